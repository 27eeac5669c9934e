"""Overhead of a repeated step, without Newton-Schulz and collectives, compared with a step of ``torch.optim.AdamW``.

The model has many small leaves, so that Python takes most of the time. The time within `muonfx.polar` and within
collectives is subtracted from each step. Each round runs every candidate once, on equal leaves. A candidate "new rate"
gets another learning rate at every step. A second part compares the routes for replicated matrices.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import muonfx as mfx
from benchmarks import world
from benchmarks.measure import summary
from muonfx.polar.many import Orthogonalizer
from muonfx.sharding.communication import messages

RATE = "learning_rate"

Params = dict[str, Tensor]


class Size(NamedTuple):
    """Size of the model, which has 13 leaves per block; six of them are square matrices."""

    blocks: int = 23
    width: int = 32

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        sides = (*[(self.width, self.width)] * 6, *[(self.width,)] * 7)
        return {
            f"{block:02}.{place:02}": shape
            for block in range(self.blocks)
            for place, shape in enumerate(sides)
        }


class Meter:
    """Seconds that this process spends in Newton-Schulz and in collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call

    @contextmanager
    def active(self) -> Iterator[None]:
        """Time every call of these functions within the ``with`` block."""
        with (
            mock.patch.object(Orthogonalizer, "__call__", self.around(Orthogonalizer.__call__)),
            mock.patch.object(
                messages.Exchange, "__init__", self.around(messages.Exchange.__init__)
            ),
            mock.patch.object(messages.Exchange, "wait", self.around(messages.Exchange.wait)),
            mock.patch.object(dist, "all_reduce", self.around(dist.all_reduce)),
        ):
            yield


