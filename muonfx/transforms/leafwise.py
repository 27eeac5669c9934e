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
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_
from types import FunctionType
from typing import Any, Literal, NamedTuple, ParamSpec, overload

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.compact.state import init_quantized, read_quantized, write_quantized
from muonfx.core import (
    Donation,
    InitAndUpdate,
    Locality,
    Transform,
    apply_updates,
    checks,
    transform,
)
from muonfx.core.donation import NOTHING
from muonfx.core.transform import Position
from muonfx.internal.arguments import float_of, is_real_number, plain_fields
from muonfx.internal.tracing import as_start
from muonfx.transforms._leaf import Leaf, Plan, Value, Values
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

    def zeros_of(param: Tensor) -> Tensor:
        stored_dtype = state_dtype(dtype, param.dtype)
        return torch.zeros_like(param, dtype=stored_dtype, requires_grad=False)

    return tree.map(zeros_of, params)


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

    def copy_of(param: Tensor) -> Tensor:
        stored_dtype = state_dtype(dtype, param.dtype)
        return as_start(param).to(stored_dtype, copy=True)

    return tree.map(copy_of, params)


def read_wide(present: Present, *trees: PyTree) -> list[list[Tensor]]:
    """Return a list of the leaves ``present`` of each tree. The leaves at a position get one dtype, at least fp32.

    >>> updates = {"w": torch.ones(1, dtype=torch.bfloat16), "b": None}
    >>> state = {"w": torch.zeros(1), "b": torch.zeros(1)}
    >>> read_wide(Present(updates), updates, state)
    [[tensor([1.])], [tensor([0.])]]
    """
    return ew.widest(*map(present.pick, trees))


def write(
    present: Present, values: list[Tensor], old_tree: PyTree, *, reuse: bool = False
) -> PyTree:
    """Return a tree with new values at the leaves ``present``, in the dtypes of the old tree; it inverts `read_wide`.

    With ``reuse``, the values are written into the leaves of the old tree.
    """
    old_leaves = present.pick(old_tree)
    if all(map(is_, values, old_leaves)):  # they were computed in place: there is nothing to write
        return old_tree
    if reuse:
        return present.fill(ew.copy(values, into=old_leaves), old_tree)
    return present.fill(ew.cast_like(values, old_leaves), old_tree)


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
        if not is_real_number(self.start):
            raise TypeError(f"Number: start must be a number or a tensor, found {self.start!r}")
        if isinstance(self.start, Tensor):
            return
        start = float_of("Number: start", self.start)
        if math.isnan(start):  # infinity may be the start of a least value
            raise ValueError(f"Number: start must be a number, found {self.start!r}")
        # A tensor is created from it, which NumPy's numbers and fractions do not allow.
        object.__setattr__(self, "start", start)


def init_slot(slot: Slot, name: str, params: PyTree) -> PyTree:
    """Return the initial state tree of a slot: zeros or copies of the parameters, in its storage dtype.

    ``name`` is the name of the slot in the state, such as "mu".
    """
    if isinstance(slot.dtype, QuantizedDtype):
        return init_quantized(slot.dtype, name, params, signed=slot.signed, start=slot.start)
    if slot.start == "zeros":
        return zeros(params, slot.dtype)
    return copies(params, slot.dtype)


def read_slot(slot: Slot, present: Present, state: PyTree) -> list[Tensor]:
    """Return the tensors of a slot's state tree that belong to the leaves ``present`` (leaves that are not None).

    A tree of a quantized dtype is decoded: its tensors are copies in fp32.
    """
    if isinstance(slot.dtype, QuantizedDtype):
        return read_quantized(slot.dtype, present, state, signed=slot.signed)
    return present.pick(state)


