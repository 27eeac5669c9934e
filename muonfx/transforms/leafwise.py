"""The decorator `leafwise`, which makes transforms from the arithmetic of one leaf.

This arithmetic is a function, the step. It is called with a `Leaf` for each operand, a placeholder that records the
operations on it. The call is repeated at each update only if the step reads numbers that may change, such as a count. A
`Plan` contains the recorded operations that the update and the new state need. `Values` runs each of them once, on the
lists of all leaves, with `muonfx.tree.elementwise`. The plan counts the uses of every value, so that `Values`
overwrites only storage that is donated or no longer needed.

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
from typing import Any, Literal, NamedTuple, ParamSpec, overload

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.compact.state import QuantizedTrees
from muonfx.core import Donation, InitAndUpdate, Locality, Transform, apply_updates, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import Position
from muonfx.internal.arguments import plain_fields
from muonfx.internal.tracing import as_start
from muonfx.transforms._leaf import Leaf, Operation, Plan, has_shape_of_leaf
from muonfx.tree import Present, PyTree, Structure, device_of
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


def copies(params: PyTree, dtype: WideStateDtype = None) -> PyTree:
    """Return a tree of copies of parameters, as `init` of a transform stores them in its state.

    Copies of a model's own parameters are detached: otherwise each step would keep the graphs of all earlier steps.
    Under ``torch.func``, and for parameters that were computed from other tensors, derivatives pass through the copies.

    Args:
        params: the parameters that `init` received.
        dtype: the dtype of the copies: "auto" is float32, or float64 for float64 parameters; None is the dtype of each
            parameter.

    >>> import muonfx as mfx
    >>> mfx.transforms.copies({"w": torch.nn.Parameter(torch.ones(2))})
    {'w': tensor([1., 1.])}
    """
    return tree.map(lambda param: as_start(param).to(state_dtype(dtype, param.dtype), copy=True), params)


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

    The count is 0 in the first step. The step must return a new value, usually ``s["count"] + 1``. To return the count
    unchanged is an error.

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


class PlainTrees:
    """Creates, reads and writes the state tree that a `Slot` declares: one tensor for each parameter."""

    reads_copies = False

    def __init__(self, dtype: WideStateDtype, start: Literal["zeros", "params"]) -> None:
        self._dtype: WideStateDtype = dtype
        self._start = start

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state tree for these parameters."""
        if self._start == "zeros":
            return zeros(params, self._dtype)
        return copies(params, self._dtype)

    def read(self, present: Present, state: PyTree) -> list[Tensor]:
        """Return the tensors of a state tree that belong to the leaves ``present`` (leaves that are not None)."""
        return present.pick(state)

    def write(self, present: Present, values: list[Tensor], old: list[Tensor], state: PyTree, *, reuse: bool) -> PyTree:
        """Return a state tree with new values at the leaves ``present``; if ``reuse``, stored in ``old``."""
        return present.fill(ew.store(values, old, reuse=reuse), state)


SlotTrees = PlainTrees | QuantizedTrees


def slot_trees(slot: Slot, role: str) -> SlotTrees:
    """Return what creates, reads and writes the state tree of a slot. ``role`` is its name in the state, such as "mu".

    Trees of a quantized dtype are decoded to copies when they are read.
    """
    if isinstance(slot.dtype, QuantizedDtype):
        return QuantizedTrees(slot.dtype, role, signed=slot.signed, start=slot.start)
    return PlainTrees(slot.dtype, slot.start)


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
            containers, or a `StepCount` unchanged.
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
        """Return the factory of transforms: a function like the constructor that returns a transform.

        A constructor is the function under the decorator, such as ``def momentum(decay=0.95): ... return state, step``.
        `muonfx.transform` makes the factory. For ``momentum(0.9)``, it calls both functions below with the argument
        0.9, and they pass it on to the constructor.
        """

        @functools.wraps(constructor)
        def init_and_update(*args: object, **kwargs: object) -> InitAndUpdate:
            # A formula is what the constructor returns, the state and the step, with the code that runs the step.
            return _formula(constructor, reads_params, *args, **kwargs).functions()

        def locality_of_transform(*args: object, **kwargs: object) -> Locality:
            return _formula(constructor, reads_params, *args, **kwargs).locality_of_transform(locality)

        as_transform = transform(
            locality=locality_of_transform,  # how much of a leaf an element of the result depends on
            reads_params=reads_params if callable(reads_params) else bool(reads_params),
            position=position,
            short_names=short_names,
            check_extras=check_extras,
        )
        return as_transform(init_and_update)

    if constructor is None:  # written with options: @leafwise(position="last")
        return decorate
    return decorate(constructor)


