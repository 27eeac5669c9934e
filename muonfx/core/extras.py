"""The extra arguments of ``update``, such as ``value=loss``: which a function accepts, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.internal.arguments import did_you_mean
from muonfx.tree import PyTree

InitAndUpdate = tuple[Callable[[PyTree], PyTree], Callable[..., tuple[PyTree, PyTree]]]
"""The pair ``(init, update)`` that a function decorated with `transform` returns."""


def sum_over_leaves(scalars: PyTree) -> Tensor:
    """Return the sum of a tree of equally shaped tensors, such as one squared norm for each leaf.

    >>> sum_over_leaves({"w": torch.tensor(4.0), "b": torch.tensor(1.0)})
    tensor(5.)
    """
    leaves = list(tree.tensors(scalars))
    if not leaves:
        return torch.zeros((), dtype=torch.float32, device=tree.device_of(scalars))
    device = leaves[0].device  # leaves may be on several devices, which one sum cannot mix
    return torch.stack([scalar.to(device) for scalar in leaves], dim=-1).sum(-1)


def unchanged(values: PyTree) -> PyTree:
    """Return a tree as it is: without ranks, ``shard``, ``sum_over_shards`` and ``max_over_ranks`` change nothing."""
    return values


class Functions(NamedTuple):
    """The functions ``(init, update)`` that a constructor returned, without the checks that `Transform` adds."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


class Extras(NamedTuple):
    """The extra arguments, such as ``value=loss``, that an update function accepts."""

    named: frozenset[str]
    """The keyword-only arguments in the signature of the function."""
    takes_all: bool
    """True if the function has ``**extras``, which it forwards to the transforms that it calls."""
    required: frozenset[str]
    """The arguments without a default, of the function or of a transform that it calls."""
    accepted: frozenset[str] | None
    """The arguments that a training loop may pass, for the function or a transform that it calls. None: any."""


EXTRAS_OVER_RANKS = frozenset({"sum_over_leaves", "sum_over_shards", "shard", "max_over_ranks"})
"""Extra arguments that compute over ranks. A TREE transform that names one of them runs on shards, without a gather."""

_ALWAYS_SUPPLIED = frozenset({"sum_over_leaves"})
"""Extra arguments that `Transform.run` supplies if the caller does not, so that they are never required."""

_OUR_EXTRAS = EXTRAS_OVER_RANKS | {"donate", "only_if", "workspace", "apply_to_params"}
"""Extra arguments that muonfx supplies to an update, so that a training loop need not."""


def check_functions(owner: str, built: object) -> None:
    """Raise TypeError unless a constructor returned ``(init, update)``, two functions."""
    if not (isinstance(built, tuple) and len(built) == 2 and all(map(callable, built))):
        raise TypeError(
            f"{owner}: the decorated function must return (init, update), two functions, found {type(built).__name__}"
        )


def require_arguments(what: str, function: Callable[..., object], names: Sequence[str]) -> None:
    """Raise TypeError unless a function of a user can be called with these positional arguments.

    Args:
        what: the name of the function in the error.
        function: the function. It may also have keyword-only arguments, which are extra arguments of an update.
        names: the names of the arguments in the error; the function may have others.

    >>> require_arguments(
    ...     "halve: update", lambda updates, state: None, ("updates", "state", "params")
    ... )
    Traceback (most recent call last):
    TypeError: halve: update must accept the arguments (updates, state, params), found (updates, state)
    """
    try:
        # The signature of a wrapper counts, not of the function that it wraps: a decorator may add or supply arguments.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a function of C may have none that Python can read
        return
    extras: dict[str, str] = {}  # any value for each keyword-only argument
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            extras[parameter.name] = parameter.name
    try:
        signature.bind(*names, **extras)
    except TypeError:
        expected = f"must accept the arguments ({', '.join(names)})"
        raise TypeError(
            f"{what} {expected}, found {signature}{_advice_on_extras(signature, names)}"
        ) from None


def _advice_on_extras(signature: inspect.Signature, names: Sequence[str]) -> str:
    """Return advice for a function that requires more positional arguments than it receives; "" for any other."""
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in _POSITIONAL_KINDS
    ]
    if len(positional) <= len(names):
        return ""
    return f": if {positional[len(names)].name} is an extra argument, write a * before it"


