"""The encoding of one tensor in eight bits: codes in the shape of the tensor, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.compact.books import Book
from muonfx.compact.noise import uniform


class Encoded(NamedTuple):
    """One tensor in eight bits: a code for each element, and an fp32 scale for each block of elements."""

    codes: Tensor
    """8-bit codes in the shape of the tensor; the fp32 values themselves if the tensor is too small to encode."""
    scales: Tensor
    """The largest magnitude of each block of the flattened tensor, fp32; empty if the tensor is not encoded."""


@dataclass(frozen=True)
class Codec:
    """Encodes tensors of at least ``min_size`` elements in eight bits, in blocks with a scale, and decodes them."""

    book: Book
    block: int
    min_size: int

    def keeps(self, shape: torch.Size) -> bool:
        """Return whether tensors of this shape are too small to encode, so that they are stored in fp32."""
        return prod(shape) < self.min_size

    def zeros(self, param: Tensor) -> Encoded:
        """Return a tensor of zeros in eight bits, with the shape and device of a parameter.

        A parameter of 5000 elements in blocks of 2048 has 5000 codes and 3 scales, one for each block.
        """
        dtype = self.book.dtype
        # Rounded up: the last block may have fewer elements.
        blocks = -(-param.numel() // self.block)
        if self.keeps(param.shape):  # too small to encode: fp32 values without scales
            dtype = torch.float32
            blocks = 0
        codes = torch.zeros(param.shape, dtype=dtype, device=param.device)
        scales = torch.zeros(blocks, dtype=torch.float32, device=param.device)
        return Encoded(codes, scales)

    def encode(self, values: Tensor, key: Tensor | None = None) -> Encoded:
        """Encode a tensor in eight bits. A 0-d int64 ``key`` seeds stochastic rounding; None rounds to nearest.

        The scale of a block is its largest magnitude. A signed linear code is an element, divided by the scale of its
        block, times 127.

        >>> from muonfx.compact.books import grid
        >>> codec = Codec(grid(signed=True), block=2, min_size=0)
        >>> codec.encode(torch.tensor([10.0, -5.0, 0.3, 0.1]))
        Encoded(codes=tensor([127, -64, 127,  42], dtype=torch.int8), scales=tensor([10.0000,  0.3000]))
        """
        x = values.detach().to(torch.float32)
        if self.keeps(x.shape):  # too small to encode
            return Encoded(x.clone(memory_format=torch.contiguous_format), x.new_zeros(0))
        # One block in each row, with its largest magnitude as scale.
        rows = _rows(x, self.block)
        scales = rows.abs().amax(dim=-1)
        # A block of zeros has codes of zero. So has a block with NaN or infinity, which keeps that scale and decodes to
        # NaN.
        is_usable = (scales.isfinite() & (scales > 0)).unsqueeze(-1)
        divisors = torch.where(is_usable, scales.unsqueeze(-1), 1.0)
        # Divide: the reciprocal of a subnormal scale is infinite.
        fractions = torch.where(is_usable, rows / divisors, 0.0)
        noise = None
        if key is not None:
            noise = _rows(uniform(key, x.numel()), self.block)
        is_positive = is_usable & (rows > 0)
        codes = self.book.encode(fractions, is_positive, noise)
        return Encoded(_flat(codes, x.shape), scales)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Decode 8-bit codes and the scales of their blocks to a new contiguous fp32 tensor."""
        if self.keeps(codes.shape):
            return codes.clone(memory_format=torch.contiguous_format)
        fractions = _rows(self.book.fractions(codes), self.block)
        return _flat(fractions * scales.unsqueeze(-1), codes.shape)


def _rows(x: Tensor, block: int) -> Tensor:
    """Return the elements of a tensor as a matrix with one block in each row, padded with zeros."""
    flat = x.reshape(-1)
    width = max(1, min(block, flat.shape[0]))  # a tensor of less than one block is one row
    missing = -flat.shape[0] % width  # up to the next multiple: 3 for 5 elements in rows of 4
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.reshape(-1, width)


def _flat(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the elements of a matrix from `_rows` as a tensor of the given shape, without the padding."""
    flat = rows.reshape(-1)
    number = prod(shape)
    if flat.shape[0] != number:
        flat = flat[:number].clone()
    return flat.reshape(shape)
