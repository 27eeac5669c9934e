"""Declarations of transforms: constructors with parsed signatures, the options of `transform`, and their checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast, get_args

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.patterns import NamePatterns
from muonfx.tree import PyTree
from muonfx.tree.arguments import did_you_mean, kinds_of

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

Position = Literal[
    "learning_rate",
    "turns",
    "either_sign",
    "before_learning_rate",
    "sets_size",
    "after_learning_rate",
    "last",
    "observer",
    "last_observer",
]
"""The place of a transform in a chain relative to the learning rate; `muonfx.transform` describes each value."""

InitAndUpdate = tuple[Callable[[PyTree], PyTree], Callable[..., tuple[PyTree, PyTree]]]
"""The pair ``(init, update)`` that a function decorated with `transform` returns."""

LeafCost = Callable[[str, tuple[int, ...], torch.dtype], float]
"""A function ``(name, shape, dtype) -> operations`` for one leaf of the updates; a multiply-add is two operations."""


class Locality(IntEnum):
    """How much of the tree a transform reads to compute one element of its output: from one element to all leaves.

    The sharding layer relies on it: an ELEMENT transform runs on shards, and a MATRIX transform receives whole
    matrices. The values are ordered, so the locality of a chain is the maximum over its members.

    >>> max(Locality.ELEMENT, Locality.MATRIX).name
    'MATRIX'
    """

    ELEMENT = 0
    """Reads the same element of the updates, the state and the parameters, and scalars such as a step count."""
    MATRIX = 1
    """Reads the matrix that contains the element: the last two dims of its leaf. Leading dims are batch dims."""
    LEAF = 2
    """Reads the whole leaf (the tensor of one parameter) that contains the element."""
    TREE = 3
    """Reads all leaves of the tree, as clipping by the global norm does."""


@dataclass(frozen=True)
class Combinator:
    """Describes how a wrapper calls the transforms that it receives as arguments; an option of `transform`.

    Raises:
        TypeError: ``own_locality`` is neither a `Locality` nor None.

    >>> Combinator(Locality.ELEMENT)
    Combinator(own_locality=<Locality.ELEMENT: 0>, in_sequence=False, varies_numbers=False, skips_steps=False)
    """

    own_locality: Locality | None = None
    """The locality of the wrapper's own computation, without the transforms that it calls. Declare it if each called
    transform receives a tree with some or all of the leaves. On sharded parameters, the called transforms then run by
    their own localities. None: unknown, so the wrapper and the called transforms run together."""
    in_sequence: bool = False
    """True if the wrapper does nothing but call its transforms in sequence, as `chain` does. Each receives the updates
    of the previous one and all extra arguments. The state is a dict from their names to their states."""
    varies_numbers: bool = False
    """True if the called transforms differ in numeric arguments only, so that one of them describes how all run."""
    leaves_out: Callable[[Any, Any], set[str]] | None = field(default=None, repr=False)
    """A function of the wrapper and the parameters that returns the names of parameters that it does not update. None:
    each called transform receives all parameters."""
    skips_steps: bool = False
    """True if the called transforms run at some updates only, as those of `accumulate` do. At the others, the wrapper
    returns updates of zero."""

    def __post_init__(self) -> None:
        if not (self.own_locality is None or isinstance(self.own_locality, Locality)):
            raise TypeError(f"Combinator: own_locality must be a Locality or None, found {self.own_locality!r}")


@dataclass(frozen=True)
class Declaration:
    """The options of the decorator `transform` as one value. The docstring of `transform` describes each field."""

    locality: Locality | Callable[..., Locality] = Locality.TREE
    combinator: Combinator = Combinator()
    reads_params: bool | Callable[..., bool] = True
    resolve: Callable[[Any, PyTree], Any] | None = None
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Any, dict[str, tuple[int, int]]]] | None = None
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None
    position: Position | Callable[..., Position | None] | None = None
    cost: Callable[[Any, str, torch.dtype], LeafCost] | None = None
    short_names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, str | tuple[str, ...]])

    def __post_init__(self) -> None:
        functions = ("resolve", "rounds_to", "on_stacks", "name_patterns", "check_extras", "cost")
        position = f"one of {', '.join(map(repr, get_args(Position)))}, None or a function of the arguments"
        accepted: dict[str, tuple[bool, str]] = {
            "locality": (isinstance(self.locality, Locality), "a Locality, such as Locality.MATRIX, or a function"),
            "reads_params": (isinstance(self.reads_params, bool), "True, False or a function of the arguments"),
            "position": (self.position is None or self.position in get_args(Position), position),
            **{option: (getattr(self, option) is None, "a function or None") for option in functions},
        }
        for option, (fits, words) in accepted.items():
            value = getattr(self, option)
            if not (fits or callable(value)):
                wrong = ValueError if isinstance(value, str) and option == "position" else TypeError
                raise wrong(f"transform: {option} must be {words}, found {value!r}")
        if not isinstance(self.combinator, Combinator):
            raise TypeError(f"transform: combinator must be a Combinator, found {self.combinator!r}")


# ------------------------------------------------------------------------------------ the signatures of init and update


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


def check_extras(within: list[Any], extras: Mapping[str, Any]) -> None:
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
