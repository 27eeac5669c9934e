"""The signatures of the functions of a transform, and the named extras that its update takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.tree import PyTree
from muonfx.tree.arguments import did_you_mean


def sum_over_leaves(scalars: PyTree) -> Tensor:
    """Add up a tree of tensors of one shape, such as 0-d: the extra ``sum_over_leaves`` in a single process."""
    found = list(tree.tensors(scalars))
    if not found:
        return torch.zeros(())
    return torch.stack([scalar.to(found[0].device) for scalar in found], dim=-1).sum(-1)


class Functions(NamedTuple):
    """The unchecked ``init`` and ``update`` of a transform, by name."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


class Extras(NamedTuple):
    """The named extras in the signature of an update function."""

    named: frozenset[str]
    takes_all: bool
    """True if the function has ``**extras``, which it forwards to the transforms that it calls."""
    required: frozenset[str]
    """Extras that the function, or a transform that it calls, cannot run without."""


ON_PIECES = frozenset({"sum_over_leaves", "shard", "max_over_ranks"})
"""Extras with which a TREE transform can run on a shard of each leaf. It then receives shards, not whole leaves."""

_OUR_EXTRAS = ON_PIECES | {"donate", "only_if", "workspace"}
"""Extras that callers of transforms supply, not training loops."""

_FORMS = ("(params)", "(updates, state, params=None), and named extras by keyword only")


def check_functions(owner: str, built: object) -> None:
    """Require that a constructor returned ``init`` and ``update`` with signatures that fit their calls."""
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


def extras_of(update: Callable[..., object], children: Iterable[Extras]) -> Extras:
    """Return the named extras of an update function, from its signature and the extras of its children."""
    parameters = inspect.signature(update).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    takes_all = inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in parameters}
    required = {parameter.name for parameter in named if parameter.default is parameter.empty}
    names = frozenset({parameter.name for parameter in named})
    for child in children if takes_all else ():
        required |= child.required - names  # an extra that this signature names with a default is optional
    return Extras(names, takes_all, frozenset(required - {"sum_over_leaves"}))


def understood(own: Extras, children: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the extras that a transform or its children read. None: one of them may read any extra."""
    found = list(children) if own.takes_all else []
    return None if None in found else (own.named - _OUR_EXTRAS).union(*filter(None, found))


def check_extras(within: list[Any], extras: Mapping[str, Any]) -> None:
    """Raise if a required extra is missing or a given extra is unread; `within` lists outer transforms first."""
    tx = within[0]
    missing = sorted(tx.extras.required - extras.keys())
    if missing:
        innermost = [part for part in within if missing[0] in part.extras.required][-1]
        raise TypeError(
            f"{innermost.name} needs the named extra {missing[0]}: give update(..., {missing[0]}=...), or "
            f"optimizer.step({missing[0]}=...)"
        )
    if not extras:
        return
    known = tx.understood_extras
    unknown = [] if known is None else sorted(extras.keys() - known - _OUR_EXTRAS)
    if known is not None and unknown:
        raise TypeError(
            f"{tx.name}: nothing in it reads the named extra {unknown[0]}{did_you_mean(unknown[0], known)}; "
            f"it reads {', '.join(sorted(known)) or 'none'}. A transform reads the extras that its update's "
            "signature names"
        )
    for part in () if torch.compiler.is_compiling() else within:
        if part.declaration.check_extras is not None:
            part.declaration.check_extras(part, extras)
