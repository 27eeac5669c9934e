"""Measurement of time and memory.

Time: each round runs every candidate once, so that other load on the machine affects all candidates equally. A result
is the median over rounds, a ratio is the median of the ratios within rounds, and the spread is the 10th to 90th
percentile.

Memory: the peak bytes of storage that a call allocates, counted at the dispatcher (`PeakBytes`). Memory that an
operator allocates and frees internally is not counted. On CUDA, the allocator's statistics are used instead.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import muonfx

RESULTS = Path(__file__).parent / "results"


MIN_ROUNDS = 10
"""Minimum number of rounds, for meaningful percentiles."""


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Time each candidate once per round, and return the seconds of every round after the warm-up.

    No round begins after `seconds`, except the first `MIN_ROUNDS`.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    began = time.perf_counter()
    for turn in range(warmup + rounds):
        if turn >= warmup + MIN_ROUNDS and time.perf_counter() - began > seconds:
            break
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of each candidate and its ratio to a baseline, as medians and percentiles."""

    def spread(values: list[float]) -> dict[str, float]:
        cuts = statistics.quantiles(
            values, n=10, method="inclusive"
        )  # interpolates within the measured values, also if there are few
        return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1]}

    return {
        name: {
            "rounds": len(own),
            "milliseconds": spread([1e3 * t for t in own]),
            "ratio": spread([a / b for a, b in zip(own, times[baseline], strict=True)]),
        }
        for name, own in times.items()
    }


class PeakBytes(TorchDispatchMode):
    """Context manager that records the peak bytes of storage allocated by operators within it.

    >>> with PeakBytes() as peak:
    ...     _ = torch.zeros(1024) + torch.zeros(1024)
    >>> peak.most
    12288
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in before and key not in self._seen:
                    self._hold(key, storage)
        return out

    def _hold(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)

        def release() -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.finalize(storage, release)


def machine() -> dict[str, Any]:
    """Return the hardware and versions of a result, without names of persons or paths."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
        flags = next(line for line in lines if line.startswith("flags")).split()
        family = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("cpu family")
        )
    except (OSError, StopIteration):
        flags = []
        family = ""
    if "AMD" in model:  # virtual machines hide the full name, and generations differ in speed
        if family == "26":
            model += " (Zen 5)"
        elif family == "25" and "avx512_bf16" in flags:  # Zen 3 has this family too, but no AVX-512
            model += " (Zen 4)"
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "bf16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "muonfx": muonfx.__version__,
    }


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Save the rows of a benchmark, with the machine, as ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return path
