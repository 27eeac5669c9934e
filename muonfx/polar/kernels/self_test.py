"""The self-test of the kernels: small products of every dtype and tile, compared with float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((2, 64, 64), (2, 33, 17), (1, 256, 128), (1, 261, 131), (1, 1024, 512), (1, 1031, 517))
"""`(b, n, k)`: for each tile one that it divides, and one that it does not."""

ALPHA, BETA, IDENTITY = 2.0315, -4.775, 0.5


def first_error(multiply: Callable[..., torch.Tensor], device: torch.device) -> str | None:
    """Describe the first wrong product of `symmetric_matmul`, or None if all are right."""
    shapes = SHAPES if device.type == "cuda" else SHAPES[:2]  # the interpreter is slow and has one tile
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for batch, n, k in shapes:
            p = torch.randn(batch, n, k, generator=generator, device="cpu").to(device, dtype)
            addend = torch.randn(batch, n, n, generator=generator, device="cpu").to(device, dtype)
            addend = addend.triu() + addend.triu(1).mT
            out = torch.full_like(addend, torch.nan)
            if n % 2:  # the Gram matrix of a tall batch
                p = p.mT.contiguous().mT
                multiply(p, identity=IDENTITY, out=out)
                exact, bound = exact_product(p, None, 1.0, 0.0, IDENTITY)
            else:
                multiply(p, addend=addend, alpha=ALPHA, beta=BETA, out=out)
                exact, bound = exact_product(p, addend, ALPHA, BETA, 0.0)
            error = ((out.double() - exact).abs() / bound).max().item()
            if not (error <= 1 and torch.equal(out, out.mT)):
                wrong = "is not symmetric" if error <= 1 else f"has {error:.3g} times the error that rounding explains"
                return f"a product of shape ({batch}, {n}, {k}) in {dtype} {wrong}"
    return None


def exact_product(
    p: torch.Tensor, addend: torch.Tensor | None, alpha: float, beta: float, identity: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `alpha p p^T + beta addend + identity I` in float64, and the largest error of a result in `p.dtype`."""
    wide, k = p.double(), p.shape[-1]
    diagonal = identity * torch.eye(p.shape[-2], dtype=torch.float64, device=p.device)
    more = torch.zeros_like(diagonal) if addend is None else beta * addend.double()
    exact = alpha * (wide @ wide.mT) + more + diagonal
    # k products and three sums in fp32, one rounding. A tensor core cuts where a sum in software would round, so a
    # sum's errors count twice.
    size = abs(alpha) * (wide.abs() @ wide.abs().mT) + more.abs() + diagonal.abs()
    narrow, sums = torch.finfo(p.dtype), 2 * (k + 4) * torch.finfo(torch.float32).eps * size
    return exact, sums + narrow.eps / 2 * (exact.abs() + sums) + narrow.smallest_normal * narrow.eps
