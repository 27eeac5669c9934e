"""All GPU benchmarks on one CUDA device: ``python3 -m benchmarks.gpu``, with the packages that are there.

- ``newton-schulz``: one orthogonalization, compared with the plain iteration compiled in bf16.
- ``step``: time and memory of a step, compared with torch.optim.Muon and, if it is installed, Dion.
- ``graph``: a captured CUDA graph of a step, compared with the same step without a graph.

Where quack-kernels is installed, ``newton-schulz`` and ``step`` also measure muonfx without it.

Required are torch with Triton, optree and safetensors. Nothing is installed, and a package to compare with that is
missing is skipped, with a printed line. A part stops after ``--minutes``. Rows are saved as
``results/gpu.json`` as they are measured; a part that runs again replaces its own rows. At the end, docs/gpu.md is
written from the file. If a part fails, the error is printed and the other parts still run.

Without a GPU, ``python3 -m benchmarks.gpu --rehearse`` runs all parts but ``graph`` with small matrices
on the CPU, and saves nothing. It shows that the packages suffice.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import muonfx as mfx
from benchmarks import measure, report, step
from benchmarks.measure import interleaved, summary
from benchmarks.peers import COMMON, Optimizer, functions, installed, optimizers, plain
from muonfx.polar import quack

Row = dict[str, Any]
Shape = tuple[int, ...]

SHAPES: tuple[Shape, ...] = ((1024, 1024), (4096, 4096), (1024, 4096), (16, 1024, 1024))
SETS: dict[str, list[step.Shape]] = {
    "12 layers of 768": ([(768, 768)] * 4 + [(3072, 768), (768, 3072)]) * 12,
    # All candidates have their tensors at once, each 5 GB here: together 50 GB, for a GPU with 80.
    "2 layers of 4096": ([(4096, 4096)] * 4 + [(16384, 4096), (4096, 16384)]) * 2,
}
PLAIN = "plain, compiled, bfloat16"


def newton_schulz(
    rounds: int,
    seconds: float,
    device: str,
    *,
    shapes: tuple[Shape, ...] = SHAPES,
    compiled: bool = True,
) -> Iterator[Row]:
    """Measure time and error of one orthogonalization, in bf16 and with the same coefficients for all candidates."""
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        exact = plain(x, torch.float64)
        ours = partial(mfx.polar.orthogonalize, coefficients=COMMON, dtype=torch.bfloat16)
        runs: dict[str, Callable[[], torch.Tensor]] = {"plain": partial(plain, x)}
        for one in functions(compiled=compiled):
            if one.coefficients == COMMON and "float32" not in one.name:
                runs[one.name] = partial(one.call, x)
        for name, settings in _products(device).items():
            runs[name] = partial(ours, x, **settings)
        times = summary(
            interleaved(runs, rounds=rounds, seconds=seconds), PLAIN if compiled else "plain"
        )
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
    if quack.failure(torch.device(device), torch.bfloat16) is None:  # "auto" uses quack
        found["muonfx, without quack"] = {"products": "batched"}
    return found


def whole_step(
    rounds: int,
    seconds: float,
    device: str,
    *,
    sets: Mapping[str, list[step.Shape]] = SETS,
    compiled: bool = True,
) -> Iterator[Row]:
    """Measure the time of a step, and its peak memory in addition to parameters, gradients and state."""
    for case, shapes in sets.items():
        gradients = [torch.randn(shape, device=device) for shape in shapes]
        runs = {
            one.name: step.stepper(one.build, gradients)[1] for one in _optimizers(device, compiled)
        }
        times = summary(interleaved(runs, rounds=rounds, seconds=seconds), step.BASELINE)
        for name, run in runs.items():
            yield {
                "case": case,
                "candidate": name,
                **times[name],
                "bytes at the peak": _peak(run, device),
            }


def _optimizers(device: str, compiled: bool) -> Iterator[Optimizer]:
    yield from (one for one in optimizers(compiled=compiled) if one.package == "torch")
    if compiled and (
        dion := installed("dion", get="put a clone of github.com/microsoft/dion on PYTHONPATH")
    ):
        make = partial(dion.Muon, lr=1e-3, weight_decay=0.1, nesterov=True)
        yield Optimizer("Dion", make, "its own", True, "dion")
    yield from step.ours()
    if quack.failure(torch.device(device), torch.bfloat16) is None:  # "auto" uses quack
        make = partial(step._chain, donate=True, coefficients=COMMON, products="batched")
        yield Optimizer("muonfx, donate_grads, without quack", make, COMMON, False, "muonfx")


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
        grads = {
            f"h.{i}.weight": torch.randn(shape, device=device) for i, shape in enumerate(shapes)
        }
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


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "newton-schulz": newton_schulz,
    "step": whole_step,
    "graph": captured_step,
}
REHEARSAL: dict[str, dict[str, Any]] = {
    "newton-schulz": {"shapes": ((8, 8), (8, 24), (3, 8, 16))},
    "step": {"sets": {"small": [(8, 8), (8, 8), (24, 8), (8, 24)]}},
}
"""The parts that a CPU can run, and the small matrices that they use there."""


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def line(row: Row) -> str:
    """Format a row as a line of the printed table.

    >>> spread = {"median": 1.0, "p10": 0.5, "p90": 2.0}
    >>> line(
    ...     {
    ...         "part": "p",
    ...         "case": "c",
    ...         "candidate": "x",
    ...         "milliseconds": spread,
    ...         "ratio": spread,
    ...         "error": 0.001,
    ...     }
    ... )
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


