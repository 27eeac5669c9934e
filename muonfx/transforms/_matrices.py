"""Declarations that transforms of matrices derive from their `MatrixView`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from glob import escape
from typing import TypeVar

from muonfx.core import Locality, Transform
from muonfx.core.patterns import NamePatterns
from muonfx.select.matrix_view import MatrixView

__all__ = ["matrix_locality", "name_patterns", "on_stacks"]

S = TypeVar("S")


def matrix_locality(*_: object, view: MatrixView, **__: object) -> Locality:
    """Return MATRIX if matrices are the last two dims, else LEAF, which is equivalent for a 2-D leaf."""
    return Locality.MATRIX if view.dims == ((-2,), (-1,)) else Locality.LEAF


def on_stacks(
    tx: Transform, shapes: Mapping[str, tuple[int, ...]], *, with_blocks: bool = True
) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """The option ``on_stacks`` of `muonfx.transform`, for transforms with a `MatrixView`."""
    view: MatrixView = tx.arguments["view"]
    views = dict(zip(shapes, view.of(list(shapes)), strict=True))
    found = {name: own.matrices(shapes[name]) for name, own in views.items() if with_blocks or own.blocks is None}
    matrices = {name: matrix for name, matrix in found.items() if matrix is not None}
    if not matrices:
        return tx, {}

    def but(setting: S | Mapping[str, S], value: S) -> dict[str, S]:
        others: Mapping[str, S] = setting if isinstance(setting, Mapping) else {"*": setting}
        ours = {escape(name): value for name in matrices}  # placed first: the first match applies
        return ours | {pattern: other for pattern, other in others.items() if pattern not in ours}

    blocks = None if view.blocks is None else but(view.blocks, None)
    return tx.replace(view=MatrixView(but(view.dims, ((-2,), (-1,))), blocks, view.block_axis)), matrices


def name_patterns(tx: Transform) -> list[NamePatterns]:
    """The option ``name_patterns`` of `muonfx.transform`, for transforms with a `MatrixView`."""
    view = tx.arguments["view"]
    settings = {field.name: getattr(view, field.name) for field in fields(view)}
    return [
        NamePatterns(name, tuple((pattern,) for pattern in setting), first_counts=True)
        for name, setting in settings.items()
        if isinstance(setting, Mapping)
    ]
