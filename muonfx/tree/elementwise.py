"""Elementwise arithmetic on lists of tensors: one call for a whole model.

Every function takes lists of equal length and returns a list. With ``reuse=True`` the tensors of the first list (in
`div` of the second) are overwritten and returned. Plain tensors use torch's ``_foreach_`` operators, which pay Python
and launch overhead once per list. Under ``torch.func`` transforms and autograd, which these operators do not support
everywhere, the same formula is computed tensor by tensor.

A scalar is a Python number or a 0-d tensor. On CPUs both give the same bits at all magnitudes, so that a
hyperparameter may be a number, a tensor or a schedule. On other devices a sum may round once with a number and twice
with a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from muonfx.internal.tracing import functorch_is_active, is_traced

Scalar = float | Tensor
Tensors = list[Tensor]

_unbound: Callable[[Tensor], Sequence[Tensor]] = torch.unbind_copy  # pyright: ignore[reportAssignmentType]

_NARROW = frozenset({torch.bfloat16, torch.float16})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_SMALL = 1 << 15  # elements; torch sums longer tensors in several threads, and so in another order
_MANY = 32  # tensors for which a number is converted to a tensor once
_STACK = 1 << 18  # elements of a stack, whose temporaries stay in a CPU's cache


def _cannot_use_foreach(*lists: Sequence[Tensor], scalar: Scalar = 1.0) -> bool:
    """Return True if torch's operators on whole lists of tensors (``torch._foreach_mul``, ...) cannot be used.

    That is so for empty lists, under ``torch.func``, and if autograd records one of the tensors. The caller then
    computes its formula tensor by tensor.
    """
    if not lists[0] or functorch_is_active():
        return True
    if not torch.is_grad_enabled():  # autograd records nothing, as in a usual step
        return False
    return _requires_grad([scalar], *lists)


def _requires_grad(*lists: Sequence[object]) -> bool:
    """Return True if one of the tensors in some lists requires grad; numbers in the lists do not count."""
    for xs in lists:
        tensors = [x for x in xs if isinstance(x, Tensor)]
        if True in [tensor.requires_grad for tensor in tensors]:
            return True
    return False


def unrecorded(*lists: Sequence[object]) -> AbstractContextManager[object]:
    """Return a context for ``with`` in which a step on these tensors runs: ``torch.no_grad()`` wherever possible.

    It is an empty context if one of them requires gradients, or if ``torch.func`` or a compiler records operators.
    Then ``no_grad`` could lose a derivative.
    """
    if torch.compiler.is_compiling() or functorch_is_active() or not torch.is_grad_enabled():
        return nullcontext()
    if _requires_grad(*lists):
        return nullcontext()
    return torch.no_grad()


def _tensorwise(function: Callable[..., Tensor], *lists: Sequence[Any]) -> Tensors:
    """Apply a function to the tensors at each position of the lists, one position after another."""
    return [function(*tensors) for tensors in zip(*lists, strict=True)]


def _dtypes(xs: Sequence[Tensor]) -> set[torch.dtype]:
    return {x.dtype for x in xs}


def _converted_numbers(values: Sequence[float], xs: Sequence[Tensor]) -> list[Any]:
    """Convert numbers to 0-d tensors if this saves time: for 32 or more fp32 or fp64 tensors on a CPU.

    In all other cases, the numbers are returned unchanged. The results have the same bits either way.

    >>> xs = [torch.zeros(2)] * 32
    >>> _converted_numbers([0.5], xs), _converted_numbers([0.5], xs[:3])
    ([tensor(0.5000)], [0.5])
    """
    # Torch makes a fp64 tensor of a number for each tensor and casts it. These have the same bits in a third of the
    # time, which for short lists is not worth the calls here.
    saves_time = len(xs) >= _MANY and not is_traced() and _on_cpu(xs)
    if not saves_time or _dtypes(xs) not in ({torch.float32}, {torch.float64}):
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
    return list(numbers.to(xs[0].dtype).unbind())


def _foreach(name: str, xs: Tensors, *rest: Any, reuse: bool, **options: Any) -> Tensors:
    """Apply one of torch's functions for lists of tensors: for "mul", ``torch._foreach_mul(xs, ...)``.

    With ``reuse``, the results overwrite ``xs``, as by ``torch._foreach_mul_``.

    >>> _foreach("mul", [torch.tensor(1.0), torch.tensor(2.0)], 10.0, reuse=False)
    [tensor(10.), tensor(20.)]
    """
    if not reuse:
        return list(getattr(torch, f"_foreach_{name}")(xs, *rest, **options))
    if torch.compiler.is_compiling():
        # In a branch of `torch.cond`, the compiler of torch 2.13 fails for a foreach function that overwrites. It
        # chooses the memory of results anyway.
        results = _foreach(name, xs, *rest, reuse=False, **options)
        return cast_like(results, xs)
    # "_" at the end: the operator that overwrites
    getattr(torch, f"_foreach_{name}_")(xs, *rest, **options)
    return xs


def _scalar_for_each(scalar: Scalar, xs: Sequence[Tensor]) -> list[Any]:
    """Repeat a scalar for each tensor of ``xs``: for two tensors, 0.9 gives ``[0.9, 0.9]``.

    If the scalar is a 0-d tensor, each repetition has the dtype of its tensor, or fp32 if this is bf16 or fp16, which
    would round the scalar. For a fp64 and a bf16 tensor, a fp64 scalar gives ``[fp64 scalar, fp32 scalar]``.
    """
    if not isinstance(scalar, Tensor):  # a Python number has no dtype
        return [scalar] * len(xs)
    # A model may be on several GPUs.
    if not scalar.is_cpu and [x for x in xs if x.device != scalar.device]:
        return [scalar.to(device=x.device, dtype=wide_dtype(x.dtype)) for x in xs]
    dtypes = _dtypes(xs)
    if len(dtypes) == 1:
        return [scalar.to(wide_dtype(*dtypes))] * len(xs)
    scalar_in: dict[torch.dtype, Tensor] = {}  # one cast for each dtype, not for each tensor
    for dtype in dtypes:
        scalar_in[dtype] = scalar.to(wide_dtype(dtype))
    return [scalar_in[x.dtype] for x in xs]


def _one_or_each(scalars: list[Any], xs: Sequence[Tensor]) -> Any:
    """Return the only scalar for tensors of one dtype and device, for which CUDA launches one kernel, else all.

    On a CPU, one and all take the same time.
    """
    if _on_cpu(xs):
        return scalars
    is_same = len(_dtypes(xs)) == 1 and _on_one_device(xs)
    return scalars[0] if is_same else scalars


def _on_cpu(xs: Sequence[Tensor]) -> bool:
    # A list takes less time than a generator, as `all` would need.
    return not [x for x in xs if not x.is_cpu]


def _on_one_device(xs: Sequence[Tensor]) -> bool:
    return not [x for x in xs if x.device != xs[0].device]


def _in_wide(
    function: Callable[..., Tensors], xs: Tensors, *rest: Tensors, scalar: Scalar, reuse: bool
) -> Tensors:
    """Apply a function such as `add` to fp32 copies of bf16 tensors, and round the results to bf16 again.

    On bf16 itself, CPUs round once in the vectorized part of a tensor and twice in its tail. So an element of a slice
    would differ from the same element of the whole tensor.

    >>> x = torch.tensor([1.0], dtype=torch.bfloat16)
    >>> _in_wide(add, [x], [x], scalar=0.5, reuse=False)  # x + 0.5 * x
    [tensor([1.5000], dtype=torch.bfloat16)]
    """
    # Copies, also of a tensor that is fp32 already, because the function overwrites them.
    wide_xs = _tensorwise(lambda x: x.to(wide_dtype(x.dtype), copy=True), xs)
    wide_rest = [cast_like(ys, wide_xs) for ys in rest]
    results = function(wide_xs, *wide_rest, scalar, reuse=True)
    # Round the results to the old dtypes: into the old tensors, or as new ones.
    if reuse:
        return copy(results, into=xs)
    return cast_like(results, xs)


def _has_narrow(xs: Sequence[Tensor]) -> bool:
    """Return True if a tensor is bf16 or fp16."""
    return not _NARROW.isdisjoint(_dtypes(xs))


def _rounds_numbers(xs: Sequence[Tensor]) -> bool:
    """Return True if ``_foreach_mul_`` rounds a Python number to bf16 or fp16, as torch 2.13 does on CPUs."""
    # The usual case: a set of dtypes takes less time than a test of each tensor.
    if not _has_narrow(xs):
        return False
    return bool([x for x in xs if x.dtype in _NARROW and x.is_cpu])


def cast(xs: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Tensors:
    """Convert each tensor to the dtype at its position. A tensor that has this dtype is not copied."""
    return [x if x.dtype == dtype else x.to(dtype) for x, dtype in zip(xs, dtypes, strict=True)]


def cast_like(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensors:
    """Convert each tensor of ``xs`` to the dtype of the tensor at the same position in ``ys``."""
    # This does not call `cast`: a step converts the results of every transform, nearly always from a dtype to the same.
    return [x if x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(xs, ys, strict=True)]


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute with these dtypes: fp32 for bf16 and fp32, fp64 if one of them is fp64."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def wide_dtypes(lists: Sequence[Sequence[Tensor]]) -> list[torch.dtype] | None:
    """Return for each position of the lists the dtype in which to compute with its tensors, as `wide_dtype` does.

    Return None if all tensors have one such dtype already, so that none has to be converted: the usual case.

    >>> narrow, wide = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)
    >>> wide_dtypes([[narrow, narrow], [narrow, wide]])
    [torch.float32, torch.float64]
    >>> print(wide_dtypes([[wide, wide], [wide, wide]]))
    None
    """
    all_dtypes: set[torch.dtype] = set()
    is_mixed = False
    for xs in lists:
        dtypes = _dtypes(xs)
        all_dtypes |= dtypes
        is_mixed = is_mixed or len(dtypes) > 1
    widest_dtype = wide_dtype(*all_dtypes)
    if len(all_dtypes) == 1 and widest_dtype in all_dtypes:
        return None
    if not is_mixed:  # each list has one dtype, so each position has the same
        return [widest_dtype] * len(lists[0])
    dtypes_of_positions: list[torch.dtype] = []
    for tensors in zip(*lists, strict=True):
        dtypes_of_tensors = [tensor.dtype for tensor in tensors]
        dtypes_of_positions.append(wide_dtype(*dtypes_of_tensors))
    return dtypes_of_positions


def widest(*lists: Tensors) -> list[Tensors]:
    """Convert the tensors at each position of the lists to one dtype of fp32 or more, to compute with them.

    For the lists ``[bf16, fp32]`` and ``[bf16, fp64]``, the first position becomes fp32 and the second fp64.
    """
    dtypes = wide_dtypes(lists)
    if dtypes is None:
        return list(lists)
    return [cast(xs, dtypes) for xs in lists]


def new_count(device: torch.device) -> Tensor:
    """Return a new step count with the value 0: a 0-d int64 tensor."""
    return torch.zeros((), dtype=torch.int64, device=device)


def new_number(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a new 0-d tensor on a device, in fp64 if the device supports it, else in fp32."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype, copy=True, non_blocking=value.is_cpu)
    return torch.full((), value, dtype=dtype, device=device)


def power(base: Scalar, count: Tensor) -> Tensor:
    """Return ``base ** count`` for a step count, in fp64 if the device supports it."""
    return torch.pow(base, new_number(count, count.device))


def clone(xs: Sequence[Tensor]) -> Tensors:
    """Return a copy of every tensor."""
    return [x.clone() for x in xs]


def copy(xs: Sequence[Tensor], into: Sequence[Tensor]) -> Tensors:
    """Write each tensor of ``xs`` into the tensor of ``into`` at the same position, and return ``into``.

    Under autograd and ``torch.func`` nothing is written; new tensors with the dtypes of ``into`` are returned.
    """
    if _cannot_use_foreach(xs):  # under torch.func or autograd
        return _tensorwise(lambda x, y: x.to(y.dtype, copy=True), xs, into)
    torch._foreach_copy_(list(into), list(xs))
    return list(into)


def mul(xs: Tensors, c: Scalar, *, reuse: bool = False) -> Tensors:
    """Return ``x * c`` for every tensor ``x``; with ``reuse``, the results overwrite ``xs``.

    >>> mul([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], 10.0)
    [tensor([10., 20.]), tensor([30.])]
    """
    if _cannot_use_foreach(xs, scalar=c):  # under torch.func or autograd
        if _has_narrow(xs):  # else vmap may round `c` to bf16 or fp16, where it may underflow
            return _in_wide(mul, xs, scalar=c, reuse=False)
        return _tensorwise(lambda x: x * c, xs)
    # One call computes the whole list. A number and a 0-d tensor need different calls to give the same bits.
    if isinstance(c, Tensor):
        return _mul_by_tensor(xs, c, reuse=reuse)
    if reuse and _rounds_numbers(xs):  # on CPUs, foreach rounds `c` to bf16 before it multiplies
        return _tensorwise(lambda x: x.mul_(c), xs)
    [factor] = _converted_numbers([c], xs)
    return _foreach("mul", xs, factor, reuse=reuse)


def _mul_by_tensor(xs: Tensors, c: Tensor, *, reuse: bool) -> Tensors:
    """Return ``x * c`` for every tensor ``x`` and a 0-d tensor ``c``; with ``reuse``, the results overwrite ``xs``.

    >>> _mul_by_tensor(
    ...     [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], torch.tensor(10.0), reuse=False
    ... )
    [tensor([10., 20.]), tensor([30.])]
    """
    if _has_narrow(xs):
        return _mul_narrow_by_tensor(xs, c, reuse=reuse)
    factors = _scalar_for_each(c, xs)
    return _foreach("mul", xs, _one_or_each(factors, xs), reuse=reuse)


def _mul_narrow_by_tensor(xs: Tensors, c: Tensor, *, reuse: bool) -> Tensors:
    """Return ``x * c`` in the dtypes of tensors ``x``, some of which are bf16 or fp16, and a 0-d tensor ``c``.

    A ``c`` of fp64 is not rounded to bf16 before it multiplies.
    """
    # Torch promotes dtypes among 0-d tensors: the product of a 0-d bf16 tensor and `c` would have the dtype of `c`.
    if [x for x in xs if x.dtype in _NARROW and x.ndim == 0]:
        return _in_wide(mul, xs, scalar=c, reuse=reuse)
    factors = _scalar_for_each(c, xs)
    if not c.is_cpu:
        # A GPU rounds a 0-d factor to bf16 before it multiplies, 0.001 to 0.00099945, but not one of shape (1,).
        for index, x in enumerate(xs):
            if x.dtype in _NARROW:
                factors[index] = factors[index].reshape(1)
    elif not reuse or not _rounds_numbers(xs):
        return _foreach("mul", xs, _one_or_each(factors, xs), reuse=reuse)
    # One by one, also on a CPU, where `_foreach_mul_` rounds `c` to bf16 before it multiplies.
    if reuse:
        return _tensorwise(Tensor.mul_, xs, factors)
    return _tensorwise(lambda x, factor: (x * factor).to(x.dtype), xs, factors)


def mul_each(xs: Tensors, cs: list[float], *, reuse: bool = False) -> Tensors:
    """Return ``x * c`` for each tensor and the number at its position in ``cs``; ``reuse`` overwrites ``xs``."""
    # In a compiled graph, inductor has no kernel of a list of numbers that it can fuse.
    if _cannot_use_foreach(xs) or torch.compiler.is_compiling():
        return _tensorwise(torch.mul, xs, cs)
    if reuse and _rounds_numbers(xs):
        return _tensorwise(Tensor.mul_, xs, cs)
    return _foreach("mul", xs, _converted_numbers(cs, xs), reuse=reuse)


def shift(xs: Tensors, c: Scalar, *, reuse: bool = False) -> Tensors:
    """Return ``x + c`` for every fp32 or fp64 tensor ``x``; with ``reuse``, the results overwrite ``xs``.

    >>> shift([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], 10.0)
    [tensor([11., 12.]), tensor([13.])]
    """
    if _cannot_use_foreach(xs, scalar=c):  # under torch.func or autograd
        return _tensorwise(lambda x: x + c, xs)
    summand: Any = c
    if not isinstance(c, Tensor):
        [summand] = _converted_numbers([c], xs)
    if isinstance(summand, Tensor):
        # One for each tensor: except in CUDA's kernel, `_foreach_add_` with one tensor reads its value, which is a sync
        # and a graph break. That kernel accepts no tensor on the CPU.
        is_on_cuda = summand.is_cuda and all(x.is_cuda for x in xs)
        summand = _scalar_for_each(summand, xs)
        if is_on_cuda and not is_traced():
            summand = _one_or_each(summand, xs)
    return _foreach("add", xs, summand, reuse=reuse)


def add(xs: Tensors, ys: Tensors, c: Scalar = 1.0, *, reuse: bool = False) -> Tensors:
    """Return ``x + c * y`` for corresponding tensors of two lists; with ``reuse``, the results overwrite ``xs``.

    On a CPU, a number c and a 0-d tensor c give the same bits, so each case below calls the operator that rounds in
    this way.

    >>> add([torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(3.0), torch.tensor(4.0)], 10.0)
    [tensor(31.), tensor(42.)]
    """
    is_number = not isinstance(c, Tensor)
    is_sum = is_number and c == 1.0
    if _cannot_use_foreach(xs, ys, scalar=c):  # under torch.func or autograd
        # Without this, `c * y` would be rounded to bf16 or fp16, where it may underflow.
        if _has_narrow(xs) and not is_sum:
            return _in_wide(add, xs, ys, scalar=c, reuse=False)
        return _tensorwise(lambda x, y: x + c * y, xs, ys)
    if is_sum:  # no product, so nothing is rounded twice
        return _foreach("add", xs, ys, reuse=reuse)
    if _rounds_numbers(xs):  # bf16 or fp16 on a CPU
        return _in_wide(add, xs, ys, scalar=c, reuse=reuse)
    if is_number:
        return _foreach("add", xs, ys, alpha=c, reuse=reuse)
    # `alpha=` would read the value of a tensor, which waits for the device. On a CPU, addcmul rounds as `alpha=` does
    # for a number.
    if _on_cpu(xs):
        return _foreach("addcmul", xs, ys, _scalar_for_each(c, xs), reuse=reuse)
    return _foreach("add", xs, mul(ys, c), reuse=reuse)


def lerp(xs: Tensors, ys: Tensors, weight: Scalar, *, reuse: bool = False) -> Tensors:
    """Interpolate: return ``x + weight * (y - x)`` for corresponding fp32 or fp64 tensors of two lists.

    For x = 1, y = 3 and the weight 0.25, the result is 1.5. With ``reuse``, the results overwrite ``xs``.
    """
    if _cannot_use_foreach(xs, ys, scalar=weight):  # under torch.func or autograd
        return _tensorwise(_lerp, xs, ys, _scalar_for_each(weight, xs))
    if not isinstance(weight, Tensor):
        return _foreach("lerp", xs, ys, weight, reuse=reuse)
    if _on_cpu(xs):  # there a 0-d weight gives the same bits as a number
        return _foreach("lerp", xs, ys, _scalar_for_each(weight, xs), reuse=reuse)
    # Other devices compute the formula itself: the differences, their products with the weight, and the sums.
    steps = list(torch._foreach_sub(ys, xs))
    return add(xs, mul(steps, weight, reuse=True), reuse=reuse)


def _lerp(x: Tensor, y: Tensor, weight: Scalar) -> Tensor:
    """Return ``x + weight * (y - x)``, also if x or y has a derivative of another dtype.

    In forward mode, torch gives the product of a number and a 0-d fp32 tensor a derivative in fp64, which
    ``torch.lerp`` refuses. A copy casts the derivative too.
    """
    has_no_dims = x.ndim == 0
    return torch.lerp(x.to(x.dtype, copy=has_no_dims), y.to(x.dtype, copy=has_no_dims), weight)


def addcmul(
    xs: Tensors, ys: Tensors, zs: Tensors, c: Scalar = 1.0, *, reuse: bool = False
) -> Tensors:
    """Return ``x + c * y * z`` for corresponding fp32 or fp64 tensors of three lists; ``reuse`` overwrites ``xs``."""
    if _cannot_use_foreach(xs, ys, zs, scalar=c):  # under torch.func or autograd
        return _tensorwise(lambda x, y, z: x + c * y * z, xs, ys, zs)
    # Compute `c * y` first, as CPUs do for a number: `y * z` may overflow although the sum is finite.
    if isinstance(c, Tensor) or (c != 1.0 and not _on_cpu(xs)):
        return _foreach("addcmul", xs, mul(ys, c), zs, 1.0, reuse=reuse)
    return _foreach("addcmul", xs, ys, zs, c, reuse=reuse)


def div(xs: Tensors, ys: Tensors, *, reuse: bool = False) -> Tensors:
    """Return ``x / y`` for corresponding tensors of two lists; with ``reuse``, the results overwrite ``ys``."""
    if _cannot_use_foreach(xs, ys):  # under torch.func or autograd
        return _tensorwise(torch.div, xs, ys)
    # No foreach function writes to the divisors. This loop does, but launches cost more on other devices.
    if reuse and _on_cpu(ys):
        for x, y in zip(xs, ys, strict=True):
            torch.div(x, y, out=y)
        return ys
    return list(torch._foreach_div(xs, ys))


def apply(name: str, *lists: Tensors, reuse: bool = False) -> Tensors:
    """Apply a torch function, such as "sqrt", to corresponding tensors of lists; ``reuse`` overwrites the first.

    ``apply("sqrt", xs)`` returns the square roots, and ``apply("maximum", xs, ys)`` the larger elements of two lists.
    The derivative of the square root at zero is 0 instead of infinity.
    """
    if _cannot_use_foreach(*lists):  # under torch.func or autograd
        function = safe_sqrt if name == "sqrt" else getattr(torch, name)
        return _tensorwise(function, *lists)
    return _foreach(name, *lists, reuse=reuse)


_ALIGNMENT = 64  # bytes of the widest CPU vectors; torch allocates CPU memory at multiples of it


def can_be_stacked(rows: int, columns: int, device: torch.device) -> bool:
    """Return True if products of a matrix have the same bits alone and at every position of a contiguous stack.

    If they have not, matrices are multiplied one by one, so that a result never depends on the other parameters.
    MKL sums in another order on some CPUs (Zen 4) if a matrix does not begin at a multiple of 64 bytes. With sides that
    are multiples of 4, every matrix of an fp32 stack does, and so does every product of it with its transpose.
    """
    return device.type != "cpu" or (rows % 4 == 0 and columns % 4 == 0)


def is_aligned(x: Tensor) -> bool:
    """Return True if a tensor on a CPU begins at a multiple of 64 bytes. Other tensors need no alignment."""
    return type(x) not in _PLAIN or x.device.type != "cpu" or x.data_ptr() % _ALIGNMENT == 0


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` if it is contiguous and aligned (`is_aligned`), else a copy that is."""
    contiguous = x.contiguous()
    return contiguous if is_aligned(contiguous) else contiguous.clone()


