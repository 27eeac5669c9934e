"""Plots of the benchmarks, drawn from the JSON results alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import muonfx as mfx
from benchmarks import rates
from benchmarks.report import BASELINE, GATHERED, curves, judged, load, shape_name

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
PICTURE, PARTS_PICTURE = ASSETS / "polar.svg", ASSETS / "step-by-part.svg"
TRAINING_PICTURE = ASSETS / "the-default-coefficients.svg"
HEADLINE_PICTURE = ASSETS / "muon-against-adamw.svg"
FINDINGS_PICTURE = ASSETS / "findings.svg"

SHOWN = ("512 x 2048", "1024 x 4096")
SPECTRUM = "gaussian"

# The colours of muonfx.plot.COLORS, copied because matplotlib is optional. They are readable on light and dark pages.
GREY, LINE = "#7a7f8c", "#d1495b"
COLORS = {
    "muonfx": "#5b6ee1",
    "torch": "#2a9d8f",
    "pytorch_optimizer": "#d0702c",
    "heavyball": "#b45cb0",
}
MARKS = {
    "muonfx": "*",
    "muonfx, polar_express_5": "D",
    "plain, compiled, bfloat16": "^",
    "HeavyBall, legacy": "^",
}
"""Marks of some candidates; others have squares (Gram form) or circles, which are hollow for blocked products."""


PARTS = (
    ("products at the measured peak", "#5b6ee1", 1.0),
    ("products: additional time", "#5b6ee1", 0.45),
    ("passes over the necessary bytes, at the rate of a copy", "#2a9d8f", 1.0),
    ("passes: additional time", "#2a9d8f", 0.45),
    ("Python and other time", "#d0702c", 1.0),
)
"""Label, colour and opacity of a bar's segments, from the left. The pale segments are time above the limit."""


def pyplot() -> ModuleType | None:
    """Return pyplot, set up to write reproducible files; print a line and return None if it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(
            "matplotlib is not installed: no plot; to install it: pip install -c constraints.txt -e '.[bench]'"
        )
        return None
    matplotlib.use("Agg")  # writes files without a display
    # A fixed salt makes files reproducible, and fonttype "none" keeps text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "muonfx", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    return plt


def draw(path: Path = PICTURE) -> Path | None:
    """Plot time against error of all rows but those in fp32; return None without results or matplotlib."""
    speed, quality = load("polar_speed"), load("polar_quality")
    if speed is None or quality is None or (plt := pyplot()) is None:
        return None
    figure, both = plt.subplots(1, 2, figsize=(9.6, 5.0), sharey=True, layout="constrained")
    for axes, case in zip(both, SHOWN, strict=True):
        qualities = judged(quality, case, lambda row: shape_name(row["shape"]))
        for row in speed["rows"]:
            name = row["candidate"]
            if shape_name(row["shape"]) == case and name in qualities and "float32" not in name:
                _point(axes, row, qualities[name][SPECTRUM]["error"])
        _dress(axes, case)
    both[0].set_ylabel("error against the float64 polynomial", color=GREY)
    _write(plt, figure, both[0], path, columns=3)
    return path


def draw_parts(path: Path = PARTS_PICTURE) -> Path | None:
    """Plot the time of a step by part; return None without results or matplotlib."""
    if (found := load("parts_speed")) is None or (plt := pyplot()) is None:
        return None
    cases = list(dict.fromkeys(row["case"] for row in found["rows"]))
    most = max(sum(row["case"] == case for row in found["rows"]) for case in cases)
    size = (9.6, 0.9 + len(cases) * (0.75 + 0.42 * most))
    figure, all_axes = plt.subplots(
        len(cases), 1, figsize=size, squeeze=False, layout="constrained"
    )
    for axes, case in zip(all_axes[:, 0], cases, strict=True):
        own = [row for row in found["rows"] if row["case"] == case]
        own.sort(key=lambda row: row["milliseconds"]["median"])
        _bars(axes, case, own)
    all_axes[-1, 0].set_xlabel("milliseconds per step", color=GREY)
    _write(plt, figure, all_axes[0, 0], path, columns=2)
    return path


DRAWN = {BASELINE: "#2a9d8f", "polar_express_4": "#d0702c", "polar_express_5": "#5b6ee1"}
"""Colours of the candidates in the plot of losses over learning rates."""
ADAMW_COLOR, MUON_COLOR = "#d0702c", "#5b6ee1"
"""Colours of the right half of the README's picture: those that `muonfx.plot.plot_rates` gives in the left half."""


