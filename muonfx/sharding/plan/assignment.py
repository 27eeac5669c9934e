"""The plan of a transform: which rank computes which matrices, how they reach that rank, and in which order.

A *run* is a sequence of neighbouring transforms of a chain that need whole matrices. A *matrix shard* is a set of whole
matrices of one parameter that one rank, its *owner*, computes: the parameter itself, or a range of a stack. A
*transfer* is the overlap of a matrix shard with a shard of the layout, which is sent to the owner and back. A *bucket*
is a set of matrix shards that are sent together. A plan depends on the layout, the chain and shapes alone, so all ranks
compute the same plan without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from muonfx.core import Transform
from muonfx.core.checks import positive_int
from muonfx.core.patterns import warn_of_unmatched
from muonfx.core.transform import patterns_in, require_transform, stacked
from muonfx.core.value import without_stand_ins
from muonfx.internal.arguments import plain_arguments
from muonfx.internal.display import Report, Table
from muonfx.placement.buckets import split_into_buckets
from muonfx.sharding.plan.balance import Item, assign
from muonfx.sharding.plan.bucket import Bucket
from muonfx.sharding.plan.cost import CostOf, Run, cost_of_run, runs_of
from muonfx.sharding.plan.matrix_shards import (
    LocalTransfers,
    MatrixShard,
    matrices_of,
    shards_of_parameter,
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
        # On a CPU, the ranks are processes of one host that exchange by gloo.
        if device == "cuda":
            return cls(4e14, 5e10, latency=5e-5, overhead=1e-5)
        flops = 6e11 if compute == torch.bfloat16 else 1e11
        return cls(flops, 7e8, latency=3.5e-4, overhead=5e-5)

    def computing(self, cost: float, matrices: int = 1) -> float:
        """Estimate the seconds to compute ``matrices`` matrices that need ``cost`` floating-point operations in all."""
        return cost / self.flops + matrices * self.overhead

    def sending(self, nbytes: float, exchanges: int = 1) -> float:
        """Estimate the seconds in which one rank sends ``nbytes`` bytes in this number of exchanges."""
        return nbytes / self.bandwidth + exchanges * self.latency


Replicas = Literal["auto", "split", "everyone"]
"""Which ranks orthogonalize a matrix that all ranks hold; see the argument ``replicas`` of `sharded`."""


class Settings(NamedTuple):
    """The arguments ``replicas`` and ``bucket_bytes`` of `sharded`, which decide where matrices are computed."""

    replicas: Replicas = "auto"
    """Who computes a matrix that all ranks hold: "split" is one rank, "everyone" every rank, "auto" the faster way."""
    bucket_bytes: int = 1 << 28
    """The approximate memory for one exchange of matrices, message buffers included; a larger matrix is sent alone."""


class WireDtypes(NamedTuple):
    """The dtypes of the messages for matrices of one dtype. Only rounding in the transforms makes them narrower."""

    updates: torch.dtype
    """The dtype of messages to the ranks that compute the matrices."""
    results: torch.dtype
    """The dtype of messages with the results."""


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
    rank: int = field(default=0, repr=False, compare=False)
    _local_buckets: dict[frozenset[str], list[Bucket]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The last result of `local_buckets`, by the names of the parameters whose update was None. It has one entry."""
    _wire_dtypes: dict[torch.dtype, WireDtypes] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The results of `wire_dtypes`, by the dtype of the matrices."""

    def local_buckets(self, updates: Mapping[str, Any]) -> list[Bucket]:
        """Return the buckets of one step: the sets of matrices that are sent together, with the transfers of this rank.

        `updates` has this rank's updates by parameter name. The matrices of an update that is None are left out. There
        is at least one bucket, perhaps empty, because the transforms run in each step.
        """
        # Equal on all ranks.
        without_update = frozenset([name for name, update in updates.items() if update is None])
        # Most steps have the same gradients as the last one, and then its buckets.
        is_as_in_last_step = without_update in self._local_buckets
        if not is_as_in_last_step:
            self._local_buckets.clear()
            self._local_buckets[without_update] = self._buckets_without(without_update)
        return self._local_buckets[without_update]

    def _buckets_without(self, left_out: frozenset[str]) -> list[Bucket]:
        """Return the buckets without the matrices of some parameters. There is at least one bucket, perhaps empty."""
        buckets: list[Bucket] = []
        for transfers in self._transfers_of_buckets:
            remaining = [local for local in transfers if local.shard.name not in left_out]
            if remaining:
                buckets.append(Bucket(remaining, self.size))
        # The transforms are run once in each step, also without a matrix.
        return buckets or [Bucket([], self.size)]

    @cached_property
    def _transfers_of_buckets(self) -> list[list[LocalTransfers]]:
        """For each bucket, the transfers of this rank for all of its matrix shards."""
        of_buckets: list[list[LocalTransfers]] = []
        for bucket in self.buckets:
            of_buckets.append([self.shards[index].local_transfers(self.rank) for index in bucket])
        return of_buckets

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
        # Matrices without an owner add to all ranks, all others to their owner.
        loads = [0.0] * self.size
        load_of_every_rank = 0.0
        for shard in self.shards:
            if shard.owner is None:  # every rank computes these matrices
                load_of_every_rank += shard.cost
            else:
                loads[shard.owner] += shard.cost
        return [load_of_every_rank + load for load in loads]

    @property
    def sent(self) -> list[int]:
        """A list with the bytes that each rank sends in a step: updates to computing ranks, and results back."""
        return self.sent_for(self.shards)

    def sent_for(self, shards: Sequence[MatrixShard]) -> list[int]:
        """Return a list with the bytes that each rank sends in a step for the matrices in `shards`.

        Two ranks each hold half of a matrix of 1,000 elements, which is sent in fp32. Rank 0 computes it: rank 1 sends
        2,000 bytes of the update to rank 0, which sends 2,000 bytes of the result back. The list is ``[2000, 2000]``.
        """
        sent = [0] * self.size
        for shard in shards:
            if shard.owner is None:  # every rank computes it, and nothing is sent
                continue
            wire = self.wire_dtypes(self.specs[shard.name].dtype)
            for transfer in shard.transfers:
                # The update to the owner, unless the owner holds it.
                if transfer.sender != shard.owner:
                    sent[transfer.sender] += transfer.numel * wire.updates.itemsize
                # The result to each rank that holds these elements, except the owner itself.
                receivers = [rank for rank in transfer.ranks if rank != shard.owner]
                sent[shard.owner] += len(receivers) * transfer.numel * wire.results.itemsize
        return sent

    def wire_dtypes(self, dtype: torch.dtype) -> WireDtypes:
        """Return the dtypes of the messages for matrices of a dtype. They are the same in all steps."""
        if dtype not in self._wire_dtypes:
            _, first = self.run[0]
            _, last = self.run[-1]
            self._wire_dtypes[dtype] = WireDtypes(
                self._narrowed(first, dtype), self._narrowed(last, dtype)
            )
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


def plan_run(
    run: Run, names: Sequence[str], layout: ShardTable, device: torch.device, settings: Settings
) -> RunPlan:
    """Decide which rank computes each matrix of the named parameters, for transforms that need whole matrices.

    `run` has these transforms, neighbours in a chain, as pairs such as ``("orthogonalize", orthogonalize(...))``.
    Nothing is sent: all ranks make the same plan, because it depends on shapes and on the layout alone.
    """
    specs = {name: layout.specs[name] for name in names}
    shapes = {name: spec.shape for name, spec in specs.items()}
    # 1. The parameters that are stacks of independent matrices, which different ranks may compute: ``{"w": (4, 4)}`` if
    # "w" has the shape (6, 4, 4). The transforms are replaced by equal ones that accept any number of these matrices.
    matrix_of = matrices_of(run, shapes)
    shapes_of_stacks = {name: shapes[name] for name in matrix_of}
    run_on_stacks = tuple([(name, stacked(tx, shapes_of_stacks)[0]) for name, tx in run])
    # 2. The matrices of each parameter, in the parts that one rank each computes, with their costs. For each part, the
    # ranks that may compute it, and then one of them, its owner.
    compute = _assumed_dtype(device)
    cost_of = cost_of_run(run_on_stacks, device.type, compute)
    shards = _unassigned_shards(specs, matrix_of, layout, cost_of)
    machine = Machine.of(device.type, compute)
    owner_of = _owners(shards, layout.size, machine, settings)
    for index, owner in owner_of.items():  # a shard that is not in it is computed by every rank
        shards[index] = replace(shards[index], owner=owner)
    # 3. The parts that are sent together (buckets).
    limit = max(1, settings.bucket_bytes // BUFFERS_PER_BUCKET)
    buckets = _buckets(shards, specs, limit)
    return RunPlan(
        run=run_on_stacks,
        stacks=tuple(matrix_of),
        size=layout.size,
        shards=tuple(shards),
        buckets=tuple(buckets),
        specs=specs,
        device=device,
        rank=layout.rank,
    )


def _assumed_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which plans assume that matrix products are computed: bf16 on CUDA, else fp32.

    The dtype "auto" of a transform depends on the CPU, and ranks with different CPUs must make the same plan.
    """
    if device.type == "cuda":
        return torch.bfloat16
    return torch.float32


