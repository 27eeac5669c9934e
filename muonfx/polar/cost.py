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
from muonfx.polar.products import ProductsLike


class Cost(NamedTuple):
    """The cost of orthogonalizing one matrix by Newton-Schulz."""

    load: float
    """The estimated time, in operations: the number that full matrix products do in this time, where a multiply-add
    counts as two. Matrices are distributed over ranks by this number."""
    plan: policy.Plan
    """The dtype, the method and the products whose time was estimated."""


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
    policy.check_method(method, resolved)
    if resolved.table is not None:  # coefficients in a tensor always take the standard form and full products
        resolved = _with_numbers(resolved.table, resolved.indices)
        method = "standard"
        products = "batched"
    short, long = sorted(shape)
    request = policy.Request(short, long, torch.device(device), resolved, method, products, portable=True)
    return _cost(request, dtype, may_take_fp16)


def _with_numbers(table: Tensor, indices: tuple[int, ...]) -> Polynomials:
    """Return polynomials that cost as much as coefficients in a tensor `(k, 2)` or `(k, 3)`, which need no values."""
    c = 1.0 if table.shape[1] == 3 else 0.0  # the cost of a step depends only on whether c is 0
    return Polynomials(steps=((1.0, 1.0, c),) * len(indices), restarts=())


@functools.lru_cache(maxsize=65536)  # a model has few shapes and many matrices
def _cost(request: policy.Request, dtype: torch.dtype, may_take_fp16: bool) -> Cost:
    """Return the cost of one matrix for products in a dtype. Cached."""
    plan = policy.plan_in(dtype, request)
    if may_take_fp16 and dtype == torch.bfloat16:
        plan = policy.in_fp16_if_better(plan, request)
    # Not the operation count: halved products save less time than operations, and memory passes take time too.
    load = 2 * policy.work(plan, request.device, portable=True)
    return Cost(load, plan)
