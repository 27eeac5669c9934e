"""`Layout`: which shard of every parameter each rank holds, with methods that shard and gather trees.

A *whole tree* contains the parameters as a single process would hold them. A *local tree* contains a rank's shards in
their place. Leaves are identified by their dotted names, so a tree may have any structure. Gradients, updates and
copies of the parameters, in any dtype, are sharded like the parameters. None stays None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from muonfx import tree
from muonfx.sharding.collectives import gathered, reduce_scattered
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
    """A table of the shard of each parameter that each rank holds, with methods that shard and gather trees.

    Layouts are built by `replicated`, `zero`, `flat` and `from_dtensors`. Two shards are either disjoint or equal, so
    several ranks may hold replicas of one shard.

    Attributes:
        kind: the name of the function that built the layout.
        specs: the global shape and dtype of each parameter, by name.
        pieces: the partition of each parameter, by name; `piece` returns single shards.
        size: the number of ranks.
        rank: this process's rank in the group; 0 without a group.
        group: the process group; None for a layout built for a number of ranks, without processes.
        stage: the ZeRO stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters; None if not ZeRO.
        is_flat: True for `zero` and `flat`.

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
        """Copy a rank's shards out of whole tensors, without communication.

        Args:
            whole: a tree of whole tensors, with the names and global shapes of the parameters, in any dtype.
            rank: the rank whose shards are returned. None: this process's rank.

        Returns:
            A tree with the structure of ``whole``, of the rank's shards. None stays None.

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
        """Build the tree of whole tensors from the local trees of all ranks: the inverse of `shard`.

        Runs in one process, for tests and inspection; `gather` does the same over a process group.

        Args:
            locals_: the local tree of each rank, in the order of the ranks.

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
        """Gather a tree of local shards to a tree of whole tensors on every rank. All ranks must call it together.

        Raises:
            ShardingError: a leaf is not a parameter or has another shape than the rank's shard, or a rank has ended.
        """
        return gathered(self, local)

    def all_gather(self, local: T, names: Sequence[str] | None = None) -> T:
        """Gather a tree of local shards to whole tensors, differentiably: the backward pass is `reduce_scatter`.

        ``grad(lambda local: loss(layout.all_gather(local)))`` returns the sharded gradients of a ZeRO-3 loop. Higher
        derivatives, ``vjp``, ``jvp`` and ``vmap`` work too, if all ranks use the same ``torch.func`` transforms.

        Args:
            local: a tree of local tensors.
            names: the names of the leaves to gather; other leaves are returned unchanged. None: all leaves.

        Raises:
            ShardingError: as in `gather`.
        """
        return gathered(self, local, names=names, differentiable=True)

    def reduce_scatter(self, grads: T) -> T:
        """Average the whole gradients of all ranks, and return this rank's shards of the mean.

        Values are added in rank order in fp32 or higher precision and rounded once, so replicas of a shard are equal.
        For S bytes of gradients on P ranks, each rank sends S(P-1)/P bytes, or twice as many if all parameters are
        replicated.

        Args:
            grads: this rank's gradients, as whole tensors. A leaf that is None on some ranks counts as zero there; a
                leaf that is None on all ranks stays None.

        Returns:
            A tree of local tensors, in the gradients' dtypes.

        Raises:
            ShardingError: a leaf is not a parameter or has another shape than the parameter, or a rank has ended.
        """
        return reduce_scattered(self, grads)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def to_global(self, local: PyTree) -> PyTree:
        """Convert local shards to leaves that record their position in the whole tensors, without communication.

        The leaves returned are `DTensor`, `muonfx.checkpoint.FlatPiece`, or whole tensors. Leaves that have one of
        these forms already are returned unchanged. `muonfx.checkpoint.save` calls this for a sharded transform.

        Raises:
            ShardingError: a leaf is neither this rank's shard nor the whole tensor; the message names the leaf.
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
        """Convert the leaves that `to_global` returned to local tensors; DTensors and whole tensors stay unchanged."""

        def at(name: str, leaf: Tensor | FlatPiece) -> Tensor:
            return leaf.data.view(self.piece(name).shape) if isinstance(leaf, FlatPiece) else leaf

        return map_named(at, values)
