"""Save a checkpoint: `save` writes it before it returns, `save_async` writes a copy in the background."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muonfx.checkpoint.background import Saving, start, wait_for_saves
from muonfx.checkpoint.data import Part
from muonfx.checkpoint.draft import Draft, Job
from muonfx.checkpoint.index import Leaf
from muonfx.core import Transform
from muonfx.sharding.boxes import Box
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["save", "save_async"]


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a state and, optionally, parameters to a checkpoint atomically.

    The checkpoint is a folder with ``index.json`` and safetensors files. The index is renamed into place after all data
    was flushed to the disk, so a save that is interrupted leaves the previous checkpoint intact. If several writers
    save to one path, the save that finishes last remains. The files of the replaced checkpoint are then removed, and
    those of killed saves of this machine. The files of running saves stay.

    Args:
        path: the folder of the checkpoint; `step_path` names one for each step. An existing checkpoint is replaced.
        state: a tree of tensors of any dtype and device, such as the state of ``tx``; None for no state. Leaves that
            share storage are written separately. At most one leaf at a time is copied to host memory.
        tx: the transform whose state is saved. Its fingerprint (a hash of its structure), its repr, and the dtypes of
            its matrix products are recorded, so that `load` can compare them. If `muonfx.sharding.sharded` made ``tx``,
            pass this rank's shards as ``state`` and ``params``, on all ranks; the whole tensors are stored.
        params: parameters to store in the same checkpoint.
        step: the number of steps taken.
        extra: JSON values, such as a seed, the position in the data, or losses. With a group, all ranks pass the same.
        keep: how many checkpoints to keep in the parent folder: those with the highest steps (see `prune`). The path
            must then be named by `step_path`. None: remove none.
        group: a process group, whose ranks must all call this function; each rank writes its shards. Leaves may be
            `torch.distributed.tensor.DTensor` or `FlatPiece` (an interval of a flattened tensor); plain tensors must be
            equal on all ranks. The ranks compare a checksum of every part that several of them hold. The ranks must
            share a file system. None: this process writes alone, or, if ``tx`` is sharded, the group of its layout.

    Returns:
        The absolute path of the checkpoint.

    Raises:
        TypeError: a leaf is not a dense tensor, or ``extra`` is not JSON; nothing was written.
        CheckpointError: the ranks of ``group`` pass different arguments, or hold different values of one leaf; the
            message names the leaf and the ranks. Nothing was written.
        WriteError: writing failed, for example because the disk is full. The previous checkpoint is unchanged, unless
            the attribute ``written`` of the error is True: then the new checkpoint is complete.

    Warns:
        UserWarning: the checkpoint was written, but another process saved to the path at the same time, old files
            could not be removed, or the folder has a checkpoint of a later step, which `latest` will return. Also if
            an earlier save in the background failed and `Saving.wait` was not called on it.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> params = {"w": torch.ones(2, 3)}
        >>> tx = mfx.momentum()
        >>> path = mfx.checkpoint.step_path(tempfile.mkdtemp(), 10)
        >>> path = mfx.checkpoint.save(path, tx.init(params), tx=tx, params=params, step=10)
        >>> sorted(mfx.checkpoint.read(path))
        ['params/w', 'trace/w']
        >>> mfx.checkpoint.load(path, like=mfx.spec(tx, params)).trace["w"].dtype
        torch.float32
    """
    job = Job.of(path, state, params, tx=tx, step=step, extra=extra, keep=keep, group=group)
    wait_for_saves()
    _run(job)
    return job.path


def save_async(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    group: ProcessGroup | None = None,
) -> Saving:
    """Copy the state and the parameters to host memory, and write the copy in a background thread.

    When this function returns, training may go on and overwrite the state. The copy needs as much memory as the leaves.
    The saves of a process run one after another, in the order of the calls, and the process waits for them before it
    exits. If a save fails and `Saving.wait` is not called on it, the next save warns, or the error is printed at exit.

    Args:
        path: the folder of the checkpoint, as in `save`.
        state: a tree of tensors, as in `save`.
        tx: the transform whose state is saved, as in `save`.
        params: parameters to store in the same checkpoint.
        step: the number of steps taken.
        extra: JSON values, as in `save`.
        keep: how many checkpoints to keep in the parent folder, as in `save`.
        group: as in `save`, but a sharded ``tx`` requires one. Use a new group for CPU tensors, such as
            ``dist.new_group(backend="gloo")``, and use it for nothing else until the save is done. Wait for the save
            before you destroy the group.

    Returns:
        A handle of the save, whose method `Saving.wait` waits for its end and raises the error of a failed save.

    Raises:
        TypeError: an argument is not valid, as in `save`. With a group, `Saving.wait` raises this error on all ranks.
        ValueError: ``tx`` is sharded over ranks, and no group is given.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> state = {"w": torch.ones(3)}
        >>> saving = mfx.checkpoint.save_async(tempfile.mkdtemp(), state, step=1)
        >>> _ = state["w"].zero_()
        >>> mfx.checkpoint.load(saving.wait(), like=state)
        {'w': tensor([1., 1., 1.])}
    """
    job = Job.of(path, state, params, tx=tx, step=step, extra=extra, keep=keep, group=group, copy=True)
    return start(job.path, partial(_run, job))


def _run(job: Job) -> None:
    if job.group is not None:
        from muonfx.checkpoint.together import save_together  # imports torch's DCP, which is slow

        save_together(job)
        return
    draft = Draft(job.path)
    with draft.discard_on_error():
        draft.begin()
        specs = {name: Spec(tuple(leaf.shape), leaf.dtype) for name, leaf in job.leaves.items()}
        parts = [Part(name, spec.dtype, Box((0,) * len(spec.shape), spec.shape)) for name, spec in specs.items()]
        file, chunks = draft.write(draft.data_file(0, 1), parts, job.leaves.__getitem__)
        leaves = {name: Leaf(spec, (chunks[name],)) for name, spec in specs.items()}
        draft.commit(replace(job.head, save_id=draft.save_id, files=(file,), leaves=leaves))
    draft.tidy(job.keep)
