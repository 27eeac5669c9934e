# pyright: basic, reportMissingImports=false
# Triton may be missing, and most of its API has no types.
"""Launch the kernel on tensors: layouts, tile and grid.

Triton's autotuner times the suitable tiles when a bucket of shapes first occurs, and caches the fastest on disk. Timing
waits for the device and cannot run while a CUDA graph is captured, so call once before the capture.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
import triton

from muonfx.polar.kernels.symmetric import INTERPRETED, symmetric_kernel
from muonfx.polar.kernels.tiles import BY_HAND, TILES, Tile, bucket, suited


def _even_n(args: dict[str, Any]) -> bool:
    return args["n"] * args["ALIGN_N"] % args["BLOCK_N"] == 0


def _even_k(args: dict[str, Any]) -> bool:
    return args["k"] * args["ALIGN_K"] % args["BLOCK_K"] == 0


_cut = triton.heuristics({"EVEN_N": _even_n, "EVEN_K": _even_k})(symmetric_kernel)


def _config(tile: Tile) -> triton.Config:
    return triton.Config(_blocks(tile), num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers)


def _blocks(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "GROUP": tile.group,
        "SHARE": tile.share,
    }


def _suited(configs: list[triton.Config], args: dict[str, Any], **_: object) -> list[triton.Config]:
    chosen = {str(_config(tile)) for tile in suited(args["p"].dtype, args["n_bucket"])}
    return [config for config in configs if str(config) in chosen]


_tuned = triton.autotune(
    [_config(tile) for tile in dict.fromkeys(tile for tiles in TILES.values() for tile in tiles)],
    key=["n_bucket", "k_bucket", "batch_bucket", "ALIGN_K"],
    prune_configs_by={"early_config_prune": _suited},
    cache_results=True,
)(_cut)


class _Layout(NamedTuple):
    """A batch of matrices with a unit stride, and the strides to the next matrix and the next line."""

    tensor: torch.Tensor
    batch: int
    stride: int
    along_columns: bool


def _layout(x: torch.Tensor) -> _Layout:
    """Find the unit stride, or copy if there is none; the stride of a dimension of size 1 counts as 0."""
    batches, rows, columns = x.shape
    if rows > 1 and columns > 1 and 1 not in x.stride()[1:]:
        x = x.contiguous()
    by_batch, by_row, by_column = x.stride()
    along_columns = columns == 1 or by_column == 1
    lines, stride = (rows, by_row) if along_columns else (columns, by_column)
    return _Layout(x, by_batch if batches > 1 else 0, stride if lines > 1 else 0, along_columns)


def _alignment(*numbers: int) -> int:
    """Return the largest of 1, 2, 4, 8 that divides all; eight elements are 16 bytes, the widest load."""
    return math.gcd(8, *numbers)


def launch(
    p: torch.Tensor,
    q: torch.Tensor | None,
    addend: torch.Tensor | None,
    alpha: float,
    beta: float,
    identity: float,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """Enqueue the kernel on the checked arguments of `symmetric_matmul`; only the summed dimension may be empty."""
    batches, n, k = p.shape
    left = _layout(p)
    right = left if q is None else _layout(q)
    result = _layout(out)
    added = result if addend is None else _layout(addend)
    align_k = _alignment(k, left.batch, left.stride, right.batch, right.stride)
    align_n = _alignment(n, added.batch, added.stride, result.batch, result.stride)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        tiles = triton.cdiv(n, meta["BLOCK_N"])
        return (batches * (tiles * (tiles + 1) // 2) * (meta["BLOCK_N"] // meta["BLOCK_M"]),)

    if tile is None and INTERPRETED.value:
        tile = BY_HAND
    chosen: dict[str, Any] = {} if tile is None else _config(tile).all_kwargs()
    with _current(p.device):
        (_tuned if tile is None else _cut)[grid](
            *(left.tensor, right.tensor, added.tensor, out),
            *(n // align_n, k // align_k),
            *(left.batch // align_k, left.stride // align_k, right.batch // align_k, right.stride // align_k),
            *(added.batch // align_n, added.stride // align_n, result.batch // align_n, result.stride // align_n),
            *(alpha, beta, identity),
            *(bucket(n), bucket(k), bucket(batches)),
            GRAM=q is None,
            ADDEND=addend is not None,
            P_ALONG_K=left.along_columns,
            Q_ALONG_K=right.along_columns,
            ADDEND_ALONG_COLUMNS=added.along_columns,
            ALIGN_N=align_n,
            ALIGN_K=align_k,
            **chosen,
        )


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device current, since Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
