"""One batch of matrices of one shape, orthogonalized as a plan says: as a function, or in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from muonfx.polar.iteration import newton_schulz, newton_schulz_with_tensor
from muonfx.polar.policy import SUPPORTED, Plan
from muonfx.polar.polynomials import Polynomials
from muonfx.polar.products import Buffered
from muonfx.polar.scaling import frobenius_normalized, normalize_, row_normalized
from muonfx.polar.workspace import Workspace
from muonfx.tree.symbols import called_once

_LARGE = 1 << 16  # elements from which a pass over one matrix costs more than a call


def as_function(x: torch.Tensor, plan: Plan, resolved: Polynomials) -> torch.Tensor:
    """Orthogonalize without writing to anything: goes through autograd, `torch.func` and the compiler.

    Shapes, dtypes: `(b, n, m)` of any magnitude and supported dtype, n <= m, not empty; `plan.dtype` comes back.

    >>> from muonfx.polar.policy import explain
    >>> from muonfx.polar.polynomials import polynomials
    >>> as_function(torch.eye(2)[None], explain((2, 2), steps=1), polynomials("keller", 1)).shape
    torch.Size([1, 2, 2])
    """
    x = frobenius_normalized(x, plan.dtype, resolved.safety)
    if resolved.table is not None:
        return newton_schulz_with_tensor(x, resolved.table, resolved.indices)
    if not resolved.row_scaling:
        return newton_schulz(x, plan.stages)
    # The Frobenius norm has come first, though row scaling undoes it: it keeps fp16 row sums in range.
    x, gram = row_normalized(x)
    return newton_schulz(x, plan.stages, gram=gram)


def in_place(
    batch: torch.Tensor, plan: Plan, resolved: Polynomials, *, tall: bool, workspace: Workspace, results: Workspace
) -> torch.Tensor:
    """Orthogonalize `batch`, already rounded to `plan.dtype`, in its own memory and a few buffers.

    Shapes: `(b, n, m)`, or `(b, m, n)` where `tall`; the same comes back, in `batch` or in memory of `results`.
    """
    normalize_(batch, resolved.safety)
    products = Buffered(
        batch, tall=tall, how=plan.products, small=plan.small_products, workspace=workspace, results=results
    )
    return newton_schulz(batch, plan.stages, products)


def goes_in_place(short: int, long: int, resolved: Polynomials) -> bool:
    """True if `in_place` is for matrices of this shape: for large ones.

    >>> from muonfx.polar.polynomials import polynomials
    >>> goes_in_place(512, 512, polynomials("keller")), goes_in_place(8, 8, polynomials("keller"))
    (True, False)
    """
    return resolved.table is None and not resolved.row_scaling and short * long >= _LARGE


def is_watched(*xs: torch.Tensor) -> bool:
    """True if autograd, `torch.func` or the compiler follows what is done with tensors: none may be overwritten.

    >>> is_watched(torch.zeros(2)), is_watched(torch.zeros(2, requires_grad=True))
    (False, True)
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level >= 0:  # within forward_ad.dual_level(), a tensor may carry a tangent
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def is_differentiated(*xs: torch.Tensor) -> bool:
    """True if derivatives are taken: in a transform of `torch.func` that takes them, in forward mode or by autograd.

    `torch.func.vmap` takes none.

    >>> is_differentiated(torch.zeros(2)), is_differentiated(torch.zeros(2, requires_grad=True))
    (False, True)
    >>> jvp = lambda x: torch.func.jvp(lambda y: y + is_differentiated(y), (x,), (x,))[0]
    >>> torch.func.vmap(lambda x: x + is_differentiated(x))(torch.zeros(1)), torch.func.vmap(jvp)(torch.zeros(1))
    (tensor([0.]), tensor([1.]))
    """
    if _in_derivative():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


@called_once  # a compiler enters the same levels while it traces, and guards them
def _in_derivative() -> bool:
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    taking = (TransformType.Grad, TransformType.Jvp)
    return any(level.key() in taking for level in get_interpreter_stack() or ())


def outside_autocast(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """`function(x, ...)` outside any autocast region, which would choose another dtype for the products.

    >>> outside_autocast(torch.abs, torch.tensor(-1.0))
    tensor(1.)
    """
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return function(x, *rest, **named)
    with torch.autocast(kind, enabled=False):
        return function(x, *rest, **named)


def check_matrix(x: torch.Tensor, name: str) -> None:
    """Raise unless `x` is a tensor `(..., m, n)` of a supported floating dtype; `name` is its name in the error."""
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
    """Raise unless every tensor of `out` can take the result of its partner in `xs`.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another number of tensors, another shape or device, or one whose elements or those of another share
            memory, except that it may be its own input.
    """
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
    """True if two tensors of one shape are the same elements in memory."""
    same = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return same and x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def sharing(xs: Sequence[torch.Tensor]) -> set[int]:
    """The places of the tensors whose span of memory overlaps that of another, or that overlap themselves.

    >>> x = torch.zeros(4, 2)
    >>> sharing([x[:2], x[2:], torch.zeros(1)]), sharing([x[:3], torch.zeros(1), x[2:]])
    (set(), {0, 2})
    """
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
    """True if several elements of a tensor may be in one place, as in an expanded one.

    >>> x = torch.zeros(4)
    >>> overlaps_itself(x.expand(2, 4)), overlaps_itself(x.unfold(0, 3, 1)), overlaps_itself(x.view(2, 2).mT)
    (True, True, False)
    """
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
