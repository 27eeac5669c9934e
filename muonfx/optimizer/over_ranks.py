"""Optimizer steps over several ranks: each runs one sharded update on the local tensors of all parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.visit import Visit, visit
from muonfx.optimizer.groups import BoundGroup
from muonfx.optimizer.state import Load, on_this_rank, shard_error
from muonfx.optimizer.stepping import Stepping, add_in_place
from muonfx.placement.arguments import Arguments, meta_like
from muonfx.placement.offload import inner_of, store_of
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.communication.agree import agree
from muonfx.sharding.communication.messages import collective
from muonfx.sharding.communication.waiting import construction, wait_for_all
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
from muonfx.sharding.transform import Sharded, bind, init_sharded, sharded_with, step_sharded
from muonfx.tree import PyTree

ALIGNED = 16
"""The leaves of a gather are padded to a multiple of this many bytes, so that each can be viewed in its dtype."""

SMALL_BUCKET = 1 << 22
"""The smallest default of ``bucket_bytes``: for small parameters, larger buckets save kernel launches."""

GATHERING = "gathering the optimizer's state from its owners"


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
    any_dtensor = next((name for name, param in all_params.items() if is_dtensor(param)), None)
    if layout is None and any_dtensor is None:
        bucket_bytes = bucket_bytes or max([SMALL_BUCKET, *[param.nbytes for param in params.values()]])
        return Stepping(tx, tuple(visit(inner_of(tx), meta_like(dict(params)))), bucket_bytes)
    if layout is None:
        layout = from_dtensors(all_params)
    elif any_dtensor is not None and not layout.dtensors:
        raise TypeError(
            f"layout: found {layout!r}, expected none, because {any_dtensor!r} is a DTensor: leave layout out"
        )
    elif not layout.is_flat and not layout.dtensors and not all(name in layout.specs for name in params):
        # Every rank holds every parameter in full, so parameters that are added later are replicated too.
        layout = replicated(all_params, layout.group or layout.size)
    if bucket_bytes is not None:
        settings = settings._replace(bucket_bytes=bucket_bytes)
    return SteppingOverRanks(tx, tuple(visit(inner_of(tx), layout.meta(list(params)))), layout, settings)


Constructor = TypeVar("Constructor", bound=Callable[..., None])


def constructed_together(constructor: Constructor) -> Constructor:
    """Decorate the constructor of an optimizer: an error on one rank is raised on all ranks that construct it."""

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        if args and isinstance(args[0], Iterator):
            args = [*args[0]], *args[1:]  # an iterator can be read only once
        with construction(lambda: _group_of(args, options)):
            constructor(self, *args, **options)

    return cast("Constructor", construct)


def _group_of(args: Sequence[Any], options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that construct an optimizer with these arguments; None if it is alone."""
    if not dist.is_initialized():
        return None
    layout = options.get("layout")
    for argument in (*args, *options.values()):
        if isinstance(argument, Sharded):
            layout = argument.layout
    if isinstance(layout, Layout):
        return layout.group
    if layout is not None:
        group = getattr(layout, "keywords", {}).get("group")  # of a functools.partial
        return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    params = args[0] if args else options.get("params")
    leaves = params.parameters() if isinstance(params, torch.nn.Module) else tree.leaves(params)
    meshes = [leaf.device_mesh for leaf in leaves if is_dtensor(leaf)]
    is_of_all = bool(meshes) and all(mesh.size() == dist.get_world_size() for mesh in meshes)
    return dist.group.WORLD if is_of_all else None


