"""The index of a checkpoint: which file holds the bytes of each leaf, and the text format of the index.

A checkpoint is a folder with an index, ``index.json``, and data files, which are ordinary safetensors files. The index
gives the location of each leaf as one or more *chunks* (boxes of the leaf) and a checksum of every *block* of their
bytes. The index is written last, and its rename completes the checkpoint.

The text of an index is one JSON object with two members, formatted so that the second can be verified before it is
parsed: ``{"sha256": "<64 hex digits>",`` line feed ``"index": <text>}`` line feed. The digest is of ``<text>``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from muonfx.checkpoint.errors import CheckpointError, CorruptError, FormatError
from muonfx.checkpoint.files import read_regular
from muonfx.checkpoint.names import is_name
from muonfx.sharding.boxes import Box, cover
from muonfx.tree import Spec
from muonfx.tree.display import Report, Table, format_bytes, printable
from muonfx.tree.dtypes import dtype_named, name_of_dtype

__all__ = [
    "BLOCK",
    "FORMAT",
    "INDEX",
    "LONGEST_HEADER",
    "VERSION",
    "Chunk",
    "DataFile",
    "Index",
    "Leaf",
    "data_name",
    "is_own_name",
    "parse",
    "read_parsed",
    "shortened",
    "text_of",
    "unfinished_index_name",
]

FORMAT = "muonfx checkpoint"
VERSION = 1
INDEX = "index.json"
BLOCK = 1 << 22
"""Bytes per checksum, 4 MiB; the last block of a chunk may be shorter."""

LONGEST = 1 << 30
"""Maximum size of an index in bytes, enough for about ten million chunks."""
LONGEST_HEADER = 8 + 100_000_000
"""Maximum size of the header of a data file in bytes, the limit of safetensors."""
_MOST_DIMS = 64
"""Maximum number of dims of a tensor in torch."""
_LONGEST_NAME = 255
"""Maximum length of a file name, in any file system."""

_HEAD = b'{"sha256": "'
_BETWEEN = b'",\n"index": '
_TAIL = b"}\n"
_START = len(_HEAD) + 64 + len(_BETWEEN)
_BIGGEST = 2**63 - 1


@dataclass(frozen=True)
class DataFile:
    """A data file: its name in the folder, its size, and the size and CRC-32 of its header."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc32: str


@dataclass(frozen=True)
class Chunk:
    """A box of a leaf: its file, the position of its first byte there, and the CRC-32 of each block."""

    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    crc32: tuple[str, ...]

    @property
    def box(self) -> Box:
        """Return the box of the leaf that the chunk holds."""
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True)
class Leaf:
    """A leaf: its global shape and dtype, and chunks that hold every element exactly once."""

    spec: Spec
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.spec.nbytes


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint, as `inspect` returns it.

    Attributes:
        save_id: the random id of the save.
        step: the number of steps taken; None if it was not given.
        extra: the values that the caller gave.
        fingerprint: the fingerprint of the transform; None if no transform was given.
        chain: the transform as code; None if no transform was given.
        versions: the versions of muonfx and torch.
        files: the data files.
        leaves: name to `Leaf`, with a ``spec`` (shape and dtype) and the chunks that hold it.
        products: the dtypes of matrix products that the transform used, by the name of its part.

    >>> import tempfile
    >>> import muonfx as mfx
    >>> index = mfx.checkpoint.inspect(mfx.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2, 3)}, step=7))
    >>> index.step, index.nbytes, index.leaves["w"].spec.shape
    (7, 24, (2, 3))
    """

    save_id: str
    step: int | None
    extra: dict[str, Any]
    fingerprint: str | None
    chain: str | None
    versions: dict[str, str]
    files: tuple[DataFile, ...]
    leaves: dict[str, Leaf]
    products: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def report(self, path: Path | None = None, leaves: Mapping[str, Leaf] | None = None) -> Report:
        """Return a table of the leaves with a heading.

        Args:
            path: the path for the heading.
            leaves: the leaves to show; None for all.
        """
        shown = self.leaves if leaves is None else leaves
        said = {
            **({} if path is None else {"checkpoint": path}),
            "step": "-" if self.step is None else self.step,
            "chain": f"{self.chain} (fingerprint {self.fingerprint})" if self.fingerprint is not None else "-",
            "written by": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "extra": _as_text(self.extra) if self.extra else "-",
            "files": f"{len(self.files)}, {format_bytes(sum(file.nbytes for file in self.files))}",
        }
        wide = max(map(len, said))
        heading = "\n".join(f"{key:{wide}}  {shortened(printable(value))}" for key, value in said.items())
        rows = [
            (
                name,
                str(leaf.spec.shape),
                str(leaf.spec.dtype).removeprefix("torch."),
                format_bytes(leaf.nbytes),
                str(len(leaf.chunks)),
            )
            for name, leaf in shown.items()
        ]
        table = Table.of(("leaf", "shape", "dtype", "bytes", "parts"), rows, right=(3, 4))
        return Report((heading, table, f"{len(shown)} leaves, {format_bytes(sum(x.nbytes for x in shown.values()))}"))

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report().to_html()


def data_name(save_id: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's data file."""
    return f"data-{save_id}-{rank:05}-of-{ranks:05}.safetensors"


