"""The table and the plot of the track, from ``results/track_quality.json`` alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

from benchmarks.plots import ASSETS, COLORS, GREY, LINE, pyplot
from benchmarks.report import DOCS, load, machine_line, table
from benchmarks.track.task import module_of

PAGE, PICTURE = DOCS / "track.md", ASSETS / "track.svg"
DEFAULT = "muon"
CLEAR = 3.0
"""A difference of more standard errors is called clear. With twenty comparisons, one in twenty tables errs once."""


@dataclass(frozen=True)
class Standing:
    """The result of one contender."""

    name: str
    steps: list[float]
    """Steps to the target, by seed; empty if the target was not reached."""
    settings: dict[str, float]
    optimizer_ms: float
    """Least median of processor milliseconds per step."""

    @property
    def mean(self) -> float:
        """Geometric mean over seeds; infinity if the target was not reached."""
        return math.exp(fmean(map(math.log, self.steps))) if self.steps else math.inf

    @property
    def title(self) -> str:
        """First sentence of the contender's docstring."""
        return str(module_of(self.name).__doc__).strip().removesuffix(".")


def standings(found: dict[str, Any]) -> list[Standing]:
    """Return the contenders by the number of steps, fewest first."""
    made = []
    for name, settings in found["settings"].items():
        rows = [row for row in found["rows"] if row["contender"] == name]
        by_length: dict[int, dict[int, float]] = {}
        for row in rows:
            if row["settings"] == settings and row["seed"] != found["tuning_seed"]:
                by_length.setdefault(row["steps"], {})[row["seed"]] = row["loss"]
        steps = _crossing(by_length, found["task"]["target"])
        made.append(Standing(name, steps, settings, min(row["optimizer_ms"] for row in rows)))
    return sorted(made, key=lambda one: one.mean)


def _crossing(by_length: dict[int, dict[int, float]], target: float) -> list[float]:
    """Return the steps to the target by seed.

    The mean losses of two neighboring lengths enclose the target and give a slope over log(steps). A seed's line has
    this slope and passes through the mean of its two losses.
    """
    lengths = sorted(by_length)
    for short, long in itertools.pairwise(lengths):
        first, second = by_length[short], by_length[long]
        if len(first) == len(second) and fmean(first.values()) > target >= fmean(second.values()):
            slope = (fmean(second.values()) - fmean(first.values())) / math.log(long / short)
            middle = math.sqrt(short * long)
            return [
                middle * math.exp((target - (first[seed] + second[seed]) / 2) / slope)
                for seed in sorted(first)
            ]
    return []


def differences(ranked: list[Standing]) -> dict[str, tuple[float, float]]:
    """Return log(steps / the default's steps) and its standard error for each contender that reached the target.

    Runs of one seed share their initial weights and batches, so differences are taken seed by seed. The variance of
    such a difference is pooled over all contenders, because five seeds give no good estimate for one of them.
    """
    steps_of = {standing.name: standing.steps for standing in ranked if standing.steps}
    logs_of: dict[str, list[float]] = {}
    for name, steps in steps_of.items():
        ratios = [own / default for own, default in zip(steps, steps_of[DEFAULT], strict=True)]
        logs_of[name] = [math.log(ratio) for ratio in ratios]
    pooled_variance = fmean([variance(logs) for name, logs in logs_of.items() if name != DEFAULT])
    return {
        name: (fmean(logs), math.sqrt(pooled_variance / len(logs)))
        for name, logs in logs_of.items()
    }


def track() -> str:
    """Return the table of the track."""
    if (found := load("track_quality")) is None:
        return ""
    ranked = standings(found)
    difference_of = differences(ranked)
    lines: list[list[str]] = []
    for standing in ranked:
        settings = ", ".join([f"{name} {value:g}" for name, value in standing.settings.items()])
        steps = "not reached"
        against = ""
        if standing.steps:
            error = stdev(standing.steps) / math.sqrt(len(standing.steps))
            steps = f"{standing.mean:.0f} ± {error:.0f}"
            if standing.name != DEFAULT:
                against = _against(*difference_of[standing.name])
        title = f"`{standing.name}`: {standing.title}"
        lines.append([title, settings, steps, against, f"{standing.optimizer_ms:.1f}"])
    head = [
        "contender",
        "tuned",
        "steps ± standard error",
        f"against `{DEFAULT}`",
        "optimizer, ms per step",
    ]
    return f"{table(head, lines)}\n\n{machine_line(found, 'one thread')}\n"


def _against(difference: float, error: float) -> str:
    """Format a difference of logarithms in per cent, in bold if it is clear."""
    text = f"{100 * math.expm1(difference):+.1f} % ± {100 * error:.1f}"
    return f"**{text}**" if abs(difference) > CLEAR * error else text


def _color_of(name: str) -> str:
    """Return the color of a contender in the picture."""
    if name == DEFAULT:
        return LINE
    return COLORS["torch"] if name.startswith("torch") else COLORS["muonfx"]


def draw_track() -> None:
    """Plot the steps to the target; do nothing without results or matplotlib."""
    found = load("track_quality")
    plt = pyplot()
    if found is None or plt is None:
        return
    ranked = [standing for standing in standings(found) if standing.steps]
    ranked.reverse()  # the best on top
    figure, axes = plt.subplots(figsize=(9.6, 0.8 + 0.3 * len(ranked)), layout="constrained")
    for row, standing in enumerate(ranked):
        color = _color_of(standing.name)
        axes.plot(
            standing.steps, [row] * len(standing.steps), "o", color=color, alpha=0.35, markersize=4
        )
        axes.plot([standing.mean], [row], "D", color=color, markersize=7)
    axes.set_yticks(range(len(ranked)), [standing.name for standing in ranked])
    axes.set_xlabel(
        f"steps to a validation loss of {found['task']['target']:g} nats per byte", color=GREY
    )
    axes.set_xscale("log")
    ticks = [200, 250, 300, 400, 500, 600, 800, 1000, 1300]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    all_steps = [steps for standing in ranked for steps in standing.steps]
    axes.set_xlim(0.95 * min(all_steps), 1.05 * max(all_steps))
    axes.grid(axis="x", alpha=0.25)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=GREY, length=0)
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})
    plt.close(figure)


SECTIONS = {"track": track}
