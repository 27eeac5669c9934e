"""Several processes on this machine that measure together: gloo, one thread each, one run.

All candidates live in the same processes and take turns within each round. They start together, and a round's time is
that of the slowest rank. What a candidate sends is counted in an extra call at the dispatcher, where every collective
passes, whoever calls it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import LEAST


def run(processes: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on every rank of a new world, and return what rank 0 returned, by way of JSON.

    Args:
        processes: how many.
        function: one that can be pickled.
        *arguments: for it; these can be, too.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others are ended.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes inherit it, and read it when they start
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_serve, (processes, folder, function, arguments), processes)
            return json.loads((Path(folder) / "result").read_text())
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


def _serve(rank: int, processes: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    result = function(*arguments)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2, seconds: float = math.inf
) -> dict[str, list[float]]:
    """`benchmarks.measure.interleaved` over ranks: every rank calls it, and the slowest one's time counts.

    Whether time is up is rank 0's to say.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    began = time.perf_counter()
    for turn in range(warmup + rounds):
        up = torch.tensor(float(turn >= warmup + LEAST and time.perf_counter() - began > seconds))
        dist.broadcast(up, 0)
        if up:
            break
        for name, call in candidates.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------------- bytes


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank must send for the collectives called within, and how many those are.

    What a rank must send, for `S` bytes on each of `P` ranks: of an all_reduce 2S(P-1)/P, of a reduce_scatter or an
    all_gather of `S` bytes in all S(P-1)/P, of an all_to_all what goes to others, of a broadcast or a scatter what the
    others get, from the root; of a reduce or a gather S from each that is not the root. A backend may send more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            if name not in SILENT:
                self.bytes += _must_send(name, args)
                self.calls += 1
        return func(*args, **(kwargs or {}))


SILENT = ("barrier", "monitored_barrier", "recv", "recv_any_source", "wait_tensor", "wrap_tensor_autograd")
"""Nothing is sent for these, or nothing worth counting."""


def _must_send(name: str, args: Sequence[Any]) -> float:
    """Bytes from this rank for a collective, by the name of its operator and the operator's arguments."""
    if name == "all_gather_into_tensor":  # the functional one: (input, ranks, group)
        return _nbytes(args[0]) * (args[1] - 1)
    group = next(_group(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _group(arg) is not None)
    size, rank = group.size(), group.rank()
    others = (size - 1) / size
    if name == "alltoall_base":  # (output, input, group, output splits, input splits)
        sent, splits = args[1], args[4]
        if not splits:
            return _nbytes(sent) * others
        rows = sum(splits)
        return _nbytes(sent) * (rows - splits[rank]) / rows if rows else 0.0
    if name == "alltoall":  # (outputs, inputs)
        return _nbytes([one for to, one in enumerate(args[1]) if to != rank])
    if name in ("allreduce", "allreduce_coalesced"):
        return 2 * _nbytes(args[0]) * others
    if name in ("allgather_base", "allgather_into_tensor_coalesced", "allgather"):  # (outputs, inputs)
        return _nbytes(args[1]) * (size - 1)
    if name in ("reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter"):  # (outputs, inputs)
        return _nbytes(args[1]) * others
    if name == "broadcast":  # (tensors, group, root)
        return _nbytes(args[0]) * (size - 1) if rank == args[2] else 0.0
    if name == "reduce":  # (tensors, group, op, root)
        return _nbytes(args[0]) if rank != args[3] else 0.0
    if name == "scatter":  # (outputs, inputs, group, root)
        return _nbytes(args[0]) * (size - 1) if rank == args[3] else 0.0
    if name == "send":
        return _nbytes(args[0])
    raise NotImplementedError(f"{name}: found a collective whose bytes nobody has counted yet; say in _must_send how")


def _nbytes(value: Any) -> float:
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


def _group(value: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # another object, such as the kind of reduction
        return None
