"""Kernels for GPUs: products that are known to be symmetric, at half the FLOPs.

Newton-Schulz spends much of its time on such products: the Gram matrix `A = X X^T`, the polynomial `b A + c A^2`, and,
in the Gram form of the iteration, nearly all others. Their two triangles are the same numbers: one is computed, the
other copied.
Products that are not symmetric have no such half to leave out, and stay with cuBLAS (`torch.baddbmm`), whose kernels
are closer to the peak than any written here would be.

Nothing here imports Triton until a kernel is asked for, and without Triton, or with a broken one, everything else of
the package works: `available` says what is there.
"""

from muonfx.polar.kernels.device import available
from muonfx.polar.kernels.products import symmetric_matmul

__all__ = ["available", "symmetric_matmul"]
