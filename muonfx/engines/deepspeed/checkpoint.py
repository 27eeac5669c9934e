"""Save and load under any ZeRO stage and number of ranks; checkpoints store whole tensors by parameter name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import checkpoint, tree
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer
from muonfx.engines.deepspeed.unit import Unit
from muonfx.sharding.shards import FlatPiece

__all__ = ["load", "save"]


def save(
    engine: Any,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint with the trained parameters in full precision and the optimizer state.

    `load` reads it under any ZeRO stage and number of ranks. DeepSpeed's own checkpoints require the number of ranks
    that wrote them, and its universal checkpoints support only Adam's state. All ranks must call this together, and
    each rank writes its shards.

    Args:
        engine: the DeepSpeed engine, which is the first result of ``deepspeed.initialize``.
        path: the folder of the checkpoint, on a file system that all ranks share.
        step: the number of steps taken.
        extra: JSON values. The counters and the scheduler of DeepSpeed are not written; to keep them, pass, for
            example, ``{"scheduler": engine.lr_scheduler.state_dict()}``.
        keep: the number of checkpoints to keep in the parent folder; see `muonfx.checkpoint.save`.

    Returns:
        The absolute path of the checkpoint.

    Raises:
        TypeError: this module did not make the engine's optimizer.
        WriteError: the checkpoint could not be written; see `muonfx.checkpoint.save`.

    >>> from types import SimpleNamespace
    >>> save(SimpleNamespace(optimizer=None), "checkpoint")
    Traceback (most recent call last):
    TypeError: engine: its optimizer is None, expected one of muonfx.engines.deepspeed
    """
    own = _optimizer_of(engine)
    params, state = _global(own, own.all_units())
    return checkpoint.save(
        path, state, tx=own.tx, params=params, step=step, extra=extra, keep=keep, group=_group_of(own.all_units())
    )


def load(engine: Any, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint that `save` wrote into the model and the optimizer, under any ZeRO stage and number of ranks.

    Learning rates, counters and the scheduler are not changed; `muonfx.checkpoint.inspect` returns the ``step`` and
    ``extra`` of the checkpoint. All ranks must call this together.

    Args:
        engine: the DeepSpeed engine, as for `save`, before or after its first step.
        path: the folder of the checkpoint.

    Raises:
        TypeError: this module did not make the engine's optimizer.
        NotFoundError, MismatchError, CorruptError, FormatError: see `muonfx.checkpoint.load`; nothing was loaded.

    >>> import tempfile
    >>> from types import SimpleNamespace
    >>> from torch import nn
    >>> from muonfx.engines import deepspeed
    >>> model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> path = deepspeed.save(SimpleNamespace(optimizer=deepspeed.Muon(model)), tempfile.mkdtemp())
    >>> deepspeed.load(SimpleNamespace(optimizer=deepspeed.Muon(other)), path)
    >>> torch.equal(model.weight, other.weight)
    True
    """
    own = _optimizer_of(engine)
    units = own.all_units()
    group = _group_of(units)
    params, state = _global(own, units)
    params = checkpoint.load_params(path, like=params, group=group)
    leaves = tree.leaves(checkpoint.load(path, like=state, tx=own.tx, group=group))
    zero, is_cut = engine.optimizer, any(unit.pieces.layout and unit.pieces.layout.stage == 3 for unit in units)
    if is_cut:
        zero.checkpoint_event_prologue()  # partitions the persistent parameters, which stage 3 keeps whole
    for unit in units:
        unit.take(params, leaves, own.state)
    if hasattr(zero, "update_lp_params"):  # stages 1 and 2
        zero.update_lp_params()
    else:
        own.update_working_copy()
    if is_cut:
        zero.checkpoint_event_epilogue()


def _optimizer_of(engine: Any) -> ZeroOptimizer:
    found = engine.optimizer
    inner = getattr(found, "optimizer", found)
    if not isinstance(inner, ZeroOptimizer):
        raise TypeError(f"engine: its optimizer is {inner!r}, expected one of muonfx.engines.deepspeed")
    return inner


def _group_of(units: Iterable[Unit]) -> dist.ProcessGroup | None:
    layouts = [unit.pieces.layout for unit in units]
    group = next((layout.group for layout in layouts if layout is not None), None)
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def _global(own: ZeroOptimizer, units: Sequence[Unit]) -> tuple[dict[str, Any], Any]:
    """Return a dict from name to parameter, and the optimizer state, merged from all flat tensors of DeepSpeed.

    Each `Unit` holds the part for one flat tensor. The leaves of the results are whole tensors, or this rank's shards.
    """
    params: dict[str, Any] = {}
    parts: list[list[Any]] = []
    for unit in units:
        some, leaves = unit.to_global(own.state)
        params |= some
        parts.append(leaves)
    return params, units[0].unflatten([_merged(leaves) for leaves in zip(*parts, strict=True)])


def _merged(leaves: Iterable[Tensor | FlatPiece | None]) -> Tensor | FlatPiece | None:
    """Return the one value that is not None; of several step counts, return the largest."""
    found = [leaf for leaf in leaves if leaf is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack([leaf for leaf in found if isinstance(leaf, Tensor)]).amax(0)
