"""Laws of locality (the part of the tree that a transform reads to compute one element of an update).

A transform reads no more than it declares: the element, its matrix, its leaf, or the whole tree.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.core.transform import within
from muonfx.core.visit import resolve_within, sums_over_leaves, works_on_pieces
from muonfx.testing.examples import (
    Example,
    history,
    map_some,
    on_meta,
    updates_of,
    without_leaves,
)
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, require_close, tolerance_of
from muonfx.transforms import scale
from muonfx.tree import PyTree

# Also used by the laws of declarations: check_elements, check_leaves, check_sums, enlarged, precise, wider_than.


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

    If leaves are halved, or flattened with their elements permuted, the updates must be the same, in the new order.
    ZeRO splits flattened leaves into intervals. A choice that depends on the original shapes must be made before, by
    the option ``resolve`` of `muonfx.transform`.

    >>> import muonfx as mfx
    >>> element_transforms_see_one_element(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    check_elements(tx, params, steps)


def check_elements(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that an element's update depends on this element alone: halve leaves, flatten them and permute elements.

    Raise `Breach` (a failed law) if an element then has another update.
    """
    example = Example(params, steps)
    _check_halves("leaf", tx, example)
    whole, tolerance = _updates_and_tolerance(tx, example)
    resolved = resolve_within(tx, on_meta(params))  # the choices by shape are made before leaves are flattened
    results = updates_of(resolved, *example.map(_flattened_and_permuted))
    expected = tree.map(_flattened_and_permuted, whole)
    what = "updates of flattened leaves with permuted elements"
    require_close(what, results, expected, "the whole's, flattened and permuted", min(tolerance, _ROUNDING))


def _updates_and_tolerance(tx: Transform, example: Example) -> tuple[list[PyTree], float]:
    """Return the updates of each step, and a tolerance for comparisons with them, by the dtypes of the state too."""
    results = history(tx, *example)
    return [updates for updates, _ in results], tolerance_of(tx, results)


_ROUNDING = 0.02
"""The tolerance of equal operations on one element, which may be vectorized in another way, in the narrowest dtype."""


def _check_halves(of: str, tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) unless halves of the leaves, as on two ranks, have the updates of whole leaves.

    ``of`` names what is halved.
    """
    whole, tolerance = _updates_and_tolerance(tx, example)
    for which, half in _HALVES.items():
        results = updates_of(tx, *example.map(half))
        what = f"updates of the {which} half of each {of}"
        require_close(what, results, tree.map(half, whole), "the same half of the whole's", _for_halves(tolerance))


def _for_halves(tolerance: float) -> float:
    """Return the tolerance for half a leaf: larger, since the largest element may be in the other half."""
    return tolerance * 1e3 if tolerance < 1e-6 else tolerance


def _half(number: int, leaf: Tensor) -> Tensor:
    """Return half ``number`` of a leaf along its first dim. Half 0 also has the middle row of an odd number."""
    if leaf.ndim == 0:
        return leaf
    return leaf.tensor_split(2)[number].contiguous()


_HALVES = {"first": functools.partial(_half, 0), "second": functools.partial(_half, 1)}


def _flattened_and_permuted(leaf: Tensor) -> Tensor:
    """Return a vector of the elements of a leaf in another order, which is the same for all leaves of its size."""
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(leaf.numel()))
    return leaf.reshape(-1)[order]


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
    _check_halves("batch", tx, Example(params, steps))


@law(on=also_in_its_dtypes, unless=wider_than(Locality.LEAF), share=0.08)
def leaf_transforms_see_one_leaf(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform with locality LEAF or less updates each leaf independently of the values of others.

    Other leaves or their gradients may also be None, as on a rank that computes some leaves. The law
    `a_leaf_has_the_same_bits_in_any_company` computes each leaf alone.

    >>> import muonfx as mfx
    >>> leaf_transforms_see_one_leaf(mfx.clip_by_block_rms(0.1), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    check_leaves(tx, params, steps)


def check_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of a leaf changes with the values or the presence of other leaves."""
    whole, tolerance = _updates_and_tolerance(tx, Example(params, steps))
    expected_is = "without this change" + _advice_on_stacks(tx)
    numbers = set(range(len(tree.leaves(params))))
    for number in numbers:
        others = numbers - {number}
        changed_params = map_some(lambda p: 5.0 * p + 1.0, others, params)
        changed_steps = [map_some(lambda g: 7.0 * g - 3.0, others, grads) for grads in steps]
        steps_without = [without_leaves(others, grads) for grads in steps]
        results_if = {
            "other leaves have other values": updates_of(tx, changed_params, changed_steps),
            "the gradients of other leaves are None": updates_of(tx, params, steps_without),
            "other leaves are None": updates_of(tx, without_leaves(others, params), steps_without),
        }
        expected = [without_leaves(others, updates) for updates in whole]
        for condition, results in results_if.items():
            updates_of_leaf = [without_leaves(others, updates) for updates in results]
            require_close(f"if {condition}, updates by step", updates_of_leaf, expected, expected_is, tolerance)


