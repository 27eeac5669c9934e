"""A picture of time against error, drawn from the JSON results and from nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.report import judged, load, shape_name

PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "polar.svg"

SHOWN = ("512 x 2048", "1024 x 4096")
SPECTRUM = "gaussian"

# On a transparent ground: every colour is readable on white and on the dark theme's blue-grey.
GREY = "#808592"
COLORS = {"muonfx": "#6f78e8", "torch": "#2a9d8f", "pytorch_optimizer": "#d0702c", "heavyball": "#b45cb0"}
MARKS = {
    "muonfx": "*",
    "muonfx, polar_express_5": "D",
    "plain, compiled, bfloat16": "^",
    "HeavyBall, legacy": "^",
}
"""Beside squares for the Gram form and circles for all others; hollow where products are by blocks."""


def has_matplotlib() -> bool:
    """True if matplotlib can draw files here, without a window; if not, a printed line says so."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("matplotlib is not installed: no plot; pip install -c constraints.txt -e '.[bench]' brings it")
        return False
    matplotlib.use("Agg")
    return True


def style() -> AbstractContextManager[None]:
    """The same results make the same file, and letters stay letters."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "muonfx", "svg.fonttype": "none"})


def draw(path: Path = PICTURE) -> Path | None:
    """Write the picture of all but the fp32 rows; None where there are no results or no matplotlib to draw with."""
    speed, quality = load("polar_speed"), load("polar_quality")
    if speed is None or quality is None:
        return None
    if not has_matplotlib():
        return None
    from matplotlib import pyplot as plt

    with style():
        figure, both = plt.subplots(1, 2, figsize=(9.6, 5.0), sharey=True, layout="constrained")
        for axes, case in zip(both, SHOWN, strict=True):
            qualities = judged(quality, case, lambda row: shape_name(row["shape"]))
            for row in speed["rows"]:
                name = row["candidate"]
                if shape_name(row["shape"]) == case and name in qualities and "float32" not in name:
                    _point(axes, row, qualities[name][SPECTRUM]["error"])
            _dress(axes, case)
        both[0].set_ylabel("error against the float64 polynomial", color=GREY)
        handles, names = both[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, labelcolor=GREY, fontsize=8.5)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
    return path


def _point(axes: Any, row: dict[str, Any], error: float) -> None:
    """A candidate, with a bar from the 10th to the 90th percentile of its time."""
    name, spent, color = row["candidate"], row["milliseconds"], COLORS[row["package"].split()[0]]
    mark = MARKS.get(name, "s" if "gram" in name.lower() else "o")
    axes.plot([spent["p10"], spent["p90"]], [error, error], color=color, linewidth=1.2, alpha=0.35)
    face = "none" if "blocks" in name else color
    size = 13 if mark == "*" else 7
    style = {"marker": mark, "markersize": size, "color": color, "markerfacecolor": face, "linestyle": "none"}
    axes.plot(spent["median"], error, label=name, **style)


def _dress(axes: Any, case: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(f"{case}, Gaussian, bf16 products", loc="left", fontsize=10, color=GREY)
    axes.set_xlabel("milliseconds a matrix", color=GREY)
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.tick_params(which="both", colors=GREY)
    axes.grid(which="major", color=GREY, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