def unfinished_index_name(save_id: str) -> str:
    """Return the name of an index until it is complete and renamed."""
    return f".{INDEX}-{save_id}.part"


def is_own_name(name: str) -> bool:
    """True if a save may have given a file this name."""
    return _OWN_NAME.fullmatch(name) is not None


_OWN_NAME = re.compile(rf"data-[0-9a-f]{{16}}-\d+-of-\d+\.safetensors|\.{re.escape(INDEX)}-[0-9a-f]{{16}}\.part")


def _as_text(extra: object) -> str:
    """Return the caller's ``extra`` as JSON text."""
    try:
        return json.dumps(extra, sort_keys=True)
    except RecursionError:  # parsing needed less stack than is left here
        return "(nested too deeply to be shown)"


def shortened(text: str, most: int = 2000) -> str:
    """Return the first ``most`` characters of a text, with its length if it is longer."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def text_of(index: Index) -> bytes:
    """Serialize an index; raise `CheckpointError` if it would be too long to be read."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": index.save_id,
        "step": index.step,
        "extra": index.extra,
        "chain": None
        if index.fingerprint is None
        else {"fingerprint": index.fingerprint, "repr": index.chain, "products": index.products},
        "versions": index.versions,
        "files": [asdict(file) for file in index.files],
        "leaves": {
            name: {
                "dtype": name_of_dtype(leaf.spec.dtype),
                "shape": leaf.spec.shape,
                "chunks": [asdict(chunk) for chunk in leaf.chunks],
            }
            for name, leaf in index.leaves.items()
        },
    }
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    if _START + len(text) + len(_TAIL) > LONGEST:
        raise CheckpointError(f"the index would have {len(text)} bytes, and may have {LONGEST}: save fewer pieces")
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + _BETWEEN + text + _TAIL


def read_parsed(path: Path) -> Index:
    """Read a folder's index in bounded time and memory, whatever the file contains."""
    return parse(read_regular(path / INDEX, LONGEST, _HEAD), str(path / INDEX))


class _Wrong(Exception):
    """An index is not valid."""


