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
from collections.abc import Mapping
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
    "as_text",
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
            "extra": as_text(self.extra) if self.extra else "-",
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


def as_text(extra: object) -> str:
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
        version = _get(body, "version", int, "index") if isinstance(body, dict) else None
        if _get(body, "format", str, "index") != FORMAT:
            raise FormatError(f"{where} is of the format {body['format']!r}, expected {FORMAT!r}")
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


def _get(holder: Any, key: str, kind: Any, where: str) -> Any:
    """Return a member of a JSON object, of the given type; a bool is not an int."""
    if not isinstance(holder, dict):
        raise _Wrong(f"{where} must be an object, found {type(holder).__name__}")
    if key not in holder:
        raise _Wrong(f"{where} has no {key!r}")
    value = holder[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise _Wrong(f"{key!r} of {where} is {value!r:.80}")
    return value


def _natural(holder: Any, key: str, where: str) -> int:
    value: int = _get(holder, key, int, where)
    if not 0 <= value <= _BIGGEST:
        raise _Wrong(f"{key!r} of {where} is {value!r:.80}, expected a size")
    return value


def _naturals(holder: Any, key: str, where: str) -> tuple[int, ...]:
    values = _get(holder, key, list, where)
    if all(type(value) is int and 0 <= value <= _BIGGEST for value in values):
        return tuple(values)
    return tuple(_natural({key: value}, key, where) for value in values)


def _crc(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) != 8 or set(value) - set("0123456789abcdef"):
        raise _Wrong(f"a checksum of {where} is {value!r:.80}, expected 8 hex digits")
    return value


def _index(body: dict[str, Any]) -> Index:
    step = None if body.get("step") is None else _natural(body, "step", "index")
    chain = None if body.get("chain") is None else _get(body, "chain", dict, "index")
    versions: Mapping[str, Any] = _get(body, "versions", dict, "index")
    if not all(isinstance(value, str) for value in versions.values()):
        raise _Wrong("the versions must be strings")
    products: Mapping[str, Any] = _get(chain, "products", dict, "chain") if chain and "products" in chain else {}
    if not all(isinstance(value, str) for value in products.values()):
        raise _Wrong("the dtypes of products must be strings")
    files = tuple(_file(entry) for entry in _get(body, "files", list, "index"))
    if len({file.name for file in files}) < len(files):
        raise _Wrong("two data files have one name")
    leaves = {name: _leaf(name, entry, files) for name, entry in _get(body, "leaves", dict, "index").items()}
    _check_no_overlap(leaves, files)
    return Index(
        _get(body, "save_id", str, "index"),
        step,
        _get(body, "extra", dict, "index"),
        None if chain is None else _get(chain, "fingerprint", str, "chain"),
        None if chain is None else _get(chain, "repr", str, "chain"),
        dict(versions),
        files,
        leaves,
        dict(products),
    )


def _file(entry: Any) -> DataFile:
    name: str = _get(entry, "name", str, "a data file")
    # A plain name, so that a checkpoint cannot refer to files outside its folder.
    plain = name.endswith(".safetensors") and not set(name) & set("/\\:\0") and not name.startswith(".")
    if not plain or len(name) > _LONGEST_NAME:
        raise _Wrong(f"{name[:80]!r} is no name of a data file")
    nbytes, header = _natural(entry, "nbytes", name), _natural(entry, "header_nbytes", name)
    if header > min(nbytes, LONGEST_HEADER):
        raise _Wrong(
            f"the header of {name} has {header} bytes, the file {nbytes}, and a header at most {LONGEST_HEADER}"
        )
    return DataFile(name, nbytes, header, _crc(_get(entry, "header_crc32", str, name), name))


def _leaf(name: str, entry: Any, files: tuple[DataFile, ...]) -> Leaf:
    if not is_name(name):
        raise _Wrong(f"{name[:80]!r} is not the name of a leaf")
    dtype = dtype_named(_get(entry, "dtype", str, name))
    if dtype is None:
        raise _Wrong(f"{name} has the unknown dtype {entry['dtype']!r:.80}")
    shape = _naturals(entry, "shape", name)
    if len(shape) > _MOST_DIMS:
        raise _Wrong(f"{name} has {len(shape)} dims, expected at most {_MOST_DIMS}")
    if prod(side or 1 for side in shape) * dtype.itemsize > _BIGGEST:
        raise _Wrong(f"{name} has the shape {shape}, beyond all memory")
    chunks = tuple(_chunk(name, part, dtype.itemsize, files) for part in _get(entry, "chunks", list, name))
    if problem := cover(shape, [chunk.box for chunk in chunks]):
        raise _Wrong(f"the chunks of {name}, of shape {shape}, {problem}")
    return Leaf(Spec(shape, dtype), chunks)


def _chunk(name: str, entry: Any, itemsize: int, files: tuple[DataFile, ...]) -> Chunk:
    offsets, sizes = _naturals(entry, "offsets", name), _naturals(entry, "sizes", name)
    file, begin = _natural(entry, "file", name), _natural(entry, "begin", name)
    nbytes = prod(sizes) * itemsize
    if file >= len(files) or begin < files[file].header_nbytes or begin + nbytes > files[file].nbytes:
        raise _Wrong(f"a chunk of {name} lies outside of the data files")
    crc32 = tuple(_crc(value, name) for value in _get(entry, "crc32", list, name))
    if len(crc32) != -(-nbytes // BLOCK):
        raise _Wrong(f"a chunk of {name} has {len(crc32)} checksums, expected one for each {BLOCK} of {nbytes} bytes")
    return Chunk(file, begin, offsets, sizes, crc32)


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
