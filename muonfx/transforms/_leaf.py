"""The placeholder `Leaf`: how it records the operations of a `leafwise` step, and how these run for all leaves.

A `Leaf` represents a list with one tensor for each leaf, and records each `Operation` on it. A `Plan` has the recorded
operations that the results of a step need. `Values` runs these on the lists.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_not
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from muonfx import tree
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar

Operand: TypeAlias = "Leaf | Scalar"

_TRANSFORM = "write the transform with muonfx.transform if its work depends on that"
_WRITES = frozenset(
    {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
)
"""The tensor methods that write in place although their names do not end with an underscore."""


class Operation(NamedTuple):
    """One recorded tensor operation of a `leafwise` step, which runs later on lists with the tensors of all leaves."""

    function: Callable[..., list[Tensor]]
    """Called with a list of tensors for each operand, then the scalars, and returns a list of results. A torch function
    that is called for each leaf receives the lists only; it contains its scalars."""
    operands: Sequence[Leaf]
    """The placeholders of the lists that it reads."""
    scalars: Sequence[object]
    """The other arguments, such as 0.9."""
    is_for_each: bool
    """True for a torch function that is called for each leaf. Its results may be views of its operands and have any
    shape and dtype. Any other function returns new tensors in the shapes of the leaves; with ``reuse=True``, it
    overwrites its first operand."""


def _unary(function: Callable[[Any], Any]) -> Callable[[Leaf], Leaf]:
    """Return a method that records a function of one tensor, which is called for each leaf."""
    return lambda x: _record_for_each(function, x)


def _binary(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Leaf], Callable[..., Leaf]]:
    """Return two methods for a Python operator: the operator itself and its reflected form, such as ``__rpow__``."""
    return lambda x, y: _record_for_each(function, x, y), lambda x, y: _record_for_each(
        function, y, x
    )


def _times(alpha: Scalar, value: Any) -> Any:
    """Return ``alpha * value``, or the value itself if alpha is 1, so that a bool stays a bool."""
    if not isinstance(alpha, Tensor) and alpha == 1:
        return value
    return alpha * value


def _plus(x: object, y: object, alpha: Scalar) -> Tensor:
    """Return ``x + alpha * y`` for one leaf."""
    return x + _times(alpha, y)


def _lerp(x: Tensor, y: Tensor, weight: Scalar) -> Tensor:
    """Return ``x + weight * (y - x)`` for one leaf."""
    if isinstance(weight, Tensor):
        return x + weight * (y - x)
    return torch.lerp(x, y, weight)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Scalar) -> Tensor:
    """Return ``x + value * y * z`` for one leaf."""
    if isinstance(value, Tensor):
        return x + value * y * z
    return torch.addcmul(x, y, z, value=value)


def _divided_by(ys: list[Tensor], xs: list[Tensor], *, reuse: bool) -> list[Tensor]:
    """Return ``x / y`` for corresponding tensors. The divisors are first, as the list that ``reuse`` overwrites."""
    return ew.div(xs, ys, reuse=reuse)


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

    def __init__(
        self, key: str | int, numbers: Iterator[int], operation: Operation | None = None
    ) -> None:
        """Make the placeholder of an operand of the step, or of the results of an operation.

        Args:
            key: the name of an operand, such as "state.trace", or the number of a result: 0, 1, 2, ...
            numbers: the next numbers for results. All placeholders of a step have the same iterator.
            operation: the recorded operation that computes the results; None for an operand.
        """
        self.key = key
        self.numbers = numbers
        self.operation = operation

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Tensor],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Leaf:
        """Record a call of a torch function on placeholders; return a placeholder for its result.

        Torch calls this method in place of its function whenever an argument is a `Leaf`. For ``torch.sqrt(x)``, the
        arguments are ``torch.sqrt`` and ``(x,)``.
        """
        if kwargs is None:
            kwargs = {}
        name = function.__name__  # "sqrt"
        if _writes_in_place(name, kwargs):
            raise TypeError(
                f"leafwise: {name} writes in place here; use the form that returns a new tensor"
            )
        # If this class has a method of the name, such as Leaf.sqrt, it records one call on the list of all leaves.
        method = getattr(cls, name, None)
        # In torch.mul(2.0, x), the number 2.0 has no such method.
        if method is not None and args and isinstance(args[0], Leaf):
            return method(*args, **kwargs)
        # Any other function, such as torch.where, is called once for each leaf.
        return _record_for_each(function, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<value {self.key} of a step, without elements>"

    def __getattr__(self, name: str) -> Callable[..., Leaf]:
        """Return a function that records a call of the tensor method ``name`` and returns a placeholder."""
        # Tensor.abs for ``u.abs()``
        method: Callable[..., Tensor] | None = getattr(Tensor, name, None)
        if not callable(method) or name.startswith("__"):
            raise AttributeError(
                f"leafwise: a step runs for all leaves at once, so a leaf has no {name}; {_TRANSFORM}"
            )
        if name.endswith("_"):
            raise AttributeError(
                f"leafwise: {name} writes in place; use {name[:-1]}, which reuses storage if it may"
            )
        return functools.partial(_record_for_each, method, self)

    def add(self, other: Operand, *, alpha: Scalar = 1) -> Leaf:
        """Return ``self + alpha * other``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(other, Leaf):
            return _record_on_lists(ew.add, _plus, (self, other), (alpha,))
        return _record_on_lists(ew.shift, operator.add, (self,), (_times(alpha, other),))

    def sub(self, other: Operand, *, alpha: Scalar = 1) -> Leaf:
        """Return ``self - alpha * other``, as a placeholder that `leafwise` computes later for every leaf."""
        return self.add(other, alpha=-alpha)

    def mul(self, other: Operand) -> Leaf:
        """Return ``self * other``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(other, Leaf):
            return _record_on_lists(functools.partial(ew.apply, "mul"), operator.mul, (self, other))
        return _record_on_lists(ew.mul, operator.mul, (self,), (other,))

    def div(self, other: Operand, *, rounding_mode: str | None = None) -> Leaf:
        """Return ``self / other``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(other, Leaf) and rounding_mode is None:
            return _record_on_lists(_divided_by, lambda y, x: x / y, (other, self))
        return _record_for_each(torch.div, self, other, rounding_mode=rounding_mode)

    def lerp(self, end: Operand, weight: Operand) -> Leaf:
        """Return ``self + weight * (end - self)``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(end, Leaf) and not isinstance(weight, Leaf):
            return _record_on_lists(ew.lerp, _lerp, (self, end), (weight,))
        return _record_for_each(torch.lerp, self, end, weight)

    def addcmul(self, x: Operand, y: Operand, *, value: Scalar = 1.0) -> Leaf:
        """Return ``self + value * x * y``, as a placeholder that `leafwise` computes later for every leaf."""
        if isinstance(x, Leaf) and isinstance(y, Leaf):
            return _record_on_lists(ew.addcmul, _addcmul, (self, x, y), (value,))
        return _record_for_each(torch.addcmul, self, x, y, value=value)

    def sqrt(self) -> Leaf:
        """Return the elementwise square root, as a placeholder that `leafwise` computes later for every leaf."""
        return _record_on_lists(functools.partial(ew.apply, "sqrt"), torch.sqrt, (self,))

    def sign(self) -> Leaf:
        """Return the sign of each element, as a placeholder that `leafwise` computes later for every leaf."""
        return _record_on_lists(functools.partial(ew.apply, "sign"), torch.sign, (self,))

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


def _writes_in_place(name: str, options: Mapping[str, object]) -> bool:
    """Return True for a torch function that writes into a tensor, such as "add_", or any with the option ``out``."""
    if options.get("out") is not None or options.get("inplace"):
        return True
    if torch.compiler.is_compiling():  # a compiler cannot trace the name
        return False
    is_special = name.startswith("__")
    return name in _WRITES or (name.endswith("_") and not is_special)


def _record_on_lists(
    function: Callable[..., list[Tensor]],
    for_one_leaf: Callable[..., Tensor],
    operands: Sequence[Leaf],
    scalars: Sequence[object] = (),
) -> Leaf:
    """Record an operation of a step, such as ``u + m``, that can run as one call on all leaves. Return a placeholder.

    Nothing is computed yet, and the placeholder represents the later result. With two leaves, ``ew.add([u1, u2], [m1,
    m2])`` is called later. If that is not possible, ``for_one_leaf`` is called for each leaf instead: ``u1 + m1`` and
    ``u2 + m2``.

    Args:
        function: a function of lists of tensors, such as ``ew.add``, which may overwrite the first list.
        for_one_leaf: the same function of single tensors, such as ``operator.add``.
        operands: the placeholders, which ``function`` receives as lists of tensors.
        scalars: further arguments of both functions, such as 0.9.
    """
    # Functions of lists require operands with the shapes of the leaves, and scalars that are real numbers.
    can_run_on_lists = all(map(_has_shape_of_leaf, operands)) and all(map(_is_number, scalars))
    if not can_run_on_lists:
        return _record_for_each(for_one_leaf, *operands, *scalars)
    return _result_of(Operation(function, operands, scalars, is_for_each=False))


def _result_of(operation: Operation) -> Leaf:
    """Return a placeholder for the results of an operation, which has the next number of its step."""
    numbers = operation.operands[0].numbers
    return Leaf(next(numbers), numbers, operation)


def _has_shape_of_leaf(value: Leaf) -> bool:
    """Return False for the result of a torch function that is called for each leaf, such as ``u.sum()``.

    It may have any shape, and its dtype may be complex. All other values have the shapes of the leaves.
    """
    return value.operation is None or not value.operation.is_for_each


def _is_number(value: object) -> bool:
    """Return True for a real number or a real 0-d tensor, which functions on lists of tensors accept as a scalar."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return not isinstance(value, complex)


