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
from types import FunctionType
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
from muonfx.transforms._leaf import Leaf, Plan
from muonfx.transforms._values import Values
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


def write(present: Present, values: list[Tensor], old_tree: PyTree, *, reuse: bool = False) -> PyTree:
    """Return a tree with new values at the leaves ``present``, in the dtypes of the old tree; it inverts `read_wide`.

    With ``reuse``, the values are written into the leaves of the old tree.
    """
    return present.fill(ew.store(values, present.pick(old_tree), reuse=reuse), old_tree)


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

    def write(self, present: Present, values: list[Tensor], state: PyTree, *, reuse: bool) -> PyTree:
        """Return a state tree with new values at the leaves ``present``; if ``reuse``, stored in the old leaves."""
        return write(present, values, state, reuse=reuse)


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
) -> Callable[[Callable[P, StateAndStep]], Callable[P, Transform]]: ...  # for ``@leafwise(reads_params=True)``


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
        >>> tx, grads = divide_by_largest_norm(), {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> tx.update(grads, tx.init(grads))
        ({'w': tensor([0.6000]), 'b': tensor([0.8000])}, {'largest': tensor(5., dtype=torch.float64)})
    """
    if reads_params not in (True, False, "updated") and not callable(reads_params):
        raise TypeError(f'leafwise: reads_params must be True, False or "updated", found {reads_params!r}')

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

    as_transform = transform(
        locality=locality_of_transform,
        reads_params=reads_params if callable(reads_params) else bool(reads_params),
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
    for name, item in tree.named_leaves(state):  # the items of the state, such as "trace" and its slot
        if not isinstance(item, types):
            type_names = " and ".join([expected.__name__ for expected in types])
            raise TypeError(f"{caller} constructor returns a state of {type_names}, found {item!r} at {name!r}")
    if reads_params:
        _require_params(caller, step)
    else:
        _require_no_params(caller, state, step)
    return state, step


def _require_params(caller: str, step: Step) -> None:
    """Raise TypeError if a step accepts no third argument, although it is called as ``step(u, s, p)``."""
    if not isinstance(step, FunctionType):
        return
    code = step.__code__
    takes_any_number = code.co_flags & inspect.CO_VARARGS  # it has *args
    if code.co_argcount < 3 and not takes_any_number:
        names = ", ".join(code.co_varnames[: code.co_argcount])
        raise TypeError(
            f"{caller} constructor with reads_params=True returns a step of three arguments, (u, s, p), found ({names})"
        )


def _require_no_params(caller: str, state: PyTree, step: Step) -> None:
    """Raise TypeError if a slot starts at the parameters, or the step requires three arguments: (u, s, p)."""
    for name, item in tree.named_leaves(state):
        if isinstance(item, Slot) and item.start == "params":  # `init` may receive parameters whose values are NaN
            raise TypeError(
                f"{caller} constructor whose slot {name!r} starts at the parameters declares reads_params=True"
            )
    if _required_arguments(step) == 3:
        raise TypeError(f"{caller} constructor whose step takes three arguments, (u, s, p), declares reads_params=True")


def _required_arguments(step: Callable[..., object]) -> int | None:
    """Return the number of positional arguments of a step without a default; None if it is not a Python function.

    For example, it is 2 for ``lambda u, s, scale=0.1: ...``.
    """
    if not isinstance(step, FunctionType):
        return None
    defaults = step.__defaults__ or ()
    return step.__code__.co_argcount - len(defaults)


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


def _locality_of_transform(name: str, state: PyTree, step: Step, locality_of_step: Locality) -> Locality:
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
        if isinstance(item, Slot) and isinstance(item.dtype, QuantizedDtype):  # the elements of a block share a scale
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
    """The operations of one call of a step, and what it received and returned.

    Placeholders represent trees: the update, and the items of the state that are slots. The other items, numbers that
    all leaves share, are 0-d tensors.
    """

    operands: list[Any]
    """The update, and each item of the state."""
    outputs: list[Any]
    """The values that the step returned in their places."""
    plan: Plan
    """The operations that the outputs need."""


class _Formula:
    """A step and its declared state, which runs the step on the lists of all leaves.

    For the state ``MomentumState(trace=Slot())``, there is one *store*, which creates, reads and writes the tree
    ``trace``. The step receives a *placeholder* in place of this tree, and returns another one for the new tree.
    """

    def __init__(self, name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> None:
        """Prepare a store for each item of the declared state, which creates, reads and writes its tree.

        Args:
            name: the name of the transform, for errors.
            declared: the state, with a `Slot` in place of each tree: ``MomentumState(trace=Slot())``.
            step: the function that computes one update, as ``step(u, s)``.
            reads_params: whether the step receives the parameters too.
        """
        self._name = name
        self._declared = declared
        self._step = step
        self._extra_names = _extra_names(step)
        """The names of the extra arguments of the step, such as "sum_over_leaves"."""
        self._reads_params = reads_params
        self._saved_step: RecordedStep | None = None
        """The operations of the step, if they are the same at each update."""
        self._items = tree.named_leaves(declared)
        """The declared items of the state with their names: ``[("trace", Slot())]``."""
        self._stores: list[SlotTrees | SharedNumber] = [PlainTrees(None, "zeros")]
        """The store of the update, which is returned in its old dtype, and one for each item of the state in order."""
        for item_name, item in self._items:
            if isinstance(item, Slot):
                self._stores.append(slot_trees(item, item_name))
            else:
                self._stores.append(SharedNumber(item))

    def functions(self) -> InitAndUpdate:
        """Return ``init`` and ``update`` of the transform, with the extra arguments of the step in the signature.

        For ``def step(u, s, *, value)``, `Transform` must find the name "value" in the signature of ``update``. The
        function below has ``**extras``, so it receives another signature: ``(updates, state, params=None, *,
        donate=NOTHING, value)``.
        """

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object
        ) -> tuple[PyTree, PyTree]:
            step_extras = {name: extras[name] for name in self._extra_names if name in extras}  # {"value": ...}
            return self._run(updates, state, params, donate, step_extras)

        if not torch.compiler.is_compiling():  # the signature was read when the transform was created
            signature = inspect.signature(update)
            # Not read while torch's compiler traces, which fails for this attribute. The step has its defaults anyway.
            defaults: dict[str, Any] = getattr(self._step, "__kwdefaults__", None) or {}
            # All parameters but the last one, ``**extras``, and then a keyword-only parameter for each name.
            *parameters, _extras = signature.parameters.values()
            for name in self._extra_names:
                default = defaults.get(name, inspect.Parameter.empty)
                parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
            update.__signature__ = signature.replace(parameters=parameters)
        return self.init, update

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state."""
        containers = tree.flatten(self._declared)[1]
        _update_store, *stores = self._stores
        trees = [store.init(params) for store in stores]
        return tree.unflatten(containers, trees)

    def _run(
        self, updates: PyTree, state: PyTree, params: PyTree, donate: Donation, extras: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Apply the step to all leaves; return the new updates and the new state.

        Take ``def step(u, s): m = s.trace * 0.9 + u; return m, MomentumState(m)``. Its operands are ``u`` and
        ``s.trace``, and its outputs are ``m`` and ``m``: the new update and the new trace.
        """
        # 1. Collect the tensors of all leaves for each operand.
        containers = tree.flatten(self._declared)[1]  # it has another type under torch.compile, so it is not saved
        items = tree.subtrees(containers, state)
        old_trees = [updates, *items]
        donated = [donate.updates, *[donate.state] * len(items)]  # whether each of them may be overwritten
        values = self._operand_values(old_trees, donated, params)
        if "sum_over_leaves" in extras:
            sum_of_placeholder = values.sum_with(extras["sum_over_leaves"])
            extras = extras | {"sum_over_leaves": sum_of_placeholder}

        # 2. Call the step with placeholders. They record its operations, which are the plan: ``[mul, add]``.
        recorded = self._recorded_step(containers, old_trees, extras)

        # 3. Run each operation of the plan once, on lists with the tensors of all leaves.
        values.run(recorded.plan)

        # 4. Build the new trees.
        new_trees: list[PyTree] = []
        for store, operand, output, old_tree, is_donated in zip(
            self._stores, recorded.operands, recorded.outputs, old_trees, donated, strict=True
        ):
            new_trees.append(self._new_tree(store, operand, output, old_tree, values, is_donated))
        new_updates, *new_items = new_trees
        return new_updates, tree.unflatten(containers, new_items)

    def _operand_values(self, old_trees: list[PyTree], donated: list[bool], params: PyTree) -> Values:
        """Return the tensors of the operands of ``step(u, s, p)``: the updates, each tree of the state, the parameters.

        For two leaves and one tree, they are ``[[u1, u2], [m1, m2], [p1, p2]]``. This is the order of the placeholders
        in `_call_step`.

        Args:
            old_trees: the updates, and the items of the state.
            donated: for each of them, whether it may be overwritten. A copy always may.
            params: the parameters.
        """
        updates = old_trees[0]
        present = Present(updates)  # the leaves that have a gradient
        values = Values(present)
        for store, old_tree, is_donated in zip(self._stores, old_trees, donated, strict=True):
            if isinstance(store, SharedNumber):  # one number for all leaves, which has no placeholder
                continue
            is_copy = isinstance(store, QuantizedTrees)  # its 8-bit codes are decoded
            values.add_operand(store.read(present, old_tree), may_write=is_donated or is_copy)
        if self._reads_params:
            params = params_for(self._name, params)
            if self._reads_params == "updated":  # the parameters after this update, as for `ema_params`
                params = apply_updates(params, updates)
            values.add_operand(present.pick(params), may_write=False)
        return values

    def _recorded_step(self, containers: Structure, old_trees: list[PyTree], extras: dict[str, Any]) -> RecordedStep:
        """Return the operations of the step, such as ``mul`` and ``add`` for ``s.trace * 0.9 + u``.

        If they are the same at each update, they are recorded once and saved. For a few small leaves, recording takes
        longer than the rest of an update.
        """
        if torch.compiler.is_compiling():  # a graph that depends on `_saved_step` is compiled again when it changes
            return self._call_step(containers, old_trees, extras)
        if self._saved_step is not None:
            return self._saved_step
        recorded = self._call_step(containers, old_trees, extras)
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
        for store in self._stores:
            if isinstance(store, SharedNumber):  # such as a step count
                return True
        return any(isinstance(scalar, Tensor) for scalar in plan.scalars)

    def _call_step(self, containers: Structure, old_trees: list[PyTree], extras: dict[str, Any]) -> RecordedStep:
        """Call the step once with placeholders, and return the operations that they record.

        ``old_trees`` are the updates and the items of the state, and ``containers`` is the structure of the state.
        A placeholder (`Leaf`) takes the place of one tensor for each leaf: the update, a tree of the state such as
        ``trace``, the parameter. A number that all leaves share, such as a step count, is passed as its 0-d tensor.
        """
        # The numbers of the placeholders: the update is 0, then the trees of the state follow, then the parameter, and
        # then the results of operations on these.
        numbers = itertools.count()
        operands: list[Any] = []
        for store, old_tree in zip(self._stores, old_trees, strict=True):
            if isinstance(store, SharedNumber):
                operands.append(old_tree)
            else:
                operands.append(Leaf(numbers))
        update, *items = operands
        step_args = [update, tree.unflatten(containers, items)]
        if self._reads_params:
            step_args.append(Leaf(numbers))

        new_update, new_state = update_and_state(self._name, self._step(*step_args, **extras))
        if not isinstance(new_update, Leaf):  # such as a tensor or 0.0, which does not depend on the update
            update_type = type(new_update).__name__
            raise TypeError(f"{self._name}: the step returns an update of type {update_type}, not one made of operands")
        new_items = self._state_outputs(containers, new_state)
        for (name, declared), item, new_item in zip(self._items, items, new_items, strict=True):
            self._check_state_output(name, declared, item, new_item)

        # The plan has only the operations that these outputs need, since a step may compute more than it returns.
        outputs = [new_update, *new_items]
        plan = Plan.of([output for output in outputs if isinstance(output, Leaf)])
        return RecordedStep(operands, outputs, plan)

    def _state_outputs(self, containers: Structure, new_state: object) -> list[Any]:
        """Return the items of a state that a step returned: ``[m]`` for ``MomentumState(m)``.

        Raise TypeError unless it has the NamedTuple, dict or tuple of the declared state, which is ``containers``.
        """
        try:
            return tree.subtrees(containers, new_state)
        except ValueError as error:
            raise TypeError(f"{self._name}: the step returns another state than declared. {error}") from error

    def _check_state_output(self, name: str, declared: object, operand: object, output: object) -> None:
        """Raise TypeError if an item of the returned state, ``output``, has a wrong type, or is an unchanged count.

        ``operand`` is the item that the step received: a placeholder for a tree, or a 0-d tensor for a number. The item
        is declared in the state, such as ``count=StepCount()``, and ``name`` is "count".
        """
        expected_type = Leaf if isinstance(operand, Leaf) else Tensor
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

    def _new_tree(
        self,
        store: SlotTrees | SharedNumber,
        operand: Any,
        output: Any,
        old_tree: PyTree,
        values: Values,
        is_donated: bool,
    ) -> PyTree:
        """Return the new updates, or the new value of an item of the state such as ``trace``, after the operations ran.

        Args:
            store: writes the tensors into a tree, in the dtypes of the old tree.
            operand: the placeholder of the old tree, such as ``s.trace``, or a number that all leaves share.
            output: what the step returned in its place.
            old_tree: the old tree, or the old number.
            values: the tensors of all placeholders.
            is_donated: whether the old tree may be overwritten.
        """
        if isinstance(store, SharedNumber):
            return store.write(output, old_tree)
        if output is operand:  # the step returned the tree unchanged
            return old_tree
        kind = "an update" if operand.number == 0 else "a state"
        values.check(operand, output, f"{self._name}: the step returns {kind}")  # its shapes
        new_tensors = values.take(output, operand)
        # Donated tensors of the compute dtype were overwritten by the operations, where possible. If they were cast,
        # the operations worked on copies, and the results are written into the donated tensors here.
        write_into_old = is_donated and values.was_cast(operand)
        return store.write(values.present, new_tensors, old_tree, reuse=write_into_old)


def params_for(name: str, params: PyTree) -> PyTree:
    """Return the parameters, or raise an error that names the transform if they are None."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return params
