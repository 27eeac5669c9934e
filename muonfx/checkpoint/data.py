"""Data files are safetensors, written leaf by leaf, with a checksum of every block.

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
"""Called with the bytes that are done and those of all."""


class Part(NamedTuple):
    """A box of a leaf to be written: the tensor is asked for when its turn comes, so that one is held at a time."""

    name: str
    dtype: torch.dtype
    box: Box
    whole: bool
    tensor: Callable[[], Tensor]

    @property
    def key(self) -> str:
        """Its name in the data file: the leaf's, and for a part of a leaf the slice, which no name contains."""
        slices = ",".join(f"{a}:{b}" for a, b in zip(self.box.offsets, self.box.ends, strict=True))
        return self.name if self.whole else f"{self.name}~[{slices}]"

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.box.numel * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor in host memory as bytes; the tensor must be kept alive by the caller."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Cut bytes into blocks, the last of which may be shorter."""
    return (data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK))


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_MADV_POPULATE_WRITE = 23
_WORTH_IT = 1 << 15


def populate(data: memoryview) -> None:
    """Have the system put memory behind bytes that are about to be written: at once is cheaper than page by page.

    A hint that changes no value. Where the system does not know it (before Linux 5.14, and others) nothing happens.
    """
    if _LIBC is not None and len(data) >= _WORTH_IT:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(data))
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + len(data) - first), _MADV_POPULATE_WRITE)


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """The CRC-32, as it stands in an index."""
    return f"{zlib.crc32(data):08x}"


class _Checksums(ExitStack):
    """Computes checksums beside the writing: those of whole blocks in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None

    def start(self, block: memoryview) -> Callable[[], str]:
        """Begin with a block, which must stay as it is; what is returned waits for the checksum."""
        if len(block) < BLOCK:
            value = checksum_of(block)
            return lambda: value
        if self._thread is None:
            # Of this save alone: a thread does not survive a fork.
            self._thread = self.enter_context(ThreadPoolExecutor(1, thread_name_prefix="muonfx-crc32"))
        try:
            return self._thread.submit(checksum_of, block).result
        except RuntimeError:  # the process ends, and waits for this save, but its pools take nothing new
            value = checksum_of(block)
            return lambda: value


def check_byte_order() -> None:
    """Require a little-endian machine, as the files are.

    Raises:
        CheckpointError: it is not one.
    """
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints hold little-endian numbers, and this machine is big-endian")


def write_data(path: Path, parts: Sequence[Part], progress: Progress | None = None) -> tuple[DataFile, list[Chunk]]:
    """Write a new data file and flush it to the disk.

    Args:
        path: must not exist.
        parts: what to write, in any order.
        progress: called after each block.

    Returns:
        The file, and a chunk for each part; they take their file to be the first.

    Raises:
        OSError: the disk is full, say. Nothing is left behind.
        CheckpointError: there are more leaves than a file can name.
    """
    check_byte_order()
    # Wide elements first, so that each leaf begins at a multiple of its element's size.
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
            del tensor  # not beside the next
            begin = len(head) + begins[place]
            chunks[place] = Chunk(0, begin, part.box.offsets, part.box.sizes, tuple(crc32))
    described = DataFile(path.name, len(head) + total, len(head), checksum_of(head))
    return described, [chunks[place] for place in range(len(parts))]


def _dense(part: Part) -> Tensor:
    """The part's values, row by row in host memory; a copy only where they are not already."""
    tensor = part.tensor().detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tuple(tensor.shape) != part.box.sizes or tensor.dtype != part.dtype:
        raise ValueError(
            f"{part.name!r} is {tuple(tensor.shape)} {tensor.dtype} now, and was {part.box.sizes} {part.dtype} when "
            "the save began: a state must not change while it is saved"
        )
    return tensor
