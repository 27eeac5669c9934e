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
    """Return a function for the option ``unless`` of `law`: why a law is not checked for a transform, or None.

    The law is left out for transforms that read more of the tree than ``locality``.

    >>> import muonfx as mfx
    >>> why_not = wider_than(Locality.ELEMENT)
    >>> why_not(mfx.scale(2.0)), why_not(mfx.clip_by_global_norm(1.0))
    (None, 'its locality is TREE')
    """

    def why_not(tx: Transform) -> str | None:
        # Localities are ordered by how much they read: ELEMENT < MATRIX < LEAF < TREE.
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
    """Return an example with large leaves: a matrix of shape (3, 5) becomes one of shape (72, 85).

    Leaves of three shapes are enlarged, those with the most dims. Others stay small, which saves time.
    """
    # The negative number of dims sorts the shapes with the most dims first.
    shapes = {tuple(leaf.shape) for leaf in tree.tensors(example.params) if leaf.numel()}
    shapes_to_enlarge = sorted(shapes, key=lambda shape: -len(shape))[:3]

    def enlarged_leaf(leaf: Tensor) -> Tensor:
        if tuple(leaf.shape) not in shapes_to_enlarge or not leaf.ndim:
            return leaf
        # The leaf is repeated like tiles, [1, 2] to [1, 2, 1, 2], and each element then gets a factor of its own.
        large = leaf.repeat(_repeats_to_enlarge(leaf))
        # All elements differ, because otherwise a mean over some would equal the mean over all.
        positions = torch.arange(large.numel(), dtype=large.dtype).reshape(large.shape)
        return large * (1.0 + 0.37 * torch.sin(positions))

    return example.map(enlarged_leaf)


def _repeats_to_enlarge(leaf: Tensor) -> list[int]:
    """Return how often to repeat a leaf along each dim, so that it has about 6,000 elements and 70 rows or more.

    >>> _repeats_to_enlarge(torch.zeros(3, 5)), _repeats_to_enlarge(torch.zeros(2, 4, 3))
    ([24, 17], [35, 1, 8])
    """
    times = math.ceil(_LARGE / leaf.numel())  # the number of copies of the leaf: 400 for the shape (3, 5)
    if leaf.ndim == 1:
        return [times]
    # Repeat along the first dim for enough rows, along the last dim for enough elements, and along no other.
    rows = math.ceil(_LARGE_SIDE / leaf.shape[0])  # 24 copies of 3 rows are 72 rows
    columns = math.ceil(times / rows)  # 17 copies of 5 columns: 24 * 17 copies are at least the needed 400
    middle = [1] * (leaf.ndim - 2)
    return [rows, *middle, columns]


