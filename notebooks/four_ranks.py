"""Four processes for notebook 04, and its pictures: a cell that begins with %%ranks runs on all four processes."""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from IPython import get_ipython
from matplotlib.patches import Patch, Rectangle

import muonfx as mfx

*COLORS, _, GRAY = mfx.plot.COLORS.values()  # a color for each rank
WORKER = """
import contextlib, io, os, pickle, sys, traceback
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # prints of libraries must not mix with answers
import torch, torch.distributed as dist
rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=4)
names = {"__name__": "__main__", "rank": rank, "dist": dist}
while source := pickle.load(sys.stdin.buffer):
    printed, value, error = io.StringIO(), None, None
    try:
        with contextlib.redirect_stdout(printed):
            value = eval(source[5:], names) if source.startswith("pull ") else exec(source, names)
    except BaseException:
        error = traceback.format_exc()
    pickle.dump((printed.getvalue(), value, error), answers)
    answers.flush()
dist.destroy_process_group()
"""


class Ranks:
    """Four processes that run source text and keep the names that it defines."""

    def __init__(self):
        store = str(Path(tempfile.mkdtemp()) / "store")
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        command = [sys.executable, "-c", WORKER]
        self.processes = [
            subprocess.Popen([*command, str(rank), store], **pipes) for rank in range(4)
        ]
        get_ipython().register_magic_function(self.run_cell, "cell", "ranks")

    def run_cell(self, line: str, cell: str):
        """Run a cell on all ranks, and with `%%ranks here` in the notebook too; print equal outputs once."""
        if line == "here":
            get_ipython().run_cell(cell)
        printed = [text.rstrip() for text, _, _ in self.run(cell)]
        for text in dict.fromkeys(filter(None, printed)):
            who = [str(rank) for rank in range(4) if printed[rank] == text]
            head = "all ranks" if len(who) == 4 else "rank " + ", ".join(who)
            print(head, text, sep="\n" if "\n" in text else ": ")

    def run(self, source: str) -> list[tuple]:
        """Run source text on all ranks; return the printed text, the value and the error of each."""
        self._send(source)
        found = [pickle.load(process.stdout) for process in self.processes]
        for rank, (_, _, error) in enumerate(found):
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
        return found

    def pull(self, expression: str) -> list:
        """Return the value of an expression on each rank."""
        return [value for _, value, _ in self.run("pull " + expression)]

    def close(self) -> list[int]:
        """End the processes and return their exit codes."""
        self._send("")
        return [process.wait() for process in self.processes]

    def _send(self, source: str):
        for process in self.processes:
            pickle.dump(source, process.stdin)
            process.stdin.flush()


PATCHES = [
    Patch(color=color, label=f"rank {rank}") for rank, color in enumerate(COLORS)
]
BOXES = (
    "{kind: {name: [[(b.offsets, b.sizes) for b in layout.position(name, r).boxes] for r in range(4)]"
    " for name in whole} for kind, layout in layouts.items()}"
)
"""The rectangles of each layout, parameter and rank."""


def draw_layouts(ranks: Ranks, params: dict):
    """Draw all matrices to scale under each layout, in the colors of the ranks that hold their elements."""
    every = ranks.pull(BOXES)[0]
    matrices = {name: param for name, param in params.items() if param.ndim == 2}
    figure, all_axes = plt.subplots(len(every), 1, figsize=(7.2, 6.8))
    for axes, (kind, holders) in zip(all_axes, every.items(), strict=True):
        x = 0
        for name, matrix in matrices.items():
            for rank, boxes in enumerate(holders[name]):
                color = GRAY if holders[name].count(boxes) > 1 else COLORS[rank]
                for (top, left), (height, width) in boxes:
                    axes.add_patch(
                        Rectangle((x + left, top), width, height, color=color, lw=0)
                    )
            x += matrix.shape[1] + 14
        axes.set(xlim=(-2, x), ylim=(92, -4), aspect="equal")
        axes.axis("off")
        axes.annotate(kind, (176, 72), fontsize=9)
    handles = [*PATCHES, Patch(color=GRAY, label="all ranks")]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    plt.show()


def draw_bytes(tables: list[dict]):
    """Draw the parameters, the state and the sent bytes of each rank under each layout."""
    figure, all_axes = plt.subplots(1, 3, figsize=(7.2, 2.4), sharey=True)
    kinds = list(tables[0])
    for axes, key in zip(all_axes, ("parameters", "state", "sent"), strict=True):
        for rank, color in enumerate(COLORS):
            places = [place + 0.19 * (rank - 1.5) for place in range(len(kinds))]
            widths = [tables[rank][kind][key] / 1024 for kind in kinds]
            axes.barh(places, widths, height=0.17, color=color)
        axes.set(xlabel=f"{key}, KiB", yticks=range(len(kinds)), yticklabels=kinds)
        axes.grid(False, axis="y")
    all_axes[0].invert_yaxis()
    figure.legend(handles=PATCHES, loc="outside upper center", ncols=4)
    plt.show()
