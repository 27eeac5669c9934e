"""Texts of arguments: stable texts for the fingerprints in checkpoints, and Python code for ``repr``.

A fingerprint is a hash of a transform's texts and must be the same in every process. A text must therefore not depend
on the file that defines a muonfx function, a memory address, or the order of a set. Nor may it depend on whether a
script is run (as ``__main__``) or imported.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from muonfx.internal.arguments import code_of
from muonfx.internal.wrappers import unwrapped

_PACKAGE = __name__.partition(".")[0]
_MAIN = re.compile(r"\b__(?:mp_)?main__\b")
_SCRIPTS = ("__main__", "__mp_main__")  # __mp_main__ in spawned processes
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def public_name(value: Any) -> str:
    """Return the dotted name by which checkpoints identify a function or class, also if muonfx moves its code later.

    A function of muonfx is therefore named without submodules.

    >>> import muonfx as mfx
    >>> public_name(mfx.momentum), public_name(torch.nn.Linear)
    ('muonfx.momentum', 'torch.nn.modules.linear.Linear')
    """
    # A factory of another package may have a permanent name, such as "acme.my_momentum".
    definition = getattr(value, "definition", None)
    permanent_name = getattr(definition, "name", None)
    if permanent_name is not None:
        return str(permanent_name)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    module = getattr(value, "__module__", None)
    if not module:  # as for some functions that are written in C
        return str(name)
    if module in _SCRIPTS:  # "__main__" would be another name if the same file is imported
        module = _name_of_script(module)
    elif module.partition(".")[0] == _PACKAGE:
        module = _PACKAGE
    return f"{module}.{name}"


def _name_of_script(module: str) -> str:
    """Return the name by which another module could import the script that runs as ``__main__``.

    It is "train" for ``python train.py``, and "package.train" for ``python -m package.train``.
    """
    script = sys.modules.get(module)
    spec = getattr(script, "__spec__", None)
    # Python -m package.train, or python -m package.
    if spec is not None and spec.name not in _SCRIPTS:
        return str(spec.name).removesuffix(".__main__")
    path = getattr(script, "__file__", None)
    if not path:  # in an interactive session
        return "__main__"
    return Path(path).stem


def text_of(
    value: Any,
    nested: Callable[[Any], str] | None = None,
    name_of: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return an argument of a transform as text for its fingerprint in checkpoints. It is equal in every process.

    A ``repr`` is not: it has addresses of functions and the order of sets, and changes if a function is moved. Pickles
    also change between versions of Python. ``nested`` converts the items of containers; the default is this function.
    ``name_of`` gives other names to keys of mappings, such as to the parameters in labels.

    >>> text_of((1, "auto")), text_of({"b", "a"}), text_of(torch.tensor(0.1)), text_of(mfx.momentum)
    ("(1,'auto')", "{'a','b'}", '*', 'muonfx.momentum')
    """
    if nested is None:
        nested = functools.partial(text_of, name_of=name_of)
    if isinstance(value, Tensor):  # numbers are not part of a fingerprint
        return "*"
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if type(value) in (tuple, list):
        return "(" + ",".join(map(nested, value)) + ")"
    if isinstance(value, Mapping):
        return _text_of_mapping(cast("Mapping[Any, Any]", value), nested, name_of)
    if isinstance(value, Set):  # sorted, since the order of a set differs between processes
        return "{" + ",".join(sorted(map(nested, cast("Set[Any]", value)))) + "}"
    if _is_public_dataclass(value):
        return code_of(value, nested)
    if isinstance(value, functools.partial):
        return _text_of_partial(cast("functools.partial[Any]", value), nested)
    if inspect.isroutine(value) or inspect.isclass(value):
        return _text_of_function(value, nested)
    # Any other object: its repr, without memory addresses, and with the name of the script for "__main__".
    text = without_addresses(repr(value))
    return _MAIN.sub(lambda match: _name_of_script(match[0]), text)


def _is_public_dataclass(value: object) -> bool:
    """Return True for an instance of a dataclass, except private ones: their ``repr`` names public functions."""
    kind = type(value)
    return is_dataclass(kind) and not kind.__name__.startswith("_")


def _text_of_function(function: Any, convert: Callable[[Any], str]) -> str:
    """Return a function or class as text for the fingerprint: its public name, such as "muonfx.momentum".

    The text of a lambda also has its code, and the text of a method has the object to which it belongs.
    """
    if inspect.ismethod(function):  # bound to an object, which may matter for its result
        return f"{public_name(function.__func__)} of {convert(function.__self__)}"
    # All lambdas of one scope share a name.
    if inspect.isfunction(function) and function.__name__ == "<lambda>":
        return public_name(function) + _text_of_code(function.__code__)
    return public_name(function)


def _text_of_mapping(
    mapping: Mapping[Any, Any], convert: Callable[[Any], str], name_of: Mapping[str, str]
) -> str:
    """Return a mapping as text for the fingerprint: ``{"w": "muon"}`` as "{'w':'muon'}"."""
    items = zip(_plain_keys(mapping), mapping.values(), strict=True)
    pairs = [f"{convert(name_of.get(key, key))}:{convert(value)}" for key, value in items]
    # The order of a dict is kept, since it may matter, for example for patterns over parameter names.
    if not isinstance(mapping, dict):
        pairs.sort()
    return "{" + ",".join(pairs) + "}"


