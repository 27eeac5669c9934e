"""The cost of orthogonalizing a matrix, from its shape and the settings alone.

It never depends on the machine: not on its clock, its CPU, or the installed packages. Ranks can therefore choose who
computes which matrix without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from muonfx.polar import policy
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike, block_side

__all__ = ["Cost", "newton_schulz_cost"]

_TILE = 128
"""The side of a kernel's tiles, which are computed whole on the diagonal; the usual winner of autotuning."""


class Cost(NamedTuple):
    """The cost of one matrix; a multiply-add counts as two operations."""

    flops: float
    """Floating-point operations; half of a symmetric product if its other half is skipped."""
    load: float
    """Operations of full products that take the same time; owners are balanced by this number."""
    method: Literal["standard", "gram"]
    """The form of the iteration."""
    scratch_bytes: int
    """The bytes of one matrix's intermediates."""
    stages: int
    """How often the Gram matrix is computed."""


def newton_schulz_cost(
    shape: tuple[int, int],
    device: str = "cpu",
    *,
    held: torch.dtype = torch.float32,
    dtype: policy.DTypeLike = "auto",
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    restarts: Sequence[int] | None = None,
    method: policy.MethodLike = "auto",
    products: ProductsLike = "auto",
) -> Cost:
    """Return the cost of `muonfx.polar.orthogonalize` for one matrix, by the policy of `muonfx.polar.explain`."""
    short, long = sorted(shape)
    if short < 0:
        raise ValueError(f"shape: found {tuple(shape)}, expected two sides of at least 0")
    resolve = _polynomials_by_name if isinstance(coefficients, str) else polynomials
    resolved = resolve(coefficients, steps, None if restarts is None else tuple(restarts))
    kind = torch.device(device).type
    if dtype == "auto":
        dtype = torch.float64 if held == torch.float64 else torch.bfloat16 if kind == "cuda" else torch.float32
    if resolved.table is None:
        return _cost(short, long, kind, held, dtype, resolved, method, products)
    # For a tensor of coefficients, the count depends only on the number of coefficients per step, two or three.
    last = 1.0 if resolved.table.shape[1] == 3 else 0.0
    alike = Polynomials(((1.0, 1.0, last),) * len(resolved.indices), ())
    if method == "gram":
        raise ValueError("method: found 'gram' with a tensor of coefficients, which only the standard form takes")
    return _cost(short, long, kind, held, dtype, alike, "standard", "batched")


_polynomials_by_name = functools.lru_cache(maxsize=256)(polynomials)


@functools.lru_cache(maxsize=65536)  # a model has few shapes and many matrices
def _cost(
    short: int,
    long: int,
    kind: str,
    held: torch.dtype,
    dtype: policy.DTypeLike,
    resolved: Polynomials,
    method: policy.MethodLike,
    products: ProductsLike,
) -> Cost:
    # Independent of this machine: a CPU is assumed to have no tile registers, a CUDA device to have the kernels.
    facts = policy.Facts(tiles=False, kernels=kind == "cuda")
    device = torch.device(kind)
    chosen = policy.plan(
        short, long, held, device, resolved, method=method, dtype=dtype, products=products, facts=facts
    )
    # Not the operation count: halved products save less time than operations, and memory passes take time too.
    load = 2 * policy.work(chosen, device, facts)
    return Cost(_flops(chosen), load, chosen.method, chosen.scratch_bytes, len(chosen.stages))


def _flops(chosen: policy.Plan) -> float:
    """Count the operations of `muonfx.polar.iteration`."""
    # Two long products for each stage, and at most 4 k - 3 small products for k steps.
    n, m = chosen.shape
    gram, small = _computed(chosen.products, n), _computed(chosen.small_products, n)
    long = len(chosen.stages) * (1 + gram) * n * n * m
    squares = sum(1 for stage in chosen.stages for step in stage.steps if step[2] != 0)
    extra = sum(len(stage.steps) - 1 for stage in chosen.stages)
    return 2 * (long + small * n**3 * (squares + 3 * extra))


def _computed(how: str, n: int) -> float:
    """Return the fraction of a symmetric `n x n` product that is computed, not mirrored."""
    if how == "batched" or n == 0:
        return 1.0
    side = min(n, block_side(n) if how == "blocks" else _TILE)
    return sum(min(side, n - start) * (n - start) for start in range(0, n, side)) / n**2
