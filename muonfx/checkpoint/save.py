"""Save a checkpoint: `save` writes it before it returns, `save_async` writes a copy in the background.

A process has at most one save in the background: the next save first waits for it. So the saves of a process are
written in the order of the calls, two saves never exchange messages on one process group at the same time, and host
memory holds one copy of a state.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx.checkpoint.files import no_collection
from muonfx.checkpoint.folder import StrPath, check_step, folder_named, step_of
from muonfx.checkpoint.index import Index, from_json, to_json
from muonfx.checkpoint.leaves import (
    GROUPS,
    PARAMS,
    SCHEDULER,
    LocalLeaf,
    in_section,
    is_optimizer,
    is_sharded,
    named_tensors,
    require_whole,
)
from muonfx.checkpoint.writer import SaveRequest, raise_on_all_ranks, write_checkpoint
from muonfx.core import Transform
from muonfx.core.checks import positive_int
from muonfx.core.precision import product_dtypes
from muonfx.core.transform import require_transform
from muonfx.core.value import without_stand_ins
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.transform import Sharded, is_global, to_global
from muonfx.tree import PyTree
from muonfx.tree.dtypes import NAMES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save(
    path: StrPath,
    state: PyTree,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    scheduler: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a state and, optionally, parameters to a checkpoint atomically.

    The checkpoint is a folder with ``index.json`` and safetensors files. The index is renamed into place after all data
    was flushed to the disk, so a save that is interrupted leaves the previous checkpoint intact. If several writers
    save to one path, the save that finishes last remains. The files of the replaced checkpoint are then removed, and
    the files that killed saves of this machine have left. The files of running saves stay.

    A save of many bytes that takes more than two seconds shows its progress on a terminal, on rank 0 only.

    Args:
        path: the folder of the checkpoint; `step_path` names one for each step. An existing checkpoint is replaced.
        state: a tree of tensors of any dtype and device, such as the state of ``tx``; None for no state. Leaves that
            share storage are written separately. At most one leaf at a time is copied to host memory. Or a
            `muonfx.Muon` or `muonfx.TransformOptimizer`: its state, and the numbers and schedules of its param groups.
        tx: the transform whose state is saved. Its fingerprint (a hash of its structure), its repr, and the dtypes of
            its matrix products are recorded, so that `load` can compare them. If `muonfx.sharding.sharded` made ``tx``,
            pass this rank's shards as ``state`` and ``params``, on all ranks; the whole tensors are stored. Not given
            for an optimizer, which has its transform.
        params: parameters to store in the same checkpoint. ``model.state_dict()`` also has buffers, such as the running
            statistics of batch norm.
        scheduler: a scheduler of torch for the optimizer ``state``, to store its ``state_dict()`` with it.
        step: the number of steps taken.
        extra: JSON values, such as a seed, the position in the data, or losses. With a group, all ranks pass the same.
        keep: how many checkpoints to keep in the parent folder: those with the highest steps (see `prune`). The path
            must then be named by `step_path`. None: remove none.
        group: a process group, whose ranks must all call this function; each rank writes its shards. Leaves may be
            `torch.distributed.tensor.DTensor` or `FlatShard` (an interval of a flattened tensor); plain tensors must be
            equal on all ranks. The ranks compare a checksum of every part that several of them hold. The ranks must
            share a file system. None: this process writes alone, or, if ``tx`` is sharded, the group of its layout.

    Returns:
        The absolute path of the checkpoint.

    Raises:
        TypeError: a leaf is not a dense tensor, or ``extra``, a group or the scheduler is not JSON; nothing was
            written.
        CheckpointError: the ranks of ``group`` pass different arguments, or hold different values of one leaf; the
            message names the leaf and the ranks. Or a group of other ranks of the job has saved to the path. Nothing
            was written.
        WriteError: writing failed, for example because the disk is full. The previous checkpoint is unchanged, unless
            the attribute ``written`` of the error is True: then the new checkpoint is complete. If it
            cannot be known which of the two is at the path, the message says so.

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

        A whole optimizer with its scheduler, and the parameters of its model:

        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = mfx.Muon(model, lr=1e-3, adamw_lr=4e-3)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> params = model.state_dict()
        >>> path = mfx.checkpoint.save(
        ...     tempfile.mkdtemp(), optimizer, params=params, scheduler=scheduler
        ... )
        >>> _ = mfx.checkpoint.load(path, optimizer, params=params, scheduler=scheduler)
    """
    tx = _transform_of(state, tx)
    if group is None and isinstance(tx, Sharded):
        group = tx.layout.group
    try:
        request = _request(
            path,
            state,
            params,
            tx=tx,
            scheduler=scheduler,
            step=step,
            extra=extra,
            keep=keep,
            group=group,
        )
    except Exception as error:
        if group is not None:  # the other ranks wait for this one
            raise_on_all_ranks(error, _path_in_errors(path), group)
        raise
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    write_checkpoint(request, shows_progress=is_first_rank)
    return request.path


