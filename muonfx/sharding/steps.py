"""Check that all ranks agree: on transform, parameters and layout before the first step, and on every later call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform, checks
from muonfx.core.contract import within
from muonfx.core.identity import text_of
from muonfx.core.precision import kernel_products, product_dtypes
from muonfx.core.recorded import Recorded, parts_of
from muonfx.core.schedules import Schedule
from muonfx.core.visit import check_extras
from muonfx.placement.arguments import Arguments, meta_like
from muonfx.placement.bucketed import require_room
from muonfx.placement.placed import execution_of
from muonfx.placement.store import IN_MEMORY
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.consensus import (
    CONSTRUCTING,
    DTYPES,
    UNPLACED,
    Facts,
    agree,
    agree_on_leaves,
    all_objects,
    check_pieces,
    wait_for_all,
)
from muonfx.sharding.dtensors import is_dtensor, is_placed_like, local_of, local_tree
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import ShardingError, digest
from muonfx.sharding.replicas import send_copies, verify_params, verify_state, warn_of_gradients
from muonfx.sharding.state import describe_state
from muonfx.tree import PyTree

__all__ = ["agreed_call", "next_serial", "verify_ranks"]


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
    many = layout.group is not None and layout.size > 1
    if many and progress.serial is None:
        verify_ranks(binding, tx, call.like, problem)
        progress.serial = next_serial(layout)
    local = call
    facts: Facts = {}
    same: object = ""
    leaves, treedef = tree.flatten(call.updates)
    names = tree.names(call.updates)
    try:
        if problem is not None:
            raise problem
        local = _checked_call(binding, tx, call, names, leaves, check=check)
        if call.extras:
            check_extras(binding.visits(tx, local.like), call.extras)
        if binding.store != IN_MEMORY:
            require_room(binding.store, local.state, local.like, local.donate)
        if tx.treedef not in binding.likes:
            binding.likes[tx.treedef] = meta_like(local.like)
        if many:
            facts = _facts_of_step(binding, progress, tx, local)
            key = ("program", tx.treedef, tuple(tree.names(local.like)))
            same = facts, binding.once(key, lambda: digest(program_facts(binding, tx, local.like)))
    except Exception as error:  # perhaps on this rank only: raised on all ranks together
        problem = error
    if not many:
        if problem is not None:
            raise problem
        return local
    codes, on_some, is_due = agree_on_leaves(
        "a step",
        names,
        leaves,
        layout,
        problem,
        same=same,
        explain=lambda: {**program_facts(binding, tx, local.like), **facts},
        request=progress.needs_verification(local.state),
    )
    if is_due:
        if local.params is not None:
            verify_params(layout, local.params)
        verify_state(binding, tx, local.like, local.state)
    if any(on_some) or max(codes, default=0) > UNPLACED:
        completed = _with_missing_gradients(layout, names, leaves, codes, on_some, tree.device_of(local.like))
        local = local._replace(updates=tree.unflatten(treedef, completed))
    if is_due:
        warn_of_gradients(layout, local.updates)
    progress.verified(local.state)
    return local


def _checked_call(
    binding: Binding, tx: Transform, call: Arguments, names: Sequence[str], leaves: Sequence[Any], *, check: bool
) -> Arguments:
    """Check a call's arguments on this rank. Return them with local tensors. `check` also compares the trees."""
    tx.check_extras(call.extras)
    layout, params = binding.layout, call.params
    # Plain tensors are checked much faster than DTensors, which have the same dtypes.
    checks.check_floating("updates", local_tree(call.updates) if layout.dtensors else call.updates)
    like = check_pieces(layout, names, leaves, as_placed=False)
    updates = tree.unflatten(tree.flatten(call.updates)[1], like)
    if params is not None and check:
        like = check_pieces(layout, tree.names(params), tree.leaves(params))
    if layout.dtensors:
        params = local_tree(params)
    local = call._replace(updates=updates, params=params, donate=Donation.of(call.donate))
    if not check:
        return local
    if params is not None:
        checks.check_updates_fit(params, updates)
    if all(leaf is not None for leaf in like):
        dtypes = tuple([leaf.dtype for leaf in like if leaf is not None])
        expected = binding.once(
            ("state", tx.treedef, tuple(names), dtypes),
            lambda: checks.ExpectedState.of(binding.init(tx, meta_like(local.like))),
        )
        checks.check_state_like(tx.name, call.state, expected, with_dtypes=params is not None)
    return local


_serials: dict[str, int] = {}
"""How many sharded transforms and optimizers have been created for each process group, by the group's name."""


def next_serial(layout: Layout) -> int:
    """Count the sharded transforms and optimizers of a process group, and return the next number: 1, 2, ..."""
    name = "" if layout.group is None else layout.group.group_name
    _serials[name] = _serials.get(name, 0) + 1
    return _serials[name]


