"""The plan of a transform: which rank computes which matrices, how they reach that rank, and in which order.

A *run* is a sequence of neighbouring transforms of a chain that need whole matrices. A *share* is a set of whole
matrices of one parameter that one rank, its *owner*, computes: the parameter itself, or a range of a stack. A
*transfer* is the part of a share in one shard, which is sent to the owner and back. A *bucket* is a set of shares that
are sent together. A plan depends on the layout, the chain and shapes alone, so all ranks compute the same plan without
communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from muonfx.sharding.layout import Layout, require_layout
from muonfx.sharding.plan.balance import assign
from muonfx.sharding.plan.cost import Run, RunCost, runs_of
from muonfx.sharding.plan.shares import Moves, Part, Share, apart, matrices_of, on_stacks, parts_of
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
    shares: tuple[Share, ...]
    buckets: tuple[tuple[int, ...], ...]
    """Groups of indices into `shares`: the matrices of a group have one dtype and are sent together."""
    specs: dict[str, Spec] = field(repr=False)
    device: torch.device
    _wire_dtypes: dict[torch.dtype, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict, repr=False)
    rank: int = field(default=0, repr=False, compare=False)
    messages: dict[frozenset[str], Any] = field(default_factory=dict, repr=False, compare=False)
    """A cache of this rank's messages in a step, by the names of the parameters whose gradient is None."""

    @cached_property
    def moves(self) -> list[list[Moves]]:
        """The messages of this rank, as a list of lists. Each inner list has the messages that are sent together."""
        return [[self.shares[i].moves(self.rank) for i in bucket] for bucket in self.buckets]

    @cached_property
    def shares_of(self) -> dict[str, tuple[Share, ...]]:
        """A dict from each parameter's name to its shares. A share is some of its matrices, with the computing rank."""
        by_name: dict[str, tuple[Share, ...]] = {}
        for share in self.shares:
            by_name[share.name] = (*by_name.get(share.name, ()), share)
        return by_name

    @property
    def flops(self) -> list[float]:
        """A list with the load of each rank per step, in floating-point operations of dense matrix products."""
        loads = [sum(share.cost for share in self.shares if share.owner is None)] * self.size
        for share in self.shares:
            if share.owner is not None:
                loads[share.owner] += share.cost
        return loads

    @property
    def sent(self) -> list[int]:
        """A list with the bytes that each rank sends in a step: updates to computing ranks, and results back."""
        return self.sent_for(self.shares)

    def sent_for(self, shares: Sequence[Share]) -> list[int]:
        """Return a list with the bytes that each rank sends in a step for the matrices in `shares`."""
        sent = [0] * self.size
        for share in shares:
            if share.owner is None:
                continue
            there, back = (dtype.itemsize for dtype in self.wire_dtypes(self.specs[share.name].dtype))
            for transfer in share.transfers:
                taking = len(transfer.ranks) - (share.owner in transfer.ranks)  # an owner sends itself nothing
                sent[share.owner] += taking * transfer.numel * back
                if transfer.sender != share.owner:
                    sent[transfer.sender] += transfer.numel * there
        return sent

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of messages to computing ranks and back. Only rounding in the transforms narrows them."""
        if dtype not in self._wire_dtypes:
            self._wire_dtypes[dtype] = self._narrowed(0, dtype), self._narrowed(-1, dtype)
        return self._wire_dtypes[dtype]

    def _narrowed(self, place: int, dtype: torch.dtype) -> torch.dtype:
        tx = self.run[place][1]
        declared = tx.declaration.matrices.rounds_to
        rounded = dtype if declared is None else declared(tx, dtype, self.device)
        return rounded if rounded.itemsize < dtype.itemsize else dtype


# One for the matrices, two for messages of the next bucket, two for messages of the previous results, one for a result.
BUFFERS_PER_BUCKET = 6
"""The peak memory of an exchange, as a multiple of the bytes of the matrices that are sent together (a bucket)."""


def plan_run(run: Run, names: Sequence[str], layout: Layout, device: torch.device, settings: Settings) -> RunPlan:
    """Decide which rank computes each matrix of the named parameters, for transforms that need whole matrices."""
    specs = {name: layout.specs[name] for name in names}
    # All ranks must make the same plan, so a transform's dtype "auto" is not resolved by this machine's CPU here.
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = Machine.of(device.type, compute)
    matrices = matrices_of(run, {name: spec.shape for name, spec in specs.items()})
    run = on_stacks(run, {name: specs[name].shape for name in matrices})
    cost = RunCost(run, device.type, compute)
    parts = [part for name in names for part in parts_of(matrices.get(name), name, layout)]
    costs = [cost(part.name, part.shape, specs[part.name].dtype) for part in parts]
    parts = apart(parts, costs, layout.size)
    nbytes = [part.numel * specs[part.name].dtype.itemsize for part in parts]
    owners = _owners(parts, costs, nbytes, layout, machine, settings)
    shares = tuple(
        Share(p.name, p.start, p.stop, p.shape, specs[p.name].shape, owner, cost, layout.pieces[p.name])
        for p, owner, cost in zip(parts, owners, costs, strict=True)
    )
    buckets = tuple(_buckets(shares, specs, max(1, settings.bucket_bytes // BUFFERS_PER_BUCKET)))
    return RunPlan(run, tuple(matrices), layout.size, shares, buckets, specs, device, rank=layout.rank)


def _owners(
    parts: Sequence[Part],
    costs: Sequence[float],
    nbytes: Sequence[int],
    layout: Layout,
    machine: Machine,
    settings: Settings,
) -> list[int | None]:
    """Choose the rank that computes each set of matrices in `parts`; None means that every rank computes it."""
    # Parts that all ranks hold whole may be split, which costs an exchange, or computed by all. Whole assignments are
    # compared by the busiest rank, since splitting saves nothing if there are fewer matrices than ranks, for example.
    everywhere = [len(part.candidates) == layout.size > 1 and part.complete for part in parts]
    fixed = [i for i, here in enumerate(everywhere) if not here]
    free = [i for i, here in enumerate(everywhere) if here]
    each = [machine.computing(cost, prod(part.shape[:-2])) for cost, part in zip(costs, parts, strict=True)]
    ways = {
        "everyone": [[]],
        "split": [free],
        "auto": [[], [i for i in free if each[i] > nbytes[i] / machine.bandwidth], free],
    }[settings.replicas]

    def assigned(which: list[int]) -> dict[int, int]:
        sizes = [parts[i].numel for i in which]
        found = assign([costs[i] for i in which], [parts[i].candidates for i in which], layout.size, sizes)
        return dict(zip(which, found, strict=True))

    tried = [(split, assigned(sorted(fixed + split))) for split in ways]
    _, given = min(tried, key=lambda way: _seconds(each, nbytes, free, *way, layout.size, machine, settings))
    return [given.get(i) for i in range(len(parts))]


def _seconds(
    each: Sequence[float],
    nbytes: Sequence[int],
    free: Sequence[int],
    split: Sequence[int],
    owners: Mapping[int, int],
    size: int,
    machine: Machine,
    settings: Settings,
) -> float:
    """Estimate the seconds per step of the busiest rank, if `owners` (from part index to rank) says who computes.

    `each` and `nbytes` list the seconds and bytes of each part (a set of matrices). All ranks hold the parts in `free`.
    One rank computes each part in `split`. Transfers of other parts are not counted: they are equal for all choices.
    """
    loads, sent = [0.0] * size, [0] * size
    for i, owner in owners.items():
        loads[owner] += each[i]
    for i in split:
        sent[owners[i]] += nbytes[i] * (size - 1)
    by_all = sum(each[i] for i in set(free) - set(split))
    arriving = sum(sent) / size
    exchanges = 1 + sum(sent) * BUFFERS_PER_BUCKET // (max(1, size - 1) * size * max(1, settings.bucket_bytes))
    return max(loads) + by_all + (machine.sending(max(*sent, arriving), exchanges) if split else 0.0)


def _buckets(shares: Sequence[Share], specs: dict[str, Spec], limit: int) -> Iterator[tuple[int, ...]]:
    """Yield indices of `shares` to send together, with at most `limit` bytes of matrices for each computing rank."""
    places = sorted(range(len(shares)), key=lambda i: (tuple(sorted(shares[i].shape[-2:])), i))
    for dtype in dict.fromkeys(specs[share.name].dtype for share in shares):
        by_owner: dict[int | None, dict[int, int]] = {None: {}}
        for i in places:
            if specs[shares[i].name].dtype == dtype:
                by_owner.setdefault(shares[i].owner, {})[i] = shares[i].numel * dtype.itemsize
        # Shares that every rank computes have their own batches: with other matrices the last bit could differ.
        yield from map(tuple, cut_into_buckets(by_owner.pop(None), limit))
        for together in zip_longest(*(cut_into_buckets(own, limit) for own in by_owner.values()), fillvalue=()):
            yield tuple(sorted(i for own in together for i in own))


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
        return [sum(loads) for loads in zip(*(run.flops for run in self.runs), strict=True)] or [0.0] * self.size

    @property
    def sent(self) -> list[int]:
        """A list with the bytes that each rank sends per step: updates to computing ranks, and results back."""
        return [sum(sent) for sent in zip(*(run.sent for run in self.runs), strict=True)] or [0] * self.size

    @property
    def balance(self) -> float:
        """The operations of the busiest rank, divided by the mean over ranks. 1.0 is a perfect balance."""
        flops = self.flops
        return max(flops) * self.size / sum(flops) if sum(flops) else 1.0

    def owners(self) -> dict[str, list[int | None]]:
        """Return a dict from parameter name to a list of the ranks that compute its matrices. None means every rank."""
        found: dict[str, list[int | None]] = {}
        for run in self.runs:
            for share in run.shares:
                found.setdefault(share.name, []).append(share.owner)
        return found

    def explain(self) -> Report:
        """Return two tables to print: a row per matrix with the rank that computes it and why, and a row per rank."""
        titles = ("parameter", "matrices", "owner", "route", "GFLOP", "KiB sent", "why")
        parts: list[str | Table] = []
        for run in self.runs:
            rows = [
                (
                    share.name,
                    " x ".join(map(str, share.shape)),
                    "all" if share.owner is None else str(share.owner),
                    share.route,
                    f"{share.cost / 1e9:.4g}",
                    f"{sum(run.sent_for([share])) / 1024:.4g}",
                    share.reason,
                )
                for share in run.shares
            ]
            names, count = ", ".join(name for name, _ in run.run), len(run.buckets)
            title = f"run of {names} in {count} bucket{'s' * (count != 1)}"
            parts.append(Table(titles, rows, right=(2, 4, 5), title=title))
        rows = [
            (str(rank), f"{f / 1e9:.4g}", f"{b / 1024:.4g}")
            for rank, (f, b) in enumerate(zip(self.flops, self.sent, strict=True))
        ]
        parts.append(Table(("rank", "GFLOP", "KiB sent"), rows, right=(0, 1, 2)))
        return Report((*parts, f"balance: the busiest rank computes {self.balance:.3f} times the mean"))

    def __str__(self) -> str:
        return str(self.explain())

    def _repr_html_(self) -> str:
        return self.explain().to_html()


def plan_for(tx: Transform, layout: Layout, *, device: torch.device | str = "cpu", **settings: Any) -> Plan:
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
    device = torch.device(device)
    given = Settings(**settings)
    given.check()
    warn_of_unmatched(patterns_in(tx), layout.meta())
    runs = [plan_run(run, names, layout, device, given) for run, names in runs_of(strip_transparent(tx), layout.meta())]
    return Plan(tuple(runs), layout.size)
