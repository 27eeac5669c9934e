"""Checks of arguments and trees: each error names the leaf or argument, the value found, and the value expected.

Argument checks test Python numbers only. A tensor (a batch of hyperparameters or a traced value) always passes, because
Python control flow must not depend on its value.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from muonfx import tree
from muonfx.tree import PyTree
from muonfx.tree.display import format_list
from muonfx.tree.tracing import functorch_is_active
from muonfx.tree.wrappers import unwrapped

__all__ = [
    "NamePatterns",
    "at_least",
    "carries_a_graph",
    "check_floating",
    "check_params",
    "check_state_like",
    "check_structure",
    "check_tree",
    "check_update",
    "check_updates_fit",
    "finite",
    "in_unit_interval",
    "is_usable",
    "positive",
    "positive_int",
    "state_dtype",
    "warn_of_growing_graphs",
    "warn_of_unmatched",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def _number(name: str, value: object) -> float | None:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        if type(value) is object or type(value).__module__.startswith("torch"):
            return None  # a pytree library's placeholder for a leaf, or a symbolic number
        raise TypeError(f"{name} must be a number or a 0-d tensor, found {value!r}")
    return float(value)


def finite(name: str, value: object) -> float:
    """Require a number that is neither NaN nor infinite, and return it.

    >>> finite("factor", float("nan"))
    Traceback (most recent call last):
    ValueError: factor must be finite, found nan
    """
    number = _number(name, value)
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{name} must be finite, found {value!r}")
    return cast("float", value)


def at_least(name: str, value: object, low: float) -> float:
    """Require a finite number not below a bound, and return it.

    >>> at_least("learning_rate", -0.1, 0.0)
    Traceback (most recent call last):
    ValueError: learning_rate must be at least 0, found -0.1
    """
    finite(name, value)
    number = _number(name, value)
    if number is not None and number < low:
        raise ValueError(f"{name} must be at least {low:g}, found {value!r}")
    return cast("float", value)


def in_unit_interval(name: str, value: object) -> float:
    """Require a number in [0, 1), and return it.

    >>> in_unit_interval("decay", 1.0)
    Traceback (most recent call last):
    ValueError: decay must be in [0, 1), found 1.0
    """
    finite(name, value)
    number = _number(name, value)
    if number is not None and not 0.0 <= number < 1.0:
        raise ValueError(f"{name} must be in [0, 1), found {value!r}")
    return cast("float", value)


def positive(name: str, value: object) -> float:
    """Require a finite number above 0, and return it.

    >>> positive("limit", 0.0)
    Traceback (most recent call last):
    ValueError: limit must be above 0, found 0.0
    """
    at_least(name, value, 0.0)
    if _number(name, value) == 0.0:
        raise ValueError(f"{name} must be above 0, found {value!r}")
    return cast("float", value)


def positive_int(name: str, value: object) -> None:
    """Require an int of 1 or more.

    >>> positive_int("every", 0)
    Traceback (most recent call last):
    ValueError: every must be an int of 1 or more, found 0
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int of 1 or more, found {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be an int of 1 or more, found {value!r}")


def state_dtype(name: str, value: object) -> None:
    """Require a setting for the dtype of a state: "auto", a real floating-point torch dtype, or None.

    >>> state_dtype("mu_dtype", torch.int8)
    Traceback (most recent call last):
    TypeError: mu_dtype must be "auto", a floating-point torch.dtype or None, found torch.int8
    >>> state_dtype("mu_dtype", "fp32")
    Traceback (most recent call last):
    ValueError: mu_dtype must be "auto", a floating-point torch.dtype or None, found 'fp32'
    """
    if value is None or value == "auto" or (isinstance(value, torch.dtype) and value.is_floating_point):
        return
    wrong = ValueError if isinstance(value, str) else TypeError
    raise wrong(f'{name} must be "auto", a floating-point torch.dtype or None, found {value!r}')


_PACKAGES = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
_LIBRARIES = tuple(os.path.join(folder, "") for folder in _PACKAGES)


def warn_caller(message: str) -> None:
    """Warn at the line of the innermost caller outside muonfx and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


class NamePatterns(NamedTuple):
    """Globs over dotted names in an argument of a transform; see ``name_patterns`` of `muonfx.transform`."""

    argument: str
    groups: tuple[tuple[str, ...], ...]
    """Groups of alternatives; one glob of each group must match."""
    first_counts: bool = False
    """True if a name belongs only to the first group that matches it."""
    required: bool = False
    """True if a group that matches nothing is an error, not a warning."""


def warn_of_unmatched(patterns: Iterable[NamePatterns], params: PyTree) -> None:
    """Warn of patterns in the arguments of a transform that do nothing for these parameters.

    The names are those of the whole tree. A transform for some of the parameters (under `partition` or `masked`) may
    have patterns for the others, such as a mask that all labels share: only a pattern without any match is a mistake.

    Raises:
        ValueError: required patterns match nothing.

    >>> import muonfx as mfx
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     mfx.normalize_rows(view=mfx.MatrixView(blocks={"*.qvk": 3})).init({"h.qkv": torch.zeros(6, 2)})
    EmptyState()
    >>> str(caught[0].message)
    "blocks: '*.qvk' matches none of the 1 parameters; close: 'h.qkv'; correct or remove it"
    """
    names = tree.names(params)
    for argument, groups, first_counts, required in patterns if names else ():
        taken: set[str] = set()
        known = {*names, *unwrapped(names).values()} if required else names
        for group in groups:
            found = {n for n in known if any(fnmatchcase(n, pattern) for pattern in group)}
            if found and not found <= taken:
                taken |= found if first_counts else set()
                continue
            shown = (" or " if required else " and ").join(map(repr, group))
            if found:
                taken_here = format_list(sorted(found), _shown)
                said = f"matches only names that an earlier pattern matches, and the first counts: {taken_here}"
            else:
                close = _close_names(group, names)
                said = f"matches none of the {len(names)} parameters; "
                said += f"close: {format_list(close, _shown)}" if close else f"they are {format_list(names, _shown)}"
            if required:
                raise ValueError(f"{argument}: {shown} {said}; correct it")
            warn_caller(f"{argument}: {shown} {said}; correct or remove it")


def _close_names(group: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return up to three names with a part similar to the fixed part of a pattern, the most similar first."""
    found: dict[str, float] = {}
    for pattern in group:
        wanted = pattern.strip("*.").lower()
        length = wanted.count(".") + 1
        for name in names:
            parts = name.lower().split(".")
            windows = [".".join(parts[at : at + length]) for at in range(max(1, len(parts) - length + 1))]
            alike = max(difflib.SequenceMatcher(None, wanted, window).ratio() for window in windows)
            if alike >= 0.6:
                found[name] = max(alike, found.get(name, 0.0))
    return sorted(found, key=lambda name: -found[name])[:3]


def _shown(name: str) -> str:
    return repr(name) if name else "the tree's only leaf"


_LAZY = UninitializedParameter, UninitializedBuffer  # torch.nn.parameter.is_lazy would break a compiled graph
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def is_usable(leaf: object) -> bool:
    """Return True for None and for a dense tensor of a supported dtype.

    >>> is_usable(torch.zeros(2)), is_usable(torch.zeros(2).to_sparse()), is_usable(torch.zeros(2, dtype=torch.int8))
    (True, False, False)
    """
    if leaf is None:
        return True
    if not isinstance(leaf, Tensor) or isinstance(leaf, _LAZY):
        return False
    return leaf.dtype in _DTYPES and leaf.layout is torch.strided and not leaf.is_nested


def _check_leaves(what: str, given: PyTree, leaves: Sequence[object]) -> None:
    if all(map(is_usable, leaves)):
        return
    named = zip(tree.names(given), leaves, strict=True)
    name, leaf = next((name, leaf) for name, leaf in named if not is_usable(leaf))
    shown = f"{what}: {_shown(name)}"
    if not isinstance(leaf, Tensor):
        raise _no_tensor(shown, what, leaf)
    if isinstance(leaf, _LAZY):
        raise TypeError(f"{shown} has no shape yet, since it belongs to a lazy module; run one forward pass first")
    if leaf.is_nested or leaf.layout is not torch.strided:
        kind = "a nested tensor" if leaf.is_nested else str(leaf.layout)
        advice = "make its parts leaves of their own" if leaf.is_nested else "make it dense with .to_dense()"
        raise TypeError(f"{shown} must be dense, found {kind}; {advice}, or leave it out")
    if leaf.is_complex():
        advice = "view it as real with torch.view_as_real"
    elif leaf.is_floating_point():
        advice = "train a copy in bfloat16 or wider, and round to it after each step"
    elif leaf.is_quantized:
        advice = "train a dequantized copy, or leave it out"
    else:
        advice = "leave it out"
    size = " of 16 bits or more" * leaf.is_floating_point()
    raise TypeError(f"{shown} must be real floating point{size}, found {leaf.dtype}; {advice}")


def _no_tensor(shown: str, what: str, leaf: object) -> TypeError:
    return TypeError(f"{shown} must be a tensor or None, found {type(leaf).__name__}{_advice_on(what, leaf)}")


def _advice_on(what: str, given: object) -> str:
    """Return the advice to pass a tree of tensors by name, if a model or an iterator was passed."""
    if not isinstance(given, nn.Module | Iterator):
        return ""
    if what == "params":
        return "; expected a tree of tensors by name: dict(model.named_parameters())"
    return "; expected a tree of tensors by name: {name: p.grad for name, p in model.named_parameters()}"


def check_tree(what: str, given: PyTree) -> None:
    """Require a tree of values with a shape and a dtype, such as tensors of any kind, or None.

    Raises:
        TypeError: the tree has another leaf. If a model or its iterator was passed, the message says what to pass.

    >>> check_tree("params", nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: params must be a tensor or None, found Linear; expected a tree ...: dict(model.named_parameters())
    """
    for name, leaf in zip(tree.names(given), tree.leaves(given), strict=True):
        if leaf is not None and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            shown = f"{what}: {_shown(name)}" if name else what
            raise _no_tensor(shown, what, leaf)


def check_floating(what: str, given: PyTree) -> None:
    """Require a tree of real floating-point tensors or None.

    >>> check_floating("updates", {"w": 1.0})
    Traceback (most recent call last):
    TypeError: updates: 'w' must be a tensor or None, found float
    """
    _check_leaves(what, given, tree.leaves(given))


def check_params(params: PyTree) -> None:
    """Require a tree of real floating-point tensors (or None) whose leaves have different names.

    >>> check_params({"table": torch.zeros(2, dtype=torch.int64)})
    Traceback (most recent call last):
    TypeError: params: 'table' must be real floating point, found torch.int64; leave it out
    """
    _check_leaves("params", params, tree.leaves(params))
    names = tree.names(params)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"params: two leaves are named {twice[0]!r}; the dotted paths of leaves must differ")