def _facts_of_step(binding: Binding, progress: Progress, tx: Transform, local: Arguments) -> Facts:
    """Return what must be equal on all ranks in a step, as texts: hyperparameters, extra arguments, counters."""
    in_state, counts = _numbers_of_state(binding, tx, local.state, local.like)
    loaded = "loaded since the last step" if progress.has_loaded else "not loaded since the last step"
    return {
        "sharded transforms or optimizers in this step (all ranks must step them in the same order)": (
            f"number {progress.serial} of the group"
        ),
        "arguments: some give params, some do not": str(local.params is not None),
        "states (load on all ranks, or on none)": loaded,
        "numbers of completed steps (a rank has gone on after an error inside its step, so its parameters and state "
        "are old: load one checkpoint on all ranks)": str(progress.completed),
        "numbers in their chains": numbers_of(tx) | _scheduled(binding, tx, max(counts, default=progress.completed)),
        "extra arguments, such as value=loss; reduce them first": {
            name: _extra(value) for name, value in sorted(local.extras.items())
        },
        "numbers in their states": in_state,
    }


def _extra(value: object) -> str:
    # A transform that takes a mapping, such as `qk_clip`, reduces its values over ranks: they may differ.
    if isinstance(value, Mapping):
        shown = zip(tree.names(value), tree.leaves(value), strict=True)
        return repr({n: (*x.shape, x.dtype) if isinstance(x, Tensor) else type(x).__qualname__ for n, x in shown})
    plain = value is None or isinstance(value, bool | int | float | str | Tensor)
    return number_text(value) if plain else type(value).__qualname__


def _scheduled(binding: Binding, tx: Transform, count: int) -> dict[str, str]:
    """Return the value of each schedule within a transform at step `count`, as a dict from argument name to text."""

    def find() -> list[tuple[int, str]]:
        return [
            (place, name)
            for place, one in enumerate(within(tx))
            for name, value in one.arguments.items()
            if isinstance(value, Schedule) or (callable(value) and "Schedule" in one.factory.definition.plain[name])
        ]

    found = binding.once(("schedules", tx.treedef), find)
    if not found:
        return {}
    members, at = list(within(tx)), torch.tensor(float(count), dtype=torch.float64)
    return {f"{i}.{members[i].name}.{name}": repr(float(members[i].arguments[name](at))) for i, name in found}


def _numbers_of_state(binding: Binding, tx: Transform, state: PyTree, like: PyTree) -> tuple[dict[str, str], list[int]]:
    """Return texts by name for state that belongs to no parameter, and a list with the values of CPU counters."""
    leaves = tree.leaves(state)

    def find() -> dict[int, str] | None:
        described = describe_state(binding, tx, like)
        if len(described) != len(leaves):
            return None
        names = tree.names(state)
        return {i: names[i] for i, what in enumerate(described) if what is not None and what.name is None}

    found = binding.once(("numbers of state", tx.treedef, len(leaves), tuple(tree.names(like))), find)
    if found is None:
        return {"": f"{len(leaves)} leaves"}, []
    counts = [
        int(leaf)
        for leaf in (leaves[i] for i in found)
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and not leaf.ndim and leaf.device.type == "cpu"
    ]
    return {name: number_text(leaves[i]) for i, name in found.items()}, counts


def _with_missing_gradients(
    layout: Layout,
    names: Sequence[str],
    leaves: Sequence[Tensor | None],
    codes: Sequence[int],
    on_some: Sequence[bool],
    device: torch.device,
) -> list[Tensor | None]:
    """Return a list of local gradients, in which gradients that only other ranks have are filled in."""
    # A gradient may be partial under tensor parallelism, and None on some ranks if only the losses of others use it.
    assert layout.group is not None
    for name, code, is_missing in zip(names, codes, on_some, strict=True):
        if code > UNPLACED and is_missing:
            raise ShardingError(
                f"nothing was changed on any rank: the gradient of {name!r} is a partial DTensor on some ranks and "
                "None on others, expected a gradient on all of them: use the parameter in the loss of every rank, or "
                "redistribute its gradient before step()"
            )
    found: list[Tensor | None] = []
    for name, leaf in zip(names, leaves, strict=True):
        spec = layout.dtensors.get(name)
        if spec is not None and is_dtensor(leaf) and not is_placed_like(leaf, spec):
            leaf = leaf.redistribute(placements=spec.placements)
        found.append(local_of(leaf))
    if not any(on_some):
        return found
    # This is rare, so every rank sends its list of present leaves to every other.
    have = all_objects([leaf is not None for leaf in leaves], layout.group, "finding out who has which gradient")
    for place, (name, code) in enumerate(zip(names, codes, strict=True)):
        if not code:
            continue
        leaf = found[place]
        if leaf is None:
            leaf = torch.zeros(layout.piece(name).shape, dtype=DTYPES[code - 1], device=device)
        found[place] = leaf
        sends: list[tuple[Tensor, int, list[int]]] = []
        for ranks in layout.holders(name).values():
            present, absent = ([rank for rank in ranks if have[rank][place] == there] for there in (True, False))
            if present and absent:
                sends.append((leaf, present[0], absent))
        if sends:
            send_copies(sends, leaf, layout, "sharing a gradient")
    return found


