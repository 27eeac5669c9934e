"""The arithmetic of one leaf, recorded, and carried out on the lists of all leaves.

A `Leaf` stands for an operand of a step, or for what the step has made of some, and records what is done with it. What
the step returns decides which of the recorded operations make up its `Plan`: each runs once, on lists, in
`muonfx.elementwise`. By then it is known where every value is used for the last time, and so whose storage may be
overwritten: `Values` keeps the donation promise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from muonfx import elementwise as ew
from muonfx import tree
from muonfx.elementwise import Scalar

__all__ = ["Leaf", "Operation", "Plan", "Values", "plan"]

Lists = Callable[..., list[Tensor]]
Casts = torch.dtype | list[torch.dtype] | None
"""The dtypes that the tensors of an operand are cast to: one for all, one for each, or None for as they are."""


class Operation(NamedTuple):
    """A function of lists that makes a value of those at some places, and of scalars."""

    function: Lists
    operands: list[int]
    scalars: Sequence[object]
    overwrites: int | None
    """The operand whose storage the function may ``reuse``."""
    is_fresh: bool
    """False where a result may be a view of an operand, or the operand itself."""
    has_leafs_shape: bool


Operand: TypeAlias = "Leaf | Scalar"


def _method(function: Callable[..., Leaf]) -> Callable[..., Leaf]:
    """Give a lambda of a class body a type."""
    return function


class Leaf:
    """One leaf in the arithmetic of a `leafwise` step, in the dtype to compute in.

    Operators and the functions and methods of torch work on it as on a tensor. It has no values yet: nothing may be
    decided on them, and no shape or dtype may be asked for, since it stands for every leaf of a tree.

    >>> import muonfx as mfx
    >>> @mfx.leafwise
    ... def soft_sign():
    ...     def step(u: mfx.Leaf, s):
    ...         return u / (1 + torch.abs(u)), s
    ...
    ...     return mfx.EmptyState(), step
    >>> soft_sign().update({"w": torch.tensor([1.0, -3.0])}, mfx.EmptyState())[0]
    {'w': tensor([ 0.5000, -0.7500])}
    """

    def __init__(self, record: list[Operation | None], operation: Operation | None = None) -> None:
        """Take the next place of a record, as the result of an operation or as an operand of the step."""
        self._record, self._place = record, len(record)
        record.append(operation)

    @classmethod
    def _of(
        cls,
        function: Lists,
        operands: Sequence[Leaf],
        scalars: Sequence[object] = (),
        *,
        overwrites: int | None = None,
        is_fresh: bool = True,
        has_leafs_shape: bool = True,
    ) -> Leaf:
        record = operands[0]._record
        places = [operand._place for operand in operands]
        for place in places:
            source = record[place]
            has_leafs_shape = has_leafs_shape and (source is None or source.has_leafs_shape)
        return cls(record, Operation(function, places, scalars, overwrites, is_fresh, has_leafs_shape))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Tensor],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Leaf:
        """Record a function of torch; those that have a form for lists have a method here."""
        own = getattr(cls, function.__name__, None)
        if own is not None and isinstance(args[0], Leaf):
            return own(*args, **(kwargs or {}))
        return _each(function, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Leaf]:
        """Look up a method of tensors."""
        method: Callable[..., Tensor] | None = getattr(Tensor, name, None)
        if not callable(method) or name.startswith("__"):
            raise AttributeError(
                f"leafwise: a leaf has no {name} here, as it stands for every leaf of a tree; write the transform with "
                "muonfx.transform if its work depends on that"
            )
        if name.endswith("_"):
            raise AttributeError(
                f"leafwise: {name} writes in place; use {name[:-1]}, which reuses storage where it may"
            )
        return functools.partial(_each, method, self)

    def __bool__(self) -> NoReturn:
        """Refuse: a step decides nothing on values."""
        raise TypeError("leafwise: a step cannot decide on the values of a leaf in Python; use torch.where")

    def add(self, other: Operand, *, alpha: Scalar = 1.0) -> Leaf:
        """Record ``self + alpha * other``."""
        if isinstance(other, Leaf):
            return Leaf._of(ew.add, (self, other), (alpha,), overwrites=0)
        return Leaf._of(ew.shift, (self,), (alpha * other,), overwrites=0)

    def sub(self, other: Operand) -> Leaf:
        """Record ``self - other``."""
        return self.add(other, alpha=-1.0)

    def mul(self, other: Operand) -> Leaf:
        """Record ``self * other``."""
        if isinstance(other, Leaf):
            return Leaf._of(functools.partial(ew.apply, "mul"), (self, other), overwrites=0)
        return Leaf._of(ew.mul, (self,), (other,), overwrites=0)

    def div(self, other: Operand) -> Leaf:
        """Record ``self / other``."""
        if isinstance(other, Leaf):
            return Leaf._of(ew.div, (self, other), overwrites=1)
        return _each(torch.div, self, other)

    def lerp(self, end: Operand, weight: Operand) -> Leaf:
        """Record ``self + weight * (end - self)``."""
        if isinstance(end, Leaf) and not isinstance(weight, Leaf):
            return Leaf._of(ew.lerp, (self, end), (weight,), overwrites=0)
        return _each(torch.lerp, self, end, weight)

    def addcmul(self, x: Operand, y: Operand, *, value: Scalar = 1.0) -> Leaf:
        """Record ``self + value * x * y``."""
        if isinstance(x, Leaf) and isinstance(y, Leaf):
            return Leaf._of(ew.addcmul, (self, x, y), (value,), overwrites=0)
        return _each(torch.addcmul, self, x, y, value=value)

    def sqrt(self) -> Leaf:
        """Record the square root."""
        return Leaf._of(functools.partial(ew.apply, "sqrt"), (self,), overwrites=0)

    def sign(self) -> Leaf:
        """Record the sign."""
        return Leaf._of(functools.partial(ew.apply, "sign"), (self,), overwrites=0)

    __add__ = __radd__ = add
    __sub__ = sub
    __mul__ = __rmul__ = mul
    __truediv__ = div
    __neg__ = _method(lambda x: -1.0 * x)
    __rsub__ = _method(lambda x, y: y + -1.0 * x)
    __abs__ = _method(lambda x: _each(torch.abs, x))
    __rtruediv__ = _method(lambda x, y: _each(torch.div, y, x))
    __pow__ = _method(lambda x, y: _each(torch.pow, x, y))
    __gt__ = _method(lambda x, y: _each(torch.gt, x, y))
    __ge__ = _method(lambda x, y: _each(torch.ge, x, y))
    __lt__ = _method(lambda x, y: _each(torch.lt, x, y))
    __le__ = _method(lambda x, y: _each(torch.le, x, y))


def _each(function: Callable[..., Tensor], *args: object, **kwargs: object) -> Leaf:
    """Record a function that is called once for each leaf."""
    found, treedef = tree.flatten((args, kwargs))
    is_leaf = [isinstance(x, Leaf) for x in found]  # not the leaves themselves, which would know what knows them
    operands = [x for x in found if isinstance(x, Leaf)]
    others = [x for x in found if not isinstance(x, Leaf)]

    def call(*given: Any) -> list[Tensor]:
        results: list[Tensor] = []
        for tensors in zip(*given[: len(given) - len(others)], strict=True):
            leaves, rest = iter(tensors), iter(given[len(given) - len(others) :])
            args, kwargs = tree.unflatten(treedef, [next(leaves if own else rest) for own in is_leaf])
            results.append(function(*args, **kwargs))
        return results

    return Leaf._of(call, operands, others, is_fresh=False, has_leafs_shape=False)


def _casts(lists: Sequence[list[Tensor]]) -> list[Casts]:
    """The dtype to compute in, for each list or its leaves: the widest of a leaf's operands, and at least fp32."""
    dtypes = [[x.dtype for x in xs] for xs in lists]
    kinds = [set(found) for found in dtypes]
    if all(len(kind) <= 1 for kind in kinds):
        wide = ew.wide_dtype(*[dtype for kind in kinds for dtype in kind])
        return [None if kind <= {wide} else wide for kind in kinds]
    return [[ew.wide_dtype(*each) for each in zip(*dtypes, strict=True)]] * len(lists)