def record_on_list(function: Callable[[list[Tensor]], list[Tensor]], operand: Leaf) -> Leaf:
    """Record one call of a function on the list of all leaves' tensors, whose results may have any shape and dtype."""
    return _result_of(Operation(function, [operand], (), is_for_each=True))


def _record_for_each(function: Callable[..., Any], *args: object, **kwargs: object) -> Leaf:
    """Record a call of a torch function that runs later, once for each leaf. Return a placeholder for the results.

    In ``torch.where(mask, 0.0, u)``, ``mask`` and ``u`` are placeholders (`Leaf`). Each represents one tensor for each
    leaf, which replaces it later.
    """
    # Arguments may be nested, as in torch.stack([x, y])
    flat_args, treedef = tree.flatten((args, kwargs))
    operands = [argument for argument in flat_args if isinstance(argument, Leaf)]
    # Later, `call` receives a list with the tensors of all leaves for each placeholder.
    call = functools.partial(_call_for_each, function, treedef, flat_args)
    return _result_of(Operation(call, operands, flat_args, is_for_each=True))


def _call_for_each(
    function: Callable[..., Any],
    treedef: tree.Structure,
    flat_args: list[Any],
    *lists: list[Tensor],
) -> list[Tensor]:
    """Call a torch function once for each leaf, and return its results, as recorded by `_record_for_each`.

    For two leaves and the recorded call ``torch.where(mask, 0.0, u)``, call ``torch.where(mask_1, 0.0, u_1)`` and
    ``torch.where(mask_2, 0.0, u_2)``.

    Args:
        function: the torch function.
        treedef: the structure of its arguments: the pair (positional arguments, keyword arguments).
        flat_args: the recorded arguments as a flat list: ``[mask, 0.0, u]``.
        lists: for each placeholder, its tensors of all leaves: ``[mask_1, mask_2]`` and ``[u_1, u_2]``.
    """
    positions = [
        position for position, argument in enumerate(flat_args) if isinstance(argument, Leaf)
    ]
    results: list[Tensor] = []
    for tensors_of_leaf in zip(*lists, strict=True):
        leaf_args = _with_numbers_like(tensors_of_leaf, flat_args)
        for position, tensor in zip(positions, tensors_of_leaf, strict=True):
            leaf_args[position] = tensor  # [mask_1, 0.0, u_1]
        # Nested as they were in the recorded call.
        positional, named = tree.unflatten(treedef, leaf_args)
        result = function(*positional, **named)
        if not isinstance(result, Tensor):
            raise _not_a_tensor(function, result)
        results.append(result)
    return results


