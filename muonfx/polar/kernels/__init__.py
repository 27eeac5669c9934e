"""Kernels for GPUs: symmetric matrix products with half the FLOPs.

Newton-Schulz spends much of its time on such products: the Gram matrix `A = X X^T` and the polynomial `b A + c A^2`.
One triangle is computed and copied to the other. Other products use cuBLAS (`torch.baddbmm`), whose kernels are closer
to the peak.

The kernels run only if ``products="triton"`` is given, because they were never measured on a GPU. Triton is imported
when a kernel is launched. Without Triton, or with a broken one, the rest of the package works; `available` reports
whether the kernels run.
"""

from muonfx.polar.kernels.device import available
from muonfx.polar.kernels.products import symmetric_matmul

__all__ = ["available", "symmetric_matmul"]
