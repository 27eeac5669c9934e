"""`orthogonalize` and `orthogonalize_many`: the public functions, and how matrices of many shapes form few batches."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from muonfx.internal.tracing import is_differentiated, is_traced, is_watched, outside_autocast
from muonfx.polar.checks import check_matrix, sharing
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.iteration import as_function, in_place, rounded_and_scaled, same_range
from muonfx.polar.policy import DTypeLike, MethodLike, Plan, plan
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike
from muonfx.polar.workspace import Workspace
from muonfx.tree.elementwise import aligned, can_be_stacked, is_aligned

_CPU_SCRATCH, _DEVICE_SCRATCH = 1 << 25, 1 << 28
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
            matrix `X X^T`, which saves time for long matrices. "auto": the choice that `explain` shows.
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
            matrix. None: 32 MiB on a CPU, to stay in its cache, and 256 MiB elsewhere.
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
        self._polynomials = polynomials(coefficients, steps)
        self._plan = functools.partial(plan, resolved=self._polynomials, method=method, dtype=dtype, products=products)
        self._plans: dict[tuple[_Kind, bool], Plan] = {}

    def plan_for(self, kind: _Kind, *, differentiated: bool, traced: bool) -> Plan:
        """Return the `Plan` (dtype, method, products) for matrices of one shape, dtype and device; it is cached."""
        if traced:  # symbols have no hash
            return self._plan(*kind[:4], differentiated=differentiated)
        known = self._plans.get((kind, differentiated))
        if known is None:
            known = self._plans[kind, differentiated] = self._plan(*kind[:4], differentiated=differentiated)
        return known

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
        donated = _donated(xs) if donate and not watched else [False] * len(xs)
        in_place = not watched and table is None and not self._polynomials.row_scaling
        # Sides may be symbols. A tracer records operators, and then one batch is best.
        traced = is_traced(*[side for x in xs for side in x.shape])
        groups = _grouped(xs, in_place, traced)
        # All plans are made before any result, so invalid settings raise before anything is written.
        plans = [self.plan_for(kind, differentiated=differentiated, traced=traced) for kind, _ in groups]
        results: list[torch.Tensor] = list(xs)
        for (kind, members), own in zip(groups, plans, strict=True):
            scratch = max_scratch_bytes or (_CPU_SCRATCH if kind.device.type == "cpu" else _DEVICE_SCRATCH)
            job = _Job(kind, own, self._polynomials, scratch, watched, watched or traced, workspace)
            filled = [i for i in members if xs[i].numel() > 0]
            for i in set(members).difference(filled) if len(filled) < len(members) else ():
                results[i] = xs[i] if donated[i] else torch.empty_like(xs[i])
            done = _run([xs[i] for i in filled], [donated[i] for i in filled], job)
            for i, y in zip(filled, done, strict=True):
                results[i] = y
        return results


def _grouped(xs: Sequence[torch.Tensor], in_place: bool, traced: bool) -> list[tuple[_Kind, list[int]]]:
    """Group matrices that can be in one batch; return pairs of their common properties and their indices in `xs`."""
    kinds: list[_Kind] = []
    for x in xs:
        rows, columns = x.shape[-2:]
        short, long = (rows, columns) if rows <= columns else (columns, rows)
        tall = rows > columns if in_place and short * long >= _LARGE else None
        kinds.append(_Kind(short, long, x.dtype, x.device, tall))
    if not traced:
        groups: defaultdict[_Kind, list[int]] = defaultdict(list)
        for i, kind in enumerate(kinds):
            groups[kind].append(i)
        return list(groups.items())
    found: list[tuple[_Kind, list[int]]] = []
    for i, kind in enumerate(kinds):  # symbols have no hash; comparing them guards the graph
        for other, members in found:
            if kind == other:
                members.append(i)
                break
        else:
            found.append((kind, [i]))
    return found


class _Job(NamedTuple):
    """The plan and the settings for all matrices of one shape, dtype and device."""

    kind: _Kind
    plan: Plan
    resolved: Polynomials
    scratch: int
    watched: bool
    at_once: bool
    """True if all matrices form one batch: autograd keeps all temporary tensors, a compiler plans memory itself, and
    splitting would fix all sizes in the compiled graph."""
    workspace: Workspace | None


def _donated(xs: Sequence[torch.Tensor]) -> list[bool]:
    """Return a bool for each tensor: True if its result may overwrite it (it is contiguous and shares no memory)."""
    shared = sharing(xs)
    return [x.is_contiguous() and i not in shared for i, x in enumerate(xs)]


def _run(xs: list[torch.Tensor], donated: list[bool], job: _Job) -> list[torch.Tensor]:
    """Orthogonalize nonempty matrices of one shape and dtype; `donated` is True for matrices to overwrite."""
    if not xs:
        return []
    (short, _, held, _, tall), plan = job.kind, job.plan
    if tall is None and not job.at_once and {x.ndim for x in xs} == {2}:
        return _run_stacked(xs, donated, job)
    if tall is None:  # another memory order rounds differently, and ranks may hold different orders
        flats = [_wide(x.contiguous(), short) for x in xs]
        limit = _most_in_a_batch(job)
        # As a view, a new wide result would keep its batch alive next to the copies of tall results.
        mixed = not job.watched and len({x.shape[-2] > x.shape[-1] for x in xs}) > 1
    else:
        flats = [x.reshape(-1, *x.shape[-2:]) for x in xs]
        limit = 1
        if _may_batch(job):
            limit = max(1, min(job.scratch // plan.scratch_bytes, plan.at_once or sum(map(len, flats))))
        mixed = False
    counts = [flat.shape[0] for flat in flats]  # read once: reading a shape takes a microsecond
    # The destination of the results of each input, or None if one batch gives the whole new result.
    places: list[torch.Tensor | None] = []
    for x, own, count in zip(xs, donated, counts, strict=True):
        is_whole = job.at_once or count <= limit
        new = None if own or is_whole else torch.empty_like(x, memory_format=torch.contiguous_format)
        places.append(x if own else new)
    # The input is a placeholder for a new result here, and is not written to.
    homes = [
        flat if place is None or place is x else _wide(place, short) if tall is None else place.view(flat.shape)
        for x, flat, place in zip(xs, flats, places, strict=True)
    ]
    batches = [(flats, homes)] if job.at_once else zip(packed(flats, limit), packed(homes, limit), strict=True)
    owners = iter([i for i, count in enumerate(counts) for _ in range(1 if job.at_once else -(-count // limit))])
    results = [x if place is None else place for x, place in zip(xs, places, strict=True)]
    for given, taken in batches:
        own = [next(owners) for _ in given]
        y = _batch(given, taken if all(places[i] is not None for i in own) else None, job)
        sources: list[torch.Tensor] = []
        destinations: list[torch.Tensor] = []
        for i, home, part in zip(own, taken, y.split([piece.shape[0] for piece in given]), strict=True):
            if places[i] is None:
                part = (part if part.shape[-2] == xs[i].shape[-2] else part.mT).to(held).reshape(xs[i].shape)
                results[i] = part.clone(memory_format=torch.contiguous_format) if mixed else part.contiguous()
            elif part.data_ptr() != home.data_ptr():
                sources.append(part)
                destinations.append(home)
        if sources:
            torch._foreach_copy_(destinations, sources)
        del y, part, sources  # free before the next batch  # pyright: ignore[reportPossiblyUnboundVariable]
    return results


def _run_stacked(xs: list[torch.Tensor], donated: list[bool], job: _Job) -> list[torch.Tensor]:
    """Do the work of `_run` for small matrices `(m, n)`, with few calls for each of them."""
    kind = job.kind
    limit = _most_in_a_batch(job)
    wide = [x if x.shape[0] == kind.short else x.mT for x in xs]
    tall = [own is not x for own, x in zip(wide, xs, strict=True)]
    mixed = len(set(tall)) > 1  # as in `_run`
    results = list(xs)

    def result(i: int, part: torch.Tensor) -> torch.Tensor:
        whole = part.mT if tall[i] else part
        return whole.clone(memory_format=torch.contiguous_format) if mixed else whole.contiguous()

    for start in range(0, len(xs), limit):
        given = wide[start : start + limit]
        # Contiguous also if there is one tall matrix: sums of transposed memory round in another order.
        joined = torch.stack(given) if len(given) > 1 else aligned(given[0])[None]
        parts = outside_autocast(as_function, joined, job.plan, job.resolved).to(kind.dtype).unbind()
        taken = [i for i, own in enumerate(donated[start : start + limit]) if own]
        if taken:
            torch._foreach_copy_([given[i] for i in taken], [parts[i] for i in taken])
        end = start + len(given)
        # A comprehension, unlike a loop, keeps no reference to the last part.
        results[start:end] = [xs[i] if donated[i] else result(i, parts[i - start]) for i in range(start, end)]
        del joined, parts  # free before the next batch
    return results


def _most_in_a_batch(job: _Job) -> int:
    """Return the number of small matrices that are computed at a time."""
    if not _may_batch(job):
        return 1
    return max(1, job.scratch // scratch_bytes(job.kind.short, job.kind.long, job.plan.dtype))


def _may_batch(job: _Job) -> bool:
    """Return True if a batch gives each matrix the bits that it has alone, or if all must be in one batch."""
    # A tracer must not compare the sides: it would trace again for each shape.
    return job.at_once or can_be_stacked(job.kind.short, job.kind.long, job.kind.device)


def _wide(x: torch.Tensor, short: int) -> torch.Tensor:
    """View contiguous matrices `(..., m, n)` as a batch `(b, short, long)`, transposed if m is the long side."""
    wide = x if x.shape[-2] == short else x.mT
    return wide[None] if x.ndim == 2 else wide.reshape(-1, *wide.shape[-2:])


def _batch(given: list[torch.Tensor], taken: list[torch.Tensor] | None, job: _Job) -> torch.Tensor:
    """Orthogonalize the matrices `given` as one batch; `taken` are tensors for its results, None for new tensors."""
    kind, plan = job.kind, job.plan
    if kind.tall is None:
        # Contiguous also if there is one tall stack: sums of transposed memory round in another order.
        if len(given) > 1:
            joined = torch.cat(given)
        elif job.at_once:
            joined = given[0].contiguous()
        else:
            joined = aligned(given[0])
        return outside_autocast(as_function, joined, plan, job.resolved).to(kind.dtype)
    workspace = job.workspace or Workspace()
    workspace.clear()
    # A new result that has the dtype of the batch stays in the buffer that the iteration leaves it in.
    results = Workspace() if taken is None and plan.dtype == kind.dtype else workspace
    buffer = _buffer(given, taken, plan.dtype, results)
    return outside_autocast(in_place, buffer, plan, job.resolved, tall=kind.tall, workspace=workspace, results=results)


def _buffer(
    given: list[torch.Tensor], taken: list[torch.Tensor] | None, compute: torch.dtype, workspace: Workspace
) -> torch.Tensor:
    """Return the matrices ``given`` as one batch of dtype ``compute``, copied unless results overwrite them."""
    first = given[0]
    if taken is not None and first.dtype == compute and _are_adjacent(given, taken):
        return first.as_strided((sum(map(len, given)), *first.shape[1:]), first.stride())
    batch = workspace.empty((sum(map(len, given)), *first.shape[1:]), compute, first.device)
    if not same_range(first.dtype, compute):  # scale by a power of two before rounding
        given = [rounded_and_scaled(piece, compute) for piece in given]
    torch._foreach_copy_(list(batch.split([len(piece) for piece in given])), given)
    return batch


def _are_adjacent(given: list[torch.Tensor], taken: list[torch.Tensor]) -> bool:
    """Return True if the tensors ``given`` are consecutive in aligned memory, and are the results ``taken``."""
    if not is_aligned(given[0]):
        return False
    storage, at = given[0].untyped_storage()._cdata, given[0].storage_offset()
    for x, y in zip(given, taken, strict=True):
        if x.untyped_storage()._cdata != storage or x.storage_offset() != at or not x.is_contiguous():
            return False
        if x.data_ptr() != y.data_ptr():
            return False
        at += x.numel()
    return True


def scratch_bytes(rows: int, columns: int, compute: torch.dtype) -> int:
    """Return the approximate bytes of temporary tensors that `as_function` needs for one `rows x columns` matrix."""
    wide = max(4, compute.itemsize)  # norms are taken in fp32 at least
    return max(1, (3 * rows * columns + 4 * rows * rows) * wide)


def packed(flats: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Distribute tensors `(k, ...)` of k matrices over lists of at most `limit` matrices; split longer tensors."""
    batches: list[list[torch.Tensor]] = []
    room = 0
    for flat in flats:
        for piece in flat.split(limit) if flat.shape[0] > limit else (flat,):
            if piece.shape[0] > room:
                batches.append([])
                room = limit
            batches[-1].append(piece)
            room -= piece.shape[0]
    return batches
