"""A simulated model on a mesh of ranks: its parameters and their layouts.

Ranks are numbered with tensor parallelism innermost: `rank = (replica * shard + s) * tp + t`. A replica consists of
`shard * tp` neighbouring ranks and holds the model once. FSDP shards the first dim of a parameter, and tensor
parallelism the second dim of a matrix. With expert parallelism, a replica is divided into `ep` parts, and each expert
is a separate parameter on the mesh of its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.simulator.bounds import lower_bound
from benchmarks.simulator.models import Kind, Model
from muonfx import polar
from muonfx.core import Transform
from muonfx.core.partition import partition
from muonfx.polar.cost import newton_schulz_cost
from muonfx.sharding.layout import Layout
from muonfx.sharding.layouts import Partition, replicated, zero
from muonfx.sharding.plan.assignment import Plan, plan_for
from muonfx.sharding.shards.cut import Cut, MeshCoordinates, OnMesh, Whole
from muonfx.sharding.shards.table import specs_of
from muonfx.transforms.moments import scale_by_adam
from muonfx.transforms.orthogonalize import orthogonalize

__all__ = ["Mesh", "Parameter", "Setting"]

MOST_RANKS = 1_000_000
"""Maximum number of ranks of a simulation."""


class Mesh(NamedTuple):
    """The number of ranks along each dim."""

    dp: int = 1
    """Number of replicas."""
    shard: int = 1
    """Ranks that shard a replica's parameters (FSDP)."""
    tp: int = 1
    """Ranks that shard each matrix (tensor parallelism)."""
    ep: int = 1
    """Parts of a replica over which experts are distributed; divides `shard`."""

    @staticmethod
    def parse(text: str) -> Mesh:
        """Parse a mesh such as ``"dp=64,shard=8"``.

        Raises:
            ValueError: a dim is unknown, repeated or not a number of at least 1, `ep` does not divide `shard`, or there
                are more than `MOST_RANKS` ranks.

        >>> Mesh.parse("dp=64,shard=8,tp=8").ranks
        4096
        >>> Mesh.parse("dp=8,shard=8,ep=8").ranks
        64
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            wrong = not number.isdecimal() or len(number) > 9 or int(number) < 1
            if name not in Mesh._fields or name in sizes or wrong:
                raise ValueError(
                    f"mesh: found {part!r}, expected dims such as 'dp=64,shard=8,tp=8,ep=8', each once"
                )
            sizes[name] = int(number)
        mesh = Mesh(**sizes)
        if mesh.shard % mesh.ep:
            raise ValueError(f"mesh: found ep={mesh.ep}, expected a divisor of shard={mesh.shard}")
        if mesh.ranks > MOST_RANKS:
            raise ValueError(f"mesh: found {mesh.ranks:,} ranks, expected at most {MOST_RANKS:,}")
        return mesh

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.dp * self.shard * self.tp

    @property
    def pieces(self) -> int:
        """Ranks per replica, which is also the number of shards of a matrix."""
        return self.shard * self.tp

    def __str__(self) -> str:
        return (
            ", ".join(
                f"{name}={size}" for name, size in zip(self._fields, self, strict=True) if size > 1
            )
            or "dp=1"
        )


class Parameter(NamedTuple):
    """One parameter of a model."""

    kind: Kind
    part: int | None = None
    """The part of a replica that holds an expert; None for the whole replica."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.kind.numel


