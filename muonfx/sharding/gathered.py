"""A run on pieces: matrices go to their owners, are computed there once, and come back.

While the matrices of one bucket are computed, those of the next are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform, chain
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import Exchange, copied
from muonfx.sharding.plan.plan import RunPlan, Share
from muonfx.tree import PyTree

__all__ = ["init_run", "update_run"]


def init_run(plan: RunPlan, layout: Layout, params: PyTree) -> PyTree:
    """The state of a run: at the owner of a share that of its matrices, elsewhere None.

    Args:
        plan: who owns what.
        layout: who holds what.
        params: local tensors; meta ones are not exchanged.
    """
    leaves, treedef = tree.flatten(params)
    names = tree.names(params)
    mine = [share for share in plan.shares if share.owner in (None, layout.rank)]
    by_name = dict(zip(names, leaves, strict=True))
    reads = any(tx.reads_params for _, tx in plan.run)
    on_meta = any(leaf.is_meta for leaf in leaves if leaf is not None)
    given: dict[str, Tensor] = {}
    if reads and not on_meta:
        for bucket in plan.buckets:
            shares = [share for i in bucket if by_name[(share := plan.shares[i]).name] is not None]
            given.update(_Coming(plan, layout, shares, by_name, as_given=True).wait())
    else:
        for share in mine:
            if (like := by_name[share.name]) is not None:
                given[share.name] = torch.zeros((), dtype=like.dtype, device=like.device).expand(share.shape)
    return transform_of(plan)._functions[0](tree.unflatten(treedef, [given.get(name) for name in names]))


def transform_of(plan: RunPlan, run: Sequence[tuple[str, Transform]] | None = None) -> Transform:
    """The transforms of a run as a chain."""
    return chain(*(plan.run if run is None else run))


def update_run(
    plan: RunPlan,
    run: Sequence[tuple[str, Transform]],
    layout: Layout,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    donate: Donation,
    extras: Mapping[str, Any],
    turns: Callable[..., Any] | None = None,
) -> tuple[PyTree, PyTree]:
    """Update by a run; all ranks of the layout must call it together, with the same leaves present.

    Args:
        plan: who owns what.
        run: the transforms, with the numbers of now.
        layout: who holds what.
        updates: local tensors; None is absent, on all ranks.
        state: what `init_run` or the previous update returned.
        params: local tensors, for a run that reads them.
        donate: what may be overwritten.
        extras: named values for the transforms.
        turns: ``(updates, state, buckets, donate)``, with the names of each bucket's parameters that this rank owns,
            makes what brings the state in by buckets; None: it is there.
    """
    tx = transform_of(plan, run)
    treedef = tree.flatten(updates)[1]
    names = tree.names(updates)
    local = dict(zip(names, tree.leaves(updates), strict=True))
    reads = params is not None and any(part.reads_params for _, part in run)
    weights = dict(zip(names, tree.leaves(params), strict=True)) if reads else {}
    buckets = [
        shares
        for bucket in plan.buckets
        if (shares := [plan.shares[i] for i in bucket if local[plan.shares[i].name] is not None])
    ]
    results = _Results(layout, local)
    if turns is None:
        by_turns: Any = _There(state, updates, len(buckets), donate)
    else:
        mine = [[share.name for share in shares if share.owner in (None, layout.rank)] for shares in buckets]
        by_turns = turns(updates, state, mine, donate)
    ahead = _begin(plan, layout, buckets[0], local, weights) if buckets else None
    before: _Going | None = None
    try:
        for turn, shares in enumerate(buckets or [[]]):
            given, values = ({}, {}) if ahead is None else (ahead[0].wait(), ahead[1].wait() if ahead[1] else {})
            fresh = ahead is None or ahead[0].is_fresh
            ahead = _begin(plan, layout, buckets[turn + 1], local, weights) if turn + 1 < len(buckets) else None
            out = by_turns.run(
                turn,
                tx.run,
                tree.unflatten(treedef, [given.get(name) for name in names]),
                by_turns.near(tree.unflatten(treedef, [values.get(name) for name in names])) if reads else None,
                extras,
                may_write=donate.updates or fresh,
            )
            done = dict(zip(names, tree.leaves(out), strict=True))
            del given, values, out
            after = _Going(plan, layout, shares, done, results)
            if before is not None:
                before.wait()
            before = after
    except BaseException:
        by_turns.abandon()
        raise
    if before is not None:
        before.wait()
    out = tree.unflatten(treedef, [None if local[name] is None else results.of[name] for name in names])
    return out, by_turns.end()


def _begin(
    plan: RunPlan,
    layout: Layout,
    shares: list[Share],
    local: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor | None],
) -> tuple[_Coming, _Coming | None]:
    """Send a bucket's updates on their way, and its parameters where they are read."""
    return (
        _Coming(plan, layout, shares, local),
        _Coming(plan, layout, shares, weights, as_given=True) if weights else None,
    )


