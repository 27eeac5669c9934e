"""Check arguments of plain types, and suggest names for misspelt ones.

The annotation of an argument lists which of bool, int, float and str it may be, or which strings (``Literal``). Python
does not check it: ``nesterov="no"`` would count as true and ``steps=True`` as 1, and here these are errors. If the
annotation contains a further type, values of other types are accepted, and the code that uses the argument checks them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from muonfx._other_libraries import ADVICE_ON_ARGUMENTS, ARGUMENTS_HERE, ARGUMENTS_OF_PARTS

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = {
    "bool": "True or False",
    "int": "an int",
    "float": "a number or a 0-d tensor",
    "str": "a string",
}
_LONGEST_REPR = 60
_SHOWN = {"NoneType": "None", "dtype": "torch.dtype", "device": "torch.device"}


def accepted_types(annotation: object, names: Mapping[str, object]) -> frozenset[str]:
    """Read the annotation of an argument, such as ``float | None``: return the names of the types that it allows.

    A string that the annotation allows, such as "auto", is in quotes. The result is empty if the argument is not
    checked, because no member of the union is bool, int, float, str or a ``Literal`` of strings. ``names`` are the
    globals with which an annotation that is a string is evaluated.

    >>> sorted(accepted_types("float | None", {})), sorted(accepted_types(Literal["auto"], {}))
    (['None', 'float'], ["'auto'"])
    >>> accepted_types(list, {})
    frozenset()
    """
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(names))
        except Exception:  # for example, a type that is imported for type checkers only
            return frozenset()
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    type_names: set[str] = set()
    has_plain_type = False
    for member in members:
        if get_origin(member) is Literal:
            choices = get_args(member)
            # Strings in quotes, which names of types do not have.
            type_names.update(map(repr, choices))
            has_plain_type |= str in map(type, choices)
        else:
            name = getattr(member, "__name__", str(member))
            type_names.add(_SHOWN.get(name, name))
            has_plain_type |= name in _PLAIN
    if not has_plain_type:
        return frozenset()
    return frozenset(type_names)


def _is_literal(type_name: str) -> bool:
    return type_name.startswith(("'", '"'))


def check_plain(owner: str, name: str, value: object, type_names: frozenset[str]) -> Any:
    """Check the type of an argument: return the value if its type is allowed, else raise an error with advice.

    Numbers of NumPy and of other libraries become int or float. ``owner`` is the name of the function, and
    ``type_names`` are the allowed types, from `accepted_types`.

    >>> check_plain("adam", "b1", "0.9", frozenset({"float"}))
    Traceback (most recent call last):
    TypeError: adam: b1 must be a number or a 0-d tensor, found '0.9'
    """
    value = _python_number(f"{owner}: {name}", value, type_names)
    if type_names and not _is_one_of(value, type_names):
        raise _wrong_type(f"{owner}: {name}", value, type_names)
    return value


def _wrong_type(argument: str, value: object, type_names: frozenset[str]) -> TypeError | ValueError:
    """Return the error for an argument of a type that is not allowed, or for a string that is none of the choices."""
    words = _words_for(type_names)
    message = (
        f"{argument} must be {words}, found {short_repr(value)}{_advice_for(value, type_names)}"
    )
    if isinstance(value, str) and any(map(_is_literal, type_names)):  # the type is right
        return ValueError(message)
    return TypeError(message)


def _python_number(argument: str, value: Any, type_names: frozenset[str]) -> Any:
    """Return a number of another library, such as ``numpy.float32(0.5)``, as a Python number, here 0.5.

    Other values are returned unchanged, and so are numbers of a type that the argument does not allow. ``argument`` is
    the name for an error.

    >>> from fractions import Fraction
    >>> _python_number("scale: factor", Fraction(1, 2), frozenset({"float"}))
    0.5
    >>> _python_number("accumulate: every", Fraction(1, 2), frozenset({"int"}))
    Fraction(1, 2)
    """
    # A bool is an int in Python and must not become 1. A tensor is accepted as a number as it is.
    if isinstance(value, bool | Tensor):
        return value
    # An integer stays an int, also for an argument that is annotated with float.
    if isinstance(value, numbers.Integral) and not type_names.isdisjoint({"int", "float"}):
        return int(value)
    if isinstance(value, numbers.Real) and "float" in type_names:
        return float_of(argument, value)
    return value


def _words_for(type_names: frozenset[str]) -> str:
    """Return words for the types that an argument allows, for an error.

    >>> _words_for(frozenset({"None", "float", "Schedule"}))
    'a number or a 0-d tensor or Schedule or None'
    """
    names = sorted(type_names - {"None"})
    names.sort(key=_is_other_type)  # numbers and strings first, then types such as "Schedule"
    if "float" in names and "Tensor" in names:
        names.remove("Tensor")  # the words for float are "a number or a 0-d tensor"
    words = [_PLAIN.get(name, name.replace("'", '"')) for name in names]
    if "None" in type_names:
        words.append("None")
    return " or ".join(words)


def short_repr(value: object) -> str:
    """Return the first line of a repr, cut to 60 characters: a model or a tensor would fill the screen."""
    text, *further_lines = repr(value).splitlines() or [""]
    if further_lines or len(text) > _LONGEST_REPR:
        return text[:_LONGEST_REPR].rstrip() + " ..."
    return text


def _advice_for(value: Any, type_names: frozenset[str]) -> str:
    """Return advice for the error about an argument of a wrong type, as the end of a sentence; "" if there is none.

    ``type_names`` are the types that the argument allows. A choice of strings is one of them, in quotes.

    >>> _advice_for("aut", frozenset({"'auto'"}))
    " (did you mean 'auto'?)"
    >>> _advice_for("bfloat16", frozenset({"torch.dtype"}))
    ': pass a torch.dtype without quotes, such as torch.bfloat16'
    >>> _advice_for(mfx.int8, frozenset({"torch.dtype", "QuantizedDtype"}))
    ': call it, as in int8()'
    """
    if isinstance(value, str) and "torch.dtype" in type_names:  # such as dtype="bfloat16"
        advice = ": pass a torch.dtype without quotes, such as torch.bfloat16"
        if "QuantizedDtype" in type_names:
            advice += ", or muonfx.int8()"
        return advice
    if isinstance(value, str):  # perhaps a misspelt choice
        choices = sorted(filter(_is_literal, type_names))
        advice = did_you_mean(value, [choice.strip("'\"") for choice in choices])
        if not advice and "float" in type_names:
            advice = advice_for_text(value)
        return advice
    # A factory is a function that returns a schedule or a dtype. It was passed without a call.
    # Such as int8 without ()
    if _is_factory(value) and not type_names.isdisjoint({"float", "QuantizedDtype"}):
        return f": call it, as in {value.__name__}()"
    if "float" in type_names:
        return _advice_for_number(value)
    return ""


def advice_for_text(value: object) -> str:
    """Return advice for the error about a text in place of a number, if it is one such as "1e-3"; else "".

    >>> advice_for_text("1e-3"), advice_for_text("fast")
    (': convert the text with float(); YAML reads 1e-3 as a text, and 1.0e-3 as a number', '')
    """
    if not isinstance(value, str) or "e" not in value.lower():
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return ": convert the text with float(); YAML reads 1e-3 as a text, and 1.0e-3 as a number"


def _is_factory(value: Any) -> bool:
    """Return True for a function such as `muonfx.int8` or `muonfx.linear_schedule`, which returns a recorded value."""
    # The decorator is defined in a module that imports this one.
    return hasattr(value, "definition")


def _advice_for_number(value: Any) -> str:
    """Return advice for the error about an object in place of a number, such as a learning rate; "" if there is none.

    In ``muon(model)``, for example, the model is in the place of the learning rate.

    >>> _advice_for_number(abs)
    ': if it is a function f of the step, pass muonfx.schedule(lambda: f)(), or use a torch scheduler'
    """
    if isinstance(value, nn.Module | Iterator):  # a model, or the generator model.parameters()
        return (
            ": a transform has no parameters; give them to muonfx.Muon(model), to "
            "muonfx.TransformOptimizer(model, transform), or to the transform's init"
        )
    if isinstance(value, LRScheduler):
        return ": a torch scheduler acts on an optimizer, such as muonfx.TransformOptimizer(model, transform)"
    if hasattr(value, "init"):  # a transform, whose class cannot be imported here
        return ": it is a transform; for an optimizer, muonfx.TransformOptimizer(model, transform)"
    if hasattr(value, "factory"):  # a schedule
        return (
            ": it accepts no schedule; use a torch scheduler, "
            "or a chain with the schedule in muonfx.TransformOptimizer"
        )
    if callable(value) and not isinstance(value, type):
        return ": if it is a function f of the step, pass muonfx.schedule(lambda: f)(), or use a torch scheduler"
    return ""


def _is_one_of(value: object, type_names: frozenset[str]) -> bool:
    """Return True if an argument has one of the types that its annotation allows, as read by `accepted_types`.

    Unlike with ``isinstance``, an int or a tensor of real numbers is accepted as a float, and a bool is accepted as a
    bool only. A name in quotes, as of ``Literal["auto"]``, accepts this string only.

    >>> _is_one_of(1, frozenset({"float"})), _is_one_of(True, frozenset({"float"}))
    (True, False)
    >>> (
    ...     _is_one_of("auto", frozenset({"'auto'", "None"})),
    ...     _is_one_of("none", frozenset({"'auto'", "None"})),
    ... )
    (True, False)
    """
    if isinstance(value, str):  # any string, or only certain ones, whose names have quotes
        return "str" in type_names or repr(value) in type_names
    if isinstance(value, Tensor) and "float" in type_names:
        return is_real_number(value)
    # An int, for example, is accepted as "int" and as "float".
    for kind, accepting_names in _ACCEPTED_AS:
        if isinstance(value, kind):
            return not type_names.isdisjoint(accepting_names)
    if is_symbolic(value):  # in place of a number, while a compiler traces
        return True
    if _is_factory(value):  # such as int8 in place of int8()
        return False
    # A schedule, a tuple or another object: accepted if the annotation has any further type, such as "Schedule". The
    # code that uses the argument checks it further.
    return any(_is_other_type(type_name) for type_name in type_names)


_ACCEPTED_AS = (
    (bool, ("bool",)),  # first, because a bool is an int in Python
    (int, ("int", "float")),
    (float, ("float",)),
    (type(None), ("None",)),
    (Tensor, ("float", "Tensor")),
)
"""Types of values, with the names of the types as which they are accepted."""


def _is_other_type(type_name: str) -> bool:
    return (
        type_name not in _PLAIN
        and type_name not in ("None", "Tensor")
        and not _is_literal(type_name)
    )


def is_real_number(value: object) -> bool:
    """Return True for a real number: of Python or NumPy, or in a tensor. A bool is none, and neither is a text.

    >>> is_real_number(1), is_real_number(torch.tensor(0.1))
    (True, True)
    >>> (
    ...     is_real_number(True),
    ...     is_real_number(torch.tensor(True)),
    ...     is_real_number(1j),
    ...     is_real_number("1e-3"),
    ... )
    (False, False, False, False)
    """
    if isinstance(value, Tensor):
        return value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, int | float | numbers.Real) and not isinstance(value, bool)


def float_of(name: str, number: Any) -> float:
    """Return a real number as a float. Raise ValueError if it is too large for one. ``name`` is its name in the error.

    >>> float_of("decay", 10**400)
    Traceback (most recent call last):
    ValueError: decay must be finite, found a number beyond 1.8e+308 in size
    """
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            f"{name} must be finite, found a number beyond {sys.float_info.max:.2g} in size"
        ) from None


def is_symbolic(value: object) -> bool:
    """Return True for an object that replaces a number while a tool traces code, and has no value to check.

    These are ``torch.SymInt`` (a size under ``torch.compile``), ``torch.fx.Proxy``, and a plain ``object()``, by which
    optree replaces the leaves of a tree.
    """
    if type(value) is object:
        return True
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    # Tracers have further classes, and torch has no common base class for them.
    return type(value).__module__.startswith(
        ("torch.fx", "torch.utils._", "torch.export", "torch._")
    )


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" with the names in ``known`` that are similar to ``wrong``; "" if there are none."""
    return _did_you_mean(difflib.get_close_matches(wrong, list(known)))


