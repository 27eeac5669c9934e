"""Orthogonalize one batch of matrices of one shape by a `Plan`, as a pure function or in place; argument checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from muonfx.polar.iteration import newton_schulz, newton_schulz_with_tensor, standard_iteration
from muonfx.polar.policy import SUPPORTED, Plan
from muonfx.polar.polynomials import Polynomials
from muonfx.polar.products import Buffered, Functional
from muonfx.polar.scaling import frobenius_normalized, normalize_, row_normalized
from muonfx.polar.workspace import Workspace
from muonfx.tree.tracing import called_once, functorch_is_active


def as_function(x: torch.Tensor, plan: Plan, resolved: Polynomials) -> torch.Tensor:
    """Orthogonalize nonempty `(b, n, m)`, n <= m, without in-place writes; the result has `plan.dtype`."""
    x = frobenius_normalized(x, plan.dtype, resolved.safety)
    if resolved.table is not None:
        return newton_schulz_with_tensor(x, resolved.table, resolved.indices)
    if not resolved.row_scaling:
        if plan.method == "standard":
            return standard_iteration(x, resolved.steps)
        return newton_schulz(x, plan.stages, Functional())
    # The Frobenius norm is applied first, although row scaling undoes it, to keep fp16 row sums in range.
    x, gram = row_normalized(x)
    return newton_schulz(x, plan.stages, Functional(), gram)


def in_place(
    batch: torch.Tensor, plan: Plan, resolved: Polynomials, *, tall: bool, workspace: Workspace, results: Workspace
) -> torch.Tensor:
    """Orthogonalize `(b, n, m)`, transposed if `tall`, in place; the result is in `batch` or memory of `results`."""
    normalize_(batch, resolved.safety)
    products = Buffered(
        batch, tall=tall, how=plan.products, small=plan.small_products, workspace=workspace, results=results
    )
    return newton_schulz(batch, plan.stages, products)


def is_watched(*xs: torch.Tensor) -> bool:
    """Return True if autograd, `torch.func` or the compiler records the tensors, so none may be overwritten."""
    if torch.compiler.is_compiling() or functorch_is_active():
        return True
    if forward_ad._current_level >= 0:  # within forward_ad.dual_level(), a tensor may carry a tangent
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def is_differentiated(*xs: torch.Tensor) -> bool:
    """Return True if derivatives are taken by autograd, forward mode or `torch.func`; `vmap` takes none."""
    if _in_derivative():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


@called_once  # a compiler enters the same levels while it traces, and guards them
def _in_derivative() -> bool:
    if forward_ad._current_level >= 0:
        return True
    if not functorch_is_active():
        return False
    taking = (TransformType.Grad, TransformType.Jvp)
    return any(level.key() in taking for level in get_interpreter_stack() or ())


def outside_autocast(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Call `function(x, ...)` outside any autocast region, which would change the dtype of the products."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return function(x, *rest, **named)
    with torch.autocast(kind, enabled=False):
        return function(x, *rest, **named)


def check_matrix(x: torch.Tensor, name: str) -> None:
    """Raise unless `x` is a dense tensor `(..., m, n)` of a supported floating dtype."""
    if not isinstance(x, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: found {type(x).__name__}, expected a torch.Tensor of shape (..., m, n)")
    if x.dtype not in SUPPORTED:
        raise TypeError(
            f"{name}: found dtype {x.dtype} (shape {tuple(x.shape)}), expected one of {', '.join(map(str, SUPPORTED))}"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: found layout {x.layout}, expected a dense tensor: x.to_dense()")
    if x.ndim < 2:
        raise ValueError(
            f"{name}: found shape {tuple(x.shape)}, expected (..., m, n); "
            "flatten it to a matrix, or leave vectors and scalars to another transform"
        )


def check_out(out: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise unless each tensor of `out` fits its input and shares memory with no other tensor."""
    if len(out) != len(xs):
        raise ValueError(f"out: found {len(out)} tensors for {len(xs)} inputs, expected one for each")
    for y, x, name in zip(out, xs, names, strict=True):
        if not isinstance(y, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: found {type(y).__name__}, expected a torch.Tensor")
        if y.dtype != x.dtype:
            raise TypeError(f"{name}: found dtype {y.dtype}, expected that of its input, {x.dtype}")
        if y.shape != x.shape or y.device != x.device:
            raise ValueError(
                f"{name}: found shape {tuple(y.shape)} on {y.device}, "
                f"expected those of its input, {tuple(x.shape)} on {x.device}"
            )
        if overlaps_itself(y):
            raise ValueError(f"{name}: found an expanded tensor, whose elements share memory; expected one to write to")
    others = [x for x, y in zip(xs, out, strict=True) if not _is_same(x, y)]
    for i in sharing([*out, *others]):
        if i < len(out):
            raise ValueError(
                f"{names[i]}: found memory shared with another input or output, expected its own, or exactly that of "
                "its own input"
            )


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two tensors of one shape are the same elements in memory."""
    same = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return same and x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def sharing(xs: Sequence[torch.Tensor]) -> set[int]:
    """Return the indices of the tensors whose memory overlaps another's, or that overlap themselves."""
    spans: list[tuple[int, int, int]] = []
    found: set[int] = set()
    for i, x in enumerate(xs):
        size = x.nbytes
        if not size:
            continue
        if not x.is_contiguous():
            if overlaps_itself(x):
                found.add(i)
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            size = (last + 1) * x.itemsize
        start = x.data_ptr()
        if start:  # meta tensors have no memory
            spans.append((start, start + size, i))
    spans.sort()
    end, holder = 0, -1
    for start, stop, i in spans:
        if start < end:
            found |= {i, holder}
        if stop > end:
            end, holder = stop, i
    return found


def overlaps_itself(x: torch.Tensor) -> bool:
    """Return True if elements of a tensor may share memory, as in an expanded tensor."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
