"""The matrices in a leaf: which dims are rows and columns, and which blocks are separate matrices.

All transforms of matrices use this module, so that they split a leaf in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from glob import escape
from typing import TypeVar

import torch
from torch import Tensor

from muonfx.core import Locality, Transform
from muonfx.core.checks import NamePatterns
from muonfx.select.matrix_view import MatrixView, stack_blocks, unstack_blocks
from muonfx.tree import Present, PyTree

__all__ = [
    "Matrices",
    "check_matrices",
    "join_scalars",
    "map_matrices",
    "matrix_locality",
    "name_patterns",
    "on_stacks",
    "on_stacks_without_blocks",
    "split_scalars",
]

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
        return [own.split(*each) for own, *each in zip(self._views, leaves, self._names, strict=True)]

    def join(self, matrices: list[list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        """Undo `split`, for leaves of these shapes."""
        return [own.join(*each) for own, *each in zip(self._views, matrices, like, strict=True)]


def map_matrices(view: MatrixView, function: Callable[..., Tensor], *trees: PyTree) -> PyTree:
    """Apply a function to the matrices (..., rows, columns) of corresponding leaves; None leaves stay None."""
    at = Present(trees[0])
    leaves = [at.pick(values) for values in trees]
    names = at.names() if view.needs_names else [""] * len(leaves[0])
    out: list[Tensor] = []
    for own, name, *parts in zip(view.of(names), names, *leaves, strict=True):
        matrices = zip(*[own.split(part, name) for part in parts], strict=True)
        out.append(own.join([function(*each) for each in matrices], parts[0]))
    return at.fill(out)


def check_matrices(view: MatrixView, params: PyTree) -> None:
    """Raise an error that names the first leaf that is not a matrix or does not fit its view."""
    at = Present(params)
    names = at.names()
    for own, leaf, name in zip(view.of(names), at.pick(params), names, strict=True):
        own.split(leaf, name)


def join_scalars(view: MatrixView, scalars: list[Tensor]) -> Tensor:
    """Join the numbers (..., 1, 1) of the matrices that `MatrixView.split` returns into one tensor."""
    if view.blocks is None:
        return scalars[0]
    if isinstance(view.blocks, tuple):
        return torch.cat(scalars, dim=view.axis)
    return unstack_blocks(scalars[0], view.axis)


def split_scalars(view: MatrixView, joined: Tensor) -> list[Tensor]:
    """Undo `join_scalars`."""
    if view.blocks is None:
        return [joined]
    if isinstance(view.blocks, tuple):
        return list(joined.split(1, dim=view.axis))
    assert isinstance(view.blocks, int)
    return [stack_blocks(joined, view.blocks, view.axis)]


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


def on_stacks_without_blocks(
    tx: Transform, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """`on_stacks` for transforms with a state for each matrix, whose layout differs for leaves with blocks."""
    views = tx.arguments["view"].of(list(shapes))
    return on_stacks(tx, {n: s for own, (n, s) in zip(views, shapes.items(), strict=True) if own.blocks is None})


def name_patterns(tx: Transform) -> list[NamePatterns]:
    """The option ``name_patterns`` of `muonfx.transform`, for transforms with a `MatrixView`."""
    view = tx.arguments["view"]
    settings = {field.name: getattr(view, field.name) for field in fields(view)}
    return [
        NamePatterns(name, tuple((pattern,) for pattern in setting), first_counts=True)
        for name, setting in settings.items()
        if isinstance(setting, Mapping)
    ]
