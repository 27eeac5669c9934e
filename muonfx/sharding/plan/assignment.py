"""The plan of a transform: which rank computes which matrices, how they reach that rank, and in which order.

A *run* is a sequence of neighbouring transforms of a chain that need whole matrices. A *matrix shard* is a set of whole
matrices of one parameter that one rank, its *owner*, computes: the parameter itself, or a range of a stack. A
*transfer* is the overlap of a matrix shard with a shard of the layout, which is sent to the owner and back. A *bucket*
is a set of matrix shards that are sent together. A plan depends on the layout, the chain and shapes alone, so all ranks
compute the same plan without communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch

from muonfx.core import Transform
from muonfx.core.patterns import warn_of_unmatched
from muonfx.core.transform import patterns_in, require_transform
from muonfx.core.value import strip_transparent
from muonfx.internal.display import Report, Table
from muonfx.placement.buckets import cut_into_buckets
from muonfx.sharding.plan.balance import assign
from muonfx.sharding.plan.cost import Run, RunCost, runs_of
from muonfx.sharding.plan.matrix_shards import (
    LocalTransfers,
    MatrixShard,
    UnassignedShard,
    matrices_of,
    on_stacks,
    unassigned_shards,
    with_ranks_of_their_own,
)
from muonfx.sharding.shards.table import ShardTable, require_layout
from muonfx.tree import Spec


class Machine(NamedTuple):
    """A rough speed of one rank in computing and sending. It is used to choose which rank computes a matrix."""

    flops: float
    """Floating-point operations per second in matrix products."""
    bandwidth: float
    """Bytes per second that a rank sends, packing and unpacking included."""
    latency: float = 0.0
    """Fixed seconds for each exchange, in addition to its bytes."""
    overhead: float = 0.0
    """Fixed seconds for each matrix, in addition to its operations."""

    @classmethod
    def of(cls, device: str, compute: torch.dtype = torch.float32) -> Machine:
        """Return a rough estimate for a type of device, such as "cuda", and the dtype of matrix products."""
        # On a CPU the ranks are processes of one host that exchange by gloo.
        if device == "cuda":
            return cls(4e14, 5e10, latency=5e-5, overhead=1e-5)
        return cls(6e11 if compute == torch.bfloat16 else 1e11, 7e8, latency=3.5e-4, overhead=5e-5)

    def computing(self, cost: float, matrices: int = 1) -> float:
        """Estimate the seconds to compute ``matrices`` matrices that need ``cost`` floating-point operations in all."""
        return cost / self.flops + matrices * self.overhead

    def sending(self, nbytes: float, exchanges: int = 1) -> float:
        """Estimate the seconds in which one rank sends ``nbytes`` bytes in this number of exchanges."""
        return nbytes / self.bandwidth + exchanges * self.latency


class Settings(NamedTuple):
    """The arguments ``replicas`` and ``bucket_bytes`` of `sharded`, which decide where matrices are computed."""

    replicas: str = "auto"
    """Who computes a matrix that all ranks hold: "split" is one rank, "everyone" every rank, "auto" the faster way."""
    bucket_bytes: int = 1 << 28
    """The approximate memory for one exchange of matrices, message buffers included; a larger matrix is sent alone."""

    def check(self) -> None:
        """Raise ValueError if a setting has an unknown value."""
        if self.replicas not in ("auto", "split", "everyone"):
            raise ValueError(f"replicas: found {self.replicas!r}, expected 'auto', 'split' or 'everyone'")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: found {self.bucket_bytes!r}, expected an int of 1 or more")


@dataclass(frozen=True)
class RunPlan:
    """Which rank computes which matrices, and in which order, for one run of transforms.

    A run is a sequence of neighbouring transforms of a chain that need whole matrices, such as `orthogonalize`.
    """

    run: Run = field(repr=False)
    """The transforms by name, in the form that treats the parameters in `stacks` as stacks of matrices."""
    stacks: tuple[str, ...]
    """The names of the parameters that all transforms of the run treat as a stack of independent matrices."""
    size: int
    shards: tuple[MatrixShard, ...]
    buckets: tuple[tuple[int, ...], ...]
    """Groups of indices into `shards`: the matrices of a group have one dtype and are sent together."""
    specs: dict[str, Spec] = field(repr=False)
    device: torch.device
    _wire_dtypes: dict[torch.dtype, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict, repr=False)
    rank: int = field(default=0, repr=False, compare=False)
    messages: dict[frozenset[str], Any] = field(default_factory=dict, repr=False, compare=False)
    """A cache of this rank's messages in a step, by the names of the parameters whose gradient is None."""

    @cached_property
    def local_transfers(self) -> list[list[LocalTransfers]]:
        """The transfers of this rank, as a list of lists. Each inner list is sent together (a bucket)."""
        transfers: list[list[LocalTransfers]] = []
        for bucket in self.buckets:
            transfers.append([self.shards[index].local_transfers(self.rank) for index in bucket])
        return transfers

    @cached_property
    def shards_of(self) -> dict[str, tuple[MatrixShard, ...]]:
        """A dict from each parameter's name to its matrix shards: some of its matrices, with the computing rank."""
        by_name: dict[str, tuple[MatrixShard, ...]] = {}
        for shard in self.shards:
            by_name[shard.name] = (*by_name.get(shard.name, ()), shard)
        return by_name

    @property
    def flops(self) -> list[float]:
        """A list with the load of each rank per step, in floating-point operations of dense matrix products."""
        loads = [sum(shard.cost for shard in self.shards if shard.owner is None)] * self.size
        for shard in self.shards:
            if shard.owner is not None:
                loads[shard.owner] += shard.cost
        return loads

    @property
    def sent(self) -> list[int]:
        """A list with the bytes that each rank sends in a step: updates to computing ranks, and results back."""
        return self.sent_for(self.shards)

    def sent_for(self, shards: Sequence[MatrixShard]) -> list[int]:
        """Return a list with the bytes that each rank sends in a step for the matrices in `shards`."""
        sent = [0] * self.size
        for shard in shards:
            if shard.owner is None:
                continue
            wire_dtype, result_dtype = self.wire_dtypes(self.specs[shard.name].dtype)
            for transfer in shard.transfers:
                receivers = len(transfer.ranks)
                if shard.owner in transfer.ranks:
                    receivers -= 1  # an owner sends itself nothing
                sent[shard.owner] += receivers * transfer.numel * result_dtype.itemsize
                if transfer.sender != shard.owner:
                    sent[transfer.sender] += transfer.numel * wire_dtype.itemsize
        return sent

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of messages to computing ranks and back. Only rounding in the transforms narrows them."""
        if dtype not in self._wire_dtypes:
            (_, first), (_, last) = self.run[0], self.run[-1]
            self._wire_dtypes[dtype] = self._narrowed(first, dtype), self._narrowed(last, dtype)
        return self._wire_dtypes[dtype]

    def _narrowed(self, tx: Transform, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which a transform rounds its input and result, if it is narrower than `dtype`."""
        rounds_to = tx.declaration.matrices.rounds_to
        if rounds_to is None:
            return dtype
        rounded = rounds_to(tx, dtype, self.device)
        return rounded if rounded.itemsize < dtype.itemsize else dtype


