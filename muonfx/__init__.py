"""muonfx: composable Muon-like optimizers for PyTorch.

An optimizer is a `Transform`, two pure functions over trees of tensors::

    init(params) -> state
    update(updates, state, params=None) -> (updates, state)

Small transforms make larger ones: `chain` applies them one after another, `partition` and `masked` to different
parameters. `apply_updates` adds the result to the parameters. `TransformOptimizer` turns any transform into a
``torch.optim.Optimizer``. The names in ``__all__``, here and in the public packages, are public; all others are
private.

``import muonfx`` loads the functional core. The optimizer classes, ``placement``, ``sharding``, ``checkpoint``,
``contrib``, ``plot``, ``studies`` and ``testing`` are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch as torch  # the repr of a value is code in vars(muonfx), and may name a dtype

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):  # also in pyproject.toml
    raise ImportError(
        f"muonfx needs torch 2.10 or later, found torch {torch.__version__}: pip install --upgrade 'torch>=2.10'"
    )

# fmt: off
# isort: off
from muonfx import compact as compact
from muonfx import core as core
from muonfx import polar, routing, tree
from muonfx import transforms as transforms
from muonfx.compact import QuantizedDtype, fp8, int8
from muonfx.core import (
    Donation, InitAndUpdate, Locality, Transform, add_updates, apply_updates, as_tensors, chain, hyperparams,
    identity, masked, partition, schedules, set_to_zero, stack, stateless, transform, with_hyperparams,
)
from muonfx.core.schedules import (
    Scalar, ScalarOrSchedule, Schedule, ScheduleFunction, constant_schedule, cosine_decay_schedule, exponential_decay,
    join_schedules, linear_schedule, schedule, warmup_cosine_decay_schedule, warmup_stable_decay_schedule,
)
from muonfx.recipes import adamw, lion, muon, muon_with_adamw, muonclip, normuon
from muonfx.routing import Labels, default_labels, describe, labels
from muonfx.transforms import (
    AttentionHeads, Leaf, MatrixSlot, MatrixView, Metric, Number, ShapeRule, Slot, StateAndMatrixStep, StateAndStep,
    StepCount, accumulate, add_decayed_weights, attention, cautious, clip_by_block_rms, clip_by_global_norm,
    clip_by_value, ema_params, leafwise, master_params, matrixwise, metrics, momentum, monitor, normalize_neurons,
    orthogonalize, qk_clip, scale, scale_by_adam, scale_by_learning_rate, scale_by_lion, scale_by_rms, scale_by_shape,
    scale_by_sign, skip_nonfinite, subtract_decayed_weights,
)
from muonfx.tree import PyTree
from muonfx._other_libraries import ADVICE_ON_NAMES, NAMES_HERE
# isort: on
# fmt: on

if TYPE_CHECKING:
    from muonfx import checkpoint as checkpoint
    from muonfx import contrib as contrib
    from muonfx import placement as placement
    from muonfx import plot as plot
    from muonfx import sharding as sharding
    from muonfx import studies as studies
    from muonfx import testing as testing
    from muonfx.checkpoint import spec as spec
    from muonfx.inspect.diagnose import Diagnosis as Diagnosis

    # Mypy takes `muonfx.inspect.diagnose` for the module.
    from muonfx.inspect.diagnose import diagnose as diagnose
    from muonfx.inspect.summary import Summary as Summary
    from muonfx.inspect.summary import summary as summary
    from muonfx.optimizer import Muon as Muon
    from muonfx.optimizer import TransformOptimizer as TransformOptimizer
    from muonfx.studies import study as study

__version__ = "0.3.0"

# fmt: off
__all__ = [
    # modules
    "attention", "checkpoint", "contrib", "placement", "polar", "schedules", "routing", "sharding", "studies",
    "tree",
    # core
    "Donation", "Locality", "Transform", "add_updates", "apply_updates", "chain", "identity", "masked", "partition",
    "set_to_zero", "spec", "stateless", "transform",
    # transforms that work leaf by leaf
    "Leaf", "Slot", "StepCount", "Number", "MatrixSlot", "leafwise", "matrixwise",
    # transforms
    "AttentionHeads", "MatrixView", "accumulate", "add_decayed_weights", "cautious", "clip_by_block_rms",
    "clip_by_global_norm", "clip_by_value", "ema_params", "master_params", "metrics", "momentum", "monitor",
    "normalize_neurons", "orthogonalize", "qk_clip", "scale", "scale_by_adam", "scale_by_learning_rate",
    "scale_by_lion", "scale_by_rms", "scale_by_shape", "scale_by_sign", "skip_nonfinite", "subtract_decayed_weights",
    # state in eight bits
    "QuantizedDtype", "fp8", "int8",
    # hyperparameters
    "as_tensors", "hyperparams", "stack", "with_hyperparams",
    # routing
    "Labels", "default_labels", "describe", "labels",
    # summaries and measurements
    "Diagnosis", "Summary", "diagnose", "summary",
    # comparisons of optimizers
    "study",
    # types of arguments and results, for annotations
    "InitAndUpdate", "Metric", "PyTree", "Scalar", "ScalarOrSchedule", "ScheduleFunction", "ShapeRule",
    "StateAndMatrixStep", "StateAndStep",
    # schedules
    "Schedule", "constant_schedule", "cosine_decay_schedule", "exponential_decay", "join_schedules",
    "linear_schedule", "schedule", "warmup_cosine_decay_schedule", "warmup_stable_decay_schedule",
    # as a torch optimizer
    "Muon", "TransformOptimizer",
    # recipes
    "adamw", "lion", "muon", "muon_with_adamw", "muonclip", "normuon",
]
# fmt: on

_MODULES = ("checkpoint", "contrib", "placement", "plot", "sharding", "studies", "testing")

_LAZY = {
    **{name: f"muonfx.{name}" for name in _MODULES},
    "Diagnosis": "muonfx.inspect",
    "Muon": "muonfx.optimizer",
    "Summary": "muonfx.inspect",
    "TransformOptimizer": "muonfx.optimizer",
    "diagnose": "muonfx.inspect",
    "spec": "muonfx.checkpoint",
    "study": "muonfx.studies",
    "summary": "muonfx.inspect",
}
"""Names that are imported when they are first used, and the module of each."""

if not TYPE_CHECKING:  # a type checker would accept any misspelt name

    def __getattr__(name: str) -> Any:
        """Import a name in `_LAZY`. For any other, raise an AttributeError with the name that muonfx has for it."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_advice(name)}")
        value = importlib.import_module(_LAZY[name])
        if value.__name__ != f"{__name__}.{name}":  # the name is not a module, but in one
            value = getattr(value, name)
        globals()[name] = value
        return value


def _advice(name: str) -> str:
    """Return where a name of another library, or a name in a package of muonfx, is; "" if it is unknown.

    >>> _advice("clip_grad_norm_")
    '; here it is muonfx.clip_by_global_norm'
    """
    equivalent = NAMES_HERE.get(name)
    if equivalent is not None:
        return f"; here it is muonfx.{equivalent}"
    if name in ADVICE_ON_NAMES:
        return f"; {ADVICE_ON_NAMES[name]}"
    for package in ("core", "transforms", "contrib"):
        if name in importlib.import_module(f"muonfx.{package}").__all__:
            return f"; here it is muonfx.{package}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, "__version__"})
