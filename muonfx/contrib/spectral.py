"""Clipping of the singular values of updates, and scaling of updates by the dual norm of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx import polar
from muonfx.core import Donation, EmptyState, Transform, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.polar.iteration import power_of_two
from muonfx.select.matrix_view import Matrices, MatrixView
from muonfx.transforms.matrixwise import matrix_locality, matrixwise, name_patterns
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew

__all__ = ["clip_singular_values", "scale_by_dual_norm"]


LARGEST = 3e4
"""The largest Frobenius norm, in thresholds, of a matrix that is clipped without being scaled down first."""


@matrixwise
def clip_singular_values(threshold: float = 1.0, *, steps: int = 10, view: MatrixView = MatrixView()):
    r"""Replace each matrix $U S V^T$ by $U \min(S, \tau)\, V^T$, by matrix products alone.

    With the polar factor $O$ and the symmetric $A = O X^T - \tau I$, this is $X - \tfrac12 (A + |A|)\, O$ where $|A| =
    A\,\mathrm{sign}(A)$: two Newton-Schulz iterations in fp32 or fp64, with the coefficients "polar_express". A matrix
    whose Frobenius norm is at most $\tau$ is returned unchanged.

    Args:
        threshold: $\tau$, positive.
        steps: the number of steps of each iteration. With 10, the error is at most 0.002 $\tau$ for singular values of
            up to 1,000 $\tau$; with 15, at most 0.01 $\tau$ for singular values of up to 10,000 $\tau$. A matrix with
            a norm above 30,000 $\tau$ is first scaled down to that norm, so that its singular values below $\tau$
            become too small.
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: ``threshold`` is not positive and finite, ``steps`` is below 1; at `init`, a leaf is not a matrix
            or does not fit the view.

    Follows the spectral hard cap of Cesista ("Fast, Numerically Stable, and Auto-Differentiable Spectral Clipping via
    Newton-Schulz Iteration", 2025) and NVIDIA's Emerging-Optimizers. This form keeps small singular values unchanged,
    even if the iteration has not converged for them.

    Example:
        >>> import muonfx as mfx
        >>> u = {"w": torch.diag(torch.tensor([5.0, 0.5]))}
        >>> mfx.contrib.clip_singular_values(2.0).update(u, mfx.core.EmptyState())[0]["w"].diagonal()
        tensor([2.0000, 0.5000])
    """
    checks.positive("threshold", threshold)
    polar.explain((0, 0), coefficients="polar_express", steps=steps)  # raises if the steps are malformed

    def step(u: Tensor, s: EmptyState):
        return _clip(u, threshold, steps), s

    return EmptyState(), step


def _clip(matrix: Tensor, threshold: float | Tensor, steps: int) -> Tensor:
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    # The excess is a difference of numbers as large as the matrix: above LARGEST it would be rounding error only.
    power = power_of_two(x.detach().abs().amax((-2, -1), keepdim=True))
    small = x * power
    share = LARGEST * threshold * power / _norm(small).clamp(min=1.0)
    x = torch.where(share < 1.0, small * share.clamp(max=1.0) / power, x)
    factor = _polar(x, steps)
    identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    excess = factor @ x.mT - threshold * identity
    excess = (excess + excess.mT) / 2
    clipped = x - (excess + excess @ _polar(excess, steps)) @ factor / 2
    # Rounding errors are relative to the threshold, so a matrix with a smaller norm is returned unchanged.
    clipped = torch.where(_norm(x) <= threshold, x, clipped)
    return clipped.mT if is_tall else clipped


def _polar(x: Tensor, steps: int) -> Tensor:
    return polar.orthogonalize(x, coefficients="polar_express", steps=steps, method="standard", dtype=x.dtype)


def _norm(x: Tensor) -> Tensor:
    return ew.safe_sqrt(x.square().sum((-2, -1), keepdim=True))


@transform(
    locality=lambda inner, *, view, **_: max(matrix_locality(view=view), inner.locality),
    reads_params=lambda inner, **_: inner.reads_params,
    name_patterns=name_patterns,
)
def scale_by_dual_norm(inner: Transform, *, view: MatrixView = MatrixView()):
    r"""Multiply a transform's update of each matrix by its inner product with the incoming gradient.

    The update is $\langle G, D(G) \rangle\, D(G)$. If the inner transform $D$ gives the steepest direction of length 1
    in a norm, the inner product is the dual norm of the gradient, and the update is the steepest descent in this norm.
    The dual norm is the sum of singular values for `orthogonalize`, and the sum of magnitudes for the sign. Updates
    then shrink with the gradient.

    Args:
        inner: the transform whose updates are scaled.
        view: which matrices a leaf consists of; the same as for the inner transform.

    Raises:
        ValueError: at `update`, a leaf is not a matrix or does not fit the view.

    Follows PolarGrad (arXiv 2505.21799), Bernstein and Newhouse (arXiv 2409.20325) and ``optax.contrib.muon`` with
    ``adaptive=True``.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_dual_norm(mfx.orthogonalize(coefficients="polar_express"))
        >>> grads = {"w": torch.diag(torch.tensor([3.0, 1.0]))}
        >>> tx.update(grads, tx.init(grads))[0]["w"].diagonal().round(decimals=2)
        tensor([4., 4.])
    """

    def init(params: PyTree) -> PyTree:
        return inner.functions.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object):
        # The gradient is needed after the inner transform, so it is not donated.
        out, state = inner.run(updates, state, params, donate=Donation(False, donate.state), **extras)
        at = Present(out)
        directions = at.pick(out)
        # An accumulating inner transform may update a leaf without a gradient, which counts as zero.
        pairs = zip(directions, at.pick(updates), strict=True)
        gradients = [torch.zeros_like(u) if g is None else g for u, g in pairs]
        matrices = Matrices(view, at, directions)
        pairs = zip(matrices.of_updates, matrices.split(gradients), strict=True)
        scaled = [list(map(_scale_by_inner_product, *own)) for own in pairs]
        return at.fill(matrices.join(scaled, directions)), state

    return init, update


def _scale_by_inner_product(direction: Tensor, gradient: Tensor) -> Tensor:
    if direction.numel() == 0:
        return direction.clone()
    wide = ew.wide_dtype(direction.dtype)
    d, g = direction.to(wide), gradient.to(wide)
    power = power_of_two(g.detach().abs().amax((-2, -1), keepdim=True))
    product = (g * power * d).sum((-2, -1), keepdim=True)
    return (d * product / power).to(direction.dtype)
