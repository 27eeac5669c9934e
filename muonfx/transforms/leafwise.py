"""The decorator `leafwise`, which makes transforms from the arithmetic of one leaf.

This arithmetic is a function, the step. It is called with a `Leaf` for each operand, a placeholder that records the
operations on it. The call is repeated at each update only if the step reads tensors, such as a step count. A `StepPlan`
contains the recorded operations that the update and the new state need. `Values` runs each of them once, on the lists
of all leaves, with `muonfx.tree.elementwise`. The plan counts the uses of every value, so that `Values` overwrites only
storage that is donated or no longer needed.

A step that calls ``sum_over_leaves`` needs the sum while it is recorded. The operations that the sum needs run then,
without overwriting anything, and the rest of the step uses their results.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, Literal, ParamSpec, cast, overload

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.compact.state import Holder
from muonfx.core import Donation, InitAndUpdate, Locality, Transform, apply_updates, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import Position
from muonfx.internal.arguments import plain_fields
from muonfx.internal.tracing import as_start
from muonfx.transforms._leaf import Leaf, Operation, Plan, StepPlan, record_step
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew

P = ParamSpec("P")
ReadsParams = bool | Literal["updated"]
Step = Callable[..., tuple[Leaf, PyTree]]
StateAndStep = tuple[PyTree, Step]
"""The pair (state, step) that a constructor decorated with `leafwise` returns."""

WideStateDtype = torch.dtype | Literal["auto"] | None
"""The storage dtype of a state: a floating dtype, "auto" (the wider of fp32 and the parameter's dtype), or None (the
parameter's dtype)."""
StateDtype = WideStateDtype | QuantizedDtype
"""The storage dtype of a state: a `WideStateDtype`, or a quantized dtype such as `int8`."""


def state_dtype(pinned: WideStateDtype, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a state is stored, for the option ``pinned`` and a parameter of this dtype."""
    if pinned is None:
        return param_dtype
    if isinstance(pinned, str):
        return ew.wide_dtype(param_dtype)
    return pinned


def zeros(params: PyTree, dtype: WideStateDtype) -> PyTree:
    """Return a tree of zeros with the shapes of the parameters, in the storage dtype that ``dtype`` selects."""
    return tree.map(lambda p: torch.zeros_like(p, dtype=state_dtype(dtype, p.dtype), requires_grad=False), params)


def copies(values: PyTree, dtype: WideStateDtype) -> PyTree:
    """Return a tree of copies of parameters, in the storage dtype that ``dtype`` selects; see `as_start`."""
    return tree.map(lambda value: as_start(value).to(state_dtype(dtype, value.dtype), copy=True), values)


@plain_fields
@dataclass(frozen=True)
class Slot:
    """Declares one tensor for each parameter, of the same shape, as a part of a transform's state.

    Functions under the decorators `leafwise` and `matrixwise` return slots. The dtype is fixed at `init`.

    Args:
        dtype: the storage dtype. "auto" is float32, or float64 for float64 parameters; None is the dtype of each
            parameter. It may also be a quantized dtype such as `int8`.
        argument: the name of the constructor's argument that sets the dtype; used in errors.
        start: the values at `init`: "zeros", or "params" for a copy of the parameters.
        signed: whether elements may be negative. It only affects quantized dtypes.

    Raises:
        TypeError: the dtype is neither floating point nor quantized nor None, or another argument has another type.
        ValueError: the dtype is a string other than "auto", or ``start`` is neither "zeros" nor "params".

    >>> import muonfx as mfx
    >>> mfx.Slot(torch.bfloat16)
    Slot(dtype=torch.bfloat16, argument='dtype', start='zeros', signed=True)
    """

    dtype: StateDtype = "auto"
    argument: str = "dtype"
    start: Literal["zeros", "params"] = "zeros"
    signed: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, QuantizedDtype):
            checks.state_dtype(self.argument, self.dtype)


@dataclass(frozen=True)
class StepCount:
    """Declares a step count as a part of a `leafwise` transform's state: a 0-d int64 tensor that all leaves share.

    >>> import muonfx as mfx
    >>> mfx.scale_by_adam().init({"w": torch.zeros(2)}).count
    tensor(0)
    """


@dataclass(frozen=True)
class Number:
    """Declares a number as a part of a `leafwise` transform's state: a 0-d tensor that all leaves share.

    It is stored in fp64 if the device supports it. The step receives it as a tensor and returns a 0-d tensor.

    Args:
        start: the value at `init`.

    Raises:
        TypeError: ``start`` is not a number.
        ValueError: ``start`` is NaN.

    >>> import muonfx as mfx
    >>> mfx.contrib.ema_nesterov().init({"w": torch.zeros(2)}).lookahead
    tensor(0., dtype=torch.float64)
    """

    start: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.start, int | float | Tensor) or isinstance(self.start, bool):
            raise TypeError(f"Number: start must be a number or a tensor, found {self.start!r}")
        if isinstance(self.start, float) and math.isnan(self.start):  # infinity is the start of a least value
            raise ValueError(f"Number: start must be a number, found {self.start!r}")


class SlotTrees:
    """Creates, reads and writes the state tree that a `Slot` declares: one tensor for each parameter."""

    def __init__(self, slot: Slot, role: str) -> None:
        self._slot = slot
        self._holder = Holder(slot.dtype, role, signed=slot.signed) if isinstance(slot.dtype, QuantizedDtype) else None
        self.reads_copies = self._holder is not None

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state tree for these parameters."""
        is_zero = self._slot.start == "zeros"
        if self._holder is not None:
            return self._holder.zeros(params) if is_zero else self._holder.of(params)
        dtype = cast("WideStateDtype", self._slot.dtype)
        return zeros(params, dtype) if is_zero else copies(params, dtype)

    def read(self, present: Present, state: PyTree) -> list[Tensor]:
        """Return the tensors of a state tree that belong to the leaves ``present`` (leaves that are not None)."""
        return present.pick(state) if self._holder is None else self._holder.read(present, state)

    def write(self, present: Present, values: list[Tensor], old: list[Tensor], state: PyTree, *, reuse: bool) -> PyTree:
        """Return a state tree with new values at the leaves ``present``; if ``reuse``, stored in ``old``."""
        if self._holder is not None:
            return self._holder.write(present, values, state)
        return present.fill(ew.store(values, old, reuse=reuse), state)


class SharedNumber:
    """Creates and writes the state of a `Number` or of a `StepCount`: one 0-d tensor for all leaves."""

    def __init__(self, declared: Number | StepCount) -> None:
        self._declared = declared

    def init(self, params: PyTree) -> Tensor:
        """Return the initial tensor."""
        device = device_of(params)
        if isinstance(self._declared, StepCount):
            return ew.new_count(device)
        return ew.new_number(self._declared.start, device)

    def write(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the tensor that is stored for the result of the step. It is not a tensor of the caller."""
        if new is old or isinstance(self._declared, StepCount):
            return new
        return ew.new_number(new, old.device)


@overload
def leafwise(constructor: Callable[P, StateAndStep], /) -> Callable[P, Transform]: ...


@overload
def leafwise(
    *,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams | Callable[..., bool] = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None,
) -> Callable[[Callable[P, StateAndStep]], Callable[P, Transform]]: ...


def leafwise(
    constructor: Callable[..., StateAndStep] | None = None,
    *,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams | Callable[..., bool] = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None,
) -> Any:
    """Turn a function into a factory of transforms that apply one formula to every leaf.

    The decorated function, called the constructor, returns a pair (state, step). The state is a NamedTuple, dict or
    tuple, and declares the parts of the transform's state: a `Slot` is one tensor for each parameter. A `StepCount` is
    a step count and a `Number` any other number that all leaves share, such as a running loss. A transform without
    state has ``EmptyState()``.

    The step is the formula, a function ``step(u, s) -> (u, s)``, or ``step(u, s, p)`` with ``reads_params=True``. From
    the update ``u``, the state ``s`` and the parameter ``p`` of one leaf, it computes the new update and state. Use
    ``u``, ``p`` and the items of ``s`` like tensors: they are `Leaf` placeholders, which record the operations, and
    counts and numbers are 0-d tensors. Each leaf is computed in the widest dtype of its operands, at least fp32.
    Results are rounded to the update's dtype and to the storage dtypes of the state.

    Keyword-only arguments of the step are extra arguments of `update`, such as ``step(u, s, *, value)`` for
    ``update(..., value=loss)``. One of them is supplied: with ``step(u, s, *, sum_over_leaves)``,
    ``sum_over_leaves((u * u).sum())`` is the sum over all leaves that have a gradient, and over all ranks, as a 0-d
    tensor. Its argument must have one shape for all leaves.

    Use `muonfx.transform` instead if one step needs shapes, other transforms, or leaves without a gradient.

    Args:
        constructor: the decorated function. It validates its arguments, and its name becomes the transform's name.
        locality: how much of a leaf an element of the result depends on: `Locality.ELEMENT` is the same element of the
            operands, and `Locality.LEAF` the whole leaf. A quantized dtype raises ELEMENT to LEAF. With
            ``sum_over_leaves``, the locality is TREE; the step runs on shards, so the rest of it must be ELEMENT.
        reads_params: whether the step receives the parameter: a bool, or a function of the constructor's arguments.
            "updated" passes the parameter after this update has been applied. ``Slot(start="params")`` requires True
            or "updated".
        position: the place in a chain relative to the learning rate, as for `muonfx.transform`.
        short_names: a dict from a key of torch's parameter groups to the arguments that it sets, such as
            ``{"betas": ("b1", "b2")}``, as for `muonfx.transform`.
        check_extras: ``(transform, extras) -> None``. Raises if the value of an extra argument is invalid, as for
            `muonfx.transform`.

    Returns:
        A factory with the constructor's name, signature and docstring. Its transforms skip gradients of None and run
        each operation on all leaves in one call. They work with ``torch.func``, ``torch.compile`` and ``donate=True``.

    Raises:
        TypeError: the constructor does not return a state and a step as described, or a step with
            ``sum_over_leaves`` has another locality than ELEMENT; at `update`, the step returns its state in other
            containers.
        ValueError: at `update`, ``params`` is missing although the step reads the parameters.

    Example:
        >>> import muonfx as mfx
        >>> @mfx.leafwise
        ... def sign_of_average(decay: float = 0.9, *, dtype="auto"):
        ...     def step(u, s):
        ...         average = torch.lerp(s["average"], u, 1 - decay)
        ...         return average.sign(), {"average": average}
        ...
        ...     return {"average": mfx.Slot(dtype)}, step
        >>> tx = sign_of_average(dtype=torch.bfloat16)
        >>> tx.update({"w": torch.tensor([2.0, -3.0])}, tx.init({"w": torch.zeros(2)}))
        ({'w': tensor([ 1., -1.])}, {'average': {'w': tensor([ 0.2002, -0.3008], dtype=torch.bfloat16)}})

        A number that all leaves share, the largest norm of all updates so far:

        >>> @mfx.leafwise
        ... def divide_by_largest_norm():
        ...     def step(u, s, *, sum_over_leaves):
        ...         norm = sum_over_leaves((u * u).sum()).sqrt()
        ...         largest = torch.maximum(s["largest"], norm)
        ...         return u / largest, {"largest": largest}
        ...
        ...     return {"largest": mfx.Number(1.0)}, step
        >>> tx, grads = divide_by_largest_norm(), {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> tx.update(grads, tx.init(grads))
        ({'w': tensor([0.6000]), 'b': tensor([0.8000])}, {'largest': tensor(5., dtype=torch.float64)})
    """
    if reads_params not in (True, False, "updated") and not callable(reads_params):
        raise TypeError(f'leafwise: reads_params must be True, False or "updated", found {reads_params!r}')

    def decorate(constructor: Callable[..., StateAndStep]) -> Callable[..., Transform]:
        """Return the factory. Its inner functions receive the constructor's arguments, and call it to read the step."""

        def formula(*args: object, **kwargs: object) -> _Formula:
            """Call the constructor, and return its declared state and step after a check."""
            step_reads_params = reads_params
            if callable(step_reads_params):
                step_reads_params = step_reads_params(*args, **kwargs)
            returned = constructor(*args, **kwargs)
            name = constructor.__name__
            state, step = state_and_step(f"{name}: a leafwise", returned, (Slot, StepCount, Number), step_reads_params)
            return _Formula(name, state, step, step_reads_params)

        @functools.wraps(constructor)
        def build(*args: object, **kwargs: object) -> InitAndUpdate:
            return _functions(formula(*args, **kwargs))

        def locality_of(*args: object, **kwargs: object) -> Locality:
            return formula(*args, **kwargs).locality(locality)

        decorator = transform(
            locality=locality_of,
            reads_params=reads_params if callable(reads_params) else bool(reads_params),
            position=position,
            short_names=short_names,
            check_extras=check_extras,
        )
        return decorator(build)

    if constructor is None:
        return decorate
    return decorate(constructor)


def state_and_step(
    caller: str, returned: object, types: tuple[type, ...], reads_params: ReadsParams
) -> tuple[PyTree, Step]:
    """Return the state and the step that a constructor returned, after a check.

    Args:
        caller: the beginning of errors: the names of the constructor and its decorator, "momentum: a leafwise".
        returned: what the constructor returned.
        types: the types of the items that the state may contain, such as `Slot`.
        reads_params: whether the step receives the parameters, as a slot that starts at the parameters requires.
    """
    if not (type(returned) is tuple and len(returned) == 2 and callable(returned[1])):
        raise TypeError(f"{caller} constructor returns a state and a step, found {returned!r}")
    state = returned[0]
    for name, field in zip(tree.names(state), tree.leaves(state), strict=True):
        if not isinstance(field, types):
            *first_names, last_name = [expected.__name__ for expected in types]
            expected_names = f"{', '.join(first_names)} and {last_name}"
            raise TypeError(f"{caller} constructor returns a state of {expected_names}, found {field!r} at {name!r}")
        if isinstance(field, Slot) and field.start == "params" and not reads_params:
            raise TypeError(
                f"{caller} constructor whose slot {name!r} starts at the parameters declares reads_params=True"
            )
    return returned


def _extra_names(step: Step) -> tuple[str, ...]:
    """Return the names of the keyword-only arguments of a step."""
    code = getattr(step, "__code__", None)
    if code is None:  # not a Python function
        return ()
    first = code.co_argcount
    return code.co_varnames[first : first + code.co_kwonlyargcount]


def _functions(formula: _Formula) -> InitAndUpdate:
    """Return ``init`` and ``update`` of a `leafwise` transform."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ) -> tuple[PyTree, PyTree]:
        return formula.run(updates, state, params, donate, {})

    def update_with_extras(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object
    ) -> tuple[PyTree, PyTree]:
        extras = {name: extras[name] for name in formula.extra_names}
        return formula.run(updates, state, params, donate, extras)

    if not formula.extra_names:
        return formula.init, update
    if not torch.compiler.is_compiling():  # the signature was read when the transform was created
        signature = inspect.signature(update)
        parameters = list(signature.parameters.values())
        for name in formula.extra_names:
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        update_with_extras.__signature__ = signature.replace(parameters=parameters)
    return formula.init, update_with_extras


class _Formula:
    """A step and its declared state, which runs the step on the lists of all leaves."""

    def __init__(self, name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> None:
        self.extra_names = _extra_names(step)
        """The names of the extra arguments of the step, such as "sum_over_leaves"."""
        self._name = name
        self._declared = declared
        self._step = step
        self._reads_params = reads_params
        self._saved_plan: StepPlan | None = None
        """The recorded operations, if they are the same at every call."""
        self._fields: list[SlotTrees | SharedNumber] = []
        """The fields of the state in order: one tensor for each leaf, or one number for all."""
        for field, role in zip(tree.leaves(declared), tree.names(declared), strict=True):
            self._fields.append(SlotTrees(field, role) if isinstance(field, Slot) else SharedNumber(field))
        self._is_tree = [isinstance(field, SlotTrees) for field in self._fields]
        """For each field, whether it has one tensor for each leaf."""

    def locality(self, of_formula: Locality) -> Locality:
        """Return the locality of the transform: the locality of its formula, or TREE if the step sums over leaves."""
        for field in tree.leaves(self._declared):
            if isinstance(field, Slot) and isinstance(field.dtype, QuantizedDtype):
                of_formula = max(of_formula, Locality.LEAF)  # the elements of a block share a scale
        if "sum_over_leaves" not in self.extra_names:
            return of_formula
        if of_formula is not Locality.ELEMENT:
            raise TypeError(
                f"{self._name}: found the locality {of_formula.name} and a step with sum_over_leaves, which runs on "
                "shards, expected ELEMENT: leave out quantized dtypes, or use muonfx.transform"
            )
        return Locality.TREE

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state."""
        return tree.unflatten(tree.flatten(self._declared)[1], [field.init(params) for field in self._fields])

    def run(
        self, updates: PyTree, state: PyTree, params: PyTree, donate: Donation, extras: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Return the new updates and the new state."""
        containers = tree.flatten(self._declared)[1]  # it has another type under torch.compile, so it is not saved
        old_fields = tree.subtrees(containers, state)
        values = self._operands(updates, old_fields, params, donate)
        if "sum_over_leaves" in extras:
            extras = extras | {"sum_over_leaves": values.sum_with(extras["sum_over_leaves"])}
        recorded = self._record(old_fields, extras)
        values.run(recorded.plan, overwrite=True)

        returned = recorded.unchanged_operands()
        new_fields = self._write_state(values, recorded, old_fields, returned, donate)
        if recorded.update != 0:
            values.check(recorded.update, 0, f"{self._name}: the step returns an update")
            new_updates = values.take(recorded.update, returned, spare=0)
            updates = values.present.fill(ew.cast_like(new_updates, values.operands[0]))
        return updates, tree.unflatten(containers, new_fields)

    def _operands(self, updates: PyTree, old_fields: list[PyTree], params: PyTree, donate: Donation) -> Values:
        """Return the operands of the step: the updates, each field with a tensor for each leaf, and the parameters."""
        present = Present(updates)
        values = Values(present)
        values.add_operand(present.pick(updates), may_write=donate.updates)
        for field, old_field in zip(self._fields, old_fields, strict=True):
            if isinstance(field, SlotTrees):
                may_write = donate.state or field.reads_copies
                values.add_operand(field.read(present, old_field), may_write=may_write)
        if self._reads_params:
            params = params_for(self._name, params)
            if self._reads_params == "updated":
                params = apply_updates(params, updates)
            values.add_operand(present.pick(params), may_write=False)
        return values

    def _record(self, state: list[PyTree], extras: Mapping[str, object]) -> StepPlan:
        """Return the recorded operations of the step, from an earlier call if they are the same at every call."""
        # A step without numbers and extra arguments does the same at every call, unless a schedule or an argument is a
        # tensor (`may_vary`). A compiled graph would guard on a saved plan.
        may_save = all(self._is_tree) and not extras and not torch.compiler.is_compiling()
        if may_save and self._saved_plan is not None:
            return self._saved_plan
        recorded = record_step(
            self._name, self._declared, self._step, state, self._is_tree, bool(self._reads_params), extras
        )
        if may_save and not recorded.plan.may_vary:
            self._saved_plan = recorded
        return recorded

    def _write_state(
        self, values: Values, recorded: StepPlan, old_fields: list[PyTree], returned: list[int], donate: Donation
    ) -> list[PyTree]:
        """Return the new value of each field, and add the numbers of their values to ``returned``."""
        new_fields: list[PyTree] = []
        source = 0  # the operand that the field replaces; the first one is the update
        for field, old_field, output in zip(self._fields, old_fields, recorded.state, strict=True):
            if isinstance(field, SharedNumber):
                new_fields.append(field.write(cast("Tensor", output), old_field))
                continue
            assert isinstance(output, int)
            source += 1
            if output == source:
                new_fields.append(old_field)
                continue
            values.check(output, source, f"{self._name}: the step returns a state")
            new_tensors = values.take(output, returned)
            old_tensors = values.operands[source]
            reuse = donate.state and values.was_cast[source]
            new_fields.append(field.write(values.present, new_tensors, old_tensors, old_field, reuse=reuse))
            returned.append(output)
        return new_fields


def params_for(name: str, params: PyTree) -> PyTree:
    """Return the parameters, or raise an error that names the transform if they are None."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return params


def _compute_dtypes(lists: Sequence[list[Tensor]]) -> torch.dtype | list[torch.dtype]:
    """Return for each leaf the widest dtype of its operands, at least fp32; one dtype if all leaves have the same."""
    all_dtypes: set[torch.dtype] = set()
    is_uniform = True  # each operand has one dtype for all leaves, as usual
    for tensors in lists:
        dtypes = {tensor.dtype for tensor in tensors}
        is_uniform = is_uniform and len(dtypes) <= 1
        all_dtypes |= dtypes
    if is_uniform:
        return ew.wide_dtype(*all_dtypes)
    wide_dtypes: list[torch.dtype] = []
    for tensors_of_leaf in zip(*lists, strict=True):
        wide_dtypes.append(ew.wide_dtype(*[tensor.dtype for tensor in tensors_of_leaf]))
    return wide_dtypes


def _require_one_shape(leaf: object) -> None:
    """Raise an error if the argument of ``sum_over_leaves`` is no placeholder, or has the shapes of the leaves."""
    if not isinstance(leaf, Leaf):
        raise TypeError(f"leafwise: sum_over_leaves adds up a value of each leaf, found {leaf!r}")
    operation = leaf.record[leaf.index]
    if operation is None or not operation.is_for_each:
        raise ValueError(
            "leafwise: sum_over_leaves adds up values of one shape, found a value with the shapes of the leaves: "
            "reduce it first, as in sum_over_leaves((u * u).sum())"
        )


class Values:
    """The values of a `leafwise` step by their numbers in a `Plan`, each as a list with one tensor for each leaf."""

    def __init__(self, present: Present) -> None:
        self.present = present
        """The leaves that have a gradient."""
        self.operands: list[list[Tensor]] = []
        """The operands of the step in their own dtypes; they have the first numbers."""
        self.was_cast: list[bool] = []
        """For each operand, whether converting its dtype made copies of all its tensors."""
        self._lists: dict[int, list[Tensor]] = {}
        """The values that have been computed, and the operands that have been converted to the compute dtype."""
        self._may_write: dict[int, bool] = {}
        """For each value, True if nothing else needs its storage, so that it may be overwritten after its last use."""
        self._unsure: set[int] = set()
        """The values that may be complex or have other shapes than their leaves, until `check` has examined them."""
        self._remaining_uses: dict[int, int] = {}
        """For each value, how many operations and outputs still read it."""
        self._dtypes: torch.dtype | list[torch.dtype] | None = None
        """The compute dtype of each leaf, or one dtype for all; None until it is needed."""

    def add_operand(self, tensors: list[Tensor], *, may_write: bool) -> None:
        """Add an operand of the step, whose number is the number of operands before it."""
        self._may_write[len(self.operands)] = may_write
        self.operands.append(tensors)
        self.was_cast.append(False)

    def run(self, plan: Plan, *, overwrite: bool) -> None:
        """Compute all values of a plan that are not computed yet. ``overwrite`` reuses storage after its last use."""
        self._remaining_uses = dict(enumerate(plan.uses))
        scalars = [scalar for _, operation in plan.operations for scalar in operation.scalars]
        with ew.unrecorded(*self.operands, scalars):
            for index, operation in plan.operations:
                if index in self._lists:
                    continue
                self._lists[index] = self._compute(operation, overwrite=overwrite)
                self._may_write[index] = not operation.is_for_each
                if operation.is_for_each:
                    self._unsure.add(index)

    def sum_with(self, sum_over_leaves: Callable[[PyTree], Tensor]) -> Callable[[Leaf], Tensor]:
        """Return the function ``sum_over_leaves`` for a step, which it calls with a `Leaf` instead of a tree."""

        def sum_of(leaf: Leaf) -> Tensor:
            """Compute the value of the placeholder for each leaf, and return the sum. It must have one shape."""
            _require_one_shape(leaf)
            self.run(Plan.of(leaf.record, [leaf]), overwrite=False)  # the rest of the step may read every value
            return sum_over_leaves(self.present.fill(self.read(leaf.index)))

        return sum_of

    def read(self, index: int) -> list[Tensor]:
        """Return the value of number ``index``, a list with one tensor for each leaf, in the compute dtype."""
        if index not in self._lists:
            if self._dtypes is None:
                self._dtypes = _compute_dtypes(self.operands)
            operand = self.operands[index]
            values = ew.cast(operand, self._dtypes)
            self._lists[index] = values
            self.was_cast[index] = all(map(is_not, values, operand))
            self._may_write[index] = self._may_write[index] or self.was_cast[index]
        return self._lists[index]

    def _compute(self, operation: Operation, *, overwrite: bool) -> list[Tensor]:
        """Run one operation on the lists of all leaves; overwrite an operand if allowed and no longer needed."""
        lists = [self.read(index) for index in operation.operands]
        if operation.overwrites is None:
            result = operation.function(*lists, *operation.scalars)
            for index in operation.operands:
                self._may_write[index] = False  # the result may be a view of it
        else:
            target = operation.operands[operation.overwrites]
            is_last_use = self._remaining_uses[target] == 1
            reuse = overwrite and is_last_use and self._may_write[target]
            result = operation.function(*lists, *operation.scalars, reuse=reuse)
            if reuse:
                self._may_write[target] = False  # its storage is the result's
        if overwrite:
            self._count_uses(operation.operands)
        return result

    def _count_uses(self, operands: Sequence[int]) -> None:
        """Count one use of each of these values, and forget results that nothing reads any more."""
        for index in operands:
            self._remaining_uses[index] -= 1
            if not self._remaining_uses[index] and index >= len(self.operands):
                del self._lists[index]

    def check(self, index: int, operand: int, beginning: str) -> None:
        """Raise an error with this beginning if a value is complex or has other shapes than an operand."""
        if index not in self._unsure:
            return
        for position, (value, expected) in enumerate(zip(self.read(index), self.operands[operand], strict=True)):
            if value.is_complex():
                raise TypeError(
                    f"{beginning} of {value.dtype} for {self.present.names()[position]!r}, expected real numbers; "
                    "take torch.abs or torch.real first"
                )
            if value.shape != expected.shape:
                raise ValueError(
                    f"{beginning} of shape {tuple(value.shape)} for {self.present.names()[position]!r}, expected its "
                    f"shape {tuple(expected.shape)}: use muonfx.transform if intermediate results change shapes"
                )

    def take(self, index: int, returned: Sequence[int], spare: int | None = None) -> list[Tensor]:
        """Return an output as a list of tensors, copied if the caller owns their storage or another output has them.

        ``returned`` are the numbers of the other outputs. ``spare`` is an operand whose storage the copy may reuse.
        """
        values = self.read(index)
        if self._may_write[index] and index not in returned:
            return values
        if spare is not None and self._may_write[spare] and not self._remaining_uses[spare]:
            return ew.copy(values, into=self.read(spare))
        return ew.clone(values)
