"""Symmetric products on a CUDA device, against cuBLAS: ``python -m benchmarks.kernels [--rounds N] [--dtype D]``.

TFLOP/s count the full product, `2 b n^2 k`, for both sides. A kernel that computes only half of it can exceed the peak,
which is the rate of `torch.mm` on large squares in the same process. A run enqueues several calls in sequence, so that
the device is never idle. If enqueueing takes longer than computing, the result is the time of enqueueing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.measure import MIN_ROUNDS, interleaved, save, summary
from muonfx.polar.kernels import failure, symmetric_matmul

CASES = ((64, 512, 512), (16, 1024, 1024), (1, 4096, 4096), (1, 4096, 16384), (1, 8192, 8192))
"""Shapes `(b, n, k)`. The polynomial uses matrices `(b, n, n)`."""

LINEAR, SQUARE = -4.7750, 2.0315
"""Coefficients `b` and `c` of the polynomial."""

OTHER_TILES = {
    torch.bfloat16: (
        (128, 128, 64, 8, 4),
        (128, 128, 32, 8, 4),
        (128, 256, 64, 8, 3),  # fewest loads per product, widest instruction of Hopper
        (128, 256, 64, 8, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 32, 4, 5),
    ),
    torch.float32: ((64, 128, 16, 8, 3), (64, 64, 32, 8, 3)),
}
"""Tiles that muonfx does not use (see `muonfx.polar.kernels.symmetric.tile`); some may not fit the device."""

ENQUEUED = 1e13
"""FLOPs of one run."""


def repeated(call: Callable[[], object], flops: float) -> tuple[Callable[[], None], int]:
    """Return a function that repeats a call up to `ENQUEUED` FLOPs, and the number of repetitions."""
    times = max(1, round(ENQUEUED / flops))

    def run() -> None:
        for _ in range(times):
            call()

    return run, times


def peak(sizes: tuple[int, ...], dtype: torch.dtype, rounds: int, device: str) -> float:
    """Return the highest TFLOP/s of `torch.mm` on square matrices of several sizes."""
    rates: list[float] = []
    for n in sizes:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        run, times = repeated(partial(torch.mm, a, b, out=torch.empty_like(a)), 2 * n**3)
        seconds = statistics.median(interleaved({"mm": run}, rounds=rounds)["mm"]) / times
        rates.append(2e-12 * n**3 / seconds)
    return max(rates)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative Frobenius error of the first matrix."""
    return ((found[0].double() - exact).norm() / exact.norm()).item()


def measure(
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    rounds: int,
    best: float,
    device: str,
    multiply: Callable[..., object] = symmetric_matmul,
) -> dict[str, Any]:
    """Return one row, for the Gram matrix of `x` or for the polynomial of a symmetric matrix of the same size.

    `multiply` is `symmetric_matmul`, or the same function with another tile.
    """
    b, n, k = shape
    x = torch.randn(shape, device=device, dtype=dtype) / k**0.5
    out = {side: x.new_empty(b, n, n) for side in ("torch", "torch again", "muonfx")}
    if name == "x x^T":
        exact = x[0].double() @ x[0].double().mT
        ours = partial(multiply, x, out=out["muonfx"])
        theirs = [partial(torch.bmm, x, x.mT, out=out[side]) for side in ("torch", "torch again")]
    else:
        x, k = torch.bmm(x, x.mT), n
        x = (x + x.mT) / 2
        wide = x[0].double()
        exact = SQUARE * wide @ wide + LINEAR * wide
        theirs = [
            partial(torch.baddbmm, x, x, x, alpha=SQUARE, beta=LINEAR, out=out[side])
            for side in ("torch", "torch again")
        ]
        ours = partial(multiply, x, addend=x, alpha=SQUARE, beta=LINEAR, out=out["muonfx"])
    flops = 2.0 * b * n * n * k
    runs = {side: repeated(call, flops) for side, call in zip(out, (*theirs, ours), strict=True)}
    found = summary(interleaved({side: run for side, (run, _) in runs.items()}, rounds=rounds), "torch")
    row: dict[str, Any] = {"product": name, "shape": [b, n, k], "dtype": str(dtype), "peak TFLOP/s": best}
    for side, times in found.items():
        milliseconds = times["milliseconds"]["median"] / runs[side][1]
        rate = 1e-9 * flops / milliseconds
        row[side] = times | {"calls": runs[side][1], "milliseconds a call": milliseconds, "TFLOP/s": rate}
        row[side] |= {"share of peak": rate / best, "error": error(out[side], exact)}
    row["muonfx"]["symmetric"] = torch.equal(out["muonfx"], out["muonfx"].mT)
    return row


