"""Check arguments of plain types, and suggest names for misspelt ones.

An annotation lists which of bool, int, float and str an argument may be, or which strings (``Literal``). Python does
not check it: ``nesterov="no"`` would count as true and ``steps=True`` as 1, and here these are errors. Only these types
are checked, and only if the whole annotation is known: a union with an unknown member is left to the code that uses
the argument. Annotations are evaluated in the globals of the function.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from torch import Tensor

__all__ = [
    "NAMES_HERE",
    "bind",
    "check_plain",
    "code_of",
    "did_you_mean",
    "kinds_of",
    "plain_arguments",
    "plain_kinds",
    "plain_value",
]

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = {"bool": "True or False", "int": "an int", "float": "a number or a 0-d tensor", "str": "a string"}
# Further types that are known; no plain value is one of them.
_OTHERS = {
    "NoneType": "None",
    "Tensor": "Tensor",
    "dtype": "torch.dtype",
    "device": "torch.device",
    "Schedule": "Schedule",
    "Predicate": "Predicate",
}
_CONTAINERS = (tuple, list, dict, Mapping, Sequence, Callable)
# Aliases of `muonfx.core.schedules` that a module may import for type checkers only.
_Schedule = type("Schedule", (), {})
_ALIASES: dict[str, object] = {"Scalar": float | Tensor, "ScalarOrSchedule": float | Tensor | _Schedule}


NAMES_HERE = {
    name: here
    for here, names in {
        "transform": "GradientTransformation GradientTransformationExtraArgs with_extra_args_support",
        "TransformOptimizer": "Optimizer",
        "PyTree": "Params Updates OptState",
        "Muon": "MuonWithAuxAdam SingleDeviceMuonWithAuxAdam SingleDeviceMuon",
        "TransformOptimizer(model, muonfx.adamw())": "Adam AdamW NAdam",
        "TransformOptimizer(model, muonfx.lion())": "Lion",
        "TransformOptimizer(model, muonfx.chain(muonfx.momentum(heavy_ball=True), "
        "muonfx.scale_by_learning_rate(0.1)))": "SGD",
        "chain": "named_chain sequential",
        "partition": "multi_transform",
        "masked": "freeze selective_transform",
        "accumulate": "MultiSteps apply_every",
        "skip_nonfinite": "apply_if_finite skip_not_finite skip_large_updates zero_nans",
        "stateless": "stateless_with_tree_map",
        "scale(muonfx.linear(1.0, 0.0, 10))": "scale_by_schedule",
        "with_hyperparams": "inject_hyperparams inject_stateful_hyperparams",
        "momentum(heavy_ball=True)": "trace sgd",
        "momentum(nesterov=False)": "ema",
        "adamw(weight_decay=0.0)": "adam",
        "adamw(nesterov=True)": "nadam nadamw",
        "clip_by_value": "clip clip_grad_value_",
        "clip_by_global_norm": "clip_grad_norm_",
        "monitor": "measure_with_ema snapshot",
        "ema_params": "incremental_update AveragedModel",
        "normalize_leaves": "normalize",
        "match_weight_norms": "scale_by_param_block_norm scale_by_param_block_rms fromage",
        "scale_by_factored_rms": "adafactor Adafactor",
        "scale_by_trust_ratio": "lamb lars LAMB LARS",
        "scale_by_rms": "rmsprop RMSprop",
        "scale_by_sign": "sign_sgd signum",
        "contrib.scale_by_ademamix": "ademamix",
        "contrib.scale_by_dog": "dog scale_by_distance_over_gradients",
        "contrib.scale_by_dowg": "dowg",
        "contrib.scale_by_dion": "galore scale_by_galore",
        "muon": "scale_by_muon",
        "contrib.schedule_free": "schedule_free_adamw schedule_free_sgd",
        "polar.orthogonalize": "newton_schulz newtonschulz5 zeropower_via_newtonschulz5",
        "constant": "constant_schedule",
        "linear": "linear_schedule",
        "cosine": "cosine_decay_schedule",
        "join": "join_schedules piecewise_constant_schedule piecewise_interpolate_schedule",
        "exponential": "exponential_decay",
        "polynomial": "polynomial_schedule",
        "one_cycle": "cosine_onecycle_schedule linear_onecycle_schedule",
        "sgdr": "sgdr_schedule",
        "warmup_cosine": "warmup_cosine_decay_schedule",
        "join([muonfx.linear(0.0, 1.0, 10), muonfx.constant(1.0)], [10])": "warmup_constant_schedule",
        "warmup_stable_decay": "warmup_exponential_decay_schedule",
        "tree": "tree_utils",
        "tree.map": "tree_map",
        "tree.map_params": "tree_map_params",
        "tree.get": "tree_get",
        "tree.get_all": "tree_get_all_with_path",
        "tree.set": "tree_set",
        "tree.add": "tree_add",
        "tree.scale": "tree_scale",
        "tree.vdot": "tree_vdot",
        "tree.norm": "tree_norm",
        "schedules": "lr_scheduler",
    }.items()
    for name in names.split()
}
"""Names of Optax, ``torch.optim`` and the first implementation of Muon, with their counterpart in muonfx."""

_ARGUMENTS_HERE = {
    "lr": ("lr", "learning_rate"),
    "beta": ("decay", "momentum"),
    "momentum": ("momentum", "decay"),
    "decay": ("decay", "momentum"),
    "betas": ("betas", "b1", "b2"),
    "b1": ("b1", "betas"),
    "b2": ("b2", "betas"),
    "nesterov": ("nesterov", "Muon's momentum always looks ahead; muonfx.muon(nesterov=False) does not"),
    "ns_steps": ("steps",),
    "ns_coefficients": ("coefficients",),
    "ns_coeffs": ("coefficients",),
    "adjust_lr_fn": ("rule",),
    "consistent_rms": ("rule",),
    "adam_b1": ("b1", "betas"),
    "adam_b2": ("b2", "betas"),
    "adam_learning_rate": ("adamw_learning_rate", "adamw_lr"),
    "adam_weight_decay": ("adamw_weight_decay",),
    "weight_decay_mask": ("mask",),
    "muon_weight_dimension_numbers": ("dims",),
    "rules": ("rules", "labels=lambda model: muonfx.default_labels(model, rules)"),
    "accumulator_dtype": ("dtype",),
    "every_k_schedule": ("every",),
}
"""Argument names of Optax and ``torch.optim``, with muonfx's possible names; the last may be advice."""