class Plan(NamedTuple):
    """The operations of a step that its outputs need, in the order in which they were written."""

    operations: list[tuple[int, Operation]]
    """Each with the place of its result."""
    uses: list[int]
    """By place, how many operations and outputs use it."""
    outputs: list[int]
    """The places of the update and of the new state's trees."""
    counts: list[Tensor]
    """The new state's scalars."""

    @property
    def has_tensors(self) -> bool:
        """True if a scalar is a tensor: it may be another at the next call, or the same of another graph."""
        return any(isinstance(scalar, Tensor) for _, operation in self.operations for scalar in operation.scalars)


def plan(record: Sequence[Operation | None], made: Sequence[Leaf | Tensor]) -> Plan:
    """The plan of what a step has recorded and made: an update, and the fields of its new state."""
    outputs = [leaf._place for leaf in made if isinstance(leaf, Leaf)]
    uses = [0] * len(record)
    for place in outputs:
        uses[place] += 1
    needed: list[tuple[int, Operation]] = []
    for place in reversed(range(len(record))):
        operation = record[place]
        if operation is not None and uses[place]:
            needed.append((place, operation))
            for operand in operation.operands:
                uses[operand] += 1
    return Plan(needed[::-1], uses, outputs, [count for count in made if isinstance(count, Tensor)])