def write_slot(
    slot: Slot, present: Present, values: list[Tensor], state: PyTree, *, reuse: bool = False
) -> PyTree:
    """Return the state tree of a slot with new values at the leaves ``present``, in its storage dtypes.

    With ``reuse``, the values are written into the leaves of the old tree ``state``, unless its dtype is quantized.
    """
    if isinstance(slot.dtype, QuantizedDtype):
        return write_quantized(slot.dtype, present, values, state, signed=slot.signed)
    return write(present, values, state, reuse=reuse)


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
    # For ``@leafwise(reads_params=True)``
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
    ``update(..., value=loss)``; one with a default may be left out. One of them is supplied: with ``step(u, s, *,
    sum_over_leaves)``, ``sum_over_leaves((u * u).sum())`` is the sum over all leaves that have a gradient, and over all
    ranks, as a 0-d tensor. Its argument must have one shape for all leaves.

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
        >>> tx, grads = (
        ...     divide_by_largest_norm(),
        ...     {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])},
        ... )
        >>> tx.update(grads, tx.init(grads))
        ({'w': tensor([0.6000]), 'b': tensor([0.8000])}, {'largest': tensor(5., dtype=torch.float64)})
    """
    if reads_params not in (True, False, "updated") and not callable(reads_params):
        raise TypeError(
            f'leafwise: reads_params must be True, False or "updated", found {reads_params!r}'
        )

    if constructor is None:  # written with options: @leafwise(position="last")
        return functools.partial(
            leafwise,
            locality=locality,
            reads_params=reads_params,
            position=position,
            short_names=short_names,
            check_extras=check_extras,
        )
    name = constructor.__name__

    # `muonfx.transform` makes the factory. For ``momentum(0.9)``, it calls both functions below with the argument 0.9.
    @functools.wraps(constructor)
    def init_and_update(*args: object, **kwargs: object) -> InitAndUpdate:
        """Call the constructor, and return the functions of the transform that its state and step describe."""
        step_reads_params = reads_params
        if callable(step_reads_params):  # it depends on the arguments
            step_reads_params = step_reads_params(*args, **kwargs)
        returned = constructor(*args, **kwargs)  # such as (MomentumState(Slot()), step)
        # The state may contain one tensor for each leaf (a Slot), and counts or numbers that all leaves share.
        types = (Slot, StepCount, Number)
        state, step = state_and_step(f"{name}: a leafwise", returned, types, step_reads_params)
        return _Formula(name, state, step, step_reads_params).functions()

    def locality_of_transform(*args: object, **kwargs: object) -> Locality:
        """Return how much of its input an element of the result depends on, for these arguments."""
        state, step = constructor(*args, **kwargs)  # `init_and_update` has checked them
        return _locality_of_transform(name, state, step, locality)

    transform_reads_params = reads_params
    if not callable(transform_reads_params):
        transform_reads_params = bool(reads_params)  # True for "updated"
    as_transform = transform(
        locality=locality_of_transform,
        reads_params=transform_reads_params,
        position=position,
        short_names=short_names,
        check_extras=check_extras,
    )
    return as_transform(init_and_update)


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
    state, step = returned
    # The items of the state, such as "trace" and its slot.
    for name, item in tree.named_leaves(state):
        if not isinstance(item, types):
            type_names = " and ".join([expected.__name__ for expected in types])
            raise TypeError(
                f"{caller} constructor returns a state of {type_names}, found {item!r} at {name!r}"
            )
    names = tree.names(state)
    if len(set(names)) < len(names):
        raise ValueError(
            f"{caller} constructor returns a state with one name for two items, found {names}"
        )
    if reads_params:
        _require_params(caller, step)
    else:
        _require_no_params(caller, state, step)
    return state, step


def _require_params(caller: str, step: Step) -> None:
    """Raise TypeError if a step accepts no third argument, although it is called as ``step(u, s, p)``."""
    if not isinstance(step, FunctionType):
        return
    # `inspect.signature` is slow, and a constructor with a schedule makes a step at every update.
    code = step.__code__
    has_star_args = bool(code.co_flags & inspect.CO_VARARGS)
    positional_names = code.co_varnames[: code.co_argcount]
    if len(positional_names) < 3 and not has_star_args:
        raise TypeError(
            f"{caller} constructor with reads_params=True returns a step of three arguments, (u, s, p), found "
            f"({', '.join(positional_names)})"
        )


def _require_no_params(caller: str, state: PyTree, step: Step) -> None:
    """Raise TypeError if a slot starts at the parameters, or the step requires three arguments: (u, s, p)."""
    for name, item in tree.named_leaves(state):
        # `init` may receive parameters whose values are NaN
        if isinstance(item, Slot) and item.start == "params":
            raise TypeError(
                f"{caller} constructor whose slot {name!r} starts at the parameters declares reads_params=True"
            )
    if not isinstance(step, FunctionType):
        return
    defaults = step.__defaults__ or ()
    # 2 for ``lambda u, s, scale=0.1: ...``
    number_required = step.__code__.co_argcount - len(defaults)
    if number_required == 3:
        raise TypeError(
            f"{caller} constructor whose step takes three arguments, (u, s, p), declares reads_params=True"
        )


def update_and_state(name: str, returned: object) -> tuple[Any, Any]:
    """Return the update and the state that a step returned. Raise an error if they are not a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{name}: the step must return (update, state), found a {type(returned).__name__}"
        )
    return returned


