"""The pictures of notebook 02."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import polar

BLUE, ORANGE, GREEN, PINK, _, GRAY = mfx.plot.COLORS.values()
COLORS = {
    "keller": ORANGE,
    "polar_express_5": BLUE,
    "polar_express": GRAY,
    "cubic": GREEN,
}


def draw_ellipses(iterates: dict[int, Tensor]):
    """Draw the image of the unit circle under 2 x 2 matrices, with the images of the right singular vectors."""
    angles = torch.linspace(0, 2 * torch.pi, 200)
    circle = torch.stack([angles.cos(), angles.sin()]).double()
    _, _, right_vectors = torch.linalg.svd(iterates[0])
    _, all_axes = plt.subplots(1, len(iterates), figsize=(7.2, 1.7))
    for axes, (steps, matrix) in zip(all_axes, iterates.items(), strict=True):
        axes.plot(*circle, color=GRAY, lw=0.8, ls=":")
        axes.plot(*(matrix @ circle), color=BLUE)
        for direction, color in zip(
            (matrix @ right_vectors.T).T, (ORANGE, GREEN), strict=True
        ):
            axes.plot([0, direction[0]], [0, direction[1]], color=color)
        lengths = torch.linalg.svdvals(matrix)
        axes.set_title(f"{steps} steps\n{lengths[0]:.2f}, {lengths[1]:.2f}", fontsize=8)
        axes.set(aspect="equal", xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
        axes.axis("off")
    plt.show()


def draw_steps(name: str = "polar_express_5", smallest: float = -4.0):
    """Draw the polynomial of a set after each of its steps, from 10**smallest to 1."""
    sigma = torch.logspace(smallest, 0, 1200, dtype=torch.float64)
    count = len(polar.PRESETS[name].steps)
    _, axes = plt.subplots()
    for step in range(1, count + 1):
        style = (
            {"color": BLUE, "lw": 1.8}
            if step == count
            else {"color": plt.get_cmap("Wistia")(step / count), "lw": 0.9}
        )
        axes.semilogx(
            sigma,
            polar.scalar_polynomial(name, sigma, steps=step),
            label=f"{step}",
            **style,
        )
    axes.axhline(1, color=GRAY, lw=0.8, ls=":")
    axes.set(
        xlabel="singular value, over the Frobenius norm",
        ylabel=f"after steps of {name}",
        ylim=(0, 1.6),
    )
    axes.legend(title="steps", ncols=2, loc="upper left")
    plt.show()


def draw_sets(matrix: Tensor):
    """Draw the polynomials of the sets, and the singular values of one matrix before and after."""
    sigma = torch.logspace(-4, 0, 2000, dtype=torch.float64)
    figure, (left, right) = plt.subplots(1, 2, sharey=True, width_ratios=[5, 4])
    for name, color in COLORS.items():
        left.semilogx(sigma, polar.scalar_polynomial(name, sigma), color=color, lw=1.3)
        after = torch.linalg.svdvals(polar.orthogonalize(matrix, coefficients=name))
        right.plot(after, color=color, label=name)
    right.plot(torch.linalg.svdvals(matrix), color=GRAY, ls=":", label="before")
    left.set(
        xlabel="singular value, over the Frobenius norm",
        ylabel="afterwards",
        ylim=(0, 1.5),
    )
    right.set(xlabel="number, in one 128 x 128 matrix")
    figure.legend(loc="outside upper right", ncols=5, fontsize=8)
    plt.show()


def draw_costs(found: dict[str, dict[str, list[tuple[int, float]]]]):
    """Draw, for each kind of matrix and each set, the error over the number of products."""
    _, all_axes = plt.subplots(1, len(found), sharey=True)
    for axes, (title, sets) in zip(all_axes, found.items(), strict=True):
        for name, points in sets.items():
            axes.plot(*zip(*points, strict=True), color=COLORS[name], lw=1, alpha=0.5)
            axes.plot(*points[-1], "o", color=COLORS[name], ms=7, label=name)
        axes.set(xlabel="matrix products", ylim=(0, 1), xlim=(0, None))
        axes.set_title(title, fontsize=9)
    all_axes[0].set(ylabel="relative error")
    all_axes[1].legend(loc="lower left", fontsize=8)
    plt.show()


def draw_reach(lowers: Sequence[float], reached: dict[int, list[float]]):
    """Draw the lower end of the band over the smallest singular value, for several numbers of quintics."""
    _, axes = plt.subplots(figsize=(7.2, 2.6))
    for (count, values), color in zip(
        reached.items(), (GREEN, ORANGE, BLUE, PINK), strict=False
    ):
        axes.semilogx(lowers, values, "o-", color=color, label=f"{count} quintics")
    axes.set(
        xlabel="smallest singular value in the interval",
        ylabel="its value afterwards",
        ylim=(0, 1.05),
    )
    axes.legend(ncols=2)
    plt.show()


def explore_steps():
    """Draw `draw_steps` with sliders if ipywidgets is installed, and else once with its defaults."""
    try:
        from ipywidgets import FloatSlider, interact
    except ImportError:
        draw_steps()
        return
    smallest = FloatSlider(value=-4, min=-6, max=-1, step=0.5)
    interact(draw_steps, name=list(polar.PRESETS), smallest=smallest)
