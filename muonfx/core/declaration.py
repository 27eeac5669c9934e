"""The options of the `transform` decorator: locality, position in a chain, and hints that save work when sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, get_args

import torch

from muonfx.core.patterns import NamePatterns
from muonfx.core.recorded import Recorded
from muonfx.tree import PyTree

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
    resolve: Callable[[Any, PyTree], Recorded] | None = None
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Recorded, dict[str, tuple[int, int]]]] | None = None
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