def _with_numbers_like(tensors: Sequence[Tensor], args: list[Any]) -> list[Any]:
    """Return a copy of the arguments of a torch function for one leaf, whose tensors are ``tensors``.

    If all ``tensors`` are 0-d, a number in a 0-d tensor gets their dtype. Torch computes ``u / number`` in the dtype of
    ``u`` if ``u`` has dims, but in fp64 if ``u`` is 0-d in fp32 and the number a 0-d tensor in fp64. Without the
    conversion, a leaf of shape () would have other bits than a leaf of shape (1,).
    """
    leaf_args = list(args)
    if any(tensor.ndim > 0 for tensor in tensors):
        return leaf_args
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    if not dtype.is_floating_point:  # torch promotes integers to the dtype of the number
        return leaf_args
    for position, argument in enumerate(args):
        if isinstance(argument, Tensor) and argument.ndim == 0 and argument.is_floating_point():
            leaf_args[position] = argument.to(dtype)
    return leaf_args


def _not_a_tensor(function: Callable[..., object], result: object) -> TypeError:
    """Return an error for a torch function whose result for a leaf is no tensor, such as ``torch.chunk``."""
    return TypeError(
        f"leafwise: {function.__name__} of a leaf is {type(result).__name__}, and a step works with tensors only; "
        f"{_TRANSFORM}"
    )


