"""Shampoo: gradients multiplied by inverse fourth roots of their Kronecker factors."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.contrib.norms import cost_of_sides, norm, square_zeros
from muonfx.core import Transform, checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.exact import solve_sylvester
from muonfx.transforms.formulas import divide_unless, running_average
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrixwise import MatrixCost, MatrixSlot, matrixwise, product
from muonfx.tree import PyTree

_EIGH_PRODUCTS = 12.0
"""The number of products of square matrices that take as long as one eigendecomposition. On a CPU, it is 10 to 14."""


class ShampooState(NamedTuple):
    """State of `scale_by_shampoo`, in fp32, or fp64 for fp64 parameters."""

    count: PyTree  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of gradients of each matrix so far, of shape (..., 1, 1)."""
    left: PyTree
    """The average of $G G^T$ of each matrix, (..., rows, rows)."""
    right: PyTree
    """The average of $G^T G$ of each matrix, (..., columns, columns)."""
    left_root: PyTree
    """The inverse fourth root of ``left``, after bias correction and damping."""
    right_root: PyTree
    """The inverse fourth root of ``right``, after bias correction and damping."""


def _cost(tx: Transform, device: str, compute: torch.dtype) -> MatrixCost:
    """Return a function from the shape of a matrix to the number of operations of its update."""
    # Each side has one factor, one product with its root, and one product of eigenvectors.
    return cost_of_sides(rectangular_products=2, square_products=1 + _EIGH_PRODUCTS)


@matrixwise(short_names={"eps": "damping"}, position="sets_size", cost=_cost)
def scale_by_shampoo(
    b2: ScalarOrSchedule = 0.95,
    damping: ScalarOrSchedule = 1e-4,
    *,
    refresh: int = 1,
    view: MatrixView = MatrixView(),
):
    r"""Multiply each gradient $G$ on both sides by inverse fourth roots of running averages of $G G^T$ and $G^T G$.

    The update is $\hat L_t^{-1/4} G_t \hat R_t^{-1/4}$, where
    $L_t = \beta_2 L_{t-1} + (1 - \beta_2) G_t G_t^T$, $R_t = \beta_2 R_{t-1} + (1 - \beta_2) G_t^T G_t$, and hats mark
    division by $1 - \beta_2^t$ and damping: $\epsilon$ times the Frobenius norm of a factor is added to its
    eigenvalues. With the first gradient alone and without damping, the update is the polar factor, as in Muon.

    Args:
        b2: $\beta_2$, in [0, 1).
        damping: $\epsilon$, positive. Rounding in fp32 changes eigenvalues by about $10^{-7}$ of the largest, so with a
            smaller number, updates depend more on rounding.
        refresh: the number of steps from one computation of the roots to the next. The eigendecompositions run at every
            step for any value, because no branch may depend on a count, so larger values save no time. They reproduce
            runs of optimizers that compute the roots rarely. If all gradients up to a refresh are zero, as for an
            adapter whose other factor starts at zero, updates are the gradients themselves until the next refresh. In
            Distributed Shampoo and pytorch_optimizer they are multiples of the gradients, of the size that grafting
            sets; here `normalize_matrices` sets it.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: an argument is out of range; at `init`, a leaf is not a matrix or does not fit the view.

    The update has about the size of an orthogonal matrix, and there is no grafting: no other optimizer sets its size.
    `normalize_matrices` after it sets the root mean square. The paper sums over all gradients instead of averaging, so
    its updates shrink with time, and it adds a constant instead of the damping.

    An eigendecomposition of a side of length n takes about as long as 12 products of n by n matrices, so long sides,
    such as a vocabulary, need another transform.

    Squares of gradients must fit into fp32. A gradient beyond 1e19 gives NaN, and one below 1e-19 counts as little or
    nothing in the factors. `normalize_matrices` in front makes the result independent of the size.

    Follows Shampoo (Gupta, Koren and Singer, arXiv 1802.09568), with the averages of Anil et al. (arXiv 2002.09018).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_shampoo()
        >>> grads = {"w": torch.tensor([[3.0, 0.0], [0.0, 1.0]])}
        >>> tx.update(grads, tx.init(grads))[0]["w"].round(decimals=2)
        tensor([[1., 0.],
                [0., 1.]])
    """
    b2 = checks.in_unit_interval("b2", b2)
    damping = checks.positive("damping", damping)
    checks.positive_int("refresh", refresh)

    def step(u: Tensor, s: ShampooState) -> tuple[Tensor, ShampooState]:
        """Average both factors, refresh their inverse roots if due, and multiply the gradient by the roots."""
        # Products round by the strides and alignment of factors.
        g = u.clone(memory_format=torch.contiguous_format)
        is_due = s.count.remainder(refresh) == 0
        count = s.count + 1.0
        correction = 1.0 - torch.pow(b2, count)

        left = running_average(s.left, g @ g.mT, b2)
        right = running_average(s.right, g.mT @ g, b2)
        new_left_root = _inverse_root(left, correction, damping)
        new_right_root = _inverse_root(right, correction, damping)
        left_root = torch.where(is_due, new_left_root, s.left_root)
        right_root = torch.where(is_due, new_right_root, s.right_root)
        update = product(left_root, g) @ right_root
        return update, ShampooState(
            count=count,
            left=left,
            right=right,
            left_root=left_root,
            right_root=right_root,
        )

    left_slot = MatrixSlot(functools.partial(square_zeros, side=-2))
    right_slot = MatrixSlot(functools.partial(square_zeros, side=-1))
    return ShampooState(
        count=MatrixSlot(),
        left=left_slot,
        right=right_slot,
        left_root=left_slot,
        right_root=right_slot,
    ), step


