"""The table of a layout: the shard of each parameter on each rank, without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import check_tree
from muonfx.program.placement import Once
from muonfx.sharding.cut import Cut
from muonfx.sharding.messages import Buffers, ShardingError, digest
from muonfx.sharding.shards import Piece
from muonfx.tree import PyTree, Spec
from muonfx.tree.display import format_list

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = ["ShardTable", "specs_of"]


@dataclass(frozen=True, eq=False, repr=False)
class ShardTable:
    """The fields and the lookups of a `Layout`, which adds the operations on trees."""

    kind: str
    specs: Mapping[str, Spec]
    pieces: Mapping[str, Cut]
    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    stage: int | None = None
    is_flat: bool = False
    """True if the shards are intervals of flat buffers, or whole parameters of one rank each."""
    dtensors: Mapping[str, DTensorSpec] = field(default_factory=dict)
    """For `from_dtensors`: the spec of each parameter that is a DTensor."""
    on_several_meshes: tuple[str, ...] = ()
    """The parameters that have different meshes on different ranks; their shards are assumed to be replicas."""
    once: Once = field(default_factory=Once)
    """Values that follow from the layout, computed once."""
    buffers: Buffers = field(default_factory=Buffers)
    """The memory of the messages between its ranks."""

    def __repr__(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        return f"<{self.kind} of {len(self.specs)} parameters over {ranks}{stage}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a layout belongs to a running process group and cannot be pickled: recreate it in the other process"
        )

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank holds all of every parameter."""
        return all(len(cut.complete) == self.size for cut in self.pieces.values() if prod(cut.shape))

    def piece(self, name: str, rank: int | None = None) -> Piece:
        """Return a rank's shard of a parameter, by default this rank's.

        Raises:
            ShardingError: there is no such parameter; the message names some existing parameters.
        """
        if name not in self.specs:
            known = format_list(list(self.specs)) or "none"
            raise ShardingError(f"{self!r} has no parameter {name!r}; it was made for {known}")
        return self.pieces[name][self.rank if rank is None else rank]

    @cached_property
    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of this rank's local tensor of each parameter."""
        return {name: cut[self.rank].shape for name, cut in self.pieces.items()}

    @cached_property
    def digest(self) -> str:
        """A hash of all shards, the same on all ranks."""
        return digest([(name, cut.digest) for name, cut in self.pieces.items()])[:12]

    def holders(self, name: str) -> Mapping[Piece, Sequence[int]]:
        """Return the distinct nonempty shards of a parameter and the ranks that hold each."""
        return self.pieces[name].holders

    def nbytes(self, rank: int | None = None) -> int:
        """Return the bytes of a rank's shards of the parameters."""
        return sum(self.piece(name, rank).numel * spec.dtype.itemsize for name, spec in self.specs.items())

    def meta(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return meta tensors of the global shapes and dtypes by name, of all parameters or of some."""
        chosen = self.specs if names is None else names
        return {n: torch.empty(self.specs[n].shape, dtype=self.specs[n].dtype, device="meta") for n in chosen}


def specs_of(params: PyTree) -> dict[str, Spec]:
    """Return shape and dtype of every leaf by name, for a DTensor the global shape."""
    check_tree("params", params)
    named = zip(tree.names(params), tree.leaves(params), strict=True)
    return {name: Spec(tuple(leaf.shape), leaf.dtype) for name, leaf in named if leaf is not None}
