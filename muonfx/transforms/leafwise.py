"""The decorator `leafwise`, which makes transforms from the arithmetic of one leaf.

This arithmetic is a function, the step. It is called with a `Leaf` for each operand, a placeholder that records the
operations on it. The call is repeated at each update only if the step reads tensors, such as a step count. A `StepPlan`
contains the recorded operations that the update and the new state need. `Values` runs each of them once, on the lists
of all leaves, with `muonfx.tree.elementwise`. The plan counts the uses of every value, so that `Values` overwrites only
storage that is donated or no longer needed.
"""

from __future__ import annotations

import functools
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
from muonfx.core.contract import NOTHING, Position
from muonfx.transforms._leaf import Leaf, Operation, StepPlan, record_step
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew
from muonfx.tree.arguments import plain_fields
from muonfx.tree.tracing import as_start

__all__ = ["Leaf", "Slot", "SlotTrees", "StateAndStep", "StateDtype", "StepCount", "WideStateDtype", "copies"]
__all__ += ["leafwise", "params_for", "state_and_step", "state_dtype", "zeros"]

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


def state_dtype(pinned: WideStateDtype, own: torch.dtype) -> torch.dtype:
    """Return the dtype in which a state is stored, for the option ``pinned`` and a parameter of dtype ``own``."""
    if pinned is None:
        return own
    return ew.wide_dtype(own) if isinstance(pinned, str) else pinned


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

    def read(self, at: Present, held: PyTree) -> list[Tensor]:
        """Return the state tensors in the tree ``held`` that belong to the leaves ``at`` (leaves that are not None)."""
        return at.pick(held) if self._holder is None else self._holder.read(at, held)

    def write(self, at: Present, values: list[Tensor], old: list[Tensor], held: PyTree, *, reuse: bool) -> PyTree:
        """Return the state tree ``held`` with new values at the leaves ``at``; if ``reuse``, stored in ``old``."""
        if self._holder is not None:
            return self._holder.write(at, values, held)
        return at.fill(ew.store(values, old, reuse=reuse), held)


@overload
def leafwise(constructor: Callable[P, StateAndStep], /) -> Callable[P, Transform]: ...


@overload
def leafwise(
    *,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, StateAndStep]], Callable[P, Transform]]: ...


