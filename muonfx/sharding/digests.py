"""Short numbers for ranks to compare in place of values and tensors: hashes of values, checksums of tensors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

K = TypeVar("K", bound=Hashable)


def digest(value: object) -> str:
    """Hash the ``repr`` of a value to 32 hex digits. Ranks compare these instead of the value."""
    text = repr(value)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def octets(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a 1-d uint8 tensor. It is a view if the tensor is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # `is_contiguous` ignores the stride of a single element; a view of another dtype requires it to be 1.
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


WORDS = 1 << 20
"""The number of 32-bit words in a pass of `checksum`. All passes use one table of weights; each has its own factor."""

_WORD_BYTES = 4


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return the int64 weights of `checksum`: pseudo-random odd numbers, one for each 32-bit word of a pass."""
    generator = torch.Generator().manual_seed(0)  # the same numbers on all ranks
    limits = torch.iinfo(torch.int64)
    numbers = torch.randint(
        limits.min, limits.max, (WORDS,), generator=generator, dtype=torch.int64, device="cpu"
    )
    return (numbers | 1).to(device)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits as a 0-d int64 tensor on the same device. Strides do not change it.

    It is a sum of products: the words of 32 bits ``w0, w1, ...`` give ``w0 * a0 + w1 * a1 + ...`` with pseudo-random
    weights. Unlike a plain sum, it changes if elements are exchanged. Unlike hashlib, it runs on the device.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)
    flat = tensor.detach().reshape(-1)
    # Blocks of `WORDS` words share one table of weights, and each block is multiplied by a weight of its own.
    block_size = _WORD_BYTES * WORDS // flat.element_size()
    for number, block in enumerate(flat.split(block_size)):
        words = _words(block)
        # Products and sums of int64 numbers wrap around, so they are computed modulo 2^64, in any order.
        sum_of_block = words.mul_(weights[: words.numel()]).sum()
        total += sum_of_block * weights[number]
    return total


def _words(block: Tensor) -> Tensor:
    """Return the bits of a 1-d tensor as a new int64 tensor of 32-bit words. The last is filled with zeros if needed.

    >>> _words(
    ...     torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    ... )  # 1 + 2 * 256 + 3 * 256**2 + 4 * 256**3, and 5
    tensor([67305985,        5])
    """
    data = octets(block)
    # A view as int32 needs whole words, aligned in memory. Otherwise the bytes are copied, with zeros at the end.
    missing_bytes = -data.numel() % _WORD_BYTES  # up to the next multiple of 4: three for 5 bytes
    is_misaligned = bool(data.storage_offset() % _WORD_BYTES)
    if missing_bytes or is_misaligned:
        data = torch.cat([data, data.new_zeros(missing_bytes)])
    return data.view(torch.int32).to(torch.int64)


def checksums(tensors: Mapping[K, object]) -> dict[K, int]:
    """Return the checksum of each tensor, and 0 for a leaf without values: None, on the meta device, or fake.

    Equal tensors on two ranks have equal checksums, so ranks compare these numbers instead of values. This function
    waits once for each device, not once for each tensor.
    """
    checksum_of = dict.fromkeys(tensors, 0)
    # 1. Start to compute all checksums.
    sums_on: dict[torch.device, dict[K, Tensor]] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            sums_on.setdefault(tensor.device, {})[key] = checksum(tensor)
    # 2. Read the tensors of one device together.
    for sum_of in sums_on.values():
        sums = torch.stack(list(sum_of.values()))
        checksum_of.update(zip(sum_of, sums.tolist(), strict=True))
    return checksum_of
