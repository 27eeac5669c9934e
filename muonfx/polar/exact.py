"""`polar_factor`: the exact polar factor by SVD, a slow reference for Newton-Schulz; and the Sylvester equation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonfx.polar.checks import check_matrix


def polar_factor(x: Tensor, *, rtol: float | None = None) -> Tensor:
    """Return the exact orthogonal polar factor `U_r V_r^T` of each matrix `x = U S V^T`, by SVD.

    `r` is the number of nonzero singular values: all of them become 1, and zeros stay zero. Slow; `orthogonalize`
    computes an approximation fast.

    The factor is computed in float64. At matrices of full rank it has derivatives of any order, forward and reverse,
    even if singular values are equal. At other matrices, the first derivative assumes that the rank does not change.

    A matrix that contains NaN or infinity gives a factor of NaN. Other matrices of the batch are not affected.

    Args:
        x: a tensor `(..., m, n)` in fp64, fp32, bf16 or fp16; any dim may be zero.
        rtol: singular values of at most `rtol` times the largest are treated as zero. None: `max(m, n)` times the
            epsilon of float64. Give a larger value if `x` is a low-rank matrix that was rounded to its dtype.

    Returns:
        A new tensor of `x`'s shape and dtype.

    Raises:
        TypeError, ValueError: as in `orthogonalize`; also ValueError if `rtol` is outside [0, 1).

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
    # Replace matrices with NaN or infinity by zeros, because the SVD would raise an error for the whole batch.
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    wide = torch.where(finite, x, torch.zeros_like(x)).double()
    tall = x.shape[-2] >= x.shape[-1]
    factor = _Factor.apply(wide, rtol) if tall else _Factor.apply(wide.mT, rtol).mT
    nans = torch.full_like(factor, torch.nan)
    return torch.where(finite, factor, nans).to(x.dtype)


class _Factor(torch.autograd.Function):
    """The polar factor of matrices `(..., m, n)`, m >= n, with derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rtol: float) -> Tensor:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        is_nonzero = s > rtol * s.amax(-1, keepdim=True)
        return (u * is_nonzero.to(s.dtype).unsqueeze(-2)) @ vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        x, ctx.rtol = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, p = ctx.saved_tensors
        return _derivative(x, p, grads[0], ctx.rtol), None  # the derivative is self-adjoint

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        x, p = ctx.saved_tensors
        return _derivative(x, p, tangents[0], ctx.rtol)


def _derivative(x: Tensor, p: Tensor, t: Tensor, rtol: float) -> Tensor:
    """Return the derivative of the polar factor `p` of the matrix `x` in the direction `t`.

    With `x = U S V^T` (nonzero singular values only), `p` is `U V^T`, and `x = p H` with the symmetric `H = V S V^T`.
    The derivative is the sum of three terms:

    1. `p K` for the part of `t` within the spaces of U and V. `K` is antisymmetric, with `H K + K H = A - A^T` for
       `A = p^T t V V^T`.
    2. `(I - p p^T) t H^+` for the part of `t` whose columns are outside the space of U.
    3. `p H^+ p^T t (I - V V^T)` for the part of `t` whose rows are outside the space of V.
    """
    h = p.mT @ x
    h = (h + h.mT) / 2  # symmetric but for rounding
    v_vt = p.mT @ p
    # The pseudoinverse H^+ has the same eigenvectors V, so H H^+ + H^+ H = V V^T + V V^T.
    h_plus = _Sylvester.apply(h, 2 * v_vt, rtol)
    pt_t = p.mT @ t
    a = pt_t @ v_vt
    k = _Sylvester.apply(h, a - a.mT, rtol)
    within = p @ k
    outside_columns = t @ h_plus - p @ (pt_t @ h_plus)
    outside_rows = p @ (h_plus @ (pt_t - a))  # p^T t - A is p^T t (I - V V^T)
    return within + outside_columns + outside_rows


def solve_sylvester(h: Tensor, c: Tensor) -> Tensor:
    """Return the solution `K` of `H K + K H = C` for positive definite matrices `H`, with derivatives of any order."""
    return _Sylvester.apply((h + h.mT) / 2, c, 0.0)


class _Sylvester(torch.autograd.Function):
    """The solution `K` of the Sylvester equation `H K + K H = C` on the range of a positive semidefinite `H`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, c: Tensor, rtol: float) -> Tensor:
        """Return `K`. Eigenvalues of `H` up to ``rtol`` times the largest one count as zero: `K` is zero there."""
        # In the basis of the eigenvectors V of H: K_ij = C_ij / (h_i + h_j), and zero outside the range of H.
        values, v = torch.linalg.eigh(h)
        is_in_range = values > rtol * values.amax(-1, keepdim=True)
        are_in_range = is_in_range.unsqueeze(-1) & is_in_range.unsqueeze(-2)
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        divisors = torch.where(are_in_range, sums, torch.inf)
        k_in_basis = (v.mT @ c @ v) / divisors
        return v @ k_in_basis @ v.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        h, _, ctx.rtol = inputs
        ctx.save_for_backward(h, output)
        ctx.save_for_forward(h, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        h, k = ctx.saved_tensors
        of_c = _Sylvester.apply(h, grads[0], ctx.rtol)
        return -(of_c @ k.mT + k.mT @ of_c), of_c, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Return the derivative K' of the solution K in the direction of the tangents H' and C'; None counts as zero.

        The derivative of `H K + K H = C` is `H K' + K' H = C' - H' K - K H'`, an equation of the same form.
        """
        h, k = ctx.saved_tensors
        h_tangent, c_tangent, _ = tangents  # the third is of rtol, which is a constant
        right_side = torch.zeros_like(k)
        if c_tangent is not None:
            right_side = c_tangent
        if h_tangent is not None:
            right_side = right_side - h_tangent @ k - k @ h_tangent
        return _Sylvester.apply(h, right_side, ctx.rtol)
