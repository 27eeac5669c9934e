"""Normalization of rows, columns, matrices or leaves to a root mean square of 1."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, transform
from muonfx.core.combine import no_state
from muonfx.core.contract import NOTHING, Functions
from muonfx.polar.scaling import power_of_two
from muonfx.transforms._matrices import (
    MatrixView,
    check_matrices,
    map_matrices,
    matrix_locality,
    name_patterns,
    on_stacks,
)
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = ["normalize_columns", "normalize_leaves", "normalize_matrices", "normalize_rows"]

of_matrices = functools.partial(
    transform,
    locality=matrix_locality,
    reads_params=False,
    on_stacks=on_stacks,
    name_patterns=name_patterns,
    position="sets_size",
)
"""Declares a stateless transform that normalizes each matrix of a view independently."""


@of_matrices()
def normalize_rows(
    *,
    view: MatrixView = MatrixView(),
):
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
    return _normalize_matrices(view, (-1,))


@of_matrices()
def normalize_columns(
    *,
    view: MatrixView = MatrixView(),
):
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
    return _normalize_matrices(view, (-2,))


@of_matrices()
def normalize_matrices(
    *,
    view: MatrixView = MatrixView(),
):
    """Divide each matrix by its root mean square.

    Behind it, ``scale(0.2)`` gives updates of the size that AdamW's customarily have. A zero matrix stays zero, and NaN
    stays in its matrix.

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
    return _normalize_matrices(view, (-2, -1))


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

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return tree.map(lambda leaf: to_unit_rms(leaf, tuple(range(leaf.ndim))), updates), state

    return no_state, update


def _normalize_matrices(view: MatrixView, dim: tuple[int, ...]) -> Functions:
    return matrixwise(view, lambda matrix: to_unit_rms(matrix, dim))


def matrixwise(view: MatrixView, function: Callable[[Tensor], Tensor]) -> Functions:
    """Build ``init`` and ``update`` of a stateless transform from its function of (..., rows, columns)."""

    def init(params: PyTree) -> EmptyState:
        check_matrices(view, params)
        return EmptyState()

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return map_matrices(view, function, updates), state

    return Functions(init, update)


def to_unit_rms(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Divide by the root mean square over some dims; zeros stay zero."""
    if x.numel() == 0:
        return x
    wide = x.to(ew.wide_dtype(x.dtype))
    # Scale by exact powers of two before squaring, so that no square overflows or underflows.
    small = wide * power_of_two(wide.detach().abs().amax(dim, keepdim=True))
    mean = small.square().mean(dim, keepdim=True)
    return (small * torch.where(mean == 0, 1.0, mean).rsqrt()).to(x.dtype)
