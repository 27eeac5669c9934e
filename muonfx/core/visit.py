"""`visit`: the one walk over a transform and the transforms that it calls.

For given parameters it finds which leaves each transform receives, where its state is in the state of the outermost
transform, and what its numbers are called. Nothing depends on values, so meta tensors suffice as parameters.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from muonfx import tree
from muonfx.core.chain import ORDER_IS_CHECKED, chain, chain_entries
from muonfx.core.extras import ON_PIECES
from muonfx.core.transform import Declaration, Locality, Transform
from muonfx.core.value import Recorded, dotted, joined_name, make_factory, part_names, parts_of, prepared
from muonfx.tree import PyTree

Path = tuple[Any, ...]

stand_in = functools.partial(make_factory, Transform, declaration=Declaration(), transparent=True)
"""A decorator for transforms that take the place of their only argument: they have its name, numbers and state."""


@dataclass(frozen=True)
class OwnNumbers:
    """The names of a transform's own hyperparameters, without hyperparameters of the transforms that it calls."""

    names: tuple[str, ...]
    """Dotted names in the outermost transform, such as "muon.momentum.decay", in order."""
    keys: tuple[str, ...]
    """`names` without labels, such as "momentum.decay": the keys in an optimizer's groups."""
    short_names: Mapping[str, str | tuple[str, ...]]
    """Short keys that the author declares, such as "lr", with the dotted name; a tuple of names for several numbers."""

    @classmethod
    def of(cls, tx: Transform, name: str, key: str) -> OwnNumbers:
        """Return the names for a transform with a dotted name, and a key (the name without labels)."""
        full_name_of: dict[str, str] = {}  # {"decay": "muon.momentum.decay"}
        keys: list[str] = []
        start_of_name = dotted(name)
        start_of_key = dotted(key)
        for argument in _own_numbers(tx):
            full_name_of[argument] = start_of_name + argument
            keys.append(start_of_key + argument)
        short_names: dict[str, str | tuple[str, ...]] = {}
        for short_name, declared in tx.declaration.short_names.items():
            arguments = (declared,) if isinstance(declared, str) else declared
            full_names = [full_name_of[argument] for argument in arguments if argument in full_name_of]
            if len(full_names) < len(arguments):  # one of the arguments is no number, but None or a schedule
                continue
            if isinstance(declared, str):
                short_names[short_name] = full_names[0]
            else:
                short_names[short_name] = tuple(full_names)
        return cls(tuple(full_name_of.values()), tuple(keys), short_names)


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
    names: tuple[str, ...]
    """The dotted names of its parameters."""
    numbers: OwnNumbers
    """The names of its own hyperparameters."""

    @property
    def title(self) -> str:
        """The name to print: the dotted name, or for the outermost transform the name of its factory."""
        return self.name or self.tx.name


def _own_numbers(tx: Transform) -> list[str]:
    """Return the names of a transform's numbers that belong to no inner transform, such as "schedule.peak"."""
    names: list[str] = []
    for name, value in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(value, Transform):
            continue
        if isinstance(value, Recorded):  # a schedule
            names += [number for number, _ in parts_of(value, name)]
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
    ...     print(visited.title, visited.state, visited.names)
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


def _visit(tx: Transform, params: PyTree, *, state: Path | None, name: str, key: str, label: str | None) -> Visit:
    """Return the visit of a transform, with those of the transforms that it calls; arguments are fields of `Visit`.

    Example: for ``cautious(momentum())`` in a chain, the inner visit has the name "cautious.inner" and no path of the
    state of its own, since the wrapper may store it in any form.
    """
    resolved = tx.resolve(params)
    calls: list[Visit] = []
    for call in calls_of(resolved, params):
        inner_name = joined_name(name, call.argument)
        inner_key = joined_name(key, call.argument)
        if call.label is not None:  # a key has no labels, so it is the same for "muon" and "adamw"
            inner_key = key
        inner_state = None
        if state is not None and call.state is not None:
            inner_state = (*state, *call.state)
        inner = _visit(call.tx, call.params, state=inner_state, name=inner_name, key=inner_key, label=call.label)
        calls.append(inner)
    names = tuple(tree.names(params))
    # Not computed later, on demand: torch.compile cannot trace the lock of a cached property.
    numbers = OwnNumbers.of(resolved, name, key)
    return Visit(resolved, params, state, name, key, label, tuple(calls), names, numbers)


