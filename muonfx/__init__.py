"""muonfx: composable Muon-like optimizers for PyTorch.

An optimizer is a `Transform`, two pure functions over trees of tensors::

    init(params) -> state
    update(updates, state, params=None) -> (updates, state)

Small transforms make larger ones: `chain` applies them one after another, `partition` and `masked` to different
parameters. `apply_updates` adds the result to the parameters. `TransformOptimizer` turns any transform into a
``torch.optim.Optimizer``. What is listed in ``__all__``, here and in the public modules ``attention``, ``checkpoint``,
``plot``, ``polar``, ``program``, ``schedules``, ``select``, ``sharding``, ``testing`` and ``tree``, is the public face;
everything else is private. ``plot`` and ``testing`` are imported when they are first used.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch as torch  # the repr of a value is code in vars(muonfx), and may name a dtype

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # also in pyproject.toml
    raise ImportError(
        f"muonfx needs torch 2.13 or later, found torch {torch.__version__}: pip install --upgrade 'torch>=2.13'"
    )

from muonfx import attention, checkpoint, checks, polar, program, schedules, select, sharding, tree
from muonfx.arguments import NAMES_HERE
from muonfx.checkpoint import spec
from muonfx.compact import Compact, CompactState, KeyedCompactState, fp8, int8
from muonfx.core import (
    Donation,
    EmptyState,
    InitAndUpdate,
    Locality,
    ScheduledHyperparamsState,
    Transform,
    add_updates,
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
    hyperparams_used,
    inject_hyperparams,
    stack,
    with_hyperparams,
)
from muonfx.optimizer import Muon, TransformOptimizer
from muonfx.partition import masked, partition
from muonfx.recipes import adamw, lion, muon, muon_with_adamw, muonclip, normuon, prodigy
from muonfx.schedules import (
    Scalar,
    ScalarOrFunction,
    ScalarOrSchedule,
    Schedule,
    ScheduleFunction,
    constant,
    cosine,
    exponential,
    join,
    linear,
    one_cycle,
    piecewise_constant,
    piecewise_interpolate,
    polynomial,
    schedule,
    sgdr,
    warmup_cosine,
    warmup_stable_decay,
)
from muonfx.select import Labels, default_labels, describe, labels
from muonfx.summary import Summary, summary
from muonfx.transforms import (
    AccumulateState,
    AdamState,
    AddNoiseState,
    AdemamixState,
    AttentionHeads,
    ConditionalState,
    DebiasedMomentumState,
    DebiasedRmsState,
    DionState,
    DogState,
    DowgState,
    EmaParamsState,
    FactoredRmsState,
    Leaf,
    LionState,
    LookaheadState,
    MasterParamsState,
    MatrixView,
    Metric,
    MomentumState,
    MonitorState,
    NamoState,
    NeuronsState,
    ProdigyState,
    ReduceOnPlateauState,
    RmsState,
    SampledMomentumState,
    ScheduleFreeState,
    ScheduleState,
    ShapeRule,
    SkipNonfiniteState,
    Slot,
    StateAndStep,
    StepCount,
    WeightNormsState,
    accumulate,
    adaptive_grad_clip,
    add_decayed_weights,
    add_noise,
    cautious,
    centralize,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_value,
    clip_singular_values,
    conditionally_mask,
    conditionally_transform,
    ema_params,
    global_norm,
    keep_weight_norms,
    leafwise,
    lookahead,
    master_params,
    match_weight_norms,
    metrics,
    momentum,
    monitor,
    normalize_by_update_norm,
    normalize_columns,
    normalize_leaves,
    normalize_matrices,
    normalize_neurons,
    normalize_rows,
    orthogonalize,
    qk_clip,
    reduce_on_plateau,
    sam,
    sam_gradient,
    sampled_momentum,
    scale,
    scale_by_adam,
    scale_by_ademamix,
    scale_by_dion,
    scale_by_dog,
    scale_by_dowg,
    scale_by_dual_norm,
    scale_by_factored_rms,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_namo,
    scale_by_prodigy,
    scale_by_rms,
    scale_by_schedule,
    scale_by_shape,
    scale_by_sign,
    scale_by_trust_ratio,
    schedule_free,
    schedule_free_eval_params,
    skip_nonfinite,
    subtract_decayed_weights,
)
from muonfx.tree import PyTree
from muonfx.variants import adamuon, dion, dion2, muon_hyperball, musgd, namo, polargrad, scion

__version__ = "0.2.0"

__all__ = [
    # modules
    "attention",
    "checkpoint",
    "checks",
    "polar",
    "program",
    "schedules",
    "select",
    "sharding",
    "tree",
    # core
    "Donation",
    "EmptyState",
    "Locality",
    "Transform",
    "add_updates",
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
    # transforms
    "AttentionHeads",
    "MatrixView",
    "accumulate",
    "adaptive_grad_clip",
    "add_decayed_weights",
    "add_noise",
    "cautious",
    "centralize",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "clip_singular_values",
    "conditionally_mask",
    "conditionally_transform",
    "ema_params",
    "global_norm",
    "keep_weight_norms",
    "lookahead",
    "master_params",
    "match_weight_norms",
    "metrics",
    "momentum",
    "monitor",
    "normalize_by_update_norm",
    "normalize_columns",
    "normalize_leaves",
    "normalize_matrices",
    "normalize_neurons",
    "normalize_rows",
    "orthogonalize",
    "qk_clip",
    "reduce_on_plateau",
    "sam",
    "sam_gradient",
    "sampled_momentum",
    "scale",
    "scale_by_adam",
    "scale_by_ademamix",
    "scale_by_dion",
    "scale_by_dog",
    "scale_by_dowg",
    "scale_by_dual_norm",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_namo",
    "scale_by_prodigy",
    "scale_by_rms",
    "scale_by_schedule",
    "scale_by_shape",
    "scale_by_sign",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_eval_params",
    "skip_nonfinite",
    "subtract_decayed_weights",
    # state in eight bits
    "Compact",
    "CompactState",
    "KeyedCompactState",
    "fp8",
    "int8",
    # hyperparameters
    "InjectHyperparamsState",
    "ScheduledHyperparamsState",
    "as_tensors",
    "hyperparams",
    "hyperparams_used",
    "inject_hyperparams",
    "stack",
    "with_hyperparams",
    # routing
    "Labels",
    "default_labels",
    "describe",
    "labels",
    # looking
    "Summary",
    "summary",
    # types of arguments and results, for annotations
    "InitAndUpdate",
    "Metric",
    "PyTree",
    "Scalar",
    "ScalarOrFunction",
    "ScalarOrSchedule",
    "ScheduleFunction",
    "ShapeRule",
    "StateAndStep",
    # their states
    "AccumulateState",
    "AdamState",
    "AddNoiseState",
    "AdemamixState",
    "ConditionalState",
    "DebiasedMomentumState",
    "DebiasedRmsState",
    "DionState",
    "DogState",
    "DowgState",
    "EmaParamsState",
    "FactoredRmsState",
    "LionState",
    "LookaheadState",
    "MasterParamsState",
    "MomentumState",
    "MonitorState",
    "NamoState",
    "NeuronsState",
    "ProdigyState",
    "ReduceOnPlateauState",
    "RmsState",
    "SampledMomentumState",
    "ScheduleFreeState",
    "ScheduleState",
    "SkipNonfiniteState",
    "WeightNormsState",
    # schedules
    "Schedule",
    "constant",
    "cosine",
    "exponential",
    "join",
    "linear",
    "one_cycle",
    "piecewise_constant",
    "piecewise_interpolate",
    "polynomial",
    "schedule",
    "sgdr",
    "warmup_cosine",
    "warmup_stable_decay",
    # as a torch optimizer
    "Muon",
    "TransformOptimizer",
    # recipes
    "adamuon",
    "adamw",
    "dion",
    "dion2",
    "lion",
    "muon",
    "muon_hyperball",
    "muon_with_adamw",
    "muonclip",
    "musgd",
    "namo",
    "normuon",
    "polargrad",
    "prodigy",
    "scion",
]


# They need packages that the core does not: imported when they are first used, and not by `from muonfx import *`.
_LAZY = ("plot", "testing")

if TYPE_CHECKING:
    from muonfx import plot as plot
    from muonfx import testing as testing
else:  # a type checker would take any misspelt name for one that this function knows

    def __getattr__(name: str) -> ModuleType:
        if name in _LAZY:
            return importlib.import_module(f"{__name__}.{name}")
        here = f"; here it is muonfx.{NAMES_HERE[name]}" if name in NAMES_HERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{here}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__"])
