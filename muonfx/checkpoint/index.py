"""The index of a checkpoint: which file holds the bytes of each leaf, and the text format of the index.

A checkpoint is a folder with an index, ``index.json``, and data files, which are ordinary safetensors files. The index
gives the location of each leaf as one or more *chunks* (boxes of the leaf) and a checksum of every *block* of their
bytes. The index is written last, and its rename completes the checkpoint.

The text of an index is one JSON object with two members, formatted so that the second can be verified before it is
parsed: ``{"sha256": "<64 hex digits>",`` line feed ``"index": <text>}`` line feed. The digest is of ``<text>``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.checkpoint.errors import CheckpointError, CorruptError, FormatError
from muonfx.checkpoint.files import no_collection, read_regular
from muonfx.checkpoint.leaves import problem_of_boxes
from muonfx.internal.display import Report, Shown, Table, format_bytes, printable
from muonfx.sharding.shards.boxes import Box
from muonfx.tree import Spec
from muonfx.tree.dtypes import DTYPES, NAMES

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

_HEAD = b'{"sha256": "'
_WHOLE = re.compile(_HEAD + rb'(?P<digest>[0-9a-f]{64})",\n"index": (?P<text>.*)}\n', re.DOTALL)
"""An index file: the digest, and the text that it is of."""
_BIGGEST = 2**63 - 1


class DataFile(NamedTuple):
    """A data file of a checkpoint: its name in the folder, its size, and the size and CRC-32 of its header."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc32: str


class Chunk(NamedTuple):
    """Where one box of a tensor (an interval of indices in each dim) is stored.

    ``file`` is the number of the data file, ``begin`` the first byte. ``crc32`` has a checksum for every 4 MiB.
    """

    file: int
    begin: int
    box: Box
    crc32: tuple[str, ...]


class Leaf(NamedTuple):
    """One saved tensor: its global shape and dtype, and the places of its bytes in the data files.

    Each `Chunk` has the place of a rectangular part of the tensor, such as the shard of one rank.
    """

    spec: Spec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index(Shown):
    """The description of a checkpoint that `inspect` returns: everything except the values of tensors.

    Attributes:
        save_id: the random id of the save, which is part of the names of its files.
        step: the number of steps taken; None if `save` was given none.
        extra: the JSON values that were passed to `save`.
        fingerprint: a hash of the structure of the transform, 16 hex digits; None if `save` was given no transform.
        chain: the code that constructs the transform; None if `save` was given no transform.
        products: a dict from the name of an inner transform to the dtype of its matrix products, such as "bfloat16".
        versions: the versions of muonfx and torch.
        files: the data files.
        leaves: a dict from name to a `Leaf`, which has a ``spec`` (shape and dtype) and the location of its bytes.
        objects: a dict from name to a value that is no tensor, such as the groups of an optimizer ("param_groups").

    >>> import tempfile
    >>> import muonfx as mfx
    >>> index = mfx.checkpoint.inspect(
    ...     mfx.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2, 3)}, step=7)
    ... )
    >>> index.step, index.nbytes, index.leaves["w"].spec.shape
    (7, 24, (2, 3))
    """

    save_id: str = ""
    step: int | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: str | None = None
    chain: str | None = None
    products: dict[str, str] = field(default_factory=dict[str, str])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    files: tuple[DataFile, ...] = ()
    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    objects: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def nbytes(self) -> int:
        """The bytes of all saved tensors at their global shapes."""
        return sum(leaf.spec.nbytes for leaf in self.leaves.values())

    def report(self) -> Report:
        """Return the printed form: a heading with step, transform and versions, and a table of the saved tensors.

        A row is such as "trace/w  (2, 3)  float32  24 B  1", whose last number counts the stored parts of the leaf.
        """
        # Texts from a file may be very long, or have control characters of a terminal.
        lines = [f"{key:10}  {printable(text):.2000}" for key, text in self._heading().items()]
        rows: list[tuple[str, ...]] = []
        for name, (spec, chunks) in self.leaves.items():
            dtype_name = str(spec.dtype).removeprefix("torch.")
            rows.append(
                (name, str(spec.shape), dtype_name, format_bytes(spec.nbytes), str(len(chunks)))
            )
        table = Table(("leaf", "shape", "dtype", "bytes", "parts"), rows, right=(3, 4))
        return Report(("\n".join(lines), table, f"{len(rows)} leaves, {format_bytes(self.nbytes)}"))

    def _heading(self) -> dict[str, str]:
        """Return the lines above the printed table, such as ``{"step": "7", "chain": "-", ...}``, in their order."""
        file_nbytes = sum([file.nbytes for file in self.files])
        heading = {  # "-" for values that the save was not given
            "step": "-",
            "chain": "-",
            "written by": ", ".join(
                [f"{name} {version}" for name, version in self.versions.items()]
            ),
            "extra": "-",
            "files": f"{len(self.files)}, {format_bytes(file_nbytes)}",
        }
        if self.step is not None:
            heading["step"] = str(self.step)
        if self.fingerprint is not None:
            heading["chain"] = f"{self.chain} (fingerprint {self.fingerprint})"
        if self.extra:
            heading["extra"] = json.dumps(self.extra, sort_keys=True)
        if self.objects:
            heading["objects"] = f"{len(self.objects)} values that are no tensors"
        return heading


