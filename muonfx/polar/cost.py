"""The cost of orthogonalizing a matrix, from its shape and the settings alone.

It does not depend on the machine, so every rank computes the same cost. Ranks can therefore agree on the rank that
computes each matrix without communication.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from muonfx.polar import policy
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike, block_side

_TILE = 128
"""The assumed side of the tiles of the Triton kernel. Tiles on the diagonal are computed in full."""


class Cost(NamedTuple):
    """The cost of orthogonalizing one matrix by Newton-Schulz; a multiply-add counts as two operations."""

    flops: float
    """Floating-point operations; a symmetric product counts half if only half of it is computed."""
    load: float
    """The estimated time, in operations: the number that full matrix products do in this time. Matrices are
    distributed over ranks by this number."""
    scratch_bytes: int
    """The size in bytes of the temporary tensors for one matrix."""


def newton_schulz_cost(
    shape: tuple[int, int],
    device: str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    method: policy.MethodLike = "auto",
    products: ProductsLike = "auto",
) -> Cost:
    """Return the cost of `muonfx.polar.orthogonalize` for one matrix, with the dtype, method and products of `explain`.

    Unlike `explain`, it assumes the same hardware on all machines, so that all ranks compute the same cost.
    """
    resolved = polynomials(coefficients, steps)
    if resolved.table is not None:
        if method == "gram":
            raise ValueError("method: found 'gram' with a tensor of coefficients, which only the standard form takes")
        # For a tensor of coefficients, the count depends only on the number of coefficients per step, two or three.
        last = 1.0 if resolved.table.shape[1] == 3 else 0.0
        resolved = Polynomials(((1.0, 1.0, last),) * len(resolved.indices), ())
        method, products = "standard", "batched"
    short, long = sorted(shape)
    return _cost(short, long, torch.device(device), dtype, resolved, method, products)


@functools.lru_cache(maxsize=65536)  # a model has few shapes and many matrices
def _cost(
    short: int,
    long: int,
    device: torch.device,
    dtype: torch.dtype,
    resolved: Polynomials,
    method: policy.MethodLike,
    products: ProductsLike,
) -> Cost:
    chosen = policy.plan(
        short, long, dtype, device, resolved, method=method, dtype=dtype, products=products, portable=True
    )
    # Not the operation count: halved products save less time than operations, and memory passes take time too.
    return Cost(_flops(chosen), 2 * policy.work(chosen, device, portable=True), chosen.scratch_bytes)


def _flops(chosen: policy.Plan) -> float:
    """Return the number of floating-point operations to orthogonalize one matrix as the plan describes."""
    # Two long products for each stage, and at most 4 k - 3 small products for k steps.
    n, m = chosen.shape
    gram, small = _computed(chosen.products, n), _computed(chosen.small_products, n)
    long = len(chosen.stages) * (1 + gram) * n * n * m
    squares = sum(1 for stage in chosen.stages for step in stage.steps if step[2] != 0)
    extra = sum(len(stage.steps) - 1 for stage in chosen.stages)
    return 2 * (long + small * n**3 * (squares + 3 * extra))


def _computed(how: str, n: int) -> float:
    """Return the fraction of a symmetric `n x n` product that is computed; the rest is mirrored.

    `how` is "batched" (computed in full), or "blocks" or "triton" (only blocks on and below the diagonal).
    """
    if how == "batched" or n == 0:
        return 1.0
    side = min(n, block_side(n) if how == "blocks" else _TILE)
    return sum(min(side, n - start) * (n - start) for start in range(0, n, side)) / n**2
