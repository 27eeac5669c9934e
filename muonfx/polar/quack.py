"""Symmetric matrix products on NVIDIA GPUs by quack-kernels (github.com/Dao-AILab/quack), where it is installed.

`X X^T` and `b A + c A^2` with a symmetric A are symmetric. `quack.gemm_interface.gemm_symmetric` computes the tiles of
one triangle and mirrors them, with about half of the multiply-adds of a full product.

`refusal` returns the reason why quack is not used for some matrices. quack is imported at first use, and its products
are then compared with float64 once for each device and dtype (the self-test). Speed is not measured, so no result
depends on a clock.

This module has not run on a GPU in this project. Its tests on a CPU replace quack by a function with its signature;
tests/test_gpu.py compares the real products with float64 wherever a GPU and quack are present.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings

import torch
from torch import Tensor

from muonfx.internal.tracing import called_once, untraced
from muonfx.polar.hardware import cuda_capability

SMALLEST_SIDE = 2048
"""Smallest side of a symmetric result for which quack is used. For no smaller side was quack measured to be faster than
torch, and below 1024 it was reported to be slower: a small result has too few tiles to occupy a GPU."""

_CAPABILITIES = (9, 10)
"""Major numbers of the compute capabilities on which quack is used: Hopper and Blackwell."""

_DTYPES = (torch.bfloat16, torch.float16)
"""fp32 is missing: torch multiplies it in full precision, and quack on tensor cores, in tf32."""

_ALIGNMENT = 8
"""quack requires strides that are multiples of 16 bytes, which are 8 elements of `_DTYPES`."""

_SHAPES = ((2, 264, 136), (1, 1032, 520))
"""Shapes `(b, n, k)` of the self-test. quack's tiles (128 x 256, 256 x 256) divide none of these sides."""

_BETA, _ALPHA = -4.775, 2.0315  # the factors b and c of "keller", which are among the largest


def refusal(short: int, long: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why quack does not multiply matrices of this shape, or None if quack multiplies them."""
    if dtype not in _DTYPES:
        return f"quack-kernels is not used for {dtype}"
    if short < SMALLEST_SIDE:
        return f"quack-kernels is not used below a side of {SMALLEST_SIDE}"
    if short % _ALIGNMENT or long % _ALIGNMENT:
        return f"quack-kernels requires sides that are multiples of {_ALIGNMENT}"
    return failure(device, dtype)


@called_once  # hardware queries cannot be traced
def is_capable(device: torch.device) -> bool:
    """Return True if a device is a GPU of a generation for which quack is used."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return cuda_capability(device.index)[0] in _CAPABILITIES


@called_once  # a tracer calls this once and uses its answer
def failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why quack cannot be used on a device, or None if it passed its self-test there.

    The self-test runs once per process, device and dtype. If quack is installed and fails, a `RuntimeWarning` gives the
    reason.

    Raises:
        RuntimeError: the first use is inside the capture of a CUDA graph.
    """
    if not is_capable(device):
        return "quack-kernels is used on GPUs of compute capability 9 and 10 only"
    if device.type == "cuda":
        if not torch.cuda.is_available():  # a plan for a GPU, printed on a machine without one
            return "quack-kernels cannot be tested, because torch finds no CUDA device here"
        # An empty tensor has the index of the current device, if `device` has none.
        device = torch.empty(0, device=device).device
    return _failure(device, dtype)


@functools.cache
def _failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the self-test of quack-kernels on a device. Return why it cannot be used there, or None if it passes.

    The result is cached, so the test runs once for each device and dtype.
    """
    if importlib.util.find_spec("quack") is None:
        return "quack-kernels is not installed"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "quack-kernels is tested at first use, which waits for the device and cannot be captured in a CUDA graph: "
            "run one step before the capture, or give products='batched'"
        )
    try:
        with untraced():
            problem = _first_error(device, dtype)
    except Exception as error:
        # A kernel that cannot be compiled or launched must not end a training run.
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return None
    failed = f"quack-kernels failed its self-test on {device}"
    warnings.warn(
        f"{failed}, so torch's products are used: {problem}", RuntimeWarning, stacklevel=2
    )
    return f"{failed}: {problem}"