def _extra_names(step: Step) -> tuple[str, ...]:
    """Return the names of the keyword-only arguments of a step."""
    code = getattr(step, "__code__", None)
    if code is None:  # not a Python function
        return ()
    # In ``co_varnames``, keyword-only arguments follow directly after all positional arguments.
    first = code.co_argcount
    return code.co_varnames[first : first + code.co_kwonlyargcount]


def _locality_of_transform(
    name: str, state: PyTree, step: Step, locality_of_step: Locality
) -> Locality:
    """Return the locality of a leafwise transform: how much of its input one element of its result depends on.

    It is the locality of the step, such as ELEMENT (the same element) for ``u * u``, with two exceptions. Quantized
    state raises ELEMENT to LEAF (the whole leaf). A step that sums over leaves has the locality TREE (all leaves).

    Args:
        name: the name of the transform, for an error.
        state: the declared state, such as ``MomentumState(trace=Slot())``.
        step: the function that computes one update.
        locality_of_step: the locality that the author of the transform has declared.
    """
    locality = locality_of_step
    for item in tree.leaves(state):
        # The elements of a block share a scale.
        if isinstance(item, Slot) and isinstance(item.dtype, QuantizedDtype):
            locality = max(locality, Locality.LEAF)  # the larger one depends on more elements
    if "sum_over_leaves" not in _extra_names(step):
        return locality
    if locality is not Locality.ELEMENT:
        raise TypeError(
            f"{name}: found the locality {locality.name} and a step with sum_over_leaves, which runs on shards, "
            "expected ELEMENT: leave out locality= and quantized dtypes, or use muonfx.transform"
        )
    return Locality.TREE


class RecordedStep(NamedTuple):
    """One call ``new_update, new_state = step(update, state)``, with a placeholder for each tree.

    For ``return m, MomentumState(trace=m)``, the new update and ``new_state["trace"]`` are one placeholder. An item of
    the state that all leaves share, such as a step count, has no placeholder: it is a 0-d tensor.
    """

    update: Leaf
    state: dict[str, Any]
    """The items of the state that the step received, by name, such as "trace"."""
    new_update: Leaf
    new_state: dict[str, Any]
    """The items of the state that it returned."""
    plan: Plan
    """The operations from the first two to the last two."""


def _without_extras(
    updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
) -> None:
    """Has the signature of an ``update`` without extra arguments, as `_Formula.functions` defines one."""


_PARAMETERS_OF_UPDATE = tuple(inspect.signature(_without_extras).parameters.values())