def leafwise(
    constructor: Callable[..., StateAndStep] | None = None,
    *,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Any:
    """Turn a function into a factory of transforms that apply one formula to every leaf.

    The decorated function, called the constructor, returns a pair (state, step). The state is a NamedTuple, dict or
    tuple, and declares the parts of the transform's state: a `Slot` is one tensor for each parameter, and a `StepCount`
    is a step count that all leaves share. A transform without state has ``EmptyState()``.

    The step is the formula, a function ``step(u, s) -> (u, s)``, or ``step(u, s, p)`` with ``reads_params=True``. From
    the update ``u``, the state ``s`` and the parameter ``p`` of one leaf, it computes the new update and state. Use
    ``u``, ``p`` and the items of ``s`` like tensors: they are `Leaf` placeholders, which record the operations, and
    counts are 0-d tensors. Each leaf is computed in the widest dtype of its operands, at least fp32. Results are
    rounded to the update's dtype and to the storage dtypes of the state.

    Use `muonfx.transform` instead if one step needs several leaves, shapes, extra arguments of `update` or other
    transforms.

    Args:
        constructor: the decorated function. It validates its arguments, and its name becomes the transform's name.
        locality: how much of a leaf an element of the result depends on: `Locality.ELEMENT` is the same element of the
            operands, and `Locality.LEAF` the whole leaf. A quantized dtype raises ELEMENT to LEAF.
        reads_params: whether the step receives the parameter. "updated" passes the parameter after this update has
            been applied. ``Slot(start="params")`` requires True or "updated".
        position: the place in a chain relative to the learning rate, as for `muonfx.transform`.
        short_names: a dict from a key of torch's parameter groups to the arguments that it sets, such as
            ``{"betas": ("b1", "b2")}``, as for `muonfx.transform`.

    Returns:
        A factory with the constructor's name, signature and docstring. Its transforms skip gradients of None and run
        each operation on all leaves in one call. They work with ``torch.func``, ``torch.compile`` and ``donate=True``.

    Raises:
        TypeError: the constructor does not return a state and a step as described; at `update`, the step returns its
            state in other containers.
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
    """
    if reads_params not in (True, False, "updated"):
        raise TypeError(f'leafwise: reads_params must be True, False or "updated", found {reads_params!r}')

    def decorate(constructor: Callable[..., StateAndStep]) -> Callable[..., Transform]:
        def declared(*args: object, **kwargs: object) -> tuple[PyTree, Step]:
            returned = constructor(*args, **kwargs)
            return state_and_step(f"{constructor.__name__}: a leafwise", returned, StepCount, reads_params)

        @functools.wraps(constructor)
        def build(*args: object, **kwargs: object) -> InitAndUpdate:
            return _functions(constructor.__name__, *declared(*args, **kwargs), reads_params)

        def find_locality(*args: object, **kwargs: object) -> Locality:
            state, _ = declared(*args, **kwargs)
            dtypes = [slot.dtype for slot in tree.leaves(state) if isinstance(slot, Slot)]
            is_quantized = any(isinstance(dtype, QuantizedDtype) for dtype in dtypes)
            return max(locality, Locality.LEAF) if is_quantized else locality  # the elements of a block share a scale

        decorator = transform(
            locality=find_locality, reads_params=bool(reads_params), position=position, short_names=short_names
        )
        return decorator(build)

    return decorate if constructor is None else decorate(constructor)


def state_and_step(kind: str, found: object, other: type, reads_params: ReadsParams) -> tuple[PyTree, Step]:
    """Return a constructor's state and step. Raise an error if the state has items other than `Slot` and ``other``."""
    if not (type(found) is tuple and len(found) == 2 and callable(found[1])):
        raise TypeError(f"{kind} constructor returns a state and a step, found {found!r}")
    for where, field in zip(tree.names(found[0]), tree.leaves(found[0]), strict=True):
        if not isinstance(field, (Slot, other)):
            raise TypeError(
                f"{kind} constructor returns a state of Slot and {other.__name__}, found {field!r} at {where!r}"
            )
        if isinstance(field, Slot) and field.start == "params" and not reads_params:
            raise TypeError(
                f"{kind} constructor whose slot {where!r} starts at the parameters declares reads_params=True"
            )
    return found


def _functions(name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> InitAndUpdate:
    """Build ``init`` and ``update`` of a `leafwise` transform from its declared state and its step."""
    named = zip(tree.leaves(declared), tree.names(declared), strict=True)
    fields = [SlotTrees(field, role) if isinstance(field, Slot) else None for field, role in named]
    is_tree = [field is not None for field in fields]
    kept: list[StepPlan] = []

    def plan_for(held: list[PyTree]) -> StepPlan:
        # If no scalar is a tensor (such as a count), the plan is the same at every call. A compiled graph would guard
        # on a plan that is kept.
        may_keep = all(is_tree) and not torch.compiler.is_compiling()
        if may_keep and kept:
            return kept[0]
        made = record_step(name, declared, step, held, is_tree, bool(reads_params))
        if may_keep and not made.may_vary:
            kept.append(made)
        return made

    def init(params: PyTree) -> PyTree:
        made = [ew.new_count(device_of(params)) if field is None else field.init(params) for field in fields]
        return tree.unflatten(tree.flatten(declared)[1], made)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ) -> tuple[PyTree, PyTree]:
        at, containers = Present(updates), tree.flatten(declared)[1]
        held = tree.subtrees(containers, state)
        operands, may_write = [at.pick(updates)], [donate.updates]
        sources: list[int] = []  # the operand that each field of the state replaces
        for field, own in zip(fields, held, strict=True):
            sources.append(len(operands))
            if field is not None:
                operands.append(field.read(at, own))
                may_write.append(donate.state or field.reads_copies)
        if reads_params:
            params = params_for(name, params)
            operands.append(at.pick(apply_updates(params, updates) if reads_params == "updated" else params))
            may_write.append(False)

        planned = plan_for(held)
        values = Values(planned, operands, may_write)
        pairs = list(zip(planned.state, sources, strict=True))
        unchanged = [(planned.update, 0), *pairs]
        taken = [source for output, source in unchanged if isinstance(output, int) and output == source]
        for number, (field, (output, source)) in enumerate(zip(fields, pairs, strict=True)):
            if field is None or isinstance(output, Tensor):
                held[number] = output
            elif output != source:
                values.check(output, operands[source], at, f"{name}: the step returns a state")
                wide, reuse = values.take(output, taken), donate.state and values.was_cast[source]
                held[number] = field.write(at, wide, operands[source], held[number], reuse=reuse)
                taken.append(output)
        if planned.update != 0:
            values.check(planned.update, operands[0], at, f"{name}: the step returns an update")
            updates = at.fill(ew.cast_like(values.take(planned.update, taken, spare=0), operands[0]))
        return updates, tree.unflatten(containers, held)

    return init, update


def params_for(name: str, params: PyTree) -> PyTree:
    """Return the parameters, or raise an error that names the transform if they are None."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return params


def _compute_dtypes(lists: Sequence[list[Tensor]]) -> list[torch.dtype | list[torch.dtype]]:
    """Return the compute dtypes of the operands: for each leaf, the widest dtype of its operands, at least fp32."""
    kinds = {x.dtype for xs in lists for x in xs}
    if len(kinds) <= 1 or all(len({x.dtype for x in xs}) <= 1 for xs in lists):
        return [ew.wide_dtype(*kinds)] * len(lists)
    return [[ew.wide_dtype(*[x.dtype for x in xs]) for xs in zip(*lists, strict=True)]] * len(lists)


class Values:
    """The values that the recorded operations (a `StepPlan`) compute, each as a list with one tensor for each leaf."""

    def __init__(self, plan: StepPlan, operands: list[list[Tensor]], may_write: list[bool]) -> None:
        self._operands, self._dtypes = operands, _compute_dtypes(operands)
        self._lists: list[list[Tensor] | None] = [None] * len(plan.uses)
        self._may_write = may_write + [False] * (len(plan.uses) - len(operands))
        self._uses = list(plan.uses)
        self._unsure = plan.unsure
        self.was_cast = [False] * len(operands)
        """For each operand, whether converting its dtype made copies of all its tensors."""
        numbers = [number for _, operation in plan.operations for number in operation.scalars]
        with ew.unrecorded(*operands, numbers):
            for place, operation in plan.operations:
                self._lists[place] = self._compute(operation)
                self._may_write[place] = operation.overwrites is not None

    def read(self, place: int) -> list[Tensor]:
        """Return the value of number ``place``, a list with one tensor for each leaf, in the compute dtype."""
        values = self._lists[place]
        if values is None:
            given = self._operands[place]
            values = self._lists[place] = ew.cast(given, self._dtypes[place])
            self.was_cast[place] = all(map(is_not, values, given))
            self._may_write[place] = self._may_write[place] or self.was_cast[place]
        return values

    def _compute(self, operation: Operation) -> list[Tensor]:
        """Run one operation on the lists of all leaves; overwrite an operand if allowed and no longer needed."""
        function, operands, scalars, overwrites = operation
        lists: list[list[Tensor]] = []
        for place in operands:
            values = self._lists[place]
            lists.append(self.read(place) if values is None else values)
        if overwrites is None:
            result = function(*lists, *scalars)
            for place in operands:
                self._may_write[place] = False  # the result may be a view of it
        else:
            target = operands[overwrites]
            reuse = self._may_write[target] and self._uses[target] == 1
            result = function(*lists, *scalars, reuse=reuse)
            self._may_write[target] = self._may_write[target] and not reuse
        for place in operands:
            self._uses[place] -= 1
            if not self._uses[place] and place >= len(self._operands):
                self._lists[place] = None
        return result

    def check(self, place: int, like: Sequence[Tensor], at: Present, what: str) -> None:
        """Raise an error that starts with ``what`` if a value is complex or has other shapes than ``like``."""
        for number, (made, own) in enumerate(zip(self.read(place), like, strict=True) if place in self._unsure else ()):
            if made.is_complex():
                raise TypeError(
                    f"{what} of {made.dtype} for {at.names()[number]!r}, expected real numbers; take torch.abs or "
                    "torch.real first"
                )
            if made.shape != own.shape:
                raise ValueError(
                    f"{what} of shape {tuple(made.shape)} for {at.names()[number]!r}, expected its shape "
                    f"{tuple(own.shape)}: use muonfx.transform if intermediate results change shapes"
                )

    def take(self, place: int, taken: Sequence[int], spare: int | None = None) -> list[Tensor]:
        """Return an output as a list of tensors, copied if the caller owns their storage or another output has them."""
        values = self.read(place)
        if self._may_write[place] and place not in taken:
            return values
        # Reuse the storage of an operand that is no longer needed.
        if spare is not None and self._may_write[spare] and not self._uses[spare]:
            return ew.copy(values, into=self.read(spare))
        return ew.clone(values)
