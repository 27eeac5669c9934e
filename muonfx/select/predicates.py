"""Predicates on parameters: frozen values that combine with ``&``, ``|`` and ``~``.

Each kind of predicate is a small private class with a public constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import NoReturn

from torch import nn

from muonfx.select.params import ParamInfo
from muonfx.tree.arguments import plain_arguments
from muonfx.tree.tracing import matches

__all__ = [
    "Predicate",
    "asks_for_modules",
    "frozen",
    "module_type",
    "ndim",
    "numel",
    "path",
    "path_patterns",
    "shape",
    "tied",
    "where",
]


class Predicate:
    """A question about one parameter, as a value.

    Predicates are compared by what they were built from, can be hashed and pickled, print as the code that builds
    them, and combine with ``&``, ``|`` and ``~``. Build them with ``ndim``, ``shape``, ``numel``, ``path``,
    ``module_type``, ``tied``, ``frozen`` and ``where``.

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

    def __repr__(self) -> str:
        return self.code_in("")

    def __and__(self, other: object) -> Predicate:
        return _And(self, other) if isinstance(other, Predicate) else NotImplemented

    def __or__(self, other: object) -> Predicate:
        return _Or(self, other) if isinstance(other, Predicate) else NotImplemented

    def __invert__(self) -> Predicate:
        return _Not(self)

    def __bool__(self) -> NoReturn:
        # `a and b` would silently mean `b`.
        raise TypeError(f"{self!r} has no truth value by itself: call it on a ParamInfo, and combine with &, | and ~")


@dataclass(frozen=True, repr=False)
class _And(Predicate):
    left: Predicate
    right: Predicate

    def __call__(self, info: ParamInfo) -> bool:
        return self.left(info) and self.right(info)

    def code_in(self, scope: str) -> str:
        return f"({self.left.code_in(scope)} & {self.right.code_in(scope)})"


@dataclass(frozen=True, repr=False)
class _Or(Predicate):
    left: Predicate
    right: Predicate

    def __call__(self, info: ParamInfo) -> bool:
        return self.left(info) or self.right(info)

    def code_in(self, scope: str) -> str:
        return f"({self.left.code_in(scope)} | {self.right.code_in(scope)})"


@dataclass(frozen=True, repr=False)
class _Not(Predicate):
    inner: Predicate

    def __call__(self, info: ParamInfo) -> bool:
        return not self.inner(info)

    def code_in(self, scope: str) -> str:
        return f"~{self.inner.code_in(scope)}"


@dataclass(frozen=True, repr=False)
class _Between(Predicate):
    what: str
    min: int | None
    max: int | None

    def __call__(self, info: ParamInfo) -> bool:
        value = info.ndim if self.what == "ndim" else info.numel
        return (self.min is None or self.min <= value) and (self.max is None or value <= self.max)

    def code_in(self, scope: str) -> str:
        if self.what == "ndim" and self.min == self.max:
            return f"{scope}ndim({self.min})"
        return f"{scope}{self.what}({_keywords(min=self.min, max=self.max)})"


@dataclass(frozen=True, repr=False)
class _Shape(Predicate):
    before: tuple[int | None, ...]
    after: tuple[int | None, ...] | None  # None: no `...` in the pattern
    min_side: int | None
    max_side: int | None

    def __call__(self, info: ParamInfo) -> bool:
        tail = self.after or ()
        fixed = len(self.before) + len(tail)
        if info.ndim < fixed or (self.after is None and info.ndim > fixed):
            return False
        sides = (*info.shape[: len(self.before)], *info.shape[info.ndim - len(tail) :])
        return (
            all(want is None or side == want for side, want in zip(sides, (*self.before, *tail), strict=True))
            and all(self.min_side is None or side >= self.min_side for side in info.shape)
            and all(self.max_side is None or side <= self.max_side for side in info.shape)
        )

    def code_in(self, scope: str) -> str:
        pattern = [repr(side) for side in self.before]
        bounds = _keywords(min_side=self.min_side, max_side=self.max_side)
        if self.after is not None and not (bounds and not self.before and not self.after):
            pattern += ["...", *(repr(side) for side in self.after)]
        return f"{scope}shape({', '.join([*pattern, *([bounds] if bounds else [])])})"


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
class _Flag(Predicate):
    what: str

    def __call__(self, info: ParamInfo) -> bool:
        return bool(info.tied) if self.what == "tied" else not info.requires_grad

    def code_in(self, scope: str) -> str:
        return f"{scope}{self.what}()"


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
    if n is not None:
        if min is not None or max is not None:
            raise ValueError(f"ndim({n}, min={min}, max={max}): give the exact number or bounds, not both")
        min = max = n
    return _between("ndim", min, max)


@plain_arguments
def numel(*, min: int | None = None, max: int | None = None) -> Predicate:
    """Parameters with ``min`` to ``max`` elements, both ends included.

    Raises:
        ValueError: no bound is given.

    >>> numel(max=4)(ParamInfo("scale", (4,)))
    True
    """
    return _between("numel", min, max)


