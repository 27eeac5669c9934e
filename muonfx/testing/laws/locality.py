"""Laws of locality (the part of the tree that a transform reads to compute one element of an update).

A transform reads no more than it declares: the element, its matrix, its leaf, or the whole tree.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.core.transform import within
from muonfx.core.visit import resolve_within, sums_over_leaves, works_on_pieces
from muonfx.testing.examples import (
    Example,
    History,
    history,
    map_some,
    on_meta,
    separating_groups,
    updates_of,
    without_leaves,
)
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, require_close, tolerance_of
from muonfx.transforms import scale
from muonfx.tree import PyTree

# Also used by the laws of declarations: check_elements, check_sums, enlarged, precise, wider_than.


def wider_than(locality: Locality) -> Callable[[Transform], str | None]:
    """Return an ``unless`` function for `law`: it excludes transforms that read more of the tree than ``locality``."""

    def why_not(tx: Transform) -> str | None:
        if tx.locality > locality:
            return f"its locality is {tx.locality.name}"
        return None

    return why_not


def precise(example: Example) -> Example:
    """Return the example in float64, with a tensor in place of each None, and with at least two steps."""
    return example.precise().prolonged(2)


def also_in_its_dtypes(example: Example) -> list[Example]:
    """Return the precise example, and the example in its own dtypes with at least four steps.

    A transform may have a branch for a narrow dtype, or for later steps. Both have a tensor in place of each None.
    """
    return [precise(example), example.contiguous().prolonged(4)]


_LARGE = 6000
"""About the number of elements of a large leaf. It has more than 4,096 and its halves have fewer: an algorithm may
change at this size."""

_LARGE_SIDE = 70
"""The smallest number of rows of a large matrix."""


def enlarged(example: Example) -> Example:
    """Return an example with leaves of several thousand elements, which repeat leaves of at most three shapes."""
    shapes = {tuple(leaf.shape) for leaf in tree.tensors(example.params) if leaf.numel()}
    with_most_dims = sorted(shapes, key=lambda shape: -len(shape))[:3]

    def enlarged_leaf(leaf: Tensor) -> Tensor:
        if tuple(leaf.shape) not in with_most_dims or not leaf.ndim:
            return leaf
        large = leaf.repeat(_repeats_to_enlarge(leaf))
        # All elements differ, because otherwise a mean over some would equal the mean over all.
        positions = torch.arange(large.numel(), dtype=large.dtype).reshape(large.shape)
        return large * (1.0 + 0.37 * torch.sin(positions))

    return example.map(enlarged_leaf)


def _repeats_to_enlarge(leaf: Tensor) -> list[int]:
    """Return how often to repeat a nonempty leaf along each dim, only the first and the last, to make it large."""
    times = math.ceil(_LARGE / leaf.numel())
    if leaf.ndim == 1:
        return [times]
    rows = math.ceil(_LARGE_SIDE / leaf.shape[0])
    columns = math.ceil(times / rows)
    middle = [1] * (leaf.ndim - 2)
    return [rows, *middle, columns]


@law(on=also_in_its_dtypes, unless=wider_than(Locality.ELEMENT), share=0.2)
def element_transforms_see_one_element(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that an elementwise transform (locality ELEMENT) updates each element independently of all others.

    If leaves are halved or their elements are permuted, the updates must be the same, in the new order.

    >>> import muonfx as mfx
    >>> element_transforms_see_one_element(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    check_elements(tx, params, steps)


def check_elements(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that an element's update depends on this element alone: halve leaves, and permute their elements.

    Raise `Breach` (a failed law) if an element then has another update.
    """
    whole = history(tx, params, steps)
    _check_halves("leaf", tx, Example(params, steps), whole)
    shuffled = updates_of(tx, *Example(params, steps).map(_shuffled))
    expected = tree.map(_shuffled, [updates for updates, _ in whole])
    tolerance = min(tolerance_of(tx, whole), _ROUNDING)
    require_close("updates of leaves with permuted elements", shuffled, expected, "the whole's, permuted", tolerance)


