"""Values that remember how they were made.

A `Recorded` value holds a *factory* (a decorated constructor) and the arguments it was called with, and nothing else
that matters. From that alone come a ``repr`` that evaluates back, equality, pickling, ``replace``, a fingerprint, and
a pytree view whose leaves are the numeric arguments, so that ``torch.func`` can batch over a value or differentiate
with respect to it.

Two kinds of argument: a *part* (a float, a tensor, or another recorded value) is visible in the pytree view; the rest
(ints, strings, dtypes, functions, and floats inside containers) is fixed structure. Which argument is which is
decided once, when the factory is called, and carried through unflattening as a *skeleton* with holes:
``torch.func.vmap`` unflattens with arbitrary objects, so deciding again from the values would give another structure.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, Self, TypeVar, cast

import optree
import torch
import torch.utils._pytree as torch_pytree
from optree import PyTreeSpec
from torch import Tensor

from muonfx.core.identity import public_name, text_of
from muonfx.tree import NAMESPACE
from muonfx.tree.arguments import (
    Options,
    bind,
    check_plain,
    did_you_mean,
    expand_options,
    floats_of,
    kinds_of,
    numbers_of_schedules,
    options_of,
    plain_value,
)

__all__ = [
    "Definition",
    "Factory",
    "Recorded",
    "Structure",
    "strip_transparent",
    "dotted",
    "make_factory",
    "part_names",
    "parts_of",
    "told_arguments",
    "with_numbers",
]


class _Hole:
    """Stands in a skeleton where a part was; there is one of it."""

    def __repr__(self) -> str:
        return "*"

    def __reduce__(self) -> str:
        return "_HOLE"


_HOLE = _Hole()


def _split(value: Any, parts: list[object], *, top: bool = False) -> object:
    """Return the skeleton of an argument and append its parts, in order, to a list."""
    if isinstance(value, Recorded | Tensor) or (top and isinstance(value, float)):
        parts.append(value)
        return _HOLE
    if type(value) in (tuple, list):
        return type(value)(_split(item, parts) for item in value)
    if type(value) is dict:
        items = list(value.items())
        if items and all(isinstance(item, Recorded) for _, item in items):
            items.sort(
                key=lambda pair: str(pair[0])
            )  # transforms by name: their order means nothing, so it must not show. Patterns' order does.
        return {key: _split(item, parts) for key, item in items}
    return value


def _join(skeleton: Any, parts: Iterator[object]) -> Any:
    """Put parts back into a skeleton; the inverse of `_split`."""
    if skeleton is _HOLE:
        return next(parts)
    if type(skeleton) in (tuple, list):
        return type(skeleton)(_join(item, parts) for item in skeleton)
    if type(skeleton) is dict:
        return {key: _join(item, parts) for key, item in skeleton.items()}
    return skeleton


MAX_DEPTH = 64
"""The number of recorded values that may lie one within another. Side by side there may be any number."""


def _depth(parts: Sequence[object]) -> int:
    """Count the recorded values that lie one within another among some parts, with the one that holds them."""
    depth, level = 1, [part for part in parts if isinstance(part, Recorded)]
    while level:
        depth += 1
        level = [part for value in level for part in value.parts if isinstance(part, Recorded)]
    return depth


def _names_of_parts(skeleton: Any, prefix: str) -> Iterator[str]:
    if skeleton is _HOLE:
        yield prefix
    elif type(skeleton) in (tuple, list):
        for index, item in enumerate(skeleton):
            yield from _names_of_parts(item, f"{prefix}.{index}")
    elif type(skeleton) is dict:
        for key, item in skeleton.items():
            yield from _names_of_parts(item, f"{prefix}.{key}" if prefix else str(key))


def _ordered(skeleton: Any) -> object:
    """The skeleton in a form whose equality sees the order of dicts, which decides what their parts mean."""
    if type(skeleton) in (tuple, list):
        return type(skeleton), tuple(_ordered(item) for item in skeleton)
    if type(skeleton) is dict:
        return dict, tuple((key, _ordered(item)) for key, item in skeleton.items())
    return skeleton


R = TypeVar("R", bound="Recorded")


@dataclass(frozen=True, eq=False)
class Definition:
    """A factory's definition: its constructor, the signature, read once, and what was declared of it."""

    constructor: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    """Of the arguments that are recorded: all but the options."""
    options: Mapping[str, type[Options]]
    """By name, the arguments that are values of several others; these are recorded in their place."""
    kinds: tuple[tuple[str, str], ...]
    """Name and kind of each parameter, in a form that can be traced."""
    plain: Mapping[str, frozenset[str]]
    """By parameter, the plain types that its annotation asks for."""
    floats: frozenset[str]
    """The parameters whose annotation says float, where an int is made one."""
    name: str | None
    """The public name, if one was declared."""
    """By argument, a default of an earlier version that means the same state."""
    remembers: bool
    """True if the constructor takes the memory of its structure."""
    transparent: bool
    """True if its values stand for their only part, whose names do not show that it is within another."""
    part_names: Callable[[Recorded], Sequence[str]] | None
    """Names the parts of a value, where the names of arguments do not."""
    declaration: object
    """The arguments of the decorator, in a form of its own."""


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


