"""Optimizer steps over several ranks: each runs one sharded update on the local tensors of all parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.visit import Visit, visit
from muonfx.optimizer.gathering import Gathering
from muonfx.optimizer.group_numbers import BoundGroup
from muonfx.optimizer.local_values import Load, on_this_rank, shard_error
from muonfx.optimizer.stepping import Stepping, add_in_place
from muonfx.placement.arguments import Arguments, meta_like
from muonfx.placement.offload import inner_of, store_of
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.communication.agree import agree
from muonfx.sharding.communication.waiting import wait_for_all
from muonfx.sharding.layout import Layout
from muonfx.sharding.layouts import from_dtensors, replicated
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.shards.dtensors import dtensor_of, is_dtensor, local_of
from muonfx.sharding.shards.flat_shard import FlatShard, FlatShardTensor
from muonfx.sharding.state import (
    LeafPlacement,
    describe_state,
    global_leaf,
    interval_of,
    leaf_to_dtensor,
    own_what_they_hold,
    state_to_dtensors,
)
from muonfx.sharding.transform import bind, init_sharded, sharded_with, step_sharded
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh

SMALL_BUCKET = 1 << 22
"""The smallest default of ``bucket_bytes``: for small parameters, larger buckets save kernel launches."""


def stepping_for(
    tx: Transform,
    params: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    layout: Layout | None,
    settings: Settings,
    bucket_bytes: int | None,
) -> Stepping:
    """Return the object that runs an optimizer's steps: over ranks with a layout or DTensors, else in one process.

    ``others`` are parameters that are not trained. The layout has them too, so that they can be saved with the others.
    """
    all_params = {**params, **others}
    dtensor_names = [name for name, param in all_params.items() if is_dtensor(param)]
    if layout is None and not dtensor_names:
        bucket_bytes = bucket_bytes or max([SMALL_BUCKET, *[param.nbytes for param in params.values()]])
        return Stepping(tx, tuple(visit(inner_of(tx), meta_like(dict(params)))), bucket_bytes)
    if layout is None:
        layout = from_dtensors(all_params)
    elif dtensor_names and not layout.dtensors:
        raise TypeError(
            f"layout: found {layout!r}, expected none, because {dtensor_names[0]!r} is a DTensor: leave layout out"
        )
    elif not layout.is_flat and not layout.dtensors and not all(name in layout.specs for name in params):
        # Every rank holds every parameter in full, so parameters that are added later are replicated too.
        layout = replicated(all_params, layout.group or layout.size)
    if bucket_bytes is not None:
        settings = settings._replace(bucket_bytes=bucket_bytes)
    return SteppingOverRanks(tx, tuple(visit(inner_of(tx), layout.meta(list(params)))), layout, settings)


class SteppingOverRanks(Stepping):
    """Creates the optimizer state and runs the steps for sharded or replicated parameters, on all ranks together.

    A transform such as `orthogonalize` needs whole matrices, so one rank, the *owner*, computes the update of a matrix.
    State that such a transform keeps is *owned*: the owner holds it for its matrices, and other ranks have None. Other
    state is sharded like its parameter.
    """

    is_over_ranks = True

    def __init__(self, tx: Transform, visits: Sequence[Visit], layout: Layout, settings: Settings) -> None:
        super().__init__(tx, visits, None)
        self.layout = layout
        self._settings = settings
        self.binding: Binding = bind(layout, settings, store_of(tx))
        """The layout with the plan of its communication, which the functions of `muonfx.sharding` take."""
        self._progress = Progress()
        self._now = self._inner
        """The transform with the current hyperparameters."""
        self._like: dict[str, Tensor | None] = {}
        """All parameters in full, as meta tensors."""
        self._is_distributed = layout.group is not None and layout.size > 1
        self._is_replicated = layout.is_replicated and not layout.dtensors
        self._gathering: Gathering | None = None
        """The copy of state from single ranks to all ranks that `share` has started; None before the first."""

    def transform_with(self, tx: Transform) -> Transform:
        """Return the sharded transform that updates the optimizer's parameters."""
        return sharded_with(self._progress, tx, self.layout, self._settings)

    def init(self, params: Mapping[str, Tensor], groups: Sequence[BoundGroup]) -> PyTree:
        """Return the initial state of this rank's shards, and record where each tensor of the state is.

        All ranks call this together, because they first compare their settings.
        """
        local = {name: local_of(param) for name, param in params.items()}
        state = init_sharded(self.binding, self._progress, self._inner, local)
        self._device = tree.device_of(local)
        self._like = self.binding.global_like(local)
        # For each leaf of the state, its shape and the ranks that hold it; None for a leaf that is None.
        self._placements = describe_state(self.binding, self._inner, self._like)
        # The leaves, by index, that `state_dict` must gather, because `optimizer.state` shows them on one rank only.
        self._owned = {}
        for place, placement in enumerate(self._placements):
            if placement is None or not placement.owned:
                continue
            if self._is_distributed and self._is_hidden(placement):
                self._owned[place] = placement
        self.refresh(params, groups)
        return state

    def _is_hidden(self, placement: LeafPlacement) -> bool:
        """Return True if only one rank has a state tensor and no DTensor on the parameter's mesh can express that."""
        if all(shard.owner is None for shard in placement.shards):
            return False
        if placement.name is None or placement.name not in self.layout.dtensors or len(placement.shards) == 1:
            return True
        return not own_what_they_hold(self.layout, placement.name, placement.shards, placement.shape)

    def _part_like(self, place: int, leaf: Any, whole: Tensor) -> Any:
        """Return this rank's part of a full state tensor to replace ``leaf``; None if the rank has no part of it."""
        placement = self._placements[place]
        if placement is None or tuple(whole.shape) != placement.shape:
            return leaf
        whole = whole.to(self._device)
        if placement.name is None:  # of no parameter, such as a step count: every rank has it in full
            return whole
        if not placement.owned:  # sharded like its parameter
            return self.layout.position(placement.name).cut(whole)
        if placement.local is None or placement.shard is None:  # other ranks have it
            return None
        return _interval(placement, whole).view(placement.local)

    def whole(self, place: int, leaf: Any) -> Any:
        """Gather the state tensor with index ``place`` and return it in full. All ranks must call this together."""
        placement = self._placements[place]
        if placement is None or placement.name is None:  # of no parameter: every rank has it in full
            return leaf
        if not placement.owned:  # sharded like its parameter
            return self.layout.gather({placement.name: leaf})[placement.name]
        if not self._is_distributed:  # one rank owns all of it
            return leaf.view(placement.shape)
        return Gathering(self.layout, self._device, {place: (placement, leaf)}).wait()[place]

    def show(self, place: int, leaf: Tensor | None) -> Tensor | None:
        """Convert the state tensor with index ``place`` to its form in ``optimizer.state``, such as a DTensor."""
        placement = self._placements[place]
        if placement is None or placement.name is None:
            return leaf
        dtensor = leaf_to_dtensor(self.binding, placement, leaf)
        if is_dtensor(dtensor):
            return dtensor
        piece = global_leaf(self.binding, self._device, placement, leaf)
        return FlatShardTensor.of(piece) if isinstance(piece, FlatShard) else piece

    def shown(self, state: PyTree) -> PyTree:
        """Return the state in the form that the sharded ``update`` takes: DTensors if the parameters are DTensors."""
        if not self.layout.dtensors:
            return state
        return state_to_dtensors(self.binding, self._inner, self._like, state)

    # ------------------------------------------------------------------------------------------------- persistence

    def share(self, state: PyTree) -> None:
        """Under DDP, start to copy the state of single ranks to all ranks, so that each rank can save all of it."""
        # This state is small compared with the updates sent to replicas, and the copy overlaps with the next forward.
        if self._gathering is not None:
            self._gathering.wait()  # usually complete by now; its buffers must not be freed earlier
        if self._owned and self._is_replicated:
            leaves = tree.leaves(state)
            owned_leaves = {place: (placement, leaves[place]) for place, placement in self._owned.items()}
            self._gathering = Gathering(self.layout, self._device, owned_leaves)

    def exported(self, state: PyTree) -> Mapping[int, Any]:
        """Return the state tensors that only one rank has, by index, as full tensors or DTensors to save."""
        if self._gathering is not None:
            return self._gathering.wait()
        if not self._owned or not self.layout.dtensors:
            return {}
        assert self.layout.group is not None
        wait_for_all(self.layout.group, "state_dict()")
        leaves = tree.leaves(state)
        exported: dict[int, Any] = {}
        for place, placement in self._owned.items():
            assert placement.name is not None
            exported[place] = self.whole(place, leaves[place])
            if placement.name in self.layout.dtensors:
                exported[place] = _evenly_sharded(exported[place], self.layout.dtensors[placement.name].mesh)
        return exported

    def take(self, place: int, leaf: Any, value: Any) -> Tensor | str:
        """Return the values to load into the state tensor with index ``place``, or an error message."""
        placement = self._placements[place]
        if placement is None or placement.name is None or not placement.owned or isinstance(value, FlatShardTensor):
            return on_this_rank(leaf, value)
        if not is_dtensor(value):
            return value
        spec = self.layout.dtensors.get(placement.name)
        is_of_one_owner = is_dtensor(leaf) and value.device_mesh == leaf.device_mesh
        if spec is None or value.device_mesh != spec.mesh or is_of_one_owner:
            return on_this_rank(leaf, value)
        # Use our own mesh: a loaded mesh may have the coordinates of the rank that saved it.
        shard = dtensor_of(local_of(value), spec.mesh, value.placements, value.shape, value.stride())
        return shard_error(value, spec.mesh) or shard

    def load(
        self, loads: Sequence[Load], state: PyTree, problem: Exception | None, without_state: Sequence[str]
    ) -> None:
        """Copy saved values into the state. If parameters are sharded, an error on one rank is raised on all ranks."""
        if self._is_distributed and not self._is_replicated:
            assert self.layout.group is not None
            wait_for_all(self.layout.group, "load_state_dict()")
            missing = dict.fromkeys(without_state, "without saved state")
            facts = {"parameters without saved state": missing}
            agree("load_state_dict()", self.layout.group, problem, same=tuple(missing), explain=lambda: facts)
        elif problem is not None:
            raise problem
        self.assign(loads, state)
        if self._is_distributed:
            self._progress.load()

    def assign(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy values into this rank's part of the state."""
        leaves = tree.leaves(state)
        # The gathered copies are loaded too, not gathered again, because this rank may load alone.
        gathered = {} if self._gathering is None else self._gathering.wait()
        for _, place, value in loads:
            placement = self._placements[place]
            leaf = leaves[place]
            if is_dtensor(value):
                value = value.full_tensor()
            if placement is not None and placement.owned and tuple(value.shape) == placement.shape:
                if place in gathered:
                    gathered[place].copy_(value)
                value = _interval(placement, value)
            if leaf is not None:
                leaf.copy_(value.view(leaf.shape))

    def initial(self, params: Mapping[str, Tensor]) -> PyTree:
        """Raise, because the ranks create a state together, and a rank may have emptied its own alone."""
        raise ValueError(
            f"optimizer.state: the state of {next(iter(params))!r} was emptied, which an optimizer over ranks cannot "
            "start again: write into its tensors instead, as in optimizer.state[param]['momentum.trace'].zero_()"
        )

    def snapshot(
        self, state: PyTree, params: dict[str, Tensor], grads: dict[str, Tensor | None], groups: Sequence[BoundGroup]
    ) -> tuple[Transform, PyTree, dict[str, Tensor], dict[str, Tensor | None]]:
        """Return the transform with the current hyperparameters, and the state, parameters and gradients, gathered."""
        return super().snapshot(state, self.layout.gather(params), self.layout.gather(grads), groups)

    def _prepare(self, tx: Transform, params: Mapping[str, Tensor]) -> None:
        self._now = tx

    def step(self, call: Arguments, problem: Exception | None) -> PyTree:
        """Run a step together with all ranks. If one rank has a ``problem``, all ranks raise before any change."""
        _, after = step_sharded(
            self.binding, self._progress, self._now, call, problem=problem, apply_to_params=add_in_place
        )
        self.share(after)
        return after


def _interval(placement: LeafPlacement, whole: Tensor) -> Tensor:
    """Return the interval of a flattened full state tensor that this rank holds."""
    flat = whole.reshape(-1)
    if placement.shard is None:
        return flat[:0]
    start, stop = interval_of(placement, placement.shard)
    return flat[start:stop]


def _evenly_sharded(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a full tensor as a DTensor that is sharded over the last dim of a mesh."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    last = Shard(0) if whole.ndim else Replicate()
    placements = [*[Replicate()] * (mesh.ndim - 1), last]
    # Cloned, because a shard is a view that would keep the full tensor in memory.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()
