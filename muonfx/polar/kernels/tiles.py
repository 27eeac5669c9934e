"""How a product is cut into tiles: the candidates, and which of them a shape is tried with.

The candidates are what the shared memory and the registers of compute capability 8.0 to 10.0 hold: a tile's loads
take `stages * (rows + columns) * depth` elements of shared memory (99 to 227 KiB a program at most), its sums
`rows * columns` of the 65,536 registers. Each was compiled for 8.0, 9.0 and 10.0 by Triton 3.7 and the listing read:
where sizes are multiples of 8, loads are asynchronous and 16 bytes wide, products run on the tensor cores (fp32: on the
ordinary ones, as IEEE arithmetic demands), and no main loop spills. Which is fastest nobody can read from a listing, so
Triton times the suited ones, once for each bucket of shapes, and remembers the winner on disk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How a product is cut: what a program computes, how far its loads run ahead, and the order of the programs."""

    rows: int
    """Rows that one program computes; divides `columns`."""
    columns: int
    """Columns that one program computes, and the side of a tile of the triangle."""
    depth: int
    """How much of the sum one turn of the loop takes."""
    warps: int = 4
    stages: int = 3
    """How many turns' loads are in flight or in use."""
    registers: int | None = None
    """A limit on registers a thread, so that two programs fit on one multiprocessor."""
    share: bool = True
    """True if a diagonal tile of a Gram matrix loads its panel once: half the loads, a second loop, more registers."""
    group: int = 8
    """Rows of tiles that are walked together."""


_HALF = (
    Tile(128, 128, 64, warps=8, stages=3, registers=128, share=False),  # two programs a multiprocessor
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 128, 32, warps=8, stages=4),  # where shared memory is small: 8.6 and 8.9
    Tile(128, 256, 64, warps=8, stages=3),  # the fewest loads a product; the widest of Hopper's instructions
    Tile(128, 256, 64, warps=8, stages=4),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(64, 64, 32, warps=4, stages=5),
    Tile(32, 32, 64, warps=4, stages=4),
)
_SINGLE = (
    Tile(128, 128, 16, warps=8, stages=3, share=False),
    Tile(64, 128, 16, warps=8, stages=3),
    Tile(64, 64, 16, warps=4, stages=4, share=False),
    Tile(64, 64, 32, warps=8, stages=3),
    Tile(32, 32, 32, warps=4, stages=3),
)
TILES: dict[torch.dtype, tuple[Tile, ...]] = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _SINGLE}
"""The candidates by dtype."""

BY_HAND = Tile(16, 32, 16, group=2)
"""For Triton's interpreter, where nothing is to be won: small, so that small matrices have many tiles."""


def suited(dtype: torch.dtype, n: int) -> list[Tile]:
    """The candidates for `(n, n)` results: none far wider than the result, none that cut it into thousands of pieces.

    >>> [tile.columns for tile in suited(torch.float32, 32)]
    [32]
    """
    widest = max(tile.columns for tile in TILES[dtype])
    least = 128 if n >= 2048 else 64 if n >= 256 else 32
    most = min(max(n, 32), 128 if n < 1024 else widest)
    return [tile for tile in TILES[dtype] if least <= tile.columns <= most]


def bucket(size: int) -> int:
    """The power of two that a size is tuned as, at most 16,384, so that a new shape is seldom a new measurement.

    >>> [bucket(size) for size in (1, 700, 768, 1024, 100_000)]
    [1, 1024, 1024, 1024, 16384]
    """
    return min(1 << (size - 1).bit_length(), 16384) if size > 1 else 1
