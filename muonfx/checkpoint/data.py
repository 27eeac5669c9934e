"""Data files: safetensors, written and read leaf by leaf, with a checksum of every block.

The format is eight bytes with the length of the header, the header (JSON: name to dtype, shape and byte range), and
the bytes of the tensors without gaps. It is read here with plain reads and not through a memory map: a map of a file
that is cut short while it is in use ends the process.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.checkpoint.atomic import fresh_file, write_all
from muonfx.checkpoint.boxes import Box
from muonfx.checkpoint.dtypes import safetensors_name
from muonfx.checkpoint.errors import CheckpointError, CorruptError
from muonfx.checkpoint.index import BLOCK, Chunk, DataFile, Index, Leaf
from muonfx.checkpoint.memory import bytes_of, room_for

__all__ = ["Part", "Progress", "Reader", "write_data"]

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


def _blocks(data: memoryview) -> Iterator[memoryview]:
    return (data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK))


def _checksum(data: bytes | bytearray | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


class _Checksums(ExitStack):
    """Computes checksums beside the reading or writing: those of whole blocks in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None

    def start(self, block: memoryview) -> Callable[[], str]:
        """Begin with a block, which must stay as it is; what is returned waits for the checksum."""
        if len(block) < BLOCK:
            value = _checksum(block)
            return lambda: value
        if self._thread is None:
            # Of this save or load alone: a thread does not survive a fork.
            self._thread = self.enter_context(ThreadPoolExecutor(1, thread_name_prefix="muonfx-crc32"))
        return self._thread.submit(_checksum, block).result


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
    chunks: dict[int, Chunk] = {}
    done = 0
    with fresh_file(path) as file, _Checksums() as checksums:
        write_all(file, head)
        for place in order:
            part = parts[place]
            tensor = _dense(part)
            crc32: list[str] = []
            for block in _blocks(bytes_of(tensor)):
                checksum = checksums.start(block)
                write_all(file, block)
                crc32.append(checksum())
                done += len(block)
                if progress is not None:
                    progress(done, total)
            del tensor  # not beside the next
            begin = len(head) + begins[place]
            chunks[place] = Chunk(0, begin, part.box.offsets, part.box.sizes, tuple(crc32))
    described = DataFile(path.name, len(head) + total, len(head), _checksum(head))
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


class Reader:
    """Reads leaves from the data files of a checkpoint and checks every byte that it hands out.

    A file is opened when it is first needed, and then checked for the length and the header that the index says.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        check_byte_order()
        self.folder, self.index = folder, index
        self._stack = ExitStack()
        self._checksums = self._stack.enter_context(_Checksums())
        self._files: dict[int, FileIO] = {}

    def __enter__(self) -> Reader:
        return self

    def check_files(self) -> Reader:
        """Open all files.

        Raises:
            CorruptError: one is missing, is shorter or longer, or has another header.
        """
        for number in range(len(self.index.files)):
            self._file(number)
        return self

    def _file(self, number: int) -> FileIO:
        if number not in self._files:
            self._files[number] = self._stack.enter_context(self._open(self.index.files[number]))
        return self._files[number]

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, described: DataFile) -> FileIO:
        path = self.folder / described.name
        try:
            file = FileIO(path)
        except OSError as error:
            raise CorruptError(f"{path}: the data file is missing or cannot be read: {error.strerror}") from error
        try:
            found = file.seek(0, 2)
            if found != described.nbytes:
                raise CorruptError(f"{path}: the data file has {found} bytes, expected {described.nbytes}")
            head = bytearray(described.header_nbytes)
            file.seek(0)
            self._fill(file, memoryview(head), path)
            if _checksum(head) != described.header_crc32:
                raise CorruptError(f"{path}: the header of the data file is damaged")
        except BaseException:
            file.close()
            raise
        return file

    @staticmethod
    def _fill(file: FileIO, into: memoryview, path: Path) -> None:
        while into:
            try:
                got = file.readinto(into)
            except OSError as error:
                raise CorruptError(f"{path}: cannot be read: {error.strerror}") from error
            if not got:
                raise CorruptError(f"{path}: the data file ends too early")
            into = into[got:]

    def _blocks(self, name: str, chunk: Chunk, into: memoryview, first: int) -> None:
        """Read blocks of a chunk, from the first on, and check them."""
        file, described = self._file(chunk.file), self.index.files[chunk.file]
        path = self.folder / described.name
        file.seek(chunk.begin + first * BLOCK)
        found: list[tuple[memoryview, Callable[[], str]]] = []
        try:
            for block in _blocks(into):
                self._fill(file, block, path)
                found.append((block, self._checksums.start(block)))
        except BaseException:
            for _, checksum in found:  # the memory must not go while the other thread reads it
                checksum()
            raise
        for place, (block, checksum) in enumerate(found, first):
            if checksum() != chunk.crc32[place]:
                begin = chunk.begin + place * BLOCK
                where = f"bytes {begin} to {begin + len(block)} of the file"
                raise CorruptError(f"{path}: the leaf {name!r} is damaged, somewhere in {where}")

    def read(self, name: str) -> Tensor:
        """Read a leaf: a new tensor in host memory.

        Raises:
            CorruptError: its bytes are not those that were written.
        """
        leaf = self.index.leaves[name]
        out = room_for(torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype, device="meta"), "cpu")
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a leaf into a tensor of its shape; other dtypes, devices and strides take a copy of one chunk."""
        leaf = self.index.leaves[name]
        for chunk in leaf.chunks:
            part = out[tuple(map(slice, chunk.offsets, chunk.box.ends))] if chunk.sizes else out
            self.read_box(name, leaf, chunk, Box((0,) * len(chunk.sizes), chunk.sizes), part)

    def read_box(self, name: str, leaf: Leaf, chunk: Chunk, box: Box, out: Tensor) -> None:
        """Read a box of a chunk (offsets from the chunk's) into a tensor of its size, by the blocks that hold it."""
        if not box.numel:
            return
        dtype, whole = leaf.spec.dtype, box.sizes == chunk.sizes
        if whole and out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self._blocks(name, chunk, bytes_of(out), 0)
            return
        strides = [prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
        start = sum(map(int.__mul__, box.offsets, strides))
        stop = sum(stride * (end - 1) for stride, end in zip(strides, box.ends, strict=True)) + 1
        first = start * dtype.itemsize // BLOCK
        nbytes = prod(chunk.sizes) * dtype.itemsize
        end = min(nbytes, -(-stop * dtype.itemsize // BLOCK) * BLOCK)
        held = torch.empty((end - first * BLOCK) // dtype.itemsize, dtype=dtype)
        self._blocks(name, chunk, bytes_of(held), first)
        out.copy_(held.as_strided(box.sizes, strides, start - first * BLOCK // dtype.itemsize))

    def verify(self) -> None:
        """Read everything and keep nothing.

        Raises:
            CorruptError: a leaf's bytes are not those that were written; the message names it.
        """
        self.check_files()
        buffer = memoryview(bytearray(BLOCK))
        for name, leaf in self.index.leaves.items():
            for chunk in leaf.chunks:
                nbytes = prod(chunk.sizes) * leaf.spec.dtype.itemsize
                for place in range(len(chunk.crc32)):
                    self._blocks(name, chunk, buffer[: min(BLOCK, nbytes - place * BLOCK)], place)
