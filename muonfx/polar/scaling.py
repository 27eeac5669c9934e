"""Scale a matrix of any magnitude into the interval that the iteration requires.

There are three steps, in this order. *Round once* to the compute dtype, so a matrix that already arrives in that dtype
gives the same result as a wider one. *Scale by a power of two*: exact, so the result is bitwise the same for `x` and
`2^k x`, and no later square under- or overflows. *Normalize* by the Frobenius norm, in fp32 at least.
"""

from __future__ import annotations

import torch

from muonfx.tree.elementwise import wide_dtype

# dtype -> (integer dtype of the same width, bits of the fraction, exponent bias)
_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
_LIFT = 60  # a subnormal times 2^60 is normal in fp32 and in fp64


def power_of_two_scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale each nonempty fp32 or fp64 matrix by a power of two that puts its largest magnitude in [1, 2)."""
    # The power is a constant for autograd, which is correct because every caller divides it out again.
    return x * power_of_two(x.detach().abs().amax((-2, -1), keepdim=True))


def power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """Return the power of two that scales each largest magnitude, fp32 or fp64, into [1, 2)."""
    # The exponent is read from the bits, since `ldexp` and `pow` round. If the power would not be a normal number (the
    # magnitude is subnormal or in the top binade), the nearest normal one is used and the scaled magnitude is in
    # [2^-51, 4), still safe to square. The power of zero is 1.
    integer, fraction, bias = _BITS[largest.dtype]
    small = largest < 2.0**-_LIFT
    bits = torch.where(small, largest * 2.0**_LIFT, largest).view(integer)
    exponent = (bits >> fraction) - bias
    exponent = torch.where(small, exponent - _LIFT, exponent)
    exponent = torch.where(largest == 0, torch.zeros_like(exponent), exponent)
    factor = (bias - exponent).clamp(1, 2 * bias) << fraction
    return factor.view(largest.dtype)


def same_range(held: torch.dtype, compute: torch.dtype) -> bool:
    """True if rounding from `held` to `compute` keeps every magnitude that a normal number of `held` can have.

    >>> same_range(torch.float32, torch.bfloat16), same_range(torch.float32, torch.float16)
    (True, False)
    """
    return torch.finfo(compute).smallest_normal <= torch.finfo(held).smallest_normal


def rounded_and_scaled(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Round `x` to `compute`, scale it by a power of two, and return it in the wide dtype."""
    wide = wide_dtype(compute)
    if same_range(x.dtype, compute):
        return power_of_two_scaled(x.to(compute).to(wide))
    # `compute` has a smaller exponent range than `x`, so rounding first could turn a matrix into zeros or infinities.
    x = x.to(wide_dtype(x.dtype, compute))
    # Twice: for subnormal input the first power is only the nearest normal one, which is too small for fp16.
    return power_of_two_scaled(power_of_two_scaled(x)).to(compute).to(wide)


def frobenius_normalized(x: torch.Tensor, compute: torch.dtype, safety: float = 1.0) -> torch.Tensor:
    """Return `x / (safety * ||x||_F)` of nonempty `x` in `compute`, with finite derivatives at zero."""
    x = rounded_and_scaled(x, compute)
    total = (x * x).sum((-2, -1), keepdim=True)
    return (x * inverse_root(total, safety)).to(compute)


def inverse_root(total: torch.Tensor, safety: float) -> torch.Tensor:
    """Return `1 / (safety * sqrt(total))`, or `1 / safety` with finite derivatives if the total is zero."""
    # `where` instead of an eps, which would change the result for small matrices. It is inside the root, whose
    # derivative at zero is infinite and would enter the gradient as 0 * inf.
    scale = torch.where(total == 0, torch.ones_like(total), total).rsqrt()
    return scale if safety == 1.0 else scale / safety


def normalize_(batch: torch.Tensor, safety: float) -> None:
    """Normalize a nonempty batch `(b, n, m)` in its compute dtype by `frobenius_normalized`, in place."""
    wide = wide_dtype(batch.dtype)
    _multiply_(batch, power_of_two(_peaks(batch).to(wide)))
    rows = torch.linalg.vector_norm(batch, dim=-1, dtype=wide)  # by rows: for a whole bf16 matrix CPUs make a copy
    _multiply_(batch, inverse_root(rows.square().sum(-1), safety))  # sums are pairwise, norms are not


def _peaks(batch: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each matrix, `(b,)`."""
    if batch.device.type == "cpu":  # where the infinity norm takes 30 times as long
        low, high = zip(*(torch.aminmax(one) for one in batch.unbind()), strict=True)
        return torch.maximum(torch.stack(high), -torch.stack(low))
    return torch.linalg.vector_norm(batch, ord=torch.inf, dim=(-2, -1))


def _multiply_(batch: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each matrix by its factor in the wide dtype, rounding once."""
    if batch.device.type == "cpu":  # a CPU multiplies by a scalar in full precision, without a wide temporary
        for one, factor in zip(batch.unbind(), factors.unbind(), strict=True):
            one.mul_(factor)
    else:
        torch.mul(batch, factors[:, None, None], out=batch)


def row_normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide rows of `(b, n, m)` by the roots of the row sums of `|x x^T|`; return the result and its Gram matrix."""
    # The spectral norm of the result is at most 1 (Gershgorin; arXiv 2208.03160), and closer to 1 than after the
    # Frobenius norm. The singular vectors change, so the iteration finds the polar factor of another matrix. A zero row
    # stays zero.
    # Rows are first scaled to norm 1: in fp16 the squares of small rows underflow next to large ones.
    wide = wide_dtype(x.dtype)
    norms = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True, dtype=wide)
    norms = torch.where(norms == 0, torch.ones_like(norms), norms)
    unit = (x / norms).to(x.dtype)
    gram = torch.bmm(unit, unit.mT)
    sums = norms * (gram.abs() * norms.mT).sum(-1, keepdim=True)
    scale = norms * torch.where(sums == 0, torch.ones_like(sums), sums).rsqrt()
    return (unit * scale).to(x.dtype), (gram * scale * scale.mT).to(x.dtype)
