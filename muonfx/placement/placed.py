"""`placed`: rewrite a transform so that it runs where its tensors are.

The result is an ordinary transform. It has the numbers of the original in the same order, and the same state. What
differs is how it runs:

- Over ranks, a transform that needs whole matrices runs on their owners, one that needs the whole tree on all ranks,
  and every other one on this rank's shards. `Ranks` supplies the two first.
- With a `Store`, the state is in host memory or on disk, and is loaded bucket by bucket.
- A transform that works leaf by leaf runs on one bucket of leaves at a time, to bound its memory.

A chain is divided into groups of neighbours that run in the same way, so that each bucket of state is loaded once and
each matrix is sent once. A wrapper, such as `partition`, keeps its own update; its inner transforms are placed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from muonfx import tree
from muonfx.core import Donation, Locality, Transform
from muonfx.core.chain import chain_entries, donation_of_outputs
from muonfx.core.donation import NOTHING
from muonfx.core.partition import partition
from muonfx.core.transform import Declaration
from muonfx.core.value import make_factory, numbers_of, with_numbers
from muonfx.core.visit import (
    Visit,
    as_chain,
    can_run_on_shards,
    delegates,
    fixed,
    is_wrapper,
    root_visit,
    stand_in,
    sums_over_leaves,
)
from muonfx.internal.display import Report, Row, Table
from muonfx.placement.bucketed import (
    StateDivision,
    StateParameters,
    buckets_by_shape,
    in_buckets,
    in_store,
    skippable,
    whole_in_store,
    with_own_state_in_store,
)
from muonfx.placement.devices import meta_like
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.polar import Workspace
from muonfx.tree import PyTree

K = TypeVar("K")


class Ranks(Protocol):
    """The interface of the ranks of a layout for `placed`; `muonfx.sharding` implements it."""

    @property
    def holds_all(self) -> bool:
        """True if there is one rank, which holds every parameter whole: nothing is sent."""
        ...

    @property
    def extras(self) -> Mapping[str, Any]:
        """Extra arguments for every update, such as a sum over the leaves of all ranks."""
        ...

    def local_like(self, params: PyTree) -> PyTree:
        """Return a tree like ``params``, with a meta tensor in the shape of this rank's shard for each parameter."""
        ...

    def on_owners(self, tx: Transform) -> Transform:
        """Return a transform that runs ``tx`` on whole matrices, each on one rank, which owns it."""
        ...

    def on_all(self, tx: Transform) -> Transform:
        """Return a transform that gathers the whole tree on every rank and runs ``tx`` on it there."""
        ...


class Where(NamedTuple):
    """Where a transform runs, and where its state is between steps."""

    ranks: Ranks | None = None
    """None in one process."""
    store: Store = IN_MEMORY
    bucket_bytes: int | None = None
    """The bytes of parameters that are updated at a time if the state is in memory; None: all."""

    @property
    def is_sharded(self) -> bool:
        """True if a rank may hold a part of a parameter only."""
        return self.ranks is not None and not self.ranks.holds_all

    @property
    def is_offloaded(self) -> bool:
        """True if the state is in host memory or on disk between steps."""
        return self.store != IN_MEMORY


IN_ONE_PROCESS = Where()

ApplyToParams = Callable[[PyTree, PyTree], None]
"""A function ``(params, updates)`` that adds updates to parameters."""

# ------------------------------------------------------------------------------------------------- how a transform runs


def needs_matrices(tx: Transform) -> bool:
    """Return True if a transform needs whole matrices or leaves itself, not only a transform that it calls."""
    return tx.locality in (Locality.MATRIX, Locality.LEAF) and not delegates(tx)