class Plan(NamedTuple):
    """The operations that some outputs need, in the order in which they were recorded."""

    operations: dict[int, Operation]
    """The operations by the numbers of their results."""
    uses: dict[str | int, int]
    """For the key of each value, how many operations and outputs read it. It may be overwritten after the last."""
    scalars: list[object]
    """The scalars of all operations, such as 0.9."""

    @classmethod
    def of(cls, outputs: Sequence[Leaf]) -> Plan:
        """Find the operations that the outputs need, and count how often each value is used.

        For ``def step(u, s): m = s.trace * 0.9 + u; return m, s``, the numbers of the product and the sum are 0 and 1.
        The output ``m`` needs the operations ``{0: mul, 1: add}``, and each value is used once.
        """
        uses: dict[str | int, int] = {}
        operations: dict[Any, Operation] = {}  # the keys of results are numbers
        pending = list(outputs)  # to be returned is a use too
        while pending:
            leaf = pending.pop()
            uses[leaf.key] = uses.get(leaf.key, 0) + 1
            if leaf.operation is not None and leaf.key not in operations:
                operations[leaf.key] = leaf.operation
                pending.extend(leaf.operation.operands)
        in_order = {number: operations[number] for number in sorted(operations)}
        scalars: list[object] = []
        for operation in in_order.values():
            scalars.extend(operation.scalars)
        return cls(in_order, uses, scalars)


class Value:
    """The tensors of one placeholder while a step runs: a list with one tensor for each leaf."""

    def __init__(self, tensors: list[Tensor], *, may_write: bool, is_wide: bool = False) -> None:
        self.tensors = tensors
        self.may_write = may_write
        """True if nothing else needs their storage, so that they may be overwritten after their last use."""
        self.is_wide = is_wide
        """True if they have the compute dtype: results, and operands of the step that have been read."""
        self.was_cast = False
        """True if the conversion to the compute dtype made new tensors for all leaves."""


