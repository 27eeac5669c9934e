"""NorMuon's normalization of neurons: it divides each row or column of a matrix by its running root mean square."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.iteration import unit_power
from muonfx.transforms.formulas import divide_unless, running_average
from muonfx.transforms.leafwise import WideStateDtype
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrixwise import MatrixSlot, matrixwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew


class NeuronsState(NamedTuple):
    """State of the transform `normalize_neurons`: the running mean square of each row or column."""

    nu: PyTree
    """For each parameter the running mean square of each row, (..., rows, 1), or of each column, (..., 1, columns)."""


@matrixwise
def normalize_neurons(
    decay: ScalarOrSchedule = 0.95,
    eps: ScalarOrSchedule = 1e-8,
    *,
    axis: Literal["rows", "longer"] = "rows",
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Divide each row of a matrix by the root of its running mean square.

    The running mean square of each row i is $v_i \leftarrow \beta v_i + (1 - \beta)\,\mathrm{mean}_j(u_{ij}^2)$. The
    update is $u_{ij} / (\sqrt{v_i} + \epsilon)$, scaled so that each matrix keeps its Frobenius norm. Put it after
    `orthogonalize` in a chain. Norms neither overflow nor underflow. A mean square beyond the range of its dtype is
    stored as the largest finite number.

    Args:
        decay: $\beta$, in [0, 1).
        eps: $\epsilon$, added to the root, not negative.
        axis: "rows" normalizes rows, as in the paper and in Dion's package. "longer" normalizes columns if a matrix has
            more columns than rows, else rows, as in modded-nanogpt and Emerging-Optimizers. In an orthogonalized
            matrix, the vectors along the other axis all have norm 1 already.
        dtype: storage dtype of the mean squares. "auto" is float32, or float64 for float64 parameters; None is the
            dtype of each parameter.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`. Each matrix keeps its
            own norm.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is
            not a matrix.

    Follows NorMuon (arXiv 2510.05491). `muonfx.contrib.normalize_matrices` and ``scale(0.2)`` after this transform
    apply the paper's factor $0.2\sqrt{mn} / \|U\|_F$. ``scale_by_shape("match_rms_adamw")`` applies it if the input is
    orthogonal, which Newton-Schulz returns approximately.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.normalize_neurons()
        >>> params = {"w": torch.zeros(2, 2)}
        >>> tx.update({"w": torch.tensor([[5.0, 5.0], [1.0, 1.0]])}, tx.init(params))[0]["w"]
        tensor([[3.6056, 3.6056],
                [3.6056, 3.6056]])
    """
    decay = checks.in_unit_interval("decay", decay)
    eps = checks.at_least("eps", eps, 0.0)

    def is_by_columns(matrix: Tensor) -> bool:
        rows, columns = matrix.shape[-2:]
        return axis == "longer" and columns > rows

    def start(matrix: Tensor) -> Tensor:
        """Return a mean square of zero for each row, (..., rows, 1), or for each column, (..., 1, columns)."""
        vector = matrix[..., :1]
        if is_by_columns(matrix):
            vector = matrix[..., :1, :]
        return matrix.new_zeros(vector.shape)

    def step(u: Tensor, s: NeuronsState):
        """Normalize the rows of a matrix, or its columns as the rows of its transpose; return it and the new state.

        The state is the running mean square of each row, or of each column.
        """
        if is_by_columns(u):
            normalized, v = _normalize(u.mT, s.nu.mT, decay, eps)
            return normalized.mT, NeuronsState(nu=v.mT)
        normalized, v = _normalize(u, s.nu, decay, eps)
        return normalized, NeuronsState(nu=v)

    slot = MatrixSlot(start, dtype, saturates=True)
    return NeuronsState(slot), step


def _normalize(
    u: Tensor, old_v: Tensor, decay: float | Tensor, eps: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Divide each row of a matrix u by its usual size, and scale the matrix back to its norm. This is NorMuon's rule.

    In the first step, the rows [5, 5] and [1, 1] both become [3.6, 3.6], and the norm of the matrix is as before. The
    usual size of a row is ``sqrt(v) + eps``, where v is the running average of its mean square. Return the new
    matrix and the new averages v, of shape (..., rows, 1).
    """
    power = unit_power(u)
    # Multiply u by an exact power of two, so that the squares neither overflow nor underflow.
    squares = (u * power).square()
    # v = decay v + (1 - decay) mean(u^2), where the mean is at most the largest finite number
    # Twice, because the square of power may overflow.
    mean_square = squares.mean(dim=-1, keepdim=True) / power / power
    mean_square = mean_square.clamp(max=torch.finfo(squares.dtype).max)
    v = running_average(old_v, mean_square, decay)
    # u / (sqrt(v) + eps). A row that has always been zero stays zero. A divisor of NaN is not 0, so it stays visible.
    divisor = ew.safe_sqrt(v) + eps
    normalized = divide_unless(divisor == 0, u, divisor, otherwise=0.0)
    # The same, times norm(u) / norm(normalized).
    return _with_norm(normalized, squares, power), v


def _with_norm(x: Tensor, squares: Tensor, power: Tensor) -> Tensor:
    """Scale each matrix of x to the Frobenius norm of another matrix u: return ``x * norm(u) / norm(x)``.

    Args:
        x: the matrices. A matrix of zeros is returned as it is.
        squares: the squares of ``u * power``.
        power: a power of two, by which u was multiplied so that no square overflows.
    """
    squared_norm = squares.sum(dim=(-2, -1), keepdim=True)
    small_x = x * unit_power(x)  # by a power of two too, which cancels in the quotient
    squared_norm_of_x = small_x.square().sum(dim=(-2, -1), keepdim=True)
    is_zero = (squared_norm_of_x == 0) | (squared_norm == 0)
    # This is the ratio of squares. Its root is taken below.
    ratio = divide_unless(is_zero, squared_norm, squared_norm_of_x, otherwise=1.0)
    scaled = small_x * ratio.sqrt() / power
    return torch.where(is_zero, x, scaled)
