"""The definition of a transform: its constructor, the options of the decorator, and the signatures of its functions."""

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
    """Make an attribute that follows from the structure of a value; all values of the structure share it."""
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
"""The place of a transform in a chain; `muonfx.transform` documents each value."""

InitAndUpdate = tuple[Callable[[PyTree], PyTree], Callable[..., tuple[PyTree, PyTree]]]
"""The pair of functions ``init, update`` that a function under `transform` returns."""

LeafCost = Callable[[str, tuple[int, ...], torch.dtype], float]
"""``(name, shape, dtype) -> operations`` for one leaf of the updates; a multiply-add counts as two operations."""


class Locality(IntEnum):
    """The part of the tree that a transform reads to compute one element of its output, from least to most.

    >>> max(Locality.ELEMENT, Locality.MATRIX).name
    'MATRIX'
    """

    ELEMENT = 0
    """The same element of the updates, state and parameters, and scalars."""
    MATRIX = 1
    """The matrix that contains the element (the last two dims of its leaf); batch dims are independent."""
    LEAF = 2
    """The leaf that contains the element."""
    TREE = 3
    """The whole tree."""


@dataclass(frozen=True)
class Combinator:
    """How a transform runs the transforms that it calls, for the option ``combinator`` of `muonfx.transform`.

    Raises:
        TypeError: ``own_locality`` is neither a `Locality` nor None.

    >>> Combinator(Locality.ELEMENT)
    Combinator(own_locality=<Locality.ELEMENT: 0>, in_sequence=False, varies_numbers=False)
    """

    own_locality: Locality | None = None
    """The locality of its own computation, without the transforms that it calls. Declare it if each called transform
    receives a tree of some of the leaves; a sharded run can then replace the called transforms. None: unknown."""
    in_sequence: bool = False
    """True if it calls its parts in sequence, as `chain` does, and does nothing else. Each part receives the output of
    the previous part and all named extras. The state is a dict by the names of the parts."""
    varies_numbers: bool = False
    """True if the called transforms differ in numeric arguments only, so that they share one execution plan."""

    def __post_init__(self) -> None:
        if not (self.own_locality is None or isinstance(self.own_locality, Locality)):
            raise TypeError(f"Combinator: own_locality must be a Locality or None, found {self.own_locality!r}")


@dataclass(frozen=True)
class Declaration:
    """The options of `muonfx.transform`, which documents each field."""

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
    understood: frozenset[str] | None
    """Extras of training loops that the function, or a transform that it calls, reads. None: any may be read."""


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


def extras_of(update: Callable[..., object], called: Iterable[Extras], *, calls_none: bool) -> Extras:
    """Return the named extras of an update function, from its signature and the extras of the transforms it calls.

    With `calls_none`, a function with ``**extras`` reads them itself.
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
        required |= one.required - named  # an extra that this signature names with a default is optional
        understood = None if understood is None or one.understood is None else understood | one.understood
    return Extras(frozenset(named), takes_all, frozenset(required - {"sum_over_leaves"}), understood)


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
    known = tx.extras.understood
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
