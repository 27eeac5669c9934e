"""`sharded`: run a transform on this rank's shards, with the same update as on whole tensors.

All steps, also an optimizer's, are run by `step_sharded`. It first calls `agreed_call`, in which all ranks check
with one all-reduce that they make the same call.

`to_global` and `from_global` convert the state of a sharded transform between the local form, for updates, and the
global form, for checkpoints, in which each leaf records its position in the whole tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, InitAndUpdate, Transform, checks
from muonfx.core.checks import positive_int
from muonfx.core.donation import NOTHING, unshared
from muonfx.core.extras import check_values_of_extras
from muonfx.core.patterns import warn_of_unmatched
from muonfx.core.schedules import Schedule
from muonfx.core.transform import (
    Arguments,
    Declaration,
    Outermost,
    check_extras,
    patterns_in,
    require_transform,
    within,
    without_left_out,
)
from muonfx.core.value import Memory, make_factory, with_memory
from muonfx.internal.tracing import without_transforms
from muonfx.placement.bucketed import require_room
from muonfx.placement.offload import inner_of, store_of
from muonfx.placement.placed import ApplyToParams
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.sharding.binding import Binding, Progress, by_structure
from muonfx.sharding.communication.agree import (
    agree,
    agree_on_leaves,
    comparable,
    comparable_numbers,
    errors_on_all_ranks,
)
from muonfx.sharding.communication.differences import Facts
from muonfx.sharding.communication.missing_gradients import complete_gradients
from muonfx.sharding.communication.replicas import (
    verify_extras,
    verify_params,
    verify_state,
    warn_of_gradients,
)
from muonfx.sharding.communication.waiting import CONSTRUCTING, construction, wait_for_all
from muonfx.sharding.digests import digest
from muonfx.sharding.facts import NUMBERS, facts_of_transforms, verify_ranks
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import Replicas, Settings
from muonfx.sharding.shards.dtensors import (
    are_plain,
    is_dtensor,
    local_tree,
    require_no_transform,
    require_shards,
    to_dtensors,
    unplaced_shards,
)
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.remembered import remembered
from muonfx.sharding.shards.table import require_layout
from muonfx.sharding.state import describe_state, global_state, local_state, state_to_dtensors
from muonfx.tree import PyTree

P = ParamSpec("P")


class Sharded(Outermost):
    """A transform that runs on this rank's shards, as `sharded` returns it. Errors are raised on all ranks.

    It stays outermost, because the ranks agree on a step before any transform runs.
    """

    @property
    def layout(self) -> Layout:
        """The `Layout` that was passed to `sharded`: which shard of each parameter each rank holds."""
        return self.arguments["layout"]

    def init(self, params: PyTree) -> PyTree:
        """Return this rank's optimizer state, for this rank's shards of the parameters.

        All ranks must call this together, unless ``params`` are meta tensors.
        """
        return self.functions.init(params)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: bool | Donation = False,
        **extras: Any,
    ) -> tuple[PyTree, PyTree]:
        """Return this rank's shards of the updates, and this rank's next state. All ranks must call this together."""
        return self.functions.update(updates, state, params, donate=donate, check=True, **extras)


def _factory(constructor: Callable[P, InitAndUpdate]) -> Callable[P, Transform]:
    """Decorate the function `sharded`, so that its result has the inner transform's hyperparameters and state."""
    return make_factory(Sharded, constructor, Declaration(), is_stand_in=True)