class Values:
    """The values of a `leafwise` step while it runs: the tensors of each placeholder, by its key.

    For ``s.trace * 0.9 + u``, these are the operands "update" and "state.trace" at first. `run` adds the results of the
    operations.
    """

    def __init__(self, present: Present, operands: dict[str, Value]) -> None:
        """Find the dtype in which each leaf is computed. Nothing is converted yet."""
        self.present = present
        """The leaves that have a gradient."""
        self._values: dict[str | int, Value] = {**operands}
        self._operands = [value.tensors for value in operands.values()]
        """The operands of the step in their own dtypes: ``[[u1, u2], [m1, m2]]`` for two leaves and a momentum."""
        self._dtypes = ew.wide_dtypes(self._operands)
        """The compute dtype of each leaf; None if all operands have one dtype in which to compute."""
        self._remaining_uses: dict[str | int, int] = {}
        """For each value, how many operations and outputs still read it; empty before `run`, when nothing is known."""

    def run(self, plan: Plan) -> None:
        """Run the operations of a plan, each on the lists of all leaves, and store their results.

        For two leaves, the plan of ``s.trace * 0.9 + u`` calls ``mul([m1, m2], 0.9)`` and then ``add`` on the two lists
        of results and updates. A result may take the storage of an operand after its last use. A result that nothing
        reads any more is freed.
        """
        self._remaining_uses = dict(plan.uses)
        # Autograd records nothing, unless it must.
        with ew.unrecorded(*self._operands, plan.scalars):
            for number, operation in plan.operations.items():
                if number not in self._values:  # else a sum over leaves has needed it already
                    self._values[number] = self._computed(operation)
                for operand in operation.operands:
                    self._remaining_uses[operand.key] -= 1
                    # Operands of the step are read again by `take`
                    is_result = operand.operation is not None
                    if is_result and not self._remaining_uses[operand.key]:
                        del self._values[operand.key]

    def sum_with(self, sum_over_leaves: Callable[[PyTree], Tensor]) -> Callable[[Leaf], Tensor]:
        """Return the function ``sum_over_leaves`` that a step of `leafwise` receives.

        A step calls it with a placeholder (`Leaf`), as in ``sum_over_leaves((u * u).sum())``. Placeholders only record
        operations to run later, but this number is needed at once.

        Args:
            sum_over_leaves: the function that `Transform` supplies, which sums the tensors of a tree.
        """

        def sum_of(leaf: Leaf) -> Tensor:
            """Run the operations that the placeholder needs, such as ``u * u`` and ``sum``, and return the sum."""
            _require_one_shape(leaf)
            # The step is still running: only the operations that this placeholder needs are computed. They overwrite
            # nothing, since the rest of the step may read every value.
            plan = Plan.of([leaf])
            with ew.unrecorded(*self._operands, plan.scalars):
                for number, operation in plan.operations.items():
                    if number not in self._values:
                        self._values[number] = self._computed(operation)
            return sum_over_leaves(self.present.fill(self._wide(leaf).tensors))

        return sum_of

    def _computed(self, operation: Operation) -> Value:
        """Run one operation on the lists of all leaves, such as ``ew.add([u1, u2], [m1, m2])``; return its results.

        They take the storage of the first operand, here ``[u1, u2]``, if no later operation reads this operand and the
        caller permits it.
        """
        operands = [self._wide(leaf) for leaf in operation.operands]
        lists = [operand.tensors for operand in operands]
        if operation.is_for_each:
            results = operation.function(*lists)
            # The results may be views of an operand, so neither may be overwritten.
            for operand in operands:
                operand.may_write = False
            return Value(results, may_write=False, is_wide=True)
        # This operation has not been counted yet, so the last use is 1. There are no counts before `run`.
        is_last_use = self._remaining_uses.get(operation.operands[0].key) == 1
        reuse = is_last_use and operands[0].may_write
        results = operation.function(*lists, *operation.scalars, reuse=reuse)
        if reuse:
            operands[0].may_write = False  # its storage is the result's now
        return Value(results, may_write=True, is_wide=True)

    def _wide(self, leaf: Leaf) -> Value:
        """Return the value of a placeholder in the compute dtype, which is fp32 or wider.

        Operands in bf16 are converted to fp32 when they are first read.
        """
        value = self._values[leaf.key]
        if value.is_wide or self._dtypes is None:
            return value
        wide_tensors = ew.cast(value.tensors, self._dtypes)
        value.was_cast = all(map(is_not, wide_tensors, value.tensors))
        if value.was_cast:
            value.may_write = True  # these are copies, not the caller's tensors
        value.tensors = wide_tensors
        value.is_wide = True
        return value

    def was_cast(self, operand: Leaf) -> bool:
        """Return True if an operand has been read, and converting its dtype made new tensors for all leaves."""
        return self._values[operand.key].was_cast

    def take(self, output: Leaf, operand: Leaf, beginning: str) -> list[Tensor]:
        """Return the tensors of a value that the step returns, such that no other output and no caller has them.

        `leafwise` calls this method after `run` for each changed output. For ``return m, MomentumState(m)``, the update
        gets a copy of ``m``, and the state, which is the last to use ``m``, the tensors themselves.

        Args:
            output: the placeholder of the value.
            operand: the placeholder in whose place the step returns the value. A copy is written into the tensors of
                this operand if nothing else needs them.
            beginning: the first words of an error: "momentum: the step returns a state".
        """
        value = self._wide(output)
        old_value = self._values[operand.key]
        if not _has_shape_of_leaf(output):  # such as ``u.sum()``
            _check_shapes(self.present, value.tensors, old_value.tensors, beginning)
        self._remaining_uses[output.key] -= 1
        is_last_use = self._remaining_uses[output.key] == 0
        if is_last_use and value.may_write:
            value.may_write = False  # they are the output's now
            return value.tensors
        # Others need the tensors too: return a copy, in the tensors of the operand if nothing else needs those.
        if old_value.may_write and not self._remaining_uses.get(operand.key):
            old_value.may_write = False
            return ew.copy(value.tensors, into=self._wide(operand).tensors)
        return ew.clone(value.tensors)


