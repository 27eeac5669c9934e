"""The section of the track's page on two model sizes, and its picture, from ``results/scaling_quality.json`` alone.

Run ``python -m benchmarks.track.sizes``.
"""

from __future__ import annotations

import math
from statistics import fmean, variance
from typing import Any, NamedTuple

import muonfx as mfx
from benchmarks import report
from benchmarks.plots import ASSETS, pyplot
from benchmarks.track.scaling import (
    CHECK_SEED,
    CHECKED,
    FACTORS,
    LARGE,
    REFERENCE,
    SEEDS,
    SIZES,
    SMALL,
    measurements,
    moved,
)
from benchmarks.track.standings import PAGE

PICTURE = ASSETS / "track-sizes.svg"
ALT = "AdamW's steps for the same loss over the parameters, for torch.optim.Muon, mfx.Muon, NorMuon and AdaMuon"
CLEAR = 2.0
"""A change of more standard errors is called a change."""
NAMES = {
    REFERENCE: "AdamW, two rates",
    "torch_muon": "torch.optim.Muon",
    "muon": "mfx.Muon",
    "normuon": "NorMuon",
    "adamuon": "AdaMuon",
}

Results = dict[str, Any]


class Speed(NamedTuple):
    """The ratio of AdamW's steps to a contender's steps for the same loss, at one size."""

    by_seed: list[float]
    mean: float
    """Geometric mean over seeds."""
    log_error: float
    """Standard error of the logarithm of the mean."""


def losses_of(results: Results, size: str, contender: str) -> dict[int, dict[int, float]]:
    """Return the losses of the measured runs by steps and seed."""
    losses: dict[int, dict[int, float]] = {}
    for row in results["rows"]:
        is_measured = row["seed"] in SEEDS and row["settings"] == results["settings"][contender]
        if is_measured and (row["size"], row["contender"]) == (size, contender):
            losses.setdefault(row["steps"], {})[row["seed"]] = row["loss"]
    return dict(sorted(losses.items()))


def steps_to(loss: float, curve: list[tuple[int, float]]) -> float:
    """Return the number of steps to a loss, linear in log(steps) between the points of a curve, and beyond them.

    >>> curve = [(100, 2.0), (200, 1.0), (400, 0.5)]
    >>> [round(steps_to(loss, curve), 1) for loss in (2.0, 1.5, 1.0, 0.5, 0.25)]
    [100.0, 141.4, 200.0, 400.0, 565.7]
    """
    segment = 0
    while segment < len(curve) - 2 and loss < curve[segment + 1][1]:
        segment += 1
    (first_steps, first_loss), (second_steps, second_loss) = curve[segment : segment + 2]
    part = (loss - first_loss) / (second_loss - first_loss)
    return first_steps * (second_steps / first_steps) ** part


def speeds(results: Results, size: str) -> dict[str, Speed]:
    """Return the speed of each contender at one size, which is 1 for AdamW.

    Runs of one seed share initial weights and batches, so a loss is compared with AdamW's losses of the same seed. The
    variance over seeds is pooled over contenders, because two seeds give no good estimate for one of them.
    """
    reference = losses_of(results, size, REFERENCE)
    steps = min(reference)
    by_seed: dict[str, list[float]] = {}
    for contender in NAMES:
        if contender == REFERENCE:
            continue
        losses = losses_of(results, size, contender)[steps]
        by_seed[contender] = []
        for seed in SEEDS:
            curve = [(length, by_length[seed]) for length, by_length in reference.items()]
            by_seed[contender].append(steps_to(losses[seed], curve) / steps)
    pooled_variance = fmean(
        [variance([math.log(ratio) for ratio in ratios]) for ratios in by_seed.values()]
    )
    error = math.sqrt(pooled_variance / len(SEEDS))
    return {
        name: Speed(ratios, math.exp(fmean(map(math.log, ratios))), error)
        for name, ratios in by_seed.items()
    }


def missing_runs(results: Results) -> int:
    """Return the number of measured runs that are not finished."""
    missing = 0
    for size in SIZES:
        for run in measurements(size, results["settings"]):
            by_steps = losses_of(results, size, run.contender)
            if run.seed not in by_steps.get(run.steps, {}):
                missing += 1
    return missing


def missing_checks(results: Results) -> int:
    """Return the number of runs of the check at the large size that have not ended."""
    missing = 0
    for contender in NAMES:
        settings = results["settings"][contender]
        for number in CHECKED:
            for factor in (1 / FACTORS[number], FACTORS[number]):
                if _loss_at(results, contender, moved(settings, number, factor)) is None:
                    missing += 1
    return missing


def section() -> str:
    """Return the section: picture, findings and tables, or the number of runs that are missing."""
    results = report.load("scaling_quality")
    if results is None:
        return ""
    missing = missing_runs(results)
    if missing:
        return f"Not finished: {missing} runs are missing. `python -m benchmarks.track.scaling` continues.\n"
    speeds_at = {size: speeds(results, size) for size in SIZES}
    parts = [
        f"![{ALT}](assets/{PICTURE.name})",
        _findings(speeds_at),
        _sizes_table(results, speeds_at),
    ]
    if missing_checks(results) == 0:
        parts.append(_check_table(results))
    else:
        parts.append("Neighboring rates and decays at the larger size were not all tried yet.")
    if "times" in results:
        parts.append(_times_table(results["times"]))
    parts.append(report.machine_line(results, "one thread"))
    return "\n\n".join(parts) + "\n"