def draw_training() -> None:
    """Plot losses over learning rates; do nothing without results or matplotlib."""
    if (found := load("training_quality")) is None or (plt := pyplot()) is None:
        return
    sizes = list(dict.fromkeys(row["size"] for row in found["rows"]))
    figure, all_axes = plt.subplots(
        1, len(sizes), figsize=(9.6, 3.9), squeeze=False, layout="constrained"
    )
    for axes, size in zip(all_axes[0], sizes, strict=True):
        _losses(axes, curves(found, size), {name: (name, color) for name, color in DRAWN.items()})
        axes.set_title(
            f"{size} parameters, 300 steps, 5 seeds", loc="left", fontsize=10, color=GREY
        )
    all_axes[0, 0].set_ylabel("validation loss, nats per byte", color=GREY)
    _write(plt, figure, all_axes[0, 0], TRAINING_PICTURE, columns=3)


def draw_headline() -> None:
    """Draw the picture of the README; do nothing without results or matplotlib."""
    results = load("headline_quality")
    plt = pyplot()
    if results is None or plt is None:
        return
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.6), layout="constrained", width_ratios=(1, 1.15)
    )
    mfx.plot.plot_rates(results["rows"], ax=left)
    left.get_legend().remove()
    rates_tried = sorted({row["rate"] for row in results["rows"]})
    left.set_xticks(rates_tried, [f"{rate:g}" for rate in rates_tried])
    left.minorticks_off()
    left.set_ylabel("validation loss, nats per byte", color=GREY)
    left.set_xlabel("rate of the matrices; of all other parameters: 0.06", color=GREY)
    left.set_title(
        "GPT, 0.23 M parameters, 200 steps, 3 seeds", loc="left", fontsize=10, color=GREY
    )
    _colour(left)
    _one_rate_and_two(right)
    _write(plt, figure, left, HEADLINE_PICTURE, columns=3)


def _one_rate_and_two(axes: Axes) -> None:
    """Draw the losses of AdamW with one rate and with two, and of ``mfx.Muon``, with every seed as a dot."""
    study = rates.Study(check_texts=False)
    setting = rates.SETTINGS[0]
    adamw_rate = study.adamw_rates[str(setting)]
    contenders = {
        "AdamW, one rate": (rates.ADAMW, (adamw_rate, adamw_rate), ADAMW_COLOR),
        "AdamW, two rates": (
            rates.TWO_RATES,
            rates.best_rates(study, setting, rates.TWO_RATES, rates.SEEDS),
            ADAMW_COLOR,
        ),
        "mfx.Muon, first try": (
            rates.MUON,
            rates.rates_of(rates.RULES[setting.task], adamw_rate),
            MUON_COLOR,
        ),
        "mfx.Muon, best found": (
            rates.MUON,
            rates.best_rates(study, setting, rates.MUON, rates.SEEDS),
            MUON_COLOR,
        ),
    }
    names = []
    for row, (name, (contender, pair, color)) in enumerate(contenders.items()):
        losses = list(rates.losses(study, setting, contender)[pair].values())
        axes.plot(losses, [row] * len(losses), "o", color=color, alpha=0.4, markersize=5)
        mean = sum(losses) / len(losses)
        axes.plot([mean], [row], "D", color=color, markersize=7)
        axes.annotate(
            f"{mean:.2f}",
            (mean, row),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=GREY,
            fontsize=9,
        )
        names.append(f"{name}\n{pair[0]:g}, {pair[1]:g}")
    axes.set_yticks(range(len(names)), names, fontsize=8.5, color=GREY)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.margins(x=0.1)
    axes.set_xlabel("validation loss, nats per byte", color=GREY)
    title = "the same size and steps: rates of matrices, of the rest"
    axes.set_title(title, loc="right", fontsize=10, color=GREY)
    _colour(axes)


