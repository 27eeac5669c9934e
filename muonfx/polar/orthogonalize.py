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
    """Send every singular value of `x` near 1 and keep its singular vectors, by Newton-Schulz.

    `band(coefficients)` gives the interval of the results. The result is bitwise the same for `2^k x`, as long as its
    entries are normal numbers, and is zero for zero. NaN or infinity in one matrix of a batch stays in that matrix.
    Works under `torch.func` transforms and `torch.compile(fullgraph=True)`; an autocast region does not change it.

    Args:
        x: `(..., m, n)`, any batch dims, any of them zero, fp64, fp32, bf16 or fp16. Never modified.
        coefficients: a name of `PRESETS`, a `Coefficients`, a sequence of `(a, b[, c])`, or a floating tensor `(k, 3)`
            or `(k, 2)` on `x`'s device, which may be differentiated or mapped over and whose values are not checked.
        steps: the number of polynomials: the first ones, the last repeated beyond the set's length; None means that
            length.
        method: "standard" multiplies the whole matrix at every step; "gram" takes several steps on its Gram matrix,
            which is cheaper the longer the matrix is; "auto" for the choice that `explain` shows.
        dtype: the dtype of the matrix products, or "auto" for `compute_dtype`'s choice. If derivatives are taken
            (autograd records, or in `torch.func.grad`, `vjp`, `jvp`), "auto" is at least fp32: in bf16 they are noise.
        products: "batched", "blocks" or "triton": how symmetric products are computed; "auto" for the choice that
            `explain` shows. Under autograd, `torch.func` and the compiler, and for small matrices, they are always
            batched.
        max_scratch_bytes: about how many bytes of intermediates may be taken at a time; see `orthogonalize_many`.
        out: the tensor for the result, of `x`'s shape, dtype and device, possibly `x` itself.

    Returns:
        A new contiguous tensor of `x`'s shape, dtype and device; or `out`.

    Raises:
        TypeError: `x` or `out` is not a floating tensor of a supported dtype, or an argument has the wrong type.
        ValueError: `x` has fewer than two dims, or another argument is malformed.
        RuntimeError: `products="triton"` where the kernels do not run; `out` under autograd, `torch.func` or the
            compiler.

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
