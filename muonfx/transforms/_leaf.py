"""Recording of a `leafwise` step: a placeholder tensor that records operations, and the plan made of them.

`muonfx.transforms.leafwise` runs the plan on the lists of all leaves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from muonfx import tree
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar

__all__ = ["Leaf", "Operation", "StepPlan", "record_step"]

Operand: TypeAlias = "Leaf | Scalar"

_TRANSFORM = "write the transform with muonfx.transform if its work depends on that"
_WRITES = frozenset({"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})
"""The tensor methods that write in place although their names do not end with an underscore."""


class Operation(NamedTuple):
    """One recorded tensor operation of a `leafwise` step, which runs later on lists with the tensors of all leaves."""

    function: Callable[..., list[Tensor]]
    operands: list[int]
    scalars: Sequence[object]
    overwrites: int | None
    """The number of the operand whose storage the function may reuse. None for a torch function that is called for each
    leaf, because its result may be a view of an operand and have any shape or dtype."""


def _unary(function: Callable[[Any], Any]) -> Callable[[Leaf], Leaf]:
    return lambda x: _each(function, x)


def _binary(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Leaf], Callable[..., Leaf]]:
    """Return two methods for a Python operator: the operator itself and its reflected form, such as ``__rpow__``."""
    return lambda x, y: _each(function, x, y), lambda x, y: _each(function, y, x)


def _times(alpha: Scalar, value: Any) -> Any:
    """Return ``alpha * value``, or the value itself if alpha is 1, so that a bool stays a bool."""
    return value if not isinstance(alpha, Tensor) and alpha == 1 else alpha * value


def _plus(x: object, y: object, alpha: Scalar) -> Tensor:
    return x + _times(alpha, y)


def _lerp(x: Tensor, y: Tensor, weight: Scalar) -> Tensor:
    return x + weight * (y - x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Scalar) -> Tensor:
    return x + value * y * z if isinstance(value, Tensor) else torch.addcmul(x, y, z, value=value)


def _refuse(*_: object) -> NoReturn:
    raise TypeError(
        "leafwise: a step runs for all leaves at once, so a leaf has no truth value, index, length, matrix product or "
        f"Python number: use torch.where, or {_TRANSFORM}"
    )


class Leaf:
    """A placeholder for the tensors of all leaves, which `leafwise` passes to its step function.

    Operators and torch functions work on it as on a tensor, and return a new placeholder. They are recorded, and run
    later on every leaf, in at least fp32. Nothing is written in place: ``x *= 2`` rebinds ``x``. A placeholder has no
    values, shape or dtype to read, so ``if`` on a comparison raises an error. Use ``torch.where`` instead, with the
    comparison as the mask.

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
        self._record, self.place = record, len(record)
        record.append(operation)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Tensor],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Leaf:
        """Record a call of a torch function on placeholders, such as ``torch.sqrt(x)``; return a placeholder."""
        name, given = function.__name__, kwargs or {}
        writes = given.get("out") is not None or given.get("inplace")
        if not torch.compiler.is_compiling():  # a compiler cannot trace the name
            writes = writes or name in _WRITES or (name.endswith("_") and not name.startswith("__"))
        if writes:
            raise TypeError(f"leafwise: {name} writes in place here; use the form that returns a new tensor")
        own = getattr(cls, name, None)
        return own(*args, **given) if own and args and isinstance(args[0], Leaf) else _each(function, *args, **given)

    def __getattr__(self, name: str) -> Callable[..., Leaf]:
        """Return a function that records a call of the tensor method ``name`` and returns a placeholder."""
        method: Callable[..., Tensor] | None = getattr(Tensor, name, None)
        if not callable(method) or name.startswith("__"):
            raise AttributeError(f"leafwise: a step runs for all leaves at once, so a leaf has no {name}; {_TRANSFORM}")
        if name.endswith("_"):
            raise AttributeError(f"leafwise: {name} writes in place; use {name[:-1]}, which reuses storage if it may")
        return functools.partial(_each, method, self)

    def add(self, other: Operand, *, alpha: Scalar = 1) -> Leaf:
        """Return ``self + alpha * other``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(other, Leaf):
            return _listed(ew.add, _plus, (self, other), (alpha,))
        return _listed(ew.shift, operator.add, (self,), (_times(alpha, other),))

    def sub(self, other: Operand, *, alpha: Scalar = 1) -> Leaf:
        """Return ``self - alpha * other``, as a placeholder that `leafwise` computes later for every leaf."""
        return self.add(other, alpha=-alpha)

    def mul(self, other: Operand) -> Leaf:
        """Return ``self * other``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(other, Leaf):
            return _listed(functools.partial(ew.apply, "mul"), operator.mul, (self, other))
        return _listed(ew.mul, operator.mul, (self,), (other,))

    def div(self, other: Operand, *, rounding_mode: str | None = None) -> Leaf:
        """Return ``self / other``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(other, Leaf) and rounding_mode is None:
            return _listed(ew.div, operator.truediv, (self, other), overwrites=1)
        return _each(torch.div, self, other, rounding_mode=rounding_mode)

    def lerp(self, end: Operand, weight: Operand) -> Leaf:
        """Return ``self + weight * (end - self)``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(end, Leaf) and not isinstance(weight, Leaf):
            return _listed(ew.lerp, _lerp, (self, end), (weight,))
        return _each(torch.lerp, self, end, weight)

    def addcmul(self, x: Operand, y: Operand, *, value: Scalar = 1.0) -> Leaf:
        """Return ``self + value * x * y``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(x, Leaf) and isinstance(y, Leaf):
            return _listed(ew.addcmul, _addcmul, (self, x, y), (value,))
        return _each(torch.addcmul, self, x, y, value=value)

    def sqrt(self) -> Leaf:
        """Return the elementwise square root, as a placeholder that `leafwise` computes later for every leaf."""
        return _listed(functools.partial(ew.apply, "sqrt"), torch.sqrt, (self,))

    def sign(self) -> Leaf:
        """Return the sign of each element, as a placeholder that `leafwise` computes later for every leaf."""
        return _listed(functools.partial(ew.apply, "sign"), torch.sign, (self,))

    def __neg__(self) -> Leaf:
        return self.mul(-1)

    def __rsub__(self, other: Operand) -> Leaf:
        return self.mul(-1).add(other)

    __add__ = __radd__ = add
    __sub__ = sub
    __mul__ = __rmul__ = mul
    __truediv__ = div
    __rtruediv__ = _binary(operator.truediv)[1]
    __pos__, __abs__, __invert__ = _unary(operator.pos), _unary(torch.abs), _unary(operator.invert)
    __pow__, __rpow__ = _binary(operator.pow)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __and__, __rand__ = _binary(operator.and_)
    __or__, __ror__ = _binary(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift)
    __gt__, __lt__ = _binary(operator.gt)
    __ge__, __le__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)[0]  # pyright: ignore[reportAssignmentType]
    __ne__ = _binary(operator.ne)[0]  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __setitem__ = _refuse
    __float__ = __int__ = __index__ = __matmul__ = __rmatmul__ = _refuse


def _listed(
    function: Callable[..., list[Tensor]],
    each: Callable[..., Tensor],
    operands: Sequence[Leaf],
    scalars: Sequence[object] = (),
    overwrites: int = 0,
) -> Leaf:
    """Record one call of ``function`` on lists of all leaves' tensors, or else a call of ``each`` for every leaf."""
    record, places = operands[0]._record, [operand.place for operand in operands]
    is_odd = None in [getattr(record[place], "overwrites", 0) for place in places]  # an input has no operation
    if is_odd or not all(map(_is_number, scalars)):
        return _each(each, *operands, *scalars)
    return Leaf(record, Operation(function, places, scalars, overwrites))


