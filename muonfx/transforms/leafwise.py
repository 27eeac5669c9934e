"""Transforms that work leaf by leaf, written as the arithmetic of one leaf.

The author's ``step`` is called once for a whole tree, with a `Leaf` for each operand, and records what is done with
them. That is a `_Plan`: each of its operations runs once on the lists of all leaves, in `muonfx.elementwise`. It knows
where every value is used for the last time, and so whose storage may be overwritten: the donation promise is kept
here, not by authors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, Literal, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from muonfx import checks, tree
from muonfx import elementwise as ew
from muonfx.arguments import check_plain, plain_kinds
from muonfx.compact import Compact
from muonfx.compact.state import Holder
from muonfx.core import NOTHING, Donation, Functions, Locality, Transform, apply_updates, transform
from muonfx.transforms._pinned import StateDtype, WideStateDtype, copies, new_count, store, zeros
from muonfx.tree import Present, PyTree, Structure, device_of

__all__ = ["Leaf", "Slot", "StepCount", "leafwise"]

Lists = Callable[..., list[Tensor]]
Casts = torch.dtype | list[torch.dtype] | None
"""The dtypes that the tensors of an operand are cast to: one for all, one for each, or None for as they are."""
ReadsParams = bool | Literal["updated"]
Step = Callable[..., tuple["Leaf", PyTree]]
Constructor = Callable[..., tuple[PyTree, Step]]


class _Operation(NamedTuple):
    """A function of lists that makes a value of those at some places, and of scalars."""

    function: Lists
    operands: list[int]
    scalars: Sequence[object]
    overwrites: int | None
    """The operand whose storage the function may ``reuse``."""
    is_fresh: bool
    """False where a result may be a view of an operand, or the operand itself."""
    has_leafs_shape: bool


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

    def __init__(self, record: list[_Operation | None], operation: _Operation | None = None) -> None:
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
        return cls(record, _Operation(function, places, scalars, overwrites, is_fresh, has_leafs_shape))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Leaf:
        """Record a function of torch; those that have a form for lists have a method here."""
        own = getattr(cls, function.__name__, None)
        if own is not None and isinstance(args[0], Leaf):
            return own(*args, **(kwargs or {}))
        return _each(function, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Leaf]:
        """Look up a method of tensors."""
        method = getattr(Tensor, name, None)
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

    def add(self, other: Any, *, alpha: Any = 1.0) -> Leaf:
        """Record ``self + alpha * other``."""
        if isinstance(other, Leaf):
            return Leaf._of(ew.add, (self, other), (alpha,), overwrites=0)
        return Leaf._of(ew.shift, (self,), (alpha * other,), overwrites=0)

    def sub(self, other: Any) -> Leaf:
        """Record ``self - other``."""
        return self.add(other, alpha=-1.0)

    def mul(self, other: Any) -> Leaf:
        """Record ``self * other``."""
        if isinstance(other, Leaf):
            return Leaf._of(functools.partial(ew.apply, "mul"), (self, other), overwrites=0)
        return Leaf._of(ew.mul, (self,), (other,), overwrites=0)

    def div(self, other: Any) -> Leaf:
        """Record ``self / other``."""
        if isinstance(other, Leaf):
            return Leaf._of(ew.div, (self, other), overwrites=1)
        return _each(torch.div, self, other)

    def lerp(self, end: Any, weight: Any) -> Leaf:
        """Record ``self + weight * (end - self)``."""
        if isinstance(end, Leaf) and not isinstance(weight, Leaf):
            return Leaf._of(ew.lerp, (self, end), (weight,), overwrites=0)
        return _each(torch.lerp, self, end, weight)

    def addcmul(self, x: Any, y: Any, *, value: Any = 1.0) -> Leaf:
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


class _Gap:
    """Stands for a leaf among the arguments of a function of torch."""


_GAP = _Gap()


def _each(function: Callable[..., Any], *args: object, **kwargs: object) -> Leaf:
    """Record a function that is called once for each leaf."""
    found, treedef = tree.flatten((args, kwargs))
    # Not the leaves themselves: they know the record, and it would know them.
    template = [_GAP if isinstance(x, Leaf) else None for x in found]
    operands = [x for x in found if isinstance(x, Leaf)]
    count = len(operands)

    def call(*given: Any) -> list[Tensor]:
        results: list[Tensor] = []
        for tensors in zip(*given[:count], strict=True):
            leaves, others = iter(tensors), iter(given[count:])
            filled = [next(others) if place is None else next(leaves) for place in template]
            args, kwargs = tree.unflatten(treedef, filled)
            results.append(function(*args, **kwargs))
        return results

    others = [x for x in found if not isinstance(x, Leaf)]
    return Leaf._of(call, operands, others, is_fresh=False, has_leafs_shape=False)


class _Plan(NamedTuple):
    """The operations of a step that its outputs need, in the order in which they were written."""

    operations: list[tuple[int, _Operation]]
    """Each with the place of its result."""
    uses: list[int]
    """By place, how many operations and outputs use it."""
    is_fresh: list[bool]
    """By place, whether its storage is that of no operand, or it is an operand itself."""
    outputs: list[int]
    """The places of the update and of the new state's trees."""
    counts: list[Tensor]
    """The new state's scalars."""

    @property
    def has_tensors(self) -> bool:
        """True if a scalar is a tensor: it may be another at the next call, or the same of another graph."""
        return any(isinstance(scalar, Tensor) for _, operation in self.operations for scalar in operation.scalars)


