"""Laws of locality (the part of the tree that a transform reads to compute one element of an update).

A transform reads no more than it declares: the element, its matrix, its leaf, or the whole tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.core.transform import within
from muonfx.core.visit import can_run_on_shards, resolve_within, sums_over_leaves
from muonfx.testing.examples import (
    Example,
    as_matrix,
    history,
    map_some,
    on_meta,
    only_leaf,
    updates_of,
    without_leaves,
)
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, require_close, tolerance_of
from muonfx.transforms import scale
from muonfx.tree import PyTree

# The laws of declarations use these, too: check_elements, check_leaves, check_sums, enlarged, precise, wider_than.


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
    shapes = {tuple(leaf.shape) for leaf in tree.tensors(example.params) if leaf.numel()}
    shapes_to_enlarge = sorted(shapes, key=len, reverse=True)[:3]

    def enlarge(leaf: Tensor) -> Tensor:
        if leaf.ndim and tuple(leaf.shape) in shapes_to_enlarge:
            return _enlarged_leaf(leaf)
        return leaf

    return example.map(enlarge)


def _enlarged_leaf(leaf: Tensor) -> Tensor:
    """Return a leaf repeated like tiles, with other elements in each tile, of about 6,000 elements and 70 rows or more.

    >>> _enlarged_leaf(torch.ones(3, 5)).shape, _enlarged_leaf(torch.ones(2, 4, 3)).shape
    (torch.Size([72, 85]), torch.Size([70, 4, 24]))
    """
    tiles = math.ceil(_LARGE / leaf.numel())  # 400 for the shape (3, 5)
    repeats = [tiles]
    # Along the first dim for enough rows, and along the last dim for enough elements.
    if leaf.ndim > 1:
        tiles_of_rows = math.ceil(_LARGE_SIDE / leaf.shape[0])
        repeats = [tiles_of_rows, *[1] * (leaf.ndim - 2), math.ceil(tiles / tiles_of_rows)]
    large = leaf.repeat(repeats)
    # All elements differ, because otherwise a mean over some would equal the mean over all.
    positions = torch.arange(large.numel(), dtype=large.dtype).reshape(large.shape)
    return large * (1.0 + 0.37 * torch.sin(positions))


@law(on=also_in_its_dtypes, unless=wider_than(Locality.ELEMENT), share=0.2)
def element_transforms_see_one_element(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that an elementwise transform (locality ELEMENT) updates each element independently of all others.

    If leaves are halved, or flattened with their elements permuted, the updates must be the same, in the new order.
    This matters because ZeRO flattens leaves and splits them into intervals. A choice that depends on the original
    shapes must be made before, by the option ``resolve`` of `muonfx.transform`.

    >>> import muonfx as mfx
    >>> element_transforms_see_one_element(
    ...     mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    check_elements(tx, params, steps)


def check_elements(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of an element depends on other elements of the same leaf.

    The transform runs on halves of the leaves, and on leaves that are flattened and have their elements in another
    order. Each element must have the update that it has in the whole leaf.
    """
    example = Example(params, steps)
    _check_halves(tx, example)
    _check_permuted_elements(tx, example)


