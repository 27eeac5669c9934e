"""Tables of the documentation, written from the JSON results alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.leaves import AIMS, COUNTS
from benchmarks.measure import RESULTS
from benchmarks.quality import SPECTRA

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PARTS_PAGE = DOCS / "benchmarks.md", DOCS / "step-by-part.md"
TABLES_PAGE = Path(__file__).parent / "results" / "README.md"
TRAINING_PAGE = DOCS / "the-default-coefficients.md"
GPU_PAGE = DOCS / "gpu.md"
BEGIN, END = "<!-- tables: {}, written by python -m benchmarks -->", "<!-- end of tables -->"

WORSE = 1.1
"""Maximum ratio to torch's error; a faster candidate above it is marked."""
BASELINE = "torch.optim.Muon"


def load(name: str) -> dict[str, Any] | None:
    """Return a result, or None if it has not been measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fold(title: str, body: str) -> str:
    """Return a block that unfolds on a click, in plain HTML.

    >>> print(_fold("small", "| a |"))
    <details>
    <summary>small</summary>
    <BLANKLINE>
    | a |
    <BLANKLINE>
    </details>
    <BLANKLINE>
    """
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>\n"


def machine_line(found: dict[str, Any], threads: str = "") -> str:
    """Return a sentence with the machine and the versions of a result."""
    m = found["machine"]
    threads = threads or f"{m['threads']} threads"
    bf16 = f" ({', '.join(m['bf16'])})" if m["bf16"] else ""
    where = m["gpu"] or f"{m['cpu']}{bf16}, {threads}"
    packages = {row["package"] for row in found["rows"] if "package" in row}
    peers = "".join(f", {one}" for one in sorted(packages) if one.split()[0] not in ("torch", "muonfx"))
    return f"{where}; torch {m['torch']}{peers}, Python {m['python']}, load average at the end {m['load']:.1f}."


def _milliseconds(value: dict[str, float]) -> str:
    return f"{value['median']:.2f}"


def _ratio(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['p10']:.2f} to {value['p90']:.2f})"


def _throughput(times: dict[str, float]) -> str:
    """Format ratios of times as ratios of throughput."""
    return f"{1 / times['median']:.2f} ({1 / times['p90']:.2f} to {1 / times['p10']:.2f})"


def _bytes(value: int) -> str:
    return f"{value / 2**20:.2f} MiB"


def shape_name(shape: Iterable[int]) -> str:
    """Format a shape.

    >>> shape_name([64, 128, 128])
    '64 x 128 x 128'
    """
    return " x ".join(map(str, shape))


# ------------------------------------------------------------------------------------------------------- adapter


def adapter() -> str:
    """Return the tables of time and memory of a chain as a torch optimizer."""
    parts: list[str] = []
    if speed := load("adapter_speed"):
        rows = [
            [
                f"{row['optimizer']}: {row['case']}",
                _milliseconds(row["torch"]["milliseconds"]),
                _milliseconds(row["muonfx"]["milliseconds"]),
                _ratio(row["muonfx"]["ratio"]),
                _ratio(row["torch again"]["ratio"]),
            ]
            for row in speed["rows"]
        ]
        head = ["one optimizer step, fp32", "torch, ms", "muonfx, ms", "muonfx / torch", "torch / torch"]
        parts.append(_fold("Time of a step", f"{table(head, rows)}\n\n{machine_line(speed)}"))
    if memory := load("adapter_memory"):
        rows = [
            [
                f"{row['optimizer']}: {row['case']}",
                *(_bytes(row[key]) for key in ("parameters", "largest parameter", "torch", "muonfx")),
            ]
            for row in memory["rows"]
        ]
        head = ["peak beyond parameters, gradients, state", "parameters", "largest parameter", "torch", "muonfx"]
        parts.append(_fold("Memory of a step", f"{table(head, rows)}\n\n{machine_line(memory)}"))
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------ speed and quality

Quality = dict[str, dict[str, Any]]
"""The rows of one candidate by spectrum."""


def checkpoint() -> str:
    """Return the tables of time and memory of a checkpoint, compared with plain safetensors."""
    parts: list[str] = []
    head = ["a checkpoint", "safetensors, ms", "muonfx, ms", "throughput, muonfx / safetensors", "again / safetensors"]
    if speed := load("checkpoint_speed"):
        rows = [
            [
                f"{row['what']} of {_bytes(row['bytes'])} in {row['leaves']} leaves",
                *(f"{row[who]['milliseconds']['median']:.0f}" for who in ("safetensors", "muonfx")),
                *(_throughput(row[who]["ratio"]) for who in ("muonfx", "safetensors again")),
            ]
            for row in speed["rows"]
        ]
        parts.append(_fold("Time of a checkpoint", f"{table(head, rows)}\n\n{machine_line(speed)}"))
    if fresh := load("checkpoint_fresh"):
        rows = [
            [
                f"{_bytes(row['bytes'])} in {row['leaves']} leaves",
                *(f"{row[who]['milliseconds']['median']:.0f}" for who in ("safetensors", "muonfx")),
                *(_throughput(row[who]["ratio"]) for who in ("muonfx", "safetensors again")),
                _throughput(row["processor"]["muonfx"]["ratio"]),
            ]
            for row in fresh["rows"]
        ]
        head = ["a load in a fresh process", *head[1:], "by processor time, muonfx / safetensors"]
        parts.append(_fold("The first load of a process", f"{table(head, rows)}\n\n{machine_line(fresh)}"))
    if memory := load("checkpoint_memory"):
        rows = [
            [row["what"], *(_bytes(row[key]) for key in ("bytes", "largest leaf", "peak beyond"))]
            for row in memory["rows"]
        ]
        head = ["peak of the process beyond the state", "state", "largest leaf", "muonfx"]
        parts.append(_fold("Memory of a checkpoint", f"{table(head, rows)}\n\n{machine_line(memory)}"))
    return "\n".join(parts)


def judged(found: dict[str, Any] | None, case: str, key: Callable[[dict[str, Any]], str]) -> dict[str, Quality]:
    """Return the quality of every candidate in one case, from the rows of a result."""
    qualities: dict[str, Quality] = {}
    for row in found["rows"] if found else ():
        if key(row) == case:
            qualities.setdefault(row["candidate"], {})[row["spectrum"]] = row
    return qualities


def faster_and_worse(row: dict[str, Any], quality: dict[str, Quality]) -> bool:
    """Return True if a candidate is faster than torch's and its error exceeds `WORSE` times torch's on a spectrum."""
    own, theirs = quality.get(row["candidate"]), quality.get(BASELINE)
    if own is None or theirs is None or row["ratio"]["median"] >= 1:
        return False
    return any(own[spectrum]["error"] > WORSE * theirs[spectrum]["error"] for spectrum in SPECTRA)


def _quality_tables(speed: str, quality: str, heading: str, key: Callable[[dict[str, Any]], str]) -> str:
    """Return a table for each case with times, ratios, errors and singular values, the fastest candidate first."""
    times, qualities = load(speed), load(quality)
    if times is None:
        return ""
    head = [heading, "coefficients", "ms", "time / torch", "error, Gaussian", "error, geometric"]
    head += [f"singular values, {name}" for name in ("Gaussian", "geometric")]
    parts: list[str] = []
    for case in dict.fromkeys(map(key, times["rows"])):
        own = [row for row in times["rows"] if key(row) == case]
        quality_of = judged(qualities, case, key)
        lines: list[list[str]] = []
        for row in sorted(own, key=lambda row: row["milliseconds"]["median"]):
            found = quality_of.get(row["candidate"], {})
            mark = " †" if faster_and_worse(row, quality_of) else ""
            star = " \\*" if row["default"] else ""
            errors = [f"{found[s]['error']:.1e}" if s in found else "" for s in SPECTRA]
            bands = [f"{found[s]['smallest']:.3f} to {found[s]['largest']:.3f}" if s in found else "" for s in SPECTRA]
            spent = [_milliseconds(row["milliseconds"]), _ratio(row["ratio"])]
            lines.append([f"{row['candidate']}{star}{mark}", row["coefficients"], *spent, *errors, *bands])
        parts.append(_fold(case, table(head, lines)))
    return "\n".join([*parts, f"{machine_line(times)}\n"])


def polar() -> str:
    """Return the tables of orthogonalization, one for each shape."""
    return _quality_tables("polar_speed", "polar_quality", "orthogonalize", lambda row: shape_name(row["shape"]))


def step() -> str:
    """Return the tables of the optimizer step, one for each set of matrices."""
    return _quality_tables("step_speed", "step_quality", "one step", lambda row: row["case"])


def scratch() -> str:
    """Return the table of scratch memory by limit."""
    found = load("polar_scratch")
    if found is None:
        return ""
    limits = [name for name in found["rows"][0] if name.isdigit()]
    names = ["1 byte" if limit == "1" else f"{int(limit) >> 20} MiB" for limit in limits]
    head = ["matrices", "products", "results", "one matrix needs", *(f"limit {name}" for name in names)]
    rows: list[list[str]] = []
    for row in found["rows"]:
        cells = [f"**{_bytes(row[k])}**" if row[k] > max(int(k), row["one matrix"]) else _bytes(row[k]) for k in limits]
        dtype = row["dtype"].removeprefix("torch.")
        rows.append([row["list"], dtype, row["results"], _bytes(row["one matrix"]), *cells])
    return _fold("Scratch by limit", f"{table(head, rows)}\n\n{machine_line(found)}")


def sharding() -> str:
    """Return a table for each case on several processes: time, bytes sent, matrices orthogonalized, and error."""
    found = load("sharding_speed")
    if found is None:
        return ""
    head = ["ms", "time / first row", "sent per rank", "matrices orthogonalized", "error"]
    parts: list[str] = []
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        what = "the optimizer step" if case == "FSDP2" else "an iteration"
        for processes in dict.fromkeys(row["processes"] for row in found["rows"] if row["case"] == case):
            lines = [
                [
                    row["candidate"],
                    _milliseconds(row["milliseconds"]),
                    _ratio(row["ratio"]),
                    _bytes(row["sent"]),
                    f"{row['matrices']} for {row['of']}",
                    "" if row["apart"] is None else f"{row['apart']:.1e}",
                ]
                for row in found["rows"]
                if (row["case"], row["processes"]) == (case, processes)
            ]
            parts.append(_fold(f"{case}, {processes} processes: {what}", table(["", *head], lines)))
    cores = found["machine"]["cores"]
    return "\n".join([*parts, f"{machine_line(found, f'{cores} cores, a thread for each process')}\n"])


def sharding_timeline() -> str:
    """Return the table of milliseconds per iteration by phase."""
    found = load("sharding_timeline")
    if found is None:
        return ""
    phases = list(found["rows"][0]["phases"])
    lines = [
        [
            f"{row['case']}, {row['processes']}: {row['candidate']}",
            f"{row['milliseconds']:.0f}",
            *(f"{row['phases'][phase]:.1f}" for phase in phases),
            " + ".join(str(number) for number in row["collectives"].values()),
        ]
        for row in found["rows"]
    ]
    head = ["case, processes: candidate", "an iteration, ms", *phases, "collectives: agreement + out + back"]
    return _fold("An iteration by phase", f"{table(head, lines)}\n\n{machine_line(found, 'a thread for each process')}")


def engines() -> str:
    """Return the table of DeepSpeed with our optimizer and with its own, by stage and dtype."""
    found = load("engines_speed")
    if found is None or not found["rows"]:
        return ""
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        by_case.setdefault((row["case"], row["dtype"]), {})[row["candidate"]] = row
    candidates = [row["candidate"] for row in found["rows"][: len(found["rows"]) // len(by_case)]]
    ours = by_case[next(iter(by_case))]["muonfx"]
    lines = [
        [
            f"{case}, {dtype}",
            *(_milliseconds(own[name]["milliseconds"]) for name in candidates),
            _ratio(own["muonfx"]["ratio"]),
        ]
        for (case, dtype), own in by_case.items()
    ]
    about = f"{ours['processes']} processes, a thread for each, {ours['rounds']} rounds"
    head = ["an iteration", *(f"{name}, ms" for name in candidates), "muonfx / first column"]
    return _fold("An iteration", f"{table(head, lines)}\n\n{machine_line(found, about)}")


def planner() -> str:
    """Return the table of predicted and measured steps of two processes."""
    found = load("planner_speed")
    if found is None:
        return ""
    lines = [
        [
            row["case"],
            f"{row['predicted']:.1f}",
            _milliseconds(row["milliseconds"]),
            f"{row['predicted over measured']:.2f}",
        ]
        for row in found["rows"]
    ]
    head = ["a step of two processes", "predicted, ms", "measured, ms", "predicted / measured"]
    return _fold(
        "Predicted and measured", f"{table(head, lines)}\n\n{machine_line(found, 'two processes, a thread for each')}"
    )


def overhead() -> str:
    """Return the tables of steps of many small leaves, in one process and on ranks."""
    leaves, ranks = load("leaves_speed"), load("overhead_speed")
    if leaves is None or ranks is None:
        return ""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in leaves["rows"]:
        by_name.setdefault(row["candidate"], []).append(row)
    lines = [
        [
            name,
            *(_milliseconds(row["milliseconds"]) for row in own),
            " / ".join(f"{aim:g}" for aim in AIMS.get(name, ())),
        ]
        for name, own in by_name.items()
    ]
    head = ["ms of processor time", *(f"{count:,} leaves" for count in COUNTS), "aims"]
    alone = _fold("Leaves of 8 x 8, one process", f"{table(head, lines)}\n\n{machine_line(leaves, 'one thread')}")
    lines = [
        [f"{row['case']}, {row['processes']}", row["candidate"], f"{row['milliseconds']:.1f}", f"{row['beyond']:.1f}"]
        for row in ranks["rows"]
        if "beyond" in row
    ]
    head = ["layout, processes", "candidate", "ms", "without Newton-Schulz and collectives, ms"]
    shown = f"{table(head, lines)}\n\n{machine_line(ranks, 'a thread for each process')}"
    return f"{alone}\n{_fold('299 leaves of width 32, on ranks', shown)}"


def parts() -> str:
    """Return a table for each set of matrices with the time of a step by part, and its limits."""
    found = load("parts_speed")
    if found is None:
        return ""
    made: list[str] = []
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["case"] == case]
        lines = [
            [
                row["candidate"],
                _milliseconds(row["milliseconds"]),
                *(f"{row['parts'][part]:.2f}" for part in ("products", "passes", "python")),
                f"{row['sum over step']:.2f}",
                f"{sum(row['flops'].values()) / 1e9:.1f}",
                *(f"{row['roofline'][k]:.2f}" for k in ("products over peak", "passes over least", "step over least")),
            ]
            for row in sorted(own, key=lambda row: row["milliseconds"]["median"])
        ]
        head = ["one step", "ms", "products, ms", "passes, ms", "Python, ms", "sum / step", "GFLOP"]
        head += ["products / peak", "passes / least", "step / least"]
        limit = own[0]["roofline"]
        least = f"Least: products {limit['least products']:.2f} ms, passes {limit['least passes']:.2f} ms."
        made += [f"## {case}\n", table(head, lines), f"\n{least}\n"]
    peaks = found["rows"][0]["peaks"]
    rates = ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in peaks["flops"].items())
    return "\n".join([*made, f"Peaks: {rates}; a copy {peaks['bytes'] / 1e9:.1f} GB/s.\n", f"{machine_line(found)}\n"])


# ------------------------------------------------------------------------------------------------------- training


Curves = dict[str, dict[float, list[float]]]


def curves(found: dict[str, Any], size: str) -> Curves:
    """Return the losses of a model size by candidate and rate, ordered by seed, without rates with missing seeds."""
    rows = [row for row in found["rows"] if row["size"] == size]
    seeds = sorted({row["seed"] for row in rows})
    by_run = {(row["candidate"], row["rate"], row["seed"]): row["loss"] for row in rows}
    made: Curves = {}
    for candidate, rate, _ in sorted(by_run, key=lambda run: run[1]):
        losses = [by_run.get((candidate, rate, seed)) for seed in seeds]
        if None not in losses:
            made.setdefault(candidate, {})[rate] = [loss for loss in losses if loss is not None]
    return made


def training() -> str:
    """Return the tables of final losses at each candidate's best rate, compared with torch.optim.Muon."""
    found = load("training_quality")
    if found is None:
        return ""
    parts: list[str] = []
    for size in dict.fromkeys(row["size"] for row in found["rows"]):
        own = curves(found, size)
        best = {name: min(by_rate.items(), key=lambda item: fmean(item[1])) for name, by_rate in own.items()}
        base, default_rate = best[BASELINE][1], best["polar_express_5"][0]
        lines: list[list[str]] = []
        for name, (rate, losses) in sorted(best.items(), key=lambda item: fmean(item[1][1])):
            apart = [mine - theirs for mine, theirs in zip(losses, base, strict=True)]
            error = "" if name == BASELINE else f"{fmean(apart):+.4f} ± {stdev(apart) / len(apart) ** 0.5:.4f}"
            spent = [r for r in found["rows"] if (r["size"], r["candidate"], r["rate"]) == (size, name, rate)]
            share = fmean(r["optimizer_seconds"] / (r["optimizer_seconds"] + r["model_seconds"]) for r in spent)
            rates = ", ".join(f"{rate:g}" for rate in sorted(own[name]))
            at_default = f"{fmean(own[name][default_rate]):.4f}" if default_rate in own[name] else ""
            lines.append([name, rates, f"{rate:g}", f"{fmean(losses):.4f}", error, at_default, f"{share:.0%}"])
        head = [
            "",
            "rates tried",
            "best rate",
            "mean loss",
            f"minus {BASELINE}, ± standard error",
            f"mean loss at {default_rate:g}",
            "optimizer's share",
        ]
        parts += [f"## {size} parameters\n", table(head, lines), ""]
    return "\n".join([*parts, f"{machine_line(found, 'one thread')}\n"])


