"""NorMuon's normalization of neurons: each row or column of a matrix by its own running second moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muonfx.core import Donation, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.scaling import power_of_two
from muonfx.select.matrix_view import stack_blocks, unstack_blocks
from muonfx.transforms._matrices import (
    MatrixView,
    matrix_locality,
    name_patterns,
    on_stacks_without_blocks,
)
from muonfx.transforms._pinned import WideStateDtype, state_dtype
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew

__all__ = ["NeuronsState", "normalize_neurons"]


class NeuronsState(NamedTuple):
    """State of `normalize_neurons`."""

    nu: PyTree
    """Second moment of each row, in the pinned dtype: shape (..., rows, 1) for a leaf of shape (..., rows, columns), or
    (..., rows, blocks) where columns are cut into blocks. Of each column: (..., 1, columns) or (..., blocks, columns).
    Of blocks of given sizes with ``axis="longer"``: (..., 1, moments), one block's behind another's."""


@transform(
    locality=matrix_locality,
    reads_params=False,
    on_stacks=on_stacks_without_blocks,
    name_patterns=name_patterns,
    position=lambda *_, keep_norm, **__: None if keep_norm else "sets_size",
)
def normalize_neurons(
    decay: ScalarOrSchedule = 0.95,
    eps: ScalarOrSchedule = 1e-8,
    *,
    keep_norm: bool = True,
    axis: Literal["rows", "longer"] = "rows",
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Divide each row of a matrix by the root of its running mean square.

    $v_t = \beta v_{t-1} + (1 - \beta)\,\mathrm{mean}_j(u_{ij}^2)$ for each row i, and the update is
    $u_{ij} / (\sqrt{v_i} + \epsilon)$, scaled so that each matrix keeps its Frobenius norm. It follows
    `orthogonalize` in a chain. Norms neither overflow nor underflow; a second moment beyond the range of its dtype
    stays at the largest number.

    Args:
        decay: $\beta$, in [0, 1).
        eps: added to the root, not negative.
        keep_norm: give each matrix the norm that it had before.
        axis: which lines are neurons: "rows", or "longer" for the columns of a matrix (or block) with more columns than
            rows and the rows of any other. The paper and Dion's "neuron" take rows, the weights of one output, and so
            does the default. modded-nanogpt, Emerging-Optimizers and Dion's "short_axis" take the longer side: those
            are the lines that an orthogonal matrix leaves unequal, where all of the shorter side have length one.
        dtype: pinned dtype of the second moment; "auto" is float32, but float64 for a float64 parameter; None is
            each parameter's own.
        view: which matrices a leaf consists of; the same as for `orthogonalize`. Each block keeps its own norm, as a
            parameter of its own would.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is no
            matrix.

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
    decay = checks.in_unit_interval("decay", decay)
    eps = checks.at_least("eps", eps, 0.0)
    checks.state_dtype("dtype", dtype)
    if axis not in ("rows", "longer"):
        raise ValueError(f'normalize_neurons: axis must be "rows" or "longer", found {axis!r}')

    def init(params: PyTree) -> NeuronsState:
        at = Present(params)
        names, leaves = at.names(), at.pick(params)
        moments: list[Tensor] = []
        for own, leaf, name in zip(view.of(names), leaves, names, strict=True):
            shapes = [_moments_of(m, axis) for m in own.split(leaf, name)]
            parts = [leaf.new_zeros(shape, dtype=state_dtype(dtype, leaf.dtype)) for shape in shapes]
            moments.append(_join_moments(own, parts, axis))
        return NeuronsState(at.fill(moments))

    def update(updates: PyTree, state: NeuronsState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        leaves, moments = at.pick(updates), at.pick(state.nu)
        names = at.names() if view.needs_names else [""] * len(leaves)
        out: list[Tensor] = []
        kept: list[Tensor] = []
        for own, leaf, nu, name in zip(view.of(names), leaves, moments, names, strict=True):
            matrices = own.split(leaf, name)
            done: list[tuple[Tensor, Tensor]] = []
            for matrix, moment in zip(matrices, _split_moments(own, nu, matrices, axis), strict=True):
                if _by_columns(matrix, axis):
                    turned, again = _normalize(matrix.mT, moment.mT, decay, eps, keep_norm)
                    done.append((turned.mT, again.mT))
                else:
                    done.append(_normalize(matrix, moment, decay, eps, keep_norm))
            out.append(own.join([normalized.to(leaf.dtype) for normalized, _ in done], leaf))
            kept.append(_join_moments(own, [moment.to(nu.dtype) for _, moment in done], axis))
        return at.fill(out), NeuronsState(at.fill(kept, state.nu))

    return init, update


def _normalize(
    matrix: Tensor, nu: Tensor, decay: float | Tensor, eps: float | Tensor, keep_norm: bool
) -> tuple[Tensor, Tensor]:
    wide = ew.wide_dtype(matrix.dtype, nu.dtype)
    u, old = matrix.to(wide), nu.to(wide)
    if u.numel() == 0:
        return u, old.clone()
    # Scale by exact powers of two before squaring, so that no square overflows or underflows.
    small, power = _to_unit(u)
    mean_square = (small.square().mean(dim=-1, keepdim=True) / power / power).clamp(max=torch.finfo(nu.dtype).max)
    moment = old + (1.0 - decay) * (mean_square - old)
    # The root of a row that has always been zero has no derivative, and 0 / (0 + eps) is 0 in any case.
    divisor = ew.safe_sqrt(moment) + eps
    normalized = torch.where(divisor > 0, u / torch.where(divisor > 0, divisor, 1.0), 0.0)
    if keep_norm:
        again, _ = _to_unit(normalized)
        before, after = (x.square().sum(dim=(-2, -1), keepdim=True) for x in (small, again))
        nonzero = (after > 0) & (before > 0)
        ratio = torch.where(nonzero, before, 1.0) / torch.where(nonzero, after, 1.0)
        normalized = torch.where(nonzero, again * ratio.sqrt() / power, normalized)
    return normalized, moment


def _to_unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply each matrix by a power of two that makes its largest magnitude about 1; return both."""
    power = power_of_two(x.detach().abs().amax((-2, -1), keepdim=True))
    return x * power, power