_VIEW = ("dims", "blocks", "block_axis")
_PARTS = (
    ("orthogonalize", ("coefficients", "steps", "method", "dtype", "products", "view"), "muonfx.orthogonalize({}=...)"),
    ("view", _VIEW, "muonfx.MatrixView({}=...)"),
    ("orthogonalize", _VIEW, "muonfx.orthogonalize(view=muonfx.MatrixView({}=...))"),
    ("adam", ("b1", "b2", "eps"), "muonfx.scale_by_adam({}=...)"),
)
"""An argument that is given as a value, arguments of that value, and the code that gives one of these."""


def plain_kinds(annotation: object, names: Mapping[str, object] | None = None) -> frozenset[str]:
    """Return the members of a union if all are known and at least one is plain; empty means unchecked.

    An annotation in quotes is evaluated with the given names; if it cannot be, it is unchecked.
    """
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, {**_ALIASES, **(names or {})})
        except Exception:
            return frozenset()
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = [kind for member in members for kind in _kinds_of_member(member)]
    is_plain = any(kind in _PLAIN or _is_literal(kind) for kind in kinds)
    return frozenset(kinds) if is_plain and "" not in kinds else frozenset()


def _kinds_of_member(member: object) -> list[str]:
    """Return the names of the types that a member of a union accepts; "" is an unknown type."""
    origin = get_origin(member)
    if origin is Literal:
        return [repr(value) for value in get_args(member)]
    if origin in _CONTAINERS:
        return [re.sub(r"\b(collections\.abc|typing|torch)\.", "", str(member))]
    if isinstance(member, type):
        return [member.__name__ if member.__name__ in _PLAIN else _OTHERS.get(member.__name__, "")]
    return [""]


def _is_literal(member: str) -> bool:
    return member.startswith(("'", '"'))


def check_plain(owner: str, name: str, value: object, kinds: frozenset[str]) -> None:
    """Raise unless `value` is of one of the kinds from `plain_kinds`."""
    if not kinds or _is_one_of(value, kinds):
        return
    choices = [kind for kind in kinds if _is_literal(kind)]
    said = sorted(kind.replace("'", '"') for kind in choices)
    said += [words for kind, words in _PLAIN.items() if kind in kinds]
    said += sorted(kinds - _PLAIN.keys() - set(choices) - ({"Tensor"} if "float" in kinds else set()))
    wrong = ValueError if choices and isinstance(value, str) else TypeError
    advice = did_you_mean(value, [choice[1:-1] for choice in choices]) if isinstance(value, str) else ""
    if "float" in kinds and callable(value):
        advice = "; a function of the step count becomes a schedule, which stands for a number, by mfx.schedule"
    raise wrong(f"{owner}: {name} must be {' or '.join(said)}, found {value!r}{advice}")