@_factory
@with_memory
def sharded(
    _memory: Memory,
    tx: Transform,
    layout: Layout,
    *,
    replicas: Replicas = "auto",
    bucket_bytes: int = 1 << 28,
):
    """Build a transform that runs ``tx`` on this rank's shards, with the same update as ``tx`` on whole tensors.

    After a gather, the updates equal the updates of ``tx`` in one process: bit for bit if the same kernels run on the
    same matrices, else up to rounding. Elementwise transforms run on the local shards. Each matrix is gathered on one
    rank, computed there once, and scattered back. Sums over the tree, such as a global norm, run over all ranks.

    Args:
        tx: any transform. The result has the same hyperparameters, structure of the state, and fingerprint (the hash
            by which a checkpoint identifies a transform).
        layout: the layout of the parameters.
        replicas: which ranks compute a matrix that all ranks hold. "split": one rank, which sends the result to the
            others. "everyone": every rank, without communication. "auto": the faster of the two.
        bucket_bytes: the approximate memory for one exchange of matrices, message buffers included. A matrix that
            needs more is sent alone.

    Returns:
        A transform on trees of local tensors or of DTensors. For DTensor parameters, the updates and the state of
        these parameters are DTensors too, if their placement can be expressed.

    Raises:
        TypeError: ``tx`` is not a transform or ``layout`` is not a layout.
        ValueError: ``replicas`` or ``bucket_bytes`` has an unknown value.

    The communication follows Dion (arXiv 2504.05295) and distributed Muon (arXiv 2502.16982), but needs no padding and
    supports every layout.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
        >>> layout = mfx.sharding.zero(params, 1, partition="flat")
        >>> tx = sharded(mfx.muon_with_adamw(2e-3, labels={"w": "muon", "b": "adamw"}), layout)
        >>> local = layout.shard(params)
        >>> updates, state = tx.update(mfx.tree.map(torch.ones_like, local), tx.init(local), local)
        >>> layout.gather(updates)["w"].shape
        torch.Size([4, 4])
    """
    require_transform("tx", tx)
    if isinstance(tx, Sharded):
        raise TypeError(
            "tx: found a sharded transform, expected a transform for whole tensors: pass tx.arguments['tx']"
        )
    require_layout(layout)
    # An error is reported to the other ranks, which may wait for this one.
    with construction(lambda: layout.group):
        positive_int("bucket_bytes", bucket_bytes)
    settings = Settings(replicas, bucket_bytes)
    inner = inner_of(tx)  # without offload
    binding = bind(layout, settings, store_of(tx))

    # A compiled graph cannot contain the collectives of these functions, so torch.compile skips them. A call of one of
    # them inside a transform of torch.func, such as `grad`, is an error, which all ranks raise together.

    @torch.compiler.disable
    def init(params: PyTree) -> PyTree:
        """Return this rank's initial state, with DTensors if the parameters are DTensors."""
        params = without_left_out(tx, params)
        if _are_all_meta(params):  # the state has shapes only, and nothing is sent
            local = local_tree(params)
            binding.remember_shapes(inner, local)
            return binding.init(inner, local)
        progress = _memory.setdefault(_PROGRESS, Progress())
        # An equal transform that is built again for a later step, without `init`, continues with this progress.
        binding.progress_of[inner.treedef] = progress
        state = init_sharded(binding, progress, inner, params)
        if layout.dtensors:
            return state_to_dtensors(binding, inner, params, state)
        return state

    @torch.compiler.disable
    @torch.no_grad()
    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Any = NOTHING,  # checked in the step, so that its error is raised on all ranks
        check: bool = False,  # as in `step_sharded`
        **extras: Any,  # for the transforms, such as ``value=loss``
    ) -> tuple[PyTree, PyTree]:
        """Return this rank's updates and its next state, as DTensors if the updates or parameters are DTensors."""
        progress = _progress_of(_memory, binding, inner)
        if progress.serial is None:  # the first step without `init`
            _wait_for_others(layout)
        # 1. For a model with DTensors, the state as local tensors. The step converts the other arguments.
        with errors_on_all_ranks(layout.group):
            params = without_left_out(tx, params)
            call = Arguments(updates, state, params, donate, extras)
            if layout.dtensors:
                call = call._replace(state=local_state(binding, inner, call.like, state))
        # 2. The step on local tensors.
        out, new_state = step_sharded(binding, progress, inner, call, check=check)
        # 3. DTensors, if the caller uses them.
        is_plain_call = not layout.dtensors or are_plain(
            [*tree.leaves(updates), *tree.leaves(params)]
        )
        if is_plain_call:
            return out, new_state
        out_as_dtensors = to_dtensors(layout, out, updates)
        state_as_dtensors = state_to_dtensors(binding, inner, updates, new_state, state)
        return out_as_dtensors, state_as_dtensors

    return init, update


def _are_all_meta(params: PyTree) -> bool:
    """Return True if there are parameters, and all of them are meta tensors: they have shapes, but no values."""
    tensors = list(tree.tensors(local_tree(params)))
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


_PROGRESS = "progress"
"""The key of the `Progress` of a sharded transform in its memory."""


