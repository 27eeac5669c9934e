"""Steps over ranks: one sharded step on the local tensors of all parameters, with one agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.checkpoint import FlatPiece
from muonfx.core import Donation, Transform
from muonfx.optimizer.stepping import Check, Stepping, add_in_place
from muonfx.optimizer.values import check_shapes, standing, unchanged, valid
from muonfx.optimizer.versions import for_groups
from muonfx.sharding.agreement import agree
from muonfx.sharding.intervals import IntervalTensor
from muonfx.sharding.layout import Layout, is_dtensor, local_of
from muonfx.sharding.layouts import from_dtensors
from muonfx.sharding.messages import collective
from muonfx.sharding.offload.transform import home_of, inner_of
from muonfx.sharding.plan.plan import Settings
from muonfx.sharding.state import Held, about, dressed, dressed_leaf, interval_of, logical_leaf
from muonfx.sharding.transform import advance, begin, introduce, sharded, walk_of
from muonfx.sharding.walk import Walk
from muonfx.tree import PyTree

__all__ = ["SteppingOverRanks", "layout_for"]


def layout_for(params: Mapping[str, Tensor], layout: Layout | None) -> Layout | None:
    """The layout of some parameters: the given one, or that of DTensors; None where nothing is sharded.

    Raises:
        TypeError: a layout was given that is not that of DTensors, for parameters that are.
    """
    any_dtensor = next((name for name, param in params.items() if is_dtensor(param)), None)
    if layout is None:
        return None if any_dtensor is None else from_dtensors(params)
    if any_dtensor is not None and layout.kind != "from_dtensors":
        raise TypeError(
            f"layout: {layout!r} was given, but {any_dtensor!r} is a DTensor, which says itself where it lies: leave "
            "layout out"
        )
    return layout.of(params)


class SteppingOverRanks(Stepping):
    """How an optimizer over pieces of parameters makes its state and takes its steps; all ranks do so together.

    Args:
        tx: the transform.
        keys: for each group, the dotted name of each hyperparameter by its key there.
        layout: who holds what.
        settings: of `muonfx.sharding.sharded`.
    """

    def __init__(self, tx: Transform, keys: Sequence[Mapping[str, str]], layout: Layout, settings: Settings) -> None:
        super().__init__(tx, keys, None)
        self.layout, self._settings = layout, settings
        self._inner = inner_of(tx)
        self.walk: Walk = walk_of(layout, settings, home_of(tx))
        self._now = self._inner
        self._known: list[optree.PyTreeSpec] = []
        self._like: dict[str, Any] = {}

    @property
    def transform(self) -> Transform:
        """The transform over what the optimizer holds."""
        return sharded(self.tx, self.layout, **self._settings._asdict())

    def init(self, params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]) -> PyTree:
        """Make the state of local tensors, once the ranks have found that they mean the same."""
        local = {name: local_of(param) for name, param in params.items()}
        state = begin(self.walk, self._inner, local)
        self._device = tree.device_of(local)
        self._like = self.walk.global_like(local)
        self._about = about(self.walk, self._inner, self._like)
        self.refresh(groups, params)
        return state

    def taken_from(self, other: Stepping, state: PyTree, old: PyTree) -> PyTree:
        """A new state with the leaves of an old one; matrices' states go to where their owners are now."""
        described = other._about if isinstance(other, SteppingOverRanks) else [None] * len(tree.leaves(old))
        before = dict(zip(tree.paths(old), zip(tree.leaves(old), described, strict=True), strict=True))
        leaves, treedef = tree.flatten(state)
        return tree.unflatten(
            treedef,
            [
                self._kept(other, *before[path], leaf, what) if path in before else leaf
                for path, leaf, what in zip(tree.paths(state), leaves, self._about, strict=True)
            ],
        )

    def _kept(self, other: Stepping, had: Any, was: Held | None, leaf: Any, what: Any) -> Any:
        if not isinstance(what, Held) or (was is not None and was.shape != what.shape):
            return leaf
        if not what.owned:
            return had if had is not None and leaf is not None and had.shape == leaf.shape else leaf
        if not isinstance(other, SteppingOverRanks) or was is None:  # every rank had all of it
            return self._of_whole(had.reshape(-1), what) if tuple(had.shape) == what.shape else leaf
        return self._moved(other, had, was, what)

    def _moved(self, other: SteppingOverRanks, had: Tensor | None, was: Held, what: Held) -> Tensor | None:
        """What lies at an owner, from where it was to where it is now; every rank hears of all: this is seldom."""
        whole = torch.empty(prod(was.shape), dtype=was.dtype, device=self._device)
        group = other.layout.group  # every rank has been in one; there may be several, each with all of the state
        for share in was.shares:
            start, stop = interval_of(was, share)
            if share.owner in (None, other.layout.rank):
                assert had is not None
                whole[start:stop] = had.reshape(-1)
            if share.owner is not None and group is not None and stop > start:
                with collective("moving the optimizer's state"):
                    dist.broadcast(whole[start:stop], dist.get_global_rank(group, share.owner), group=group)
        return self._of_whole(whole, what)

    def _of_whole(self, whole: Tensor, what: Held) -> Tensor | None:
        """What this rank owns of a flattened state leaf."""
        if what.local is None or what.share is None:
            return None
        start, stop = interval_of(what, what.share)
        return whole[start:stop].view(what.local)

    def show(self, place: int, leaf: Any) -> Any:
        """A leaf of the state as ``optimizer.state`` has it: a DTensor, or another thing that says which part it is."""
        what = self._about[place]
        found = dressed_leaf(self.walk, what, leaf)
        if is_dtensor(found) or not isinstance(what, Held) or what.name is None:
            return found
        piece = logical_leaf(self.walk, self._device, what, leaf)
        return IntervalTensor.of(piece) if isinstance(piece, FlatPiece) else piece

    def shown(self, state: PyTree) -> PyTree:
        """The state as the functional API has it."""
        return dressed(self.walk, self._inner, self._like, state) if self.layout.dtensors else state

    def agree(self, problem: Exception | None) -> None:
        """Raise on all ranks what is wrong on one."""
        if self.layout.group is not None and self.layout.size > 1:
            agree([], self.layout.group, problem)
            self.walk.note_load()
        super().agree(problem)

    def refresh(self, groups: Sequence[Mapping[str, Any]], params: Mapping[str, Tensor]) -> None:
        """Build the transform for the hyperparameters that stand in the groups now."""
        values = standing(groups, self._keys)
        if self._values is not None and unchanged(values, self._values):
            return
        for group in values:
            check_shapes(self.tx, group)
        own = [(group, held["param_names"]) for group, held in zip(values, groups, strict=True) if held["param_names"]]
        self._now = self._known_alike(valid(for_groups(self._inner, [v for v, _ in own], [names for _, names in own])))
        self._values = [dict(group) for group in values]

    def _known_alike(self, tx: Transform) -> Transform:
        """The same transform on the structure of an equal one of before, by which what was found out is kept."""
        leaves, treedef = tree.flatten(tx)
        known = next((old for old in self._known if old == treedef), None)
        if known is not None:
            return tree.unflatten(known, leaves)
        self._known.append(treedef)
        introduce(self.walk, tx)
        return tx

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        params: dict[str, Tensor],
        updates: dict[str, Tensor | None],
        state: PyTree,
        *,
        donate: bool,
        extras: dict[str, Any],
        check: Check,
    ) -> PyTree:
        """Take a step together with all ranks; what is wrong on one is raised on all, before anything is changed."""
        problem: Exception | None = None
        try:
            check(updates)
            self.refresh(groups, params)
        except (TypeError, ValueError) as error:
            problem = error
        local = {name: local_of(param) for name, param in params.items()}
        out, after = advance(
            self.walk, self._now, updates, state, local, donate=Donation(donate, True), extras=extras, problem=problem
        )
        add_in_place(local, out)
        return after
