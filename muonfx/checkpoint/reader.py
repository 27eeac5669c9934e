"""Read data files: safetensors files with a checksum of every block.

The files are read with plain reads. With a memory map, truncation of a file in use would end the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from io import FileIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.checkpoint.errors import CorruptError
from muonfx.checkpoint.files import (
    bytes_of,
    check_byte_order,
    checksum_of,
    close_read,
    open_regular,
)
from muonfx.checkpoint.index import BLOCK, Chunk, DataFile, Index, Leaf, blocks_of
from muonfx.checkpoint.leaves import shards_of
from muonfx.sharding.shards.boxes import Box, intersection

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
    """Fill memory with the bytes of a file from position ``begin``.

    With 8 bytes of memory and ``begin=100``, these are the bytes 100 to 107; it is an error if the file ends before.
    One call of the system may read fewer bytes than requested, so it is repeated. Threads may read one file at once if
    the system has ``preadv``.
    """
    while destination:  # until no byte of the memory is left
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [destination], begin)
        else:  # threads would share the position of the file, so `DataReader` has only one
            file.seek(begin)
            count = file.readinto(destination) or 0
        if count == 0:  # the end of the file
            raise OSError(errno.EIO, "it ends too early")
        begin += count
        destination = destination[count:]  # a view of the memory that is still to fill


def _check_size_and_header(file: FileIO, path: Path, data_file: DataFile) -> None:
    """Raise unless an open file has the size, and the checksum of the header, that the index has for this file.

    For example ``DataFile(name="data-...", nbytes=96, header_nbytes=72, header_crc32="0f3a91c2")``.
    """
    nbytes = file.seek(0, os.SEEK_END)
    if nbytes != data_file.nbytes:
        raise CorruptError(f"{path}: the data file has {nbytes} bytes, expected {data_file.nbytes}")
    header = bytearray(data_file.header_nbytes)
    _fill(file, 0, memoryview(header))
    if checksum_of(header) != data_file.header_crc32:
        raise CorruptError(f"{path}: the header of the data file is damaged")


class _Block(NamedTuple):
    """A block of at most 4 MiB of a data file: its position, checksum, destination, and the name of its leaf."""

    file: int
    begin: int
    destination: memoryview
    crc32: str
    name: str


def _blocks(name: str, chunk: Chunk, destination: memoryview, first: int = 0) -> list[_Block]:
    """List the blocks of a file to read into ``destination``, beginning with block number ``first`` of a chunk.

    A chunk, a part of the leaf ``name``, is stored in blocks of 4 MiB with one checksum each. 10 MiB of memory are
    filled from three blocks, of which the last has 2 MiB.
    """
    blocks: list[_Block] = []
    for number, block_memory in enumerate(blocks_of(destination), first):
        begin_in_file = chunk.begin + number * BLOCK
        blocks.append(_Block(chunk.file, begin_in_file, block_memory, chunk.crc32[number], name))
    return blocks


class Transfer(NamedTuple):
    """A box of a leaf to copy from one chunk of the checkpoint to the memory of a tensor."""

    name: str
    chunk: Chunk
    box: Box
    """The box in the coordinates of the leaf; it is within the box of the chunk."""
    destination: Tensor
    """A tensor with the sizes of the box."""


def _transfers_of(name: str, stored: Leaf, leaf: Any) -> list[Transfer]:
    """List the copies that fill the shards of ``leaf`` on this rank from the chunks of a ``stored`` leaf.

    A shard is a part of the tensor in memory, and a chunk a part in a file. The layouts may differ: a shard with the
    rows 2 to 5 is filled from a chunk with the rows 0 to 3, and from one with the rows 4 to 7.
    """
    transfers: list[Transfer] = []
    for box, values in shards_of(leaf).items():
        if not values.numel():  # a leaf without elements has one empty shard
            continue
        for chunk in stored.chunks:
            if chunk.box == box:  # the usual case, in which no boxes need be computed
                transfers.append(Transfer(name, chunk, box, values))
                continue
            # The rows 2 and 3 in the example, in the coordinates of the leaf.
            overlap = intersection(box, chunk.box)
            if overlap is not None:
                destination = _relative(overlap, box).of(values)  # a view of the shard
                transfers.append(Transfer(name, chunk, overlap, destination))
    return transfers


def _relative(box: Box, outer: Box) -> Box:
    """Return a box in the coordinates of another box that contains it.

    >>> _relative(Box(offsets=(4, 2), sizes=(2, 3)), Box(offsets=(4, 0), sizes=(4, 8)))
    Box(offsets=(0, 2), sizes=(2, 3))
    """
    starts = zip(box.offsets, outer.offsets, strict=True)
    offsets = [start - outer_start for start, outer_start in starts]
    return Box(tuple(offsets), box.sizes)


def _range_of(view: Tensor) -> tuple[int, int]:
    """Return the positions in memory of the first element of a view, and after its last one, counted in elements.

    It is (5, 15) for the rows 1 and 2 of a 4 x 5 matrix, and (1, 17) for its column 1, whose elements are at the
    positions 1, 6, 11 and 16.
    """
    begin = int(view.storage_offset())
    # In each dim, the last index is size - 1, and each index moves the position by the stride: 1 + 3 * 5 is 16.
    end = begin + 1
    for stride, size in zip(view.stride(), view.shape, strict=True):
        end += stride * (size - 1)
    return begin, end


class DataReader:
    """Reads tensors from the data files of a checkpoint, and verifies the checksum of all bytes that it reads."""

    def __init__(self, folder: Path, index: Index) -> None:
        """Prepare to read the files that ``index`` names. They are opened later, by their numbers."""
        check_byte_order()
        self.folder = folder
        self.index = index
        self._files: dict[int, FileIO] = {}
        """The open data files by their number in the index."""
        threads = 1
        if hasattr(os, "preadv"):  # reads from a position, so that threads can read one file
            threads = torch.get_num_threads()
        # One pool per reader, not a global one: threads do not survive a fork.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="muonfx-read")

    def __enter__(self) -> DataReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end the threads. A closed reader may be closed again."""
        self._pool.shutdown()
        for file in self._files.values():
            close_read(file)
        self._files = {}

    def check_files(self, numbers: Iterable[int] | None = None) -> None:
        """Open data files by number, or all of them, and check their sizes and headers."""
        if numbers is None:
            numbers = range(len(self.index.files))
        for number in sorted(numbers):
            self._file(number)

    def _file(self, number: int) -> FileIO:
        """Return the data file with this number in the index, open; check its size and header when it is opened.

        The system limits the number of open files. If too many are open, the one that was opened first is closed;
        `_file` opens it again when it is needed.
        """
        if number in self._files:
            return self._files[number]
        if len(self._files) >= _MOST_OPEN:  # no read of another file is in progress
            oldest = next(iter(self._files))
            close_read(self._files.pop(oldest))
        self._files[number] = self._open(self.index.files[number])
        return self._files[number]

    def _open(self, data_file: DataFile) -> FileIO:
        """Open a data file, and check its size and header, which shows most damage before any values are read."""
        path = self.folder / data_file.name
        with _reading(path):
            file = open_regular(path)
            try:
                _check_size_and_header(file, path, data_file)
            except BaseException:
                close_read(file)
                raise
        return file

    def transfers_to(self, destinations: Mapping[str, Any]) -> list[Transfer]:
        """Return the copies that fill ``destinations``, a dict from leaf name to a tensor or this rank's shards."""
        transfers: list[Transfer] = []
        for name, leaf in destinations.items():
            transfers += _transfers_of(name, self.index.leaves[name], leaf)
        return transfers

    def read(self, transfers: Iterable[Transfer]) -> None:
        """Fill the destination of each transfer, a tensor, with a part of a leaf; convert dtype and device if needed.

        A file has the leaf in chunks, as the ranks have written it. A transfer is of a whole chunk or a box in it.
        """
        # Whole chunks that need no conversion are read into their destination, all of them together, by threads.
        blocks: list[_Block] = []
        for transfer in transfers:
            name, chunk, box, destination = transfer
            dtype = self.index.leaves[name].spec.dtype
            is_whole_chunk = box == chunk.box
            if is_whole_chunk and _takes_bytes(destination, dtype):
                blocks += _blocks(name, chunk, bytes_of(destination))
            else:
                self._read_and_convert(transfer, dtype)
        self._read_blocks(blocks)

    def _read_and_convert(self, transfer: Transfer, dtype: torch.dtype) -> None:
        """Read a part of a chunk into a buffer, and copy it to the destination of the transfer.

        This is for a box that is smaller than the chunk, or a destination of another dtype, device or order. ``dtype``
        is the dtype in the file.
        """
        name, chunk, box, destination = transfer
        # 1. Which elements of the chunk to read: the rows 2 and 3 of a chunk of shape (4, 8) are the elements 16 to 31.
        # A meta tensor has the strides of the whole chunk, but no memory.
        stored_chunk = torch.empty(chunk.box.sizes, dtype=dtype, device="meta")
        stored_box = _relative(box, chunk.box).of(stored_chunk)
        begin, end = _range_of(stored_box)
        # 2. Only the blocks of the file around these elements are read, since a chunk may have many gigabytes.
        buffer, buffer_begin = self._read_around(begin, end, name, chunk, dtype)
        # 3. The box as a view of the buffer, whose first element is number `buffer_begin` of the chunk.
        values = buffer.as_strided(box.sizes, stored_box.stride(), begin - buffer_begin)
        destination.copy_(values)

    def _read_around(
        self, begin: int, end: int, name: str, chunk: Chunk, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        """Read the blocks with the elements ``begin`` to ``end`` of a chunk; also return where the first block begins.

        Whole blocks are read, since each has one checksum. All positions are counted in elements of the chunk: float32
        has 2**20 in a block of 4 MiB, so the elements 2_000_000 to 2_500_000 are in the blocks 1 and 2.
        """
        block_numel = BLOCK // dtype.itemsize
        first_block = begin // block_numel
        last_block = (end - 1) // block_numel  # `end` is after the last element
        buffer_begin = first_block * block_numel
        buffer_end = min((last_block + 1) * block_numel, chunk.box.numel)
        buffer = torch.empty(buffer_end - buffer_begin, dtype=dtype)
        self._read_blocks(_blocks(name, chunk, bytes_of(buffer), first_block))
        return buffer, buffer_begin

    def verify(self) -> Index:
        """Read every byte of the checkpoint, verify all checksums, and return the index."""
        for name, leaf in self.index.leaves.items():
            for chunk in leaf.chunks:
                buffer = torch.empty(chunk.box.numel * leaf.spec.dtype.itemsize, dtype=torch.uint8)
                self._read_blocks(_blocks(name, chunk, bytes_of(buffer)))
        return self.index

    def _read_blocks(self, blocks: list[_Block]) -> None:
        """Read parts of at most 4 MiB of the data files into memory, and verify the checksum of each part.

        Threads read the blocks of one file in parallel. Files are read one after the other, so that a file may be
        closed before the next is opened.
        """
        # In the order of the files, as `groupby` requires, and within a file from its begin to its end.
        blocks.sort(key=attrgetter("file", "begin"))
        for number, blocks_of_file in groupby(blocks, attrgetter("file")):
            file = self._file(number)
            path = self.folder / self.index.files[number].name
            reads = [
                self._pool.submit(_read_task, path, file, task) for task in _tasks(blocks_of_file)
            ]
            try:
                for read in reads:
                    read.result()  # raises the error of this read
            finally:
                for read in reads:
                    read.cancel()  # after an error, those that have not begun
                wait(reads)  # the memory must not be freed while a thread writes to it


def _tasks(blocks: Iterable[_Block]) -> list[list[_Block]]:
    """Group blocks to tasks of at most 4 MiB, each of which one thread reads.

    A thousand leaves of 1 KiB are one task: for small leaves, a task for each would cost more than the read.
    """
    tasks: list[list[_Block]] = []
    free_bytes = 0  # of the last task
    for block in blocks:
        nbytes = len(block.destination)
        if nbytes > free_bytes:  # the block does not fit in the last task, or there is none
            tasks.append([])
            free_bytes = BLOCK
        tasks[-1].append(block)
        free_bytes -= nbytes
    return tasks


def _read_task(path: Path, file: FileIO, blocks: Iterable[_Block]) -> None:
    """Read some blocks of a file, and verify their checksums. A thread runs this.

    An error names the leaf of the damaged block, and the bytes of the file in which the damage is.
    """
    with _reading(path):
        for _, begin, destination, crc32, name in blocks:
            _fill(file, begin, destination)
            if checksum_of(destination) != crc32:
                end = begin + len(destination)
                raise CorruptError(
                    f"{path}: the leaf {name!r} is damaged in bytes {begin} to {end} of the file"
                )


def _takes_bytes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether stored bytes of a dtype can be read directly into a tensor, without a conversion."""
    return tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