def save_async(
    path: StrPath,
    state: PyTree,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    scheduler: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    group: ProcessGroup | None = None,
) -> Saving:
    """Copy the state and the parameters to host memory, and write the copy in a background thread.

    When this function returns, training may go on and overwrite the state. The copy needs as much memory as the leaves.
    The saves of a process run one after another, in the order of the calls: a save first waits until the one in the
    background has ended. The process waits for it before it exits. If a save fails and `Saving.wait` is not called on
    it, the next save warns, or the error is printed at exit.

    Args:
        path: the folder of the checkpoint, as in `save`.
        state: a tree of tensors, or an optimizer, as in `save`.
        tx: the transform whose state is saved, as in `save`.
        params: parameters to store in the same checkpoint.
        scheduler: a scheduler of torch, as in `save`.
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
    tx = _transform_of(state, tx)
    if group is None and isinstance(tx, Sharded) and tx.layout.group is not None:
        # Two threads that communicate on one group would mix up their messages, and training continues with this group.
        raise ValueError(
            "save_async of a sharded state requires a process group that nothing else uses: pass "
            'group=dist.new_group(backend="gloo")'
        )
    try:
        request = _request(
            path,
            state,
            params,
            tx=tx,
            scheduler=scheduler,
            step=step,
            extra=extra,
            keep=keep,
            group=group,
        )
        # Training may change the originals.
        copies = {name: leaf.copied() for name, leaf in request.leaves.items()}
    except Exception as error:
        if group is None:
            raise
        # The other ranks wait for this one in their background threads.
        where = _path_in_errors(path)
        # Its frames would keep the state alive until the next save.
        without_frames = error.with_traceback(None)
        return start(where, partial(raise_on_all_ranks, without_frames, where, group))
    return start(request.path, partial(write_checkpoint, replace(request, leaves=copies)))


def _path_in_errors(path: StrPath) -> Path:
    """Return the path of a save with invalid arguments: absolute, as on the other ranks, if it can name a folder."""
    with suppress(Exception):
        return folder_named(path)
    return Path(str(path))


def _transform_of(state: PyTree, tx: Transform | None) -> Transform | None:
    """Return the transform whose state is saved: the argument ``tx`` of `save`, or the transform of an optimizer."""
    if not is_optimizer(state):
        return tx
    if tx is not None:
        raise TypeError("tx: an optimizer is saved with its transform: leave tx out")
    return state.transform


def _request(
    path: StrPath,
    state: PyTree,
    params: PyTree,
    *,
    tx: Transform | None,
    scheduler: Any,
    step: int | None,
    extra: Mapping[str, Any] | None,
    keep: int | None,
    group: ProcessGroup | None,
) -> SaveRequest:
    """Check the arguments of `save` or `save_async`, and return them as one value for the writer.

    Before that, wait for the save in the background. If ``state`` is an optimizer, ``tx`` is its transform.
    """
    finish_earlier_save()
    folder = folder_named(path)  # absolute, so that a later chdir() does not change it
    if not isinstance(tx, Transform | None):
        require_transform("tx", tx)  # raises
    require_valid(folder, step, keep)
    optimizer: Any = None
    if is_optimizer(state):
        optimizer = state
        state = optimizer.transform_state
    with no_collection():
        leaves = _leaves_of(state, params, tx, is_alone=group is None)
        head = replace(head_of(step, extra), objects=_objects_of(optimizer, scheduler))
        if tx is not None:
            head = _with_transform(head, tx, leaves)
        local_leaves = {name: LocalLeaf.of(leaf) for name, leaf in leaves.items()}
    return SaveRequest(folder, head, local_leaves, keep, group)


def require_valid(path: Path, step: int | None, keep: int | None) -> None:
    """Raise unless ``step`` and ``keep`` are arguments that a save to ``path`` can have.

    ``keep=`` requires a path with a step, such as "runs/step-000000100": it keeps those with the highest steps.
    """
    if step is not None:
        check_step(step)
    if keep is not None:
        positive_int("keep", keep)
        if step_of(path) is None:
            raise ValueError(
                f"keep= compares the steps in names: save to step_path({str(path.parent)!r}, step)"
            )


def _leaves_of(
    state: PyTree, params: PyTree, tx: Transform | None, *, is_alone: bool
) -> dict[str, Any]:
    """Return the tensors to save by name, "trace/w" of the state or "params/w"; raise if one cannot be written.

    ``is_alone`` is True if this process saves without others: then no leaf may be a part of a tensor on one rank.
    """
    # With a sharded transform, this rank has parts of tensors as plain tensors. They get their positions in the wholes.
    if isinstance(tx, Sharded):
        if state is not None and not is_global(state):
            state = to_global(tx, state)
        if params is not None:
            params = tx.layout.to_global(params)
    named: dict[str, Any] = {}
    if state is not None:
        named |= named_tensors(state)
    if params is not None:
        named |= named_tensors(params, section=PARAMS)
    # None marks a place in the tree that has no tensor, such as a parameter without a momentum.
    leaves = {name: leaf for name, leaf in named.items() if leaf is not None}
    for name, leaf in leaves.items():
        require_writable(name, leaf)
        if is_alone:  # the parts on other ranks would be missing
            require_whole(
                name, leaf, "pass group= on all ranks, such as group=torch.distributed.group.WORLD"
            )
    return leaves


def require_writable(name: str, leaf: Any) -> None:
    """Raise unless a checkpoint can hold a leaf: a dense tensor with values, or a part of one on this rank.

    Refused are, for example, a meta tensor, a sparse tensor, and a `DTensor` of which each rank holds a summand.
    """
    if leaf.dtype not in NAMES:
        raise TypeError(
            f"the leaf {name!r} has the dtype {leaf.dtype}, which a checkpoint cannot hold"
        )
    if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_meta):
        raise TypeError(
            f"the leaf {name!r} must be a dense tensor with values, found {leaf.layout}, {leaf.device}"
        )
    if not is_sharded(leaf):
        return
    if is_dtensor(leaf) and any(placement.is_partial() for placement in leaf.placements):
        raise TypeError(
            f"the leaf {name!r} has the placements {leaf.placements}, of which each rank holds a summand, expected "
            "Shard or Replicate: redistribute it before the save"
        )


def _objects_of(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the groups of an optimizer and the state of its scheduler by name; raise if JSON cannot hold them.

    For example ``{"param_groups": [{"lr": 0.1, ...}], "scheduler": {"class": "StepLR", "state": {...}}}``.
    """
    if optimizer is None:  # the state of a transform is saved, which has no groups
        if scheduler is not None:
            raise TypeError(
                "scheduler: it is stored with an optimizer: pass the optimizer as the state"
            )
        return {}
    objects: dict[str, Any] = {GROUPS: optimizer.saved_groups()}
    if scheduler is not None:
        objects[SCHEDULER] = {"class": type(scheduler).__name__, "state": scheduler.state_dict()}
    # A copy, since `save_async` writes it while training changes the originals.
    return {name: from_json(to_json(value, name)) for name, value in objects.items()}