def sharded_with(
    progress: Progress, tx: Transform, layout: Layout, settings: Settings
) -> Transform:
    """Return ``sharded(tx, layout)`` for an optimizer, which counts its steps itself in `progress`."""
    result = sharded(tx, layout, **settings._asdict())
    result.structure.memory[_PROGRESS] = progress
    return result


def _progress_of(memory: Memory, binding: Binding, inner: Transform) -> Progress:
    """Return the object that counts the steps of a sharded transform. The ranks compare the count in each step.

    Usually `init` has stored it in the `memory` of the transform. But a training loop may build an equal transform for
    each step, ``sharded(muon(rate), layout)``, and call `init` of the first only. The others continue the count of the
    first. `binding` has it by the structure of the `inner` transform, which is equal for all rates.
    """
    # `init` was called for this very transform, or an optimizer counts its steps
    if _PROGRESS in memory:
        return memory[_PROGRESS]
    # Without any `init`, for example with a loaded state, the count starts here.
    return binding.progress_of.setdefault(inner.treedef, Progress())


def init_sharded(binding: Binding, progress: Progress, tx: Transform, params: PyTree) -> PyTree:
    """Return this rank's initial state. Raise on all ranks if one has an error, or if transforms or parameters differ.

    If a rank raised alone, the other ranks would wait for it in their next message.
    """
    layout = binding.layout
    # 1. All ranks arrive, and have the same transform and parameters.
    _wait_for_others(layout)
    with errors_on_all_ranks(layout.group):
        require_no_transform("init of a sharded transform", params)
        warn_of_unmatched(patterns_in(tx), params)  # raises if this rank turns warnings into errors
    with without_transforms():
        verify_ranks(binding, tx, params)
        # 2. The state. Its errors, such as of a full disk, may be on this rank only.
        local = local_tree(params)
        with errors_on_all_ranks(layout.group):
            state = binding.init(tx, local)
        if layout.group is not None and layout.size > 1:
            agree("init of a sharded transform", layout.group)  # receives the error of another rank
        verify_params(layout, local)
    # 3. No rank has an error. This transform gets the next number, 1, 2, ..., which the ranks compare at every step.
    progress.begin(_next_serial(layout), state)
    return state


def step_sharded(
    binding: Binding,
    progress: Progress,
    tx: Transform,
    call: Arguments,
    *,
    check: bool = False,
    apply_to_params: ApplyToParams | None = None,
) -> tuple[PyTree, PyTree]:
    """Run one step on this rank's shards. Return its updates and next state. If a rank has an error, all raise.

    Args:
        binding: runs transforms over the ranks; transforms and optimizers of one layout share it.
        progress: counts the steps of this transform or optimizer alone.
        tx: the transform for whole tensors, with its current hyperparameters.
        call: the arguments of `update`. Their leaves may be DTensors.
        check: True to compare the trees of the arguments, and to copy tensors that the new state shares with a kept old
            state.
        apply_to_params: adds the updates to the parameters bucket by bucket, as in `muonfx.placement.placed`.
    """
    layout = binding.layout
    with errors_on_all_ranks(layout.group):
        require_no_transform("update of a sharded transform", call)
    with without_transforms():
        # 1. The ranks exchange errors, and a hash of the call. If they differ, all ranks raise. `local` is the same
        # call with local tensors in place of DTensors. A gradient that is None here, but not on another rank, is filled
        # in.
        local = agreed_call(binding, progress, tx, call, check=check)
        progress.has_lacked_gradients = all(leaf is None for leaf in tree.leaves(local.updates))
        # 2. A donated tensor that another argument also contains would be overwritten too early: it is copied first.
        donate, updates, state = unshared(local.donate, local.updates, local.state, local.params)
        extras = dict(local.extras)
        if apply_to_params is not None:
            extras["apply_to_params"] = apply_to_params
        # 3. The transform in the form that runs on shards. It is found by the names and shapes of `local.like`, which
        # is the parameters or, without them, the updates.
        local_tx = binding.placed(tx, local.like)
        out, new_state = local_tx.run(updates, state, local.params, donate=donate, **extras)
        # 4. A new state may contain tensors of the old one. If the caller keeps the old state, and donates the new one
        # in the next step, these would be overwritten.
        keeps_old_state = check and not local.donate.state
        if keeps_old_state:
            new_state = tree.copy_shared(new_state, local.state)
    # After an error on this rank alone, the step is not counted: the next step then finds that the ranks differ.
    progress.completed += 1
    return out, new_state


