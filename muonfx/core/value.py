"""Values that record how they were created: the base class of `Transform` and `Schedule`.

A `Recorded` value holds a *factory* (a decorated constructor) and the arguments of the call. Its ``repr``, equality,
pickling, ``replace``, fingerprint and pytree structure all follow from these two. As a pytree, its leaves are the
numeric arguments, so ``torch.func`` can batch over a value or differentiate with respect to it.

An argument is either a *part* (a float, a tensor, or another recorded value), which is a child in the pytree, or fixed
(an int, a string, a dtype, a function, or a float inside a container). The factory decides which when it is called, and
stores the arguments in two pieces. For ``momentum(0.9)``, the parts are ``(0.9,)``, and the *template* is
``{"decay": *, "nesterov": True, ...}``, with a *blank*, printed as ``*``, in place of each part. Unflattening fills
parts into the template. ``torch.func.vmap`` unflattens with arbitrary objects, so their types must not decide again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

import optree
import torch
import torch.utils._pytree as torch_pytree
from optree import PyTreeSpec
from torch import Tensor

from muonfx.core.argument_texts import code_of_value, public_name, same, text_of
from muonfx.internal.arguments import accepted_types_of, bind, check_plain, float_of, hint
from muonfx.tree import NAMESPACE

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")

Memory = dict[object, Any]
"""The cache that a constructor under ``with_memory`` receives. Each result must be determined by its key."""


_PACKAGE = __name__.partition(".")[0]
_SCALAR_OR_SCHEDULE = frozenset({"float", "Tensor", "Schedule"})
"""The names of the types in the annotation `ScalarOrSchedule`."""


@dataclass(frozen=True, eq=False)
class Definition:
    """The function behind a factory such as `momentum`, with its parsed signature and the decorator's arguments."""

    constructor: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    """The parameters of the constructor, without its `Memory`."""
    kinds: tuple[tuple[str, str], ...]
    """Name and kind of each parameter, as strings because torch.compile can trace these."""
    accepted_types: Mapping[str, frozenset[str]]
    """By parameter, the names of the types that its annotation accepts, such as "float"."""
    name: str | None
    """The permanent public name, such as "acme.my_momentum", or None."""
    number_parameters: tuple[str, ...]
    """The parameters for which the constructor receives a number: if a schedule was passed, the number of a step."""
    remembers: bool
    """True if the constructor takes a cache (`Memory`) as its first argument."""
    is_stand_in: bool
    """True if a value of this factory takes the place of its only part, as ``offload(tx)`` takes the place of ``tx``.

    It changes neither the dotted names of the numbers in this part nor its fingerprint.
    """
    is_ours: bool
    """True if the constructor belongs to muonfx, whose tests already check the results of ``init`` and ``update``."""
    declaration: object
    """Further options of the decorator; for `transform`, a `Declaration`."""
    check: Callable[[Any], None] | None = None
    """The function of `checked_by`, or None."""

    def is_number(self, name: str) -> bool:
        """Return True if an argument is annotated as a number: ``float`` or `ScalarOrSchedule`, perhaps ``| None``."""
        return "float" in self.accepted_types[name]

    def as_float(self, name: str, value: Any) -> object:
        """Return the value of an argument, converted to float if it is an int and the annotation is float."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if is_int and self.is_number(name):
            return float_of(name, value)
        return value


def _types_of_arguments(
    parameters: Mapping[str, inspect.Parameter], constructor: Callable[..., Any]
) -> dict[str, frozenset[str]]:
    """Return the names of the types that each argument of a constructor accepts: {"rate": {"float", "None"}}.

    `ScalarOrSchedule` counts as float, because the constructor receives the number of each step in place of a schedule.
    """
    accepted = accepted_types_of(parameters, constructor)
    for argument, types in accepted.items():
        # {"float", "Tensor", "Schedule"} becomes {"float"}, with or without "None".
        if types - {"None"} == _SCALAR_OR_SCHEDULE:
            accepted[argument] = types - {"Tensor", "Schedule"}
    return accepted


def _takes_number(types: frozenset[str]) -> bool:
    """Return True if a constructor that is annotated with these types receives a number, also for a schedule.

    `ScalarOrSchedule` counts as {"float"}. With "Schedule" among the types, it receives a schedule as it is.
    """
    return "float" in types and "Schedule" not in types


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
    recorded_class: Any,
    constructor: Callable[..., Any],
    declaration: object = None,
    *,
    name: str | None = None,
    is_stand_in: bool = False,
) -> Any:
    """Turn a function into a factory: a function with the same signature whose calls return recorded values.

    A recorded value stores the arguments of its call, so that it can be printed, compared and changed. For example, the
    decorator `transform` makes a factory of the function ``momentum``. A call ``momentum(0.9)`` then returns a
    `Transform` (the ``recorded_class``) that stores 0.9.

    ``declaration``, ``name`` and ``is_stand_in`` are fields of `Definition`, which describes the factory.
    """

    @functools.wraps(constructor)
    def factory(*args: object, **kwargs: object) -> Any:
        recorded = recorded_class._record(factory, *args, **kwargs)
        prepared(recorded)  # runs the constructor now, so that bad arguments raise here
        check = cast("Factory", factory).definition.check
        if check is not None and not torch.compiler.is_compiling():
            check(recorded)
        return recorded

    if name is not None:
        _check_public_name(name)
    parameters = dict(inspect.signature(constructor).parameters)
    accepted_types = _types_of_arguments(parameters, constructor)
    module = constructor.__module__ or ""  # None for a function in a bare exec()
    # All facts that follow from the function and its signature are computed here, once, and not at each call.
    cast("Factory", factory).definition = Definition(
        constructor=constructor,
        parameters=parameters,
        kinds=tuple(
            [(argument, parameter.kind.name) for argument, parameter in parameters.items()]
        ),
        accepted_types=accepted_types,
        number_parameters=tuple(
            [argument for argument, types in accepted_types.items() if _takes_number(types)]
        ),
        name=name,
        remembers=getattr(constructor, "takes_memory", False),
        is_stand_in=is_stand_in,
        is_ours=module.partition(".")[0] == _PACKAGE,
        declaration=declaration,
    )
    return factory


def checked_by(check: Callable[[Any], None]) -> Callable[[F], F]:
    """Decorate a factory, so that each call passes its result to a function, which may raise an error or warn.

    Unlike the constructor, the function does not run again for a copy with other numbers, which a schedule may make at
    every step. So it can warn, and take its time. It does not run while torch.compile traces.
    """

    def decorate(factory: F) -> F:
        checked: Any = factory
        checked.definition = dataclasses.replace(checked.definition, check=check)
        return factory

    return decorate


def _check_public_name(name: object) -> None:
    if not (isinstance(name, str) and all(map(str.isidentifier, name.split(".")))):
        raise ValueError(
            f"name must be identifiers with dots between them, such as 'acme.my_momentum', found {name!r}"
        )


class Lazy(Generic[V]):
    """A property that is computed at the first read and then cached in the ``__dict__`` of its object.

    Later reads find it there without a call. Nothing is cached while torch.compile traces.
    """

    _is_of_structure: ClassVar[bool] = False

    def __init__(self, compute: Callable[[Any], V]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> V:
        """Compute the property of an object when it is first read, and store it in ``instance.__dict__``.

        Python calls this method for ``tx.locality`` only while ``tx.__dict__`` has no item "locality".

        Args:
            instance: the object, such as ``tx``; None if the property is read from the class.
            owner: the class of the object, which Python passes.
        """
        if instance is None:  # read from the class, as by a documentation tool
            return cast("V", self)
        # This is no method of the subclass, which torch.compile would compile again for each property.
        # Store the result also in the `Structure` that copies with other numbers share.
        if self._is_of_structure:
            results: dict[str, Any] = instance.structure.attributes
            if self._name not in results:
                results[self._name] = self._compute(instance)
            result = results[self._name]
        else:
            result = self._compute(instance)
        # Objects created while tracing must not be stored on an object that outlives the trace.
        if not torch.compiler.is_compiling():
            instance.__dict__[self._name] = result
        return result


class LazyOfStructure(Lazy[V]):
    """A `Lazy` property that does not depend on numbers, so that values which differ only in numbers share the result.

    It is cached in their `Structure`. A copy of ``momentum(0.9)`` with the decay 0.5, for example, has the same one.
    """

    _is_of_structure = True


# ----------------------------------------------------------------------------------------- the options of the decorator


P = ParamSpec("P")


def with_memory(constructor: Callable[Concatenate[Memory, P], Any]) -> Callable[P, Any]:
    """Decorate a function that builds a transform, so that it receives a cache (a dict) as its first argument.

    For ``def partition(_memory, transforms, labels)``, a call is still ``partition(transforms, labels)``. The package
    passes the cache, which holds results that depend on names, shapes and dtypes only. All transforms that differ only
    in numbers share one, also if ``torch.func`` or `with_hyperparams` rebuilds them. It is freed with them, unlike a
    cache of the module.
    """
    parameters = list(inspect.signature(constructor).parameters.values())
    marked: Any = constructor
    # The function itself is returned, with two attributes. Its signature has the arguments that callers pass.
    marked.__signature__ = inspect.Signature(parameters[1:])
    # `make_factory` reads it, and then passes the cache as first argument
    marked.takes_memory = True
    return cast("Callable[P, Any]", constructor)


class _Blank:
    """Takes the place of a part in the template: of a number, transform or schedule, which is stored separately."""

    def __repr__(self) -> str:
        return "*"

    def __reduce__(self) -> str:
        return "_BLANK"


_BLANK = _Blank()

_CONTAINERS = (tuple, list, dict)
"""The types of arguments in which transforms and tensors are parts."""


def take_parts(argument: Any, parts: list[Any]) -> object:
    """Append the tensors, transforms and schedules in an argument to a list. Return the argument with blanks for them.

    A float in a container stays, because only a float that is itself an argument is a number that can be changed.

    >>> parts = [0.9]
    >>> take_parts({"b": [torch.tensor(0.2), True], "a": 0.1}, parts)  # a blank prints as *
    {'b': [*, True], 'a': 0.1}
    >>> parts
    [0.9, tensor(0.2000)]
    """
    if isinstance(argument, (Recorded, Tensor)):
        parts.append(argument)
        return _BLANK
    kind: Any = type(argument)
    if kind is dict:
        return {key: take_parts(item, parts) for key, item in _items(argument)}
    if kind in (tuple, list):
        return kind([take_parts(item, parts) for item in argument])
    return argument


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a dict, or the indices and items of a tuple or list.

    A dict of transforms is sorted, because its order has no meaning. The order of patterns has a meaning and is kept:
    of two that match a name, the first counts.

    >>> _items({"b": mfx.scale(2.0), "a": mfx.scale(1.0)})
    [('a', scale(factor=1.0)), ('b', scale(factor=2.0))]
    >>> _items({"*.q": 0.5, "*": 0.1}), _items(("x", "y"))
    ([('*.q', 0.5), ('*', 0.1)], [(0, 'x'), (1, 'y')])
    """
    if type(container) is not dict:
        return list(enumerate(container))
    items = list(container.items())
    has_only_transforms = all(isinstance(item, Recorded) for item in container.values())
    if has_only_transforms:
        items.sort(key=lambda item: str(item[0]))
    return items