def head_of(step: int | None, extra: Mapping[str, Any] | None) -> Index:
    """Return an index with the step, the ``extra`` values and the versions, to which a save adds all other fields."""
    package = sys.modules["muonfx"]  # modules inside the package must not import it
    versions = {"muonfx": package.__version__, "torch": str(torch.__version__)}
    return Index(step=step, extra=_as_json(dict(extra or {})), versions=versions)


def _as_json(extra: dict[str, object]) -> dict[str, object]:
    """Return a copy of ``extra`` through JSON; raise if JSON cannot hold it or changes it.

    JSON turns the tuple in ``{"sizes": (1, 2)}`` into a list, so `load` would return another value than was saved.
    """
    try:
        copied: dict[str, object] = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            "extra must be JSON (dicts, lists, strings, finite numbers, bools, None, without circles): "
            + str(error)
        ) from error
    changed_keys = [
        str(key) for key, value in extra.items() if key not in copied or copied[key] != value
    ]
    if changed_keys:
        raise ValueError(
            f"extra: found values that JSON changes: {', '.join(sorted(changed_keys))}; expected lists instead of "
            "tuples, and strings as keys"
        )
    return copied


def _with_transform(head: Index, tx: Transform, leaves: Mapping[str, Any]) -> Index:
    """Return an index with the description of a transform, such as ``chain="momentum()"``.

    ``leaves`` are the tensors to save by name. The description is cached on the transform, because a run saves often.
    """
    # The dtypes of matrix products depend on the dtypes and the device of the parameters.
    params = _params_or_floats(leaves)
    dtypes = frozenset(leaf.dtype for leaf in params)
    device: torch.device | None = None
    if params:
        device = torch.device(params[0].device)
    cache_key = ("checkpoint", dtypes, device)
    description = tx.derived.get(cache_key)
    if description is None:
        description = _description_of(tx, dtypes, device)
        if not tx.tensors:  # a number in a tensor may change in place
            tx.derived[cache_key] = description
    return replace(head, **description)