# ------------------------------------------------------------------------------------------------------- findings

GATHERED = "full_tensor() on every rank"


def _sharded() -> str:
    """Return the finding on a step under FSDP2, compared with gathering all matrices on all ranks."""
    found = load("sharding_speed")
    rows = [row for row in found["rows"] if row["case"] == "FSDP2"] if found else []
    by_processes: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_processes.setdefault(row["processes"], {})[row["candidate"]] = row
    if not by_processes:
        return ""
    times = " and ".join(
        f"{own['muonfx']['ratio']['median']:.2f} (on {processes} processes)" for processes, own in by_processes.items()
    )
    most = max(by_processes)
    ours, theirs = by_processes[most]["muonfx"], by_processes[most][GATHERED]
    return (
        f"**Under sharding, each matrix is orthogonalized once.** Under FSDP2, a step takes {times} of the time of a "
        f"step that gathers every matrix on every rank. On {most} processes, a rank sends {_bytes(ours['sent'])} "
        f"instead of {_bytes(theirs['sent'])}, and all ranks together orthogonalize {ours['matrices']} matrices "
        f"instead of {theirs['matrices']}. All processes share {found['machine']['cores'] if found else 0} cores; no "
        f"network was measured. See [several processes](#several-processes)."
    )


def _alone() -> str:
    """Return the finding on a step in one process, compared with other packages, the last set of matrices first."""
    found = load("step_speed")
    if found is None:
        return ""
    cases = list(dict.fromkeys(row["case"] for row in reversed(found["rows"])))
    own = {(row["candidate"], row["case"]): row["ratio"] for row in found["rows"]}
    ours = "; ".join(f"{_ratio(own['muonfx', case])} for {case.replace('^2', '²').replace('x', '×')}" for case in cases)
    others = [row["candidate"] for row in found["rows"] if row["default"] and not row["candidate"].startswith("mfx.")]
    peers = ", ".join(
        f"{name} " + " and ".join(f"{own[name, case]['median']:.2f}" for case in cases)
        for name in dict.fromkeys(others)
        if name != BASELINE
    )
    medians = [own["muonfx", case]["median"] for case in cases]
    around = " to ".join(f"{median:.2f}" for median in dict.fromkeys((min(medians), max(medians))))
    return (
        f"**In one process, a step takes {around} of the time of {BASELINE}** and computes the same update: {ours}, "
        f"with the 10th and 90th percentiles in brackets. Other packages, with their defaults: {peers}. "
        f"See [the optimizer step](#the-optimizer-step)."
    )


