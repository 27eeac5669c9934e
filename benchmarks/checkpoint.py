"""Time and memory of saving and loading a state, compared with plain safetensors.

Both sides have the same result. A save ends with flushed files: muonfx always flushes, and for safetensors the
benchmark does. A load returns tensors that own their memory: safetensors maps the file, so the benchmark copies.
muonfx also writes checksums, with isal if it is installed, and verifies every byte when it loads. The file cache is
warm in all loads.

A resumed run loads once, into new memory. `fresh` measures this with one process for each load, while `speed` reuses
memory of earlier rounds. Neither time includes imports or the creation of ``like``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from math import isqrt
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import muonfx as mfx
from benchmarks.measure import interleaved, summary


def make(megabytes: int, device: str = "cpu", *, small: bool = False) -> dict[str, Any]:
    """Return a state of about this size: momentum of square matrices, and two moments of vectors.

    If ``small`` is True, all matrices have 64 KiB.
    """
    side = 4096 if megabytes >= 512 else 1024
    if small:
        side = 128
    number = max(1, round(megabytes * 2**20 / (4 * side * side)))
    torch.manual_seed(0)
    matrices = {f"blocks.{i}.weight": torch.randn(side, side, device=device) for i in range(number)}
    moments: dict[str, dict[str, Tensor]] = {"mu": {}, "nu": {}}
    if not small:
        for vectors in moments.values():
            for i in range(number):
                vectors[f"blocks.{i}.bias"] = torch.randn(side, device=device)
    return {"momentum": {"trace": matrices}, "adam": moments}


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the same tensors as a flat dict, for plain safetensors."""
    return dict(zip(mfx.tree.names(state), mfx.tree.leaves(state), strict=True))