def _did_you_mean(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" (did you mean {' or '.join(map(repr, names))}?)"


def close_names(wrong: str, names: Iterable[str], level: str = ".") -> list[str]:
    """Return up to three names that contain a part similar to ``wrong``, to suggest them in an error message.

    ``level`` is the separator of the components in a name.

    >>> close_names("atn.q", ["blocks.0.attn.q", "blocks.0.mlp.up"])
    ['blocks.0.attn.q']
    """
    # "atn.q" has two components, so it is compared with "blocks.0", "0.attn" and "attn.q" of "blocks.0.attn.q".
    length = wrong.count(level) + 1
    name_with_part: dict[str, str] = {}  # "attn.q": "blocks.0.attn.q"
    for name in names:
        components = name.lower().split(level)
        # A name of fewer components is compared as a whole.
        last_start = max(0, len(components) - length)
        for start in range(last_start + 1):
            part = level.join(components[start : start + length])
            name_with_part.setdefault(part, name)
    similar_parts = difflib.get_close_matches(wrong.lower(), name_with_part)
    similar_names = [name_with_part[part] for part in similar_parts]
    return list(dict.fromkeys(similar_names))  # each name once, in this order


def hint(wrong: str, known: Collection[str]) -> str:
    """Return advice for an error about an unknown argument: its name in muonfx, or similar names.

    ``wrong`` may be an argument of another library, which the tables of `muonfx._other_libraries` translate. ``known``
    are the arguments of the function.

    >>> hint("lr", ["learning_rate"]), hint("decya", ["decay"])
    (" (did you mean 'learning_rate'?)", " (did you mean 'decay'?)")
    >>> hint("steps", ["orthogonalize"])
    ' (here: orthogonalize=muonfx.orthogonalize(steps=...))'
    """
    equivalents = ARGUMENTS_HERE.get(wrong, ())
    accepted = [name for name in equivalents if name in known]
    if accepted:  # the function has the argument by another name
        return _did_you_mean(accepted)
    code = _code_with_argument([wrong, *equivalents], known)
    if code:  # an object that is one of its arguments has the argument
        return f" (here: {code})"
    if wrong in ADVICE_ON_ARGUMENTS:  # muonfx does it in another way
        return f" (here: {ADVICE_ON_ARGUMENTS[wrong]})"
    return did_you_mean(wrong, known)


def _code_with_argument(names: list[str], known: Collection[str]) -> str:
    """Return how to pass an argument to an object that is itself an argument in ``known``; "" if there is none.

    In the example, a function with the argument ``orthogonalize`` was called with ``steps=``. ``names`` has the wrong
    name, and its equivalents in muonfx.

    >>> _code_with_argument(["steps"], ["orthogonalize"])
    'orthogonalize=muonfx.orthogonalize(steps=...)'
    """
    # A row is, for example, ("orthogonalize", ("steps", ...), "muonfx.orthogonalize({}=...)").
    for argument, inner_arguments, code in ARGUMENTS_OF_PARTS:
        if argument not in known:
            continue
        for name in names:
            if name in inner_arguments:
                return f"{argument}={code.format(name)}"
    return ""


def bind(
    owner: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> inspect.BoundArguments:
    """Bind the arguments of a call to a signature, like ``signature.bind``, with a clearer error.

    The error names ``owner``, the function called, lists its arguments, and suggests spellings for a wrong name:

    >>> bind("scale", inspect.signature(lambda factor: None), (), {"facter": 2.0})
    Traceback (most recent call last):
    TypeError: scale: there is no argument 'facter' (did you mean 'factor'?); scale takes factor
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = str(error)
    parameters = dict(signature.parameters)
    parameters.pop("self", None)  # of a method
    accepted = ", ".join(map(_shown_parameter, parameters.values())) or "no arguments"
    problem = _unknown_name(parameters, kwargs) or problem
    raise TypeError(f"{owner}: {problem}; {owner} takes {accepted}")


def _unknown_name(parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, object]) -> str:
    """Return "there is no argument 'facter' (did you mean 'factor'?)" if a call has a wrong name; else ""."""
    takes_any_name = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    if takes_any_name:
        return ""
    unused = [name for name in parameters if name not in kwargs]  # one of these may have been meant
    for name in kwargs:
        if name not in parameters:
            return f"there is no argument {name!r}{hint(name, unused)}"
    return ""


def _shown_parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is shown in the list of arguments of a function in an error.

    It is "params", "lr=" if it is passed by name only, "*transforms" or "**options".
    """
    if parameter.kind is parameter.KEYWORD_ONLY:
        return f"{parameter.name}="
    return str(parameter.replace(annotation=parameter.empty, default=parameter.empty))


def code_of(value: Any, code: Callable[[Any], str] = repr) -> str:
    """Return Python code that creates a dataclass instance, without the fields that have their default value.

    For ``Row(cells=("a",), children=())``, it is "Row(cells=('a',))". ``code`` converts the value of a field to code.
    """
    arguments: list[str] = []
    for field in fields(value):
        field_value = getattr(value, field.name)
        if field_value != field.default:
            arguments.append(f"{field.name}={code(field_value)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def plain_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that every call checks the types of bool, int, float and str arguments by annotation.

    One decorator replaces such checks at the start of each public function. It is too slow for functions that are
    called in a training step.

    >>> @plain_arguments
    ... def scale(factor: float): ...
    >>> scale("2")
    Traceback (most recent call last):
    TypeError: scale: factor must be a number or a 0-d tensor, found '2'
    """
    signature = inspect.signature(function)
    types_of = accepted_types_of(signature.parameters, function)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Check the arguments that have an annotation of a plain type. Then call ``function`` with them."""
        bound = bind(owner, signature, args, kwargs)
        for name, value in bound.arguments.items():
            type_names = types_of[name]  # such as {"float"}; empty if the argument is not checked
            if type_names:
                value = check_plain(owner, name, value, type_names)
            if isinstance(value, Tensor) and "float" in type_names:
                value = _zero_dim(owner, name, value)
            bound.arguments[name] = value
        return function(*bound.args, **bound.kwargs)

    return checked


def _zero_dim(owner: str, name: str, value: Tensor) -> Tensor:
    """Return a tensor of one element as a 0-d tensor. Raise ValueError for any other tensor with dims.

    ``tensor([0.1])`` becomes ``tensor(0.1)``. ``tensor([0.1, 0.2])`` raises, because one number is expected.
    """
    if value.ndim == 0:
        return value
    if value.numel() != 1:
        raise ValueError(
            f"{owner}: {name} must be a number or a 0-d tensor, found a tensor of shape "
            f"{tuple(value.shape)}; for one transform with each of several numbers: muonfx.stack"
        )
    return value.reshape(())


def plain_fields(dataclass: type[T]) -> type[T]:
    """Decorate a dataclass so that the types of its bool, int, float and str fields are checked when it is built.

    The dataclass must define ``__post_init__``, which is called first.

    >>> from dataclasses import dataclass
    >>> @plain_fields
    ... @dataclass
    ... class Newton:
    ...     steps: int
    ...
    ...     def __post_init__(self): ...
    >>> Newton("5")
    Traceback (most recent call last):
    TypeError: Newton: steps must be an int, found '5'
    """
    types_of_field = accepted_types_of(inspect.signature(dataclass).parameters, dataclass)
    post_init = vars(dataclass)["__post_init__"]

    def checked_post_init(value: T) -> None:
        post_init(value)
        for name, type_names in types_of_field.items():
            if type_names:
                check_plain(dataclass.__name__, name, getattr(value, name), type_names)

    setattr(dataclass, "__post_init__", checked_post_init)  # noqa: B010
    return dataclass


def accepted_types_of(
    parameters: Mapping[str, inspect.Parameter], function: Callable[..., object]
) -> dict[str, frozenset[str]]:
    """Read the annotations of a function or class: return the names of the allowed types of each parameter.

    A parameter with an empty set is not checked: ``*args``, ``**kwargs``, and a parameter whose default has another
    type than its annotation.

    >>> def scale(factor: float, *names: str, steps: int = None): ...
    >>> accepted_types_of(inspect.signature(scale).parameters, scale)
    {'factor': frozenset({'float'}), 'names': frozenset(), 'steps': frozenset()}
    """
    # Annotations in quotes are evaluated in the module that defines the function or class.
    inner = inspect.unwrap(function)
    # A class has no globals.
    names = getattr(inner, "__globals__", None) or vars(sys.modules[inner.__module__])
    types_of_parameter: dict[str, frozenset[str]] = {}
    for name, parameter in parameters.items():
        types_of_parameter[name] = frozenset()  # nothing is checked
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        type_names = accepted_types(parameter.annotation, names)
        is_required = parameter.default is parameter.empty
        # A default that does not fit the annotation shows that the annotation is no rule.
        if is_required or _is_one_of(parameter.default, type_names):
            types_of_parameter[name] = type_names
    return types_of_parameter