def _slower() -> str:
    """Return the finding on the cases in which muonfx is slower."""
    times, saved = load("polar_speed"), load("checkpoint_speed")
    slower: list[str] = []
    for row in times["rows"] if times else ():
        if row["candidate"] == "muonfx" and row["ratio"]["median"] > 1.1:
            slower.append(
                f"orthogonalizing {shape_name(row['shape'])} takes {row['ratio']['median']:.2f} times as long as "
                f"PyTorch's function"
            )
    for row in saved["rows"] if saved else ():
        if (rate := 1 / row["muonfx"]["ratio"]["median"]) < 0.9:
            what = f"the {row['what']} of a checkpoint of {row['leaves']:,} leaves"
            slower.append(f"{what} has {rate:.2f} of the throughput of plain safetensors")
    if not slower:
        return ""
    return (
        f"**More than a tenth slower:** {'; '.join(slower)}. A load verifies every byte; safetensors does not. "
        f"See [orthogonalization](#orthogonalization) and [checkpoints](#checkpoints)."
    )


def findings() -> str:
    """Return the findings as a numbered list."""
    found = [made for make in (_sharded, _alone, _slower) if (made := make())]
    return "\n".join(f"{number}. {text}" for number, text in enumerate(found, 1)) + "\n"


def saved() -> str:
    """Return the table of the times of a checkpoint, divided by the times of plain safetensors."""
    found = load("checkpoint_speed")
    by_what: dict[str, dict[int, str]] = {}
    for row in found["rows"] if found else ():
        by_what.setdefault(row["what"], {})[row["leaves"]] = f"{row['muonfx']['ratio']['median']:.2f}"
    counts = list(next(iter(by_what.values()), {}))
    lines = [[what, *(own[count] for count in counts)] for what, own in by_what.items()]
    return table(["", *(f"{count:,} leaves" for count in counts)], lines) + "\n"