def verify_ranks(binding: Binding, tx: Transform, params: PyTree, problem: Exception | None = None) -> None:
    """Raise on all ranks unless all have the same transform, parameters, layout, settings and package versions."""
    layout = binding.layout
    facts: Facts = {}
    if layout.size > 1 and layout.group is None:
        raise ShardingError(
            f"{layout!r} was created with a number of ranks and has no process group, expected a process group: create "
            "it in the running job, after init_process_group. Without a group it supports plan_for and inspection only"
        )
    try:
        checks.check_params(params)
        check_pieces(layout, tree.names(params), tree.leaves(params))
        local = local_tree(params)
        binding.likes[tx.treedef] = meta_like(local)
        if layout.size > 1 and problem is None:
            facts = _facts_of_binding(binding, tx, local)
    except Exception as error:  # perhaps on this rank only: raised on all ranks together
        problem = problem or error
    if layout.group is not None and layout.size > 1:
        wait_for_all(layout.group, CONSTRUCTING)
        same = {subject: digest(fact) for subject, fact in facts.items()}
        agree("binding a transform to a layout", layout.group, problem, same=same, explain=lambda: facts)
    elif problem is not None:
        raise problem


def _facts_of_binding(binding: Binding, tx: Transform, local: PyTree) -> Facts:
    """Return, as texts by subject, what must be equal on all ranks before the first step, in the order to report."""
    layout, store, kept = binding.layout, binding.store, "in memory with the parameters"
    device = tree.device_of(local)
    roof = sys.modules[__name__.partition(".")[0]]  # modules inside the package must not import it
    if store != IN_MEMORY:
        place = "on disk" if store.on_disk else "in host memory"
        kept = f"offloaded, {place}, in buckets of {store.bucket_bytes} bytes"
    present = {name: leaf for name, leaf in zip(tree.names(local), tree.leaves(local), strict=True) if leaf is not None}
    described = describe_state(binding, tx, local)
    names_of_state = tree.names(binding.init(tx, binding.local_like(local)))
    return {
        "versions": {"muonfx": str(getattr(roof, "__version__", "unknown")), "torch": str(torch.__version__)},
        "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout.specs.items()},
        "parameters that are None": {name: "None" for name in tree.names(local) if name not in present},
        "trees": str(tree.flatten(local)[1]),
        "layouts": f"{layout!r} ({layout.digest})",
        "ranks in their groups": str(torch.distributed.get_process_group_ranks(layout.group)),
        "kinds of device to compute on": device.type,
        **program_facts(binding, tx, local),
        "numbers in their chains": numbers_of(tx),
        "settings": repr(binding.settings),
        "stores of the state": kept,
        "settings of torch": _settings_of_torch(),
        # Machines may resolve "auto" differently; an explicit dtype is the same everywhere.
        'dtypes for "auto" (give each such transform a dtype, for example dtype=torch.float32)': product_dtypes(
            tx, [leaf.dtype for leaf in present.values()], device
        ),
        'products where "triton" is given (a warning has the reason; give products="batched")': kernel_products(
            tx, device
        ),
        "states": {
            name: "None" if what is None else f"{what.shape} {what.dtype}, owners {[s.owner for s in what.shares]}"
            for name, what in zip(names_of_state, described, strict=True)
        },
    }


def program_facts(binding: Binding, tx: Transform, params: PyTree) -> Facts:
    """Return, as texts by subject, the transforms that are applied to each parameter, and their arguments."""
    transforms: dict[str, str] = {}
    of_each: dict[str, list[str]] = {}
    for place, visited in enumerate(binding.visits(tx, params)):
        transforms[f"{place} {visited.title}"] = f"{execution_of(visited)} {_text(tree.map(lambda _: 0.0, visited.tx))}"
        for name in visited.names:
            of_each.setdefault(name, []).append(visited.title)
    return {
        "transforms of a parameter": {name: ", ".join(titles) for name, titles in of_each.items()},
        "chains": transforms,
    }


def _text(value: object) -> str:
    """Return a text for an argument of a transform. All functions share one text: ranks compare their results."""
    if isinstance(value, Recorded):
        return f"{value.factory.__name__}({', '.join(f'{k}={_text(v)}' for k, v in value.arguments.items())})"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return "a function"
    return text_of(value, _text)


def numbers_of(tx: Transform) -> dict[str, str]:
    """Return the current hyperparameters of a transform as texts: a dict by dotted name, such as "muon.momentum"."""
    if "numbers" not in tx.derived:
        tx.derived["numbers"] = parts_of(tx)
    return {name: number_text(number) for name, number in tx.derived["numbers"]}


SMALL = 64
"""Values of a CPU tensor are compared at every step if it has at most this number of elements."""


def number_text(value: object) -> str:
    """Return a text for a hyperparameter or a counter, such as "0.1". It never syncs with a GPU."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    # Values on a device are compared when replicas are verified.
    if value.device.type != "cpu" or value.numel() > SMALL:
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return f"{value.tolist()} of {value.dtype}"


def _settings_of_torch() -> dict[str, str]:
    return {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))),
    }
