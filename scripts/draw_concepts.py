"""Draw the pictures of the concept pages into docs/assets/concepts: `.venv/bin/python scripts/draw_concepts.py`.

The pictures are plain SVG in medium tones without a background, readable on light and dark pages.
"""

from dataclasses import dataclass, field
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "assets" / "concepts"
GRAY, BLUE, ORANGE, GREEN = "#7d8394", "#6472e8", "#d9752b", "#2f9e7a"
MONO = "font-family='ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace'"


@dataclass
class Picture:
    """Builder of an SVG; coordinates are pixels from the top left."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = GRAY,
        size: int = 13,
        anchor: str = "middle",
        **kw: str,
    ):
        """Add one line of text, with its middle (or start, or end) at x and its baseline at y."""
        style = MONO if kw.get("mono") else "font-family='system-ui, sans-serif'"
        weight = " font-weight='600'" if kw.get("bold") else ""
        self.parts.append(
            f"<text x='{x}' y='{y}' fill='{color}' font-size='{size}' text-anchor='{anchor}' {style}{weight}>"
            f"{text}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        color: str = BLUE,
        fill: float = 0.12,
        radius: int = 6,
    ):
        """Add a rectangle with a pale fill."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='{radius}' stroke='{color}' stroke-width='1.5' "
            f"fill='{color}' fill-opacity='{fill}'/>"
        )

    def node(self, x: float, y: float, w: float, name: str, below: str = "", color: str = BLUE):
        """Add a box 34 pixels high that contains a name, and a remark below it."""
        self.box(x, y, w, 34, color)
        self.text(x + w / 2, y + 22, name, color, mono="yes", bold="yes")
        if below:
            self.text(x + w / 2, y + 52, below, size=12)

    def arrow(self, *points: tuple[float, float], color: str = GRAY, dashed: bool = False):
        """Add a line through the points with an arrow head at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = " stroke-dasharray='4 4'" if dashed else ""
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.5'{dash} marker-end='url(#head)'/>"
        )

    def grid(
        self,
        x: float,
        y: float,
        rows: int,
        columns: int,
        cell: int,
        color: str = GRAY,
        fill: float = 0.0,
    ):
        """Add a matrix of empty cells."""
        for row in range(rows):
            for column in range(columns):
                self.box(x + column * cell, y + row * cell, cell, cell, color, fill, radius=0)

    def save(self, name: str):
        """Write the SVG to a file."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' height='{self.height}' role='img'>\n<title>{self.title}</title>\n"
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{GRAY}'/></marker></defs>\n"
        )
        TARGET.mkdir(parents=True, exist_ok=True)
        (TARGET / f"{name}.svg").write_text(
            head + "\n".join(self.parts) + "\n</svg>\n", encoding="utf-8"
        )


def step():
    """Draw the path of a gradient to the arithmetic of a transform; the page explains each numbered arrow."""
    p = Picture(
        720,
        446,
        "The path of a gradient: checks, the placed transform in three ways, and the updates",
    )

    def numbered(number: int, *points: tuple[float, float]):
        p.arrow(*points)
        (x1, y1), (x2, y2) = points[-2:]
        p.text((x1 + x2) / 2 + 10, (y1 + y2) / 2 + 4, str(number), color=BLUE, size=12, bold="yes")

    for x, name, below in (
        (20, "tx.update", "one process"),
        (210, "optimizer/", "one process"),
        (460, "sharding/", "over ranks: one all-reduce"),
    ):
        p.node(x, 20, 160 if x == 20 else 240, name, below, color=GRAY)
    numbered(1, (100, 78), (100, 328))
    numbered(2, (330, 78), (330, 116))
    numbered(3, (580, 78), (580, 116))
    p.node(
        210,
        118,
        490,
        "placement/: the placed transform",
        "part by part, bucket by bucket",
        color=BLUE,
    )
    for place, (name, lines) in enumerate(
        (
            ("elementwise", ("runs on local shards",)),
            ("matrices", ("over ranks: gather on", "the owner, scatter")),
            ("sum over leaves", ("sums local shards; over", "ranks: one all-reduce")),
        )
    ):
        x = 210 + 170 * place
        numbered(4 + place, (x + 75, 178), (x + 75, 223))
        p.node(x, 225, 150, name, color=ORANGE)
        for line, text in enumerate(lines):
            p.text(x + 75, 277 + 16 * line, text, size=12)
        numbered(7, (x + 75, 300), (x + 75, 328))
    p.node(
        20,
        330,
        680,
        "transforms/ and polar/",
        "the arithmetic of a leaf or of a stack of matrices",
        color=GREEN,
    )
    numbered(8, (360, 392), (360, 418))
    p.text(360, 436, "updates and new state", size=13, bold="yes")
    p.save("step")