class _There:
    """A state that is where it is needed: each of several buckets starts from the same counters.

    A counter is a leaf that belongs to no parameter.
    """

    def __init__(self, state: PyTree, params: PyTree, turns: int, donate: Donation) -> None:
        self._state, self._donate, self._last = state, donate, max(turns, 1) - 1
        self._old = tree.leaves(state)
        self._counters: list[int] = []
        if turns > 1:
            ends = set(tree.paths(params))
            depths = {len(end) for end in ends}
            self._counters = [
                place for place, path in enumerate(tree.paths(state)) if not any(path[-n:] in ends for n in depths if n)
            ]

    def run(
        self, turn: int, tx: Any, updates: PyTree, params: PyTree, extras: Mapping[str, Any], *, may_write: bool
    ) -> PyTree:
        """Update one bucket, with the counters as they were; with copies, where they may be overwritten too early."""
        leaves, treedef = tree.flatten(self._state)
        for place in self._counters:
            old = self._old[place]
            again = self._donate.state and turn < self._last
            leaves[place] = old.clone() if again and isinstance(old, Tensor) else old
        state = tree.unflatten(treedef, leaves)
        out, self._state = tx(updates, state, params, donate=Donation(may_write, self._donate.state), **extras)
        return out

    def near(self, values: PyTree) -> PyTree:
        """Values where the transform computes."""
        return values

    def end(self) -> PyTree:
        """The next state."""
        return self._state

    def abandon(self) -> None:
        """Do nothing: nothing is under way."""


class _Coming:
    """A bucket's matrices on their way to their owners."""

    def __init__(
        self,
        plan: RunPlan,
        layout: Layout,
        shares: Sequence[Share],
        local: Mapping[str, Tensor | None],
        *,
        as_given: bool = False,
    ) -> None:
        me = layout.rank
        outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        self._shares: dict[str, Tensor] = {}
        self.is_fresh = True
        crossing = False
        wire: torch.dtype | None = None
        device = None
        for share in shares:
            tensor = local[share.name]
            assert tensor is not None
            there = tensor.dtype if as_given else plan.travels(tensor.dtype)[0]
            wire = there if wire is None else torch.promote_types(wire, there)
            device = tensor.device
            crossing = crossing or share.comes
            here = share.owner in (None, me)
            if not share.comes:
                if here:
                    self._shares[share.name] = _held(share, layout, tensor)
                    self.is_fresh = False
                continue
            room = None
            if here:
                # A run of one transform that rounds first can work in what was sent; a longer one wants its own dtype.
                held = there if len(plan.run) == 1 else tensor.dtype
                room = torch.empty(share.shape, dtype=held, device=tensor.device)
                self._shares[share.name] = room
            own = layout.piece(share.name)
            for leg in share.legs:
                assert share.owner is not None
                if leg.sender == me:
                    outgoing[share.owner] += [own.window(tensor, box) for box in leg.boxes]
                if room is not None:
                    incoming[leg.sender] += [share.piece.window(share.local(room), box) for box in leg.boxes]
        self._exchange = _exchange(outgoing, incoming, wire, device, layout, "gathering matrices") if crossing else None

    def wait(self) -> dict[str, Tensor]:
        """The whole matrices that this rank owns, by the parameter's name."""
        if self._exchange is not None:
            self._exchange.wait()
        return self._shares


