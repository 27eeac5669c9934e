"""A layout: the shard of every parameter on every rank, and the tree operations that follow from it.

A *whole tree* has the parameters as one process would hold them; a *local tree* has a rank's local tensors in their
place. Leaves are identified by their dotted names, so a tree may have any structure, and gradients, updates and copies
of the parameters, in any dtype, are sharded like the parameters. None stays None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import check_tree
from muonfx.sharding.collectives import ReduceOp, gathered, reduce_scattered
from muonfx.sharding.consensus import outside_transforms
from muonfx.sharding.cut import Buffer, Cut
from muonfx.sharding.dtensors import local_tree, logical_tree, map_named
from muonfx.sharding.messages import Buffers, ShardingError
from muonfx.sharding.shards import Piece
from muonfx.tree import PyTree, Spec
from muonfx.tree.display import format_list

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = ["Layout", "specs_of"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Layout:
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

    kind: str
    specs: Mapping[str, Spec]
    pieces: Mapping[str, Cut] = field(repr=False)
    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    stage: int | None = None
    buffer: Buffer | None = field(default=None, repr=False)
    dtensors: Mapping[str, DTensorSpec] = field(default_factory=dict, repr=False)
    """For `from_dtensors`: the DTensor spec of each parameter that is one."""
    on_several_meshes: tuple[str, ...] = field(default=(), repr=False)
    """The parameters that lie on different meshes on different ranks, whose pieces are taken for the same."""
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that follow from the layout, computed once."""
    buffers: Buffers = field(default_factory=Buffers, repr=False)
    """The memory of the messages between its ranks."""

    def __repr__(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        return f"<{self.kind} of {len(self.specs)} parameters over {ranks}{stage}>"

    def __eq__(self, other: object) -> bool:
        """True if every rank holds the same shards."""
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (
            self._key == other._key and self.specs == other.specs and dict(self.pieces) == dict(other.pieces)
        )

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.kind, self.size, self.rank, self.stage, self.group

    def __reduce__(self) -> NoReturn:
        raise TypeError("a layout belongs to a running process group and cannot be pickled: make it anew over there")

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return list(self.specs)

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank holds all of every parameter."""
        return all(len(cut.complete) == self.size for cut in self.pieces.values() if prod(cut.shape))

    @property
    def is_flat(self) -> bool:
        """True if the pieces lie in flat buffers."""
        return self.buffer is not None

    def piece(self, name: str, rank: int | None = None) -> Piece:
        """What a rank, by default this one, holds of a parameter.

        Raises:
            ShardingError: there is no such parameter; the message names some that there are.
        """
        if name not in self.specs:
            known = format_list(list(self.specs)) or "none"
            raise ShardingError(f"{self!r} has no parameter {name!r}; it was made for {known}")
        return self.pieces[name][self.rank if rank is None else rank]

    @cached_property
    def digest(self) -> str:
        """A hash of who holds what, the same on all ranks; made of a word a parameter, however many ranks there are."""
        text = repr([(name, self.pieces[name].digest) for name in self.specs])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def holders(self, name: str) -> Mapping[Piece, Sequence[int]]:
        """The different pieces of a parameter that have elements, and the ranks that hold each."""
        return self.pieces[name].holders

    def nbytes(self, rank: int | None = None) -> int:
        """The bytes of a rank's pieces of the parameters."""
        return sum(self.piece(name, rank).numel * spec.dtype.itemsize for name, spec in self.specs.items())

    def meta(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Meta tensors of the global shapes and dtypes, by name."""
        chosen = self.specs if names is None else names
        return {n: torch.empty(self.specs[n].shape, dtype=self.specs[n].dtype, device="meta") for n in chosen}

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

    def logical(self, local: PyTree) -> PyTree:
        """A tree of what a checkpoint understands: `DTensor`, `muonfx.checkpoint.FlatPiece`, or a tensor that all have.

        `muonfx.checkpoint.save` does this by itself where it is given a sharded chain. What is logical already stays as
        it is, and so does a tensor that is the whole, as under ZeRO-1.

        Raises:
            ShardingError: a leaf is neither this rank's piece nor the whole; the message names it.
        """
        return logical_tree(self, local)

    def local(self, logical: PyTree) -> PyTree:
        """The local tree that a logical one describes: the inverse of `logical`. DTensors stay what they are."""
        return local_tree(self, logical)


def specs_of(params: PyTree) -> dict[str, Spec]:
    """Return shape and dtype of every leaf by name, for a DTensor the global shape."""
    check_tree("params", params)
    named = zip(tree.names(params), tree.leaves(params), strict=True)
    return {name: Spec(tuple(leaf.shape), leaf.dtype) for name, leaf in named if leaf is not None}