def transform():
    """Draw the two pure functions of a transform: init, called once, and update, called at each step."""
    p = Picture(
        720, 190, "init creates a state from parameters; update returns updates and the next state"
    )
    p.node(20, 20, 90, "params", color=GRAY)
    p.node(170, 20, 90, "init")
    p.node(320, 20, 90, "state", "a tree of tensors", color=GREEN)
    p.arrow((110, 37), (168, 37))
    p.arrow((260, 37), (318, 37))
    p.node(20, 110, 110, "gradients", color=GRAY)
    p.node(300, 110, 130, "update", "modifies none of its inputs")
    p.node(500, 90, 110, "updates", color=ORANGE)
    p.node(500, 138, 110, "state", color=GREEN)
    p.arrow((130, 127), (298, 127))
    p.arrow((365, 78), (365, 108))
    p.arrow((205, 96), (298, 117))
    p.text(200, 96, "params, if it needs them", size=12, anchor="end")
    p.arrow((430, 122), (498, 107))
    p.arrow((430, 132), (498, 155))
    p.text(622, 160, "next step", size=12, anchor="start")
    p.text(622, 112, "apply_updates", size=12, anchor="start", mono="yes")
    p.save("transform")


def chain():
    """Draw a chain that contains a partition, with the state of each part below it."""
    p = Picture(
        860, 210, "A chain: clipping, then a partition of Muon and Adam, then the learning rate"
    )
    p.text(40, 82, "gradients", anchor="middle")
    p.arrow((76, 77), (98, 77))
    p.node(100, 60, 130, "clip", "no state")
    p.arrow((230, 77), (258, 77), (282, 42), (308, 42))
    p.arrow((230, 77), (258, 77), (282, 127), (308, 127))
    p.text(262, 30, "matrices", size=12)
    p.text(262, 152, "the rest", size=12)
    p.node(310, 25, 110, "momentum", "trace")
    p.arrow((420, 42), (438, 42))
    p.node(440, 25, 140, "orthogonalize", "no state")
    p.node(310, 110, 270, "scale_by_adam", "mu, nu, count")
    p.arrow((580, 42), (606, 42), (630, 77), (658, 77))
    p.arrow((580, 127), (606, 127), (630, 77), (658, 77))
    p.node(660, 60, 110, "rate", "count")
    p.arrow((770, 77), (796, 77))
    p.text(826, 82, "updates", ORANGE)
    p.text(
        430,
        200,
        "the state is a dict by names of transforms; a partition has an entry for each label",
        size=12,
    )
    p.save("chain")