def execution_of(visited: Visit) -> str:
    """Return how a transform runs on sharded parameters, as text.

    A transform that calls others is a "chain", a "route" if it passes only some parameters to one of them, as
    `partition` does, or runs "around" them, as `accumulate` does. Any other runs:

    - "elementwise" or "on pieces": on the shards of each rank.
    - "sum over leaves": on the shards too, with a sum over all ranks, such as a global norm.
    - "matrix stage": on whole matrices, each on the rank that owns it.
    - "whole tree": on all parameters, gathered on each rank.

    >>> import muonfx as mfx
    >>> import torch
    >>> params = {"w": torch.zeros(2, 2)}
    >>> (
    ...     execution_of(root_visit(mfx.momentum(), params)),
    ...     execution_of(root_visit(mfx.orthogonalize(), params)),
    ... )
    ('elementwise', 'matrix stage')
    """
    # 1. A transform that calls others.
    tx = visited.tx
    if chain_entries(tx) is not None:
        return "chain"
    if is_wrapper(tx):
        passes_some_only = any(call.param_names != visited.param_names for call in visited.calls)
        return "route" if passes_some_only else "around"
    # 2. A transform that computes itself, by the parts of the tree that it needs.
    if needs_matrices(tx):
        return "matrix stage"
    if tx.locality is Locality.ELEMENT:
        return "elementwise"
    runs_on_shards = can_run_on_shards(tx) and not tx.children
    if not runs_on_shards:
        return "whole tree"
    if sums_over_leaves(tx):
        return "sum over leaves"
    return "on pieces"


def _execution_at(visited: Visit, where: Where) -> str:
    """Return how a transform runs in a place: "leaf by leaf" if it can run on some leaves at a time.

    Else this returns the text of `execution_of`. An elementwise transform such as `momentum` runs leaf by leaf
    everywhere. `orthogonalize` needs whole matrices: it runs leaf by leaf in one process, where each leaf is whole, and
    as a "matrix stage" on shards.

    >>> import muonfx as mfx
    >>> import torch
    >>> _execution_at(root_visit(mfx.orthogonalize(), {"w": torch.zeros(2, 2)}), IN_ONE_PROCESS)
    'leaf by leaf'
    """
    # The locality says how much of a tree a transform reads to compute one element: ELEMENT < MATRIX < LEAF < TREE.
    locality = visited.tx.locality
    if locality is Locality.ELEMENT:
        return "leaf by leaf"
    if locality <= Locality.LEAF and not where.is_sharded:
        return "leaf by leaf"
    return execution_of(visited)


def _run_together(execution_of_member: Mapping[K, str]) -> list[list[K]]:
    """Group neighbouring members of a chain that run together: leaf by leaf, or on the same gathered matrices.

    >>> _run_together(
    ...     {"clip": "sum over leaves", "momentum": "leaf by leaf", "scale": "leaf by leaf"}
    ... )
    [['clip'], ['momentum', 'scale']]
    """
    groups: list[list[K]] = []
    previous_execution = ""
    for member, execution in execution_of_member.items():
        # Any other member is a group of its own.
        can_run_together = execution in ("leaf by leaf", "matrix stage")
        if can_run_together and execution == previous_execution:
            groups[-1].append(member)
        else:
            groups.append([member])
        previous_execution = execution
    return groups


# ------------------------------------------------------------------------------------------------------------ rewriting


def placed(
    tx: Transform, params: PyTree, where: Where = IN_ONE_PROCESS, *, visited: Visit | None = None
) -> Transform:
    """Return a transform with the updates of ``tx`` that runs on shards, by buckets, or with its state in a store.

    Args:
        tx: a transform.
        params: the parameters in full, not sharded. Values are not read, so meta tensors suffice.
        where: where the transform runs; by default in one process, with its state in memory.
        visited: the first `Visit` of the transform for the parameters, if the caller has it. None: they are visited.

    Returns:
        A transform with the numbers and the state of ``tx``. It prints as a table of how each transform in it runs on
        sharded parameters. The column "numbers" has the prefix of the names in `muonfx.hyperparams`, and the column
        "state" the path of the state. Its ``update`` accepts one more extra argument, ``apply_to_params``: a function
        ``(params, updates)`` that adds final updates to the parameters, bucket by bucket. The returned updates are then
        None.

    Raises:
        TypeError: a transform was resolved (option ``resolve`` of `transform`) to one with other numbers.

    >>> import torch
    >>> import muonfx as mfx
    >>> tx = mfx.chain(
    ...     mfx.clip_by_global_norm(1.0),
    ...     mfx.momentum(),
    ...     mfx.orthogonalize(),
    ...     mfx.normalize_neurons(),
    ... )
    >>> placed(tx, {"w": torch.zeros(4, 4), "v": torch.zeros(4, 2)})
    node                                              locality  leaves  state                numbers
    chain: chain                                      TREE      2       -                    -
      sum over leaves: clip_by_global_norm            TREE      2       clip_by_global_norm  clip_by_global_norm
      elementwise: momentum                           ELEMENT   2       momentum             momentum
      matrix stage: orthogonalize, normalize_neurons  LEAF      2       orthogonalize        orthogonalize
    """
    if visited is None:
        visited = root_visit(tx, meta_like(params))
    rewritten = _place(visited, where, applies=True)
    _require_same_numbers(rewritten, tx)
    # Every transform in it can use these extra arguments: memory that they reuse, and sums over all ranks.
    extras: dict[str, Any] = {"workspace": Workspace()}
    if where.ranks is not None:
        extras |= where.ranks.extras
    return _with_extras(rewritten, extras, lambda: report(visited))


