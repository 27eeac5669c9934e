"""Compile the kernels for a GPU that is not there, by Triton's own route from arguments to machine code.

A driver is pretended: it names a capability and a size of shared memory, and its launches are written down. What a
measurement takes is made up: the least shared memory wins. Run in a process without the interpreter:
`python pretended_gpu.py CAPABILITY KIBIBYTES` prints a report as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

LAUNCHES: list[dict[str, Any]] = []
INSTRUCTIONS = {
    "mma.sync": "mma.sync",
    "wgmma.mma_async": "wgmma.mma_async",
    "tcgen05.mma": "tcgen05.mma",
    "tf32": "tf32",
    "16-byte asynchronous load": r"cp\.async\.cg\.shared\.global[^;]*0x10",
}


class Launcher:
    """Stands for what would start a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        names = source.fn.arg_names
        self.constants = {names[place[0]]: value for place, value in source.constants.items()}
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, *_: Any) -> None:
        """Write down what would be launched."""
        tile = [self.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
        LAUNCHES.append(
            {
                "grid": [x, y, z],
                "shared": self.metadata.shared,
                "rows": tile[0],
                "columns": tile[1],
                "tile": f"{tile} {self.metadata.num_warps} {self.metadata.num_stages} {self.constants['SHARE']}",
            }
        )


class Driver:
    """What Triton asks a driver for."""

    launcher_cls = Launcher

    def __init__(self, capability: int, kibibytes: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (0, 0, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": kibibytes * 1024},
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def benchmark(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
            call()
            return [float(LAUNCHES[-1]["shared"]) for _ in quantiles]

        return benchmark


def main(capability: int, kibibytes: int) -> dict[str, Any]:
    driver.set_active(Driver(capability, kibibytes))
    from muonfx.polar.kernels import launch as launching
    from muonfx.polar.kernels.symmetric import INTERPRETED, symmetric_kernel

    assert not INTERPRETED.value

    def launch(batch: int, n: int, k: int, dtype: torch.dtype, *, q: bool = False, addend: bool = False) -> list[Any]:
        before = len(LAUNCHES)
        p, out = torch.zeros(batch, n, k, dtype=dtype), torch.zeros(batch, n, n, dtype=dtype)
        given = p.clone() if q else None, out.clone() if addend else None
        launching.launch(p, *given, 1.0, float(addend), 1.0, out)
        for made in LAUNCHES[before:]:
            tiles = triton.cdiv(n, made["columns"])
            made["expected grid"] = [batch * tiles * (tiles + 1) // 2 * made["columns"] // made["rows"], 1, 1]
        return LAUNCHES[before:]

    launches = {
        "half": launch(3, 300, 200, torch.bfloat16, addend=True),
        "half again": launch(3, 296, 248, torch.bfloat16, addend=True),
        "two factors": launch(3, 60, 200, torch.float16, q=True),
        "large": launch(1, 4096, 64, torch.bfloat16),
        "odd": launch(2, 33, 35, torch.bfloat16),
        "single": launch(2, 60, 200, torch.float32, q=True, addend=True),
    }
    kernels = []
    for cache, *_ in symmetric_kernel.device_caches.values():
        for kernel in cache.values():
            names = kernel.src.fn.arg_names
            constants = {names[place[0]]: value for place, value in kernel.src.constants.items()}
            kernels.append(
                {
                    "dtype": kernel.src.signature["p"].lstrip("*"),
                    "columns": constants["BLOCK_N"],
                    "aligned": constants["ALIGN_K"] == 8,
                    "words": [word for word, text in INSTRUCTIONS.items() if re.search(text, kernel.asm["ptx"])],
                }
            )
    return {"launches": launches, "kernels": kernels}


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
