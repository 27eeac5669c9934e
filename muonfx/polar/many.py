"""`orthogonalize` and `orthogonalize_many`: the public functions, and how matrices of many shapes form few batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.internal.tracing import (
    called_once,
    is_differentiated,
    is_traced,
    is_watched,
    outside_autocast,
)
from muonfx.polar.checks import check_matrix, sharing
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.hardware import cpu_has_amx
from muonfx.polar.iteration import as_function, in_place, rounded_and_scaled, same_range
from muonfx.polar.policy import DTypeLike, MethodLike, Plan, Request, plan
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike
from muonfx.polar.workspace import Workspace
from muonfx.tree.elementwise import aligned, can_be_stacked, is_aligned

_CPU_SCRATCH = 1 << 25
"""The default bytes for temporary tensors of one batch on a CPU: these stay in its cache."""
_CPU_SCRATCH_WITH_AMX = 1 << 26
"""The same for a CPU with AMX. Each core computes the products of one matrix, so a batch should have several."""
DEVICE_SCRATCH = 1 << 30
"""The default bytes for temporary tensors of one batch on other devices."""
_LARGE = 1 << 16  # elements above which a pass over one matrix takes longer than a launch


def orthogonalize(
    x: Tensor,
    *,
    coefficients: CoefficientsLike | Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    max_scratch_bytes: int | None = None,
) -> Tensor:
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
    xs: Sequence[Tensor],
    *,
    coefficients: CoefficientsLike | Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    max_scratch_bytes: int | None = None,
    donate: bool = False,
    workspace: Workspace | None = None,
) -> list[Tensor]:
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
            matrix. None: 32 MiB on a CPU, to stay in its cache, 64 MiB on a CPU with AMX, and 1 GiB elsewhere.
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
    return run(xs, max_scratch_bytes=max_scratch_bytes, donate=donate, workspace=workspace)


class _Kind(NamedTuple):
    """The properties that matrices must share to be in one batch: shape, dtype, device and memory order."""

    short: int
    long: int
    dtype: torch.dtype
    device: torch.device
    in_buffers: bool
    """True for large matrices, whose temporary tensors are in reused buffers. Small matrices, and matrices under
    autograd, take new memory."""
    is_tall: bool
    """True if the batch has the shape `(b, long, short)`. False for all others: `(b, short, long)`. Only matrices in
    buffers stay tall; without buffers, tall matrices are transposed."""


class Orthogonalizer:
    """A callable that runs `orthogonalize_many` with fixed settings. It caches the `Plan` for each shape and dtype."""

    def __init__(
        self,
        coefficients: CoefficientsLike | Tensor = "polar_express_5",
        steps: int | None = None,
        method: MethodLike = "auto",
        dtype: DTypeLike = "auto",
        products: ProductsLike = "auto",
    ) -> None:
        """Look up the coefficients. The other arguments are checked when the first plan is made.

        All arguments are as in `orthogonalize`.
        """
        # The result is five polynomials (a, b, c) for "polar_express_5", for example.
        resolved = polynomials(coefficients, steps)
        self._polynomials = resolved
        self._method: MethodLike = method
        self._dtype: DTypeLike = dtype
        self._products: ProductsLike = products
        # The keys are the kind, and whether derivatives are taken.
        self._plans: dict[tuple[_Kind, bool], Plan] = {}

        # torch.compile(dynamic=True) would replace the numbers in `_polynomials` by symbols, as if they could change.
        # The result of a function that is `called_once` is a constant for it, so it reads them from this function.
        @called_once
        def constant_fields() -> tuple[Any, ...]:
            return tuple(resolved)

        self._constant_fields = constant_fields

    def check_options(self) -> None:
        """Make a plan for a matrix of shape (0, 0), which raises now if an option is malformed."""
        plan(self._request(0, 0, torch.device("cpu")), torch.float32, self._dtype)

    def plan_for(self, kind: _Kind, *, differentiated: bool, traced: bool) -> Plan:
        """Return how to orthogonalize matrices of one shape, dtype and device: a `Plan` (dtype, method, products).

        Plans are cached. With ``traced``, sides may be symbols, which have no hash, so there is no look-up.
        """
        key = (kind, differentiated)
        if not traced and key in self._plans:
            return self._plans[key]
        request = self._request(kind.short, kind.long, kind.device)
        result = plan(request, kind.dtype, self._dtype, differentiated=differentiated)
        if not traced:
            self._plans[key] = result
        return result

    def _request(self, short: int, long: int, device: torch.device) -> Request:
        """Return the inputs of a plan for matrices with these sides. A tracer takes the polynomials as constants."""
        resolved = self._polynomials
        if resolved.table is None and torch.compiler.is_compiling():
            resolved = Polynomials(*self._constant_fields())
        return Request(short, long, device, resolved, self._method, self._products)

    def __call__(
        self,
        xs: Sequence[Tensor],
        *,
        max_scratch_bytes: int | None = None,
        donate: bool = False,
        workspace: Workspace | None = None,
    ) -> list[Tensor]:
        """Orthogonalize a list of matrices, without checking them; arguments are as in `orthogonalize_many`.

        Matrices that can be computed together, such as all of one shape, form a job. The jobs run one after another.
        """
        if max_scratch_bytes is not None and max_scratch_bytes < 1:
            raise ValueError(f"max_scratch_bytes: found {max_scratch_bytes}, expected at least 1")
        inputs = list(xs)
        # Coefficients in a tensor, which may be differentiated too.
        if self._polynomials.table is not None:
            inputs.append(self._polynomials.table)
        # Autograd, torch.func or a compiler records them, so none may be overwritten.
        watched = is_watched(*inputs)
        differentiated = watched and is_differentiated(*inputs)

        # 1. The jobs. All are made before any result, so that invalid settings raise before anything is written.
        jobs = self._jobs(xs, watched, differentiated, max_scratch_bytes, workspace)

        # 2. The inputs that are overwritten by their results: contiguous ones that share memory with no other input.
        overwrite = [False] * len(xs)
        if donate and not watched:
            indices_with_shared_memory = sharing(xs)
            overwrite = [
                x.is_contiguous() and i not in indices_with_shared_memory for i, x in enumerate(xs)
            ]

        # 3. The results, by the position of the input.
        result_of: dict[int, Tensor] = {}
        for job in jobs:
            result_of.update(_run_in_batches(xs, overwrite, job))
        return [result_of[i] for i in range(len(xs))]

    def _jobs(
        self,
        xs: Sequence[Tensor],
        watched: bool,
        differentiated: bool,
        max_scratch_bytes: int | None,
        workspace: Workspace | None,
    ) -> list[_Job]:
        """Group matrices that can be computed together. Return a job for each group: its indices, plan and settings.

        They have one dtype and device, and one shape or its transpose. `watched` is True if autograd, `torch.func` or a
        compiler records the call, and `differentiated` if derivatives are taken.

        >>> xs = [torch.zeros(2, 3), torch.zeros(4, 4), torch.zeros(3, 2)]
        >>> jobs = Orthogonalizer()._jobs(xs, False, False, max_scratch_bytes=None, workspace=None)
        >>> [job.indices for job in jobs]
        [[0, 2], [1]]
        """
        sides: list[int] = []
        for x in xs:
            sides += x.shape
        # A compiler or `make_fx` may pass symbols as sides, which cannot be hashed.
        traced = is_traced(*sides)
        # The iteration in reused buffers has no derivatives and no row scaling, and needs coefficients as numbers.
        may_use_buffers = (
            not watched and self._polynomials.table is None and not self._polynomials.row_scaling
        )
        jobs: list[_Job] = []
        for kind, indices in _grouped(xs, may_use_buffers):
            job = _Job(
                kind=kind,
                indices=indices,
                plan=self.plan_for(kind, differentiated=differentiated, traced=traced),
                coefficients=self._polynomials,
                max_scratch_bytes=max_scratch_bytes,
                in_one_batch=watched or traced,
                workspace=workspace,
            )
            jobs.append(job)
        return jobs


def _grouped(xs: Sequence[Tensor], may_use_buffers: bool) -> list[tuple[_Kind, list[int]]]:
    """Group matrices that can be in one batch: return pairs (kind, indices in `xs`).

    A kind has their common properties: the two sides, the dtype and the device. It is compared with each group in turn,
    not looked up in a dict, because sides that are symbols have no hash.
    """
    groups: list[tuple[_Kind, list[int]]] = []
    for i, x in enumerate(xs):
        kind = _kind_of(x, may_use_buffers)
        for group_kind, indices in groups:
            if kind == group_kind:
                indices.append(i)
                break
        else:  # no group has this kind
            groups.append((kind, [i]))
    return groups


def _kind_of(x: Tensor, may_use_buffers: bool) -> _Kind:
    """Return the properties of a matrix by which it is grouped. Large matrices use buffers if they may."""
    rows, columns = x.shape[-2:]
    is_tall = rows > columns
    in_buffers = may_use_buffers and rows * columns >= _LARGE
    if is_tall:
        return _Kind(columns, rows, x.dtype, x.device, in_buffers, is_tall=in_buffers)
    return _Kind(rows, columns, x.dtype, x.device, in_buffers, is_tall=False)


class _Job(NamedTuple):
    """The plan and the settings for all matrices of one shape, dtype and device."""

    kind: _Kind
    indices: list[int]
    """The positions of the matrices in the list of all matrices."""
    plan: Plan
    coefficients: Polynomials
    max_scratch_bytes: int | None
    """The approximate bytes for the temporary tensors of one batch; None for the default of the device."""
    in_one_batch: bool
    """True if all matrices form one batch: autograd keeps all temporary tensors, a compiler plans memory itself, and
    splitting would fix all sizes in the compiled graph."""
    workspace: Workspace | None


class _Chunk(NamedTuple):
    """Matrices of one input that are in one batch: the whole input, or a part of a stack that exceeds the batch."""

    input_index: int
    """The position of the input in the list of inputs."""
    input: Tensor
    """The input, whose shape and dtype the result has."""
    matrices: Tensor
    """The matrices `(b, short, long)`, or `(b, long, short)` in a tall batch."""
    destination: Tensor | None
    """Memory for the results, of the same shape; None if the results become a new tensor, for a whole input."""


def _run_in_batches(xs: Sequence[Tensor], overwrite: list[bool], job: _Job) -> dict[int, Tensor]:
    """Orthogonalize the tensors ``xs[i]`` for the indices ``i`` of a job. Return a dict from ``i`` to the result.

    A tensor is a matrix or a stack ``(..., m, n)``. If ``overwrite[i]``, the result is the tensor itself, overwritten.

    The matrices of all tensors are distributed over batches, which are computed one after another. With a limit of 4
    matrices in a batch, stacks of 3, 2 and 6 matrices give the batches (3), (2), (4) and (2).
    """
    limit = _most_in_a_batch(job)  # None: any number
    results: dict[int, Tensor] = {}
    chunks: list[_Chunk] = []
    for i in job.indices:
        x = xs[i]
        results[i] = x  # an overwritten tensor is its own result; for any other, this is replaced
        if x.numel() == 0:
            if not overwrite[i]:
                results[i] = torch.empty_like(x)
            continue
        matrices = _as_batch(x, job.kind)
        fits_one_batch = limit is None or matrices.shape[0] <= limit
        if fits_one_batch:  # one chunk; without a destination, `_run_batch` returns a new tensor
            destination = matrices if overwrite[i] else None
            chunks.append(_Chunk(i, x, matrices, destination))
            continue
        # A stack for several batches: each of its chunks is written to its part of the result.
        if not overwrite[i]:
            results[i] = torch.empty_like(x, memory_format=torch.contiguous_format)
        destination = _as_batch(results[i], job.kind)
        for part, part_of_destination in zip(
            matrices.split(limit), destination.split(limit), strict=True
        ):
            chunks.append(_Chunk(i, x, part, part_of_destination))

    for batch in _packed(chunks, limit):
        results.update(_run_batch(batch, job))
    return results


def _run_batch(batch: list[_Chunk], job: _Job) -> dict[int, Tensor]:
    """Orthogonalize chunks of the inputs in one batch. A chunk is one input or a part of a stack.

    The result of a chunk is written to its destination. A chunk without a destination is a whole input. Return the
    results of these inputs, by their index in the list of inputs.
    """
    orthogonalize_batch = _batch_in_buffers if job.kind.in_buffers else _new_batch
    orthogonal = orthogonalize_batch(batch, job)
    counts = [chunk.matrices.shape[0] for chunk in batch]  # not len, which fixes a symbolic size
    orthogonal_chunks = orthogonal.split(counts)  # views of the batch
    _write_to_destinations(batch, orthogonal_chunks)

    # A view keeps the whole batch in memory. If some results are copied out of the batch, all are.
    must_copy = not job.in_one_batch and not _can_be_views(batch)
    new_results: dict[int, Tensor] = {}
    for chunk, value in zip(batch, orthogonal_chunks, strict=True):
        if chunk.destination is None:
            new_results[chunk.input_index] = _result_like(chunk.input, value, must_copy)
    return new_results


def _write_to_destinations(batch: list[_Chunk], values: Sequence[Tensor]) -> None:
    """Copy the orthogonalized matrices of each chunk to its destination, if it has one."""
    destinations: list[Tensor] = []
    copied_values: list[Tensor] = []
    for chunk, value in zip(batch, values, strict=True):
        if chunk.destination is None:
            continue
        # If the addresses are equal, the iteration has run in the destination.
        if value.data_ptr() != chunk.destination.data_ptr():
            destinations.append(chunk.destination)
            copied_values.append(value)
    if destinations:
        torch._foreach_copy_(destinations, copied_values)


def _result_like(x: Tensor, value: Tensor, must_copy: bool) -> Tensor:
    """Return the result of an input `x`, in its shape and dtype, from its orthogonalized matrices in a batch.

    The matrices `value` have the shape (b, short, long). The result is a contiguous view of them if it can be, and if
    it need not be a copy (`must_copy`).
    """
    if value.shape[-2] != x.shape[-2]:  # a tall input was computed as its transpose
        value = value.mT
    value = value.to(x.dtype, copy=must_copy, memory_format=torch.contiguous_format)
    return value.reshape(x.shape).contiguous()


def _can_be_views(batch: list[_Chunk]) -> bool:
    """Return True if all results can be views of their batch: new results of inputs that were not transposed."""
    for chunk in batch:
        was_transposed = chunk.matrices.shape[-2] != chunk.input.shape[-2]
        if was_transposed or chunk.destination is not None:
            return False
    return True


def _default_scratch(device: torch.device) -> int:
    """Return the bytes for the temporary tensors of one batch, if the caller gives none."""
    if device.type != "cpu":
        return DEVICE_SCRATCH
    return _CPU_SCRATCH_WITH_AMX if cpu_has_amx() else _CPU_SCRATCH


def _most_in_a_batch(job: _Job) -> int | None:
    """Return how many matrices one batch may have, so that its temporary tensors fit `job.max_scratch_bytes`.

    None for any number.
    """
    if job.in_one_batch:
        return None
    kind = job.kind
    # In a batch it would get other bits than alone.
    if not can_be_stacked(kind.short, kind.long, kind.device):
        return 1
    max_bytes = job.max_scratch_bytes or _default_scratch(kind.device)
    if not kind.in_buffers:  # small matrices, computed by `as_function`
        return max(1, max_bytes // scratch_bytes(kind.short, kind.long, job.plan.dtype))
    limit = max(1, max_bytes // job.plan.scratch_bytes)
    limit = min(limit, job.plan.at_once or limit)  # None: no limit by the cache of a CPU
    # A thread of a CPU, surely of one with AMX, takes whole matrices: for 2 threads, 3 matrices take as long as 4.
    threads = torch.get_num_threads()
    if kind.device.type == "cpu" and limit > threads:
        limit -= limit % threads
    return limit


def _as_batch(x: Tensor, kind: _Kind) -> Tensor:
    """View the matrices of an input as a batch ``(b, short, long)``: tall matrices are transposed.

    Large matrices, which are computed in reused buffers, are never transposed.

    >>> x = torch.zeros(2, 3, 64, 16)
    >>> small = _kind_of(x, may_use_buffers=False)
    >>> _as_batch(x, small).shape, _as_batch(x, small._replace(in_buffers=True)).shape
    (torch.Size([6, 16, 64]), torch.Size([6, 64, 16]))
    """
    if kind.in_buffers:
        return x.reshape(-1, *x.shape[-2:])
    # Another memory order rounds differently, and ranks may hold different orders.
    x = x.contiguous()
    wide = x
    if x.shape[-2] != kind.short:  # a tall matrix
        wide = x.mT
    if x.ndim == 2:
        return wide[None]
    return wide.reshape(-1, *wide.shape[-2:])


def _new_batch(batch: list[_Chunk], job: _Job) -> Tensor:
    """Orthogonalize chunks of the inputs as one batch in new memory. Return the batch in the dtype of the inputs.

    Chunks of 3 and 2 matrices `(short, long)` are joined to a batch `(5, short, long)`.
    """
    matrices = [chunk.matrices for chunk in batch]
    # 1. Under autograd or a compiler, all matrices are one batch. They are rounded before they are joined, to save
    # memory. Else the iteration rounds the batch, which gives the same values.
    dtype = job.kind.dtype
    batch_dtype = job.plan.rounded_to or job.plan.dtype
    is_narrower = batch_dtype.itemsize < dtype.itemsize and same_range(dtype, batch_dtype)
    if job.in_one_batch and is_narrower:
        matrices = [x.to(batch_dtype) for x in matrices]
    # 2. Join them. Sums round in another order for other strides and addresses. So the batch is always contiguous and
    # begins at a multiple of 64 bytes, as a result of `cat` does. A single chunk is copied if it must be.
    if len(matrices) > 1:
        joined = torch.cat(matrices)
    elif job.in_one_batch:  # a traced tensor has no address
        joined = matrices[0].contiguous()
    else:
        joined = aligned(matrices[0])
    return outside_autocast(as_function, joined, job.plan, job.coefficients).to(dtype)


def _batch_in_buffers(batch: list[_Chunk], job: _Job) -> Tensor:
    """Orthogonalize chunks as one batch in reused buffers, or in the memory of the chunks if possible. Return it."""
    plan = job.plan
    # Memory for temporary tensors, which each batch overwrites.
    workspace = job.workspace or Workspace()
    workspace.clear()
    batch_dtype = plan.rounded_to or plan.dtype
    are_all_copied = batch_dtype != job.kind.dtype or all(
        chunk.destination is not None for chunk in batch
    )
    results = workspace
    # Results stay views of this batch, which the next batch must not overwrite.
    if not are_all_copied:
        results = Workspace()
    joined = _join_chunks(batch, batch_dtype, results)
    tall = job.kind.is_tall
    return outside_autocast(
        in_place, joined, plan, job.coefficients, tall=tall, workspace=workspace, results=results
    )


def _join_chunks(chunks: list[_Chunk], dtype: torch.dtype, workspace: Workspace) -> Tensor:
    """Return the matrices of chunks as one batch in a dtype: chunks of 3 and 2 matrices give a batch of 5.

    The iteration overwrites the batch. It is copied to memory of the workspace, unless the chunks are such a batch
    already: they have the dtype, follow each other in memory, and may be overwritten.
    """
    matrices = [chunk.matrices for chunk in chunks]
    counts = list(map(len, matrices))
    first = matrices[0]
    shape = (sum(counts), *first.shape[1:])
    if first.dtype == dtype and _are_one_buffer(chunks):
        # The result is a view of the first chunk and of all that follow it in memory.
        return first.as_strided(shape, first.stride())
    if not same_range(first.dtype, dtype):
        # Rounding alone, such as from fp32 to fp16, could give zeros or infinities. So each matrix is scaled too.
        matrices = [rounded_and_scaled(x, dtype) for x in matrices]
    batch = workspace.empty(shape, dtype, first.device)
    parts_of_batch = list(batch.split(counts))
    torch._foreach_copy_(parts_of_batch, matrices)
    return batch


def _are_one_buffer(chunks: list[_Chunk]) -> bool:
    """Return True if one tensor can view the matrices of all chunks, and their results overwrite them.

    Each must be contiguous, and begin in memory where the one before it ends, as the halves ``buffer[:3]`` and
    ``buffer[3:]`` of one buffer do. The first must begin at an aligned address.
    """
    first = chunks[0].matrices
    if not is_aligned(first):
        return False
    storage = first.untyped_storage()._cdata
    expected_offset = first.storage_offset()  # at which a chunk begins if it follows the one before
    for chunk in chunks:
        x = chunk.matrices
        follows = x.untyped_storage()._cdata == storage and x.storage_offset() == expected_offset
        is_overwritten = (
            chunk.destination is not None and chunk.destination.data_ptr() == x.data_ptr()
        )
        if not (follows and is_overwritten and x.is_contiguous()):
            return False
        expected_offset += x.numel()
    return True


def scratch_bytes(rows: int, columns: int, compute: torch.dtype) -> int:
    """Return the approximate bytes of temporary tensors that `as_function` needs for one `rows x columns` matrix."""
    wide = max(4, compute.itemsize)  # norms are taken in fp32 at least
    return max(1, (3 * rows * columns + 4 * rows * rows) * wide)


def _packed(chunks: list[_Chunk], limit: int | None) -> list[list[_Chunk]]:
    """Distribute chunks over batches of at most `limit` matrices, in order; no chunk has more than `limit`.

    With a limit of 4, chunks of 1, 2, 2 and 4 matrices give the batches (1, 2), (2) and (4). None: a single batch.
    """
    if not chunks:
        return []
    if limit is None:
        return [chunks]
    batches: list[list[_Chunk]] = []
    room = 0  # how many more matrices fit into the last batch
    for chunk in chunks:
        count = chunk.matrices.shape[0]
        if count > room:  # begin a new batch
            batches.append([])
            room = limit
        batches[-1].append(chunk)
        room -= count
    return batches
