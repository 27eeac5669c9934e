# pyright: basic, reportMissingImports=false
# A kernel has Triton's semantics, and Triton may be missing, so strict type checking does not apply.
"""The Triton kernel for symmetric products.

**Result.** `alpha P Q^T + beta C + identity I` for a batch of matrices; the caller guarantees symmetry. Of the `n x n`
result only the tiles on or above the diagonal are computed. Each is stored twice: in its position, and transposed at
its mirror image. With `T = n / BLOCK_N` tiles per side these are `T (T + 1) / 2` tiles instead of `T^2`:
`(1 + 1 / T) n^2 k` FLOPs instead of `2 n^2 k`.

**Bitwise symmetry.** The lower triangle is always a copy of the upper one: a tile off the diagonal is copied whole, and
a tile on the diagonal overwrites its lower half with its transposed upper half. The result is the mirrored upper
triangle of the formula, even if the product is not symmetric.

**Order of the tiles.** A linear program id is composed of matrix, tile, and row block of the tile. A tile is `BLOCK_N`
wide and high; a program computes `BLOCK_M` of its rows. The triangle is folded into a full rectangle of `(T + 1) // 2`
rows: its lower rows, rotated, fill the gap next to its upper rows. Integer divisions alone give a tile's position, and
no program is idle. The rectangle is traversed in groups of `GROUP` rows, column by column, so that concurrent programs
share panels of P and Q in the L2 cache.

**Memory.** Loads follow the unit stride, for P and for a transposed view. Sizes and strides are passed divided by their
largest common power of two up to 8 (`ALIGN_N`, `ALIGN_K`) and multiplied again here, so the compiler sees a multiple of
8 and moves 16 bytes at a time. Odd sizes have narrow loads: correct, but slow. A side that is a multiple of the block
needs no mask (`EVEN_N`, `EVEN_K`). A transposed tile passes through shared memory (`tl.trans`), so that both stores run
along rows. On a diagonal tile of a Gram matrix one panel may be loaded for both sides (`SHARE`). Offsets that involve a
stride or a batch index are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTEGERS = (
    *("n", "k", "p_batch", "p_stride", "q_batch", "q_stride"),
    *("addend_batch", "addend_stride", "out_batch", "out_stride"),
    *("n_bucket", "k_bucket", "batch_bucket"),
)

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""True if Triton's interpreter was on at import; its kernels then run in NumPy, on any device."""


@triton.jit
def upper_tile(index, tiles, GROUP: tl.constexpr):
    """Return row and column, `row <= column`, of tile `index` of the `tiles * (tiles + 1) / 2` upper tiles."""
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
    """Return 64-bit pointers to a block of a matrix with unit stride along columns or along rows."""
    if ALONG_COLUMNS:
        return matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    else:
        return matrix + rows[:, None] + columns.to(tl.int64)[None, :] * stride


@triton.jit
def _inside(indices, size, EVEN: tl.constexpr):
    """Return the mask of valid indices; a constant if the blocks are even, so the compiler drops the mask."""
    return (indices < size) | EVEN


# The interpreter multiplies the bit patterns of bf16 instead of its values, truncates instead of rounding, and handles
# subnormal numbers incorrectly. Under it bf16 is widened before a product, and both conversions are done on the bits.


