"""Predicates on parameters: frozen values that combine with ``&``, ``|`` and ``~``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from muonfx.select.params import ParamInfo
from muonfx.tree.arguments import plain_arguments
from muonfx.tree.tracing import matches

__all__ = ["Predicate", "asks_for_modules", "module_type", "ndim", "path", "path_patterns", "where"]


class Predicate:
    """A condition on one parameter, as a value.

    Predicates are compared by what they were built from, can be hashed and pickled, print as the code that builds
    them, and combine with ``&``, ``|`` and ``~``. Build them with ``ndim``, ``path``, ``module_type`` and ``where``.

    >>> tall = ndim(2) & ~path("*head*")
    >>> tall
    (ndim(2) & ~path('*head*'))
    >>> tall(ParamInfo("blocks.0.fc", (8, 2))), tall(ParamInfo("lm_head.weight", (8, 2)))
    (True, False)
    >>> eval(repr(tall)) == tall
    True
    """

    __slots__ = ()

    def __call__(self, info: ParamInfo) -> bool:
        """Return True if the parameter matches."""
        raise NotImplementedError

    def code_in(self, scope: str) -> str:
        """The code that builds the predicate, with a prefix for the names of this module, such as "select."."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Predicate, ...]:
        """The predicates that this one combines."""
        return ()

    def __repr__(self) -> str:
        return self.code_in("")

    def __and__(self, other: object) -> Predicate:
        return _Both("&", self, other) if isinstance(other, Predicate) else NotImplemented

    def __or__(self, other: object) -> Predicate:
        return _Both("|", self, other) if isinstance(other, Predicate) else NotImplemented

    def __invert__(self) -> Predicate:
        return _Not(self)

    def __bool__(self) -> NoReturn:
        # `a and b` would silently mean `b`.
        raise TypeError(f"{self!r} has no truth value by itself: call it on a ParamInfo, and combine with &, | and ~")


@dataclass(frozen=True, repr=False)
class _Both(Predicate):
    operator: str
    left: Predicate
    right: Predicate

    def __call__(self, info: ParamInfo) -> bool:
        return (all if self.operator == "&" else any)(part(info) for part in self.parts)

    def code_in(self, scope: str) -> str:
        return f"({self.left.code_in(scope)} {self.operator} {self.right.code_in(scope)})"

    @property
    def parts(self) -> tuple[Predicate, ...]:
        return self.left, self.right


@dataclass(frozen=True, repr=False)
class _Not(Predicate):
    inner: Predicate

    def __call__(self, info: ParamInfo) -> bool:
        return not self.inner(info)

    def code_in(self, scope: str) -> str:
        return f"~{self.inner.code_in(scope)}"

    @property
    def parts(self) -> tuple[Predicate, ...]:
        return (self.inner,)


@dataclass(frozen=True, repr=False)
class _Ndim(Predicate):
    min: int | None
    max: int | None

    def __call__(self, info: ParamInfo) -> bool:
        return (self.min is None or self.min <= info.ndim) and (self.max is None or info.ndim <= self.max)

    def code_in(self, scope: str) -> str:
        if self.min == self.max:
            return f"{scope}ndim({self.min})"
        bounds = (f"{key}={value}" for key, value in (("min", self.min), ("max", self.max)) if value is not None)
        return f"{scope}ndim({', '.join(bounds)})"


@dataclass(frozen=True, repr=False)
class _Path(Predicate):
    patterns: tuple[str, ...]

    def __call__(self, info: ParamInfo) -> bool:
        return any(matches(name, pattern) for name in info.names for pattern in self.patterns)

    def code_in(self, scope: str) -> str:
        return f"{scope}path({', '.join(map(repr, self.patterns))})"


@dataclass(frozen=True, repr=False)
class _ModuleType(Predicate):
    types: tuple[type | str, ...]

    def __call__(self, info: ParamInfo) -> bool:
        return any(_is_a(module, wanted) for module in info.modules for wanted in self.types)

    def code_in(self, scope: str) -> str:
        return f"{scope}module_type({', '.join(_type_code(kind) for kind in self.types)})"


@dataclass(frozen=True, repr=False)
class _Where(Predicate):
    fn: Callable[[ParamInfo], bool]
    name: str

    def __call__(self, info: ParamInfo) -> bool:
        return bool(self.fn(info))

    def code_in(self, scope: str) -> str:
        return f"{scope}where({getattr(self.fn, '__qualname__', repr(self.fn))}, {self.name!r})"


