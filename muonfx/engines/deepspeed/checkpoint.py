"""Save and load under any ZeRO stage and number of ranks; checkpoints store whole tensors by parameter name.

Ranks may have different parameters: a pipeline stage has its own layers, and a rank of expert parallelism has its own
experts. A checkpoint contains the parameters of all ranks, as one process would name them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import checkpoint, tree
from muonfx.core import Transform
from muonfx.engines.deepspeed.flat_optimizer import FlatOptimizer, States
from muonfx.engines.deepspeed.flat_params import FlatParams, WithPosition
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer
from muonfx.engines.deepspeed.parallel import (
    all_ranks,
    gather_objects,
    global_names,
    raising_on_all_ranks,
)
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.tree import PyTree, Spec


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
        extra: JSON values. The counters, the scheduler and the rates of the groups are not written; to keep them, pass,
            for example, ``{"scheduler": engine.lr_scheduler.state_dict(), "groups": groups}`` with the list ``[{"lr":
            group["lr"]} for group in engine.optimizer.param_groups]``.
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
    optimizer = _optimizer_of(engine)
    with optimizer.without_new_state():
        values = _Values.of(optimizer, FlatParams.to_save)
        group = all_ranks()
        return checkpoint.save(
            path,
            values.state,
            tx=values.tx,
            params=values.params,
            step=step,
            extra=extra,
            keep=keep,
            group=group,
        )


def load(engine: Any, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint that `save` wrote into the model and the optimizer, under any ZeRO stage and number of ranks.

    Learning rates, counters and the scheduler are not changed; `muonfx.checkpoint.inspect` returns the ``step`` and
    ``extra`` of the checkpoint. Restore the rates of the groups as well as the scheduler: torch's schedulers write them
    at their next step only. All ranks must call this together.

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
    optimizer = _optimizer_of(engine)
    # A failed load leaves none, because weights may be loaded after it.
    with optimizer.without_new_state():
        params, leaves = _loaded_values(path, optimizer)
    flat_optimizers = optimizer.all_flat_optimizers()
    # At stages 1 to 3 this is DeepSpeed's own optimizer, a wrapper of this one.
    zero = engine.optimizer
    is_stage_1_or_2 = hasattr(zero, "update_lp_params")
    is_stage_3 = hasattr(zero, "checkpoint_event_prologue")
    if is_stage_3:
        # Partitions the persistent parameters, which stage 3 keeps whole.
        zero.checkpoint_event_prologue()
    for flat_optimizer in flat_optimizers:
        flat_optimizer.load(params, leaves, optimizer.state)
    # Copy the full-precision parameters into the parameters of the model.
    if is_stage_1_or_2:
        zero.update_lp_params()
    else:
        optimizer.update_working_copy()
    if is_stage_3:
        zero.checkpoint_event_epilogue()


def _loaded_values(
    path: str | os.PathLike[str], optimizer: ZeroOptimizer
) -> tuple[dict[str, Any], list[Any]]:
    """Read the values of this rank from a checkpoint; return its parameters by name, and the leaves of its state.

    All ranks must call this together.
    """
    group = all_ranks()
    values = _Values.of(optimizer, FlatParams.with_position)
    loaded_params = checkpoint.load_params(path, like=values.params, group=group)
    loaded_state = checkpoint.load(path, like=values.state, tx=values.tx, group=group)
    return values.local_params(loaded_params), values.local_leaves(loaded_state)


def _optimizer_of(engine: Any) -> ZeroOptimizer:
    """Return the optimizer of this module that a DeepSpeed engine steps; raise if it has another one."""
    # At ZeRO stages 1 to 3, `engine.optimizer` is a wrapper, whose attribute ``optimizer`` is the one of this module.
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(
            f"engine: its optimizer is {optimizer!r}, expected one of muonfx.engines.deepspeed"
        )
    return optimizer


class _Values(NamedTuple):
    """The parameters and the optimizer state of all ranks; this rank's values with their positions in whole tensors."""

    params: dict[str, Any]
    """A dict from name to parameter. A parameter that only other ranks hold is an empty `FlatShard`."""
    state: PyTree
    """The state as nested dicts. A leaf that only other ranks hold is an empty `FlatShard`."""
    global_name_of: dict[str, str]
    """For each parameter of this rank, its name in ``params``. Experts have another index there."""
    paths: list[tuple[Any, ...]]
    """The path in ``state`` of each leaf of this rank's own state."""
    tx: Transform | None
    """The transform; None if it differs between ranks, because labels name the parameters of a rank."""

    @classmethod
    def of(cls, optimizer: ZeroOptimizer, with_position: WithPosition) -> _Values:
        """Collect the values of this rank, and add empty ones for other ranks. All ranks must call this together.

        If rank 0 has "up.weight" and rank 1 has "down.weight", ``params`` has both names on both ranks. On rank 0,
        "down.weight" is an empty `FlatShard`. The same holds for the state, as at ("momentum", "trace", "down.weight").

        ``with_position`` is `FlatParams.to_save`, or `FlatParams.with_position` to load.
        """
        # Other parameters have their own names in a checkpoint.
        expert_name_of = global_names(optimizer.model)
        flat_optimizers = optimizer.all_flat_optimizers()
        # 1. The state of this rank. A checkpoint has no leaves that are None, but a loaded state has them again, so
        # ``paths`` has their paths, too.
        with raising_on_all_ranks("a checkpoint", all_ranks()):
            leaf_of_path = _local_state(
                flat_optimizers, optimizer.state, expert_name_of, with_position
            )
        local_leaves = {path: leaf for path, leaf in leaf_of_path.items() if leaf is not None}
        # 2. The parameters of this rank, each with its position in the whole parameter.
        global_name_of: dict[str, str] = {}
        params: dict[str, Any] = {}
        for flat_optimizer in flat_optimizers:
            flat = flat_optimizer.flat
            for name, param in flat.params().items():
                global_name_of[name] = expert_name_of.get(name, name)
                params[global_name_of[name]] = with_position(flat, name, param)
        # 3. Both with empty leaves for those that only other ranks have.
        return cls(
            params=_with_leaves_of_others(params),
            state=_nest_leaves(_with_leaves_of_others(local_leaves)),
            global_name_of=global_name_of,
            paths=list(leaf_of_path),
            tx=_common_transform(optimizer.tx, has_local_names=bool(expert_name_of)),
        )

    def local_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of this rank, by its own names for them, from the parameters of all ranks."""
        return {name: params[global_name] for name, global_name in self.global_name_of.items()}

    def local_leaves(self, state: PyTree) -> list[Any]:
        """Return the leaves of this rank's own state from a state of all ranks. A leaf that is None remains None."""
        leaf_of_path = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
        return [leaf_of_path.get(path) for path in self.paths]


