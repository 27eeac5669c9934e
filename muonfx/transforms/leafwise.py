"""Transforms that work leaf by leaf, written as the arithmetic of one leaf.

The author's ``step`` is called once for a whole tree, with a `Leaf` for each operand. A `Leaf` records what is done
with it; when the step has returned, each recorded operation runs once on the lists of all leaves, in
`muonfx.elementwise`. By then it is known where every value is used for the last time, and so whose storage may be
overwritten: the donation promise is kept here, not by authors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor

from muonfx import checks, tree
from muonfx import elementwise as ew
from muonfx.arguments import check_plain, plain_kinds
from muonfx.compact import Compact
from muonfx.compact.state import Holder
from muonfx.core import Donation, Locality, Transform, apply_updates, transform
from muonfx.core.contract import NOTHING
from muonfx.transforms._pinned import StateDtype, WideStateDtype, copies, new_count, store, zeros
from muonfx.tree import Present, PyTree, device_of

__all__ = ["Leaf", "Slot", "StepCount", "leafwise"]

Lists = Callable[..., list[Tensor]]
Casts = torch.dtype | list[torch.dtype] | None
"""The dtypes that the tensors of an operand are cast to: one for all, one for each, or None for as they are."""
ReadsParams = bool | Literal["updated"]
Step = Callable[..., tuple["Leaf", PyTree]]
Constructor = Callable[..., tuple[PyTree, Step]]


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

    _record: list[Leaf]
    _operands: Sequence[Leaf] = ()
    _values: Sequence[Tensor] = ()
    _may_write = False
    _uses = 0
    _is_fresh = True
    _has_leafs_shape = True

    def __init__(
        self,
        function: Lists,
        operands: Sequence[Leaf],
        scalars: Sequence[Any] = (),
        *,
        overwrites: int | None = None,
        is_fresh: bool = True,
        has_leafs_shape: bool = True,
    ) -> None:
        """Record a function of lists; it may ``reuse`` the storage of the operand that it ``overwrites``.

        A result is not ``is_fresh`` where it may be a view of an operand, or the operand itself.
        """
        self._function, self._operands, self._scalars, self._overwrites = function, operands, scalars, overwrites
        self._is_fresh, self._has_leafs_shape = is_fresh, has_leafs_shape
        for operand in operands:
            self._record = operand._record
            self._has_leafs_shape = self._has_leafs_shape and operand._has_leafs_shape
        self._record.append(self)

    def _count_uses(self) -> None:
        self._uses += 1
        if self._uses == 1:
            for operand in self._operands:
                operand._count_uses()

    def _read(self) -> list[Tensor]:
        return cast("list[Tensor]", self._values)

    def _compute(self) -> None:
        """Run the recorded function, in storage that it is the last to use where it can."""
        lists = [operand._read() for operand in self._operands]
        if self._overwrites is None:
            self._values = self._function(*lists, *self._scalars)
        else:
            target = self._operands[self._overwrites]
            reuse = self._has_leafs_shape and target._may_write and target._uses == 1
            self._values = self._function(*lists, *self._scalars, reuse=reuse)
            target._may_write = target._may_write and not reuse
        self._may_write = self._is_fresh and self._has_leafs_shape
        for operand in self._operands:
            operand._uses -= 1
            operand._may_write = operand._may_write and self._is_fresh
            if not operand._uses and not isinstance(operand, _Operand):
                operand._values = ()

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
            return Leaf(ew.add, (self, other), (alpha,), overwrites=0)
        return Leaf(ew.shift, (self,), (alpha * other,), overwrites=0)

    def sub(self, other: Any) -> Leaf:
        """Record ``self - other``."""
        return self.add(other, alpha=-1.0)

    def mul(self, other: Any) -> Leaf:
        """Record ``self * other``."""
        if isinstance(other, Leaf):
            return Leaf(functools.partial(ew.apply, "mul"), (self, other), overwrites=0)
        return Leaf(ew.mul, (self,), (other,), overwrites=0)

    def div(self, other: Any) -> Leaf:
        """Record ``self / other``."""
        if isinstance(other, Leaf):
            return Leaf(ew.div, (self, other), overwrites=1)
        return _each(torch.div, self, other)

    def lerp(self, end: Any, weight: Any) -> Leaf:
        """Record ``self + weight * (end - self)``."""
        if isinstance(end, Leaf) and not isinstance(weight, Leaf):
            return Leaf(ew.lerp, (self, end), (weight,), overwrites=0)
        return _each(torch.lerp, self, end, weight)

    def addcmul(self, x: Any, y: Any, *, value: Any = 1.0) -> Leaf:
        """Record ``self + value * x * y``."""
        if isinstance(x, Leaf) and isinstance(y, Leaf):
            return Leaf(ew.addcmul, (self, x, y), (value,), overwrites=0)
        return _each(torch.addcmul, self, x, y, value=value)

    def sqrt(self) -> Leaf:
        """Record the square root."""
        return Leaf(functools.partial(ew.apply, "sqrt"), (self,), overwrites=0)

    def sign(self) -> Leaf:
        """Record the sign."""
        return Leaf(functools.partial(ew.apply, "sign"), (self,), overwrites=0)

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


class _Operand(Leaf):
    """An update, a parameter or a tree of the state as a step is given it; cast when it is first read."""

    was_cast = False
    """True if the values are fresh copies, every one."""

    def __init__(self, given: list[Tensor], casts_to: Casts, record: list[Leaf], may_write: bool = False) -> None:
        self.given, self._casts_to, self._record, self._may_write = given, casts_to, record, may_write

    def _read(self) -> list[Tensor]:
        if self._casts_to is None:
            return self.given
        if not self._values:
            self._values = ew.cast(self.given, self._casts_to)
            self.was_cast = all(map(is_not, self._values, self.given))
            self._may_write = self._may_write or self.was_cast
        return cast("list[Tensor]", self._values)


def _each(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Leaf:
    """Record a function that is called once for each leaf."""
    found, treedef = tree.flatten((args, kwargs))
    operands = [leaf for leaf in found if isinstance(leaf, Leaf)]

    def call(*lists: list[Tensor]) -> list[Tensor]:
        results: list[Tensor] = []
        for tensors in zip(*lists, strict=True):
            rest = iter(tensors)
            given = [next(rest) if isinstance(leaf, Leaf) else leaf for leaf in found]
            args, kwargs = tree.unflatten(treedef, given)
            results.append(function(*args, **kwargs))
        return results

    return Leaf(call, operands, is_fresh=False, has_leafs_shape=False)


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

    def write(self, at: Present, values: list[Tensor], operand: _Operand, held: PyTree, *, reuse: bool) -> PyTree:
        """Round values to the pinned dtype; with ``reuse``, into the state's old storage if nothing else lies there."""
        if self._holder is not None:
            return self._holder.write(at, values, held)
        return at.fill(store(values, operand.given, reuse=reuse and operand.was_cast), held)


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
        former_defaults: as for `muonfx.transform`.
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
        def build(*args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
            state, step = _declared(constructor, reads_params, args, kwargs)
            return _functions(constructor.__name__, state, step, reads_params)

        def find_locality(*args: Any, **kwargs: Any) -> Locality:
            state, _ = _declared(constructor, reads_params, args, kwargs)
            slots = [field for field in tree.leaves(state) if isinstance(field, Slot)]
            is_compact = any(isinstance(slot.dtype, Compact) for slot in slots)
            return max(locality, Locality.LEAF) if is_compact else locality  # elements of one block share a scale

        return transform(
            build,
            name=name,
            locality=find_locality,
            reads_params=bool(reads_params),
            former_defaults=former_defaults,
            short_names=short_names,
        )

    return decorate if constructor is None else decorate(constructor)


def _declared(
    constructor: Constructor, reads_params: ReadsParams, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[PyTree, Step]:
    """Call a constructor and check what it returns."""
    found: Any = constructor(*args, **kwargs)
    what = f"{constructor.__name__}: a leafwise constructor"
    if not (type(found) is tuple and len(found) == 2 and callable(found[1])):
        raise TypeError(f"{what} returns a state and a step, found {found!r}")
    for field, where in zip(tree.leaves(found[0]), tree.names(found[0]), strict=True):
        if not isinstance(field, Slot | StepCount):
            raise TypeError(f"{what} returns a state of Slot and StepCount, found {field!r} at {where!r}")
        if isinstance(field, Slot) and field.start == "params" and not reads_params:
            raise TypeError(f"{what} with a slot that starts at the parameters, {where!r}, declares reads_params=True")
    return found


def _functions(
    name: str, declared: PyTree, step: Step, reads_params: ReadsParams
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Build ``init`` and ``update`` from a declared state and a step."""
    named = zip(tree.leaves(declared), tree.names(declared), strict=True)
    fields = [_Trees(field, role) if isinstance(field, Slot) else None for field, role in named]

    def init(params: PyTree) -> PyTree:
        made = [new_count(device_of(params)) if field is None else field.init(params) for field in fields]
        return tree.unflatten(tree.flatten(declared)[1], made)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING) -> Any:
        at, containers = Present(updates), tree.flatten(declared)[1]
        given, held = at.pick(updates), tree.subtrees(containers, state)
        pairs = list(zip(fields, held, strict=True))
        stored = [(None, False) if field is None else field.read(at, own) for field, own in pairs]
        weights = [at.pick(_params(name, params, updates, reads_params))] if reads_params else []

        record: list[Leaf] = []
        casts = iter(_casts([given, *weights, *[values for values, _ in stored if values is not None]]))
        u = _Operand(given, next(casts), record, donate.updates)
        p = [_Operand(values, next(casts), record) for values in weights]
        old = [
            own if values is None else _Operand(values, next(casts), record, donate.state or fresh)
            for (values, fresh), own in zip(stored, held, strict=True)
        ]
        out, new_state = step(u, tree.unflatten(containers, old), *p)
        new = _fields(name, declared, out, new_state)
        _compute(record, [out, *new])

        given_out = [leaf for leaf, operand in zip([out, *new], [u, *old], strict=True) if leaf is operand]
        kept: list[Any] = []
        for (field, own), leaf, operand in zip(pairs, new, old, strict=True):
            if field is None or leaf is operand:
                kept.append(leaf if field is None else own)
            else:
                values = ew.clone(leaf._read()) if _is_shared(leaf, given_out) else leaf._read()
                kept.append(field.write(at, values, operand, own, reuse=donate.state))
                given_out.append(leaf)
        new_state = tree.unflatten(containers, kept)
        if out is u:
            return updates, new_state
        values = out._read()
        if _is_shared(out, given_out):
            is_spare = u._may_write and not u._uses
            values = ew.copy(values, into=u._read()) if is_spare else ew.clone(values)
        return at.fill(ew.cast_like(values, given)), new_state

    return init, update


def _params(name: str, params: PyTree, updates: PyTree, reads_params: ReadsParams) -> PyTree:
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return apply_updates(params, updates) if reads_params == "updated" else params


def _compute(record: list[Leaf], outputs: list[Any]) -> None:
    """Run what was recorded, as far as the outputs need it, in the order in which it was written."""
    for leaf in outputs:
        if isinstance(leaf, Leaf):
            leaf._count_uses()
    for leaf in record:
        if leaf._uses:
            leaf._compute()
    record.clear()  # it refers to its leaves and they to it: a cycle would keep their tensors alive


def _is_shared(leaf: Leaf, given_out: list[Leaf]) -> bool:
    """True if storage of an output may be another's, or the caller's."""
    leaf._read()
    is_ours = leaf._is_fresh and (leaf._may_write or not isinstance(leaf, _Operand))
    return not is_ours or any(leaf is other for other in given_out)


def _fields(name: str, declared: PyTree, out: Any, new_state: PyTree) -> list[Any]:
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