@remembered
def bind(layout: Layout, settings: Settings, store: Store) -> Binding:
    """Return the `Binding`, which runs transforms over the ranks of a layout with these settings."""
    return Binding(layout, settings, store)


_serials: Counter[str] = Counter()
"""How many sharded transforms and optimizers have been created for each process group, by the group's name."""


def _next_serial(layout: Layout) -> int:
    """Count the sharded transforms and optimizers of a process group, and return the next number: 1, 2, ..."""
    name = "" if layout.group is None else layout.group.group_name
    _serials[name] += 1
    return _serials[name]


def _wait_for_others(layout: Layout) -> None:
    """Wait until all ranks of a layout construct a sharded transform or optimizer, or make its first step.

    If a rank never arrives, the error names it; the next collective would only time out.
    """
    if layout.group is not None and layout.size > 1:
        wait_for_all(layout.group, CONSTRUCTING)


# ----------------------------------------------------------------------------------------- what must be equal in a step


def agreed_call(
    binding: Binding,
    progress: Progress,
    tx: Transform,
    call: Arguments,
    *,
    check: bool,
) -> Arguments:
    """Check that all ranks make the same call of `update`. Return its arguments with local tensors for DTensors.

    Args:
        binding: runs transforms over the ranks of a layout.
        progress: counts the steps of this transform or optimizer alone.
        tx: the transform that is stepped.
        call: this rank's arguments. A gradient that is None here but not on other ranks is filled in.
        check: True to compare the trees of the arguments with each other.
    """
    layout = binding.layout
    if layout.group is None or layout.size == 1:
        local, _ = _checked_call(binding, tx, call, check=check)
        return local
    # 1. In a first step without `init`, which would have compared them: the transform and the parameters are the same.
    if progress.serial is None:
        verify_ranks(binding, tx, call.like)
        progress.serial = _next_serial(layout)
    # 2. In every step: the arguments of this rank are correct. `unplaced` are the names of gradients that are partial
    # sums, for example, which are not sharded like their parameters.
    with errors_on_all_ranks(layout.group):
        local, unplaced = _checked_call(binding, tx, call, check=check)
        facts = _facts_of_step(binding, progress, tx, local)
    # 3. In every step, with one all-reduce: the ranks make the same call.
    agreement = agree_on_leaves(
        "a step",
        local.updates,
        layout,
        unplaced=unplaced,
        same=facts,
        explain=lambda: _facts_as_texts(binding, tx, local, facts),
        # If one rank must compare replicas, all ranks do.
        request=progress.needs_verification(local.state),
    )
    # 4. In the first step after `init` or a load on any rank: the replicas have equal values.
    if agreement.is_requested:
        _verify_replicas(binding, tx, local)
        # From now on, the first gradient of each parameter is compared, too.
        progress.lacking = frozenset(tree.names(local.updates))
    # 5. Complete the gradients that are None on some ranks, or partial sums.
    if agreement.missing or unplaced:
        completed = complete_gradients(
            layout, call.updates, agreement.missing, tree.device_of(local.like)
        )
        local = local._replace(updates=completed)
    # 6. Until each parameter has had a gradient: replicas have equal first gradients.
    if progress.lacking:
        _compare_first_gradients(progress, layout, local.updates)
    progress.verified(local.state)
    return local


def _verify_replicas(binding: Binding, tx: Transform, local: Arguments) -> None:
    """Raise on all ranks if replicas of the parameters, of the state or of an extra argument differ.

    Gradients are compared later: each in the first step in which it is not None.
    """
    layout = binding.layout
    if local.params is not None:
        verify_params(layout, local.params)
    verify_state(binding, tx, local.like, local.state)
    verify_extras(layout, _equal_leaves_of_extras(tx, local.extras))


def _compare_first_gradients(progress: Progress, layout: Layout, updates: PyTree) -> None:
    """Warn if replicas of a parameter have different gradients in the first step in which it has one.

    This may be a later step than the first: `DistributedDataParallel` does not reduce the gradients of parameters that
    were frozen when it wrapped the model, and are unfrozen later.
    """
    first_gradients: dict[str, Tensor] = {}
    for name, gradient in tree.named_leaves(updates):
        if gradient is not None and name in progress.lacking:
            first_gradients[name] = gradient
    if first_gradients:
        warn_of_gradients(layout, first_gradients)
        progress.lacking = progress.lacking.difference(first_gradients)


