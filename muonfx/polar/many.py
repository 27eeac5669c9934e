"""`orthogonalize` and `orthogonalize_many`: the public functions, and how matrices of many shapes form few batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from operator import is_
from typing import Any, NamedTuple

import torch

from muonfx.internal.tracing import called_once, is_differentiated, is_traced, is_watched, outside_autocast
from muonfx.polar.checks import check_matrix, sharing
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.iteration import as_function, in_place, rounded_and_scaled, same_range
from muonfx.polar.policy import DTypeLike, MethodLike, Plan, plan
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike
from muonfx.polar.workspace import Workspace
from muonfx.tree.elementwise import aligned, can_be_stacked, is_aligned

_CPU_SCRATCH = 1 << 25
_DEVICE_SCRATCH = 1 << 29
"""The default bytes for temporary tensors of one batch: on a CPU, a size that stays in its cache; on other devices."""
_LARGE = 1 << 16  # elements above which a pass over one matrix takes longer than a launch


def orthogonalize(
    x: torch.Tensor,
    *,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    max_scratch_bytes: int | None = None,
) -> torch.Tensor:
    """Orthogonalize a matrix by Newton-Schulz: map its singular values close to 1 and keep its singular vectors.

    `band(coefficients)` returns the interval that contains the resulting singular values. A zero matrix gives zero.
    NaN or infinity in one matrix of a batch does not affect the others. `x` and `2^k x` have bitwise equal results if
    all entries are normal (not subnormal) numbers. The function works under `torch.func` and
    `torch.compile(fullgraph=True)`. Autocast has no effect.

    Args:
        x: a tensor `(..., m, n)` in fp64, fp32, bf16 or fp16; any dim may be zero.
        coefficients: a name in `PRESETS`, a `Coefficients`, a sequence of `(a, b[, c])`, or a floating tensor `(k, 3)`
            or `(k, 2)` on the device of `x`. A tensor may be differentiated or mapped over; its values are not checked.
        steps: the number of steps; None for one step per polynomial. If there are more steps than polynomials, the last
            polynomial is repeated.
        method: "standard" multiplies by the whole matrix in every step. "gram" takes several steps on the small Gram
            matrix `X X^T`, which saves time for long matrices. "auto": the choice that `explain` shows. A tuple such as
            (2, 3): the Gram form in stages of exactly 2 and 3 steps, with a warning if rounding does not allow them.
        dtype: the dtype of the matrix products. "auto": the choice of `compute_dtype`, but at least fp32 if derivatives
            are taken (by autograd, or by `torch.func.grad`, `vjp` or `jvp`), because bf16 derivatives are useless.
        products: how symmetric products such as `X X^T` are computed. "batched": in full, by one batched product.
            "blocks": only one half, by blocks; the other half is a mirrored copy. "auto": the choice that `explain`
            shows, which may also be quack-kernels on a GPU. Small matrices, and all matrices under autograd,
            `torch.func` and the compiler, use "batched".
        max_scratch_bytes: the approximate limit of memory for temporary tensors; see `orthogonalize_many`.

    Returns:
        A new contiguous tensor of `x`'s shape, dtype and device.

    Raises:
        TypeError: `x` is not a floating tensor of a supported dtype, or an argument has the wrong type.
        ValueError: `x` has fewer than two dims, or another argument is malformed.
        RuntimeError: quack-kernels, which is tested at first use, is first used inside the capture of a CUDA graph.

    Follows Keller Jordan's Muon, with the scaling of this package (see `muonfx.polar.iteration`), and Gram
    Newton-Schulz of Dao-AILab with changes (see `muonfx.polar.stages`).

    >>> g = torch.tensor([[3e-20, 0.0, 0.0], [0.0, -5e-20, 0.0]])
    >>> orthogonalize(g, coefficients="polar_express", dtype=torch.float64).round(decimals=5) + 0.0
    tensor([[ 1.,  0.,  0.],
            [ 0., -1.,  0.]])
    """
    check_matrix(x, "x")
    run = Orthogonalizer(coefficients, steps, method, dtype, products)
    return run([x], max_scratch_bytes=max_scratch_bytes)[0]


def orthogonalize_many(
    xs: Sequence[torch.Tensor],
    *,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    max_scratch_bytes: int | None = None,
    donate: bool = False,
    workspace: Workspace | None = None,
) -> list[torch.Tensor]:
    """Orthogonalize a list of matrices. Matrices of one shape, or of its transpose, are computed as one batch.

    With one thread of a CPU, the results equal `[orthogonalize(x, ...) for x in xs]` bit by bit. Elsewhere they are
    equal up to rounding, because a batched product may sum in another order: differences of elements are at most 1e-12
    in fp64, 2e-5 in fp32 and 0.2 in bf16 for Gaussian matrices with sides of 8 to 128.

    Args:
        xs: tensors `(..., m, n)` as in `orthogonalize`, of any mix of shapes, dtypes and devices.
        coefficients: as in `orthogonalize`.
        steps: as in `orthogonalize`.
        method: as in `orthogonalize`.
        dtype: as in `orthogonalize`; "auto" is resolved for each input dtype and device. Derivatives of one input
            make the dtype at least fp32 for all inputs.
        products: as in `orthogonalize`.
        max_scratch_bytes: the approximate memory for the temporary tensors of one batch. A batch has at least one
            matrix. None: 32 MiB on a CPU, to stay in its cache, and 512 MiB elsewhere.
        donate: True if the caller does not use `xs` again. Each contiguous input that shares no memory with another
            input is then overwritten by its result, which saves memory. The values of the results are the same.
        workspace: memory for the temporary tensors of large matrices, which the next call can reuse; None: new memory.

    Returns:
        One tensor for each input, in order, with its shape, dtype and device. It is a new contiguous tensor, or the
        overwritten input itself with `donate`. New tensors of one batch may be disjoint views of one buffer; autograd
        then treats an in-place change of one as a change of all.

    Raises:
        TypeError, ValueError, RuntimeError: as in `orthogonalize`; the message has the position in `xs`.
        ValueError: `max_scratch_bytes` is below 1.

    >>> a, b = orthogonalize_many([torch.eye(2, 3), torch.eye(3, 2)])
    >>> a.shape, b.shape, torch.equal(a, b.mT)
    (torch.Size([2, 3]), torch.Size([3, 2]), True)
    """
    for i, x in enumerate(xs):
        check_matrix(x, f"xs[{i}]")
    run = Orthogonalizer(coefficients, steps, method, dtype, products)
    if not xs:  # invalid settings raise also for no matrices
        run.plan_for(_Kind(1, 1, torch.float32, torch.device("cpu")), differentiated=False, traced=False)
    return run(xs, max_scratch_bytes=max_scratch_bytes, donate=donate, workspace=workspace)


class _Kind(NamedTuple):
    """The properties that matrices must share to be in one batch: shape, dtype, device and memory order."""

    short: int
    long: int
    dtype: torch.dtype
    device: torch.device
    tall: bool | None = None
    """True if the batch has the shape `(long, short)`, False if `(short, long)`. None if tall matrices are transposed,
    as small matrices and matrices under autograd are."""


class Orthogonalizer:
    """A callable that runs `orthogonalize_many` with fixed settings. It caches the `Plan` for each shape and dtype."""

    def __init__(
        self,
        coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
        steps: int | None = None,
        method: MethodLike = "auto",
        dtype: DTypeLike = "auto",
        products: ProductsLike = "auto",
    ) -> None:
        """Resolve the coefficients; the other arguments are checked when the first plan is made.

        `_traced_fields` returns the fields of the polynomials as constants of a trace; see `_resolved`.
        """
        resolved = polynomials(coefficients, steps)
        self._polynomials = resolved
        self._plan = functools.partial(plan, method=method, dtype=dtype, products=products)
        self._traced_fields: Callable[[], tuple[Any, ...]] = called_once(lambda: tuple(resolved))
        self._plans: dict[tuple[_Kind, bool], Plan] = {}
        """From (kind, whether derivatives are taken) to the plan."""

    def plan_for(self, kind: _Kind, *, differentiated: bool, traced: bool) -> Plan:
        """Return the `Plan` (dtype, method, products) for matrices of one shape, dtype and device; it is cached."""
        if traced:  # symbols have no hash
            return self._plan(*kind[:4], self._resolved(), differentiated=differentiated)
        key = (kind, differentiated)
        if key not in self._plans:
            self._plans[key] = self._plan(*kind[:4], self._polynomials, differentiated=differentiated)
        return self._plans[key]

    def _resolved(self) -> Polynomials:
        """Return the polynomials, with constant numbers also in a trace."""
        # With dynamic=True, torch.compile makes symbols of numbers in attributes, and constants of a plain tuple.
        if self._polynomials.table is None and torch.compiler.is_compiling():
            return Polynomials(*self._traced_fields())
        return self._polynomials

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        *,
        max_scratch_bytes: int | None = None,
        donate: bool = False,
        workspace: Workspace | None = None,
    ) -> list[torch.Tensor]:
        """Orthogonalize a list of matrices, without checking them; arguments are as in `orthogonalize_many`."""
        if max_scratch_bytes is not None and max_scratch_bytes < 1:
            raise ValueError(f"max_scratch_bytes: found {max_scratch_bytes}, expected at least 1")
        table = self._polynomials.table
        inputs = xs if table is None else [*xs, table]
        watched = is_watched(*inputs)
        differentiated = watched and is_differentiated(*inputs)
        # Sides may be symbols. A tracer records operators, and then one batch is best.
        traced = is_traced(*[side for x in xs for side in x.shape])
        donated = [False] * len(xs)
        if donate and not watched:
            donated = _donated(xs)
        # The iteration in reused buffers takes numbers only, and has no derivatives.
        in_place = not watched and table is None and not self._polynomials.row_scaling
        groups = _grouped(xs, in_place)
        # All plans are made before any result, so invalid settings raise before anything is written.
        plans = [self.plan_for(kind, differentiated=differentiated, traced=traced) for kind, _ in groups]
        results = list(xs)
        for (kind, indices), plan_of_group in zip(groups, plans, strict=True):
            default_scratch = _CPU_SCRATCH if kind.device.type == "cpu" else _DEVICE_SCRATCH
            scratch = max_scratch_bytes or default_scratch
            job = _Job(kind, plan_of_group, self._polynomials, scratch, watched, watched or traced, workspace)
            nonempty = [i for i in indices if xs[i].numel() > 0]
            ys = _run([xs[i] for i in nonempty], [donated[i] for i in nonempty], job)
            for i, y in zip(nonempty, ys, strict=True):
                results[i] = y
        for i, x in enumerate(xs):
            if x.numel() == 0 and not donated[i]:
                results[i] = torch.empty_like(x)
        return results


def _grouped(xs: Sequence[torch.Tensor], in_place: bool) -> list[tuple[_Kind, list[int]]]:
    """Group matrices that can be in one batch; return pairs of their common properties and their indices in `xs`."""
    groups: list[tuple[_Kind, list[int]]] = []
    for i, x in enumerate(xs):
        kind = _kind_of(x, in_place)
        for group_kind, indices in groups:
            if kind == group_kind:  # not by a dict: sides that are symbols have no hash
                indices.append(i)
                break
        else:
            groups.append((kind, [i]))
    return groups


def _kind_of(x: torch.Tensor, in_place: bool) -> _Kind:
    """Return the properties of a matrix by which it is grouped. With `in_place`, large ones are not transposed."""
    rows, columns = x.shape[-2:]
    short, long = (rows, columns) if rows <= columns else (columns, rows)
    tall = None
    if in_place and short * long >= _LARGE:
        tall = rows > columns
    return _Kind(short, long, x.dtype, x.device, tall)


class _Job(NamedTuple):
    """The plan and the settings for all matrices of one shape, dtype and device."""

    kind: _Kind
    plan: Plan
    resolved: Polynomials
    scratch: int
    """The approximate bytes for the temporary tensors of one batch."""
    watched: bool
    """True if autograd, torch.func or the compiler records the matrices, so that none may be overwritten."""
    at_once: bool
    """True if all matrices form one batch: autograd keeps all temporary tensors, a compiler plans memory itself, and
    splitting would fix all sizes in the compiled graph."""
    workspace: Workspace | None


def _donated(xs: Sequence[torch.Tensor]) -> list[bool]:
    """Return a bool for each tensor: True if its result may overwrite it (it is contiguous and shares no memory)."""
    shared = sharing(xs)
    return [x.is_contiguous() and i not in shared for i, x in enumerate(xs)]


class _Piece(NamedTuple):
    """Matrices of one input that are in one batch: the whole input, or a part of a stack that exceeds the batch."""

    input_index: int
    """The position of the input in the list of inputs."""
    matrices: torch.Tensor
    """The matrices `(b, short, long)`, or `(b, long, short)` in a tall batch."""
    destination: torch.Tensor | None
    """Memory for the results, of the same shape; None if the results become a new tensor, for a whole input."""


def _run(xs: list[torch.Tensor], donated: list[bool], job: _Job) -> list[torch.Tensor]:
    """Orthogonalize nonempty tensors of one kind. Return their results, in order.

    A tensor may be a matrix, or a stack ``(..., m, n)``. `donated` is True for each tensor that its result overwrites.
    The matrices of all tensors are distributed over batches, which are computed one after another. Example: with a
    limit of 4 matrices, stacks of 3, 2 and 6 matrices give the batches (3), (2), (4) and (2).
    """
    if not xs:
        return []
    is_transposed_if_tall = job.kind.tall is None
    if is_transposed_if_tall and not job.at_once and {x.ndim for x in xs} == {2}:  # single matrices: a shorter way
        return _run_stacked(xs, donated, job)
    limit = _most_in_a_batch(job)
    results = list(xs)
    pieces: list[_Piece] = []
    for i, x in enumerate(xs):
        matrices = _as_batch(x, job.kind)
        must_be_split = not job.at_once and matrices.shape[0] > limit
        destination = None
        if donated[i]:  # write into the input itself
            destination = matrices
        elif must_be_split:  # its parts are in several batches, so the memory of the result is needed before them
            results[i] = torch.empty_like(x, memory_format=torch.contiguous_format)
            destination = _as_batch(results[i], job.kind)
        pieces.append(_Piece(i, matrices, destination))

    # Tall matrices are computed as their transposes, so their results are copies. As a view, a new wide result would
    # keep its whole batch in memory, next to these copies: if there are both, wide results are copied too.
    may_copy = is_transposed_if_tall and not job.watched  # a tracer must not compare the sides
    copies = may_copy and len({x.shape[-2] > x.shape[-1] for x in xs}) > 1
    batches = [pieces] if job.at_once else _packed(pieces, limit)
    for batch in batches:
        _run_batch(batch, results, job, copies)
    return results


def _run_batch(batch: list[_Piece], results: list[torch.Tensor], job: _Job, copies: bool) -> None:
    """Orthogonalize pieces in one batch, and write their results.

    The result of a piece with a destination is written there. Else ``results[piece.input_index]``, which is the input,
    is replaced by its result: a view of the batch, or a copy of it if `copies`.
    """
    destinations = [piece.destination for piece in batch if piece.destination is not None]
    matrices = [piece.matrices for piece in batch]
    counts = [piece.matrices.shape[0] for piece in batch]  # not len, which fixes a symbolic size
    # The batch can run in the memory of its destinations only if all pieces have one.
    all_have_destinations = len(destinations) == len(batch)
    y = _batch(matrices, destinations if all_have_destinations else None, job)
    written: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []
    for piece, result in zip(batch, y.split(counts), strict=True):
        if piece.destination is None:
            x = results[piece.input_index]
            is_transposed = result.shape[-2] != x.shape[-2]  # a tall input was computed as its transpose
            oriented = result.mT if is_transposed else result
            result_like_x = oriented.to(job.kind.dtype).reshape(x.shape)
            results[piece.input_index] = _new_contiguous(result_like_x, copies)
        elif result.data_ptr() != piece.destination.data_ptr():  # else the iteration ran in the destination
            written.append(piece.destination)
            copied.append(result)
    if written:
        torch._foreach_copy_(written, copied)


def _new_contiguous(result: torch.Tensor, copies: bool) -> torch.Tensor:
    """Return a contiguous result: a copy if `copies`, else the result itself where it is contiguous."""
    if copies:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


def _run_stacked(xs: list[torch.Tensor], donated: list[bool], job: _Job) -> list[torch.Tensor]:
    """Do the work of `_run` for small matrices `(m, n)`, with few calls for each of them."""
    limit = _most_in_a_batch(job)
    wide = [x if x.shape[0] == job.kind.short else x.mT for x in xs]
    number_wide = sum(map(is_, wide, xs))
    copies = 0 < number_wide < len(xs)  # as in `_run`
    results: list[torch.Tensor] = []
    for start in range(0, len(xs), limit):
        batch = slice(start, start + limit)
        results += _run_stack(xs[batch], wide[batch], donated[batch], job, copies)
    return results


def _run_stack(
    xs: list[torch.Tensor], wide: list[torch.Tensor], donated: list[bool], job: _Job, copies: bool
) -> list[torch.Tensor]:
    """Orthogonalize `xs`, whose wide views are `wide`, as one stack; all temporary tensors are freed at the end."""
    # Contiguous also if there is one tall matrix: sums of transposed memory round in another order.
    stack = torch.stack(wide) if len(wide) > 1 else aligned(wide[0])[None]
    ys = outside_autocast(as_function, stack, job.plan, job.resolved).to(job.kind.dtype).unbind()
    targets = list(compress(wide, donated))
    if targets:
        torch._foreach_copy_(targets, list(compress(ys, donated)))
    results: list[torch.Tensor] = []
    for x, wide_x, y, is_donated in zip(xs, wide, ys, donated, strict=True):
        if is_donated:
            results.append(x)
        else:
            results.append(_new_contiguous(y if wide_x is x else y.mT, copies))
    return results


def _most_in_a_batch(job: _Job) -> int:
    """Return the number of matrices that are computed at a time, if they are not computed at once."""
    kind = job.kind
    # A batch must give each matrix the bits that it has alone. A tracer must not compare the sides: it would trace
    # again for each shape.
    if not job.at_once and not can_be_stacked(kind.short, kind.long, kind.device):
        return 1
    if kind.tall is None:
        return max(1, job.scratch // scratch_bytes(kind.short, kind.long, job.plan.dtype))
    limit = max(1, job.scratch // job.plan.scratch_bytes)
    if job.plan.at_once is None:
        return limit
    return min(limit, job.plan.at_once)


def _as_batch(x: torch.Tensor, kind: _Kind) -> torch.Tensor:
    """View matrices `(..., m, n)` as a batch `(b, short, long)`, or as `(b, m, n)` if the kind has a memory order."""
    if kind.tall is not None:
        return x.reshape(-1, *x.shape[-2:])
    x = x.contiguous()  # another memory order rounds differently, and ranks may hold different orders
    is_tall = x.shape[-2] != kind.short
    wide = x.mT if is_tall else x
    if x.ndim == 2:
        return wide[None]
    return wide.reshape(-1, *wide.shape[-2:])


def _batch(matrices: list[torch.Tensor], destinations: list[torch.Tensor] | None, job: _Job) -> torch.Tensor:
    """Orthogonalize tensors as one batch; `destinations` are memory for its results, None for new memory."""
    kind = job.kind
    plan = job.plan
    if kind.tall is None:
        # Contiguous also if there is one tall stack: sums of transposed memory round in another order.
        if len(matrices) > 1:
            joined = torch.cat(matrices)
        elif job.at_once:
            joined = matrices[0].contiguous()
        else:
            joined = aligned(matrices[0])
        return outside_autocast(as_function, joined, plan, job.resolved).to(kind.dtype)
    workspace = job.workspace or Workspace()
    workspace.clear()
    # A new result that has the dtype of the batch stays in the buffer that the iteration leaves it in.
    batch_dtype = plan.rounded_to or plan.dtype
    results = Workspace() if destinations is None and batch_dtype == kind.dtype else workspace
    buffer = _buffer(matrices, destinations, batch_dtype, results)
    return outside_autocast(in_place, buffer, plan, job.resolved, tall=kind.tall, workspace=workspace, results=results)


def _buffer(
    matrices: list[torch.Tensor],
    destinations: list[torch.Tensor] | None,
    compute: torch.dtype,
    workspace: Workspace,
) -> torch.Tensor:
    """Return matrices as one batch of dtype ``compute``, on which the iteration can run in place.

    Args:
        matrices: tensors ``(count, rows, columns)`` with the same rows and columns.
        destinations: memory for the results, one tensor for each of the matrices; None if results are new tensors.
        compute: the dtype of the batch: the dtype of the iteration, or `Plan.rounded_to`.
        workspace: provides the memory of a copy.

    Returns:
        A tensor ``(sum of counts, rows, columns)``. It is a view of the matrices if they are adjacent in memory, have
        this dtype, and are their own destinations. Else it is a copy.
    """
    first = matrices[0]
    counts = [len(x) for x in matrices]
    shape = (sum(counts), *first.shape[1:])
    may_be_overwritten = destinations is not None and _are_adjacent(matrices, destinations)
    if may_be_overwritten and first.dtype == compute:
        return first.as_strided(shape, first.stride())
    batch = workspace.empty(shape, compute, first.device)
    if not same_range(first.dtype, compute):  # scale by a power of two before rounding
        matrices = [rounded_and_scaled(x, compute) for x in matrices]
    torch._foreach_copy_(list(batch.split(counts)), matrices)
    return batch


def _are_adjacent(matrices: list[torch.Tensor], destinations: list[torch.Tensor]) -> bool:
    """Return True if tensors are consecutive in aligned memory, and are themselves the destinations of the results."""
    if not is_aligned(matrices[0]):
        return False
    storage = matrices[0].untyped_storage()._cdata
    offset = matrices[0].storage_offset()
    for x, destination in zip(matrices, destinations, strict=True):
        if x.untyped_storage()._cdata != storage or x.storage_offset() != offset or not x.is_contiguous():
            return False
        if x.data_ptr() != destination.data_ptr():
            return False
        offset += x.numel()
    return True


def scratch_bytes(rows: int, columns: int, compute: torch.dtype) -> int:
    """Return the approximate bytes of temporary tensors that `as_function` needs for one `rows x columns` matrix."""
    wide = max(4, compute.itemsize)  # norms are taken in fp32 at least
    return max(1, (3 * rows * columns + 4 * rows * rows) * wide)


def _packed(pieces: Sequence[_Piece], limit: int) -> list[list[_Piece]]:
    """Distribute pieces over batches of at most `limit` matrices; longer pieces are split."""
    batches: list[list[_Piece]] = []
    room = 0  # in the last batch
    for piece in pieces:
        for part in _split(piece, limit):
            count = part.matrices.shape[0]
            if count > room:
                batches.append([])
                room = limit
            batches[-1].append(part)
            room -= count
    return batches


def _split(piece: _Piece, limit: int) -> list[_Piece]:
    """Split a piece into pieces of at most `limit` matrices."""
    if piece.matrices.shape[0] <= limit:
        return [piece]
    assert piece.destination is not None  # a new result of a split input needs memory beforehand
    parts: list[_Piece] = []
    for matrices, destination in zip(piece.matrices.split(limit), piece.destination.split(limit), strict=True):
        parts.append(_Piece(piece.input_index, matrices, destination))
    return parts
