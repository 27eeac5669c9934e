"""`visit`: the one walk over a transform and the transforms that it calls.

For given parameters it finds which leaves each transform receives, where its state is in the state of the outermost
transform, and what its numbers are called. Nothing depends on values, so meta tensors suffice as parameters.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muonfx import tree
from muonfx.core.chain import chain, chain_entries
from muonfx.core.extras import EXTRAS_OVER_RANKS
from muonfx.core.partition import partition
from muonfx.core.transform import Declaration, Locality, ShortNames, Transform
from muonfx.core.value import (
    Recorded,
    joined_name,
    make_factory,
    named_numbers,
    part_names,
    prepared,
)
from muonfx.tree import PyTree

Path = tuple[Any, ...]

stand_in = functools.partial(make_factory, Transform, declaration=Declaration(), is_stand_in=True)
"""A decorator for transforms that take the place of their only argument: they have its name, numbers and state."""


@dataclass(frozen=True)
class OwnNumbers:
    """The names of a transform's own hyperparameters, without hyperparameters of the transforms that it calls."""

    names: tuple[str, ...]
    """Dotted names in the outermost transform, such as "muon.momentum.decay", in order."""
    keys: tuple[str, ...]
    """`names` without labels, such as "momentum.decay": the keys in an optimizer's groups."""
    short_names: ShortNames
    """Short keys that the author declares, such as "lr", with the dotted name; a tuple of names for several numbers."""

    @classmethod
    def of(cls, tx: Transform, name: str, key: str) -> OwnNumbers:
        """Return the names of the hyperparameters of one transform.

        ``name`` is its dotted name in the outermost transform, and ``key`` this name without the labels of partitions.
        Both are needed: groups of an optimizer have a number of each label under one key.

        >>> numbers = OwnNumbers.of(mfx.momentum(), name="muon.momentum", key="momentum")
        >>> numbers.names, numbers.keys
        (('muon.momentum.decay',), ('momentum.decay',))
        """
        numbers = _own_numbers(tx)  # ["decay"]
        names = [joined_name(name, number) for number in numbers]
        keys = [joined_name(key, number) for number in numbers]
        name_of = dict(zip(numbers, names, strict=True))  # {"decay": "muon.momentum.decay"}
        return cls(tuple(names), tuple(keys), _short_names(tx.declaration.short_names, name_of))


def _short_names(declared: ShortNames, name_of: Mapping[str, str]) -> ShortNames:
    """Return the full names of the numbers to which an author has given short names, by short name.

    ``declared`` has the arguments of each short name, and ``name_of`` the full name of each argument that is a number.
    In the example, ``eps`` is None and not a number, so it has no name.

    >>> _short_names({"eps": "eps", "betas": ("b1", "b2")}, {"b1": "adam.b1", "b2": "adam.b2"})
    {'betas': ('adam.b1', 'adam.b2')}
    """
    short_names: dict[str, str | tuple[str, ...]] = {}
    for short_name, arguments in declared.items():
        if isinstance(arguments, str):
            if arguments in name_of:
                short_names[short_name] = name_of[arguments]
        elif name_of.keys() >= set(arguments):
            short_names[short_name] = tuple([name_of[argument] for argument in arguments])
    return short_names


@dataclass(frozen=True, eq=False)
class Visit:
    """One transform that `visit` has found, with the part of the tree on which it works."""

    tx: Transform
    """The transform with all choices made that depend on names and shapes of its parameters (`Transform.resolve`)."""
    params: PyTree
    """The parameters that it receives."""
    state: Path | None
    """The path of its state in the outermost state, such as ``("muon", "momentum")``.

    None if it is called by a transform that is neither a chain nor a wrapper, and may store the state in any form.
    """
    name: str
    """Its dotted name in the outermost transform, such as "muon.momentum", which begins the names of its numbers."""
    key: str
    """`name` without the labels of partitions, such as "momentum"."""
    label: str | None
    """The label by which `partition` selects it, such as "muon"."""
    calls: tuple[Visit, ...] = field(repr=False)
    """The visits of the transforms that it calls, in order."""
    param_names: tuple[str, ...]
    """The dotted names of its parameters."""
    numbers: OwnNumbers
    """The names of its own hyperparameters."""

    @property
    def title(self) -> str:
        """The name to print: the dotted name, or for the outermost transform the name of its factory."""
        return self.name or self.tx.name


