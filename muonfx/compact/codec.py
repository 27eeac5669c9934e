"""One leaf in eight bits: codes of the leaf's own shape, and a scale for each block of the flattened leaf."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.compact.books import Book
from muonfx.compact.noise import uniform

__all__ = ["Codec", "Encoded"]


class Encoded(NamedTuple):
    """What a leaf is stored as."""

    codes: Tensor
    """Of the leaf's shape, in the book's dtype; the leaf itself in fp32, where it is too small to gain."""
    scales: Tensor
    """The largest magnitude of each block, fp32: shape (blocks,), (0,) for a leaf that is kept in fp32."""


@dataclass(frozen=True)
class Codec:
    """How leaves are encoded: what a compact dtype means for values of one kind."""

    book: Book
    block: int
    min_size: int

    def keeps(self, shape: torch.Size) -> bool:
        """True if leaves of a shape are stored in fp32."""
        return prod(shape) < self.min_size

    def zeros(self, param: Tensor) -> Encoded:
        """Encode zeros like a parameter."""
        shape, device = param.shape, param.device
        blocks = 0 if self.keeps(shape) else -(-prod(shape) // self.block)
        dtype = torch.float32 if self.keeps(shape) else self.book.dtype
        return Encoded(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(blocks, device=device))

    def encode(self, values: Tensor, key: Tensor | None = None) -> Encoded:
        """Round a leaf to new codes and scales, through which no derivative goes.

        A block with a NaN or an infinite element has such a scale and is all NaN when it is decoded.

        Args:
            values: of any shape and floating dtype; rounded to fp32 first.
            key: for stochastic rounding, a 0-d int64 tensor; None: to the nearest level.
        """
        x = values.detach().to(torch.float32)
        if self.keeps(x.shape):
            return Encoded(x.clone(memory_format=torch.contiguous_format), x.new_zeros(0))
        rows = _rows(x, self.block)
        scales = rows.abs().amax(dim=-1)
        usable = (scales.isfinite() & (scales > 0)).unsqueeze(-1)
        # Division, not multiplication by the reciprocal: that of a subnormal scale is infinite.
        fractions = torch.where(usable, rows / torch.where(usable, scales.unsqueeze(-1), 1.0), 0.0)
        noise = None if key is None else _rows(uniform(key, x.numel()), self.block)
        return Encoded(_flat(self.book.encode(fractions, usable & (rows > 0), noise), x.shape), scales)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values that codes and scales stand for: a new contiguous fp32 tensor."""
        if self.keeps(codes.shape):
            return codes.clone(memory_format=torch.contiguous_format)
        return _flat(_rows(self.book.fractions(codes), self.block) * scales.unsqueeze(-1), codes.shape)


def _rows(x: Tensor, block: int) -> Tensor:
    """A leaf as a matrix with one block a row, filled up with zeros."""
    flat = x.reshape(-1)
    width = max(1, min(block, flat.shape[0]))
    missing = -flat.shape[0] % width
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).reshape(-1, width)


def _flat(rows: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_rows`, for a leaf of the given shape."""
    flat, number = rows.reshape(-1), prod(shape)
    return (flat if flat.shape[0] == number else flat[:number].clone()).reshape(shape)