def by_stacks(
    function: Callable[..., Tensor | Sequence[Tensor]], *lists: Sequence[Tensor], results: int = 1
) -> tuple[Tensors, ...]:
    """Apply a function of tensors to lists, with one call for all small tensors of one shape. Return a list per result.

    There is a list for each argument of ``function``. Small tensors of equal shape are stacked for the call. The
    function must treat the first dim as a batch, and return ``results`` new tensors with this dim. A lone tensor is a
    stack of one, so that on a CPU its bits do not depend on the other tensors. For a list of a (2, 3), a (4,) and a
    (2, 3) tensor, the function receives a stack (2, 2, 3) and then a stack (1, 4).

    >>> xs = [torch.tensor([3.0]), torch.tensor([5.0])]
    >>> by_stacks(lambda x: (2 * x, x**2), xs, results=2)  # one call, with the stack [[3.0], [5.0]]
    ([tensor([6.]), tensor([10.])], [tensor([9.]), tensor([25.])])
    """
    # The memory of tensors cannot be examined: no stacks.
    if _cannot_use_foreach(*lists) or is_traced():
        groups = [[index] for index in range(len(lists[0]))]
        to_contiguous = Tensor.contiguous
    else:
        groups = _groups(lists)  # [[0, 2], [1]]
        to_contiguous = aligned
    # `outputs` has a list for each result.
    outputs: list[list[Any]] = [[None] * len(lists[0]) for _ in range(results)]
    for indices in groups:
        stacks = [_stack_of(xs, indices, to_contiguous) for xs in lists]
        output_stacks = function(*stacks)
        if isinstance(output_stacks, Tensor):  # a function with one result may return it alone
            output_stacks = [output_stacks]
        # Cut each stack of results into tensors, and put these at the positions of the group: 0 and 2.
        for output, stack in zip(outputs, output_stacks, strict=True):
            for index, tensor in zip(indices, _unstacked(stack), strict=True):
                output[index] = tensor
    return tuple(outputs)


