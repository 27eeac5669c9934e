"""Optimizer steps over several ranks: each runs one sharded update on the local tensors of all parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.transform import Arguments
from muonfx.optimizer.group_numbers import CallersTensors, TrackedGroup
from muonfx.optimizer.local_values import (
    Load,
    apart_from,
    is_whole,
    on_this_rank,
    require_same_position,
)
from muonfx.optimizer.named_parameters import Gradients, NamedTensors
from muonfx.optimizer.stepping import FormerState, Stepping, add_in_place
from muonfx.placement.devices import meta_like
from muonfx.placement.offload import store_of
from muonfx.polar.hardware import cpu_has_amx
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.communication.agree import agree, errors_on_all_ranks
from muonfx.sharding.communication.messages import collective
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
)
from muonfx.sharding.transform import bind, init_sharded, sharded_with, step_sharded
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

SMALL_BUCKET = 1 << 23
SMALL_BUCKET_WITH_AMX = 1 << 26
SMALL_BUCKET_ON_CUDA = 1 << 29
"""The smallest defaults of ``bucket_bytes``: for small parameters, larger buckets save calls and kernel launches.

A CPU with AMX computes each bf16 product of a batch on one core, so a bucket must hold several matrices of a shape.
"""


def stepping_for(
    tx: Transform,
    params: NamedTensors,
    others: NamedTensors,
    layout: Layout | None,
    settings: Settings,
    bucket_bytes: int | None,
    callers_tensors: CallersTensors,
) -> Stepping:
    """Return the object that runs an optimizer's steps: over ranks with a layout or DTensors, else in one process.

    Args:
        tx: the transform of the optimizer.
        params: the parameters to train, by name.
        others: parameters that are not trained. The layout has them too, so that they can be saved with the others.
        layout: which rank has which part of each parameter; None for DTensors and in one process.
        settings: options of the communication.
        bucket_bytes: how many bytes of parameters are updated at a time; None for a default.
        callers_tensors: records tensors that were put into several groups, of which each has a copy.
    """
    layout = _complete_layout(layout, params, others)  # None: no parameter is sharded or replicated
    if layout is not None:
        if bucket_bytes is not None:
            settings = settings._replace(bucket_bytes=bucket_bytes)
        return SteppingOverRanks(tx, layout.meta(list(params)), layout, settings, callers_tensors)
    if bucket_bytes is None:
        bucket_bytes = _default_bucket_bytes(params)
    return Stepping(tx, meta_like(dict(params)), bucket_bytes, callers_tensors)


def _default_bucket_bytes(params: NamedTensors) -> int:
    """Return the bytes of parameters to update at a time: of the largest parameter, or of a small bucket if larger.

    A small bucket has 8 MiB, on a CPU with AMX 64 MiB, and on CUDA 512 MiB.
    """
    smallest_on_cpu = SMALL_BUCKET_WITH_AMX if cpu_has_amx() else SMALL_BUCKET
    bucket_bytes = smallest_on_cpu
    for param in params.values():
        smallest = SMALL_BUCKET_ON_CUDA if param.is_cuda else smallest_on_cpu
        # Sparse parameters have no `nbytes`.
        param_bytes = param.numel() * param.element_size()
        bucket_bytes = max(bucket_bytes, smallest, param_bytes)
    return bucket_bytes


def _complete_layout(
    layout: Layout | None, params: NamedTensors, others: NamedTensors
) -> Layout | None:
    """Return the layout of all parameters: which rank has which part of each. Return None in one process.

    Args:
        layout: the layout that the caller has given, or None: then DTensors have their layout themselves.
        params: the parameters to train, by name. Some may have been added after the layout was made.
        others: the parameters that are not trained.
    """
    all_params = {**params, **others}
    dtensor_names = [name for name, param in all_params.items() if is_dtensor(param)]
    if layout is None and not dtensor_names:  # one process
        return None
    if layout is None:
        return from_dtensors(all_params)
    is_for_plain_tensors = not layout.dtensors
    if is_for_plain_tensors and dtensor_names:
        raise TypeError(
            f"layout: found {layout!r}, expected none, because {dtensor_names[0]!r} is a DTensor: leave layout out"
        )
    # The layout may lack a parameter that was added. If every rank has all others in full, it also has the added one.
    is_replicated = is_for_plain_tensors and not layout.is_flat
    lacks_params = not params.keys() <= layout.specs.keys()
    if is_replicated and lacks_params:
        return replicated(all_params, layout.group or layout.size)
    return _with_current_dtypes(layout, all_params)


def _with_current_dtypes(layout: Layout, params: NamedTensors) -> Layout:
    """Return a layout with the dtypes of the parameters, which may have been converted since the layout was made."""
    specs = dict(layout.specs)
    for name, param in params.items():
        if name in specs:
            specs[name] = specs[name]._replace(dtype=param.dtype)
    if specs == layout.specs:
        return layout
    return replace(layout, specs=specs)


class SteppingOverRanks(Stepping):
    """Creates the optimizer state and runs the steps for sharded or replicated parameters, on all ranks together.

    A transform such as `orthogonalize` needs whole matrices, so one rank, the *owner*, computes the update of a matrix.
    State that such a transform keeps is *owned*: the owner holds it for its matrices, and other ranks have None. Other
    state is sharded like its parameter.

    Args:
        tx: the transform, with the hyperparameters from construction.
        meta_params: the parameters in full by name, as meta tensors.
        layout: which rank has which part of each parameter.
        settings: options of the communication.
        callers_tensors: as in `Stepping`.
    """

    is_over_ranks = True

    # `init` sets the following attributes, because they depend on the parameters.
    _device: torch.device  # of this rank's parameters
    # The placement of each leaf of the state has its shape, and the ranks that hold it.
    _placements: Sequence[LeafPlacement | None]
    # These are the leaves that `optimizer.state` shows on one rank only, by index.
    _on_one_rank: dict[int, LeafPlacement]

    def __init__(
        self,
        tx: Transform,
        meta_params: PyTree,
        layout: Layout,
        settings: Settings,
        callers_tensors: CallersTensors,
    ) -> None:
        """Plan the communication for a layout. `init` creates the state later, together with all ranks."""
        super().__init__(tx, meta_params, None, callers_tensors)
        self.layout = layout
        self._settings = settings
        self.binding: Binding = bind(layout, settings, store_of(tx))
        """The layout with the plan of its communication, which the functions of `muonfx.sharding` take."""
        self._progress = Progress()
        """The number of steps that this rank has completed, which the ranks compare at every step."""
        self._is_distributed = layout.group is not None and layout.size > 1
        """True if there is another rank to communicate with."""
        self._is_replicated = layout.is_replicated and not layout.dtensors
        """True if every rank has all parameters in full as plain tensors, as under DDP."""
        self._gathering: Gathering | None = None
        """The copy of single ranks' state to all ranks that `_share` has started; None if none was necessary."""

    @property
    def has_lacked_gradients(self) -> bool:
        """True if no rank had a gradient in the last step. It is equal on all ranks."""
        return self._progress.has_lacked_gradients

    def sharded_if_over_ranks(self, tx: Transform) -> Transform:
        """Return ``tx`` as a sharded transform, which updates the shards of the parameters."""
        return sharded_with(self._progress, tx, self.layout, self._settings)

    def init(
        self,
        params: NamedTensors,
        groups: Sequence[TrackedGroup],
        former: FormerState | None = None,
    ) -> PyTree:
        """Return the optimizer state of this rank's parts of the parameters. All ranks call this together.

        Where ``former``, the state before parameters were replaced or added, has a leaf at the same path, the state has
        its value, else the initial value. Raise if the ranks have different settings, or a number in the groups is out
        of range.
        """
        local_params = {name: local_of(param) for name, param in params.items()}
        state = init_sharded(self.binding, self._progress, self.inner, local_params)
        with self.errors_on_all_ranks():
            # The next lines read which rank has which part of the state.
            self._record_placements(local_params)
            self.refresh(params, groups)  # reads the hyperparameters
            state = self._with_former_values(state, former)
        self.is_true_on_any_rank(False)  # receives the error of a rank that failed in the block
        self._share(state)  # last, because it copies the final values to other ranks
        return state

    def _record_placements(self, local_params: dict[str, Tensor]) -> None:
        """Record which ranks hold each tensor of the state, and its shape. Later steps show and save it by this record.

        ``local_params`` are this rank's parts of the parameters, by name.
        """
        self._device = tree.device_of(local_params)
        # All parameters in full, as tensors without values on the meta device.
        meta_params = self.binding.global_like(local_params)
        self._placements = describe_state(self.binding, self.inner, meta_params)
        # The tensors that one rank alone has, by index. A state dict must gather them.
        self._on_one_rank = {}
        for index, placement in enumerate(self._placements):
            if placement is not None and self._is_on_one_rank(placement):
                self._on_one_rank[index] = placement

    def _is_on_one_rank(self, placement: LeafPlacement) -> bool:
        """Return True if only the owner of a matrix has a leaf of the state, so that a state dict must gather it.

        For example, the state of `normalize_neurons`. The owner is the rank that computes the update of the matrix.
        """
        if not self._is_distributed or not placement.owned:
            return False
        # All ranks compute all of its matrices.
        if all(shard.owner is None for shard in placement.shards):
            return False
        return not self._is_shown_by_dtensor(placement)

    def _is_shown_by_dtensor(self, placement: LeafPlacement) -> bool:
        """Return True if `optimizer.state` has a DTensor for a leaf that several owners have, each one shard of it.

        For example, a stack of four matrices is sharded over two ranks, and each rank computes the two that it holds.
        """
        name = placement.name
        shards = placement.shards  # of the owners
        if name is None or name not in self.layout.dtensors:  # of no parameter, or of a plain one
            return False
        return len(shards) > 1 and own_what_they_hold(self.layout, name, shards, placement.shape)

    def _local_part(self, index: int, leaf: Any, full_value: Tensor) -> Any:
        """Return this rank's part of a full state tensor; None if the rank has no part of it.

        For example, on the second of two ranks, it is the second half of the rows. It replaces ``leaf``, the part of
        the new state at this ``index``. If the shapes do not fit, return ``leaf`` itself.
        """
        placement = self._placements[index]  # which rank has which part
        # The state has no tensor here, or one of another shape.
        if placement is None or tuple(full_value.shape) != placement.shape:
            return leaf
        full_value = full_value.to(self._device, placement.dtype)
        # Every rank has a leaf of no parameter in full, such as a step count.
        if placement.name is None:
            return full_value
        if placement.owned:
            return _part_of_owner(placement, full_value)
        return self.layout.position(placement.name).cut(full_value)  # sharded like its parameter

    def full_leaf(self, index: int, leaf: Any) -> Any:
        """Return a tensor of the state in full, on all ranks. They call this together, because they gather the parts.

        ``index`` is the index of the tensor in the state, and ``leaf`` is this rank's part, such as half of its rows.
        """
        # The parameter to which it belongs, and which rank has which part.
        placement = self._placements[index]
        # Every rank has a leaf of no parameter in full.
        if placement is None or placement.name is None:
            return leaf
        # Each rank has the part for the matrices that it computes.
        if placement.owned and self._is_distributed:
            return Gathering(self.layout, self._device, {index: placement}, {index: leaf}).wait()[
                index
            ]
        if placement.owned:  # this rank computes all matrices
            return leaf.view(placement.shape)
        # It is sharded like its parameter, so the layout can gather it like the parameter.
        full_leaves = self.layout.gather({placement.name: leaf})
        return full_leaves[placement.name]

    def show(self, index: int, leaf: Tensor | None) -> Tensor | None:
        """Convert a leaf of the state to its form in ``optimizer.state``, with which torch can save and reshard it.

        - A DTensor, if the parameter is one. For example, this rank's rows of a momentum become a DTensor with the
          shape of the whole momentum.
        - A `FlatShardTensor`, if this rank has an interval of the flattened tensor.
        - The leaf itself, if this rank has it in full, such as a step count.
        """
        placement = self._placements[index]  # which rank has which part
        # Every rank has a leaf of no parameter in full.
        if placement is None or placement.name is None:
            return leaf
        # The leaf itself, if the parameter is a plain tensor.
        dtensor = leaf_to_dtensor(self.binding, placement, leaf)
        if is_dtensor(dtensor):
            return dtensor
        full_or_interval = global_leaf(self.binding, self._device, placement, leaf)
        if isinstance(full_or_interval, FlatShard):
            return FlatShardTensor.of(full_or_interval)
        return full_or_interval

    # ------------------------------------------------------------------------------------------------- persistence

    def _share(self, state: PyTree) -> None:
        """Under DDP, start to copy the tensors of the state that one rank alone has to all ranks, after each step.

        So each rank can save the whole state: often only rank 0 calls ``state_dict()``, and cannot gather it there. The
        copy overlaps with the next forward.
        """
        if self._gathering is not None:  # the copy that the last step has started
            self._gathering.wait()  # usually complete by now; its buffers must not be freed earlier
        # `exported` gathers the tensors, or there are none
        if not self._is_replicated or not self._on_one_rank:
            return
        parts = dict(enumerate(tree.leaves(state)))
        self._gathering = Gathering(self.layout, self._device, self._on_one_rank, parts)

    def exported(self, state: PyTree) -> Mapping[int, Any]:
        """Return the leaves that a state dict needs on all ranks and `optimizer.state` has on one rank only, by index.

        For example, the state of `normalize_neurons` is on the owner of each matrix.

        - Under DDP, `_share` has copied these leaves to all ranks. The result has full tensors.
        - For DTensors, all ranks call this together to gather them. The result has DTensors, which torch can save.
        - Otherwise the result is empty: each rank saves the part that `optimizer.state` has there.
        """
        if self._gathering is not None:  # under DDP
            return self._gathering.wait()
        if self._on_one_rank and self.layout.dtensors:
            return self._gathered_as_dtensors(tree.leaves(state))
        return {}

    def _gathered_as_dtensors(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Return the tensors of the state that one rank alone has, as DTensors of which each rank has an equal part.

        A state dict has them in this form, by their index in the state. All ranks call this together, because each
        tensor is first sent to all ranks. ``leaves`` are this rank's tensors; a tensor of another rank alone is None.
        """
        assert self.layout.group is not None  # there are several ranks
        # Raises after a timeout if a rank does not call it.
        wait_for_all(self.layout.group, "state_dict()")
        gathered: dict[int, Any] = {}
        for index, placement in self._on_one_rank.items():
            gathered[index] = self.full_leaf(index, leaves[index])  # sent by the rank that has it
            mesh = self._mesh_of(placement)  # the ranks of its parameter
            if mesh is not None:
                # Frees the full leaf before the next gather.
                gathered[index] = _evenly_sharded(gathered[index], mesh)
        return gathered

    def _mesh_of(self, placement: LeafPlacement) -> DeviceMesh | None:
        """Return the mesh of the parameter to which a leaf of the state belongs; None if it is not a DTensor."""
        if placement.name is None or placement.name not in self.layout.dtensors:
            return None
        return self.layout.dtensors[placement.name].mesh

    def local_value(self, index: int, leaf: Any, value: Any) -> Tensor:
        """Return the value that `assign` copies into a leaf of the state: this rank's part of a saved tensor, or all.

        - The whole tensor, if only the owner of a matrix (the rank that computes its update) has the leaf, and it was
          saved in a form of `exported`: in full, or as a DTensor that is sharded evenly over the parameter's mesh.
          `assign` takes this rank's part.
        - Otherwise this rank's part.

        ``leaf`` is the tensor that ``optimizer.state`` has now.
        """
        placement = self._placements[index]
        # Every rank has it, or it is sharded like its parameter.
        if placement is None or not placement.owned:
            return on_this_rank(leaf, value)
        if is_whole(value):
            return value
        mesh = self._mesh_of(placement)
        if mesh is not None and _is_on(mesh, value) and not _is_on(mesh, leaf):  # sharded evenly
            return _on_mesh_of_this_process(value, mesh)
        return on_this_rank(leaf, value)  # saved in the form of `optimizer.state`

    def errors_on_all_ranks(self) -> AbstractContextManager[None]:
        """Return a context for the checks before a step, whose errors are raised on all ranks.

        The next message of the ranks must be a call of `agree`, as in `is_true_on_any_rank` and `step`.
        """
        return errors_on_all_ranks(self.layout.group)

    def loading(self) -> AbstractContextManager[None]:
        """Return a context to read a state dict in. If parameters are sharded, its errors are raised on all ranks."""
        if self._may_load_alone:
            return nullcontext()
        assert self.layout.group is not None
        wait_for_all(self.layout.group, "load_state_dict()")
        return errors_on_all_ranks(self.layout.group)

    def require_same_on_all_ranks(self, without_state: Sequence[str]) -> None:
        """If parameters are sharded, raise on all ranks if they found different parameters without saved state."""
        if self._may_load_alone:
            return
        assert self.layout.group is not None
        facts = {
            "parameters without saved state": dict.fromkeys(without_state, "without saved state")
        }
        agree("load_state_dict()", self.layout.group, same=facts)

    @property
    def _may_load_alone(self) -> bool:
        """True if this rank needs no other to load a state: under DDP, each rank has all of the state."""
        return self._is_replicated or not self._is_distributed

    def load(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy saved values into this rank's part of the state, and let the next step compare the ranks again."""
        self.assign(loads, state)
        if self._is_distributed:
            self._progress.load()  # the next step compares the loaded states of all ranks

    def note_loaded(self, state: PyTree) -> None:
        """Share the new state of single ranks, and let the next step compare the steps of all ranks again."""
        self._share(state)
        if self._is_distributed:
            self._progress.load()

    def assign(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy values into this rank's part of the state. Each value is of a whole leaf, or this rank's part of it.

        Under DDP, also copy them into the full tensors that `exported` returns. They are not gathered again, because
        this rank may load alone.
        """
        local_leaves = tree.leaves(state)
        full_leaves: dict[int, Tensor] = {}  # those that `exported` returns under DDP, by index
        if self._gathering is not None:
            full_leaves = self._gathering.wait()
        # A value may share memory with a tensor that an earlier load overwrites: clone it first.
        for load in apart_from([*local_leaves, *full_leaves.values()], loads):
            index = load.leaf_index
            value = load.value
            if is_dtensor(value):  # of the whole leaf, as `exported` has returned it
                value = value.full_tensor()
            full_leaf = full_leaves.get(index)
            if full_leaf is not None and value.shape == full_leaf.shape:
                full_leaf.copy_(value)
            local_leaf = local_leaves[index]
            if local_leaf is None:  # another rank has it
                continue
            placement = self._placements[index]
            # Each rank has a part of a leaf on the owners of matrices.
            if placement is not None and placement.owned:
                is_whole = tuple(value.shape) == placement.shape
                if is_whole:
                    value = _owned_interval(placement, value)
            local_leaf.copy_(value.view(local_leaf.shape))

    def is_true_on_any_rank(self, is_true_here: bool) -> bool:
        """Return True if a fact is true on any rank. All ranks call this together."""
        if not self._is_distributed:
            return is_true_here
        assert self.layout.group is not None
        return agree("the first step", self.layout.group, request=is_true_here).is_requested

    def initial_state(self, params: NamedTensors) -> PyTree:
        """Return the initial state of this rank's shards. All ranks call this together, and raise if one has an error.

        Otherwise the other ranks would make the next step without the rank that has failed, and wait for it.
        """
        local_params = {name: local_of(param) for name, param in params.items()}
        with self.errors_on_all_ranks():
            state = self.binding.init(self._current, local_params)
        self.is_true_on_any_rank(False)  # receives the error of a rank that failed in the block
        return state

    def snapshot(
        self,
        state: PyTree,
        params: dict[str, Tensor],
        grads: Gradients,
        groups: Sequence[TrackedGroup],
    ) -> tuple[Transform, PyTree, dict[str, Tensor], Gradients]:
        """Return the transform with the current hyperparameters, and the state, parameters and gradients, gathered."""
        return super().snapshot(
            state, self.layout.gather(params), self.layout.gather(grads), groups
        )

    def _set_current(self, tx: Transform, params: NamedTensors) -> None:
        self._current = tx

    def step(self, call: Arguments) -> PyTree:
        """Run a step together with all ranks. If one rank has an error in the call, all raise before any change."""
        _, new_state = step_sharded(
            self.binding, self._progress, self._current, call, apply_to_params=add_in_place
        )
        self._share(new_state)
        return new_state


def _owned_interval(placement: LeafPlacement, full_value: Tensor) -> Tensor:
    """Return the part of a full state tensor, flattened, that this rank holds for the matrices that it computes.

    For example, of four matrices of shape (2, 3), a rank that computes the second has the elements 6 to 12. The result
    is empty for a rank that computes none.
    """
    flat = full_value.reshape(-1)
    if placement.shard is None:  # this rank computes no matrix of the parameter
        return flat[:0]
    start, stop = interval_of(placement, placement.shard)
    return flat[start:stop]


def _part_of_owner(placement: LeafPlacement, full_value: Tensor) -> Tensor | None:
    """Return the part of a full state tensor for the matrices that this rank computes; None if it computes none."""
    # Other ranks own the matrices of this parameter.
    if placement.local is None or placement.shard is None:
        return None
    # `local` is the shape of this rank's part
    return _owned_interval(placement, full_value).view(placement.local)


def _is_on(mesh: DeviceMesh, tensor: object) -> bool:
    """Return True if a tensor is a DTensor on a mesh."""
    return is_dtensor(tensor) and tensor.device_mesh == mesh


def _on_mesh_of_this_process(value: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return a loaded DTensor on the mesh of this process, which is equal to its own. Raise if it is another's shard.

    The mesh that was loaded with it may have the coordinates of the rank that saved it.
    """
    require_same_position(value, mesh)
    return dtensor_of(local_of(value), mesh, value.placements, value.shape, value.stride())


def _evenly_sharded(full_value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a full tensor as a DTensor whose rows are sharded over the last dim of a mesh, which needs less memory.

    For example, on a mesh of shape (2, 4), each rank has a quarter of the rows.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements: list[Placement] = [Replicate()] * mesh.ndim
    if full_value.ndim:  # a scalar has no rows
        placements[-1] = Shard(0)
    # Cloned, because a shard is a view that would keep the full tensor in memory.
    return distribute_tensor(full_value, mesh, placements, src_data_rank=None).clone()


_ALIGNED = 16
"""The leaves of a gather are padded to a multiple of this many bytes, so that each can be viewed in its dtype."""

_GATHERING = "gathering the optimizer's state from its owners"


class Gathering:
    """An asynchronous broadcast of state that only one rank has, because it alone orthogonalizes the matrix.

    Args:
        layout: the layout of the parameters, with the process group.
        device: the device of the state.
        placements: which rank has which part of each leaf to gather, by the index of the leaf in the state.
        parts: this rank's part of each leaf, by its index; None if it computes none of the matrices.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        placements: Mapping[int, LeafPlacement],
        parts: Mapping[int, Tensor | None],
    ) -> None:
        """Start the copy of all leaves. `wait` returns them."""
        # Each byte of the buffer is written by one rank and is zero on the others, so the sum over ranks has the exact
        # bits of the owners. A single collective copies all leaves.
        buffer, self._full_leaves = _zeros_in_one_buffer(placements, device)
        for index, placement in placements.items():
            part = parts[index]
            shard = placement.shard  # the matrices that this rank computes, or None
            if part is None or shard is None:
                continue
            # If all ranks compute them, one of the equal parts is enough: that of rank 0.
            is_computed_by_all = shard.owner is None
            if is_computed_by_all and layout.rank != 0:
                continue
            start, stop = interval_of(placement, shard)
            self._full_leaves[index].view(-1)[start:stop] = part.reshape(-1)
        # Start the sum, and let the step continue: `wait` waits for its end.
        self._work: Any = None
        if device.type == "meta":  # no values to send, and torch 2.10 cannot
            return
        with collective(_GATHERING):
            self._work = dist.all_reduce(buffer, group=layout.group, async_op=True)

    def wait(self) -> dict[int, Tensor]:
        """Wait for the copy. Return a dict from the index of a tensor in the state to the full tensor."""
        if self._work is not None:
            with collective(_GATHERING):
                self._work.wait()
        return self._full_leaves


def _zeros_in_one_buffer(
    placements: Mapping[int, LeafPlacement], device: torch.device
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return a buffer of zero bytes, and a view of it for each whole leaf, with its shape and dtype, by index.

    For example, leaves of 20 and 16 bytes are views of the bytes 0 to 20 and 32 to 48.
    """
    sizes: list[int] = []  # in bytes
    for placement in placements.values():
        sizes.append(prod(placement.shape) * placement.dtype.itemsize)
    padded_sizes = [size + -size % _ALIGNED for size in sizes]  # -20 % 16 is 12, so 20 becomes 32
    buffer = torch.zeros(sum(padded_sizes), dtype=torch.uint8, device=device)
    views: dict[int, Tensor] = {}
    for index, size, leaf_bytes in zip(placements, sizes, buffer.split(padded_sizes), strict=True):
        placement = placements[index]
        views[index] = leaf_bytes[:size].view(placement.dtype).view(placement.shape)
    return buffer, views
