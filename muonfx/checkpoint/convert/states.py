"""The form that all formats share: `Leaf`, the state that an optimizer has for one parameter.

`filled` makes the state of a transform from leaves, and `gathered` collects leaves from the state of a transform. The
*source* in messages is the state of the other optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from muonfx import tree
from muonfx.checkpoint.errors import first_of_each_kind
from muonfx.compact import KeyedQuantizedState, QuantizedState
from muonfx.core import EmptyState, ScheduledState, Transform
from muonfx.core.transform import within
from muonfx.transforms import AdamState, LionState, MomentumState
from muonfx.tree import PyTree
from muonfx.tree.dtypes import widens


class Leaf(NamedTuple):
    """One parameter's moments and step count in another optimizer; ``kind`` is "muon", "adamw" or "lion"."""

    kind: str
    moments: Sequence[Tensor | None]
    """The momentum, or the first and the second moment; None before the first step."""
    step: int | None
    """None if the source does not count steps."""


def flat(params: PyTree) -> dict[str, Tensor]:
    """Return the parameters of a tree as a dict from dotted name to tensor, without None leaves."""
    return {name: leaf for name, leaf in tree.named_leaves(params) if leaf is not None}


_KINDS: dict[type, str] = {MomentumState: "muon", AdamState: "adamw", LionState: "lion"}
"""The kind of optimizer that each type of state belongs to. Its fields are trees of moments, and perhaps ``count``."""