def _unassigned_shards(
    specs: Mapping[str, Spec],
    matrix_of: Mapping[str, tuple[int, int]],
    layout: ShardTable,
    cost_of: CostOf,
) -> list[MatrixShard]:
    """Divide all parameters into the parts that one rank each will compute, with their costs and candidate ranks.

    `matrix_of` has (rows, columns) for each parameter that is a stack of matrices. Its parts are some matrices of the
    stack. Any other parameter is one part.
    """
    shards: list[MatrixShard] = []
    for name, spec in specs.items():
        for shard in shards_of_parameter(matrix_of.get(name), name, layout.cuts[name]):
            cost = cost_of(name, shard.shape, spec.dtype)
            nbytes = shard.numel * spec.dtype.itemsize
            shards.append(replace(shard, cost=cost, nbytes=nbytes))
    return with_ranks_of_their_own(shards, layout.size)


def _owners(
    shards: Sequence[MatrixShard], size: int, machine: Machine, settings: Settings
) -> dict[int, int]:
    """Choose the rank that computes each matrix shard (some whole matrices). Return it by the index of the shard.

    A shard that all ranks hold is computed by every rank, and is not in the returned dict. Or it is *split*: one rank
    computes it and sends the result to the others, for example ``{0: 1}`` if rank 1 computes shard 0. Any other shard
    is computed by one rank.

    Whether it is faster to split depends on the number of ranks and on their load. So a few choices are tried, and the
    one that takes the fewest seconds in a step is returned.
    """
    assignments: list[dict[int, int]] = []
    for split in _sets_to_split(shards, machine, settings.replicas):
        items: dict[int, Item] = {}  # the shards that one rank will compute, by index
        for index, shard in enumerate(shards):
            if index in split or not shard.is_on_all_ranks:
                items[index] = Item(shard.cost, shard.numel, shard.candidates)
        # `assign` balances the costs: it returns one of its candidates for each item.
        owners = assign(list(items.values()), size)
        assignments.append(dict(zip(items, owners, strict=True)))

    def seconds_of(owner_of: dict[int, int]) -> float:
        return _seconds_of_step(shards, owner_of, size, machine, settings)

    # `min` returns the first of equal times, so that splitting less is preferred.
    return min(assignments, key=seconds_of)