def other_tiles(name: str, shape: tuple[int, int, int], dtype: torch.dtype, best: float) -> dict[str, Any]:
    """Return the milliseconds of a call for each other tile, or the error if the tile does not run on the device."""
    from muonfx.polar.kernels.symmetric import launch, tile

    found: dict[str, Any] = {}
    for numbers in OTHER_TILES[torch.float32 if dtype == torch.float32 else torch.bfloat16]:

        def multiply(p: Any, *, addend: Any = None, alpha: float = 1.0, beta: float = 0.0, out: Any) -> None:
            launch(p, addend, alpha, beta, 0.0, out, tile(*numbers))  # noqa: B023  # called in this iteration only

        try:
            row = measure(name, shape, dtype, MIN_ROUNDS, best, "cuda", multiply)["muonfx"]
            found[str(numbers)] = row["milliseconds a call"]
        except Exception as error:
            found[str(numbers)] = f"{type(error).__name__}: {error}"
    return found


def measured(dtype: torch.dtype, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure all cases and print a line for each."""
    import triton

    best = peak((4096, 8192, 16384), dtype, rounds, "cuda")
    print(f"{torch.cuda.get_device_name()}, {dtype}; the peak is {best:.0f} TFLOP/s")
    print("product, b x n x k; torch: ms, TFLOP/s, share of the peak; muonfx: the same; muonfx / torch; errors")
    for shape in CASES:
        for name in ("x x^T", "b A + c A^2"):
            row = measure(name, shape, dtype, rounds, best, "cuda")
            print(line(row), flush=True)
            row["other tiles"] = other_tiles(name, shape, dtype, best)
            fastest = min((ms, tile) for tile, ms in row["other tiles"].items() if isinstance(ms, float))
            print(f"{'':14} the fastest other tile is {fastest[1]}: {fastest[0]:.3f} ms", flush=True)
            yield row | {"triton": triton.__version__, "cuda": torch.version.cuda, "driver": clocks()}


def clocks() -> str | None:
    """Return the driver version, clocks and power from nvidia-smi, or None if it cannot be run."""
    wanted = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit"
    command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv", f"--id={torch.cuda.current_device()}"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def line(row: dict[str, Any]) -> str:
    """Format a row as a line of the printed table."""
    ours, theirs = row["muonfx"], row["torch"]
    ratio = ours["ratio"]
    return (
        f"{row['product']:14} {'x'.join(map(str, row['shape'])):>15}"
        f" {theirs['milliseconds a call']:9.3f} {theirs['TFLOP/s']:7.0f} {theirs['share of peak']:6.0%}"
        f" {ours['milliseconds a call']:9.3f} {ours['TFLOP/s']:7.0f} {ours['share of peak']:6.0%}"
        f"   {ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})"
        f"   {theirs['error']:.1e} {ours['error']:.1e}"
    )


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="number of rounds; each round runs every candidate once")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: found no CUDA device, expected one: times of Triton's interpreter mean nothing\n")
    if why := failure(torch.device("cuda")):
        parser.exit(2, f"the kernels do not run here: {why}\n")
    rows = list(measured(getattr(torch, options.dtype), options.rounds))
    print(f"saved as {save(f'kernels_{options.dtype}', rows).name}")


if __name__ == "__main__":
    main()
