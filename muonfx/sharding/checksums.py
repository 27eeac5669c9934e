"""Checksums of the bits of tensors, with which ranks compare replicas without sending them.

The checksum of 32-bit words `u_0, u_1, ...` is `sum_j w_j u_j` modulo 2^64, with a pseudo-random odd weight for each
index. The order of elements counts, one pass suffices, and two given tensors that differ have the same checksum with a
probability of about 2^-32. Bits are compared: 0.0 and -0.0 differ, and so do two NaNs with different payloads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from muonfx.sharding.messages import octets

__all__ = ["checksum", "scattered"]

ROW = 1 << 16
"""Words that share one table of weights; each row of them has one further weight."""
BLOCK = 1 << 22
"""Bytes per pass; the temporary copies of a pass take twice as many."""


def scattered(number: int) -> int:
    """Return a pseudo-random odd int64 for each nonnegative integer (splitmix64)."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return _signed(z ^ z >> 31 | 1)


def _signed(number: int) -> int:
    """Wrap an integer modulo 2^64 to int64."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - (1 << 64) if number >> 63 else number


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return `scattered` of 0 to ROW - 1 as a tensor."""
    z = torch.arange(1, ROW + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    # int64 shifts keep the sign: mask it away.
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & (1 << 33) - 1) | 1


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of the elements in order, whatever the strides, as a 0-d int64 tensor on their device."""
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    each = BLOCK // flat.element_size()
    for number, block in enumerate(flat.split(each)):
        if block.numel():
            total += _of_block(octets(block), number * (BLOCK // 4 // ROW))
    return total


def _of_block(block: Tensor, first_row: int) -> Tensor:
    """Return the checksum of one block of bytes."""
    weights = _weights(block.device)
    if block.numel() % 4:
        block = torch.cat([block, block.new_zeros(-block.numel() % 4)])
    if block.data_ptr() % 4:
        block = block.clone()
    words = block.view(torch.int32)
    full = words.numel() // ROW
    sums = [(words[: full * ROW].view(full, ROW).to(torch.int64).mul_(weights)).sum(1)] if full else []
    if rest := words.numel() % ROW:
        sums.append((words[full * ROW :].to(torch.int64).mul_(weights[:rest])).sum().reshape(1))
    factors = [scattered(first_row + row) for row in range(full + (rest > 0))]
    return (torch.cat(sums) * torch.tensor(factors, dtype=torch.int64, device=block.device)).sum()
