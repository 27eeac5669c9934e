"""Steps over ranks: one sharded step on the local tensors of all parameters, after one agreement of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.optimizer.gathering import Gathering, gathered_whole
from muonfx.optimizer.state import Load, Taken, on_this_rank, other_piece
from muonfx.optimizer.stepping import Stepping, add_in_place
from muonfx.optimizer.values import Group, GroupNumbers
from muonfx.program.nodes import Program
from muonfx.program.offload.transform import store_of
from muonfx.sharding.binding import Binding
from muonfx.sharding.consensus import agree
from muonfx.sharding.dtensors import dtensor_of, is_dtensor, local_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.layouts import from_dtensors, replicated
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.rendezvous import wait_for_all
from muonfx.sharding.shards import FlatPiece, IntervalTensor
from muonfx.sharding.state import (
    LeafPlacement,
    describe_state,
    global_leaf,
    interval_of,
    leaf_to_dtensor,
    own_what_they_hold,
    state_to_dtensors,
)
from muonfx.sharding.steps import next_serial
from muonfx.sharding.transform import bind, init_sharded, sharded, step_sharded
from muonfx.tree import PyTree

__all__ = ["SteppingOverRanks", "layout_for"]


def layout_for(params: Mapping[str, Tensor], layout: Layout | None) -> Layout | None:
    """Return the given layout, or the layout of DTensor parameters, or None if nothing is sharded."""
    any_dtensor = next((name for name, param in params.items() if is_dtensor(param)), None)
    if layout is None:
        return None if any_dtensor is None else from_dtensors(params)
    if any_dtensor is not None and not layout.dtensors:
        raise TypeError(
            f"layout: {layout!r} was given, but {any_dtensor!r} is a DTensor, which says itself where it lies: leave "
            "layout out"
        )
    if layout.is_flat or layout.dtensors or all(name in layout.specs for name in params):
        return layout
    # If every rank holds every parameter whole, parameters added later are replicated too.
    return replicated(params, layout.group or layout.size)


class SteppingOverRanks(Stepping):
    """Creates the state of sharded parameters and runs the steps, together on all ranks."""

    def __init__(
        self, tx: Transform, program: Program, numbers: Sequence[GroupNumbers], layout: Layout, settings: Settings
    ) -> None:
        super().__init__(tx, program, numbers, None)
        self.layout, self._settings = layout, settings
        self.binding: Binding = bind(layout, settings, store_of(tx))
        self._serial: int | None = None
        self._known: list[optree.PyTreeSpec] = []
        self._like: dict[str, Tensor | None] = {}
        self._many = layout.group is not None and layout.size > 1
        self._gathering: Gathering | None = None

    @property
    def transform(self) -> Transform:
        """The transform over the parameters that the optimizer holds."""
        return sharded(self.tx, self.layout, **self._settings._asdict())

    def init(self, params: Mapping[str, Tensor], groups: Sequence[Group]) -> PyTree:
        """Create the state of local tensors after the ranks have found that their settings agree."""
        local = {name: local_of(param) for name, param in params.items()}
        state = init_sharded(self.binding, self._inner, local)
        self._serial = next_serial(self.layout)
        self._device = tree.device_of(local)
        self._like = self.binding.global_like(local)
        self._about = describe_state(self.binding, self._inner, self._like)
        self._owned = {
            place: what
            for place, what in enumerate(self._about)
            if self._many and what is not None and what.owned and self._is_hidden(what)
        }
        self.refresh(groups, params)
        return state

    def _kept(self, other: Stepping, at: int, had: Any, place: int, leaf: Any) -> Any:
        what = self._about[place]
        if what is None:
            return leaf
        is_alike = what.name is None or (
            isinstance(other, SteppingOverRanks)
            and (was := other._about[at]) is not None
            and not (what.owned or was.owned)
            # Compare the shards of all ranks, so that all agree on whether to communicate.
            and other.layout.pieces[what.name] == self.layout.pieces[what.name]
        )
        if is_alike:
            return had.to(self._device) if had is not None and leaf is not None and had.shape == leaf.shape else leaf
        whole = other.whole(at, had)
        if whole is None or tuple(whole.shape) != what.shape:
            return leaf
        assert what.name is not None
        whole = whole.to(self._device)
        if not what.owned:
            return self.layout.piece(what.name).cut(whole)
        if what.local is None or what.share is None:
            return None
        return whole.reshape(-1)[slice(*interval_of(what, what.share))].view(what.local)

    def whole(self, place: int, leaf: Any) -> Any:
        """Return a leaf as one process holds it; all ranks call this together, and rarely."""
        what = self._about[place]
        if what is None or what.name is None:
            return leaf
        if not what.owned:
            return self.layout.gather({what.name: leaf})[what.name]
        if not self._many:
            return leaf.view(what.shape)
        return Gathering(self.layout, self._device, {place: (what, leaf)}).wait()[place]

    def show(self, place: int, leaf: Tensor | None) -> Tensor | None:
        """Return a leaf as ``optimizer.state`` presents it: a DTensor, or another tensor that describes its shard."""
        what = self._about[place]
        if what is None or what.name is None:
            return leaf
        found = leaf_to_dtensor(self.binding, what, leaf)
        if is_dtensor(found):
            return found
        piece = global_leaf(self.binding, self._device, what, leaf)
        return IntervalTensor.of(piece) if isinstance(piece, FlatPiece) else piece

    def shown(self, state: PyTree) -> PyTree:
        """Return the state as the functional API presents it."""
        return state_to_dtensors(self.binding, self._inner, self._like, state) if self.layout.dtensors else state

    # ------------------------------------------------------------------------------------------------- persistence

    def _is_hidden(self, what: LeafPlacement) -> bool:
        """Return True if some share has one owner, and the shares are no DTensor with the parameter's placements."""
        if all(share.owner is None for share in what.shares):
            return False
        if what.name is None or what.name not in self.layout.dtensors or len(what.shares) == 1:
            return True
        return not own_what_they_hold(self.layout, what.name, what.shares, what.shape)

    def share(self, state: PyTree) -> None:
        """Start to gather the owner-held state on every replica, so that any rank's state dict is complete."""
        # The state is small compared with the updates sent to replicas, and the gather overlaps with the caller's work.
        if self._gathering is not None:
            self._gathering.wait()  # complete by now; it must be, before its buffers are freed
            self._gathering = None
        if self._owned and self._is_replicated:
            self._gathering = Gathering(self.layout, self._device, self._with_leaves(state))

    @property
    def _is_replicated(self) -> bool:
        """True if every rank has every parameter as a whole plain tensor."""
        return self.layout.is_replicated and not self.layout.dtensors

    def _with_leaves(self, state: PyTree) -> dict[int, tuple[LeafPlacement, Tensor | None]]:
        leaves = tree.leaves(state)
        return {place: (what, leaves[place]) for place, what in self._owned.items()}

    def exported(self, state: PyTree) -> dict[int, Any]:
        """Gather owner-held state: whole if every rank holds every parameter, else as evenly sharded DTensors."""
        if self._gathering is not None:
            return dict(self._gathering.wait())
        if not self._owned or not self.layout.dtensors:
            return {}
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        assert self.layout.group is not None
        wait_for_all(self.layout.group, "state_dict()")
        found: dict[int, Any] = {}
        for place, whole in gathered_whole(self.layout, self._device, self._with_leaves(state)):
            name = self._owned[place].name
            assert name is not None
            found[place] = whole
            if name in self.layout.dtensors:
                mesh = self.layout.dtensors[name].mesh
                last: Placement = Shard(0) if whole.ndim else Replicate()
                placements = [*[Replicate()] * (mesh.ndim - 1), last]
                # Cloned, because a shard is a view that would keep the whole leaf in memory.
                found[place] = distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()
        return found

    def take(self, place: int, leaf: Any, value: Any) -> Taken | str:
        """Return the copy that loads a value from a state dict into a leaf, or an error message."""
        what = self._about[place]
        if what is None or what.name is None or not what.owned or isinstance(value, IntervalTensor):
            return on_this_rank(leaf, value)
        if is_dtensor(value):
            spec = self.layout.dtensors.get(what.name)
            is_evenly_sharded = spec is not None and value.device_mesh == spec.mesh
            if not is_evenly_sharded or (is_dtensor(leaf) and value.device_mesh == leaf.device_mesh):
                return on_this_rank(leaf, value)
            assert spec is not None
            if wrong := other_piece(value, spec.mesh):
                return wrong
        return None, value, (0, 0) if what.share is None else interval_of(what, what.share)

    def load(self, loads: Sequence[Load], state: PyTree, problem: Exception | None) -> None:
        """Copy loaded values into the state; sharded parameters on all ranks or, with an error, on none."""
        if self._many and not self._is_replicated:
            assert self.layout.group is not None
            wait_for_all(self.layout.group, "load_state_dict()")
            agree("load_state_dict()", self.layout.group, problem)
        elif problem is not None:
            raise problem
        leaves = tree.leaves(state)
        # Loaded, not gathered again: this rank may load alone.
        gathered = {} if self._gathering is None else self._gathering.wait()
        for load in loads:
            if load.interval is None:
                if load.target is not None:
                    load.target.copy_(load.source)
                continue
            whole: Any = load.source
            if is_dtensor(whole):
                # Use our own mesh: a loaded mesh may have the coordinates of the rank that saved it.
                what = self._about[load.place]
                assert what is not None
                assert what.name is not None
                mesh = self.layout.dtensors[what.name].mesh
                own = dtensor_of(local_of(whole), mesh, whole.placements, whole.shape, whole.stride())
                whole = own.full_tensor()
            if (target := leaves[load.place]) is not None:
                target.copy_(whole.reshape(-1)[slice(*load.interval)].view(target.shape))
            if load.place in gathered:
                gathered[load.place].copy_(whole)
        if self._many:
            self.binding.has_loaded = True

    def _prepare(self, tx: Transform, params: Mapping[str, Tensor]) -> None:
        leaves, treedef = tree.flatten(tx)
        known = next((old for old in self._known if old == treedef), None)
        if known is not None:
            self._now = tree.unflatten(known, leaves)  # on the structure of an equal one, so that its caches are used
            return
        self._known.append(treedef)
        self._now = tx

    def step(
        self,
        groups: Sequence[Group],
        params: dict[str, Tensor],
        updates: dict[str, Tensor | None],
        state: PyTree,
        *,
        donate: bool,
        extras: dict[str, Any],
        problem: Exception | None,
    ) -> PyTree:
        """Run a step together with all ranks; a problem of one is raised on all before anything is changed."""
        try:
            if problem is None:
                self.refresh(groups, params)
        except Exception as error:  # perhaps on this rank only: raised on all ranks together
            problem = error
        local = {name: local_of(param) for name, param in params.items()}
        _, after = step_sharded(
            self.binding,
            self._now,
            updates,
            state,
            local,
            donate=Donation(donate, True),
            extras=extras,
            problem=problem,
            apply=add_in_place,
            serial=self._serial,
        )
        self.share(after)
        return after
