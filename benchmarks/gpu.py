"""All GPU benchmarks on one CUDA device, in under 15 minutes: ``make bench-gpu``, or ``python -m benchmarks.gpu``.

- Newton-Schulz, compared with the plain iteration compiled in bf16.
- Time and memory of a step, compared with torch.optim.Muon and, if it is installed, Dion.
- A captured CUDA graph of a step, compared with the same step without a graph.
- The kernels, compared with cuBLAS.

Rows are saved as ``results/gpu.json``. If a part fails, the error is printed and the other parts still run.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import muonfx as mfx
from benchmarks import kernels, step
from benchmarks.measure import interleaved, save, summary
from benchmarks.peers import COMMON, Optimizer, functions, installed, optimizers, plain
from muonfx.polar.kernels import failure

Row = dict[str, Any]
Shape = tuple[int, ...]

SHAPES: tuple[Shape, ...] = ((1024, 1024), (4096, 4096), (1024, 4096), (16, 1024, 1024))
SETS: dict[str, list[step.Shape]] = {
    "12 layers of 768": ([(768, 768)] * 4 + [(3072, 768), (768, 3072)]) * 12,
    "4 layers of 4096": ([(4096, 4096)] * 4 + [(16384, 4096), (4096, 16384)]) * 4,
}
PLAIN = "plain, compiled, bfloat16"


def newton_schulz(rounds: int, seconds: float, device: str, *, compiled: bool = True) -> Iterator[Row]:
    """Measure time and error of one orthogonalization, in bf16 and with the same coefficients for all candidates."""
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        exact = plain(x, torch.float64)
        ours = partial(mfx.polar.orthogonalize, coefficients=COMMON, dtype=torch.bfloat16)
        runs: dict[str, Callable[[], torch.Tensor]] = {"plain": partial(plain, x)}
        for one in functions(compiled=compiled):
            if one.coefficients == COMMON and "float32" not in one.name:
                runs[one.name] = partial(one.call, x)
        for name, settings in _products(device).items():
            runs[name] = partial(ours, x, **settings)
        times = summary(interleaved(runs, rounds=rounds, seconds=seconds), PLAIN if compiled else "plain")
        for name, run in runs.items():
            error = float((run().double() - exact).norm() / exact.norm())
            yield {"case": _text(shape), "candidate": name, **times[name], "error": error}


def _products(device: str) -> dict[str, Mapping[str, Any]]:
    """Return the settings of `orthogonalize` to measure, by name."""
    found: dict[str, Mapping[str, Any]] = {
        "muonfx": {},
        "muonfx, standard": {"method": "standard", "products": "batched"},
        "muonfx, gram": {"method": "gram", "products": "batched"},
    }
    if failure(torch.device(device)) is None:
        found["muonfx, triton"] = {"products": "triton"}
    return found


def whole_step(rounds: int, seconds: float, device: str, *, compiled: bool = True) -> Iterator[Row]:
    """Measure the time of a step, and its peak memory in addition to parameters, gradients and state."""
    for case, shapes in SETS.items():
        gradients = [torch.randn(shape, device=device) for shape in shapes]
        runs = {one.name: step.stepper(one.build, gradients)[1] for one in _optimizers(device, compiled)}
        times = summary(interleaved(runs, rounds=rounds, seconds=seconds), step.BASELINE)
        for name, run in runs.items():
            yield {"case": case, "candidate": name, **times[name], "bytes at the peak": _peak(run, device)}


def _optimizers(device: str, compiled: bool) -> Iterator[Optimizer]:
    yield from (one for one in optimizers(compiled=compiled) if one.package == "torch")
    if compiled and (dion := installed("dion", get="put a clone of github.com/microsoft/dion on PYTHONPATH")):
        make = partial(dion.Muon, lr=1e-3, weight_decay=0.1, nesterov=True)
        yield Optimizer("Dion", make, "its own", True, "dion")
    yield from step.ours()
    if failure(torch.device(device)) is None:
        make = partial(step._chain, donate=True, coefficients=COMMON, products="triton")
        yield Optimizer("muonfx, donate_grads, triton", make, COMMON, False, "muonfx")


def _peak(run: Callable[[], object], device: str) -> int | None:
    """Return the peak bytes of a call from the CUDA allocator, or None on another device."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def captured_step(rounds: int, seconds: float, device: str) -> Iterator[Row]:
    """Time a functional step replayed from a CUDA graph, compared with the same step run by Python."""
    for case, shapes in SETS.items():
        tx = mfx.muon(1e-3, weight_decay=0.1, orthogonalize=mfx.orthogonalize(coefficients=COMMON))
        grads = {f"h.{i}.weight": torch.randn(shape, device=device) for i, shape in enumerate(shapes)}
        twins = []
        for _ in range(2):
            params = {name: grad.clone() for name, grad in grads.items()}
            twins.append((params, tx.init(params)))

        def take_step(params: Any, state: Any) -> None:
            updates, new = tx.update(grads, state, params)  # noqa: B023  # called in this iteration only
            torch._foreach_copy_(mfx.tree.leaves(state), mfx.tree.leaves(new))
            torch._foreach_add_(list(params.values()), list(updates.values()))

        eager, static = (partial(take_step, *twin) for twin in twins)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            static()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static()
        eager()
        for _ in range(3):
            eager()
            graph.replay()
        equal = all(torch.equal(a, b) for a, b in zip(*map(mfx.tree.leaves, twins), strict=True))
        runs = {"without a graph": eager, "captured": graph.replay}
        times = summary(interleaved(runs, rounds=rounds, seconds=seconds), "without a graph")
        for name in runs:
            yield {"case": case, "candidate": name, **times[name], "same bits": equal}


