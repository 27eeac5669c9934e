"""Predicted and measured times of sharded Newton-Schulz on two processes.

First the inputs of the simulator are measured on this machine: the rate of Newton-Schulz by side, the fixed cost of a
matrix and of an exchange, and the bandwidth. Then steps of ``sharded(orthogonalize(), layout)`` are timed for GPT
blocks of several widths, and compared with ``python -m benchmarks.simulator`` for the same shapes. All processes work
during both measurements, since they share memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonfx as mfx
from benchmarks import world
from benchmarks.measure import summary
from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.models import Kind, Model
from benchmarks.simulator.report import Cluster, rows
from benchmarks.simulator.tally import OURS
from muonfx.polar.cost import newton_schulz_cost
from muonfx.sharding.communication import messages

Call = Callable[[], object]

SIDES = (64, 128, 256, 512, 1024)
"""Sides at which the rate is measured. The simulator interpolates in the logarithm of the side."""
SMALL, LARGE = 2**10, 2**22
"""Bytes of the two exchanges from which latency and bandwidth are computed."""
FEW, MANY = 4, 36
"""Numbers of tiny matrices in the two steps from which the fixed costs of a matrix and of a step are computed."""
BLOCKS = 2


class Case(NamedTuple):
    """A step to predict and to measure."""

    width: int
    dtype: torch.dtype
    route: str

    def __str__(self) -> str:
        return f"{self.width} wide, {str(self.dtype).removeprefix('torch.')}, {self.route}"


ROUTES = {"owner": "owner", "split": "split", "whole": "whole parameters"}
"""Routes, and the schemes of the simulator."""

CASES = (
    *(Case(512, dtype, route) for dtype in (torch.float32, torch.bfloat16) for route in ROUTES),
    Case(768, torch.bfloat16, "owner"),
    Case(128, torch.float32, "owner"),
)


def shapes(width: int) -> dict[str, tuple[int, int]]:
    """Return the matrices of some GPT blocks: four of attention and two of the MLP in each."""
    block = {
        **dict.fromkeys("qkvo", (width, width)),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    return {f"{i}.{name}": shape for i in range(BLOCKS) for name, shape in block.items()}


def weights(wanted: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return random matrices, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in wanted.items()}


# ------------------------------------------------------------------------------------------------------ the machine


def machine(dtype: torch.dtype, sides: tuple[int, ...], rounds: int, seconds: float) -> Cluster:
    """Measure the inputs of the simulator on this machine; a collective."""
    tx = mfx.orthogonalize(dtype=dtype)
    calls: dict[str, Call] = {}
    loads: dict[str, float] = {}
    for side in sides:
        for shape in ((side, side), (side, 4 * side)):
            given, name = weights({"a": shape, "b": shape}), f"{side} {shape}"
            state = tx.init(given)
            calls[name] = lambda given=given, state=state: tx.update(given, state)
            loads[name] = 2 * newton_schulz_cost(shape, dtype=dtype).load
    for number in (FEW, MANY):
        calls[f"{number} tiny"] = step(
            tx, weights({str(i): (2 + i % 4, 8) for i in range(number)}), "whole"
        )
    calls["few by owner"] = step(tx, weights({str(i): (2 + i % 4, 8) for i in range(FEW)}), "owner")
    for nbytes in (SMALL, LARGE):
        calls[f"{nbytes} bytes"] = exchange(nbytes)
    times = world.interleaved(calls, rounds=rounds, seconds=seconds)
    took = {name: statistics.median(own) for name, own in times.items()}
    small, large = took[f"{SMALL} bytes"], took[f"{LARGE} bytes"]
    bandwidth = (LARGE - SMALL) / (large - small) if large > small else math.inf
    # A step of tiny matrices consists of the agreement of all ranks and of a fixed cost for each matrix of a rank.
    few, many = FEW / dist.get_world_size(), MANY / dist.get_world_size()
    overhead = max(0.0, (took[f"{MANY} tiny"] - took[f"{FEW} tiny"]) / (many - few))
    # By the owner's route it has three exchanges: the agreement, to the owners, and back.
    latency = max(small, (took["few by owner"] - few * overhead) / 3)
    products = {name: max(took[name] - 2 * overhead, took[name] / 2) for name in loads}
    rates = [
        (
            side,
            math.sqrt(
                math.prod(
                    loads[name] / products[name] for name in loads if name.split()[0] == str(side)
                )
            ),
        )
        for side in sides
    ]
    return Cluster(tuple(rates), bandwidth, bandwidth, latency=latency, overhead=overhead)


def exchange(nbytes: int) -> Call:
    """Return a function in which every rank sends ``nbytes`` to its neighbour."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    here, there = torch.randn(nbytes // 4), torch.empty(nbytes // 4)

    layout = mfx.sharding.replicated({})

    def call() -> None:
        outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
        incoming: list[list[Tensor]] = [[] for _ in range(ranks)]
        outgoing[(me + 1) % ranks], incoming[(me - 1) % ranks] = [here], [there]
        messages.exchange(layout, outgoing, incoming, here, "measuring an exchange")

    return call


