"""A layout: the shard of every parameter on every rank, and the tree operations that follow from it.

A *whole tree* has the parameters as one process would hold them; a *local tree* has a rank's local tensors in their
place. Leaves are identified by their dotted names, so a tree may have any structure, and gradients, updates and copies
of the parameters, in any dtype, are sharded like the parameters. None stays None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from muonfx import tree
from muonfx.sharding.collectives import ReduceOp, gathered, reduce_scattered
from muonfx.sharding.consensus import outside_transforms
from muonfx.sharding.dtensors import global_piece, is_dtensor, map_named
from muonfx.sharding.messages import ShardingError
from muonfx.sharding.shard_table import ShardTable
from muonfx.sharding.shards import FlatPiece
from muonfx.tree import PyTree

__all__ = ["Layout"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Layout(ShardTable):
    """The shard of each parameter that each rank holds. The functions of `muonfx.sharding` build layouts.

    Each element is in the shard of one rank, or in equal shards of several ranks.

    Attributes:
        kind: "replicated", "from_dtensors", "zero" or "flat", the function that built the layout.
        specs: global shape and dtype of each parameter by name.
        size: the number of ranks.
        rank: this process's rank in the group; 0 without a group.
        group: the process group; None for a layout without processes.
        stage: the ZeRO stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too; None if not ZeRO.
        buffer: for `zero` and `flat`, the positions of the shards in flat buffers.

    >>> import muonfx as mfx
    >>> params = {"w": torch.arange(6.0).reshape(2, 3)}
    >>> layout = mfx.sharding.zero(params, 2, partition="flat")
    >>> [layout.shard(params, rank)["w"].tolist() for rank in range(2)]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    >>> layout.assemble([layout.shard(params, rank) for rank in range(2)])["w"].shape
    torch.Size([2, 3])
    """

    # ---------------------------------------------------------------------------------------- trees, in one process

    def shard(self, whole: T, rank: int | None = None) -> T:
        """Copy a rank's shards out of whole tensors.

        Args:
            whole: a tree whose leaves have the names and global shapes of the parameters, in any dtype; None is kept.
            rank: the rank, by default this one.

        Returns:
            A tree of local tensors.

        Raises:
            ShardingError: a leaf is not a parameter, or has another shape than the parameter.
        """

        def at(name: str, leaf: Tensor) -> Tensor:
            piece = self.piece(name, rank)
            if tuple(leaf.shape) != self.specs[name].shape:
                raise ShardingError(f"{name!r} has shape {tuple(leaf.shape)}, in the layout {self.specs[name].shape}")
            return piece.cut(leaf.detach())

        with outside_transforms("layout.shard", whole) as problem:
            if problem is not None:
                raise problem
            return map_named(at, whole)

    def assemble(self, locals_: Sequence[PyTree]) -> PyTree:
        """Build the whole tree from the local trees of all ranks: the inverse of `shard`, in one process.

        Args:
            locals_: the local tree of each rank, in order.

        Raises:
            ValueError: the number of trees is not the number of ranks.
        """
        if len(locals_) != self.size:
            raise ValueError(f"locals_: found {len(locals_)} trees, expected one for each of {self.size} ranks")
        columns = [tree.leaves(local) for local in locals_]
        by_name = dict(zip(tree.names(locals_[0]), zip(*columns, strict=True), strict=True))

        def at(name: str, leaf: Tensor) -> Tensor:
            whole = leaf.new_zeros(self.specs[name].shape)
            for piece, ranks in self.holders(name).items():
                piece.paste(by_name[name][ranks[0]], whole)
            return whole

        return map_named(at, locals_[0])

    # ------------------------------------------------------------------------------------------- trees, on all ranks

    def gather(self, local: T) -> T:
        """Gather a local tree to the whole tree on every rank; all ranks must call it together.

        Raises:
            ShardingError: a leaf is not a parameter or has another shape than the rank's shard; a rank has ended.
        """
        return gathered(self, local)

    def all_gather(self, local: T, names: Sequence[str] | None = None, *, op: ReduceOp = "mean") -> T:
        """Gather like `gather`, differentiably: gradients are reduced over the ranks as by `reduce_scatter`.

        ``grad(lambda local: loss(layout.all_gather(local)))`` gives a ZeRO-3 loop its sharded gradients. It can be
        differentiated again, and called under ``vjp``, ``jvp`` and ``vmap``, all ranks with the same transforms.

        Args:
            local: a tree of local tensors.
            names: the names of the leaves to gather; the other leaves are unchanged. None: all.
            op: the reduction of gradients over the ranks, "mean" or "sum".

        Raises:
            ShardingError: as `gather`.
            ValueError: an unknown ``op``.
        """
        return gathered(self, local, names=names, op=op, differentiable=True)

    def reduce_scatter(self, grads: T, op: ReduceOp = "mean") -> T:
        """Reduce every rank's own whole gradients over all ranks, and return this rank's shards.

        Values are added in the order of the ranks, in fp32 at least, and rounded once, so the sum does not depend on
        the number of ranks that hold a shard. Each rank sends S(P-1)/P bytes for S bytes of gradients, or twice as many
        if every rank holds all of them.

        Args:
            grads: whole gradients, different on every rank. A leaf that is None on some ranks counts as zero there; a
                leaf that is None on all ranks stays None.
            op: "mean" divides by the number of ranks; "sum" does not.

        Returns:
            A tree of local tensors, in the gradients' dtypes.

        Raises:
            ShardingError: a leaf is not a parameter or has another shape; a rank has ended.
            ValueError: an unknown ``op``.
        """
        return reduce_scattered(self, grads, op)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def to_global(self, local: PyTree) -> PyTree:
        """Convert a local tree to one whose leaves record their position in the whole tensors.

        The leaves are `DTensor`, `muonfx.checkpoint.FlatPiece`, or whole tensors. `muonfx.checkpoint.save` calls this
        if it is given a sharded chain. Leaves that are global already, or whole as under ZeRO-1, are unchanged.

        Raises:
            ShardingError: a leaf is neither this rank's shard nor the whole; the message names it.
        """

        def at(name: str, leaf: Tensor | FlatPiece) -> Tensor | FlatPiece:
            piece, whole = self.piece(name), self.specs[name].shape
            # This rank's piece may be the whole tensor, but a whole tensor must be whole on all ranks: test it first.
            is_whole = tuple(leaf.shape) == whole and name not in self.dtensors
            if isinstance(leaf, FlatPiece) or is_dtensor(leaf) or is_whole:
                return leaf
            if piece.fits(leaf):
                return global_piece(self, name, leaf)
            raise ShardingError(
                f"{name!r} has shape {tuple(leaf.shape)}; in {self!r} the whole has {whole} and this rank's piece "
                f"{piece.shape}: give the parameters that the layout was made for"
            )

        return map_named(at, local)

    def from_global(self, values: PyTree) -> PyTree:
        """Return the local tree that a tree of `to_global` describes; DTensors are returned unchanged."""

        def at(name: str, leaf: Tensor | FlatPiece) -> Tensor:
            return leaf.data.view(self.piece(name).shape) if isinstance(leaf, FlatPiece) else leaf

        return map_named(at, values)