def _checked_call(
    binding: Binding, tx: Transform, call: Arguments, *, check: bool
) -> tuple[Arguments, list[str]]:
    """Return this rank's arguments of `update` with local tensors. Raise if they are wrong.

    Also return the names of the gradients with other DTensor placements than their parameters, such as Partial. With
    `check`, the trees of updates, params and state are compared with each other too.
    """
    # 1. Local tensors in place of DTensors.
    updates = local_tree(call.updates)
    params = local_tree(call.params)
    local = Arguments(updates, call.state, params, Donation.of(call.donate), call.extras)
    # 2. The names of extra arguments, such as "value"; the dtypes, the shards and the trees.
    check_extras(tx, call.extras)
    _require_plain_extras(call.extras)
    checks.check_floating("updates", local.updates)
    unplaced = unplaced_shards(binding.layout, call.updates)
    if check:
        _check_trees(binding, tx, call, local)
    # 3. The values of extra arguments, which some of the transforms within `tx` check.
    if call.extras:
        transforms = [visited.tx for visited in binding.visits(tx, local.like)]
        check_values_of_extras(transforms, call.extras)
    # 4. Room for a new state on the disk, if it is offloaded.
    if binding.store != IN_MEMORY:
        require_room(binding.store, local.state, local.like, local.donate)
    # For conversions of the state, such as `to_global`, that are called without parameters.
    binding.remember_shapes(tx, local.like)
    return local, unplaced


def _require_plain_extras(extras: Mapping[str, Any]) -> None:
    """Raise TypeError if an extra argument has a DTensor: it cannot be computed with this rank's local tensors."""
    for name, leaf in tree.named_leaves(dict(extras)):
        if is_dtensor(leaf):
            raise TypeError(
                f"the extra argument {name}: found a DTensor, expected a tensor that is equal on all ranks: pass "
                "full_tensor() of it. A transform takes its shards of a whole tree with the extra argument shard"
            )


def _check_trees(binding: Binding, tx: Transform, call: Arguments, local: Arguments) -> None:
    """Raise unless parameters, updates and state fit the layout and each other. `local` is `call` without DTensors."""
    if call.params is not None:
        require_shards(binding.layout, call.params)
        checks.check_updates_fit(local.params, local.updates)
    # Without parameters, the dtypes of the state are unknown.
    with_dtypes = local.params is not None
    binding.check_state(tx, local.like, local.state, with_dtypes=with_dtypes)


# The subjects of the facts of a step, as errors name them. Some have advice in parentheses.
_TRANSFORMS = "transforms and their arguments"
_ORDER = (
    "sharded transforms or optimizers in this step (all ranks must step them in the same order)"
)
_COMPLETED = (
    "numbers of completed steps (a rank has gone on after an error inside its step, so its parameters and state are "
    "old: load one checkpoint on all ranks)"
)
_EXTRAS = "extra arguments, such as value=loss; reduce them first"
_DTYPES = "dtypes of parameters (convert the model on all ranks, or on none)"
_HAS_PARAMS = "arguments: some give params, some do not"
_LOADS = "states (load on all ranks, or on none)"
_COUNTERS = "numbers in their states"


class _PreparedFacts(NamedTuple):
    """The values that `_facts_of_step` needs in every step. They are computed in the first step of a transform only."""

    transforms: str
    """The digest of `facts_of_transforms`."""
    state_size: int
    """The number of leaves of the state."""
    counter_indices: dict[str, int]
    """The index in the state of each leaf without a parameter, such as a counter: ``{"2.scale_by_adam.count": 4}``."""


