"""The form that all formats share: `Leaf`, the state that an optimizer has for one parameter.

`filled` makes the state of a transform from leaves, and `gathered` collects leaves from the state of a transform. The
*source* in messages is the state of the other optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.checkpoint.errors import first_of_each_kind
from muonfx.compact import KeyedQuantizedState, QuantizedState
from muonfx.core import EmptyState, ScheduledState, Transform
from muonfx.core.transform import within
from muonfx.transforms import AdamState, LionState, MomentumState
from muonfx.tree import PyTree
from muonfx.tree.dtypes import widens


@dataclass(frozen=True)
class Leaf:
    """One parameter's moments and step count in another optimizer; ``kind`` is "muon", "adamw" or "lion"."""

    kind: str
    first: Tensor | None = None  # the momentum or first moment; None before the first step
    second: Tensor | None = None
    step: int | None = None  # None if the source does not count steps


def flat(params: PyTree) -> dict[str, Tensor]:
    """Return the parameters of a tree as a dict from dotted name to tensor, without None leaves."""
    if tree.is_flat(params):
        return {name: leaf for name, leaf in params.items() if leaf is not None}
    pairs = zip(tree.names(params), tree.leaves(params), strict=True)
    return {name: leaf for name, leaf in pairs if leaf is not None}


_STATES: dict[type, tuple[str, tuple[str, ...]]] = {
    MomentumState: ("muon", ("trace",)),
    AdamState: ("adamw", ("mu", "nu")),
    LionState: ("lion", ("mu",)),
}
"""The kind of optimizer that each type of state belongs to, and its fields in the order (first, second)."""


