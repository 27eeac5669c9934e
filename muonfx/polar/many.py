"""Orthogonalize many matrices of many shapes in few batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.engine import (
    as_function,
    check_matrix,
    check_out,
    goes_in_place,
    in_place,
    is_differentiated,
    is_watched,
    outside_autocast,
    sharing,
)
from muonfx.polar.policy import DTypeLike, MethodLike, Plan, plan
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike
from muonfx.polar.scaling import rounded_and_scaled, same_range
from muonfx.polar.workspace import Workspace
from muonfx.tree.tracing import is_traced

_CPU_SCRATCH, _DEVICE_SCRATCH = 1 << 25, 1 << 28


def orthogonalize_many(
    xs: Sequence[torch.Tensor],
    *,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    restarts: Sequence[int] | None = None,
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    max_scratch_bytes: int | None = None,
    donate: bool = False,
    out: Sequence[torch.Tensor] | None = None,
    names: Sequence[str] | None = None,
    workspace: Workspace | None = None,
) -> list[torch.Tensor]:
    """`[orthogonalize(x, ...) for x in xs]`, with small matrices of one shape, or of its transpose, batched together.

    Equal to that loop within the rounding of another summation order: elementwise 1e-12 in fp64, 2e-5 in fp32 and 0.2
    in bf16 on Gaussian matrices with sides 8 to 128. Bitwise wherever the batched product sums as the single one does.

    Args:
        xs: tensors `(..., m, n)` as `orthogonalize` takes them, of any mix of shapes, dtypes and devices.
        coefficients: as in `orthogonalize`.
        steps: as in `orthogonalize`.
        method: as in `orthogonalize`.
        restarts: as in `orthogonalize`.
        dtype: as in `orthogonalize`; "auto" is resolved for each input dtype and device. Derivatives of one input
            make it at least fp32 for all.
        products: as in `orthogonalize`.
        max_scratch_bytes: about how many bytes of intermediates one batch may take; one matrix always goes through.
            None: 32 MiB on a CPU, which its cache likes best, 256 MiB elsewhere.
        donate: the caller's promise not to use `xs` again: each that is contiguous, and shares memory with no other, is
            then overwritten by its result and returned, which saves the room of the results and, where dtypes agree, a
            copy. Same values.
        out: tensors to write the results to, one for each of `xs`, of its shape, dtype and device; contiguous ones
            take them without a temporary. It may be its own `x`, and share memory with no other.
        names: what errors call `xs`; None: `xs[0]`, `xs[1]`, ...
        workspace: memory for intermediates of large matrices, for the next call to use again; None: new memory.

    Returns:
        One tensor for each of `xs`, in order, with its shape, dtype and device: those of `out`; or, with `donate`, of
        `xs`; or else new contiguous ones. New results of one batch may be views of one buffer; they do not overlap, but
        autograd takes a change in place of one for a change of all.

    Raises:
        TypeError, ValueError, RuntimeError: as `orthogonalize`, naming the position in `xs`.
        ValueError: `max_scratch_bytes` is below 1; `out` beside `donate`.

    >>> a, b = orthogonalize_many([torch.eye(2, 3), torch.eye(3, 2)])
    >>> a.shape, b.shape, torch.equal(a, b.mT)
    (torch.Size([2, 3]), torch.Size([3, 2]), True)
    """
    if max_scratch_bytes is not None and max_scratch_bytes < 1:
        raise ValueError(f"max_scratch_bytes: found {max_scratch_bytes}, expected at least 1")
    for i, x in enumerate(xs):
        check_matrix(x, f"xs[{i}]" if names is None else names[i])
    resolved = Orthogonalizer(coefficients, steps, method, restarts, dtype, products)
    if not xs:  # invalid settings raise also for no matrices
        resolved.plan_for(_Kind(1, 1, torch.float32, torch.device("cpu")), differentiated=False)
    return resolved(xs, max_scratch_bytes=max_scratch_bytes, donate=donate, out=out, workspace=workspace)


class _Kind(NamedTuple):
    """The properties that matrices of one plan share."""

    short: int
    long: int
    dtype: torch.dtype
    device: torch.device


class Orthogonalizer:
    """`orthogonalize_many` with settings that are resolved once, and one plan per shape, dtype and device."""

    def __init__(
        self,
        coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
        steps: int | None = None,
        method: MethodLike = "auto",
        restarts: Sequence[int] | None = None,
        dtype: DTypeLike = "auto",
        products: ProductsLike = "auto",
    ) -> None:
        self._polynomials = polynomials(coefficients, steps, restarts)
        self._method: MethodLike = method
        self._dtype: DTypeLike = dtype
        self._products: ProductsLike = products
        self._plans: dict[tuple[_Kind, bool], Plan] = {}

    def plan_for(self, kind: _Kind, *, differentiated: bool) -> Plan:
        """Return the plan for matrices of one kind, made at the first call."""
        if is_traced(kind.short, kind.long):  # symbols have no hash
            return self._made(kind, differentiated)
        known = self._plans.get((kind, differentiated))
        if known is None:
            known = self._plans[kind, differentiated] = self._made(kind, differentiated)
        return known

    def _made(self, kind: _Kind, differentiated: bool) -> Plan:
        return plan(
            *kind,
            self._polynomials,
            method=self._method,
            dtype=self._dtype,
            products=self._products,
            differentiated=differentiated,
        )

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        *,
        max_scratch_bytes: int | None = None,
        donate: bool = False,
        out: Sequence[torch.Tensor] | None = None,
        workspace: Workspace | None = None,
    ) -> list[torch.Tensor]:
        """Orthogonalize matrices without checking them; the arguments are as in `orthogonalize_many`."""
        table = self._polynomials.table
        inputs = xs if table is None else [*xs, table]
        watched = is_watched(*inputs)
        differentiated = watched and is_differentiated(*inputs)
        targets = _targets(xs, donate, out, watched)
        groups = _grouped(xs)
        # All plans are made before any result, so invalid settings raise before anything is written.
        plans = [self.plan_for(kind, differentiated=differentiated) for kind, _ in groups]
        results: list[torch.Tensor] = list(xs)
        for (kind, members), own in zip(groups, plans, strict=True):
            scratch = max_scratch_bytes or (_CPU_SCRATCH if kind.device.type == "cpu" else _DEVICE_SCRATCH)
            job = _Job(kind, own, self._polynomials, scratch, watched, workspace)
            rest: list[int] = []
            for i in members:
                if xs[i].numel() > 0:
                    rest.append(i)
                else:
                    target = targets[i]
                    results[i] = xs[i].clone(memory_format=torch.contiguous_format) if target is None else target
            for together, run in _ways(job, rest, xs):
                done = run([xs[i] for i in together], [targets[i] for i in together], job)
                for i, y in zip(together, done, strict=True):
                    results[i] = y
        return results


def _grouped(xs: Sequence[torch.Tensor]) -> list[tuple[_Kind, list[int]]]:
    """Return the indices of the matrices of each kind, kinds in order of first occurrence."""
    kinds: list[_Kind] = []
    sides: list[int] = []
    for x in xs:
        rows, columns = x.shape[-2:]
        short, long = (rows, columns) if rows <= columns else (columns, rows)
        kinds.append(_Kind(short, long, x.dtype, x.device))
        sides += (short, long)
    if not is_traced(*sides):
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
    """The plan and settings for matrices of one kind."""

    kind: _Kind
    plan: Plan
    resolved: Polynomials
    scratch: int
    watched: bool
    workspace: Workspace | None


_Run = Callable[[list[torch.Tensor], list[torch.Tensor | None], _Job], list[torch.Tensor]]


def _ways(job: _Job, members: list[int], xs: Sequence[torch.Tensor]) -> list[tuple[list[int], _Run]]:
    """Return which nonempty matrices of a group run together, and by which function."""
    if job.watched or not goes_in_place(job.kind.short, job.kind.long, job.resolved):
        return [(members, _run_as_function)]
    tall = [i for i in members if xs[i].shape[-2] > xs[i].shape[-1]]
    wide = [i for i in members if xs[i].shape[-2] <= xs[i].shape[-1]]
    return [(wide, _run_in_place), (tall, _run_in_place)]


def _targets(
    xs: Sequence[torch.Tensor], donate: bool, out: Sequence[torch.Tensor] | None, watched: bool
) -> list[torch.Tensor | None]:
    """Return the tensor to write each result to; None means a new tensor."""
    if out is None:
        if not donate or watched:
            return [None] * len(xs)
        shared = sharing(xs)  # a tensor that shares memory with another input must not be overwritten
        return [x if x.is_contiguous() and i not in shared else None for i, x in enumerate(xs)]
    if donate:
        raise ValueError(
            "out: found beside donate=True, expected one of them: donated inputs take the results themselves"
        )
    check_out(out, xs, ["out" if len(xs) == 1 else f"out[{i}]" for i in range(len(out))])
    if watched or (torch.is_grad_enabled() and any(y.requires_grad for y in out)):
        raise RuntimeError(
            "out: found under autograd, torch.func or torch.compile, which do not follow what is written to a tensor; "
            "leave it out, or call under torch.no_grad()"
        )
    return list(out)


def _run_as_function(xs: list[torch.Tensor], targets: list[torch.Tensor | None], job: _Job) -> list[torch.Tensor]:
    """Orthogonalize small or watched matrices, wide and tall ones concatenated into batches."""
    # Each batch is copied to its destinations before the next one is made: at most one batch is held besides results.
    short, long, held, _ = job.kind
    flats: list[torch.Tensor] = []
    for x in xs:
        ordered = x.contiguous()  # another memory order rounds differently, and ranks may hold different orders
        wide = ordered if x.shape[-2] == short else ordered.mT
        flats.append(wide[None] if x.ndim == 2 else wide.reshape(-1, short, long))
    counts = [flat.shape[0] for flat in flats]  # read once: reading a shape takes a microsecond
    limit = max(1, job.scratch // scratch_bytes(short, long, job.plan.dtype))
    if is_traced(short, long, *counts):
        limit = sum(counts) + 1  # splitting would specialize all sizes, and a compiler plans memory itself
    places = [
        _place(x, target, whole=count <= limit or job.watched)
        for x, target, count in zip(xs, targets, counts, strict=True)
    ]
    owners = iter([(i, start) for i, count in enumerate(counts) for start in range(0, count, limit)])
    parts: list[list[torch.Tensor]] = [[] for _ in xs]
    results = list(xs)
    # The result of a wide matrix is a view of its batch and keeps it alive, next to the copies of tall ones.
    mixed = not job.watched and len({x.shape[-2] > x.shape[-1] for x in xs}) > 1

    def deliver(pieces: list[torch.Tensor]) -> None:
        sources: list[torch.Tensor] = []
        homes: list[torch.Tensor] = []
        for piece in pieces:
            i, start = next(owners)
            part = piece if xs[i].shape[-2] == short else piece.mT
            place = places[i]
            if place is None:
                parts[i].append(part)
                if start + part.shape[0] == counts[i]:
                    results[i] = joined_parts(i)
                continue
            sources.append(part)
            home = place[None] if place.ndim == 2 else place.view(-1, *part.shape[1:])
            count = part.shape[0]
            homes.append(home if count == counts[i] else home[start : start + count])
            results[i] = place
        if homes:
            torch._foreach_copy_(homes, sources)

    def joined_parts(i: int) -> torch.Tensor:
        target = targets[i]
        whole = (parts[i][0] if len(parts[i]) == 1 else torch.cat(parts[i])).reshape(xs[i].shape)
        parts[i].clear()
        if target is not None:
            return target.copy_(whole)
        return whole.clone(memory_format=torch.contiguous_format) if mixed else whole.contiguous()

    for batch in packed(flats, limit):
        joined = batch[0] if len(batch) == 1 else torch.cat(batch)
        y = outside_autocast(as_function, joined, job.plan, job.resolved).to(held)
        deliver(list(y.split([piece.shape[0] for piece in batch])))
        del joined, y  # free before the next batch
    for i, (target, place) in enumerate(zip(targets, places, strict=True)):
        if target is not None and place is not None and target is not place:
            results[i] = target.copy_(place)
    return results


def _run_in_place(xs: list[torch.Tensor], targets: list[torch.Tensor | None], job: _Job) -> list[torch.Tensor]:
    """Orthogonalize large matrices, all wide or all tall, with one buffer for each batch."""
    if not xs:
        return []
    m, n = xs[0].shape[-2:]
    flats = [x.reshape(-1, m, n) for x in xs]
    limit = max(1, min(job.scratch // job.plan.scratch_bytes, job.plan.at_once or sum(map(len, flats))))
    places = [_place(x, target, whole=len(flat) <= limit) for x, target, flat in zip(xs, targets, flats, strict=True)]
    # The input stands for a new result here, and is then not written to.
    homes = [flat if place is None else place.view(-1, m, n) for flat, place in zip(flats, places, strict=True)]
    new = iter([place is None for place, flat in zip(places, flats, strict=True) for _ in flat.split(limit)])
    fresh: list[torch.Tensor] = []
    for given, taken in zip(packed(flats, limit), packed(homes, limit), strict=True):
        is_new = [next(new) for _ in given]
        workspace = job.workspace or Workspace()
        workspace.clear()
        # A new result that has the dtype of the batch stays in the buffer that the iteration leaves it in.
        batches = Workspace() if any(is_new) and job.plan.dtype == job.kind.dtype else workspace
        buffer = _buffer(given, None if any(is_new) else taken, job.plan.dtype, batches)
        y = outside_autocast(in_place, buffer, job.plan, job.resolved, tall=m > n, workspace=workspace, results=batches)
        fresh += _settled(y, taken, is_new, job.kind.dtype)
        del buffer, y  # free before the next batch
    made = iter(fresh)
    results: list[torch.Tensor] = []
    for x, target, place in zip(xs, targets, places, strict=True):
        y = next(made).view(x.shape) if place is None else place
        results.append(y if target is None or target is place else target.copy_(y))
    return results


def _place(x: torch.Tensor, target: torch.Tensor | None, *, whole: bool) -> torch.Tensor | None:
    """Return the destination of the batched results of `x`, or None if one batch gives its whole new result."""
    if target is not None and target.is_contiguous():
        return target
    return None if whole else torch.empty_like(x, memory_format=torch.contiguous_format)


def _settled(y: torch.Tensor, homes: list[torch.Tensor], is_new: list[bool], held: torch.dtype) -> list[torch.Tensor]:
    """Copy the parts of a batch to their destinations and return the new results."""
    fresh: list[torch.Tensor] = []
    for piece, home, new in zip(y.split([len(home) for home in homes]), homes, is_new, strict=True):
        if new:
            fresh.append(piece.to(held))
        elif piece.data_ptr() != home.data_ptr():
            home.copy_(piece)
    return fresh


def _buffer(
    given: list[torch.Tensor], taken: list[torch.Tensor] | None, compute: torch.dtype, workspace: Workspace
) -> torch.Tensor:
    """Return a batch in the compute dtype, which is the inputs' own memory if results overwrite it."""
    first = given[0]
    if taken is not None and first.dtype == compute and _lie_together(given, taken):
        return first.as_strided((sum(map(len, given)), *first.shape[1:]), first.stride())
    batch = workspace.empty((sum(map(len, given)), *first.shape[1:]), compute, first.device)
    if not same_range(first.dtype, compute):  # scale by a power of two before rounding
        given = [rounded_and_scaled(piece, compute) for piece in given]
    torch._foreach_copy_(list(batch.split([len(piece) for piece in given])), given)
    return batch


def _lie_together(given: list[torch.Tensor], taken: list[torch.Tensor]) -> bool:
    """Return True if tensors are contiguous, adjacent in one storage and overwritten by their own results."""
    storage, at = given[0].untyped_storage()._cdata, given[0].storage_offset()
    for x, y in zip(given, taken, strict=True):
        if x.untyped_storage()._cdata != storage or x.storage_offset() != at or not x.is_contiguous():
            return False
        if x.data_ptr() != y.data_ptr():
            return False
        at += x.numel()
    return True


def scratch_bytes(rows: int, columns: int, compute: torch.dtype) -> int:
    """Return about how many bytes of intermediates `as_function` needs for one `rows x columns` matrix."""
    wide = max(4, compute.itemsize)  # norms are taken in fp32 at least
    return max(1, (3 * rows * columns + 4 * rows * rows) * wide)


def packed(flats: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Pack `flats`, each `(k, ...)`, in order into lists of at most `limit` rows; split longer ones at `limit`."""
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