def candidates(kind: str, size: Size) -> dict[str, Callable[[], object]]:
    """Return AdamW, and our optimizers with a constant and with a changing learning rate, on separate parameters."""
    labels = {name: "muon" if len(shape) == 2 else "adamw" for name, shape in size.shapes.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = mfx.muon_with_adamw(
        0.02, labels=labels, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
    )

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return (
            torch.randn(shape)
            if kind == "replicated"
            else distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        )

    def parameters() -> dict[str, torch.nn.Parameter]:
        made = {name: torch.nn.Parameter(tensor(shape)) for name, shape in size.shapes.items()}
        for param in made.values():
            param.grad = tensor(tuple(param.shape))
        return made

    def optimizer(changing: bool) -> Callable[[], None]:
        params = parameters()
        layout = mfx.sharding.replicated(params) if kind == "replicated" else None
        made = mfx.TransformOptimizer(params, plain, layout=layout)

        def step() -> None:
            for group in made.param_groups if changing else ():
                group["lr"] *= 0.9999
            made.step()

        return step

    def function(changing: bool) -> Callable[[], None]:
        params = parameters()
        held: Any = {name: param.detach() for name, param in params.items()}
        grads = {name: param.grad for name, param in params.items()}
        layout = (mfx.sharding.replicated if kind == "replicated" else mfx.sharding.from_dtensors)(
            held
        )
        tx = mfx.sharding.sharded(plain, layout)
        state = tx.init(held)
        rates = {name: value for name, value in mfx.hyperparams(tx).items() if name.endswith(RATE)}
        turn = 0

        def step() -> None:
            nonlocal state, turn
            turn += changing
            now = (
                mfx.with_hyperparams(tx, {n: v * 0.9999**turn for n, v in rates.items()})
                if changing
                else tx
            )
            updates, state = now.update(grads, state, held, donate=True)
            local = [
                [getattr(leaf, "_local_tensor", leaf) for leaf in tree.values()]
                for tree in (held, updates)
            ]
            torch._foreach_add_(*local)

        return step

    return {
        "torch AdamW, foreach": torch.optim.AdamW(list(parameters().values()), foreach=True).step,
        "optimizer": optimizer(changing=False),
        "optimizer, new rate": optimizer(changing=True),
        "function": function(changing=False),
        "function, new rate": function(changing=True),
        "torch AdamW, foreach, again": torch.optim.AdamW(
            list(parameters().values()), foreach=True
        ).step,
    }


def measure(kind: str, size: Size, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one kind of layout; a collective."""
    torch.manual_seed(0)
    meter = Meter()
    calls = candidates(kind, size)
    times: dict[str, list[float]] = {name: [] for name in calls}
    rest: dict[str, list[float]] = {name: [] for name in calls}
    with meter.active():
        for turn in range(rounds + 3):
            for name, call in calls.items():
                dist.barrier()
                meter.seconds, start = 0.0, time.perf_counter()
                call()
                took = time.perf_counter() - start
                if turn >= 3:
                    times[name].append(took)
                    rest[name].append(took - meter.seconds)
    first = next(iter(calls))
    about = {
        "case": kind,
        "processes": dist.get_world_size(),
        "leaves": len(size.shapes),
        "rounds": rounds,
    }
    return [
        {
            **about,
            "candidate": name,
            "milliseconds": 1e3 * statistics.median(times[name]),
            "beyond": 1e3 * statistics.median(rest[name]),
            "least_beyond": 1e3 * min(rest[name]),
            "over_adamw": statistics.median(
                a / b for a, b in zip(rest[name], times[first], strict=True)
            ),
            "least_over_adamw": min(rest[name]) / min(times[first]),
        }
        for name in calls
    ]


def replica_routes(
    width: int, blocks: int, dtype: str, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Compare ``replicas="auto"`` with "everyone" and "split" under replicated parameters; a collective."""
    shapes = {
        f"{b}.{i}": (width, width * (1 + 3 * (i == 5))) for b in range(blocks) for i in range(6)
    }
    plain = mfx.muon(0.02, orthogonalize=mfx.orthogonalize(dtype=getattr(torch, dtype)))
    calls: dict[str, Callable[[], object]] = {}
    routes: dict[str, dict[str, int]] = {}
    for replicas in ("everyone", "split", "auto"):
        params = {name: torch.ones(shape) for name, shape in shapes.items()}
        torch.manual_seed(0)  # equal gradients on all ranks, as data-parallel training reduces them
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        layout = mfx.sharding.replicated(params)
        tx = mfx.sharding.sharded(plain, layout, replicas=replicas)
        held = {"state": tx.init(params)}

        def step(tx: Any = tx, held: Any = held, grads: Any = grads, params: Any = params) -> None:
            _, held["state"] = tx.update(grads, held["state"], params)

        calls[replicas] = step
        (run,) = mfx.sharding.plan_for(plain, layout, replicas=replicas).runs
        taken = [shard.route for shard in run.shards]
        routes[replicas] = {route: taken.count(route) for route in dict.fromkeys(taken)}
    found = summary(world.interleaved(calls, rounds=rounds, seconds=seconds), "everyone")
    about = {
        "case": f"replicas, {blocks} blocks of width {width}, {dtype}",
        "processes": dist.get_world_size(),
    }
    return [{**about, "candidate": name, "routes": routes[name], **found[name]} for name in calls]


def speed(
    rounds: int,
    *,
    size: Size = Size(),  # noqa: B008  immutable
    models: tuple[tuple[int, int, str], ...] = (
        (32, 12, "float32"),
        (128, 4, "float32"),
        (512, 1, "float32"),
        (32, 12, "bfloat16"),
        (512, 2, "bfloat16"),
    ),
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Measure steps of small leaves in one process and on two ranks, then the routes for replicated matrices."""
    rows = [
        row
        for kind, processes in (("replicated", 1), ("replicated", 2), ("FSDP2", 2))
        for row in world.run(processes, measure, kind, size, rounds)
    ]
    return rows + [
        row for model in models for row in world.run(2, replica_routes, *model, rounds, seconds)
    ]