def _check_permuted_elements(tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) if elements have other updates in one dim, in another order, than in their leaf.

    The leaf [[1, 2], [3, 4]] becomes a vector such as [3, 1, 4, 2], in which each element must keep its update.
    """
    whole_updates, tolerance = _updates_and_tolerance(tx, example)
    expected = tree.map(_flattened_and_permuted, whole_updates)
    # A transform may choose leaves by their shapes. It does so for the original shapes, before leaves are flattened.
    resolved = resolve_within(tx, on_meta(example.params))
    results = updates_of(resolved, *example.map(_flattened_and_permuted))
    what = "updates of flattened leaves with permuted elements"
    require_close(
        what, results, expected, "the whole's, flattened and permuted", min(tolerance, _ROUNDING)
    )


def _updates_and_tolerance(tx: Transform, example: Example) -> tuple[list[PyTree], float]:
    """Return the updates of each step, and a tolerance for comparisons with them, by the dtypes of the state too."""
    results = history(tx, *example)
    return [updates for updates, _ in results], tolerance_of(tx, results)


_ROUNDING = 0.02
"""The tolerance of equal operations on one element, which may be vectorized in another way, in the narrowest dtype."""


def _check_halves(tx: Transform, example: Example) -> None:
    """Raise `Breach` (a failed law) unless half a leaf alone has the same updates as this half in the whole leaf.

    Two ranks would hold such halves: rows 0 to 2 and rows 3 to 4 of a leaf with 5 rows.
    """
    whole_updates, tolerance = _updates_and_tolerance(tx, example)
    for which, half in {"first": _first_half, "second": _second_half}.items():
        results = updates_of(tx, *example.map(half))
        expected = tree.map(half, whole_updates)
        what = f"updates of the {which} half of each leaf"
        require_close(
            what, results, expected, "the same half of the whole's", _for_halves(tolerance)
        )


def _for_halves(tolerance: float) -> float:
    """Return the tolerance for half a leaf: larger, since the largest element may be in the other half."""
    return max(tolerance, 1e-6)


def _first_half(leaf: Tensor) -> Tensor:
    """Return the first half of a leaf along its first dim, with the middle row of an odd number of rows."""
    if leaf.ndim == 0:
        return leaf
    return leaf.tensor_split(2)[0].contiguous()


def _second_half(leaf: Tensor) -> Tensor:
    """Return the other rows of a leaf, which its first half does not have."""
    if leaf.ndim == 0:
        return leaf
    return leaf.tensor_split(2)[1].contiguous()


def _flattened_and_permuted(leaf: Tensor) -> Tensor:
    """Return a vector of the elements of a leaf in another order, which is the same for all leaves of its size."""
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(leaf.numel()))
    return leaf.reshape(-1)[order]


def _batched(example: Example) -> list[Example]:
    """Return examples in which every leaf is a batch of different matrices: shape (3, 5) becomes (2, 3, 5)."""

    def batch_of_two(leaf: Tensor) -> Tensor:
        if leaf.ndim >= 3:  # it is a batch already
            return leaf
        matrix = as_matrix(leaf)
        # This matrix has other elements, in another order.
        other_matrix = (7.0 * matrix.roll(1, -1) + 0.5).flip(-1)
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
    _check_halves(tx, Example(params, steps))


@law(on=also_in_its_dtypes, unless=wider_than(Locality.LEAF), share=0.08)
def leaf_transforms_see_one_leaf(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform with locality LEAF or less updates each leaf independently of the values of others.

    The law changes all leaves but one, and compares the updates of this one. Other leaves or their gradients may also
    be None, as on a rank that computes only some of the leaves.

    >>> import muonfx as mfx
    >>> leaf_transforms_see_one_leaf(
    ...     mfx.clip_by_block_rms(0.1), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)})
    ... )
    """
    check_leaves(tx, params, steps)


