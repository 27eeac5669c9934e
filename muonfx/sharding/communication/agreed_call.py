"""The checks before a call over ranks: the transform, the layout and the state at the first step, each call later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from muonfx import tree
from muonfx.core import Donation, Transform, checks
from muonfx.core.transform import check_extras
from muonfx.core.visit import check_resolved_extras
from muonfx.placement.arguments import Arguments, meta_like
from muonfx.placement.bucketed import require_room
from muonfx.placement.store import IN_MEMORY
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.communication.agree import agree, agree_on_leaves
from muonfx.sharding.communication.differences import Facts
from muonfx.sharding.communication.missing_gradients import complete_gradients
from muonfx.sharding.communication.replicas import verify_params, verify_state, warn_of_gradients
from muonfx.sharding.communication.waiting import CONSTRUCTING, wait_for_all
from muonfx.sharding.digests import digest
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.facts import facts_of_binding, facts_of_dtypes, facts_of_step, facts_of_transforms
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import PLAIN, local_of, local_tree
from muonfx.sharding.shards.local_leaves import LocalLeaves, local_leaves
from muonfx.tree import PyTree


def agreed_call(
    binding: Binding,
    progress: Progress,
    tx: Transform,
    call: Arguments,
    *,
    check: bool,
    problem: Exception | None = None,
) -> Arguments:
    """Check that all ranks make the same call of `update`. Return its arguments with local tensors for DTensors.

    A gradient that is None here but not on other ranks is filled in. If a rank has an error, or passes a `problem`, all
    ranks raise. `progress` belongs to the transform or optimizer that is stepped.
    """
    layout = binding.layout
    if layout.group is None or layout.size == 1:
        if problem is not None:
            raise problem
        leaves, treedef = tree.flatten(call.updates)
        return _checked_call(binding, tx, call, tree.names(call.updates), leaves, treedef, check=check).call
    if progress.serial is None:
        verify_ranks(binding, tx, call.like, problem)
        progress.serial = next_serial(layout)
    leaves, treedef = tree.flatten(call.updates)
    names = tree.names(call.updates)
    local = call
    gradients = LocalLeaves(leaves, [])
    facts: Facts = {}
    try:
        if problem is not None:
            raise problem
        local, gradients = _checked_call(binding, tx, call, names, leaves, treedef, check=check)
        facts = facts_of_step(binding, progress, tx, local)
    except Exception as error:  # perhaps on this rank only: raised on all ranks together
        problem = error
    agreement = agree_on_leaves(
        "a step",
        names,
        gradients.tensors,
        layout,
        problem,
        unplaced=gradients.unplaced,
        same=facts,
        explain=lambda: {**facts_of_transforms(binding, tx, local.like), **facts, **facts_of_dtypes(local.params)},
        request=progress.needs_verification(local.state),
    )
    if agreement.is_requested:
        if local.params is not None:
            verify_params(layout, local.params)
        verify_state(binding, tx, local.like, local.state)
    if agreement.missing or gradients.unplaced:
        completed = complete_gradients(layout, names, leaves, agreement, tree.device_of(local.like))
        local = local._replace(updates=tree.unflatten(treedef, completed))
    if agreement.is_requested:
        warn_of_gradients(layout, local.updates)
    progress.verified(local.state)
    return local


class _CheckedCall(NamedTuple):
    """A call whose arguments have been checked on this rank."""

    call: Arguments
    """The call with local tensors in place of DTensors."""
    gradients: LocalLeaves
    """The leaves of its updates."""


def _checked_call(
    binding: Binding,
    tx: Transform,
    call: Arguments,
    names: Sequence[str],
    leaves: Sequence[Any],
    treedef: tree.Structure,
    *,
    check: bool,
) -> _CheckedCall:
    """Check a call's arguments on this rank. `check` also compares the trees of updates, params and state.

    `names`, `leaves` and `treedef` belong to the updates.
    """
    layout = binding.layout
    check_extras(tx, call.extras)
    if not checks.all_usable([local_of(leaf) for leaf in leaves]):
        checks.check_floating("updates", local_tree(call.updates))
    gradients = local_leaves(layout, names, leaves, as_placed=False)
    params = call.params
    if params is not None and check:
        local_leaves(layout, tree.names(params), tree.leaves(params))
    local = call._replace(donate=Donation.of(call.donate))
    if not PLAIN.issuperset(map(type, leaves)):
        local = local._replace(updates=tree.unflatten(treedef, gradients.tensors))
    if layout.dtensors:
        local = local._replace(params=local_tree(params))
    if check:
        _check_trees(binding, tx, local)
    if call.extras:
        check_resolved_extras(binding.visits(tx, local.like), call.extras)
    if binding.store != IN_MEMORY:
        require_room(binding.store, local.state, local.like, local.donate)
    if tx.treedef not in binding.likes:
        binding.likes[tx.treedef] = meta_like(local.like)
    return _CheckedCall(local, gradients)


def _check_trees(binding: Binding, tx: Transform, local: Arguments) -> None:
    """Raise unless updates fit the parameters and the state fits both. All have local tensors."""
    if local.params is not None:
        checks.check_updates_fit(local.params, local.updates)
    leaves = tree.leaves(local.params if local.params is not None else local.updates)
    if any(leaf is None for leaf in leaves):
        return
    dtypes = tuple([leaf.dtype for leaf in leaves])
    expected = binding.once(
        ("state", tx.treedef, tuple(tree.names(local.updates)), dtypes),
        lambda: checks.ExpectedState.of(binding.init(tx, meta_like(local.like))),
    )
    checks.check_state_like(tx.name, local.state, expected, with_dtypes=local.params is not None)


_serials: dict[str, int] = {}
"""How many sharded transforms and optimizers have been created for each process group, by the group's name."""


def next_serial(layout: Layout) -> int:
    """Count the sharded transforms and optimizers of a process group, and return the next number: 1, 2, ..."""
    name = "" if layout.group is None else layout.group.group_name
    _serials[name] = _serials.get(name, 0) + 1
    return _serials[name]


def verify_ranks(binding: Binding, tx: Transform, params: PyTree, problem: Exception | None = None) -> None:
    """Raise on all ranks unless all have the same transform, parameters, layout, settings and package versions.

    `init` calls this, and the first step of a transform without `init`. All ranks call it together. `problem` is an
    error that this rank already has. Ranks with an error report it to the others instead of returning early, because
    the others would wait for them.
    """
    layout = binding.layout
    facts: Facts = {}
    if layout.size > 1 and layout.group is None:
        raise ShardingError(
            f"{layout!r} was created with a number of ranks and has no process group, expected a process group: create "
            "it in the running job, after init_process_group. Without a group it supports plan_for and inspection only"
        )
    try:
        checks.check_params(params)
        local_leaves(layout, tree.names(params), tree.leaves(params))
        local = local_tree(params)
        binding.likes[tx.treedef] = meta_like(local)
        if layout.size > 1 and problem is None:  # one rank has no other to compare the facts with
            facts = facts_of_binding(binding, tx, local)
    except Exception as error:  # perhaps on this rank only: raised on all ranks together
        problem = problem or error
    if layout.group is not None and layout.size > 1:
        wait_for_all(layout.group, CONSTRUCTING)  # names a rank that never arrives; the collective would only time out
        agree("binding a transform to a layout", layout.group, problem, same=digest(facts), explain=lambda: facts)
    elif problem is not None:
        raise problem