def _sets_to_split(
    shards: Sequence[MatrixShard], machine: Machine, replicas: Replicas
) -> list[set[int]]:
    """Return the choices that `_owners` compares. Each is a set of shards that one rank computes for all, by index.

    Only shards that all ranks hold can be computed by one rank for all, or by every rank for itself. With `replicas`
    "everyone", every rank computes all of them, and with "split", one rank computes each. With "auto", there are three
    choices: none, those that take longer to compute than to send, and all. If shard 2 of three takes longer, the result
    is ``[set(), {2}, {0, 1, 2}]``.
    """
    none: set[int] = set()
    all_replicated = {index for index, shard in enumerate(shards) if shard.is_on_all_ranks}
    if replicas == "everyone":
        return [none]
    if replicas == "split":
        return [all_replicated]
    # Their choice need not be the best, since to split a single matrix saves no time.
    slower_to_compute: set[int] = set()
    for index in all_replicated:
        seconds_to_send = shards[index].nbytes / machine.bandwidth
        if _seconds_to_compute(shards[index], machine) > seconds_to_send:
            slower_to_compute.add(index)
    return [none, slower_to_compute, all_replicated]


def _seconds_to_compute(shard: MatrixShard, machine: Machine) -> float:
    number_of_matrices = prod(shard.shape[:-2])
    return machine.computing(shard.cost, number_of_matrices)


