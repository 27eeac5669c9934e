"""Transforms that work leaf by leaf, written as the arithmetic of one leaf.

The author's ``step`` is called with a `Leaf` for each operand, which records the operations on it. It is called once,
or at every update if it reads tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, cast, overload

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import Compact
from muonfx.compact.state import Holder
from muonfx.core import Donation, InitAndUpdate, Locality, Transform, apply_updates, checks, transform
from muonfx.core.contract import NOTHING, Position
from muonfx.transforms._leaf import Leaf, Operation, Plan, Values, plan
from muonfx.transforms._pinned import StateDtype, WideStateDtype, copies, new_count, zeros
from muonfx.tree import Present, PyTree, Structure, device_of
from muonfx.tree import elementwise as ew
from muonfx.tree.arguments import check_plain, plain_kinds

__all__ = ["Leaf", "Slot", "SlotTrees", "StateAndStep", "StepCount", "leafwise", "params_for"]

ReadsParams = bool | Literal["updated"]
Step = Callable[..., tuple["Leaf", PyTree]]
StateAndStep = tuple[PyTree, Callable[..., tuple["Leaf", PyTree]]]
"""The pair that a function under `leafwise` returns: a state of `Slot` and `StepCount`, and the step of one leaf."""

Constructor = Callable[..., StateAndStep]

P = ParamSpec("P")


# Looked up once: compiled steps create slots whenever they rebuild a transform.
_STR, _BOOL = plain_kinds("str"), plain_kinds("bool")


@dataclass(frozen=True)
class Slot:
    """A tree of a transform's state, like the parameters, in a pinned dtype.

    Args:
        dtype: "auto" for at least fp32 and never narrower than the parameter, a floating dtype for all, None for each
            parameter's own, or a compact one such as `int8`.
        argument: the argument that pins it, for errors.
        start: "zeros", a number for every element, or "params" for a copy of the parameters.
        signed: whether elements may be negative; only a compact dtype cares.

    Raises:
        TypeError: the dtype is neither floating point nor compact nor None, or another argument has the wrong type.
        ValueError: the dtype is a string other than "auto", or ``start`` is another one than "zeros" and "params".

    >>> import muonfx as mfx
    >>> mfx.Slot(torch.bfloat16)
    Slot(dtype=torch.bfloat16, argument='dtype', start='zeros', signed=True)
    """

    dtype: StateDtype = "auto"
    argument: str = "dtype"
    start: Literal["zeros", "params"] | float | Tensor = "zeros"
    signed: bool = True

    def __post_init__(self) -> None:
        check_plain("Slot", "argument", self.argument, _STR)
        check_plain("Slot", "signed", self.signed, _BOOL)
        if not isinstance(self.dtype, Compact):
            checks.state_dtype(self.argument, self.dtype)
        if isinstance(self.start, str):
            if self.start not in ("zeros", "params"):
                raise ValueError(f'Slot: start must be "zeros", "params" or a number, found {self.start!r}')
        else:
            checks.finite("Slot: start", self.start)

    @property
    def starts_at_params(self) -> bool:
        """True if its first values are the parameters'."""
        return isinstance(self.start, str) and self.start == "params"


@dataclass(frozen=True)
class StepCount:
    """A scalar of a transform's state that all leaves share: a 0-d int64 tensor that starts at zero.

    >>> import muonfx as mfx
    >>> mfx.scale_by_adam().init({"w": torch.zeros(2)}).count
    tensor(0)
    """


class SlotTrees:
    """Creates, reads and writes the tree that a `Slot` declares."""

    def __init__(self, slot: Slot, role: str) -> None:
        self._slot = slot
        self._holder = Holder(slot.dtype, role, signed=slot.signed) if isinstance(slot.dtype, Compact) else None

    def init(self, params: PyTree) -> PyTree:
        """Return the first tree."""
        start, holder = self._slot.start, self._holder
        if isinstance(start, str):
            if holder is not None:
                return holder.zeros(params) if start == "zeros" else holder.of(params)
            dtype = cast("WideStateDtype", self._slot.dtype)
            return zeros(params, dtype) if start == "zeros" else copies(params, dtype)
        wide = zeros(params, "auto" if holder is not None else cast("WideStateDtype", self._slot.dtype))
        value = start.to(tree.device_of(params)) if isinstance(start, Tensor) else start
        filled = tree.map(lambda leaf: (leaf + value).to(leaf.dtype), wide)
        return filled if holder is None else holder.of(filled)

    def read(self, at: Present, held: PyTree) -> tuple[list[Tensor], bool]:
        """Return the values of the selected leaves, and whether they are fresh copies."""
        return (at.pick(held), False) if self._holder is None else (self._holder.read(at, held), True)

    def write(self, at: Present, values: list[Tensor], old: list[Tensor], held: PyTree, *, reuse: bool) -> PyTree:
        """Round values to the pinned dtype; with ``reuse``, into the storage of the old values."""
        if self._holder is not None:
            return self._holder.write(at, values, held)
        return at.fill(ew.store(values, old, reuse=reuse), held)


