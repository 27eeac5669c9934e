"""The form that all formats share: `Leaf`, the state that an optimizer has for one parameter.

`filled` makes the state of a transform from leaves, and `gathered` collects leaves from the state of a transform. The
*source* in messages is the state of the other optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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


def _walk(node: object, path: str, visit: Callable[[Any, str], Any]) -> Any:
    """Return a copy of a state tree; ``visit(node, path)`` replaces each momentum, Adam, Lion and schedule state."""
    if type(node) in _STATES:
        return visit(node, path)
    if isinstance(node, ScheduledState):
        return visit(node, path)._replace(inner=_walk(node.inner, f"{path}inner/", visit))
    if isinstance(node, EmptyState) or node is None:
        return node
    if isinstance(node, dict):
        return {key: _walk(item, f"{path}{key}/", visit) for key, item in node.items()}
    raise ValueError(
        f"{path.rstrip('/') or 'the state'}: found a {type(node).__name__}, which has no counterpart in other "
        "optimizers: convert into the chain without this transform, then insert the transform's init(params) into the "
        "converted state"
    )


def filled(tx: Transform, params: PyTree, leaves: Mapping[str, Leaf], *, heavy_ball: bool, step: int | None) -> PyTree:
    """Return the state of a transform with the values that another optimizer has for each parameter.

    ``leaves`` is a dict from parameter name to these values. ``heavy_ball`` is True if the other optimizer's momenta
    are sums of gradients, not averages. ``step`` is the number of steps if the other optimizer does not count them.
    """
    for part in within(tx):
        if part.arguments.get("heavy_ball", heavy_ball) != heavy_ball:
            combines = "averages" if heavy_ball else "sums"
            expected = "a sum" if heavy_ball else "an average"
            raise ValueError(
                f"{part!r} {combines} gradients, expected {expected} as in the source: pass heavy_ball={heavy_ball}"
            )
    filled_names: set[str] = set()
    problems: list[str] = []
    steps = {name: leaf.step for name, leaf in leaves.items() if leaf.step is not None}
    counts = set(steps.values())
    if step is not None and len(counts) == 1 and counts != {step}:
        problems.append(f"step: found {step}, but the source counts {counts.pop()} steps; leave step= out")

    def visit(node: Any, path: str) -> Any:
        """Return a state at ``path``, such as "momentum/", with moments from ``leaves`` and the step count."""
        changes: dict[str, Any] = {}
        names: list[str] = []  # of the parameters in this state; none in the state of a schedule, which has a count
        if type(node) in _STATES:
            kind, fields = _STATES[type(node)]
            names = tree.names(_without_codes(getattr(node, fields[0]), path))
            filled_names.update(names)
            for number, field in enumerate(fields):
                zeros = getattr(node, field)
                changes[field] = _filled_tree(zeros, f"{path}{field}", kind, number, leaves, problems)
        if "count" in node._fields:
            steps_of_node = {name: steps[name] for name in names if name in steps}
            count = _common_step(f"{path}count", steps_of_node or steps, step, problems)
            changes["count"] = torch.full_like(node.count, count)
        return node._replace(**changes)

    state = _walk(tx.init(params), "", visit)
    for name in leaves.keys() - filled_names:
        problems.append(f"{name!r} has a {leaves[name].kind} state that the transform does not keep")
    if problems:
        texts = first_of_each_kind(sorted(set(problems)))
        raise ValueError(f"the source does not fit the transform: {'; '.join(texts)}")
    return state


def _without_codes(moments: PyTree, path: str) -> PyTree:
    """Return the moments at this path of a state; raise if they are codes in eight bits."""
    if isinstance(moments, QuantizedState | KeyedQuantizedState):
        raise ValueError(f"{path}: states in eight bits cannot be converted; convert into a chain with an fp32 state")
    return moments


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


def _filled_tree(
    zeros: PyTree, path: str, kind: str, number: int, leaves: Mapping[str, Leaf], problems: list[str]
) -> PyTree:
    """Return a tree with the first (``number`` 0) or second moment of each parameter; add to ``problems``."""
    values, treedef = tree.flatten(zeros)
    for index, (name, zero) in enumerate(zip(tree.names(zeros), values, strict=True)):
        if zero is None:
            continue
        leaf = leaves.get(name)
        if leaf is None:
            problems.append(f"{path}/{name}: missing in the source")
            continue
        if leaf.kind != kind:
            problems.append(f"{path}/{name}: the source has a {leaf.kind} state")
            continue
        moment = (leaf.first, leaf.second)[number]
        if moment is not None:
            values[index] = _cast(moment, zero, f"{path}/{name}", problems)
    return tree.unflatten(treedef, values)


def _cast(value: Tensor, like: Tensor, path: str, problems: list[str]) -> Tensor:
    """Return a copy of a moment in the dtype and on the device of ``like``; add to ``problems`` if it does not fit."""
    if value.shape != like.shape:
        problems.append(f"{path}: shape {tuple(value.shape)}, expected {tuple(like.shape)}")
    elif not widens(value.dtype, like.dtype):
        problems.append(f"{path}: would narrow from {value.dtype} to {like.dtype}")
    return value.detach().to(dtype=like.dtype, device=like.device, copy=True)


def gathered(state: PyTree) -> dict[str, Leaf]:
    """Return a dict from parameter name to a copy of its moments and step count in the state of a transform."""
    leaves: dict[str, Leaf] = {}

    def visit(node: Any, path: str) -> Any:
        """Add the moments and step count of a state to ``leaves``, and return the state unchanged."""
        if type(node) not in _STATES:  # the state of a schedule
            return node
        kind, fields = _STATES[type(node)]
        moments = [_without_codes(getattr(node, field), path) for field in fields]
        step = None
        if "count" in node._fields:
            step = int(node.count)
        for name, *leaf_moments in zip(tree.names(moments[0]), *map(tree.leaves, moments), strict=True):
            if leaf_moments[0] is not None:
                copies = [moment.clone() for moment in leaf_moments]
                leaves[name] = Leaf(kind, *copies, step=step)
        return node

    _walk(state, "", visit)
    return leaves