@triton.jit
def _widened(x):
    """Convert `x` to fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _narrowed(x, DTYPE: tl.constexpr):
    """Round the fp32 `x` to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        nan = 0x7FC0
        return tl.where(x == x, nearest, nan).to(tl.uint16).to(DTYPE, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _dot(a, b, total):
    """Return `total + a b^T`, summed in fp32 without tf32."""
    if INTERPRETED:
        a = _widened(a)
        b = _widened(b)
    return tl.dot(a, tl.trans(b), total, input_precision="ieee")


@triton.jit(do_not_specialize=INTEGERS)
def symmetric_kernel(
    p,
    q,
    addend,
    out,
    n,
    k,
    p_batch,
    p_stride,
    q_batch,
    q_stride,
    addend_batch,
    addend_stride,
    out_batch,
    out_stride,
    alpha,
    beta,
    identity,
    n_bucket,
    k_bucket,
    batch_bucket,
    GRAM: tl.constexpr,
    ADDEND: tl.constexpr,
    P_ALONG_K: tl.constexpr,
    Q_ALONG_K: tl.constexpr,
    ADDEND_ALONG_COLUMNS: tl.constexpr,
    ALIGN_N: tl.constexpr,
    ALIGN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Compute `BLOCK_M` rows of one tile of one matrix, and their mirror image."""
    n *= ALIGN_N
    k *= ALIGN_K
    SPLIT: tl.constexpr = BLOCK_N // BLOCK_M
    tiles = tl.cdiv(n, BLOCK_N)
    programs = tiles * (tiles + 1) // 2 * SPLIT
    batch = (tl.program_id(0) // programs).to(tl.int64)
    within = tl.program_id(0) % programs
    i, j = upper_tile(within // SPLIT, tiles, GROUP)
    on_diagonal = i == j
    rows = i * BLOCK_N + within % SPLIT * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    depths = tl.arange(0, BLOCK_K)
    rows_inside = _inside(rows, n, EVEN_N)
    columns_inside = _inside(columns, n, EVEN_N)

    p_stride = p_stride.to(tl.int64) * ALIGN_K
    q_stride = q_stride.to(tl.int64) * ALIGN_K
    left = _panel(p + batch * p_batch * ALIGN_K, rows, depths, p_stride, P_ALONG_K)
    right = _panel(q + batch * q_batch * ALIGN_K, columns, depths, q_stride, Q_ALONG_K)
    left_step = BLOCK_K if P_ALONG_K else BLOCK_K * p_stride
    right_step = BLOCK_K if Q_ALONG_K else BLOCK_K * q_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GRAM and SHARE and SPLIT == 1 and on_diagonal:
        for start in range(0, k, BLOCK_K):
            depths_inside = _inside(depths, k - start, EVEN_K)
            a = tl.load(left, mask=rows_inside[:, None] & depths_inside[None, :], other=0.0)
            total = _dot(a, a, total)
            left += left_step
    else:
        for start in range(0, k, BLOCK_K):
            depths_inside = _inside(depths, k - start, EVEN_K)
            a = tl.load(left, mask=rows_inside[:, None] & depths_inside[None, :], other=0.0)
            b = tl.load(right, mask=columns_inside[:, None] & depths_inside[None, :], other=0.0)
            total = _dot(a, b, total)
            left += left_step
            right += right_step

    inside = rows_inside[:, None] & columns_inside[None, :]
    total *= alpha
    if ADDEND:
        addend_stride = addend_stride.to(tl.int64) * ALIGN_N
        c = _panel(addend + batch * addend_batch * ALIGN_N, rows, columns, addend_stride, ADDEND_ALONG_COLUMNS)
        total += beta * _widened(tl.load(c, mask=inside, other=0.0))
    total = tl.where(rows[:, None] == columns[None, :], total + identity, total)
    value = _narrowed(total, out.dtype.element_ty)

    out += batch * out_batch * ALIGN_N
    out_stride = out_stride.to(tl.int64) * ALIGN_N
    here = _panel(out, rows, columns, out_stride, True)
    mirrored = _panel(out, columns, rows, out_stride, True)
    mirrored_inside = columns_inside[:, None] & rows_inside[None, :]
    if not on_diagonal:
        tl.store(here, value, mask=inside)
        tl.store(mirrored, tl.trans(value), mask=mirrored_inside)
    elif SPLIT == 1:
        upper = rows[:, None] <= columns[None, :]
        tl.store(here, tl.where(upper, value, tl.trans(value)), mask=inside)
    else:  # not square: its mirror image overlaps another program's rows, so only the upper part is stored, twice
        tl.store(here, value, mask=inside & (rows[:, None] <= columns[None, :]))
        tl.store(mirrored, tl.trans(value), mask=mirrored_inside & (rows[None, :] <= columns[:, None]))
