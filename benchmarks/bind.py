"""Time and memory of binding a sharded optimizer to a large model on one of many ranks, before the first step.

One process simulates one rank of thousands. It uses torch's fake process group, whose collectives return at once. The
parameters are meta tensors. The time includes the layout, the state of `muonfx.sharding.sharded` with the plan of its
matrices, and the messages of this rank. It does not include communication. Each case runs in a new process. Its peak
resident memory is reported with that of a process that only imports torch and muonfx and creates the parameters.

Run ``python -m benchmarks bind``, or one case with
``python -m benchmarks.bind '{"layout": "from_dtensors", "mesh": [512, 8]}'``.
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import muonfx as mfx
from benchmarks.simulator.models import Kind, model
from muonfx.sharding import transform as sharded_transform
from muonfx.sharding.shards.cut import MeshCoordinates, OnMesh

CASES: tuple[dict[str, Any], ...] = (
    {"layout": "from_dtensors", "mesh": [64, 8]},
    {"layout": "from_dtensors", "mesh": [512, 8]},
    {"layout": "from_dtensors", "mesh": [500, 8]},
    {"layout": "from_dtensors", "mesh": [512, 8], "norms": "own mesh"},
    {"layout": "from_dtensors", "mesh": [4096]},
    {"layout": "from_dtensors", "mesh": [8, 512], "outer": "replicate"},
    {"layout": "zero, whole", "mesh": [4096]},
    {"layout": "zero, flat", "mesh": [4096]},
    {"layout": "flat", "mesh": [4096]},
    {"layout": "replicated", "mesh": [4096]},
)
"""Meshes are (FSDP2), (FSDP2, tensor parallel), or (replicas, FSDP2); 500 x 8 shards no parameter evenly."""

Shape = tuple[int, ...]


def parameters(name: str) -> Iterator[tuple[str, Shape, Kind]]:
    """Yield the name, shape and kind of each parameter of a model."""
    for kind in model(name).kinds:
        for number in range(kind.repeats):
            yield f"{kind.name}.{number}", kind.shape, kind


@functools.cache
def local_shape(sides: Shape, at: Shape, placements: tuple[Any, ...], shape: Shape) -> Shape:
    """Return the shape of the shard at some coordinates of a mesh. torch's function would take most of the time."""
    return OnMesh(shape, MeshCoordinates(sides, [at]), placements)[0].shape


def tensor(mesh: DeviceMesh, placements: Sequence[Any], shape: Shape) -> Any:
    """Return a meta DTensor."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    spec = DTensorSpec(
        mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, torch.bfloat16)
    )
    own = local_shape(
        tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), tuple(placements), shape
    )
    local = torch.empty(own, dtype=torch.bfloat16, device="meta")
    kind: Any = DTensor
    return kind(local, spec, requires_grad=False)


def dtensors(case: dict[str, Any]) -> dict[str, Any]:
    """Return a model under FSDP2, with tensor parallelism (columns of every second matrix) or replicas."""
    sides = tuple(case["mesh"])
    mesh = init_device_mesh("cpu", sides, mesh_dim_names=("outer", "inner")[: len(sides)])
    norms_on = mesh
    if len(sides) == 1:
        by_rows = by_columns = others = [Shard(0)]
    elif case.get("outer") == "replicate":
        by_rows = by_columns = others = [Replicate(), Shard(0)]
    else:
        by_rows = [_StridedShard(0, split_factor=sides[1]), Shard(0)]
        by_columns, others = [Shard(0), Shard(1)], [Shard(0), Replicate()]
    if case.get("norms") == "own mesh":
        norms_on, others = mesh["outer"], [Shard(0)]
    found: dict[str, Any] = {}
    for place, (name, shape, _) in enumerate(parameters(case["model"])):
        if len(shape) == 1:
            found[name] = tensor(norms_on, others, shape)
        else:
            found[name] = tensor(mesh, by_columns if place % 2 else by_rows, shape)
    return found


def layout_of(case: dict[str, Any], params: dict[str, Any]) -> Any:
    """Return the layout of a case."""
    kind, size = case["layout"], prod(case["mesh"])
    if kind == "from_dtensors":
        return mfx.sharding.from_dtensors(params)
    if kind == "replicated":
        return mfx.sharding.replicated(params)
    if kind == "flat":
        total = sum(leaf.numel() for leaf in params.values())
        return mfx.sharding.flat(
            params, order=list(params), cuts=[total * rank // size for rank in range(size + 1)]
        )
    return mfx.sharding.zero(params, partition=kind.removeprefix("zero, "))


def megabytes() -> float:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def bind(case: dict[str, Any]) -> dict[str, Any]:
    """Bind one case in this process, which must not have a process group."""
    # Rank 0 owns one of the largest matrices, so it has the most to prepare.
    size, rank = prod(case["mesh"]), 0
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    if case["layout"] == "from_dtensors":
        params = dtensors(case)
    else:
        params = {
            n: torch.empty(s, dtype=torch.bfloat16, device="meta")
            for n, s, _ in parameters(case["model"])
        }
    labels = {name: "muon" if kind.muon else "adamw" for name, _, kind in parameters(case["model"])}
    before = megabytes()
    began = time.perf_counter()
    layout = layout_of(case, params)
    laid_out = time.perf_counter()
    tx = mfx.sharding.sharded(
        mfx.muon_with_adamw(
            0.02, labels=labels, orthogonalize=mfx.orthogonalize(dtype=torch.bfloat16)
        ),
        layout,
    )
    local = {
        name: leaf if case["layout"] == "from_dtensors" else layout.position(name).blank(leaf)
        for name, leaf in params.items()
    }
    tx.init(local)
    layout.digest  # noqa: B018  ranks compare it when they bind
    made = time.perf_counter()
    shards = 0
    binding, _, _ = sharded_transform.binding_of(tx, local)
    for plan in binding.plans.values():
        for shard in plan.shards:
            shard.local_transfers(rank)
            shards += shard.owner == rank
    prepared = time.perf_counter()
    dist.destroy_process_group()
    return {
        "parameters": len(params),
        "ranks": size,
        "owned": shards,
        "layout_seconds": laid_out - began,
        "init_seconds": made - laid_out,
        "moves_seconds": prepared - made,
        "seconds": prepared - began,
        "megabytes": megabytes(),
        "megabytes_before": before,
    }


def speed(
    rounds: int = 3, *, cases: Sequence[dict[str, Any]] = CASES, name: str = "llama-70b"
) -> list[dict[str, Any]]:
    """Return a row for each case, from the fastest of several processes."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        given = {"model": name, **case}
        command = [sys.executable, "-m", "benchmarks.bind", json.dumps(given)]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(rounds)
        ]
        rows.append({**given, "rounds": rounds, **min(runs, key=lambda run: run["seconds"])})
    return rows


if __name__ == "__main__":
    print(json.dumps(bind({"model": "llama-70b", **json.loads(sys.argv[1])})))
