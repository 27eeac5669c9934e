"""The products that the iteration is made of, on a batch of matrices: as plain functions, or in reused buffers.

Two forms with the same methods. `Functional` allocates every result and goes through autograd, `torch.func` and the
compiler. `Buffered` overwrites: on a CPU fresh memory is slow, and everywhere the scratch stays small and known; it
also leaves out half of each product that is known to be symmetric, by blocks (`"blocks"`) or by a kernel (`"triton"`).

A batch is `(b, n, m)` with n <= m, or, where it is `tall`, its transpose `(b, m, n)`: large matrices are never
transposed in memory. The small matrices beside it are `(b, n, n)`, symmetric, and commute with each other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch

from muonfx.polar import kernels
from muonfx.polar.workspace import Workspace

ProductsLike = Literal["auto", "batched", "blocks", "triton"]
"""How products are done: in batches by the BLAS, symmetric ones by blocks, or by Triton kernels."""


class Shifted(NamedTuple):
    """The symmetric matrix `shift * I + scale * rest`, whose diagonal need not be rounded to `rest`'s dtype."""

    shift: float
    scale: float
    rest: torch.Tensor


class Products(Protocol):
    """What the iteration needs."""

    def gram(self, x: torch.Tensor, shift: float) -> torch.Tensor:
        """`x x^T + shift * I`."""
        ...

    def symmetric(
        self, addend: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, beta: float, alpha: float
    ) -> torch.Tensor:
        """`beta * addend + alpha * p q`, which is symmetric because `p` and `q` are and commute."""
        ...

    def sum(self, a: torch.Tensor, b: torch.Tensor, weight: float) -> torch.Tensor:
        """`a + weight * b`, good until the next sum."""
        ...

    def weighted(self, x: torch.Tensor, q: Shifted) -> torch.Tensor:
        """`q x`; `x` is not needed any more."""
        ...

    def keep(self, *live: torch.Tensor) -> None:
        """Of all small matrices that were returned, only these are still needed."""
        ...


class Functional:
    """Every result is new. For wide batches; a view of a tall one does."""

    def gram(self, x: torch.Tensor, shift: float) -> torch.Tensor:
        """`x x^T + shift * I`."""
        if shift == 0:
            return torch.bmm(x, x.mT)
        identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand(x.shape[0], -1, -1)
        return torch.baddbmm(identity, x, x.mT, beta=shift)

    def symmetric(
        self, addend: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, beta: float, alpha: float
    ) -> torch.Tensor:
        """`beta * addend + alpha * p q`."""
        return torch.baddbmm(addend, p, q, beta=beta, alpha=alpha)

    def sum(self, a: torch.Tensor, b: torch.Tensor, weight: float) -> torch.Tensor:
        """`a + weight * b`."""
        return torch.add(a, b, alpha=weight)

    def weighted(self, x: torch.Tensor, q: Shifted) -> torch.Tensor:
        """`q x`."""
        return torch.baddbmm(x, q.rest, x, beta=q.shift, alpha=q.scale)

    def keep(self, *live: torch.Tensor) -> None:
        """Nothing to do: what is not referred to is freed."""