def blocks_of(data: memoryview) -> list[memoryview]:
    """Divide the bytes of a chunk into blocks of 4 MiB, each of which gets a checksum, as views of the same memory.

    A chunk of 10 MiB has three blocks, of which the last has 2 MiB.
    """
    blocks: list[memoryview] = []
    for begin in range(0, len(data), BLOCK):
        blocks.append(data[begin : begin + BLOCK])
    return blocks


def data_name(save_id: str, rank: int, ranks: int) -> str:
    """Return the name of the data file that a rank writes in a save over ``ranks`` ranks."""
    return f"data-{save_id}-{rank:05}-of-{ranks:05}.safetensors"


def unfinished_index_name(save_id: str) -> str:
    """Return the name of the index file of a save before it is complete and renamed to ``index.json``."""
    return f".{INDEX}-{save_id}.part"


def lock_name(save_id: str) -> str:
    """Return the name of the file that a save locks while it runs."""
    return f".save-{save_id}.lock"


def save_id_of(name: str) -> str | None:
    """Return the id of the save that has named a data file, an unfinished index or a lock; None for other names.

    >>> (
    ...     save_id_of("data-0123456789abcdef-00000-of-00001.safetensors"),
    ...     save_id_of("model.safetensors"),
    ... )
    ('0123456789abcdef', None)
    """
    for pattern in _OWN_NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            return match[1]
    return None


_SAVE_ID = "([0-9a-f]{16})"
_OWN_NAMES = (
    re.compile(rf"data-{_SAVE_ID}-\d+-of-\d+\.safetensors"),
    re.compile(rf"\.{re.escape(INDEX)}-{_SAVE_ID}\.part"),
    re.compile(rf"\.save-{_SAVE_ID}\.lock"),
)


@no_collection()
def text_of(index: Index) -> bytes:
    """Return the bytes of ``index.json``: ``{"sha256": "0f3a...", "index": {"format": "muonfx checkpoint", ...}}``.

    The index is the description of a checkpoint, which `read_index` reads. Raise `CheckpointError` if the bytes exceed
    the size that can be read again.
    """
    # The transform, None if the save was given none.
    chain: dict[str, Any] | None = None
    if index.fingerprint is not None:
        chain = {"fingerprint": index.fingerprint, "repr": index.chain, "products": index.products}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": index.save_id,
        "step": index.step,
        "extra": index.extra,
        "chain": chain,
        "versions": index.versions,
        "files": [file._asdict() for file in index.files],
        "leaves": {name: _json_of_leaf(leaf) for name, leaf in index.leaves.items()},
    }
    # Values that are no tensors, such as param groups.
    if index.objects:
        body["objects"] = {name: to_json(value, name) for name, value in index.objects.items()}
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    # JSON too, but with fixed bytes around the text, so that a reader can verify the text before it parses it.
    data = b"".join([_HEAD, digest, b'",\n"index": ', text, b"}\n"])
    if len(data) > LONGEST:
        raise CheckpointError(
            f"the index has {len(text)} bytes, expected at most {LONGEST}: save fewer leaves"
        )
    return data


def _json_of_leaf(leaf: Leaf) -> dict[str, Any]:
    """Return the entry of a leaf, which `_leaf` reads: ``{"dtype": "F32", "shape": [2], "chunks": [...]}``."""
    chunks = [
        {"file": file, "begin": begin, "offsets": box.offsets, "sizes": box.sizes, "crc32": crc32}
        for file, begin, box, crc32 in leaf.chunks
    ]
    return {"dtype": NAMES[leaf.spec.dtype], "shape": leaf.spec.shape, "chunks": chunks}


