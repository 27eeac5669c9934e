"""The transforms, one family a file."""

from muonfx.transforms._matrices import MatrixView
from muonfx.transforms.accumulate import AccumulateState, accumulate
from muonfx.transforms.adam import AdamState, scale_by_adam
from muonfx.transforms.average import EmaParamsState, MasterParamsState, ema_params, master_params
from muonfx.transforms.clip import clip_by_block_rms, clip_by_global_norm, clip_by_value, global_norm
from muonfx.transforms.decay import add_decayed_weights, cautious, subtract_decayed_weights
from muonfx.transforms.dion import DionState, SampledMomentumState, sampled_momentum, scale_by_dion
from muonfx.transforms.leafwise import Leaf, Slot, StepCount, leafwise
from muonfx.transforms.lion import LionState, scale_by_lion
from muonfx.transforms.momentum import DebiasedMomentumState, MomentumState, momentum
from muonfx.transforms.monitor import MonitorState, metrics, monitor
from muonfx.transforms.namo import NamoState, scale_by_namo
from muonfx.transforms.neurons import NeuronsState, normalize_neurons
from muonfx.transforms.nonfinite import SkipNonfiniteState, skip_nonfinite
from muonfx.transforms.normalize import normalize_columns, normalize_leaves, normalize_matrices, normalize_rows
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.transforms.scale import ScheduleState, scale, scale_by_learning_rate, scale_by_schedule, scale_by_shape
from muonfx.transforms.spectral import clip_singular_values, scale_by_dual_norm
from muonfx.transforms.weight_norm import WeightNormsState, keep_weight_norms, match_weight_norms

__all__ = [
    "AccumulateState",
    "AdamState",
    "DebiasedMomentumState",
    "DionState",
    "EmaParamsState",
    "Leaf",
    "LionState",
    "MasterParamsState",
    "MatrixView",
    "MomentumState",
    "MonitorState",
    "NamoState",
    "NeuronsState",
    "SampledMomentumState",
    "ScheduleState",
    "SkipNonfiniteState",
    "Slot",
    "StepCount",
    "WeightNormsState",
    "accumulate",
    "add_decayed_weights",
    "cautious",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "clip_singular_values",
    "ema_params",
    "global_norm",
    "keep_weight_norms",
    "leafwise",
    "master_params",
    "match_weight_norms",
    "metrics",
    "momentum",
    "monitor",
    "normalize_columns",
    "normalize_leaves",
    "normalize_matrices",
    "normalize_neurons",
    "normalize_rows",
    "orthogonalize",
    "sampled_momentum",
    "scale",
    "scale_by_adam",
    "scale_by_dion",
    "scale_by_dual_norm",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_namo",
    "scale_by_schedule",
    "scale_by_shape",
    "skip_nonfinite",
    "subtract_decayed_weights",
]