def _findings(speeds_at: dict[str, dict[str, Speed]]) -> str:
    """Return a list with a sentence for each contender, which says whether its advantage changed with the size."""
    lines: list[str] = []
    for contender, name in list(NAMES.items())[1:]:
        small, large = [speeds_at[size][contender] for size in SIZES]
        change = math.log(large.mean / small.mean)
        verdict = "no change was shown"
        if abs(change) > CLEAR * math.hypot(small.log_error, large.log_error):
            verdict = "its advantage grew" if change > 0 else "its advantage shrank"
        ratios = (
            f"{_speed_text(small)} times its steps at {SMALL}, and {_speed_text(large)} at {LARGE}"
        )
        lines.append(
            f"- **{name}**: AdamW needs {ratios} ({_change_text([small, large])}: {verdict})."
        )
    return "\n".join(lines)


def _sizes_table(results: Results, speeds_at: dict[str, dict[str, Speed]]) -> str:
    """Return the table of losses and speeds at both sizes."""
    lines: list[list[str]] = []
    for contender, name in NAMES.items():
        line = [
            name,
            ", ".join([f"{value:g}" for value in results["settings"][contender].values()]),
        ]
        for size in SIZES:
            losses = losses_of(results, size, contender)
            line.append(f"{fmean(losses[min(losses)].values()):.3f}")
            line.append(_speed_text(speeds_at[size].get(contender)))
        line.append(_change_text([speeds_at[size].get(contender) for size in SIZES]))
        lines.append(line)
    head = ["", "rate, decay, rate of the rest"]
    for size in SIZES:
        head += [f"{size}: loss", "AdamW's steps"]
    return report.table([*head, "change"], lines)


def _speed_text(speed: Speed | None) -> str:
    """Format a speed: "1.35 ± 0.02"."""
    return "1" if speed is None else f"{speed.mean:.2f} ± {speed.mean * speed.log_error:.2f}"


def _change_text(pair: list[Speed | None]) -> str:
    """Format the change from the first size to the second: "+3 % ± 2"."""
    small, large = pair
    if small is None or large is None:
        return ""
    error = math.hypot(small.log_error, large.log_error)
    return f"{100 * (large.mean / small.mean - 1):+.0f} % ± {100 * error:.0f}"


def _check_table(results: Results) -> str:
    """Return the table of the losses at neighboring rates and decays at the large size, minus the loss there."""
    lines: list[list[str]] = []
    for contender, name in NAMES.items():
        settings = results["settings"][contender]
        base = _loss_at(results, contender, settings)
        line = [name]
        for number in CHECKED:
            for factor in (1 / FACTORS[number], FACTORS[number]):
                loss = _loss_at(results, contender, moved(settings, number, factor))
                line.append("" if loss is None or base is None else f"{loss - base:+.3f}")
        lines.append(line)
    head = [f"{LARGE}, seed {CHECK_SEED}: loss with"]
    for number in CHECKED:
        head += [f"{number} / {FACTORS[number]:.3g}", f"{number} * {FACTORS[number]:.3g}"]
    return report.table(head, lines)


def _loss_at(results: Results, contender: str, settings: dict[str, float]) -> float | None:
    """Return the loss of a run of the check at the large size, or None."""
    rows = [row for row in results["rows"] if (row["size"], row["contender"]) == (LARGE, contender)]
    rows = [row for row in rows if row["settings"] == settings and row["seed"] == CHECK_SEED]
    if not rows:
        return None
    shortest = min(rows, key=lambda row: row["steps"])  # AdamW also trained for longer
    return shortest["loss"]


def _times_table(times: dict[str, Any]) -> str:
    """Return the table of the time of a step."""
    lines: list[list[str]] = []
    for contender, name in NAMES.items():
        line = [name]
        for size in SIZES:
            for row in times["rows"]:
                if (row["size"], row["contender"]) == (size, contender):
                    line += [f"{row['model_ms']:.0f}", f"{row['optimizer_ms']:.1f}"]
        lines.append(line)
    head = ["processor ms per step"]
    for size in SIZES:
        head += [f"{size}: model", "optimizer"]
    load = times["machine"]["load"]
    return f"{report.table(head, lines)}\n\nThese times are from an idle machine, with a load of {load:.1f} at the end."


def draw_sizes() -> None:
    """Draw the speed over the number of parameters; do nothing without results or matplotlib."""
    results = report.load("scaling_quality")
    plt = pyplot()
    if results is None or plt is None or missing_runs(results):
        return
    parameters = [float(size.split()[0]) for size in SIZES]
    speeds_at = [speeds(results, size) for size in SIZES]
    with mfx.plot.style():
        figure, axes = plt.subplots(figsize=(6.2, 3.4), layout="constrained")
        axes.axhline(1.0, color=mfx.plot.COLORS["gray"], linewidth=1.2, linestyle="--")
        for index, (name, color, marker) in enumerate(
            zip(list(NAMES)[1:], mfx.plot.COLORS.values(), "os^D", strict=False)
        ):
            # So that the marks of two contenders do not cover each other.
            shift = 1 + 0.012 * (index - 1.5)
            positions = [shift * value for value in parameters]
            means = [by_name[name].mean for by_name in speeds_at]
            errors = [by_name[name].mean * by_name[name].log_error for by_name in speeds_at]
            axes.errorbar(
                positions, means, errors, color=color, marker=marker, capsize=3, label=NAMES[name]
            )
        axes.set(xscale="log", xlabel="parameters, and tokens", ylabel="AdamW's steps / steps")
        axes.set_xticks(parameters, list(SIZES))
        axes.minorticks_off()
        axes.margins(x=0.15)
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.32))
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})
        plt.close(figure)


SECTIONS = {"sizes": section}


def main() -> None:
    """Write the section and the picture."""
    report.rewrite(PAGE, SECTIONS)
    draw_sizes()


if __name__ == "__main__":
    main()
