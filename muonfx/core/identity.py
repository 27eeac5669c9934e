"""Names and texts by which a function or a value is known in every process and in every version.

A fingerprint is a hash of such texts, and lies in checkpoints for years. So nothing may enter it that another process
or the next version has otherwise: the file a function of ours lies in, an address in memory, the order of a set, or
``__main__`` for a script that another script imports.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Set
from enum import Enum
from pathlib import Path
from types import CodeType
from typing import Any, cast

from torch import Tensor

from muonfx.tree.wrappers import unwrapped

__all__ = ["public_name", "text_of"]

_PACKAGE = __name__.partition(".")[0]
_MAIN = re.compile(r"\b__(?:mp_)?main__\b")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def public_name(value: Any) -> str:
    """The stable name of a function, a class or a factory.

    One of muonfx is called ``muonfx.<name>``, wherever in the package it lies; any other by its module and qualified
    name, unless its factory declares a name. A script that runs as ``__main__`` is called what an import calls it.

    >>> import muonfx as mfx
    >>> public_name(mfx.momentum), public_name(mfx.default_labels), public_name(Path)
    ('muonfx.momentum', 'muonfx.default_labels', 'pathlib.Path')
    """
    declared = getattr(getattr(value, "definition", None), "name", None)
    if declared is not None:
        return str(declared)
    module = str(getattr(value, "__module__", None) or "")
    if module.partition(".")[0] == _PACKAGE:
        module = _PACKAGE
    elif module in ("__main__", "__mp_main__"):  # the latter in processes that were spawned
        module = _name_of_script(module)
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{module}.{name}" if module else str(name)


def _name_of_script(module: str) -> str:
    script = sys.modules.get(module)
    spec = getattr(script, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name).removesuffix(".__main__")  # python -m package.train
    path = getattr(script, "__file__", None)
    return Path(path).stem if path else "__main__"


def text_of(value: Any, nested: Callable[[Any], str] | None = None) -> str:
    """A text of a value that is no number of a transform: equal values have equal texts, in every process.

    Functions and classes count by their names, a lambda by its code as well; what a closure holds does not count. Names
    that are the keys of a mapping, as labels have them, count without wrappers.

    Args:
        value: an int, string, dtype, function, container, or whatever else is given to a factory.
        nested: writes what lies within containers; None: this function.

    >>> text_of({"b": 1, "a": (2.5, None)}), text_of({"x"}), text_of(functools.partial(len, [1]))
    ("{'b':1,'a':(2.5,None)}", "{'x'}", 'partial(builtins.len,(1))')
    """
    within = nested or text_of
    if isinstance(value, Tensor):
        return "*"
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if type(value) in (tuple, list):
        return f"({','.join(map(within, value))})"
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        pairs = [f"{within(key)}:{within(item)}" for key, item in zip(_plain_keys(held), held.values(), strict=True)]
        # the order of a dict may have a meaning, as that of patterns has
        return f"{{{','.join(pairs if isinstance(value, dict) else sorted(pairs))}}}"
    if isinstance(value, Set):
        return f"{{{','.join(sorted(map(within, cast('Set[Any]', value))))}}}"
    if isinstance(value, functools.partial):
        held = cast("functools.partial[Any]", value)
        given = [within(held.func), *map(within, held.args)]
        return (
            f"partial({','.join(given + [f'{name}={within(held.keywords[name])}' for name in sorted(held.keywords)])})"
        )
    if inspect.ismethod(value):
        return f"{public_name(value.__func__)} of {within(value.__self__)}"
    if inspect.isfunction(value) and value.__name__ == "<lambda>":  # all lambdas of a place share one name
        return public_name(value) + _text_of_code(value.__code__)
    if inspect.isroutine(value) or inspect.isclass(value):
        return public_name(value)
    return _MAIN.sub(lambda found: _name_of_script(found[0]), _ADDRESS.sub("", repr(value)))


def _plain_keys(held: Mapping[Any, Any]) -> list[Any]:
    """The keys, without what wrappers put into them if they are names of parameters."""
    keys = list(held)
    if not all(isinstance(key, str) for key in keys):
        return keys
    plain = list(unwrapped(keys).values())
    return plain if len(set(plain)) == len(keys) else keys


def _text_of_code(code: CodeType) -> str:
    """The instructions of a function, and the names and constants that they use."""
    constants = [_text_of_code(item) if inspect.iscode(item) else text_of(item) for item in code.co_consts]
    return f"[{code.co_code.hex()}|{','.join(code.co_names)}|{','.join(constants)}]"