@no_collection()
def read_index(path: Path, *, with_leaves: bool = True) -> Index:
    """Read ``index.json``, the description of a checkpoint, which may be untrusted, in bounded time and memory.

    The file is ``{"sha256": "...", "index": {"format": "muonfx checkpoint", ...}}``, where the first value is the
    checksum of the second. Without leaves, ``Index.leaves`` is empty, and the call takes a fraction of the time. Raise
    `CorruptError` if the file is damaged, and `FormatError` if it has another version of the format.
    """
    data = read_regular(path, LONGEST)
    if not data.startswith(_HEAD):  # the bytes before the checksum
        raise CorruptError(
            f"{path} is damaged, or is not an index of muonfx, which begins with {_HEAD.decode()!r}"
        )
    # The checksum is compared before the text is parsed: the parser could fail on a damaged text, or accept it.
    match = _WHOLE.fullmatch(data)
    if match is None or hashlib.sha256(match["text"]).hexdigest().encode() != match["digest"]:
        raise CorruptError(f"{path} is damaged: its text does not match its checksum")
    # A text with a valid checksum may still be from another program, so `_index` checks each value in it.
    try:
        body = json.loads(match["text"])
        _require_format(body, path)
        return _index(body, with_leaves=with_leaves)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{path} has invalid contents: {type(error).__name__}: {error!s:.300}"
        ) from error


def _require_format(body: Any, path: Path) -> None:
    """Raise unless this version of muonfx can read the parsed text of an index.

    The text begins as ``{"format": "muonfx checkpoint", "version": 1, ...}``.
    """
    if body["format"] != FORMAT:
        raise FormatError(f"{path} has the format {body['format']!r:.80}, expected {FORMAT!r}")
    if body["version"] != VERSION:
        raise FormatError(
            f"{path} has version {body['version']!r:.80} of the format, and this muonfx reads version {VERSION}: "
            "upgrade to the version of muonfx that wrote it"
        )


# The checksum finds damage. The checks below are for files that were made to do harm, or by another program: they bound
# the memory that a reader allocates, and keep it within the folder.


def _index(body: Any, *, with_leaves: bool) -> Index:
    """Convert the parsed text of ``index.json`` to an `Index`, after a check of every number and name in it.

    Without leaves, which are most of the text, ``Index.leaves`` is empty.
    """
    step = body["step"]
    if step is not None:
        _require_sizes([step])
    chain: Any = body["chain"]
    if chain is None:  # the save was given no transform
        chain = {"fingerprint": None, "repr": None, "products": {}}
    files = tuple(_file(entry) for entry in body["files"])
    leaves: dict[str, Leaf] = {}
    if with_leaves:
        # Each leaf refers to files by number, so the files are converted first.
        leaves = {name: _leaf(name, entry, files) for name, entry in body["leaves"].items()}
        _require_filled(files, leaves)
    return Index(
        save_id=str(body["save_id"]),
        step=step,
        extra=dict(body["extra"]),
        fingerprint=chain["fingerprint"],
        chain=chain["repr"],
        products=dict(chain["products"]),
        versions=dict(body["versions"]),
        files=files,
        leaves=leaves,
        objects={name: from_json(value) for name, value in body.get("objects", {}).items()},
    )


def _file(entry: Any) -> DataFile:
    """Return the `DataFile` that an entry of the index describes.

    Raise for a name such as "../../etc/passwd": the reader opens only files that a save can have named.
    """
    # An entry is {"name": "data-...", "nbytes": 96, "header_nbytes": 80, "header_crc32": "..."}, for example.
    file = DataFile(**entry)
    _require_sizes([file.nbytes, file.header_nbytes])
    if save_id_of(file.name) is None:
        raise ValueError(f"{file.name:.80} is not the name of a data file")
    if file.header_nbytes > LONGEST_HEADER:  # the reader allocates memory for it
        raise ValueError(
            f"the header of {file.name} has {file.header_nbytes} bytes, at most {LONGEST_HEADER}"
        )
    return file


def _leaf(name: str, entry: Any, files: tuple[DataFile, ...]) -> Leaf:
    """Return the `Leaf` that an entry of the index describes, such as ``{"dtype": "F32", "shape": [2], ...}``.

    Raise unless a tensor can have this shape, and the chunks, parts of the tensor, hold each element once. Two chunks
    of a matrix with 8 rows may have the rows 0 to 3 and 4 to 7.
    """
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:  # such as one of a newer version of torch
        raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r:.80}")
    shape = tuple(entry["shape"])
    _require_shape_of_tensor(name, shape, dtype.itemsize)
    chunks = tuple(
        _chunk(name, chunk_entry, dtype.itemsize, files) for chunk_entry in entry["chunks"]
    )
    problem = problem_of_boxes(shape, [chunk.box for chunk in chunks])
    if problem is not None:
        raise ValueError(f"the chunks of {name!r}, of shape {shape}, {problem}")
    return Leaf(Spec(shape, dtype), chunks)