class Gathering:
    """An asynchronous broadcast of state that only one rank has, because it alone orthogonalizes the matrix."""

    def __init__(
        self, layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
    ) -> None:
        # leaves: a dict from the index of a leaf in the state to its placement and this rank's part of it
        sizes = [prod(what.shape) * what.dtype.itemsize for what, _ in leaves.values()]
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        # Each byte is written by one rank, and is zero on the others, so the sum has the exact bits of the owners.
        buffer = torch.zeros(sum(padded), dtype=torch.uint8, device=device)
        self._wholes: dict[int, Tensor] = {}
        for (place, (what, leaf)), size, room in zip(leaves.items(), sizes, buffer.split(padded), strict=True):
            whole = room[:size].view(what.dtype)
            self._wholes[place] = whole.view(what.shape)
            if leaf is not None and what.shard is not None and (what.shard.owner is not None or layout.rank == 0):
                whole[slice(*interval_of(what, what.shard))] = leaf.reshape(-1)
        with collective(GATHERING):
            self._work: Any = dist.all_reduce(buffer, group=layout.group, async_op=True)

    def wait(self) -> dict[int, Tensor]:
        """Wait for the copy. Return a dict from the index of a tensor in the state to the full tensor."""
        with collective(GATHERING):
            self._work.wait()
        return self._wholes