# ------------------------------------------------------------------------------------------------------------ a step


def step(tx: mfx.Transform, whole: dict[str, Tensor], route: str) -> Call:
    """Return a function that computes one update of a sharded transform by a route."""
    if route == "owner":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        held: dict[str, Any] = {
            name: distribute_tensor(leaf, mesh, [Shard(0)]) for name, leaf in whole.items()
        }
        own = mfx.sharding.sharded(tx, mfx.sharding.from_dtensors(held))
    elif route == "split":
        held = whole
        own = mfx.sharding.sharded(tx, mfx.sharding.replicated(whole), replicas="split")
    else:
        layout = mfx.sharding.zero(whole, partition="whole", tx=tx)
        held = layout.shard(whole)
        own = mfx.sharding.sharded(tx, layout)
    state = own.init(held)
    return lambda: own.update(held, state, held)


def predicted(case: Case, machine: Cluster, ranks: int) -> float:
    """Return the seconds of a step that the simulator predicts."""
    kinds = tuple(Kind(name, shape, 1, muon=True) for name, shape in shapes(case.width).items())
    model = Model("GPT blocks", "benchmarks/planner.py", kinds)
    setting = Setting(model, Mesh(shard=ranks), "cpu", case.dtype)
    (row,) = rows(
        setting, machine, [scheme for scheme in OURS if scheme.name == ROUTES[case.route]]
    )
    return row.step


def measure(
    cases: tuple[Case, ...], sides: tuple[int, ...], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Return the rows; a collective."""
    machines = {
        dtype: machine(dtype, sides, rounds, seconds)
        for dtype in dict.fromkeys(case.dtype for case in cases)
    }
    calls = {
        str(case): step(
            mfx.orthogonalize(dtype=case.dtype), weights(shapes(case.width)), case.route
        )
        for case in cases
    }
    times = world.interleaved(calls, rounds=rounds, seconds=seconds)
    spread = summary(times, str(cases[0]))
    found: list[dict[str, Any]] = []
    for case in cases:
        on, name = machines[case.dtype], str(case)
        guess = predicted(case, on, dist.get_world_size())
        found.append(
            {
                "case": name,
                "predicted": 1e3 * guess,
                "milliseconds": spread[name]["milliseconds"],
                "predicted over measured": guess / statistics.median(times[name]),
                "machine": on._asdict(),
            }
        )
    return found


def speed(
    rounds: int,
    *,
    processes: int = 2,
    cases: tuple[Case, ...] = CASES,
    sides: tuple[int, ...] = SIDES,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return the predicted and measured milliseconds of each case, and the measured inputs of the prediction."""
    return world.run(processes, measure, cases, sides, rounds, seconds)
