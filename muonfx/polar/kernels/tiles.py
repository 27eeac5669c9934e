"""Tile sizes of a product: the candidates, and the ones that are tried for a shape.

The candidates fit the shared memory and registers of compute capability 8.0 to 10.0: the loads of a tile take
`stages * (rows + columns) * depth` elements of shared memory (99 to 227 KiB per program at most), its sums
`rows * columns` of the 65,536 registers. Each was compiled for 8.0, 9.0 and 10.0 by Triton 3.7 and the listing
inspected: if sizes are multiples of 8, loads are asynchronous and 16 bytes wide, products run on the tensor cores (fp32
on CUDA cores, as IEEE arithmetic requires), and no main loop spills. A listing does not show which tile is fastest, so
Triton times the suitable ones once for each bucket of shapes and caches the fastest on disk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Tile sizes of a program, how many loads it prefetches, and the order of the programs."""

    rows: int
    """Rows that one program computes; divides `columns`."""
    columns: int
    """Columns that one program computes, and the side of a tile of the triangle."""
    depth: int
    """Length of the sum in one iteration of the loop."""
    warps: int = 4
    stages: int = 3
    """Number of iterations whose loads are in flight or in use."""
    registers: int | None = None
    """Limit on registers per thread, so that two programs fit on one multiprocessor."""
    share: bool = True
    """True if a diagonal tile of a Gram matrix loads its panel once: half the loads, more registers."""
    group: int = 8
    """Rows of tiles that are traversed together."""


_HALF = (
    Tile(128, 128, 64, warps=8, stages=3, registers=128, share=False),  # two programs a multiprocessor
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 128, 32, warps=8, stages=4),  # where shared memory is small: 8.6 and 8.9
    Tile(128, 256, 64, warps=8, stages=3),  # the fewest loads per product; the widest instruction of Hopper
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
"""Candidates by dtype."""

BY_HAND = Tile(16, 32, 16, group=2)
"""Tile for Triton's interpreter, small so that small matrices have many tiles."""


def suited(dtype: torch.dtype, n: int) -> list[Tile]:
    """Return the candidates for `(n, n)` results that are neither far wider than the result nor far too small."""
    widest = max(tile.columns for tile in TILES[dtype])
    least = 128 if n >= 2048 else 64 if n >= 256 else 32
    most = min(max(n, 32), 128 if n < 1024 else widest)
    return [tile for tile in TILES[dtype] if least <= tile.columns <= most]


def bucket(size: int) -> int:
    """Return the power of two that a size is tuned as, at most 16,384, so that few new shapes are timed."""
    return min(1 << (size - 1).bit_length(), 16384) if size > 1 else 1
