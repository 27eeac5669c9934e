"""The Gram route: a matrix that is cut along its long side is orthogonalized where its pieces are.

Newton-Schulz needs of a matrix `X` (n rows, m >= n columns) only `X X^T`, which is a sum over any cut of columns. So
each stage of the iteration adds up the pieces' Gram matrices over all ranks, packed as triangles, and every rank
multiplies its own piece. With K stages a rank sends about K n^2 (P-1)/P elements, against 2 n m (P-1)/P^2 for the way
to an owner and back: fewer where m/n > K P/2. The sums are taken in fp32 at least, and in another order than one
process would: the result is within rounding, not bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx.core import Transform
from muonfx.polar.iteration import composed
from muonfx.polar.policy import Plan, plan, stable_dtype
from muonfx.polar.polynomials import polynomials
from muonfx.polar.products import Functional, Shifted
from muonfx.polar.scaling import inverse_root, power_of_two, same_range, wide_dtype
from muonfx.sharding.messages import collective
from muonfx.transforms.orthogonalize import orthogonalize

__all__ = ["Slab", "gram_bytes", "gram_plan", "is_for_gram", "orthogonalize_slabs", "slab_of"]

Run = Sequence[tuple[str, Transform]]


def is_for_gram(run: Run) -> bool:
    """True if a run is one orthogonalization of whole leaves, by coefficients that the Gram form takes.

    >>> import muonfx as mfx
    >>> is_for_gram([("o", mfx.orthogonalize())]), is_for_gram([("o", mfx.orthogonalize(blocks=2))])
    (True, False)
    """
    if len(run) != 1 or run[0][1].factory is not orthogonalize:
        return False
    given = run[0][1].arguments
    if given["dims"] is not None or given["blocks"] is not None or given["method"] == "standard":
        return False
    resolved = polynomials(given["coefficients"], given["steps"])
    return resolved.table is None and not resolved.row_scaling


def gram_plan(run: Run, shape: Sequence[int], dtype: torch.dtype, device: torch.device, compute: torch.dtype) -> Plan:
    """The plan for a matrix on the Gram route: in stages whatever its shape."""
    given = run[0][1].arguments
    resolved = polynomials(given["coefficients"], given["steps"])
    asked = given["dtype"]
    if asked == "auto":
        asked = stable_dtype(torch.float64 if dtype == torch.float64 else compute, resolved)
    return plan(min(shape), max(shape), dtype, device, resolved, method="gram", dtype=asked, products="batched")


class Slab(NamedTuple):
    """This rank's piece of a matrix, and how the matrix is orthogonalized."""

    x: Tensor
    """Of shape (n, m_p), the short side whole; m_p may be 0."""
    plan: Plan
    """Of the whole matrix: the same on all ranks."""
    safety: float


def gram_bytes(n: int, stages: int, ranks: int, wide: torch.dtype = torch.float32) -> float:
    """What each rank sends for a matrix of short side n, in bytes: an all-reduce of a triangle for each stage.

    >>> gram_bytes(2, 3, 2)
    36.0
    """
    return stages * 2 * (ranks - 1) / ranks * (n * (n + 1) // 2) * wide.itemsize


def slab_of(run: Run, window: Tensor, shape: Sequence[int], compute: torch.dtype) -> Slab:
    """This rank's slab of a matrix, as a view."""
    given = run[0][1].arguments
    wide = window if shape[0] <= shape[1] else window.mT
    safety = polynomials(given["coefficients"], given["steps"]).safety
    return Slab(wide, gram_plan(run, shape, window.dtype, window.device, compute), safety)


@torch.no_grad()
def orthogonalize_slabs(slabs: Sequence[Slab], group: dist.ProcessGroup) -> list[Tensor]:
    """Orthogonalize matrices of which every rank has a slab; all ranks together, with the same matrices.

    All are computed in one dtype; the results are this rank's slabs, in the dtype of its inputs.
    """
    if not slabs:
        return []
    on = Functional()
    xs = _normalized(slabs, group)
    for turn in range(max(len(slab.plan.stages) for slab in slabs)):
        going = [i for i, slab in enumerate(slabs) if turn < len(slab.plan.stages)]
        stages = {i: slabs[i].plan.stages[turn] for i in going}
        # Each rank takes off its part of the center before it rounds, so that small differences are not rounded away.
        grams = [on.gram(xs[i][None], -stages[i].center / dist.get_world_size(group))[0] for i in going]
        for i, gram in zip(going, _summed(grams, group), strict=True):
            q = composed(on, Shifted(stages[i].center, 1.0, gram[None]), stages[i].steps)
            xs[i] = on.weighted(xs[i][None], q)[0]
    return [x.to(slab.x.dtype) for x, slab in zip(xs, slabs, strict=True)]


def _normalized(slabs: Sequence[Slab], group: dist.ProcessGroup) -> list[Tensor]:
    """The slabs over their matrices' Frobenius norms, rounded as one process rounds whole matrices."""
    compute = slabs[0].plan.dtype
    wide = wide_dtype(compute)
    rounded = [slab.x.to(compute).to(wide) if same_range(slab.x.dtype, compute) else slab.x.to(wide) for slab in slabs]
    peaks = torch.stack([x.abs().max() if x.numel() else x.new_zeros(()) for x in rounded])
    with collective("finding the largest elements"):
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
    scaled = [x * power for x, power in zip(rounded, power_of_two(peaks).unbind(), strict=True)]
    scaled = [
        x if same_range(slab.x.dtype, compute) else x.to(compute).to(wide)
        for x, slab in zip(scaled, slabs, strict=True)
    ]
    totals = torch.stack([x.square().sum() for x in scaled])
    with collective("summing squares"):
        dist.all_reduce(totals, group=group)
    return [
        (x * inverse_root(total, slab.safety)).to(compute)
        for x, total, slab in zip(scaled, totals.unbind(), slabs, strict=True)
    ]


def _summed(grams: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Add symmetric matrices over all ranks: their upper triangles, packed in one buffer, in fp32 at least."""
    wide = wide_dtype(grams[0].dtype)
    places = [torch.triu_indices(len(gram), len(gram), device=gram.device) for gram in grams]
    packed = torch.cat([gram[i, j].to(wide) for gram, (i, j) in zip(grams, places, strict=True)])
    with collective("adding up Gram matrices"):
        dist.all_reduce(packed, group=group)
    summed: list[Tensor] = []
    for gram, (i, j), values in zip(grams, places, packed.split([p.shape[1] for p in places]), strict=True):
        whole = torch.empty_like(gram)
        whole[i, j] = values.to(gram.dtype)
        whole[j, i] = values.to(gram.dtype)
        summed.append(whole)
    return summed
