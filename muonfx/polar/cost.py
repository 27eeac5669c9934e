"""The cost of orthogonalizing a matrix, from its shape and the settings alone.

It does not depend on the machine, so every rank computes the same cost. Ranks can therefore agree on the rank that
computes each matrix without communication.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.polar import policy
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike, block_side


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
    coefficients: CoefficientsLike | Tensor = "polar_express_5",
    steps: int | None = None,
    method: policy.MethodLike = "auto",
    products: ProductsLike = "auto",
    may_take_fp16: bool = False,
) -> Cost:
    """Return the cost of `muonfx.polar.orthogonalize` for one matrix, with the dtype, method and products of `explain`.

    Unlike `explain`, it assumes the same hardware on all machines, so that all ranks compute the same cost. With
    `may_take_fp16`, products in bf16 may be in fp16 instead, as with the dtype "auto" on CUDA.
    """
    resolved = polynomials(coefficients, steps)
    if resolved.table is not None:  # coefficients in a tensor always take the standard form and full products
        policy.check_method(method, resolved)
        resolved = _with_numbers(resolved.table, resolved.indices)
        method = "standard"
        products = "batched"
    short, long = sorted(shape)
    return _cost(short, long, torch.device(device), dtype, resolved, method, products, may_take_fp16)


def _with_numbers(table: Tensor, indices: tuple[int, ...]) -> Polynomials:
    """Return polynomials that cost as much as coefficients in a tensor `(k, 2)` or `(k, 3)`, which need no values."""
    c = 1.0 if table.shape[1] == 3 else 0.0  # the cost of a step depends only on whether c is 0
    return Polynomials(steps=((1.0, 1.0, c),) * len(indices), restarts=())


@functools.lru_cache(maxsize=65536)  # a model has few shapes and many matrices
def _cost(
    short: int,
    long: int,
    device: torch.device,
    dtype: torch.dtype,
    resolved: Polynomials,
    method: policy.MethodLike,
    products: ProductsLike,
    may_take_fp16: bool,
) -> Cost:
    """Return the cost of one matrix with resolved coefficients. Cached."""
    plan = policy.plan(
        short,
        long,
        dtype,  # of the matrix, and of the products
        device,
        resolved,
        method=method,
        dtype=dtype,
        products=products,
        portable=True,
        may_take_fp16=may_take_fp16,
    )
    # Not the operation count: halved products save less time than operations, and memory passes take time too.
    multiply_adds = policy.work(plan, device, portable=True)
    return Cost(_flops(plan), 2 * multiply_adds, plan.scratch_bytes)


def _flops(plan: policy.Plan) -> float:
    """Return the number of floating-point operations to orthogonalize one matrix as the plan describes."""
    n, m = plan.shape
    gram_share = _computed_share(plan.products, n)
    small_share = _computed_share(plan.small_products, n)
    # Products with the long side: each stage computes the symmetric R = X X^T, and Q X.
    long_products = len(plan.stages) * (1 + gram_share) * n * n * m
    # Products of n by n matrices, in the order of `muonfx.polar.iteration.composed`. Each step has the polynomial
    # G = a I + b R + c R^2. Only of squares, one half is mirrored.
    squares = 0
    full_products = 0
    for stage in plan.stages:
        last = len(stage.steps) - 1
        for index, (_, _, c) in enumerate(stage.steps):
            if c != 0:
                squares += 1  # R^2
            if index > 0:
                full_products += 1  # G Q
            if index < last:  # the next R is G (G R)
                full_products += 1
                if c == 0:
                    squares += 1  # G R is a R + b R^2
                else:
                    full_products += 1  # G R
    small_products = (small_share * squares + full_products) * n**3
    return 2 * (long_products + small_products)


def _computed_share(how: str, n: int) -> float:
    """Return the part of a symmetric `n x n` product that is computed, not mirrored, by "batched" or "blocks"."""
    if how == "batched" or n == 0:
        return 1.0
    side = min(n, block_side(n))
    computed = 0
    for start in range(0, n, side):  # a row of blocks, from the diagonal on
        computed += min(side, n - start) * (n - start)
    return computed / n**2
