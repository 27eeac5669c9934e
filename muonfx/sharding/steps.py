"""Agreement of the ranks before each step: on the presence and dtypes of leaves, on numbers, and on errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform, checks
from muonfx.core.recorded import parts_of
from muonfx.sharding.binding import Binding
from muonfx.sharding.consensus import (
    DTYPES,
    UNPLACED,
    Different,
    Facts,
    agree_on_leaves,
    all_numbers,
    check_pieces,
    number_of,
    raise_difference,
    warn_together,
)
from muonfx.sharding.description import structure_of
from muonfx.sharding.dtensors import is_dtensor, local_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import Exchange, ShardingError
from muonfx.sharding.replicas import verify_params, verify_state, warn_of_gradients
from muonfx.sharding.state import describe_state
from muonfx.sharding.verification import PROBLEMS, verify_ranks
from muonfx.tree import PyTree

__all__ = ["agreed_updates"]


def agreed_updates(
    binding: Binding,
    tx: Transform,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    donate: Donation,
    extras: dict[str, Any],
    check: bool,
    problem: Exception | None = None,
) -> PyTree:
    """Return the local updates on which all ranks agree: a leaf that any rank has is present on all ranks."""
    layout = binding.layout
    like = updates if params is None else params
    try:
        tx.check_extras(extras)
        checks.check_floating("updates", updates)
        _check_step(binding, tx, updates, state, params, check=check)
        if extras:
            binding.executor.check_extras(binding.executor.program(tx, tree.map(local_of, like)), extras)
        binding.executor.require_room(state, tree.map(local_of, like), donate)
    except PROBLEMS as error:
        problem = problem or error
    if not binding.compared:  # the ranks have not compared anything yet, not even the number of parameters
        verify_ranks(binding, tx, like)
    is_new = tx.treedef not in binding.compared
    if layout.group is None or layout.size == 1:
        if is_new:
            verify_ranks(binding, tx, like)
        if problem is not None:
            raise problem
        return tree.map(local_of, updates)
    is_due = binding.is_verification_due(tx)
    loads: set[bool] = set()

    def verify() -> None:
        nonlocal is_due
        is_due = True
        if params is not None:
            verify_params(layout, tree.map(local_of, params))
        verify_state(binding, tx, tree.map(local_of, like), state)

    told: Facts = {}
    number = 0
    try:
        if problem is None:
            told, number = _facts(binding, tx, state, like, extras)
    except PROBLEMS as error:
        problem = error
    try:
        codes, missing = agree_on_leaves(
            updates,
            layout,
            problem,
            {"arguments: some give params, some do not": int(params is not None), _FACTS: number},
            # One rank alone may have a new chain or a loaded state, so all ranks act if any of them wishes it.
            wishes=[
                (binding.has_loaded, lambda: loads.add(True)),
                (not binding.has_loaded, lambda: loads.add(False)),
                (is_new, lambda: verify_ranks(binding, tx, like)),
                (is_due, verify),
            ],
        )
    except Different as error:
        if error.what == _FACTS:
            raise_difference(told, layout.group)
        raise
    leaves, treedef = tree.flatten(updates)
    names = tree.names(updates)
    for name, code, gone in zip(names, codes, missing, strict=True):
        if code > UNPLACED and gone:
            raise ShardingError(
                f"nothing was changed on any rank: the gradient of {name!r} is partial on some ranks and None on others"
            )
    local = [local_of(_placed(layout, name, leaf)) for name, leaf in zip(names, leaves, strict=True)]
    if any(code and gone for code, gone in zip(codes, missing, strict=True)):
        local = _filled(layout, names, local, codes, tree.device_of(tree.map(local_of, like)))
    found = tree.unflatten(treedef, local)
    if is_due:
        warn_of_gradients(layout, found)
    if len(loads) > 1:
        warn_together(
            "since the last step a state was loaded on some ranks and not on others (on this one it was "
            f"{'' if binding.has_loaded else 'not '}loaded): its pieces do not belong together",
            layout.group,
        )
    binding.begin_step(tx)
    return found


_FACTS = "chains, numbers or extras"
SMALL = 64
"""The largest number of elements of a CPU tensor whose values are compared at every step."""


def _facts(binding: Binding, tx: Transform, state: PyTree, like: PyTree, extras: dict[str, Any]) -> tuple[Facts, int]:
    """Return the facts that must be equal on all ranks at a step, as texts for an error, and their number."""
    numbers: dict[str, Mapping[str, str]] = {
        "numbers in their chains": {name: _text(number) for name, number in parts_of(tx)},
        "named extras, such as value=loss; reduce them first": {name: _text(value) for name, value in extras.items()},
        "numbers in their states": _numbers_of_state(binding, tx, state, like),
    }
    # The chain without its hyperparameters, including the assignment of parameters to groups of an optimizer.
    key = ("structure", tx.treedef)
    if key not in binding.derived:
        text = structure_of(tx)
        binding.derived[key] = text, number_of(text)
    structure, its_number = binding.derived[key]
    return {"chains": structure, **numbers}, number_of([its_number, numbers])


def _text(value: object) -> str:
    """Describe a value by a text, without a device sync."""
    # A transform that takes a mapping, such as `qk_clip`, reduces its values over ranks: they may differ.
    if isinstance(value, Mapping):
        shown = zip(tree.names(value), tree.leaves(value), strict=True)
        return repr({n: (*x.shape, x.dtype) if isinstance(x, Tensor) else type(x).__qualname__ for n, x in shown})
    if not isinstance(value, Tensor):
        plain = value is None or isinstance(value, bool | int | float | str)
        return repr(value) if plain else type(value).__qualname__
    # Values on a device are compared when replicas are verified.
    if value.device.type != "cpu" or value.numel() > SMALL:
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return f"{value.tolist()} of {value.dtype}"


def _numbers_of_state(binding: Binding, tx: Transform, state: PyTree, like: PyTree) -> dict[str, str]:
    """Describe the state leaves that belong to no parameter, such as counters and injected hyperparameters."""
    leaves = tree.leaves(state)
    key = ("numbers of state", tx.treedef, len(leaves), tuple(tree.names(like)))
    if key not in binding.derived:
        described = describe_state(binding, tx, tree.map(local_of, like))
        places = [i for i, what in enumerate(described) if what is not None and what.name is None]
        names = tree.names(state)
        fits = len(described) == len(leaves)
        binding.derived[key] = [(place, names[place]) for place in places] if fits else None
    places = binding.derived[key]
    return {"": f"{len(leaves)} leaves"} if places is None else {name: _text(leaves[place]) for place, name in places}


def _placed(layout: Layout, name: str, leaf: Tensor | None) -> Tensor | None:
    """Redistribute a gradient to the placements of its parameter; it may be partial under tensor parallelism."""
    wanted = layout.dtensors.get(name)
    if wanted is None or not is_dtensor(leaf) or leaf._spec.placements == wanted.placements:
        return leaf
    return leaf.redistribute(placements=wanted.placements)


def _filled(
    layout: Layout, names: Sequence[str], leaves: Sequence[Tensor | None], codes: Sequence[int], device: torch.device
) -> list[Tensor | None]:
    """Fill leaves that are absent on this rank and present on another from another holder, or with zeros."""
    assert layout.group is not None
    # This is rare, so every rank sends its list of present leaves to every other.
    mine = [int(leaf is not None) for leaf in leaves]
    have = all_numbers(mine, layout.group, "finding out who has which gradient")
    found = list(leaves)
    for place, (name, code) in enumerate(zip(names, codes, strict=True)):
        if not code:
            continue
        dtype = DTYPES[code - 1]
        if found[place] is None:
            found[place] = torch.zeros(layout.piece(name).shape, dtype=dtype, device=device)
        outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        for ranks in layout.holders(name).values():
            present = [rank for rank in ranks if have[rank][place]]
            for taker in ranks if present else []:
                if not have[taker][place]:
                    own = found[place]
                    assert own is not None
                    if layout.rank == present[0]:
                        outgoing[taker].append(own)
                    if layout.rank == taker:
                        incoming[present[0]].append(own)
        if any(len({bool(have[rank][place]) for rank in ranks}) > 1 for ranks in layout.holders(name).values()):
            expected = [sum(tensor.numel() for tensor in tensors) for tensors in incoming]
            Exchange(
                outgoing, expected, dtype=dtype, device=device, group=layout.group, what="sharing a gradient"
            ).wait(incoming)
    return found


def _check_step(
    binding: Binding, tx: Transform, updates: PyTree, state: PyTree, params: PyTree, *, check: bool
) -> None:
    check_pieces(binding.layout, updates, as_placed=False)
    if not check:
        return
    local = tree.map(local_of, updates)
    weights = tree.map(local_of, params)
    if params is not None:
        check_pieces(binding.layout, params)
        checks.check_updates_fit(weights, local)
    like = local if params is None else weights
    if any(leaf is None for leaf in tree.leaves(like)):
        return
    key = ("state", tx.treedef, tuple(tree.names(like)), tuple(leaf.dtype for leaf in tree.leaves(like)))
    derived = binding.derived
    if key not in derived:
        meta = binding.executor.init(tx, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), like))
        derived[key] = (*tree.flatten(meta), meta)
    checks.check_state_like(tx.name, state, derived[key], with_dtypes=params is not None)