def check_structure(what: str, found: PyTree, expected_of: str, expected: PyTree) -> None:
    """Require that two trees have the same containers with the same keys.

    >>> check_structure("updates", {"w": 1}, "params", {"v": 1})
    Traceback (most recent call last):
    ValueError: updates must have the structure of params: missing 'v'; unexpected 'w'
    """
    if tree.same_structure(found, expected):
        return
    have, want = tree.names(found), tree.names(expected)
    missing = [name for name in want if name not in set(have)]
    extra = [name for name in have if name not in set(want)]
    both = ("missing", missing), ("unexpected", extra)
    differences = [f"{what_is} {format_list(names, _shown)}" for what_is, names in both if names]
    detail = "; ".join(differences) or (
        "the same names in other containers (dict, OrderedDict, tuple, list, NamedTuple), or in another order of an "
        "OrderedDict, which counts"
    )
    raise ValueError(f"{what} must have the structure of {expected_of}: {detail}")


def check_update(updates: PyTree, params: PyTree) -> tuple[list[Any], tree.Structure]:
    """Require real floating-point updates that fit the parameters, if there are any.

    Returns:
        The leaves and the structure of the parameters, or of the updates if there are no parameters.

    >>> check_update({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    Traceback (most recent call last):
    ValueError: updates: 'w' has shape (2,), its parameter has (3,)
    """
    leaves, treedef = tree.flatten(updates)
    _check_leaves("updates", updates, leaves)
    if params is None:
        return leaves, treedef
    like, expected = tree.flatten(params)
    if treedef != expected:
        check_structure("updates", updates, "params", params)
    _check_shapes(updates, leaves, like)
    return like, expected