def symmetric_matmul(
    p: Tensor,
    *,
    addend: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor,
) -> Tensor:
    """Write `alpha p p^T + beta addend` into `out` by quack, and return it.

    `p` is `(b, n, k)`, contiguous or the transpose of a contiguous tensor. `addend` and `out` are contiguous
    `(b, n, n)`; each matrix of `addend` must be symmetric, since the lower half of the result is a mirrored copy.
    """
    gemm_symmetric = importlib.import_module("quack.gemm_interface").gemm_symmetric
    with torch.cuda.device_of(p):
        return gemm_symmetric(p, p.mT, C=addend, out=out, alpha=alpha, beta=beta)


@torch.library.custom_op(
    "muonfx::symmetric_matmul",
    mutates_args=(),
    schema="(Tensor p, Tensor? addend, float alpha, float beta) -> Tensor",
)
def traced_symmetric_matmul(p: Tensor, addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Return `alpha p p^T + beta addend` by quack, as one operator of a compiled graph. It has no derivative."""
    return symmetric_matmul(p, addend=addend, alpha=alpha, beta=beta, out=_empty_square(p))


@traced_symmetric_matmul.register_fake
def _(p: Tensor, addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Return a tensor of the shape of the result, while a graph is traced."""
    return _empty_square(p)


def _empty_square(p: Tensor) -> Tensor:
    """Return an uninitialized batch `(b, n, n)` for `p` of the shape `(b, n, k)`."""
    return p.new_empty((p.shape[0], p.shape[1], p.shape[1]))


def _first_error(device: torch.device, dtype: torch.dtype) -> str | None:
    """Multiply random matrices by `symmetric_matmul`. Describe the first wrong product; None if all are right."""
    generator = torch.Generator().manual_seed(0)
    for batch, n, k in _SHAPES:
        # The factors: an n by k matrix, the memory of its transpose, a symmetric n by n matrix, and the identity.
        wide = torch.randn(batch, n, k, generator=generator, device="cpu").to(device, dtype)
        tall = wide.mT.contiguous()
        noise = torch.randn(batch, n, n, generator=generator, device="cpu").to(device, dtype)
        symmetric = noise.triu() + noise.triu(1).mT
        identity = torch.eye(n, dtype=dtype, device=device).expand(batch, n, n).contiguous()
        # The five products of the iteration, each alpha p p^T + beta addend: the Gram matrix of a wide matrix X (p = X)
        # and of a tall one (p = X^T, a view), both also less a multiple of I, and a polynomial of a symmetric A.
        errors = {
            "X X^T": relative_error(wide),
            "X^T X": relative_error(tall.mT),
            "X X^T - I / 2": relative_error(wide, identity, beta=-0.5),
            "X^T X - I / 2": relative_error(tall.mT, identity, beta=-0.5),
            "b A + c A^2": relative_error(symmetric, symmetric, alpha=_ALPHA, beta=_BETA),
        }
        for product, error in errors.items():
            if not error <= 1:  # NaN is an error too
                return f"{product} of {batch} x {n} x {k} in {dtype} has {error:.3g} times the error of rounding"
    return None


def relative_error(
    p: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> float:
    """Return the largest error of an entry of `alpha p p^T + beta addend` by quack, divided by its bound."""
    n, k = p.shape[-2:]
    out = torch.full((len(p), n, n), torch.nan, dtype=p.dtype, device=p.device)
    symmetric_matmul(p, addend=addend, alpha=alpha, beta=beta, out=out)
    wide = p.double()
    magnitudes = wide.abs()
    exact = alpha * (wide @ wide.mT)
    magnitude = abs(alpha) * (magnitudes @ magnitudes.mT)  # the sum of the magnitudes of all terms
    if addend is not None:
        exact += beta * addend.double()
        magnitude += abs(beta) * addend.double().abs()
    # k products and two more operations in fp32. A tensor core truncates where other hardware rounds, so the errors of
    # a sum count twice.
    error_of_sum = 2 * (k + 4) * torch.finfo(torch.float32).eps * magnitude
    # Add one rounding to the dtype of `out`: half a unit in the last place, or a whole one of subnormal numbers.
    narrow = torch.finfo(p.dtype)
    subnormal_step = narrow.smallest_normal * narrow.eps
    error_of_rounding = narrow.eps / 2 * (exact.abs() + error_of_sum)
    bound = error_of_sum + error_of_rounding + subnormal_step
    return ((out.double() - exact).abs() / bound).max().item()
