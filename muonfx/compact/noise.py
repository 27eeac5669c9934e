"""Noise as a pure function of a key and a place, in plain tensor arithmetic: no generator, and nothing remembered.

A hash of counters, in the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with a
32-bit mixer from Wellons' hash-prospector whose multipliers are below 2**31: no product of int64 overflows, so every
device, compiler and ``torch.func`` transform computes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["key_of", "normal", "uniform"]

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit numbers, held in int64, to 32-bit numbers, one to one."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def uniform(key: Tensor, number: int) -> Tensor:
    """Numbers in [0, 1), multiples of 2**-24: the first of the stream that belongs to a key.

    Args:
        key: a 0-d int64 tensor, not negative.
        number: how many.

    Returns:
        An fp32 vector.

    >>> key = torch.tensor(7)
    >>> bool((uniform(key, 4) == uniform(key, 9)[:4]).all()), bool((uniform(key, 4) == uniform(key + 1, 4)).any())
    (True, False)
    """
    low, high = key & _MASK, key >> 32
    start = _mix(_mix(low) ^ high)
    place = torch.arange(number, dtype=torch.int64, device=key.device)
    # Windows of two keys may overlap in the first round; the second makes them differ.
    first = _mix((place + start) & _MASK) ^ (place >> 32)
    second = _mix(first ^ _mix((start + 0x9E3779B9) & _MASK) ^ _mix(high ^ 0x5BD1E995))
    return (second >> 8).to(torch.float32) * 2.0**-24


def normal(key: Tensor, number: int) -> Tensor:
    """Numbers of the normal distribution, one for each of `uniform`: at most 5.5 in magnitude.

    >>> x = normal(torch.tensor(7), 100_000)
    >>> bool(x.mean().abs() < 0.01), bool((x.square().mean() - 1).abs() < 0.02)
    (True, True)
    """
    centered = 2.0 * uniform(key, number) - 1.0 + 2.0**-24  # exact in fp32, and never -1, 0 or 1
    return torch.erfinv(centered) * 2.0**0.5


def key_of(text: str) -> int:
    """A key for a name, the same in every process: 62 bits of an FNV-1a hash, in Python that can be traced.

    >>> key_of("w") != key_of("v")
    True
    """
    found = 0xCBF29CE484222325
    for character in text:
        found = ((found ^ ord(character)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return (found ^ (found >> 29)) & (2**62 - 1)