def _as_float(definition: Definition, name: str, value: Any) -> object:
    """An int as a float, where the annotation says float."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_int and name in definition.floats else value


@dataclass(frozen=True, eq=False)
class Structure:
    """What a recorded value is apart from its parts: the pytree context."""

    kind: type[Recorded]
    factory: Factory
    skeleton: dict[str, object]
    derived: dict[str, Any] = field(default_factory=dict, repr=False)
    """What follows from the rest, computed once where it is made and shared by all values of this structure."""
    memory: dict[object, Any] = field(default_factory=dict, repr=False)
    """The answers that a constructor has derived from structure; they live as long as the structure does."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        if self is other:  # as in all values that differ in numbers only
            return True
        same_call = self.kind is other.kind and self.factory is other.factory
        return same_call and _ordered(self.skeleton) == _ordered(other.skeleton)

    def __hash__(self) -> int:
        return hash((self.kind, self.factory))


class Recorded:
    """A value that is its factory and the arguments of the call; see the module's docstring.

    Not made directly: a decorator such as `muonfx.transform` turns a function into a factory that returns one.
    """

    structure: Structure
    parts: tuple[Any, ...]

    @classmethod
    def record(cls, factory: Factory, /, *args: object, **kwargs: object) -> Self:
        """Record a call of a factory; ints become floats where the factory's annotation says float.

        Raises:
            TypeError: the arguments do not fit the factory's signature, or one whose annotation asks for a bool, an
                int, a float or a str is none.
            ValueError: more than `MAX_DEPTH` values would lie one within another.
        """
        definition = factory.definition
        parameters = definition.parameters
        if definition.options:
            kwargs = expand_options(definition.options, kwargs)
        bound = bind(factory.__name__, inspect.Signature(list(parameters.values())), args, kwargs, definition.options)
        bound.apply_defaults()
        parts: list[object] = []
        skeleton: dict[str, object] = {}
        for name, value in bound.arguments.items():
            kinds = definition.plain[name]
            value = plain_value(value, kinds)
            if not ("float" in kinds and cls.stands_for_a_number(factory, value)):
                check_plain(factory.__name__, name, value, kinds)
            skeleton[name] = _split(_as_float(definition, name, value), parts, top=True)
        if (depth := _depth(parts)) > MAX_DEPTH:
            raise ValueError(
                f"{factory.__name__}: {depth} values one within another, at most {MAX_DEPTH} may be: "
                "beyond that Python's own recursion ends printing and pickling; put them side by side, "
                "chain(a, b, c) and not chain(chain(a, b), c)"
            )
        return cls._from(Structure(cls, factory, skeleton), parts)

    @classmethod
    def stands_for_a_number(cls, factory: Factory, value: object) -> bool:
        """True if a value may be given where a factory takes a number."""
        return False

    @classmethod
    def _from(cls, context: Structure, parts: Iterable[object]) -> Self:
        value = cast("Self", object.__new__(context.kind))
        object.__setattr__(value, "structure", context)
        object.__setattr__(value, "parts", tuple(parts))
        return value

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Register every kind of recorded value as a pytree node, with optree and with torch."""
        super().__init_subclass__(**kwargs)
        # optree's types ask for a collection; any class will do
        optree.register_pytree_node(
            cast("Any", cls), cast("Any", _flatten), cast("Any", _unflatten), namespace=NAMESPACE
        )
        torch_pytree.register_pytree_node(
            cls, _flatten_for_torch, _unflatten_for_torch, serialized_type_name=public_name(cls)
        )

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: a recorded value does not change; `replace` makes another."""
        raise AttributeError(
            f"{self.structure.factory.__name__}(...) is a value and cannot be changed; use .replace({name}=...)"
        )

    @property
    def factory(self) -> Factory:
        """The function that made this value."""
        return self.structure.factory

    @property
    def _arguments(self) -> dict[str, Any]:
        parts = iter(self.parts)
        return {name: _join(skeleton, parts) for name, skeleton in self.structure.skeleton.items()}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the call by name, defaults included."""
        return dict(self._arguments)

    def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any], **further: object) -> Any:
        """Call a function of the factory's signature with recorded arguments, and with further named ones."""
        positional: list[object] = []
        named: dict[str, object] = dict(further)
        for name, kind in self.factory.definition.kinds:
            if kind == "VAR_POSITIONAL":
                positional.extend(arguments[name])
            elif kind == "VAR_KEYWORD":
                named.update(arguments[name])
            elif kind == "KEYWORD_ONLY":
                named[name] = arguments[name]
            else:
                positional.append(arguments[name])
        return function(*positional, **named)

    def build(self) -> Any:
        """Call the constructor with the recorded arguments."""
        return self._build_for(self._arguments)

    def _build_for(self, arguments: Mapping[str, Any]) -> Any:
        definition = self.factory.definition
        further: dict[str, object] = {name: kind.take(name, arguments) for name, kind in definition.options.items()}
        constructor = definition.constructor
        if definition.remembers:
            constructor = functools.partial(constructor, self.structure.memory)
        return self._call(constructor, arguments, **further)

    @property
    def built(self) -> Any:
        """What the constructor returns for the recorded arguments, built on first use."""
        kept = self.__dict__.get("_built")
        if kept is None:
            kept = self.build()
            # Tracing must not store closures on an object that may outlive it.
            if not torch.compiler.is_compiling():
                self.__dict__["_built"] = kept
        return kept

    @property
    def treedef(self) -> PyTreeSpec:
        """The structure of the value and of all within it, without numbers: equal for values that differ in these."""
        kept = self.__dict__.get("_treedef")
        if kept is None:
            kept = optree.tree_structure(cast("Any", self), none_is_leaf=True, namespace=NAMESPACE)
            self.__dict__["_treedef"] = kept
        return kept

    def with_parts(self, parts: Sequence[object]) -> Self:
        """The same call with other parts, which may be of other structure than those there are."""
        return self._from(dataclasses.replace(self.structure, derived={}, memory={}), parts)

    def prepare(self) -> None:
        """Build now, as a factory does, so that bad arguments fail at the call and tracing finds everything ready."""
        _ = self.built

    def prepare_all(self) -> Self:
        """Prepare the value and all within it, so that a bad value is found before anything is changed."""
        self.prepare()
        for part in self.parts:
            if isinstance(part, Recorded):
                part.prepare_all()
        return self

    def replace(self, **changes: object) -> Self:
        """Make the value anew with some arguments changed.

        Raises:
            TypeError: an argument that the factory does not have; the message lists those it has.
        """
        changes = expand_options(self.factory.definition.options, changes)
        unknown = changes.keys() - self._arguments.keys()
        if unknown:
            wrong, known = sorted(unknown), ", ".join(self._arguments)
            close = did_you_mean(wrong[0], self._arguments)
            raise TypeError(f"{self.factory.__name__} has no argument {', '.join(wrong)}{close}; it has {known}")
        return self._call(self.factory, {**self._arguments, **changes})

    def __repr__(self) -> str:
        """Print as the code that builds the value; arguments that equal their default are left out."""
        written: list[str] = []
        named = False
        for name, parameter in self.factory.definition.parameters.items():
            value = self._arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                written.extend(_literal(item) for item in value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                written.extend(f"{key}={_literal(item)}" for key, item in value.items())
            elif not _same(value, parameter.default):
                # Numbers by name; the transforms and labels that a combinator is given, by place.
                required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                by_place = required and not isinstance(value, int | float | Tensor) and not named
                named = named or not by_place
                written.append(_literal(value) if by_place else f"{name}={_literal(value)}")
        return f"{self.factory.__name__}({', '.join(written)})"

    def __eq__(self, other: object) -> bool:
        """Two values are equal when the same factory was called with equal arguments."""
        if not isinstance(other, Recorded):
            return NotImplemented
        return self.structure == other.structure and _same(self.parts, other.parts)

    def __hash__(self) -> int:
        """Hash by factory and structure; equal values hash alike."""
        return hash((self.factory.__module__, self.factory.__qualname__, len(self.parts)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as factory, skeleton and parts; closures, which do not pickle, are built again on first use."""
        return _rebuild, (type(self), self.factory, self.structure.skeleton, self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash of the factories' public names and the fixed arguments that differ from their defaults.

        Numeric arguments do not count: two values with one fingerprint have states of one meaning, so a run may resume
        with another learning rate. It is the same in every process and does not change when code moves or an argument
        with a default is added.
        """
        return hashlib.sha256(_structure(self).encode()).hexdigest()[:16]


def make_factory(
    kind: type[Recorded],
    constructor: Callable[..., Any],
    declaration: object = None,
    *,
    name: str | None = None,
    remembers: bool = False,
    transparent: bool = False,
    part_names: Callable[[Recorded], Sequence[str]] | None = None,
) -> Any:
    """Turn a function into a factory of recorded values, with the function's name, signature and docstring.

    Args:
        kind: of the values.
        constructor: the function.
        declaration: what the kind wants to know of the constructor, as `Definition.declaration`.
        name: as in `muonfx.transform`.
        remembers: as there.
        transparent: as in `Definition`.
        part_names: as there.

    Raises:
        ValueError: ``name`` is not made of identifiers and dots, or the constructor does not take all that one of its
            options stands for.
    """
    if name is not None and not (isinstance(name, str) and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"name must be identifiers with dots between them, such as 'acme.my_momentum', found {name!r}")

    @functools.wraps(constructor)
    def call(*args: object, **kwargs: object) -> Recorded:
        made = kind.record(factory, *args, **kwargs)
        made.prepare()
        return made

    factory = cast("Factory", call)
    parameters = dict(inspect.signature(constructor).parameters)
    if remembers:
        del parameters[next(iter(parameters))]
        factory.__signature__ = inspect.Signature(list(parameters.values()))
    options = options_of(parameters)
    for argument, option in options.items():
        if missing := [name for name in option.__match_args__ if name not in parameters]:
            raise ValueError(
                f"{constructor.__name__}: {argument} stands for {', '.join(missing)}, which it does not take"
            )
        del parameters[argument]
    factory.definition = Definition(
        constructor,
        parameters,
        options,
        tuple((argument, parameter.kind.name) for argument, parameter in parameters.items()),
        {argument: numbers_of_schedules(kinds) for argument, kinds in kinds_of(parameters, constructor).items()},
        floats_of(parameters, constructor),
        name,
        remembers,
        transparent,
        part_names,
        declaration,
    )
    return factory


def parts_of(value: Recorded) -> Iterator[tuple[str, Any]]:
    """Iterate over the numeric arguments of a recorded value as (dotted name, number), nested values included.

    A factory may name the parts of its values (a chain does), or make values that stand for their only part: the name
    of that one is empty, and does not show.

    >>> import muonfx as mfx
    >>> [name for name, _ in parts_of(mfx.chain(mfx.momentum(0.9), mfx.scale(2.0)))]
    ['momentum.decay', 'scale.factor']
    """
    for name, part in zip(part_names(value), value.parts, strict=True):
        if isinstance(part, Recorded):
            yield from ((f"{dotted(name)}{inner}", number) for inner, number in parts_of(part))
        else:
            yield name, part


def with_numbers(value: R, numbers: Iterator[object]) -> R:
    """A recorded value with other numbers, in the order of its leaves; what keeps all of its numbers is kept itself.

    So a changed number leaves the closures of everything else built.

    Args:
        value: the value.
        numbers: as many as it has leaves, at least; those are taken.

    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.momentum(0.9), mfx.scale(2.0))
    >>> new = with_numbers(tx, iter([tx.parts[0].parts[0], 3.0]))
    >>> new, new.parts[0] is tx.parts[0]
    (chain(momentum(decay=0.9), scale(factor=3.0)), True)
    """
    parts = [with_numbers(part, numbers) if isinstance(part, Recorded) else next(numbers) for part in value.parts]
    if all(new is old for new, old in zip(parts, value.parts, strict=True)):
        return value
    return cast("R", Recorded._from(value.structure, parts))


def strip_transparent(value: Any) -> Any:
    """What a transparent value stands for; any other value as it is.

    >>> strip_transparent("anything")
    'anything'
    """
    while isinstance(value, Recorded) and value.factory.definition.transparent:
        (value,) = value.parts
    return value


def dotted(name: str) -> str:
    """The name of a part as the beginning of a longer name.

    >>> dotted("inner"), dotted("")
    ('inner.', '')
    """
    return f"{name}." if name else ""


def part_names(value: Recorded) -> tuple[str, ...]:
    """The dotted names of a value's own parts, in order."""
    if value.factory.definition.transparent:
        return ("",)
    chosen = value.factory.definition.part_names
    if chosen is not None:
        return tuple(chosen(value))
    skeleton = value.structure.skeleton
    return tuple(
        name
        for argument, item in skeleton.items()
        for name in _names_of_parts(item, "" if type(item) is dict else argument)
    )


def _flatten(value: Recorded) -> tuple[tuple[object, ...], Structure, tuple[str, ...]]:
    return value.parts, value.structure, part_names(value)


def _unflatten(context: Structure, parts: Iterable[object]) -> Recorded:
    return Recorded._from(context, parts)


def _flatten_for_torch(value: Recorded) -> tuple[list[object], Structure]:
    return list(value.parts), value.structure


def _unflatten_for_torch(parts: Iterable[object], context: Structure) -> Recorded:
    return Recorded._from(context, parts)


def _rebuild(
    kind: type[Recorded], factory: Factory, skeleton: dict[str, object], parts: tuple[object, ...]
) -> Recorded:
    return Recorded._from(Structure(kind, factory, skeleton), parts)


def _same(a: Any, b: Any) -> bool:
    """Equality that sees into containers and compares tensors by value and dtype."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool(torch.equal(a, b))
        )
    if type(a) in (tuple, list) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and a == b)


def _literal(value: object) -> str:
    """Python code for an argument."""
    if isinstance(value, Tensor):
        try:
            return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
        except RuntimeError:  # a tensor inside a torch.func transform has no values to print
            return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, float) and value - value != 0.0:
        return f"float({str(value)!r})"
    if type(value) is tuple:
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if type(value) is list:
        return f"[{', '.join(map(_literal, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_literal(item)}' for key, item in value.items())}}}"
    if inspect.isfunction(value) or inspect.isclass(value):
        return _name_in_package(value)
    code_in = getattr(value, "code_in", None)  # of a predicate, whose names are in a module of their own
    return str(code_in("select.")) if callable(code_in) else repr(value)


def _name_in_package(value: Any) -> str:
    """The shortest dotted name of a function or class in this package's namespace; of another, its own name."""
    package, *parts = (value.__module__ or "").split(".")  # None for a function in a bare exec()
    if package == __name__.partition(".")[0]:
        module = sys.modules[package]
        for depth in range(len(parts) + 1):
            if getattr(module, value.__qualname__, None) is value:
                return ".".join([*parts[:depth], value.__qualname__])
            module = getattr(module, parts[depth], None) if depth < len(parts) else None
    return value.__qualname__


def _structure(value: Recorded) -> str:
    """Write down everything in a value but its numeric parts and the arguments that are as by default."""
    value = strip_transparent(value)
    told = [f"{name}={text}" for name, text in told_arguments(value).items()]
    return f"{public_name(value.factory)}({','.join(told)})"


def told_arguments(value: Recorded) -> dict[str, str]:
    """The arguments that are neither numbers nor as by default, as texts that are the same in every process.

    >>> import muonfx as mfx
    >>> told_arguments(mfx.momentum(0.5, nesterov=False))
    {'nesterov': 'False'}
    """
    parts = iter(value.parts)
    written = {name: _text(item, parts) for name, item in value.structure.skeleton.items()}
    definition = value.factory.definition
    return {name: text for name, text in written.items() if text != _default_text(definition, name)}


def _text(skeleton: object, parts: Iterator[object]) -> str:
    if skeleton is _HOLE:
        part = next(parts)
        return _structure(part) if isinstance(part, Recorded) else _NUMBER
    return text_of(skeleton, lambda item: _text(item, parts))


_NUMBER = "*"


def _default_text(definition: Definition, name: str) -> str:
    """The text of an argument that need not be told: that of its default, or for one without, of any number."""
    parameter = definition.parameters[name]
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "()"
    if parameter.kind is parameter.VAR_KEYWORD:
        return "{}"
    if parameter.default is parameter.empty:
        return _NUMBER
    parts: list[object] = []
    skeleton = _split(_as_float(definition, name, parameter.default), parts, top=True)
    return _text(skeleton, iter(parts))
