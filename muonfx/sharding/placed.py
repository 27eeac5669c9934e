"""Whether a tree lies as a layout says."""

from __future__ import annotations

from torch import Tensor

from muonfx import tree
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout, is_dtensor, local_of
from muonfx.tree import PyTree

__all__ = ["check_pieces"]


def check_pieces(layout: Layout, values: PyTree) -> None:
    """Require that leaves are this rank's pieces of the layout's parameters, as DTensors placed as these are.

    Raises:
        ShardingError: one is not; the message names it.
    """
    for name, leaf in zip(tree.names(values), tree.leaves(values), strict=True):
        if leaf is None:
            continue
        local, piece = local_of(leaf), layout.piece(name)
        if not isinstance(local, Tensor):
            raise TypeError(f"{name!r} must be a tensor or None, found {type(leaf).__name__}")
        if is_dtensor(leaf):
            wanted = layout.dtensors.get(name)
            if wanted is None or leaf._spec.mesh != wanted.mesh or leaf._spec.placements != wanted.placements:
                raise ShardingError(
                    f"{name!r} is placed as {leaf._spec.placements} on {leaf._spec.mesh}, in the layout "
                    + (f"as {wanted.placements} on {wanted.mesh}" if wanted is not None else "it is no DTensor")
                    + ": make the layout anew after placements have changed"
                )
        if not piece.fits(local):
            raise ShardingError(
                f"{name!r} has a local tensor of shape {tuple(local.shape)}, the layout says {piece.shape}: was the "
                "tree sharded by this layout?"
            )
