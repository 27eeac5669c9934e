"""Values that record how they were created: the base class of `Transform` and `Schedule`.

A `Recorded` value holds a *factory* (a decorated constructor) and the arguments of the call. Its ``repr``, equality,
pickling, ``replace``, fingerprint and pytree structure all follow from these two. As a pytree, its leaves are the
numeric arguments, so ``torch.func`` can batch over a value or differentiate with respect to it.

An argument is either a *part* (a float, a tensor, or another recorded value), which is a child in the pytree, or fixed
structure (an int, a string, a dtype, a function, or a float inside a container). The factory decides which when it is
called, and stores the arguments as a *skeleton*: a dict with a hole in place of each part. Unflattening fills parts
into the skeleton. ``torch.func.vmap`` unflattens with arbitrary objects, so their types must not decide again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

import optree
import torch
import torch.utils._pytree as torch_pytree
from optree import PyTreeSpec
from torch import Tensor

from muonfx.core.argument_texts import code_of_value, public_name, same, text_of
from muonfx.internal.arguments import bind, check_plain, hint, kinds_of
from muonfx.tree import NAMESPACE

V = TypeVar("V")

Memory = dict[object, Any]
"""The cache that a constructor under ``with_memory`` receives. Each result must be determined by its key."""


# The names of the types in an annotation `ScalarOrSchedule`, for which a constructor gets the number of each step.
_BY_STEP = frozenset({"Tensor", "Schedule"})
_SCALAR = _BY_STEP | {"float", "None"}


@dataclass(frozen=True, eq=False)
class Definition:
    """The function behind a factory such as `momentum`, with its parsed signature and the decorator's arguments."""

    constructor: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    """The parameters of the constructor, without its `Memory`."""
    kinds: tuple[tuple[str, str], ...]
    """Name and kind of each parameter, as strings because torch.compile can trace these."""
    plain: Mapping[str, frozenset[str]]
    """By parameter, the names of the types that its annotation accepts, such as "float"."""
    name: str | None
    """The permanent public name, such as "acme.my_momentum", or None."""
    remembers: bool
    """True if the constructor takes a cache (`Memory`) as its first argument."""
    transparent: bool
    """True if a value of this factory represents its only part, and adds nothing to the dotted name of that part."""
    is_ours: bool
    """True if the constructor belongs to muonfx, whose tests already check the results of ``init`` and ``update``."""
    declaration: object
    """Further options of the decorator; for `transform`, a `Declaration`."""

    def as_float(self, name: str, value: Any) -> object:
        """Return the value of an argument, converted to float if it is an int and the annotation is float."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if is_int and "float" in self.plain[name] else value


class Factory(Protocol):
    """A function made by a decorator, such as `momentum`. A call returns a `Recorded` value, such as a `Transform`."""

    definition: Definition
    __name__: str
    __qualname__: str
    __module__: str
    __signature__: inspect.Signature

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Create and return a value that stores the arguments of this call."""
        ...


def make_factory(
    kind: Any,
    constructor: Callable[..., Any],
    declaration: object = None,
    *,
    name: str | None = None,
    transparent: bool = False,
) -> Any:
    """Turn a constructor into a factory: a function with the same signature that returns values of class ``kind``."""

    @functools.wraps(constructor)
    def call(*args: object, **kwargs: object) -> Any:
        return prepared(kind._record(factory, *args, **kwargs))

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
    """A property that is computed at the first read and then cached. Nothing is cached while torch.compile traces."""

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


class _OfStructure(Lazy[V]):
    def __get__(self, value: Any, kind: type | None = None) -> V:
        if value is None:
            return cast("V", self)
        shared: dict[str, Any] = value.structure.attributes
        if self._name not in shared:
            shared[self._name] = self._compute(value)
        if not torch.compiler.is_compiling():
            value.__dict__[self._name] = shared[self._name]
        return shared[self._name]