def _text_of_partial(partial: functools.partial[Any], convert: Callable[[Any], str]) -> str:
    """Return a partial as text for the fingerprint: "partial(module.f,1)" for ``partial(f, 1)``."""
    texts = [convert(partial.func), *map(convert, partial.args)]
    for name, value in sorted(partial.keywords.items()):
        texts.append(f"{name}={convert(value)}")
    return f"partial({','.join(texts)})"


def without_addresses(text: str) -> str:
    """Remove memory addresses from a ``repr``: "<object at 0x7f00>" becomes "<object>"."""
    return _ADDRESS.sub("", text)


def _plain_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of a dict as a list. Parameter names lose the prefixes that wrappers add, such as "_orig_mod.".

    Wrappers are ``torch.compile`` and DDP, for example. So the fingerprint is the same for a compiled and an uncompiled
    model.

    >>> _plain_keys({"_orig_mod.fc.weight": "muon"})
    ['fc.weight']
    """
    keys = list(mapping)
    if not all(isinstance(key, str) for key in keys):  # they are no names
        return keys
    plain_names = list(unwrapped(keys).values())
    if len(set(plain_names)) < len(keys):  # two keys differ by a wrapper only
        return keys
    return plain_names


def _text_of_code(code: CodeType) -> str:
    """Return the code of a lambda as text: its bytecode, the names that it reads, and its constants.

    Two lambdas in one function have the same name, and differ in this text.
    """
    constants: list[str] = []
    for constant in code.co_consts:
        # A function within the lambda is a constant.
        convert = _text_of_code if inspect.iscode(constant) else text_of
        constants.append(convert(constant))
    return f"[{code.co_code.hex()}|{','.join(code.co_names)}|{','.join(constants)}]"


def code_of_value(value: object) -> str:
    """Return Python code that creates an argument, for the ``repr`` of a transform.

    >>> code_of_value((torch.float32, [float("inf")]))
    "(torch.float32, [float('inf')])"
    """
    if isinstance(value, Tensor):
        try:
            return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
        except RuntimeError:  # a tensor inside a torch.func transform has no values to print
            return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, float) and not math.isfinite(value):  # "nan" and "inf" are no Python code
        return f"float({str(value)!r})"
    if type(value) is tuple:
        comma = "," if len(value) == 1 else ""  # (1,) is a tuple, and (1) a number
        return f"({', '.join(map(code_of_value, value))}{comma})"
    if type(value) is list:
        return f"[{', '.join(map(code_of_value, value))}]"
    if type(value) is dict:
        items = [f"{key!r}: {code_of_value(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if inspect.isfunction(value) or inspect.isclass(value):
        return _name_in_package(value)
    code_in = getattr(value, "code_in", None)
    if callable(code_in):  # a predicate, which is named in the module `routing`
        return str(code_in("routing."))
    return repr(value)  # such as a string, a dtype or a transform, whose repr is code


def _name_in_package(value: Any) -> str:
    """Return the shortest name by which muonfx exports a function or class; for others, ``__qualname__``.

    For ``muonfx.routing.rules.ndim``, the modules ``muonfx``, ``muonfx.routing`` and ``muonfx.routing.rules`` are
    searched in this order, and the name is "routing.ndim".
    """
    name = value.__qualname__
    module_name = value.__module__ or ""  # None for a function in a bare exec()
    package, *submodules = module_name.split(".")
    if package != _PACKAGE:
        return name
    module = sys.modules[package]
    if getattr(module, name, None) is value:  # exported by muonfx itself
        return name
    # Search the submodules from the outermost to the innermost.
    for length, submodule in enumerate(submodules, start=1):
        module = getattr(module, submodule, None)
        if getattr(module, name, None) is value:
            return ".".join([*submodules[:length], name])
    return name


def same(a: Any, b: Any) -> bool:
    """Return True if two arguments are equal, so that their texts are equal too, up to numbers.

    Tensors, also within lists, must agree in values, shape and dtype. Dicts must have the same order, which may have a
    meaning: of two patterns that match a name, the first counts.

    >>> same([torch.tensor(1.0)], [torch.tensor(1.0)]), same(1, 1.0), same({"a": 1}, {"a": 1.0})
    (True, False, False)
    >>> same({"*.q": 1, "*": 2}, {"*": 2, "*.q": 1})
    False
    """
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):  # `a == b` would be a tensor
        return a.dtype == b.dtype and bool(torch.equal(a, b))
    if type(a) is not type(b):  # 1 and 1.0 would print as different code
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    is_equal = bool(a == b)
    is_container = isinstance(a, tuple | Mapping | Set) or is_dataclass(a)
    # It may have a dict, whose order `==` ignores, or 1 where the other has 1.0.
    if is_equal and is_container:
        return text_of(a) == text_of(b)
    return is_equal
