"""The transforms, one family a file."""

from muonfx.transforms._heads import AttentionHeads
from muonfx.transforms._matrices import MatrixView
from muonfx.transforms.accumulate import AccumulateState, accumulate
from muonfx.transforms.adam import AdamState, scale_by_adam
from muonfx.transforms.average import EmaParamsState, MasterParamsState, ema_params, master_params
from muonfx.transforms.clip import clip_by_block_rms, clip_by_global_norm, clip_by_value, global_norm
from muonfx.transforms.decay import add_decayed_weights, cautious
from muonfx.transforms.leafwise import Leaf, Slot, StepCount, leafwise
from muonfx.transforms.lion import LionState, scale_by_lion
from muonfx.transforms.momentum import DebiasedMomentumState, MomentumState, momentum
from muonfx.transforms.monitor import MonitorState, metrics, monitor
from muonfx.transforms.neurons import NeuronsState, normalize_neurons
from muonfx.transforms.nonfinite import SkipNonfiniteState, skip_nonfinite
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.transforms.qk_clip import qk_clip
from muonfx.transforms.scale import ScheduleState, scale, scale_by_learning_rate, scale_by_schedule, scale_by_shape

__all__ = [
    "AccumulateState",
    "AdamState",
    "AttentionHeads",
    "DebiasedMomentumState",
    "EmaParamsState",
    "Leaf",
    "LionState",
    "MasterParamsState",
    "MatrixView",
    "MomentumState",
    "MonitorState",
    "NeuronsState",
    "ScheduleState",
    "SkipNonfiniteState",
    "Slot",
    "StepCount",
    "accumulate",
    "add_decayed_weights",
    "cautious",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "ema_params",
    "global_norm",
    "leafwise",
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
]
