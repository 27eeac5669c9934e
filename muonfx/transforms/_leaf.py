"""The arithmetic of one leaf, recorded once and run on the lists of all leaves.

A `Leaf` represents an operand or a result of a step and records the operations on it. A `Plan` contains the recorded
operations that the outputs of the step need; each runs once, on lists, with `muonfx.tree.elementwise`. The plan counts
the uses of every value, so `Values` knows which storage may be overwritten and keeps the donation promise.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from muonfx import tree
from muonfx.tree import Present
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar

__all__ = ["Leaf", "Operation", "Plan", "Values", "plan"]

Lists = Callable[..., list[Tensor]]
Casts = torch.dtype | list[torch.dtype] | None
"""The dtypes to cast the tensors of an operand to: one for all, one for each, or None for no cast."""


class Operation(NamedTuple):
    """A function of lists, with the indices of its operands and with its scalars."""

    function: Lists
    operands: list[int]
    scalars: Sequence[object]
    overwrites: int | None
    """The operand whose storage the function may ``reuse``."""
    is_fresh: bool
    """False if a result may be an operand or a view of one."""
    has_leafs_shape: bool
    """True if the results always have the shape of the leaf and the compute dtype."""


Operand: TypeAlias = "Leaf | Scalar"


_WIDE = frozenset({torch.float32, torch.float64})


def _method(function: Callable[..., Leaf]) -> Callable[..., Leaf]:
    """Annotate a lambda in a class body."""
    return function


def _both_ways(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Leaf], Callable[..., Leaf]]:
    """Return a Python operator, called for each leaf, and its reflected form."""
    return lambda x, y: _each(function, x, y), lambda x, y: _each(function, y, x)


def _is_number(value: object) -> bool:
    """Return True for a scalar that the list functions accept: no complex numbers, and only 0-d real tensors."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return not isinstance(value, complex)


def _times(alpha: Scalar, value: Any) -> Any:
    """Return ``alpha * value``; an alpha of 1 keeps an integer an integer."""
    return value if not isinstance(alpha, Tensor) and alpha == 1 else alpha * value


def _plus(x: object, y: object, alpha: Scalar) -> Tensor:
    return x + _times(alpha, y)


def _minus(x: object, y: object, alpha: Scalar) -> Tensor:
    return x - _times(alpha, y)


def _from_one(x: Any, y: Any) -> Tensor:
    return y - x


def _lerp(x: Tensor, y: Tensor, weight: Scalar) -> Tensor:
    return x + weight * (y - x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Scalar) -> Tensor:
    return x + value * y * z if isinstance(value, Tensor) else torch.addcmul(x, y, z, value=value)


def _subtract(xs: list[Tensor], ys: list[Tensor], alpha: Scalar, *, reuse: bool = False) -> list[Tensor]:
    return ew.add(xs, ys, -alpha, reuse=reuse)


def _shift_down(xs: list[Tensor], c: Scalar, *, reuse: bool = False) -> list[Tensor]:
    return ew.shift(xs, -c, reuse=reuse)


def _negative(xs: list[Tensor], *, reuse: bool = False) -> list[Tensor]:
    return ew.mul(xs, -1.0, reuse=reuse)


def _from(xs: list[Tensor], c: Scalar, *, reuse: bool = False) -> list[Tensor]:
    return ew.shift(ew.mul(xs, -1.0, reuse=reuse), c, reuse=True)


def _refused(what: str, advice: str) -> Callable[..., NoReturn]:
    """Return a method of `Leaf` that raises."""

    def refuse(*args: object) -> NoReturn:
        raise TypeError(f"leafwise: a leaf stands for every leaf of a tree and has no {what} here; {advice}")

    return refuse


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Leaf, Operand], Leaf]:
    """Return an in-place operator: it makes the leaf represent the result from then on."""

    def apply(leaf: Leaf, other: Operand) -> Leaf:
        leaf._place = function(leaf, other)._place
        return leaf

    return apply