def _filled(template: Any, parts: Iterator[object]) -> Any:
    """Return a template with the next of ``parts``, in order, in place of each blank. It undoes `take_parts`.

    >>> _filled(
    ...     {"decay": _BLANK, "nesterov": True, "betas": (_BLANK, _BLANK)}, iter([0.9, 0.8, 0.7])
    ... )
    {'decay': 0.9, 'nesterov': True, 'betas': (0.8, 0.7)}
    """
    if template is _BLANK:
        return next(parts)
    kind = type(template)
    if kind not in _CONTAINERS:  # a fixed value, such as True
        return template
    items = template.values() if kind is dict else template
    filled: list[Any] = []
    for item in items:
        if item is _BLANK:  # not by a call of this function, because most blanks are here
            item = next(parts)
        elif type(item) in _CONTAINERS:
            item = _filled(item, parts)
        filled.append(item)
    if kind is dict:
        return dict(zip(template, filled, strict=True))
    return kind(filled)


def _names_of_blanks(template: Any, name: str) -> list[str]:
    """Return the dotted name of each blank in the template of an argument, which is itself called ``name``.

    >>> _names_of_blanks({"muon": _BLANK, "adamw": [_BLANK, 2]}, "transforms")
    ['transforms.muon', 'transforms.adamw.0']
    """
    if template is _BLANK:  # the argument itself is a number or a transform
        return [name]
    if type(template) not in _CONTAINERS:  # a fixed value, such as True
        return []
    names: list[str] = []
    for key, item in _items(template):
        names += _names_of_blanks(item, joined_name(name, str(key)))
    return names