def _formula(
    constructor: Callable[..., StateAndStep],
    reads_params: ReadsParams | Callable[..., bool],
    /,
    *args: object,
    **kwargs: object,
) -> _Formula:
    """Call a constructor with its arguments, and return the state and the step that it declares, ready to run.

    A constructor is the function under the decorator, such as ``def momentum(decay=0.95): ... return state, step``.
    Raise TypeError if it returns anything else.
    """
    if callable(reads_params):  # whether the step receives the parameters depends on the arguments
        reads_params = reads_params(*args, **kwargs)
    returned = constructor(*args, **kwargs)  # such as (MomentumState(Slot()), step)
    name = constructor.__name__
    # The state may contain one tensor for each leaf (a Slot), and counts or numbers that all leaves share.
    state, step = state_and_step(f"{name}: a leafwise", returned, (Slot, StepCount, Number), reads_params)
    return _Formula(name, state, step, reads_params)


def state_and_step(
    caller: str, returned: object, types: tuple[type, ...], reads_params: ReadsParams
) -> tuple[PyTree, Step]:
    """Check that a constructor has returned a state and a step, and return them. Raise TypeError if it has not.

    A constructor is the function under `leafwise` or `matrixwise`. It returns a pair such as
    ``(MomentumState(trace=Slot()), step)``: a declaration of the state, and a function that computes one update.

    Args:
        caller: the beginning of errors: the names of the constructor and its decorator, "momentum: a leafwise".
        returned: what the constructor returned.
        types: the types of the items that the state may contain, such as `Slot`.
        reads_params: whether the step receives the parameters, as a slot that starts at the parameters requires.
    """
    # Exactly a tuple: a NamedTuple of two items is a state without a step.
    if not (type(returned) is tuple and len(returned) == 2 and callable(returned[1])):
        raise TypeError(f"{caller} constructor returns a state and a step, found {returned!r}")
    for name, item in tree.named_leaves(returned[0]):  # the items of the state, such as "trace" and its slot
        if not isinstance(item, types):
            type_names = " and ".join([expected.__name__ for expected in types])
            raise TypeError(f"{caller} constructor returns a state of {type_names}, found {item!r} at {name!r}")
        # Without reads_params, `init` may receive sharded parameters whose values are NaN.
        starts_at_params = isinstance(item, Slot) and item.start == "params"
        if starts_at_params and not reads_params:
            raise TypeError(
                f"{caller} constructor whose slot {name!r} starts at the parameters declares reads_params=True"
            )
    return returned