def _losses(
    axes: Axes, by_name: dict[str, dict[float, list[float]]], drawn: dict[str, tuple[str, str]]
) -> None:
    """Draw the mean loss of each candidate over its rates, and a band from its best to its worst seed."""
    for name, (label, color) in drawn.items():
        if by_rate := by_name.get(name):
            losses = list(by_rate.values())
            least, most = [min(seeds) for seeds in losses], [max(seeds) for seeds in losses]
            axes.fill_between(list(by_rate), least, most, color=color, alpha=0.15, lw=0)
            means = [sum(seeds) / len(seeds) for seeds in losses]
            axes.plot(
                list(by_rate),
                means,
                color=color,
                marker="o",
                markersize=4,
                linewidth=1.6,
                label=label,
            )
    axes.set_xscale("log")
    ticks: list[float] = []
    for rate in sorted({rate for name in drawn for rate in by_name.get(name, {})}):
        if not ticks or rate > 1.25 * ticks[-1]:  # closer labels would overlap
            ticks.append(rate)
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate of the matrices", color=GREY)
    _colour(axes)


def draw_findings(path: Path = FINDINGS_PICTURE) -> Path | None:
    """Plot the time of a step by package, in one process and sharded; return None without results or matplotlib."""
    step, sharded = load("step_speed"), load("sharding_speed")
    if step is None or sharded is None or (plt := pyplot()) is None:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 2.9), layout="constrained")
    case = list(dict.fromkeys(row["case"] for row in step["rows"]))[-1]
    shown = [
        row
        for row in step["rows"]
        if row["case"] == case and (row["default"] or row["candidate"] == "muonfx")
    ]
    shown = [row for row in shown if not row["candidate"].endswith(" again")]
    shown.sort(key=lambda row: row["milliseconds"]["median"])
    known = {"muonfx": "muonfx, as torch's", "mfx.Muon": "muonfx, default"}
    named = [(known.get(row["candidate"], row["candidate"]), row) for row in shown]
    _bar_chart(left, "A step in one process", named)
    short = {"muonfx": "muonfx", GATHERED: "gather all"}
    rows = [row for row in sharded["rows"] if row["case"] == "FSDP2" and row["candidate"] in short]
    rows.sort(key=lambda row: (row["processes"], row["candidate"] != "muonfx"))
    _bar_chart(
        right,
        "A step under FSDP2",
        [(f"{short[row['candidate']]}, {row['processes']} ranks", row) for row in rows],
    )
    _save(plt, figure, path)
    return path


