"""The matrices in a leaf: which dims are rows and columns, and which blocks are separate matrices.

All transforms of matrices use this module, so that they split a leaf in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from glob import escape
from typing import TypeVar

from torch import Tensor

from muonfx.core import Locality, Transform
from muonfx.core.checks import NamePatterns
from muonfx.select.matrix_view import MatrixView
from muonfx.tree import Present

__all__ = ["Matrices", "matrix_locality", "name_patterns", "on_stacks"]

S = TypeVar("S")


def matrix_locality(*_: object, view: MatrixView, **__: object) -> Locality:
    """Return MATRIX if matrices are the last two dims, else LEAF, which is equivalent for a 2-D leaf."""
    return Locality.MATRIX if view.dims == ((-2,), (-1,)) else Locality.LEAF


class Matrices:
    """The leaves of a tree of updates, each split into the matrices of its view.

    Without ``names``, leaves are named only if the view depends on names.
    """

    def __init__(self, view: MatrixView, at: Present, leaves: list[Tensor], names: Sequence[str] | None = None) -> None:
        self.at = at
        self._names = names or (at.names() if view.needs_names else [""] * len(leaves))
        self._views = view.of(self._names)
        self.of_updates = self.split(leaves)
        """For each leaf a stack of matrices (..., rows, columns), or one for each of several unequal blocks."""

    def split(self, leaves: list[Tensor]) -> list[list[Tensor]]:
        """Split leaves like the updates."""
        return [own.split(leaf, name) for own, leaf, name in zip(self._views, leaves, self._names, strict=True)]

    def join(self, matrices: list[list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        """Undo `split`, for leaves of these shapes."""
        return [own.join(parts, leaf) for own, parts, leaf in zip(self._views, matrices, like, strict=True)]


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