def _by_columns(matrix: Tensor, axis: str) -> bool:
    return axis == "longer" and matrix.shape[-1] > matrix.shape[-2]


def _moments_of(matrix: Tensor, axis: str) -> tuple[int, ...]:
    """Return the shape of the moments of a matrix's neurons."""
    *batch, rows, columns = matrix.shape
    return (*batch, 1, columns) if _by_columns(matrix, axis) else (*batch, rows, 1)


def _split_moments(view: MatrixView, moments: Tensor, matrices: Sequence[Tensor], axis: str) -> list[Tensor]:
    """Undo `_join_moments`: one tensor for each of unequal blocks, or one stack of equal blocks."""
    if view.blocks is None:
        return [moments]
    if isinstance(view.blocks, int):
        return [stack_blocks(moments, view.blocks, view.axis)]
    if axis == "longer":
        shapes = [_moments_of(matrix, axis) for matrix in matrices]
        parts = moments.squeeze(-2).split([shape[-2] * shape[-1] for shape in shapes], dim=-1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    sizes = [1] * len(view.blocks) if view.axis == -1 else list(view.blocks)
    return list(moments.split(sizes, dim=view.axis))


def _join_moments(view: MatrixView, parts: Sequence[Tensor], axis: str) -> Tensor:
    """Join the moments of a leaf's blocks into one tensor, laid out as documented at `NeuronsState`."""
    if view.blocks is None:
        return parts[0]
    if isinstance(view.blocks, int):
        return unstack_blocks(parts[0], view.axis)
    if axis == "longer":  # the longer side may differ between unequal blocks
        return torch.cat([part.flatten(-2) for part in parts], dim=-1).unsqueeze(-2)
    return torch.cat(list(parts), dim=view.axis)