def check_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of a leaf changes with the values or the presence of other leaves.

    For each leaf, the transform runs three times: all other leaves have other values, or no gradients, or are None. So
    the updates of "w" must be the same for the gradients ``{"w": g, "b": h}`` and ``{"w": g, "b": None}``.
    """
    usual_updates, tolerance = _updates_and_tolerance(tx, Example(params, steps))
    expected_is = "without this change" + _advice_on_stacks(tx)
    for number in range(len(tree.leaves(params))):
        # The updates of this leaf at each step, in trees whose other leaves are None.
        expected = [only_leaf(number, updates) for updates in usual_updates]
        for condition, example in _with_other_leaves_changed(number, params, steps).items():
            results = [only_leaf(number, updates) for updates in updates_of(tx, *example)]
            require_close(
                f"if {condition}, updates by step", results, expected, expected_is, tolerance
            )


def _with_other_leaves_changed(
    number: int, params: PyTree, steps: list[PyTree]
) -> dict[str, Example]:
    """Return examples in which leaf ``number`` stays and all other leaves change, by a text that names the change."""
    others = set(range(len(tree.leaves(params)))) - {number}
    changed_params = map_some(lambda p: 5.0 * p + 1.0, others, params)
    changed_steps = [map_some(lambda g: 7.0 * g - 3.0, others, grads) for grads in steps]
    steps_without_others = [only_leaf(number, grads) for grads in steps]
    return {
        "other leaves have other values": Example(changed_params, changed_steps),
        "the gradients of other leaves are None": Example(params, steps_without_others),
        "other leaves are None": Example(only_leaf(number, params), steps_without_others),
    }


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
    has_sums = False
    for inner in within(tx):  # such as a chain and its members
        if inner.locality is not Locality.TREE:
            continue
        if sums_over_leaves(inner):
            has_sums = True
        elif can_run_on_shards(inner):
            return f"{inner.name} combines its shards by other means than sums over leaves"
        elif not inner.extras.takes_all:  # a wrapper with ``**extras`` forwards ``sum_over_leaves``
            return _why_gathered(inner)
    if not has_sums:  # only wrappers that forward it
        return _why_gathered(tx)
    return None


def _why_gathered(tx: Transform) -> str:
    """Return the reason why the law about sums leaves out a transform that receives the gathered tree."""
    return f"{tx.name} has the locality TREE and no argument sum_over_leaves, so it receives the gathered tree"


@law(on=precise, unless=_why_sums_are_not_checked, share=0.2)
def tree_transforms_see_sums_over_leaves(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that a transform which reads the whole tree needs no more of other ranks than sums over their leaves.

    For example, `clip_by_global_norm` needs the squared norms of all leaves, added over the ranks. The law simulates
    two ranks that hold different leaves, or one half of each leaf, and exchange only such sums. Together they must have
    the updates of one rank that holds the whole tree.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tree_transforms_see_sums_over_leaves(
    ...     mfx.clip_by_global_norm(0.1), *Example.of({"w": (2, 3), "b": (3,)})
    ... )
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
    """Raise `Breach` (a failed law) unless two ranks that hold halves of the leaves compute halves of the updates.

    For a leaf of 5 rows, the first rank has rows 0 to 2 and the second rank rows 3 to 4. Each must return the updates
    that these rows have in a usual run.
    """
    tx = _without_work_on_wholes(tx)  # orthogonalization, for example, would need whole matrices
    whole_updates, tolerance = _updates_and_tolerance(tx, example)
    expected = [tree.map(_first_half, whole_updates), tree.map(_second_half, whole_updates)]
    on_both_ranks: set[int] = set()
    for number, leaf in enumerate(tree.leaves(example.params)):
        if leaf.ndim == 0:  # it cannot be halved, so both ranks have it
            on_both_ranks.add(number)
    # A transform may choose leaves by their shapes. It does so for the shapes of whole leaves.
    resolved = resolve_within(tx, on_meta(example.params))
    results = _on_two_ranks(
        resolved, example.map(_first_half), example.map(_second_half), on_both_ranks
    )
    what = "on two ranks that hold a half of each leaf, updates by rank and step"
    require_close(what, results, expected, "the same half of one rank's", _for_halves(tolerance))


def _without_work_on_wholes(tx: Transform) -> Transform:
    """Return a transform with `scale` in place of each inner transform that needs whole matrices or leaves.

    In a sharded run these receive whole matrices, so halves would be wrong input for them.

    >>> import muonfx as mfx
    >>> _without_work_on_wholes(
    ...     mfx.chain(mfx.clip_by_global_norm(1.0), ("muon", mfx.orthogonalize()))
    ... )
    chain(clip_by_global_norm(max_norm=1.0), ('muon', scale(factor=-0.5)))
    """
    if tx.locality in (Locality.MATRIX, Locality.LEAF):
        return scale(-0.5)
    children = [_without_work_on_wholes(child) for child in tx.children]
    return tx.with_children(children)


def _check_sums_of_leaves(
    held: str, tx: Transform, example: Example, on_first_rank: set[int]
) -> None:
    """Raise `Breach` (a failed law) unless two ranks with gradients of different leaves compute the updates of one.

    The first rank has the gradients of the leaves with the numbers ``on_first_rank``, and the second rank the others.
    Both have all parameters. ``held`` is a text for the message: "every other leaf".
    """
    params, steps = example
    on_second_rank = set(range(len(tree.leaves(params)))) - on_first_rank
    usual_updates, tolerance = _updates_and_tolerance(tx, example)
    # In the trees of a rank, the leaves of the other rank are None.
    first_steps = [without_leaves(on_second_rank, grads) for grads in steps]
    second_steps = [without_leaves(on_first_rank, grads) for grads in steps]
    expected = [
        [without_leaves(on_second_rank, updates) for updates in usual_updates],
        [without_leaves(on_first_rank, updates) for updates in usual_updates],
    ]
    results = _on_two_ranks(
        tx, Example(params, first_steps), Example(params, second_steps), on_both_ranks=set()
    )
    what = f"on two ranks that hold {held}, updates by rank and step"
    require_close(what, results, expected, "on one rank", tolerance)


def _on_two_ranks(
    tx: Transform, first_example: Example, second_example: Example, on_both_ranks: set[int]
) -> list[list[PyTree]]:
    """Run a transform on two simulated ranks, and return a list for each rank with the updates of each step.

    The ranks run one after the other, so the first cannot wait for the second. Each stops at the first sum that is not
    known yet. Then both contributions to this sum are known, and both ranks start again.

    Args:
        tx: the transform, which has the argument ``sum_over_leaves``.
        first_example: the parameters and gradients of the first rank.
        second_example: the parameters and gradients of the second rank.
        on_both_ranks: the numbers of the leaves that both ranks hold. Only the first rank adds them to a sum.
    """
    known_sums: list[Tensor] = []
    while True:
        first = _run_until_unknown_sum(tx, first_example, known_sums, not_counted=set())
        second = _run_until_unknown_sum(tx, second_example, known_sums, not_counted=on_both_ranks)
        if isinstance(first, _UnknownSum) and isinstance(second, _UnknownSum):
            known_sums.append(first.contribution + second.contribution)
        elif isinstance(first, _UnknownSum) or isinstance(second, _UnknownSum):
            text = f"only one rank computes sum {len(known_sums) + 1}, expected the same sums on both ranks"
            raise Breach(None, text)
        else:
            return [first, second]


class _UnknownSum(BaseException):
    """Raised by a rank that needs a sum to which the other rank has not contributed yet; with its own contribution.

    It is no Exception, since a transform may catch these.
    """

    def __init__(self, contribution: Tensor) -> None:
        super().__init__(contribution)
        self.contribution = contribution


def _run_until_unknown_sum(
    tx: Transform, example: Example, known_sums: list[Tensor], not_counted: set[int]
) -> list[PyTree] | _UnknownSum:
    """Return the updates of one rank, or an `_UnknownSum` if it needs more sums over both ranks than are known.

    Clipping by the global norm needs one sum in each step. Without known sums, the run ends in the first step, and the
    result has this rank's part of the squared norm. The caller adds the part of the other rank to ``known_sums``, and
    starts the run again, which then ends in the second step.

    ``not_counted`` are the numbers of the leaves that the other rank adds to a sum.
    """
    next_sums = list(known_sums)

    def sum_over_leaves(scalars: PyTree) -> Tensor:
        """Return the sum over both ranks of a tree with one number for each leaf, such as its squared norm."""
        if next_sums:
            return next_sums.pop(0)
        contribution = torch.zeros((), dtype=torch.float64)
        for scalar in tree.tensors(without_leaves(not_counted, scalars)):
            contribution = contribution + scalar.double()
        raise _UnknownSum(contribution)

    try:
        return updates_of(tx, *example, sum_over_leaves=sum_over_leaves)
    except _UnknownSum as unknown_sum:
        return unknown_sum
