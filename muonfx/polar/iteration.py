"""The standard Newton-Schulz iteration: `X <- a X + (b A + c A^2) X` with `A = X X^T`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from muonfx.polar.coefficients import CoefficientsLike, Step, schedule, step_indices
from muonfx.polar.coefficients import coefficients as resolve
from muonfx.polar.scaling import frobenius_normalized, row_normalized


class Method(NamedTuple):
    """Coefficients and a number of steps, resolved: divide by `safety * ||x||_F`, then `apply`."""

    apply: Callable[..., torch.Tensor]
    """`(x, *, reuse=False)` on non-empty batches `(b, n, m)`, n <= m, of norm at most 1; the same shape and dtype."""
    safety: float = 1.0

    def __call__(self, x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Do both, on non-empty batches `(b, n, m)` of any magnitude; `compute` comes back."""
        return self.apply(frobenius_normalized(x, compute, self.safety))


def iteration(value: CoefficientsLike | torch.Tensor, steps: int | None = None) -> Method:
    """Resolve coefficients and a number of steps, checked, to the function that applies them.

    Args:
        value: as `orthogonalize` takes it.
        steps: as `orthogonalize` takes it.

    Raises:
        ValueError, TypeError: as `orthogonalize`.

    >>> iteration("cubic", 2)(torch.eye(2)[None], torch.float32).shape
    torch.Size([1, 2, 2])
    """
    if isinstance(value, torch.Tensor):
        _check_tensor_coefficients(value)
        return Method(partial(newton_schulz_with_tensor, table=value, indices=step_indices(value.shape[0], steps)))
    chosen = resolve(value)
    polynomials = schedule(chosen, steps)
    if chosen.row_scaling:
        return Method(partial(_row_scaled_newton_schulz, steps=polynomials))
    return Method(partial(newton_schulz, steps=polynomials), chosen.norm_safety)


def newton_schulz(
    x: torch.Tensor, steps: Sequence[Step], gram: torch.Tensor | None = None, *, reuse: bool = False
) -> torch.Tensor:
    """Apply the polynomials `steps` to the singular values of `x`, in `x`'s dtype.

    Three matrix products a step, two where `c` is 0, each fused with its sum.

    Args:
        x: `(b, n, m)`, singular values at most about 1; cheapest for n <= m.
        steps: one `(a, b, c)` of Python floats a step.
        gram: `x x^T`, `(b, n, n)`, where the caller has it already.
        reuse: `x` may be overwritten, and every product goes into one of four buffers, `x` among them: the least room,
            and on a CPU, where fresh memory is slow, the most speed. Not for autograd or `torch.func`.

    >>> newton_schulz(torch.tensor([[[0.5]]]), [(1.5, -0.5, 0.0)] * 6)
    tensor([[[1.]]])
    """
    if reuse:
        return _newton_schulz_in_buffers(x, steps, gram)
    for a, b, c in steps:
        square = torch.bmm(x, x.mT) if gram is None else gram
        gram = None
        if c == 0:
            x = torch.baddbmm(x, square, x, beta=a, alpha=b)
        else:
            weight = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, weight, x, beta=a)
    return x


def _newton_schulz_in_buffers(x: torch.Tensor, steps: Sequence[Step], gram: torch.Tensor | None) -> torch.Tensor:
    spare = torch.empty_like(x)
    square = x.new_empty(*x.shape[:-1], x.shape[-2])
    weight = torch.empty_like(square)
    for a, b, c in steps:
        if gram is None:
            torch.bmm(x, x.mT, out=square)
        else:
            square, gram = gram, None
        if c == 0:
            torch.baddbmm(x, square, x, beta=a, alpha=b, out=spare)
        else:
            torch.baddbmm(square, square, square, beta=b, alpha=c, out=weight)
            torch.baddbmm(x, weight, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def newton_schulz_with_tensor(
    x: torch.Tensor, table: torch.Tensor, indices: Sequence[int], *, reuse: bool = False
) -> torch.Tensor:
    """`newton_schulz` with the coefficients in a tensor, so that they can be differentiated and mapped over.

    Fused products take plain numbers only, so this is a little slower.

    Args:
        x: `(b, n, m)`.
        table: `(k, 3)`, or `(k, 2)` for `c = 0`, floating point.
        indices: which row of `table` each step uses.
        reuse: as in `newton_schulz`; nothing is reused here.
    """
    for i in indices:
        square = torch.bmm(x, x.mT)
        weight = table[i, 1] * square
        if table.shape[1] == 3:
            weight = weight + table[i, 2] * torch.bmm(square, square)
        # A mapped coefficient is no longer a scalar to type promotion, so say which dtype the products have.
        x = (table[i, 0] * x + torch.bmm(weight.to(x.dtype), x)).to(x.dtype)
    return x


def _row_scaled_newton_schulz(x: torch.Tensor, steps: Sequence[Step], *, reuse: bool = False) -> torch.Tensor:
    # The Frobenius norm has come first, though row scaling undoes it: it keeps fp16 row sums in range.
    x, gram = row_normalized(x)
    return newton_schulz(x, steps, gram, reuse=reuse)


def _check_tensor_coefficients(table: torch.Tensor) -> None:
    if not table.dtype.is_floating_point:
        raise TypeError(f"coefficients: found a tensor of {table.dtype}, expected a floating dtype")
    if table.ndim != 2 or table.shape[0] == 0 or table.shape[1] not in (2, 3):
        raise ValueError(
            f"coefficients: found a tensor of shape {tuple(table.shape)}, "
            "expected (steps, 3) or (steps, 2) with steps >= 1"
        )
