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
from muonfx.checkpoint.shards import shards_of
from muonfx.sharding.shards.boxes import Box, intersection
from muonfx.tree.dtypes import SAFETENSORS_NAMES

crc32_of: Callable[[Any], int] = zlib.crc32
with suppress(ImportError):  # isal has the same values, in about a tenth of the time
    crc32_of = import_module("isal.isal_zlib").crc32


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor as bytes, not copied; the caller must keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def with_plain_bits(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its values. A view of a complex tensor may be conjugated when it is read."""
    return tensor.resolve_conj().resolve_neg()


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Return the CRC-32 checksum of some bytes as text: eight hex digits."""
    return f"{crc32_of(data):08x}"


def check_byte_order() -> None:
    """Raise on a big-endian machine, because the files of checkpoints are little-endian."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints store little-endian numbers, and this machine is big-endian")


# ------------------------------------------------------------------------------------------------------------- writing


class Entry(NamedTuple):
    """One entry of a data file: a box (rectangular part) of a leaf, and its values."""

    key: str
    """Unique name of the entry in the data file: "trace/w" for a whole leaf, "trace/w~[0:4,0:8]" for a part."""
    name: str
    """The name of the leaf."""
    box: Box
    values: Tensor
    """A tensor with the sizes of the box, on any device."""


def write_data(path: Path, number: int, entries: Sequence[Entry]) -> tuple[DataFile, list[tuple[str, Chunk]]]:
    """Write boxes of tensors to a new safetensors file, and flush the file to the disk.

    Each tensor is copied to the CPU immediately before it is written. The result is the name and size of the file, and
    a list with the name of the leaf and the position of the box for each entry. In these positions, ``number`` is the
    number of the file in the index.
    """
    check_byte_order()
    # Largest element size first, so that each leaf begins at a multiple of its element size.
    ordered = sorted(entries, key=lambda entry: (-entry.values.itemsize, entry.key))
    header = _header_of(ordered)
    if len(header) > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: the names of {len(entries)} leaves take {len(header)} bytes, more than the header "
            f"of a safetensors file may have ({LONGEST_HEADER}): save with group=, so that each rank writes its own"
        )
    chunks: list[tuple[str, Chunk]] = []
    with fresh_file(path) as file:
        file.write(header)
        begin = len(header)
        for entry in ordered:
            tensor = with_plain_bits(entry.values).cpu().contiguous()
            data = bytes_of(tensor)
            checksums: list[str] = []
            for offset in range(0, len(data), BLOCK):
                block = data[offset : offset + BLOCK]
                file.write(block)
                checksums.append(checksum_of(block))
            chunks.append((entry.name, Chunk(number, begin, entry.box, tuple(checksums))))
            begin += len(data)
            del tensor  # free it before the next tensor is made
    return DataFile(path.name, begin, len(header), checksum_of(header)), chunks


def _header_of(entries: Sequence[Entry]) -> bytes:
    """Return the first bytes of a safetensors file with these entries: the length of the header, and the header."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        nbytes = entry.values.nbytes
        begin = end
        end += nbytes
        dtype_name = SAFETENSORS_NAMES.get(entry.values.dtype)
        shape = entry.box.sizes
        if dtype_name is None:  # safetensors has no name for it, and stores its bytes
            dtype_name = "U8"
            shape = (nbytes,)
        described[entry.key] = {"dtype": dtype_name, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------------------------------------------------- reading

_MOST_OPEN = 64
"""Data files that a reader holds open. The system limits their number, and each rank has written one file."""


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Convert an OSError in the ``with`` block to a `CorruptError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CorruptError(f"{path}: the data file cannot be read: {error.strerror}") from error


def _fill(file: FileIO, begin: int, destination: memoryview) -> None:
    """Fill memory with the bytes of a file from position ``begin``. It is safe to call this in several threads."""
    while destination:
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [destination], begin)
        else:
            file.seek(begin)
            count = file.readinto(destination) or 0
        if not count:
            raise OSError(errno.EIO, "it ends too early")
        begin += count
        destination = destination[count:]


class _Block(NamedTuple):
    """A block of at most 4 MiB of a data file: its position, checksum, destination, and the name of its leaf."""

    file: int
    begin: int
    destination: memoryview
    crc32: str
    name: str


def _blocks(name: str, chunk: Chunk, destination: memoryview, first: int = 0) -> list[_Block]:
    """Divide the bytes of a chunk from block number ``first``, as many as ``destination`` has, into blocks."""
    blocks: list[_Block] = []
    for number, offset in enumerate(range(0, len(destination), BLOCK), first):
        block_bytes = destination[offset : offset + BLOCK]
        blocks.append(_Block(chunk.file, chunk.begin + number * BLOCK, block_bytes, chunk.crc32[number], name))
    return blocks


class Transfer(NamedTuple):
    """A box of a leaf to copy from one chunk of the checkpoint to the memory of a tensor."""

    name: str
    chunk: Chunk
    box: Box
    """The box in the coordinates of the leaf; it is within the box of the chunk."""
    destination: Tensor
    """A tensor with the sizes of the box."""


def transfers_of(name: str, stored: Leaf, leaf: Any) -> list[Transfer]:
    """Return the copies that fill the shards of ``leaf`` on this rank from the chunks of a ``stored`` leaf."""
    transfers: list[Transfer] = []
    for box, values in shards_of(leaf).items():
        for chunk in stored.chunks:
            if chunk.box == box:
                overlap = box
                destination = values
            else:
                overlap = intersection(box, chunk.box)
                if overlap is None:
                    continue
                offsets = map(int.__sub__, overlap.offsets, box.offsets)
                destination = Box(tuple(offsets), overlap.sizes).of(values)
            if overlap.numel:
                transfers.append(Transfer(name, chunk, overlap, destination))
    return transfers


class Reader:
    """Reads tensors from the data files of a checkpoint, and verifies the checksum of all bytes that it reads."""

    def __init__(self, folder: Path, index: Index) -> None:
        check_byte_order()
        self.folder = folder
        self.index = index
        self._files: dict[int, tuple[FileIO, ExitStack]] = {}
        """The open data files by their number in the index, each with the stack that closes it."""
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
        if numbers is None:
            numbers = range(len(self.index.files))
        for number in sorted(numbers):
            self._file(number)
        return self

    def _file(self, number: int) -> FileIO:
        """Return the data file with this number in the index, open; check its size and header when it is opened."""
        if number not in self._files:
            if len(self._files) >= _MOST_OPEN:  # no read of another file is in progress
                self._files.pop(next(iter(self._files)))[1].close()
            self._files[number] = self._open(self.index.files[number])
        return self._files[number][0]

    def _open(self, described: DataFile) -> tuple[FileIO, ExitStack]:
        """Open a data file, and check its size and header; return it with a stack that closes it."""
        path = self.folder / described.name
        with ExitStack() as stack:
            stack.enter_context(_reading(path))
            file = stack.enter_context(open_regular(path))
            nbytes = file.seek(0, os.SEEK_END)
            if nbytes != described.nbytes:
                raise CorruptError(f"{path}: the data file has {nbytes} bytes, expected {described.nbytes}")
            header = bytearray(described.header_nbytes)
            _fill(file, 0, memoryview(header))
            if checksum_of(header) != described.header_crc32:
                raise CorruptError(f"{path}: the header of the data file is damaged")
            return file, stack.pop_all()

    def transfers_to(self, destinations: Mapping[str, Any]) -> list[Transfer]:
        """Return the copies that fill ``destinations``, a dict from leaf name to a tensor or this rank's shards."""
        transfers: list[Transfer] = []
        for name, leaf in destinations.items():
            transfers += transfers_of(name, self.index.leaves[name], leaf)
        return transfers

    def read(self, transfers: Iterable[Transfer]) -> None:
        """Copy boxes of leaves to memory; convert dtypes, and copy to other devices.

        A whole chunk is read in place if the tensor has its dtype and order.
        """
        blocks: list[_Block] = []
        for transfer in transfers:
            name, chunk, box, destination = transfer
            dtype = self.index.leaves[name].spec.dtype
            if box == chunk.box and _takes_bytes(destination, dtype):
                blocks += _blocks(name, chunk, bytes_of(destination))
            else:
                self._read_and_convert(transfer, dtype)
        self._read_blocks(blocks)

    def _read_and_convert(self, transfer: Transfer, dtype: torch.dtype) -> None:
        """Read the blocks of a chunk that contain a box into a buffer, and copy the box from there."""
        name, chunk, box, destination = transfer
        sizes = chunk.box.sizes
        strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        first_element = 0
        last_element = 0
        for dim, stride in enumerate(strides):
            first_element += stride * (box.offsets[dim] - chunk.box.offsets[dim])
            last_element += stride * (box.ends[dim] - 1 - chunk.box.offsets[dim])
        first_block = first_element * dtype.itemsize // BLOCK
        end_block = last_element * dtype.itemsize // BLOCK + 1
        chunk_nbytes = chunk.box.numel * dtype.itemsize
        buffer_begin = first_block * BLOCK
        buffer_end = min(chunk_nbytes, end_block * BLOCK)
        buffer = torch.empty((buffer_end - buffer_begin) // dtype.itemsize, dtype=dtype)
        self._read_blocks(_blocks(name, chunk, bytes_of(buffer), first_block))
        offset_in_buffer = first_element - buffer_begin // dtype.itemsize
        destination.copy_(buffer.as_strided(box.sizes, strides, offset_in_buffer))

    def verify(self) -> Index:
        """Read every byte of the checkpoint, verify all checksums, and return the index."""
        self.check_files()
        for name, leaf in self.index.leaves.items():
            for chunk in leaf.chunks:
                buffer = torch.empty(chunk.box.numel * leaf.spec.dtype.itemsize, dtype=torch.uint8)
                self._read_blocks(_blocks(name, chunk, bytes_of(buffer)))
        return self.index

    def _read_blocks(self, blocks: list[_Block]) -> None:
        """Read blocks of at most 4 MiB and verify their checksums; blocks of one file are read in parallel."""
        blocks.sort(key=attrgetter("file", "begin"))
        for number, blocks_of_file in groupby(blocks, attrgetter("file")):
            file = self._file(number)
            path = self.folder / self.index.files[number].name
            reads = [self._pool.submit(_read_task, path, file, task) for task in _tasks(blocks_of_file)]
            try:
                for read in reads:
                    read.result()
            finally:
                for read in reads:
                    read.cancel()
                wait(reads)  # the memory must not be freed while a thread writes to it


def _tasks(blocks: Iterable[_Block]) -> list[list[_Block]]:
    """Group blocks of about 4 MiB together: for small leaves, a task for each would cost more than the read."""
    tasks: list[list[_Block]] = []
    room = 0
    for block in blocks:
        if room < len(block.destination):
            tasks.append([])
            room = BLOCK
        tasks[-1].append(block)
        room -= len(block.destination)
    return tasks


def _read_task(path: Path, file: FileIO, blocks: Iterable[_Block]) -> None:
    """Read some blocks of a file, and verify their checksums."""
    with _reading(path):
        for _, begin, destination, crc32, name in blocks:
            _fill(file, begin, destination)
            if checksum_of(destination) != crc32:
                end = begin + len(destination)
                raise CorruptError(f"{path}: the leaf {name!r} is damaged in bytes {begin} to {end} of the file")


def _takes_bytes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether stored bytes of a dtype can be read directly into a tensor, without a conversion."""
    return tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
