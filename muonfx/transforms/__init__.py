"""The transforms, one family a file."""

from muonfx.transforms._matrices import MatrixView
from muonfx.transforms.accumulate import AccumulateState, accumulate
from muonfx.transforms.adam import AdamState, scale_by_adam
from muonfx.transforms.ademamix import AdemamixState, scale_by_ademamix
from muonfx.transforms.average import EmaParamsState, MasterParamsState, ema_params, master_params
from muonfx.transforms.clip import clip_by_block_rms, clip_by_global_norm, clip_by_value, global_norm
from muonfx.transforms.conditional import ConditionalState, conditionally_mask, conditionally_transform
from muonfx.transforms.decay import add_decayed_weights, cautious
from muonfx.transforms.distance import DogState, DowgState, scale_by_dog, scale_by_dowg
from muonfx.transforms.leafwise import Leaf, Slot, StepCount, leafwise
from muonfx.transforms.lion import LionState, scale_by_lion
from muonfx.transforms.lookahead import LookaheadState, lookahead
from muonfx.transforms.momentum import DebiasedMomentumState, MomentumState, momentum
from muonfx.transforms.monitor import MonitorState, metrics, monitor
from muonfx.transforms.neurons import NeuronsState, normalize_neurons
from muonfx.transforms.nonfinite import SkipNonfiniteState, skip_nonfinite
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.transforms.plateau import ReduceOnPlateauState, reduce_on_plateau
from muonfx.transforms.prodigy import ProdigyState, scale_by_prodigy
from muonfx.transforms.scale import ScheduleState, scale, scale_by_learning_rate, scale_by_schedule, scale_by_shape
from muonfx.transforms.schedule_free import ScheduleFreeState, schedule_free, schedule_free_eval_params
from muonfx.transforms.sharpness import sam, sam_gradient

__all__ = [
    "AccumulateState",
    "AdamState",
    "ConditionalState",
    "AdemamixState",
    "DebiasedMomentumState",
    "DogState",
    "DowgState",
    "EmaParamsState",
    "Leaf",
    "LionState",
    "LookaheadState",
    "MasterParamsState",
    "MatrixView",
    "MomentumState",
    "MonitorState",
    "NeuronsState",
    "ProdigyState",
    "ReduceOnPlateauState",
    "ScheduleFreeState",
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
    "conditionally_mask",
    "conditionally_transform",
    "ema_params",
    "global_norm",
    "leafwise",
    "lookahead",
    "master_params",
    "metrics",
    "momentum",
    "monitor",
    "normalize_neurons",
    "orthogonalize",
    "reduce_on_plateau",
    "sam",
    "sam_gradient",
    "scale",
    "scale_by_adam",
    "scale_by_ademamix",
    "scale_by_dog",
    "scale_by_dowg",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_prodigy",
    "scale_by_schedule",
    "scale_by_shape",
    "schedule_free",
    "schedule_free_eval_params",
    "skip_nonfinite",
]
