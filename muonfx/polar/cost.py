"""The cost of orthogonalizing a matrix, from its shape and the settings alone.

It does not depend on the machine, so every rank computes the same cost. Ranks can therefore agree on the rank that
computes each matrix without communication.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from muonfx.polar import policy
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike


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
) -> policy.Plan:
    """Estimate the time of `orthogonalize` for one matrix: return a plan whose `load` is the estimate.

    Matrices are distributed over ranks by their loads, so all ranks must compute the same load. Unlike `explain`, this
    function therefore assumes the same hardware on all machines.

    >>> newton_schulz_cost((64, 128)).load < newton_schulz_cost((128, 256)).load
    True

    Args:
        shape: the numbers of rows and columns.
        device: the type of the device, such as "cuda".
        dtype: the dtype of the matrix products.
        coefficients: as in `orthogonalize`.
        steps: as in `orthogonalize`.
        method: as in `orthogonalize`.
        products: as in `orthogonalize`.
        may_take_fp16: whether products in bf16 may be in fp16 instead, as with the dtype "auto" on CUDA.
    """
    resolved = polynomials(coefficients, steps)
    policy.check_method(method, resolved)
    if resolved.table is not None:
        # Coefficients in a tensor, which always take the standard form and full products. A plan without numbers has
        # no load, so other numbers take their place.
        resolved = _with_numbers(resolved.table, resolved.indices)
        method = "standard"
        products = "batched"
    short, long = sorted(shape)
    request = policy.Request(
        short, long, torch.device(device), resolved, method, products, portable=True
    )
    return _plan(request, dtype, may_take_fp16)


def _with_numbers(table: Tensor, indices: tuple[int, ...]) -> Polynomials:
    """Return polynomials that cost as much as coefficients in a tensor `(k, 2)` or `(k, 3)`, which need no values."""
    c = 1.0 if table.shape[1] == 3 else 0.0  # the cost of a step depends only on whether c is 0
    return Polynomials(steps=((1.0, 1.0, c),) * len(indices), restarts=())


@functools.lru_cache(maxsize=65536)  # a model has few shapes and many matrices
def _plan(request: policy.Request, dtype: torch.dtype, may_take_fp16: bool) -> policy.Plan:
    """Return the plan for one matrix and products in a dtype. Cached."""
    plan = policy.plan_in(dtype, request)
    if may_take_fp16 and dtype == torch.bfloat16:
        return policy.in_fp16_if_better(plan, request)
    return plan
