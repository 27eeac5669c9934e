"""Write data files: safetensors files with a checksum of every block.

The format is eight bytes with the length of the header, the header (JSON: name to dtype, shape and byte range), and
the bytes of the tensors without gaps.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.files import fresh_file, write_all
from muonfx.checkpoint.index import BLOCK, LONGEST_HEADER, Chunk, DataFile
from muonfx.sharding.boxes import Box
from muonfx.tree.dtypes import safetensors_name

__all__ = ["Part", "Progress", "blocks_of", "bytes_of", "check_byte_order", "checksum_of", "populate", "write_data"]

Progress = Callable[[int, int], object]
"""Called with the number of bytes written and the total number of bytes."""


class Part(NamedTuple):
    """A box of a leaf to be written; ``tensor`` is called late, so that only one tensor is in memory at a time."""

    name: str
    dtype: torch.dtype
    box: Box
    whole: bool
    tensor: Callable[[], Tensor]

    @property
    def key(self) -> str:
        """Return the name in the data file: the name of the leaf, with the slice appended for a part of the leaf."""
        slices = ",".join(f"{a}:{b}" for a, b in zip(self.box.offsets, self.box.ends, strict=True))
        return self.name if self.whole else f"{self.name}~[{slices}]"

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.box.numel * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor as bytes; the caller must keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Split bytes into blocks of `BLOCK` bytes; the last block may be shorter."""
    return (data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK))


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_MADV_POPULATE_WRITE = 23
_WORTH_IT = 1 << 15


def populate(data: memoryview) -> None:
    """Allocate the pages of a buffer in one system call, which is cheaper than page faults (from Linux 5.14 on)."""
    if _LIBC is not None and len(data) >= _WORTH_IT:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(data))
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + len(data) - first), _MADV_POPULATE_WRITE)


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Return the CRC-32 in the form that an index stores."""
    return f"{zlib.crc32(data):08x}"


class _Checksums(ExitStack):
    """Computes the checksums of full blocks in a thread while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None

    def start(self, block: memoryview) -> Callable[[], str]:
        """Start the checksum of a block, which must not change, and return a function that waits for it."""
        if len(block) < BLOCK:
            value = checksum_of(block)
            return lambda: value
        if self._thread is None:
            # One thread per save, not a global one: threads do not survive a fork.
            self._thread = self.enter_context(ThreadPoolExecutor(1, thread_name_prefix="muonfx-crc32"))
        try:
            return self._thread.submit(checksum_of, block).result
        except RuntimeError:  # at interpreter exit, pools accept no new work while the process waits for this save
            value = checksum_of(block)
            return lambda: value


def check_byte_order() -> None:
    """Require a little-endian machine, since the files are little-endian."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints hold little-endian numbers, and this machine is big-endian")


def write_data(path: Path, parts: Sequence[Part], progress: Progress | None = None) -> tuple[DataFile, list[Chunk]]:
    """Write the parts to a new file, flush it, and return the file and one chunk per part, with file number 0."""
    check_byte_order()
    # Largest element size first, so that each leaf begins at a multiple of its element size.
    order = sorted(range(len(parts)), key=lambda place: (-parts[place].dtype.itemsize, parts[place].key))
    begins: dict[int, int] = {}
    total = 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for place in order:
        part = parts[place]
        begins[place] = total
        total += part.nbytes
        kind = safetensors_name(part.dtype)
        header[part.key] = {
            "dtype": kind or "U8",
            "shape": part.box.sizes if kind else [part.nbytes],
            "data_offsets": [begins[place], total],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    if len(head) > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: the names of {len(parts)} leaves take {len(head)} bytes, and a safetensors file has room for "
            f"{LONGEST_HEADER}: save with group=, so that each rank writes its own"
        )
    chunks: dict[int, Chunk] = {}
    done = 0
    with fresh_file(path) as file, _Checksums() as checksums:
        write_all(file, head)
        for place in order:
            part = parts[place]
            tensor = _dense(part)
            crc32: list[str] = []
            for block in blocks_of(bytes_of(tensor)):
                checksum = checksums.start(block)
                write_all(file, block)
                crc32.append(checksum())
                done += len(block)
                if progress is not None:
                    progress(done, total)
            del tensor  # free it before the next tensor is made
            begin = len(head) + begins[place]
            chunks[place] = Chunk(0, begin, part.box.offsets, part.box.sizes, tuple(crc32))
    described = DataFile(path.name, len(head) + total, len(head), checksum_of(head))
    return described, [chunks[place] for place in range(len(parts))]


def _dense(part: Part) -> Tensor:
    """Return the values of a part as a contiguous CPU tensor, copied only if necessary."""
    tensor = part.tensor().detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tuple(tensor.shape) != part.box.sizes or tensor.dtype != part.dtype:
        raise ValueError(
            f"{part.name!r} is {tuple(tensor.shape)} {tensor.dtype} now, and was {part.box.sizes} {part.dtype} when "
            "the save began: a state must not change while it is saved"
        )
    return tensor