_ROUNDING = 0.02
"""The tolerance of equal operations on one element, which may be vectorized in another way, in the narrowest dtype."""


def _check_halves(of: str, tx: Transform, example: Example, whole: History) -> None:
    """Raise `Breach` (a failed law) unless halves of the leaves, as on two ranks, have the updates of whole leaves.

    ``whole`` are the updates and states of whole leaves at each step, and ``of`` names what is halved.
    """
    tolerance = _for_halves(tolerance_of(tx, whole))
    whole_updates = [updates for updates, _ in whole]
    for which, half in _HALVES.items():
        results = updates_of(tx, *example.map(half))
        expected = tree.map(half, whole_updates)
        what = f"updates of the {which} half of each {of}"
        require_close(what, results, expected, "the same half of the whole's", tolerance)


def _for_halves(tolerance: float) -> float:
    """Return the tolerance for half a leaf: larger, since the largest element may be in the other half."""
    return tolerance * 1e3 if tolerance < 1e-6 else tolerance


def _first_half(leaf: Tensor) -> Tensor:
    """Return the first half of a leaf along its first dim, which also has the middle row of an odd number."""
    return leaf if leaf.ndim == 0 else leaf.narrow(0, 0, (leaf.shape[0] + 1) // 2).contiguous()


def _second_half(leaf: Tensor) -> Tensor:
    """Return the second half of a leaf along its first dim, without the middle row of an odd number."""
    if leaf.ndim == 0:
        return leaf
    rows = leaf.shape[0] // 2
    return leaf.narrow(0, leaf.shape[0] - rows, rows).contiguous()


_HALVES = {"first": _first_half, "second": _second_half}


def _shuffled(leaf: Tensor) -> Tensor:
    """Return a leaf with its elements in another order, which is the same for all leaves of its size."""
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(leaf.numel()))
    return leaf.reshape(-1)[order].reshape(leaf.shape)


def _batched(example: Example) -> list[Example]:
    """Return examples in which a batch of two different matrices replaces each leaf of fewer than three dims."""

    def batch_of_two(leaf: Tensor) -> Tensor:
        if leaf.ndim >= 3:
            return leaf
        if leaf.ndim < 2:
            leaf = leaf.reshape(1, -1)
        other_matrix = (7.0 * leaf.roll(1, -1) + 0.5).flip(-1)  # with other elements, in another order
        return torch.stack([leaf, other_matrix])

    return also_in_its_dtypes(example.dense().map(batch_of_two))