@plain_arguments
def shape(*sides: int | EllipsisType | None, min_side: int | None = None, max_side: int | None = None) -> Predicate:
    """Parameters whose shape fits a pattern and whose sides all lie within bounds.

    Args:
        *sides: one entry a dimension: a number, None for any length, and at most one ``...`` for any number of
            dimensions. Without any, every shape fits (a scalar is ``ndim(0)``).
        min_side: the least length of every side.
        max_side: the greatest length of every side.

    Raises:
        ValueError: nothing is asked, or ``...`` occurs twice.

    >>> pointwise = shape(None, None, 1, 1)
    >>> pointwise(ParamInfo("conv.weight", (8, 4, 1, 1))), shape(..., 4)(ParamInfo("fc.weight", (8, 4)))
    (True, True)
    """
    if not sides and min_side is None and max_side is None:
        raise ValueError("shape() asks nothing: give a pattern such as shape(None, 1), or min_side, or max_side")
    if sum(side is ... for side in sides) > 1:
        raise ValueError(f"shape{sides}: at most one ... can be matched")
    for side in sides:
        if not (side is None or side is ... or type(side) is int):
            raise TypeError(f"shape{sides}: found {side!r}, expected an int, None or ...")
    before: list[int | None] = []
    after: list[int | None] | None = None if sides else []
    for side in sides:
        if isinstance(side, EllipsisType):
            after = []
        else:
            (before if after is None else after).append(side)
    return _Shape(tuple(before), None if after is None else tuple(after), min_side, max_side)


def path(*patterns: str) -> Predicate:
    """Parameters with a name that fits one of the patterns.

    Patterns are those of ``fnmatch.fnmatchcase`` over the whole dotted name: ``*`` matches anything, dots too, ``?``
    one character, ``[ab]`` one of a set. All names of a tied tensor are tried, with and without the components that
    ``torch.compile``, FSDP and checkpointing wrappers add.

    Raises:
        ValueError: no pattern is given.
        TypeError: a pattern is no string.

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

    A string is a pattern over class names, for classes that are not at hand. A tied tensor has several owners and any
    of them counts. Without a model no owner is known and nothing matches.

    Raises:
        ValueError: no type is given.
        TypeError: something is neither a class nor a string.

    >>> module_type(nn.Embedding, "*RMSNorm")
    module_type(torch.nn.Embedding, '*RMSNorm')
    """
    if not types:
        raise ValueError("module_type() needs at least one type, such as module_type(nn.Embedding)")
    for kind in types:
        if not isinstance(kind, type | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"module_type: found {kind!r}, expected a class, or a string for its name")
    return _ModuleType(types)


def tied() -> Predicate:
    """Parameters that are one tensor under several names, or of several modules.

    >>> tied()(ParamInfo("wte.weight", (8, 4), tied=("lm_head.weight",)))
    True
    """
    return _Flag("tied")


def frozen() -> Predicate:
    """Parameters that were set to ``requires_grad=False``.

    >>> frozen()(ParamInfo("wte.weight", (8, 4), requires_grad=False))
    True
    """
    return _Flag("frozen")


@plain_arguments
def where(fn: Callable[[ParamInfo], bool], name: str | None = None) -> Predicate:
    """Parameters for which your own function is true.

    It prints as ``where(fn, name)``, compares by function and name, and pickles if the function does: a function
    defined in a module does all that, a lambda works and cannot be pickled.

    Raises:
        TypeError: ``fn`` cannot be called.

    >>> where(lambda info: info.shape[0] > 100, "tall")(ParamInfo("fc.weight", (128, 4)))
    True
    """
    if not callable(fn):
        raise TypeError(f"where: found {fn!r}, expected a function of a ParamInfo")
    return _Where(fn, name if name is not None else getattr(fn, "__name__", type(fn).__name__))


def path_patterns(predicate: object) -> tuple[tuple[str, ...], ...]:
    """Return the patterns of every `path` in a predicate, grouped by the paths joined with ``|``."""
    if isinstance(predicate, _Path):
        return (predicate.patterns,)
    if isinstance(predicate, _Or | _And):
        left, right = path_patterns(predicate.left), path_patterns(predicate.right)
        if isinstance(predicate, _Or) and left and right:
            return (tuple(pattern for group in (*left, *right) for pattern in group),)
        return (*left, *right)
    return path_patterns(predicate.inner) if isinstance(predicate, _Not) else ()


def asks_for_modules(predicate: object) -> bool:
    """Return True if a predicate uses module types, which named tensors do not have."""
    if isinstance(predicate, _Or | _And):
        return asks_for_modules(predicate.left) or asks_for_modules(predicate.right)
    return asks_for_modules(predicate.inner) if isinstance(predicate, _Not) else isinstance(predicate, _ModuleType)


def _between(what: str, low: int | None, high: int | None) -> Predicate:
    if low is None and high is None:
        raise ValueError(f"{what}() asks nothing: give min, max or both")
    return _Between(what, low, high)


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


def _keywords(**values: int | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)
