"""Clipping of updates: each element, each leaf, or the whole tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonfx.core import Donation, EmptyState, Locality, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.core.simple import no_state
from muonfx.polar.iteration import unit_power
from muonfx.transforms._leaf import Leaf, record_on_list
from muonfx.transforms.formulas import divide_unless
from muonfx.transforms.scale import of_leaves, of_lists
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew

Sum = Callable[..., Tensor]
"""The type of the argument ``sum_over_leaves`` of `update`: a function that adds up a tree of scalars, on all ranks."""


@transform(locality=Locality.ELEMENT)
def clip_by_value(limit: ScalarOrSchedule):
    """Clamp every element of the updates to [-limit, limit]. A NaN or an infinite element becomes NaN.

    Args:
        limit: the largest magnitude, positive.

    Raises:
        ValueError: ``limit`` is not positive and finite.

    >>> import muonfx as mfx
    >>> mfx.clip_by_value(1.0).update({"w": torch.tensor([-3.0, 0.5])}, mfx.core.EmptyState())[0]
    {'w': tensor([-1.0000,  0.5000])}
    """
    limit = checks.positive("limit", limit)

    def clip(leaves: list[Tensor], may_overwrite: bool) -> list[Tensor]:
        clipped = ew.clamp(leaves, -limit, limit)
        return ew.kept_visible(clipped, leaves)  # NaN where an element was infinite or NaN

    return of_lists(clip)


@transform(locality=Locality.LEAF, reads_params=False)
def clip_by_block_rms(threshold: ScalarOrSchedule):
    """Scale down each leaf of the updates whose root mean square exceeds a threshold.

    Args:
        threshold: the largest root mean square, positive.

    Raises:
        ValueError: ``threshold`` is not positive and finite.

    Follows Adafactor's update clipping (arXiv 1804.04235) and Optax's transform of this name.

    >>> import muonfx as mfx
    >>> mfx.clip_by_block_rms(1.0).update({"w": torch.full((2,), 3.0)}, mfx.core.EmptyState())[0]
    {'w': tensor([1., 1.])}
    """
    threshold = checks.positive("threshold", threshold)

    def clip(leaf: Tensor) -> Tensor:
        """Return ``u / max(1, rms(u) / threshold)`` for a flattened leaf u, or for each row of a stack of leaves.

        For a threshold of 1, the leaf [3, 3] becomes [1, 1].
        """
        if leaf.numel() == 0:
            return leaf
        u = leaf.to(ew.wide_dtype(leaf.dtype))
        # Scale by an exact power of two before squaring, so that nothing overflows or underflows. Numerator and
        # denominator are multiplied by it:
        # u / max(1, rms(u) / threshold) = power u / max(power, rms(power u) / threshold).
        power = unit_power(u, (-1,))  # for each leaf, whose elements are in the last dim
        scaled_u = u * power
        mean_square = scaled_u.square().mean(-1, keepdim=True)
        scaled_rms = ew.safe_sqrt(mean_square)
        ratio = scaled_rms / ew.scalar_like(threshold, scaled_rms)
        divisor = torch.maximum(power, ratio)
        clipped = scaled_u / divisor
        return clipped.to(leaf.dtype)

    return of_leaves(clip)


@transform(locality=Locality.TREE)
def clip_by_global_norm(max_norm: ScalarOrSchedule):
    """Scale all updates down by one factor if the norm of the whole tree exceeds a bound.

    Args:
        max_norm: the bound of the 2-norm over all elements of all leaves, on all ranks; positive.

    The norm is computed in fp64, so squares do not overflow. If the norm is above 1e38 times ``max_norm``, fp32 updates
    lose their last digits. A NaN makes all updates NaN; an infinity makes its own element NaN and all others zero. Put
    `skip_nonfinite` around the chain to skip such steps.

    Raises:
        ValueError: ``max_norm`` is not positive and finite.

    >>> import muonfx as mfx
    >>> mfx.clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, mfx.core.EmptyState())[
    ...     0
    ... ]
    {'w': tensor([0.6000, 0.8000])}
    """
    max_norm = checks.positive("max_norm", max_norm)

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        sum_over_leaves: Sum,
        donate: Donation = NOTHING,
    ):
        """Multiply all updates by min(1, max_norm / norm). A norm of NaN makes the factor NaN.

        For a bound of 1 and a tree whose norm is 5, the factor is 0.2.
        """
        present = Present(updates)  # the leaves that have a gradient
        leaves = present.pick(updates)
        # A rank without leaves takes part too: the sum is a collective of all ranks.
        total = sum_over_leaves(squares_of_leaves(updates))
        norm = norm_of_sum(total)
        bound = ew.scalar_like(max_norm, norm)
        is_within = norm <= max_norm
        factor = divide_unless(is_within, bound, norm, otherwise=1.0)
        # `leafwise` would make copies in fp32, which a single product does not need: it is rounded once in any dtype.
        clipped = ew.mul(leaves, factor, reuse=donate.updates)
        return present.fill(ew.cast_like(clipped, leaves)), state

    return no_state, update


def recorded_squares(update: Leaf) -> Leaf:
    """Return the `squares_of_leaves` of a placeholder in the step of a `leafwise` transform, as a placeholder."""
    return record_on_list(_squares, update)


def norm_of_sum(total: Tensor) -> Tensor:
    """Return the 2-norm over all leaves, from the sum of their `squares_of_leaves`; in fp64 if the device supports it.

    For the leaves [3.0] and [4.0], it is 5.
    """
    if total.ndim == 0:  # there are no leaves, and their sum is 0
        return total
    # The two items are the sum of n^2 and the sum of (small n)^2 over the norms n of all leaves. The first root is the
    # norm. If a square overflows, the second root divided by small is the norm.
    norm, small_norm = ew.safe_sqrt(total).unbind()
    norm_if_overflown = small_norm / _small(total)
    return torch.where(norm.isfinite(), norm, norm_if_overflown)


def squares_of_leaves(updates: PyTree) -> PyTree:
    """Return for each leaf a tensor of shape (2,): the square of its norm, and the square of a small part of the norm.

    For the leaf [3.0, 4.0], the items are 25 and ``(5 * 2^-65)^2``, or ``(5 * 2^-513)^2`` in fp64. Sums of the first
    squares give the norm of the tree. If they overflow, sums of the second squares give it: see `norm_of_sum`.
    """
    present = Present(updates)  # the leaves that have a gradient
    squares = _squares(present.pick(updates))
    return present.fill(squares)


def _squares(leaves: list[Tensor]) -> list[Tensor]:
    """Return for the norm n of each leaf a tensor with the two items n^2 and (small n)^2; see `squares_of_leaves`."""
    norms = ew.norms(leaves)
    devices_and_dtypes = {(norm.device, norm.dtype) for norm in norms}
    can_be_stacked = len(devices_and_dtypes) == 1 and not torch.compiler.is_compiling()
    if not can_be_stacked:
        return list(map(_with_small_square, norms))
    # Three kernel launches in all, not per leaf.
    all_squares = _with_small_square(torch.stack(norms))
    return list(all_squares.unbind())


def _with_small_square(norms: Tensor) -> Tensor:
    """Return the pair (n^2, (small n)^2) for each norm n, in a new last dim."""
    # The square overflows beyond 1e154. A fixed power of two needs no collective for the largest norm.
    small_norms = norms * _small(norms)
    pairs = torch.stack([norms, small_norms], dim=-1)
    return pairs.square()


def _small(like: Tensor) -> float:
    """Return a power of two so small that its product with the square of any finite norm is finite."""
    return 2.0**-513 if like.dtype == torch.float64 else 2.0**-65