def _require_same_numbers(rewritten: Transform, tx: Transform) -> None:
    """Raise TypeError unless a rewritten transform has the numbers of ``tx``, such as learning rates, in their order.

    They must be the same objects, since `with_numbers` replaces them later.
    """
    if list(map(id, numbers_of(rewritten))) != list(map(id, numbers_of(tx))):
        raise TypeError(
            f"{tx.name}: found other numbers after `resolve`, expected the numbers of the transform in their order: "
            "return a transform with the same numeric arguments"
        )


class Placed(Transform):
    """The result of `placed`, which prints as a table."""

    def tree(self) -> Report:
        """Return a table of how each transform runs on sharded parameters."""
        return self.arguments["report"]()

    def __repr__(self) -> str:
        """Return the table as text."""
        return str(self.tree())


_returns_placed = functools.partial(
    make_factory, Placed, declaration=Declaration(), is_stand_in=True
)
"""A decorator like `stand_in`, for a function that returns a `Placed` transform."""


@_returns_placed
def _with_extras(tx: Transform, extras: Mapping[str, Any], report: Callable[[], Report]):
    """Run a transform with extra arguments. An extra argument of the call takes precedence."""

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras_of_call: Any,
    ):
        """Run ``tx`` with the given extra arguments, and with those of the call."""
        all_extras = {**extras, **extras_of_call}
        return tx.run(updates, state, params, donate=donate, **all_extras)

    return tx.functions.init, update


def _place(visited: Visit, where: Where, *, applies: bool = False) -> Transform:
    """Rewrite a transform so that it runs where its tensors are, such as on shards, or bucket by bucket.

    `visited` is the transform, with its parameters and the transforms that it calls. With ``applies``, the result takes
    the extra argument ``apply_to_params``, and adds its updates to the parameters.
    """
    execution = _execution_at(visited, where)
    # 1. A transform that may also run together with its neighbours in a chain.
    if execution in ("leaf by leaf", "matrix stage"):
        return _place_together(fixed(visited), execution, visited.params, where, applies=applies)
    # 2. Some parameters are complete before others, and are updated then: the parameters of each inner transform of a
    # `partition`, and the parameters of the last members of a chain.
    if execution == "chain":  # a member of it needs the whole tree or, over ranks, whole matrices
        return _place_chain(visited, where, applies=applies)
    if visited.tx.factory is partition:
        return _place_wrapper(visited, where, applies=applies)
    # 3. All updates are applied at the end.
    if execution in ("route", "around"):  # a wrapper, such as `accumulate`
        rewritten = _place_wrapper(visited, where)
    else:  # "sum over leaves", "on pieces" or "whole tree"
        rewritten = _place_whole_tree(visited, where)
    if applies:
        return applying(rewritten)
    return rewritten


def _place_together(
    tx: Transform, execution: str, meta_params: PyTree, where: Where, *, applies: bool
) -> Transform:
    """Rewrite a transform, or a chain of neighbours that run together: "leaf by leaf" or as a "matrix stage".

    `execution` is one of these two. In a matrix stage, each whole matrix is updated on one rank, which owns it.
    """
    if execution == "leaf by leaf":
        return _place_leaf_by_leaf(tx, meta_params, where, applies=applies)
    assert where.ranks is not None
    on_owners = where.ranks.on_owners(tx)
    if applies:
        return applying(on_owners)
    return on_owners


