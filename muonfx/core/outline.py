"""The table that `Transform.tree` returns: a transform and the transforms that it calls, with their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from muonfx.core.argument_texts import same
from muonfx.core.value import part_names, take_parts
from muonfx.internal.display import Report, Row, Table

_LONGEST = 40
"""The number of characters to which the text of an argument is shortened."""


def outline(tx: Any) -> Report:
    """Return a table with one row for a transform and one for each transform that it calls, at any depth."""
    return Report((Table(("transform", "locality", "arguments"), [_row(tx, tx.name)]),))


def _row(tx: Any, title: str) -> Row:
    """Return the row of a transform in the table of `outline`, and under it the rows of the transforms that it calls.

    ``title`` is the text of its first cell, such as "inner: momentum".
    """
    inner_rows: list[Row] = []
    for name, part in zip(part_names(tx), tx.parts, strict=True):
        if _is_transform(part):  # else it is a number or a schedule
            argument = name.rpartition(".")[2]  # "inner" for "cautious.inner"
            inner_rows.append(_row(part, _title(argument, part.name)))
    arguments = ", ".join(_shown_arguments(tx))
    return Row((title, tx.locality.name, arguments), tuple(inner_rows))


def _title(argument: str, name: str) -> str:
    """Return the title of a transform that is an argument of another one, such as "inner: momentum".

    A member of a chain has its own name as argument, and the only transform in a wrapper "" or "tx": the title is then
    the name alone.
    """
    if argument in ("", "tx", name):
        return name
    return f"{argument}: {name}"


def _is_transform(value: object) -> bool:
    return hasattr(value, "locality")  # this module cannot import the class `Transform`


def _shown_arguments(tx: Any) -> Iterator[str]:
    """Yield the arguments of a transform that its row in a table has: all numbers, and others unlike their defaults.

    Arguments that contain transforms are left out, because these transforms have their own rows.

    >>> (
    ...     list(_shown_arguments(mfx.momentum(0.9, nesterov=False))),
    ...     list(_shown_arguments(mfx.chain(mfx.momentum()))),
    ... )
    (['decay=0.9', 'nesterov=False'], [])
    """
    for name, parameter in tx.factory.definition.parameters.items():
        value = tx.arguments[name]
        parts: list[object] = []
        take_parts(value, parts)
        if any(map(_is_transform, parts)):
            continue
        # Numbers are always shown; a flag or a dtype is shown if it was changed.
        if isinstance(value, float | Tensor) or not same(value, parameter.default):
            yield f"{name}={_written(value)}"


def _written(value: object) -> str:
    """Return an argument as short text: 6 digits of a number, the number of entries of a dict, or a shortened repr.

    >>> _written(1 / 3), _written({"a": 1, "b": 2, "c": 3}), _written("x" * 100)
    ('0.333333', '3 entries', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...")
    """
    if isinstance(value, Tensor):
        return _written_tensor(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping) and len(value) > 2:
        return f"{len(value)} entries"
    # Code, cut to 40 characters: the name of a function, else a repr such as "bfloat16".
    if inspect.isroutine(value) or inspect.isclass(value):
        text = str(getattr(value, "__name__", value))
    else:
        text = repr(value).removeprefix("torch.")
    if len(text) > _LONGEST:
        return text[: _LONGEST - 3] + "..."
    return text


def _written_tensor(tensor: Tensor) -> str:
    """Return the number in a 0-d tensor, or the shape of any other tensor: "tensor of [2, 3]"."""
    if tensor.ndim:
        return f"tensor of {list(tensor.shape)}"
    try:
        return f"{tensor.item():.6g}"
    except RuntimeError:  # a tensor inside torch.func or on meta has no value
        return "tensor of []"