# One for the matrices, two for messages of the next bucket, two for messages of the previous results, one for a result.
BUFFERS_PER_BUCKET = 6
"""The peak memory of an exchange, as a multiple of the bytes of the matrices that are sent together (a bucket)."""


def plan_run(run: Run, names: Sequence[str], layout: ShardTable, device: torch.device, settings: Settings) -> RunPlan:
    """Decide which rank computes each matrix of the named parameters, for transforms that need whole matrices."""
    specs = {name: layout.specs[name] for name in names}
    # All ranks must make the same plan, so a transform's dtype "auto" is not resolved by this machine's CPU here.
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = Machine.of(device.type, compute)
    matrices = matrices_of(run, {name: spec.shape for name, spec in specs.items()})
    run = on_stacks(run, {name: specs[name].shape for name in matrices})
    unassigned: list[UnassignedShard] = []
    for name in names:
        unassigned += unassigned_shards(matrices.get(name), name, layout)
    cost_of = RunCost(run, device.type, compute)
    costs = [cost_of(shard.name, shard.shape, specs[shard.name].dtype) for shard in unassigned]
    nbytes = [shard.numel * specs[shard.name].dtype.itemsize for shard in unassigned]
    unassigned = with_ranks_of_their_own(unassigned, costs, layout.size)
    owners = _owners(unassigned, costs, nbytes, layout.size, machine, settings)
    shards: list[MatrixShard] = []
    for shard, owner, cost in zip(unassigned, owners, costs, strict=True):
        name = shard.name
        whole = specs[name].shape
        shards.append(MatrixShard(name, shard.start, shard.stop, shard.shape, whole, owner, cost, layout.cuts[name]))
    buckets = tuple(_buckets(shards, specs, max(1, settings.bucket_bytes // BUFFERS_PER_BUCKET)))
    return RunPlan(run, tuple(matrices), layout.size, tuple(shards), buckets, specs, device, rank=layout.rank)


def _owners(
    shards: Sequence[UnassignedShard],
    costs: Sequence[float],
    nbytes: Sequence[int],
    size: int,
    machine: Machine,
    settings: Settings,
) -> list[int | None]:
    """Choose the rank that computes each of the matrix shards; None means that every rank computes it.

    A shard that all ranks hold whole may be split, so that one rank computes it and sends the result, or be computed
    by every rank. Whole assignments are compared by the busiest rank, since splitting saves nothing if there are fewer
    matrices than ranks, for example.
    """
    everywhere: list[int] = []
    elsewhere: list[int] = []
    for index, shard in enumerate(shards):
        is_everywhere = shard.complete and len(shard.candidates) == size > 1
        if is_everywhere:
            everywhere.append(index)
        else:
            elsewhere.append(index)
    seconds = [machine.computing(cost, prod(shard.shape[:-2])) for cost, shard in zip(costs, shards, strict=True)]
    slower_than_sending = [index for index in everywhere if seconds[index] > nbytes[index] / machine.bandwidth]
    choices = {
        "everyone": [[]],
        "split": [everywhere],
        "auto": [[], slower_than_sending, everywhere],
    }[settings.replicas]
    fewest_seconds = math.inf
    best: dict[int, int] = {}
    for split in choices:
        assigned = sorted(elsewhere + split)
        owners = assign(
            [costs[index] for index in assigned],
            [shards[index].candidates for index in assigned],
            size,
            [shards[index].numel for index in assigned],
        )
        owner_of = dict(zip(assigned, owners, strict=True))
        loads = [0.0] * size
        for index, owner in owner_of.items():
            loads[owner] += seconds[index]
        by_every_rank = sum(seconds[index] for index in everywhere if index not in owner_of)
        results = [(owner_of[index], nbytes[index]) for index in split]
        estimate = max(loads) + by_every_rank + _seconds_to_send(results, size, machine, settings)
        if estimate < fewest_seconds:
            fewest_seconds = estimate
            best = owner_of
    return [best.get(index) for index in range(len(shards))]


def _seconds_to_send(results: Sequence[tuple[int, int]], size: int, machine: Machine, settings: Settings) -> float:
    """Estimate the seconds in which owners send `results`, pairs (owner, bytes), to all other ranks.

    Transfers of shards that not all ranks hold are not counted: they are equal for all choices.
    """
    if not results:
        return 0.0
    sent = [0] * size
    for owner, nbytes in results:
        sent[owner] += nbytes * (size - 1)
    arriving = sum(sent) / size
    exchanges = 1 + sum(sent) * BUFFERS_PER_BUCKET // (max(1, size - 1) * size * max(1, settings.bucket_bytes))
    return machine.sending(max(*sent, arriving), exchanges)


def _buckets(shards: Sequence[MatrixShard], specs: dict[str, Spec], limit: int) -> Iterator[tuple[int, ...]]:
    """Yield indices of `shards` to send together, with at most `limit` bytes of matrices for each computing rank."""
    by_shape = sorted(range(len(shards)), key=lambda index: (sorted(shards[index].shape[-2:]), index))
    for dtype in dict.fromkeys(specs[shard.name].dtype for shard in shards):
        nbytes_by_owner: dict[int | None, dict[int, int]] = {None: {}}
        for index in by_shape:
            shard = shards[index]
            if specs[shard.name].dtype == dtype:
                nbytes_by_owner.setdefault(shard.owner, {})[index] = shard.numel * dtype.itemsize
        # Shards that every rank computes have their own batches: with other matrices the last bit could differ.
        yield from map(tuple, cut_into_buckets(nbytes_by_owner.pop(None), limit))
        buckets_of_owners = [cut_into_buckets(nbytes, limit) for nbytes in nbytes_by_owner.values()]
        for buckets in zip_longest(*buckets_of_owners, fillvalue=()):
            yield tuple(sorted(itertools.chain(*buckets)))


@dataclass(frozen=True)
class Plan:
    """Which rank computes each matrix of a transform, and how many bytes are sent. It prints as a table.

    Attributes:
        runs: a list of partial plans, one for each sequence of neighbouring transforms that need whole matrices.
        size: the number of ranks.

    >>> import muonfx as mfx
    >>> layout = mfx.sharding.zero({"w": torch.zeros(64, 64)}, 2, partition="flat")
    >>> plan = plan_for(mfx.muon(2e-3, orthogonalize=mfx.orthogonalize(dtype=torch.float32)), layout)
    >>> plan.owners(), sum(plan.sent)
    ({'w': [0]}, 16384)
    """

    runs: tuple[RunPlan, ...]
    size: int

    @property
    def flops(self) -> list[float]:
        """A list with the floating-point operations of each rank per step, in transforms that need whole matrices."""
        return _sums([run.flops for run in self.runs]) or [0.0] * self.size

    @property
    def sent(self) -> list[int]:
        """A list with the bytes that each rank sends per step: updates to computing ranks, and results back."""
        return _sums([run.sent for run in self.runs]) or [0] * self.size

    @property
    def balance(self) -> float:
        """The operations of the busiest rank, divided by the mean over ranks. 1.0 is a perfect balance."""
        flops = self.flops
        if not sum(flops):
            return 1.0
        return max(flops) * self.size / sum(flops)

    def owners(self) -> dict[str, list[int | None]]:
        """Return a dict from parameter name to a list of the ranks that compute its matrices. None means every rank."""
        owners: dict[str, list[int | None]] = {}
        for run in self.runs:
            for shard in run.shards:
                owners.setdefault(shard.name, []).append(shard.owner)
        return owners

    def explain(self) -> Report:
        """Return two tables to print: a row per matrix with the rank that computes it and why, and a row per rank."""
        tables: list[str | Table] = [_table_of_run(run) for run in self.runs]
        flops = self.flops
        sent = self.sent
        rows: list[tuple[str, ...]] = []
        for rank in range(self.size):
            rows.append((str(rank), f"{flops[rank] / 1e9:.4g}", f"{sent[rank] / 1024:.4g}"))
        tables.append(Table(("rank", "GFLOP", "KiB sent"), rows, right=(0, 1, 2)))
        return Report((*tables, f"balance: the busiest rank computes {self.balance:.3f} times the mean"))

    def __str__(self) -> str:
        return str(self.explain())

    def _repr_html_(self) -> str:
        return self.explain().to_html()


def _sums(lists: Sequence[list[Any]]) -> list[Any]:
    """Return the elementwise sum of lists of numbers."""
    return [sum(numbers) for numbers in zip(*lists, strict=True)]


def _table_of_run(run: RunPlan) -> Table:
    """Return a table with a row for each matrix shard."""
    rows: list[tuple[str, ...]] = []
    for shard in run.shards:
        rows.append(
            (
                shard.name,
                " x ".join(map(str, shard.shape)),
                "all" if shard.owner is None else str(shard.owner),
                shard.route,
                f"{shard.cost / 1e9:.4g}",
                f"{sum(run.sent_for([shard])) / 1024:.4g}",
                shard.reason,
            )
        )
    names = ", ".join(name for name, _ in run.run)
    count = len(run.buckets)
    title = f"run of {names} in {count} bucket{'s' * (count != 1)}"
    titles = ("parameter", "matrices", "owner", "route", "GFLOP", "KiB sent", "why")
    return Table(titles, rows, right=(2, 4, 5), title=title)


def plan_for(tx: Transform, layout: ShardTable, *, device: torch.device | str = "cpu", **settings: Any) -> Plan:
    """Return which rank will compute which matrix under `sharded`. Only shapes are needed, no communication.

    Args:
        tx: the transform, sharded or not.
        layout: the layout of the parameters, with or without processes.
        device: the type of device of the training run. The dtype "auto" counts as bf16 on CUDA, else as fp32.
        **settings: the arguments ``replicas`` and ``bucket_bytes`` of `sharded`.

    Raises:
        TypeError: ``tx`` is not a transform, or ``layout`` is not a layout.
        ValueError: ``replicas`` or ``bucket_bytes`` has an unknown value.

    Warns:
        UserWarning: a pattern of a view or mask matches no parameter.

    >>> import muonfx as mfx
    >>> layout = mfx.sharding.zero({"w": torch.zeros(64, 64), "v": torch.zeros(64, 32)}, 2)
    >>> plan_for(mfx.muon(2e-3), layout).owners()
    {'v': [1], 'w': [0]}
    """
    require_transform("tx", tx)
    require_layout(layout)
    chosen = Settings(**settings)
    chosen.check()
    meta = layout.meta()
    warn_of_unmatched(patterns_in(tx), meta)
    runs: list[RunPlan] = []
    for run, names in runs_of(strip_transparent(tx), meta):
        runs.append(plan_run(run, names, layout, torch.device(device), chosen))
    return Plan(tuple(runs), layout.size)