def _own_numbers(tx: Transform) -> list[str]:
    """Return the names of the numbers of a transform and of its schedules, without the numbers of inner transforms.

    >>> _own_numbers(mfx.momentum(0.9)), _own_numbers(mfx.chain(mfx.momentum(0.9)))
    (['decay'], [])
    >>> _own_numbers(mfx.scale_by_learning_rate(mfx.linear_schedule(1.0, 0.0, 100)))
    ['learning_rate.start', 'learning_rate.end']
    """
    names: list[str] = []
    for name, value in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(value, Transform):
            continue
        if isinstance(value, Recorded):  # a schedule
            names += list(named_numbers(value, name))
        else:
            names.append(name)
    return names


def visit(tx: Transform, params: PyTree) -> list[Visit]:
    """Return one `Visit` for a transform and for each transform that it calls: first the outer, then the inner ones.

    Args:
        tx: any transform.
        params: the whole parameters, not sharded; meta tensors suffice.

    >>> import torch
    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.cautious(mfx.momentum()), mfx.orthogonalize())
    >>> for visited in visit(tx, {"w": torch.zeros(4, 4)}):
    ...     print(visited.title, visited.state, visited.param_names)
    chain () ('w',)
    cautious ('cautious',) ('w',)
    cautious.inner None ('w',)
    orthogonalize ('orthogonalize',) ('w',)
    """
    return _with_inner(root_visit(tx, params))


def _with_inner(outer: Visit) -> list[Visit]:
    """Return a list of a visit and then of the visits of the transforms that it calls, at any depth."""
    visits = [outer]
    for inner in outer.calls:
        visits += _with_inner(inner)
    return visits


def root_visit(tx: Transform, params: PyTree) -> Visit:
    """Return the first `Visit` of `visit`, which has the others in its `calls`."""
    return _visit(tx, params, state=(), name="", key="", label=None)


def _visit(
    tx: Transform, params: PyTree, *, state: Path | None, name: str, key: str, label: str | None
) -> Visit:
    """Return a `Visit` that describes a transform within the outermost one, and in it the visits of inner transforms.

    For the `momentum` of ``partition({"muon": chain(momentum(), ...)}, labels)``, the arguments are as below.

    Args:
        tx: the transform.
        params: the parameters that it receives, which have the label "muon".
        state: the path of its state in the whole state, ("muon", "momentum"). It differs from the name, for example for
            a wrapper that stores the state of its inner transform as a field. None if it is not known.
        name: its dotted name, which begins the names of its numbers: "muon.momentum".
        key: the same without labels, since an optimizer has a group of parameters for each label: "momentum".
        label: the label of its parameters, if a partition calls it; None for the momentum, which a chain calls.
    """
    resolved = tx.resolve(params)  # choices that depend on names and shapes are made now
    calls: list[Visit] = []
    for call in _calls(resolved, params):
        inner_key = joined_name(key, call.argument)
        inner_label = None
        if resolved.factory is partition:  # the labels "muon" and "adamw" are left out of keys
            inner_key = key
            inner_label = call.argument
        inner_visit = _visit(
            call.tx,
            call.params,
            state=_joined_path(state, call.state),
            name=joined_name(name, call.argument),
            key=inner_key,
            label=inner_label,
        )
        calls.append(inner_visit)
    param_names = tuple(tree.names(params))
    # They are not computed later, on demand, because torch.compile cannot trace the lock of a cached property.
    numbers = OwnNumbers.of(resolved, name, key)
    return Visit(resolved, params, state, name, key, label, tuple(calls), param_names, numbers)


def _joined_path(path: Path | None, inner_path: Path | None) -> Path | None:
    """Return the path of a state within the state at another path; None if one of them is unknown."""
    if path is None or inner_path is None:
        return None
    return (*path, *inner_path)


# --------------------------------------------------------------------------------- how a transform calls its inner ones