def check_resolved_extras(visits: Iterable[Visit], extras: Mapping[str, Any]) -> None:
    """Raise if a resolved transform cannot use one of the extra arguments of a step, such as ``max_logits``.

    `muonfx.core.transform.check_extras` checks the names of extra arguments, without knowing the parameters.
    """
    if not extras or torch.compiler.is_compiling():  # a trace has no values to check
        return
    for visited in visits:
        check = visited.tx.declaration.check_extras
        if check is not None:
            check(visited.tx, extras)


# --------------------------------------------------------------------------------- how a transform calls its inner ones


@dataclass(frozen=True)
class Call:
    """A transform that another one calls, and the parameters that it passes on."""

    tx: Transform
    argument: str
    """The name of the inner transform among the arguments: "inner", or a member of a chain or a dict."""
    params: PyTree
    state: Path | None
    """The path of the inner state in the state of the caller; None if it is unknown, as in `Visit`."""
    label: str | None


def calls_of(tx: Transform, params: PyTree) -> list[Call]:
    """Return the transforms that ``tx`` calls, in order. ``tx`` is resolved for ``params``.

    A chain passes all parameters to each member. Any other transform shows what it passes, and where it stores the
    inner states, when its ``init`` runs once on substitutes of the inner transforms (`record_calls`).

    For example, a `partition` with the labels "muon" and "adamw" gives two calls. The first has the argument and the
    label "muon", the parameters with this label, and the path ``("muon",)`` of its state.
    """
    if not tx.children:
        return []
    entries = chain_entries(tx)
    if entries is not None:
        return [Call(member, name, params, state=(name,), label=None) for name, member in entries.items()]
    names = [name for name, value in zip(part_names(tx), tx.parts, strict=True) if isinstance(value, Transform)]
    recorded = record_calls(tx, params, replaced=is_wrapper(tx))
    path_of = _placeholder_paths(recorded.state)
    # An inner transform that `init` does not call counts as one that receives all parameters.
    received = [recorded.params_of.get(index, params) for index in range(len(names))]
    labels = _labels(tx, received)
    calls: list[Call] = []
    for index, (name, inner) in enumerate(zip(names, tx.children, strict=True)):
        label = name if name in labels else None
        calls.append(Call(inner, name, received[index], path_of.get(index), label))
    return calls


def _placeholder_paths(state: PyTree) -> dict[int, Path]:
    """Return the path of each `Placeholder` in a state, by the number of its inner transform."""
    path_of: dict[int, Path] = {}
    for leaf, path in zip(tree.leaves(state), tree.paths(state), strict=True):
        if isinstance(leaf, Placeholder):
            path_of[leaf.index] = path
    return path_of


def is_wrapper(tx: Transform) -> bool:
    """Return True if a transform calls others, and its own computation is elementwise or a sum over leaves.

    The inner transforms then run where their own localities allow, and the state of each is one subtree.
    """
    combinator = tx.declaration.combinator
    if not tx.children or combinator.in_sequence:
        return False
    if combinator.own_locality is Locality.TREE:
        return sums_over_leaves(tx)
    return combinator.own_locality is Locality.ELEMENT


def delegates(tx: Transform) -> bool:
    """Return True for a chain or a wrapper: the transforms that it calls run where their own localities allow."""
    return chain_entries(tx) is not None or is_wrapper(tx)


def sums_over_leaves(tx: Transform) -> bool:
    """Return True if the update of a transform needs no more of other leaves than a sum over them."""
    return "sum_over_leaves" in tx.extras.named


