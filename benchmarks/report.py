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
from benchmarks.operations import MODELS
from benchmarks.quality import SPECTRA

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
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
    machine = found["machine"]
    where = machine["gpu"]
    if where is None:
        threads = threads or f"{machine['threads']} threads"
        bf16 = f" ({', '.join(machine['bf16'])})" if machine["bf16"] else ""
        where = f"{machine['cpu']}{bf16}, {threads}"
    packages = {row["package"] for row in found["rows"] if "package" in row}
    peers = [
        package for package in sorted(packages) if package.split()[0] not in ("torch", "muonfx")
    ]
    libraries = ", ".join([f"torch {machine['torch']}", *peers, f"Python {machine['python']}"])
    return f"{where}; {libraries}, load average at the end {machine['load']:.1f}."


def _milliseconds(value: dict[str, float]) -> str:
    return f"{value['median']:.2f}"


def _ratio(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['p10']:.2f} to {value['p90']:.2f})"


def _throughput(times: dict[str, float]) -> str:
    """Format ratios of times as ratios of throughput."""
    return f"{1 / times['median']:.2f} ({1 / times['p90']:.2f} to {1 / times['p10']:.2f})"


def _bytes(value: int) -> str:
    return f"{value / 2**20:.2f} MiB"


def _all_bytes(row: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """Format the numbers of bytes in a row under some keys."""
    return [_bytes(row[key]) for key in keys]


def shape_name(shape: Iterable[int]) -> str:
    """Format a shape.

    >>> shape_name([64, 128, 128])
    '64 x 128 x 128'
    """
    return " x ".join(map(str, shape))


# ------------------------------------------------------------------------------------------------------- adapter


def adapter() -> str:
    """Return the tables of time and memory of a chain as a torch optimizer."""
    return "\n".join(filter(None, [_adapter_times(), _adapter_memory()]))


def _adapter_times() -> str:
    """Return the table of the time of a step of a chain as a torch optimizer."""
    speed = load("adapter_speed")
    if speed is None:
        return ""
    lines: list[list[str]] = []
    for row in speed["rows"]:
        ours = row["muonfx"]
        milliseconds = [
            _milliseconds(row["torch"]["milliseconds"]),
            _milliseconds(ours["milliseconds"]),
        ]
        ratios = [_ratio(ours["ratio"]), _ratio(row["torch again"]["ratio"])]
        lines.append([f"{row['optimizer']}: {row['case']}", *milliseconds, *ratios])
    head = [
        "one optimizer step, fp32",
        "torch, ms",
        "muonfx, ms",
        "muonfx / torch",
        "torch / torch",
    ]
    return _fold("Time of a step", f"{table(head, lines)}\n\n{machine_line(speed)}")


def _adapter_memory() -> str:
    """Return the table of the peak memory of a step of a chain as a torch optimizer."""
    memory = load("adapter_memory")
    if memory is None:
        return ""
    columns = ("parameters", "largest parameter", "torch", "muonfx")
    lines: list[list[str]] = []
    for row in memory["rows"]:
        lines.append([f"{row['optimizer']}: {row['case']}", *_all_bytes(row, columns)])
    head = ["peak beyond parameters, gradients, state", *columns]
    return _fold("Memory of a step", f"{table(head, lines)}\n\n{machine_line(memory)}")


# ------------------------------------------------------------------------------------------------ speed and quality

Quality = dict[str, dict[str, Any]]
"""The rows of one candidate by spectrum."""


def checkpoint() -> str:
    """Return the tables of time and memory of a checkpoint, compared with plain safetensors."""
    return "\n".join(filter(None, [_checkpoint_times(), _first_load(), _checkpoint_memory()]))


CHECKPOINT_HEAD = [
    "safetensors, ms",
    "muonfx, ms",
    "throughput, muonfx / safetensors",
    "again / safetensors",
]


def _beside_safetensors(row: dict[str, Any]) -> list[str]:
    """Return the cells under `CHECKPOINT_HEAD` of one row."""
    milliseconds = [
        f"{row[who]['milliseconds']['median']:.0f}" for who in ("safetensors", "muonfx")
    ]
    return [
        *milliseconds,
        _throughput(row["muonfx"]["ratio"]),
        _throughput(row["safetensors again"]["ratio"]),
    ]


def _checkpoint_times() -> str:
    """Return the table of the times to save and to load."""
    speed = load("checkpoint_speed")
    if speed is None:
        return ""
    lines: list[list[str]] = []
    for row in speed["rows"]:
        title = f"{row['what']} of {_bytes(row['bytes'])} in {row['leaves']} leaves"
        lines.append([title, *_beside_safetensors(row)])
    head = ["a checkpoint", *CHECKPOINT_HEAD]
    return _fold("Time of a checkpoint", f"{table(head, lines)}\n\n{machine_line(speed)}")


def _first_load() -> str:
    """Return the table of the time of the first load of a process."""
    fresh = load("checkpoint_fresh")
    if fresh is None:
        return ""
    lines: list[list[str]] = []
    for row in fresh["rows"]:
        title = f"{_bytes(row['bytes'])} in {row['leaves']} leaves"
        by_processor = _throughput(row["processor"]["muonfx"]["ratio"])
        lines.append([title, *_beside_safetensors(row), by_processor])
    head = [
        "a load in a fresh process",
        *CHECKPOINT_HEAD,
        "by processor time, muonfx / safetensors",
    ]
    return _fold("The first load of a process", f"{table(head, lines)}\n\n{machine_line(fresh)}")


def _checkpoint_memory() -> str:
    """Return the table of the peak memory of a save and a load."""
    memory = load("checkpoint_memory")
    if memory is None:
        return ""
    lines: list[list[str]] = []
    for row in memory["rows"]:
        lines.append([row["what"], *_all_bytes(row, ("bytes", "largest leaf", "peak beyond"))])
    head = ["peak of the process beyond the state", "state", "largest leaf", "muonfx"]
    return _fold("Memory of a checkpoint", f"{table(head, lines)}\n\n{machine_line(memory)}")


def judged(
    found: dict[str, Any] | None, case: str, key: Callable[[dict[str, Any]], str]
) -> dict[str, Quality]:
    """Return the quality of every candidate in one case, from the rows of a result."""
    qualities: dict[str, Quality] = {}
    for row in found["rows"] if found else ():
        if key(row) == case:
            qualities.setdefault(row["candidate"], {})[row["spectrum"]] = row
    return qualities


def faster_and_worse(row: dict[str, Any], quality: dict[str, Quality]) -> bool:
    """Return True if a candidate is faster than torch's and its error exceeds `WORSE` times torch's on a spectrum."""
    candidate = quality.get(row["candidate"])
    baseline = quality.get(BASELINE)
    if candidate is None or baseline is None or row["ratio"]["median"] >= 1:
        return False
    return any(
        candidate[spectrum]["error"] > WORSE * baseline[spectrum]["error"] for spectrum in SPECTRA
    )


def _quality_tables(
    speed: str, quality: str, heading: str, key: Callable[[dict[str, Any]], str]
) -> str:
    """Return a table for each case with times, ratios, errors and singular values, the fastest candidate first."""
    times, qualities = load(speed), load(quality)
    if times is None:
        return ""
    head = [heading, "coefficients", "ms", "time / torch", "error, Gaussian", "error, geometric"]
    head += [f"singular values, {name}" for name in ("Gaussian", "geometric")]
    sections: list[str] = []
    for case in dict.fromkeys(map(key, times["rows"])):
        rows = [row for row in times["rows"] if key(row) == case]
        quality_of = judged(qualities, case, key)
        lines = [_quality_line(row, quality_of) for row in sorted(rows, key=_median_time)]
        sections.append(_fold(case, table(head, lines)))
    return "\n".join([*sections, f"{machine_line(times)}\n"])


def _median_time(row: dict[str, Any]) -> float:
    return row["milliseconds"]["median"]


def _quality_line(row: dict[str, Any], quality_of: dict[str, Quality]) -> list[str]:
    """Return the cells of one candidate: its name and marks, coefficients, time, ratio, errors and singular values."""
    star = " \\*" if row["default"] else ""
    mark = " †" if faster_and_worse(row, quality_of) else ""
    line = [
        f"{row['candidate']}{star}{mark}",
        row["coefficients"],
        _milliseconds(row["milliseconds"]),
    ]
    line.append(_ratio(row["ratio"]))
    errors: list[str] = []
    singular_values: list[str] = []
    quality = quality_of.get(row["candidate"], {})
    for spectrum in SPECTRA:
        if spectrum not in quality:
            errors.append("")
            singular_values.append("")
            continue
        judged_row = quality[spectrum]
        errors.append(f"{judged_row['error']:.1e}")
        singular_values.append(f"{judged_row['smallest']:.3f} to {judged_row['largest']:.3f}")
    return [*line, *errors, *singular_values]


def polar() -> str:
    """Return the tables of orthogonalization, one for each shape."""
    return _quality_tables(
        "polar_speed", "polar_quality", "orthogonalize", lambda row: shape_name(row["shape"])
    )


def step() -> str:
    """Return the tables of the optimizer step, one for each set of matrices; then those of a CPU with AMX."""
    on_zen = _quality_tables("step_speed", "step_quality", "one step", lambda row: row["case"])
    with_amx = _quality_tables(
        "step_speed_amx",
        "step_quality_amx",
        "one step",
        lambda row: f"{row['case']}, on a CPU with AMX",
    )
    return f"{on_zen}\n{with_amx}"


def scratch() -> str:
    """Return the table of scratch memory by limit."""
    found = load("polar_scratch")
    if found is None:
        return ""
    limits = [name for name in found["rows"][0] if name.isdigit()]
    names = ["1 byte" if limit == "1" else f"{int(limit) >> 20} MiB" for limit in limits]
    head = [
        "matrices",
        "products",
        "results",
        "one matrix needs",
        *(f"limit {name}" for name in names),
    ]
    rows: list[list[str]] = []
    for row in found["rows"]:
        dtype = row["dtype"].removeprefix("torch.")
        cells = [row["list"], dtype, row["results"], _bytes(row["one matrix"])]
        for limit in limits:
            cell = _bytes(row[limit])
            exceeds_limit = row[limit] > max(int(limit), row["one matrix"])
            cells.append(f"**{cell}**" if exceeds_limit else cell)
        rows.append(cells)
    return _fold("Scratch by limit", f"{table(head, rows)}\n\n{machine_line(found)}")


def sharding() -> str:
    """Return a table for each case on several processes: time, bytes sent, matrices orthogonalized, and error."""
    found = load("sharding_speed")
    if found is None:
        return ""
    rows_of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        rows_of.setdefault((row["case"], row["processes"]), []).append(row)
    cases = list(dict.fromkeys(case for case, _ in rows_of))
    sections: list[str] = []
    # All processes of a case together.
    for case, processes in sorted(rows_of, key=lambda key: cases.index(key[0])):
        what = "the optimizer step" if case == "FSDP2" else "an iteration"
        lines = [_sharding_line(row) for row in rows_of[case, processes]]
        head = ["", "ms", "time / first row", "sent per rank", "matrices orthogonalized", "error"]
        sections.append(_fold(f"{case}, {processes} processes: {what}", table(head, lines)))
    cores = found["machine"]["cores"]
    return "\n".join(
        [*sections, f"{machine_line(found, f'{cores} cores, a thread for each process')}\n"]
    )


def _sharding_line(row: dict[str, Any]) -> list[str]:
    """Return the cells of one candidate on several processes."""
    error = "" if row["apart"] is None else f"{row['apart']:.1e}"
    matrices = f"{row['matrices']} for {row['of']}"
    return [
        row["candidate"],
        _milliseconds(row["milliseconds"]),
        _ratio(row["ratio"]),
        _bytes(row["sent"]),
        matrices,
        error,
    ]


def sharding_timeline() -> str:
    """Return the table of milliseconds per iteration by phase."""
    found = load("sharding_timeline")
    if found is None:
        return ""
    phases = list(found["rows"][0]["phases"])
    lines: list[list[str]] = []
    for row in found["rows"]:
        title = f"{row['case']}, {row['processes']}: {row['candidate']}"
        times = [f"{row['phases'][phase]:.1f}" for phase in phases]
        collectives = " + ".join(map(str, row["collectives"].values()))
        lines.append([title, f"{row['milliseconds']:.0f}", *times, collectives])
    head = [
        "case, processes: candidate",
        "an iteration, ms",
        *phases,
        "collectives: agreement + out + back",
    ]
    return _fold(
        "An iteration by phase",
        f"{table(head, lines)}\n\n{machine_line(found, 'a thread for each process')}",
    )


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
    lines: list[list[str]] = []
    for (case, dtype), row_of in by_case.items():
        times = [_milliseconds(row_of[name]["milliseconds"]) for name in candidates]
        lines.append([f"{case}, {dtype}", *times, _ratio(row_of["muonfx"]["ratio"])])
    about = f"{ours['processes']} processes, a thread for each, {ours['rounds']} rounds"
    head = ["an iteration", *(f"{name}, ms" for name in candidates), "muonfx / first column"]
    return _fold("An iteration", f"{table(head, lines)}\n\n{machine_line(found, about)}")


def planner() -> str:
    """Return the table of predicted and measured steps of two processes."""
    found = load("planner_speed")
    if found is None:
        return ""
    lines: list[list[str]] = []
    for row in found["rows"]:
        ratio = f"{row['predicted over measured']:.2f}"
        lines.append(
            [row["case"], f"{row['predicted']:.1f}", _milliseconds(row["milliseconds"]), ratio]
        )
    head = ["a step of two processes", "predicted, ms", "measured, ms", "predicted / measured"]
    return _fold(
        "Predicted and measured",
        f"{table(head, lines)}\n\n{machine_line(found, 'two processes, a thread for each')}",
    )


def overhead() -> str:
    """Return the tables of steps of many small leaves, in one process and on ranks."""
    leaves, ranks = load("leaves_speed"), load("overhead_speed")
    if leaves is None or ranks is None:
        return ""
    return f"{_overhead_alone(leaves)}\n{_overhead_on_ranks(ranks)}"


def _overhead_alone(found: dict[str, Any]) -> str:
    """Return the table of processor time by number of leaves, in one process."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        rows_of.setdefault(row["candidate"], []).append(row)
    lines: list[list[str]] = []
    for candidate, rows in rows_of.items():
        aims = " / ".join([f"{aim:g}" for aim in AIMS.get(candidate, ())])
        lines.append([candidate, *[_milliseconds(row["milliseconds"]) for row in rows], aims])
    head = ["ms of processor time", *[f"{count:,} leaves" for count in COUNTS], "aims"]
    return _fold(
        "Leaves of 8 x 8, one process",
        f"{table(head, lines)}\n\n{machine_line(found, 'one thread')}",
    )


def _overhead_on_ranks(found: dict[str, Any]) -> str:
    """Return the table of the time of a step on ranks, and of the part that is neither products nor messages."""
    lines: list[list[str]] = []
    for row in found["rows"]:
        if "beyond" in row:
            layout = f"{row['case']}, {row['processes']}"
            lines.append(
                [layout, row["candidate"], f"{row['milliseconds']:.1f}", f"{row['beyond']:.1f}"]
            )
    head = ["layout, processes", "candidate", "ms", "without Newton-Schulz and collectives, ms"]
    machine = machine_line(found, "a thread for each process")
    return _fold("299 leaves of width 32, on ranks", f"{table(head, lines)}\n\n{machine}")


def parts() -> str:
    """Return a table for each set of matrices with the time of a step by part, and its limits."""
    found = load("parts_speed")
    if found is None:
        return ""
    head = ["one step", "ms", "products, ms", "passes, ms", "Python, ms", "sum / step", "GFLOP"]
    head += ["products / peak", "passes / least", "step / least"]
    sections: list[str] = []
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["case"] == case]
        lines = [_parts_line(row) for row in sorted(rows, key=_median_time)]
        limit = rows[0]["roofline"]
        least = f"Least: products {limit['least products']:.2f} ms, passes {limit['least passes']:.2f} ms."
        sections += [f"### {case}\n", table(head, lines), f"\n{least}\n"]
    peaks = found["rows"][0]["peaks"]
    rates = ", ".join(
        [f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in peaks["flops"].items()]
    )
    sections.append(f"Peaks: {rates}; a copy {peaks['bytes'] / 1e9:.1f} GB/s.\n")
    return "\n".join([*sections, f"{machine_line(found)}\n"])


def _parts_line(row: dict[str, Any]) -> list[str]:
    """Return the cells of one candidate: its times by part, its work, and its ratios to the limits."""
    line = [row["candidate"], _milliseconds(row["milliseconds"])]
    line += [f"{row['parts'][part]:.2f}" for part in ("products", "passes", "python")]
    line.append(f"{row['sum over step']:.2f}")
    line.append(f"{sum(row['flops'].values()) / 1e9:.1f}")
    for ratio in ("products over peak", "passes over least", "step over least"):
        line.append(f"{row['roofline'][ratio]:.2f}")
    return line


# ------------------------------------------------------------------------------------------------------- training


Curves = dict[str, dict[float, list[float]]]


def curves(found: dict[str, Any], size: str) -> Curves:
    """Return the losses of a model size by candidate and rate, ordered by seed, without rates with missing seeds."""
    rows = [row for row in found["rows"] if row["size"] == size]
    rows.sort(key=lambda row: (row["rate"], row["seed"]))
    seeds = {row["seed"] for row in rows}
    losses_of: Curves = {}
    for row in rows:
        losses_of.setdefault(row["candidate"], {}).setdefault(row["rate"], []).append(row["loss"])
    complete: Curves = {}
    for candidate, losses_at in losses_of.items():
        complete[candidate] = {
            rate: losses for rate, losses in losses_at.items() if len(losses) == len(seeds)
        }
    return {candidate: losses_at for candidate, losses_at in complete.items() if losses_at}


def training() -> str:
    """Return the tables of final losses at each candidate's best rate, compared with torch.optim.Muon."""
    found = load("training_quality")
    if found is None:
        return ""
    sections: list[str] = []
    for size in dict.fromkeys(row["size"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["size"] == size]
        sections += [f"## {size} parameters\n", _training_table(rows, curves(found, size)), ""]
    return "\n".join([*sections, f"{machine_line(found, 'one thread')}\n"])


def _training_table(rows: list[dict[str, Any]], losses_of: Curves) -> str:
    """Return the table of one model size, the candidate with the least mean loss first."""
    best_rate = {
        name: min(losses_at, key=lambda rate: fmean(losses_at[rate]))
        for name, losses_at in losses_of.items()
    }
    best_losses = {name: losses_of[name][rate] for name, rate in best_rate.items()}
    default_rate = best_rate["polar_express_5"]
    lines: list[list[str]] = []
    for name in sorted(best_losses, key=lambda name: fmean(best_losses[name])):
        rates = ", ".join([f"{rate:g}" for rate in sorted(losses_of[name])])
        difference = (
            "" if name == BASELINE else _mean_difference(best_losses[name], best_losses[BASELINE])
        )
        at_default = ""
        if default_rate in losses_of[name]:
            at_default = f"{fmean(losses_of[name][default_rate]):.4f}"
        runs = [row for row in rows if (row["candidate"], row["rate"]) == (name, best_rate[name])]
        loss = f"{fmean(best_losses[name]):.4f}"
        share = f"{_optimizer_share(runs):.0%}"
        lines.append([name, rates, f"{best_rate[name]:g}", loss, difference, at_default, share])
    head = ["", "rates tried", "best rate", "mean loss", f"minus {BASELINE}, ± standard error"]
    head += [f"mean loss at {default_rate:g}", "optimizer's share"]
    return table(head, lines)


def _mean_difference(losses: list[float], baseline: list[float]) -> str:
    """Format the mean difference of losses with the same seeds, with its standard error: "+0.0050 ± 0.0014"."""
    differences = [loss - other for loss, other in zip(losses, baseline, strict=True)]
    return f"{fmean(differences):+.4f} ± {stdev(differences) / len(differences) ** 0.5:.4f}"


def _optimizer_share(runs: list[dict[str, Any]]) -> float:
    """Return the mean share of the optimizer in the time of some runs."""
    shares: list[float] = []
    for run in runs:
        shares.append(run["optimizer_seconds"] / (run["optimizer_seconds"] + run["model_seconds"]))
    return fmean(shares)


# ------------------------------------------------------------------------------------------------------- findings

GATHERED = "full_tensor() on every rank"


def _sharded() -> str:
    """Return the finding on a step under FSDP2, compared with gathering all matrices on all ranks."""
    found = load("sharding_speed")
    if found is None:
        return ""
    by_processes: dict[int, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["case"] == "FSDP2":
            by_processes.setdefault(row["processes"], {})[row["candidate"]] = row
    if not by_processes:
        return ""
    ratios: list[str] = []
    for processes, row_of in by_processes.items():
        ratios.append(f"{row_of['muonfx']['ratio']['median']:.2f} (on {processes} processes)")
    times = " and ".join(ratios)
    most = max(by_processes)
    ours, theirs = by_processes[most]["muonfx"], by_processes[most][GATHERED]
    return (
        f"**Under sharding, each matrix is orthogonalized once.** Under FSDP2, a step takes {times} of the time of a "
        f"step that gathers every matrix on every rank. On {most} processes, a rank sends {_bytes(ours['sent'])} "
        f"instead of {_bytes(theirs['sent'])}, and all ranks together orthogonalize {ours['matrices']} matrices "
        f"instead of {theirs['matrices']}. All processes share {found['machine']['cores']} cores; no "
        f"network was measured. See [several processes](#several-processes)."
    )


def _alone() -> str:
    """Return the finding on a step in one process, compared with other packages, the last set of matrices first."""
    found = load("step_speed")
    if found is None:
        return ""
    cases = list(dict.fromkeys(row["case"] for row in reversed(found["rows"])))
    ratio_of = {(row["candidate"], row["case"]): row["ratio"] for row in found["rows"]}
    ours: list[str] = []
    for case in cases:
        ours.append(
            f"{_ratio(ratio_of['muonfx', case])} for {case.replace('^2', '²').replace('x', '×')}"
        )
    names = [
        row["candidate"]
        for row in found["rows"]
        if row["default"] and not row["candidate"].startswith(BASELINE)  # nor its second timing
    ]
    peers: list[str] = []
    for name in dict.fromkeys(names):
        if not name.startswith("mfx."):
            medians = [f"{ratio_of[name, case]['median']:.2f}" for case in cases]
            peers.append(f"{name} {' and '.join(medians)}")
    our_medians = [ratio_of["muonfx", case]["median"] for case in cases]
    least, largest = f"{min(our_medians):.2f}", f"{max(our_medians):.2f}"
    around = least if least == largest else f"{least} to {largest}"
    return (
        f"**In one process, a step takes {around} of the time of {BASELINE}** and computes the same update: "
        f"{'; '.join(ours)}, with the 10th and 90th percentiles in brackets. Other packages, with their defaults: "
        f"{', '.join(peers)}.{_with_amx(cases)} See [the optimizer step](#the-optimizer-step)."
    )


def _with_amx(cases: list[str]) -> str:
    """Return the sentence on the same step on a CPU with AMX, for the same sets of matrices."""
    found = load("step_speed_amx")
    if found is None:
        return ""
    ratio_of = {(row["candidate"], row["case"]): row["ratio"]["median"] for row in found["rows"]}
    ratios = [f"{ratio_of['muonfx', case]:.2f}" for case in cases]
    return f" On two cores with AMX, the ratios are {' and '.join(ratios)}."


def _slower() -> str:
    """Return the finding on the cases in which muonfx is slower."""
    orthogonalizations = load("polar_speed") or {"rows": []}
    checkpoints = load("checkpoint_speed") or {"rows": []}
    slower: list[str] = []
    for row in orthogonalizations["rows"]:
        ratio = row["ratio"]["median"]
        if row["candidate"] == "muonfx" and ratio > 1.1:
            shape = shape_name(row["shape"])
            slower.append(
                f"orthogonalizing {shape} takes {ratio:.2f} times as long as PyTorch's function"
            )
    for row in checkpoints["rows"]:
        throughput = 1 / row["muonfx"]["ratio"]["median"]
        if throughput < 0.9:
            what = f"the {row['what']} of a checkpoint of {row['leaves']:,} leaves"
            slower.append(f"{what} has {throughput:.2f} of the throughput of plain safetensors")
    if not slower:
        return ""
    text = f"**More than a tenth slower:** {'; '.join(slower)}."
    if "checkpoint" in text:
        text += " A load verifies every byte; safetensors does not."
    return f"{text} See [orthogonalization](#orthogonalization) and [checkpoints](#checkpoints)."


def findings() -> str:
    """Return the findings as a numbered list."""
    texts = filter(None, [_sharded(), _alone(), _slower()])
    return "".join([f"{number}. {text}\n" for number, text in enumerate(texts, 1)])


def saved() -> str:
    """Return the table of the times of a checkpoint, divided by the times of plain safetensors."""
    found = load("checkpoint_speed")
    rows = found["rows"] if found else []
    ratio_of = {(row["what"], row["leaves"]): row["muonfx"]["ratio"]["median"] for row in rows}
    counts = list(dict.fromkeys(row["leaves"] for row in rows))
    lines: list[list[str]] = []
    for what in dict.fromkeys(row["what"] for row in rows):
        lines.append([what, *[f"{ratio_of[what, count]:.2f}" for count in counts]])
    return table(["", *[f"{count:,} leaves" for count in counts]], lines) + "\n"


def zero() -> str:
    """Return the table of iterations under ZeRO, divided by iterations with DeepSpeed's own Muon."""
    found = load("sharding_speed")
    rows: list[dict[str, Any]] = []
    if found is not None:
        rows = [row for row in found["rows"] if row["candidate"] == "muonfx, whole"]
    ratio_of = {(row["case"], row["processes"]): row["ratio"]["median"] for row in rows}
    sizes = list(dict.fromkeys(row["processes"] for row in rows))
    lines: list[list[str]] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        lines.append([case, *[f"{ratio_of[case, size]:.2f}" for size in sizes]])
    return table(["", *[f"{size} processes" for size in sizes]], lines) + "\n"


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
        sections += [
            f"Stopped after {minutes:g} minutes; later cases were not measured.\n"
            for minutes in stopped
        ]
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
    """Return the tables of operations, FLOPs, bytes and estimated time of a step, by model and candidate."""
    counted = load("operations_count")
    if counted is None:
        return ""
    rows = list(counted["rows"])
    compiled = load("operations_compiled")
    if compiled is not None:
        rows += compiled["rows"]
    rows.sort(
        key=lambda row: list(MODELS).index(row["model"])
    )  # stable: the compiled steps of a model follow its others
    lines = list(map(_line_of_operations, rows))
    head = [
        "one step",
        "operations",
        "TFLOP",
        "GB of products",
        "GB of other operations",
        "least GB",
        "ms, estimated",
    ]
    machine = counted["machine"]
    versions = f"torch {machine['torch']}, Python {machine['python']}."
    return f"{table(head, lines)}\n\n{_bytes_of_transforms(counted['rows'])}\n\n{versions}\n"


def _line_of_operations(row: dict[str, Any]) -> list[str]:
    """Return the cells of one candidate's step."""
    gigabytes = [row[key] / 1e9 for key in ("product_bytes", "other_bytes", "least bytes")]
    return [
        f"{row['model']}: {row['candidate']}",
        str(row["operations"]),
        f"{row['flops'] / 1e12:.2f}",
        *(f"{number:.1f}" for number in gigabytes),
        f"{row['seconds'] * 1e3:.1f}",
    ]


def _bytes_of_transforms(rows: list[dict[str, Any]]) -> str:
    """Return a table of the bytes outside of products: a line for each transform, a column for each model."""
    counted_rows = [row for row in rows if "bytes of transforms" in row]
    names: list[str] = []
    for row in counted_rows:
        names += [name for name in row["bytes of transforms"] if name not in names]
    lines: list[list[str]] = []
    for name in names:
        gigabytes = [row["bytes of transforms"].get(name, 0.0) / 1e9 for row in counted_rows]
        if max(gigabytes) >= 0.05:
            lines.append([f"`{name}`", *(f"{number:.1f}" for number in gigabytes)])
    return table(
        ["GB outside products, by transform", *(row["model"] for row in counted_rows)], lines
    )


GPU_SECTIONS: dict[str, Callable[[], str]] = {"gpu": gpu}
OPERATIONS_SECTIONS: dict[str, Callable[[], str]] = {"operations": operations}
FINDINGS_SECTIONS: dict[str, Callable[[], str]] = {
    "findings": findings,
    "saved": saved,
    "zero": zero,
}
SECTIONS: dict[str, Callable[[], str]] = {
    "adapter": adapter,
    "checkpoint": checkpoint,
    "polar": polar,
    "step": step,
    "parts": parts,
    "scratch": scratch,
    "sharding": sharding,
    "sharding_timeline": sharding_timeline,
    "engines": engines,
    "planner": planner,
    "overhead": overhead,
}
TRAINING_SECTIONS: dict[str, Callable[[], str]] = {"training": training}


def tables() -> str:
    """Return all tables as Markdown."""
    return "\n".join(make() for make in (FINDINGS_SECTIONS | SECTIONS | TRAINING_SECTIONS).values())


def rewrite(page: Path = TABLES_PAGE, sections: dict[str, Callable[[], str]] = SECTIONS) -> None:
    """Rewrite the tables of a page, each section between its two marks."""
    text = page.read_text()
    for name, make in sections.items():
        begin = BEGIN.format(name)
        if begin not in text:
            raise ValueError(
                f"{page.name}: found no line {begin!r}, expected one for each of {', '.join(sections)}"
            )
        pattern = re.escape(begin) + ".*?" + re.escape(END)
        made = f"{begin}\n\n{make()}\n{END}"
        text = re.sub(pattern, lambda _, made=made: made, text, count=1, flags=re.DOTALL)
    page.write_text(text)
