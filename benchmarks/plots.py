"""A picture of time against error, drawn from the JSON results and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import judged, load, shape_name

PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "polar.svg"

SHOWN = ("512 x 2048", "1024 x 1024")
SPECTRUM = "geometric"

# On a transparent ground: every colour is readable on white and on the dark theme's blue-grey.
GREY = "#808592"
COLORS = {"muonfx": "#6f78e8", "torch": "#2a9d8f", "pytorch_optimizer": "#d0702c", "heavyball": "#b45cb0"}
MARKS = {"standard": "o", "gram": "s"}


def draw(path: Path = PICTURE) -> Path | None:
    """Write the picture; None where there are no results or no matplotlib to draw with."""
    speed, quality = load("polar_speed"), load("polar_quality")
    if speed is None or quality is None:
        return None
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("matplotlib is not installed: no plot; pip install -c constraints.txt -e '.[bench]' brings it")
        return None
    matplotlib.use("Agg")  # files only: no window, no display needed
    from matplotlib import pyplot as plt

    # the same results make the same file, letters stay letters
    matplotlib.rcParams.update({"svg.hashsalt": "muonfx", "svg.fonttype": "none"})
    figure, both = plt.subplots(1, 2, figsize=(9.6, 4.6), sharey=True, layout="constrained")
    for axes, case in zip(both, SHOWN, strict=True):
        qualities = judged(quality, case, lambda row: shape_name(row["shape"]))
        rows = [row for row in speed["rows"] if shape_name(row["shape"]) == case and row["candidate"] in qualities]
        for row in rows:
            _point(axes, row, qualities[row["candidate"]][SPECTRUM]["error"])
        _dress(axes, case)
    both[0].set_ylabel("error against the float64 polynomial", color=GREY)
    _legend(figure)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


def _point(axes: Any, row: dict[str, Any], error: float) -> None:
    """A candidate: colour by package, mark by method, hollow where products are by blocks; a bar from p10 to p90."""
    package = row["package"].split()[0]
    spent, color = row["milliseconds"], COLORS[package]
    gram = "gram" in row["candidate"].lower() or row.get("plan", {}).get("method") == "gram"
    hollow = row.get("plan", {}).get("products") == "blocks"
    axes.plot([spent["p10"], spent["p90"]], [error, error], color=color, linewidth=1.2, alpha=0.5)
    marks = {"marker": MARKS["gram" if gram else "standard"], "markersize": 7, "color": color}
    axes.plot(spent["median"], error, markerfacecolor="none" if hollow else color, linestyle="none", **marks)
    if row["default"] or row["candidate"] == "muonfx":
        name = row["candidate"].removeprefix("muonfx, ")
        above = row["candidate"] in ("muonfx", "pytorch_optimizer")
        offset = (0, 9) if above else (0, -15)
        axes.annotate(
            name, (spent["median"], error), offset, textcoords="offset points", ha="center", color=color, fontsize=8
        )


def _dress(axes: Any, case: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"{case}, singular values 1 to 1e-4", loc="left", fontsize=10, color=GREY)
    axes.set_xlabel("milliseconds a matrix", color=GREY)
    axes.margins(x=0.12, y=0.12)
    axes.tick_params(which="both", colors=GREY)
    axes.grid(which="major", color=GREY, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    names = {"muonfx": "muonfx", "torch": "PyTorch", "pytorch_optimizer": "pytorch_optimizer", "heavyball": "HeavyBall"}
    handles = [
        Line2D([], [], color=COLORS[key], marker="o", linestyle="none", label=name) for key, name in names.items()
    ]
    shapes = (("o", GREY, "standard"), ("s", GREY, "Gram"), ("o", "none", "by blocks"))
    handles += [
        Line2D([], [], color=GREY, marker=mark, markerfacecolor=face, linestyle="none", label=label)
        for mark, face, label in shapes
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, labelcolor=GREY, fontsize=9
    )