def works_on_pieces(tx: Transform) -> bool:
    """Return True if the update of a transform can run on shards, by an extra argument such as ``sum_over_leaves``."""
    return not ON_PIECES.isdisjoint(tx.extras.named)


def _labels(tx: Transform, received: Sequence[PyTree]) -> set[str]:
    """Return the names of inner transforms that are labels, such as "muon"; none if leaves are not divided by label.

    A label is a key of a dict of transforms that is an argument, as for `partition`. ``received`` are the parameters
    that each inner transform receives. Labels divide the leaves, so none is passed to two inner transforms.
    """
    names: list[str] = []
    for params in received:
        names += tree.names(params)
    if len(set(names)) < len(names):  # a leaf is passed to two, so the keys are no labels
        return set()
    labels: set[str] = set()
    for argument in tx.arguments.values():
        if type(argument) is dict:
            labels |= {str(label) for label, value in argument.items() if isinstance(value, Transform)}
    return labels


@dataclass(frozen=True)
class Placeholder:
    """A leaf in a wrapper's state, in place of the state of the inner transform number `index`."""

    index: int


@stand_in
def _recorder(tx: Transform, index: int, record: Callable[[int, PyTree], None], replaced: bool):
    """Stand in for inner transform number ``index`` while ``init`` runs: pass its parameters to ``record``."""

    def init(params: PyTree) -> PyTree:
        record(index, params)
        if replaced:
            return Placeholder(index)
        return tx.functions.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        raise AssertionError("a recorder is never run")

    return init, update


class RecordedInit(NamedTuple):
    """The state that the ``init`` of a transform returned, and the parameters that it passed to inner transforms."""

    state: PyTree
    """The state, with a `Placeholder` where the state of an inner transform would be."""
    params_of: dict[int, PyTree]
    """The parameters that each inner transform received, by its number."""


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

    def record(index: int, inner_params: PyTree) -> None:
        params_of[index] = inner_params

    recorders = [_recorder(inner, index, record, replaced) for index, inner in enumerate(tx.children)]
    tx_with_recorders = tx.with_children(recorders)
    with warnings.catch_warnings():  # init on the real parameters gives the warnings
        warnings.simplefilter("ignore")
        state = tx_with_recorders.functions.init(params)
    return RecordedInit(state, params_of)


# ----------------------------------------------------------------------------------------------- resolved transforms


def resolve_within(tx: Transform, params: PyTree) -> Transform:
    """Make each choice of a transform that depends on the names and shapes of parameters, and return the result.

    The result can update some of the leaves, with None for all others, or shards of them.
    """
    return fixed(root_visit(tx, params))


def fixed(visited: Visit) -> Transform:
    """Return the transform of a visit, in which each inner transform is replaced by its resolved form.

    For example, an inner transform that selects parameters by shape is replaced by one with a mask.
    """
    return with_inner(visited.tx, [fixed(inner_visit) for inner_visit in visited.calls])


def with_inner(tx: Transform, inner_transforms: Sequence[Transform]) -> Transform:
    """Return a transform that calls other transforms, given in the order of ``tx.children``; ``tx`` if none differs."""
    is_unchanged = True
    for child, inner in zip(tx.children, inner_transforms, strict=True):
        if inner is not child:
            is_unchanged = False
    if is_unchanged:
        return tx
    member_names = chain_entries(tx)
    if member_names is None:
        return tx.with_children(inner_transforms)
    return as_chain(dict(zip(member_names, inner_transforms, strict=True)))  # with the names of the former members


def as_chain(members: Mapping[str, Transform]) -> Transform:
    """Return a chain of members whose order a chain has checked before, without checking it again."""
    factory: Any = chain
    recorded = Transform._record(factory, *members.items())
    recorded.structure.memory[ORDER_IS_CHECKED] = True
    return prepared(recorded)