def _is_one_of(value: object, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return "int" in kinds or "float" in kinds
    if isinstance(value, float):
        return "float" in kinds
    if isinstance(value, str):
        return "str" in kinds or repr(value) in kinds
    if value is None:
        return "None" in kinds
    if isinstance(value, Tensor):
        return bool(kinds & {"float", "Tensor", "torch.Tensor"})
    if type(value) is object or type(value).__module__.startswith("torch"):
        return True  # a pytree library's placeholder for a leaf, a symbolic number, a dtype
    # a schedule, a tuple, ...: the code that uses the argument checks it further
    return any(kind not in _PLAIN and kind != "None" and not _is_literal(kind) for kind in kinds)


def plain_value(value: object, kinds: frozenset[str]) -> object:
    """Convert a number of NumPy or another library to Python's; return any other value unchanged."""
    if value is None or isinstance(value, bool | str | Tensor) or type(value) in (int, float):
        return value
    if isinstance(value, numbers.Integral) and kinds & {"int", "float"}:
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and "float" in kinds else value


def _single_number(owner: str, name: str, value: object, kinds: frozenset[str]) -> object:
    """Return a one-element tensor given for a number as a 0-d view; raise if it has several elements."""
    if not isinstance(value, Tensor) or value.ndim == 0 or "float" not in kinds:
        return value
    if value.numel() != 1:
        raise ValueError(
            f"{owner}: {name} must be a number or a 0-d tensor, found a tensor of shape {tuple(value.shape)}; for one "
            "transform with each of several numbers: muonfx.stack"
        )
    return value.reshape(())


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the known names similar to a misspelt one, as a clause for an error message; "" if there are none."""
    known = list(known)
    close = [name for name in known if wrong == _initials(name) or name == _initials(wrong)]
    close = close or difflib.get_close_matches(wrong, known, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def _hint(wrong: str, known: Iterable[str]) -> str:
    """Return the muonfx name of an unknown argument, as a clause for an error message."""
    known = list(known)
    here = _ARGUMENTS_HERE.get(wrong, ())
    if found := [name for name in here if name in known]:
        return f" (did you mean {' or '.join(map(repr, found))}?)"
    for argument, inner, code in _PARTS:
        if argument in known and (found := [name for name in (wrong, *here) if name in inner]):
            return f" (here: {argument}={code.format(found[0])})"
    return f" (here: {here[-1]})" if here and not here[-1].isidentifier() else did_you_mean(wrong, known)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def bind(
    owner: str,
    signature: inspect.Signature,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> inspect.BoundArguments:
    """Bind call arguments to a signature; the error names the owner, its arguments and likely spellings."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters
        if "self" in parameters:  # a method
            rest = [p for name, p in parameters.items() if name != "self"]
            return bind(owner, signature.replace(parameters=rest), args[1:], kwargs)
        by_place = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unknown = [name for name in kwargs if name not in parameters]
        others = [name for name in parameters if name not in kwargs and name not in by_place[: len(args)]]
        if unknown:
            wrong = f"there is no argument {unknown[0]!r}{_hint(unknown[0], others)}"
        elif len(args) > len(by_place):
            most = f"{len(by_place)} positional argument{'s' * (len(by_place) != 1)}"
            wrong = f"takes {most} at most, found {len(args)}: give the others by name"
        else:
            wrong = str(error)
        takes = [name if name in by_place else f"{name}=" for name in parameters]
        raise TypeError(f"{owner}: {wrong}; {owner} takes {', '.join(takes) or 'no arguments'}") from None


def code_of(value: Any, code: Callable[[Any], str] = repr) -> str:
    """Return the code that builds a frozen dataclass, without the fields at their defaults."""
    given = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
    changed = [f"{name}={code(own)}" for name, own, default in given if own != default]
    return f"{type(value).__name__}({', '.join(changed)})"


def plain_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Check a function's plain arguments at every call; too slow for a training step."""
    signature = inspect.signature(function)
    kinds = kinds_of(signature.parameters, function)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = bind(owner, signature, args, kwargs)
        for name, value in bound.arguments.items():
            value = _single_number(owner, name, plain_value(value, kinds[name]), kinds[name])
            check_plain(owner, name, value, kinds[name])
            bound.arguments[name] = value
        return function(*bound.args, **bound.kwargs)

    return checked


def kinds_of(
    parameters: Mapping[str, inspect.Parameter], function: Callable[..., object] | None = None
) -> dict[str, frozenset[str]]:
    """Return the `plain_kinds` of each parameter; empty if it is variadic or its default is of another type."""
    inner = None if function is None else inspect.unwrap(function)
    module = sys.modules.get(getattr(inner, "__module__", ""))
    names = getattr(inner, "__globals__", None) or getattr(module, "__dict__", {})  # a class has no globals
    found: dict[str, frozenset[str]] = {}
    for name, parameter in parameters.items():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        kinds = frozenset[str]() if is_variadic else plain_kinds(parameter.annotation, names)
        fits = parameter.default is parameter.empty or _is_one_of(parameter.default, kinds)
        found[name] = kinds if fits else frozenset()
    return found