def _local_state(
    flat_optimizers: Sequence[FlatOptimizer],
    states: States,
    expert_name_of: Mapping[str, str],
    with_position: WithPosition,
) -> dict[tuple[Any, ...], Any]:
    """Return this rank's optimizer state: a dict from the path in a checkpoint to the leaf, which may be None.

    ``states`` is ``optimizer.state``. In a path, a name of ``expert_name_of`` is replaced; see `_rename_path`.
    ``with_position`` is as in `_Values.of`.
    """
    leaf_of_path: dict[tuple[Any, ...], Any] = {}
    for flat_optimizer in flat_optimizers:
        flat_optimizer.check_and_cast(states)
        leaves = flat_optimizer.global_leaves(states, with_position)
        # All flat optimizers have the same paths. The leaf at a path is None in those without the parameter.
        for state_path, leaf in zip(flat_optimizer.state_paths, leaves, strict=True):
            path = _rename_path(state_path, expert_name_of)
            leaf_of_path[path] = _merge_leaves(leaf_of_path.get(path), leaf)
    return leaf_of_path


def _rename_path(path: tuple[Any, ...], new_name_of: Mapping[str, str]) -> tuple[Any, ...]:
    """Return the path of a leaf of the state, in which the name of a parameter is replaced by its new name.

    >>> _rename_path(
    ...     ("momentum", "trace", "experts.0.weight"), {"experts.0.weight": "experts.2.weight"}
    ... )
    ('momentum', 'trace', 'experts.2.weight')
    """
    entries: list[Any] = []
    for entry in path:
        # An entry that is no parameter's name stays.
        entries.append(new_name_of.get(str(entry), entry))
    return tuple(entries)