def parse(data: bytes | bytearray, where: str) -> Index:
    """Parse an index; raise `FormatError` for another format version and `CorruptError` if it is not valid."""
    if not data.startswith(_HEAD):
        raise CorruptError(
            f"{where} is damaged, or no index of a muonfx checkpoint: one begins with {_HEAD.decode()!r}"
        )
    digest, text = data[len(_HEAD) : len(_HEAD) + 64], memoryview(data)[_START : -len(_TAIL)]
    if (
        hashlib.sha256(text).hexdigest().encode() != digest
        or data[len(_HEAD) + 64 : _START] != _BETWEEN
        or not data.endswith(_TAIL)
    ):
        raise CorruptError(f"{where} is damaged: its text is not the one that its checksum was made of")
    try:
        body = json.loads(bytes(text), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        format, version = _members(body, "index", format="a string", version="a size")
        if format != FORMAT:
            raise FormatError(f"{where} is of the format {format!r}, expected {FORMAT!r}")
        if version != VERSION:
            raise FormatError(
                f"{where} is of version {version} of the format, and this muonfx reads version {VERSION}: it was "
                "written by another muonfx, upgrade to that one"
            )
        return _index(body)
    except (_Wrong, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptError(f"{where} makes no sense: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Wrong("an object has one name twice")
    return found


def _no_constant(name: str) -> None:
    raise _Wrong(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value - value != 0.0:
        raise _Wrong(f"{digits:.40} is beyond all floats")
    return value


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _BIGGEST


_IS: dict[str, Callable[[Any], bool]] = {
    "a string": lambda value: isinstance(value, str),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, dict),
    "an object or null": lambda value: isinstance(value, dict | None),
    "an object of strings": lambda value: isinstance(value, dict) and all(isinstance(x, str) for x in value.values()),
    "a size": _is_size,
    "a size or null": lambda value: value is None or _is_size(value),
    "a list of sizes": lambda value: isinstance(value, list) and all(map(_is_size, value)),
    "8 hex digits": lambda value: isinstance(value, str) and _CRC.fullmatch(value) is not None,
    "a list of checksums": lambda value: isinstance(value, list) and all(map(_IS["8 hex digits"], value)),
}
"""What a member of an object of the index may be."""
_CRC = re.compile("[0-9a-f]{8}")


def _members(holder: object, where: str, **expected: str) -> list[Any]:
    """Return the named members of a JSON object; each must be as expected, in the words of `_IS`."""
    if not isinstance(holder, dict):
        raise _Wrong(f"{where} must be an object, found {type(holder).__name__}")
    for key, kind in expected.items():
        if key not in holder:
            raise _Wrong(f"{where} has no {key!r}")
        if not _IS[kind](holder[key]):
            raise _Wrong(f"{key!r} of {where} is {holder[key]!r:.80}, expected {kind}")
    return [holder[key] for key in expected]


def _index(body: object) -> Index:
    save_id, step, extra, chain, versions, of_files, of_leaves = _members(
        body,
        "index",
        save_id="a string",
        step="a size or null",
        extra="an object",
        chain="an object or null",
        versions="an object of strings",
        files="a list",
        leaves="an object",
    )
    fingerprint = text = None
    products: dict[str, str] = {}
    if chain is not None:
        fingerprint, text, products = _members(
            chain, "chain", fingerprint="a string", repr="a string", products="an object of strings"
        )
    files = tuple(map(_file, of_files))
    if len({file.name for file in files}) < len(files):
        raise _Wrong("two data files have one name")
    leaves = {name: _leaf(name, entry, files) for name, entry in of_leaves.items()}
    _check_no_overlap(leaves, files)
    return Index(save_id, step, extra, fingerprint, text, versions, files, leaves, products)


def _file(entry: object) -> DataFile:
    name, nbytes, header, crc32 = _members(
        entry, "a data file", name="a string", nbytes="a size", header_nbytes="a size", header_crc32="8 hex digits"
    )
    # A plain name, so that a checkpoint cannot refer to files outside its folder.
    plain = name.endswith(".safetensors") and not set(name) & set("/\\:\0") and not name.startswith(".")
    if not plain or len(name) > _LONGEST_NAME:
        raise _Wrong(f"{name[:80]!r} is no name of a data file")
    if header > min(nbytes, LONGEST_HEADER):
        raise _Wrong(
            f"the header of {name} has {header} bytes, the file {nbytes}, and a header at most {LONGEST_HEADER}"
        )
    return DataFile(name, nbytes, header, crc32)


def _leaf(name: str, entry: object, files: tuple[DataFile, ...]) -> Leaf:
    if not is_name(name):
        raise _Wrong(f"{name[:80]!r} is not the name of a leaf")
    written, sides, of_chunks = _members(entry, name, dtype="a string", shape="a list of sizes", chunks="a list")
    dtype, shape = dtype_named(written), tuple(sides)
    if dtype is None:
        raise _Wrong(f"{name} has the unknown dtype {written!r:.80}")
    if len(shape) > _MOST_DIMS:
        raise _Wrong(f"{name} has {len(shape)} dims, expected at most {_MOST_DIMS}")
    if prod(side or 1 for side in shape) * dtype.itemsize > _BIGGEST:
        raise _Wrong(f"{name} has the shape {shape}, beyond all memory")
    chunks = tuple(_chunk(name, part, dtype.itemsize, files) for part in of_chunks)
    if problem := cover(shape, [chunk.box for chunk in chunks]):
        raise _Wrong(f"the chunks of {name}, of shape {shape}, {problem}")
    return Leaf(Spec(shape, dtype), chunks)


def _chunk(name: str, entry: object, itemsize: int, files: tuple[DataFile, ...]) -> Chunk:
    file, begin, offsets, sizes, crc32 = _members(
        entry,
        f"a chunk of {name}",
        file="a size",
        begin="a size",
        offsets="a list of sizes",
        sizes="a list of sizes",
        crc32="a list of checksums",
    )
    nbytes = prod(sizes) * itemsize
    if file >= len(files) or begin < files[file].header_nbytes or begin + nbytes > files[file].nbytes:
        raise _Wrong(f"a chunk of {name} lies outside of the data files")
    if len(crc32) != -(-nbytes // BLOCK):
        raise _Wrong(f"a chunk of {name} has {len(crc32)} checksums, expected one for each {BLOCK} of {nbytes} bytes")
    return Chunk(file, begin, tuple(offsets), tuple(sizes), tuple(crc32))


def _check_no_overlap(leaves: Mapping[str, Leaf], files: tuple[DataFile, ...]) -> None:
    """Require that each byte after the header of a file belongs to exactly one leaf."""
    ends = [file.header_nbytes for file in files]
    spans = sorted(
        (chunk.file, chunk.begin, prod(chunk.sizes) * leaf.spec.dtype.itemsize, name)
        for name, leaf in leaves.items()
        for chunk in leaf.chunks
    )
    for file, begin, nbytes, name in spans:
        if begin != ends[file]:
            raise _Wrong(f"the bytes of {name} do not follow on those of its neighbour")
        ends[file] += nbytes
    if ends != [file.nbytes for file in files]:
        raise _Wrong("a data file has bytes that belong to no leaf")