class _Formula:
    """A step and its declared state, as the functions ``init`` and ``update`` of a transform.

    The examples are for ``def step(u, s): m = s.trace * 0.9 + u; return m, MomentumState(trace=m)``, whose state is
    declared as ``MomentumState(trace=Slot())``.
    """

    def __init__(self, name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> None:
        """Store the arguments, and the parts of the state by name.

        Args:
            name: the name of the transform, for errors.
            declared: the state, with a `Slot` in place of each tree: ``MomentumState(trace=Slot())``.
            step: the function that computes one update, as ``step(u, s)``.
            reads_params: whether the step receives the parameters too.
        """
        self._name = name
        self._declared = declared
        # {"trace": Slot()}
        self._items: dict[str, Slot | StepCount | Number] = dict(tree.named_leaves(declared))
        self._step = step
        self._extra_names = _extra_names(step)  # of its extra arguments, such as "sum_over_leaves"
        self._reads_params = reads_params
        # If its operations are the same at each update.
        self._saved_step: RecordedStep | None = None

    def functions(self) -> InitAndUpdate:
        """Return ``init`` and ``update`` of the transform."""

        def update(
            updates: PyTree,
            state: PyTree,
            params: PyTree = None,
            *,
            donate: Donation = NOTHING,
            **extras: object,
        ) -> tuple[PyTree, PyTree]:
            return self._run(updates, state, params, donate, extras)

        # `Transform` reads the names of the extra arguments from the signature, when it is created.
        if not torch.compiler.is_compiling():
            update.__signature__ = self._signature_of_update()
        return self.init, update

    def _signature_of_update(self) -> inspect.Signature:
        """Return the signature of ``update`` with the extra arguments of the step by name.

        For ``def step(u, s, *, value)``, it is ``(updates, state, params=None, *, donate=NOTHING, value)``.
        """
        parameters = list(_PARAMETERS_OF_UPDATE)
        if self._extra_names:
            parameters_of_step = inspect.signature(self._step, follow_wrapped=False).parameters
            parameters += [parameters_of_step[name] for name in self._extra_names]
        return inspect.Signature(parameters)

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state."""
        return self._state_of([_start(name, item, params) for name, item in self._items.items()])

    def _state_of(self, items: list[Any]) -> PyTree:
        """Return a state with these items, in the containers that were declared: ``MomentumState(m)`` for ``[m]``."""
        # It has another type under torch.compile, so it is not saved.
        containers = tree.flatten(self._declared)[1]
        return tree.unflatten(containers, items)

    def _items_of(self, state: object) -> dict[str, Any]:
        """Return the items of a state by name: ``{"trace": m}`` for ``MomentumState(m)``.

        Raise ValueError unless it has the NamedTuple, dict or tuple of the declared state.
        """
        containers = tree.flatten(self._declared)[1]
        return dict(zip(self._items, tree.subtrees(containers, state), strict=True))

    def _run(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        donate: Donation,
        extras: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        """Apply the step to all leaves; return the new updates and the new state."""
        old_state = self._items_of(state)  # {"trace": {"w": m1, "v": m2}}

        # 1. Collect the tensors of all leaves for each operand: the lists [u1, u2] and [m1, m2].
        values = self._operand_values(updates, old_state, params, donate)
        if "sum_over_leaves" in extras:
            sum_of_placeholder = values.sum_with(extras["sum_over_leaves"])
            extras = extras | {"sum_over_leaves": sum_of_placeholder}

        # 2. Call the step with placeholders. They record its operations, which are the plan: ``[mul, add]``.
        recorded = self._recorded_step(old_state, extras)

        # 3. Run each operation of the plan once, on lists with the tensors of all leaves.
        values.run(recorded.plan)

        # 4. Build the new trees from the lists.
        new_updates = updates
        # If they are the same placeholder, the step returned the update unchanged.
        if recorded.new_update is not recorded.update:
            tensors = values.take(
                recorded.new_update, recorded.update, f"{self._name}: the step returns an update"
            )
            reuse = donate.updates and values.was_cast(recorded.update)
            new_updates = write(values.present, tensors, updates, reuse=reuse)
        new_state = self._new_state(values, recorded, old_state, donate.state)
        return new_updates, self._state_of(new_state)

    def _operand_values(
        self, updates: PyTree, old_state: dict[str, PyTree], params: PyTree, donate: Donation
    ) -> Values:
        """Return the tensors of the operands of ``step(u, s, p)``: the update, each tree of the state, the parameter.

        For two leaves, they are ``{"update": [u1, u2], "state.trace": [m1, m2], "params": [p1, p2]}``.
        """
        present = Present(updates)  # the leaves that have a gradient
        operands = {"update": Value(present.pick(updates), may_write=donate.updates)}
        for name, item in self._items.items():
            # A number that all leaves share has no placeholder.
            if isinstance(item, Slot):
                tensors = read_slot(item, present, old_state[name])
                is_copy = isinstance(item.dtype, QuantizedDtype)  # its 8-bit codes were decoded
                operands[f"state.{name}"] = Value(tensors, may_write=donate.state or is_copy)
        if self._reads_params:
            params = params_for(self._name, params)
            # The parameters after this update, as for `ema_params`
            if self._reads_params == "updated":
                params = apply_updates(params, updates)
            operands["params"] = Value(present.pick(params), may_write=False)
        return Values(present, operands)

    def _recorded_step(self, old_state: dict[str, PyTree], extras: dict[str, Any]) -> RecordedStep:
        """Return the operations of the step, such as ``mul`` and ``add`` for ``s.trace * 0.9 + u``.

        If they are the same at each update, they are recorded once and saved. For a few small leaves, recording takes
        longer than the rest of an update.
        """
        # A graph that depends on `_saved_step` is compiled again when it changes.
        if torch.compiler.is_compiling():
            return self._call_step(old_state, extras)
        if self._saved_step is not None:
            return self._saved_step
        recorded = self._call_step(old_state, extras)
        if not self._may_vary(recorded.plan):
            self._saved_step = recorded
        return recorded

    def _may_vary(self, plan: Plan) -> bool:
        """Return True if the step has to be recorded again at the next update, since a number in it may change.

        The number 0.9 in ``s.trace * 0.9`` cannot change. A step count, an extra argument of the step and a learning
        rate that is a tensor can.
        """
        if self._extra_names:  # one that is left out now may be given later
            return True
        if not all(isinstance(item, Slot) for item in self._items.values()):  # such as a step count
            return True
        return any(isinstance(scalar, Tensor) for scalar in plan.scalars)

    def _call_step(self, old_state: dict[str, PyTree], extras: dict[str, Any]) -> RecordedStep:
        """Call the step once with placeholders, and return the operations that they record.

        A placeholder (`Leaf`) takes the place of one tensor for each leaf: the update, a tree of the state such as
        ``trace``, the parameter. A number that all leaves share, such as a step count, is passed as its 0-d tensor.
        The placeholders have the names of `_operand_values`.
        """
        numbers = itertools.count()  # of the results of operations
        update = Leaf("update", numbers)
        state = dict(old_state)
        for name, item in self._items.items():
            if isinstance(item, Slot):
                state[name] = Leaf(f"state.{name}", numbers)
        step_args = [update, self._state_of(list(state.values()))]
        if self._reads_params:
            step_args.append(Leaf("params", numbers))

        new_update, returned_state = update_and_state(self._name, self._step(*step_args, **extras))
        # A tensor or 0.0, for example, does not depend on the update.
        if not isinstance(new_update, Leaf):
            update_type = type(new_update).__name__
            raise TypeError(
                f"{self._name}: the step returns an update of type {update_type}, not one made of operands"
            )
        try:
            new_state = self._items_of(returned_state)
        except ValueError as error:
            raise TypeError(
                f"{self._name}: the step returns another state than declared. {error}"
            ) from error
        for name in self._items:
            self._check_item(name, state[name], new_state[name])

        # The plan has only the operations that these outputs need, since a step may compute more than it returns.
        outputs = [
            output for output in [new_update, *new_state.values()] if isinstance(output, Leaf)
        ]
        return RecordedStep(update, state, new_update, new_state, Plan.of(outputs))

    def _check_item(self, name: str, operand: object, output: object) -> None:
        """Raise TypeError if an item of the returned state, ``output``, has a wrong type, or is an unchanged count.

        ``operand`` is the item that the step received: a placeholder for a tree, or a 0-d tensor for a number. The item
        is declared in the state, such as ``count=StepCount()``, and ``name`` is "count".
        """
        declared = self._items[name]
        expected_type = Leaf if isinstance(declared, Slot) else Tensor
        if not isinstance(output, expected_type):
            raise TypeError(
                f"{self._name}: the step returns a {type(output).__name__} for {name!r} of its state, declared as "
                f"{declared!r}"
            )
        if output is operand and isinstance(declared, StepCount):
            raise TypeError(
                f"{self._name}: the step returns the count {name!r} of its state unchanged, so each step would be the "
                "first: return the count + 1"
            )

    def _new_state(
        self, values: Values, recorded: RecordedStep, old_state: dict[str, PyTree], is_donated: bool
    ) -> list[PyTree]:
        """Return the new items of the state in order, after the operations of the step ran: ``[{"w": m1}]``.

        With ``is_donated``, the tensors of the old state may be overwritten.
        """
        new_items: list[PyTree] = []
        for name, item in self._items.items():
            old_item = old_state[name]
            operand = recorded.state[name]
            output = recorded.new_state[name]
            if output is operand:  # the step returned the item unchanged
                new_items.append(old_item)
            elif isinstance(item, Slot):
                tensors = values.take(output, operand, f"{self._name}: the step returns a state")
                # Donated tensors of the compute dtype were overwritten by the operations, where possible. If they were
                # cast, the operations worked on copies, and the results are written into the donated tensors here.
                reuse = is_donated and values.was_cast(operand)
                new_items.append(write_slot(item, values.present, tensors, old_item, reuse=reuse))
            elif isinstance(item, StepCount):
                new_items.append(output)
            else:  # a copy, because the step may return a tensor of the caller
                new_items.append(ew.new_number(output, old_item.device))
        return new_items


def _start(name: str, item: Slot | StepCount | Number, params: PyTree) -> PyTree:
    """Return the initial value of an item of a state, such as a tree of zeros for ``trace=Slot()``."""
    if isinstance(item, Slot):
        return init_slot(item, name, params)
    if isinstance(item, StepCount):
        return ew.new_count(device_of(params))
    return ew.new_number(item.start, device_of(params))


def params_for(name: str, params: PyTree) -> PyTree:
    """Return the parameters, or raise an error that names the transform if they are None."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return params
