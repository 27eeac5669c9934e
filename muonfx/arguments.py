"""Arguments of plain types, checked against their annotations: a str where a bool is meant is an error, never true.

An annotation says which of bool, int, float and str an argument may be. Python does not look, and so ``nesterov="no"``
would count as true and ``steps=True`` as 1. Only these four types are looked at, and only where the whole annotation
is understood: a union with an unknown name in it may mean anything and is left to whoever reads the argument.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

__all__ = ["check_plain", "plain_arguments", "plain_kinds"]

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = {"bool": "True or False", "int": "an int", "float": "a number or a 0-d tensor", "str": "a string"}
# No plain value is any of these.
_OTHERS = frozenset({"None", "Tensor", "torch.Tensor", "torch.dtype", "torch.device", "Schedule", "Predicate"})
_GENERIC = ("tuple[", "list[", "dict[", "Mapping[", "Sequence[", "Callable[")


def plain_kinds(annotation: Any) -> frozenset[str]:
    """The members of a union, where all are understood and one is a plain type; else the empty set: nothing to check.

    >>> sorted(plain_kinds("float | Schedule | Callable[[Tensor], Tensor]")), plain_kinds("PyTree | bool")
    (['Callable[[Tensor], Tensor]', 'Schedule', 'float'], frozenset())
    """
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or str(annotation)
    members = _members(text)
    known = all(m in _PLAIN or m in _OTHERS or m.startswith(_GENERIC) for m in members)
    return frozenset(members) if known and not members.isdisjoint(_PLAIN) else frozenset()


def _members(text: str) -> set[str]:
    found, depth, start = set[str](), 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "|" and not depth:
            found.add(text[start:at].strip())
            start = at + 1
    return found | {text[start:].strip()}


def check_plain(owner: str, name: str, value: Any, kinds: frozenset[str]) -> None:
    """Require a value of one of the kinds that `plain_kinds` has found.

    An int passes for a float, and a tensor or a traced number for either; a bool passes for nothing but a bool.

    Raises:
        TypeError: it is of another type; the message says which are taken.

    >>> check_plain("momentum", "nesterov", "no", plain_kinds("bool"))
    Traceback (most recent call last):
    TypeError: momentum: nesterov must be True or False, found 'no'
    """
    if not kinds or _is_one_of(value, kinds):
        return
    said = [words for kind, words in _PLAIN.items() if kind in kinds]
    said += sorted(kind for kind in kinds if kind not in _PLAIN)
    raise TypeError(f"{owner}: {name} must be {' or '.join(said)}, found {value!r}")


def _is_one_of(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return "int" in kinds or "float" in kinds
    if isinstance(value, float):
        return "float" in kinds
    if isinstance(value, str):
        return "str" in kinds
    if value is None:
        return "None" in kinds
    if isinstance(value, Tensor):
        return bool(kinds & {"float", "Tensor", "torch.Tensor"})
    if type(value) is object or type(value).__module__.startswith("torch"):
        return True  # the placeholder that a pytree library puts in a leaf's place, a symbolic number, a dtype
    return not kinds <= {*_PLAIN, "None"}  # a schedule, a tuple, ...: whoever reads the argument looks closer


def plain_arguments(function: F) -> F:
    """Check a function's arguments of plain types at every call; for what is called once, not at every step.

    >>> @plain_arguments
    ... def f(steps: int, *, loud: bool = False): ...
    >>> f(3, loud=1)
    Traceback (most recent call last):
    TypeError: f: loud must be True or False, found 1
    """
    signature = inspect.signature(function)
    kinds = kinds_of(signature.parameters)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check_plain(owner, name, value, kinds[name])
        return function(*args, **kwargs)

    return cast("F", checked)


def kinds_of(parameters: Mapping[str, inspect.Parameter]) -> dict[str, frozenset[str]]:
    """Find `plain_kinds` of each parameter; none for one that takes many, or whose default is of another type.

    >>> def f(a: int, *rest: int, b: float = None): ...
    >>> kinds_of(inspect.signature(f).parameters)
    {'a': frozenset({'int'}), 'rest': frozenset(), 'b': frozenset()}
    """
    found: dict[str, frozenset[str]] = {}
    for name, parameter in parameters.items():
        many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        kinds = (
            frozenset[str]() if many or parameter.annotation is parameter.empty else plain_kinds(parameter.annotation)
        )
        fits = parameter.default is parameter.empty or _is_one_of(parameter.default, kinds)
        found[name] = kinds if fits else frozenset()
    return found