def _facts_of_step(binding: Binding, progress: Progress, tx: Transform, call: Arguments) -> Facts:
    """Return the values that must be equal on all ranks in a step, by the subject that an error names.

    For example, ``{"numbers in their chains": {"muon.momentum": 0.95}, "numbers of completed steps ...": 7, ...}``. The
    ranks compare one hash of all values. If rank 1 has another momentum, the error is "the ranks have different numbers
    in their chains: ...".

    Args:
        binding: runs transforms over the ranks.
        progress: counts the steps of the transform or optimizer that is stepped.
        tx: the transform with its current numbers.
        call: the arguments of the step, with local tensors.
    """
    prepared = _prepare_facts(binding, tx, call.like)  # computed once, for all steps
    counters = _leaves_without_parameter(prepared, call.state)
    step = _step_of(counters, progress)
    schedules = _values_of_schedules(tx, step)
    loaded = "loaded" if progress.has_loaded else "not loaded"
    return {
        # The transform, and how often it was stepped.
        _TRANSFORMS: prepared.transforms,
        _ORDER: f"number {progress.serial} of the group",
        _HAS_PARAMS: call.params is not None,
        _DTYPES: _digest_of_dtypes(binding, call.params),
        _LOADS: f"{loaded} since the last step",
        _COMPLETED: progress.completed,
        # The numbers with which it computes this step.
        NUMBERS: {**comparable_numbers(tx), **schedules},
        _EXTRAS: _comparable_extras(tx, call.extras),
        _COUNTERS: {name: comparable(counter) for name, counter in counters.items()},
    }


def _step_of(counters: Mapping[str, Any], progress: Progress) -> int:
    """Return the number of the step at which schedules are compared: the largest counter of the state.

    Without counters, it is the number of completed steps.
    """
    host_counters = filter(is_host_counter, counters.values())
    return max(map(int, host_counters), default=progress.completed)


def _facts_as_texts(binding: Binding, tx: Transform, call: Arguments, facts: Facts) -> Facts:
    """Return `_facts_of_step` for an error, with the texts of which it has digests. Called only if the ranks differ."""
    dtypes = {
        name: str(leaf.dtype) for name, leaf in tree.named_leaves(call.params) if leaf is not None
    }
    return {**facts_of_transforms(binding, tx, call.like), **facts, _DTYPES: dtypes}


@by_structure  # remembers the result for the next steps
def _prepare_facts(binding: Binding, tx: Transform, params: PyTree) -> _PreparedFacts:
    """Return the values that `_facts_of_step` needs in every step: a digest of transforms, and the indices of counters.

    The digest is a short hash, which ranks compare in place of long texts. The values of counters change in each step,
    but not where they are in the state.
    """
    # For each leaf of the state, the parameter to which it belongs.
    placements = describe_state(binding, tx, params)
    counter_indices: dict[str, int] = {}
    for index, placement in enumerate(placements):
        if placement is not None and placement.name is None:  # the leaf belongs to no parameter
            counter_indices[placement.path] = index
    transforms = digest(facts_of_transforms(binding, tx, params))
    return _PreparedFacts(transforms, len(placements), counter_indices)


def _digest_of_dtypes(binding: Binding, params: PyTree) -> str:
    """Return a hash of the dtypes of parameters. The binding stores it, because most steps have the same dtypes."""
    dtypes = tuple([getattr(leaf, "dtype", None) for leaf in tree.leaves(params)])
    if dtypes not in binding.dtype_digests:
        binding.dtype_digests[dtypes] = digest(dtypes)
    return binding.dtype_digests[dtypes]


def _leaves_without_parameter(prepared: _PreparedFacts, state: PyTree) -> dict[str, Any]:
    """Return the leaves of a state that belong to no parameter, such as ``{"2.scale_by_adam.count": tensor(7)}``.

    A wrong state, with another number of leaves than `init` returns, is no error here: it may be on this rank only. If
    so, the ranks differ in the text "5 leaves", which is compared in place of the counters, and all of them raise.
    """
    leaves = tree.leaves(state)
    is_of_another_transform = len(leaves) != prepared.state_size
    if is_of_another_transform:
        return {"": f"{len(leaves)} leaves"}
    return {name: leaves[index] for name, index in prepared.counter_indices.items()}


def _values_of_schedules(tx: Transform, step: int) -> dict[str, float]:
    """Return the value of each schedule in the arguments of a transform, at a step.

    For example, ``{"3.scale_by_learning_rate.learning_rate": 0.02}``.
    """
    if "schedules" not in tx.derived:  # a dict that is kept for the next steps
        tx.derived["schedules"] = _find_schedules(tx)
    schedules = tx.derived["schedules"]
    count = torch.tensor(float(step), dtype=torch.float64)
    return {name: float(schedule(count)) for name, schedule in schedules.items()}