def _place_leaf_by_leaf(
    tx: Transform, meta_params: PyTree, where: Where, *, applies: bool
) -> Transform:
    """Rewrite a transform, or a chain, that can run on some leaves or shards at a time, to run bucket by bucket.

    A bucket is some of the parameters. With everything in memory and no limit of bytes, there are no buckets.
    """
    if applies:  # within a bucket, so that its updates are freed before the next bucket
        tx = applying(tx)
    if where.is_offloaded:
        return in_store(tx, where.store, StateParameters())
    # In memory, buckets bound the memory of updates, which `applying` frees, and of temporary tensors. Elementwise
    # transforms, the only ones that run on shards, have few of these.
    saves_memory = applies or not where.is_sharded
    if where.bucket_bytes is None or not saves_memory:
        return tx
    if where.ranks is not None:
        meta_params = where.ranks.local_like(meta_params)
    buckets = buckets_by_shape(meta_params, where.bucket_bytes)
    if len(buckets) <= 1:
        return tx
    return in_buckets(tx, where.bucket_bytes, buckets, StateParameters())


def _place_whole_tree(visited: Visit, where: Where) -> Transform:
    """Rewrite a transform that needs all leaves, to run on the gathered tree, or sums over leaves, to run on shards.

    `clip_by_global_norm` only sums over leaves: each rank adds the squares of its shards, and the sums are added over
    all ranks, so nothing is gathered.
    """
    tx = visited.tx
    if where.is_sharded and execution_of(visited) == "whole tree":
        assert where.ranks is not None
        tx = where.ranks.on_all(tx)
    # It cannot run bucket by bucket, so its whole state is loaded in each step.
    if where.is_offloaded:
        return whole_in_store(tx, where.store, StateParameters())
    return tx


def _place_wrapper(visited: Visit, where: Where, *, applies: bool = False) -> Transform:
    """Rewrite the inner transforms of a wrapper, each for the parameters that it receives.

    A wrapper is a transform that calls others, such as `partition`, which may call Muon for some parameters and AdamW
    for the rest. With ``applies``, each of them adds its updates to the parameters: they are the wrapper's updates.
    """
    # 1. The transforms that it calls.
    inner_transforms: list[Transform] = []
    for call in visited.calls:
        inner = _place(call, where, applies=applies)
        if where.is_offloaded:  # the wrapper can skip it before its state is loaded
            inner = skippable(inner)
        inner_transforms.append(inner)
    rewritten = visited.tx.with_children(inner_transforms)
    # 2. Its own state, such as a sum of gradients.
    if where.is_offloaded:
        division = StateDivision.of(visited.tx, visited.params)
        return with_own_state_in_store(rewritten, division, where.store, StateParameters())
    return rewritten


def _place_chain(visited: Visit, where: Where, *, applies: bool) -> Transform:
    """Rewrite a chain as a chain of groups of neighbouring members that run together.

    In ``chain(clip_by_global_norm(1.0), momentum(), scale(0.5))`` the last two can run together on one bucket of
    parameters after another, so the groups are (clip_by_global_norm,) and (momentum, scale). With ``applies``, only the
    last group adds its updates to the parameters.
    """
    entries = chain_entries(visited.tx)  # the members by name
    assert entries is not None
    visit_of = dict(zip(entries, visited.calls, strict=True))
    executions = {name: _execution_at(member, where) for name, member in visit_of.items()}
    groups = _run_together(executions)
    rewritten: dict[str, Transform] = {}
    for index, names in enumerate(groups):
        first = names[0]
        is_last = index == len(groups) - 1
        group_applies = applies and is_last
        if len(names) == 1:  # it may be any transform, also a wrapper or a chain
            rewritten[str(index)] = _place(visit_of[first], where, applies=group_applies)
            continue
        # Several members run as one chain, all of them in the way of the first.
        group = as_chain({name: fixed(visit_of[name]) for name in names})
        rewritten[str(index)] = _place_together(
            group, executions[first], visited.params, where, applies=group_applies
        )
    return in_groups(as_chain(rewritten), tuple(groups))