def _plan(record: list[_Operation | None], made: Sequence[Leaf | Tensor]) -> _Plan:
    outputs = [leaf._place for leaf in made if isinstance(leaf, Leaf)]
    uses = [0] * len(record)
    for place in outputs:
        uses[place] += 1
    needed: list[tuple[int, _Operation]] = []
    for place in reversed(range(len(record))):
        operation = record[place]
        if operation is not None and uses[place]:
            needed.append((place, operation))
            for operand in operation.operands:
                uses[operand] += 1
    is_fresh = [operation is None or operation.is_fresh for operation in record]
    return _Plan(needed[::-1], uses, is_fresh, outputs, [count for count in made if isinstance(count, Tensor)])


class _Values:
    """The values of a plan, each a list of tensors; operands are cast when they are first read."""

    def __init__(self, plan: _Plan, operands: list[list[Tensor]], may_write: list[bool]) -> None:
        self._operands, self._casts, self._is_fresh = operands, _casts(operands), plan.is_fresh
        self._lists: list[list[Tensor] | None] = [None] * len(plan.uses)
        self._may_write = may_write + [False] * (len(plan.uses) - len(operands))
        self._uses = list(plan.uses)
        self.was_cast = [False] * len(operands)
        """By operand, whether the values that were read are copies, every one."""
        for place, operation in plan.operations:
            self._lists[place] = self._compute(operation)
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

    def _compute(self, operation: _Operation) -> list[Tensor]:
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
        is_ours = self._is_fresh[place] and (self._may_write[place] or place >= len(self._operands))
        if is_ours and place not in taken:
            return values
        if spare is not None and self._may_write[spare] and not self._uses[spare]:
            return ew.copy(values, into=self.read(spare))
        return ew.clone(values)


# Looked up once: a slot is made anew wherever a compiled step rebuilds its transform.
_STR, _BOOL = plain_kinds("str"), plain_kinds("bool")