def _is_number(value: object) -> bool:
    """Return True for a real number or a real 0-d tensor, which functions on lists of tensors accept as a scalar."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return not isinstance(value, complex)


def _each(function: Callable[..., Any], *args: object, **kwargs: object) -> Leaf:
    """Record a torch function that is called once for each leaf, and return a placeholder for the results."""
    found, treedef = tree.flatten((args, kwargs))
    is_leaf = [isinstance(x, Leaf) for x in found]  # `call` keeps bools, because leaves would be a reference cycle
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

    return Leaf(operands[0]._record, Operation(call, [operand.place for operand in operands], others, None))


class StepPlan(NamedTuple):
    """The recorded operations that compute the update and the new state of a `leafwise` step, in order.

    Every value has a number: first the operands (update, state and parameters), then the result of each operation.
    """

    operations: list[tuple[int, Operation]]
    """Pairs (number of the result, operation)."""
    uses: list[int]
    """For each value, how many operations and outputs read it. It may be overwritten after the last of them."""
    update: int
    """The number of the value that is the update."""
    state: list[int | Tensor]
    """For each field of the new state, the number of its value; for a step count, the new count itself."""
    unsure: frozenset[int]
    """The numbers of values that must be checked: they may be complex, or have another shape than their leaf."""
    may_vary: bool
    """True if a scalar is a tensor. Its value may change, so the step is recorded again at the next call."""


def record_step(
    name: str,
    declared: PyTree,
    step: Callable[..., object],
    held: Sequence[PyTree],
    is_tree: Sequence[bool],
    reads_params: bool,
) -> StepPlan:
    """Call a `leafwise` step with placeholders, check the form of its result, and return the recorded operations."""
    containers = tree.flatten(declared)[1]
    record: list[Operation | None] = []
    u = Leaf(record)
    old = [Leaf(record) if stored else own for stored, own in zip(is_tree, held, strict=True)]
    params = [Leaf(record)] if reads_params else []
    returned = step(u, tree.unflatten(containers, old), *params)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{name}: the step must return (update, state), found a {type(returned).__name__}")
    out, state = returned
    if not isinstance(out, Leaf):
        raise TypeError(f"{name}: the step returns an update of type {type(out).__name__}, not one made of operands")
    try:
        found = tree.subtrees(containers, state)
    except ValueError as error:
        raise TypeError(f"{name}: the step returns another state than declared. {error}") from error
    for place, (stored, own) in enumerate(zip(is_tree, found, strict=True)):
        if not isinstance(own, Leaf if stored else Tensor):
            raise TypeError(
                f"{name}: the step returns a {type(own).__name__} for {tree.names(declared)[place]!r} of its state, "
                f"declared as {tree.leaves(declared)[place]!r}"
            )
    return _plan(record, out, found)


def _plan(record: Sequence[Operation | None], update: Leaf, state: Sequence[Leaf | Tensor]) -> StepPlan:
    uses = [0] * len(record)
    for leaf in (update, *state):
        if isinstance(leaf, Leaf):
            uses[leaf.place] += 1
    needed: list[tuple[int, Operation]] = []
    for place in reversed(range(len(record))):
        operation = record[place]
        if operation is not None and uses[place]:
            needed.append((place, operation))
            for operand in operation.operands:
                uses[operand] += 1
    unsure = frozenset(place for place, operation in needed if operation.overwrites is None)
    may_vary = any(isinstance(scalar, Tensor) for _, operation in needed for scalar in operation.scalars)
    fields = [leaf.place if isinstance(leaf, Leaf) else leaf for leaf in state]
    return StepPlan(needed[::-1], uses, update.place, fields, unsure, may_vary)
