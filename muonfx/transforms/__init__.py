"""The transforms that most chains are made of: momentum, orthogonalization, Adam, clipping, decay, and others.

Each file contains one family. `leafwise` makes a transform from the arithmetic of one leaf, `matrixwise` from the
arithmetic of a stack of matrices. Variants that few chains need are in `muonfx.contrib`.
"""

from muonfx.transforms.accumulate import AccumulateState, accumulate
from muonfx.transforms.average import EmaParamsState, MasterParamsState, ema_params, master_params
from muonfx.transforms.clip import clip_by_block_rms, clip_by_global_norm, clip_by_value
from muonfx.transforms.decay import add_decayed_weights, cautious, subtract_decayed_weights
from muonfx.transforms.leafwise import Leaf, Number, Slot, StateAndStep, StepCount, copies, leafwise
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrixwise import MatrixSlot, StateAndMatrixStep, matrixwise
from muonfx.transforms.moments import (
    AdamState,
    DebiasedMomentumState,
    DebiasedRmsState,
    LionState,
    MomentumState,
    RmsState,
    momentum,
    scale_by_adam,
    scale_by_lion,
    scale_by_rms,
)
from muonfx.transforms.monitor import LeafMonitorState, Metric, MonitorState, metrics, monitor
from muonfx.transforms.neurons import NeuronsState, normalize_neurons
from muonfx.transforms.nonfinite import SkipNonfiniteState, skip_nonfinite
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.transforms.qk_clip import AttentionHeads, qk_clip
from muonfx.transforms.scale import (
    ShapeRule,
    scale,
    scale_by_learning_rate,
    scale_by_shape,
    scale_by_sign,
)

# fmt: off
__all__ = [
    "AccumulateState", "AdamState", "AttentionHeads", "DebiasedMomentumState", "DebiasedRmsState", "EmaParamsState",
    "Leaf", "LeafMonitorState", "LionState", "MasterParamsState", "MatrixSlot", "MatrixView", "Metric", "MomentumState",
    "MonitorState", "NeuronsState", "Number", "RmsState", "ShapeRule", "SkipNonfiniteState", "Slot",
    "StateAndMatrixStep", "StateAndStep", "StepCount", "accumulate", "add_decayed_weights", "cautious",
    "clip_by_block_rms", "clip_by_global_norm", "clip_by_value", "copies", "ema_params", "leafwise", "master_params",
    "matrixwise", "metrics", "momentum", "monitor", "normalize_neurons", "orthogonalize", "qk_clip", "scale",
    "scale_by_adam", "scale_by_learning_rate", "scale_by_lion", "scale_by_rms", "scale_by_shape", "scale_by_sign",
    "skip_nonfinite", "subtract_decayed_weights",
]
# fmt: on
