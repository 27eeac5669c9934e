"""Checksums of tensors' bits, by which ranks find out whether their copies are the same without sending them.

The checksum of words `u_0, u_1, ...` of 32 bits is `sum_j w_j u_j` modulo 2^64, with a pseudo-random odd weight for
each place: so the order of elements counts, one pass suffices, and two given tensors that differ have the same checksum
with a probability of about 2^-32. It compares bits: 0.0 and -0.0 differ, and so do two NaNs with other payloads.

Sums are linear, and that makes the comparison cheap: of n copies with checksums `d_0, d_1, ...` the sum
`sum_i k_i d_i`, with pseudo-random `k_1, k_2, ...` and `k_0 = -(k_1 + k_2 + ...)`, is zero where all are the same. Such
sums can be added over all pieces of all parameters: the ranks add up one number.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from muonfx.sharding.messages import octets

__all__ = ["checksum", "scattered", "vanishing"]

ROW = 1 << 16
"""Words that share one table of weights; each row of them has a weight of its own besides."""
BLOCK = 1 << 22
"""Bytes that are looked at in one go: what is copied beside a tensor is twice that."""


def scattered(number: int) -> int:
    """A pseudo-random odd number, signed and of 64 bits, for each number from 0 on (splitmix64).

    >>> scattered(0), scattered(1)
    (-2152535657050944081, 7960286522194355701)
    """
    z = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return _signed(z ^ z >> 31 | 1)


def _signed(number: int) -> int:
    """A number modulo 2^64, as int64 has it."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - (1 << 64) if number >> 63 else number


@functools.lru_cache(maxsize=64)
def vanishing(count: int) -> tuple[int, ...]:
    """Pseudo-random factors, one for each of some copies, whose sum is zero modulo 2^64.

    >>> sum(vanishing(5)) % 2**64
    0
    """
    others = [scattered(place) for place in range(1, count)]
    return (_signed(-sum(others)), *others)


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """`scattered` of the first numbers."""
    z = torch.arange(1, ROW + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    # int64 shifts keep the sign: mask it away.
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & (1 << 33) - 1) | 1


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """The checksum of a tensor's elements in order, whatever its strides: a 0-d int64 tensor on its device.

    >>> a = torch.tensor([1.0, 2.0])
    >>> int(checksum(a)) == int(checksum(a.clone())), int(checksum(a)) == int(checksum(a.flip(0)))
    (True, False)
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    each = BLOCK // flat.element_size()
    for number, block in enumerate(flat.split(each)):
        if block.numel():
            total += _of_block(octets(block), number * (BLOCK // 4 // ROW))
    return total


def _of_block(block: Tensor, first_row: int) -> Tensor:
    """The checksum of a block's bytes."""
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