@dataclass(frozen=True)
class Slot:
    """A tree of a transform's state, like the parameters, in a pinned dtype.

    Args:
        dtype: "auto" for at least fp32 and never narrower than the parameter, a floating dtype for all, None for each
            parameter's own, or a compact one such as `int8`.
        argument: the argument that pins it, for errors.
        start: "zeros", or "params" for a copy of the parameters.
        signed: whether elements may be negative; only a compact dtype cares.

    Raises:
        TypeError: the dtype is neither floating point nor compact nor None, or another argument has the wrong type.
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
        """Check the arguments."""
        check_plain("Slot", "argument", self.argument, _STR)
        check_plain("Slot", "signed", self.signed, _BOOL)
        if not isinstance(self.dtype, Compact):
            checks.state_dtype(self.argument, self.dtype)
        if self.start not in ("zeros", "params"):
            raise ValueError(f'Slot: start must be "zeros" or "params", found {self.start!r}')


@dataclass(frozen=True)
class StepCount:
    """A scalar of a transform's state that all leaves share: a 0-d int64 tensor that starts at zero.

    >>> import muonfx as mfx
    >>> mfx.scale_by_adam().init({"w": torch.zeros(2)}).count
    tensor(0)
    """


class _Trees:
    """Makes, reads and writes the tree that a `Slot` declares."""

    def __init__(self, slot: Slot, role: str) -> None:
        self._slot = slot
        self._holder = Holder(slot.dtype, role, signed=slot.signed) if isinstance(slot.dtype, Compact) else None

    def init(self, params: PyTree) -> PyTree:
        if self._holder is not None:
            return self._holder.zeros(params) if self._slot.start == "zeros" else self._holder.of(params)
        dtype = cast("WideStateDtype", self._slot.dtype)
        return zeros(params, dtype) if self._slot.start == "zeros" else copies(params, dtype)

    def read(self, at: Present, held: PyTree) -> tuple[list[Tensor], bool]:
        """Values at some places, and whether they are fresh."""
        return (at.pick(held), False) if self._holder is None else (self._holder.read(at, held), True)

    def write(self, at: Present, values: list[Tensor], old: list[Tensor], held: PyTree, *, reuse: bool) -> PyTree:
        """Round values to the pinned dtype; with ``reuse``, into the storage of the old ones."""
        if self._holder is not None:
            return self._holder.write(at, values, held)
        return at.fill(store(values, old, reuse=reuse), held)


def _casts(lists: Sequence[list[Tensor]]) -> list[Casts]:
    """The dtype to compute in, for each list or its leaves: the widest of a leaf's operands, and at least fp32."""
    dtypes = [[x.dtype for x in xs] for xs in lists]
    kinds = [set(found) for found in dtypes]
    if all(len(kind) <= 1 for kind in kinds):
        wide = ew.wide_dtype(*[dtype for kind in kinds for dtype in kind])
        return [None if kind <= {wide} else wide for kind in kinds]
    return [[ew.wide_dtype(*each) for each in zip(*dtypes, strict=True)]] * len(lists)