def flush(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def even(megabytes: int, leaves: int) -> dict[str, Any]:
    """Return the momentum of `leaves` square matrices of one size, about `megabytes` MiB in all."""
    side = isqrt(megabytes * 2**20 // (4 * leaves))
    torch.manual_seed(0)
    return {
        "momentum": {
            "trace": {f"blocks.{i}.weight": torch.randn(side, side) for i in range(leaves)}
        }
    }


def speed(megabytes: int, rounds: int, folder: str | None = None) -> list[dict[str, Any]]:
    """Time a save and a load; plain safetensors is timed twice, to show the noise.

    With fsync, a save of either side ends when the bytes are on the disk. Without, they are in the file cache; muonfx
    always calls fsync, so the benchmark replaces it by a function that does nothing.
    """
    rows: list[dict[str, Any]] = []
    for leaves in (100, 3000):
        rows += _speed(even(megabytes, leaves), rounds, folder)
    return rows


def _speed(state: dict[str, Any], rounds: int, folder: str | None) -> list[dict[str, Any]]:
    tensors = flat(state)
    like = mfx.checkpoint.StateSpec.of(state)
    where = Path(tempfile.mkdtemp(dir=folder))
    plain = where / "plain.safetensors"
    ours = where / "ours"

    def save_plainly(name: str) -> Callable[[], object]:
        def run() -> None:
            part = where / f"{name}.part"
            save_file(tensors, part)
            flush(part)
            os.replace(part, where / f"{name}.safetensors")

        return run

    def load_plainly() -> dict[str, Tensor]:
        return {name: leaf.clone() for name, leaf in load_file(plain).items()}

    saves = {
        "safetensors": save_plainly("plain"),
        "muonfx": lambda: mfx.checkpoint.save(ours, state),
        "safetensors again": save_plainly("again"),
    }
    loads = {
        "safetensors": load_plainly,
        "muonfx": lambda: mfx.checkpoint.load(ours, like=like),
        "safetensors again": load_plainly,
    }
    cases = [("save", saves, False), ("save without fsync", saves, True), ("load", loads, False)]
    try:
        found: list[dict[str, Any]] = []
        for what, candidates, is_unflushed in cases:
            with patch("os.fsync", lambda handle: None) if is_unflushed else nullcontext():
                times = interleaved(candidates, rounds=rounds, warmup=1)
            found.append(
                {
                    "what": what,
                    "bytes": like.nbytes,
                    "leaves": len(like),
                    **summary(times, "safetensors"),
                }
            )
        return found
    finally:
        shutil.rmtree(where)


LOAD = """
import resource, sys, time
import torch
from safetensors.torch import load_file
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
import muonfx as mfx
from benchmarks.checkpoint import make

who, where, megabytes, small = sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6] == "small"
like = make(megabytes, "meta", small=small)
plain = lambda: {name: leaf.clone() for name, leaf in load_file(where + "/plain.safetensors").items()}
load = (lambda: mfx.checkpoint.load(where + "/ours", like=like)) if who == "muonfx" else plain
start = time.perf_counter()
before = resource.getrusage(resource.RUSAGE_SELF)
state = load()
after = resource.getrusage(resource.RUSAGE_SELF)
print(time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def fresh(megabytes: int, rounds: int, folder: str | None = None) -> list[dict[str, Any]]:
    """Measure wall time and processor time of the first load of a process."""
    rows: list[dict[str, Any]] = []
    for size, small in ((megabytes, False), (megabytes // 4, False), (3 * megabytes // 16, True)):
        where = Path(tempfile.mkdtemp(dir=folder))
        state = make(size, small=small)
        spec = mfx.checkpoint.StateSpec.of(state)
        try:
            save_file(flat(state), where / "plain.safetensors")
            mfx.checkpoint.save(where / "ours", state)
            del state
            wall: dict[str, list[float]] = {
                who: [] for who in ("safetensors", "muonfx", "safetensors again")
            }
            cpu: dict[str, list[float]] = {who: [] for who in wall}
            for turn in range(rounds + 1):
                for who in wall:
                    command = [
                        sys.executable,
                        "-c",
                        LOAD,
                        str(Path(__file__).parent.parent),
                        str(torch.get_num_threads()),
                    ]
                    command += [who, str(where), str(size), "small" if small else "large"]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    if turn:  # the first turn fills the file cache
                        for times, seconds in zip((wall, cpu), done.stdout.split(), strict=True):
                            times[who].append(float(seconds))
            rows.append(
                {
                    "what": "load",
                    "bytes": spec.nbytes,
                    "leaves": len(spec),
                    **summary(wall, "safetensors"),
                }
                | {"processor": summary(cpu, "safetensors")}
            )
        finally:
            shutil.rmtree(where)
    return rows


PEAK = """
import resource, sys
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
import muonfx as mfx
from benchmarks.checkpoint import make

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak to the current value

what, megabytes, path = sys.argv[2], int(sys.argv[3]), sys.argv[4]
mfx.checkpoint.save(path + "-small", {"w": torch.zeros(4)})
mfx.checkpoint.load(path + "-small", like={"w": torch.zeros(4)})
if what == "load":
    like = make(megabytes, "meta")
    reset()
    before = status("VmRSS")
    state = mfx.checkpoint.load(path, like=like)
    print(status("VmHWM") - before - sum(leaf.nbytes for leaf in mfx.tree.leaves(state)))
else:
    state = make(megabytes)
    if what == "save transposed":
        state = mfx.tree.map(lambda leaf: leaf.t().contiguous().t() if leaf.ndim == 2 else leaf, state)
    reset()
    before = status("VmRSS")
    mfx.checkpoint.save(path, state)
    print(status("VmHWM") - before)
"""


def memory(megabytes: int, folder: str | None = None) -> list[dict[str, Any]]:
    """Measure the peak resident memory of a new process in addition to the state (Linux only)."""
    rows: list[dict[str, Any]] = []
    where = Path(tempfile.mkdtemp(dir=folder))
    state = make(megabytes)
    largest = max(leaf.nbytes for leaf in mfx.tree.leaves(state))
    total = sum(leaf.nbytes for leaf in mfx.tree.leaves(state))
    mfx.checkpoint.save(where / "state", state)
    del state
    try:
        for what in ("save", "save transposed", "load"):
            path = where / ("state" if what == "load" else "other")
            command = [
                sys.executable,
                "-c",
                PEAK,
                str(Path(__file__).parent.parent),
                what,
                str(megabytes),
                str(path),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(
                {
                    "what": what,
                    "bytes": total,
                    "largest leaf": largest,
                    "peak beyond": int(done.stdout),
                }
            )
    finally:
        shutil.rmtree(where)
    return rows