def _description_of(
    tx: Transform, dtypes: Collection[torch.dtype], device: torch.device | None
) -> dict[str, Any]:
    """Return the fields of an `Index` that describe a transform, by name.

    The parameters have these dtypes and this device, which is None if there are none.
    """
    plain_tx = without_stand_ins(tx)  # without wrappers such as offload, which change no number
    products: dict[str, str] = {}
    if device is not None:
        products = product_dtypes(plain_tx, dtypes, device)
    return {"fingerprint": tx.fingerprint, "chain": repr(plain_tx), "products": products}


def _params_or_floats(leaves: Mapping[str, Any]) -> list[Any]:
    """Return the floating-point parameters among the leaves; without any, all floating-point leaves.

    The dtypes of matrix products depend on the parameters' dtypes. Parameters that are not saved are assumed to have
    the dtypes of the state. Of "count", "trace/w" and "params/w", the result has "params/w"; without that, "trace/w".
    """
    params: list[Any] = []
    float_leaves: list[Any] = []
    for name, leaf in leaves.items():
        if not leaf.dtype.is_floating_point:  # such as a step count
            continue
        float_leaves.append(leaf)
        if in_section(name, PARAMS):
            params.append(leaf)
    return params or float_leaves


# ------------------------------------------------------------------------------------------------------- the background


class Saving:
    """The handle of a save that runs in a background thread; `save_async` returns it.

    >>> import tempfile
    >>> saving = mfx.checkpoint.save_async(tempfile.mkdtemp(), {"w": torch.ones(2)})
    >>> saving.wait() == saving.path, saving.done
    (True, True)
    """

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path = path
        self._future = future
        self._is_reported = False

    def __repr__(self) -> str:
        progress = "ended" if self.done else "running"
        return f"<save to {self.path}, {progress}>"

    @property
    def done(self) -> bool:
        """True if the save has ended, successfully or with an error. `wait` raises that error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is written.

        Args:
            timeout: the longest time to wait, in seconds; None for no limit.

        Returns:
            The path of the checkpoint.

        Raises:
            TimeoutError: the save is not done yet.
            CheckpointError: the save failed, as in `save`.
        """
        # A TimeoutError of `exception` itself is raised here and is not a failure of the save, which continues.
        error = self._future.exception(timeout)
        self._is_reported = True
        if error is not None:
            raise error
        return self.path

    def unreported_failure(self) -> str | None:
        """Wait for the end of the save, and return a sentence about its error; None without one.

        An error is reported once: None is returned, too, if `wait` has raised it or this method has returned it.
        """
        error = self._future.exception()
        if error is None or self._is_reported:
            return None
        self._is_reported = True
        return f"the save to {self.path} in the background failed, and wait() was not called on it: {error!r}"


_latest: Saving | None = None
"""The last save that was started in the background. All earlier ones have ended, and their errors were reported."""


def start(path: Path, save: Callable[[], None]) -> Saving:
    """Call ``save``, a function that writes the checkpoint at ``path``, in a thread; return a handle to wait for it.

    `save_async` calls this after the end of the earlier save, so at most one save runs at a time.
    """
    global _latest  # the module waits for it before the next save, and at exit
    # One thread per save, which ends with it: threads do not survive a fork. The interpreter waits for it at exit.
    pool = ThreadPoolExecutor(1, thread_name_prefix="muonfx-save")
    _latest = Saving(path, pool.submit(save))
    pool.shutdown(wait=False)
    return _latest


def wait_for_save() -> None:
    """Wait until the save in the background has ended, if there is one."""
    if _latest is not None:
        wait([_latest._future])


def finish_earlier_save() -> None:
    """Wait until the save in the background has ended; warn once if it failed and `Saving.wait` was not called."""
    if _latest is not None and (failure := _latest.unreported_failure()):
        warnings.warn(f"{failure}: call wait() on the result of save_async", stacklevel=4)


@atexit.register
def _report_at_exit() -> None:
    """Print, when the process exits, the error of a save on which `Saving.wait` was not called."""
    if _latest is not None and (failure := _latest.unreported_failure()):
        print(f"muonfx: {failure}", file=sys.stderr)


def _forget() -> None:
    """Forget the save in a child process, which does not have its thread; the parent process reports its error."""
    global _latest
    _latest = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
