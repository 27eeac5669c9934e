"""Plots of the rows of `muonfx.study`, and of schedules."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from muonfx.core.checks import warn_caller
from muonfx.plot.axes import COLORS, axes_for
from muonfx.plot.curves import draw_band

Rows = Sequence[Mapping[str, Any]]

MARKERS = ("o", "s", "^", "D", "v", "P")
"""A marker for each optimizer, so that a plot can be read without its colours."""

LINE_STYLES = ("-", "--", ":", "-.")
"""A line style for each six optimizers: after six, colours and markers begin again."""


class Contender(NamedTuple):
    """One optimizer of a study, and how it is drawn."""

    name: str
    losses_at: dict[float, dict[int, Tensor]]
    """For each rate and each step, in ascending order, the losses of all seeds, shape (seeds,), float64."""
    color: str
    marker: str
    line_style: str


def plot_losses(rows: Rows, *, ax: Axes | None = None) -> Axes:
    """Draw the loss of each optimizer over steps, at its best rate: the validation loss if there is one.

    The line is the mean over seeds, in a band from the lowest to the highest. The best rate has the lowest mean loss at
    the last step.

    Args:
        rows: the rows that `muonfx.study` returns.
        ax: the axes to draw on; None: a new figure.

    Raises:
        ValueError: there are no rows, or they are of several studies.

    >>> import muonfx as mfx
    >>> rows = [
    ...     {"optimizer": "muon", "rate": 0.1, "seed": 0, "step": step, "loss": 1 / step}
    ...     for step in (1, 2, 4)
    ... ]
    >>> ax = mfx.plot.plot_losses(rows)
    >>> ax.lines[0].get_label(), ax.lines[0].get_ydata().tolist()
    ('muon, rate 0.1', [1.0, 0.5, 0.25])
    """
    key = _key_of_loss(rows)
    with axes_for(ax) as axes:
        for contender in _contenders(rows, key):
            best_rate = _best_rate(contender)
            _draw_band(
                axes,
                contender.losses_at[best_rate],
                contender,
                f"{contender.name}, rate {best_rate:.3g}",
            )
        axes.set(xlabel="step", ylabel=key.replace("_", " "))
        axes.legend()
    return axes


def plot_rates(rows: Rows, *, ax: Axes | None = None) -> Axes:
    """Draw the loss at the last step over the rate, for each optimizer: a mean and a band over seeds.

    A rate at which the run of a seed diverged to NaN or inf has a cross near the upper edge, and no point. Losses above
    the median of the first reports are cut off, so that a rate that is much too large does not hide the differences
    between the others. If the best rate is the lowest or highest that was tried, the legend says so, since a better one
    may lie beyond.

    Args:
        rows: the rows that `muonfx.study` returns.
        ax: the axes to draw on; None: a new figure.

    Raises:
        ValueError: there are no rows, or they are of several studies, such as of other steps.

    >>> import muonfx as mfx
    >>> rows = [
    ...     {"optimizer": "muon", "rate": rate, "seed": 0, "step": 9, "loss": 1 + rate}
    ...     for rate in (0.1, 1.0)
    ... ]
    >>> ax = mfx.plot.plot_rates(rows)
    >>> ax.get_xscale(), ax.lines[0].get_ydata().tolist()
    ('log', [1.1, 2.0])
    """
    key = _key_of_loss(rows)
    last_step = max(row["step"] for row in rows)
    contenders = _contenders(rows, key)
    _require_end_at(last_step, contenders)
    with axes_for(ax) as axes:
        for index, contender in enumerate(contenders):
            _draw_final_losses(axes, contender, last_step, height_of_crosses=0.97 - 0.04 * index)
        axes.set(
            xscale="log",
            xlabel="learning rate",
            ylabel=f"{key.replace('_', ' ')} after {last_step} steps",
        )
        # Lower the top to the typical first loss, if it is above it.
        _, top = axes.get_ylim()
        axes.set_ylim(top=min(top, _typical_first_loss(rows, key)))
        axes.legend()
    return axes


def _draw_final_losses(
    axes: Axes, contender: Contender, last_step: int, height_of_crosses: float
) -> None:
    """Draw the losses of one optimizer at the last step over the rate, and a cross where the run of a seed diverged.

    ``contender.losses_at`` has the losses of all seeds by rate and step: ``{0.1: {100: tensor([2.1, 2.2])}}``. They are
    NaN or infinite for a run that diverged. ``height_of_crosses`` is from 0, the bottom of the axes, to 1, their top.
    """
    final_losses_at: dict[float, Tensor] = {}
    diverged: list[float] = []
    for rate, losses_at_step in contender.losses_at.items():
        final_losses = losses_at_step[last_step]
        if final_losses.isfinite().all():
            final_losses_at[rate] = final_losses
        else:  # at least one seed has diverged at this rate
            diverged.append(rate)
    if final_losses_at:
        label = contender.name
        if _best_is_at_edge(final_losses_at, list(contender.losses_at)):
            label += " (best at the edge)"
        _draw_band(axes, final_losses_at, contender, label)
    heights = [height_of_crosses] * len(diverged)
    across_the_axes = axes.get_xaxis_transform()  # x is a rate, y a height
    crosses = axes.scatter(
        diverged, heights, color=contender.color, marker="x", transform=across_the_axes
    )
    if not final_losses_at:  # no line has the name of the optimizer
        crosses.set_label(f"{contender.name} (diverged)")


def plot_steps_to(rows: Rows, target: float, *, ax: Axes | None = None) -> Axes:
    """Draw how many steps each optimizer takes to a loss, over the rate: a mean and a band over seeds.

    The step is the first one that has a row with a loss of ``target`` or less. A rate at which a run does not reach it
    has no point. The legend also names an optimizer that does not reach it from all seeds at any rate.

    Args:
        rows: the rows that `muonfx.study` returns.
        target: the loss to reach.
        ax: the axes to draw on; None: a new figure.

    Raises:
        ValueError: there are no rows, they are of several studies, or no optimizer reaches the loss from all seeds at
            any rate.

    >>> import muonfx as mfx
    >>> rows = [
    ...     {"optimizer": "muon", "rate": 0.1, "seed": 0, "step": step, "loss": 1 / step}
    ...     for step in (1, 2, 4)
    ... ]
    >>> mfx.plot.plot_steps_to(rows, 0.5).lines[0].get_ydata().tolist()
    [2.0]
    """
    key = _key_of_loss(rows)
    contenders = _contenders(rows, key)
    # Each optimizer has a dict by rate.
    steps_to = [_steps_to(contender, target) for contender in contenders]
    if not any(steps_to):  # all dicts are empty
        finite_losses = [row[key] for row in rows if math.isfinite(row[key])]
        lowest = min(finite_losses, default=math.nan)
        raise ValueError(
            f"target: no optimizer reaches a loss of {target:g} from all seeds at any rate: give a larger loss; "
            f"the lowest of one seed is {lowest:.4g}"
        )
    with axes_for(ax) as axes:
        for contender, steps_at in zip(contenders, steps_to, strict=True):
            label = contender.name
            if not steps_at:
                label += " (not reached)"
            _draw_band(axes, steps_at, contender, label)
        axes.set(
            xscale="log",
            xlabel="learning rate",
            ylabel=f"steps to a {key.replace('_', ' ')} of {target:g}",
        )
        axes.legend()
    return axes


def plot_schedule(
    schedule: Callable[[Tensor], Any],
    steps: int,
    *,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a schedule over its first steps.

    Args:
        schedule: a schedule such as `muonfx.cosine_decay_schedule`, or any function of the step count, a 0-d tensor.
        steps: the number of steps, at least 1.
        label: the name of the schedule in a legend.
        ax: the axes to draw on; None: a new figure.

    Raises:
        ValueError: ``steps`` is less than 1.

    >>> import muonfx as mfx
    >>> ax = mfx.plot.plot_schedule(mfx.linear_schedule(1.0, 0.0, 4), 5)
    >>> ax.lines[0].get_ydata().tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if steps < 1:  # else the plot would be empty
        raise ValueError(f"steps: found {steps}, expected at least 1")
    values = [float(schedule(torch.tensor(step))) for step in range(steps)]
    with axes_for(ax) as axes:
        axes.plot(range(steps), values, label=label)
        axes.set(xlabel="step", ylabel="learning rate")
        if label is not None:
            axes.legend()
    return axes


def _best_is_at_edge(losses_at: Mapping[float, Tensor], tried_rates: Sequence[float]) -> bool:
    """Return True if the rate with the lowest mean loss is the lowest or highest of several that were tried.

    >>> _best_is_at_edge({0.1: torch.tensor([2.0]), 0.2: torch.tensor([1.0])}, [0.1, 0.2, 0.4])
    False
    """
    if not losses_at or len(tried_rates) < 3:  # with one or two rates, each is at an edge
        return False
    best_rate = min(losses_at, key=lambda rate: float(losses_at[rate].mean()))
    return best_rate in (min(tried_rates), max(tried_rates))


def _key_of_loss(rows: Rows) -> str:
    """Return the key of the loss to draw: "validation_loss" if the rows have it, otherwise "loss".

    Raise ValueError if there are no rows, or if a row lacks the key or another one that a plot needs.
    """
    if not rows:  # else the plot would be empty
        raise ValueError("rows: found none, expected the rows that muonfx.study returns")
    with_validation = [row for row in rows if "validation_loss" in row]
    if with_validation and len(with_validation) < len(rows):
        raise ValueError(
            f"rows: found a validation_loss in {len(with_validation)} of {len(rows)} rows, expected it in all or none: "
            "draw the rows of one study"
        )
    key = "validation_loss" if with_validation else "loss"
    for index, row in enumerate(rows):
        for name in ("optimizer", "rate", "seed", "step", key):
            if name not in row:
                raise ValueError(
                    f"rows: row {index} has no {name!r}, expected the keys of a row of muonfx.study"
                )
    return key


def _require_end_at(last_step: int, contenders: Sequence[Contender]) -> None:
    """Raise ValueError if the runs at a rate end before the last step, as if rows of two studies were mixed."""
    for contender in contenders:
        for rate, losses_at_step in contender.losses_at.items():
            if last_step not in losses_at_step:
                raise ValueError(
                    f"rows: {contender.name} at rate {rate} ends at step {max(losses_at_step)}, others at {last_step}, "
                    "expected one last step: draw the rows of one study"
                )


def _warn_of_other_seeds(rows: Rows) -> None:
    """Warn if a rate lacks a seed that others have, so that means and bands are of different seeds.

    There is a warning for rows of the seeds 0 and 1 at the rate 0.1, and of the seed 0 alone at the rate 0.2.
    """
    all_seeds: set[int] = set()
    seeds_at: dict[tuple[str, float], set[int]] = {}  # by optimizer and rate
    for row in rows:
        all_seeds.add(row["seed"])
        seeds_at.setdefault((row["optimizer"], row["rate"]), set()).add(row["seed"])
    for (name, rate), seeds in seeds_at.items():
        missing = sorted(all_seeds - seeds)
        if missing:
            warn_caller(
                f"rows: {name} at rate {rate} has no rows of seed {missing[0]}, which others have: its mean and its "
                "band are of other seeds. Draw rows of the same seeds"
            )
            return


def _contenders(rows: Rows, key: str) -> list[Contender]:
    """Return the optimizers of a study, in the order of their first rows, each with its losses, a colour and a marker.

    ``key`` is the key of the loss in a row: "loss" or "validation_loss".
    """
    rows_of: dict[str, dict[float, list[Mapping[str, Any]]]] = {}  # by optimizer, then by rate
    for row in rows:
        rows_of.setdefault(row["optimizer"], {}).setdefault(row["rate"], []).append(row)
    colors = itertools.cycle(COLORS.values())
    markers = itertools.cycle(MARKERS)
    contenders: list[Contender] = []
    for name, rows_at in rows_of.items():
        losses_at = {rate: _losses_at_steps(rows_at[rate], key) for rate in sorted(rows_at)}
        # The index grows by one after each six optimizers, and begins again after the last style.
        line_style = LINE_STYLES[len(contenders) // len(MARKERS) % len(LINE_STYLES)]
        contenders.append(Contender(name, losses_at, next(colors), next(markers), line_style))
    _warn_of_other_seeds(rows)
    return contenders


def _losses_at_steps(rows: Rows, key: str) -> dict[int, Tensor]:
    """Return the losses of all seeds at each step, from the rows of one optimizer and one rate.

    For example, for the seeds 0 and 1, it is ``{5: tensor([2.3, 2.4]), 10: tensor([1.9, 2.0])}``. Raise ValueError if a
    seed has no row at one of the steps.
    """
    seeds: list[int] = []  # each once, in the order of the rows
    loss_of: dict[int, dict[int, float]] = {}  # by step, then by seed
    for row in rows:
        if row["seed"] not in seeds:
            seeds.append(row["seed"])
        loss_of.setdefault(row["step"], {})[row["seed"]] = row[key]
    losses_at: dict[int, Tensor] = {}
    for step in sorted(loss_of):
        loss_of_seed = loss_of[step]
        for seed in seeds:
            if seed not in loss_of_seed:  # as if rows of two studies were mixed
                raise ValueError(
                    f"rows: {rows[0]['optimizer']} at rate {rows[0]['rate']} has no report of seed {seed} at step "
                    f"{step}, expected reports of all seeds at the same steps: draw the rows of one study"
                )
        losses = [loss_of_seed[seed] for seed in seeds]
        losses_at[step] = torch.tensor(losses, dtype=torch.float64)
    return losses_at


def _typical_first_loss(rows: Rows, key: str) -> float:
    """Return the median over runs of the loss of the first report, above which a plot cuts off losses.

    Return inf, to cut off nothing, if the first report is also the last, or if all runs have diverged before it.
    """
    steps = [row["step"] for row in rows]
    first_step = min(steps)
    if first_step == max(steps):  # there is one report, whose losses are drawn
        return math.inf
    first_losses: list[float] = []
    for row in rows:
        if row["step"] == first_step and math.isfinite(row[key]):
            first_losses.append(row[key])
    if not first_losses:
        return math.inf
    return statistics.median(first_losses)


def _best_rate(contender: Contender) -> float:
    """Return the rate with the lowest mean loss over seeds at its last step, the first one if all rates diverged."""

    def final_loss(rate: float) -> float:
        # The losses are {5: tensor([2.3, 2.5]), 10: tensor([1.0, 2.0])}, for example.
        losses_at_step = contender.losses_at[rate]
        mean = float(losses_at_step[max(losses_at_step)].mean())
        # A run diverged; also NaN, which is neither more nor less than another loss.
        if not math.isfinite(mean):
            return math.inf
        return mean

    return min(contender.losses_at, key=final_loss)


def _steps_to(contender: Contender, target: float) -> dict[float, Tensor]:
    """Return the step at which each seed first has a loss of ``target`` or less, for each rate.

    For example, with two seeds, it is ``{0.1: tensor([400., 350.])}``. A rate at which a seed does not reach the target
    is left out.
    """
    steps_at: dict[float, Tensor] = {}
    for rate, losses_at_step in contender.losses_at.items():
        # `is_reached` has the shape (reports, seeds).
        is_reached = torch.stack(list(losses_at_step.values())) <= target
        is_reached_by_all_seeds = is_reached.any(dim=0).all()
        if is_reached_by_all_seeds:
            # For each seed; of several ones, argmax returns the first.
            first_report = is_reached.int().argmax(dim=0)
            steps_of_reports = torch.tensor(list(losses_at_step), dtype=torch.float64)
            steps_at[rate] = steps_of_reports[first_report]
    return steps_at


def _draw_band(
    axes: Axes, values_at: Mapping[Any, Tensor], contender: Contender, label: str
) -> None:
    """Draw a line with markers through the means over seeds, and a band from the lowest to the highest seed.

    ``values_at`` maps a position, such as a step or a rate, to the values of the seeds there, shape (seeds,). If it is
    empty, nothing is drawn, and the label is in the legend.
    """
    positions = list(values_at)
    values = list(values_at.values())
    look = {"color": contender.color, "marker": contender.marker, "linestyle": contender.line_style}
    draw_band(axes, positions, values, label=label, **look)
