"""Orthogonalize batches of matrices: compute their polar factors, by Newton-Schulz iterations or exactly.

- `orthogonalize` and `orthogonalize_many` run the iteration; `polar_factor` is exact and slow.
- `PRESETS` are the known polynomials of the iteration; `fit_coefficients` computes new ones, and `band` returns the
  interval into which polynomials map singular values.
- `explain` shows the dtype, the form of the iteration and the kernels that are chosen for a shape, with reasons.

All functions are pure and take tensors of shape ``(..., m, n)``. Nothing here uses trees, transforms or optimizers.
"""

from muonfx.polar.bands import Band, band, scalar_polynomial
from muonfx.polar.coefficients import (
    CANS_RAW,
    POLAR_EXPRESS_RAW,
    PRESETS,
    Coefficients,
    CoefficientSet,
    CoefficientsLike,
    coefficients,
    with_safety,
)
from muonfx.polar.exact import polar_factor
from muonfx.polar.fit import fit_coefficients
from muonfx.polar.iteration import same_range
from muonfx.polar.many import orthogonalize, orthogonalize_many
from muonfx.polar.policy import DTypeLike, MethodLike, Plan, compute_dtype, explain
from muonfx.polar.products import ProductsLike
from muonfx.polar.workspace import Workspace

# fmt: off
__all__ = [
    # the polar factor: fast, in batches, exact
    "orthogonalize", "orthogonalize_many", "polar_factor", "Workspace",
    # polynomials
    "PRESETS", "CANS_RAW", "POLAR_EXPRESS_RAW", "Coefficients", "CoefficientSet", "CoefficientsLike",
    "coefficients", "with_safety", "fit_coefficients", "Band", "band", "scalar_polynomial",
    # how it is done, and why
    "explain", "Plan", "compute_dtype", "same_range", "DTypeLike", "MethodLike", "ProductsLike",
]
# fmt: on


def __dir__() -> list[str]:
    return sorted(__all__)
