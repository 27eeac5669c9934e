"""Normalization: updates with a root mean square of 1, and weights that keep their Frobenius norm."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import EmptyState, Locality, checks, transform
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.iteration import unit_power
from muonfx.transforms.formulas import divide_unless
from muonfx.transforms.leafwise import WideStateDtype
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrixwise import MatrixCost, MatrixSlot, matrixwise
from muonfx.transforms.scale import of_leaves
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew


@matrixwise(position="sets_size")
def normalize_rows(*, view: MatrixView = MatrixView()):
    r"""Divide each row of each matrix by its root mean square, $u_{ij} / \sqrt{\mathrm{mean}_j(u_{ij}^2)}$.

    A row belongs to an output feature; in an embedding, to a token. Rows of zeros stay zero, and a NaN affects only its
    row. Multiplying the input by a power of two does not change a bit of the result.

    Args:
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is not a matrix or does not fit the view.

    Follows Scion (arXiv 2502.07529). It is Scion's ColNorm of a transposed embedding. Scion's RowNorm is this transform
    followed by ``scale_by_shape("fan_in")``.

    Example:
        >>> import muonfx as mfx
        >>> grads = {"w": torch.tensor([[3.0, -3.0], [0.0, 0.0]])}
        >>> mfx.contrib.normalize_rows().update(grads, mfx.core.EmptyState())[0]["w"]
        tensor([[ 1., -1.],
                [ 0.,  0.]])
    """

    def step(u: Tensor, s: EmptyState):
        return _to_unit_rms(u, dim=(-1,)), s  # over the columns j

    return EmptyState(), step


@matrixwise(position="sets_size")
def normalize_columns(*, view: MatrixView = MatrixView()):
    r"""Divide each column of each matrix by its root mean square, $u_{ij} / \sqrt{\mathrm{mean}_i(u_{ij}^2)}$.

    A column belongs to an input feature. Columns of zeros stay zero, and a NaN affects only its column.

    Args:
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is not a matrix or does not fit the view.

    Follows the ColNorm of Scion (arXiv 2502.07529).

    Example:
        >>> import muonfx as mfx
        >>> grads = {"w": torch.tensor([[3.0, 0.0], [-3.0, 0.0]])}
        >>> mfx.contrib.normalize_columns().update(grads, mfx.core.EmptyState())[0]["w"]
        tensor([[ 1.,  0.],
                [-1.,  0.]])
    """

    def step(u: Tensor, s: EmptyState):
        return _to_unit_rms(u, dim=(-2,)), s  # over the rows i

    return EmptyState(), step


@matrixwise(position="sets_size")
def normalize_matrices(*, view: MatrixView = MatrixView()):
    """Divide each matrix by the root mean square of its elements.

    With ``scale(0.2)`` after it, updates have the usual size of AdamW's updates. A zero matrix stays zero, and a NaN
    affects only its matrix.

    Args:
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is not a matrix or does not fit the view.

    Follows the RMS-aligned rescaling of AdaMuon (arXiv 2507.11005).

    Example:
        >>> import muonfx as mfx
        >>> grads = {"w": torch.tensor([[1.0, 5.0], [5.0, -7.0]])}
        >>> mfx.contrib.normalize_matrices().update(grads, mfx.core.EmptyState())[0]["w"]
        tensor([[ 0.2000,  1.0000],
                [ 1.0000, -1.4000]])
    """

    def step(u: Tensor, s: EmptyState):
        return _to_unit_rms(u, dim=(-2, -1)), s  # over all elements of a matrix

    return EmptyState(), step


@transform(locality=Locality.LEAF, reads_params=False, position="sets_size")
def normalize_leaves():
    """Divide each leaf of the updates, of any shape, by the root mean square of its elements.

    A leaf of zeros stays zero, and a NaN affects only its leaf.

    Follows the norm that Scion (arXiv 2502.07529) uses for biases.

    Example:
        >>> import muonfx as mfx
        >>> mfx.contrib.normalize_leaves().update(
        ...     {"b": torch.tensor([3e-30, -3e-30])}, mfx.core.EmptyState()
        ... )[0]
        {'b': tensor([ 1., -1.])}
    """
    # `of_leaves` passes flattened leaves
    divide_by_rms = functools.partial(_to_unit_rms, dim=(-1,))
    return of_leaves(divide_by_rms)


def _to_unit_rms(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Divide a tensor by its root mean square over the dims ``dim``: [3, -3] becomes [1, -1]. Zeros stay zero.

    With ``dim=(-1,)``, each row of a matrix is divided by its own root mean square.
    """
    if x.numel() == 0:  # the mean of no elements would be NaN
        return x
    wide = x.to(ew.wide_dtype(x.dtype))
    # Scale by exact powers of two before squaring, so that no square overflows or underflows.
    small = wide * unit_power(wide, dim)
    mean_square = small.square().mean(dim, keepdim=True)
    positive = torch.where(mean_square == 0, 1.0, mean_square)  # zeros are divided by 1, not by 0
    unit = small * positive.rsqrt()
    return unit.to(x.dtype)


