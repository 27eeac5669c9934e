"""Predicates: conditions on one parameter, such as ``ndim(2)``, which combine with ``&``, ``|`` and ``~``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from torch import nn

from muonfx import tree
from muonfx.core.partition import Condition
from muonfx.internal.arguments import plain_arguments
from muonfx.routing.globs import any_glob_matches
from muonfx.routing.params import ParamInfo, read_params
from muonfx.tree import PyTree


@dataclass(frozen=True, repr=False)
class Predicate(Condition):
    """A condition on one parameter, for the rules of `labels`; call it on a `ParamInfo`.

    Build predicates with `ndim`, `path`, `module_type` and `where`, and combine them with ``&``, ``|`` and ``~``.
    Predicates with equal arguments are equal. They can be hashed and pickled, and print as the code that builds them.

    >>> tall = ndim(2) & ~path("*head*")
    >>> tall
    (ndim(2) & ~path('*head*'))
    >>> tall(ParamInfo("blocks.0.fc", (8, 2))), tall(ParamInfo("lm_head.weight", (8, 2)))
    (True, False)
    >>> eval(repr(tall)) == tall
    True
    """

    name: str
    """The function that built the predicate, such as "path", or the operator "&", "|" or "~"."""
    arguments: tuple[Any, ...]
    """The arguments of that function, or the operands."""

    def __call__(self, info: ParamInfo) -> bool:
        """Return True if the parameter that ``info`` describes matches."""
        return _MATCHES[self.name](info, *self.arguments)

    def code_in(self, scope: str) -> str:
        """Return Python code that builds this predicate; ``scope`` is written in front of each function.

        >>> (ndim(2) & ~path("*head*")).code_in("routing.")
        "(routing.ndim(2) & ~routing.path('*head*'))"
        """
        operands = [operand.code_in(scope) for operand in self.parts]
        if self.name == "~":
            return f"~{operands[0]}"
        if self.name in ("&", "|"):
            return f"({operands[0]} {self.name} {operands[1]})"
        if self.name == "ndim":  # its bounds are written in several ways: "2", "min=2", "max=4"
            return f"{scope}ndim({_code_of_bounds(*self.arguments)})"
        return f"{scope}{self.name}({', '.join(map(_code_of, self.arguments))})"

    @property
    def parts(self) -> tuple[Predicate, ...]:
        """The conditions that ``&``, ``|`` or ``~`` combine, as a tuple of predicates; empty for a single condition."""
        return tuple([operand for operand in self.arguments if isinstance(operand, Predicate)])

    def select(self, params: PyTree) -> dict[str, bool]:
        """Return a dict from the name of each parameter in a pytree to True if the predicate matches it.

        >>> ndim(2).select({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
        {'b': False, 'w': True}
        """
        # A parameter that is None has no `ParamInfo`, and is not selected.
        is_selected = dict.fromkeys(tree.names(params), False)
        infos, _ = read_params(params)
        for info in infos:
            is_selected[info.name] = self(info)
        return is_selected

    def globs(self) -> tuple[tuple[str, ...], ...]:
        """Return the globs of each `path` within, in groups, to find misspelt ones.

        A group is several globs of which at least one should match the name of a parameter; else they are misspelt.
        With ``&``, each operand has groups of its own. With ``|``, one operand may match nothing, so that the globs of
        both are one group.

        >>> (path("a.*") & (path("b.*") | path("c.*"))).globs()
        (('a.*',), ('b.*', 'c.*'))
        """
        if self.name == "path":  # one group: the arguments of `path`
            return (self.arguments,)
        groups_of_parts = [part.globs() for part in self.parts]
        groups = tuple(chain.from_iterable(groups_of_parts))
        # An operand without globs, such as `ndim`, has no groups. The globs of the other one stay as they are.
        is_one_group = self.name == "|" and all(groups_of_parts)
        if is_one_group:
            return (tuple(chain.from_iterable(groups)),)
        return groups

    def needs_modules(self) -> bool:
        """Return True if the predicate depends on module types (`module_type`), which named tensors do not have."""
        return self.name == "module_type" or any(map(Predicate.needs_modules, self.parts))

    def __repr__(self) -> str:
        return self.code_in("")

    def __and__(self, other: object) -> Predicate:
        if not isinstance(other, Predicate):
            return NotImplemented
        return Predicate("&", (self, other))

    def __or__(self, other: object) -> Predicate:
        if not isinstance(other, Predicate):
            return NotImplemented
        return Predicate("|", (self, other))

    def __invert__(self) -> Predicate:
        return Predicate("~", (self,))

    def __bool__(self) -> NoReturn:
        # `a and b` would silently mean `b`.
        raise TypeError(
            f"{self!r} has no truth value by itself: call it on a ParamInfo, and combine with &, | and ~"
        )


_MATCHES: dict[str, Callable[..., bool]] = {
    "&": lambda info, left, right: left(info) and right(info),
    "|": lambda info, left, right: left(info) or right(info),
    "~": lambda info, inner: not inner(info),
    "ndim": lambda info, low, high: (
        (low is None or low <= info.ndim) and (high is None or info.ndim <= high)
    ),
    "path": lambda info, *globs: any_glob_matches(globs, info.names),
    "module_type": lambda info, *types: any(
        _is_in_module(info, type_or_glob) for type_or_glob in types
    ),
    "where": lambda info, fn, _: bool(fn(info)),
}


@plain_arguments
def ndim(n: int | None = None, *, min: int | None = None, max: int | None = None) -> Predicate:
    """Return a predicate that matches parameters with exactly ``n`` dims, or with ``min`` to ``max`` dims, inclusive.

    Raises:
        ValueError: there is no argument, or both ``n`` and a bound.

    >>> ndim(2), ndim(min=2)
    (ndim(2), ndim(min=2))
    """
    has_number = n is not None
    has_bounds = min is not None or max is not None
    if has_number == has_bounds:  # both, or none
        raise ValueError(
            f"ndim({n}, min={min}, max={max}): give either the exact number, or min, max or both"
        )
    if has_number:
        return Predicate("ndim", (n, n))
    return Predicate("ndim", (min, max))


def path(*patterns: str) -> Predicate:
    """Return a predicate that matches a parameter if its name matches one of the glob patterns.

    Each pattern is compared with the whole dotted name by ``fnmatch.fnmatchcase``: ``*`` matches any characters,
    including dots, ``?`` one character, and ``[ab]`` one character of a set. A tied tensor matches by any of its names.
    Names match with and without the components that ``torch.compile``, FSDP and activation checkpointing add.

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
            raise TypeError(
                f"path: found {pattern!r}, expected a string; pass several patterns as path('a.*', 'b.*')"
            )
    return Predicate("path", patterns)


def module_type(*types: type | str) -> Predicate:
    """Return a predicate that matches parameters owned by a module of one of the given types or their subclasses.

    A type may also be a string, a glob over class names; then it need not be imported. A tied tensor matches if any
    module that owns it matches. Named tensors without a model never match, because their modules are unknown.

    Raises:
        ValueError: no type is given.
        TypeError: an argument is neither a class nor a string.

    >>> module_type(nn.Embedding, "*RMSNorm")
    module_type(torch.nn.Embedding, '*RMSNorm')
    """
    if not types:
        raise ValueError("module_type() needs at least one type, such as module_type(nn.Embedding)")
    for type_or_glob in types:
        if not isinstance(type_or_glob, type | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"module_type: found {type_or_glob!r}, expected a class, or a string for its name"
            )
    return Predicate("module_type", types)


@plain_arguments
def where(fn: Callable[[ParamInfo], bool], name: str | None = None) -> Predicate:
    """Return a predicate that matches parameters for which ``fn(info)`` is True; ``info`` is a `ParamInfo`.

    The predicate prints as ``where(fn, name)``; ``name`` is by default the name of the function. Two such predicates
    are equal if function and name are. It can be pickled if ``fn`` is defined in a module; a lambda cannot.

    Raises:
        TypeError: ``fn`` is not callable.

    >>> where(lambda info: info.shape[0] > 100, "tall")(ParamInfo("fc.weight", (128, 4)))
    True
    >>> tied = where(lambda info: bool(info.tied), "tied")
    >>> frozen = where(lambda info: not info.requires_grad, "frozen")
    """
    if not callable(fn):
        raise TypeError(f"where: found {fn!r}, expected a function of a ParamInfo")
    if name is None:
        name = getattr(fn, "__name__", type(fn).__name__)
    return Predicate("where", (fn, name))


def _is_in_module(info: ParamInfo, type_or_glob: type | str) -> bool:
    """Return True if a module that owns a parameter is of a type, or of a class whose name a glob matches.

    For example, ``nn.Embedding`` and "*Embedding" both match a parameter of an ``nn.Embedding``.
    """
    if isinstance(type_or_glob, type):
        return any(issubclass(module_class, type_or_glob) for module_class in info.modules)
    for module_class in info.modules:  # several for a tied parameter
        class_names = [base.__name__ for base in module_class.__mro__]
        if any_glob_matches([type_or_glob], class_names):
            return True
    return False


def _code_of_bounds(low: int | None, high: int | None) -> str:
    """Return the code of the arguments of `ndim`.

    >>> _code_of_bounds(2, 2), _code_of_bounds(2, None), _code_of_bounds(2, 4)
    ('2', 'min=2', 'min=2, max=4')
    """
    if low == high:
        return str(low)
    if high is None:
        return f"min={low}"
    if low is None:
        return f"max={high}"
    return f"min={low}, max={high}"


def _code_of(argument: object) -> str:
    """Return the Python code of an argument of a predicate, which is a string, a class or a function.

    >>> _code_of(nn.Linear), _code_of("*Norm"), _code_of(len)
    ('torch.nn.Linear', "'*Norm'", 'len')
    """
    # The short name "torch.nn", not the file "torch.nn.modules.linear".
    if isinstance(argument, type):
        module = argument.__module__
        if getattr(nn, argument.__name__, None) is argument:
            module = "torch.nn"
        return f"{module}.{argument.__qualname__}"
    return getattr(argument, "__qualname__", repr(argument))