R = TypeVar("R", bound="Recorded")


@dataclass(frozen=True, eq=False)
class Structure:
    """The fixed part of a transform or schedule: its factory, and all arguments but numbers and inner transforms."""

    kind: type[Recorded]
    factory: Factory
    template: dict[str, object]
    """The arguments by name, with a blank in place of each part: ``{"decay": *, "nesterov": True}``."""
    memory: Memory = field(default_factory=dict, repr=False)
    """The cache that the constructor receives. Not part of `derived`, because compiled steps depend on its contents."""
    derived: dict[str, Any] = field(default_factory=dict, repr=False)
    """Results that follow from the structure, cached for all values that share this object."""
    attributes: dict[str, object] = field(default_factory=dict, repr=False)
    """Attributes by name that every new value gets at once: adding one later would make torch.compile compile again."""

    def __eq__(self, other: object) -> bool:
        """Return True if the factories and all arguments but the numbers and inner transforms are equal.

        So ``scale(0.1)`` and ``scale(0.2)`` have equal structures, and ``momentum(nesterov=False)`` has another one
        than ``momentum()``.
        """
        if not isinstance(other, Structure):
            return NotImplemented
        if self is other:  # as for values that differ only in numbers
            return True
        if self.kind is not other.kind or self.factory != other.factory:
            return False
        # `==` would ignore the order of dicts, and equate 1 and True
        return same(self.template, other.template)

    def __hash__(self) -> int:
        return hash((self.kind, self.factory))