def _find_schedules(tx: Transform) -> dict[str, Callable[[Tensor], Any]]:
    """Return the schedules among the arguments of a transform and of those that it calls, by their names.

    A name is the number of the transform, its name and the argument: "3.scale_by_learning_rate.learning_rate".
    """
    schedules: dict[str, Callable[[Tensor], Any]] = {}
    for index, inner in enumerate(within(tx)):
        # Each argument has the names of its types, such as {"float", "Schedule"}.
        types_of = inner.factory.definition.accepted_types
        for name, value in inner.arguments.items():
            # A function is a schedule if its argument may be one: ``learning_rate=lambda step: 0.1 / (1 + step)``.
            is_function_as_schedule = callable(value) and "Schedule" in types_of[name]
            if isinstance(value, Schedule) or is_function_as_schedule:
                full_name = f"{index}.{inner.name}.{name}"
                schedules[full_name] = value
    return schedules


def is_host_counter(leaf: object) -> bool:
    """Return True for a 0-d int64 tensor on the CPU, which can be read without waiting for a device."""
    return (
        isinstance(leaf, Tensor)
        and leaf.dtype == torch.int64
        and not leaf.ndim
        and leaf.device.type == "cpu"
    )


def _comparable_extras(tx: Transform, extras: Mapping[str, Any]) -> dict[str, object]:
    """Return a value for ranks to compare for each leaf of the extra arguments, by its name.

    For ``value=0.5`` and ``hessian={"w": tensor}`` it is ``{"hessian.w": "a tensor (100,) of torch.float32",
    "value": 0.5}``. Where the values may differ between ranks, the ranks compare shapes and dtypes only.
    """
    equal_leaves = _equal_leaves_of_extras(tx, extras)
    texts: dict[str, object] = {}
    # Sorted: ranks may pass them in different orders.
    for name, leaf in tree.named_leaves(dict(extras)):
        if name in equal_leaves:
            texts[name] = comparable(leaf)
        else:
            texts[name] = _kind_of_leaf(leaf)
    return texts


