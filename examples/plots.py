"""Plots of a run's losses, of several optimizers, and of the owners of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no window, no display needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import muonfx as mfx
from muonfx.sharding import Plan

COLORS = dict(zip(("muon", "adamw", "torch-muon", "normuon"), mfx.plot.COLORS.values(), strict=False))
NAMES = {"muon": "muonfx Muon", "adamw": "muonfx AdamW", "torch-muon": "torch.optim.Muon", "normuon": "muonfx NorMuon"}
INK = mfx.plot.COLORS["gray"]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return a centered moving mean over about a twentieth of all values, which does not lag behind the curve."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


@mfx.plot.style()
def plot_run(metrics: Mapping[str, Any], path: Path) -> None:
    """Draw the training loss (raw in a pale line, and smoothed) and the validation loss over the steps of one run."""
    losses, validation = metrics["train_losses"], metrics["validation"]
    config = metrics["config"]
    color = COLORS[config["optimizer"]]
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=color, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smoothed(losses), color=color, linewidth=1.8)
    ends = [(smoothed(losses)[-1], "training,\nsmoothed", color)] if losses else []
    if validation:
        xs, ys = [point["step"] for point in validation], [point["loss"] for point in validation]
        axes.plot(xs, ys, color=INK, linewidth=1.0, marker="o", markersize=4.5, markerfacecolor="none")
        ends.append((ys[-1], f"validation\n{ys[-1]:.3f}", INK))
    final = f"final validation loss {validation[-1]['loss']:.3f}" if validation else "no validation yet"
    parameters = f"{metrics['parameters'] / 1e6:.2f} M parameters"
    axes.set_title(f"{NAMES[config['optimizer']]}, {parameters}: {final}", fontsize=10.5)
    _dress(axes, "step")
    if len(losses) > 100:
        axes.set_ylim(min(losses) - 0.1, 3.2)  # cut off the first steps, where the loss starts at log 256
    _label_ends(axes, len(losses), ends)
    figure.savefig(path, dpi=130)
    plt.close(figure)


@mfx.plot.style()
def plot_comparison(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the losses of several optimizers over steps, and over seconds spent in training steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), sharey=True)
    for name, metrics in runs.items():
        losses, validation, color = metrics["train_losses"], metrics["validation"], COLORS[name]
        left.plot(range(1, len(losses) + 1), smoothed(losses), color=color, linewidth=1.0, alpha=0.35)
        ys = [point["loss"] for point in validation]
        label = f"{NAMES[name]}  {ys[-1]:.3f}" if ys else NAMES[name]
        marks = {"color": color, "linewidth": 1.8, "marker": "o", "markersize": 4, "markerfacecolor": "none"}
        left.plot([point["step"] for point in validation], ys, **marks)
        right.plot([point["seconds"] for point in validation], ys, label=label, **marks)
    _dress(left, "step")
    _dress(right, "seconds in training steps")
    val_losses = [point["loss"] for metrics in runs.values() for point in metrics["validation"]]
    left.set_ylim(min(val_losses) - 0.08, max(val_losses) + 0.12)  # cut off the steep first steps
    right.set_ylabel("")
    left.set_title("equal steps (faint: training loss, smoothed)", fontsize=10)
    right.set_title("the same, by time", fontsize=10)
    legend = right.legend(fontsize=9, title="validation loss at the end", title_fontsize=9, loc="upper right")
    for text, name in zip(legend.get_texts(), runs, strict=True):
        text.set_color(COLORS[name])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_owners(plan: Plan, path: Path) -> None:
    """Draw the owner of each matrix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ax = mfx.plot.plot_plan(plan)
    ax.figure.savefig(path)
    plt.close(ax.figure)


def _label_ends(axes: Axes, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write the names to the right of the ends of the curves, shifted apart."""
    for rank, (y, text, color) in enumerate(sorted(ends)):
        shift = 0 if len(ends) == 1 else (-10, 10)[rank]
        put = {"xytext": (9, shift), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(text, (x, y), color=color, fontsize=9, linespacing=0.95, **put)


def _dress(axes: Axes, xlabel: str) -> None:
    """Set the labels of both axes, and let the x-axis begin at 0."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel("loss (nats per byte)")
    axes.set_xlim(left=0)
