"""The first time that ranks meet over a chain: they compare what they have."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx import checks, tree
from muonfx.core import Transform
from muonfx.polar import compute_dtype
from muonfx.polar.hardware import settle_cpu_bf16
from muonfx.sharding.agreement import compare
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout, local_of
from muonfx.sharding.layouts import ALIKE
from muonfx.sharding.placed import check_pieces
from muonfx.sharding.walk import Walk
from muonfx.tree import PyTree

__all__ = ["PROBLEMS", "meet"]

PROBLEMS = (TypeError, ValueError, AttributeError, KeyError, OSError, ShardingError)
"""What may be wrong with what a caller gave on one rank."""


def meet(walk: Walk, tx: Transform, params: PyTree) -> None:
    """Require, once, that all ranks have the same chain, parameters and layout; settle what "auto" stands for.

    Args:
        walk: the layout and its plans.
        tx: the transform.
        params: this rank's parameters, or what has their names and shapes.

    Raises:
        ShardingError: they have not, or something is wrong on another rank.
    """
    layout = walk.layout
    key = id(tx._context)
    if key in walk.met:
        return
    problem: Exception | None = None
    try:
        checks.check_params(params)
        check_pieces(layout, params)
    except PROBLEMS as error:
        problem = error
    if layout.size > 1 and layout.group is None:
        raise ShardingError(f"{layout!r} has no process group: it is only to look at and to plan with")
    local = tree.map(local_of, params)
    device = walk.device(tree.device_of(local))
    fastest = compute_dtype(torch.float32, device)
    if layout.group is not None and layout.size > 1:
        names = zip(tree.names(local), tree.leaves(local), strict=True)
        said = compare(
            {
                "chains": repr(tx),
                "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout._specs.items()},
                "parameters that are None": {name: "None" for name, leaf in names if leaf is None},
                "trees": str(tree.flatten(local)[1]),
                "layouts": _digest(layout),
                "kinds of device to compute on": device.type,
                "settings": repr(walk.settings),
                "own dtype": fastest,
                "own sums of bits": _sums_of_bits(layout, local) if problem is None else {},
            },
            layout.group,
            problem,
        )
        _check_alike(layout, [theirs["own sums of bits"] for theirs in said])
        fastest = _settled(device, [theirs["own dtype"] for theirs in said])
    elif problem is not None:
        raise problem
    walk.compute = fastest
    walk.likes[key] = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), local)
    walk.met[key] = tx._context  # kept, so that no other can have its id


def _settled(device: torch.device, dtypes: list[torch.dtype]) -> torch.dtype:
    if len(set(dtypes)) == 1:
        return dtypes[0]
    # On CPUs it is a measurement, which may come out differently: fp32 suits all.
    if device.type != "cpu":
        raise ShardingError(f"the ranks' devices compute in different dtypes, {dtypes}: give orthogonalize a dtype")
    settle_cpu_bf16(False)
    return torch.float32


def _sums_of_bits(layout: Layout, local: PyTree) -> dict[str, int]:
    """A checksum of the local tensors of parameters that lie on different meshes on different ranks."""
    named = dict(zip(tree.names(local), tree.leaves(local), strict=True))
    found = {name: named.get(name) for name in layout.derived.get(ALIKE, ())}
    return {
        name: int(leaf.contiguous().view(torch.uint8).sum(dtype=torch.int64)) if leaf.numel() else 0
        for name, leaf in found.items()
        if isinstance(leaf, Tensor) and not leaf.is_meta
    }


def _check_alike(layout: Layout, said: list[dict[str, int]]) -> None:
    """Require that what lies on several meshes is the same, as far as the same pieces have the same checksum."""
    for name in said[0]:
        for ranks in layout.holders(name).values():
            odd = next((rank for rank in ranks if said[rank].get(name) != said[ranks[0]].get(name)), None)
            if odd is not None:
                raise ShardingError(
                    f"{name!r} lies on different meshes on different ranks and has other values on rank {odd} than on "
                    f"rank {ranks[0]}: if these are different parameters, give them different names, or place them on "
                    "one mesh of more dims"
                )


def _digest(layout: Layout) -> str:
    return f"{layout!r} ({layout.digest})"
