"""Orthogonalization: replace each matrix by the nearest one with orthonormal rows or columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muonfx import polar
from muonfx.core import Donation, EmptyState, Transform, transform
from muonfx.core.contract import NOTHING
from muonfx.polar.policy import Decided
from muonfx.transforms._matrices import Blocks, Dims, matrix_locality, name_patterns, on_stacks, view_as_matrices
from muonfx.tree import Present, PyTree

__all__ = ["orthogonalize"]


def _rounds_to(tx: Transform, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the products, unless a power of two comes before the rounding to it."""
    given = tx.arguments
    compute = polar.compute_dtype(
        dtype, device, given["dtype"], coefficients=given["coefficients"], steps=given["steps"]
    )
    return compute if polar.same_range(dtype, compute) else dtype


def _with_compute_dtype(tx: Transform, dtype: torch.dtype) -> Transform:
    return tx.replace(dtype=Decided(dtype)) if tx.arguments["dtype"] == "auto" else tx


@transform(
    locality=lambda coefficients, steps, method, dtype, products, dims, blocks, block_axis: matrix_locality(dims),
    reads_params=False,
    rounds_to=_rounds_to,
    with_compute_dtype=_with_compute_dtype,
    on_stacks=on_stacks,
    name_patterns=name_patterns,
)
def orthogonalize(
    *,
    coefficients: str | polar.Coefficients | tuple[tuple[float, ...], ...] | Tensor = "polar_express_5",
    steps: int | None = None,
    method: str = "auto",
    dtype: torch.dtype | str = "auto",
    products: str = "auto",
    dims: Dims | Mapping[str, Dims] | None = None,
    blocks: Blocks | Mapping[str, Blocks] | None = None,
    block_axis: int = -2,
):
    """Replace each matrix $G = U S V^T$ by about $U V^T$, with a Newton-Schulz iteration.

    Args:
        coefficients: the name of a set (see `muonfx.polar`), the set itself, or its steps (a, b, c).
        steps: how many steps; None takes the set's own number.
        method: "standard" or "gram"; "auto" takes the cheaper one by shape (`muonfx.polar.explain` says which and why).
        dtype: what to compute in; "auto" decides by the device. Updates come back in their own dtype.
        products: "batched", "blocks" or "triton", how symmetric products are done; "auto" decides by shape and device.
        dims: which dims of a leaf are rows and which are columns, the others being a batch: ``((-2,), (-1,))`` treats
            a stack of expert matrices one by one. None: a leaf of more than two dims is flattened behind the first,
            as a convolution wants it. A mapping gives a value for each glob over the leaf's dotted name.
        blocks: cut each matrix along ``block_axis`` into this many equal blocks, or into blocks of these sizes, and
            treat each alone: ``{"*.qkv.weight": 3}`` for a fused QKV, the number of heads for per-head updates.
        block_axis: -2 cuts rows (output features), -1 columns (input features).

    Returns:
        A stateless transform; of locality MATRIX where ``dims`` says that matrices are the last two dims, else LEAF.

    Raises:
        ValueError: a setting is malformed; at `update`, a leaf is no matrix or does not fit ``dims`` or ``blocks``.

    Follows Keller Jordan's Muon; see `muonfx.polar.orthogonalize` for the iteration and its sources.

    Example:
        >>> import muonfx as mfx
        >>> u = mfx.orthogonalize().update({"w": torch.diag(torch.tensor([5.0, 0.5]))}, mfx.EmptyState())[0]["w"]
        >>> bool((u.diagonal() - 1).abs().max() < 0.2)
        True
    """
    view = view_as_matrices(dims, blocks, block_axis)
    settings: dict[str, Any] = {
        "coefficients": coefficients,
        "steps": steps,
        "method": method,
        "dtype": dtype,
        "products": products,
    }
    polar.orthogonalize(torch.empty(0, 0), **settings)  # names what is wrong with the settings

    def init(params: PyTree) -> EmptyState:
        at = Present(params)
        names = at.names()
        for leaf, name, own in zip(at.pick(params), names, view.of(names), strict=True):
            own.split(leaf, name)
        return EmptyState()

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        workspace: polar.Workspace | None = None,
    ):
        at = Present(updates)
        leaves = at.pick(updates)
        names = at.names() if view.needs_names else [""] * len(leaves)
        views = view.of(names)
        split = [own.split(leaf, name) for own, leaf, name in zip(views, leaves, names, strict=True)]
        flat = [matrix for matrices in split for matrix in matrices]
        done = iter(polar.orthogonalize_many(flat, donate=donate.updates, workspace=workspace, **settings))
        out = [
            own.join([next(done) for _ in matrices], leaf)
            for own, matrices, leaf in zip(views, split, leaves, strict=True)
        ]
        return at.fill(out), state

    return init, update
