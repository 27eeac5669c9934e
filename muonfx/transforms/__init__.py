"""The transforms, one family a file."""

from muonfx.transforms._heads import AttentionHeads
from muonfx.transforms._matrices import MatrixView
from muonfx.transforms.accumulate import AccumulateState, accumulate
from muonfx.transforms.adam import AdamState, scale_by_adam
from muonfx.transforms.ademamix import AdemamixState, scale_by_ademamix
from muonfx.transforms.average import EmaParamsState, MasterParamsState, ema_params, master_params
from muonfx.transforms.clip import (
    adaptive_grad_clip,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
)
from muonfx.transforms.conditional import ConditionalState, conditionally_mask, conditionally_transform
from muonfx.transforms.decay import add_decayed_weights, cautious, subtract_decayed_weights
from muonfx.transforms.dion import DionState, SampledMomentumState, sampled_momentum, scale_by_dion
from muonfx.transforms.distance import DogState, DowgState, scale_by_dog, scale_by_dowg
from muonfx.transforms.leafwise import Leaf, Slot, StateAndStep, StepCount, leafwise
from muonfx.transforms.lion import LionState, scale_by_lion
from muonfx.transforms.lookahead import LookaheadState, lookahead
from muonfx.transforms.momentum import DebiasedMomentumState, MomentumState, momentum
from muonfx.transforms.monitor import Metric, MonitorState, metrics, monitor
from muonfx.transforms.namo import NamoState, scale_by_namo
from muonfx.transforms.neurons import NeuronsState, normalize_neurons
from muonfx.transforms.noise import AddNoiseState, add_noise
from muonfx.transforms.nonfinite import SkipNonfiniteState, skip_nonfinite
from muonfx.transforms.normalize import normalize_columns, normalize_leaves, normalize_matrices, normalize_rows
from muonfx.transforms.norms import centralize, normalize_by_update_norm, scale_by_trust_ratio
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.transforms.plateau import ReduceOnPlateauState, reduce_on_plateau
from muonfx.transforms.prodigy import ProdigyState, scale_by_prodigy
from muonfx.transforms.qk_clip import qk_clip
from muonfx.transforms.rms import DebiasedRmsState, FactoredRmsState, RmsState, scale_by_factored_rms, scale_by_rms
from muonfx.transforms.scale import (
    ScheduleState,
    ShapeRule,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    scale_by_shape,
    scale_by_sign,
)
from muonfx.transforms.schedule_free import ScheduleFreeState, schedule_free, schedule_free_eval_params
from muonfx.transforms.sharpness import sam, sam_gradient
from muonfx.transforms.spectral import clip_singular_values, scale_by_dual_norm
from muonfx.transforms.weight_norm import WeightNormsState, keep_weight_norms, match_weight_norms

__all__ = [
    "Metric",
    "ShapeRule",
    "StateAndStep",
    "AccumulateState",
    "AdamState",
    "AddNoiseState",
    "AdemamixState",
    "AttentionHeads",
    "ConditionalState",
    "DebiasedMomentumState",
    "DebiasedRmsState",
    "DionState",
    "DogState",
    "DowgState",
    "EmaParamsState",
    "FactoredRmsState",
    "Leaf",
    "LionState",
    "LookaheadState",
    "MasterParamsState",
    "MatrixView",
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
    "Slot",
    "StepCount",
    "WeightNormsState",
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
    "leafwise",
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
]
