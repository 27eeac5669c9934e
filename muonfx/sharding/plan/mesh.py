"""A mesh of ranks on paper, and the matrices of a model laid out on it.

Ranks are numbered with tensor parallelism innermost: `rank = (replica * shard + s) * tp + t`. A replica, `shard * tp`
neighbouring ranks, holds the model once. There a matrix is cut into `shard * tp` pieces, or, if it is an expert's and
experts are dealt out over `ep` parts of the replica, into that many fewer. Pieces are taken to be of equal size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from muonfx.sharding.plan.cost import Cost, newton_schulz_cost
from muonfx.sharding.plan.models import Model

__all__ = ["Matrix", "Mesh", "matrices"]


MOST_RANKS = 1_000_000
"""More than there are anywhere, and what takes some seconds to count."""


class Mesh(NamedTuple):
    """How many ranks there are along each dim."""

    dp: int = 1
    """Replicas."""
    shard: int = 1
    """Ranks that shard a replica's parameters (FSDP)."""
    tp: int = 1
    """Ranks that cut each matrix (tensor parallelism)."""
    ep: int = 1
    """Parts of a replica that experts are dealt out to; divides `shard`."""

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh that ``"dp=64,shard=8"`` says.

        Raises:
            ValueError: a dim is unknown, repeated or not a number of at least 1, `ep` does not divide `shard`, or there
                are more than `MOST_RANKS` ranks.

        >>> Mesh.parse("dp=64,shard=8,tp=8").ranks
        4096
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            wrong = not number.isdecimal() or len(number) > 9 or int(number) < 1
            if name not in Mesh._fields or name in sizes or wrong:
                raise ValueError(f"mesh: found {part!r}, expected dims such as 'dp=64,shard=8,tp=8,ep=8', each once")
            sizes[name] = int(number)
        mesh = Mesh(**sizes)
        if mesh.shard % mesh.ep:
            raise ValueError(f"mesh: found ep={mesh.ep}, expected a divisor of shard={mesh.shard}")
        if mesh.ranks > MOST_RANKS:
            raise ValueError(f"mesh: found {mesh.ranks:,} ranks, expected at most {MOST_RANKS:,}")
        return mesh

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.dp * self.shard * self.tp

    @property
    def pieces(self) -> int:
        """Ranks of a replica, into as many pieces a matrix is cut."""
        return self.shard * self.tp

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self._fields, self, strict=True) if size > 1) or "dp=1"


class Matrix(NamedTuple):
    """One matrix that Muon takes."""

    shape: tuple[int, int]
    numel: int
    cost: Cost
    part: int | None
    """Which part of a replica holds it, or None: the whole replica."""

    def pieces(self, mesh: Mesh) -> int:
        """Into how many pieces it is cut."""
        return mesh.pieces if self.part is None else mesh.pieces // mesh.ep

    def holders(self, mesh: Mesh) -> range:
        """The ranks of the first replica that hold a piece of it.

        >>> Matrix((4, 4), 16, newton_schulz_cost((4, 4)), part=1).holders(Mesh(shard=8, ep=2))
        range(4, 8)
        """
        pieces = self.pieces(mesh)
        first = 0 if self.part is None else self.part * pieces
        return range(first, first + pieces)


def matrices(model: Model, mesh: Mesh, device: str, dtype: torch.dtype) -> list[Matrix]:
    """Every matrix that Muon takes, layer by layer.

    >>> from muonfx.sharding.plan.models import model
    >>> len(matrices(model("gpt2-xl"), Mesh(shard=8), "cuda", torch.bfloat16))
    192
    """
    placed: list[tuple[float, Matrix]] = []
    for kind in model.matrices:
        rows, columns = kind.shape
        cost = newton_schulz_cost((rows, columns), device, dtype=dtype)
        alike = [
            Matrix((rows, columns), kind.numel, cost, part if kind.experts and mesh.ep > 1 else None)
            for part in range(mesh.ep)
        ]
        placed += [((i + 0.5) / kind.repeats, alike[i % mesh.ep]) for i in range(kind.repeats)]
    placed.sort(key=lambda entry: entry[0])  # stable: kinds stay in order within a layer
    return [matrix for _, matrix in placed]