@plain_arguments
def ndim(n: int | None = None, *, min: int | None = None, max: int | None = None) -> Predicate:
    """Parameters with ``n`` dimensions, or with ``min`` to ``max`` of them, both ends included.

    Raises:
        ValueError: no bound is given, or both an exact number and a bound.

    >>> ndim(2), ndim(min=2)
    (ndim(2), ndim(min=2))
    """
    bounds = (min, max) if n is None else (n, n)
    if bounds == (None, None) or (n is not None and (min, max) != (None, None)):
        raise ValueError(f"ndim({n}, min={min}, max={max}): give either the exact number, or min, max or both")
    return _Ndim(*bounds)


def path(*patterns: str) -> Predicate:
    """Parameters with a name that fits one of the patterns.

    Patterns are those of ``fnmatch.fnmatchcase`` over the whole dotted name: ``*`` matches anything, dots too, ``?``
    one character, ``[ab]`` one of a set. All names of a tied tensor are tried, with and without the components that
    ``torch.compile``, FSDP and checkpointing wrappers add.

    Raises:
        ValueError: no pattern is given.
        TypeError: a pattern is not a string.

    >>> path("blocks.*.attn.*")(ParamInfo("blocks.0.attn.q.weight", (4, 4)))
    True
    """
    if not patterns:
        raise ValueError("path() needs at least one pattern, such as path('*.attn.*')")
    for pattern in patterns:
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"path: found {pattern!r}, expected a string; pass several patterns as path('a.*', 'b.*')")
    return _Path(patterns)


def module_type(*types: type | str) -> Predicate:
    """Parameters owned by a module of one of the types, or of a subclass of one.

    A string is a pattern over class names, for classes that are not imported. A tied tensor has several owners and any
    of them counts. Without a model no owner is known and nothing matches.

    Raises:
        ValueError: no type is given.
        TypeError: an argument is neither a class nor a string.

    >>> module_type(nn.Embedding, "*RMSNorm")
    module_type(torch.nn.Embedding, '*RMSNorm')
    """
    if not types:
        raise ValueError("module_type() needs at least one type, such as module_type(nn.Embedding)")
    for kind in types:
        if not isinstance(kind, type | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"module_type: found {kind!r}, expected a class, or a string for its name")
    return _ModuleType(types)


@plain_arguments
def where(fn: Callable[[ParamInfo], bool], name: str | None = None) -> Predicate:
    """Parameters for which your own function returns True.

    It prints as ``where(fn, name)``, compares by function and name, and pickles if the function does: a function
    defined in a module can be pickled, a lambda cannot.

    Raises:
        TypeError: ``fn`` cannot be called.

    >>> where(lambda info: info.shape[0] > 100, "tall")(ParamInfo("fc.weight", (128, 4)))
    True
    >>> tied = where(lambda info: bool(info.tied), "tied")
    >>> frozen = where(lambda info: not info.requires_grad, "frozen")
    """
    if not callable(fn):
        raise TypeError(f"where: found {fn!r}, expected a function of a ParamInfo")
    return _Where(fn, name if name is not None else getattr(fn, "__name__", type(fn).__name__))


def path_patterns(predicate: object) -> tuple[tuple[str, ...], ...]:
    """Return the patterns of every `path` in a predicate, grouped by the paths joined with ``|``."""
    if isinstance(predicate, _Path):
        return (predicate.patterns,)
    groups = [path_patterns(part) for part in (predicate.parts if isinstance(predicate, Predicate) else ())]
    found = tuple(group for part in groups for group in part)
    if isinstance(predicate, _Both) and predicate.operator == "|" and all(groups):
        return (tuple(pattern for group in found for pattern in group),)
    return found


def asks_for_modules(predicate: object) -> bool:
    """Return True if a predicate uses module types, which named tensors do not have."""
    parts = predicate.parts if isinstance(predicate, Predicate) else ()
    return isinstance(predicate, _ModuleType) or any(map(asks_for_modules, parts))


def _is_a(module: type, wanted: type | str) -> bool:
    if isinstance(wanted, str):
        return any(matches(base.__name__, wanted) for base in module.__mro__)
    return issubclass(module, wanted)


def _type_code(kind: type | str) -> str:
    if isinstance(kind, str):
        return repr(kind)
    if getattr(nn, kind.__name__, None) is kind:
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