def _require_shape_of_tensor(name: str, shape: tuple[Any, ...], itemsize: int) -> None:
    """Raise unless a tensor can have this shape, with elements of ``itemsize`` bytes.

    torch computes strides also for a tensor without elements, so a size of 0 does not make the others harmless. The
    shape (0, 2**62, 4) has no elements, and a stride of 2**64, which is no int of torch.
    """
    _require_sizes(shape)
    other_sizes = [size for size in shape if size != 0]
    strides_fit = prod(other_sizes) * itemsize <= _BIGGEST
    if len(shape) > _MOST_DIMS or not strides_fit:
        raise ValueError(f"{name!r} has the shape {shape!r:.80}, which no tensor can have")


def _chunk(name: str, entry: Any, itemsize: int, files: tuple[DataFile, ...]) -> Chunk:
    """Return the `Chunk`, the position of a part of the leaf ``name`` in a file, that an entry of the index describes.

    Raise unless its bytes are within the data file, after the header, and each block of them has a checksum.
    """
    box = Box(tuple(entry["offsets"]), tuple(entry["sizes"]))
    chunk = Chunk(entry["file"], entry["begin"], box, tuple(entry["crc32"]))
    _require_sizes([chunk.file, chunk.begin, *box.offsets, *box.sizes])
    nbytes = prod(box.sizes) * itemsize
    # A file consists of its header and then values. The last byte of the chunk is at most the last of the file.
    if chunk.file >= len(files):
        raise ValueError(
            f"a chunk of {name!r} is in file {chunk.file}, and there are {len(files)} data files"
        )
    file = files[chunk.file]
    if not file.header_nbytes <= chunk.begin <= file.nbytes - nbytes:
        raise ValueError(f"a chunk of {name!r} is outside of the data files")
    blocks = -(-nbytes // BLOCK)  # rounded up: 3 for 10 MiB in blocks of 4 MiB
    if len(chunk.crc32) != blocks:
        raise ValueError(
            f"a chunk of {name!r} has {len(chunk.crc32)} checksums, expected one for each {BLOCK} bytes"
        )
    return chunk


def _require_filled(files: tuple[DataFile, ...], leaves: dict[str, Leaf]) -> None:
    """Raise unless the headers and the chunks of all leaves have as many bytes as the data files.

    Otherwise an index could name the same bytes of a small file for many large leaves, which would fill the memory.
    """
    # The sum of bytes for each file, in the order of the files: first its header, then its chunks.
    filled_nbytes = [file.header_nbytes for file in files]
    for leaf in leaves.values():
        for chunk in leaf.chunks:
            filled_nbytes[chunk.file] += prod(chunk.box.sizes) * leaf.spec.dtype.itemsize
    if filled_nbytes != [file.nbytes for file in files]:
        raise ValueError("the leaves do not fill the data files")


def _require_sizes(values: Iterable[Any]) -> None:
    """Raise unless each value from an index is an int that can be a size or position."""
    for value in values:  # a call for each number would take much of the time of a load
        if type(value) is not int or not 0 <= value <= _BIGGEST:
            raise ValueError(f"expected a size, found {value!r:.80}")


# ------------------------------------------------------------------------------------------- values that are no tensors

# The entries of a param group, for example, as JSON: exact, and without pickle. JSON has no tuples, no infinite numbers
# and only strings as keys. Such a value is written as an object with one member, whose key begins with "~": the tuple
# (0.9, 0.95) is {"~tuple": [0.9, 0.95]}.


def to_json(value: Any, name: str) -> Any:
    """Return a value as JSON, from which `from_json` returns an equal value of the same type.

    Args:
        value: None, a bool, int, float, str or bytes, a tensor of at most one dim that is not complex, or a list,
            tuple, dict or Counter of such values.
        name: the name of the value, for an error. Names of inner values are below it: "scheduler/base_lrs/0".

    Raises:
        TypeError: the value, or one in it, is of another type or on the meta device; the message has its name.

    >>> to_json({"lr": 0.1, "betas": (0.9, 0.95), "best": float("inf")}, "group")
    {'lr': 0.1, 'betas': {'~tuple': [0.9, 0.95]}, 'best': {'~float': 'inf'}}
    """
    # Exactly: an instance of a subclass would be loaded as one of its base class.
    value_type = type(value)
    # JSON has these types itself. All others get a tag, the key of an object with one member.
    if value is None or value_type in (bool, int, str):
        return value
    if value_type is float:  # JSON has no infinity and no NaN
        return value if isfinite(value) else {"~float": repr(value)}
    if value_type is bytes:
        return {"~bytes": base64.b64encode(value).decode()}
    if value_type in (list, tuple):
        items = [to_json(item, f"{name}/{index}") for index, item in enumerate(value)]
        return items if value_type is list else {"~tuple": items}
    if value_type in (dict, OrderedDict, Counter):
        return _dict_to_json(value, name)
    if isinstance(value, Tensor) and value.is_meta:
        raise TypeError(f"{name!r} is on the meta device, expected a tensor with values")
    # A rate may be a tensor of shape () or (1,), and a schedule may have a table with a rate for each step.
    if (
        isinstance(value, Tensor)
        and value.ndim <= 1
        and value.dtype in NAMES
        and not value.dtype.is_complex
    ):
        return {"~tensor": [NAMES[value.dtype], to_json(value.tolist(), name)]}
    raise TypeError(
        f"{name!r} is a {value_type.__module__}.{value_type.__qualname__}, expected a tensor, or a value that JSON can "
        "hold (None, bool, int, float, str, bytes, a tensor of at most one dim, or a list, tuple or dict of these): a "
        "checkpoint has no pickle. Convert it, for example by float() or tolist(), or leave it out"
    )


def _dict_to_json(values: dict[Any, Any], name: str) -> dict[str, Any]:
    """Return a dict as JSON: as an object, or as a list of its items if some keys are no strings or begin with ``~``.

    >>> _dict_to_json({"gamma": 0.5}, "state"), _dict_to_json({30: 0.5}, "state")
    ({'gamma': 0.5}, {'~dict': [[30, 0.5]]})
    """
    json_of_key = {key: to_json(value, f"{name}/{key}") for key, value in values.items()}
    is_counter = type(values) is Counter
    has_plain_keys = all(map(_is_plain_key, values))
    if has_plain_keys and not is_counter:
        return json_of_key
    # JSON would turn the key 30 into "30". A list of pairs keeps the type of each key.
    pairs: list[list[Any]] = []
    for key, json_value in json_of_key.items():
        json_key = to_json(key, f"{name}/{key}")
        pairs.append([json_key, json_value])
    tag = "~counter" if is_counter else "~dict"
    return {tag: pairs}


def _is_plain_key(key: object) -> bool:
    """Return whether a key can be the key of an object in JSON: a string that is not taken for a tag."""
    return type(key) is str and not key.startswith("~")


def from_json(written: Any) -> Any:
    """Return the value that `to_json` has written; raise ValueError for JSON that it does not write.

    >>> from_json({"~tuple": [1, {"~float": "-inf"}]})
    (1, -inf)
    """
    if isinstance(written, list):
        return [from_json(item) for item in written]
    if not isinstance(written, dict):
        return written
    if not any(key.startswith("~") for key in written):  # an ordinary dict, without a tag
        return {key: from_json(value) for key, value in written.items()}
    # One member, such as {"~tuple": [1, 2]}; ValueError for more.
    ((tag, content),) = written.items()
    if tag not in _DECODERS:
        raise ValueError(f"{tag!r} is not a kind of value in a checkpoint")
    decode = _DECODERS[tag]
    return decode(from_json(content))


def _counter(items: list[Any]) -> Counter[Any]:
    """Return a Counter with the counts of a list of pairs, such as ``[[30, 2]]``."""
    return Counter(dict(items))


def _tensor(content: list[Any]) -> Tensor:
    """Return a tensor from the name of its dtype and its number or list of numbers.

    Raise ValueError if the dtype cannot hold them, or if there is a list in the list.

    >>> _tensor(["float32", 0.5]), _tensor(["int64", [1, 2]])
    (tensor(0.5000), tensor([1, 2]))
    """
    dtype_name, numbers = content
    try:
        tensor = torch.tensor(numbers, dtype=DTYPES[dtype_name])
    except RuntimeError as error:
        raise ValueError(f"{numbers!r:.80} is no {dtype_name}: {error}") from error
    if tensor.ndim > 1:
        raise ValueError(f"{numbers!r:.80} has {tensor.ndim} dims, expected at most one")
    return tensor


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "~float": float,
    "~bytes": partial(base64.b64decode, validate=True),
    "~tuple": tuple,
    "~dict": dict,
    "~counter": _counter,
    "~tensor": _tensor,
}
"""By tag: the function that makes a value of the content, in which inner values are restored already."""