def _check_shapes(
    present: Present, results: list[Tensor], leaves: list[Tensor], beginning: str
) -> None:
    """Raise an error if a value that a step returns is complex, or has another shape than its leaf.

    ``def step(u, s): return u.sum(), s`` is such an error for a leaf of shape (2,).

    Args:
        present: the positions of the leaves in the tree, for their names.
        results: the value that the step returned, here ``u.sum()`` of each leaf.
        leaves: the value that it received in its place, here ``u`` of each leaf.
        beginning: the first words of the error: "momentum: the step returns an update".
    """
    for index, (result, leaf) in enumerate(zip(results, leaves, strict=True)):
        if result.is_complex():
            raise TypeError(
                f"{beginning} of {result.dtype} for {present.names()[index]!r}, expected real numbers; take torch.abs "
                "or torch.real first"
            )
        if result.shape != leaf.shape:
            raise ValueError(
                f"{beginning} of shape {tuple(result.shape)} for {present.names()[index]!r}, expected its shape "
                f"{tuple(leaf.shape)}: use muonfx.transform if intermediate results change shapes"
            )


def _require_one_shape(leaf: object) -> None:
    """Raise an error if the argument of ``sum_over_leaves`` in a step cannot be added up over all leaves.

    It must be a placeholder (`Leaf`) for a value of one shape, as in ``sum_over_leaves((u * u).sum())``. ``u * u`` has
    the shape of each leaf, so it is an error.
    """
    if not isinstance(leaf, Leaf):
        raise TypeError(f"leafwise: sum_over_leaves adds up a value of each leaf, found {leaf!r}")
    if _has_shape_of_leaf(leaf):
        raise ValueError(
            "leafwise: sum_over_leaves adds up values of one shape, found a value with the shapes of the leaves: "
            "reduce it first, as in sum_over_leaves((u * u).sum())"
        )
