"""The table that `Transform.tree` returns: a transform and the transforms that it calls, with their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from muonfx.core.argument_texts import same
from muonfx.core.value import Recorded, part_names
from muonfx.internal.display import Report, Row, Table

_LONGEST = 40
"""The number of characters to which the text of an argument is shortened."""


def outline(tx: Any) -> Report:
    """Return a table with one row for a transform and one for each transform that it calls, at any depth."""
    return Report((Table(("transform", "locality", "arguments"), [_row(tx, tx.name)]),))


def _row(tx: Any, title: str) -> Row:
    called, rows = set(map(id, tx.children)), list[Row]()
    for name, part in zip(part_names(tx), tx.parts, strict=True):
        if id(part) in called:
            last = name.rpartition(".")[2]
            rows.append(_row(part, part.name if last in ("", "tx", part.name) else f"{last}: {part.name}"))
    return Row((title, tx.locality.name, ", ".join(_shown_arguments(tx))), tuple(rows))


def _shown_arguments(tx: Recorded) -> Iterator[str]:
    """Yield ``name=value`` for a transform's numbers, and for other arguments that differ from their defaults.

    Arguments that contain transforms are left out, because these transforms have their own rows.
    """
    for name, parameter in tx.factory.definition.parameters.items():
        value = tx.arguments[name]
        if any(isinstance(part, type(tx)) for part in tx._parts_in(name)):
            continue
        is_number = isinstance(value, float | Tensor) or (isinstance(value, Recorded) and value.parts)  # a schedule
        if is_number or (not same(value, parameter.default) and (value or parameter.default is not parameter.empty)):
            yield f"{name}={_written(value)}"


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