def of_structure(compute: Callable[[Any], V]) -> V:
    """Decorate a method as a cached property. Transforms that differ only in numbers share the cached result."""
    return cast("V", _OfStructure(compute))


# ----------------------------------------------------------------------------------------- the options of the decorator


P = ParamSpec("P")


def with_memory(constructor: Callable[Concatenate[Memory, P], Any]) -> Callable[P, Any]:
    """Decorate a constructor so that it receives a cache (a dict) as its first argument.

    Callers of the factory do not pass the cache. It holds results that depend on names, shapes and dtypes only. All
    transforms that differ only in numbers share it, also if ``torch.func`` or `with_hyperparams` rebuilds them.
    """
    _, *rest = inspect.signature(constructor).parameters.values()
    marked: Any = constructor
    marked.__signature__ = inspect.Signature(rest)
    marked.takes_memory = True
    return cast("Callable[P, Any]", constructor)


class _Hole:
    """A placeholder in an argument for a number, transform or schedule, which is stored separately."""

    def __repr__(self) -> str:
        return "*"

    def __reduce__(self) -> str:
        return "_HOLE"


_HOLE = _Hole()


def _map(value: Any, function: Callable[[str, Any], object], name: str = "") -> Any:
    if type(value) in (tuple, list):
        return type(value)([_map(item, function, f"{name}.{index}") for index, item in enumerate(value)])
    if type(value) is dict:
        items = list(value.items())
        if items and all(isinstance(item, Recorded) for _, item in items):
            # The order of a dict of transforms has no meaning, so it is normalized; the order of patterns has one.
            items.sort(key=lambda pair: str(pair[0]))
        return {key: _map(item, function, f"{name}.{key}") for key, item in items}
    return function(name, value)


def _split(value: Any, parts: list[object]) -> object:
    """Replace the numbers, transforms and schedules in an argument by placeholders, and append them to ``parts``."""

    def keep(name: str, item: object) -> object:
        if not isinstance(item, Recorded | Tensor):
            return item
        parts.append(item)
        return _HOLE

    if isinstance(value, float | Tensor | Recorded):
        parts.append(value)
        return _HOLE
    return _map(value, keep) if type(value) in (tuple, list, dict) else value


def _join(skeleton: Any, parts: Iterator[object]) -> Any:
    """Replace the placeholders in an argument by ``parts``, in order. This is the inverse of `_split`."""
    if skeleton is _HOLE:
        return next(parts)
    if type(skeleton) in (tuple, list):
        return type(skeleton)([_join(item, parts) for item in skeleton])
    if type(skeleton) is dict:
        return {key: _join(item, parts) for key, item in skeleton.items()}
    return skeleton


def _names_in(skeleton: Any, *, holes: bool = True) -> list[str]:
    """Return the dotted names of an argument's placeholders (see `_split`); with ``holes=False``, of all leaves."""
    found: list[str] = []
    _map(skeleton, lambda name, item: found.append(name.removeprefix(".")) if item is _HOLE or not holes else None)
    return found


R = TypeVar("R", bound="Recorded")