def _states_in(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path, such as "muon/momentum/", and the value of each state of a transform in a state tree."""
    if type(node) in _STATES:
        yield path, node
    elif isinstance(node, ScheduledState):
        yield path, node
        yield from _states_in(node.inner, f"{path}inner/")
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _states_in(child, f"{path}{key}/")
    elif not isinstance(node, EmptyState) and node is not None:
        raise ValueError(
            f"{path.rstrip('/') or 'the state'}: found a {type(node).__name__}, which has no counterpart in other "
            "optimizers: convert into the chain without this transform, then insert the transform's init(params) into "
            "the converted state"
        )


def _moments_of(state: Any, path: str) -> dict[str, PyTree]:
    """Return a dict from field, such as "mu", to the tree of moments; it is empty for the state of a schedule."""
    _, fields = _STATES.get(type(state), ("", ()))
    moments = {field: getattr(state, field) for field in fields}
    if any(isinstance(moment, QuantizedState | KeyedQuantizedState) for moment in moments.values()):
        raise ValueError(f"{path}: states in eight bits cannot be converted; convert into a chain with an fp32 state")
    return moments


def filled(tx: Transform, params: PyTree, leaves: Mapping[str, Leaf], *, heavy_ball: bool, step: int | None) -> PyTree:
    """Return the state of a transform with the values that another optimizer has for each parameter.

    ``leaves`` is a dict from parameter name to these values. ``heavy_ball`` is True if the other optimizer's momenta
    are sums of gradients, not averages. ``step`` is the number of steps if the other optimizer does not count them.
    """
    _require_heavy_ball(tx, heavy_ball)
    problems: list[str] = []
    steps = {name: leaf.step for name, leaf in leaves.items() if leaf.step is not None}
    counts = set(steps.values())
    if step is not None and len(counts) == 1 and counts != {step}:
        problems.append(f"step: found {step}, but the source counts {counts.pop()} steps; leave step= out")
    state = tx.init(params)  # new tensors, which are filled in place
    filled_names: set[str] = set()
    for path, part in _states_in(state):
        problems += _fill_moments(part, path, leaves)
        names = _parameter_names(part, path)
        filled_names.update(names)
        if "count" in part._fields:
            steps_of_part = {name: steps[name] for name in names if name in steps}
            part.count.fill_(_common_step(f"{path}count", steps_of_part or steps, step, problems))
    for name in leaves.keys() - filled_names:
        problems.append(f"{name!r} has a {leaves[name].kind} state that the transform does not keep")
    if problems:
        texts = first_of_each_kind(sorted(set(problems)))
        raise ValueError(f"the source does not fit the transform: {'; '.join(texts)}")
    return state


def _common_step(path: str, steps: Mapping[str, int], step: int | None, problems: list[str]) -> int:
    """Return the step count that all parameters share, or ``step`` if none has one; add error texts to ``problems``."""
    name_of_count: dict[int, str] = {}
    for name, count in steps.items():
        name_of_count.setdefault(count, name)
    if len(name_of_count) == 1:
        return min(name_of_count)
    if step is not None:
        return step
    if name_of_count:
        listed = ", ".join(f"{count} ({name!r})" for count, name in sorted(name_of_count.items()))
        problems.append(f"{path} is one for all parameters, the source has {listed}; give step= to choose")
    else:
        problems.append(f"{path}: the source does not count steps; give step=")
    return 0


def _parameter_names(part: Any, path: str) -> list[str]:
    """Return the names of the parameters in the state of a transform; none for the state of a schedule."""
    for moments in _moments_of(part, path).values():
        return tree.names(moments)
    return []


def _fill_moments(part: Any, path: str, leaves: Mapping[str, Leaf]) -> list[str]:
    """Copy the moments in ``leaves`` into the state of a transform; return texts about those that do not fit."""
    problems: list[str] = []
    for number, (field, moments) in enumerate(_moments_of(part, path).items()):
        for name, zeros in zip(tree.names(moments), tree.leaves(moments), strict=True):
            if zeros is None:
                continue
            problem = _fill(zeros, leaves.get(name), _STATES[type(part)][0], number)
            if problem is not None:
                problems.append(f"{path}{field}/{name}: {problem}")
    return problems


def _fill(zeros: Tensor, leaf: Leaf | None, kind: str, number: int) -> str | None:
    """Copy the first (``number`` 0) or second moment of a parameter into ``zeros``; return why it does not fit."""
    if leaf is None:
        return "missing in the source"
    if leaf.kind != kind:
        return f"the source has a {leaf.kind} state"
    moment = leaf.first if number == 0 else leaf.second
    if moment is None:  # before the first step
        return None
    if moment.shape != zeros.shape:
        return f"shape {tuple(moment.shape)}, expected {tuple(zeros.shape)}"
    if not widens(moment.dtype, zeros.dtype):
        return f"would narrow from {moment.dtype} to {zeros.dtype}"
    zeros.copy_(moment.detach())
    return None


def _require_heavy_ball(tx: Transform, heavy_ball: bool) -> None:
    """Raise if a momentum of the transform sums gradients and the source averages them, or the reverse."""
    for part in within(tx):
        if part.arguments.get("heavy_ball", heavy_ball) != heavy_ball:
            combines = "averages" if heavy_ball else "sums"
            expected = "a sum" if heavy_ball else "an average"
            raise ValueError(
                f"{part!r} {combines} gradients, expected {expected} as in the source: pass heavy_ball={heavy_ball}"
            )


def gathered(state: PyTree) -> dict[str, Leaf]:
    """Return a dict from parameter name to a copy of its moments and step count in the state of a transform."""
    leaves: dict[str, Leaf] = {}
    for path, part in _states_in(state):
        trees = [*_moments_of(part, path).values()]
        if not trees:  # the state of a schedule
            continue
        step = int(part.count) if "count" in part._fields else None
        for name, *moments in zip(tree.names(trees[0]), *map(tree.leaves, trees), strict=True):
            if moments[0] is not None:
                copies = [moment.clone() for moment in moments]
                leaves[name] = Leaf(_STATES[type(part)][0], *copies, step=step)
    return leaves
