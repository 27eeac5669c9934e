"""Load a checkpoint into the structure of another state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx.checkpoint.catalog import folder_named, with_reader
from muonfx.checkpoint.data import Reader
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.names import PARAMS
from muonfx.checkpoint.spec import StateSpec
from muonfx.checkpoint.target import Allow, Rules, Target
from muonfx.core import Transform
from muonfx.sharding.shards import FlatPiece
from muonfx.sharding.views import is_logical, layout_of, local, logical
from muonfx.tree import PyTree
from muonfx.tree.renaming import Rename

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load", "load_params", "read", "verify"]


def load(
    path: str | os.PathLike[str],
    like: PyTree | StateSpec,
    *,
    tx: Transform | None = None,
    allow_missing: Allow = False,
    allow_extra: Allow = False,
    allow_other_chain: bool = False,
    cast: Mapping[str, torch.dtype] | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
) -> PyTree:
    """Read a state from a checkpoint, under whatever layout it was written.

    Nothing is unpickled, and every byte that is used is checked. The state has the structure, dtypes, strides and
    devices of ``like``, and shares storage with nothing. Values come back bit for bit; a leaf may be of a wider dtype
    than in the file, which is exact.

    Patterns, in what follows, are names of leaves, the levels that names begin with ("momentum/trace"), or globs. One
    that means no leaf is an error. Names of parameters are those without what wrappers such as ``torch.compile`` put
    into them, in the checkpoint as in ``like``: a state moves between wrapped and unwrapped models.

    Args:
        path: of the checkpoint.
        like: a state (it is not written to), or a `StateSpec` as `muonfx.spec` makes it, for a state in host memory.
            Where leaves are `DTensor` or `FlatPiece`, each rank reads its part, and ``group`` must be given.
        tx: the transform that the state is for: its fingerprint is compared. A `StateSpec` brings its own. Where
            `muonfx.sharding.sharded` made it, ``like`` is this rank's state, as ``tx.init`` makes it, and so is what is
            returned, under whatever layout the checkpoint was written.
        allow_missing: leaves (True, or patterns) that need not be in the checkpoint; they are copied from ``like``.
        allow_extra: leaves of the checkpoint (True, or patterns) that need not be in ``like``.
        allow_other_chain: do not compare fingerprints.
        cast: pattern to dtype: leaves that may be rounded to that dtype, which must be that of ``like``.
        rename: from names in the checkpoint to those in ``like``: a function, or a dict. A key is a name, the levels
            that names begin with, or a pattern in which each ``*`` stands for any text, which takes the place of the
            same ``*`` in the value: ``{"*/encoder.*": "*/model.encoder.*"}``. The most exact entry counts. One that
            means no leaf is an error, as are two leaves of one new name.
        device: put all leaves there, instead of where those of ``like`` are.
        group: a process group, all of whose ranks call this together; if one of them fails, all do. None: this process
            alone reads, or, where ``tx`` is sharded and ``like`` no `StateSpec`, the ranks of its layout.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        MismatchError: leaves are missing, left over, of another shape or would be narrowed, or the chain is another;
            the message lists all of it, with what to do.
        CorruptError: the checkpoint is damaged; the message names the file, the leaf, and an older good checkpoint.
        FormatError: it was written by a newer version of muonfx.

    Warns:
        UserWarning: the transform's matrix products were computed in another dtype than they are now.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> params = {"w": torch.ones(2, 3)}
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), mfx.momentum().init(params))
        >>> half = mfx.spec(mfx.momentum(dtype=torch.bfloat16), params)
        >>> mfx.checkpoint.load(path, like=half)
        Traceback (most recent call last):
        muonfx.checkpoint.errors.MismatchError: ... does not fit, nothing was loaded:
          narrowing: 'trace/w' is torch.float32 in the checkpoint, and torch.bfloat16 is wanted
        what to do:
          to round: cast={'trace/w': torch.bfloat16} ...
        >>> mfx.checkpoint.load(path, like=half, cast={"trace": torch.bfloat16}).trace["w"].dtype
        torch.bfloat16
    """
    rules = Rules(allow_missing, allow_extra, allow_other_chain, cast or {}, rename or {})
    layout = layout_of(tx)
    if layout is None or tx is None or isinstance(like, StateSpec):
        return _load(path, lambda: like, tx, rules, device, group, section="")
    group = layout.group if group is None else group
    if is_logical(like):  # a rank without shards takes the other path, which calls `_load` as well
        return _load(path, lambda: like, tx, rules, device, group, section="")
    return local(tx, _load(path, lambda: logical(tx, like), tx, rules, device, group, section=""))


def load_params(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    tx: Transform | None = None,
    allow_missing: Allow = False,
    allow_extra: Allow = False,
    cast: Mapping[str, torch.dtype] | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
) -> PyTree:
    """Read the parameters from a checkpoint; `load` says what the arguments mean.

    Args:
        path: of the checkpoint.
        like: the parameters: a tree of tensors, which is not written to; meta tensors for parameters in host memory.
        tx: the transform that they are for: where `muonfx.sharding.sharded` made it, ``like`` holds this rank's pieces.
        allow_missing: parameters that need not be in the checkpoint.
        allow_extra: parameters in the checkpoint that need not be in ``like``.
        cast: pattern to dtype: parameters that may be rounded.
        rename: from names in the checkpoint to names in ``like``, as in `load`; both begin with "params/".
        device: put all parameters there.
        group: a process group, all of whose ranks call this together; where ``tx`` is sharded, that of its layout.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        MismatchError: the parameters are not those of ``like``; the message lists all differences.
        CorruptError: the checkpoint is damaged.
        FormatError: it was written by a newer version of muonfx.

    Example:
        >>> import tempfile
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), None, params={"w": torch.ones(2)})
        >>> mfx.checkpoint.load_params(path, like={"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    rules = Rules(allow_missing, allow_extra, True, cast or {}, rename or {})
    layout = layout_of(tx)
    if layout is None:
        return _load(path, lambda: like, None, rules, device, group, section=PARAMS)
    group = layout.group if group is None else group
    return layout.local(_load(path, lambda: layout.logical(like), None, rules, device, group, section=PARAMS))


def _load(
    path: str | os.PathLike[str],
    make_like: Callable[[], PyTree | StateSpec],
    tx: Transform | None,
    rules: Rules,
    device: torch.device | str | None,
    group: ProcessGroup | None,
    *,
    section: str,
) -> PyTree:
    if group is not None:
        from muonfx.checkpoint.distributed import load_together  # imports torch's DCP, which is slow

        def make_target() -> Target:
            return Target.of(make_like(), tx, rules, device, section, whole=False)

        return load_together(path, make_target, rules, group)
    path = folder_named(path)
    target = Target.of(make_like(), tx, rules, device, section, whole=True)

    def read_all(index: Index, reader: Reader) -> dict[str, Any]:
        leaves, rooms = target.make_room(index, str(path))
        # Without a group, Target.of has refused every leaf of which this rank holds only a shard.
        reader.read_into({source: _whole(room) for source, room in rooms.items()})
        return leaves

    return target.rebuild(with_reader(path, read_all))


def _whole(room: Tensor | FlatPiece) -> Tensor:
    whole = room.whole if isinstance(room, FlatPiece) else room
    assert whole is not None
    return whole


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

    def read_all(index: Index, reader: Reader) -> dict[str, Tensor]:
        leaves = {name: torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype) for name, leaf in index.leaves.items()}
        reader.read_into(leaves)
        return leaves

    return with_reader(folder_named(path), read_all)


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
    return with_reader(folder_named(path), lambda _, reader: reader.verify())
