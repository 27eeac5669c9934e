"""SOAP: Adam in the eigenbases of the Kronecker factors of Shampoo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muonfx.contrib.norms import cost_of_sides, norm, square_zeros
from muonfx.core import Transform, checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.iteration import unit_power
from muonfx.transforms.formulas import running_average
from muonfx.transforms.leafwise import Slot
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrixwise import MatrixCost, MatrixSlot, matrixwise, product
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar

Factors = Literal["shampoo", "kl"]
"""The factors of `scale_by_soap`."""

_SHIFT = 2.0**-13
"""Added to the eigenvalues of a factor, scaled to a maximum in [1, 2), so that rounding does not choose the basis."""

_LARGEST = 2.0**48
"""A gradient with larger elements is scaled down: then the squares of 10,000 by 10,000 matrices are finite in fp32."""

_QR_PRODUCTS = 5.0
"""The number of products of square matrices that take as long as one QR decomposition. On a CPU, it is 4 to 7."""


class SoapState(NamedTuple):
    """State of `scale_by_soap`, in fp32, or fp64 for fp64 parameters.

    A side that is longer than ``max_precondition_size`` has no factor and no basis: their shape is (..., 0, 0).
    """

    count: PyTree  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of gradients of each matrix so far, of shape (..., 1, 1)."""
    mu: PyTree
    """The average of the gradients: a tree like the parameters."""
    nu: PyTree
    """The average of the squared gradients in the bases: a tree like the parameters."""
    left: PyTree
    """The average of $G G^T$ of each matrix, or its KL form, (..., rows, rows)."""
    right: PyTree
    """The average of $G^T G$ of each matrix, or its KL form, (..., columns, columns)."""
    left_basis: PyTree
    """The basis $P$: orthogonal, near the eigenvectors of ``left``, which are sorted by falling eigenvalue."""
    right_basis: PyTree
    """The basis $Q$: orthogonal, near the eigenvectors of ``right``, which are sorted by falling eigenvalue."""


def _cost(tx: Transform, device: str, compute: torch.dtype) -> MatrixCost:
    """Return a function from the shape of a matrix to the number of operations of its update."""
    longest = tx.arguments["max_precondition_size"]
    if tx.arguments["factors"] == "kl":
        return cost_of_sides(
            rectangular_products=5, square_products=2 + _QR_PRODUCTS, longest=longest
        )
    # Each side has three rotations of the gradient and one factor, then one product of factor and basis.
    return cost_of_sides(rectangular_products=4, square_products=1 + _QR_PRODUCTS, longest=longest)