class _Call(NamedTuple):
    """A call of an inner transform by the transform that contains it."""

    argument: str
    """The name of the inner transform: "inner", a label of `partition`, or the name of a chain's member."""
    tx: Transform
    params: PyTree
    """The parameters that the inner transform receives."""
    state: Path | None
    """The path of the inner state in the state of the caller; None if it is unknown, as in `Visit`."""


def _calls(tx: Transform, params: PyTree) -> list[_Call]:
    """Return the calls of inner transforms by ``tx``, in order. ``tx`` is resolved for ``params``.

    >>> tx = mfx.partition(
    ...     {"muon": mfx.momentum(), "adamw": mfx.scale(0.1)}, {"w": "muon", "b": "adamw"}
    ... )
    >>> for call in _calls(tx, {"w": torch.zeros(2), "b": torch.zeros(3)}):
    ...     print(call.argument, call.params, call.state)
    adamw {'b': tensor([0., 0., 0.])} ('adamw',)
    muon {'w': tensor([0., 0.])} ('muon',)
    """
    named_parts = zip(part_names(tx), tx.parts, strict=True)
    inner_transforms = [(name, part) for name, part in named_parts if isinstance(part, Transform)]
    if not inner_transforms:
        return []
    # A chain passes all parameters on, and stores the states by name.
    if tx.declaration.combinator.in_sequence:
        return [_Call(name, inner, params, (name,)) for name, inner in inner_transforms]
    # Any other transform is observed, so that its author need not declare what it does. Its `init` runs once with
    # substitutes of the inner transforms, which record the parameters that they receive, and return placeholders that
    # show where their state is.
    recorded = record_calls(tx, params, replaced=is_wrapper(tx))
    path_of = _placeholder_paths(recorded.state)
    calls: list[_Call] = []
    for index, (name, inner) in enumerate(inner_transforms):
        # All of them, if `init` does not call it.
        params_of_inner = recorded.params_of.get(index, params)
        path_of_state = path_of.get(index)  # None if its state is not stored as it is
        calls.append(_Call(name, inner, params_of_inner, path_of_state))
    return calls


def _placeholder_paths(state: PyTree) -> dict[int, Path]:
    """Find where a wrapper stores the states of its inner transforms: return a dict from their numbers to paths.

    The state was made with a `Placeholder`, which has the number, in place of each inner state. The state
    ``{"a": Placeholder(0)}`` gives ``{0: ("a",)}``.
    """
    path_of: dict[int, Path] = {}
    for leaf, path in zip(tree.leaves(state), tree.paths(state), strict=True):
        if isinstance(leaf, Placeholder):
            path_of[leaf.index] = path
    return path_of


def is_wrapper(tx: Transform) -> bool:
    """Return True if a transform calls others, and its own computation is elementwise or a sum over leaves.

    Such a wrapper can run on shards, while the inner transforms run on whole matrices. In its state, the state of each
    inner transform is one subtree.

    >>> tx = mfx.orthogonalize()
    >>> is_wrapper(mfx.accumulate(tx, 4)), is_wrapper(mfx.chain(tx)), is_wrapper(tx)
    (True, False, False)
    """
    combinator = tx.declaration.combinator
    if not tx.children or combinator.in_sequence:  # it calls none, or is a chain
        return False
    # It reads all leaves, which is allowed if it only sums over them.
    if combinator.own_locality is Locality.TREE:
        return sums_over_leaves(tx)
    return combinator.own_locality is Locality.ELEMENT


def delegates(tx: Transform) -> bool:
    """Return True for a chain or a wrapper: the transforms that it calls run where their own localities allow."""
    return chain_entries(tx) is not None or is_wrapper(tx)


def sums_over_leaves(tx: Transform) -> bool:
    """Return True if the update of a transform needs no more of other leaves than a sum over them."""
    return "sum_over_leaves" in tx.extras.named


def can_run_on_shards(tx: Transform) -> bool:
    """Return True if the update of a transform can run on shards, by an extra argument such as ``sum_over_leaves``."""
    return not EXTRAS_OVER_RANKS.isdisjoint(tx.extras.named)


@dataclass(frozen=True)
class Placeholder:
    """A leaf in a wrapper's state, in place of the state of the inner transform number `index`."""

    index: int


