# pyright: basic, reportMissingImports=false
# A kernel has Triton's semantics, and Triton may be missing, so strict type checking does not apply.
"""The Triton kernel for symmetric products, and its launch.

**Result.** `alpha P P^T + beta C + identity I` for a batch of matrices. Of the `n x n` result only the tiles on or
above the diagonal are computed. Each is stored twice: in its position, and transposed at its mirror image. With
`T = n / BLOCK_N` tiles per side these are `T (T + 1) / 2` tiles instead of `T^2`: `(1 + 1 / T) n^2 k` FLOPs instead of
`2 n^2 k`.

**Bitwise symmetry.** The lower triangle is always a copy of the upper one: a tile off the diagonal is copied whole, and
a tile on the diagonal overwrites its lower half with its transposed upper half.

**Order of the tiles.** A linear program id is composed of matrix, tile, and row block of the tile. A tile is `BLOCK_N`
wide and high; a program computes `BLOCK_M` of its rows. The triangle is folded into a full rectangle of `(T + 1) // 2`
rows: its lower rows, rotated, fill the gap next to its upper rows. Integer divisions alone give a tile's position, and
no program is idle. The rectangle is traversed in groups of `GROUP` rows, column by column, so that concurrent programs
share panels of P in the L2 cache.

**Memory.** P is contiguous or the transpose of a contiguous tensor; loads follow its unit stride. Sizes are passed
divided by their largest common power of two up to 8 (`ALIGN_N`, `ALIGN_K`) and multiplied again here, so the compiler
sees a multiple of 8 and moves 16 bytes at a time. Odd sizes have narrow loads: correct, but slow. A side that is a
multiple of the block needs no mask (`EVEN_N`, `EVEN_K`). A transposed tile passes through shared memory (`tl.trans`),
so that both stores run along rows. Offsets that involve a stride or a batch index are 64-bit.

**Tiles.** The tile depends on the dtype and the side of the result alone. There is no autotuning, because tiles round
differently and no result may depend on a clock. Every tile fits the shared memory and registers of compute capability
8.0 to 10.0: the loads of a tile take `stages * (rows + columns) * depth` elements of shared memory (99 KiB per program
at most), its sums `rows * columns` of the 65,536 registers. ``python -m benchmarks.kernels`` compares them with others.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""True if Triton's interpreter was on at import; its kernels then run in NumPy, on any device."""


def tile(
    rows: int, columns: int, depth: int, warps: int, stages: int, registers: int | None = None, group: int = 8
) -> triton.Config:
    """Return the Triton launch configuration in which a program computes a block of `rows` x `columns` elements."""
    blocks = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "GROUP": group}
    return triton.Config(blocks, num_warps=warps, num_stages=stages, maxnreg=registers)


_HALF = (tile(32, 32, 64, 4, 4), tile(64, 64, 64, 4, 4), tile(128, 128, 64, 8, 3, registers=128))
_SINGLE = (tile(32, 32, 32, 4, 3), tile(64, 64, 16, 4, 4), tile(128, 128, 16, 8, 3))
TILES = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _SINGLE}
"""For each dtype the launch configurations for results with a side below 256, below 1024, and larger."""

_BY_HAND = tile(16, 32, 16, 4, 3, group=2)  # for the interpreter, so that small matrices have many tiles


def chosen_tile(n: int, dtype: torch.dtype) -> triton.Config:
    """Return the launch configuration for `n x n` results."""
    return _BY_HAND if INTERPRETED else TILES[dtype][(n >= 256) + (n >= 1024)]


@triton.jit
def upper_tile(index, tiles, GROUP: tl.constexpr):
    """Return (row, column) of the tile number `index`, counted on and above the diagonal of `tiles` x `tiles` tiles."""
    even = 1 - tiles % 2
    width = tiles + even
    height = (tiles + 1) // 2
    first = index // (GROUP * width) * GROUP
    within = index % (GROUP * width)
    rows = tl.minimum(height - first, GROUP)
    row = first + within % rows
    column = within // rows
    if column < row + even:  # the part of the rectangle that holds the lower half of the triangle, rotated
        i = tiles - row - even
        j = tiles - 1 - column
    else:
        i = row
        j = column - even
    return i, j


@triton.jit
def _panel(matrix, rows, columns, stride, ALONG_COLUMNS: tl.constexpr):
    """Return pointers to the elements `rows` x `columns` of a matrix stored by rows (ALONG_COLUMNS) or by columns."""
    if ALONG_COLUMNS:
        return matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    else:
        return matrix + rows[:, None] + columns.to(tl.int64)[None, :] * stride


@triton.jit
def _inside(indices, size, EVEN: tl.constexpr):
    """Return the mask `indices < size`. If EVEN, all are smaller, and the constant mask is removed by the compiler."""
    return (indices < size) | EVEN


