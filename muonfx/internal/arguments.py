"""Check arguments of plain types, and suggest names for misspelt ones.

The annotation of an argument lists which of bool, int, float and str it may be, or which strings (``Literal``). Python
does not check it: ``nesterov="no"`` would count as true and ``steps=True`` as 1, and here these are errors. If the
annotation contains a further type, values of other types are accepted, and the code that uses the argument checks them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from muonfx._other_libraries import ARGUMENTS_HERE, ARGUMENTS_OF_PARTS

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = {"bool": "True or False", "int": "an int", "float": "a number or a 0-d tensor", "str": "a string"}
_LONGEST_REPR = 60
_DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
_SHOWN = {"NoneType": "None", "dtype": "torch.dtype", "device": "torch.device"}


def plain_kinds(annotation: object, names: Mapping[str, object]) -> frozenset[str]:
    """Return the names of the types that an annotation allows, such as {"float", "None"}; empty if not checked.

    An annotation is checked if all members of the union are types and at least one is bool, int, float, str or a
    ``Literal``. Quoted annotations are evaluated with ``names`` as globals, and are not checked if this fails.
    """
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(names))
        except Exception:
            return frozenset()
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = frozenset(itertools.chain.from_iterable(map(_kinds_of_member, members)))
    is_plain = not kinds.isdisjoint(_PLAIN) or any(map(_is_literal, kinds))
    return kinds if is_plain and "" not in kinds else frozenset()


def _kinds_of_member(member: object) -> list[str]:
    """Return the type name of a member of a union, or the strings of a ``Literal``; [""] for any other member."""
    origin = get_origin(member)
    if origin is None:
        return [_SHOWN.get(member.__name__, member.__name__) if isinstance(member, type) else ""]
    if origin is Literal:
        return list(map(repr, get_args(member)))
    return [re.sub(r"\b(collections\.abc|typing|torch|muonfx(\.\w+)*)\.", "", str(member))]


def _is_literal(kind: str) -> bool:
    return kind.startswith(("'", '"'))


def check_plain(owner: str, name: str, value: object, kinds: frozenset[str]) -> Any:
    """Return the value of an argument if its type is allowed, else raise an error.

    Numbers of NumPy and of other libraries become int or float. The error begins with ``owner``, the
    function, and ``name``, the argument. ``kinds`` are the names of the allowed types, from `plain_kinds`.
    """
    if not isinstance(value, bool | Tensor):
        if isinstance(value, numbers.Integral) and kinds & {"int", "float"}:
            value = int(value)
        elif isinstance(value, numbers.Real) and "float" in kinds:
            value = float(value)
    if not kinds or _is_one_of(value, kinds):
        return value
    choices = sorted(filter(_is_literal, kinds))
    accepted = [choice.replace("'", '"') for choice in choices]
    accepted += [words for kind, words in _PLAIN.items() if kind in kinds]
    further_kinds = kinds - _PLAIN.keys() - set(choices)
    if "float" in kinds:
        further_kinds -= {"Tensor"}  # its words are "a number or a 0-d tensor"
    accepted += sorted(further_kinds)
    error = ValueError if choices and isinstance(value, str) else TypeError
    advice = _advice_for(value, kinds, choices)
    raise error(f"{owner}: {name} must be {' or '.join(accepted)}, found {short_repr(value)}{advice}")


def short_repr(value: object) -> str:
    """Return the first line of a repr, cut to 60 characters: a model or a tensor would fill the screen."""
    text, *further_lines = repr(value).splitlines() or [""]
    if further_lines or len(text) > _LONGEST_REPR:
        return text[:_LONGEST_REPR].rstrip() + " ..."
    return text


def _advice_for(value: object, kinds: frozenset[str], choices: list[str]) -> str:
    """Return what to do about an argument of a wrong type, as the end of a sentence; "" if nothing is known."""
    if isinstance(value, str):
        if "torch.dtype" in kinds:
            return _advice_for_dtype(value)
        return did_you_mean(value, [choice[1:-1] for choice in choices])
    if "float" not in kinds:
        return ""
    if isinstance(value, nn.Module | Iterator | Mapping):
        return (
            ": a transform has no parameters; give them to muonfx.Muon(model), to "
            "muonfx.TransformOptimizer(model, transform), or to the transform's init"
        )
    if isinstance(value, LRScheduler):
        return ": a torch scheduler acts on an optimizer, such as muonfx.TransformOptimizer(model, transform)"
    if hasattr(value, "factory"):
        return (
            ": it accepts no schedule; use a torch scheduler, or a chain with the schedule in muonfx.TransformOptimizer"
        )
    if callable(value) and not isinstance(value, type):
        return ": if it is a function f of the step, pass muonfx.schedule(lambda: f)(), or use a torch scheduler"
    return ""


def _advice_for_dtype(name: str) -> str:
    """Return what to write instead of the name of a dtype, such as "bf16".

    >>> _advice_for_dtype("bf16")
    ': pass torch.bfloat16, without quotes'
    """
    if name in ("int8", "fp8"):
        return f": pass muonfx.{name}"
    name = _DTYPE_NAMES.get(name, name.removeprefix("torch."))
    if isinstance(getattr(torch, name, None), torch.dtype):
        return f": pass torch.{name}, without quotes"
    return ": pass a torch.dtype, such as torch.bfloat16"


def _is_one_of(value: object, kinds: frozenset[str]) -> bool:
    """Return True if the type of a value is one of ``kinds``, as `plain_kinds` returns them: {"float", "None"}.

    An int is accepted as a float, and a 0-d tensor too; a bool is accepted as a bool only.
    """
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return bool(kinds & {"int", "float"})
    if isinstance(value, float):
        return "float" in kinds
    if isinstance(value, str):
        return "str" in kinds or repr(value) in kinds
    if value is None:
        return "None" in kinds
    if isinstance(value, Tensor):
        return bool(kinds & {"float", "Tensor"})
    if type(value) is object or _is_symbolic(value):
        return True  # a pytree library's placeholder for a leaf, or a number of a tracer
    # A schedule, a tuple or another object: the code that uses the argument checks it further.
    return any(_is_other_type(kind) for kind in kinds)


def _is_other_type(kind: str) -> bool:
    return kind not in _PLAIN and kind != "None" and not _is_literal(kind)


def _is_symbolic(value: object) -> bool:
    """Return True for the numbers and placeholders of torch's tracers, such as ``torch.SymInt`` and ``fx.Proxy``."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    return type(value).__module__.startswith(("torch.fx", "torch.utils._", "torch.export", "torch._"))


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" with the names in ``known`` that are similar to ``wrong``; "" if there are none."""
    close = closest(wrong, known)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def closest(wrong: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the names ``known`` that are similar to ``wrong``, or whose initials match it, as "lr"."""
    known = list(known)
    initials = [name for name in known if wrong == _initials(name) or name == _initials(wrong)]
    return initials or difflib.get_close_matches(wrong, known, n=3, cutoff=0.6)


def close_names(wanted: str, names: Iterable[str], level: str = ".") -> list[str]:
    """Return up to three of ``names`` that contain components, such as "attn.q", similar to those in ``wanted``."""
    length = wanted.count(level) + 1
    name_with: dict[str, str] = {}  # "attn.q": "blocks.0.attn.q"
    for name in names:
        components = name.lower().split(level)
        for start in range(max(1, len(components) - length + 1)):
            window = level.join(components[start : start + length])
            name_with.setdefault(window, name)
    close_windows = difflib.get_close_matches(wanted.lower(), name_with)
    return list(dict.fromkeys([name_with[window] for window in close_windows]))


def hint(wrong: str, known: Iterable[str]) -> str:
    """Return advice for an error about an unknown argument: the same argument in muonfx, or similar names.

    For example, " (did you mean 'decay'?)". The table `ARGUMENTS_HERE` has the arguments in muonfx for an argument of
    another library. Its last entry may be a sentence of advice instead.
    """
    known = list(known)
    equivalents = ARGUMENTS_HERE.get(wrong, ())
    accepted = [name for name in equivalents if name in known]
    if accepted:
        return f" (did you mean {' or '.join(map(repr, accepted))}?)"
    code = _code_with_argument([wrong, *equivalents], known)
    if code:
        return f" (here: {code})"
    if equivalents and not equivalents[-1].isidentifier():  # advice, not a name
        return f" (here: {equivalents[-1]})"
    return did_you_mean(wrong, known)


def _code_with_argument(names: list[str], known: list[str]) -> str:
    """Return how to pass one of ``names`` to an object that is itself an argument in ``known``; "" if there is none.

    >>> _code_with_argument(["steps"], ["orthogonalize"])
    'orthogonalize=muonfx.orthogonalize(steps=...)'
    """
    for argument, inner_arguments, code in ARGUMENTS_OF_PARTS:
        if argument not in known:
            continue
        for name in names:
            if name in inner_arguments:
                return f"{argument}={code.format(name)}"
    return ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def bind(
    owner: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> inspect.BoundArguments:
    """Bind the arguments of a call to a signature, like ``signature.bind``, with a clearer error.

    The error names ``owner``, the function called, lists its arguments, and suggests spellings for a wrong name.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters
        if "self" in parameters:  # a method
            without_self = [parameter for name, parameter in parameters.items() if name != "self"]
            return bind(owner, signature.replace(parameters=without_self), args[1:], kwargs)
        positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unknown = [name for name in kwargs if name not in parameters]
        if unknown:
            passed = {*kwargs, *positional[: len(args)]}
            missing = [name for name in parameters if name not in passed]
            problem = f"there is no argument {unknown[0]!r}{hint(unknown[0], missing)}"
        elif len(args) > len(positional):
            noun = "positional argument" if len(positional) == 1 else "positional arguments"
            problem = f"takes {len(positional)} {noun} at most, found {len(args)}: give the others by name"
        else:
            problem = str(error)
        accepted = [name if name in positional else f"{name}=" for name in parameters]
        raise TypeError(f"{owner}: {problem}; {owner} takes {', '.join(accepted) or 'no arguments'}") from None


def code_of(value: Any, code: Callable[[Any], str] = repr) -> str:
    """Return Python code that creates a dataclass instance, without the fields that have their default value.

    ``code`` converts the value of a field to code.
    """
    arguments: list[str] = []
    for field in fields(value):
        field_value = getattr(value, field.name)
        if field_value != field.default:
            arguments.append(f"{field.name}={code(field_value)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def plain_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that every call checks the types of bool, int, float and str arguments by annotation.

    Too slow for functions that are called in a training step.
    """
    signature = inspect.signature(function)
    kinds = kinds_of(signature.parameters, function)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function with checked arguments. A tensor of one element becomes 0-d where a number is accepted."""
        bound = bind(owner, signature, args, kwargs)
        for name, value in bound.arguments.items():
            if not kinds[name]:
                continue
            value = check_plain(owner, name, value, kinds[name])
            if isinstance(value, Tensor) and value.ndim and "float" in kinds[name]:
                if value.numel() != 1:
                    raise ValueError(
                        f"{owner}: {name} must be a number or a 0-d tensor, found a tensor of shape "
                        f"{tuple(value.shape)}; for one transform with each of several numbers: muonfx.stack"
                    )
                value = value.reshape(())
            bound.arguments[name] = value
        return function(*bound.args, **bound.kwargs)

    return checked


def plain_fields(kind: type[T]) -> type[T]:
    """Decorate a dataclass so that the types of its bool, int, float and str fields are checked when it is built."""
    kinds_of_field = kinds_of(inspect.signature(kind).parameters, kind)
    post_init = vars(kind)["__post_init__"]

    def checked_post_init(value: T) -> None:
        post_init(value)
        for name, field_kinds in kinds_of_field.items():
            if field_kinds:
                check_plain(kind.__name__, name, getattr(value, name), field_kinds)

    setattr(kind, "__post_init__", checked_post_init)  # noqa: B010
    return kind


def kinds_of(parameters: Mapping[str, inspect.Parameter], function: Callable[..., object]) -> dict[str, frozenset[str]]:
    """Return a dict from each parameter of a function to the names of its allowed types, as `plain_kinds` does.

    The names are empty, for no check, if a parameter is variadic or its default has another type.
    """
    inner = inspect.unwrap(function)
    names = getattr(inner, "__globals__", None) or vars(sys.modules[inner.__module__])  # a class has no globals
    checked_kinds: dict[str, frozenset[str]] = {}
    for name, parameter in parameters.items():
        checked_kinds[name] = frozenset()
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kinds = plain_kinds(parameter.annotation, names)
        if parameter.default is parameter.empty or _is_one_of(parameter.default, kinds):
            checked_kinds[name] = kinds
    return checked_kinds