class SteppingOverRanks(Stepping):
    """Creates the optimizer state and runs the steps for sharded or replicated parameters, on all ranks together."""

    is_over_ranks = True

    def __init__(self, tx: Transform, visits: Sequence[Visit], layout: Layout, settings: Settings) -> None:
        super().__init__(tx, visits, None)
        self.layout, self._settings = layout, settings
        self.binding: Binding = bind(layout, settings, store_of(tx))
        self._progress = Progress()
        self._now = self._inner
        self._like: dict[str, Tensor | None] = {}
        self._many = layout.group is not None and layout.size > 1
        self._is_replicated = layout.is_replicated and not layout.dtensors
        self._gathering: Gathering | None = None

    def transform_with(self, tx: Transform) -> Transform:
        """Return the sharded transform that updates the optimizer's parameters."""
        return sharded_with(self._progress, tx, self.layout, self._settings)

    def init(self, params: Mapping[str, Tensor], groups: Sequence[BoundGroup]) -> PyTree:
        """Return the initial state of this rank's shards. The ranks first compare their settings."""
        local = {name: local_of(param) for name, param in params.items()}
        state = init_sharded(self.binding, self._progress, self._inner, local)
        self._device = tree.device_of(local)
        self._like = self.binding.global_like(local)
        self._about = describe_state(self.binding, self._inner, self._like)
        self._owned = {
            place: what
            for place, what in enumerate(self._about)
            if self._many and what is not None and what.owned and self._is_hidden(what)
        }
        self.refresh(params, groups)
        return state

    def _is_hidden(self, what: LeafPlacement) -> bool:
        """Return True if only one rank has a state tensor and no DTensor on the parameter's mesh can express that."""
        if all(shard.owner is None for shard in what.shards):
            return False
        if what.name is None or what.name not in self.layout.dtensors or len(what.shards) == 1:
            return True
        return not own_what_they_hold(self.layout, what.name, what.shards, what.shape)

    def _kept(self, other: Stepping, at: int, had: Any, place: int, leaf: Any) -> Any:
        what = self._about[place]
        if what is None:
            return leaf
        whole = other.whole(at, had)
        if whole is None or tuple(whole.shape) != what.shape:
            return leaf
        whole = whole.to(self._device)
        if what.name is None:
            return whole
        if not what.owned:
            return self.layout.position(what.name).cut(whole)
        return None if what.local is None or what.shard is None else _part(what, whole).view(what.local)

    def whole(self, place: int, leaf: Any) -> Any:
        """Gather the state tensor with index ``place`` and return it in full. All ranks must call this together."""
        what = self._about[place]
        if what is None or what.name is None:
            return leaf
        if not what.owned:
            return self.layout.gather({what.name: leaf})[what.name]
        if not self._many:
            return leaf.view(what.shape)
        return Gathering(self.layout, self._device, {place: (what, leaf)}).wait()[place]

    def show(self, place: int, leaf: Tensor | None) -> Tensor | None:
        """Convert the state tensor with index ``place`` to its form in ``optimizer.state``, such as a DTensor."""
        what = self._about[place]
        if what is None or what.name is None:
            return leaf
        found = leaf_to_dtensor(self.binding, what, leaf)
        if is_dtensor(found):
            return found
        piece = global_leaf(self.binding, self._device, what, leaf)
        return FlatShardTensor.of(piece) if isinstance(piece, FlatShard) else piece

    def shown(self, state: PyTree) -> PyTree:
        """Return the state in the form that the sharded ``update`` takes: DTensors if the parameters are DTensors."""
        return state_to_dtensors(self.binding, self._inner, self._like, state) if self.layout.dtensors else state

    # ------------------------------------------------------------------------------------------------- persistence

    def share(self, state: PyTree) -> None:
        """Under DDP, start to copy the state of single ranks to all ranks, so that each rank can save all of it."""
        # This state is small compared with the updates sent to replicas, and the copy overlaps with the next forward.
        if self._gathering is not None:
            self._gathering.wait()  # usually complete by now; its buffers must not be freed earlier
        if self._owned and self._is_replicated:
            leaves = tree.leaves(state)
            found = {place: (what, leaves[place]) for place, what in self._owned.items()}
            self._gathering = Gathering(self.layout, self._device, found)

    def exported(self, state: PyTree) -> Mapping[int, Any]:
        """Return the state tensors that only one rank has, by index, as full tensors or DTensors to save."""
        if self._gathering is not None:
            return self._gathering.wait()
        if not self._owned or not self.layout.dtensors:
            return {}
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        assert self.layout.group is not None
        wait_for_all(self.layout.group, "state_dict()")
        leaves = tree.leaves(state)
        found: dict[int, Any] = {}
        for place, what in self._owned.items():
            found[place] = whole = self.whole(place, leaves[place])
            assert what.name is not None
            if what.name in self.layout.dtensors:
                mesh = self.layout.dtensors[what.name].mesh
                placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0) if whole.ndim else Replicate()]
                # Cloned, because a shard is a view that would keep the full tensor in memory.
                found[place] = distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()
        return found

    def take(self, place: int, leaf: Any, value: Any) -> Tensor | str:
        """Return the values to load into the state tensor with index ``place``, or an error message."""
        what = self._about[place]
        if what is None or what.name is None or not what.owned or isinstance(value, FlatShardTensor):
            return on_this_rank(leaf, value)
        if not is_dtensor(value):
            return value
        spec = self.layout.dtensors.get(what.name)
        is_of_one_owner = is_dtensor(leaf) and value.device_mesh == leaf.device_mesh
        if spec is None or value.device_mesh != spec.mesh or is_of_one_owner:
            return on_this_rank(leaf, value)
        # Use our own mesh: a loaded mesh may have the coordinates of the rank that saved it.
        own = dtensor_of(local_of(value), spec.mesh, value.placements, value.shape, value.stride())
        return shard_error(value, spec.mesh) or own

    def load(
        self, loads: Sequence[Load], state: PyTree, problem: Exception | None, without_state: Sequence[str]
    ) -> None:
        """Copy saved values into the state. If parameters are sharded, an error on one rank is raised on all ranks."""
        if self._many and not self._is_replicated:
            assert self.layout.group is not None
            wait_for_all(self.layout.group, "load_state_dict()")
            missing = dict.fromkeys(without_state, "without saved state")
            facts = {"parameters without saved state": missing}
            agree("load_state_dict()", self.layout.group, problem, same=tuple(missing), explain=lambda: facts)
        elif problem is not None:
            raise problem
        self.assign(loads, state)
        if self._many:
            self._progress.load()

    def assign(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy values into this rank's part of the state."""
        leaves = tree.leaves(state)
        # The gathered copies are loaded too, not gathered again, because this rank may load alone.
        gathered = {} if self._gathering is None else self._gathering.wait()
        for _, place, given in loads:
            what, leaf = self._about[place], leaves[place]
            value = given.full_tensor() if is_dtensor(given) else given
            if what is not None and what.owned and tuple(value.shape) == what.shape:
                if place in gathered:
                    gathered[place].copy_(value)
                value = _part(what, value)
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


def _part(what: LeafPlacement, whole: Tensor) -> Tensor:
    """Return the interval of a flattened full state tensor that this rank holds."""
    return whole.reshape(-1)[slice(*((0, 0) if what.shard is None else interval_of(what, what.shard)))]
