"""Draw the pictures of docs/looking.md: ``python scripts/looking_pictures.py [folder]``; default: docs/assets."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

import muonfx as mfx

mpl.use("Agg")  # writes files without a display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

NARROW = 4.4
"""The width of a second rendering in inches, which a window of 390 pixels shows in a legible size."""
WIDE_ONLY = ("looking-memory", "looking-plan")
"""Pictures whose texts need the width; a narrow window scrolls over them."""
ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"


def params_of_a_model() -> dict[str, Tensor]:
    """Return the parameters of a small transformer from a fixed seed."""
    random, width = torch.Generator().manual_seed(0), 64
    shapes: dict[str, tuple[int, ...]] = {"wte": (256, width)}
    for block in range(3):
        shapes |= {
            f"blocks.{block}.attn.query": (width, width),
            f"blocks.{block}.attn.out": (width, width),
            f"blocks.{block}.mlp.up": (4 * width, width),
            f"blocks.{block}.mlp.down": (width, 4 * width),
            f"blocks.{block}.norm": (width,),
        }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def pictures() -> dict[str, Axes]:
    """Return the axes of each picture by file name."""
    params = params_of_a_model()
    labels = mfx.routing.default_labels_by_name(params)
    found = {"looking-polynomial": mfx.plot.plot_polynomial("polar_express_5")}
    mfx.plot.plot_polynomial("keller", ax=found["looking-polynomial"])

    matrix = params["blocks.0.mlp.up"] @ torch.diag(torch.logspace(0, -2, 64))
    found["looking-spectrum"] = mfx.plot.plot_spectrum(
        matrix, mfx.polar.orthogonalize(matrix, dtype=torch.float32)
    )

    # With "auto", the plan would depend on the machine.
    fp32 = mfx.orthogonalize(dtype=torch.float32)
    muon = mfx.muon_with_adamw(0.02, 0.003, orthogonalize=fp32, labels=labels)
    tx = mfx.chain(
        mfx.monitor("gradients", ("rms",), by_leaf=True),
        muon,
        mfx.monitor("updates", ("rms",), by_leaf=True),
    )
    grads = {
        name: 0.003 * (1 + place % 5) * param for place, (name, param) in enumerate(params.items())
    }
    _, state = tx.update(grads, tx.init(params), params)
    found["looking-rms"] = mfx.plot.plot_update_rms(state)

    parts = {
        "muon": mfx.chain(
            mfx.momentum(dtype=torch.bfloat16), mfx.orthogonalize(), mfx.scale(-0.02)
        ),
        "adamw": mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.003)),
    }
    found["looking-memory"] = mfx.plot.plot_state_memory(mfx.partition(parts, labels).init(params))

    layout = mfx.sharding.zero(params, 4, partition="flat")
    plan = mfx.sharding.plan_for(muon, layout)
    found["looking-plan"] = mfx.plot.plot_plan(plan)
    return found


def main(folder: Path = ASSETS) -> list[Path]:
    """Write every picture to a folder in two widths, and return the wide ones; the files are reproducible."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with mfx.plot.style():
        for name, ax in pictures().items():
            written.append(folder / f"{name}.svg")
            ax.figure.savefig(written[-1], metadata={"Date": None})
            if name not in WIDE_ONLY:
                ax.figure.set_size_inches(NARROW, ax.figure.get_size_inches()[1])
                ax.figure.savefig(folder / f"{name}-narrow.svg", metadata={"Date": None})
            plt.close("all")
    return written


if __name__ == "__main__":
    print(*main(*map(Path, sys.argv[1:2])), sep="\n")