class Values:
    """The values of a plan, each a list of tensors; operands are cast when they are first read."""

    def __init__(self, plan: Plan, operands: list[list[Tensor]], may_write: list[bool]) -> None:
        self._operands, self._casts = operands, _casts(operands)
        self._lists: list[list[Tensor] | None] = [None] * len(plan.uses)
        self._may_write = may_write + [False] * (len(plan.uses) - len(operands))
        self._is_fresh = [False] * len(plan.uses)
        self._uses = list(plan.uses)
        self.was_cast = [False] * len(operands)
        """By operand, whether the values that were read are copies, every one."""
        for place, operation in plan.operations:
            self._lists[place] = self._compute(operation)
            self._is_fresh[place] = operation.is_fresh
            self._may_write[place] = operation.is_fresh and operation.has_leafs_shape

    def read(self, place: int) -> list[Tensor]:
        """The values at a place."""
        values = self._lists[place]
        if values is None:
            values, to = self._operands[place], self._casts[place]
            if to is not None:
                given, values = values, ew.cast(values, to)
                self.was_cast[place] = all(map(is_not, values, given))
                self._may_write[place] = self._may_write[place] or self.was_cast[place]
            self._lists[place] = values
        return values

    def _compute(self, operation: Operation) -> list[Tensor]:
        """Run an operation, in storage that it is the last to use where it can."""
        function, operands, scalars, overwrites, is_fresh, has_leafs_shape = operation
        lists = [self.read(place) for place in operands]
        if overwrites is None:
            result = function(*lists, *scalars)
        else:
            target = operands[overwrites]
            reuse = has_leafs_shape and self._may_write[target] and self._uses[target] == 1
            result = function(*lists, *scalars, reuse=reuse)
            self._may_write[target] = self._may_write[target] and not reuse
        for place in operands:
            self._uses[place] -= 1
            self._may_write[place] = self._may_write[place] and is_fresh
            if not self._uses[place] and place >= len(self._operands):
                self._lists[place] = None
        return result

    def take(self, place: int, taken: Sequence[int], spare: int | None = None) -> list[Tensor]:
        """Values to give out: copies where their storage may be the caller's, or has been given out already.

        Copies are written into the storage of a spare operand that is used no more, where it may be.
        """
        values = self.read(place)
        if (self._is_fresh[place] or self._may_write[place]) and place not in taken:
            return values
        if spare is not None and self._may_write[spare] and not self._uses[spare]:
            return ew.copy(values, into=self.read(spare))
        return ew.clone(values)