def products(rounds: int, seconds: float, device: str) -> Iterator[Row]:
    """Measure the symmetric products of the kernels and print their table."""
    if why := failure(torch.device(device)):
        raise RuntimeError(f"the kernels do not run here: {why}")
    yield from kernels.measured(torch.bfloat16, rounds)


PARTS = {
    "Newton-Schulz": newton_schulz,
    "whole step": whole_step,
    "CUDA graph": captured_step,
    "kernels": products,
}


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def line(row: Row) -> str:
    """Format a row as a line of the printed table.

    >>> spread = {"median": 1.0, "p10": 0.5, "p90": 2.0}
    >>> line({"part": "p", "case": "c", "candidate": "x", "milliseconds": spread, "ratio": spread, "error": 0.001})
    'p              c                  x                                  1.000 ms  1.00 (0.50 to 2.00)  error 1.0e-03'
    """
    ratio = row["ratio"]
    text = f"{row['part']:14} {row['case']:18} {row['candidate']:30} {row['milliseconds']['median']:9.3f} ms"
    text += f"  {ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})"
    if "error" in row:
        text += f"  error {row['error']:.1e}"
    if row.get("bytes at the peak") is not None:
        text += f"  {row['bytes at the peak'] / 2**20:.0f} MiB"
    if "same bits" in row:
        text += f"  same bits: {'yes' if row['same bits'] else 'NO'}"
    return text


def main(arguments: list[str] | None = None) -> None:
    """Measure each part, print its rows and save the rows of all parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of: {', '.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=40, help="number of rounds; each round runs every candidate once")
    parser.add_argument("--seconds", type=float, default=15, help="time limit for one case, after at least ten rounds")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"part: found {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.exit(
            2, "error: found no CUDA device, expected one: use a machine with a GPU and a CUDA build of torch\n"
        )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds, ratio to the first candidate")
    rows: list[Row] = []
    for part in options.parts or PARTS:
        try:
            for row in PARTS[part](options.rounds, options.seconds, "cuda"):
                rows.append({"part": part, **row})
                if "milliseconds" in row:
                    print(line(rows[-1]), flush=True)
        except Exception as error:  # the results of the other parts are still useful
            traceback.print_exc()
            rows.append({"part": part, "failed": f"{type(error).__name__}: {error}"})
        torch.cuda.empty_cache()
    print(f"saved as {save('gpu', rows)}")
    if failed := [row["part"] for row in rows if "failed" in row]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
