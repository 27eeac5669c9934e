"""`Binding`: runs a transform over the ranks of a layout (which shard of each parameter each rank holds)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform, checks
from muonfx.core.chain import chain_entries
from muonfx.core.donation import NOTHING
from muonfx.core.extras import sum_over_leaves
from muonfx.core.transform import Arguments, stacked
from muonfx.core.visit import Visit, stand_in, visit, with_inner
from muonfx.placement.bucketed import StateParameters
from muonfx.placement.devices import meta_like
from muonfx.placement.placed import PlacedTransforms, Where
from muonfx.placement.store import Store
from muonfx.sharding.communication.agree import warn_together
from muonfx.sharding.communication.collectives import all_reduce, gathered
from muonfx.sharding.communication.matrix_stage import MatrixStage
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import RunPlan, Settings, plan_run
from muonfx.sharding.plan.cost import Run
from muonfx.sharding.shards.dtensors import map_named
from muonfx.tree import PyTree

F = TypeVar("F", bound=Callable[..., Any])


def by_structure(function: F) -> F:
    """Decorate a function of a binding, a transform and parameters, so that the binding remembers each result.

    A result is remembered by the tree structure of the transform and the names of the parameters: for ``{"w": ...}``
    and other values of the same ``{"w": ...}``, the function is called once. Nested and flat dicts of parameters with
    equal names share a result, so it must not depend on their containers.
    """

    @functools.wraps(function)
    def call(binding: Binding, tx: Transform, params: PyTree) -> Any:
        # The structure has no values of numbers and tensors.
        key = function, tx.treedef, tuple(tree.names(params))
        if key not in binding.results:
            binding.results[key] = function(binding, tx, params)
        return binding.results[key]

    return cast("F", call)


@dataclass(eq=False)
class Progress:
    """The steps of one sharded transform or optimizer, of which the ranks compare the number at every step."""

    serial: int | None = None
    """Its number among those of its process group, by initialization; None until the ranks have agreed."""
    completed: int = 0
    """The number of steps since `init` or a load that this rank has completed without an error."""
    has_loaded: bool = False
    """True if this rank has loaded a state since the last step."""
    has_lacked_gradients: bool = False
    """True if no rank had a gradient in the last step."""
    is_unverified: bool = True
    """True until the first step after `init` or a load, which compares the replicas of all tensors."""
    lacking: frozenset[str] = frozenset()
    """The names of the parameters that no rank has had a gradient of so far. They are equal on all ranks."""
    _new_states: weakref.WeakValueDictionary[int, Tensor] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """One tensor, by its id, of each state from `init` with which no step was made. There may be several states."""

    def begin(self, serial: int, state: PyTree) -> None:
        """Record a new state of `init`, to be verified at its first step."""
        self.serial = serial
        self.completed = 0
        self.is_unverified = True
        for tensor in tree.tensors(state):
            self._new_states[id(tensor)] = tensor
            break

    def load(self) -> None:
        """Record that this rank has loaded a state."""
        self.has_loaded = True
        self.completed = 0
        self.is_unverified = True

    def needs_verification(self, state: PyTree) -> bool:
        """Return True if this is the first step after `init` or a load, or the first step with a state of `init`."""
        if self.is_unverified or not self._new_states:
            return self.is_unverified
        return not tree.ids(state).isdisjoint(self._new_states)

    def verified(self, state: PyTree) -> None:
        """Record that the ranks have agreed on a step with a state, and compared the replicas if any rank needed it."""
        self.has_loaded = False
        self.is_unverified = False
        if not self._new_states:
            return
        for leaf_id in tree.ids(state).intersection(self._new_states):
            del self._new_states[leaf_id]


@dataclass(eq=False)
class Binding:
    """Runs transforms over the ranks of a layout: it gathers matrices, and sums scalars over all ranks.

    `bind` builds one binding for each `settings` and `store`. Several transforms and optimizers may share it, so facts
    of one of them are in its `Progress`.
    """

    layout: Layout
    settings: Settings
    store: Store
    likes: dict[Hashable, PyTree] = field(default_factory=dict)
    """A dict from the tree structure of a transform to a tree of meta tensors in the shapes of this rank's shards."""
    progress_of: dict[Hashable, Progress] = field(default_factory=dict)
    """A dict from the tree structure of a transform to the progress of the one that was initialized last."""

    # The following attributes are caches.
    results: dict[Hashable, Any] = field(default_factory=dict)
    """The results of functions that `by_structure` decorates, by function, transform and names of parameters."""
    _expected_states: dict[Hashable, checks.ExpectedState] = field(default_factory=dict)
    """The structure, shapes and dtypes of a state, by the structures of transform and parameters, and their dtypes."""
    dtype_digests: dict[tuple[torch.dtype | None, ...], str] = field(default_factory=dict)
    """For the dtypes of parameters in the order of the tree, a hash of them, which the ranks compare."""
    plans: dict[Hashable, RunPlan] = field(default_factory=dict)
    """The results of `plan`, by names of parameters, transforms and device."""
    _warned: set[Hashable] = field(default_factory=set)

    @property
    def holds_all(self) -> bool:
        """True if there is one rank and it holds every parameter whole, in the parameter's own shape."""
        if self.layout.size > 1:
            return False
        return all(cut[0].shape == cut.shape for cut in self.layout.cuts.values())

    @cached_property
    def placed(self) -> PlacedTransforms:
        """A function of a transform and local parameters. It returns the transform that runs on this rank's shards.

        It calls methods of this binding where a transform needs other ranks, and loads the state from the `store`.
        """
        where = Where(self, self.store, self.settings.bucket_bytes)
        return PlacedTransforms(where, self.global_like)

    @property
    def extras(self) -> dict[str, Any]:
        """The extra arguments that compute over ranks, for transforms that accept them."""
        return {
            "shard": self.layout.shard,
            "max_over_ranks": self.max_over_ranks,
            "sum_over_leaves": self.sum_over_leaves,
            "sum_over_shards": self.sum_over_shards,
        }

    def remember_shapes(self, tx: Transform, local: PyTree) -> None:
        """Remember the shapes of this rank's parameters. `to_global` may be called without parameters, and needs them.

        For each transform, the shapes of the first call are remembered.
        """
        if tx.treedef not in self.likes:
            self.likes[tx.treedef] = meta_like(local)

    def shapes_of_params(self, tx: Transform) -> PyTree:
        """Return the shapes of this rank's parameters: the tree of `remember_shapes` or, without it, a flat dict."""
        if tx.treedef in self.likes:
            return self.likes[tx.treedef]
        return self.local_like(self.layout.meta())

    def init(self, tx: Transform, params: PyTree) -> PyTree:
        """Return this rank's initial state for a transform. `params` has local tensors; on meta, nothing is sent."""
        return self.placed(tx, params).functions.init(params)

    def check_state(self, tx: Transform, like: PyTree, state: PyTree, *, with_dtypes: bool) -> None:
        """Raise unless a state is one that `init` returns on this rank, as a step and `to_global` require.

        If the parameter "w" has shape (4, 8) on this rank, for example, its momentum must have this shape.

        Args:
            tx: the transform for whole tensors.
            like: the local parameters or, without them, the local updates, of which some may be None.
            state: the state to check, of local tensors. Its structure and shapes are compared.
            with_dtypes: True to compare dtypes too.
        """
        leaves, structure = tree.flatten(like)
        dtypes = [getattr(leaf, "dtype", None) for leaf in leaves]
        if None in dtypes:  # seldom, so most steps need no names
            for name, leaf in zip(tree.names(like), leaves, strict=True):
                # Without parameters, a gradient that is None leaves the shape of its state unknown.
                if leaf is None and name in self.layout.specs:
                    return
        # `init` is called on meta tensors, and once only for all steps with the same structure and dtypes.
        key = tx.treedef, structure, tuple(dtypes)
        if key not in self._expected_states:
            meta_state = self.init(tx, meta_like(like))
            self._expected_states[key] = checks.ExpectedState.of(meta_state)
        checks.check_state_like(tx.name, state, self._expected_states[key], with_dtypes=with_dtypes)

    @by_structure
    def visits(self, tx: Transform, params: PyTree) -> tuple[Visit, ...]:
        """Return a `Visit` of a transform and of each transform that it calls, for the global parameters."""
        return tuple(visit(tx, self.global_like(params)))

    def on_owners(self, tx: Transform) -> Transform:
        """Return a transform that runs ``tx``, which needs whole matrices, with each matrix on one rank (its owner)."""
        return _on_owners(tx, self, StateParameters())

    def on_all(self, tx: Transform) -> Transform:
        """Return a transform that gathers the whole tree on every rank and runs ``tx`` on it there."""
        return _on_all(tx, self)

    def plan(self, run: Run, param_names: Sequence[str], device: torch.device) -> RunPlan:
        """Return the plan that assigns each matrix to a rank, for neighbouring transforms that need whole matrices.

        `run` has the transforms as pairs such as ``("orthogonalize", orthogonalize(...))``. Plans are cached by
        structure, because they do not depend on hyperparameters.
        """
        names = [name for name in param_names if name in self.layout.specs]
        if device.type == "meta":  # the speed of a device is estimated, and meta has none
            device = torch.device("cpu")
        members: list[tuple[str, Transform]] = []
        structures: list[tuple[str, Hashable]] = []
        for name, tx in run:
            member = tx
            # `by_groups` calls one transform with other numbers for each param group. They need the same plan.
            if tx.declaration.combinator.varies_numbers:
                member = tx.children[0]
            members.append((name, member))
            structures.append((name, member.treedef))
        key = tuple(names), tuple(structures), str(device)
        if key not in self.plans:
            self.plans[key] = plan_run(tuple(members), names, self.layout, device, self.settings)
        return self.plans[key]

    def global_like(self, params: PyTree) -> PyTree:
        """Return a tree like `params`, with a meta tensor in the global shape of each parameter.

        Where `params` has a shard of shape (2, 8) on one of two ranks, the result has the shape (4, 8), and no values.
        """
        leaves, treedef = tree.flatten(params)
        for index, name in enumerate(tree.names(params)):
            # A leaf None stays None, unless it is a parameter of the layout, for example one without a gradient.
            if leaves[index] is not None or name in self.layout.specs:
                meta_params = self.layout.meta([name])
                leaves[index] = meta_params[name]
        return tree.unflatten(treedef, leaves)

    def local_like(self, params: PyTree) -> PyTree:
        """Return a tree like `params`, with a meta tensor in the shape of this rank's shard for each parameter."""

        def blank_shard(name: str, leaf: Tensor) -> Tensor:
            return self.layout.position(name).blank(leaf)

        return map_named(blank_shard, self.global_like(params))

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Return the sum of a tree of scalars over all ranks. The scalar of a replicated shard counts once."""
        totals = self._totals(scalars)
        if not totals:
            return torch.zeros(())
        # The function of a single process adds the leaves.
        return sum_over_leaves(list(totals.values()))

    def sum_over_shards(self, values: PyTree) -> PyTree:
        """Return for each leaf its sum over ranks, by one all-reduce. All leaves have one shape; None stays None.

        If "w" has 6 elements on this rank and 4 on the other, ``{"w": tensor(6.)}`` becomes ``{"w": tensor(10.)}``. If
        both ranks hold the same 6 elements, they count once, and it stays ``tensor(6.)``.
        """
        total_of = self._totals(values)  # by name, without the leaves that are None
        totals = list(map(total_of.get, tree.names(values)))
        _, treedef = tree.flatten(values)
        return tree.unflatten(treedef, totals)

    def _totals(self, values: PyTree) -> dict[str, Tensor]:
        """Return by name the sum over ranks of each leaf of a tree that is not None. The leaves have one shape.

        If rank 0 has ``{"w": tensor(6.)}`` and rank 1 has ``{"w": tensor(4.)}``, both get ``{"w": tensor(10.)}``.
        """
        device = tree.device_of(values)
        counted: dict[str, Tensor] = {}
        for name, leaf in tree.named_leaves(values):
            if leaf is not None:
                counted[name] = self._counted(name, leaf.to(device))
        if not counted:
            return {}
        # One all-reduce for all leaves. Each row is one leaf, and is replaced by its sum over ranks.
        stacked = torch.stack(list(counted.values()))
        all_reduce(self.layout, stacked, "summing over all ranks")
        return dict(zip(counted, stacked.unbind(), strict=True))

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over all ranks. An all-reduce finds it, without a host sync."""
        if self.layout.size == 1:
            return values
        maxima = values.clone()
        all_reduce(self.layout, maxima, "finding the largest of all ranks", op=dist.ReduceOp.MAX)
        return maxima

    def _counted(self, name: str, scalar: Tensor) -> Tensor:
        """Return one leaf's scalar on the one rank that counts it in a sum over ranks; return zero on the others."""
        # Only the first holder counts a shard. Every holder adds NaN and infinity, so that no rank misses them.
        if self.layout.rank in self.layout.cuts[name].firsts:
            return scalar
        return torch.where(scalar.isfinite(), torch.zeros_like(scalar), scalar)

    def gather(self, values: PyTree) -> PyTree:
        """Gather a tree of this rank's shards into a tree of whole tensors on every rank."""
        if all(leaf is None for leaf in tree.leaves(values)):
            return values
        return gathered(self.layout, values)

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Warn once that a transform needs all parameters in full, so that every rank gathers them at each step.

        A single rank, or a layout without a process group, gathers nothing.
        """
        if self.layout.size == 1 or self.layout.group is None:
            return
        # Warn once for a transform and its parameters, which are the same on all ranks.
        names = tree.names(params)
        key = (tx.name, tuple(names))
        if key in self._warned:
            return
        self._warned.add(key)
        nbytes = sum([self.layout.specs[name].nbytes for name in names])
        warn_together(
            f"{tx.name} has the locality TREE, so at every step every rank gathers all updates and parameters, "
            f"{nbytes / 2**20:.1f} MiB each, and repeats the same computation. Of muonfx.monitor, leave "
            "out the metric 'orthogonality_error', and call muonfx.diagnose now and then. For a transform of your own, "
            "declare a smaller locality, or add an argument sum_over_leaves to its update if it needs only a sum over "
            "the tree",
            self.layout.group,
        )


@stand_in
def _on_owners(tx: Transform, binding: Binding, state_parameters: StateParameters):
    """Run a transform that needs whole matrices, or neighbours in a chain that do, with each matrix on one rank.

    The rank that computes a matrix is its owner: the matrix is gathered there, updated, and scattered. `stand_in` makes
    a transform like `tx` of the two functions below.
    """

    # Usually there is one stage. But a wrapper may call its inner transform for some parameters, and then for others.
    @functools.cache
    def stage_for(param_names: tuple[str, ...], device: torch.device) -> MatrixStage:
        return _matrix_stage(tx, binding, param_names, device)

    def init(params: PyTree) -> PyTree:
        stage = stage_for(tuple(tree.names(params)), tree.device_of(params))
        return stage.init(params)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Update the matrices of these parameters, which the ranks exchange."""
        call = Arguments(updates, state, params, donate, extras)
        stage = stage_for(tuple(tree.names(call.like)), tree.device_of(call.like))
        return stage.update(call, state_parameters)

    return init, update