def zero() -> str:
    """Return the table of iterations under ZeRO, divided by iterations with DeepSpeed's own Muon."""
    found = load("sharding_speed")
    rows = [row for row in found["rows"] if row["candidate"] == "muonfx, whole"] if found else []
    sizes = list(dict.fromkeys(row["processes"] for row in rows))
    ratio = {(row["case"], row["processes"]): f"{row['ratio']['median']:.2f}" for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [[case, *(ratio[case, size] for size in sizes)] for case in cases]
    return table(["", *(f"{size} processes" for size in sizes)], lines) + "\n"


def gpu() -> str:
    """Return the tables of a run on a GPU, or a sentence that there was none."""
    measured = load("gpu")
    if measured is None:
        return "No run was recorded yet.\n"
    sections: list[str] = [f"{machine_line(measured)}\n"]
    for part in dict.fromkeys(row["part"] for row in measured["rows"]):
        rows = [row for row in measured["rows"] if row["part"] == part]
        sections.append(f"## {part}\n")
        sections += [f"Failed: {row['failed']}\n" for row in rows if "failed" in row]
        stopped = [row["stopped after minutes"] for row in rows if "stopped after minutes" in row]
        sections += [f"Stopped after {minutes:g} minutes; later cases were not measured.\n" for minutes in stopped]
        if timed := [row for row in rows if "milliseconds" in row]:
            sections.append(_gpu_times(timed))
    return "\n".join(sections)


def _gpu_times(rows: list[dict[str, Any]]) -> str:
    """Return the table of a part whose candidates are timed."""
    # besides times, each part measures one other quantity
    formats: dict[str, Callable[[Any], str]] = {
        "error": lambda error: f"{error:.1e}",
        "bytes at the peak": _bytes,
        "same bits": lambda same: "yes" if same else "**no**",
    }
    (quantity,) = formats.keys() & rows[0].keys()
    lines: list[list[str]] = []
    for row in rows:
        name = f"{row['case']}: {row['candidate']}"
        milliseconds = f"{row['milliseconds']['median']:.3f}"
        lines.append([name, milliseconds, _ratio(row["ratio"]), formats[quantity](row[quantity])])
    return table(["", "ms", "ratio to the baseline", quantity], lines) + "\n"


def operations() -> str:
    """Return the table of operations, FLOPs, bytes and estimated time of a step, by model and candidate."""
    found = load("operations_count")
    if found is None:
        return ""
    lines: list[list[str]] = []
    for row in found["rows"]:
        gigabytes = [row[key] / 1e9 for key in ("product_bytes", "other_bytes", "least bytes")]
        lines.append(
            [
                f"{row['model']}: {row['candidate']}",
                str(row["operations"]),
                f"{row['flops'] / 1e12:.2f}",
                *(f"{number:.1f}" for number in gigabytes),
                f"{row['seconds'] * 1e3:.1f}",
            ]
        )
    head = ["one step", "operations", "TFLOP", "GB of products", "GB of other operations", "least GB", "ms, estimated"]
    machine = found["machine"]
    return f"{table(head, lines)}\n\ntorch {machine['torch']}, Python {machine['python']}.\n"


GPU_SECTIONS: dict[str, Callable[[], str]] = {"gpu": gpu}
OPERATIONS_SECTIONS: dict[str, Callable[[], str]] = {"operations": operations}
FINDINGS_SECTIONS: dict[str, Callable[[], str]] = {"findings": findings, "saved": saved, "zero": zero}
SECTIONS: dict[str, Callable[[], str]] = {
    "adapter": adapter,
    "checkpoint": checkpoint,
    "polar": polar,
    "step": step,
    "scratch": scratch,
    "sharding": sharding,
    "sharding_timeline": sharding_timeline,
    "engines": engines,
    "planner": planner,
    "overhead": overhead,
}
PARTS_SECTIONS: dict[str, Callable[[], str]] = {"parts": parts}
TRAINING_SECTIONS: dict[str, Callable[[], str]] = {"training": training}


def tables() -> str:
    """Return all tables as Markdown."""
    return "\n".join(make() for make in (FINDINGS_SECTIONS | SECTIONS | PARTS_SECTIONS | TRAINING_SECTIONS).values())


def rewrite(page: Path = TABLES_PAGE, sections: dict[str, Callable[[], str]] = SECTIONS) -> None:
    """Rewrite the tables of a page, each section between its two marks."""
    text = page.read_text()
    for name, make in sections.items():
        begin = BEGIN.format(name)
        if begin not in text:
            raise ValueError(f"{page.name}: found no line {begin!r}, expected one for each of {', '.join(sections)}")
        pattern = re.escape(begin) + ".*?" + re.escape(END)
        made = f"{begin}\n\n{make()}\n{END}"
        text = re.sub(pattern, lambda _, made=made: made, text, count=1, flags=re.DOTALL)
    page.write_text(text)