def _inverse_root(factor: Tensor, correction: Tensor, damping: Any) -> Tensor:
    """Return ``(L + damping |L| I)^(-1/4)`` for ``L = factor / correction``: the identity for L = 0, and NaN for NaN.

    Args:
        factor: symmetric matrices, such as the running average of g g^T.
        correction: Adam's correction of the bias of this average, which started at zero: ``1 - b2^t``.
        damping: added to the eigenvalues of L, relative to its Frobenius norm.

    >>> factor = torch.diag(torch.tensor([32.0, 2.0]))
    >>> _inverse_root(factor, correction=torch.tensor([[2.0]]), damping=0.0).diagonal()
    tensor([0.5000, 1.0000])
    """
    # First the root of the factor divided by its norm. The identity takes the place of a factor of zero, and of one
    # with NaN or infinity, for which `eigh` would raise an error.
    size = norm(factor)
    is_usual = size.isfinite() & (size > 0)
    n = factor.shape[-1]
    identity = torch.eye(n, dtype=factor.dtype, device=factor.device)
    unit_factor = divide_unless(~is_usual, factor, size, otherwise=0.0)
    damped_factor = unit_factor + damping * identity
    usual_factor = torch.where(is_usual, damped_factor, identity)
    unit_root = _InverseRoot.apply(usual_factor)

    # (size / correction * unit_factor)^(-1/4) = (correction / size)^(1/4) * unit_root. The fourth roots precede the
    # division, because the quotient overflows for a tiny factor. For a factor of zero, the quotient is 1.
    usual_size = torch.where(is_usual, size, correction)
    root_of_correction = correction.sqrt().sqrt()
    root_of_size = usual_size.sqrt().sqrt()
    root = unit_root * (root_of_correction / root_of_size)
    return torch.where(size.isfinite(), root, torch.nan)


class _InverseRoot(torch.autograd.Function):
    """The inverse fourth root of positive definite matrices, with derivatives even if eigenvalues are equal."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(x)
        eps = torch.finfo(x.dtype).eps
        values = values.clamp(min=eps)  # only rounding makes them smaller
        # The rounding of a power depends on the position of the element.
        roots = values.unsqueeze(-2).sqrt().rsqrt()
        return (vectors * roots) @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return _derivative(x, y, grads[0])  # the derivative is self-adjoint

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        x, y = ctx.saved_tensors
        return _derivative(x, y, tangents[0])


def _derivative(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Return the derivative of the inverse fourth root ``y`` of ``x`` in the direction ``t``."""
    # A square root S of A has S dS + dS S = dA, and the inverse Y of the fourth root R has dY = -Y dR Y.
    root = x @ y @ y
    fourth_root = root @ y
    symmetric_t = (t + t.mT) / 2
    d_root = solve_sylvester(root, symmetric_t)
    d_fourth_root = solve_sylvester(fourth_root, d_root)
    return -y @ d_fourth_root @ y
