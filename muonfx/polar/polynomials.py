"""Resolve the arguments `coefficients` and `steps` of `orthogonalize` to one polynomial per step, and the scaling."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from muonfx.internal.tracing import fixed
from muonfx.polar.coefficients import Coefficients, CoefficientsLike, Step, schedule, step_indices
from muonfx.polar.coefficients import coefficients as resolve
from muonfx.polar.stages import default_restarts


class Polynomials(NamedTuple):
    """The polynomials of all steps of an iteration, and the scaling before them. Without a `table` it can be hashed."""

    steps: tuple[Step, ...]
    """One `(a, b, c)` for each step; empty if the coefficients are a tensor."""
    restarts: tuple[int, ...]
    """The numbers of steps after which ``method="gram"`` recomputes `X X^T` from `X`; rounding may require more."""
    safety: float = 1.0
    """The input is divided by this factor times its Frobenius norm."""
    row_scaling: bool = False
    """True if each row is also scaled, by its row sum of `|X X^T|`."""
    table: Tensor | None = None
    """The coefficients if they were given as a tensor `(k, 2)` or `(k, 3)`."""
    indices: tuple[int, ...] = ()
    """The row of `table` for each step."""


def polynomials(value: CoefficientsLike | Tensor, steps: int | None = None) -> Polynomials:
    """Check the arguments `coefficients` and `steps` of `orthogonalize`, and return the polynomial of each step.

    For the name of a preset or for numbers, the result has the coefficients `(a, b, c)` of each step. The numbers in a
    tensor are not read; the result has the tensor, and for each step the index of a row:

    >>> polynomials([(1.5, -0.5, 0.0)], steps=2).steps
    ((1.5, -0.5, 0.0), (1.5, -0.5, 0.0))
    >>> import torch
    >>> polynomials(torch.tensor([[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]), steps=3).indices
    (0, 1, 1)
    """
    if isinstance(value, Tensor):
        _check_table(value)
        rows = step_indices(value.shape[0], steps)
        return Polynomials(steps=(), restarts=(), table=value, indices=tuple(rows))
    return _with_numbers(resolve(value), steps)


def _with_numbers(coefficients: Coefficients, steps: int | None) -> Polynomials:
    """Return one polynomial `(a, b, c)` for each step, the restarts and the scaling, for coefficients in numbers.

    The restarts are the numbers of steps after which the Gram form recomputes `X X^T` from `X`, such as ``(2, 3)``.
    """
    # With dynamic=True, torch.compile replaces numbers by symbols. `fixed` undoes this.
    polynomial_of_step = tuple(
        (fixed(a), fixed(b), fixed(c)) for a, b, c in schedule(coefficients, steps)
    )
    if coefficients.restarts is None:
        restarts = default_restarts(len(polynomial_of_step))
    else:
        restarts = _continued(coefficients.restarts, len(polynomial_of_step))
    safety = fixed(coefficients.norm_safety)
    if coefficients.row_scaling:  # it undoes any scaling of the whole matrix before it
        safety = 1.0
    return Polynomials(polynomial_of_step, restarts, safety, coefficients.row_scaling)


def _continued(restarts: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """Extend restarts (steps after which `X X^T` is recomputed) up to `steps`, by repeating their last distance.

    >>> _continued((2, 4), steps=9)
    (2, 4, 6, 8)
    """
    if len(restarts) == 0:
        return ()
    # The 0 is for a single restart, whose distance is from the start.
    previous, last = (0, *restarts)[-2:]
    distance = last - previous
    all_restarts = (*restarts, *range(last + distance, steps, distance))
    return tuple(k for k in all_restarts if k < steps)


def _check_table(table: Tensor) -> None:
    """Raise unless a tensor of coefficients is floating and has the shape ``(steps, 2)`` or ``(steps, 3)``."""
    if not table.dtype.is_floating_point:
        raise TypeError(f"coefficients: found a tensor of {table.dtype}, expected a floating dtype")
    if table.ndim != 2 or table.shape[0] == 0 or table.shape[1] not in (2, 3):
        raise ValueError(
            f"coefficients: found a tensor of shape {tuple(table.shape)}, "
            "expected (steps, 3) or (steps, 2) with steps >= 1"
        )
