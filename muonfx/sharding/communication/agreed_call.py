"""The checks before a call over ranks: the transform, the layout and the state at the first step, each call later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform, checks
from muonfx.core.extras import check_values_of_extras
from muonfx.core.transform import check_extras
from muonfx.placement.arguments import Arguments, meta_like
from muonfx.placement.bucketed import require_room
from muonfx.placement.store import IN_MEMORY
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.communication.agree import agree, agree_on_leaves, errors_on_all_ranks, require_group
from muonfx.sharding.communication.missing_gradients import complete_gradients
from muonfx.sharding.communication.replicas import verify_extras, verify_params, verify_state, warn_of_gradients
from muonfx.sharding.communication.waiting import CONSTRUCTING, wait_for_all
from muonfx.sharding.facts import equal_leaves_of_extras, facts_as_texts, facts_of_binding, facts_of_step
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import is_dtensor, local_tree, require_shards, unplaced_shards
from muonfx.sharding.state import check_state
from muonfx.tree import PyTree


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
    # 1. In the first step without `init`: the ranks have the same transform and parameters.
    if progress.serial is None:
        verify_ranks(binding, tx, call.like)
        progress.serial = next_serial(layout)
    # 2. In every step: the arguments of this rank are correct.
    with errors_on_all_ranks(layout.group):
        local, unplaced = _checked_call(binding, tx, call, check=check)
        facts = facts_of_step(binding, progress, tx, local)
    # 3. In every step, with one all-reduce: the ranks make the same call.
    agreement = agree_on_leaves(
        "a step",
        local.updates,
        layout,
        unplaced=unplaced,
        same=facts,
        explain=lambda: facts_as_texts(binding, tx, local, facts),
        request=progress.needs_verification(local.state),  # if one rank must compare replicas, all ranks do
    )
    # 4. In the first step after `init` or a load on any rank: the replicas have equal values.
    if agreement.is_requested:
        _verify_replicas(binding, tx, local)
        progress.lacking = frozenset(tree.names(local.updates))
    # 5. Gradients that are None on some ranks, or partial sums, are completed. Replicas should then have equal ones.
    if agreement.missing or unplaced:
        completed = complete_gradients(layout, call.updates, agreement, tree.device_of(local.like))
        local = local._replace(updates=completed)
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
    verify_extras(layout, equal_leaves_of_extras(tx, local.extras))


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


def _checked_call(binding: Binding, tx: Transform, call: Arguments, *, check: bool) -> tuple[Arguments, list[str]]:
    """Return this rank's arguments of `update` with local tensors. Raise if they are wrong.

    Also return the names of the gradients with other DTensor placements than their parameters, such as Partial. With
    `check`, the trees of updates, params and state are compared with each other too.
    """
    updates = local_tree(call.updates)
    params = local_tree(call.params)
    local = Arguments(updates, call.state, params, Donation.of(call.donate), call.extras)
    check_extras(tx, call.extras)
    _require_plain_extras(call.extras)
    checks.check_floating("updates", local.updates)
    unplaced = unplaced_shards(binding.layout, call.updates)
    if check:
        _check_trees(binding, tx, call, local)
    if call.extras:
        transforms = [visited.tx for visited in binding.visits(tx, local.like)]
        check_values_of_extras(transforms, call.extras)
    if binding.store != IN_MEMORY:
        require_room(binding.store, local.state, local.like, local.donate)
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
    with_dtypes = local.params is not None  # without parameters, the dtypes of the state are unknown
    check_state(binding, tx, local.like, local.state, with_dtypes=with_dtypes)


_serials: Counter[str] = Counter()
"""How many sharded transforms and optimizers have been created for each process group, by the group's name."""


def next_serial(layout: Layout) -> int:
    """Count the sharded transforms and optimizers of a process group, and return the next number: 1, 2, ..."""
    name = "" if layout.group is None else layout.group.group_name
    _serials[name] += 1
    return _serials[name]


def wait_for_others(layout: Layout) -> None:
    """Wait until all ranks of a layout construct a sharded transform or optimizer, or make its first step.

    If a rank never arrives, the error names it; the next collective would only time out.
    """
    if layout.group is not None and layout.size > 1:
        wait_for_all(layout.group, CONSTRUCTING)


def verify_ranks(binding: Binding, tx: Transform, params: PyTree) -> None:
    """Raise on all ranks unless all have the same transform, parameters, layout, settings and package versions.

    All ranks call this together after `wait_for_others`, in `init` or in the first step without `init`.
    """
    layout = binding.layout
    if layout.size == 1:
        _checked_parameters(binding, tx, params)
        return
    group = require_group(layout)
    with errors_on_all_ranks(group):
        local = _checked_parameters(binding, tx, params)
        facts = facts_of_binding(binding, tx, local)
    agree("binding a transform to a layout", group, same=facts)


def _checked_parameters(binding: Binding, tx: Transform, params: PyTree) -> PyTree:
    """Raise unless the parameters are this rank's shards. Return them as local tensors."""
    checks.check_params(params)
    require_shards(binding.layout, params)
    local = local_tree(params)
    binding.likes[tx.treedef] = meta_like(local)
    return local
