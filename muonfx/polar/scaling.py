"""Bringing a matrix into the interval that the iteration needs, for any magnitude of its entries.

Three steps, in this order. *Round once*: to the compute dtype, so that a matrix which arrives in that dtype (over a
wire, say) and one that arrives wider take the same path from here on. *Scale by a power of two*: exact, so the result
is bitwise the same for `x` and `2^k x`, and no later square under- or overflows. *Normalise*: by the Frobenius norm, in
fp32 at least.
"""

from __future__ import annotations

import torch

# dtype -> (integer dtype of the same width, bits of the fraction, exponent bias)
_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
_LIFT = 60  # a subnormal times 2^60 is normal in fp32 and in fp64


def wide_dtype(compute: torch.dtype) -> torch.dtype:
    """The dtype for norms and sums beside products in `compute`: fp64 for fp64, else fp32.

    >>> wide_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if compute == torch.float64 else torch.float32


def power_of_two_scaled(x: torch.Tensor) -> torch.Tensor:
    """`x` times a power of two for each matrix, after which the largest magnitude is in [1, 2).

    The exponent is read from the bits of the largest magnitude: `ldexp` and `pow` round. Where the power itself would
    not be a normal number (largest magnitude subnormal or in the top binade) the nearest one that is stands in, and the
    largest magnitude ends up in [2^-51, 4): still safe to square. A zero matrix is multiplied by 1. The power is a
    constant to autograd, which is right for every caller that divides it out again.

    Shapes, dtypes: `(..., m, n)`, not empty, fp32 or fp64; the same come back.

    >>> power_of_two_scaled(torch.tensor([[0.0, 3.0e-39], [-1.5e-39, 0.0]])).abs().max().item() > 2**-23
    True
    >>> power_of_two_scaled(torch.tensor([[5.0, -12.0]]))
    tensor([[ 0.6250, -1.5000]])
    """
    return x * power_of_two(x.detach().abs().amax((-2, -1), keepdim=True))


def power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The power of two for each of some largest magnitudes, fp32 or fp64; see `power_of_two_scaled`.

    >>> power_of_two(torch.tensor([12.0, 0.0, 0.3]))
    tensor([0.1250, 1.0000, 4.0000])
    """
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
    """`x` rounded to `compute`, times a power of two, held in the wide dtype.

    Where `compute` has a smaller exponent range than `x` the power of two comes first, lest rounding turn a whole
    matrix into zeros or infinities. bf16 and fp32 share their range, except that fp32 above 3.396e38 rounds to infinity
    in bf16 and below 4.6e-41 to zero.
    """
    wide = wide_dtype(compute)
    if same_range(x.dtype, compute):
        return power_of_two_scaled(x.to(compute).to(wide))
    x = x.to(torch.promote_types(x.dtype, wide))
    # Twice: the first power is only the nearest normal one for subnormal input, which fp16 would not survive.
    return power_of_two_scaled(power_of_two_scaled(x)).to(compute).to(wide)


def frobenius_normalized(x: torch.Tensor, compute: torch.dtype, safety: float = 1.0) -> torch.Tensor:
    """`x / (safety * ||x||_F)` in `compute`, any magnitude of `x`; zero for a zero matrix, with finite derivatives.

    Shapes: `(..., m, n)`, not empty; the same comes back.

    >>> frobenius_normalized(torch.tensor([[3e-30, 4e-30]]), torch.float32)
    tensor([[0.6000, 0.8000]])
    """
    x = rounded_and_scaled(x, compute)
    total = (x * x).sum((-2, -1), keepdim=True)
    return (x * inverse_root(total, safety)).to(compute)


def inverse_root(total: torch.Tensor, safety: float) -> torch.Tensor:
    """`1 / (safety * sqrt(total))`, and `1 / safety` where the total is zero, with finite derivatives there.

    >>> inverse_root(torch.tensor([4.0, 0.0]), 1.0)
    tensor([0.5000, 1.0000])
    """
    # where, not an eps: an eps would change the answer for small matrices; and it must be inside the root, whose
    # derivative at zero is infinite and would reach the gradient as 0 * inf.
    scale = torch.where(total == 0, torch.ones_like(total), total).rsqrt()
    return scale if safety == 1.0 else scale / safety


def normalize_(batch: torch.Tensor, safety: float) -> None:
    """`frobenius_normalized` of a batch that is already rounded to the compute dtype, in place, with no other room.

    For large matrices, and without autograd or `torch.func`.

    Shapes: `batch` is `(b, n, m)`, not empty.

    >>> x = torch.tensor([[[3e-30, 4e-30]]])
    >>> normalize_(x, 1.0)
    >>> x
    tensor([[[0.6000, 0.8000]]])
    """
    wide = wide_dtype(batch.dtype)
    _multiply_(batch, power_of_two(_peaks(batch).to(wide)))
    rows = torch.linalg.vector_norm(batch, dim=-1, dtype=wide)  # by rows: over a whole bf16 matrix CPUs make a copy
    _multiply_(batch, inverse_root(rows.square().sum(-1), safety))  # sums are pairwise, norms are not


def _peaks(batch: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each matrix, `(b,)`."""
    if batch.device.type == "cpu":  # where the infinity norm takes 30 times as long
        low, high = zip(*(torch.aminmax(one) for one in batch.unbind()), strict=True)
        return torch.maximum(torch.stack(high), -torch.stack(low))
    return torch.linalg.vector_norm(batch, ord=torch.inf, dim=(-2, -1))


def _multiply_(batch: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each matrix by its own number of the wide dtype, rounding once."""
    if batch.device.type == "cpu":  # one number on a CPU is used in full precision, and spares a wide temporary
        for one, factor in zip(batch.unbind(), factors.unbind(), strict=True):
            one.mul_(factor)
    else:
        torch.mul(batch, factors[:, None, None], out=batch)


def row_normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `x` over the square roots of the row sums of `|x x^T|`, and the Gram matrix of the result.

    The spectral norm is then at most 1 (Gershgorin; arXiv 2208.03160), and nearer to 1 than after the Frobenius norm.
    The singular vectors change, so the iteration then finds the polar factor of another matrix. A zero row stays zero.

    Shapes: `(b, n, m)` gives `(b, n, m)` and `(b, n, n)`.
    """
    # By way of rows of norm 1: the squares of small rows beside large ones are below fp16, whose sums would be zero.
    wide = wide_dtype(x.dtype)
    norms = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True, dtype=wide)
    norms = torch.where(norms == 0, torch.ones_like(norms), norms)
    unit = (x / norms).to(x.dtype)
    gram = torch.bmm(unit, unit.mT)
    sums = norms * (gram.abs() * norms.mT).sum(-1, keepdim=True)
    scale = norms * torch.where(sums == 0, torch.ones_like(sums), sums).rsqrt()
    return (unit * scale).to(x.dtype), (gram * scale * scale.mT).to(x.dtype)
