"""The outline of a transform: those that it calls as a tree, with what each must see and its numbers."""

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
"""Characters of one setting."""


@dataclass(frozen=True, repr=False)
class Outline(Shown):
    """A transform and those that it calls; made by `Transform.tree`, printed as a table.

    Attributes:
        tx: the transform.
    """

    tx: Transform

    def report(self) -> Report:
        """The table: a row for each transform, with those that it calls under it."""
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
    """The transform's name, behind the name that its caller gives it where that is another."""
    last = name.rpartition(".")[2]
    return child.name if not last or last in (child.name, "tx") else f"{last}: {child.name}"


def _arguments(tx: Transform, called: Container[int]) -> tuple[list[str], list[str]]:
    """The numbers of a transform, and its other arguments where they are not the defaults."""
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
    """True if an argument is one of the transforms that are called, or has one in it."""
    if isinstance(value, Mapping):
        return any(_holds_one(item, called) for item in value.values())
    return id(value) in called or (isinstance(value, tuple | list) and any(_holds_one(v, called) for v in value))


def _is_default(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, Tensor) and value == default)


def _written(value: object) -> str:
    if isinstance(value, Tensor):
        try:
            return f"tensor of {list(value.shape)}" if value.ndim else f"{value.item():.6g}"
        except RuntimeError:  # one inside torch.func, or a meta tensor, has no value to print
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
