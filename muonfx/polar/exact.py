"""The polar factor itself, by SVD: slow, and what the iteration is checked against."""

from __future__ import annotations

import torch

from muonfx.polar.engine import check_matrix


def polar_factor(x: torch.Tensor, *, rtol: float | None = None) -> torch.Tensor:
    """The orthogonal polar factor `U_r V_r^T` of `x = U S V^T`, over its nonzero singular values.

    Computed in float64. A matrix with NaN or infinity gives all NaN and leaves the rest of its batch alone.

    Args:
        x: `(..., m, n)`, any of them zero, fp64, fp32, bf16 or fp16.
        rtol: a singular value counts as zero at or below `rtol` times the largest; None means `max(m, n)` float64
            epsilons, which takes every entry as exact: give a larger one where `x` is a rounded matrix of low rank.

    Returns:
        A new tensor of `x`'s shape and dtype.

    Raises:
        TypeError, ValueError: as `orthogonalize`; ValueError for `rtol` outside [0, 1).

    >>> polar_factor(torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]))
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    check_matrix(x, "x")
    if rtol is None:
        rtol = max(x.shape[-2:]) * torch.finfo(torch.float64).eps
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol: found {rtol!r}, expected a number in [0, 1)")
    if x.numel() == 0:
        return x.clone()
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u, s, vh = torch.linalg.svd(torch.where(finite, x, torch.zeros_like(x)).double(), full_matrices=False)
    kept = (s > rtol * s.amax(-1, keepdim=True)).to(s.dtype)
    factor = (u * kept.unsqueeze(-2)) @ vh
    return torch.where(finite, factor, torch.full_like(factor, torch.nan)).to(x.dtype)