@law(on=_batched, unless=wider_than(Locality.MATRIX), share=0.2)
def matrix_transforms_see_one_matrix(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform with locality MATRIX updates each matrix in the last two dims independently of others.

    The law splits leaves into halves along their first batch dim.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(view=mfx.MatrixView("... out in -> ... out in"))
    >>> matrix_transforms_see_one_matrix(tx, *Example.of({"w": (2, 2, 3)}))
    """
    _check_halves("batch", tx, Example(params, steps), history(tx, params, steps))


@law(on=also_in_its_dtypes, unless=wider_than(Locality.LEAF), share=0.08)
def leaf_transforms_see_one_leaf(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform with locality LEAF or less updates each leaf independently of the values of others.

    Other leaves or their gradients may also be None, as on a rank that computes some leaves. The law
    `a_leaf_has_the_same_bits_in_any_company` computes each leaf alone.

    >>> import muonfx as mfx
    >>> leaf_transforms_see_one_leaf(mfx.clip_by_block_rms(0.1), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    whole = history(tx, params, steps)
    tolerance = tolerance_of(tx, whole)
    names = tree.names(params)
    for group in separating_groups(len(names)):  # for any two leaves, one group has only the first
        group_names = [names[number] for number in sorted(group)]
        changed_params = map_some(lambda p: 5.0 * p + 1.0, group, params)
        changed_steps = [map_some(lambda g: 7.0 * g - 3.0, group, grads) for grads in steps]
        params_without = without_leaves(group, params)
        steps_without = [without_leaves(group, grads) for grads in steps]
        results_if = {
            f"{group_names} have other values": updates_of(tx, changed_params, changed_steps),
            f"the gradients of {group_names} are None": updates_of(tx, params, steps_without),
            f"{group_names} are None": updates_of(tx, params_without, steps_without),
        }
        for condition, results in results_if.items():
            for step, updates in enumerate(results):
                what = f"step {step}, if {condition}, the update of"
                other_updates = without_leaves(group, updates)
                expected = without_leaves(group, whole[step][0])
                require_close(what, other_updates, expected, "without this change", tolerance)


def _needs_more_than_sums(tx: Transform) -> str | None:
    """Return why a transform is not computed from shards and sums over leaves alone; None if it is.

    A sharded run passes shards and the argument ``sum_over_leaves`` to a transform that has this argument. Another
    transform that reads the tree receives whole tensors, so the law about sums does not apply to it.
    """
    if tx.locality < Locality.TREE:
        return f"its locality is {tx.locality.name}"
    takes_sums = False
    for inner in within(tx):  # the transform itself, and those that it calls
        if inner.locality is not Locality.TREE:
            continue
        if sums_over_leaves(inner):
            takes_sums = True
        elif works_on_pieces(inner):
            return f"{inner.name} combines its shards by other means than sums over leaves"
        elif not inner.extras.takes_all:  # one with **extras forwards sum_over_leaves to the transforms that it calls
            return _why_gathered(inner)
    if not takes_sums:
        return _why_gathered(tx)
    return None


def _why_gathered(tx: Transform) -> str:
    """Return the reason why the law about sums leaves out a transform that receives the gathered tree."""
    return f"{tx.name} has the locality TREE and no argument sum_over_leaves, so it receives the gathered tree"


@law(on=precise, unless=_needs_more_than_sums, share=0.2)
def tree_transforms_see_sums_over_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform which reads the whole tree (locality TREE) needs only sums over leaves of other ranks.

    The law runs two threads as two ranks, which hold different leaves or a half of each leaf, and adds up their sums.
    Transforms of whole matrices or leaves never receive halves. For halves, `scale` takes the place of those within
    ``tx``, such as `orthogonalize` after `clip_by_global_norm`.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tree_transforms_see_sums_over_leaves(mfx.clip_by_global_norm(0.1), *Example.of({"w": (2, 3), "b": (3,)}))
    """
    check_sums(tx, params, steps)


def check_sums(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) unless two ranks, with different leaves or halves, compute the updates of one."""
    _check_sums_of_halves(tx, Example(params, steps))
    whole = history(tx, params, steps)
    tolerance = tolerance_of(tx, whole)
    whole_updates = [updates for updates, _ in whole]
    numbers = range(len(tree.leaves(params)))
    _check_sums_of_leaves("every other leaf", tx, Example(params, steps), whole_updates, numbers[::2], tolerance)
    _check_sums_of_leaves("all leaves or none", tx, Example(params, steps), whole_updates, numbers, tolerance)


def _check_sums_of_halves(tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) unless two ranks that hold halves of the leaves compute halves of the updates."""
    # Leaves without dims have no halves: both ranks hold them.
    on_both = {number for number, leaf in enumerate(tree.leaves(example.params)) if leaf.ndim == 0}
    tx = _without_work_on_wholes(tx)
    whole = history(tx, *example)
    tolerance = _for_halves(tolerance_of(tx, whole))
    whole_updates = [updates for updates, _ in whole]
    examples = [example.map(half) for half in _HALVES.values()]
    resolved = resolve_within(tx, on_meta(example.params))
    results = _on_two_ranks(resolved, examples, on_both)
    for rank, half in enumerate(_HALVES.values()):
        what = f"on two ranks that hold a half of each leaf, updates of rank {rank}"
        expected = tree.map(half, whole_updates)
        require_close(what, results[rank], expected, "the same half of one rank's", tolerance)


def _without_work_on_wholes(tx: Transform) -> Transform:
    """Return a transform with `scale` in place of each inner transform that needs whole matrices or leaves.

    In a sharded run these receive whole matrices, so halves would be wrong input for them.

    >>> import muonfx as mfx
    >>> _without_work_on_wholes(mfx.chain(mfx.clip_by_global_norm(1.0), ("muon", mfx.orthogonalize())))
    chain(clip_by_global_norm(max_norm=1.0), ('muon', scale(factor=-0.5)))
    """
    if tx.locality in (Locality.MATRIX, Locality.LEAF):
        return scale(-0.5)
    return tx.with_children([_without_work_on_wholes(child) for child in tx.children])


def _check_sums_of_leaves(
    held: str,
    tx: Transform,
    example: Example,
    whole_updates: list[PyTree],
    on_first_rank: Sequence[int],
    tolerance: float,
) -> None:
    """Raise `Breach` (a failed law) unless two ranks with gradients of different leaves compute the updates of one.

    The first rank has the gradients of the leaves with the numbers ``on_first_rank``, and the second rank the others.
    """
    params, steps = example
    on_second_rank = set(range(len(tree.leaves(params)))).difference(on_first_rank)
    missing_on_rank = (on_second_rank, on_first_rank)  # rank 0 misses the gradients that rank 1 has
    examples: list[Example] = []
    for missing in missing_on_rank:
        steps_of_rank = [without_leaves(missing, grads) for grads in steps]
        examples.append(Example(params, steps_of_rank))
    results = _on_two_ranks(tx, examples, on_both=set())
    for rank, missing in enumerate(missing_on_rank):
        expected = [without_leaves(missing, updates) for updates in whole_updates]
        what = f"on two ranks that hold {held}, updates of rank {rank}"
        require_close(what, results[rank], expected, "on one rank", tolerance)


def _on_two_ranks(tx: Transform, examples: list[Example], on_both: set[int]) -> list[list[PyTree]]:
    """Run a transform on two simulated ranks, and return the updates of all steps for each rank.

    Args:
        tx: the transform, which takes ``sum_over_leaves``.
        examples: the parameters and gradients of each rank.
        on_both: the numbers of the leaves that both ranks hold; a sum counts them once.
    """
    ranks = _TwoRanks()

    def updates_of_rank(rank: int) -> list[PyTree]:
        def sum_over_leaves(scalars: PyTree) -> Tensor:
            if rank == 1:
                scalars = without_leaves(on_both, scalars)  # rank 0 counts the leaves that both ranks hold
            return ranks.sum(rank, scalars)

        return updates_of(tx, *examples[rank], sum_over_leaves=sum_over_leaves)

    return ranks.run(updates_of_rank)


class _TwoRanks:
    """Two threads that simulate two ranks and add up scalars, as ranks do with an all-reduce."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.sent: list[list[Tensor | None]] = [[], []]
        """For each rank, the values that it has sent in all calls of `_exchange`."""

    def _exchange(self, rank: int, value: Tensor | None) -> list[Any]:
        """Send a value, wait for the value of the other rank, and return both. A rank that has finished sends None."""
        self.sent[rank].append(value)
        self.barrier.wait()
        call = len(self.sent[rank])
        values = [values_of_rank[call - 1] for values_of_rank in self.sent]
        has_finished = [value is None for value in values]
        if any(has_finished) and not all(has_finished):
            raise Breach(None, f"only one rank computes sum {call}, expected the same sums on both ranks")
        return values

    def sum(self, rank: int, scalars: PyTree) -> Tensor:
        """Return the sum of the scalars of both ranks."""
        total = torch.zeros((), dtype=torch.float64)
        for scalar in tree.tensors(scalars):
            total = total + scalar.double()
        total_of_0, total_of_1 = self._exchange(rank, total)
        return total_of_0 + total_of_1

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function(rank)`` in both threads at once. Return both results, or raise the first error."""
        errors: list[Exception] = []

        def run_rank(rank: int) -> Any:
            """Run the function on one rank. After an error, release the other thread from the barrier."""
            try:
                result = function(rank)
                self._require_both_finished(rank)
                return result
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(run_rank, range(2)))
        if errors:
            raise errors[0]
        return results

    def _require_both_finished(self, rank: int) -> None:
        """Raise `Breach` if the other rank waits for one more sum of this rank, which has finished."""
        self._exchange(rank, None)