@triton.jit
def _store_mirrored(out, diagonal, rows, columns, stride, value, rows_inside, columns_inside, SPLIT: tl.constexpr):
    """Store a block of the symmetric result and its transpose at the mirrored position, within the bounds of `out`."""
    here = _panel(out, rows, columns, stride, True)
    mirrored = _panel(out, columns, rows, stride, True)
    mirrored_inside = columns_inside[:, None] & rows_inside[None, :]
    inside = rows_inside[:, None] & columns_inside[None, :]
    if not diagonal:
        tl.store(here, value, mask=inside)
        tl.store(mirrored, tl.trans(value), mask=mirrored_inside)
    elif SPLIT == 1:
        upper = rows[:, None] <= columns[None, :]
        tl.store(here, tl.where(upper, value, tl.trans(value)), mask=inside)
    else:  # not square: its mirror image overlaps another program's rows, so only the upper part is stored, twice
        tl.store(here, value, mask=inside & (rows[:, None] <= columns[None, :]))
        tl.store(mirrored, tl.trans(value), mask=mirrored_inside & (rows[None, :] <= columns[:, None]))


@triton.jit(do_not_specialize=["n", "k"])
def symmetric_kernel(
    p,
    addend,
    out,
    n,
    k,
    alpha,
    beta,
    identity,
    ADDEND: tl.constexpr,
    ALONG_K: tl.constexpr,
    ALIGN_N: tl.constexpr,
    ALIGN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute a block of `alpha p p^T + beta addend + identity I` above the diagonal; store it and its transpose."""
    n *= ALIGN_N
    k *= ALIGN_K
    SPLIT: tl.constexpr = BLOCK_N // BLOCK_M
    tiles = tl.cdiv(n, BLOCK_N)
    programs = tiles * (tiles + 1) // 2 * SPLIT
    batch = (tl.program_id(0) // programs).to(tl.int64)
    within = tl.program_id(0) % programs
    i, j = upper_tile(within // SPLIT, tiles, GROUP)
    rows = i * BLOCK_N + within % SPLIT * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    depths = tl.arange(0, BLOCK_K)
    rows_inside = _inside(rows, n, EVEN_N)
    columns_inside = _inside(columns, n, EVEN_N)

    n_stride = n.to(tl.int64)
    stride = k.to(tl.int64) if ALONG_K else n_stride
    p += batch * n * k
    left = _panel(p, rows, depths, stride, ALONG_K)
    right = _panel(p, columns, depths, stride, ALONG_K)
    step = BLOCK_K if ALONG_K else BLOCK_K * stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        depths_inside = _inside(depths, k - start, EVEN_K)
        a = tl.load(left, mask=rows_inside[:, None] & depths_inside[None, :], other=0.0)
        b = tl.load(right, mask=columns_inside[:, None] & depths_inside[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        left += step
        right += step

    inside = rows_inside[:, None] & columns_inside[None, :]
    square = batch * n * n
    total *= alpha
    if ADDEND:
        c = tl.load(_panel(addend + square, rows, columns, n_stride, True), mask=inside, other=0.0)
        total += beta * c.to(tl.float32)
    total = tl.where(rows[:, None] == columns[None, :], total + identity, total)
    value = total.to(out.dtype.element_ty)
    _store_mirrored(out + square, i == j, rows, columns, n_stride, value, rows_inside, columns_inside, SPLIT)


def launch(
    p: torch.Tensor,
    addend: torch.Tensor | None,
    alpha: float,
    beta: float,
    identity: float,
    out: torch.Tensor,
    config: triton.Config | None = None,
) -> None:
    """Launch the kernel for the arguments of `symmetric_matmul`, with the configuration for their size by default."""
    if INTERPRETED and out.dtype != torch.float32:  # the interpreter multiplies the bit patterns of bf16
        wide = None if addend is None else addend.float()
        whole = torch.empty_like(out, dtype=torch.float32)
        launch(p.float(), wide, alpha, beta, identity, whole, config)
        out.copy_(whole)
        return
    p = p if p.mT.is_contiguous() else p.contiguous()
    batches, n, k = p.shape
    align_n, align_k = math.gcd(8, n), math.gcd(8, k)
    config = chosen_tile(n, p.dtype) if config is None else config
    blocks: dict[str, int] = config.kwargs
    tiles = triton.cdiv(n, blocks["BLOCK_N"])
    programs = batches * (tiles * (tiles + 1) // 2) * (blocks["BLOCK_N"] // blocks["BLOCK_M"])
    with torch.cuda.device_of(p):  # Triton launches on the current device
        symmetric_kernel[(programs,)](
            *(p, out if addend is None else addend.contiguous(), out),
            *(n // align_n, k // align_k, alpha, beta, identity),
            ADDEND=addend is not None,
            ALONG_K=p.is_contiguous(),
            ALIGN_N=align_n,
            ALIGN_K=align_k,
            EVEN_N=n % blocks["BLOCK_N"] == 0,
            EVEN_K=k % blocks["BLOCK_K"] == 0,
            **config.all_kwargs(),  # pyright: ignore[reportCallIssue]
        )
