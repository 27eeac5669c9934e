"""The extra arguments of ``update``, such as ``value=loss``: which a function accepts, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.internal.arguments import did_you_mean
from muonfx.tree import PyTree

InitAndUpdate = tuple[Callable[[PyTree], PyTree], Callable[..., tuple[PyTree, PyTree]]]
"""The pair ``(init, update)`` that a function decorated with `transform` returns."""


def sum_over_leaves(scalars: PyTree) -> Tensor:
    """Return the sum of a tree of equally shaped tensors, such as one squared norm for each leaf."""
    found = list(tree.tensors(scalars))
    if not found:
        return torch.zeros((), dtype=torch.float32, device=tree.device_of(scalars))
    return torch.stack([scalar.to(found[0].device) for scalar in found], dim=-1).sum(-1)


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
    understood: frozenset[str] | None
    """The arguments that a training loop may pass, for the function or a transform that it calls. None: any."""


ON_PIECES = frozenset({"sum_over_leaves", "shard", "max_over_ranks"})
"""Extra arguments that compute over ranks. A TREE transform that names one of them runs on shards, without a gather."""

_OUR_EXTRAS = ON_PIECES | {"donate", "only_if", "workspace"}
"""Extra arguments that muonfx supplies to an update, so that a training loop need not."""

_FORMS = ("(params)", "(updates, state, params=None), and extra arguments by keyword only")


def check_functions(owner: str, built: object) -> None:
    """Raise TypeError unless a constructor returned ``(init, update)`` with the expected signatures."""
    if not (isinstance(built, tuple) and len(built) == 2 and all(map(callable, built))):
        raise TypeError(
            f"{owner}: the decorated function must return (init, update), two functions, found {type(built).__name__}"
        )
    for role, function, form, count in zip(("init", "update"), built, _FORMS, (1, 3), strict=True):
        try:
            signature = inspect.signature(function)
        except ValueError:  # a function written in C may have no signature
            continue
        try:
            named = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
            signature.bind(*[None] * count, **dict.fromkeys(named))
        except TypeError as error:
            raise TypeError(f"{owner}: its {role} must take {form}; it takes {signature}: {error}") from None


def extras_of(update: Callable[..., object], called: Iterable[Extras], *, calls_none: bool) -> Extras:
    """Return the extra arguments, such as ``value=loss``, that an update function accepts.

    They follow from its signature and, if it has ``**extras``, from the transforms that it calls. If it calls none
    (``calls_none``), ``**extras`` accepts any name.
    """
    named, required, takes_all = set[str](), set[str](), False
    for parameter in inspect.signature(update).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named.add(parameter.name)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
        takes_all = takes_all or parameter.kind is parameter.VAR_KEYWORD
    understood = None if takes_all and calls_none else frozenset(named - _OUR_EXTRAS)
    for one in called if takes_all else ():
        required |= one.required - named  # an argument that this signature names with a default is optional
        understood = None if understood is None or one.understood is None else understood | one.understood
    return Extras(frozenset(named), takes_all, frozenset(required - {"sum_over_leaves"}), understood)


def check_extras_within(within: list[Any], extras: Mapping[str, Any]) -> None:
    """Raise TypeError if an extra argument of ``update`` is missing, or if no transform accepts it."""
    tx = within[0]
    missing = sorted(tx.extras.required - extras.keys())
    if missing:
        innermost = [part for part in within if missing[0] in part.extras.required][-1]
        raise TypeError(
            f"{innermost.name}: the extra argument {missing[0]}= is missing: call update(..., {missing[0]}=...) or "
            f"optimizer.step({missing[0]}=...)"
        )
    if not extras:
        return
    known = tx.extras.understood
    unknown = [] if known is None else sorted(extras.keys() - known - _OUR_EXTRAS)
    if known is not None and unknown:
        expected = f"only {' or '.join(f'{name}=' for name in sorted(known))}" if known else "no extra argument"
        within_it = " and the transforms in it do" if len(within) > 1 else " does"
        raise TypeError(
            f"{tx.name}: found the extra argument {unknown[0]}={did_you_mean(unknown[0], known)}, expected {expected}: "
            f"leave it out, since {tx.name}{within_it} not read it"
        )
    for part in () if torch.compiler.is_compiling() else within:
        if part.declaration.check_extras is not None:
            part.declaration.check_extras(part, extras)