def _seconds_of_step(
    shards: Sequence[MatrixShard],
    owner_of: Mapping[int, int],
    size: int,
    machine: Machine,
    settings: Settings,
) -> float:
    """Estimate the seconds to compute all shards, and to send the results of those that are split.

    If rank 0 owns shards of 2 and 3 seconds, rank 1 one of 4, and every rank computes one of 1, they are computed in
    5 + 1 seconds. If rank 0 sends 300 bytes of results, and rank 1 sends 150 at the same time, the 300 bytes count.
    Transfers of shards that not all ranks hold are not counted: they are equal for all choices.
    """
    # 1. The load of each rank.
    seconds_of_every_rank = 0.0
    seconds_of_rank = [0.0] * size
    sent_by_rank = [0] * size
    nbytes_of_results = 0
    for index, shard in enumerate(shards):
        seconds = _seconds_to_compute(shard, machine)
        owner = owner_of.get(index)
        if owner is None:
            seconds_of_every_rank += seconds
            continue
        seconds_of_rank[owner] += seconds
        if shard.is_on_all_ranks:  # it is split: the owner sends the result to all other ranks
            sent_by_rank[owner] += shard.nbytes * (size - 1)
            nbytes_of_results += shard.nbytes
    seconds_to_compute = max(seconds_of_rank) + seconds_of_every_rank
    if not nbytes_of_results:
        return seconds_to_compute
    # 2. The number of exchanges, each of which has a latency. In one exchange, each owner sends the results of matrices
    # of at most ``bucket_bytes / BUFFERS_PER_BUCKET`` bytes, because `bucket_bytes` is for the buffers too.
    exchanges = 1 + nbytes_of_results * BUFFERS_PER_BUCKET // (size * settings.bucket_bytes)
    return seconds_to_compute + machine.sending(max(sent_by_rank), exchanges)


def _buckets(
    shards: Sequence[MatrixShard], specs: Mapping[str, Spec], limit: int
) -> list[tuple[int, ...]]:
    """Return groups of indices of `shards` to send together, with at most `limit` bytes for each computing rank.

    The groups ``[(0, 2), (1,)]`` send shards 0 and 2 first, and then shard 1. The shards of a group have one dtype.
    They are sorted by shape, so that a rank can compute equal shapes in one batch.
    """

    def short_and_long_side(index: int) -> list[int]:
        return sorted(shards[index].shape[-2:])

    by_shape = sorted(range(len(shards)), key=short_and_long_side)
    dtypes = [specs[shard.name].dtype for shard in shards]
    buckets: list[tuple[int, ...]] = []
    for dtype in dict.fromkeys(dtypes):  # each once, in the order of the shards
        shards_of_dtype = {index: shards[index] for index in by_shape if dtypes[index] == dtype}
        buckets += _buckets_of_dtype(shards_of_dtype, limit)
    return buckets


def _buckets_of_dtype(shards: Mapping[int, MatrixShard], limit: int) -> list[tuple[int, ...]]:
    """Return groups of matrix shards of one dtype, by index, with at most `limit` bytes for each computing rank.

    If rank 0 computes shards 0 and 2 of 60 bytes each, and rank 1 computes shard 1 of 60 bytes, the groups for a limit
    of 100 are ``[(0, 1), (2,)]``: both ranks compute a shard of the first group at the same time.
    """
    # For each owner, from the index of a shard to its bytes.
    nbytes_on: dict[int | None, dict[int, int]] = {}
    for index, shard in shards.items():
        nbytes_on.setdefault(shard.owner, {})[index] = shard.nbytes
    # Shards that every rank computes have their own buckets: in a batch with others the last bit could differ.
    nbytes_on_every_rank = nbytes_on.pop(None, {})
    buckets_of_every_rank = split_into_buckets(nbytes_on_every_rank, limit)
    buckets_of_owners = [split_into_buckets(nbytes, limit) for nbytes in nbytes_on.values()]
    return [*map(tuple, buckets_of_every_rank), *_one_of_each_owner(buckets_of_owners)]


def _one_of_each_owner(buckets_of_owners: Sequence[list[list[int]]]) -> list[tuple[int, ...]]:
    """Join the first buckets of all owners to one bucket, then the second ones, and so on.

    All owners then compute at the same time, each its part of the joined bucket. Here the first owner has two buckets,
    and the second has one:

    >>> _one_of_each_owner([[[0, 2], [4]], [[1, 3]]])
    [(0, 1, 2, 3), (4,)]
    """
    joined: list[tuple[int, ...]] = []
    # The k-th bucket of each owner; an owner with fewer buckets has an empty one.
    for buckets in zip_longest(*buckets_of_owners, fillvalue=[]):
        indices = itertools.chain.from_iterable(buckets)
        joined.append(tuple(sorted(indices)))
    return joined


