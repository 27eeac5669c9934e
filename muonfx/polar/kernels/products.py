"""Check the arguments of symmetric products, and register the operator that a compiler traces.

In `torch.compile` a product is one opaque operator that writes to `out`. The compiler neither inlines nor tunes the
kernel, so compiled and eager code run the same kernel.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from muonfx.polar.kernels.device import available
from muonfx.tree.tracing import functorch_is_active

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def symmetric_matmul(
    p: torch.Tensor,
    q: torch.Tensor | None = None,
    *,
    addend: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    identity: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the symmetric `alpha p q^T + beta addend + identity I`, at half the FLOPs of a product."""
    # Shapes: `p` and `q` are `(b, n, k)`, `addend` and `out` `(b, n, n)`; `out` has unit stride along the columns and
    # its own memory. The upper triangle of the formula is computed and mirrored, so the result is bitwise symmetric and
    # only the upper triangle of `addend` counts. Sums are in fp32, fp32 products are IEEE (no tf32), and the result is
    # rounded once. A transposed view is read as fast as a contiguous tensor; other views without a unit stride are
    # copied. The first call for a bucket of sizes times several tiles: it waits for the device and cannot be captured
    # in a CUDA graph. Two tiles may differ in the last bit of a sum.
    if q is p:
        q = None
    _check_inputs(p, q, addend, alpha, beta, identity)
    if beta == 0:
        addend = None
    _check_plain([x for x in (p, q, addend, out) if x is not None])
    if not available(p.device):
        raise RuntimeError(
            f"symmetric_matmul: found device {p.device}, expected a CUDA device of capability 8.0 or more with Triton, "
            "or a CPU with TRITON_INTERPRET=1 set before the first import of Triton; use torch.baddbmm here"
        )
    batches, n, _ = p.shape
    if out is None:
        out = p.new_empty(batches, n, n)
    else:
        _check_out(out, p)
    if out.numel() > 0:
        _operator(p, q, addend, float(alpha), float(beta), float(identity), out)
    return out


def _launch(
    p: torch.Tensor,
    q: torch.Tensor | None,
    addend: torch.Tensor | None,
    alpha: float,
    beta: float,
    identity: float,
    out: torch.Tensor,
) -> None:
    from muonfx.polar.kernels.launch import launch  # imports Triton, so only on use

    for name, other in (("p", p), ("q", q), ("addend", addend)):
        if other is not None and _overlap(out, other):
            raise ValueError(f"out: found a tensor that shares memory with {name}, expected memory of its own")
    launch(p, q, addend, alpha, beta, identity, out)


def _changes_nothing_but_out(*_: object) -> None:
    """Do nothing under a tracer: the schema declares the write to `out`."""


# Not torch.library.custom_op, whose Python layers take longer (20 against 8 us) than many products.
_LIBRARY = torch.library.Library("muonfx", "FRAGMENT")
_LIBRARY.define(
    "symmetric_matmul(Tensor p, Tensor? q, Tensor? addend, float alpha, float beta, float identity, Tensor(a!) out)"
    " -> ()",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.impl("symmetric_matmul", _launch, "CPU")
_LIBRARY.impl("symmetric_matmul", _launch, "CUDA")
torch.library.register_fake("muonfx::symmetric_matmul", _changes_nothing_but_out, lib=_LIBRARY)
_operator = torch.ops.muonfx.symmetric_matmul.default


def _check_inputs(
    p: torch.Tensor,
    q: torch.Tensor | None,
    addend: torch.Tensor | None,
    alpha: float,
    beta: float,
    identity: float,
) -> None:
    _check_tensor("p", p, None)
    if p.ndim != 3:
        raise ValueError(f"p: found shape {tuple(p.shape)}, expected (b, n, k)")
    batches, n, _ = p.shape
    if q is not None:
        _check_tensor("q", q, p)
        if q.shape != p.shape:
            raise ValueError(f"q: found shape {tuple(q.shape)}, expected p's {tuple(p.shape)}")
    if addend is not None:
        _check_tensor("addend", addend, p)
        if addend.shape != (batches, n, n):
            raise ValueError(f"addend: found shape {tuple(addend.shape)}, expected {(batches, n, n)}")
    for name, value in (("alpha", alpha), ("beta", beta), ("identity", identity)):
        if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{name}: found {type(value).__name__}, expected a number")
    if beta != 0 and addend is None:
        raise ValueError(f"beta: found {beta} without an addend, expected one of shape {(batches, n, n)}")


def _check_tensor(name: str, x: torch.Tensor, like: torch.Tensor | None) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: found {type(x).__name__}, expected a torch.Tensor")
    if like is None:
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: found {x.dtype}, expected one of {', '.join(map(str, DTYPES))}; use torch.baddbmm for others"
            )
    elif x.dtype != like.dtype:
        raise TypeError(f"{name}: found {x.dtype}, expected p's {like.dtype}")
    elif x.device != like.device:
        raise ValueError(f"{name}: found device {x.device}, expected p's {like.device}")


def _check_out(out: torch.Tensor, p: torch.Tensor) -> None:
    _check_tensor("out", out, p)
    batches, n, _ = p.shape
    if out.shape != (batches, n, n):
        raise ValueError(f"out: found shape {tuple(out.shape)}, expected {(batches, n, n)}")
    by_batch, by_row, by_column = out.stride()
    whole = (n - 1) * by_row + n  # span of one matrix, from its first entry to its last
    rows_apart = n <= 1 or (by_column == 1 and by_row >= n)
    one_by_one = by_batch >= whole
    row_by_row = by_batch >= n and by_row >= (batches - 1) * by_batch + n
    if not rows_apart or (batches > 1 and n > 0 and not (one_by_one or row_by_row)):
        raise ValueError(
            f"out: found strides {out.stride()} for shape {tuple(out.shape)}, expected unit stride along the columns "
            "and no two entries in one place"
        )


def _check_plain(tensors: list[torch.Tensor]) -> None:
    """Raise if a derivative or a batching rule is needed; a tracer raises its own errors."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        wanted = "a gradient of its input"
    elif torch.compiler.is_compiling():
        return
    elif functorch_is_active():
        wanted = "a transform of torch.func"
    elif any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        wanted = "a forward derivative of its input"
    else:
        return
    raise RuntimeError(
        f"symmetric_matmul: found {wanted}, expected plain tensors: it has no derivatives; use torch.baddbmm there, "
        "or torch.no_grad() where none is needed"
    )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the memory spans of two nonempty tensors overlap."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or b.numel() == 0:
        return False
    first, last = zip(*(_span(x) for x in (a, b)), strict=True)
    return max(first) <= min(last)


def _span(x: torch.Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = int(x.storage_offset())
    return first, first + int(steps)
