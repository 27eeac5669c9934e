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
            found, expected = ("averages", "a sum") if heavy_ball else ("sums", "an average")
            raise ValueError(
                f"{part!r} {found} gradients, expected {expected} as in the source: pass heavy_ball={heavy_ball}"
            )
    shown: set[str] = set()
    wrong: list[str] = []
    steps = {name: leaf.step for name, leaf in leaves.items() if leaf.step is not None}
    if step is not None and set(steps.values()) not in ({step}, set()) and len(set(steps.values())) == 1:
        wrong.append(f"step: found {step}, but the source counts {next(iter(steps.values()))} steps; leave step= out")

    def visit(node: Any, path: str) -> Any:
        changes: dict[str, Any] = {}
        own: dict[str, int] = {}
        if type(node) in _STATES:
            kind, fields = _STATES[type(node)]
            names = tree.names(_codes_of(getattr(node, fields[0]), path))
            shown.update(names)
            for place, field in enumerate(fields):
                changes[field] = _tree(getattr(node, field), f"{path}{field}", kind, place, leaves, wrong)
            own = {name: steps[name] for name in names if name in steps}
        if "count" in node._fields:
            changes["count"] = torch.full_like(node.count, _agreed(f"{path}count", own or steps, step, wrong))
        return node._replace(**changes)

    state = _walk(tx.init(params), "", visit)
    wrong += [
        f"{name!r} has a {leaves[name].kind} state that the transform does not keep" for name in leaves.keys() - shown
    ]
    if wrong:
        raise ValueError("the source does not fit the transform: " + "; ".join(first_of_each_kind(sorted(set(wrong)))))
    return state


def _codes_of(held: PyTree, path: str) -> PyTree:
    if isinstance(held, QuantizedState | KeyedQuantizedState):
        raise ValueError(f"{path}: states in eight bits cannot be converted; convert into a chain with an fp32 state")
    return held


def _agreed(where: str, steps: Mapping[str, int], given: int | None, wrong: list[str]) -> int:
    """Return the step count that all parameters share, or ``given`` if none has one; add error texts to ``wrong``."""
    different = sorted(set(steps.values()))
    if len(different) == 1:
        return different[0]
    if given is None and different:
        firsts = [next(name for name, step in steps.items() if step == number) for number in different]
        listed = ", ".join(f"{number} ({name!r})" for number, name in zip(different, firsts, strict=True))
        wrong.append(f"{where} is one for all parameters, the source has {listed}; give step= to choose")
    elif given is None:
        wrong.append(f"{where}: the source does not count steps; give step=")
    return given or 0


def _tree(fresh: PyTree, path: str, kind: str, place: int, leaves: Mapping[str, Leaf], wrong: list[str]) -> PyTree:
    values, treedef = tree.flatten(fresh)
    for number, (name, zero) in enumerate(zip(tree.names(fresh), values, strict=True)):
        found = leaves.get(name)
        if zero is None:
            continue
        if found is None:
            wrong.append(f"{path}/{name}: missing in the source")
        elif found.kind != kind:
            wrong.append(f"{path}/{name}: the source has a {found.kind} state")
        elif (value := found.second if place else found.first) is not None:
            values[number] = _cast(value, zero, f"{path}/{name}", wrong)
    return tree.unflatten(treedef, values)


def _cast(value: Tensor, like: Tensor, where: str, wrong: list[str]) -> Tensor:
    if value.shape != like.shape:
        wrong.append(f"{where}: shape {tuple(value.shape)}, expected {tuple(like.shape)}")
    elif not widens(value.dtype, like.dtype):
        wrong.append(f"{where}: would narrow from {value.dtype} to {like.dtype}")
    return value.detach().to(dtype=like.dtype, device=like.device, copy=True)


def gathered(state: PyTree) -> dict[str, Leaf]:
    """Return a dict from parameter name to a copy of its moments and step count in the state of a transform."""
    found: dict[str, Leaf] = {}

    def visit(node: Any, path: str) -> Any:
        if type(node) not in _STATES:
            return node
        kind, fields = _STATES[type(node)]
        trees = [_codes_of(getattr(node, field), path) for field in fields]
        step = int(node.count) if "count" in node._fields else None
        for name, first, *rest in zip(tree.names(trees[0]), *map(tree.leaves, trees), strict=True):
            if first is not None:
                found[name] = Leaf(kind, first.clone(), rest[0].clone() if rest else None, step)
        return node

    _walk(state, "", visit)
    return found