@dataclass(frozen=True, eq=False)
class Structure:
    """The fixed part of a transform or schedule: its factory, and all arguments but numbers and inner transforms."""

    kind: type[Recorded]
    factory: Factory
    skeleton: dict[str, object]
    """The arguments by name, with a hole in place of each part."""
    memory: Memory = field(default_factory=dict, repr=False)
    """The cache that the constructor receives. Not part of `derived`, because compiled steps depend on its contents."""
    derived: dict[str, Any] = field(default_factory=dict, repr=False)
    """Results that follow from the structure, cached for all values that share this object."""
    attributes: dict[str, object] = field(default_factory=dict, repr=False)
    """Attributes by name that every new value gets at once: adding one later would make torch.compile compile again."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        if self is other:  # as for values that differ only in numbers
            return True
        same_call = (self.kind, self.factory) == (other.kind, other.factory)
        # Parts are stored in the order of the skeleton, so skeletons with another order of a dict are not equal.
        same_order = _names_in(self.skeleton, holes=False) == _names_in(other.skeleton, holes=False)
        return same_call and self.skeleton == other.skeleton and same_order

    def __hash__(self) -> int:
        return hash((self.kind, self.factory))


class Recorded:
    """Base class of `Transform` and `Schedule`: an immutable value that stores the call that created it."""

    structure: Structure
    factory: Factory
    """The decorated function whose call created this value."""
    parts: tuple[Any, ...]
    """The numbers, tensors and recorded values among the arguments, in order."""
    _number_types: ClassVar[tuple[type, ...]] = ()
    """The classes, such as `Schedule`, whose values are accepted in place of a number."""

    @classmethod
    def _record(cls, factory: Factory, /, *args: object, **kwargs: object) -> Self:
        """Check the arguments of a factory call against its annotations, and return a value that stores them."""
        definition = factory.definition
        parameters = definition.parameters
        bound = bind(factory.__name__, inspect.Signature(list(parameters.values())), args, kwargs)
        bound.apply_defaults()
        parts: list[object] = []
        skeleton: dict[str, object] = {}
        for name, value in bound.arguments.items():
            kinds, default = definition.plain[name], parameters[name].default
            if value is not default and not ("float" in kinds and isinstance(value, cls._number_types)):
                value = check_plain(factory.__name__, name, value, kinds)
            if dataclasses.is_dataclass(default) and not isinstance(value, type(default)):
                text = f"{factory.__name__}: {name} must be a {type(default).__name__}, found {value!r}"
                raise TypeError(text + f": pass {type(default).__name__}({value!r})" * isinstance(value, str))
            skeleton[name] = _split(definition.as_float(name, value), parts)
        return cls._from(Structure(cls, factory, skeleton), parts)

    def _names_of_parts(self, argument: str) -> Iterable[str]:
        """Return the dotted names of the numbers and recorded values (such as transforms) within one argument."""
        skeleton = self.structure.skeleton[argument]
        if type(skeleton) not in (tuple, list, dict):
            return [argument] if skeleton is _HOLE else []
        return _names_in(skeleton if type(skeleton) is dict else {argument: skeleton})

    def _parts_in(self, argument: str) -> list[Any]:
        """Return the numbers and recorded values (such as transforms) within one argument, in order."""
        found: list[Any] = []
        _split(self.arguments[argument], found)
        return found

    @classmethod
    def _from(cls, context: Structure, parts: Iterable[object]) -> Self:
        value = cast("Self", object.__new__(context.kind))
        object.__setattr__(value, "structure", context)
        object.__setattr__(value, "factory", context.factory)
        object.__setattr__(value, "parts", tuple(parts))
        if not torch.compiler.is_compiling():
            value.__dict__.update(context.attributes)
        return value

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Register the subclass as a pytree node with optree and ``torch.utils._pytree``."""
        super().__init_subclass__(**kwargs)
        optree.register_pytree_node(
            cast("Any", cls),  # optree's type hints require a collection, but any class works
            cast("Any", lambda value: (value.parts, value.structure, part_names(value))),
            cast("Any", Recorded._from),
            namespace=NAMESPACE,
        )
        torch_pytree.register_pytree_node(
            cls,
            lambda value: (list(value.parts), value.structure),
            lambda parts, structure: Recorded._from(cast("Structure", structure), parts),
            serialized_type_name=public_name(cls),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{self.structure.factory.__name__}(...) is immutable; use .replace({name}=...) for a changed copy"
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """A dict with all arguments of the call that created this value, by name, including defaults."""
        parts, found = iter(self.parts), dict(self.structure.skeleton)
        for name, skeleton in found.items():
            if skeleton is _HOLE:
                found[name] = next(parts)
            elif type(skeleton) in (tuple, list, dict):
                found[name] = _join(skeleton, parts)
        return found

    def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function that has the factory's signature, with arguments from a dict by name."""
        positional: list[object] = []
        named: dict[str, object] = {}
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

    def _build(self) -> Any:
        """Call the decorated function with the arguments that this value stores, and return its result."""
        return self._build_for(self.arguments)

    def _build_for(self, arguments: Mapping[str, Any]) -> Any:
        definition = self.factory.definition
        constructor = definition.constructor
        if definition.remembers:
            constructor = functools.partial(constructor, self.structure.memory)
        return self._call(constructor, arguments)

    @Lazy
    def _built(self) -> Any:
        """The cached result of `_build`; for a transform, the pair ``(init, update)``."""
        return self._build()

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numeric arguments of this and of inner transforms that are tensors, in the order of pytree leaves."""
        inner = [part.tensors if isinstance(part, Recorded) else (part,) for part in self.parts]
        return tuple([number for numbers in inner for number in numbers if isinstance(number, Tensor)])

    @functools.cached_property
    def treedef(self) -> PyTreeSpec:
        """The optree structure of this value. Values that differ only in numbers have equal structures."""
        return optree.tree_structure(cast("Any", self), none_is_leaf=True, namespace=NAMESPACE)

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """A cache for results that other modules compute from this value."""
        return {}

    def _new_structure(self) -> Structure:
        """Return a copy of ``structure`` without its cached results."""
        return Structure(self.structure.kind, self.structure.factory, self.structure.skeleton)

    def _prepare(self) -> None:
        """Call the decorated function now and cache its result, so that bad arguments raise before the first use."""
        _ = self._built

    def replace(self, **changes: object) -> Self:
        """Return a copy with some arguments of the factory call changed.

        Raises:
            TypeError: the factory has no argument of this name. The message lists its arguments.
        """
        if unknown := changes.keys() - self.arguments.keys():
            wrong, known = min(unknown), ", ".join(self.arguments)
            inside = [name for name, _ in parts_of(self) if name.endswith(f".{wrong}")]
            advice = f"{hint(wrong, self.arguments)}; it has {known}"
            advice += f". To change {inside[0]}: with_hyperparams(tx, {{{inside[0]!r}: ...}})" if inside else ""
            raise TypeError(f"{self.factory.__name__} has no argument {wrong}{advice}")
        return self._call(self.factory, {**self.arguments, **changes})

    def __repr__(self) -> str:
        """Return Python code that creates an equal value. Arguments that equal their defaults are left out."""
        written: list[str] = []
        named = False
        for name, parameter in self.factory.definition.parameters.items():
            value = self.arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                written.extend(code_of_value(item) for item in value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                written.extend(f"{key}={code_of_value(item)}" for key, item in value.items())
            elif not same(value, parameter.default):
                # Write numbers as keywords, and the transforms and labels of a combinator as positional arguments.
                required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                by_place = required and not isinstance(value, int | float | Tensor) and not named
                named = named or not by_place
                written.append(code_of_value(value) if by_place else f"{name}={code_of_value(value)}")
        return f"{self.factory.__name__}({', '.join(written)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recorded):
            return NotImplemented
        return self.structure == other.structure and same(self.parts, other.parts)

    def __hash__(self) -> int:
        return hash((self.factory.__module__, self.factory.__qualname__, len(self.parts)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, not the functions. The constructor creates the functions again at first use."""
        return Recorded._from, (self._new_structure(), self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that identify the transform in checkpoints.

        Transforms with equal fingerprints have states of the same meaning. Numeric arguments are ignored, so a run can
        resume with another learning rate. The digits are the same in every process, and if code is moved.
        """
        return hashlib.sha256(_structure(self).encode()).hexdigest()[:16]


def prepared(value: R) -> R:
    """Build the functions of a transform and of its inner transforms and schedules now, and return the transform.

    Bad arguments then raise before the first use.
    """
    if "_is_prepared" in value.__dict__:
        return value
    for part in value.parts:
        if isinstance(part, Recorded):
            prepared(part)
    value._prepare()
    if not torch.compiler.is_compiling():
        value.__dict__["_is_prepared"] = True
    return value


def parts_of(value: Recorded, prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted name, number) pairs for the numeric arguments of a transform and of its inner transforms."""
    found: list[tuple[str, Any]] = []
    for name, part in zip(part_names(value), value.parts, strict=True):
        found += parts_of(part, prefix + dotted(name)) if isinstance(part, Recorded) else [(prefix + name, part)]
    return found


def with_numbers(value: R, numbers: Iterator[object]) -> R:
    """Return a copy of a transform or schedule with new numeric arguments, in the order of its pytree leaves."""
    parts = [with_numbers(part, numbers) if isinstance(part, Recorded) else next(numbers) for part in value.parts]
    if all(map(operator.is_, parts, value.parts)):
        return value
    return cast("R", Recorded._from(value.structure, parts))


def strip_transparent(value: Any) -> Any:
    """Return ``tx`` for ``offload(tx)`` and other wrappers declared ``transparent``; return other values unchanged."""
    while isinstance(value, Recorded) and value.factory.definition.transparent:
        (value,) = value.parts
    return value


def dotted(name: str) -> str:
    """Return ``name`` with a dot appended, or "" for an empty name."""
    return f"{name}." if name else ""


def joined_name(name: str, argument: str) -> str:
    """Return the dotted name of an argument of the transform ``name``. A transparent wrapper adds nothing to it."""
    return dotted(name) + argument if argument else name


def walk(value: Recorded, name: str = "") -> Iterator[tuple[str, Recorded]]:
    """Yield (dotted name, value) for a transform or schedule, and then for each one within it, at any depth.

    >>> import muonfx as mfx
    >>> [name for name, _ in walk(mfx.chain(mfx.cautious(mfx.momentum()), mfx.scale(-0.1)))]
    ['', 'cautious', 'cautious.inner', 'scale']
    """
    yield name, value
    for argument, inner in zip(part_names(value), value.parts, strict=True):
        if isinstance(inner, Recorded):
            yield from walk(inner, joined_name(name, argument))


def part_names(value: Recorded) -> tuple[str, ...]:
    """Return the dotted names of a transform's own numbers and inner transforms, in order."""
    derived = value.structure.derived
    if "part_names" not in derived:
        skeleton, is_transparent = value.structure.skeleton, value.factory.definition.transparent
        names = [""] if is_transparent else [n for argument in skeleton for n in value._names_of_parts(argument)]
        derived["part_names"] = tuple(names)
    return derived["part_names"]


def _structure(value: Recorded) -> str:
    """Return the text whose hash is the fingerprint: public names and arguments, without numbers and defaults."""
    value = strip_transparent(value)
    parts = iter(value.parts)
    written = {name: _text(item, parts) for name, item in value.structure.skeleton.items()}
    definition = value.factory.definition
    changed = [f"{name}={text}" for name, text in written.items() if text != _default_text(definition, name)]
    return f"{public_name(value.factory)}({','.join(changed)})"


def _text(skeleton: object, parts: Iterator[object]) -> str:
    if skeleton is _HOLE:
        part = next(parts)
        return _structure(part) if isinstance(part, Recorded) else _NUMBER
    return text_of(skeleton, lambda item: _text(item, parts))


_NUMBER = "*"


def _default_text(definition: Definition, name: str) -> str:
    """Return an argument's default as text for the fingerprint; ``"*"``, as for a number, if it has none."""
    parameter = definition.parameters[name]
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "()"
    if parameter.kind is parameter.VAR_KEYWORD:
        return "{}"
    if parameter.default is parameter.empty:
        return _NUMBER
    parts: list[object] = []
    skeleton = _split(definition.as_float(name, parameter.default), parts)
    return _text(skeleton, iter(parts))
