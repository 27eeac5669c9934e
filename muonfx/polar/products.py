"""Matrix products of the Newton-Schulz iteration on a batch of matrices, as plain functions or in reused buffers.

`Functional` allocates every result and works under autograd, `torch.func` and the compiler. Its subclass `Buffered`
overwrites buffers, because fresh memory is slow on a CPU and because its scratch memory is small and known. It also
computes only half of each large symmetric product and mirrors it, by blocks (`"blocks"`) or by quack-kernels
(`"quack"`). In a compiled graph, `FunctionalByQuack` does the latter.

A batch is `(b, n, m)` with n <= m. A `tall` batch is the transpose `(b, m, n)`: large matrices are never transposed in
memory. The small matrices, such as Gram matrices, are `(b, n, n)`, symmetric, and commute with each other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muonfx.polar import quack
from muonfx.polar.workspace import Workspace

ProductsLike = Literal["auto", "batched", "blocks"]
"""How to compute symmetric products such as `X X^T`: in full ("batched"), or one half, which is mirrored ("blocks")."""

Products = Literal["batched", "blocks", "quack"]
"""How the products of one shape are computed; "quack" only by "auto", and if `muonfx.polar.quack.refusal` is None."""


class Shifted(NamedTuple):
    """The matrix `shift * I + scale * rest`; its large diagonal is not rounded to the dtype of `rest`."""

    shift: float
    scale: float
    rest: Tensor


class Functional:
    """Matrix products of the Newton-Schulz iteration that allocate every result, for batches `(b, n, m)`, n <= m."""

    def gram(self, x: Tensor, shift: float) -> Tensor:
        """Return `x x^T + shift * I` for each matrix of a batch."""
        if shift == 0:
            return torch.bmm(x, x.mT)
        identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand(x.shape[0], -1, -1)
        return torch.baddbmm(identity, x, x.mT, beta=shift)

    def symmetric(
        self, addend: Tensor, p: Tensor, q: Tensor, *, beta: float, alpha: float
    ) -> Tensor:
        """Return `beta * addend + alpha * p q` for symmetric matrices that commute, so that the result is symmetric."""
        return torch.baddbmm(addend, p, q, beta=beta, alpha=alpha)

    def sum(self, a: Tensor, b: Tensor, weight: float) -> Tensor:
        """Return `a + weight * b`; a subclass may overwrite the result at the next call."""
        if not _rounds_by_place(a):
            return torch.add(a, b, alpha=weight)
        return torch.add(a.float(), b.float(), alpha=weight).to(a.dtype)

    def weighted(self, x: Tensor, q: Shifted) -> Tensor:
        """Return `Q x` for the matrix `Q = q.shift * I + q.scale * q.rest`; `x` may be overwritten."""
        return torch.baddbmm(x, q.rest, x, beta=q.shift, alpha=q.scale)

    def keep(self, *live: Tensor) -> None:
        """Release the memory of all small matrices except `live`. Does nothing here, since Python frees memory."""


class FunctionalByQuack(Functional):
    """Matrix products that compute only half of each symmetric product, by quack-kernels, in a compiled graph."""

    def gram(self, x: Tensor, shift: float) -> Tensor:
        """Return `x x^T + shift * I` for each matrix of a batch."""
        identity = None
        if shift != 0:  # quack refuses the batch stride of zero
            identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).repeat(
                x.shape[0], 1, 1
            )
        return quack.traced_symmetric_matmul(x, identity, 1.0, shift)

    def symmetric(
        self, addend: Tensor, p: Tensor, q: Tensor, *, beta: float, alpha: float
    ) -> Tensor:
        """Return `beta * addend + alpha * p q` for symmetric matrices that commute, so that the result is symmetric."""
        if p is not q:  # mirroring one triangle would make its error of rounding symmetric
            return super().symmetric(addend, p, q, beta=beta, alpha=alpha)
        return quack.traced_symmetric_matmul(p, addend, alpha, beta)


class Buffered(Functional):
    """Matrix products of the iteration that write into reused buffers, one of which is the batch `x` itself."""

    def __init__(
        self,
        x: Tensor,
        *,
        tall: bool,
        how: str,
        small: str,
        workspace: Workspace,
        results: Workspace,
    ) -> None:
        """Allocate a second batch like `x`. Small matrices are allocated when they are first needed.

        For a batch `x` of shape (3, 64, 256), the second batch has this shape, and small matrices (3, 64, 64).

        Args:
            x: the batch, which is overwritten.
            tall: True if its matrices have more rows than columns.
            how: how the Gram matrix `x x^T` is computed: "batched" in full, "blocks" or "quack" by half.
            small: how products of small matrices are computed, with the same choices.
            workspace: provides memory for small matrices, such as Gram matrices and polynomials of them.
            results: provides memory for the second batch, in which the result may be returned.
        """
        self._tall = tall
        self._how = how
        self._small = small
        # 1. The batches. A product cannot be written into its own factor, so `weighted` writes into the spare batch,
        # and its argument becomes the spare.
        self._spare = results.empty(x.shape, x.dtype, x.device)
        # 2. The small matrices.
        self._workspace = workspace
        self._n = min(x.shape[-2:])
        self._free: list[Tensor] = []  # buffers that `keep` has released
        self._lent: list[Tensor] = []  # buffers that are in use
        self._sum: Tensor | None = None  # the buffer for results of `sum`
        self._wide_sum: Tensor | None = None  # a buffer for them in fp32, before they are rounded
        self._identities: Tensor | None = None

    def gram(self, x: Tensor, shift: float) -> Tensor:
        """Return `x x^T + shift * I` for each matrix, or `x^T x + shift * I` if the batch is tall.

        It is the smaller of the two: `(n, n)` for a matrix `(n, m)` or `(m, n)` with n <= m. It contains the products
        of all pairs of rows (columns, if tall).
        """
        wide = x.mT if self._tall else x  # a view, not a copy
        # The shift is added within the product, so that the diagonal is rounded after the shift, when it is small.
        identities = None
        if shift != 0:
            identities = self._identity_matrices(len(x))
        if self._how != "batched":  # compute one half, and mirror it
            return self._mirrored(self._how, wide, identities, beta=shift, alpha=1.0)
        gram = self._small_matrices()  # a reused buffer
        if identities is None:
            return torch.bmm(wide, wide.mT, out=gram)
        return torch.baddbmm(identities, wide, wide.mT, beta=shift, out=gram)

    def symmetric(
        self, addend: Tensor, p: Tensor, q: Tensor, *, beta: float, alpha: float
    ) -> Tensor:
        """Return `beta * addend + alpha * p q` for symmetric matrices that commute, in a buffer."""
        # Only rounding makes the product of two different matrices asymmetric. The antisymmetric half of this error is
        # harmless. Mirroring one triangle would make all of it symmetric, so only squares are mirrored.
        if p is q and self._small != "batched":
            return self._mirrored(self._small, p, addend, beta=beta, alpha=alpha)
        return torch.baddbmm(addend, p, q, beta=beta, alpha=alpha, out=self._small_matrices())

    def _mirrored(
        self, how: str, p: Tensor, addend: Tensor | None, *, beta: float, alpha: float
    ) -> Tensor:
        """Return `beta * addend + alpha * p p^T`, a symmetric matrix, of which only one half is computed.

        The other half is its mirror image. `how` is "quack" (quack-kernels on a GPU) or "blocks" (products of
        blocks of rows). Without an addend, `beta` is 0. The result is in a reused buffer.
        """
        out = self._small_matrices()
        if how == "quack":
            if addend is None:
                return quack.symmetric_matmul(p, alpha=alpha, out=out)
            return quack.symmetric_matmul(p, addend=addend, alpha=alpha, beta=beta, out=out)
        # Compute it by blocks: `out <- addend`, then `out <- beta * out + alpha * p p^T`.
        if addend is not None:
            out.copy_(addend)  # once here, since each product would copy its own strided block
        _add_by_blocks(out, p, beta=beta, alpha=alpha)
        return out

    def sum(self, a: Tensor, b: Tensor, weight: float) -> Tensor:
        """Return `a + weight * b`, in a buffer that the next call overwrites."""
        if self._sum is None:  # the first call
            self._sum = self._allocate_small(len(a))
        if not _rounds_by_place(a):
            return torch.add(a, b, alpha=weight, out=self._sum)
        # bf16 or fp16 on a CPU: add in fp32 and round once. Else an element would be rounded once or twice, depending
        # on its place in memory.
        if self._wide_sum is None:
            self._wide_sum = self._workspace.empty(self._sum.shape, torch.float32, self._sum.device)
        self._wide_sum.copy_(b).mul_(weight).add_(a)
        return self._sum.copy_(self._wide_sum)  # rounds

    def weighted(self, x: Tensor, q: Shifted) -> Tensor:
        """Return `Q x`, or `x Q` if the batch is tall, for `Q = q.shift * I + q.scale * q.rest`; may overwrite `x`."""
        if self._tall:
            y = torch.baddbmm(x, x, q.rest, beta=q.shift, alpha=q.scale, out=self._spare)
        else:
            y = torch.baddbmm(x, q.rest, x, beta=q.shift, alpha=q.scale, out=self._spare)
        self._spare = x
        return y

    def keep(self, *live: Tensor) -> None:
        """Make the buffers of all small matrices except `live` available for new results."""
        live_ids = {id(matrix) for matrix in live}
        self._free += [buffer for buffer in self._lent if id(buffer) not in live_ids]
        self._lent = [buffer for buffer in self._lent if id(buffer) in live_ids]

    def _small_matrices(self) -> Tensor:
        """Return a buffer for a batch of small matrices: a released buffer, or a new one."""
        buffer = self._free.pop() if self._free else self._allocate_small(len(self._spare))
        self._lent.append(buffer)
        return buffer

    def _allocate_small(self, count: int) -> Tensor:
        return self._workspace.empty(
            (count, self._n, self._n), self._spare.dtype, self._spare.device
        )

    def _identity_matrices(self, count: int) -> Tensor:
        """Return a batch of identity matrices, which all stages share."""
        if self._identities is None:
            identity = torch.eye(self._n, out=self._allocate_small(1)[0])
            self._identities = identity.expand(count, -1, -1)
            if self._how == "quack":  # it refuses the batch stride of zero
                self._identities = self._identities.contiguous()
        return self._identities


def _rounds_by_place(x: Tensor) -> bool:
    """Return True if a weighted sum rounds an element by its place in memory, and so by the size of the batch."""
    # A CPU rounds bf16 and fp16 once in the vectorized part of a tensor, and twice in the rest.
    return x.is_cpu and x.dtype.itemsize == 2


def block_side(n: int) -> int:
    """Return the side of the blocks in which an `n x n` symmetric product is computed: about `n / 4`, 128 to 512."""
    return min(512, max(128, n // 4 // 128 * 128))


def _add_by_blocks(out: Tensor, p: Tensor, *, beta: float, alpha: float) -> None:
    """Compute `out <- beta * out + alpha * p p^T`, where `out` is symmetric; with `beta` 0 its values do not matter.

    The result is divided into blocks. Those up to the diagonal (#) are computed, and the others (.) are mirrored::

        # . .
        # # .
        # # #
    """
    n = out.shape[-1]
    side = block_side(n)
    # One matrix at a time, since batched products of torch copy a partial batch.
    for square, matrix in zip(out.unbind(), p.unbind(), strict=True):
        for start in range(0, n, side):
            end = min(start + side, n)
            target = square[start:end, :end]  # the blocks of these rows up to the diagonal
            rows = matrix[start:end]
            columns = matrix[:end].mT
            if beta == 0 and alpha == 1:  # the plain product, which does not read `out`
                torch.mm(rows, columns, out=target)
            else:
                target.addmm_(rows, columns, beta=beta, alpha=alpha)
    # Each column of blocks above the diagonal is the transpose of the row of blocks left of the diagonal. For the whole
    # batch at once, since such a copy takes less time than its launch.
    for start in range(side, n, side):
        end = start + side
        out[:, :start, start:end].copy_(out[:, start:end, :start].mT)
