"""Random numbers as a pure function of a key and an index, without a generator or hidden state.

The numbers are hashes of counters, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with a
32-bit mixer from Wellons' hash-prospector. Its multipliers are below 2**31, so no int64 product overflows, and every
device, compiler and ``torch.func`` transform computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit numbers in an int64 tensor to 32-bit numbers; different numbers have different hashes."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


_GOLDEN_RATIO = 0x9E3779B9  # 2**32 divided by it; any constant would make another hash of the key
_SALT = 0x5BD1E995  # the same, of any bits


def uniform(key: Tensor, number: int) -> Tensor:
    """Return a vector of ``number`` pseudo-random fp32 values in [0, 1), which depend on the key only.

    Each value is a hash of the key and of the position in the vector, as in Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3" (SC 2011). A ``torch.Generator`` would give other values on another type of device. The key is a
    nonnegative 0-d int64 tensor. The values are multiples of 2**-24.

    >>> uniform(torch.tensor(7), 3)
    tensor([0.6662, 0.0168, 0.4237])
    """
    low_bits = key & _MASK  # 32 of the 64 bits
    high_bits = key >> 32
    key_hash = _mix(_mix(low_bits) ^ high_bits)  # depends on all bits of the key
    position = torch.arange(number, dtype=torch.int64, device=key.device)
    # The first round hashes key_hash + position. These sums of two keys may overlap, and the vectors would then have
    # equal parts. The second round, with two more hashes of the key, makes them differ.
    first_round = _mix((position + key_hash) & _MASK) ^ (position >> 32)
    other_hash = _mix((key_hash + _GOLDEN_RATIO) & _MASK) ^ _mix(high_bits ^ _SALT)
    second_round = _mix(first_round ^ other_hash)
    # The upper 24 of 32 bits, which fp32 can hold.
    return (second_round >> 8).to(torch.float32) * 2.0**-24


def key_of(text: str) -> int:
    """Return a 62-bit FNV-1a hash of a text. It is the same in every process, and torch.compile can trace it."""
    hash_value = 0xCBF29CE484222325
    for character in text:
        hash_value = ((hash_value ^ ord(character)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return (hash_value ^ (hash_value >> 29)) & (2**62 - 1)


def keys_of(prefix: str, names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return a list with a seed for each leaf, from a hash of ``prefix`` and its name, as a 0-d int64 tensor."""
    keys: list[Tensor] = []
    for name, leaf in zip(names, leaves, strict=True):
        keys.append(
            torch.full((), key_of(f"{prefix}/{name}"), dtype=torch.int64, device=leaf.device)
        )
    return keys
