"""The approximate orthogonal polar factor of a matrix, or of a batch of them."""

from __future__ import annotations

import torch

from muonfx.polar.checks import check_matrix
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.many import Orthogonalizer
from muonfx.polar.policy import DTypeLike, MethodLike
from muonfx.polar.products import ProductsLike


def orthogonalize(
    x: torch.Tensor,
    *,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    max_scratch_bytes: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Orthogonalize a matrix by Newton-Schulz: map its singular values close to 1 and keep its singular vectors.

    `band(coefficients)` returns the interval of the resulting singular values. Scaling `x` by a power of two does not
    change a bit of the result if all entries are normal numbers. Zero gives zero. NaN or infinity in one matrix does
    not affect others of the batch. `torch.func` and `torch.compile(fullgraph=True)` work; autocast has no effect.

    Args:
        x: a tensor `(..., m, n)` in fp64, fp32, bf16 or fp16; any dim may be zero. It is not modified unless it is
            also `out`.
        coefficients: a name in `PRESETS`, a `Coefficients`, a sequence of `(a, b[, c])`, or a floating tensor `(k, 3)`
            or `(k, 2)` on the device of `x`. A tensor may be differentiated or mapped over; its values are not checked.
        steps: the number of steps; None for one step per polynomial. If there are more steps than polynomials, the last
            polynomial is repeated.
        method: "standard" multiplies by the whole matrix in every step. "gram" takes several steps on the small Gram
            matrix, which saves the more the longer the matrix is. "auto": the choice that `explain` shows.
        dtype: the dtype of the matrix products; "auto" for the choice of `compute_dtype`, and at least fp32 if
            derivatives are taken (by autograd, or by `torch.func.grad`, `vjp` or `jvp`), which bf16 makes useless.
        products: how symmetric products are computed, "batched", "blocks" or "triton"; "auto" for the choice that
            `explain` shows. Under autograd, `torch.func` and the compiler, and for small matrices, they are always
            batched.
        max_scratch_bytes: the approximate limit of memory for intermediates; see `orthogonalize_many`.
        out: the tensor for the result, of `x`'s shape, dtype and device, possibly `x` itself.

    Returns:
        A new contiguous tensor of `x`'s shape, dtype and device; or `out`.

    Raises:
        TypeError: `x` or `out` is not a floating tensor of a supported dtype, or an argument has the wrong type.
        ValueError: `x` has fewer than two dims, or another argument is malformed.
        RuntimeError: `products="triton"` on a device that cannot run the kernels; or `out` under autograd,
            `torch.func` or the compiler.

    Follows Keller Jordan's Muon, with the scaling of this package (see `muonfx.polar.iteration`), and Gram
    Newton-Schulz of Dao-AILab with changes (see `muonfx.polar.stages`).

    >>> g = torch.tensor([[3e-20, 0.0, 0.0], [0.0, -5e-20, 0.0]])
    >>> orthogonalize(g, coefficients="polar_express", dtype=torch.float64).round(decimals=5) + 0.0
    tensor([[ 1.,  0.,  0.],
            [ 0., -1.,  0.]])
    """
    check_matrix(x, "x")
    run = Orthogonalizer(coefficients, steps, method, dtype, products)
    return run([x], max_scratch_bytes=max_scratch_bytes, out=None if out is None else [out])[0]