def leafwise(
    constructor: Constructor | None = None,
    *,
    name: str | None = None,
    locality: Locality = Locality.ELEMENT,
    reads_params: ReadsParams = False,
    former_defaults: Mapping[str, Any] | None = None,
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
        former_defaults: as for `muonfx.transform`.

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
        def build(*args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
            state, step = _declared(constructor, reads_params, args, kwargs)
            return _functions(constructor.__name__, state, step, reads_params)

        def find_locality(*args: Any, **kwargs: Any) -> Locality:
            state, _ = _declared(constructor, reads_params, args, kwargs)
            slots = [field for field in tree.leaves(state) if isinstance(field, Slot)]
            is_compact = any(isinstance(slot.dtype, Compact) for slot in slots)
            return max(locality, Locality.LEAF) if is_compact else locality  # elements of one block share a scale

        return transform(
            build, name=name, locality=find_locality, reads_params=bool(reads_params), former_defaults=former_defaults
        )

    return decorate if constructor is None else decorate(constructor)


def _declared(
    constructor: Constructor, reads_params: ReadsParams, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[PyTree, Step]:
    """Call a constructor and check what it returns."""
    found: object = constructor(*args, **kwargs)
    what = f"{constructor.__name__}: a leafwise constructor"
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[1])):
        raise TypeError(f"{what} returns a state and a step, found {found!r}")
    for place, field in enumerate(tree.leaves(found[0])):
        if not isinstance(field, Slot | StepCount):
            where = tree.names(found[0])[place]
            raise TypeError(f"{what} returns a state of Slot and StepCount, found {field!r} at {where!r}")
        if isinstance(field, Slot) and field.start == "params" and not reads_params:
            where = tree.names(found[0])[place]
            raise TypeError(f"{what} with a slot that starts at the parameters, {where!r}, declares reads_params=True")
    return found


def _functions(name: str, declared: PyTree, step: Step, reads_params: ReadsParams) -> Functions:
    """Build ``init`` and ``update`` from a declared state and a step."""
    slots, treedef = tree.flatten(declared)
    named = zip(slots, tree.names(declared), strict=True) if slots else ()
    fields = [_Trees(field, role) if isinstance(field, Slot) else None for field, role in named]
    # A plan without scalars that are tensors, which a count would be, is the same at every call.
    kept: list[_Plan] = []

    def containers() -> Structure:
        return tree.flatten(declared)[1] if torch.compiler.is_compiling() else treedef  # traced code has its own kind

    def plan_for(held: list[PyTree]) -> _Plan:
        may_keep = None not in fields and not torch.compiler.is_compiling()  # a graph would be guarded by what is kept
        if may_keep and kept:
            return kept[0]
        record: list[_Operation | None] = []
        u = Leaf(record)
        p = [Leaf(record)] if reads_params else []
        old = [own if field is None else Leaf(record) for field, own in zip(fields, held, strict=True)]
        out, new_state = step(u, tree.unflatten(containers(), old), *p)
        plan = _plan(record, [out, *_fields(name, declared, out, new_state)])
        if may_keep and not plan.has_tensors:
            kept.append(plan)
        return plan

    def init(params: PyTree) -> PyTree:
        made = [new_count(device_of(params)) if field is None else field.init(params) for field in fields]
        return tree.unflatten(containers(), made)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ) -> tuple[PyTree, PyTree]:
        at, held = Present(updates), tree.subtrees(containers(), state)
        operands, may_write = [at.pick(updates)], [donate.updates]
        if reads_params:
            operands.append(at.pick(_params(name, params, updates, reads_params)))
            may_write.append(False)
        sources = [0]  # the operands in whose place the outputs come
        for field, own in zip(fields, held, strict=True):
            if field is not None:
                sources.append(len(operands))
                stored, is_fresh = field.read(at, own)
                operands.append(stored)
                may_write.append(donate.state or is_fresh)

        plan = plan_for(held)
        values = _Values(plan, operands, may_write)
        pairs = list(zip(plan.outputs, sources, strict=True))
        taken = [place for place, source in pairs if place == source]
        (out, _), *rest = pairs
        counts, places = iter(plan.counts), iter(rest)
        new_state: list[PyTree] = []
        for field, own in zip(fields, held, strict=True):
            if field is None:
                new_state.append(next(counts))
                continue
            place, source = next(places)
            if place != source:
                wide, reuse = values.take(place, taken), donate.state and values.was_cast[source]
                own = field.write(at, wide, operands[source], own, reuse=reuse)
                taken.append(place)
            new_state.append(own)
        if out != 0:
            updates = at.fill(ew.cast_like(values.take(out, taken, spare=0), operands[0]))
        return updates, tree.unflatten(containers(), new_state)

    return Functions(init, update)


def _params(name: str, params: PyTree, updates: PyTree, reads_params: ReadsParams) -> PyTree:
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return apply_updates(params, updates) if reads_params == "updated" else params


def _fields(name: str, declared: PyTree, out: object, new_state: PyTree) -> list[Leaf | Tensor]:
    """The fields of a new state, checked against those declared."""
    if not isinstance(out, Leaf):
        raise TypeError(f"{name}: the step returns an update of type {type(out).__name__}, not one made of operands")
    slots, containers = tree.flatten(declared)
    try:
        found = tree.subtrees(containers, new_state)
    except ValueError as error:
        wrong = f"{name}: the step returns a state {new_state!r}, not in the containers of {declared!r}"
        raise TypeError(wrong) from error
    for place, (field, leaf) in enumerate(zip(slots, found, strict=True)):
        if not isinstance(leaf, Leaf if isinstance(field, Slot) else Tensor):
            where = tree.names(declared)[place]
            found_type = "a Leaf" if isinstance(leaf, Leaf) else f"a {type(leaf).__name__}"
            raise TypeError(f"{name}: the step returns {found_type} for {where!r} of its state, declared as {field!r}")
    return found