def _stack_of(
    xs: Sequence[Tensor], indices: list[int], to_contiguous: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the tensors at some indices of a list, which have one shape, as a stack.

    A lone tensor becomes a contiguous stack of one, since its strides would change the bits of a product.

    >>> xs = [torch.ones(4, 3), torch.ones(2), torch.ones(4, 3)]
    >>> _stack_of(xs, [0, 2], aligned).shape, _stack_of(xs, [1], aligned).shape
    (torch.Size([2, 4, 3]), torch.Size([1, 2]))
    """
    if len(indices) > 1:
        return torch.stack([xs[index] for index in indices])
    lone_tensor = xs[indices[0]]
    return to_contiguous(lone_tensor).unsqueeze(0)


def _unstacked(stack: Tensor) -> Sequence[Tensor]:
    """Return the tensors of a stack: a view of a lone tensor, else copies, which do not hold the memory of others."""
    if len(stack) == 1:
        return [stack.squeeze(0)]
    return _unbound(stack)


def _groups(lists: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Group the indices of small tensors that can be stacked; any other tensor is in a group by itself.

    A list of a (2, 3), a (4,) and a (2, 3) tensor gives the groups ``[[0, 2], [1]]``. If there are several lists, the
    tensors at an index must agree in all of them: both their gradients and their momenta, say.
    """
    # First, the indices of tensors of the same shape, dtype and device.
    indices_by_spec: defaultdict[object, list[int]] = defaultdict(list)
    for index, tensors in enumerate(zip(*lists, strict=True)):
        spec = tuple(map(_stackable_spec, tensors))
        indices_by_spec[spec].append(index)
    groups: list[list[int]] = []
    for indices in indices_by_spec.values():
        # Then, cut these indices into groups of at most `limit`: [0, 2, 5] with the limit 2 gives [0, 2] and [5].
        first_tensors = [xs[indices[0]] for xs in lists]
        limit = _most_in_a_stack(first_tensors)  # 1 if they are large
        for start in range(0, len(indices), limit):
            groups.append(indices[start : start + limit])
    return groups


def _stackable_spec(x: Tensor) -> tuple[object, ...]:
    """Return what two tensors must have in common to be in one stack."""
    return type(x), x.shape, x.dtype, x.device


def _most_in_a_stack(tensors: Sequence[Tensor]) -> int:
    """Return how many tensors like each of these can be in one stack: 1 if they cannot be stacked.

    A stack should fit a CPU's cache: 256 matrices of 32 x 32 elements, or 64 of 64 x 64. A large tensor is always
    computed alone, because torch sums it in several threads, and so in another order than within a stack.
    """
    # The sizes are of one tensor of each argument, such as a gradient and a momentum.
    sizes = [x.numel() for x in tensors]
    largest = max(sizes)
    if largest >= _SMALL:
        return 1
    for x in tensors:
        is_plain_tensor = type(x) in _PLAIN  # not of a subclass, such as DTensor
        if not is_plain_tensor or not _has_stackable_matrices(x):
            return 1
    return _STACK // max(largest, 1)  # an empty tensor counts as one element


def _has_stackable_matrices(x: Tensor) -> bool:
    """Return True if a stack of tensors like this one gives the same bits as each tensor by itself."""
    # A vector, such as a norm for each row, is in no product of matrices.
    is_vector = x.ndim < 2 or 1 in x.shape[-2:]
    return is_vector or can_be_stacked(x.shape[-2], x.shape[-1], x.device)


def clamp(xs: Tensors, low: Scalar, high: Scalar) -> Tensors:
    """Return every tensor with its elements clamped to ``[low, high]``; NaN stays NaN."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return _tensorwise(lambda x: x.clamp(scalar_like(low, x), scalar_like(high, x)), xs)
    return _tensorwise(lambda x: x.clamp(low, high), xs)


def kept_visible(bounded: Tensors, xs: Tensors) -> Tensors:
    """Replace elements of new tensors ``bounded`` by NaN where the element of ``xs`` that they come from is not finite.

    A bounded function such as the sign would otherwise turn an overflow into an ordinary number.
    """
    return add(bounded, xs, 0.0, reuse=True)  # zero times a number that is not finite is NaN


def norms(xs: Tensors) -> Tensors:
    """Return the 2-norm of each tensor as a 0-d tensor, in fp64 if the device supports it, without overflow.

    For a tensor of the elements 3 and 4, it is 5.
    """
    # fp64 can represent the square of every finite fp32 number. fp64 tensors are scaled first, one by one.
    if _cannot_use_foreach(xs) or not all(map(_squares_fit_into_fp64, xs)):
        return _tensorwise(_norm, xs)
    return list(torch._foreach_norm(xs, 2, dtype=torch.float64))


def _squares_fit_into_fp64(x: Tensor) -> bool:
    """Return True if the squares of all finite elements are finite in fp64, on a device that has fp64."""
    return x.dtype != torch.float64 and x.device.type != "mps"


def _norm(x: Tensor) -> Tensor:
    """Return the 2-norm of one tensor as a 0-d tensor, in fp64 if the device supports it, without overflow.

    The 2-norm is the square root of the sum of squares: 5 for the elements 3 and 4.
    """
    if _squares_fit_into_fp64(x):  # the usual case
        return torch.linalg.vector_norm(x, dtype=torch.float64)
    if x.numel() == 0:
        return torch.linalg.vector_norm(x)
    # The squares of fp64, or of fp32 on a device without fp64, may overflow: divide by the largest magnitude first. A
    # tensor of zeros, or with an infinity, is divided by 1, so that no 0 / 0 or inf / inf makes it NaN.
    x = x.to(wide_dtype(x.dtype))
    peak = x.detach().abs().amax()
    is_divisor = (peak > 0) & peak.isfinite()
    divisor = torch.where(is_divisor, peak, torch.ones_like(peak))
    return torch.linalg.vector_norm(x / divisor) * divisor


def peaks(xs: Tensors) -> Tensors:
    """Return a 0-d tensor for each tensor: its largest absolute value, NaN if it has NaN, 0 if it is empty."""
    if all(x.is_cuda and x.numel() for x in xs) and not _cannot_use_foreach(xs):
        return list(torch._foreach_norm(xs, float("inf")))  # fast on CUDA and slow elsewhere
    return _tensorwise(_peak, xs)


def _peak(x: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor as a 0-d tensor, in one pass over it; 0 if it is empty.

    For the elements -3 and 2, it is 3.
    """
    if x.numel() == 0:
        return x.new_zeros(())
    # The largest or the smallest element has the largest absolute value.
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def scalar_like(number: Scalar, x: Tensor) -> Tensor:
    """Convert a number to a 0-d tensor with the dtype and device of ``x``, to use both in one formula."""
    # Why not leave the number as it is: torch divides a Python number by a tensor as number times reciprocal, and
    # promotes the dtype of a 0-d tensor. With tensors of one dtype as operands, both give the same bits.
    if isinstance(number, Tensor):
        # A GPU is not waited for.
        return number.to(dtype=x.dtype, device=x.device, non_blocking=number.is_cpu)
    return torch.full((), number, dtype=x.dtype, device=x.device)


def safe_sqrt(x: Tensor) -> Tensor:
    """Return the square root of each element, with derivative 0 instead of infinity at 0."""
    is_zero = x == 0
    # The root of 1 is computed in place of the root of 0. Else its infinite derivative times 0 would be NaN.
    return torch.where(is_zero, x.detach(), torch.where(is_zero, 1.0, x).sqrt())