class _Going:
    """A bucket's results on their way back."""

    def __init__(
        self,
        plan: RunPlan,
        layout: Layout,
        shares: Sequence[Share],
        done: Mapping[str, Tensor | None],
        results: _Results,
    ) -> None:
        me = layout.rank
        outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        crossing = False
        wire: torch.dtype | None = None
        device = None
        for share in shares:
            result = done[share.name] if share.owner in (None, me) else None
            if not share.goes:
                if result is not None:
                    results.put(share, result)
                continue
            crossing = True
            like = results.like(share.name)
            _, back = plan.travels(like.dtype)
            wire = back if wire is None else torch.promote_types(wire, back)
            device = like.device
            for leg in share.legs:
                assert share.owner is not None
                if result is not None:
                    for rank in leg.ranks:
                        outgoing[rank] += [share.piece.window(share.local(result), box) for box in leg.boxes]
                if me in leg.ranks:
                    incoming[share.owner] += results.windows(share, leg.boxes)
        self._exchange = _exchange(outgoing, incoming, wire, device, layout, "returning matrices") if crossing else None

    def wait(self) -> None:
        """Wait for the results that come here."""
        if self._exchange is not None:
            self._exchange.wait()


def _exchange(
    outgoing: list[list[Tensor]],
    incoming: list[list[Tensor]],
    wire: torch.dtype | None,
    device: torch.device | None,
    layout: Layout,
    what: str,
) -> Exchange:
    group = layout.group
    assert isinstance(group, dist.ProcessGroup)
    assert wire is not None
    assert device is not None
    return Exchange(outgoing, incoming, dtype=wire, device=device, group=group, what=what)


def _held(share: Share, layout: Layout, tensor: Tensor) -> Tensor:
    """A share that is whole in a local tensor, in the shape to compute in; a view where that can be."""
    piece = layout.piece(share.name)
    if piece.numel == share.numel:
        return tensor.reshape(share.shape)
    if piece.start is not None:
        return tensor[share.start - piece.start : share.stop - piece.start].view(share.shape)
    if piece.numel == prod(share.whole):
        return tensor.reshape(-1)[share.start : share.stop].view(share.shape)
    room = tensor.new_empty(share.shape)
    for box in share.piece.boxes:
        share.piece.window(share.local(room), box).copy_(piece.window(tensor, box))
    return room


class _Results:
    """The new local tensors of a run."""

    def __init__(self, layout: Layout, local: Mapping[str, Tensor | None]) -> None:
        self._layout, self._local = layout, local
        self.of: dict[str, Tensor] = {
            name: leaf for name, leaf in local.items() if leaf is not None and leaf.numel() == 0
        }

    def like(self, name: str) -> Tensor:
        """The update that a result takes the place of."""
        found = self._local[name]
        assert found is not None
        return found

    def put(self, share: Share, result: Tensor) -> None:
        """Take a result that was computed here for here."""
        like = self.like(share.name)
        if share.numel == like.numel():
            self.of[share.name] = result.reshape(like.shape).to(like.dtype)
        else:
            windows = self.windows(share, share.piece.boxes)
            copied([share.piece.window(share.local(result), box) for box in share.piece.boxes], windows)

    def windows(self, share: Share, boxes: Sequence[Any]) -> list[Tensor]:
        """Where boxes of a result belong."""
        room = self._room(share.name)
        return [self._layout.piece(share.name).window(room, box) for box in boxes]

    def _room(self, name: str) -> Tensor:
        if name not in self.of:
            self.of[name] = torch.empty_like(self.like(name), memory_format=torch.contiguous_format)
        return self.of[name]