def _equal_leaves_of_extras(tx: Transform, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the extra arguments that must be equal on all ranks, by a name such as "hessian.w".

    A transform that takes ``max_over_ranks``, such as `qk_clip`, reduces its other arguments over ranks. They may
    differ, unless another transform reads them without reducing them.
    """
    if not extras:  # as in most steps
        return {}
    reduced: set[str] = set()
    not_reduced: set[str] = set()
    for inner in within(tx):
        reduces_over_ranks = "max_over_ranks" in inner.extras.named
        if reduces_over_ranks:
            reduced |= inner.extras.named
        else:
            not_reduced |= inner.extras.named
    may_differ = reduced - not_reduced
    equal_extras = {name: value for name, value in extras.items() if name not in may_differ}
    return dict(tree.named_leaves(equal_extras))


def _kind_of_leaf(leaf: object) -> object:
    """Return the shape and dtype of a tensor as one tuple, or the name of the type of another value."""
    if isinstance(leaf, Tensor):
        return *leaf.shape, leaf.dtype
    return type(leaf).__qualname__


# --------------------------------------------------------------------------------------------------- global states


def to_global(tx: Transform, state: PyTree, params: PyTree = None) -> PyTree:
    """Convert this rank's state for a checkpoint, so that each leaf stores its position in the whole tensor.

    It needs no communication. `muonfx.checkpoint.save` calls this if it is given ``tx``. The checkpoint then has the
    names and whole tensors of a single process, and loads under any layout and number of ranks.

    Args:
        tx: a transform that `sharded` built.
        state: this rank's state. A state that is already converted is returned unchanged.
        params: this rank's parameters; needed if ``tx`` has not been used yet.

    Returns:
        A tree like the state. Its leaves are `torch.distributed.tensor.DTensor`, `muonfx.checkpoint.FlatShard`, or
        tensors that are equal on all ranks.

    Raises:
        TypeError: ``tx`` is not sharded.
        ValueError: the state does not fit ``tx`` and its layout; the message names a leaf.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(2, 2)}
    >>> layout = mfx.sharding.zero(params, 1, partition="flat")
    >>> tx = mfx.sharding.sharded(mfx.momentum(), layout)
    >>> to_global(tx, tx.init(layout.shard(params))).trace["w"]
    FlatShard(elements 0 to 4 of (2, 2), torch.float32)
    """
    binding, inner, like = binding_of(tx, params)
    if is_global(state):
        return state
    local = local_state(binding, inner, like, state)
    # The state must be one that `init` would return on this rank, for parameters in the containers of the caller, such
    # as nested dicts. They are known from `params`, or from an earlier use of ``tx``.
    checked = local
    has_containers = params is not None or inner.treedef in binding.likes
    if not has_containers:  # then `like` is a flat dict by name
        checked = _in_containers_of(binding.init(inner, like), local)
    binding.check_state(inner, local_tree(like), checked, with_dtypes=False)
    # Each leaf gets its position in the whole tensor, such as "elements 0 to 4".
    return global_state(binding, inner, like, local)


def _in_containers_of(expected: PyTree, state: PyTree) -> PyTree:
    """Return the leaves of a state in the containers of another state with the same names, such as a flat dict.

    A state of nested parameters may have the momentum ``{"layer": {"weight": m}}`` where `expected` has the flat dict
    ``{"layer.weight": ...}``. Return the state unchanged if its leaves have other names, or another order.
    """
    if tree.names(state) != tree.names(expected):
        return state
    # Equal names in equal order: each leaf is put where the leaf of its name is in `expected`.
    _, treedef = tree.flatten(expected)
    return tree.unflatten(treedef, tree.leaves(state))


def from_global(tx: Transform, state: PyTree, params: PyTree = None) -> PyTree:
    """Convert a state in the form of `to_global` to local tensors of this rank, which ``tx.update`` accepts.

    `muonfx.checkpoint.load` calls this if it is given ``tx``. If one rank calls it, all ranks must, because the next
    update then compares the replicas of the state between ranks.

    Args:
        tx: a transform that `sharded` built.
        state: a result of `to_global`, or a loaded state of this form. A local state is returned unchanged.
        params: as in `to_global`.

    Raises:
        TypeError: ``tx`` is not sharded.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(2, 2)}
    >>> layout = mfx.sharding.zero(params, 1, partition="flat")
    >>> tx = mfx.sharding.sharded(mfx.momentum(), layout)
    >>> from_global(tx, to_global(tx, tx.init(layout.shard(params)))).trace["w"]
    tensor([0., 0., 0., 0.])
    """
    # `inner` is the transform for whole tensors, and `like` has the shapes of the parameters.
    binding, inner, like = binding_of(tx, params)
    # A state in this form was usually loaded. So the object that counts the steps of ``tx`` counts from 0 again, and
    # the next update compares the replicas.
    progress = _progress_of(tx.structure.memory, binding, inner)
    progress.load()
    local = local_state(binding, inner, like, state)
    if binding.layout.dtensors:  # the state of parameters that are DTensors consists of DTensors
        return state_to_dtensors(binding, inner, like, local)
    return local


def is_global(values: PyTree) -> bool:
    """Return True if any leaf of a tree is a `FlatShard` (a shard with its position), as `to_global` returns."""
    # A global tree without a FlatShard has DTensors and whole tensors only, which `to_global` leaves unchanged.
    return any(isinstance(leaf, FlatShard) for leaf in tree.leaves(values))


def settings_of(tx: Sharded) -> Settings:
    """Return the arguments ``replicas`` and ``bucket_bytes`` with which `sharded` built a transform."""
    return Settings(*[tx.arguments[name] for name in Settings._fields])


def binding_of(tx: Transform, params: PyTree) -> tuple[Binding, Transform, PyTree]:
    """Return all that is needed to convert a state of a sharded transform, such as ``sharded(offload(muon), layout)``.

    Returns:
        The `Binding`, which runs transforms over the ranks of the layout; the transform for whole tensors, ``muon``;
        and `params` or, if they are None, meta tensors in the shapes of this rank's shards.
    """
    if not isinstance(tx, Sharded):
        raise TypeError(
            f"tx: found {tx!r}, expected a transform that muonfx.sharding.sharded returned"
        )
    inner_or_offloaded = tx.arguments["tx"]
    inner = inner_of(inner_or_offloaded)
    # Between steps, the state is in memory, or where `offload` puts it.
    store = store_of(inner_or_offloaded)
    binding = bind(tx.layout, settings_of(tx), store)
    if params is None:
        params = binding.shapes_of_params(inner)
    return binding, inner, params