@matrixwise(
    short_names={"betas": ("b1", "b2"), "momentum": "b1", "eps": "eps"},
    position="sets_size",
    cost=_cost,
)
def scale_by_soap(
    b1: ScalarOrSchedule = 0.95,
    b2: ScalarOrSchedule = 0.95,
    eps: ScalarOrSchedule = 1e-8,
    *,
    factors: Factors = "shampoo",
    refresh: int = 1,
    max_precondition_size: int = 10_000,
    view: MatrixView = MatrixView(),
):
    r"""Apply Adam in the eigenbases of running averages of $G G^T$ and $G^T G$, for gradients $G$.

    Each step computes, with the bases $P$ and $Q$:

    - the moments $m_t = \beta_1 m_{t-1} + (1 - \beta_1) G_t$ and
      $v_t = \beta_2 v_{t-1} + (1 - \beta_2) (P^T G_t Q)^2$;
    - the update $P \frac{P^T \hat m_t Q}{\sqrt{\hat v_t} + \epsilon} Q^T$, where hats mark the bias correction of
      Adam;
    - the factor $L_t = \beta_2 L_{t-1} + (1 - \beta_2) G_t G_t^T$, and $R_t$ likewise from $G_t^T G_t$;
    - the next $P$: the orthogonal factor of the QR decomposition of $(L_t + \delta I) P$, with columns and $v_t$ sorted
      by falling $P^T L_t P$. The next $Q$ follows likewise from $R_t$.

    The first gradient of a matrix only initializes $L$, $R$ and the bases, without sorting; its update is zero.

    Args:
        b1: $\beta_1$, in [0, 1).
        b2: $\beta_2$, in [0, 1).
        eps: added to the root, not negative.
        factors: "shampoo" for the averages above. "kl" for the factors of KL-SOAP, which minimize the KL divergence
            between two Gaussians, with the covariance of the gradients and with $L \otimes R$. Each gradient is then
            whitened by the other factor: $G_t R_{t-1}^{-1} G_t^T / n$ takes the place of $G_t G_t^T$, and
            $G_t^T L_{t-1}^{-1} G_t / m$ of $G_t^T G_t$, for m by n matrices.
        refresh: the number of steps from one new basis to the next. Larger values reproduce runs of optimizers whose
            default is 10. They save no time: no branch may depend on a count, so the QR decompositions run at every
            step.
        max_precondition_size: sides longer than this keep the identity as their basis. The QR decomposition of a side
            of length n takes about $8 n^3 / 3$ operations.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: an argument is out of range; at `init`, a leaf is not a matrix or does not fit the view.

    The bases start as the identity, where the authors compute the eigenvectors of the first $L$ and $R$. These
    matrices often have a low rank, and the eigenvectors of equal eigenvalues depend on rounding, so the result would
    depend on the layout. For the same reason $\delta$ is not zero: it is $2^{-13}$ of the largest element of $L$,
    rounded down to a power of two. With a refresh at every step, the bases are nearer to the eigenvectors from the
    third gradient on than after a start at eigenvectors with a refresh at every tenth step, and after 20 steps the
    start makes no difference.

    With "kl", $R^{-1}$ is $Q \Lambda^{-1} Q^T$ with the diagonal $\Lambda$ of $Q^T R Q$. Since zeros in $\Lambda$ would
    dominate the averages, $2^{-13}$ of the largest element is added to all elements, and the mean element times
    $\beta_2^t / (1 - \beta_2^t)$, for $t$ gradients so far. The second term gives the identity the weight that the
    average does not have yet. Before the first gradient, $R$ counts as the identity times the root mean square of this
    gradient, so that a multiple of all gradients gives the same bases. The authors start with a constant instead. A
    side without a factor counts as the identity. Each factor needs two more products per step.

    The updates of rectangular matrices are sensitive to rounding. The factor of the longer side has zero eigenvalues
    until there are enough gradients, and rounding chooses the basis of their space. A relative change of all gradients
    by 1e-7 changes updates of 32 by 128 to 128 by 512 matrices by 5 to 53 percent, and of 32 by 32 matrices by less
    than 0.01 percent. Equal runs therefore need bitwise equal gradients. A ``max_precondition_size`` between both sides
    keeps the identity as basis of the longer side, and then the change is below 0.01 percent.

    A gradient whose largest element is beyond $2^{48}$ (2.8e14) is scaled down, to less than twice that, so that its
    squares do not overflow fp32: an infinite factor would be lost for good.

    Follows SOAP (Vyas et al., arXiv 2409.11321) and KL-SOAP (Lin et al., arXiv 2509.03378).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_soap()
        >>> grads = {"w": torch.tensor([[3.0, 0.0], [0.0, 1.0]])}
        >>> first, state = tx.update(grads, tx.init(grads))
        >>> second, state = tx.update(grads, state)
        >>> first["w"], second["w"].diag().round(decimals=3)
        (tensor([[0., 0.],
                [0., 0.]]), tensor([1., 1.]))
    """
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)
    eps = checks.at_least("eps", eps, 0.0)
    if factors not in ("shampoo", "kl"):
        raise ValueError(f"factors: found {factors!r}, expected 'shampoo' or 'kl'")
    checks.positive_int("refresh", refresh)
    checks.positive_int("max_precondition_size", max_precondition_size)

    def slot(start: Callable[..., Tensor], side: int) -> MatrixSlot:
        """Declare a factor or a basis of one side: -2 for the rows, or -1 for the columns."""
        return MatrixSlot(functools.partial(start, side=side, longest=max_precondition_size))

    def step(u: Tensor, s: SoapState) -> tuple[Tensor, SoapState]:
        """Return Adam's update in the current bases, then average the factors and refresh the bases.

        The names are as in the docstring of `scale_by_soap`: bases p and q, moments m and v, factors left (L) and right
        (R). For gradients g of shape (..., rows, columns), p and left have the shape (..., rows, rows), and q and right
        (..., columns, columns). A basis and a factor are empty if the side is too long.
        """
        is_first = s.count == 0
        is_due = s.count.remainder(refresh) == 0
        t = s.count.clamp(min=1.0)  # the first gradient is not averaged
        c1 = 1.0 - torch.pow(b1, t)
        c2 = 1.0 - torch.pow(b2, t)
        # Products round by the strides and the alignment of their factors, which copies have in common.
        g = u.clone(memory_format=torch.contiguous_format)
        g = _limited(g)
        p = s.left_basis.clone(memory_format=torch.contiguous_format)
        q = s.right_basis.clone(memory_format=torch.contiguous_format)

        # m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) (p^T g q)^2. The first gradient changes neither.
        rotated_g = _rotate(g, p, q)
        new_m = running_average(s.mu, g, b1)
        new_v = running_average(s.nu, rotated_g.square(), b2)
        m = torch.where(is_first, s.mu, new_m)
        v = torch.where(is_first, s.nu, new_v)

        # update = p (p^T (m / c1) q / (sqrt(v / c2) + eps)) q^T. For the first gradient, it is zero.
        root = ew.safe_sqrt(v / c2)
        divisor = torch.where(is_first, 1.0, root + eps)
        rotated_m = _rotate(m, p, q)
        rotated_update = rotated_m / divisor / c1
        update = _rotate(rotated_update, p.mT, q.mT)
        update = torch.where(is_first, 0.0, update)

        # L = b2 L + (1 - b2) g g^T,  R = b2 R + (1 - b2) g^T g. KL-SOAP whitens g by the other factor first.
        g_for_left = g
        g_for_right = g.mT
        if factors == "kl":
            # The averages started at zero. This start has the weight 1 - c2, and all gradients together have c2.
            missing = 1.0 / c2 - 1.0  # (1 - c2) / c2
            g_for_left = _whiten(g, s.right, q, missing)
            g_for_right = _whiten(g.mT, s.left, p, missing)
        left = _averaged(s.left, g_for_left, b2)
        right = _averaged(s.right, g_for_right, b2)

        # A new basis has another order of columns, and the second moment is sorted likewise.
        if left.shape[-1]:
            p, order = _refreshed(left, p, is_due, is_first)
            v = v.take_along_dim(order.mT, -2)
        if right.shape[-1]:
            q, order = _refreshed(right, q, is_due, is_first)
            v = v.take_along_dim(order, -1)
        return update, SoapState(
            count=s.count + 1.0,
            mu=m,
            nu=v,
            left=left,
            right=right,
            left_basis=p,
            right_basis=q,
        )

    return SoapState(
        count=MatrixSlot(),
        mu=Slot(),
        nu=Slot(),
        left=slot(_zeros, -2),
        right=slot(_zeros, -1),
        left_basis=slot(_identity, -2),
        right_basis=slot(_identity, -1),
    ), step