@stand_in
def in_groups(tx: Transform, groups: tuple[list[str], ...]):
    """Run a chain of which some members are chains, with the state of one chain of all their members.

    ``tx`` is ``chain(clip, chain(momentum, scale))``, for example, because the last two can run together. Then
    ``groups`` is ``(["clip"], ["momentum", "scale"])``. The state has the keys "clip", "momentum" and "scale", like the
    state of ``chain(clip, momentum, scale)``.
    """
    named_groups = list(zip(groups, tx.children, strict=True))

    def init(params: PyTree) -> dict[str, PyTree]:
        state: dict[str, PyTree] = {}
        for names, group in named_groups:
            state |= _state_by_member(names, group.functions.init(params))
        return state

    def update(
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        apply_to_params: ApplyToParams | None = None,
        **extras: Any,
    ):
        """Pass the updates through the groups in order, as `chain` does.

        Each group receives its part of the state, such as the states of "momentum" and "scale". The last one also
        receives ``apply_to_params``, the function that adds its updates to the parameters.
        """
        new_state: dict[str, PyTree] = {}
        donation = donate  # the inputs that the group may overwrite
        for index, (names, group) in enumerate(named_groups):
            is_last = index == len(named_groups) - 1
            if is_last and apply_to_params is not None:
                extras["apply_to_params"] = apply_to_params
            group_state = _state_of_group(names, state)
            outputs, new_group_state = group.run(
                updates, group_state, params, donate=donation, **extras
            )
            new_state |= _state_by_member(names, new_group_state)
            donation = donation_of_outputs(group, outputs, updates, donation)
            updates = outputs
        return updates, new_state

    return init, update


def _state_of_group(names: list[str], state: Mapping[str, PyTree]) -> PyTree:
    """Return the state that a group of members receives, from the state of all members by name.

    A single member is no chain, so its state is not in a dict by name.

    >>> state = {"clip": "a", "momentum": "b", "scale": "c"}
    >>> _state_of_group(["clip"], state), _state_of_group(["momentum", "scale"], state)
    ('a', {'momentum': 'b', 'scale': 'c'})
    """
    if len(names) == 1:
        return state[names[0]]
    return {name: state[name] for name in names}


def _state_by_member(names: list[str], group_state: PyTree) -> dict[str, PyTree]:
    """Return a dict by name of the states of a group's members; it undoes `_state_of_group`.

    >>> (
    ...     _state_by_member(["clip"], "a"),
    ...     _state_by_member(["momentum", "scale"], {"momentum": "b", "scale": "c"}),
    ... )
    ({'clip': 'a'}, {'momentum': 'b', 'scale': 'c'})
    """
    if len(names) == 1:
        return {names[0]: group_state}
    return group_state


@stand_in
def applying(tx: Transform):
    """Run a transform, and add its updates to the parameters by the extra argument ``apply_to_params``, a function.

    The returned updates are then None, and their memory is free. Without this argument, they are returned as they are.
    The decorator `stand_in` makes a transform like ``tx`` of the two returned functions.
    """

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        apply_to_params: ApplyToParams | None = None,
        **extras: Any,
    ):
        """Run ``tx``. If its updates were added to the parameters, return None for each of them."""
        updates, state = tx.run(updates, state, params, donate=donate, **extras)
        if apply_to_params is None:
            return updates, state
        # This adds the updates to the parameters, two dicts by name. None is returned in place of each update, so that
        # its memory can be freed.
        apply_to_params(params, updates)
        return dict.fromkeys(updates), state

    return tx.functions.init, update


# ------------------------------------------------------------------------------------------- one for each structure


class PlacedTransforms:
    """Calls `placed`, which is slow, once for the structure of a transform and the names and shapes of parameters.

    For ``momentum(0.9)`` and a later ``momentum(0.8)``, it is called once. The number in its result is then replaced.

    Args:
        where: where the transforms run.
        global_like: a function from this rank's parameters to meta tensors in the shapes of the whole parameters. None
            in one process, whose parameters are whole.
    """

    LIMIT = 64
    """The number of results at which all are dropped: a chain that is made in each step may be new each time."""

    def __init__(self, where: Where, global_like: Callable[[PyTree], PyTree] | None = None) -> None:
        self.where = where
        self._global_like = global_like
        # Parameters of one structure may have several shapes.
        self._results: dict[Hashable, list[_PlacedFor]] = {}

    def __call__(self, tx: Transform, params: PyTree, visited: Visit | None = None) -> Transform:
        """Return the transform that runs ``tx`` where its tensors are, such as on this rank's shards in ``params``.

        ``visited`` is the first `Visit` of ``tx``, if the caller has it.
        """
        # The containers and names of both, without numbers and tensors.
        key = tx.treedef, tree.flatten(params)[1]
        fitting = [
            result for result in self._results.get(key, []) if self._has_shapes_of(params, result)
        ]
        if fitting:
            result = fitting[0]
        else:
            if sum(map(len, self._results.values())) >= self.LIMIT:
                self._results.clear()
            global_like = self._global_like or meta_like
            meta_params = global_like(params)
            result = _PlacedFor(
                meta_params, tx, placed(tx, meta_params, self.where, visited=visited)
            )
            self._results.setdefault(key, []).append(result)
        if result.tx is not tx:  # it has the numbers of an earlier call
            result.placed = with_numbers(result.placed, iter(numbers_of(tx)))
            result.tx = tx
        return result.placed

    def _has_shapes_of(self, params: PyTree, result: _PlacedFor) -> bool:
        """Return True if a transform was placed for parameters of these shapes. A leaf that is None fits any shape."""
        if self._global_like is not None:  # one layout always gives the same global shapes
            return True
        # A parameter that was None before has no known shape, so the transform is placed again for it.
        for leaf, meta_leaf in zip(
            tree.leaves(params), tree.leaves(result.meta_params), strict=True
        ):
            if leaf is not None and (meta_leaf is None or meta_leaf.shape != leaf.shape):
                return False
        return True