class WeightNormsState(NamedTuple):
    """State of the transform `keep_weight_norms`: the norm of each matrix at `init`."""

    radius: PyTree
    """The Frobenius norm of each matrix at `init`, which the matrix keeps; of shape (..., 1, 1)."""


@matrixwise(reads_params=True, position="sets_size")
def match_weight_norms(*, view: MatrixView = MatrixView()):
    """Scale each matrix's update to the Frobenius norm of its weight.

    The learning rate is then the relative size of a step. If the weight is zero, its update is not scaled. An update of
    zero stays zero.

    Args:
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is not a matrix or does not fit the view; at `update`, ``params`` is missing.

    Follows Hyperball (Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1", 2025). It is the trust
    ratio of LARS (arXiv 1708.03888), for each matrix.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.full((2, 2), 3.0)}
        >>> tx = mfx.contrib.match_weight_norms()
        >>> tx.update({"w": torch.ones(2, 2)}, tx.init(params), params)[0]["w"].norm()
        tensor(6.)
    """

    def step(u: Tensor, s: EmptyState, p: Tensor):
        # u |p| / |u| = u / rms(u) * rms(p), since u and p have equally many elements.
        rows, columns = p.shape[-2:]
        number_of_elements = rows * columns
        rms_of_p = norm(p) * number_of_elements**-0.5
        unit_u = _to_unit_rms(u, (-2, -1))
        new_u = torch.where(rms_of_p == 0, u, unit_u * rms_of_p)
        return new_u, s

    return EmptyState(), step


@matrixwise(reads_params=True, position="last")
def keep_weight_norms(*, dtype: WideStateDtype = "auto", view: MatrixView = MatrixView()):
    r"""Change each matrix's update so that its weight keeps the Frobenius norm that it had at `init`.

    For a weight $w$ with the initial value $w_0$, the update $u$ becomes $R\,(w + u) / \|w + u\|_F - w$ with
    $R = \|w_0\|_F$. Put it after `scale_by_learning_rate`. A matrix that was zero at `init` is not constrained.

    Args:
        dtype: storage dtype of the norms. "auto" is float32, or float64 for float64 parameters; None is the dtype of
            each parameter.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: ``dtype`` is a string other than "auto"; at `init`, a leaf is not a matrix or does not fit the view;
            at `update`, ``params`` is missing.

    Follows Hyperball (Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1", 2025) as implemented
    by ``MuonH`` in Dion's repository, which raises an error for a zero matrix.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.scale_by_learning_rate(0.5), mfx.contrib.keep_weight_norms())
        >>> params = {"w": torch.tensor([[3.0, 4.0]])}
        >>> updates, _ = tx.update({"w": torch.tensor([[6.0, 0.0]])}, tx.init(params), params)
        >>> mfx.apply_updates(params, updates)["w"]
        tensor([[0., 5.]])
    """

    def step(u: Tensor, s: WeightNormsState, p: Tensor):
        # The new weight p + u is scaled to the norm at `init`, s.radius. A weight of zero cannot be scaled.
        new_norm = norm(p + u)
        is_free = (new_norm == 0) | (s.radius == 0)  # a weight that is or was zero
        new_u = _with_norm(u, p, new_norm, s.radius, is_free)
        return new_u, s

    radius_slot = MatrixSlot(norm, dtype)
    return WeightNormsState(radius_slot), step