_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def extras_of(update: Callable[..., object]) -> Extras:
    """Return the extra arguments in the signature of an update function. With ``**extras``, it accepts any name.

    Here, a training loop may pass ``value``. It need not pass ``donate``, which muonfx supplies, so ``accepted`` has no
    such name.

    >>> def update(updates, state, params=None, *, value, donate): ...
    >>> extras = extras_of(update)
    >>> sorted(extras.named), sorted(extras.required), sorted(extras.accepted)
    (['donate', 'value'], ['donate', 'value'], ['value'])
    """
    names: set[str] = set()
    required: set[str] = set()  # those without a default
    takes_all = False
    for parameter in inspect.signature(update).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.KEYWORD_ONLY:
            names.add(parameter.name)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
    accepted = None  # any name
    if not takes_all:
        accepted = frozenset(names - _OUR_EXTRAS)
    return Extras(frozenset(names), takes_all, frozenset(required - _ALWAYS_SUPPLIED), accepted)


def forwarding(outer: Extras, inner: Iterable[Extras]) -> Extras:
    """Return the extra arguments of a function that forwards its ``**extras`` to transforms with the extras ``inner``.

    It requires and accepts the extra arguments of the inner transforms, too. One that it names with a default is
    optional.

    >>> def outer_update(updates, state, params=None, *, value=1.0, **extras): ...
    >>> def inner_update(updates, state, params=None, *, value, loss): ...
    >>> extras = forwarding(extras_of(outer_update), [extras_of(inner_update)])
    >>> sorted(extras.required), sorted(extras.accepted)
    (['loss'], ['loss', 'value'])
    """
    required = outer.required
    accepted: frozenset[str] | None = outer.named - _OUR_EXTRAS
    for extras in inner:
        required |= extras.required - outer.named
        if accepted is None or extras.accepted is None:  # any name
            accepted = None
        else:
            accepted |= extras.accepted
    return Extras(outer.named, outer.takes_all, required, accepted)


def check_extras_within(transforms: list[Any], extras: Mapping[str, Any]) -> None:
    """Raise TypeError if an extra argument of ``update`` is missing, or if no transform accepts it.

    ``transforms`` are a transform and all transforms that it calls, in the order of `muonfx.core.transform.within`.
    """
    # Its extra arguments include the arguments of all transforms that it calls.
    outermost = transforms[0]
    # The compiler of torch 2.10 cannot subtract a set and the keys of a dict.
    names = frozenset(extras)
    missing = sorted(outermost.extras.required - names)
    if missing:
        raise _missing(transforms, missing[0])
    accepted = outermost.extras.accepted
    if accepted is not None:  # else it accepts any name
        unknown = sorted(names - accepted - _OUR_EXTRAS)
        if unknown:
            _require_keyword(transforms, unknown[0])
            raise _unknown(outermost, unknown[0])
    check_values_of_extras(transforms, extras)


def check_values_of_extras(transforms: Iterable[Any], extras: Mapping[str, Any]) -> None:
    """Raise if one of several transforms cannot use the value of an extra argument, such as ``max_logits``.

    Each transform may declare a function ``check_extras``, which raises for a wrong value. Here it is called.
    """
    if not extras or torch.compiler.is_compiling():  # a trace has no values to check
        return
    for tx in transforms:
        check = tx.declaration.check_extras
        if check is not None:
            check(tx, extras)


def _missing(transforms: list[Any], name: str) -> TypeError:
    """Return the error of a missing extra argument, with the name of an innermost transform that requires it."""
    requiring = [tx for tx in transforms if name in tx.extras.required]
    return TypeError(
        f"{requiring[-1].name}: the extra argument {name}= is missing: call update(..., {name}=...) or "
        f"optimizer.step({name}=...)"
    )


def _require_keyword(transforms: list[Any], name: str) -> None:
    """Raise TypeError if the update of a transform has a positional argument of this name, such as ``value=1.0``.

    Only keyword-only arguments are extra arguments, because ``update(grads, state, params, other)`` is a mistake.
    """
    for tx in transforms:
        parameters = list(inspect.signature(tx.functions.update).parameters.values())
        for parameter in parameters[3:]:  # after updates, state and params
            if parameter.name == name and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                raise TypeError(
                    f"{tx.name}: the argument {name} of update is positional, expected a keyword-only one: write a * "
                    f"before it, as in update(updates, state, params=None, *, {name})"
                )


def _unknown(outermost: Any, name: str) -> TypeError:
    """Return the error of an extra argument that neither the outermost transform nor one within it reads.

    For ``update(..., values=loss)`` of a transform that reads "value", it is "...: found the extra argument values=
    (did you mean 'value'?), expected only value=: leave it out, since no transform reads it".
    """
    accepted = sorted(outermost.extras.accepted)  # a misspelt name is probably one of these
    expected = "no extra argument"
    if accepted:
        expected = f"only {'= or '.join(accepted)}="
    return TypeError(
        f"{outermost.name}: found the extra argument {name}={did_you_mean(name, accepted)}, expected {expected}: "
        "leave it out, since no transform reads it"
    )
