"""Looking at a checkpoint without a state to load it into."""

from __future__ import annotations

import os

from torch import Tensor

from muonfx.checkpoint.index import Index
from muonfx.checkpoint.keep import folder_named, read_index, with_reader
from muonfx.checkpoint.reading import Reader

__all__ = ["inspect", "read", "verify"]


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all leaves of a checkpoint as they are, by name, into host memory; every byte is checked.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        CorruptError: it is damaged.
        FormatError: it was written by a newer version of muonfx.

    >>> import tempfile
    >>> mfx.checkpoint.read(mfx.checkpoint.save(tempfile.mkdtemp(), {"trace": {"w": torch.ones(2)}}))
    {'trace/w': tensor([1., 1.])}
    """
    return with_reader(folder_named(path), lambda index, reader: {name: reader.read(name) for name in index.leaves})


def inspect(path: str | os.PathLike[str]) -> Index:
    """Read what a checkpoint says about itself: step, extra, chain, versions, and the leaves' shapes and dtypes.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        CorruptError: its index is damaged.
        FormatError: it was written by a newer version of muonfx.

    >>> import tempfile
    >>> index = mfx.checkpoint.inspect(
    ...     mfx.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=3, extra={"seed": 0})
    ... )
    >>> index.step, index.extra, index.leaves["w"].spec
    (3, {'seed': 0}, Spec(shape=(2,), dtype=torch.float32))
    """
    return read_index(path)


def verify(path: str | os.PathLike[str]) -> Index:
    """Read every byte of a checkpoint and compare the checksums.

    Returns:
        What `inspect` returns.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        CorruptError: it is damaged; the message names the file and the leaf.
        FormatError: it was written by a newer version of muonfx.

    >>> import tempfile
    >>> mfx.checkpoint.verify(mfx.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)})).nbytes
    8
    """

    def checked(index: Index, reader: Reader) -> Index:
        reader.verify()
        return index

    return with_reader(folder_named(path), checked)