@dataclass(frozen=True, repr=False)
class Plan:
    """Which rank computes each matrix of a transform, and how many bytes are sent. It prints as a table.

    Attributes:
        runs: a list of partial plans, one for each sequence of neighbouring transforms that need whole matrices.
        size: the number of ranks.

    >>> import muonfx as mfx
    >>> layout = mfx.sharding.zero({"w": torch.zeros(64, 64)}, 2, partition="flat")
    >>> plan = plan_for(
    ...     mfx.muon(2e-3, orthogonalize=mfx.orthogonalize(dtype=torch.float32)), layout
    ... )
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

    @plain_arguments
    def explain(self, depth: int | None = None) -> Report:
        """Return two tables to print: a row per matrix with the rank that computes it and why, and a row per rank.

        Args:
            depth: 0 leaves out the rows of matrices, of which large models have thousands. None: all rows.
        """
        tables_of_runs: list[Table] = []
        if depth != 0:
            tables_of_runs = list(map(_table_of_run, self.runs))
        rows: list[tuple[str, ...]] = []
        for rank, (flops, sent) in enumerate(zip(self.flops, self.sent, strict=True)):
            gflop = f"{flops / 1e9:.4g}"
            kib_sent = f"{sent / 1024:.4g}"
            rows.append((str(rank), gflop, kib_sent))
        table_of_ranks = Table(("rank", "GFLOP", "KiB sent"), rows, right=(0, 1, 2))
        balance = f"balance: the busiest rank computes {self.balance:.3f} times the mean"
        return Report((*tables_of_runs, table_of_ranks, balance))

    def __repr__(self) -> str:
        return f"<plan of {len(self.owners())} parameters on {self.size} ranks, balance {self.balance:.3f}>"

    def __str__(self) -> str:
        return str(self.explain())

    def _repr_html_(self) -> str:
        return self.explain().to_html()


def _sums(lists: Sequence[list[Any]]) -> list[Any]:
    """Return the elementwise sum of lists of numbers."""
    return [sum(numbers) for numbers in zip(*lists, strict=True)]


def _table_of_run(run: RunPlan) -> Table:
    """Return a table with a row for each matrix shard (some whole matrices that one rank computes).

    A row is, for example, "w, 64 x 64, 0, local, 0.007905, 0, the owner alone holds it": the parameter, shape and
    owner, how the matrices reach it, the cost, the KiB sent, and the reason.
    """
    rows: list[tuple[str, ...]] = []
    for shard in run.shards:
        shape = " x ".join(map(str, shard.shape))
        owner = "all" if shard.owner is None else str(shard.owner)
        gflop = f"{shard.cost / 1e9:.4g}"
        sent = sum(run.sent_for([shard]))
        kib_sent = f"{sent / 1024:.4g}"
        rows.append((shard.name, shape, owner, shard.route, gflop, kib_sent, shard.reason))
    columns = ("parameter", "matrices", "owner", "route", "GFLOP", "KiB sent", "why")
    # The title is, for example, "run of orthogonalize in 2 buckets" (sets of matrices that are sent together).
    names = [name for name, _ in run.run]
    buckets = "bucket" if len(run.buckets) == 1 else "buckets"
    title = f"run of {', '.join(names)} in {len(run.buckets)} {buckets}"
    return Table(columns, rows, right=(2, 4, 5), title=title)


@plain_arguments
def plan_for(
    tx: Transform,
    layout: ShardTable,
    *,
    device: torch.device | str = "cpu",
    replicas: Replicas = "auto",
    bucket_bytes: int = 1 << 28,
) -> Plan:
    """Return which rank will compute which matrix under `sharded`. Only shapes are needed, no communication.

    Args:
        tx: the transform, sharded or not.
        layout: the layout of the parameters, with or without processes.
        device: the type of device of the training run. The dtype "auto" counts as bf16 on CUDA, else as fp32.
        replicas: as in `sharded`.
        bucket_bytes: as in `sharded`.

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
    positive_int("bucket_bytes", bucket_bytes)
    settings = Settings(replicas, bucket_bytes)
    meta = layout.meta()
    warn_of_unmatched(patterns_in(tx), meta)
    # A run is a sequence of neighbouring transforms that need whole matrices. Each run has a plan of its own.
    runs = runs_of(without_stand_ins(tx), meta)
    plans = [plan_run(run, names, layout, torch.device(device), settings) for run, names in runs]
    return Plan(tuple(plans), layout.size)
