"""Arguments: those of plain types are checked, and several that belong together may be given as one value.

An annotation says which of bool, int, float and str an argument may be, or which few strings (``Literal``). Python
does not look, and so ``nesterov="no"`` would count as true and ``steps=True`` as 1: here these are errors. Only these
types are looked at, and only where the whole annotation is understood: a union with an unknown name in it may mean
anything and is left to whoever reads the argument. Aliases are understood where the function's module has them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, ParamSpec, Self, TypeVar, Union, get_args, get_origin

from torch import Tensor

__all__ = [
    "NAMES_HERE",
    "Options",
    "bind",
    "check_plain",
    "did_you_mean",
    "expand_options",
    "floats_of",
    "kinds_of",
    "numbers_of_schedules",
    "options_of",
    "plain_arguments",
    "plain_kinds",
    "plain_value",
]

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = {"bool": "True or False", "int": "an int", "float": "a number or a 0-d tensor", "str": "a string"}
# No plain value is any of these.
_OTHERS = frozenset({"None", "Tensor", "torch.Tensor", "torch.dtype", "torch.device", "Schedule", "Predicate"})
_GENERIC = ("tuple[", "list[", "dict[", "Mapping[", "Sequence[", "Callable[")
_SHORT = {"NoneType": "None", "torch.Tensor": "Tensor"}
# The aliases that say what a number may be: understood by name too, where a function has imported them itself.
_ALIASES = {
    "Scalar": frozenset({"float", "Tensor"}),
    "ScalarOrSchedule": frozenset({"float", "Tensor", "Schedule"}),
    "ScalarOrFunction": frozenset({"float", "Tensor", "Schedule", "Callable[[Tensor], Tensor]"}),
}


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
        "inject_hyperparams": "inject_stateful_hyperparams",
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
        "polar.NewtonSchulz": "NewtonSchulz",
        "constant": "constant_schedule",
        "linear": "linear_schedule",
        "cosine": "cosine_decay_schedule",
        "join": "join_schedules",
        "exponential": "exponential_decay",
        "polynomial": "polynomial_schedule",
        "piecewise_constant": "piecewise_constant_schedule",
        "piecewise_interpolate": "piecewise_interpolate_schedule",
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
"""Names of Optax, ``torch.optim`` and Muon's first implementation, with the code that is muonfx's counterpart."""

_ARGUMENTS_HERE = {
    "lr": ("lr", "learning_rate"),
    "beta": ("decay", "momentum"),
    "momentum": ("momentum", "decay"),
    "decay": ("decay", "momentum"),
    "betas": ("betas", "b1", "b2"),
    "b1": ("b1", "betas"),
    "b2": ("b2", "betas"),
    "nesterov": ("nesterov", "Muon's momentum always looks ahead; muonfx.muon(nesterov=False) does not"),
    "steps": ("steps", "newton_schulz=muonfx.polar.NewtonSchulz(steps=...)"),
    "ns_steps": ("steps", "newton_schulz=muonfx.polar.NewtonSchulz(steps=...)"),
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
    "accumulator_dtype": ("dtype",),
    "every_k_schedule": ("every",),
}
"""Arguments of Optax and ``torch.optim``: the names that functions here may have, and in the end words if none is."""


def plain_kinds(annotation: object, names: Mapping[str, object] | None = None) -> frozenset[str]:
    """The members of a union, where all are understood and one is a plain type; else the empty set: nothing to check.

    Args:
        annotation: a type, or the text of one.
        names: the globals in which a text was written, for the aliases in it.

    >>> sorted(plain_kinds("float | Schedule | Callable[[Tensor], Tensor]")), plain_kinds("PyTree | bool")
    (['Callable[[Tensor], Tensor]', 'Schedule', 'float'], frozenset())
    >>> sorted(plain_kinds("Method | None", {"Method": Literal["auto", "gram"]}))
    ["'auto'", "'gram'", 'None']
    """
    members = _expand(annotation, names or {})
    known = all(m in _PLAIN or m in _OTHERS or m.startswith(_GENERIC) or _is_literal(m) for m in members)
    return frozenset(members) if known and any(m in _PLAIN or _is_literal(m) for m in members) else frozenset()


def _is_literal(member: str) -> bool:
    return member.startswith(("'", '"'))


def _expand(annotation: object, names: Mapping[str, object]) -> set[str]:
    """The members of a union as text, with aliases replaced by what they stand for."""
    if isinstance(annotation, str):
        found = set[str]()
        for member in _members(annotation):
            found |= _expand_name(member, names)
        return found
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return set[str]().union(*(_expand(member, names) for member in get_args(annotation)))
    if origin is Literal:
        return {repr(value) for value in get_args(annotation)}
    if origin is None and isinstance(annotation, type):
        text = annotation.__qualname__
        return {_SHORT.get(text, text)}
    text = str(annotation)
    return {text.removeprefix("collections.abc.").removeprefix("typing.")}


def _expand_name(member: str, names: Mapping[str, object]) -> set[str]:
    if member in _PLAIN or member in _OTHERS or member.startswith(_GENERIC):
        return {_SHORT.get(member, member)}
    if member.startswith("Literal[") and member.endswith("]"):
        return {repr(part.strip().strip("\"'")) for part in member[len("Literal[") : -1].split(",")}
    first, *rest = member.split(".")
    meant = names.get(first)
    for attribute in rest:
        meant = getattr(meant, attribute, None)
    if get_origin(meant) in (Union, UnionType, Literal):
        return _expand(meant, names)
    return set(_ALIASES.get((rest or [first])[-1], {member}))


def numbers_of_schedules(kinds: frozenset[str]) -> frozenset[str]:
    """The kinds of an argument for which numbers stand where schedules are given, as in `ScalarOrSchedule`.

    Who says ``float | Schedule`` and no more, or takes functions too, looks at the schedule itself.

    >>> sorted(numbers_of_schedules(frozenset({"float", "Tensor", "Schedule", "None"})))
    ['None', 'float']
    >>> sorted(numbers_of_schedules(frozenset({"float", "Schedule"})))
    ['Schedule', 'float']
    """
    is_alias = _ALIASES["ScalarOrSchedule"] <= kinds <= _ALIASES["ScalarOrSchedule"] | {"None"}
    return kinds - {"Tensor", "Schedule"} if is_alias else kinds


def _members(text: str) -> set[str]:
    found, depth, start = set[str](), 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "|" and not depth:
            found.add(text[start:at].strip())
            start = at + 1
    return found | {text[start:].strip()}


def check_plain(owner: str, name: str, value: object, kinds: frozenset[str]) -> None:
    """Require a value of one of the kinds that `plain_kinds` has found.

    An int passes for a float, and a tensor or a traced number for either; a bool passes for nothing but a bool.

    Raises:
        TypeError: it is of another type; the message says which are taken.

    >>> check_plain("momentum", "nesterov", "no", plain_kinds("bool"))
    Traceback (most recent call last):
    TypeError: momentum: nesterov must be True or False, found 'no'
    """
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
        return True  # the placeholder that a pytree library puts in a leaf's place, a symbolic number, a dtype
    # a schedule, a tuple, ...: whoever reads the argument looks closer
    return any(kind not in _PLAIN and kind != "None" and not _is_literal(kind) for kind in kinds)


def plain_value(value: object, kinds: frozenset[str]) -> object:
    """A number of NumPy, or of another library, as Python's; all else as it is.

    >>> from fractions import Fraction
    >>> plain_value(Fraction(1, 2), plain_kinds("float")), plain_value("3", plain_kinds("int"))
    (0.5, '3')
    """
    if value is None or isinstance(value, bool | str | Tensor) or type(value) in (int, float):
        return value
    if isinstance(value, numbers.Integral) and kinds & {"int", "float"}:
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and "float" in kinds else value


def _single_number(owner: str, name: str, value: object, kinds: frozenset[str]) -> object:
    """A tensor of one element, given for a number, as a 0-d tensor that shares its storage.

    Raises:
        ValueError: the tensor has several elements.
    """
    if not isinstance(value, Tensor) or value.ndim == 0 or "float" not in kinds:
        return value
    if value.numel() != 1:
        raise ValueError(
            f"{owner}: {name} must be a number or a 0-d tensor, found a tensor of shape {tuple(value.shape)}; for one "
            "transform with each of several numbers: muonfx.stack"
        )
    return value.reshape(())


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Names like a misspelt one, as the end of a clause of an error message; nothing where none is like it.

    >>> did_you_mean("boundry", ["boundary", "value"]), did_you_mean("x", ["boundary"])
    (" (did you mean 'boundary'?)", '')
    >>> did_you_mean("lr", ["learning_rate", "decay"])
    " (did you mean 'learning_rate'?)"
    """
    known = list(known)
    close = [name for name in known if wrong == _initials(name) or name == _initials(wrong)]
    close = close or difflib.get_close_matches(wrong, known, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def _hint(wrong: str, known: Iterable[str]) -> str:
    """What stands here for an unknown argument, as the end of a clause of an error message.

    >>> _hint("betas", ["b1", "b2", "eps"]), _hint("ns_steps", ["lr"])
    (" (did you mean 'b1' or 'b2'?)", ' (here: newton_schulz=muonfx.polar.NewtonSchulz(steps=...))')
    """
    known = list(known)
    here = _ARGUMENTS_HERE.get(wrong, ())
    if found := [name for name in here if name in known]:
        return f" (did you mean {' or '.join(map(repr, found))}?)"
    return f" (here: {here[-1]})" if here and not here[-1].isidentifier() else did_you_mean(wrong, known)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def bind(
    owner: str,
    signature: inspect.Signature,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    stood_for: Iterable[str] = (),
) -> inspect.BoundArguments:
    """Bind the arguments of a call to a signature.

    Args:
        owner: the function's name.
        signature: its signature.
        args: the positional arguments.
        kwargs: the named ones.
        stood_for: arguments that it takes too, and that others of the signature have been put in the place of.

    Raises:
        TypeError: they do not fit; the message names the owner and all that it takes, and the name that a misspelt one
            may stand for.

    >>> signature = inspect.Signature([inspect.Parameter("steps", inspect.Parameter.KEYWORD_ONLY)])
    >>> bind("f", signature, (), {"stesp": 3})
    Traceback (most recent call last):
    TypeError: f: there is no argument 'stesp' (did you mean 'steps'?); f takes steps=
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters
        if "self" in parameters:  # a method's own
            rest = [p for name, p in parameters.items() if name != "self"]
            return bind(owner, signature.replace(parameters=rest), args[1:], kwargs)
        by_place = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unknown = [name for name in kwargs if name not in parameters]
        others = [*stood_for]
        others += [name for name in parameters if name not in kwargs and name not in by_place[: len(args)]]
        if unknown:
            wrong = f"there is no argument {unknown[0]!r}{_hint(unknown[0], others)}"
        elif len(args) > len(by_place):
            most = f"{len(by_place)} positional argument{'s' * (len(by_place) != 1)}"
            wrong = f"takes {most} at most, found {len(args)}: give the others by name"
        else:
            wrong = str(error)
        takes = [name if name in by_place else f"{name}=" for name in parameters]
        raise TypeError(f"{owner}: {wrong}; {owner} takes {', '.join(takes) or 'no arguments'}") from None


@dataclass(frozen=True, repr=False)
class Options:
    """Base of the frozen dataclasses that say several arguments as one value.

    A function takes one by a keyword whose default is one, beside keywords with the names of some of its fields, the
    loose arguments. Either is given, never both. What is called with loose arguments gets a value made of them, if it
    is decorated with `plain_arguments` or makes recorded values; these hold the loose arguments, whichever was given.

    >>> from muonfx.polar import NewtonSchulz
    >>> NewtonSchulz(steps=3), NewtonSchulz(steps=3).arguments["method"]
    (NewtonSchulz(steps=3), 'auto')
    """

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields by name, as loose arguments."""
        return {name: getattr(self, name) for name in self.__match_args__}

    def __repr__(self) -> str:
        """Print as the code that makes the value; fields that are as by default are left out."""
        told = [f"{name}={value!r}" for name, value in _told(type(self), self.arguments).items()]
        return f"{type(self).__name__}({', '.join(told)})"

    @classmethod
    def take(cls, name: str, given: Mapping[str, object]) -> Self:
        """Take the value among named arguments, or where it is absent or None, make one of the loose arguments.

        Args:
            name: of the argument for the value.
            given: the arguments of a call by name; those that are neither the value nor a field do not count.

        Raises:
            TypeError: the value is of another type.
            ValueError: both say something; the message names the loose arguments that do. Or a field is malformed.

        >>> from muonfx.polar import NewtonSchulz
        >>> NewtonSchulz.take("newton_schulz", {"steps": 3, "decay": 0.9})
        NewtonSchulz(steps=3)
        >>> NewtonSchulz.take("newton_schulz", {"newton_schulz": NewtonSchulz(steps=3), "steps": 4})
        Traceback (most recent call last):
        ValueError: newton_schulz stands for steps too: give one of them
        """
        value = given.get(name)
        loose: dict[str, Any] = {field: given[field] for field in cls.__match_args__ if field in given}
        if value is None:
            return cls(**loose)
        if not isinstance(value, cls):
            raise TypeError(f"{name} must be a {cls.__name__}, found {value!r}")
        if told := _told(cls, loose):
            raise ValueError(f"{name} stands for {', '.join(told)} too: give one of them")
        return value


def _told(kind: type[Options], given: Mapping[str, object]) -> dict[str, object]:
    """Those of some fields that differ from their defaults."""
    default = {field.name: field.default for field in fields(kind)}
    return {name: own for name, own in given.items() if isinstance(own, Tensor) or own != default[name]}


def options_of(parameters: Mapping[str, inspect.Parameter]) -> dict[str, type[Options]]:
    """Find the parameters whose default is a value of `Options`, with the type of each."""
    return {name: type(own.default) for name, own in parameters.items() if isinstance(own.default, Options)}


def expand_options(options: Mapping[str, type[Options]], given: Mapping[str, object]) -> dict[str, Any]:
    """Named arguments of a call with each value of `Options` among them replaced by its fields.

    Raises:
        TypeError, ValueError: as `Options.take`.

    >>> from muonfx.polar import NewtonSchulz
    >>> expand_options({"newton_schulz": NewtonSchulz}, {"newton_schulz": NewtonSchulz(steps=3), "dims": None})["steps"]
    3
    """
    loose = {name: value for name, value in given.items() if name not in options}
    for name in options.keys() & given.keys():
        if given[name] is not None:
            loose |= options[name].take(name, given).arguments
    return loose


def plain_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Check a function's arguments of plain types at every call; for what is called once, not at every step.

    Those that are `Options` it gets as values, never None, also where the caller has given loose arguments.

    >>> @plain_arguments
    ... def f(steps: int, *, loud: bool = False): ...
    >>> f(3, loud=1)
    Traceback (most recent call last):
    TypeError: f: loud must be True or False, found 1
    """
    signature = inspect.signature(function)
    kinds = kinds_of(signature.parameters, function)
    options = options_of(signature.parameters)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = bind(owner, signature, args, kwargs)
        for name, value in bound.arguments.items():
            value = _single_number(owner, name, plain_value(value, kinds[name]), kinds[name])
            check_plain(owner, name, value, kinds[name])
            bound.arguments[name] = value
        given = bound.kwargs
        given.update({name: kind.take(name, given) for name, kind in options.items()})
        return function(*bound.args, **given)

    return checked


def _names_in_reach(function: Callable[..., object] | None) -> Mapping[str, object]:
    """The globals in which a function's annotations, or those of a class, were written."""
    if function is None:
        return {}
    inner = inspect.unwrap(function)
    return getattr(inner, "__globals__", None) or getattr(sys.modules.get(inner.__module__), "__dict__", {})


def floats_of(parameters: Mapping[str, inspect.Parameter], function: Callable[..., object]) -> frozenset[str]:
    """Find the parameters whose annotation allows a float; a container of floats is not one.

    >>> def f(a: Scalar, b: int, *, c: Unknown | float = 0.0, d: str | tuple[float, float] = ""): ...
    >>> sorted(floats_of(inspect.signature(f).parameters, f))
    ['a', 'c']
    """
    names = _names_in_reach(function)
    said = {name: own.annotation for name, own in parameters.items() if own.annotation is not own.empty}
    return frozenset(name for name, own in said.items() if any(map(_is_float, _expand(own, names))))


def _is_float(member: str) -> bool:
    """True if a member of a union is a float, and no container of floats."""
    return "float" in member and not member.startswith(_GENERIC) and not _is_literal(member)


def kinds_of(
    parameters: Mapping[str, inspect.Parameter], function: Callable[..., object] | None = None
) -> dict[str, frozenset[str]]:
    """Find `plain_kinds` of each parameter; none for one that takes many, or whose default is of another type.

    Args:
        parameters: of a function.
        function: itself, whose module has the aliases.

    >>> def f(a: int, *rest: int, b: float = None): ...
    >>> kinds_of(inspect.signature(f).parameters)
    {'a': frozenset({'int'}), 'rest': frozenset(), 'b': frozenset()}
    """
    names = _names_in_reach(function)
    found: dict[str, frozenset[str]] = {}
    for name, parameter in parameters.items():
        many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        kinds = (
            frozenset[str]()
            if many or parameter.annotation is parameter.empty
            else plain_kinds(parameter.annotation, names)
        )
        fits = parameter.default is parameter.empty or _is_one_of(parameter.default, kinds)
        found[name] = kinds if fits else frozenset()
    return found
