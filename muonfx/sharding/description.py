"""Describe a transform by texts that are the same in every process that built the same transform."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from types import CellType, CodeType

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.recorded import Recorded

__all__ = ["captured_by", "chain_text", "functions_of", "structure_of"]

_DEEPEST = 4
"""The recursion limit for functions within functions, which may contain themselves."""


def chain_text(tx: Transform) -> str:
    """Return the code that builds a transform, without memory addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(tx))


def structure_of(tx: Transform) -> str:
    """Describe a transform without its hyperparameters, which a schedule changes."""
    return chain_text(tree.map(lambda _: 0.0, tx)) + "\n" + "\n".join(functions_of(tx).values())


def functions_of(tx: Recorded) -> dict[str, str]:
    """Return the code digests of all functions among a transform's arguments, because a repr shows names only."""
    return {name: _code_of(function, 0) for name, function in _functions(tx)}


def captured_by(tx: Recorded) -> dict[str, str]:
    """Describe the values captured by a chain's functions: numbers, strings, containers, functions of those."""
    return {name: _captured(function, 0) for name, function in _functions(tx)}


def _functions(tx: Recorded) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []

    def look(name: str, value: object) -> None:
        if isinstance(value, Recorded):
            for argument, inner in value.arguments.items():
                look(f"{name}.{argument}" if name else f"{value.factory.__name__}.{argument}", inner)
        elif isinstance(value, tuple | list):
            for place, item in enumerate(value):
                look(f"{name}.{place}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                look(f"{name}.{key}", item)
        elif inspect.isroutine(value) or isinstance(value, functools.partial):
            found.append((name, value))

    look("", tx)
    return found


def _code_of(value: object, depth: int) -> str:
    if isinstance(value, functools.partial):
        return f"partial of {_code_of(value.func, depth + 1)}"
    value = getattr(value, "__func__", value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    code = getattr(value, "__code__", None)
    return name if code is None else f"{name} (code {_digest(code)})"


def _digest(code: CodeType) -> str:
    digest = hashlib.sha256(code.co_code)

    def add(value: object) -> None:
        digest.update((_digest(value) if isinstance(value, CodeType) else repr(value)).encode())

    for value in (code.co_names, *code.co_consts):
        add(value)
    return digest.hexdigest()[:12]


def _captured(value: object, depth: int) -> str:
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, functools.partial):
        return ", ".join(_captured(item, depth + 1) for item in (value.func, value.args, value.keywords)) + ", "
    if isinstance(value, tuple | list):
        return f"({', '.join(_captured(item, depth + 1) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_captured(item, depth + 1)}' for key, item in value.items())}}}"
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return _captured((*cells, *(value.__defaults__ or ())), depth + 1)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    return type(value).__qualname__  # other values may differ between ranks, as devices do


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the cell of a function that is not defined yet
        return False
    return True
