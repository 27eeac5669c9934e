"""The approximate orthogonal polar factor of a matrix, or of a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.iteration import iteration
from muonfx.polar.policy import SUPPORTED, DTypeLike, compute_dtype


def orthogonalize(
    x: torch.Tensor,
    *,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    dtype: DTypeLike = "auto",
) -> torch.Tensor:
    """Send every singular value of `x` near 1 and keep its singular vectors, by Newton-Schulz.

    How near is what `band(coefficients)` says. The result is bitwise the same for `2^k x`, and is zero for zero. NaN or
    infinity in one matrix of a batch stays in that matrix. Goes through `torch.func` transforms and
    `torch.compile(fullgraph=True)`; an autocast region around it changes nothing.

    Args:
        x: `(..., m, n)`, any batch dims, any of them zero, fp64, fp32, bf16 or fp16. Never written to.
        coefficients: a name of `KNOWN`, a `Coefficients`, a sequence of `(a, b[, c])`, or a floating tensor `(k, 3)` or
            `(k, 2)` on `x`'s device, which may be differentiated or mapped over and whose values are not checked.
        steps: how many polynomials: the first ones, the last repeated beyond the set's length; None means that length.
        dtype: the dtype of the matrix products, or "auto" for `compute_dtype`'s choice.

    Returns:
        A new contiguous tensor of `x`'s shape, dtype and device.

    Raises:
        TypeError: `x` is not a floating tensor of a supported dtype, or an argument has the wrong type.
        ValueError: `x` has fewer than two dims, or coefficients, steps or dtype are malformed.

    Follows Keller Jordan's Muon, with the scaling of this package (see `muonfx.polar.scaling`).

    >>> g = torch.tensor([[3e-20, 0.0, 0.0], [0.0, -5e-20, 0.0]])
    >>> orthogonalize(g, coefficients="polar_express", dtype=torch.float64).round(decimals=5) + 0.0
    tensor([[ 1.,  0.,  0.],
            [ 0., -1.,  0.]])
    """
    check_matrix(x, "x")
    method = iteration(coefficients, steps)
    compute = compute_dtype(x.dtype, x.device, dtype)
    if x.numel() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    y = run(method, wide.reshape(-1, *wide.shape[-2:]), compute).reshape(wide.shape)
    return (y.mT if tall else y).to(x.dtype).contiguous()


def run(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`function(x, *rest)` outside any autocast region, which would choose another dtype for the products."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return function(x, *rest)
    with torch.autocast(kind, enabled=False):
        return function(x, *rest)


def check_matrix(x: torch.Tensor, name: str) -> None:
    """Raise unless `x` is a tensor `(..., m, n)` of a supported floating dtype; `name` is its name in the error."""
    if not isinstance(x, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: found {type(x).__name__}, expected a torch.Tensor of shape (..., m, n)")
    if x.dtype not in SUPPORTED:
        raise TypeError(
            f"{name}: found dtype {x.dtype} (shape {tuple(x.shape)}), expected one of {', '.join(map(str, SUPPORTED))}"
        )
    if x.ndim < 2:
        raise ValueError(
            f"{name}: found shape {tuple(x.shape)}, expected (..., m, n); "
            "flatten it to a matrix, or leave vectors and scalars to another transform"
        )
