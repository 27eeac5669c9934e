"""Fingerprints that checkpoints carry, compared with those of transforms: today's, and the ones that 0.1 wrote.

A fingerprint of 0.1 has no version before a colon, and was made of the module that a factory lay in and of all its
arguments. So that moving a file changes nothing any more, these are kept below as they were in 0.1. The table is
finished: what came later has never had such a fingerprint.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

from muonfx.identity import public_name
from muonfx.recorded import _HOLE, Recorded, strip_transparent, told_arguments

__all__ = ["fingerprint_0_1", "is_of_0_1", "is_of_later"]

# Public name -> the module in 0.1, and the arguments in their order with the texts of the defaults; "*" is a number.
_FACTORIES: dict[str, tuple[str, dict[str, str | None]]] = {
    "muonfx.int8": (
        "muonfx.compact.dtypes",
        {"block": "2048", "code": "'linear'", "min_size": "4096", "stochastic": "False", "seed": "0"},
    ),
    "muonfx.fp8": (
        "muonfx.compact.dtypes",
        {"block": "2048", "format": "'e4m3'", "min_size": "4096", "stochastic": "False", "seed": "0"},
    ),
    "muonfx.identity": ("muonfx.core", {}),
    "muonfx.set_to_zero": ("muonfx.core", {}),
    "muonfx.stateless": ("muonfx.core", {"function": None, "locality": "<Locality.TREE: 3>"}),
    "muonfx.chain": ("muonfx.core", {"transforms": "()"}),
    "muonfx.inject_hyperparams": ("muonfx.hyperparams", {"inner": None}),
    "muonfx.partition": ("muonfx.partition", {"transforms": None, "labels": None}),
    "muonfx.masked": ("muonfx.partition", {"inner": None, "mask": None}),
    "muonfx.constant": ("muonfx.schedules", {"value": None}),
    "muonfx.linear": ("muonfx.schedules", {"start": None, "end": None, "steps": None}),
    "muonfx.cosine": ("muonfx.schedules", {"start": None, "steps": None, "end": "*"}),
    "muonfx.warmup_cosine": (
        "muonfx.schedules",
        {"peak": None, "warmup_steps": None, "total_steps": None, "start": "*", "end": "*"},
    ),
    "muonfx.warmup_stable_decay": (
        "muonfx.schedules",
        {"peak": None, "warmup_steps": None, "decay_steps": None, "total_steps": None, "start": "*", "end": "*"},
    ),
    "muonfx.join": ("muonfx.schedules", {"schedules": None, "boundaries": None}),
    "muonfx.accumulate": (
        "muonfx.transforms.accumulate",
        {"inner": None, "every": None, "mean": "True", "dtype": "torch.float32"},
    ),
    "muonfx.scale_by_adam": (
        "muonfx.transforms.adam",
        {
            "b1": "*",
            "b2": "*",
            "eps": "*",
            "eps_root": "*",
            "nesterov": "False",
            "mu_dtype": "torch.float32",
            "nu_dtype": "torch.float32",
        },
    ),
    "muonfx.ema_params": ("muonfx.transforms.average", {"decay": "*", "dtype": "torch.float32"}),
    "muonfx.master_params": ("muonfx.transforms.average", {"inner": None, "dtype": "torch.float32"}),
    "muonfx.clip_by_value": ("muonfx.transforms.clip", {"limit": None}),
    "muonfx.clip_by_block_rms": ("muonfx.transforms.clip", {"threshold": None}),
    "muonfx.clip_by_global_norm": ("muonfx.transforms.clip", {"max_norm": None}),
    "muonfx.add_decayed_weights": ("muonfx.transforms.decay", {"weight_decay": "*", "mask": "None"}),
    "muonfx.cautious": ("muonfx.transforms.decay", {"inner": None, "min_share": "*"}),
    "muonfx.scale_by_lion": ("muonfx.transforms.lion", {"b1": "*", "b2": "*", "mu_dtype": "torch.float32"}),
    "muonfx.momentum": (
        "muonfx.transforms.momentum",
        {"decay": "*", "nesterov": "True", "debias": "False", "heavy_ball": "False", "dtype": "torch.float32"},
    ),
    "muonfx.monitor": ("muonfx.transforms.monitor", {"name": "'updates'", "metrics": "('norm','rms')"}),
    "muonfx.normalize_neurons": (
        "muonfx.transforms.neurons",
        {"decay": "*", "eps": "*", "keep_norm": "True", "dtype": "torch.float32", "dims": "None"},
    ),
    "muonfx.skip_nonfinite": ("muonfx.transforms.nonfinite", {"inner": None}),
    "muonfx.orthogonalize": (
        "muonfx.transforms.orthogonalize",
        {
            "coefficients": "'polar_express_5'",
            "steps": "None",
            "method": "'auto'",
            "dtype": "'auto'",
            "products": "'auto'",
            "dims": "None",
            "blocks": "None",
            "block_axis": "-2",
        },
    ),
    "muonfx.scale": ("muonfx.transforms.scale", {"factor": None}),
    "muonfx.scale_by_schedule": ("muonfx.transforms.scale", {"schedule": None}),
    "muonfx.scale_by_learning_rate": ("muonfx.transforms.scale", {"learning_rate": None, "flip_sign": "True"}),
    "muonfx.scale_each": ("muonfx.transforms.scale", {"factors": None}),
    "muonfx.scale_by_shape": (
        "muonfx.transforms.scale",
        {"rule": "'match_rms_adamw'", "dims": "None", "blocks": "None", "block_axis": "-2"},
    ),
}
_FUNCTIONS = {"muonfx.default_labels": "muonfx.select.defaults"}


def is_of_0_1(fingerprint: str) -> bool:
    """Tell whether a fingerprint was made by the rule of 0.1.

    >>> is_of_0_1("b045c683981a2ae2"), is_of_0_1("2:b045c683981a2ae2")
    (True, False)
    """
    return ":" not in fingerprint


def is_of_later(fingerprint: str) -> bool:
    """Tell whether a fingerprint was made by a rule that this version does not know.

    >>> is_of_later("2:b045c683981a2ae2"), is_of_later("3:b045c683981a2ae2")
    (False, True)
    """
    return not is_of_0_1(fingerprint) and not fingerprint.startswith("2:")


def fingerprint_0_1(value: Recorded) -> str | None:
    """Compute the fingerprint that 0.1 would have written for a transform; None for one that 0.1 could not make.

    >>> import muonfx as mfx
    >>> fingerprint_0_1(mfx.chain(mfx.momentum(), mfx.scale(-0.1)))
    'c657fa8548f3c7a3'
    """
    try:
        return hashlib.sha256(_structure(value).encode()).hexdigest()[:16]
    except _Later:
        return None


class _Later(Exception):
    """A value says something that 0.1 had no argument for."""


def _structure(value: Any) -> str:
    """The text of which 0.1 made a fingerprint; it wrote down all arguments, and nested values behind them."""
    if isinstance(value, Recorded):
        return _structure_of_call(strip_transparent(value))
    if type(value) in (tuple, list):
        return f"({','.join(map(_structure, value))})"
    if type(value) is dict:
        return f"{{{','.join(f'{key!r}:{_structure(item)}' for key, item in value.items())}}}"
    if inspect.isfunction(value) or inspect.isclass(value):
        module = _FUNCTIONS.get(public_name(value), value.__module__)
        code = value.__code__ if inspect.isfunction(value) and value.__name__ == "<lambda>" else None
        body = f"{code.co_code.hex()}{code.co_names}{code.co_consts}" if code is not None else ""
        return f"{module}.{value.__qualname__}{body}"
    return repr(value)


def _structure_of_call(value: Recorded) -> str:
    skeleton, parts = value.structure.skeleton, iter(value.parts)
    nested = {name: [next(parts) for _ in range(_holes(item))] for name, item in skeleton.items()}
    name = public_name(value.factory)
    module, arguments = _FACTORIES.get(name, (None, dict.fromkeys(skeleton)))
    told = told_arguments(value)
    if told.keys() - arguments.keys():
        raise _Later
    # by default today: 0.1 wrote down its own default, which may have been another
    former = {a: v for a, v in value.factory.definition.former_defaults.items() if a not in told}
    texts = {
        argument: _structure(former.get(argument, item)) for argument, item in skeleton.items() if argument in arguments
    }
    missing = {argument: text for argument, text in arguments.items() if argument not in texts}
    if None in missing.values():
        raise _Later
    fixed = ",".join(f"{argument}={texts.get(argument, default)}" for argument, default in arguments.items())
    inner = [part for argument in arguments for part in nested.get(argument, []) if isinstance(part, Recorded)]
    where = f"{value.factory.__module__}.{value.factory.__qualname__}" if module is None else None
    where = where or f"{module}.{name.rpartition('.')[2]}"
    return f"{where}({fixed})[{','.join(map(_structure, inner))}]"


def _holes(skeleton: Any) -> int:
    """Count the parts of an argument."""
    if skeleton is _HOLE:
        return 1
    if type(skeleton) in (tuple, list):
        return sum(map(_holes, skeleton))
    return sum(map(_holes, skeleton.values())) if type(skeleton) is dict else 0
