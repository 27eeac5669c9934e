"""`ShardTable`: which shard of each parameter each rank holds. It is the part of a layout without communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import check_tree
from muonfx.internal.display import format_list
from muonfx.sharding.buffers import Buffers
from muonfx.sharding.digests import digest
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.cut import Cut
from muonfx.sharding.shards.position import ShardPosition, ShardView
from muonfx.sharding.shards.remembered import remembered
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(frozen=True, eq=False, repr=False)
class ShardTable:
    """Which shard of each parameter each rank holds. Its subclass `Layout` can also shard and gather trees."""

    kind: str
    specs: Mapping[str, Spec]
    cuts: Mapping[str, Cut]
    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    stage: int | None = None
    is_flat: bool = False
    """True for layouts built by `zero` and `flat`, whose shards are parts of flattened parameters."""
    dtensors: Mapping[str, DTensorSpec] = field(default_factory=dict)
    """A dict from the name of each parameter that is a DTensor to its mesh and placements (a `DTensorSpec`)."""
    on_several_meshes: tuple[str, ...] = ()
    """The names of parameters with different meshes on different ranks; their shards are assumed to be replicas."""
    buffers: Buffers = field(default_factory=Buffers)
    """Reusable memory for the messages between the ranks of this layout."""
    tree_digests: dict[tuple[str, ...], str] = field(default_factory=dict, init=False)
    """For trees with these names of leaves, a hash of this layout and of the names, which the ranks compare."""

    def __repr__(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        ranks = "rank" if self.size == 1 else "ranks"
        return f"<{self.kind} of {len(self.specs)} parameters over {self.size} {ranks}{stage}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a layout belongs to a running process group and cannot be pickled: recreate it in the other process"
        )

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank holds every parameter in full."""
        return are_on_all_ranks(self, self.cuts)

    def position(self, name: str, rank: int | None = None) -> ShardPosition:
        """Return which elements of a parameter a rank holds, as a `ShardPosition`: their positions, without values.

        Args:
            name: the name of the parameter.
            rank: the rank in the group. None: this process's rank.

        Raises:
            ShardingError: the layout has no parameter of this name; the message names some of its parameters.

        >>> import muonfx as mfx
        >>> layout = mfx.sharding.zero({"w": torch.zeros(4, 5)}, 2, partition="flat")
        >>> layout.position("w", rank=1).boxes  # rows 2 and 3
        (Box(offsets=(2, 0), sizes=(2, 5)),)
        """
        self.require([name])
        if rank is None:
            rank = self.rank
        return self.cuts[name][rank]

    def require(self, names: Iterable[str]) -> None:
        """Raise ShardingError if the layout has no parameter of one of these names."""
        for name in names:
            if name in self.specs:
                continue
            known_names = format_list(list(self.specs)) or "none"  # shortened if there are many
            raise ShardingError(
                f"{self!r} has no parameter {name!r}, expected one of {known_names}: create the layout from the "
                "parameters that you pass"
            )

    def require_whole(self, name: str, tensor: Tensor) -> None:
        """Raise ShardingError unless a tensor has the global shape of the parameter of this name."""
        self.require([name])
        if tuple(tensor.shape) != self.specs[name].shape:
            raise ShardingError(
                f"{name!r} has shape {tuple(tensor.shape)}, expected {self.specs[name].shape}, the global shape in "
                f"{self!r}: pass whole tensors"
            )

    @cached_property
    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """A dict from parameter name to the shape of this rank's shard."""
        return {name: cut[self.rank].shape for name, cut in self.cuts.items()}

    @cached_property
    def digest(self) -> str:
        """A hash of the shards of all ranks. Ranks compare it to check that they have the same layout."""
        return digest([(name, cut.digest) for name, cut in self.cuts.items()])[:12]

    @remembered
    def views(self, name: str) -> list[ShardView]:
        """Return where each box (rectangular part) of this rank's shard of a parameter is in the local tensor."""
        position = self.position(name)
        return list(map(position.view, position.boxes))

    def holders(self, name: str) -> Mapping[ShardPosition, Sequence[int]]:
        """Return a dict from the position of each distinct nonempty shard of a parameter to the ranks that hold it."""
        return self.cuts[name].holders

    def nbytes(self, rank: int | None = None) -> int:
        """Return the total bytes of a rank's shards of all parameters. Default: this process's rank."""
        return sum(
            self.position(name, rank).numel * spec.dtype.itemsize
            for name, spec in self.specs.items()
        )

    def meta(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return a dict from parameter name (default: of all) to a meta tensor of the global shape and dtype."""
        chosen = list(self.specs) if names is None else names
        self.require(chosen)
        return meta_of({name: self.specs[name] for name in chosen})


def are_on_all_ranks(layout: ShardTable, names: Iterable[str]) -> bool:
    """Return True if every rank holds every element of these parameters."""
    for name in names:
        cut = layout.cuts[name]
        if prod(cut.shape) and len(cut.complete) < layout.size:
            return False
    return True


def meta_of(specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """Return a dict from name to a meta tensor of each shape and dtype."""
    return {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in specs.items()
    }


def specs_of(params: PyTree) -> dict[str, Spec]:
    """Return a dict from parameter name to its shape and dtype. The shape of a DTensor is the global one."""
    check_tree("params", params)
    return {
        name: Spec(tuple(leaf.shape), leaf.dtype)
        for name, leaf in tree.named_leaves(params)
        if leaf is not None
    }


def require_layout(value: object) -> None:
    """Raise TypeError unless the argument ``layout`` is a `Layout`. The message shows how to create one."""
    if not isinstance(value, ShardTable):
        raise TypeError(
            f"layout must be a muonfx.sharding layout, found a {type(value).__name__}: create one, as in "
            "muonfx.sharding.zero(params), or zero(params, 8) to plan for 8 ranks without processes"
        )