@dataclass(eq=False)
class _PlacedFor:
    """A result of `placed`, with the parameters and the transform for which it was made."""

    meta_params: PyTree
    tx: Transform
    """The transform whose numbers `placed` has: the one of the latest call."""
    placed: Transform


# ------------------------------------------------------------------------------------------------------------- reports


def report(visited: Visit) -> Report:
    """Return a table of how each transform runs: one row for each, or for several that run together."""
    titles = ("node", "locality", "leaves", "state", "numbers")
    return Report((Table(titles, [_row([visited])]),))


def _row(visits: list[Visit]) -> Row:
    """Return the row of one transform, or of neighbours in a chain that run together because they need whole matrices.

    The transforms that it calls have rows of their own below it. The last two cells are the path of its state in the
    whole state, and the prefix of the names of its numbers.

    >>> import muonfx as mfx
    >>> import torch
    >>> visited = root_visit(mfx.chain(mfx.momentum()), {"w": torch.zeros(2, 2)})
    >>> _row([visited.calls[0]]).cells
    ('elementwise: momentum', 'ELEMENT', '1', 'momentum', 'momentum')
    """
    # The neighbours are named together; the first of them gives the other cells.
    visited = visits[0]
    names_of_transforms = ", ".join([neighbour.tx.name for neighbour in visits])
    path_of_state = ".".join(map(str, visited.state or ()))
    cells = (
        f"{execution_of(visited)}: {names_of_transforms}",
        visited.tx.locality.name,
        str(len(visited.param_names)),
        path_of_state or "-",
        visited.name or "-",
    )
    if not delegates(visited.tx):  # it calls no other transform
        return Row(cells)
    inner_rows = [_row(group) for group in grouped(visited)]
    return Row(cells, tuple(inner_rows))


def grouped(outer: Visit) -> list[list[Visit]]:
    """Return the transforms that a transform calls; neighbours in a chain that need whole matrices are in one list.

    >>> import muonfx as mfx
    >>> import torch
    >>> tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons())
    >>> groups = grouped(root_visit(tx, {"w": torch.zeros(2, 2)}))
    >>> [[visited.tx.name for visited in group] for group in groups]
    [['momentum'], ['orthogonalize', 'normalize_neurons']]
    """
    is_chain = chain_entries(outer.tx) is not None
    if not is_chain:  # each transform runs alone
        return [[inner] for inner in outer.calls]
    # In a chain, each member receives the result of the one before it: neighbours that need whole matrices can use
    # matrices that were gathered once.
    return _run_together({inner: execution_of(inner) for inner in outer.calls})


def matrix_stages(root: Visit) -> Iterator[list[Visit]]:
    """Yield the transforms within a transform that need whole matrices. Neighbours in a chain are in one list.

    The neighbours run together, on the rank that owns a matrix. They may be at any depth, such as in the chain of a
    Muon that a `partition` calls for some parameters.

    >>> import muonfx as mfx
    >>> import torch
    >>> tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons())
    >>> stages = matrix_stages(root_visit(tx, {"w": torch.zeros(2, 2)}))
    >>> [[visited.tx.name for visited in stage] for stage in stages]
    [['orthogonalize', 'normalize_neurons']]
    """
    if needs_matrices(root.tx):  # the transform itself, which calls no others
        yield [root]
    elif delegates(root.tx):  # a chain or a wrapper
        for group in grouped(root):
            if needs_matrices(group[0].tx):
                yield group
            else:  # a group of one transform, which may be a chain or a wrapper
                yield from matrix_stages(group[0])
