"""Measurements on several processes of this machine, with gloo and one thread per process.

All candidates run in the same processes, and each round runs every candidate once. All ranks start a candidate
together; its time is that of the slowest rank. The bytes that it sends are counted in a separate call, at the
dispatcher, which sees every collective.
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

from benchmarks.measure import MIN_ROUNDS


def run(processes: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on every rank of a new process group, and return the result of rank 0 through JSON.

    Args:
        processes: number of processes.
        function: a function that can be pickled.
        *arguments: its arguments, which can be pickled.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised an error; the other ranks are stopped.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes, which read it when they start
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_serve, (processes, folder, function, arguments), processes)
            return json.loads((Path(folder) / "result").read_text())
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


def _serve(
    rank: int, processes: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes
    )
    result = function(*arguments)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Run `benchmarks.measure.interleaved` over all ranks, with the time of the slowest rank; a collective.

    Rank 0 decides when the time limit is reached.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    began = time.perf_counter()
    for turn in range(warmup + rounds):
        up = torch.tensor(
            float(turn >= warmup + MIN_ROUNDS and time.perf_counter() - began > seconds)
        )
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
    """Context manager that counts collectives and the minimum bytes that this rank must send for them.

    A backend may send more. The minimum for `P` ranks and `S` bytes is:

    - all_reduce: 2S(P-1)/P
    - reduce_scatter, and all_gather with `S` bytes in total: S(P-1)/P
    - all_to_all: all bytes for other ranks
    - broadcast and scatter: all bytes that other ranks receive, sent by the root
    - reduce and gather: S from each rank but the root
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


SILENT = (
    "barrier",
    "monitored_barrier",
    "recv",
    "recv_any_source",
    "wait_tensor",
    "wrap_tensor_autograd",
)
"""Operators that send no bytes, or too few to count."""


def _must_send(name: str, args: Sequence[Any]) -> float:
    """Return the bytes that this rank sends for a collective, from the name and the arguments of its operator."""
    if name == "all_gather_into_tensor":  # the functional one: (input, ranks, group)
        return _nbytes(args[0]) * (args[1] - 1)
    group = next(
        _group(arg)
        for arg in args
        if isinstance(arg, torch.ScriptObject) and _group(arg) is not None
    )
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
    # (outputs, inputs)
    if name in ("allgather_base", "allgather_into_tensor_coalesced", "allgather"):
        return _nbytes(args[1]) * (size - 1)
    # (outputs, inputs)
    if name in ("reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter"):
        return _nbytes(args[1]) * others
    if name == "broadcast":  # (tensors, group, root)
        return _nbytes(args[0]) * (size - 1) if rank == args[2] else 0.0
    if name == "reduce":  # (tensors, group, op, root)
        return _nbytes(args[0]) if rank != args[3] else 0.0
    if name == "scatter":  # (outputs, inputs, group, root)
        return _nbytes(args[0]) * (size - 1) if rank == args[3] else 0.0
    if name == "send":
        return _nbytes(args[0])
    raise NotImplementedError(
        f"found the collective {name}, expected one of those in _must_send: add a rule for it there"
    )


def _nbytes(value: Any) -> float:
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


def _group(value: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # not a process group, for example the reduce operation
        return None