@matrixwise(reads_params=True, position="before_learning_rate")
def floor_by_weight_norms(floor: ScalarOrSchedule = 0.35, *, view: MatrixView = MatrixView()):
    r"""Scale each matrix's update up if its Frobenius norm is below a fraction of the norm of its weight.

    The update $u$ of a weight $w$ becomes $u \max(1, \rho \|w\|_F / \|u\|_F)$. Larger updates do not change, and an
    update of zero stays zero.

    Args:
        floor: $\rho$, the smallest norm of an update relative to the norm of its weight, before the learning rate; not
            negative.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: ``floor`` is negative; at `init`, a leaf is not a matrix or does not fit the view; at `update`,
            ``params`` is missing.

    Follows the u/w floor of Skylight, a record of May 2026 in the optimization track of modded-nanogpt. There, it comes
    after `orthogonalize` and `normalize_neurons` in the chain.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.tensor([[6.0, 8.0]])}
        >>> tx = mfx.contrib.floor_by_weight_norms(0.5)
        >>> tx.update({"w": torch.tensor([[0.0, 0.5]])}, tx.init(params), params)[0]["w"]
        tensor([[0., 5.]])
    """
    floor = checks.at_least("floor", floor, 0.0)

    def step(u: Tensor, s: EmptyState, p: Tensor):
        u_norm = norm(u)
        least_norm = floor * norm(p)
        # An update of zero has no direction to scale up.
        is_small = (u_norm > 0) & (u_norm < least_norm)
        factor = divide_unless(~is_small, least_norm, u_norm, otherwise=1.0)
        return u * factor, s

    return EmptyState(), step


@matrixwise(reads_params=True, position="after_learning_rate")
def radial_brake(
    outward: ScalarOrSchedule = 0.5,
    inward: ScalarOrSchedule = 1.0,
    *,
    view: MatrixView = MatrixView(),
):
    r"""Change each matrix's update so that the Frobenius norm of its weight changes less.

    Only a fraction $s$ of the change is kept: ``outward`` if the norm grows, else ``inward``. The update $u$ of a
    weight $w$ becomes $R\,(w + u) / \|w + u\|_F - w$ with $R = \|w\|_F + s\,(\|w + u\|_F - \|w\|_F)$. Put this
    transform after `scale_by_learning_rate`. A weight that is zero is not constrained.

    Args:
        outward: the factor $s$ if the norm grows, from 0 (no growth) to 1 (no change of the update).
        inward: the factor $s$ if the norm falls, from 0 (no decrease) to 1 (no change of the update). A larger factor
            could reverse the weight.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: a number is not from 0 to 1; at `init`, a leaf is not a matrix or does not fit the view; at
            `update`, ``params`` is missing.

    Follows the radial brake in records of May 2026 in the optimization track of modded-nanogpt, and the hook of this
    name in Emerging-Optimizers. If both fractions are zero, each weight keeps its norm, as with `keep_weight_norms`.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.scale_by_learning_rate(1.0), mfx.contrib.radial_brake())
        >>> params = {"w": torch.tensor([[3.0, 4.0]])}
        >>> updates, _ = tx.update({"w": torch.tensor([[-3.0, -4.0]])}, tx.init(params), params)
        >>> mfx.apply_updates(params, updates)["w"]
        tensor([[4.5000, 6.0000]])
    """
    outward = checks.fraction("outward", outward)
    inward = checks.fraction("inward", inward)

    def step(u: Tensor, s: EmptyState, p: Tensor):
        """Return the update after which the weight p has the norm ``|p| + fraction * (|p + u| - |p|)``.

        For ``outward=0.5`` and an update that changes the norm from 5 to 10, the norm becomes 7.5.
        """
        old_norm = norm(p)
        new_norm = norm(p + u)
        change = new_norm - old_norm
        fraction_outward = ew.scalar_like(outward, new_norm)
        fraction_inward = ew.scalar_like(inward, new_norm)
        fraction = torch.where(new_norm > old_norm, fraction_outward, fraction_inward)
        radius = old_norm + change * fraction
        is_free = (old_norm == 0) | (new_norm == 0)  # a weight of zero cannot be scaled to a norm
        new_u = _with_norm(u, p, new_norm, radius, is_free)
        return new_u, s

    return EmptyState(), step