_TRANSFORM = "write the transform with muonfx.transform if its work depends on that"
_WHERE = "use torch.where"
_WRITES = frozenset({"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})
"""The methods of tensors that write in place and whose names do not end with an underscore."""


class Leaf:
    """One leaf in the arithmetic of a `leafwise` step, in the dtype to compute in.

    Operators and the functions and methods of torch work on it as on a tensor; comparisons give masks. It has no values
    yet: nothing may be decided on them, and its shape and dtype cannot be read, since it stands for every leaf of a
    tree.

    >>> import muonfx as mfx
    >>> @mfx.leafwise
    ... def soft_sign():
    ...     def step(u: mfx.Leaf, s):
    ...         return u / (1 + torch.abs(u)), s
    ...
    ...     return mfx.core.EmptyState(), step
    >>> soft_sign().update({"w": torch.tensor([1.0, -3.0])}, mfx.core.EmptyState())[0]
    {'w': tensor([ 0.5000, -0.7500])}
    """

    __array_ufunc__ = None  # makes numpy scalars defer to the operators of the leaf

    def __init__(self, record: list[Operation | None], operation: Operation | None = None) -> None:
        """Append an operand of the step, or the result of an operation, to the record."""
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
        places = [operand._place for operand in operands]
        operation = Operation(function, places, scalars, overwrites, is_fresh, has_leafs_shape)
        return cls(operands[0]._record, operation)

    @classmethod
    def _of_lists(
        cls,
        function: Lists,
        each: Callable[..., Tensor],
        operands: Sequence[Leaf],
        scalars: Sequence[object] = (),
        overwrites: int | None = 0,
    ) -> Leaf:
        """Record a function of lists that is equivalent to calling ``each`` for every leaf."""
        sources = [operand._record[operand._place] for operand in operands]
        if all(source is None or source.has_leafs_shape for source in sources):
            return cls._of(function, operands, scalars, overwrites=overwrites)
        number = len(operands)

        # The result of a torch function may be a mask or have another dtype: `each` then follows torch's promotion.
        def call(*given: Any) -> list[Tensor]:
            lists, rest = given[:number], given[number:]
            dtypes = {x.dtype for xs in lists for x in xs}
            if len(dtypes) == 1 and dtypes <= _WIDE:
                return function(*given)
            return [each(*tensors, *rest) for tensors in zip(*lists, strict=True)]

        return cls._of(call, operands, scalars, has_leafs_shape=False)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Tensor],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Leaf:
        """Record a torch function, by the method of this class if there is one."""
        name, given = function.__name__, kwargs or {}
        writes = given.get("out") is not None or given.get("inplace")
        if not torch.compiler.is_compiling():  # a compiler cannot trace the name
            writes = writes or name in _WRITES or (name.endswith("_") and not name.startswith("__"))
        if writes:
            raise TypeError(f"leafwise: {name} writes in place here; use the form that returns a new tensor")
        own = getattr(cls, name, None)
        if own is not None and args and isinstance(args[0], Leaf):
            return own(*args, **given)
        return _each(function, *args, **given)

    def __getattr__(self, name: str) -> Callable[..., Leaf]:
        """Return a method of tensors that is recorded."""
        method: Callable[..., Tensor] | None = getattr(Tensor, name, None)
        if not callable(method) or name.startswith("__"):
            raise AttributeError(
                f"leafwise: a leaf has no {name} here, as it stands for every leaf of a tree; {_TRANSFORM}"
            )
        if name.endswith("_"):
            raise AttributeError(
                f"leafwise: {name} writes in place; use {name[:-1]}, which reuses storage where it may"
            )
        return functools.partial(_each, method, self)

    def __bool__(self) -> NoReturn:
        raise TypeError("leafwise: a step cannot decide on the values of a leaf in Python; use torch.where")

    def add(self, other: Operand, *, alpha: Scalar = 1.0) -> Leaf:
        """Record ``self + alpha * other``."""
        if isinstance(other, Leaf):
            return Leaf._of_lists(ew.add, _plus, (self, other), (alpha,))
        if not _is_number(other):
            return _each(_plus, self, other, alpha)
        return Leaf._of_lists(ew.shift, operator.add, (self,), (_times(alpha, other),))

    def sub(self, other: Operand, *, alpha: Scalar = 1.0) -> Leaf:
        """Record ``self - alpha * other``."""
        if isinstance(other, Leaf):
            return Leaf._of_lists(_subtract, _minus, (self, other), (alpha,))
        if not _is_number(other):
            return _each(_minus, self, other, alpha)
        return Leaf._of_lists(_shift_down, operator.sub, (self,), (_times(alpha, other),))

    def mul(self, other: Operand) -> Leaf:
        """Record ``self * other``."""
        if isinstance(other, Leaf):
            return Leaf._of_lists(functools.partial(ew.apply, "mul"), operator.mul, (self, other))
        if not _is_number(other):
            return _each(operator.mul, self, other)
        return Leaf._of_lists(ew.mul, operator.mul, (self,), (other,))

    def div(self, other: Operand, *, rounding_mode: str | None = None) -> Leaf:
        """Record ``self / other``."""
        if isinstance(other, Leaf) and rounding_mode is None:
            return Leaf._of_lists(ew.div, operator.truediv, (self, other), overwrites=1)
        return _each(torch.div, self, other, rounding_mode=rounding_mode)

    def lerp(self, end: Operand, weight: Operand) -> Leaf:
        """Record ``self + weight * (end - self)``."""
        if isinstance(end, Leaf) and not isinstance(weight, Leaf):
            return Leaf._of_lists(ew.lerp, _lerp, (self, end), (weight,))
        return _each(torch.lerp, self, end, weight)

    def addcmul(self, x: Operand, y: Operand, *, value: Scalar = 1.0) -> Leaf:
        """Record ``self + value * x * y``."""
        if isinstance(x, Leaf) and isinstance(y, Leaf):
            return Leaf._of_lists(ew.addcmul, _addcmul, (self, x, y), (value,))
        return _each(torch.addcmul, self, x, y, value=value)

    def sqrt(self) -> Leaf:
        """Record the square root."""
        return Leaf._of_lists(functools.partial(ew.apply, "sqrt"), torch.sqrt, (self,))

    def sign(self) -> Leaf:
        """Record the sign."""
        return Leaf._of_lists(functools.partial(ew.apply, "sign"), torch.sign, (self,))

    def neg(self) -> Leaf:
        """Record ``-self``."""
        return Leaf._of_lists(_negative, torch.neg, (self,))

    __add__ = __radd__ = add
    __sub__ = sub
    __mul__ = __rmul__ = mul
    __truediv__ = div
    __neg__ = neg
    __pos__ = _method(lambda x: _each(operator.pos, x))
    __abs__ = _method(lambda x: _each(torch.abs, x))
    __invert__ = _method(lambda x: _each(operator.invert, x))
    __round__ = _method(lambda x, *digits: _each(round, x, *digits))
    __rsub__ = _method(
        lambda x, y: Leaf._of_lists(_from, _from_one, (x,), (y,)) if _is_number(y) else _each(_from_one, x, y)
    )
    __rtruediv__ = _method(lambda x, y: _each(operator.truediv, y, x))
    __pow__, __rpow__ = _both_ways(operator.pow)
    __floordiv__, __rfloordiv__ = _both_ways(operator.floordiv)
    __mod__, __rmod__ = _both_ways(operator.mod)
    __and__, __rand__ = _both_ways(operator.and_)
    __or__, __ror__ = _both_ways(operator.or_)
    __xor__, __rxor__ = _both_ways(operator.xor)
    __lshift__, __rlshift__ = _both_ways(operator.lshift)
    __rshift__, __rrshift__ = _both_ways(operator.rshift)
    __gt__, __lt__ = _both_ways(operator.gt)[0], _both_ways(operator.lt)[0]
    __ge__, __le__ = _both_ways(operator.ge)[0], _both_ways(operator.le)[0]
    __eq__ = _both_ways(operator.eq)[0]  # pyright: ignore[reportAssignmentType]
    __ne__ = _both_ways(operator.ne)[0]  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    __iadd__, __isub__, __imul__ = _in_place(operator.add), _in_place(operator.sub), _in_place(operator.mul)
    __itruediv__, __ifloordiv__ = _in_place(operator.truediv), _in_place(operator.floordiv)
    __imod__, __ipow__ = _in_place(operator.mod), _in_place(operator.pow)
    __iand__, __ior__, __ixor__ = _in_place(operator.and_), _in_place(operator.or_), _in_place(operator.xor)
    __ilshift__, __irshift__ = _in_place(operator.lshift), _in_place(operator.rshift)

    __matmul__ = __rmatmul__ = __imatmul__ = _refused("matrix product (@)", _TRANSFORM)
    __len__ = _refused("len()", _TRANSFORM)
    __iter__ = _refused("rows to iterate over", _TRANSFORM)
    __getitem__ = _refused("elements to index", f"{_WHERE}, or {_TRANSFORM}")
    __setitem__ = __delitem__ = _refused("elements to write to", _WHERE)
    __contains__ = _refused("values for `in`", f"compare with == and {_WHERE}")
    __float__ = __int__ = __index__ = __complex__ = _refused("number in Python", f"{_WHERE}, or {_TRANSFORM}")


def _each(function: Callable[..., Any], *args: object, **kwargs: object) -> Leaf:
    """Record a function that is called once for each leaf."""
    found, treedef = tree.flatten((args, kwargs))
    is_leaf = [isinstance(x, Leaf) for x in found]  # not the leaves: a reference cycle
    operands = [x for x in found if isinstance(x, Leaf)]
    others = [x for x in found if not isinstance(x, Leaf)]

    def call(*given: Any) -> list[Tensor]:
        results: list[Tensor] = []
        for tensors in zip(*given[: len(given) - len(others)], strict=True):
            leaves, rest = iter(tensors), iter(given[len(given) - len(others) :])
            args, kwargs = tree.unflatten(treedef, [next(leaves if own else rest) for own in is_leaf])
            result = function(*args, **kwargs)
            if not isinstance(result, Tensor):
                raise TypeError(
                    f"leafwise: {function.__name__} of a leaf is {type(result).__name__}, and a step works with "
                    f"tensors only; {_TRANSFORM}"
                )
            results.append(result)
        return results

    return Leaf._of(call, operands, others, is_fresh=False, has_leafs_shape=False)


def _casts(lists: Sequence[list[Tensor]]) -> list[Casts]:
    """Return the compute dtype of each list or leaf: the widest among a leaf's operands, and at least fp32."""
    kinds = [{x.dtype for x in xs} for xs in lists]
    if max(map(len, kinds)) <= 1:
        wide = ew.wide_dtype(*set().union(*kinds))
        return [None if kind <= {wide} else wide for kind in kinds]
    return [[ew.wide_dtype(*[x.dtype for x in xs]) for xs in zip(*lists, strict=True)]] * len(lists)


class Plan(NamedTuple):
    """The operations that the outputs of a step need, in recorded order."""

    operations: list[tuple[int, Operation]]
    """Pairs (index of the result, operation)."""
    uses: list[int]
    """The number of operations and outputs that use each value."""
    outputs: list[int]
    """The indices of the update and of the new state's trees."""
    counts: list[Tensor]
    """The new state's scalars."""
    sure: frozenset[int]
    """The indices of values that have the shape of the leaf and the compute dtype."""

    @property
    def has_tensors(self) -> bool:
        """True if a scalar is a tensor, which may differ at the next call."""
        return any(isinstance(scalar, Tensor) for _, operation in self.operations for scalar in operation.scalars)


def plan(record: Sequence[Operation | None], made: Sequence[Leaf | Tensor]) -> Plan:
    """Return the plan that computes a step's outputs: the update and the fields of its new state."""
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
    counts = [count for count in made if isinstance(count, Tensor)]
    unsure = {place for place, operation in needed if not operation.has_leafs_shape}
    return Plan(needed[::-1], uses, outputs, counts, frozenset(range(len(record))) - unsure)


class Values:
    """The values of a plan as lists of tensors; operands are cast when they are first read."""

    def __init__(self, plan: Plan, operands: list[list[Tensor]], may_write: list[bool]) -> None:
        self._operands, self._casts = operands, _casts(operands)
        self._lists: list[list[Tensor] | None] = [None] * len(plan.uses)
        self._may_write = may_write + [False] * (len(plan.uses) - len(operands))
        self._is_fresh = [False] * len(plan.uses)
        self._uses = list(plan.uses)
        self.was_cast = [False] * len(operands)
        """For each operand, whether all values that were read are copies."""
        self._sure = plan.sure
        for place, operation in plan.operations:
            self._lists[place] = self._compute(operation)
            self._is_fresh[place] = operation.is_fresh
            self._may_write[place] = operation.is_fresh and operation.has_leafs_shape

    def read(self, place: int) -> list[Tensor]:
        """Return the value at an index."""
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
        """Run an operation, in the storage of an operand if this is its last use."""
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

    def check(self, place: int, like: Sequence[Tensor], at: Present, what: str) -> None:
        """Require real values in the shapes of the tensors ``like``."""
        if place in self._sure:
            return
        for number, (made, own) in enumerate(zip(self.read(place), like, strict=True)):
            name = at.names()[number] if made.is_complex() or made.shape != own.shape else ""
            if made.is_complex():
                raise TypeError(
                    f"{what} of {made.dtype} for {name!r}, expected real numbers; take torch.abs or torch.real first"
                )
            if made.shape != own.shape:
                raise ValueError(
                    f"{what} of shape {tuple(made.shape)} for {name!r}, expected its shape {tuple(own.shape)}; "
                    "muonfx.transform is for work that changes shapes on its way"
                )

    def take(self, place: int, taken: Sequence[int], spare: int | None = None) -> list[Tensor]:
        """Return an output, copied if its storage may be the caller's or was already returned."""
        values = self.read(place)
        if (self._is_fresh[place] or self._may_write[place]) and place not in taken:
            return values
        # Reuse the storage of an operand that is no longer needed.
        if spare is not None and self._may_write[spare] and not self._uses[spare]:
            return ew.copy(values, into=self.read(spare))
        return ew.clone(values)