def check_updates_fit(params: PyTree, updates: PyTree) -> None:
    """Require that updates have the structure and the shapes of the parameters.

    >>> check_updates_fit({"w": torch.zeros(3)}, {"w": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: updates: 'w' has shape (2,), its parameter has (3,)
    """
    check_structure("updates", updates, "params", params)
    _check_shapes(updates, tree.leaves(updates), tree.leaves(params))


def _check_shapes(updates: PyTree, leaves: Sequence[Any], like: Sequence[Any]) -> None:
    for place, (update, param) in enumerate(zip(leaves, like, strict=True)):
        if update is None or (param is not None and update.shape == param.shape):
            continue
        name = _shown(tree.names(updates)[place])
        if param is None:
            raise ValueError(f"updates: {name} has an update but its parameter is None")
        raise ValueError(f"updates: {name} has shape {tuple(update.shape)}, its parameter has {tuple(param.shape)}")


def check_state_like(name: str, state: PyTree, expected: tuple[list[Any], Any, Any], *, with_dtypes: bool) -> None:
    """Require that a state has the structure, shapes and dtypes of another, given as leaves, structure and tree.

    >>> expected = {"trace": torch.zeros(2)}
    >>> check_state_like("momentum", {"trace": torch.zeros(3)}, (*tree.flatten(expected), expected), with_dtypes=True)
    Traceback (most recent call last):
    ValueError: state: 'trace' has shape (3,) and dtype torch.float32, expected (2,) and torch.float32; shape and ...
    """
    wanted, wanted_def, whole = expected
    found, found_def = tree.flatten(state)
    if found_def != wanted_def:
        what = f"state: was it made by another transform or for other parameters? The state of {name}"
        check_structure(what, state, f"{name}.init(params)", whole)
    for place, (have, want) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(want, Tensor):
            continue
        if isinstance(have, Tensor) and have.shape == want.shape and (have.dtype == want.dtype or not with_dtypes):
            continue
        leaf = _shown(tree.names(state)[place])
        if not isinstance(have, Tensor):
            raise TypeError(f"state: {leaf} must be a tensor, found {type(have).__name__}")
        raise ValueError(
            f"state: {leaf} has shape {tuple(have.shape)} and dtype {have.dtype}, expected {tuple(want.shape)} and "
            f"{want.dtype}; shape and dtype are fixed by init"
        )


def carries_a_graph(params: Iterable[object]) -> bool:
    """Return True if a tensor among the parameters is the result of recorded operations, outside of ``torch.func``.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> carries_a_graph([weight]), carries_a_graph([2 * weight])
    (False, True)
    """
    if not torch.is_grad_enabled() or functorch_is_active():
        return False
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in params)


def warn_of_growing_graphs(what: str, params: PyTree) -> None:
    """Warn that parameters were not detached and keep the graphs of all steps; ``what`` names the caller.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn_of_growing_graphs("update", {"w": 2 * torch.ones(2, requires_grad=True)})
    >>> str(caught[0].message)
    "update: the parameters, such as 'w', carry the graph of the steps before, and the gradients carry none: ..."
    """
    named = zip(tree.names(params), tree.leaves(params), strict=True)
    name = next(name for name, leaf in named if leaf is not None and leaf.grad_fn is not None)
    warnings.warn(
        f"{what}: the parameters, such as {name!r}, carry the graph of the steps before, and the gradients carry none: "
        "it grows with every step and takes memory. If nothing is differentiated through the steps, detach the "
        "parameters once, params = {n: p.detach() for n, p in model.named_parameters()}, or step under torch.no_grad()",
        UserWarning,
        stacklevel=3,
    )
