"""The outline of a transform: the tree of transforms that it calls, with their localities and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from muonfx.core.recorded import Recorded
from muonfx.tree.display import Column, Report, Row, Shown, Table

__all__ = ["Outline", "describe_arguments"]

_LONGEST = 40
"""The most characters shown of one setting."""


@dataclass(frozen=True, repr=False)
class Outline(Shown):
    """A transform shown as a table of the transforms that it calls; `Transform.tree` returns it."""

    row: Row
    """Title, locality, numbers and settings of the transform, and the rows of those that it calls."""

    def report(self) -> Report:
        """Return a table with one row for each transform, children below their parents."""
        rows = (self.row,)
        has_settings = any(row.cells[3] for _, row in self.row.walk())
        columns = tuple(Column(title) for title in ("transform", "locality", "numbers", "settings"))
        if not has_settings:
            columns, rows = columns[:3], (_without_last(self.row),)
        return Report((Table(columns, rows),))


def describe_arguments(tx: Recorded, called: Container[int]) -> tuple[list[str], list[str]]:
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


def _holds_one(value: object, called: Container[int]) -> bool:
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
