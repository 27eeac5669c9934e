"""Triton kernels for GPUs: symmetric matrix products with half the FLOPs.

Newton-Schulz spends much of its time on such products: the Gram matrix `A = X X^T` and the polynomial `b A + c A^2`.
One triangle is computed and copied to the other. Other products use cuBLAS (`torch.baddbmm`), whose kernels are closer
to the peak.

The kernels run only if ``products="triton"`` is given, because they were never measured on a GPU, and only if they pass
a self-test (`failure`). Triton is imported when `available` or a product needs it. Without Triton, or with a broken
one, the rest of the package works.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from muonfx.internal.tracing import called_once, untraced
from muonfx.polar.hardware import cuda_capability

__all__ = ["available", "failure", "symmetric_matmul"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHAPES = ((2, 64, 64), (2, 33, 17), (1, 256, 128), (1, 261, 131), (1, 1024, 512), (1, 1031, 517))
"""Shapes `(b, n, k)` of the self-test: for each tile of the kernel one that it divides, and one that it does not."""

_ALPHA, _BETA, _IDENTITY = 2.0315, -4.775, 0.5


@called_once  # a tracer calls this once and keeps the answer
def available(device: torch.device) -> bool:
    """Return True if Triton is installed and `symmetric_matmul` can run on this kind of device; never raises."""
    return _available(device.type, device.index)


@functools.cache
def _available(kind: str, index: int | None) -> bool:
    try:
        if kind == "cuda":
            capable = torch.version.cuda is not None and cuda_capability(index)[0] >= 8
        else:
            capable = kind == "cpu" and bool(os.environ.get("TRITON_INTERPRET"))
        if not capable:
            return False
        from muonfx.polar.kernels.symmetric import INTERPRETED
    except Exception:  # plain products work, whatever the error of CUDA or Triton is
        return False
    return kind == "cuda" or INTERPRETED


@called_once
def failure(device: torch.device) -> str | None:
    """Test the kernels on a device at first use; return None if they are correct, else the reason as text.

    The test runs once per process and device. It compares small products of every dtype and tile size with float64. A
    failed test warns with a `RuntimeWarning`, and `orthogonalize` then uses torch's products.

    Raises:
        RuntimeError: the first use is inside the capture of a CUDA graph.
    """
    if not available(device):
        return "Triton is missing, or the device is not CUDA of capability 8.0 or more"
    if device.type == "cuda":
        device = torch.empty(0, device=device).device  # with the index of the current device, if it has none
    return _failure(device)


@functools.cache
def _failure(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "products='triton': the kernels are tested at first use, which waits for the device and cannot be captured "
            "in a CUDA graph; run one step before the capture"
        )
    try:
        with untraced():
            found = _first_error(device)
    except Exception as error:  # a kernel that cannot be compiled or launched must not end a training run
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        warnings.warn(
            f"products='triton': the kernels failed their self-test on {device}, so torch's products are used: {found}",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def symmetric_matmul(
    p: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    identity: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `alpha p p^T + beta addend + identity I` by a Triton kernel with half the FLOPs of a full product."""
    # `p` is `(b, n, k)` in fp32, bf16 or fp16; the symmetric `addend` and the contiguous `out` are `(b, n, n)`; none is
    # empty. The upper triangle is computed and mirrored, so the result is bitwise symmetric. Sums are in fp32, fp32
    # products are IEEE (no tf32), and the result is rounded once. There are no derivatives.
    from muonfx.polar.kernels.symmetric import launch

    out = p.new_empty(*p.shape[:-1], p.shape[-2]) if out is None else out
    launch(p, addend, alpha, beta, identity, out)
    return out


def _first_error(device: torch.device) -> str | None:
    """Return a description of the first wrong product of `symmetric_matmul` in the self-test; None if all are right."""
    shapes = _SHAPES if device.type == "cuda" else _SHAPES[:2]  # the interpreter is slow and has one tile
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        for batch, n, k in shapes:
            p = torch.randn(batch, n, k, generator=generator, device="cpu").to(device, dtype)
            addend = torch.randn(batch, n, n, generator=generator, device="cpu").to(device, dtype)
            addend = addend.triu() + addend.triu(1).mT
            out = torch.full_like(addend, torch.nan)
            if n % 2:  # the Gram matrix of a tall batch
                p = p.mT.contiguous().mT
                symmetric_matmul(p, identity=_IDENTITY, out=out)
                exact, bound = exact_product(p, None, 1.0, 0.0, _IDENTITY)
            else:
                symmetric_matmul(p, addend=addend, alpha=_ALPHA, beta=_BETA, out=out)
                exact, bound = exact_product(p, addend, _ALPHA, _BETA, 0.0)
            error = ((out.double() - exact).abs() / bound).max().item()
            if not (error <= 1 and torch.equal(out, out.mT)):
                wrong = "is not symmetric" if error <= 1 else f"has {error:.3g} times the error that rounding explains"
                return f"a product of shape ({batch}, {n}, {k}) in {dtype} {wrong}"
    return None


def exact_product(
    p: torch.Tensor, addend: torch.Tensor | None, alpha: float, beta: float, identity: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `alpha p p^T + beta addend + identity I` in float64, and a bound of the errors of the kernel's result."""
    wide, k = p.double(), p.shape[-1]
    diagonal = identity * torch.eye(p.shape[-2], dtype=torch.float64, device=p.device)
    more = torch.zeros_like(diagonal) if addend is None else beta * addend.double()
    exact = alpha * (wide @ wide.mT) + more + diagonal
    # k products and three sums in fp32, one rounding. A tensor core cuts where a sum in software would round, so a
    # sum's errors count twice.
    size = abs(alpha) * (wide.abs() @ wide.abs().mT) + more.abs() + diagonal.abs()
    narrow, sums = torch.finfo(p.dtype), 2 * (k + 4) * torch.finfo(torch.float32).eps * size
    return exact, sums + narrow.eps / 2 * (exact.abs() + sums) + narrow.smallest_normal * narrow.eps