def _with_norm(u: Tensor, p: Tensor, new_norm: Tensor, radius: Tensor, is_free: Tensor) -> Tensor:
    """Return the update after which the weight has the norm ``radius``: ``radius (p + u) / new_norm - p``.

    ``p`` is the weight, ``u`` its update, and ``new_norm`` is the norm of ``p + u``. Where ``is_free``, the result is
    ``u``.
    """
    ratio = divide_unless(is_free, radius, new_norm, otherwise=1.0)
    new_p = (p + u) * ratio
    return torch.where(is_free, u, new_p - p)


def square_zeros(matrix: Tensor, side: int) -> Tensor:
    """Return zeros (..., n, n) for a stack of matrices with n rows (``side=-2``) or n columns (-1)."""
    *batch, _, _ = matrix.shape
    n = matrix.shape[side]
    return matrix.new_zeros((*batch, n, n))


def cost_of_sides(
    rectangular_products: int, square_products: float, longest: float = math.inf
) -> MatrixCost:
    """Return a function from the shape of a matrix to the number of operations of an update with a factor per side.

    Matrices are distributed over ranks by this number. A multiply-add is two operations.

    >>> cost = cost_of_sides(rectangular_products=1, square_products=0)
    >>> cost(2, 3, torch.float32)  # 2 * (2 * 6 + 3 * 6)
    60.0

    Args:
        rectangular_products: the number of products of the factor of a side and the matrix, for each side.
        square_products: the number of products of two matrices in the shape of this factor.
        longest: a longer side has no factor.
    """

    def cost(rows: int, columns: int, dtype: torch.dtype) -> float:
        """Return the operations for one matrix. Each side has a factor, n by n for the length n, unless it is long."""
        operations = 0.0
        for n in (rows, columns):
            if n > longest:  # the side has no factor, so it costs nothing
                continue
            multiply_adds = rectangular_products * n * rows * columns  # factor times matrix
            multiply_adds += square_products * n**3  # factor times factor
            operations += 2.0 * multiply_adds
        return operations

    return cost


def norm(matrix: Tensor) -> Tensor:
    """Return the Frobenius norms of a stack of matrices, as (..., 1, 1) in fp32 or wider, without overflow.

    The matrix [[3, 4]] has the norm [[5]].
    """
    wide = matrix.to(ew.wide_dtype(matrix.dtype))
    if matrix.numel() == 0:
        *batch, _, _ = matrix.shape
        return wide.new_zeros((*batch, 1, 1))
    power = unit_power(wide)  # a power of two by which the squares are of usual size
    squares = (wide * power).square()
    sum_of_squares = squares.sum((-2, -1), keepdim=True)
    return ew.safe_sqrt(sum_of_squares) / power  # `safe_sqrt` has a finite derivative at 0