@stand_in
def _with_init(tx: Transform, init: Callable[[PyTree], PyTree]):
    """Take the place of a transform, with another ``init``. It is never updated."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        raise AssertionError("this transform is only initialized")

    return init, update


class RecordedInit(NamedTuple):
    """The state that the ``init`` of a transform returned, and the parameters that it passed to inner transforms."""

    state: PyTree
    """The state, with a `Placeholder` where the state of an inner transform would be."""
    params_of: dict[int, PyTree]
    """The parameters that each inner transform received, by its number."""


def _recording_init(
    index: int, inner: Transform, params_of: dict[int, PyTree], replaced: bool, params: PyTree
) -> PyTree:
    """Take the place of the ``init`` of the inner transform number ``index``: store its parameters in ``params_of``.

    Return a `Placeholder` with the index if the state is ``replaced`` by it, else the state of the inner transform.
    """
    params_of[index] = params
    if replaced:
        return Placeholder(index)
    return inner.functions.init(params)


def record_calls(tx: Transform, params: PyTree, *, replaced: bool = True) -> RecordedInit:
    """Run the ``init`` of a transform, with a recorder in place of each inner transform.

    A transform that computes with the states of inner transforms requires ``replaced=False``. They are then real states
    instead of placeholders.

    >>> import muonfx as mfx
    >>> tx = mfx.partition({"a": mfx.momentum(0.9), "b": mfx.scale(2.0)}, {"w": "a", "v": "b"})
    >>> recorded = record_calls(tx, {"w": torch.zeros(1), "v": torch.zeros(2)})
    >>> recorded.state
    {'a': Placeholder(index=0), 'b': Placeholder(index=1)}
    >>> recorded.params_of
    {0: {'w': tensor([0.])}, 1: {'v': tensor([0., 0.])}}
    """
    params_of: dict[int, PyTree] = {}
    recorders: list[Transform] = []
    for index, inner in enumerate(tx.children):
        init = functools.partial(_recording_init, index, inner, params_of, replaced)
        # A call of the factory would prepare a transform, but this one has no locality or extra arguments to find.
        factory: Any = _with_init
        recorders.append(Transform._record(factory, inner, init))
    tx_with_recorders = tx.with_children(recorders)
    with warnings.catch_warnings():  # init on the real parameters gives the warnings
        warnings.simplefilter("ignore")
        state = tx_with_recorders.functions.init(params)
    return RecordedInit(state, params_of)


# ----------------------------------------------------------------------------------------------- resolved transforms


def resolve_within(tx: Transform, params: PyTree) -> Transform:
    """Make each choice of a transform that depends on the names and shapes of parameters, and return the result.

    For example, a mask by name replaces the condition "has two dims", which shards could not evaluate. The result can
    update some of the leaves, with None for all others, or shards of them.
    """
    return fixed(root_visit(tx, params))


def fixed(visited: Visit) -> Transform:
    """Return the transform of a visit, in which each inner transform is replaced by its resolved form.

    For example, an inner transform that selects parameters by shape is replaced by one with a mask.
    """
    return with_inner(visited.tx, [fixed(inner_visit) for inner_visit in visited.calls])


def with_inner(tx: Transform, inner_transforms: Sequence[Transform]) -> Transform:
    """Return a transform that calls other transforms, given in the order of ``tx.children``; ``tx`` if none differs."""
    if all(map(operator.is_, inner_transforms, tx.children)):  # the same objects
        return tx
    member_names = chain_entries(tx)
    if member_names is None:
        return tx.with_children(inner_transforms)
    # The members keep their names.
    return as_chain(dict(zip(member_names, inner_transforms, strict=True)))


def as_chain(members: Mapping[str, Transform]) -> Transform:
    """Return a chain of transforms by name, without a check of their order, which another chain has checked before.

    A second check would repeat the warnings of the first.

    >>> as_chain({"rate": mfx.scale(-0.1)})
    chain(('rate', scale(factor=-0.1)))
    """
    # A call of `chain` does the same and then checks the order: it stores its arguments, and runs the constructor.
    factory: Any = chain
    return prepared(Transform._record(factory, *members.items()))