def _bar_chart(axes: Axes, title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Draw a bar for each candidate, ours coloured, with a line from the 10th to the 90th percentile."""
    for place, (name, row) in enumerate(rows):
        spent, ours = row["milliseconds"], name.startswith("muonfx")
        axes.barh(
            place,
            spent["median"],
            0.64,
            color=COLORS["muonfx"] if ours else GREY,
            alpha=1.0 if ours else 0.45,
        )
        axes.plot([spent["p10"], spent["p90"]], [place, place], color=GREY, linewidth=1.4)
        text = f"{spent['median']:.0f} ms"
        axes.annotate(
            text,
            (spent["p90"], place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=GREY,
        )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9.5, color=GREY)
    axes.invert_yaxis()
    # Space for the labels.
    axes.set_xlim(0, 1.3 * max(row["milliseconds"]["p90"] for _, row in rows))
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    axes.set_xlabel("milliseconds", color=GREY)
    axes.tick_params(axis="x", colors=GREY, length=3)
    axes.tick_params(axis="y", length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)


def segments(row: dict[str, Any]) -> list[float]:
    """Return the milliseconds of a bar's segments. Products and passes are split at the limit of the machine.

    >>> parts = {"products": 5.0, "passes": 3.0, "python": 1.0}
    >>> segments({"parts": parts, "roofline": {"products at peak": 4.0, "least passes": 3.5}})
    [4.0, 1.0, 3.0, 0.0, 1.0]
    """
    parts, limit = row["parts"], row["roofline"]
    products = min(parts["products"], limit["products at peak"])
    passes = min(parts["passes"], limit["least passes"])
    return [
        products,
        parts["products"] - products,
        passes,
        parts["passes"] - passes,
        max(0.0, parts["python"]),
    ]


def _bars(axes: Axes, case: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a bar for each candidate, the fastest at the top, with its time and the ratio to the minimum time."""
    for place, row in enumerate(rows):
        left = 0.0
        for (name, color, alpha), width in zip(PARTS, segments(row), strict=True):
            label = name if place == 0 else None
            axes.barh(place, width, 0.62, left, color=color, alpha=alpha, label=label, linewidth=0)
            left += width
        median, over = row["milliseconds"]["median"], row["roofline"]["step over least"]
        about = f"{median:.{0 if median >= 100 else 1}f} ms, {over:.1f} × minimum, {row['ratio']['median']:.2f} × torch"
        axes.annotate(
            about,
            (left, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=GREY,
        )
    least = rows[0]["roofline"]["least products"] + rows[0]["roofline"]["least passes"]
    axes.axvline(
        least,
        color=LINE,
        linewidth=1.6,
        linestyle=(0, (4, 2)),
        label="roofline: minimum time of a step",
    )
    names = [row["candidate"] for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9.5)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name.startswith("muonfx") else "normal")
    axes.invert_yaxis()
    # Space for the labels of the bars.
    axes.set_xlim(0, 1.42 * max(sum(segments(row)) for row in rows))
    axes.set_title(case.replace("^2", "²").replace("x", "×"), loc="left", fontsize=10.5, color=GREY)
    axes.tick_params(axis="x", colors=GREY, length=3)
    axes.tick_params(axis="y", colors=GREY, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)


def _write(plt: ModuleType, figure: Figure, axes: Axes, path: Path, columns: int) -> None:
    """Add a legend below the axes and write the file."""
    handles, names = axes.get_legend_handles_labels()
    style = {"frameon": False, "labelcolor": GREY, "fontsize": 8.5}
    figure.legend(handles, names, loc="outside lower center", ncols=columns, **style)
    _save(plt, figure, path)


def _save(plt: ModuleType, figure: Figure, path: Path) -> None:
    """Write the file without a date and close the figure."""
    path.parent.mkdir(exist_ok=True)
    extra = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    figure.savefig(path, transparent=True, **extra)
    plt.close(figure)


def _point(axes: Axes, row: dict[str, Any], error: float) -> None:
    """Draw the mark of a candidate, with a bar from the 10th to the 90th percentile of its time."""
    name, spent, color = row["candidate"], row["milliseconds"], COLORS[row["package"].split()[0]]
    mark = MARKS.get(name, "s" if "gram" in name.lower() else "o")
    axes.plot([spent["p10"], spent["p90"]], [error, error], color=color, linewidth=1.2, alpha=0.35)
    face = "none" if "blocks" in name else color
    size = 13 if mark == "*" else 7
    style = {"marker": mark, "markersize": size, "markerfacecolor": face, "linestyle": "none"}
    axes.plot(spent["median"], error, label=name, color=color, **style)  # pyright: ignore[reportArgumentType]


def _dress(axes: Axes, case: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(f"{case}, Gaussian, bf16 products", loc="left", fontsize=10, color=GREY)
    axes.set_xlabel("milliseconds per matrix", color=GREY)
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    _colour(axes)


def _colour(axes: Axes) -> None:
    """Draw a light grid and no box."""
    axes.tick_params(which="both", colors=GREY)
    axes.grid(which="major", color=GREY, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