def rows_of_other_parts(parts: list[str]) -> list[Row]:
    """Return the saved rows of all parts except ``parts``, if they were measured on this GPU with this torch."""
    saved = report.load("gpu")
    if saved is None:
        return []
    here, there = measure.machine(), saved["machine"]
    for fact in ("gpu", "torch", "muonfx"):
        if here[fact] != there[fact]:
            print(
                f"results/gpu.json is of {fact} {there[fact]}, and this run is of {here[fact]}: its rows are dropped"
            )
            return []
    return [row for row in saved["rows"] if row["part"] not in parts]


def run_part(
    part: str,
    rows: list[Row],
    save: Callable[[list[Row]], object],
    *,
    minutes: float,
    **options: Any,
) -> None:
    """Run one part: append its rows, print and save each, and stop after ``minutes``."""
    deadline = time.monotonic() + 60 * minutes
    for row in PARTS[part](**options):
        rows.append({"part": part, **row})
        save(rows)
        if "milliseconds" in row:
            print(line(rows[-1]), flush=True)
        if time.monotonic() > deadline:
            print(
                f"{part}: stopped after {minutes:g} minutes; what is not printed above was not measured"
            )
            rows.append({"part": part, "stopped after minutes": minutes})
            save(rows)
            return


def main(arguments: list[str] | None = None) -> None:
    """Measure each part, print its rows and save the rows of all parts."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"some of: {', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=40,
        help="number of rounds; each round runs every candidate once",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=15,
        help="time limit for one case, after at least ten rounds",
    )
    parser.add_argument("--minutes", type=float, default=7, help="a part stops after these minutes")
    parser.add_argument(
        "--rehearse", action="store_true", help="small matrices on the CPU; nothing is saved"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(
            f"part: found {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}"
        )
    settings: dict[str, Any] = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "device": "cuda",
    }
    if options.rehearse:
        rehearse(options.parts or list(REHEARSAL), settings | {"device": "cpu"}, options.minutes)
        return
    if not torch.cuda.is_available():
        parser.exit(
            2,
            "error: found no CUDA device, expected one: use a machine with a GPU, or rehearse with --rehearse\n",
        )
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds, ratio to the first candidate"
    )
    chosen = options.parts or list(PARTS)
    rows = rows_of_other_parts(chosen)
    for part in chosen:
        try:
            run_part(
                part,
                rows,
                lambda measured: measure.save("gpu", measured),
                minutes=options.minutes,
                **settings,
            )
        except Exception as error:  # the results of the other parts are still useful
            traceback.print_exc()
            rows.append({"part": part, "failed": f"{type(error).__name__}: {error}"})
            measure.save("gpu", rows)
        torch.cuda.empty_cache()
    report.rewrite(report.GPU_PAGE, report.GPU_SECTIONS)
    print("saved as benchmarks/results/gpu.json; docs/gpu.md is written from it")
    if failed := [row["part"] for row in rows if "failed" in row]:
        sys.exit(f"failed: {', '.join(failed)}")


def rehearse(parts: list[str], settings: dict[str, Any], minutes: float) -> None:
    """Run parts with small matrices on the CPU, without torch.compile, and save nothing."""
    rehearsed = [part for part in parts if part in REHEARSAL]
    for part in rehearsed:
        run_part(
            part,
            [],
            lambda rows: None,
            minutes=minutes,
            compiled=False,
            **REHEARSAL[part],
            **settings,
        )
    left_out = [part for part in PARTS if part not in rehearsed]
    print(
        f"rehearsed on the CPU: {', '.join(rehearsed)}; not rehearsed: {', '.join(left_out)}; nothing was saved"
    )


if __name__ == "__main__":
    main()
