"""Views of parameters as matrices: the dims of rows and columns, and blocks that are separate matrices."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonfx.tree import Present, PyTree
from muonfx.tree.arguments import code_of
from muonfx.tree.tracing import matches

__all__ = ["BlockAxis", "Blocks", "Dims", "Matrices", "MatrixView", "is_set_for"]

Dims = tuple[tuple[int, ...], tuple[int, ...]]
"""The dims that form the rows and the dims that form the columns; all other dims are batch dims."""

Blocks = int | tuple[int, ...]
"""The number of equal blocks, or their sizes, along the block axis."""

BlockAxis = int | Mapping[str, int | None]
"""The axis that is split into blocks: -2 or -1, for all leaves or by name."""

S = TypeVar("S")


_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dims": (
        lambda own: isinstance(own, tuple) and len(own) == 2 and all(isinstance(side, tuple) and side for side in own),
        "None or (row dims, column dims) such as ((0,), (1, 2))",
    ),
    "blocks": (
        lambda own: own != () and all(type(n) is int and n > 0 for n in (own if isinstance(own, tuple) else (own,))),
        "None, a count, or a tuple of sizes, each at least 1",
    ),
    "block_axis": (lambda own: type(own) is int and own in (-2, -1), "-2 (rows) or -1 (columns)"),
}
"""For each setting, the condition that its values must satisfy, and the description of valid values for errors."""


@dataclass(frozen=True, repr=False, eq=False)
class MatrixView:
    """How to divide a parameter into matrices, for transforms such as `muonfx.orthogonalize` (argument ``view=``).

    Each setting is one value for all parameters, or a mapping from globs over dotted names to values. The first glob
    that matches a parameter's name applies; without a match, the value is None.

    Args:
        dims: the dims that form the rows, and the dims that form the columns; all other dims are batch dims.
            ``((-2,), (-1,))`` treats each matrix of a stack of experts separately. None: the first dim forms the rows,
            and all other dims are flattened into columns, as for a convolution.
        blocks: a number of equal blocks, or the sizes of blocks, into which each matrix is split along ``block_axis``.
            Each block is treated as a matrix: ``{"*.qkv.weight": 3}`` for a fused QKV, or the number of heads to treat
            each head separately.
        block_axis: the axis along which ``blocks`` splits: -2, the default, for rows (output features), or -1 for
            columns (input features).

    Raises:
        ValueError: a setting is malformed; the message contains the expected form.

    Example:
        >>> import muonfx as mfx
        >>> view = mfx.MatrixView(blocks={"*.qkv.weight": 3})
        >>> mfx.chain(mfx.orthogonalize(view=view), mfx.scale_by_shape("spectral", view=view))
        chain(orthogonalize(view=MatrixView(blocks={'*.qkv.weight': 3})),
              scale_by_shape(lr_scaling='spectral', view=MatrixView(blocks={'*.qkv.weight': 3})))

        Attention by head, 8 heads of queries and 2 of keys and values, whose outputs are the columns of ``o``:

        >>> heads = {"*.q.weight": 8, "*.k.weight": 2, "*.v.weight": 2, "*.o.weight": 8}
        >>> view = mfx.MatrixView(blocks=heads, block_axis={"*.o.weight": -1})
        >>> tx = mfx.muon(0.02, orthogonalize=mfx.orthogonalize(view=view))
    """

    dims: Dims | Mapping[str, Dims | None] | None = None
    blocks: Blocks | Mapping[str, Blocks | None] | None = None
    block_axis: BlockAxis = -2

    def __post_init__(self) -> None:
        """Check the settings, and copy mappings so that callers cannot modify them."""
        for name, (is_valid, expected) in _SETTINGS.items():
            setting = getattr(self, name)
            for value in setting.values() if isinstance(setting, Mapping) else (setting,):
                if value is not None and not is_valid(value):
                    raise ValueError(f"{name} must be {expected}, found {value!r}")
            if isinstance(setting, Mapping):
                object.__setattr__(self, name, dict(setting))
        if self.blocks is None and self.block_axis != -2:
            raise ValueError(
                f"block_axis={self.block_axis!r} has no effect without blocks: give blocks, or leave block_axis out"
            )

    def __repr__(self) -> str:
        return code_of(self)

    def __eq__(self, other: object) -> bool:
        """Compare settings; the order of patterns counts, because the first match applies."""
        return self._key == other._key if isinstance(other, MatrixView) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        settings = (self.dims, self.blocks, self.block_axis)
        return tuple([tuple(one.items()) if isinstance(one, Mapping) else one for one in settings])

    def of(self, names: Sequence[str]) -> list[MatrixView]:
        """Return the view of each named leaf."""
        if not self.needs_names:
            return [self] * len(names)
        found: list[tuple[Dims | None, Blocks | None, int]] = []
        for name in names:
            blocks = _pick(self.blocks, name)
            axis = -2 if blocks is None else _pick(self.block_axis, name) or -2
            found.append((_pick(self.dims, name), blocks, axis))
        views = {settings: MatrixView(*settings) for settings in dict.fromkeys(found)}
        return [views[settings] for settings in found]

    def extended(self, dims: Mapping[str, Dims], blocks: Mapping[str, Blocks]) -> MatrixView:
        """Return this view with more settings by glob, for leaves that it does not set; the blocks split rows."""
        axis = self.block_axis
        if blocks and axis != -2:
            axis = dict.fromkeys(blocks, -2) | (dict(axis) if isinstance(axis, Mapping) else {"*": axis})
        return MatrixView(_extended(self.dims, dims), _extended(self.blocks, blocks), axis)

    @property
    def needs_names(self) -> bool:
        """True if a setting depends on a leaf's name."""
        return (
            isinstance(self.dims, Mapping) or isinstance(self.blocks, Mapping) or isinstance(self.block_axis, Mapping)
        )

    @property
    def axis(self) -> int:
        """The block axis, of the view of one leaf."""
        assert isinstance(self.block_axis, int)  # `of` has resolved mappings
        return self.block_axis

    def split(self, leaf: Tensor, name: str) -> list[Tensor]:
        """Split a leaf into its matrices.

        Returns:
            One tensor of shape (..., rows, columns), in which equal blocks are a batch dim; or a tensor for each of
            several unequal blocks.

        Raises:
            ValueError: the leaf is not a matrix, or does not fit the settings; the message contains its name.
        """
        matrix = self._to_matrix(leaf, name)
        if self.blocks is None:
            return [matrix]
        size = matrix.shape[self.axis]
        if isinstance(self.blocks, int):
            if size % self.blocks:
                raise ValueError(f"{name!r}: {size} {self._axis_name} cannot be cut into {self.blocks} equal blocks")
            blocks = matrix.unflatten(self.axis, (self.blocks, size // self.blocks))
            return [blocks if self.axis == -2 else blocks.movedim(-2, -3)]
        assert isinstance(self.blocks, tuple)  # `of` has resolved mappings
        if sum(self.blocks) != size:
            raise ValueError(
                f"{name!r}: blocks {self.blocks} add up to {sum(self.blocks)}, the leaf has {size} {self._axis_name}"
            )
        return list(matrix.split(list(self.blocks), dim=self.axis))

    def join(self, matrices: list[Tensor], leaf: Tensor) -> Tensor:
        """Return the inverse of `split`: a tensor with the shape of ``leaf``, from its matrices."""
        if self.blocks is None:
            matrix = matrices[0]
        elif isinstance(self.blocks, int):
            (blocks,) = matrices
            matrix = blocks.flatten(-3, -2) if self.axis == -2 else blocks.movedim(-3, -2).flatten(-2)
        else:
            matrix = torch.cat(matrices, dim=self.axis)
        if self.dims is None:
            return matrix if leaf.ndim == 2 else matrix.reshape(leaf.shape)
        batch, rows, columns = self._dims_of(leaf, "")
        order = [*batch, *rows, *columns]
        permuted = matrix.reshape([leaf.shape[dim] for dim in order])
        return permuted.permute([order.index(dim) for dim in range(leaf.ndim)])

    def matrices(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the shape of one matrix if a leaf is a sequence of independent matrices in memory, else None."""
        if self.dims is not None:
            sides = [tuple(dim % len(shape) for dim in side) for side in self.dims]
            if sides != [(len(shape) - 2,), (len(shape) - 1,)]:
                return None
        elif len(shape) != 2:
            return None
        if self.blocks is None:
            return (shape[-2], shape[-1]) if len(shape) > 2 else None
        if not isinstance(self.blocks, int) or self.axis != -2 or shape[-2] % self.blocks:
            return None
        return shape[-2] // self.blocks, shape[-1]

    @property
    def _axis_name(self) -> str:
        return "rows" if self.axis == -2 else "columns"

    def _to_matrix(self, leaf: Tensor, name: str) -> Tensor:
        if self.dims is None:
            if leaf.ndim < 2:
                raise ValueError(
                    f"{name!r} has shape {tuple(leaf.shape)}; a matrix is needed. Route vectors elsewhere with "
                    "muonfx.partition and muonfx.default_labels"
                )
            return leaf if leaf.ndim == 2 else leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
        batch, rows, columns = self._dims_of(leaf, name)
        shape = [leaf.shape[dim] for dim in batch]
        shape += [math.prod([leaf.shape[dim] for dim in side]) for side in (rows, columns)]
        return leaf.permute([*batch, *rows, *columns]).reshape(shape)

    def _dims_of(self, leaf: Tensor, name: str) -> tuple[list[int], list[int], list[int]]:
        assert isinstance(self.dims, tuple)
        sides = [[dim % leaf.ndim if -leaf.ndim <= dim < leaf.ndim else -1 for dim in side] for side in self.dims]
        taken = [dim for side in sides for dim in side]
        if -1 in taken or len(set(taken)) < len(taken):
            raise ValueError(
                f"{name!r} has shape {tuple(leaf.shape)}; dims {self.dims} repeat a dim or name a missing one"
            )
        return [dim for dim in range(leaf.ndim) if dim not in taken], sides[0], sides[1]


class Matrices:
    """The leaves of a tree, each split into matrices by its `MatrixView`.

    Leaves are named, for errors, if the view depends on names or if ``named`` is True, which takes time at every step.
    """

    def __init__(self, view: MatrixView, values: PyTree, *, named: bool = False) -> None:
        self.values = values
        self.at = Present(values)
        self.leaves: list[Tensor] = self.at.pick(values)
        self.names = self.at.names() if named or view.needs_names else [""] * len(self.leaves)
        self._views = view.of(self.names)
        self._is_plain = view.dims is None and view.blocks is None
        self.of_leaves = self.split(self.leaves)
        """For each leaf a stack of matrices (..., rows, columns), or one for each of several unequal blocks."""

    def split(self, leaves: list[Tensor]) -> list[list[Tensor]]:
        """Split leaves of the same shapes."""
        if self._is_plain and {leaf.ndim for leaf in leaves} <= {2}:
            return [[leaf] for leaf in leaves]
        return [own.split(leaf, name) for own, leaf, name in zip(self._views, leaves, self.names, strict=True)]

    def join(self, matrices: list[list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        """Undo `split`, for leaves of these shapes."""
        if self._is_plain and {leaf.ndim for leaf in like} <= {2}:
            return [parts[0] for parts in matrices]
        return [own.join(parts, leaf) for own, parts, leaf in zip(self._views, matrices, like, strict=True)]

    def map(
        self, function: Callable[..., Sequence[Sequence[Tensor]]], *operands: list[list[Tensor]]
    ) -> list[list[list[Tensor]]]:
        """Apply a function of lists to the matrices of all leaves; return each result as ``split`` returns leaves."""
        made = function(*[[matrix for own in operand for matrix in own] for operand in operands])
        counts = list(builtins.map(len, operands[0]))
        return [[list(islice(matrices, count)) for count in counts] for matrices in builtins.map(iter, made)]

    def fill(self, matrices: list[list[Tensor]]) -> PyTree:
        """Return the tree with other matrices."""
        return self.at.fill(self.join(matrices, self.leaves))


def is_set_for(setting: object, name: str) -> bool:
    """Return True if a setting of a view, for all leaves or by globs, has an entry for a leaf."""
    return setting is not None and (
        not isinstance(setting, Mapping) or any(matches(name, pattern) for pattern in setting)
    )


def _extended(setting: S | Mapping[str, S | None] | None, more: Mapping[str, S]) -> S | Mapping[str, S | None] | None:
    return {**(setting if isinstance(setting, Mapping) else {}), **more} if more else setting


def _pick(setting: S | Mapping[str, S | None] | None, name: str) -> S | None:
    if not isinstance(setting, Mapping):
        return setting
    return next((value for pattern, value in setting.items() if matches(name, pattern)), None)
