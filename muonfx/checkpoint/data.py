"""Write and read data files: safetensors files with a checksum of every block.

The format is eight bytes with the length of the header, the header (JSON: name to dtype, shape and byte range), and
the bytes of the tensors without gaps. The files are read with plain reads. With a memory map, truncation of a file in
use would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from io import FileIO
from itertools import groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.checkpoint.errors import CheckpointError, CorruptError
from muonfx.checkpoint.files import fresh_file, open_regular
from muonfx.checkpoint.index import BLOCK, LONGEST_HEADER, Chunk, DataFile, Index, Leaf
from muonfx.sharding.boxes import Box
from muonfx.tree.dtypes import SAFETENSORS_NAMES

__all__ = ["Part", "Reader", "bytes_of", "write_data"]


crc32_of: Callable[[Any], int] = zlib.crc32
with suppress(ImportError):  # isal has the same values, in about a tenth of the time
    crc32_of = import_module("isal.isal_zlib").crc32


class Part(NamedTuple):
    """One entry of a data file: a box (rectangular part) of a tensor, with its dtype and its key."""

    key: str
    """Unique name of the box in the data file."""
    dtype: torch.dtype
    box: Box


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor as bytes, not copied; the caller must keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Return the CRC-32 checksum of some bytes as text: eight hex digits."""
    return f"{crc32_of(data):08x}"