class Buffered:
    """Results go into buffers that are made once and used again; the batch itself is one of them.

    Args:
        x: the batch, `(b, n, m)`, or `(b, m, n)` where `tall`; overwritten.
        tall: whether the short side is the columns.
        how: "batched", "blocks" or "triton", for the Gram matrix of the batch.
        small: the same, for products of small matrices.
        workspace: has the memory for small matrices; None: new memory.
        results: has the memory for batches, in which results lie; None: new memory.
    """

    def __init__(
        self,
        x: torch.Tensor,
        *,
        tall: bool,
        how: str,
        small: str,
        workspace: Workspace | None = None,
        results: Workspace | None = None,
    ) -> None:
        self._tall, self._how, self._small = tall, how, small
        self._workspace = workspace or Workspace()
        self._spare = (results or Workspace()).empty(x.shape, x.dtype, x.device)
        self._n = min(x.shape[-2:])
        self._free: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._identity: torch.Tensor | None = None

    def gram(self, x: torch.Tensor, shift: float) -> torch.Tensor:
        """`x x^T + shift * I`."""
        wide, out = (x.mT if self._tall else x), self._take()
        if self._how == "triton":
            return kernels.symmetric_matmul(wide, None, identity=shift, out=out)
        if self._how == "blocks":
            if shift:
                out.copy_(self._eye())
            _add_by_blocks(out, wide, wide, beta=shift, alpha=1.0)
            return out
        if shift == 0:
            return torch.bmm(wide, wide.mT, out=out)
        return torch.baddbmm(self._eye().expand_as(out), wide, wide.mT, beta=shift, out=out)

    def symmetric(
        self, addend: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, beta: float, alpha: float
    ) -> torch.Tensor:
        """`beta * addend + alpha * p q`."""
        out = self._take()
        if p is not q:
            # Only rounding makes their product asymmetric, and half of that error is antisymmetric and does no harm;
            # mirrored, all of it would.
            return torch.baddbmm(addend, p, q, beta=beta, alpha=alpha, out=out)
        if self._small == "triton":
            return kernels.symmetric_matmul(p, q, addend=addend, alpha=alpha, beta=beta, out=out)
        if self._small == "blocks":
            out.copy_(addend)  # here and not by each product, which would copy its own strided block
            _add_by_blocks(out, p, q, beta=beta, alpha=alpha)
            return out
        return torch.baddbmm(addend, p, q, beta=beta, alpha=alpha, out=out)

    def sum(self, a: torch.Tensor, b: torch.Tensor, weight: float) -> torch.Tensor:
        """`a + weight * b`, in one place that the next sum overwrites."""
        if self._sum is None:
            self._sum = self._square(len(a))
        return torch.add(a, b, alpha=weight, out=self._sum)

    def weighted(self, x: torch.Tensor, q: Shifted) -> torch.Tensor:
        """`q x`, which is `x q` where the batch is tall."""
        left, right = (x, q.rest) if self._tall else (q.rest, x)
        y = torch.baddbmm(x, left, right, beta=q.shift, alpha=q.scale, out=self._spare)
        self._spare = x
        return y

    def keep(self, *live: torch.Tensor) -> None:
        """Take back all small matrices but these."""
        kept = {id(one) for one in live}
        self._free += [one for one in self._lent if id(one) not in kept]
        self._lent = [one for one in self._lent if id(one) in kept]

    def _take(self) -> torch.Tensor:
        own = self._free.pop() if self._free else self._square(len(self._spare))
        self._lent.append(own)
        return own

    def _square(self, count: int) -> torch.Tensor:
        return self._workspace.empty((count, self._n, self._n), self._spare.dtype, self._spare.device)

    def _eye(self) -> torch.Tensor:
        if self._identity is None:
            self._identity = torch.eye(self._n, out=self._square(1)[0])
        return self._identity


def block_side(n: int) -> int:
    """The side of the blocks for an `n x n` product: an eighth to a quarter of it, 128 at least.

    >>> [block_side(n) for n in (300, 512, 1024, 4096)]
    [128, 128, 256, 512]
    """
    return min(512, max(128, n // 4 // 128 * 128))


def _add_by_blocks(out: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, beta: float, alpha: float) -> None:
    """`out <- beta * out + alpha * p q^T`, which is symmetric: rows of blocks up to the diagonal, the rest mirrored.

    Product by product: torch's batched ones copy what is no whole batch. Mirrored for all at once: a copy is so short
    that most of it is its call.

    Shapes: `p` and `q` `(b, n, k)`, `out` `(b, n, n)`; for `beta` 0 it may have any values.
    """
    n, side = out.shape[-1], block_side(out.shape[-1])
    for square, left, right in zip(out.unbind(), p.unbind(), q.unbind(), strict=True):
        end = 0
        for rows, taken in zip(left.split(side), square.split(side), strict=True):
            end += rows.shape[0]
            target, columns = taken.narrow(1, 0, end), right.narrow(0, 0, end).mT
            if beta == 0 and alpha == 1:
                torch.mm(rows, columns, out=target)
            else:
                target.addmm_(rows, columns, beta=beta, alpha=alpha)
    for start in range(side, n, side):
        rows = slice(start, start + side)
        out[:, :start, rows].copy_(out[:, rows, :start].mT)
