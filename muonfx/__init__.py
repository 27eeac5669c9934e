"""muonfx: composable Muon-like optimizers for PyTorch.

An optimizer is a `Transform`, two pure functions over trees of tensors::

    init(params) -> state
    update(updates, state, params=None) -> (updates, state)

Small transforms make larger ones: `chain` applies them one after another, `partition` and `masked` to different
parameters. `apply_updates` adds the result to the parameters. `TransformOptimizer` turns any transform into a
``torch.optim.Optimizer``. What is listed in ``__all__``, here and in the public modules ``attention``, ``checkpoint``,
``polar``, ``schedules``, ``select``, ``sharding``, ``testing`` and ``tree``, is the public face; everything else is
private.
"""

from muonfx import attention, checkpoint, checks, polar, schedules, select, sharding, tree
from muonfx.checkpoint import spec
from muonfx.compact import Compact, CompactState, KeyedCompactState, fp8, int8
from muonfx.core import (
    Donation,
    EmptyState,
    Locality,
    Transform,
    apply_updates,
    chain,
    identity,
    set_to_zero,
    stateless,
    transform,
)
from muonfx.hyperparams import (
    InjectHyperparamsState,
    as_tensors,
    hyperparams,
    inject_hyperparams,
    stack,
    with_hyperparams,
)
from muonfx.optimizer import Muon, TransformOptimizer
from muonfx.partition import masked, partition
from muonfx.recipes import adamw, lion, muon, muon_with_adamw, muonclip, normuon
from muonfx.schedules import (
    Schedule,
    constant,
    cosine,
    join,
    linear,
    schedule,
    warmup_cosine,
    warmup_stable_decay,
)
from muonfx.select import Labels, default_labels, describe, labels
from muonfx.transforms import (
    AccumulateState,
    AdamState,
    AttentionHeads,
    DebiasedMomentumState,
    EmaParamsState,
    Leaf,
    LionState,
    MasterParamsState,
    MatrixView,
    MomentumState,
    MonitorState,
    NeuronsState,
    ScheduleState,
    SkipNonfiniteState,
    Slot,
    StepCount,
    accumulate,
    add_decayed_weights,
    cautious,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_value,
    ema_params,
    global_norm,
    leafwise,
    master_params,
    metrics,
    momentum,
    monitor,
    normalize_neurons,
    orthogonalize,
    qk_clip,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_schedule,
    scale_by_shape,
    skip_nonfinite,
)

__version__ = "0.2.0"

__all__ = [
    # modules
    "attention",
    "checkpoint",
    "checks",
    "polar",
    "schedules",
    "select",
    "sharding",
    "tree",
    # core
    "Donation",
    "EmptyState",
    "Locality",
    "Transform",
    "apply_updates",
    "chain",
    "identity",
    "masked",
    "partition",
    "set_to_zero",
    "spec",
    "stateless",
    "transform",
    # transforms that work leaf by leaf
    "Leaf",
    "Slot",
    "StepCount",
    "leafwise",
    # state in eight bits
    "Compact",
    "CompactState",
    "KeyedCompactState",
    "fp8",
    "int8",
    # hyperparameters
    "InjectHyperparamsState",
    "as_tensors",
    "hyperparams",
    "inject_hyperparams",
    "stack",
    "with_hyperparams",
    # routing
    "Labels",
    "default_labels",
    "describe",
    "labels",
    # transforms
    "AttentionHeads",
    "MatrixView",
    "accumulate",
    "add_decayed_weights",
    "cautious",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "ema_params",
    "global_norm",
    "master_params",
    "metrics",
    "momentum",
    "monitor",
    "normalize_neurons",
    "orthogonalize",
    "qk_clip",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_schedule",
    "scale_by_shape",
    "skip_nonfinite",
    # their states
    "AccumulateState",
    "AdamState",
    "DebiasedMomentumState",
    "EmaParamsState",
    "LionState",
    "MasterParamsState",
    "MomentumState",
    "MonitorState",
    "NeuronsState",
    "ScheduleState",
    "SkipNonfiniteState",
    # schedules
    "Schedule",
    "constant",
    "cosine",
    "join",
    "linear",
    "schedule",
    "warmup_cosine",
    "warmup_stable_decay",
    # as a torch optimizer
    "Muon",
    "TransformOptimizer",
    # recipes
    "adamw",
    "lion",
    "muon",
    "muon_with_adamw",
    "muonclip",
    "normuon",
]
