"""NorMuon's normalization of neurons: rows of a matrix, each by its own running second moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import checks
from muonfx import elementwise as ew
from muonfx.core import NOTHING, Donation, transform
from muonfx.transforms._matrices import Dims, matrix_locality, name_patterns, on_stacks, view_as_matrices
from muonfx.tree import Present, PyTree

__all__ = ["NeuronsState", "normalize_neurons"]


class NeuronsState(NamedTuple):
    """State of `normalize_neurons`."""

    nu: PyTree
    """Second moment of each row, in the pinned dtype: shape (..., rows, 1) for a leaf of shape (..., rows, columns)."""


@transform(
    locality=lambda decay, eps, keep_norm, dtype, dims: matrix_locality(dims),
    reads_params=False,
    on_stacks=on_stacks,
    name_patterns=name_patterns,
)
def normalize_neurons(
    decay: float = 0.95,
    eps: float = 1e-8,
    *,
    keep_norm: bool = True,
    dtype: torch.dtype | None = torch.float32,
    dims: Dims | Mapping[str, Dims] | None = None,
):
    r"""Divide each row of a matrix by the root of its running mean square.

    $v_t = \beta v_{t-1} + (1 - \beta)\,\mathrm{mean}_j(u_{ij}^2)$ for each row i, and the update is
    $u_{ij} / (\sqrt{v_i} + \epsilon)$, scaled so that each matrix keeps its Frobenius norm. It follows
    `orthogonalize` in a chain, and works on whole matrices also where orthogonalization is done by blocks.

    Args:
        decay: $\beta$, in [0, 1).
        eps: added to the root, not negative.
        keep_norm: give each matrix the norm that it had before.
        dtype: pinned dtype of the second moment; None pins each parameter's own.
        dims: as in `orthogonalize`, and the same value.

    Raises:
        ValueError: an argument is out of range; at `init`, a leaf is no matrix.

    Follows NorMuon (arXiv 2510.05491), whose factor $0.2\sqrt{mn} / \|U\|_F$ is that of
    ``scale_by_shape("match_rms_adamw")`` after ``keep_norm`` where the input is orthogonal.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.normalize_neurons(keep_norm=False)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> tx.update({"w": torch.tensor([[4.0, 4.0], [0.1, 0.1]])}, tx.init(params))[0]["w"]
        tensor([[4.4721, 4.4721],
                [4.4721, 4.4721]])
    """
    checks.in_unit_interval("decay", decay)
    checks.at_least("eps", eps, 0.0)
    checks.floating_dtype("dtype", dtype)
    view = view_as_matrices(dims, None, -2)

    def init(params: PyTree) -> NeuronsState:
        at = Present(params)
        names, leaves = at.names(), at.pick(params)
        matrices = [own.split(leaf, name)[0] for own, leaf, name in zip(view.of(names), leaves, names, strict=True)]
        return NeuronsState(at.fill([m.new_zeros((*m.shape[:-1], 1), dtype=dtype or m.dtype) for m in matrices]))

    def update(updates: PyTree, state: NeuronsState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        leaves, moments = at.pick(updates), at.pick(state.nu)
        names = at.names() if view.needs_names else [""] * len(leaves)
        out: list[Tensor] = []
        kept: list[Tensor] = []
        for own, leaf, nu, name in zip(view.of(names), leaves, moments, names, strict=True):
            matrix = own.split(leaf, name)[0]
            normalized, new_nu = _normalize(matrix, nu, decay, eps, keep_norm)
            out.append(own.join([normalized.to(leaf.dtype)], leaf))
            kept.append(new_nu.to(nu.dtype))
        return at.fill(out), NeuronsState(at.fill(kept, state.nu))

    return init, update


def _normalize(
    matrix: Tensor, nu: Tensor, decay: float | Tensor, eps: float | Tensor, keep_norm: bool
) -> tuple[Tensor, Tensor]:
    wide = ew.wide_dtype(matrix.dtype, nu.dtype)
    u, old = matrix.to(wide), nu.to(wide)
    if u.numel() == 0:
        return u, old
    mean_square = u.square().mean(dim=-1, keepdim=True)
    moment = old + (1.0 - decay) * (mean_square - old)
    # Where a row has been zero so far, its root has no derivative and 0 / (0 + eps) is 0 whatever the root.
    divisor = ew.safe_sqrt(moment) + eps
    normalized = torch.where(divisor > 0, u / torch.where(divisor > 0, divisor, 1.0), 0.0)
    if keep_norm:
        before, after = (x.square().sum(dim=(-2, -1), keepdim=True) for x in (u, normalized))
        nonzero = (after > 0) & (before > 0)
        ratio = torch.where(nonzero, before, 1.0) / torch.where(nonzero, after, 1.0)
        normalized = normalized * ratio.sqrt()
    return normalized, moment
