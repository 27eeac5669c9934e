"""A chain, walked with its state away from home: each transform of it gets its state by buckets, or all at once.

By buckets: what looks at one leaf at a time (within one process), or at single elements (on pieces), with all that it
calls; runs of matrices, by the buckets in which they are exchanged; and the wrappers of `wrappers`. All at once: what
looks at the whole tree and has a state like the parameters; that costs memory, and there is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import NOTHING, Donation, Locality, Transform, identity, sum_over_leaves
from muonfx.sharding.gathered import init_run
from muonfx.sharding.kinds import Kind, kind_of, with_parts
from muonfx.sharding.offload.home import Home
from muonfx.sharding.offload.making import made_by
from muonfx.sharding.offload.near import device_of, on_device, with_numbers_on
from muonfx.sharding.offload.stream import streamed
from muonfx.sharding.offload.turns import Turns, cut, moves, owners_of, settled, sizes_of, spec_of
from muonfx.sharding.offload.wrappers import wrapper_of
from muonfx.sharding.plan.costs import Run
from muonfx.sharding.walk import Walk, within
from muonfx.tree import PyTree

__all__ = ["Streaming"]


class _Near(Walk):
    """The walk of what is done within one bucket, where all that it needs is at hand."""

    def kind(self, tx: Transform) -> Kind:
        return _kind_among(self.layout.size, tx)


@dataclass(eq=False)
class Streaming(Walk):
    """The walk of a chain whose state is offloaded."""

    home: Home = field(default_factory=lambda: Home(None, 1 << 26, False))

    def __post_init__(self) -> None:
        self.turns = self._turns_of_run
        self._near = _Near(self.layout, self.settings, self.compute)
        self._near._warned = self._warned

    @property
    def near(self) -> Walk:
        """The walk within a bucket."""
        return self._near

    def kind(self, tx: Transform) -> Kind:
        """How a transform is done; what can be streamed as one, with all that it calls, is done on pieces."""
        return Kind.PIECES if self.is_unit(tx) else _kind_among(self.layout.size, tx)

    def is_unit(self, tx: Transform) -> bool:
        """Whether a transform, with all that it calls, can be run on some leaves at a time, for any choice of them."""
        return tx.locality <= (Locality.LEAF if self.layout.size == 1 else Locality.ELEMENT)

    def device(self, given: torch.device) -> torch.device:
        """Where to compute with updates that are on a device."""
        return given if given.type == "meta" else self.home.device(given)

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Add scalars over all leaves and ranks."""
        return sum_over_leaves(scalars) if self.layout.size == 1 else super().sum_over_leaves(scalars)

    # ------------------------------------------------------------------------------------------------------- init

    def init(self, tx: Transform, params: PyTree) -> PyTree:
        """The state of a transform, at home."""
        given = device_of(params)
        if given.type == "meta":
            return self.near.init(tx, params)
        tx = self.resolved(tx, params)
        if self.is_unit(tx):
            return self.init_pieces(tx, params)
        if (wrapper := wrapper_of(tx)) is not None:
            return wrapper.init(self, tx, params)
        if self._streams(tx, params):
            return super().init(tx, params)
        home = self._home_at_once
        state = self.near.init(_unwrapped(tx), on_device(home.device(given), params))
        return settled(home, home.device(given), state, owners_of(state, params), copy=False)

    def init_pieces(self, tx: Transform, params: PyTree) -> PyTree:
        """The state of a transform that looks at one leaf at a time, made by buckets.

        The other leaves are meta tensors meanwhile, so that whatever depends on names and shapes is as always.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = self.near.init(tx, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params))
        buckets = cut(sizes_of(tree.names(params), shown, owners_of(shown, params)), self.home.bucket_bytes)
        return made_by(self.home, buckets, params, lambda some: self.near.init(tx, some), outside="meta")

    def init_run(self, run: Run, params: PyTree) -> dict[str, PyTree]:
        """The states of the transforms of a run, made by the buckets of its plan."""
        if device_of(params).type == "meta":
            return super().init_run(run, params)
        plan = self.plan(run, params)
        now = self._at_owner(plan, run)
        seen: set[str] = set()
        buckets: list[list[str]] = []
        for bucket in plan.buckets:
            names = dict.fromkeys(plan.shares[i].name for i in bucket)
            buckets.append([name for name in names if name not in seen])
            seen |= set(names)
        buckets.append(list(dict.fromkeys(share.name for share in plan.shares if share.name not in seen)))
        return made_by(self.home, buckets, params, lambda some: init_run(plan, now, self.layout, some), outside=None)

    # ----------------------------------------------------------------------------------------------------- update

    def update(
        self,
        tx: Transform,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        donate: Donation,
        extras: Mapping[str, Any],
    ) -> tuple[PyTree, PyTree]:
        """Update by a transform whose state is at home; it is at home again afterwards."""
        like = updates if params is None else params
        tx = self.resolved(tx, like)
        extras = {**extras, "sum_over_leaves": self.sum_over_leaves}
        given = device_of(updates, params)
        if self.is_unit(tx):
            return streamed(self.home, tx, self._runs(tx), updates, state, params, donate, extras)
        if (wrapper := wrapper_of(tx)) is not None:
            return wrapper.update(self, tx, updates, state, params, donate, extras)
        if tx.reads_params and not self._calls(tx):
            params = on_device(given, params)
        if self._streams(tx, like):
            return super().update(tx, updates, state, params, donate, extras)
        owners = owners_of(state, like)
        home = self._home_at_once
        if not home.is_direct(home.device(given)):
            self._warn_of_bringing(tx, state, owners)
        turns = Turns(home, given, state, owners, [tree.names(updates)], donate)
        try:
            out = turns.run(
                0, self._runs(_unwrapped(tx)), updates, turns.near(params), extras, may_write=donate.updates
            )
        except BaseException:
            turns.abandon()
            raise
        return out, turns.end()

    def update_run(
        self,
        run: Run,
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree,
        donate: Donation,
        extras: Mapping[str, Any],
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Update by a run."""
        if any(tx.reads_params for _, tx in run):
            params = on_device(device_of(updates, params), params)
        device = self.device(device_of(updates, params))
        run = tuple((name, with_numbers_on(device, tx)) for name, tx in run)
        return super().update_run(run, updates, state, params, donate, extras)

    def kept(self, state: PyTree, params: PyTree, donate: Donation) -> PyTree:
        """A state that does not change; a copy, where the caller goes on to own the old one."""
        if donate.state:
            return state
        return settled(self.home, self.device(device_of(params)), state, owners_of(state, params), copy=True)

    def require_room(self, state: PyTree, params: PyTree, donate: Donation) -> None:
        """Require the room that the next state takes beside this one.

        Raises:
            OSError: the disk has not as much.
        """
        if self.home.folder is None:
            return
        device = self.device(device_of(params))
        pairs = zip(tree.leaves(state), owners_of(state, params), strict=True)
        self.home.require(
            [
                spec_of(leaf)
                for leaf, owner in pairs
                if moves(leaf, owner) and not (donate.state and self.home.has(leaf, device))
            ]
        )

    # ---------------------------------------------------------------------------------------- found out once

    def _runs(self, tx: Transform) -> Callable[..., Any]:
        def run(updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation = NOTHING, **extras: Any) -> Any:
            here = with_numbers_on(self.device(device_of(updates, params)), tx)
            return self.near.update(here, updates, state, params, donate, extras)

        return run

    @property
    def _home_at_once(self) -> Home:
        """For what is not streamed: on several ranks it may have to send, which only the gradients' device can."""
        return self.home if self.layout.size == 1 else self.home._replace(on_host=False)

    def _turns_of_run(
        self, updates: PyTree, state: PyTree, buckets: Sequence[Sequence[str]], donate: Donation
    ) -> Turns:
        return Turns(self.home, device_of(updates), state, owners_of(state, updates), buckets, donate)

    def _streams(self, tx: Transform, like: PyTree) -> bool:
        """Whether all of a transform's state is that of others that it calls, or of single values."""
        kind = kind_of(tx)
        if kind in (Kind.CHAIN, Kind.RUN):
            return True
        key = ("streams", tree.flatten(tx)[1], tuple(tree.names(like)))
        if key not in self.derived:
            bare = with_parts(tx, lambda part: identity()) if kind is Kind.INSIDE else tx
            whole = self.global_like(like)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                own = bare.functions.init(whole)
            owned = zip(tree.leaves(own), owners_of(own, whole), strict=True)
            self.derived[key] = not any(moves(leaf, owner) for leaf, owner in owned)
        return self.derived[key]

    def _calls(self, tx: Transform) -> bool:
        return kind_of(tx) in (Kind.CHAIN, Kind.INSIDE)

    def _warn_of_bringing(self, tx: Transform, state: PyTree, owners: Sequence[str | None]) -> None:
        key = ("bringing", tx.name)
        if key in self._warned:
            return
        self._warned.add(key)
        nbytes = sum(sizes_of([o for o in owners if o is not None], state, owners).values())
        warnings.warn(
            f"{tx.name} looks at the whole tree and keeps a state of its own like the parameters, so all of that, "
            f"{nbytes / 2**20:.1f} MiB, is brought in at once at every step: offload the transforms around it instead, "
            "or declare its locality",
            stacklevel=2,
        )


def _kind_among(size: int, tx: Transform) -> Kind:
    """How a transform is done among some ranks; one alone has nothing to gather and nobody to send to."""
    kind = kind_of(tx)
    return Kind.PIECES if size == 1 and kind in (Kind.RUN, Kind.EVERYTHING) else kind


def _unwrapped(tx: Transform) -> Transform:
    """A transform whose parts do not stream themselves."""
    if kind_of(tx) is not Kind.INSIDE:
        return tx
    return with_parts(tx, lambda part: part.arguments["tx"] if part.factory is within else part)
