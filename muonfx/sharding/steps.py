"""Before each step the ranks agree: on what is there, of which dtype, and whether something is wrong anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import checks, tree
from muonfx.core import Donation, Transform
from muonfx.recorded import parts_of
from muonfx.sharding.agreement import compare, host_device
from muonfx.sharding.alike import DTYPES, LARGE, UNPLACED, agree_on_leaves
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout, is_dtensor, local_of
from muonfx.sharding.meeting import PROBLEMS
from muonfx.sharding.messages import Exchange, collective
from muonfx.sharding.offload.walk import Streaming
from muonfx.sharding.placed import check_pieces
from muonfx.sharding.walk import Walk
from muonfx.tree import PyTree

__all__ = ["agreed_updates"]


def agreed_updates(
    walk: Walk,
    tx: Transform,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    donate: Donation,
    extras: dict[str, Any],
    check: bool,
    problem: Exception | None = None,
) -> PyTree:
    """The local updates that all ranks agree on: what is there on any rank is there on all.

    Where a leaf is absent on some ranks, it is what another holder of the same piece has, or else zeros.
    """
    layout = walk.layout
    try:
        tx.check_extras(extras)
        checks.check_floating("updates", updates)
        _check_step(walk, tx, updates, state, params, check=check)
        if isinstance(walk, Streaming):
            like = updates if params is None else params
            walk.require_room(state, tree.map(local_of, like), donate)
    except PROBLEMS as error:
        problem = problem or error
    if layout.group is None or layout.size == 1:
        if problem is not None:
            raise problem
        return tree.map(local_of, updates)
    boundary = extras.get("boundary")
    numbers = _numbers(tx)
    facts = {
        "values of boundary=": 0 if not isinstance(boundary, bool) else 1 + boundary,
        "arguments: some give params, some do not": int(params is not None),
        "numbers in their chains": zlib.crc32(repr(numbers).encode()) & LARGE,
    }
    try:
        codes, missing = agree_on_leaves(updates, layout, problem, facts)
    except ShardingError as error:
        if "numbers in their chains" in str(error):
            compare({"numbers in their chains": numbers}, layout.group)
        raise
    leaves, treedef = tree.flatten(updates)
    names = tree.names(updates)
    for name, code, gone in zip(names, codes, missing, strict=True):
        if code > UNPLACED and gone:
            raise ShardingError(
                f"nothing was changed on any rank: the gradient of {name!r} is partial on some ranks and None on others"
            )
    local = [local_of(_placed(layout, name, leaf)) for name, leaf in zip(names, leaves, strict=True)]
    if any(code and gone for code, gone in zip(codes, missing, strict=True)):
        local = _filled(
            layout, names, local, codes, tree.device_of(tree.map(local_of, updates if params is None else params))
        )
    return tree.unflatten(treedef, local)


def _placed(layout: Layout, name: str, leaf: Any) -> Any:
    """A gradient with the placements of its parameter; those of tensor parallelism may still have to be reduced."""
    wanted = layout.dtensors.get(name)
    if wanted is None or not is_dtensor(leaf) or leaf._spec.placements == wanted.placements:
        return leaf
    return leaf.redistribute(placements=wanted.placements)


def _filled(
    layout: Layout, names: Sequence[str], leaves: Sequence[Tensor | None], codes: Sequence[int], device: torch.device
) -> list[Tensor | None]:
    """Fill in what is absent here and present elsewhere; seldom, so every rank tells every other what it has."""
    assert layout.group is not None
    mine = torch.tensor([int(leaf is not None) for leaf in leaves], dtype=torch.int32, device=host_device(layout.group))
    said = [torch.empty_like(mine) for _ in range(layout.size)]
    with collective("finding out who has which gradient"):
        dist.all_gather(said, mine, group=layout.group)
    have = [row.tolist() for row in said]
    found = list(leaves)
    for place, (name, code) in enumerate(zip(names, codes, strict=True)):
        if not code:
            continue
        dtype = DTYPES[code - 1]
        if found[place] is None:
            found[place] = torch.zeros(layout.piece(name).shape, dtype=dtype, device=device)
        outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        for ranks in layout.holders(name).values():
            present = [rank for rank in ranks if have[rank][place]]
            for taker in ranks if present else []:
                if not have[taker][place]:
                    own = found[place]
                    assert own is not None
                    if layout.rank == present[0]:
                        outgoing[taker].append(own)
                    if layout.rank == taker:
                        incoming[present[0]].append(own)
        if any(len({bool(have[rank][place]) for rank in ranks}) > 1 for ranks in layout.holders(name).values()):
            expected = [sum(tensor.numel() for tensor in tensors) for tensors in incoming]
            Exchange(
                outgoing, expected, dtype=dtype, device=device, group=layout.group, what="sharing a gradient"
            ).wait(incoming)
    return found


def _numbers(tx: Transform) -> dict[str, float | str]:
    """The numeric arguments, as far as they can be known without waiting for a device."""
    return {name: value if isinstance(value, float) else "a tensor" for name, value in parts_of(tx)}


def _check_step(walk: Walk, tx: Transform, updates: PyTree, state: PyTree, params: PyTree, *, check: bool) -> None:
    _check_local(walk.layout, updates)
    if not check:
        return
    local = tree.map(local_of, updates)
    weights = tree.map(local_of, params)
    if params is not None:
        check_pieces(walk.layout, params)
        checks.check_updates_fit(weights, local)
    like = local if params is None else weights
    if any(leaf is None for leaf in tree.leaves(like)):
        return
    key = ("state", id(tx._context), tuple(tree.names(like)), tuple(leaf.dtype for leaf in tree.leaves(like)))
    derived = walk.derived
    if key not in derived:
        meta = walk.init(tx, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), like))
        derived[key] = (*tree.flatten(meta), meta)
    checks.check_state_like(tx.name, state, derived[key], with_dtypes=params is not None)


def _check_local(layout: Layout, updates: PyTree) -> None:
    """Require the shapes of this rank's pieces; of a DTensor, which may still be partial, that of the parameter."""
    for name, leaf in zip(tree.names(updates), tree.leaves(updates), strict=True):
        if leaf is None:
            continue
        piece = layout.piece(name)
        wanted = layout._specs[name].shape if is_dtensor(leaf) else piece.shape
        if tuple(leaf.shape) != wanted and (is_dtensor(leaf) or not piece.fits(leaf)):
            raise ShardingError(
                f"{name!r} has a local tensor of shape {tuple(leaf.shape)}, the layout says {wanted}: was the tree "
                "sharded by this layout?"
            )