def _matrix_stage(
    tx: Transform, binding: Binding, names: Sequence[str], device: torch.device
) -> MatrixStage:
    """Return an object that gathers each matrix on one rank (its owner), and runs a transform or a chain there.

    ``names`` are the parameters whose matrices it updates.
    """
    members = chain_entries(tx) or {tx.name: tx}  # a single transform counts as a chain of one
    plan = binding.plan(tuple(members.items()), names, device)  # has the owner of each matrix
    # An owner may compute some matrices of a stack only.
    tx_on_stacks = tx
    if plan.stacks:
        shapes = {name: plan.specs[name].shape for name in plan.stacks}
        tx_on_stacks = _for_parts_of_stacks(tx, shapes)
    return MatrixStage(plan, tx_on_stacks, tx.reads_params, binding.layout, binding.store)


def _for_parts_of_stacks(tx: Transform, shapes: Mapping[str, tuple[int, ...]]) -> Transform:
    """Return an equal transform or chain that accepts any number of the matrices of each stack.

    If "experts" is a stack of the shape (6, 4, 4), it also updates a part of the shape (2, 4, 4), because an owner may
    compute only two of the six matrices. A plan has such transforms, too, but all transforms of one structure share it,
    so those may have another learning rate. ``shapes`` has the shape of each stack by parameter name.
    """
    if chain_entries(tx) is None:
        return stacked(tx, shapes)[0]
    return with_inner(tx, [stacked(member, shapes)[0] for member in tx.children])


