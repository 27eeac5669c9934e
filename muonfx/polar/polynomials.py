"""Resolve `coefficients` and `steps` to polynomials and the scaling of a matrix that they require."""

from __future__ import annotations

from typing import NamedTuple

import torch

from muonfx.polar.coefficients import CoefficientsLike, Step, schedule, step_indices
from muonfx.polar.coefficients import coefficients as resolve
from muonfx.polar.stages import default_restarts
from muonfx.tree.tracing import fixed


class Polynomials(NamedTuple):
    """Resolved and checked polynomials; hashable if there is no `table`."""

    steps: tuple[Step, ...]
    """One `(a, b, c)` for each step; empty if the coefficients are a tensor."""
    restarts: tuple[int, ...]
    """The step numbers after which the Gram form computes a new Gram matrix; rounding may require more."""
    safety: float = 1.0
    """The input is divided by this factor times its Frobenius norm."""
    row_scaling: bool = False
    """True if rows are scaled after the division by the norm."""
    table: torch.Tensor | None = None
    """Coefficients as a tensor `(k, 2 or 3)`."""
    indices: tuple[int, ...] = ()
    """Row of `table` for each step."""


def polynomials(value: CoefficientsLike | torch.Tensor, steps: int | None = None) -> Polynomials:
    """Resolve and check the arguments `coefficients` and `steps` of `orthogonalize`."""
    if isinstance(value, torch.Tensor):
        _check_table(value)
        return Polynomials((), (), table=value, indices=tuple(step_indices(value.shape[0], steps)))
    chosen = resolve(value)
    taken = tuple((fixed(a), fixed(b), fixed(c)) for a, b, c in schedule(chosen, steps))
    count = len(taken)
    restarts = default_restarts(count) if chosen.restarts is None else _continued(chosen.restarts, count)
    safety = 1.0 if chosen.row_scaling else fixed(chosen.norm_safety)
    return Polynomials(taken, restarts, safety, chosen.row_scaling)


def _continued(restarts: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """Extend a set's restarts to any number of steps by repeating its last whole stage."""
    if len(restarts) == 0:
        return ()
    *_, before, last = (0, *restarts)
    return tuple(k for k in (*restarts, *range(2 * last - before, steps, last - before)) if k < steps)


def _check_table(table: torch.Tensor) -> None:
    if not table.dtype.is_floating_point:
        raise TypeError(f"coefficients: found a tensor of {table.dtype}, expected a floating dtype")
    if table.ndim != 2 or table.shape[0] == 0 or table.shape[1] not in (2, 3):
        raise ValueError(
            f"coefficients: found a tensor of shape {tuple(table.shape)}, "
            "expected (steps, 3) or (steps, 2) with steps >= 1"
        )