def _states_in(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Find the states of momentum, Adam, Lion and schedules in a state tree; yield the path and the value of each.

    A path is such as "muon/momentum/". Raise for a state that other optimizers do not have. ``node`` is the state tree,
    or a part of it at ``path`` in a recursive call.
    """
    if type(node) in _KINDS:  # of momentum, Adam or Lion
        yield path, node
    elif isinstance(node, ScheduledState):
        # It counts steps itself, and has the state of an inner transform.
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
    """Return the moments in the state of one transform: ``{"mu": tree, "nu": tree}`` for Adam.

    The dict is empty for the state of a schedule, which only counts steps.
    """
    if type(state) not in _KINDS:
        return {}
    moments = state._asdict()  # the fields by name
    moments.pop("count", None)
    # Eight bits alone are no value: a moment in this form consists of codes and scales.
    if any(isinstance(moment, QuantizedState | KeyedQuantizedState) for moment in moments.values()):
        raise ValueError(
            f"{path}: states in eight bits cannot be converted; convert into a chain with an fp32 state"
        )
    return moments


def filled(
    tx: Transform, params: PyTree, leaves: Mapping[str, Leaf], *, heavy_ball: bool, step: int | None
) -> PyTree:
    """Return the state of a transform with the values that another optimizer has for each parameter.

    ``leaves`` is a dict from parameter name to these values. ``heavy_ball`` is True if the other optimizer's momenta
    are sums of gradients, not averages. ``step`` is the number of steps if the other optimizer does not count them.
    """
    _require_heavy_ball(tx, heavy_ball)
    step_of = {name: leaf.step for name, leaf in leaves.items() if leaf.step is not None}
    state = tx.init(params)  # new tensors, which are filled in place
    # All problems are collected, so that the caller sees them in one error.
    problems = _mistakes_of_step(step, step_of)
    unused_names = set(leaves)
    for path, part in _states_in(state):
        names = _params_of(part, path)
        unused_names.difference_update(names)
        problems += _fill_moments(part, path, leaves)
        if "count" in part._fields:
            # A schedule has no parameters of its own, and counts the steps of all.
            steps_of_params = {name: step_of[name] for name in names if name in step_of} or step_of
            problems += _fill_count(part.count, f"{path}count", steps_of_params, step)
    for name in unused_names:
        problems.append(
            f"{name!r} has a {leaves[name].kind} state that the transform does not keep"
        )
    if problems:
        texts = first_of_each_kind(sorted(set(problems)))
        raise ValueError(f"the source does not fit the transform: {'; '.join(texts)}")
    return state


def _mistakes_of_step(step: int | None, step_of: Mapping[str, int]) -> list[str]:
    """Return a text if the caller's ``step`` differs from the one count that all parameters have, else no text."""
    counts = set(step_of.values())
    if step is None or len(counts) != 1 or step in counts:
        return []
    return [f"step: found {step}, but the source counts {min(counts)} steps; leave step= out"]


def _fill_count(
    count: Tensor, path: str, step_of: Mapping[str, int], step: int | None
) -> list[str]:
    """Set the step count of a transform to the count of its parameters in the source, or else to ``step``.

    ``step_of`` has the count of each parameter, such as ``{"fc.weight": 100, "fc.bias": 100}``, from which the step
    count is 100. Return a text if the step count is not known, and no text if it was set.
    """
    counts = set(step_of.values())
    if len(counts) == 1:
        step = counts.pop()
    if step is None:
        return [_problem_of_counts(path, step_of)]
    count.fill_(step)
    return []


def _problem_of_counts(path: str, step_of: Mapping[str, int]) -> str:
    """Return a text about parameters that have different step counts, or none.

    >>> _problem_of_counts("adam/count", {"fc.weight": 100, "fc.bias": 7})
    "adam/count is one for all parameters, the source has 7 ('fc.bias'), 100 ('fc.weight'); give step= to choose"
    """
    if not step_of:
        return f"{path}: the source does not count steps; give step="
    name_of_count: dict[int, str] = {}  # the first parameter with each count
    for name, steps in step_of.items():
        name_of_count.setdefault(steps, name)
    texts = ", ".join([f"{steps} ({name!r})" for steps, name in sorted(name_of_count.items())])
    return f"{path} is one for all parameters, the source has {texts}; give step= to choose"


def _params_of(part: Any, path: str) -> list[str]:
    """Return the names of the parameters of one transform, whose moments its state has; none for a schedule."""
    names: dict[str, None] = {}  # each once, in order
    for moments in _moments_of(part, path).values():
        for name, _ in tree.named_leaves(moments):
            names[name] = None
    return list(names)


def _fill_moments(part: Any, path: str, leaves: Mapping[str, Leaf]) -> list[str]:
    """Copy the moments of another optimizer into the new state of a transform, whose moments are zeros.

    Moments are the momentum, or the averages of Adam, "mu" and "nu". ``leaves`` has those to copy by the name of the
    parameter, and ``path`` is of the transform. Return a text about each moment that does not fit, such as
    "muon/momentum/trace/fc.weight: missing in the source".
    """
    problems: list[str] = []
    # The moments of both optimizers have one order: number 0 is "mu" here and "exp_avg" in torch, number 1 is "nu" and
    # "exp_avg_sq".
    for number, (field, moments) in enumerate(_moments_of(part, path).items()):
        for name, zeros in tree.named_leaves(moments):
            if zeros is None:  # this transform has no moment of the parameter
                continue
            problem = _fill(zeros, leaves.get(name), _KINDS[type(part)], number)
            if problem is not None:
                problems.append(f"{path}{field}/{name}: {problem}")
    return problems


def _fill(zeros: Tensor, leaf: Leaf | None, kind: str, number: int) -> str | None:
    """Copy the first (``number`` 0) or second moment of a parameter into ``zeros``; return why it does not fit.

    ``leaf`` is the state of the parameter in the other optimizer. Return None if the moment fits, or if there is none.
    """
    if leaf is None:
        return "missing in the source"
    if leaf.kind != kind:
        return f"the source has a {leaf.kind} state"
    moment = leaf.moments[number]
    if moment is None:  # before the first step
        return None
    if isinstance(moment, DTensor) != isinstance(zeros, DTensor):
        return (
            f"found a {type(moment).__name__}, expected a {type(zeros).__name__}, as in params: pass parameters with "
            "the same shards, or gather the state with full_tensor()"
        )
    if moment.shape != zeros.shape:
        return f"shape {tuple(moment.shape)}, expected {tuple(zeros.shape)}"
    if not widens(moment.dtype, zeros.dtype):
        return f"would narrow from {moment.dtype} to {zeros.dtype}"
    zeros.copy_(moment.detach())
    return None


def _require_heavy_ball(tx: Transform, heavy_ball: bool) -> None:
    """Raise if a momentum of the transform sums gradients and the source averages them, or the reverse.

    A sum (``heavy_ball=True``) is larger than an average by a factor of 1 / (1 - decay), 10 for a decay of 0.9. In
    the other form, the gradients so far would count ten times too much or too little against new ones.
    """
    difference = "sums gradients, expected an average"
    advice = f"use the chain of convert.recipe, or one with momentum(heavy_ball={heavy_ball})"
    if heavy_ball:
        difference = "averages gradients, expected a sum"
        advice += ", which muonfx.Muon and muon_with_adamw do not have"
    for part in within(tx):
        is_momentum = "heavy_ball" in part.arguments
        if is_momentum and part.arguments["heavy_ball"] != heavy_ball:
            raise ValueError(f"{part!r} {difference} as in the source: {advice}")


def gathered(state: PyTree) -> dict[str, Leaf]:
    """Collect the moments and the step count of each parameter from the state of a transform, as copies.

    The result has ``{"fc.weight": Leaf("adamw", [mu, nu], 100)}`` for Adam after 100 steps.
    """
    leaves: dict[str, Leaf] = {}
    for path, part in _states_in(state):
        step = int(part.count) if "count" in part._fields else None
        moments_of = _moments_by_parameter(_moments_of(part, path))
        for name, moments in moments_of.items():  # none for a schedule, which has only a count
            leaves[name] = Leaf(_KINDS[type(part)], moments, step)
    return leaves


def _moments_by_parameter(moments: Mapping[str, PyTree]) -> dict[str, list[Tensor]]:
    """Return copies of the moments by parameter: ``{"w": [mu, nu]}`` for ``{"mu": {"w": mu}, "nu": {"w": nu}}``."""
    copies: dict[str, list[Tensor]] = {}
    for params in moments.values():
        for name, moment in tree.named_leaves(params):
            if moment is not None:
                copies.setdefault(name, []).append(moment.clone())
    return copies