@stand_in
def _on_all(tx: Transform, binding: Binding):
    """Run a transform that needs the whole tree: gather the tree on every rank, and run the transform on it there.

    Every rank computes the same, and then takes its own shards of the result. `stand_in` makes a transform like `tx` of
    the two functions below.
    """
    # A transform may take functions as extra arguments, which sum over the shards of all ranks, for example. Here each
    # rank has whole tensors, as a single process has, so it gets the functions of a single process.
    extras_of_process: dict[str, Any] = {
        "sum_over_leaves": sum_over_leaves,
        "sum_over_shards": lambda values: values,
        "shard": lambda values: values,
    }

    def init(params: PyTree) -> PyTree:
        binding.warn_of_gathering(tx, params)
        # Meta tensors have no values to gather: their whole shapes are enough.
        if tree.device_of(params).type == "meta":
            return tx.functions.init(binding.global_like(params))
        return tx.functions.init(binding.gather(params))

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run ``tx`` on the gathered updates, and return this rank's shards of the result."""
        # 1. The whole updates and, if the caller passed them, the whole parameters.
        whole_updates = binding.gather(updates)
        whole_params: PyTree = None
        if params is not None:
            whole_params = binding.gather(params)
        # 2. The update, as in a single process. The state is whole too, and equal on all ranks. `run` passes only the
        # extra arguments that `tx` takes.
        extras.update(extras_of_process)
        whole_result, new_state = tx.run(whole_updates, state, whole_params, **extras)
        return binding.layout.shard(whole_result), new_state

    return init, update
