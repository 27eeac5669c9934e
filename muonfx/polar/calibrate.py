"""Measure what this machine does with symmetric products: ``python -m muonfx.polar.calibrate``.

It takes less than a minute on a quiet machine, prints what it found beside the rates that are built in, and writes a
file that `muonfx.polar.use_rates` reads. Nothing reads it by itself: ranks that work together, and a run that goes on
later, must have the same.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from muonfx.polar.hardware import cpu_bf16_is_faster, cpu_has_amx, cpu_has_bf16
from muonfx.polar.products import Buffered
from muonfx.polar.rates import Rates, built_in, write_rates

__all__ = ["main", "measured"]

SHAPES = [(256, 256), (256, 1024), (384, 1536), (512, 512), (512, 2048), (768, 768), (1024, 1024), (1024, 4096)]
"""Short and long sides, in the order of their products' sizes as far as that goes."""

BATCH = 4
"""Matrices at a time: halving goes through them one by one, and a batched product does not."""


def median_seconds(calls: Sequence[Callable[[], object]], seconds: float, least: int = 3) -> list[float]:
    """Time calls in turn, so that a busy moment falls on all of them; the median of each.

    >>> len(median_seconds([lambda: None, lambda: None], 0.0))
    2
    """
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times[0]) < least:
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def measured(dtype: torch.dtype, seconds: float, say: Callable[[str], object] = print) -> Rates:
    """Measure the rates of a dtype on this CPU.

    Args:
        dtype: of the products.
        seconds: how long, in all.
        say: takes a line about each shape.

    >>> measured(torch.float32, 0.0, say=lambda line: None).share <= 1
    True
    """
    each = seconds / (len(SHAPES) + 1)
    ratios: dict[float, list[float]] = {}
    for short, long in SHAPES:
        x = torch.randn(BATCH, short, long).to(dtype)
        full, half = (_gram_of(x, how) for how in ("batched", "blocks"))
        whole, halved = median_seconds([full, half], each)
        size = short * short * long
        ratios.setdefault(float(size), []).append(halved / whole)
        say(
            f"  {BATCH} x {short} x {long}: {1e3 * whole:8.2f} ms whole ({2e-9 * BATCH * size / whole:6.0f} GFLOP/s), "
            f"{1e3 * halved:8.2f} ms by blocks, {halved / whole:.2f}"
        )
    halved_from, share = threshold({size: max(found) for size, found in ratios.items()})
    n = 1024
    square = torch.randn(n, n).to(dtype)
    out, added = torch.empty_like(square), torch.empty_like(square)
    product, adding = median_seconds(
        [lambda: torch.mm(square, square, out=out), lambda: torch.add(square, out, alpha=0.5, out=added)], each
    )
    pass_cost = max(n * adding / product, 1.0)
    say(f"  a pass over {n} x {n}: {1e3 * adding:.2f} ms; a product: {1e3 * product:.2f} ms")
    return Rates(halved_from, share, round(pass_cost), _source())


def threshold(ratios: dict[float, float]) -> tuple[float, float]:
    """From which size on halving paid at every size, and the time it took there, over that of whole products.

    Args:
        ratios: by size, of halved to whole.

    >>> threshold({1e6: 1.2, 1e7: 0.9, 1e8: 0.7})
    (10000000.0, 0.8)
    >>> threshold({1e6: 0.8, 1e7: 1.1})
    (inf, 1.0)
    """
    paid: list[tuple[float, float]] = []
    for size, ratio in sorted(ratios.items(), reverse=True):
        if ratio >= 0.98:  # within what a measurement is worth
            break
        paid.append((size, ratio))
    if not paid:
        return float("inf"), 1.0
    return paid[-1][0], round(statistics.fmean(ratio for _, ratio in paid), 2)


def _gram_of(x: torch.Tensor, how: str) -> Callable[[], object]:
    products = Buffered(x, tall=False, how=how, small=how)

    def call() -> None:
        products.gram(x, 0.0)
        products.keep()

    return call


def _source() -> str:
    kind = "AMX" if cpu_has_amx() else torch.backends.cpu.get_cpu_capability()
    name = platform.processor() or platform.machine()
    return f"measured on {torch.get_num_threads()} threads, {kind}, {name}, torch {torch.__version__.partition('+')[0]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m muonfx.polar.calibrate", description=__doc__)
    parser.add_argument("--out", help="the file to write; without it, nothing is written")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each dtype (default 20)")
    parser.add_argument("--threads", type=int, help="of torch (default: as many as it takes by itself)")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    dtypes = [torch.float32, *([torch.bfloat16] if cpu_has_bf16() else [])]
    found: dict[tuple[str, torch.dtype], Rates] = {}
    for dtype in dtypes:
        print(dtype)
        found["cpu", dtype] = measured(dtype, given.seconds)
    if torch.bfloat16 in dtypes:
        print(f"bf16 products are {'faster' if cpu_bf16_is_faster() else 'slower'} than fp32's")
    print()
    print(f"{'':16}{'halved from':>12}{'share':>8}{'a pass':>8}")
    for (kind, dtype), rates in found.items():
        for what, one in (("here", rates), ("built in", built_in(kind, cpu_has_amx(), dtype))):
            name = str(dtype).removeprefix("torch.") if what == "here" else ""
            print(f"{name:9}{what:>8}{one.halved_from:12.1e}{one.share:8.2f}{one.pass_cost:8.0f}  {one.source}")
    if given.out:
        write_rates(given.out, found)
        print(
            f"\nwritten to {given.out}: muonfx.polar.use_rates({given.out!r}) on all ranks, before optimizers are made"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