def check_byte_order() -> None:
    """Raise on a big-endian machine, because the files of checkpoints are little-endian."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints store little-endian numbers, and this machine is big-endian")


def write_data(path: Path, parts: Sequence[Part], values: Callable[[str], Tensor]) -> tuple[DataFile, dict[str, Chunk]]:
    """Write boxes of tensors to a new safetensors file, and flush the file to the disk.

    ``values(key)`` returns the tensor of the box with this key; it is called immediately before the tensor is written.
    The result is the name and size of the file, and a dict from key to the position of the box in the file.
    """
    check_byte_order()
    # Largest element size first, so that each leaf begins at a multiple of its element size.
    order = sorted(parts, key=lambda part: (-part.dtype.itemsize, part.key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in order:
        begin, end = end, end + prod(part.box.sizes) * part.dtype.itemsize
        kind = SAFETENSORS_NAMES.get(part.dtype)
        shape = part.box.sizes if kind else (end - begin,)
        header[part.key] = {"dtype": kind or "U8", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    if len(head) > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: the names of {len(parts)} leaves take {len(head)} bytes, more than the header "
            f"of a safetensors file may have ({LONGEST_HEADER}): save with group=, so that each rank writes its own"
        )
    chunks: dict[str, Chunk] = {}
    with fresh_file(path) as file:
        file.write(head)
        begin = len(head)
        for part in order:
            tensor = values(part.key).detach().resolve_conj().resolve_neg().cpu().contiguous()
            crc32: list[str] = []
            data = bytes_of(tensor)
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                file.write(block)
                crc32.append(checksum_of(block))
            chunks[part.key] = Chunk(0, begin, part.box, tuple(crc32))
            begin += len(data)
            del tensor  # free it before the next tensor is made
    return DataFile(path.name, begin, len(head), checksum_of(head)), chunks


_MOST_OPEN = 64


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Convert an OSError in the ``with`` block to a `CorruptError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CorruptError(f"{path}: the data file cannot be read: {error.strerror}") from error


def _fill(file: FileIO, at: int, into: memoryview) -> None:
    """Fill ``into`` with the bytes of a file from position ``at``. It is safe to call this in several threads."""
    while into:
        if hasattr(os, "preadv"):
            got = os.preadv(file.fileno(), [into], at)
        else:
            file.seek(at)
            got = file.readinto(into) or 0
        if not got:
            raise OSError(errno.EIO, "it ends too early")
        at, into = at + got, into[got:]


class _Block(NamedTuple):
    """A block of at most 4 MiB of a data file: its position, checksum, destination, and the name of its tensor."""

    file: int
    begin: int
    into: memoryview
    crc32: str
    name: str


def _blocks(name: str, chunk: Chunk, into: memoryview, first: int = 0) -> list[_Block]:
    return [
        _Block(chunk.file, chunk.begin + place * BLOCK, into[at : at + BLOCK], chunk.crc32[place], name)
        for place, at in enumerate(range(0, len(into), BLOCK), first)
    ]


class Reader:
    """Reads tensors from the data files of a checkpoint, and verifies the checksum of all bytes that it reads."""

    def __init__(self, folder: Path, index: Index) -> None:
        check_byte_order()
        self.folder, self.index = folder, index
        self._files: dict[int, tuple[FileIO, ExitStack]] = {}
        # One pool per reader, not a global one: threads do not survive a fork.
        threads = torch.get_num_threads() if hasattr(os, "preadv") else 1
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="muonfx-read")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(CheckpointError) if kind is not None else nullcontext():
            self.close()

    def close(self) -> None:
        """Close all data files; raise `CorruptError` if the operating system reports an error."""
        self._pool.shutdown()
        with ExitStack() as stack:
            for _, closing in self._files.values():
                stack.callback(closing.close)
            self._files = {}

    def check_files(self, numbers: Iterable[int] | None = None) -> Reader:
        """Open data files by number, or all of them, and check their sizes and headers; return the reader itself."""
        for number in range(len(self.index.files)) if numbers is None else sorted(numbers):
            self._file(number)
        return self

    def _file(self, number: int) -> FileIO:
        """Return the data file with this number in the index, open; check its size and header when it is opened."""
        if number not in self._files:
            # The number of open files is limited, and each rank has written one file; no read is in progress.
            if len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files)))[1].close()
            described = self.index.files[number]
            path = self.folder / described.name
            with ExitStack() as stack:
                stack.enter_context(_reading(path))
                file = stack.enter_context(open_regular(path))
                if (found := file.seek(0, os.SEEK_END)) != described.nbytes:
                    raise CorruptError(f"{path}: the data file has {found} bytes, expected {described.nbytes}")
                head = bytearray(described.header_nbytes)
                _fill(file, 0, memoryview(head))
                if checksum_of(head) != described.header_crc32:
                    raise CorruptError(f"{path}: the header of the data file is damaged")
                self._files[number] = file, stack.pop_all()
        return self._files[number][0]

    def _read_blocks(self, blocks: list[_Block]) -> None:
        """Read blocks of at most 4 MiB and verify their checksums; blocks of one file are read in parallel."""
        blocks.sort(key=attrgetter("file", "begin"))
        for number, of_file in groupby(blocks, attrgetter("file")):
            file, path = self._file(number), self.folder / self.index.files[number].name
            parts: list[list[_Block]] = []  # small leaves share a part: a task costs more than the read
            left = 0
            for block in of_file:
                if left < len(block.into):
                    parts.append([])
                    left = BLOCK
                parts[-1].append(block)
                left -= len(block.into)
            reads = [self._pool.submit(self._read_part, path, file, part) for part in parts]
            try:
                for read in reads:
                    read.result()
            finally:
                for read in reads:
                    read.cancel()
                wait(reads)  # the memory must not be freed while a thread writes to it

    def _read_part(self, path: Path, file: FileIO, part: list[_Block]) -> None:
        with _reading(path):
            for _, begin, into, crc32, name in part:
                _fill(file, begin, into)
                if checksum_of(into) != crc32:
                    where = f"bytes {begin} to {begin + len(into)} of the file"
                    raise CorruptError(f"{path}: the leaf {name!r} is damaged in {where}")

    def read_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Read whole tensors into the tensors of ``destinations``, a dict by leaf name; convert dtypes and devices."""
        blocks: list[_Block] = []
        for name, out in destinations.items():
            leaf = self.index.leaves[name]
            for chunk in leaf.chunks:
                part = out[tuple(map(slice, chunk.box.offsets, chunk.box.ends))] if len(leaf.chunks) > 1 else out
                if _takes_bytes(part, leaf):
                    blocks += _blocks(name, chunk, bytes_of(part))
                else:
                    self.read_box(name, leaf, chunk, Box((0,) * out.ndim, chunk.box.sizes), part)
        self._read_blocks(blocks)

    def read_box(self, name: str, leaf: Leaf, chunk: Chunk, box: Box, out: Tensor) -> None:
        """Read a part of a tensor into ``out``, which has its shape; read only the blocks that contain the part.

        ``chunk`` is a stored box of the tensor ``name``. ``box`` is the part, with offsets relative to the stored box.
        """
        if not box.numel:
            return
        if box.sizes == chunk.box.sizes and _takes_bytes(out, leaf):
            self._read_blocks(_blocks(name, chunk, bytes_of(out)))
            return
        dtype = leaf.spec.dtype
        strides = [prod(chunk.box.sizes[dim + 1 :]) for dim in range(len(chunk.box.sizes))]
        start = sum(map(int.__mul__, box.offsets, strides))
        stop = sum(stride * (end - 1) for stride, end in zip(strides, box.ends, strict=True)) + 1
        first = start * dtype.itemsize // BLOCK
        nbytes = prod(chunk.box.sizes) * dtype.itemsize
        end = min(nbytes, -(-stop * dtype.itemsize // BLOCK) * BLOCK)
        held = torch.empty((end - first * BLOCK) // dtype.itemsize, dtype=dtype)
        self._read_blocks(_blocks(name, chunk, bytes_of(held), first))
        out.copy_(held.as_strided(box.sizes, strides, start - first * BLOCK // dtype.itemsize))

    def verify(self) -> Index:
        """Read every byte of the checkpoint, verify all checksums, and return the index."""
        self.check_files()
        for name, leaf in self.index.leaves.items():
            for chunk in leaf.chunks:
                held = torch.empty(prod(chunk.box.sizes) * leaf.spec.dtype.itemsize, dtype=torch.uint8)
                self._read_blocks(_blocks(name, chunk, bytes_of(held)))
        return self.index


def _takes_bytes(out: Tensor, leaf: Leaf) -> bool:
    """Return whether the stored bytes of a tensor can be read directly into ``out``, without a conversion."""
    return out.dtype == leaf.spec.dtype and out.device.type == "cpu" and out.is_contiguous()
