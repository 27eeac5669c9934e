"""Factories: a constructor with its parsed signature and the arguments of the decorator; lazy attributes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from muonfx.tree.arguments import kinds_of

V = TypeVar("V")

Memory = dict[object, Any]
"""A constructor's cache, which exists as long as the structure of the value; its keys determine the results."""


# The kinds of a `ScalarOrSchedule`. Its constructor gets the number of each step, a float or a 0-d tensor.
_BY_STEP = frozenset({"Tensor", "Schedule"})
_SCALAR = _BY_STEP | {"float", "None"}


@dataclass(frozen=True, eq=False)
class Definition:
    """A factory's constructor, its parsed signature, and the arguments of the decorator."""

    constructor: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    """The recorded parameters."""
    kinds: tuple[tuple[str, str], ...]
    """Name and kind of each parameter, as strings that can be traced."""
    plain: Mapping[str, frozenset[str]]
    """The plain types that each parameter's annotation accepts."""
    name: str | None
    """The declared public name."""
    remembers: bool
    """True if the constructor takes a `Memory` as its first argument."""
    transparent: bool
    """True if a value represents its only part and adds nothing to that part's name."""
    is_ours: bool
    """True if the constructor belongs to this package, whose tests check what its functions return."""
    declaration: object
    """Further options of the decorator, such as a `Declaration`."""

    def as_float(self, name: str, value: Any) -> object:
        """Convert an int to a float if the annotation of the parameter is float."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if is_int and "float" in self.plain[name] else value


class Factory(Protocol):
    """A decorated constructor."""

    definition: Definition
    __name__: str
    __qualname__: str
    __module__: str
    __signature__: inspect.Signature

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Record a call."""
        ...


def make_factory(
    kind: Any,
    constructor: Callable[..., Any],
    declaration: object = None,
    *,
    name: str | None = None,
    transparent: bool = False,
) -> Any:
    """Turn a function into a factory of recorded values with the function's name, signature and docstring."""

    @functools.wraps(constructor)
    def call(*args: object, **kwargs: object) -> Any:
        return kind.record(factory, *args, **kwargs).prepare_all()

    if name is not None and not (isinstance(name, str) and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"name must be identifiers with dots between them, such as 'acme.my_momentum', found {name!r}")
    parameters = dict(inspect.signature(constructor).parameters)
    accepted = kinds_of(parameters, constructor)
    factory = cast("Factory", call)
    factory.definition = Definition(
        constructor,
        parameters,
        tuple((argument, parameter.kind.name) for argument, parameter in parameters.items()),
        {argument: own - _BY_STEP if _BY_STEP <= own <= _SCALAR else own for argument, own in accepted.items()},
        name,
        getattr(constructor, "takes_memory", False),
        transparent,
        (constructor.__module__ or "").partition(".")[0] == __name__.partition(".")[0],
        declaration,
    )
    return factory


class Lazy(Generic[V]):
    """An attribute that is computed when it is first read, and is then a plain attribute of the value."""

    def __init__(self, compute: Callable[[Any], V]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, value: Any, kind: type | None = None) -> V:
        if value is None:  # read from the class, as by a documentation tool
            return cast("V", self)
        found = self._compute(value)
        # Objects created while tracing must not be stored on an object that outlives the trace.
        if not torch.compiler.is_compiling():
            value.__dict__[self._name] = found
        return found


def of_structure(find: Callable[[Any], V]) -> V:
    """Make an attribute that follows from the structure of a value; all values of the structure share it."""
    name = find.__name__

    @functools.wraps(find)
    def get(self: Any) -> V:
        found = self.structure.attributes
        if name not in found:
            found[name] = find(self)
        return cast("V", found[name])

    return cast("V", Lazy(get))