def locality():
    """Draw the part of the input that one element of the output depends on, for each locality."""
    p = Picture(
        760, 200, "One element of the output, and the inputs that it depends on for each locality"
    )
    cell = 13

    def leaf(x: float, y: float, stack: int, seen: str, chosen: bool = True):
        for depth in reversed(range(stack)):
            left, top = x + 12 * depth, y + 12 * (stack - 1 - depth)
            whole = seen == "leaf" or (seen == "matrix" and depth == 0)
            p.parts.append(f"<g opacity='{1 if depth == 0 or whole else 0.45}'>")
            p.grid(left, top, 4, 5, cell, BLUE if whole else GRAY, 0.22 if whole else 0.0)
            p.parts.append("</g>")
        if chosen:
            p.box(x + 2 * cell, y + 12 * (stack - 1) + cell, cell, cell, ORANGE, 0.95, radius=0)

    places = (
        (20, "ELEMENT", "momentum, Adam"),
        (190, "MATRIX", "a matrix of a stack"),
        (360, "LEAF", "orthogonalize"),
    )
    for x, name, example in places:
        leaf(x + 15, 40, 3, {"ELEMENT": "none", "MATRIX": "matrix", "LEAF": "leaf"}[name])
        p.text(x + 60, 24, name, BLUE, mono="yes", bold="yes")
        p.text(x + 60, 152, example, size=12)
    for i, x in enumerate((535, 645)):
        leaf(x, 40, 2, "leaf", chosen=i == 0)
    p.text(640, 24, "TREE", BLUE, mono="yes", bold="yes")
    p.text(640, 152, "the global norm", size=12)
    p.box(160, 176, 11, 11, ORANGE, 0.95, radius=0)
    p.text(178, 186, "one element of the output", size=12, anchor="start")
    p.box(400, 176, 11, 11, BLUE, 0.22, radius=0)
    p.text(418, 186, "the inputs that it depends on", size=12, anchor="start")
    p.save("locality")


def owner():
    """Draw a matrix sharded over four ranks, which is gathered on its owner, orthogonalized once and scattered."""
    p = Picture(
        800,
        230,
        "Four ranks hold a shard each; the owner gathers the matrix, computes once, scatters the result",
    )
    colors = (BLUE, ORANGE, GREEN, "#b0568f")
    for rank, color in enumerate(colors):
        y = 20 + 46 * rank
        p.text(20, y + 22, f"rank {rank}", anchor="start")
        p.box(80, y, 110, 34, color)
        p.text(135, y + 22, "its rows", color, size=12)
        p.arrow((192, y + 17), (268, 60 + 24 * rank))
        p.box(270, 48 + 24 * rank, 130, 24, color, 0.3, radius=0)
        p.box(540, 48 + 24 * rank, 130, 24, color, 0.3, radius=0)
    p.text(335, 38, "gathered on its owner", size=12)
    p.arrow((402, 96), (538, 96))
    p.text(470, 86, "orthogonalize", BLUE, size=12, mono="yes", bold="yes")
    p.text(470, 116, "once, on one rank", size=12)
    p.text(605, 38, "its update", size=12)
    for rank, color in enumerate(colors):
        y = 20 + 46 * rank
        p.arrow((672, 60 + 24 * rank), (708, y + 17))
        p.box(710, y, 70, 34, color)
    p.text(
        400, 222, "momentum before it and weight decay after it run on the local shards", size=12
    )
    p.save("owner")


def polynomials():
    """Draw the polynomials of two presets as functions of a singular value."""
    import matplotlib

    matplotlib.use("svg")
    import torch
    from matplotlib import pyplot

    from muonfx import polar

    pyplot.style.use("muonfx.plot.style")
    pyplot.rcParams.update({"svg.hashsalt": "muonfx", "text.color": GRAY})
    sigma = torch.logspace(-3, 0, 400, dtype=torch.float64)
    figure, axes = pyplot.subplots(figsize=(7.4, 2.9))
    for name, color in (("keller", ORANGE), ("polar_express_5", BLUE)):
        axes.plot(
            sigma, polar.scalar_polynomial(name, sigma), color=color, linewidth=1.3, label=name
        )
    axes.axhline(1.0, color=GRAY, linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        xlabel="singular value before, over the Frobenius norm",
        ylabel="after",
        ylim=(0, 1.3),
    )
    axes.legend(frameon=False, loc="lower right")
    for name, width in (("polynomials", 7.4), ("polynomials-narrow", 4.4)):
        figure.set_size_inches(width, 2.9)
        figure.savefig(
            TARGET / f"{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )


if __name__ == "__main__":
    for draw in (transform, chain, locality, owner, step, polynomials):
        draw()