@overload
def leafwise(constructor: Callable[P, StateAndStep], /) -> Callable[P, Transform]: ...


@overload
def leafwise(
    *,
    name: str | None = None,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, StateAndStep]], Callable[P, Transform]]: ...


def leafwise(
    constructor: Constructor | None = None,
    *,
    name: str | None = None,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Any:
    """Make a factory of transforms from a function that returns a state and the arithmetic of one leaf.

    The state is a NamedTuple, dict or tuple of `Slot` (a tree like the parameters) and `StepCount` (a scalar). The
    arithmetic is ``step(u, s) -> (u, s)``, or ``step(u, s, p)`` with ``reads_params=True``: the update of one leaf, its
    state in the same containers, and its parameter, as `Leaf` values in the dtype to compute in: the widest of the
    three and at least fp32. Counts are 0-d tensors. What comes back is rounded to the update's dtype and to the pinned
    dtypes of the state.

    `muonfx.transform` is for what needs more: several leaves, shapes, named extras or other transforms.

    Args:
        constructor: the function. It validates its arguments, and its name becomes the transform's name.
        name: as for `muonfx.transform`.
        locality: what a step must see; ELEMENT unless said otherwise, and at least LEAF with a compact dtype.
        reads_params: whether the step takes the parameter; "updated" for the parameter as `apply_updates` leaves it
            with this update. A slot that starts at the parameters needs it too.
        position: as for `muonfx.transform`.
        short_names: as for `muonfx.transform`.

    Returns:
        A factory with the constructor's name, signature and docstring. Its transforms leave absent leaves alone, keep
        the donation promise and go through ``torch.func`` and ``torch.compile``. All leaves are done in one call for
        each operation.

    Raises:
        TypeError: the constructor does not return a state of slots and counts and a step, or at `update` the step
            returns other containers than it was given.
        ValueError: at `update`, the parameters are missing that the step reads.

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

    def decorate(constructor: Constructor) -> Callable[..., Transform]:
        @functools.wraps(constructor)
        def build(*args: object, **kwargs: object) -> InitAndUpdate:
            state, step = _declared(constructor, reads_params, args, kwargs)
            return _functions(constructor.__name__, state, step, reads_params)

        def find_locality(*args: object, **kwargs: object) -> Locality:
            state, _ = _declared(constructor, reads_params, args, kwargs)
            slots = [field for field in tree.leaves(state) if isinstance(field, Slot)]
            is_compact = any(isinstance(slot.dtype, Compact) for slot in slots)
            return max(locality, Locality.LEAF) if is_compact else locality  # the elements of a block share a scale

        decorator = transform(
            name=name,
            locality=find_locality,
            reads_params=bool(reads_params),
            position=position,
            short_names=short_names,
        )
        return decorator(build)

    return decorate if constructor is None else decorate(constructor)


def _declared(
    constructor: Constructor, reads_params: ReadsParams, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[PyTree, Step]:
    """Call a constructor and check its result."""
    found: object = constructor(*args, **kwargs)
    what = f"{constructor.__name__}: a leafwise constructor"
    if not (type(found) is tuple and len(found) == 2 and callable(found[1])):
        raise TypeError(f"{what} returns a state and a step, found {found!r}")
    for place, field in enumerate(tree.leaves(found[0])):
        if isinstance(field, StepCount) or (isinstance(field, Slot) and (reads_params or not field.starts_at_params)):
            continue
        where = tree.names(found[0])[place]
        if not isinstance(field, Slot):
            raise TypeError(f"{what} returns a state of Slot and StepCount, found {field!r} at {where!r}")
        raise TypeError(f"{what} with a slot that starts at the parameters, {where!r}, declares reads_params=True")
    return found


def _functions(name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> InitAndUpdate:
    """Build ``init`` and ``update`` from a declared state and a step."""
    slots, treedef = tree.flatten(declared)
    named = zip(slots, tree.names(declared), strict=True) if slots else ()
    fields = [SlotTrees(field, role) if isinstance(field, Slot) else None for field, role in named]
    # A plan is cached only if no scalar is a tensor (as counts are): it is then the same at every call.
    kept: list[Plan] = []

    def containers() -> Structure:
        return tree.flatten(declared)[1] if torch.compiler.is_compiling() else treedef  # tracing has its own treedefs

    def plan_for(held: list[PyTree]) -> Plan:
        may_keep = None not in fields and not torch.compiler.is_compiling()  # a compiled graph would guard on the cache
        if may_keep and kept:
            return kept[0]
        record: list[Operation | None] = []
        u = Leaf(record)
        p = [Leaf(record)] if reads_params else []
        old = [own if field is None else Leaf(record) for field, own in zip(fields, held, strict=True)]
        returned: object = step(u, tree.unflatten(containers(), old), *p)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"{name}: the step must return (update, state), found {_shape_of(returned)}")
        out, new_state = returned
        made = plan(record, [out, *_fields(name, declared, out, new_state)])
        if may_keep and not made.has_tensors:
            kept.append(made)
        return made

    def init(params: PyTree) -> PyTree:
        made = [new_count(device_of(params)) if field is None else field.init(params) for field in fields]
        return tree.unflatten(containers(), made)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ) -> tuple[PyTree, PyTree]:
        at, top = Present(updates), containers()
        held = tree.subtrees(top, state)
        operands, may_write = [at.pick(updates)], [donate.updates]
        if reads_params:
            operands.append(at.pick(params_for(name, params, updates, reads_params)))
            may_write.append(False)
        sources = [0]  # the operand that each output replaces
        for field, own in zip(fields, held, strict=True):
            if field is not None:
                sources.append(len(operands))
                stored, is_fresh = field.read(at, own)
                operands.append(stored)
                may_write.append(donate.state or is_fresh)

        planned = plan_for(held)
        values = Values(planned, operands, may_write)
        pairs = list(zip(planned.outputs, sources, strict=True))
        taken = [place for place, source in pairs if place == source]
        (out, _), *rest = pairs
        counts, places = iter(planned.counts), iter(rest)
        new_state: list[PyTree] = []
        for field, own in zip(fields, held, strict=True):
            if field is None:
                new_state.append(next(counts))
                continue
            place, source = next(places)
            if place != source:
                values.check(place, operands[source], at, f"{name}: the step returns a state")
                wide, reuse = values.take(place, taken), donate.state and values.was_cast[source]
                own = field.write(at, wide, operands[source], own, reuse=reuse)
                taken.append(place)
            new_state.append(own)
        if out != 0:
            values.check(out, operands[0], at, f"{name}: the step returns an update")
            updates = at.fill(ew.cast_like(values.take(out, taken, spare=0), operands[0]))
        return updates, tree.unflatten(top, new_state)

    return init, update


def params_for(name: str, params: PyTree, updates: PyTree, reads_params: ReadsParams) -> PyTree:
    """Return the parameters that a step reads; raise if they are missing."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return apply_updates(params, updates) if reads_params == "updated" else params


def _shape_of(state: object) -> str:
    """Describe the outermost container of a state for an error message."""
    if isinstance(state, dict):
        return f"a dict of {', '.join(map(repr, state)) or 'nothing'}"
    if state is None:
        return "None"
    return f"a {type(state).__name__}" + (f" of {len(state)}" if isinstance(state, tuple | list) else "")


def _fields(name: str, declared: PyTree, out: object, new_state: PyTree) -> list[Leaf | Tensor]:
    """Return the fields of a new state after comparing them with the declared fields."""
    if not isinstance(out, Leaf):
        raise TypeError(f"{name}: the step returns an update of type {type(out).__name__}, not one made of operands")
    slots, containers = tree.flatten(declared)
    try:
        found = tree.subtrees(containers, new_state)
    except ValueError as error:
        raise TypeError(
            f"{name}: the step returns a state of {_shape_of(new_state)}, and {_shape_of(declared)} was declared"
        ) from error
    for place, (field, leaf) in enumerate(zip(slots, found, strict=True)):
        if not isinstance(leaf, Leaf if isinstance(field, Slot) else Tensor):
            where = tree.names(declared)[place]
            found_type = "a Leaf" if isinstance(leaf, Leaf) else f"a {type(leaf).__name__}"
            raise TypeError(f"{name}: the step returns {found_type} for {where!r} of its state, declared as {field!r}")
    return found