def _common_transform(tx: Transform, *, has_local_names: bool) -> Transform | None:
    """Return the transform if all ranks have the same one; else None. All ranks must call this together.

    ``has_local_names`` is True if this rank has other names for its experts than the checkpoint. The labels of its
    transform, which name parameters, then do not fit the checkpoint, and the result is None on all ranks.
    """
    # A fingerprint is a text by which transforms are compared. None differs from each of them.
    local_fingerprint = None if has_local_names else tx.fingerprint
    for fingerprint in gather_objects(local_fingerprint):  # of each rank
        if fingerprint != tx.fingerprint:
            return None
    return tx


def _with_leaves_of_others(leaves: dict[Any, Any]) -> dict[Any, Any]:
    """Return the leaves of all ranks: this rank's, and an empty `FlatShard` for each leaf that only other ranks hold.

    All ranks must call this together. If this rank has ``{"up.weight": w}``, and another one ``{"down.weight": v}``,
    both get both names. A whole tensor that not all ranks hold becomes a `FlatShard` with all elements, because a plain
    tensor counts as equal on all ranks.
    """
    specs = {key: Spec(tuple(leaf.shape), leaf.dtype) for key, leaf in leaves.items()}
    specs_of_ranks: list[dict[Any, Spec]] = gather_objects(specs)
    # 1. All names, without values.
    all_leaves: dict[Any, Any] = {}
    for rank_specs in specs_of_ranks:
        for key, spec in rank_specs.items():
            # A shard without elements: it says that the leaf exists, and its shape and dtype.
            all_leaves.setdefault(key, FlatShard(spec.shape, 0, torch.empty(0, dtype=spec.dtype)))
    # 2. The values of this rank.
    for key, leaf in leaves.items():
        is_on_all_ranks = all(key in rank_specs for rank_specs in specs_of_ranks)
        if isinstance(leaf, Tensor) and not is_on_all_ranks:
            all_leaves[key] = FlatShard.cut(leaf, 0, leaf.numel())
        else:
            all_leaves[key] = leaf
    return all_leaves


def _nest_leaves(leaf_of_path: Mapping[tuple[Any, ...], Any]) -> PyTree:
    """Return a tree of nested dicts, in which leaves have the given paths.

    >>> _nest_leaves({("momentum", "trace", "0.weight"): 1, ("count",): 2})
    {'momentum': {'trace': {'0.weight': 1}}, 'count': 2}
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaf_of_path.items():
        if not path:  # a state that is a single leaf
            return leaf
        # Go down to the dict that has the leaf, and make the dicts that are missing.
        *outer_keys, last_key = path
        level = root
        for key in outer_keys:
            level = level.setdefault(key, {})
        level[last_key] = leaf
    return root


def _merge_leaves(
    first: Tensor | FlatShard | None, second: Tensor | FlatShard | None
) -> Tensor | FlatShard | None:
    """Return the value that is not None; of two step counts, return the larger.

    Each flat optimizer of a rank has all leaves of the state, with None for parameters of the others.

    >>> _merge_leaves(None, torch.tensor(3)), _merge_leaves(torch.tensor(2), torch.tensor(3))
    (tensor(3), tensor(3))
    """
    if second is None:
        return first
    # Two flat optimizers have the same count, unless one of them had steps without a gradient.
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.maximum(first, second)
    return second