def _is_written_by_position(parameter: inspect.Parameter, value: object) -> bool:
    """Return True if a ``repr`` has an argument without its name: a required one, such as a transform; no number."""
    if (
        parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
        or parameter.default is not parameter.empty
    ):
        return False
    return not isinstance(value, int | float | Tensor)


def _flatten_for_optree(recorded: Recorded) -> tuple[tuple[Any, ...], Structure, tuple[str, ...]]:
    """Return children, structure and the names of the children, as optree requires."""
    return recorded.parts, recorded.structure, part_names(recorded)


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
        """Check the arguments of a call, such as ``momentum(0.9)``, and return a value that stores them.

        They are stored in two pieces. For this call, ``parts`` is ``[0.9]``, and ``template`` has a blank for the decay
        and all other arguments as they are: ``{"decay": *, "nesterov": True, ...}``.
        """
        definition = factory.definition
        signature = inspect.Signature(list(definition.parameters.values()))
        bound = bind(factory.__name__, signature, args, kwargs)
        bound.apply_defaults()
        # The numbers, transforms and schedules among the arguments are stored apart: they are children in the pytree.
        parts: list[object] = []
        template: dict[str, object] = {}
        for name, argument in bound.arguments.items():
            # Defaults are correct, so they need no check.
            if argument is not definition.parameters[name].default:
                argument = cls._checked(factory, name, argument)
            argument = definition.as_float(name, argument)
            if isinstance(argument, float):  # not one in a container, which is fixed
                template[name] = _BLANK
                parts.append(argument)
            else:
                template[name] = take_parts(argument, parts)
        return cls._from(Structure(cls, factory, template), parts)

    @classmethod
    def _checked(cls, factory: Factory, name: str, argument: Any) -> Any:
        """Return one argument of a call if the annotation of its parameter accepts it. Else raise an error.

        ``scale("2")`` raises: the factor must be a number. ``scale(linear_schedule(1.0, 0.0, 4))`` is accepted.
        """
        # An argument whose default is a dataclass, such as a `MatrixView`, must be of the same class.
        default = factory.definition.parameters[name].default
        if dataclasses.is_dataclass(default) and not isinstance(argument, type(default)):
            kind = type(default).__name__  # such as "MatrixView"
            raise TypeError(
                f"{factory.__name__}: {name} must be a {kind}, found {argument!r}: pass {kind}(...)"
            )
        # The names are {"float", "None"}, for example. An argument that is not checked has none.
        type_names = factory.definition.accepted_types[name]
        if not type_names:
            return argument
        is_number = factory.definition.is_number(name)
        if is_number and isinstance(argument, cls._number_types):  # a schedule in place of a number
            return argument
        return check_plain(factory.__name__, name, argument, type_names)

    def _names_of_parts(self, argument: str) -> Iterable[str]:
        """Return the dotted names of the numbers and recorded values (such as transforms) in one argument.

        They are ["decay"] for ``decay=0.9``, none for ``nesterov=True``, and the keys of a dict of transforms.
        """
        template = self.structure.template[argument]
        # Its items have its keys as names: "muon", not "transforms.muon".
        if type(template) is dict:
            return _names_of_blanks(template, "")
        return _names_of_blanks(template, argument)

    @classmethod
    def _from(cls, structure: Structure, values: Iterable[object]) -> Self:
        """Return the value that has a structure, and ``values`` as its numbers and inner transforms, unchecked.

        Nothing is checked, because the values may also be tracers of ``torch.func``, or any object that a pytree
        library puts in place of a number.

        >>> Recorded._from(mfx.scale(0.1).structure, [0.2])
        scale(factor=0.2)
        """
        # An instance is immutable, so its own `__setattr__` raises: `object.__setattr__` sets the attributes.
        recorded = cast("Self", object.__new__(structure.kind))
        object.__setattr__(recorded, "structure", structure)
        object.__setattr__(recorded, "factory", structure.factory)
        object.__setattr__(recorded, "parts", tuple(values))
        if not torch.compiler.is_compiling():
            # Cached properties that other values of this structure have computed, such as "locality".
            recorded.__dict__.update(structure.attributes)
        return recorded

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Register the subclass as a pytree node, so that ``torch.func`` can batch over the numbers of its values.

        Both libraries of pytrees are used: optree by muonfx, and ``torch.utils._pytree`` by torch. Each receives a
        function that returns the parts and the structure of a value, and one that builds a value from them.
        """
        super().__init_subclass__(**kwargs)
        # Its type hints require a collection, but any class works.
        register: Any = optree.register_pytree_node
        register(cls, _flatten_for_optree, Recorded._from, namespace=NAMESPACE)
        torch_pytree.register_pytree_node(
            cls,
            lambda recorded: (list(recorded.parts), recorded.structure),
            lambda parts, structure: Recorded._from(structure, parts),
            serialized_type_name=public_name(cls),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{self.structure.factory.__name__}(...) is immutable; use .replace({name}=...) for a changed copy"
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """A dict with all arguments of the call that created this value, by name, including defaults."""
        return _filled(self.structure.template, iter(self.parts))

    def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function that has the factory's signature, with arguments from a dict by name.

        The dict has the arguments of ``*args`` as one sequence and those of ``**kwargs`` as one dict, which are
        unpacked.

        >>> mfx.scale(0.1)._call(print, {"factor": 5})  # print(5)
        5
        >>> mfx.chain()._call(print, {"transforms": ("a", "b")})  # print("a", "b")
        a b
        """
        positional: list[object] = []
        named: dict[str, object] = {}
        # A pair is ("decay", "POSITIONAL_OR_KEYWORD"), for example.
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

    def _build(self, arguments: Mapping[str, Any]) -> Any:
        """Call the decorated function with arguments by name, and return its result: a transform's (init, update)."""
        definition = self.factory.definition
        constructor = definition.constructor
        if definition.remembers:
            constructor = functools.partial(constructor, self.structure.memory)
        return self._call(constructor, arguments)

    @Lazy
    def _built(self) -> Any:
        """The cached result of the decorated function for the arguments that this value stores."""
        return self._build(self.arguments)

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numeric arguments of this and of inner transforms that are tensors, in the order of pytree leaves."""
        return tuple([number for number in numbers_of(self) if isinstance(number, Tensor)])

    @functools.cached_property
    def treedef(self) -> PyTreeSpec:
        """The optree structure of this value. Values that differ only in numbers have equal structures."""
        return optree.tree_structure(cast("Any", self), none_is_leaf=True, namespace=NAMESPACE)

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """A cache for results that other modules compute from this value."""
        return {}

    def with_parts(self, parts: Iterable[object]) -> Self:
        """Return an unchecked copy with other numbers, schedules and inner transforms, in the order of `parts`."""
        # A new structure, because cached results of the old one, such as the locality, describe the old transforms.
        return self._from(self._new_structure(), parts)

    def _new_structure(self) -> Structure:
        """Return a copy of ``structure`` without its cached results."""
        return Structure(self.structure.kind, self.structure.factory, self.structure.template)

    def _prepare(self) -> None:
        """Call the decorated function now and cache its result, so that bad arguments raise before the first use."""
        _ = self._built

    def replace(self, **changes: object) -> Self:
        """Return a copy with some arguments of the factory call changed.

        ``momentum(0.9).replace(nesterov=False)`` returns ``momentum(decay=0.9, nesterov=False)``.

        Raises:
            TypeError: the factory has no argument of this name. The message lists its arguments.
        """
        arguments = self.arguments
        unknown = sorted(changes.keys() - arguments.keys())
        if unknown:
            raise TypeError(
                f"{self.factory.__name__} has no argument {unknown[0]}{hint(unknown[0], arguments)}; it has "
                f"{', '.join(arguments)}. To change a number of a transform within it, use with_hyperparams"
            )
        # A new call, which checks the changed arguments.
        return self._call(self.factory, {**arguments, **changes})

    def __repr__(self) -> str:
        """Return Python code that creates an equal value. Arguments that equal their defaults are left out.

        The code is, for example, "momentum(decay=0.9)" or "cautious(momentum(decay=0.9))".
        """
        arguments = self.arguments
        positional: list[str] = []
        keywords: list[str] = []
        for name, parameter in self.factory.definition.parameters.items():
            value = arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += map(code_of_value, value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                keywords += [f"{key}={code_of_value(item)}" for key, item in value.items()]
            # It is written without its name only if no named argument comes before, since Python allows no other order.
            elif not keywords and _is_written_by_position(parameter, value):
                positional.append(code_of_value(value))
            elif not same(value, parameter.default):
                keywords.append(f"{name}={code_of_value(value)}")
        return f"{self.factory.__name__}({', '.join([*positional, *keywords])})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recorded):
            return NotImplemented
        return self.structure == other.structure and same(self.parts, other.parts)

    def __hash__(self) -> int:
        return hash((self.factory.__module__, self.factory.__qualname__, len(self.parts)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, not the functions. The constructor creates the functions again at first use."""
        return _unpickled, (self._new_structure(), self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that identify the transform in checkpoints.

        Transforms with equal fingerprints have states of the same meaning. Numeric arguments are ignored, so a run can
        resume with another learning rate. The digits are the same in every process, and if code is moved.
        """
        return self.fingerprint_with_names({})

    def fingerprint_with_names(self, name_of: Mapping[str, str]) -> str:
        """Return the fingerprint of this transform if its parameters had other names, as in its labels.

        ``name_of`` has the other name of each parameter that has one.
        """
        return hashlib.sha256(_text_of_call(self, name_of).encode()).hexdigest()[:16]


def _unpickled(structure: Structure, parts: Sequence[object]) -> Recorded:
    """Return the value that `Recorded.__reduce__` pickled. New arguments of its factory have their defaults."""
    recorded = Recorded._from(structure, parts)
    parameters = structure.factory.definition.parameters
    if structure.template.keys() == parameters.keys():
        return recorded
    arguments = recorded.arguments
    removed = {name: value for name, value in arguments.items() if name not in parameters}
    signature = inspect.Signature(list(parameters.values()))
    # It unpacks the arguments of *args and **kwargs.
    call = inspect.BoundArguments(signature, arguments)
    # A TypeError for removed arguments.
    return structure.factory(*call.args, **call.kwargs, **removed)


def prepared(recorded: R) -> R:
    """Build the functions of a transform, and of inner transforms and schedules, now. Return the transform.

    So a call such as ``momentum(decay=2.0)`` raises, and not the first use of its result. The transform is marked, so
    that this happens once: it may become an argument of another transform.
    """
    if "_is_prepared" in recorded.__dict__:
        return recorded
    for value in recorded.parts:  # the numbers, inner transforms and schedules
        if isinstance(value, Recorded):
            prepared(value)
    recorded._prepare()
    if not torch.compiler.is_compiling():  # a trace may not change an object that outlives it
        recorded.__dict__["_is_prepared"] = True  # attributes cannot be set on an immutable value
    return recorded


def named_numbers(recorded: Recorded, name: str = "") -> dict[str, Any]:
    """Return the numeric arguments of a transform and of its inner transforms, by dotted name.

    The names begin with ``name``, the dotted name of the transform, such as "muon.momentum".

    >>> import muonfx as mfx
    >>> named_numbers(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)), "muon")
    {'muon.momentum.decay': 0.9, 'muon.scale.factor': -0.1}
    """
    numbers: dict[str, Any] = {}
    for argument, value in zip(part_names(recorded), recorded.parts, strict=True):
        full_name = joined_name(name, argument)
        if isinstance(value, Recorded):  # an inner transform or a schedule, with numbers of its own
            numbers.update(named_numbers(value, full_name))
        else:
            numbers[full_name] = value
    return numbers


def numbers_of(recorded: Recorded) -> list[Any]:
    """Return the numeric arguments of a transform and of its inner transforms, in the order of pytree leaves.

    >>> import muonfx as mfx
    >>> numbers_of(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)))
    [0.9, -0.1]
    """
    numbers: list[Any] = []
    for value in recorded.parts:
        if isinstance(value, Recorded):
            numbers += numbers_of(value)
        else:
            numbers.append(value)
    return numbers


def with_numbers(recorded: R, numbers: Iterator[object]) -> R:
    """Return a copy of a transform or schedule with new numeric arguments, in the order of `numbers_of`.

    ``numbers`` has one number for each numeric argument. Each call for an inner transform takes its own from it.

    >>> import muonfx as mfx
    >>> with_numbers(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)), iter([0.5, -0.2]))
    chain(momentum(decay=0.5), scale(factor=-0.2))
    """
    new_parts: list[object] = []
    for part in recorded.parts:
        if isinstance(part, Recorded):
            new_parts.append(with_numbers(part, numbers))
        else:
            new_parts.append(next(numbers))
    if all(map(operator.is_, new_parts, recorded.parts)):  # the same objects
        return recorded
    return cast("R", Recorded._from(recorded.structure, new_parts))


def without_stand_ins(value: Any) -> Any:
    """Return ``tx`` for ``offload(tx)`` and other values that stand in for their only part; else the value itself."""
    while isinstance(value, Recorded) and value.factory.definition.is_stand_in:
        (value,) = value.parts
    return value


def joined_name(name: str, argument: str) -> str:
    """Return the dotted name of an argument of the transform ``name``: "muon.decay" for "muon" and "decay".

    The outermost transform has the name "". The part of a stand-in, such as `offload`, is called "" and adds nothing.
    """
    if not name:
        return argument
    if not argument:
        return name
    return f"{name}.{argument}"


def walk(recorded: Recorded, name: str = "") -> Iterator[tuple[str, Recorded]]:
    """Yield (dotted name, value) for a transform or schedule, and then for each one within it, at any depth.

    >>> import muonfx as mfx
    >>> [name for name, _ in walk(mfx.chain(mfx.cautious(mfx.momentum()), mfx.scale(-0.1)))]
    ['', 'cautious', 'cautious.inner', 'scale']
    """
    yield name, recorded
    for argument, value in zip(part_names(recorded), recorded.parts, strict=True):
        if isinstance(value, Recorded):
            yield from walk(value, joined_name(name, argument))


def part_names(recorded: Recorded) -> tuple[str, ...]:
    """Return the dotted names of a transform's own numbers and inner transforms, in the order of `Recorded.parts`.

    >>> import muonfx as mfx
    >>> part_names(mfx.momentum()), part_names(mfx.chain(mfx.momentum(), mfx.scale(-0.1)))
    (('decay',), ('momentum', 'scale'))
    """
    cache = recorded.structure.derived  # shared with transforms that differ only in numbers
    if "part_names" in cache:
        return cache["part_names"]
    names: list[str] = []
    # The only part of such a transform, as of `offload`, adds no name.
    if recorded.factory.definition.is_stand_in:
        names.append("")
    else:
        for argument in recorded.structure.template:
            names += recorded._names_of_parts(argument)
    cache["part_names"] = tuple(names)
    return cache["part_names"]


def _text_of_call(recorded: Recorded, name_of: Mapping[str, str]) -> str:
    """Return the text whose hash is the fingerprint: public names and arguments, without numbers and defaults.

    For example, "muonfx.chain(transforms=(muonfx.momentum(nesterov=False),muonfx.scale()))". Defaults are left out, so
    that a new argument with a default does not change the fingerprints of old checkpoints.
    """
    recorded = without_stand_ins(recorded)
    parts: list[object] = []
    for part in recorded.parts:
        if isinstance(part, Recorded):  # an inner transform or a schedule
            parts.append(part)
        else:  # a number stays a blank, whose text is "*"
            parts.append(_BLANK)
    arguments = _filled(recorded.structure.template, iter(parts))
    texts: list[str] = []
    for name, argument in arguments.items():
        text = _text_of_argument(argument, name_of)
        # A number is "*" here and as a default, so it is left out too.
        if text != _text_of_default(recorded.factory.definition, name):
            texts.append(f"{name}={text}")
    return f"{public_name(recorded.factory)}({','.join(texts)})"


_NUMBER = repr(_BLANK)
"""The text of a number, and of an argument without a default: "*"."""


def _text_of_argument(argument: object, name_of: Mapping[str, str]) -> str:
    """Return an argument, in which numbers are blanks, as text for the fingerprint: "(*,True)", for example.

    A fingerprint identifies a transform in checkpoints, also if a run resumes with another learning rate.
    """
    if isinstance(argument, Recorded):  # an inner transform or a schedule
        return _text_of_call(argument, name_of)
    if type(argument) is dict:
        argument = dict(_items(argument))  # the items of a default are not sorted yet
    if type(argument) in _CONTAINERS:  # which may contain transforms
        return text_of(argument, functools.partial(_text_of_argument, name_of=name_of), name_of)
    # A fixed value, such as "True", or a number, whose text is "*".
    return text_of(argument, name_of=name_of)


def _text_of_default(definition: Definition, name: str) -> str:
    """Return the default of an argument as text for the fingerprint: "*" for a number, or if there is no default.

    An argument whose text equals its default's text is left out of the fingerprint. For ``decay: float = 0.9``, the
    text is "*", and for ``nesterov: bool = True``, it is "True".
    """
    parameter = definition.parameters[name]
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "()"
    if parameter.kind is parameter.VAR_KEYWORD:
        return "{}"
    default = definition.as_float(name, parameter.default)
    if default is parameter.empty or isinstance(default, float):
        return _NUMBER
    return _text_of_argument(default, {})