def _advice_on_stacks(tx: Transform) -> str:
    """Return what to do if a leaf depends on others: for a transform of stacks of matrices, the only cause; else ""."""
    if tx.declaration.matrices.on_stacks is None:
        return ""
    return (
        " (leaves of equal shape form one stack, and the step must not mix its matrices: reduce over the last two dims "
        "only, as in u.norm(dim=(-2, -1), keepdim=True))"
    )


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

    The law simulates two ranks, which hold different leaves or a half of each leaf, and adds up their sums.
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
    numbers = range(len(tree.leaves(params)))
    _check_sums_of_leaves("every other leaf", tx, Example(params, steps), set(numbers[::2]))
    _check_sums_of_leaves("all leaves or none", tx, Example(params, steps), set(numbers))


def _check_sums_of_halves(tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) unless two ranks that hold halves of the leaves compute halves of the updates."""
    # Leaves without dims have no halves: both ranks hold them.
    on_both = {number for number, leaf in enumerate(tree.leaves(example.params)) if leaf.ndim == 0}
    tx = _without_work_on_wholes(tx)
    whole, tolerance = _updates_and_tolerance(tx, example)
    resolved = resolve_within(tx, on_meta(example.params))
    examples: list[Example] = []
    expected: list[PyTree] = []
    for half in _HALVES.values():
        examples.append(example.map(half))
        expected.append(tree.map(half, whole))
    results = _on_two_ranks(resolved, examples, on_both)
    what = "on two ranks that hold a half of each leaf, updates by rank and step"
    require_close(what, results, expected, "the same half of one rank's", _for_halves(tolerance))


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


def _check_sums_of_leaves(held: str, tx: Transform, example: Example, on_first_rank: set[int]) -> None:
    """Raise `Breach` (a failed law) unless two ranks with gradients of different leaves compute the updates of one.

    The first rank has the gradients of the leaves with the numbers ``on_first_rank``, and the second rank the others.
    """
    params, steps = example
    on_second_rank = set(range(len(tree.leaves(params)))) - on_first_rank
    whole, tolerance = _updates_and_tolerance(tx, example)
    examples: list[Example] = []
    expected: list[list[PyTree]] = []
    for missing in (on_second_rank, on_first_rank):
        examples.append(Example(params, [without_leaves(missing, grads) for grads in steps]))
        expected.append([without_leaves(missing, updates) for updates in whole])
    results = _on_two_ranks(tx, examples, on_both=set())
    what = f"on two ranks that hold {held}, updates by rank and step"
    require_close(what, results, expected, "on one rank", tolerance)


class _NextSum(BaseException):
    """Raised by a rank that needs a sum to which the other rank has not contributed yet; with its own contribution.

    It is no Exception, since a transform may catch these.
    """

    def __init__(self, contribution: Tensor) -> None:
        super().__init__(contribution)
        self.contribution = contribution


def _on_two_ranks(tx: Transform, examples: list[Example], on_both: set[int]) -> list[list[PyTree]]:
    """Run a transform on two simulated ranks, and return the updates of all steps for each rank.

    Each rank runs until it needs a sum that is not known. From what both have contributed to it follows the sum, and
    both run again from the start with one more known sum, until no sum is missing.

    Args:
        tx: the transform, which takes ``sum_over_leaves``.
        examples: the parameters and gradients of each rank.
        on_both: the numbers of the leaves that both ranks hold; a sum counts them once.
    """
    known_sums: list[Tensor] = []
    while True:
        results: list[list[PyTree]] = []
        contributions: list[Tensor] = []
        for example, uncounted in zip(examples, (set[int](), on_both), strict=True):
            try:
                results.append(_updates_with_sums(tx, example, known_sums, uncounted))
            except _NextSum as next_sum:
                contributions.append(next_sum.contribution)
        if not contributions:
            return results
        if results:
            text = f"only one rank computes sum {len(known_sums) + 1}, expected the same sums on both ranks"
            raise Breach(None, text)
        contribution_of_0, contribution_of_1 = contributions
        known_sums.append(contribution_of_0 + contribution_of_1)


def _updates_with_sums(tx: Transform, example: Example, known_sums: list[Tensor], uncounted: set[int]) -> list[PyTree]:
    """Return the updates of one rank, or raise `_NextSum` for the first sum that is not among ``known_sums``.

    ``uncounted`` are the numbers of the leaves that the other rank counts.
    """
    calls = itertools.count()

    def sum_over_leaves(scalars: PyTree) -> Tensor:
        call = next(calls)
        if call < len(known_sums):
            return known_sums[call]
        contribution = torch.zeros((), dtype=torch.float64)
        for scalar in tree.tensors(without_leaves(uncounted, scalars)):
            contribution = contribution + scalar.double()
        raise _NextSum(contribution)

    return updates_of(tx, *example, sum_over_leaves=sum_over_leaves)