def _zeros(matrix: Tensor, side: int, longest: int) -> Tensor:
    """Return zeros (..., n, n) for the length n of a side, -2 or -1; (..., 0, 0) if it is more than ``longest``."""
    if matrix.shape[side] > longest:
        return matrix.new_zeros((*matrix.shape[:-2], 0, 0))
    return square_zeros(matrix, side)


def _identity(matrix: Tensor, side: int, longest: int) -> Tensor:
    """Return the first basis of a side: the identity (..., n, n), or (..., 0, 0) if n is more than ``longest``."""
    zeros = _zeros(matrix, side, longest)
    identity = torch.eye(zeros.shape[-1], dtype=zeros.dtype, device=zeros.device)
    return zeros + identity


def _rotate(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.mT @ x @ right``. An empty ``left`` or ``right`` counts as the identity."""
    if left.shape[-1]:
        x = product(left.mT, x)
    if right.shape[-1]:
        x = x @ right
    return x


def _averaged(factor: Tensor, g: Tensor, b2: Scalar) -> Tensor:
    """Return ``b2 factor + (1 - b2) g g^T``. An empty factor stays empty."""
    if not factor.shape[-1]:
        return factor
    return running_average(factor, g @ g.mT, b2)


def _limited(g: Tensor) -> Tensor:
    """Return matrices, of which those with an element beyond `_LARGEST` are scaled down by a power of two."""
    largest = g.detach().abs().amax((-2, -1), keepdim=True)
    power = torch.where(largest > _LARGEST, _LARGEST * unit_power(g), 1.0)
    return g * power


def _whiten(g: Tensor, factor: Tensor, basis: Tensor, missing: Tensor) -> Tensor:
    """Return w with ``w w^T = g R^-1 g^T / n`` for gradients g (m by n): ``w = g Q / sqrt(n Lambda)``.

    R is a running average of n by n matrices, and about ``Q Lambda Q^T`` with a diagonal matrix Lambda.

    Args:
        g: the gradients.
        factor: R; empty if there is none, which counts as the identity.
        basis: Q, orthogonal, whose columns are near the eigenvectors of R.
        missing: the weight of the zeros with which the average R started, relative to the weight of its gradients: 0.1
            / 0.9 if the weights are 0.1 and 0.9.
    """
    rows, columns = g.shape[-2:]
    root_n = columns**0.5
    if not factor.shape[-1]:
        return g / root_n
    # Lambda, the diagonal of Q^T R Q. A zero in it would make its column dominate, so a multiple of the identity is
    # added: the mean with the missing weight, and always a small number.
    factor_times_basis = factor @ basis
    eigenvalues = (basis * factor_times_basis).sum(-2, keepdim=True)
    mean = eigenvalues.mean(-1, keepdim=True)
    largest = eigenvalues.amax(-1, keepdim=True)
    damped = eigenvalues + missing * mean + _SHIFT * largest
    # Before the first gradient, R is zero, and the identity times the root mean square of g takes its place.
    rms = norm(g) / (rows**0.5 * root_n)
    damped = torch.where(largest == 0, rms, damped)
    # If all gradients have been zero, g is zero too, and any divisor gives zero.
    positive = torch.where(damped <= 0, 1.0, damped)
    size = positive.sqrt() * root_n
    return g @ basis / size


def _refreshed(
    factor: Tensor, basis: Tensor, is_due: Tensor, is_first: Tensor
) -> tuple[Tensor, Tensor]:
    """Bring a basis nearer to the eigenvectors of ``factor`` by one power iteration, in the order of the eigenvalues.

    For the factor ``diag(1, 4)`` and the identity as basis, the two columns are exchanged.

    Args:
        factor: symmetric matrices (..., n, n).
        basis: orthogonal matrices, whose columns are near the eigenvectors.
        is_due: whether the basis changes at this step, (..., 1, 1).
        is_first: whether the basis is still the identity with which it starts.

    Returns:
        The new basis, and the index (..., 1, n) that each of its columns had in the old basis.
    """
    # 1. Multiply by factor + delta I. The factor is scaled to a maximum in [1, 2), so that delta is a constant.
    scaled_factor = factor * unit_power(factor)
    shifted_product = scaled_factor @ basis + _SHIFT * basis

    # 2. Sort the columns by falling eigenvalue. The identity is not sorted: the order of its columns says nothing yet,
    # and each change of order is a jump.
    eigenvalues = (basis * shifted_product).sum(-2, keepdim=True)
    is_sorted = is_due & ~is_first
    order = _order_of(eigenvalues, is_sorted)
    sorted_product = shifted_product.take_along_dim(order, -1)

    # 3. Make the columns orthonormal. A positive diagonal of R makes the decomposition unique.
    q, r = torch.linalg.qr(sorted_product)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    signs = torch.where(diagonal < 0, -1.0, 1.0)
    unique_q = q * signs.unsqueeze(-2)
    new_basis = torch.where(is_due, unique_q, basis)
    # The columns of `q` are contiguous; the state keeps the strides that `init` and `load` give it.
    return new_basis.contiguous(), order


def _order_of(eigenvalues: Tensor, is_sorted: Tensor) -> Tensor:
    """Return the indices of the eigenvalues (..., 1, n) in falling order; where ``is_sorted`` is False, 0 to n - 1."""
    # Eigenvalues that differ by less than the shift keep their order, which would depend on rounding.
    n = eigenvalues.shape[-1]
    rounded = (eigenvalues / _SHIFT).round()
    falling = rounded.argsort(dim=-1, descending=True, stable=True)
    unsorted = torch.arange(n, device=eigenvalues.device)
    return torch.where(is_sorted, falling, unsorted.expand_as(falling))
