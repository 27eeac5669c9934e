"""Bad input, caught at the door: each error names the leaf or argument, what was found, and what was expected.

Argument checks look at Python numbers only. A tensor (a batch of hyperparameters, a traced value) passes: its value
must not decide anything in Python.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx import tree

if TYPE_CHECKING:
    from muonfx.core import Transform

__all__ = [
    "at_least",
    "check_floating",
    "check_params",
    "check_state_like",
    "check_structure",
    "check_update",
    "check_updates_fit",
    "finite",
    "floating_dtype",
    "in_unit_interval",
    "positive_int",
]


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        if type(value) is object or type(value).__module__.startswith("torch"):
            return None  # the placeholder that a pytree library puts in a leaf's place, or a symbolic number
        raise TypeError(f"{name} must be a number or a 0-d tensor, found {value!r}")
    return float(value)


def finite(name: str, value: Any) -> None:
    """Require a number that is neither NaN nor infinite.

    >>> finite("factor", float("nan"))
    Traceback (most recent call last):
    ValueError: factor must be finite, found nan
    """
    number = _number(name, value)
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{name} must be finite, found {value!r}")


def at_least(name: str, value: Any, low: float) -> None:
    """Require a finite number not below a bound.

    >>> at_least("learning_rate", -0.1, 0.0)
    Traceback (most recent call last):
    ValueError: learning_rate must be at least 0, found -0.1
    """
    finite(name, value)
    number = _number(name, value)
    if number is not None and number < low:
        raise ValueError(f"{name} must be at least {low:g}, found {value!r}")


def in_unit_interval(name: str, value: Any) -> None:
    """Require a number in [0, 1).

    >>> in_unit_interval("decay", 1.0)
    Traceback (most recent call last):
    ValueError: decay must be in [0, 1), found 1.0
    """
    finite(name, value)
    number = _number(name, value)
    if number is not None and not 0.0 <= number < 1.0:
        raise ValueError(f"{name} must be in [0, 1), found {value!r}")


def positive_int(name: str, value: Any) -> None:
    """Require an int of 1 or more.

    >>> positive_int("every", 0)
    Traceback (most recent call last):
    ValueError: every must be an int of 1 or more, found 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of 1 or more, found {value!r}")


def floating_dtype(name: str, value: Any) -> None:
    """Require a real floating-point torch dtype, or None.

    >>> floating_dtype("mu_dtype", torch.int8)
    Traceback (most recent call last):
    TypeError: mu_dtype must be a floating-point torch.dtype or None, found torch.int8
    """
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating-point torch.dtype or None, found {value!r}")


def _shown(name: str) -> str:
    return repr(name) if name else "the tree's only leaf"


def _good(leaf: Any) -> bool:
    return leaf is None or (isinstance(leaf, Tensor) and leaf.is_floating_point())


def _check_leaves(what: str, given: Any) -> list[Any]:
    leaves = tree.leaves(given)
    if all(map(_good, leaves)):
        return leaves
    name, leaf = next((name, leaf) for name, leaf in zip(tree.names(given), leaves, strict=True) if not _good(leaf))
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{what}: {_shown(name)} must be a tensor or None, found {type(leaf).__name__}")
    advice = "view it as real with torch.view_as_real" if leaf.is_complex() else "leave it out"
    raise TypeError(f"{what}: {_shown(name)} must be real floating point, found {leaf.dtype}; {advice}")


def check_floating(what: str, given: Any) -> None:
    """Require a tree of real floating-point tensors or None.

    >>> check_floating("updates", {"w": 1.0})
    Traceback (most recent call last):
    TypeError: updates: 'w' must be a tensor or None, found float
    """
    _check_leaves(what, given)


def check_params(params: Any) -> None:
    """Require a tree of real floating-point tensors (or None) whose leaves have different names.

    >>> check_params({"table": torch.zeros(2, dtype=torch.int64)})
    Traceback (most recent call last):
    TypeError: params: 'table' must be real floating point, found torch.int64; leave it out
    """
    _check_leaves("params", params)
    names = tree.names(params)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"params: two leaves are named {twice[0]!r}; the dotted paths of leaves must differ")


def check_structure(what: str, found: Any, expected_of: str, expected: Any) -> None:
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
    differences = [f"missing {_list(missing)}"] * bool(missing) + [f"unexpected {_list(extra)}"] * bool(extra)
    detail = "; ".join(differences) or (
        "the same names in other containers (dict, OrderedDict, tuple, list, NamedTuple), or in another order of an "
        "OrderedDict, which counts"
    )
    raise ValueError(f"{what} must have the structure of {expected_of}: {detail}")


def _list(names: list[str]) -> str:
    shown = ", ".join(map(_shown, names[:5]))
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_update(tx: Transform, updates: Any, state: Any, params: Any) -> None:
    """Require that updates, state and params belong together and to this transform.

    >>> import muonfx as mfx
    >>> check_update(mfx.momentum(), {"w": torch.zeros(2)}, mfx.EmptyState(), {"w": torch.zeros(3)})
    Traceback (most recent call last):
    ValueError: updates: 'w' has shape (2,), its parameter has (3,)
    """
    _check_leaves("updates", updates)
    if params is not None:
        check_updates_fit(params, updates)
    _check_state(tx, state, updates if params is None else params, with_dtypes=params is not None)


def check_updates_fit(params: Any, updates: Any) -> None:
    """Require that updates have the structure and the shapes of the parameters.

    >>> check_updates_fit({"w": torch.zeros(3)}, {"w": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: updates: 'w' has shape (2,), its parameter has (3,)
    """
    check_structure("updates", updates, "params", params)
    for place, (update, param) in enumerate(zip(tree.leaves(updates), tree.leaves(params), strict=True)):
        if update is None or (param is not None and update.shape == param.shape):
            continue
        name = _shown(tree.names(updates)[place])
        if param is None:
            raise ValueError(f"updates: {name} has an update but its parameter is None")
        raise ValueError(f"updates: {name} has shape {tuple(update.shape)}, its parameter has {tuple(param.shape)}")


def _check_state(tx: Transform, state: Any, params: Any, *, with_dtypes: bool) -> None:
    """Compare a state with what `init` makes of these parameters, on the meta device, so that nothing is allocated."""
    wanted, wanted_def, expected = _expected_state(tx, params)
    if expected is not None:
        check_state_like(tx.name, state, (wanted, wanted_def, expected), with_dtypes=with_dtypes)


def check_state_like(name: str, state: Any, expected: tuple[list[Any], Any, Any], *, with_dtypes: bool) -> None:
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


def _expected_state(tx: Transform, params: Any) -> tuple[list[Any], Any, Any]:
    leaves, treedef = tree.flatten(params)
    key = (treedef, tuple(None if leaf is None else (leaf.shape, leaf.dtype) for leaf in leaves))
    numbers = tuple(tuple(part.shape) for part in tree.leaves(tx) if isinstance(part, Tensor))
    key = (*key, numbers)  # injected numbers are in the state
    remembered: dict[Any, Any] = tx._context.derived.setdefault("expected_states", {})
    if key not in remembered:
        if any(leaf is None for leaf in leaves) and treedef.num_leaves:
            # A None may stand for an absent parameter or, where gradients stand for the parameters, say nothing.
            return [], None, None
        meta = tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # init has given them already
            expected = tx._functions[0](meta)
        remembered[key] = (*tree.flatten(expected), expected)
    return remembered[key]
