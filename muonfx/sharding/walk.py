"""A chain, walked on local tensors: each transform of it is done as `kinds` says."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import NOTHING, Donation, Locality, Transform, chain_entries, sum_over_leaves, transform
from muonfx.polar import compute_dtype
from muonfx.recorded import with_numbers
from muonfx.sharding.collectives import gathered
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.gathered import init_run, update_run
from muonfx.sharding.kinds import Kind, groups_of, kind_of, planned_as, resolved_within, with_compute_dtype, with_parts
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import collective
from muonfx.sharding.plan.costs import Run
from muonfx.sharding.plan.parts import on_stacks
from muonfx.sharding.plan.plan import RunPlan, Settings, plan_run
from muonfx.tree import PyTree

__all__ = ["Walk"]


@transform(locality=Locality.TREE, transparent=True)
def within(tx: Transform, walk: Any):
    """A transform of a chain, as the transforms around it see it: done on pieces."""

    def init(params: PyTree) -> PyTree:
        return walk.init(tx, params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any):
        return walk.update(tx, updates, state, params, donate, extras)

    return init, update


@dataclass(eq=False)
class Walk:
    """How the transforms of a chain are done under a layout; what follows from shapes alone is found out once.

    Attributes:
        layout: who holds what.
        settings: what the caller has chosen.
        compute: what a dtype of "auto" stands for on all ranks, by the kind of device; empty until they have agreed.
    """

    layout: Layout
    settings: Settings
    compute: dict[str, torch.dtype] = field(default_factory=dict)
    met: dict[int, Any] = field(default_factory=dict)
    """The structures of the chains that the ranks have compared, by id."""
    likes: dict[int, PyTree] = field(default_factory=dict)
    """For each of these, meta tensors in the tree of the local parameters."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """What else follows from shapes, found out once."""
    steps: int = 0
    """The number of steps taken."""
    verified: set[int] = field(default_factory=set)
    """The chains, as in `met`, before whose steps the copies that ranks hold have been compared."""
    has_loaded: bool = False
    """True if this rank has taken a state from elsewhere since the last step."""
    turns: Callable[..., Any] | None = None
    """Makes what brings the state of a run in by turns; None: it is there."""
    _plans: dict[Any, RunPlan] = field(default_factory=dict)
    _resolved: OrderedDict[Any, tuple[Transform, Transform]] = field(default_factory=OrderedDict)
    _of_structure: OrderedDict[Any, Transform] = field(default_factory=OrderedDict)
    """The last transform of each structure as it is done here; its closures are built."""
    _stacked: OrderedDict[Any, tuple[Run, Run]] = field(default_factory=OrderedDict)
    _warned: set[Any] = field(default_factory=set)

    def init(self, tx: Transform, params: PyTree) -> PyTree:
        """The state of a transform for local tensors."""
        tx = self.resolved(tx, params)
        kind = self.kind(tx)
        if kind is Kind.CHAIN:
            state: dict[str, PyTree] = {}
            for group in self.groups(tx, params):
                if self.kind(group[0][1]) is Kind.RUN:
                    state |= self.init_run(group, params)
                else:
                    state[group[0][0]] = self.init(group[0][1], params)
            return state
        if kind is Kind.RUN:
            return self.init_run(((tx.name, tx),), params)[tx.name]
        if kind is Kind.EVERYTHING:
            self._warn(tx, params)
            return tx.functions.init(self._whole(params))
        return tx.functions.init(params)

    def update(
        self,
        tx: Transform,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        donate: Donation,
        extras: Mapping[str, Any],
    ) -> tuple[PyTree, PyTree]:
        """Update by a transform on local tensors; all ranks together, with the same leaves present."""
        like = updates if params is None else params
        tx = self.resolved(tx, like)
        kind = self.kind(tx)
        extras = {**extras, "sum_over_leaves": self.sum_over_leaves}
        if kind is Kind.CHAIN:
            return self._update_chain(tx, updates, state, params, donate, extras)
        if kind is Kind.RUN:
            out, after = self.update_run(((tx.name, tx),), updates, {tx.name: state}, params, donate, extras)
            return out, after[tx.name]
        if kind is Kind.EVERYTHING:
            own_sum: Any = {**extras, "sum_over_leaves": sum_over_leaves}
            out, after = tx.run(self._whole(updates), state, self._whole(params), **own_sum)
            return self._pieces(out), after
        return tx.run(updates, state, params, donate=donate, **extras)

    def kind(self, tx: Transform) -> Kind:
        """How a transform is done."""
        return kind_of(tx)

    def init_run(self, run: Run, params: PyTree) -> dict[str, PyTree]:
        """The states of the transforms of a run."""
        plan = self.plan(run, params)
        return init_run(plan, self._at_owner(plan, run), self.layout, params)

    def update_run(
        self,
        run: Run,
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree,
        donate: Donation,
        extras: Mapping[str, Any],
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Update by a run, with the states of its transforms."""
        plan = self.plan(run, updates if params is None else params)
        now = self._at_owner(plan, run)
        return update_run(plan, now, self.layout, updates, state, params, donate, extras, self.turns)

    def _update_chain(
        self,
        tx: Transform,
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree,
        donate: Donation,
        extras: Mapping[str, Any],
    ) -> tuple[PyTree, PyTree]:
        after: dict[str, PyTree] = {}
        may_write = donate.updates
        for group in self.groups(tx, updates if params is None else params):
            given = Donation(may_write, donate.state)
            name, part = group[0]
            if self.kind(part) is Kind.RUN:
                own = {name: state[name] for name, _ in group}
                out, new = self.update_run(group, updates, own, params, given, extras)
                after |= new
            else:
                out, after[name] = self.update(part, updates, state[name], params, given, extras)
            promised = all(part.keeps_donation_promise for _, part in group)
            may_write = donate.state and promised and (may_write or _is_new(out, updates))
            updates = out
        return updates, {name: after[name] for name in state}

    # ---------------------------------------------------------------------------------------- found out once

    def resolved(self, tx: Transform, params: PyTree) -> Transform:
        """A transform with all decided that names and global shapes decide, and with those that it calls on pieces."""
        names = tuple(tree.names(params))
        compute = self.compute_on(tree.device_of(params))
        key = (id(tx), names, compute)
        if key not in self._resolved:
            made = self._resolved_now(tx, params, names, compute)
            self._resolved[key] = (tx, made)
            self._resolved[id(made), names, compute] = (made, made)  # it is what it is to become
            while len(self._resolved) > 1024:
                self._resolved.popitem(last=False)
            return made
        return self._resolved[key][1]

    def _resolved_now(
        self, tx: Transform, params: PyTree, names: tuple[str, ...], compute: torch.dtype | None
    ) -> Transform:
        """`resolved` of a transform that is new: names and shapes decide nothing by numbers, so these are put in."""
        numbers, structure = tree.flatten(tx)
        key = (structure, names, compute)
        known = self._of_structure.get(key)
        if known is not None:
            made = with_numbers(known, iter(numbers))
        else:
            meta = self.global_like(params)
            made = tx.resolve(meta)
            if compute is not None:
                made = with_compute_dtype(made, compute)
            if self.kind(made) is Kind.RUN:
                made = resolved_within(made, meta)
            if self.kind(made) is Kind.INSIDE:
                made = with_parts(made, lambda part: within(part, self))
            found = tree.leaves(made)
            if len(found) != len(numbers) or any(a is not b for a, b in zip(found, numbers, strict=True)):
                return made  # its own way to resolve makes other numbers of them
        self._of_structure[key] = made
        while len(self._of_structure) > 256:
            self._of_structure.popitem(last=False)
        return made

    def groups(self, tx: Transform, params: PyTree) -> list[Run]:
        """The transforms of a chain in groups: runs that go to an owner together, and single others."""
        entries = chain_entries(tx)
        assert entries is not None
        return [
            tuple(group)
            for group in groups_of({n: self.resolved(part, params) for n, part in entries.items()}, self.kind)
        ]

    def plan(self, run: Run, params: PyTree) -> RunPlan:
        """The plan of a run for some parameters."""
        run = tuple((name, planned_as(tx)) for name, tx in run)
        names = [name for name in tree.names(params) if name in self.layout._specs]
        device = tree.device_of(params)
        kind = torch.device("cpu") if device.type == "meta" else self.device(device)
        key = (tuple(names), tuple((name, tree.flatten(tx)[1]) for name, tx in run), str(kind))
        if key not in self._plans:
            # On a CPU "auto" is a measurement, and who owns what must not depend on one: balance as for fp32.
            compute = torch.float32 if kind.type == "cpu" else compute_dtype(torch.float32, kind)
            self._plans[key] = plan_run(run, names, self.layout, kind, self.settings, compute)
        return self._plans[key]

    def is_verification_due(self, tx: Transform) -> bool:
        """Tell whether the copies that ranks hold are to be compared before the next step of a chain."""
        every = self.settings.verify_every
        return id(tx.structure) not in self.verified or (every is not None and self.steps % every == 0)

    def begin_step(self, tx: Transform) -> None:
        """Count a step that all ranks have agreed to take, with copies compared where that was due."""
        self.steps += 1
        self.verified.add(id(tx.structure))
        self.has_loaded = False

    def note_load(self) -> None:
        """Note that a state has come from elsewhere, perhaps on some ranks only: the next step compares copies."""
        self.verified.clear()
        self.has_loaded = True

    def compute_on(self, device: torch.device) -> torch.dtype | None:
        """The dtype that "auto" stands for on all ranks, for updates on a device; None: they have not agreed."""
        if device.type == "meta":
            return next(iter(self.compute.values()), None)
        return self.compute.get(self.device(device).type)

    def device(self, given: torch.device) -> torch.device:
        """Where to compute with updates that are on a device."""
        return given

    def _at_owner(self, plan: RunPlan, run: Run) -> Run:
        """The transforms of a run, with the numbers of now, as they are done at an owner."""
        if not plan.stacks:
            return run
        key = tuple(id(tx) for _, tx in run), plan.stacks
        if key not in self._stacked:
            self._stacked[key] = run, on_stacks(run, {name: plan.specs[name].shape for name in plan.stacks})
            while len(self._stacked) > 256:
                self._stacked.popitem(last=False)
        return self._stacked[key][1]

    def global_like(self, params: PyTree) -> PyTree:
        """Meta tensors of the global shapes in the place of local ones."""
        leaves, treedef = tree.flatten(params)
        specs = self.layout._specs
        meta: list[Any] = []
        for name, leaf in zip(tree.names(params), leaves, strict=True):
            if name not in specs:
                if leaf is not None:
                    raise ShardingError(f"{name!r} is no parameter of {self.layout!r}")
                meta.append(None)
            else:
                meta.append(torch.empty(specs[name].shape, dtype=specs[name].dtype, device="meta"))
        return tree.unflatten(treedef, meta)

    def local_like(self, params: PyTree) -> PyTree:
        """Meta tensors of this rank's pieces in the place of parameters or of what stands for them."""
        meta = self.global_like(params)
        leaves, treedef = tree.flatten(meta)
        named = zip(tree.names(meta), leaves, strict=True)
        pieces = [leaf if leaf is None else self.layout.piece(name).blank(leaf) for name, leaf in named]
        return tree.unflatten(treedef, pieces)

    # ------------------------------------------------------------------------------------------- over all ranks

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Add scalars, one for each leaf, over all leaves and ranks; a piece that several ranks hold counts once."""
        leaves = tree.leaves(scalars)
        names = [name for name, leaf in zip(tree.names(scalars), leaves, strict=True) if leaf is not None]
        found = [leaf for leaf in leaves if leaf is not None]
        if not found:
            return torch.zeros(())
        stacked = torch.stack([self._counted(n, x.to(found[0].device)) for n, x in zip(names, found, strict=True)])
        if self.layout.group is not None and self.layout.size > 1:
            with collective("summing over all ranks"):
                dist.all_reduce(stacked, group=self.layout.group)
        return sum_over_leaves(list(stacked.unbind()))

    def _counted(self, name: str, scalar: Tensor) -> Tensor:
        """What a rank adds for a leaf: of several holders one adds; but of what is not finite, all hear."""
        if self.layout.counts(name):
            return scalar
        return torch.where(scalar.isfinite(), torch.zeros_like(scalar), scalar)

    def _whole(self, values: PyTree) -> PyTree:
        present = [leaf for leaf in tree.leaves(values) if leaf is not None]
        if present and all(leaf.is_meta for leaf in present):
            return self.global_like(values)
        return gathered(self.layout, values) if present else values

    def _pieces(self, whole: PyTree) -> PyTree:
        return self.layout.shard(whole)

    def _warn(self, tx: Transform, params: PyTree) -> None:
        key = (tx.name, tuple(tree.names(params)))
        if key in self._warned or self.layout.size == 1:
            return
        self._warned.add(key)
        specs = [self.layout._specs[name] for name in tree.names(params)]
        nbytes = sum(spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs)
        warnings.warn(
            f"{tx.name} declares no locality narrower than the whole tree, so every rank gathers all updates and "
            f"parameters, {nbytes / 2**20:.1f} MiB each, at every step, and computes alike: declare its locality, or "
            "name sum_over_leaves in its update if all that it needs of the tree is a sum",
            stacklevel=2,
        )


def _is_new(new: PyTree, old: PyTree) -> bool:
    """Whether no leaf of a tree is one of another."""
    given = {id(leaf) for leaf in tree.leaves(old) if leaf is not None}
    return not any(id(leaf) in given for leaf in tree.leaves(new))
