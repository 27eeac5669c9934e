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
from muonfx.sharding.dtensors import from_global_tree, map_named, to_global_tree
from muonfx.sharding.messages import ShardingError
from muonfx.sharding.shard_table import ShardTable
from muonfx.tree import PyTree

__all__ = ["Layout"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Layout(ShardTable):
    """Which piece of each parameter each rank holds: a value, made by the functions of `muonfx.sharding`.

    Every element lies on exactly one rank, or in pieces of several ranks that are the same.

    Attributes:
        kind: what it was made by: "replicated", "from_dtensors", "zero" or "flat".
        specs: global shape and dtype of each parameter by name.
        size: how many ranks there are.
        rank: this process's place among them; 0 where there is no group.
        group: the process group; None for a layout that is only looked at.
        stage: of ZeRO: 1 shards the optimizer's state, 2 gradients too, 3 parameters too; None elsewhere.
        buffer: for `zero` and `flat`, how the pieces lie in flat buffers.

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
        """Copy a rank's pieces out of whole tensors.

        Args:
            whole: a tree whose leaves have the names and global shapes of the parameters, in any dtype; None is kept.
            rank: whose; by default this one's.

        Returns:
            A tree of local tensors.

        Raises:
            ShardingError: a leaf is no parameter, or has another shape than it.
        """
        with outside_transforms("layout.shard", whole) as problem:
            if problem is not None:
                raise problem
            return map_named(lambda name, leaf: self._cut(name, leaf, rank), whole)

    def _cut(self, name: str, leaf: Tensor, rank: int | None) -> Tensor:
        piece = self.piece(name, rank)
        if tuple(leaf.shape) != self.specs[name].shape:
            raise ShardingError(f"{name!r} has shape {tuple(leaf.shape)}, in the layout {self.specs[name].shape}")
        return piece.cut(leaf.detach())

    def assemble(self, locals_: Sequence[PyTree]) -> PyTree:
        """Put the local trees of all ranks together: the inverse of `shard`, in one process.

        Args:
            locals_: the local tree of each rank, in order.

        Raises:
            ValueError: another number of trees than ranks.
        """
        if len(locals_) != self.size:
            raise ValueError(f"locals_: found {len(locals_)} trees, expected one for each of {self.size} ranks")
        columns = [tree.leaves(local) for local in locals_]
        at = dict(zip(tree.names(locals_[0]), zip(*columns, strict=True), strict=True))
        return map_named(lambda name, _: self._paste(name, at[name]), locals_[0])

    def _paste(self, name: str, locals_: Sequence[Tensor]) -> Tensor:
        whole = locals_[0].new_zeros(self.specs[name].shape)
        for piece, ranks in self.holders(name).items():
            piece.paste(locals_[ranks[0]], whole)
        return whole

    # ------------------------------------------------------------------------------------------- trees, on all ranks

    def gather(self, local: T) -> T:
        """Make the whole tree on every rank; all ranks must call it together.

        Raises:
            ShardingError: a leaf is no parameter or has another shape than the rank's piece; a rank is gone.
        """
        return gathered(self, local)

    def all_gather(self, local: T, names: Sequence[str] | None = None, *, op: ReduceOp = "mean") -> T:
        """`gather`, through which gradients flow: they are reduced over the ranks as `reduce_scatter` does it.

        So ``grad(lambda local: loss(layout.all_gather(local)))`` gives a ZeRO-3 loop its sharded gradients. It can be
        differentiated again, and called under ``vjp``, ``jvp`` and ``vmap``, all ranks with the same transforms.

        Args:
            local: a tree of local tensors.
            names: gather the leaves of these names only and leave the others as they are; None: all.
            op: what becomes of gradients: "mean" or "sum" over the ranks.

        Raises:
            ShardingError: as `gather`.
            ValueError: an unknown ``op``.
        """
        return gathered(self, local, names=names, op=op, differentiable=True)

    def reduce_scatter(self, grads: T, op: ReduceOp = "mean", *, bucket_bytes: int = 1 << 25) -> T:
        """Reduce every rank's own whole gradients over all ranks, and return this rank's pieces.

        Values are added in the order of the ranks, in fp32 at least, and rounded once, so that the sum does not depend
        on how many ranks hold a piece. Each rank sends S(P-1)/P bytes for S bytes of gradients; twice that where every
        rank gets all of them.

        Args:
            grads: whole gradients, different on every rank. A leaf that is None on some ranks counts there as zero;
                one that is None on all stays None.
            op: "mean" divides by the number of ranks; "sum" does not.
            bucket_bytes: about how many bytes of gradients go at a time.

        Returns:
            A tree of local tensors, in the gradients' dtypes.

        Raises:
            ShardingError: a leaf is no parameter or has another shape; a rank is gone.
            ValueError: an unknown ``op``.
        """
        return reduce_scattered(self, grads, op, bucket_bytes)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def to_global(self, local: PyTree) -> PyTree:
        """Convert a local tree to one whose leaves record their position in the whole tensors.

        The leaves are `DTensor`, `muonfx.checkpoint.FlatPiece`, or whole tensors. `muonfx.checkpoint.save` calls this
        if it is given a sharded chain. Leaves that are global already, or whole as under ZeRO-1, are unchanged.

        Raises:
            ShardingError: a leaf is neither this rank's piece nor the whole; the message names it.
        """
        return to_global_tree(self, local)

    def from_global(self, values: PyTree) -> PyTree:
        """Return the local tree that a tree of `to_global` describes; DTensors are returned unchanged."""
        return from_global_tree(self, values)