@law(on=also_in_its_dtypes, unless=wider_than(Locality.ELEMENT), share=0.2)
def element_transforms_see_one_element(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that an elementwise transform (locality ELEMENT) updates each element independently of all others.

    If leaves are halved, or flattened with their elements permuted, the updates must be the same, in the new order.
    This matters because ZeRO flattens leaves and splits them into intervals. A choice that depends on the original
    shapes must be made before, by the option ``resolve`` of `muonfx.transform`.

    >>> import muonfx as mfx
    >>> element_transforms_see_one_element(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    check_elements(tx, params, steps)


def check_elements(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of an element depends on other elements of the same leaf.

    The transform runs on halves of the leaves, and on leaves that are flattened and have their elements in another
    order. Each element must have the update that it has in the whole leaf.
    """
    # First the halves: an element must not depend on the elements of the other half.
    example = Example(params, steps)
    _check_halves("leaf", tx, example)
    # Then another order, in one dim: an element must not depend on its place or its neighbours either.
    whole_updates, tolerance = _updates_and_tolerance(tx, example)
    # A transform may choose leaves by their shapes. It does so for the original shapes, before leaves are flattened.
    resolved = resolve_within(tx, on_meta(params))
    results = updates_of(resolved, *example.map(_flattened_and_permuted))
    # The usual updates in this order. The same permutation applies to a leaf, its gradients and its updates.
    expected = tree.map(_flattened_and_permuted, whole_updates)
    what = "updates of flattened leaves with permuted elements"
    require_close(what, results, expected, "the whole's, flattened and permuted", min(tolerance, _ROUNDING))


def _updates_and_tolerance(tx: Transform, example: Example) -> tuple[list[PyTree], float]:
    """Return the updates of each step, and a tolerance for comparisons with them, by the dtypes of the state too."""
    results = history(tx, *example)
    return [updates for updates, _ in results], tolerance_of(tx, results)


_ROUNDING = 0.02
"""The tolerance of equal operations on one element, which may be vectorized in another way, in the narrowest dtype."""


def _check_halves(of: str, tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) unless half a leaf alone has the same updates as this half in the whole leaf.

    Two ranks would hold such halves: rows 0 to 2 and rows 3 to 4 of a leaf with 5 rows. ``of`` is the word for a leaf
    in the message, "leaf" or "batch".
    """
    whole_updates, tolerance = _updates_and_tolerance(tx, example)
    for which, half in _HALVES.items():  # "first" or "second", and the function that returns this half of a leaf
        # The half of each parameter and of each gradient, as if the other half did not exist.
        results = updates_of(tx, *example.map(half))
        expected = tree.map(half, whole_updates)
        what = f"updates of the {which} half of each {of}"
        require_close(what, results, expected, "the same half of the whole's", _for_halves(tolerance))


def _for_halves(tolerance: float) -> float:
    """Return the tolerance for half a leaf: larger, since the largest element may be in the other half."""
    if tolerance < 1e-6:
        return tolerance * 1e3
    return tolerance


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
    """Return examples in which every leaf is a batch of matrices: shape (3, 5) becomes (2, 3, 5)."""

    def batch_of_two(leaf: Tensor) -> Tensor:
        if leaf.ndim >= 3:  # it is a batch already
            return leaf
        matrix = leaf
        if leaf.ndim < 2:  # a scalar or a vector becomes a matrix with one row
            matrix = leaf.reshape(1, -1)
        other_matrix = (7.0 * matrix.roll(1, -1) + 0.5).flip(-1)  # with other elements, in another order
        return torch.stack([matrix, other_matrix])

    return also_in_its_dtypes(example.dense().map(batch_of_two))


@law(on=_batched, unless=wider_than(Locality.MATRIX), share=0.2)
def matrix_transforms_see_one_matrix(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform with locality MATRIX updates each matrix in the last two dims independently of others.

    For example, a leaf of shape (2, 3, 5) is a batch of two matrices. The law runs the transform on each half of the
    batch alone, and compares the updates with the updates of the whole batch.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(view=mfx.MatrixView("... out in -> ... out in"))
    >>> matrix_transforms_see_one_matrix(tx, *Example.of({"w": (2, 2, 3)}))
    """
    # The first dim of shape (2, 3, 5) counts matrices, so a half of the leaf is one whole matrix.
    _check_halves("batch", tx, Example(params, steps))


@law(on=also_in_its_dtypes, unless=wider_than(Locality.LEAF), share=0.08)
def leaf_transforms_see_one_leaf(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform with locality LEAF or less updates each leaf independently of the values of others.

    Other leaves or their gradients may also be None, as on a rank that computes only some of the leaves. Another law,
    `a_leaf_has_the_same_bits_in_any_company`, computes each leaf alone.

    >>> import muonfx as mfx
    >>> leaf_transforms_see_one_leaf(mfx.clip_by_block_rms(0.1), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    check_leaves(tx, params, steps)


def check_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of a leaf changes with the values or the presence of other leaves.

    For each leaf, the transform runs three times: all other leaves have other values, or no gradients, or are None. For
    example, the updates of "w" must be the same if the gradient of "b" is None.
    """
    usual_updates, tolerance = _updates_and_tolerance(tx, Example(params, steps))
    expected_is = "without this change" + _advice_on_stacks(tx)
    numbers = set(range(len(tree.leaves(params))))  # the leaves are numbered in the order of the tree
    for number in numbers:
        # All leaves but this one change, in the parameters and in the gradients of all steps.
        others = numbers - {number}
        changed_params = map_some(lambda p: 5.0 * p + 1.0, others, params)
        changed_steps = [map_some(lambda g: 7.0 * g - 3.0, others, grads) for grads in steps]
        steps_without = [without_leaves(others, grads) for grads in steps]
        results_if = {
            "other leaves have other values": updates_of(tx, changed_params, changed_steps),
            "the gradients of other leaves are None": updates_of(tx, params, steps_without),
            "other leaves are None": updates_of(tx, without_leaves(others, params), steps_without),
        }
        # Only the updates of this leaf are compared: all others become None.
        expected = [without_leaves(others, updates) for updates in usual_updates]
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


def _why_sums_are_not_checked(tx: Transform) -> str | None:
    """Return why the law about sums over leaves does not apply to a transform, or None if it applies.

    Clipping by the global norm reads all leaves, but only through the sum of their squares. On sharded parameters, such
    a transform has the argument ``sum_over_leaves``: a function that adds a number of each leaf over all ranks. The law
    applies if this is so for each transform within ``tx`` that reads the whole tree. Others receive whole tensors.
    """
    if tx.locality < Locality.TREE:
        return f"its locality is {tx.locality.name}"
    # `tx` may be a chain, as chain(clip_by_global_norm, momentum). Look at each transform in it that reads the tree.
    transforms_of_tree = [inner for inner in within(tx) if inner.locality is Locality.TREE]
    takes_sums = False
    for inner in transforms_of_tree:
        if sums_over_leaves(inner):  # as the law requires
            takes_sums = True
            continue
        if works_on_pieces(inner):
            return f"{inner.name} combines its shards by other means than sums over leaves"
        # A wrapper with ``**extras``, such as a chain, forwards ``sum_over_leaves`` to the transforms that it calls.
        is_forwarding = inner.extras.takes_all
        if not is_forwarding:
            return _why_gathered(inner)
    if not takes_sums:  # only wrappers that forward the argument, and no transform that has it
        return _why_gathered(tx)
    return None


def _why_gathered(tx: Transform) -> str:
    """Return the reason why the law about sums leaves out a transform that receives the gathered tree."""
    return f"{tx.name} has the locality TREE and no argument sum_over_leaves, so it receives the gathered tree"


@law(on=precise, unless=_why_sums_are_not_checked, share=0.2)
def tree_transforms_see_sums_over_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform which reads the whole tree needs no more of other ranks than sums over their leaves.

    For example, `clip_by_global_norm` needs the squared norms of all leaves, added over the ranks. The law simulates
    two ranks that hold different leaves, or one half of each leaf, and exchange only such sums. Together they must have
    the updates of one rank that holds the whole tree.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tree_transforms_see_sums_over_leaves(mfx.clip_by_global_norm(0.1), *Example.of({"w": (2, 3), "b": (3,)}))
    """
    check_sums(tx, params, steps)


def check_sums(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) unless two ranks that exchange sums over leaves compute the updates of one rank.

    The two simulated ranks hold one half of each leaf; or every other leaf; or all leaves and none. Of four leaves, the
    ranks hold leaves 0 and 2 and leaves 1 and 3; then leaves 0 to 3 and no leaf.
    """
    example = Example(params, steps)
    _check_sums_of_halves(tx, example)
    numbers = range(len(tree.leaves(params)))
    _check_sums_of_leaves("every other leaf", tx, example, on_first_rank=set(numbers[::2]))
    _check_sums_of_leaves("all leaves or none", tx, example, on_first_rank=set(numbers))


def _check_sums_of_halves(tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) unless two ranks that hold halves of the leaves compute halves of the updates."""
    # Transforms of whole matrices, such as `orthogonalize`, cannot run on halves, so `scale` replaces them first.
    tx = _without_work_on_wholes(tx)
    whole_updates, tolerance = _updates_and_tolerance(tx, example)
    # A leaf without dims cannot be halved, so both ranks hold it.
    on_both_ranks = {number for number, leaf in enumerate(tree.leaves(example.params)) if leaf.ndim == 0}
    # Rank 0 has the first half of each leaf and rank 1 the second; the same holds for the expected updates.
    example_of_rank: list[Example] = []
    expected_of_rank: list[PyTree] = []
    for half in _HALVES.values():
        example_of_rank.append(example.map(half))
        expected_of_rank.append(tree.map(half, whole_updates))
    # A transform may choose leaves by their shapes. It does so for the shapes of whole leaves.
    resolved = resolve_within(tx, on_meta(example.params))
    results = _on_two_ranks(resolved, example_of_rank, on_both_ranks)
    what = "on two ranks that hold a half of each leaf, updates by rank and step"
    require_close(what, results, expected_of_rank, "the same half of one rank's", _for_halves(tolerance))


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
    ``held`` says this in the message: "every other leaf".
    """
    # Both ranks have all parameters. Only gradients and updates of leaves of the other rank are None.
    params, steps = example
    on_second_rank = set(range(len(tree.leaves(params)))) - on_first_rank
    updates_of_one_rank, tolerance = _updates_and_tolerance(tx, example)
    example_of_rank: list[Example] = []
    expected_of_rank: list[list[PyTree]] = []
    for missing in (on_second_rank, on_first_rank):  # the leaves that the first rank lacks, then those of the second
        steps_of_rank = [without_leaves(missing, grads) for grads in steps]
        example_of_rank.append(Example(params, steps_of_rank))
        expected_of_rank.append([without_leaves(missing, updates) for updates in updates_of_one_rank])
    results = _on_two_ranks(tx, example_of_rank, on_both_ranks=set())
    what = f"on two ranks that hold {held}, updates by rank and step"
    require_close(what, results, expected_of_rank, "on one rank", tolerance)


class _NextSum(BaseException):
    """Raised by a rank that needs a sum to which the other rank has not contributed yet; with its own contribution.

    It is no Exception, since a transform may catch these.
    """

    def __init__(self, contribution: Tensor) -> None:
        super().__init__(contribution)
        self.contribution = contribution


def _on_two_ranks(tx: Transform, example_of_rank: list[Example], on_both_ranks: set[int]) -> list[list[PyTree]]:
    """Run a transform on two simulated ranks, and return a list for each rank with the updates of each step.

    Both ranks run in this process, one after the other. When the first needs a sum over both, the second has not run
    yet. So each rank runs until it needs an unknown sum, and stops with its contribution to it. The two contributions
    give the sum, and both ranks run again from the start with one more known sum, until none is missing.

    Args:
        tx: the transform, which has the argument ``sum_over_leaves``.
        example_of_rank: the parameters and gradients of each rank.
        on_both_ranks: the numbers of the leaves that both ranks hold. Only the first rank adds them to a sum.
    """
    first_example, second_example = example_of_rank
    known_sums: list[Tensor] = []
    while True:
        results: list[list[PyTree]] = []  # of the ranks that have run to the end
        contributions: list[Tensor] = []  # of the ranks that have stopped at an unknown sum
        # The first rank counts all of its leaves. The second leaves out those that both hold, which would count twice.
        for example, not_counted in ((first_example, set[int]()), (second_example, on_both_ranks)):
            try:
                results.append(_updates_with_sums(tx, example, known_sums, not_counted))
            except _NextSum as next_sum:
                contributions.append(next_sum.contribution)
        if not contributions:  # both have run to the end
            return results
        if results:  # one has, and the other waits for it
            text = f"only one rank computes sum {len(known_sums) + 1}, expected the same sums on both ranks"
            raise Breach(None, text)
        # Both wait for the same sum, which is now known. Start both again.
        contribution_of_first, contribution_of_second = contributions
        known_sums.append(contribution_of_first + contribution_of_second)


def _updates_with_sums(
    tx: Transform, example: Example, known_sums: list[Tensor], not_counted: set[int]
) -> list[PyTree]:
    """Return the updates of one rank, or raise `_NextSum` when it needs a sum that is not known yet.

    ``known_sums`` are the results of the first calls of ``sum_over_leaves`` in the run. ``not_counted`` are the numbers
    of the leaves that the other rank adds to a sum.
    """
    calls = itertools.count()  # numbers the calls of `sum_over_leaves` in this run

    def sum_over_leaves(scalars: PyTree) -> Tensor:
        """Return the sum over both ranks of a tree with one number for each leaf, such as its squared norm."""
        call = next(calls)  # 0 at the first call of this run
        if call < len(known_sums):  # an earlier run of both ranks has found this sum
            return known_sums[call]
        # The first unknown sum: add this rank's scalars, and stop the run by an error that carries the result.
        contribution = torch.zeros((), dtype=torch.float64)
        for scalar in tree.tensors(without_leaves(not_counted, scalars)):
            contribution = contribution + scalar.double()
        raise _NextSum(contribution)

    return updates_of(tx, *example, sum_over_leaves=sum_over_leaves)
