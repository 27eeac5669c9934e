"""Normalization of rows, columns, matrices or leaves to a root mean square of 1."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx.core import EmptyState, Locality, transform
from muonfx.polar.iteration import power_of_two
from muonfx.select import MatrixView
from muonfx.transforms.matrixwise import StateAndMatrixStep, matrixwise
from muonfx.transforms.scale import of_leaves
from muonfx.tree import elementwise as ew

__all__ = ["normalize_columns", "normalize_leaves", "normalize_matrices", "normalize_rows"]


@matrixwise(position="sets_size")
def normalize_rows(*, view: MatrixView = MatrixView()):
    r"""Divide each row of each matrix by its root mean square, $u_{ij} / \sqrt{\mathrm{mean}_j(u_{ij}^2)}$.

    A row belongs to an output feature; in an embedding, to a token. Zero rows stay zero. The result is bitwise the same
    for $2^k u$, and NaN stays in its row.

    Args:
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is no matrix or does not fit the view.

    Follows Scion (arXiv 2502.07529): its ColNorm of a transposed embedding is this; its RowNorm is this and
    ``scale_by_shape("fan_in")``.

    Example:
        >>> import muonfx as mfx
        >>> mfx.normalize_rows().update({"w": torch.tensor([[3.0, -3.0], [0.0, 0.0]])}, mfx.core.EmptyState())[0]["w"]
        tensor([[ 1., -1.],
                [ 0.,  0.]])
    """
    return _to_unit_rms_over(-1)


@matrixwise(position="sets_size")
def normalize_columns(*, view: MatrixView = MatrixView()):
    r"""Divide each column of each matrix by its root mean square, $u_{ij} / \sqrt{\mathrm{mean}_i(u_{ij}^2)}$.

    A column belongs to an input feature. Zero columns stay zero, and NaN stays in its column.

    Args:
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is no matrix or does not fit the view.

    Follows Scion (arXiv 2502.07529): its ColNorm.

    Example:
        >>> import muonfx as mfx
        >>> mfx.normalize_columns().update({"w": torch.tensor([[3.0, 0.0], [-3.0, 0.0]])}, mfx.core.EmptyState())[0][
        ...     "w"
        ... ]
        tensor([[ 1.,  0.],
                [-1.,  0.]])
    """
    return _to_unit_rms_over(-2)


@matrixwise(position="sets_size")
def normalize_matrices(*, view: MatrixView = MatrixView()):
    """Divide each matrix by its root mean square.

    With ``scale(0.2)`` after it, updates have the usual size of AdamW's. A zero matrix stays zero, and NaN stays in its
    matrix.

    Args:
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is no matrix or does not fit the view.

    Follows the RMS-aligned rescaling of AdaMuon (arXiv 2507.11005).

    Example:
        >>> import muonfx as mfx
        >>> mfx.normalize_matrices().update({"w": torch.tensor([[2.0, -2.0], [2.0, 2.0]])}, mfx.core.EmptyState())[0][
        ...     "w"
        ... ]
        tensor([[ 1., -1.],
                [ 1.,  1.]])
    """
    return _to_unit_rms_over(-2, -1)


@transform(locality=Locality.LEAF, reads_params=False, position="sets_size")
def normalize_leaves():
    """Divide each leaf by its root mean square: vectors and scalars too.

    A zero leaf stays zero, and NaN stays in its leaf.

    Follows Scion (arXiv 2502.07529): its norm for biases.

    Example:
        >>> import muonfx as mfx
        >>> mfx.normalize_leaves().update({"b": torch.tensor([3e-30, -3e-30])}, mfx.core.EmptyState())[0]
        {'b': tensor([ 1., -1.])}
    """
    return of_leaves(lambda leaf: to_unit_rms(leaf, tuple(range(leaf.ndim))))


def _to_unit_rms_over(*dim: int) -> StateAndMatrixStep:
    return EmptyState(), lambda u, s: (to_unit_rms(u, dim), s)


def to_unit_rms(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Divide by the root mean square over some dims; zeros stay zero."""
    if x.numel() == 0:
        return x
    wide = x.to(ew.wide_dtype(x.dtype))
    # Scale by exact powers of two before squaring, so that no square overflows or underflows.
    small = wide * power_of_two(wide.detach().abs().amax(dim, keepdim=True))
    mean = small.square().mean(dim, keepdim=True)
    return (small * torch.where(mean == 0, 1.0, mean).rsqrt()).to(x.dtype)
