"""The outline of a transform: the tree of transforms that it calls, with their localities and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from muonfx.core.recorded import Recorded, part_names
from muonfx.tree.display import Column, Report, Row, Shown, Table

if TYPE_CHECKING:
    from muonfx.core.contract import Transform

__all__ = ["Outline"]

_LONGEST = 40
"""The most characters shown of one setting."""


@dataclass(frozen=True, repr=False)
class Outline(Shown):
    """A transform shown as a table of the transforms that it calls; `Transform.tree` returns it."""

    tx: Transform

    def report(self) -> Report:
        """Return a table with one row for each transform, children below their parents."""
        rows = (_row(self.tx, self.tx.name),)
        has_settings = any(row.cells[3] for _, row in rows[0].walk())
        columns = tuple(Column(title) for title in ("transform", "locality", "numbers", "settings"))
        if not has_settings:
            columns, rows = columns[:3], (_without_last(rows[0]),)
        return Report((Table(columns, rows),))


def _row(tx: Transform, title: str) -> Row:
    called = {id(child): child for child in tx.children}
    named = zip(part_names(tx), tx.parts, strict=True)
    children = tuple(
        _row(called[id(part)], _title(name, called[id(part)])) for name, part in named if id(part) in called
    )
    numbers, settings = _arguments(tx, called)
    return Row((title, tx.locality.name, ", ".join(numbers), ", ".join(settings)), children)


def _title(name: str, child: Transform) -> str:
    """Return the transform's name, after the name that its caller gives it if the two differ."""
    last = name.rpartition(".")[2]
    return child.name if not last or last in (child.name, "tx") else f"{last}: {child.name}"


def _arguments(tx: Transform, called: Container[int]) -> tuple[list[str], list[str]]:
    """Return the numbers of a transform, and its other arguments that differ from their defaults."""
    numbers: list[str] = []
    settings: list[str] = []
    for name, parameter in tx.factory.definition.parameters.items():
        value = tx.arguments[name]
        if _holds_one(value, called):
            continue
        if isinstance(value, float | Tensor) or (isinstance(value, Recorded) and value.parts):  # such as a schedule
            numbers.append(f"{name}={_written(value)}")
        elif not _is_default(value, parameter.default) and (value or parameter.default is not parameter.empty):
            settings.append(f"{name}={_written(value)}")
    return numbers, settings


def _holds_one(value: Any, called: Container[int]) -> bool:
    """Return True if an argument is, or contains, one of the called transforms."""
    if isinstance(value, Mapping):
        return any(_holds_one(item, called) for item in value.values())
    return id(value) in called or (isinstance(value, tuple | list) and any(_holds_one(v, called) for v in value))


def _is_default(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, Tensor) and value == default)


def _written(value: object) -> str:
    if isinstance(value, Tensor):
        try:
            return f"tensor of {list(value.shape)}" if value.ndim else f"{value.item():.6g}"
        except RuntimeError:  # a tensor inside torch.func or on meta has no value
            return "tensor of []"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping) and len(value) > 2:
        return f"{len(value)} entries"
    if inspect.isroutine(value) or inspect.isclass(value):
        text = str(getattr(value, "__name__", value))
    else:
        text = repr(value).removeprefix("torch.")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _without_last(row: Row) -> Row:
    return Row(row.cells[:-1], tuple(map(_without_last, row.children)))
