"""`Layout`: which shard of every parameter each rank holds, with methods that shard and gather trees.

A layout has a *cut* for each parameter: the partition of the parameter into the shards of all ranks.

A *whole tree* contains the parameters as a single process would hold them. A *local tree* contains a rank's shards of
these parameters instead. Leaves are identified by their dotted names, so a tree may have any structure. Gradients,
updates and copies of the parameters, in any dtype, are sharded like the parameters. None stays None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from muonfx import tree
from muonfx.internal.tracing import without_transforms
from muonfx.sharding.communication.collectives import (
    gathered,
    gathered_with_derivatives,
    reduce_scattered,
)
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.dtensors import (
    global_shard,
    is_dtensor,
    map_named,
    require_no_transform,
)
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Layout(ShardTable):
    """Which shard of each parameter each rank holds, with methods to shard and gather trees of tensors.

    `replicated`, `zero`, `flat` and `from_dtensors` build layouts. Two shards of one parameter are either disjoint or
    equal. Equal shards on several ranks are replicas.

    Attributes:
        kind: the name of the function that built the layout.
        specs: a dict from the name of each parameter to its global shape and dtype.
        cuts: a dict from the name of each parameter to its cut (its partition over all ranks). See also `position`.
        size: the number of ranks.
        rank: this process's rank in the group; 0 without a group.
        group: the process group; None for a layout built for a number of ranks, without processes.
        stage: the ZeRO stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters; None if not ZeRO.
        is_flat: True for layouts built by `zero` and `flat`, whose shards are parts of flattened parameters.

    >>> import muonfx as mfx
    >>> params = {"w": torch.arange(6.0).reshape(2, 3)}
    >>> layout = mfx.sharding.zero(params, 2, partition="flat")
    >>> [layout.shard(params, rank)["w"].tolist() for rank in range(2)]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    >>> layout.assemble([layout.shard(params, rank) for rank in range(2)])["w"].shape
    torch.Size([2, 3])
    """

    def shard(self, whole: T, rank: int | None = None) -> T:
        """Copy the shards of one rank out of a tree of whole tensors, without communication.

        Args:
            whole: a tree of whole tensors, with the names and global shapes of the parameters, in any dtype.
            rank: the rank whose shards are returned. None: this process's rank.

        Returns:
            A tree with the structure of ``whole``, of the rank's shards. None stays None.

        Raises:
            ShardingError: a leaf is not a parameter, or has another shape than the parameter.

        >>> import muonfx as mfx
        >>> params = {"w": torch.arange(6.0)}
        >>> layout = mfx.sharding.zero(
        ...     params, 2, partition="flat"
        ... )  # each rank has half of the elements
        >>> layout.shard(params, rank=1)
        {'w': tensor([3., 4., 5.])}
        """
        require_no_transform("layout.shard", whole)

        def shard_of(name: str, leaf: Tensor) -> Tensor:
            self.require_whole(name, leaf)
            return self.position(name, rank).cut(leaf.detach())

        with without_transforms():
            return map_named(shard_of, whole)

    def assemble(self, locals_: Sequence[PyTree]) -> PyTree:
        """Put the shards of all ranks together to whole tensors, in one process. It is the inverse of `shard`.

        This is for tests and inspection. `gather` does the same over a process group.

        Args:
            locals_: a list with the tree of shards of each rank, in the order of the ranks.

        Raises:
            ValueError: the number of trees is not the number of ranks, or the trees have different numbers of leaves.

        >>> import muonfx as mfx
        >>> layout = mfx.sharding.zero({"w": torch.zeros(6)}, 2, partition="flat")
        >>> layout.assemble([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])
        {'w': tensor([0., 0., 0., 1., 1., 1.])}
        """
        if len(locals_) != self.size:
            raise ValueError(
                f"locals_: found {len(locals_)} trees, expected one for each of {self.size} ranks"
            )

        def zeros(name: str, shard: Tensor) -> Tensor:
            return shard.new_zeros(self.specs[name].shape)

        # Each shard is copied to its place in zeros of the whole shape.
        wholes = map_named(zeros, locals_[0])
        whole_leaves = tree.named_leaves(wholes)
        # The lowest rank that holds a shard is last, as in `broadcast`
        for rank in reversed(range(self.size)):
            shards = tree.leaves(locals_[rank])
            for (name, whole), shard in zip(whole_leaves, shards, strict=True):
                if whole is not None:
                    self.position(name, rank).paste(shard, whole)
        return wholes

    def gather(self, local: T) -> T:
        """Gather the shards of all ranks to whole tensors on every rank. All ranks must call this together.

        Args:
            local: the tree of this rank's shards, as `shard` returns it, or of DTensors.

        Raises:
            ShardingError: a leaf is not a parameter or has another shape than the rank's shard, or a rank has ended.
        """
        return gathered(self, local)

    def all_gather(self, local: T, names: Sequence[str] | None = None) -> T:
        """Gather the shards of all ranks to whole tensors, with derivatives: the backward pass is `reduce_scatter`.

        In a ZeRO-3 loop, ``grad(lambda local: loss(layout.all_gather(local)))`` returns the gradients as shards. Higher
        derivatives, ``vjp``, ``jvp`` and ``vmap`` work too, if all ranks use the same ``torch.func`` transforms.

        Args:
            local: the tree of this rank's shards.
            names: the names of the leaves to gather; other leaves are returned unchanged. None: all leaves.

        Raises:
            ShardingError: as in `gather`.
        """
        return gathered_with_derivatives(self, local, names)

    def reduce_scatter(self, grads: T) -> T:
        """Average the whole gradients of all ranks. Return this rank's shards of the mean.

        Values are added in rank order in fp32 or higher and rounded once, so replicas of a shard are equal. For S bytes
        of gradients on P ranks, each rank sends S(P-1)/P bytes, or twice as many if all parameters are replicated.

        Args:
            grads: this rank's gradients, as whole tensors. A leaf that is None on some ranks counts as zero there; a
                leaf that is None on all ranks stays None.

        Returns:
            A tree of this rank's shards, in the gradients' dtypes.

        Raises:
            ShardingError: a leaf is not a parameter or has another shape than the parameter, or a rank has ended.
        """
        return reduce_scattered(self, grads)

    def to_global(self, local: PyTree) -> PyTree:
        """Convert this rank's shards to a form for checkpoints, which records where each shard is in its whole tensor.

        It needs no communication. `muonfx.checkpoint.save` calls this for a sharded transform.

        Args:
            local: the tree of this rank's shards. A leaf that is already in the returned form is not changed, and
                neither is one that is no parameter, such as a buffer of the model: it is equal on all ranks.

        Returns:
            A tree of `DTensor`, `muonfx.checkpoint.FlatShard` (an interval of a flattened tensor, with its position),
            and whole tensors.

        Raises:
            ShardingError: a leaf is neither this rank's shard nor the whole tensor; the message names the leaf.

        >>> import muonfx as mfx
        >>> layout = mfx.sharding.zero({"w": torch.zeros(6)}, 2, partition="flat")
        >>> layout.to_global({"w": torch.zeros(3)})
        {'w': FlatShard(elements 0 to 3 of (6,), torch.float32)}
        """
        return map_named(self._global_leaf, local)

    def _global_leaf(self, name: str, leaf: Tensor | FlatShard) -> Tensor | FlatShard:
        """Convert one leaf for a checkpoint: a DTensor, a `FlatShard` such as "elements 3 to 6 of (6,)", or whole.

        Raise if it is neither this rank's shard nor the whole tensor.
        """
        if isinstance(leaf, FlatShard) or is_dtensor(leaf):  # it is in global form already
            return leaf
        # A save compares a tensor that is no parameter, such as a buffer of batch norm, between the ranks.
        if name not in self.specs:
            return leaf
        position = self.position(name)
        # A leaf of the whole shape counts as whole on all ranks, even if this rank's shard has the same shape.
        whole_shape = self.specs[name].shape
        if tuple(leaf.shape) == whole_shape and name not in self.dtensors:
            return leaf
        if position.fits(leaf):
            return global_shard(self, name, leaf)
        raise ShardingError(
            f"{name!r} has shape {tuple(leaf.shape)}, expected {position.shape}, this rank's shard under {self!r}, or "
            f"{whole_shape}, the full shape: pass the parameters that the layout was created from. FSDP2 leaves a "
            "model unsharded after a forward pass without backward: call model.reshard() first"
        )

    def from_global(self, values: PyTree) -> PyTree:
        """Convert a tree in the form that `to_global` returns to this rank's shards as local tensors.

        Each `muonfx.checkpoint.FlatShard` (a shard with its position) becomes a tensor. Other leaves are unchanged.
        """

        def to_local(name: str, leaf: Tensor | FlatShard) -> Tensor:
            # Its values are 1-d, and a rank's shard may have more dims.
            if isinstance(leaf, FlatShard):
                return leaf.data.view(self.position(name).shape)
            return leaf

        return map_named(to_local, values)