@dataclass(frozen=True)
class Setting:
    """A model, its mesh of ranks, and the other inputs of a plan.

    >>> from benchmarks.simulator.models import model
    >>> on = Setting(model("gpt2-xl"), Mesh(shard=8))
    >>> len(on.matrices), on.layout("fsdp2"), on.plan("fsdp2").size
    (192, <from_dtensors of 339 parameters over 8 ranks>, 8)
    """

    model: Model
    mesh: Mesh
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    """Dtype of gradients, in messages and in Newton-Schulz."""
    state_size: int = 4
    """Bytes per element of momentum and of Adam's moments."""
    bucket: int = 256 * 2**20
    """Bytes of buffers: matrices and messages of the current, the next and the previous bucket."""
    _layouts: dict[str, Layout] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters by name, layer by layer, in the order of their names."""
        placed: list[tuple[float, Parameter]] = []
        for kind in self.model.kinds:
            in_parts = kind.experts and self.mesh.ep > 1
            alike = [Parameter(kind, part if in_parts else None) for part in range(self.mesh.ep)]
            placed += [
                ((i + 0.5) / kind.repeats, alike[i % self.mesh.ep]) for i in range(kind.repeats)
            ]
        # A stable sort keeps the order of kinds within a layer.
        placed.sort(key=lambda entry: entry[0])
        return {f"{place:08d} {own.kind.name}": own for place, (_, own) in enumerate(placed)}

    @cached_property
    def matrices(self) -> tuple[Parameter, ...]:
        """The parameters that Muon updates."""
        return tuple(own for own in self.parameters.values() if own.kind.muon)

    def cost(self, shape: tuple[int, ...]) -> polar.Plan:
        """Return the cost of one matrix."""
        rows, columns = shape
        return newton_schulz_cost((rows, columns), self.device, dtype=self.dtype)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each matrix in a message."""
        return [matrix.numel * self.dtype.itemsize for matrix in self.matrices]

    @cached_property
    def loads(self) -> list[float]:
        """The load of each matrix."""
        return [self.cost(matrix.kind.shape).load for matrix in self.matrices]

    @cached_property
    def least(self) -> float:
        """The minimum load of the busiest rank if each matrix is computed once."""
        return lower_bound(self.loads, self.mesh.ranks)

    @cached_property
    def intermediates(self) -> int:
        """Scratch bytes of Newton-Schulz for one matrix at a time."""
        return max(self.cost(kind.shape).scratch_bytes for kind in self.model.matrices)

    def state_of(self, kind: Kind) -> int:
        """Return the state bytes per element of a parameter: one momentum, or two moments."""
        return self.state_size * (1 if kind.muon else 2)

    @cached_property
    def _params(self) -> dict[str, Tensor]:
        blank = {
            kind: torch.empty(kind.shape, dtype=self.dtype, device="meta")
            for kind in self.model.kinds
        }
        return {name: blank[own.kind] for name, own in self.parameters.items()}

    @cached_property
    def _tx(self) -> Transform:
        labels = {
            name: "muon" if own.kind.muon else "adam" for name, own in self.parameters.items()
        }
        return partition({"muon": orthogonalize(dtype=self.dtype), "adam": scale_by_adam()}, labels)

    def layout(self, kind: str) -> Layout:
        """Return the layout "fsdp2", "zero-whole", "zero-flat" or "ddp".

        FSDP2 supports replicas, tensor and expert parallelism. Under ZeRO and DDP, all ranks are data ranks.
        """
        if kind not in self._layouts:
            self._layouts[kind] = self._make(kind)
        return self._layouts[kind]

    def _make(self, kind: str) -> Layout:
        ranks = self.mesh.ranks
        if kind == "fsdp2":
            return self._on_mesh()
        if kind == "ddp":
            return replicated(self._params, ranks)
        return zero(
            self._params,
            ranks,
            partition=cast("Partition", kind.removeprefix("zero-")),
            tx=self._tx,
        )

    def _on_mesh(self) -> Layout:
        from torch.distributed.tensor import Replicate, Shard

        mesh, inner = self.mesh, self.mesh.shard // self.mesh.ep
        at = [(*divmod(rank // mesh.tp, mesh.shard), rank % mesh.tp) for rank in range(mesh.ranks)]
        places: dict[int | None, MeshCoordinates] = {
            None: MeshCoordinates((mesh.dp, mesh.shard, mesh.tp), at)
        }
        for part in range(mesh.ep) if mesh.ep > 1 else ():
            own = [(dp, s % inner, tp) if s // inner == part else None for dp, s, tp in at]
            places[part] = MeshCoordinates((mesh.dp, inner, mesh.tp), own)
        matrix, vector = (Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(0), Replicate())

        @cache
        def cut(shape: tuple[int, ...], part: int | None) -> Cut:
            if not shape:
                return Whole(shape, mesh.ranks)
            return OnMesh(shape, places[part], matrix if len(shape) > 1 else vector)

        specs = specs_of(self._params)
        pieces = {name: cut(spec.shape, self.parameters[name].part) for name, spec in specs.items()}
        return Layout("from_dtensors", specs, pieces, mesh.ranks)

    def plan(self, layout: str, **settings: Any) -> Plan:
        """Return the plan of a step under one of the layouts, with arguments of `muonfx.sharding.plan_for`."""
        return plan_for(
            self._tx,
            self.layout(layout),
            device=self.device,
            bucket_bytes=self.bucket,
            **settings,
        )