def update_and_state(name: str, returned: object) -> tuple[Any, Any]:
    """Return the update and the state that a step returned. Raise an error if they are not a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{name}: the step must return (update, state), found a {type(returned).__name__}")
    return returned


def _extra_names(step: Step) -> tuple[str, ...]:
    """Return the names of the keyword-only arguments of a step."""
    code = getattr(step, "__code__", None)
    if code is None:  # not a Python function
        return ()
    # In ``co_varnames``, keyword-only arguments follow directly after all positional arguments.
    first = code.co_argcount
    return code.co_varnames[first : first + code.co_kwonlyargcount]


class RecordedStep(NamedTuple):
    """The operations of one call of a step, and what it received and returned."""

    operands: list[Any]
    """The placeholder of the update, and then for each field of the state a placeholder, or the 0-d tensor of a number
    that all leaves share."""
    outputs: list[Any]
    """For each operand, the placeholder or the number that the step returns in its place."""
    plan: Plan
    """The operations that the outputs need."""


class _Formula:
    """A step and its declared state, which runs the step on the lists of all leaves."""

    def __init__(self, name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> None:
        """Prepare each field of the declared state, such as ``MomentumState(trace=Slot())``. ``name`` is for errors."""
        self._name = name
        self._declared = declared
        self._step = step
        self._extra_names = _extra_names(step)
        """The names of the extra arguments of the step, such as "sum_over_leaves"."""
        self._reads_params = reads_params
        self._saved_step: RecordedStep | None = None
        """The recorded step, if it is the same at each update."""
        self._fields: list[SlotTrees | SharedNumber] = []
        """The fields of the state in order: one tensor for each leaf, or one number for all."""
        for name_of_field, declared_field in tree.named_leaves(declared):
            if isinstance(declared_field, Slot):
                self._fields.append(slot_trees(declared_field, name_of_field))
            else:
                self._fields.append(SharedNumber(declared_field))

    def functions(self) -> InitAndUpdate:
        """Return ``init`` and ``update`` of the transform, with the extra arguments of the step in the signature.

        A step may have extra arguments, as ``value`` in ``def step(u, s, *, value)``. `Transform` reads the names of
        extra arguments from the signature of ``update``. The function below has ``**extras`` in place of the names, so
        it receives another signature: ``(updates, state, params=None, *, donate=NOTHING, value)``.
        """

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object
        ) -> tuple[PyTree, PyTree]:
            step_extras = {name: extras[name] for name in self._extra_names}  # {"value": ...}
            return self._run(updates, state, params, donate, step_extras)

        if not torch.compiler.is_compiling():  # the signature was read when the transform was created
            signature = inspect.signature(update)
            # All parameters but the last one, ``**extras``, and then a keyword-only parameter for each name.
            *parameters, _extras = signature.parameters.values()
            parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self._extra_names]
            update.__signature__ = signature.replace(parameters=parameters)
        return self.init, update

    def locality_of_transform(self, locality_of_step: Locality) -> Locality:
        """Return the locality of the transform: how much of its input one element of its result depends on.

        It is the locality of the step, with two exceptions. Quantized state raises ELEMENT (the same element of the
        inputs) to LEAF (the whole leaf). A step that sums over leaves has the locality TREE (all leaves).
        """
        locality = locality_of_step
        for declared in tree.leaves(self._declared):
            is_quantized = isinstance(declared, Slot) and isinstance(declared.dtype, QuantizedDtype)
            if is_quantized:  # the elements of a block share a scale
                locality = max(locality, Locality.LEAF)  # the larger one depends on more elements
        if "sum_over_leaves" not in self._extra_names:
            return locality
        if locality is not Locality.ELEMENT:
            raise TypeError(
                f"{self._name}: found the locality {locality.name} and a step with sum_over_leaves, which runs on "
                "shards, expected ELEMENT: leave out quantized dtypes, or use muonfx.transform"
            )
        return Locality.TREE

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state."""
        containers = tree.flatten(self._declared)[1]
        return tree.unflatten(containers, [field.init(params) for field in self._fields])

    def _run(
        self, updates: PyTree, state: PyTree, params: PyTree, donate: Donation, extras: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Apply the step to all leaves; return the new updates and the new state.

        Take ``def step(u, s): m = s.trace * 0.9 + u; return m, MomentumState(m)``. The state has one field, ``trace``.
        The operands of the step are the updates and this field. Its outputs are the new updates and the new field.
        """
        # 1. Collect the tensors of all leaves for each operand.
        containers = tree.flatten(self._declared)[1]  # it has another type under torch.compile, so it is not saved
        old_fields = tree.subtrees(containers, state)
        values = self._operands(updates, old_fields, params, donate)
        if "sum_over_leaves" in extras:
            extras = extras | {"sum_over_leaves": values.sum_with(extras["sum_over_leaves"])}

        # 2. Call the step with placeholders. They record its operations, which are the plan: ``[mul, add]``.
        operands, outputs, plan = self._recorded_step(containers, old_fields, extras)

        # 3. Run each operation of the plan once, on lists with the tensors of all leaves.
        values.run(plan, overwrite=True)

        # 4. Build the new trees. First reserve each operand that the step returns as it is: no other output may get its
        # storage.
        for operand, output in zip(operands, outputs, strict=True):
            if isinstance(operand, Leaf) and output.index == operand.index:
                values.keep(operand.index)
        new_fields: list[PyTree] = []
        for field, operand, output, old_field in zip(self._fields, operands[1:], outputs[1:], old_fields, strict=True):
            if isinstance(field, SharedNumber):
                new_fields.append(field.write(output, old_field))
            else:
                new_fields.append(self._new_tree(field, operand, output, old_field, values, donate))
        new_updates = self._new_updates(operands[0], outputs[0], updates, values)
        return new_updates, tree.unflatten(containers, new_fields)

    def _recorded_step(self, containers: Structure, old_fields: list[PyTree], extras: dict[str, Any]) -> RecordedStep:
        """Return the operations of the step. They are recorded once and saved, if they are the same at each update.

        For a few small leaves, recording takes longer than the rest of an update.
        """
        # `_saved_step` is not read while torch.compile traces: the graph would depend on it, and be compiled again when
        # it changes.
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and self._saved_step is not None:
            return self._saved_step
        recorded = self._call_step(containers, old_fields, extras)
        # The operations contain the numbers that the step has read, such as 0.9. They may be other numbers at the next
        # update if the step reads a step count, a scalar tensor (which its owner may change) or an extra argument.
        has_shared_numbers = any(isinstance(field, SharedNumber) for field in self._fields)
        has_tensors = any(isinstance(scalar, Tensor) for scalar in recorded.plan.scalars)
        may_vary = has_shared_numbers or has_tensors or len(extras) > 0
        if not is_compiling and not may_vary:
            self._saved_step = recorded
        return recorded

    def _call_step(self, containers: Structure, old_fields: list[PyTree], extras: dict[str, Any]) -> RecordedStep:
        """Call the step once with placeholders, and return the operations that they record.

        A placeholder (`Leaf`) takes the place of one tensor for each leaf: the update, a field of the state such as
        ``trace``, the parameter. A number that all leaves share, such as a step count, is passed as its 0-d tensor.
        """
        # Each placeholder appends itself to the record, and so does each result of an operation on placeholders. So the
        # order of the lines below numbers the values: the update is 0, then the fields with one follow, and the
        # parameter is the last.
        record: list[Operation | None] = []
        update = Leaf(record)
        fields: list[Any] = []
        for field, old_field in zip(self._fields, old_fields, strict=True):
            fields.append(old_field if isinstance(field, SharedNumber) else Leaf(record))
        step_args = [update, tree.unflatten(containers, fields)]
        if self._reads_params:
            step_args.append(Leaf(record))

        new_update, new_state = update_and_state(self._name, self._step(*step_args, **extras))
        if not isinstance(new_update, Leaf):  # such as a tensor or 0.0, which does not depend on the update
            update_type = type(new_update).__name__
            raise TypeError(f"{self._name}: the step returns an update of type {update_type}, not one made of operands")
        new_fields = self._new_fields(containers, fields, new_state)

        # The plan has only the operations that these outputs need, since a step may compute more than it returns.
        outputs = [new_update, *new_fields]
        placeholders = [output for output in outputs if isinstance(output, Leaf)]
        return RecordedStep([update, *fields], outputs, Plan.of(record, placeholders))

    def _operands(self, updates: PyTree, old_fields: list[PyTree], params: PyTree, donate: Donation) -> Values:
        """Return the operands of the step: the updates, each field with a tensor for each leaf, and the parameters.

        They are added in the order of the placeholders in `_call_step`, since both are found by their number. Each is a
        list with the tensors of all leaves that have a gradient. An operand may be overwritten if the caller
        has donated it (``donate``), or if it is a copy already.
        """
        present = Present(updates)  # the leaves that have a gradient
        values = Values(present)
        values.add_operand(present.pick(updates), may_write=donate.updates)
        for field, old_field in zip(self._fields, old_fields, strict=True):
            if isinstance(field, SharedNumber):  # one number for all leaves: the step has read it when it was recorded
                continue
            may_write = donate.state or field.reads_copies  # quantized state is decoded to copies
            values.add_operand(field.read(present, old_field), may_write=may_write)
        if self._reads_params:
            params = params_for(self._name, params)
            if self._reads_params == "updated":  # the parameters after this update, as for `ema_params`
                params = apply_updates(params, updates)
            values.add_operand(present.pick(params), may_write=False)
        return values

    def _new_fields(self, containers: Structure, fields: list[Any], new_state: object) -> list[Any]:
        """Return a list of the fields of the state that a step returned: ``[m]`` for ``MomentumState(m)``.

        Raise TypeError unless the state has the declared form.

        Args:
            containers: the form: the NamedTuple, dict or tuple of the declared state.
            fields: the fields that the step received.
            new_state: the state that it returned.
        """
        try:
            new_fields = tree.subtrees(containers, new_state)
        except ValueError as error:
            raise TypeError(f"{self._name}: the step returns another state than declared. {error}") from error
        for index, (field, new_field) in enumerate(zip(fields, new_fields, strict=True)):
            # A placeholder is replaced by a placeholder, and a number that all leaves share by a 0-d tensor.
            expected_type = Leaf if isinstance(field, Leaf) else Tensor
            if not isinstance(new_field, expected_type):
                name, declared = tree.named_leaves(self._declared)[index]
                raise TypeError(
                    f"{self._name}: the step returns a {type(new_field).__name__} for {name!r} of its state, declared "
                    f"as {declared!r}"
                )
            if new_field is field and isinstance(new_field, Tensor):  # a number returned unchanged
                self._require_no_step_count(index)
        return new_fields

    def _require_no_step_count(self, index: int) -> None:
        """Raise an error if the field that the step returned unchanged is a step count, which would stay 0."""
        name, declared = tree.named_leaves(self._declared)[index]
        if isinstance(declared, StepCount):
            raise TypeError(
                f"{self._name}: the step returns the count {name!r} of its state unchanged, so each step would be the "
                "first: return the count + 1"
            )

    def _new_tree(
        self, field: SlotTrees, operand: Leaf, output: Leaf, old_field: PyTree, values: Values, donate: Donation
    ) -> PyTree:
        """Return the new tree of a field that has a tensor for each leaf, such as ``trace`` of `momentum`.

        Args:
            field: writes the tree of the field.
            operand: the placeholder of the field that the step received.
            output: the placeholder that it returned for the field.
            old_field: the old tree.
            values: the values that have been computed, from which the new tensors are taken.
            donate: whether the old state may be overwritten.
        """
        if output.index == operand.index:  # the step has returned the field as it is
            return old_field
        values.check(operand, output, f"{self._name}: the step returns a state")  # its shapes
        new_tensors = values.take(output.index)
        old_tensors = values.operands[operand.index]
        # Donated tensors of the compute dtype were overwritten by the operations, where possible. If they were cast,
        # the operations worked on copies, and the results are written into the donated tensors here.
        reuse = donate.state and values.was_cast(operand.index)
        return field.write(values.present, new_tensors, old_tensors, old_field, reuse=reuse)

    def _new_updates(self, operand: Leaf, output: Leaf, updates: PyTree, values: Values) -> PyTree:
        """Return the tree of the new updates, in the dtypes of the incoming updates."""
        if output.index == operand.index:
            return updates
        values.check(operand, output, f"{self._name}: the step returns an update")
        new_tensors = values.take(output.index, copy_into=operand.index)
        return values.present.fill(ew.cast_like(new_tensors, values.operands[operand.index]))


def params_for(name: str, params: PyTree) -> PyTree:
    """Return the parameters, or raise an error that names the transform if they are None."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return params


def _compute_dtypes(lists: Sequence[list[Tensor]]) -> torch.dtype | list[torch.dtype]:
    """Return the dtype in which each leaf is computed: the widest dtype of its operands, at least fp32.

    ``lists`` has a list for each operand, with its tensors of all leaves. If every list has a single dtype, such as
    bf16 for all updates and fp32 for all momenta, the result is one dtype for all leaves.
    """
    all_dtypes: set[torch.dtype] = set()
    for tensors in lists:  # the tensors of one operand
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:  # such as updates in bf16 for some leaves and in fp32 for others
            return _compute_dtype_of_each(lists)
        all_dtypes |= dtypes
    return ew.wide_dtype(*all_dtypes)  # the usual case, which takes no call for each leaf


def _compute_dtype_of_each(lists: Sequence[list[Tensor]]) -> list[torch.dtype]:
    """Return a list with the widest dtype of each leaf's operands; ``lists`` has a list of tensors for each operand."""
    compute_dtypes: list[torch.dtype] = []
    for operands_of_leaf in zip(*lists, strict=True):
        dtypes = [operand.dtype for operand in operands_of_leaf]
        compute_dtypes.append(ew.wide_dtype(*dtypes))
    return compute_dtypes


def _require_one_shape(leaf: object) -> None:
    """Raise an error if the argument of ``sum_over_leaves`` in a step cannot be added up over all leaves.

    It must be a placeholder (`Leaf`) for a value of one shape, as in ``sum_over_leaves((u * u).sum())``. ``u * u`` has
    the shape of each leaf, so it is an error.
    """
    if not isinstance(leaf, Leaf):
        raise TypeError(f"leafwise: sum_over_leaves adds up a value of each leaf, found {leaf!r}")
    if has_shape_of_leaf(leaf):
        raise ValueError(
            "leafwise: sum_over_leaves adds up values of one shape, found a value with the shapes of the leaves: "
            "reduce it first, as in sum_over_leaves((u * u).sum())"
        )


class Values:
    """The values of a `leafwise` step by their numbers in a `Plan`, each as a list with one tensor for each leaf.

    The numbers begin with the operands of the step: the update, the state and the parameters.
    """

    def __init__(self, present: Present) -> None:
        """Begin without values. `add_operand` adds those with the numbers 0, 1 and so on, and `run` all others."""
        self.present = present
        """The leaves that have a gradient."""
        self.operands: list[list[Tensor]] = []
        """The operands of the step in their own dtypes: ``[[u1, u2], [m1, m2]]`` for two leaves and a momentum."""
        self._computed: dict[int, list[Tensor]] = {}
        """The results so far, and the operands that have been read, in the compute dtype."""
        self._may_write: dict[int, bool] = {}
        """For each value, True if nothing else needs its storage, so that it may be overwritten after its last use."""
        self._remaining_uses: dict[int, int] = {}
        """For each value, how many operations and outputs still read it."""
        self._dtypes: torch.dtype | list[torch.dtype] | None = None
        """The compute dtype of each leaf, or one dtype for all; None until it is needed."""

    def add_operand(self, tensors: list[Tensor], *, may_write: bool) -> None:
        """Add an operand of the step, whose number is the number of operands before it."""
        self._may_write[len(self.operands)] = may_write
        self.operands.append(tensors)

    def run(self, plan: Plan, *, overwrite: bool) -> None:
        """Run the operations of a plan, each on the lists of all leaves, and store their results.

        For two leaves, the plan of ``s.trace * 0.9 + u`` calls ``mul([m1, m2], 0.9)`` and then ``add`` on the two lists
        of results and updates. With ``overwrite``, a result may take the storage of an operand after its last use. A
        result that nothing reads any more is then freed.
        """
        self._remaining_uses = dict(enumerate(plan.uses))  # {number of a value: how many will still read it}
        with ew.unrecorded(*self.operands, plan.scalars):  # autograd records nothing, unless it must
            for index, operation in plan.operations:
                if index not in self._computed:  # else a sum over leaves has needed it already
                    self._computed[index] = self._compute(operation, overwrite=overwrite)
                    # A later operation may overwrite a new tensor. A torch function that is called for each leaf may
                    # return a view of an operand instead, whose storage others may need.
                    self._may_write[index] = not operation.is_for_each
                if overwrite:
                    self._count_uses(operation.operands)

    def sum_with(self, sum_over_leaves: Callable[[PyTree], Tensor]) -> Callable[[Leaf], Tensor]:
        """Return a function that sums a `Leaf` over all leaves, from one that sums the tensors of a tree.

        A step calls it with a placeholder, as in ``sum_over_leaves((u * u).sum())``, and needs the number at once.
        """

        def sum_of(leaf: Leaf) -> Tensor:
            """Run the operations that the placeholder needs, such as ``u * u`` and ``sum``, and return the sum."""
            _require_one_shape(leaf)
            # The step is still running: only the operations that this placeholder needs are computed.
            plan = Plan.of(leaf.record, [leaf])
            self.run(plan, overwrite=False)  # the rest of the step may read every value
            value_of_each_leaf = self.read(leaf.index)
            return sum_over_leaves(self.present.fill(value_of_each_leaf))

        return sum_of

    def read(self, index: int) -> list[Tensor]:
        """Return the tensors of a value, one for each leaf, in the compute dtype, which is fp32 or wider.

        ``index`` is the number of the value. The values with the first numbers are the operands of the step: 0 is the
        update. They are converted when they are read for the first time, for example from bf16.
        """
        if index in self._computed:  # a result, or an operand that has been read before
            return self._computed[index]
        if self._dtypes is None:
            self._dtypes = _compute_dtypes(self.operands)
        self._computed[index] = ew.cast(self.operands[index], self._dtypes)
        if self.was_cast(index):
            self._may_write[index] = True  # these are copies, not the caller's tensors
        return self._computed[index]

    def was_cast(self, operand: int) -> bool:
        """Return True if an operand has been read, and converting its dtype made new tensors for all leaves."""
        if operand not in self._computed:
            return False
        return all(map(is_not, self._computed[operand], self.operands[operand]))

    def _compute(self, operation: Operation, *, overwrite: bool) -> list[Tensor]:
        """Run one operation on the lists of all leaves, such as ``ew.add([u1, u2], [m1, m2])``; return its results.

        With ``overwrite``, the results take the storage of an operand that nothing else needs: that of ``[u1, u2]``, if
        no later operation reads the updates, and the caller permits it.
        """
        lists = [self.read(index) for index in operation.operands]
        if operation.overwrites is None:  # a torch function that is called for each leaf
            for index in operation.operands:
                self._may_write[index] = False  # the result may be a view of it
            return operation.function(*lists)
        target = operation.operands[operation.overwrites]  # the operand that the function can overwrite
        is_last_use = self._remaining_uses[target] == 1  # this one, which has not been counted yet
        reuse = overwrite and is_last_use and self._may_write[target]
        if reuse:
            self._may_write[target] = False  # its storage becomes the result's
        return operation.function(*lists, *operation.scalars, reuse=reuse)

    def _count_uses(self, operands: Sequence[int]) -> None:
        """Count one use of each of these values, and forget results that nothing reads any more."""
        for index in operands:
            self._remaining_uses[index] -= 1
            # The first numbers are the operands of the step, which `was_cast` and `take` read again.
            if not self._remaining_uses[index] and index >= len(self.operands):
                del self._computed[index]

    def check(self, operand: Leaf, output: Leaf, beginning: str) -> None:
        """Raise an error if a value that the step returns is complex, or has another shape than its leaf.

        A step that returns ``u.sum()`` in place of an update ``u`` of shape (2,) is such an error.

        Args:
            operand: the placeholder that the step received, such as ``s.trace``.
            output: the placeholder that it returned in its place.
            beginning: the first words of the error: "momentum: the step returns a state".
        """
        if has_shape_of_leaf(output):  # the usual case, which reads no tensor
            return
        old_tensors = self.operands[operand.index]
        for index, (new, old) in enumerate(zip(self.read(output.index), old_tensors, strict=True)):
            if new.is_complex():
                raise TypeError(
                    f"{beginning} of {new.dtype} for {self.present.names()[index]!r}, expected real numbers; take "
                    "torch.abs or torch.real first"
                )
            if new.shape != old.shape:
                raise ValueError(
                    f"{beginning} of shape {tuple(new.shape)} for {self.present.names()[index]!r}, expected its shape "
                    f"{tuple(old.shape)}: use muonfx.transform if intermediate results change shapes"
                )

    def keep(self, operand: int) -> None:
        """Reserve the storage of an operand that is returned as it is, so that no other output receives it."""
        self._may_write[operand] = False

    def take(self, index: int, copy_into: int | None = None) -> list[Tensor]:
        """Return the tensors of a value that the step returns, such that no other output and no caller has them.

        ``index`` is the number of the value. For a step that returns the same value as update and as state, the first
        output gets the tensors, and the other one a copy. The copy is written into the operand ``copy_into`` if nothing
        else needs its storage.
        """
        tensors = self.read(index)
        if self._may_write[index]:  # nothing else needs them: they are returned without a copy
            self._may_write[index] = False  # a further output that is this value receives a copy
            return tensors
        if copy_into is not None:
            is_free = self._may_write[copy_into] and self._remaining_uses[copy_into] == 0
            if is_free:  # its storage takes the copy, so no memory is allocated
                return ew.copy(tensors, into=self.read(copy_into))
        return ew.clone(tensors)
