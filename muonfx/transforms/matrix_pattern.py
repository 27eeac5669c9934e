"""Patterns that divide a tensor into matrices, such as ``"(qkv=3 out) in -> qkv out in"``; see `MatrixView`.

The left side names the axes of each dim of the tensor, as in einops; ``a + b`` names parts that are concatenated along
an axis. The right side has a result, a stack of matrices, for the tensor or for each part. The last two dims of a
result are the rows and the columns of its matrices; the dims before them are batch dims.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_DOTS = "..."
_TOKEN = re.compile(r"\s*([A-Za-z_]\w*(?:\s*=\s*\d+)?|\.\.\.|[()+])")


Group = tuple[str, ...]
"""Names: those that form one dim of a result, ("heads", "d") for ``(heads d)``, or the parts of an axis."""
Dim = tuple[Group, ...]
"""The axes that form one dim of the tensor, outermost first: (("heads",), ("k", "v")) for ``(heads=8 (k=128 + v=64))``.
An axis is a group of the parts that are concatenated along it. A plain axis, such as ``heads=8``, has one part."""


class Units(NamedTuple):
    """The division of a tensor into units: equal, contiguous parts, each of which can be updated on its own.

    For a weight with one matrix per head, a unit is the rows of a head.
    """

    shape: tuple[int, int]
    """The number of rows and of columns of a unit."""
    pattern: str
    """The pattern that divides the tensor into the same matrices after a reshape to (units, rows, columns)."""
    are_matrices: bool
    """True if each unit is one matrix, and leading dims of the tensor count the units, as in a stack of experts."""


class _Sized(NamedTuple):
    """A pattern that is applied to a tensor of known shape, with ``dim_0``, ``dim_1`` and so on in place of ``...``.

    The examples below are for ``"(q=2 + k=3) in -> q in, in k"`` and the shape (5, 4).
    """

    dims: list[Dim]
    """The dims of the tensor: [(("q", "k"),), (("in",),)]."""
    results: list[list[Group]]
    """The dims of each result: [[("q",), ("in",)], [("in",), ("k",)]]."""
    size_of: dict[str, int]
    """The size of each name: {"q": 2, "k": 3, "in": 4}."""


@dataclass
class _Stack:
    """One stack of matrices of a `Division`. The examples below are for ``in k``."""

    part_index: int
    """The index of the part of the tensor that it contains: 1 for k, of the parts q and k."""
    order: list[int]
    """For each axis of the stack, its index in the tensor: [1, 0]."""
    lengths: list[int]
    """The length of each axis of the stack: [4, 3]."""
    shape: list[int]
    """The shape, in which names in parentheses are one dim: [4, 3]."""


@dataclass
class Division:
    """How a pattern divides tensors of one shape into stacks of matrices.

    The examples below are for ``"(q=2 + k=3) in -> q in, in k"`` and the shape (5, 4).
    """

    shape: Sequence[int]
    """The shape of the tensors."""
    lengths: list[int]
    """The length of each axis: [5, 4]."""
    divided_axis: int
    """The index of the axis that "+" divides into parts: 0. Without "+", axis 0 has one part, the whole tensor."""
    part_lengths: list[int]
    """The lengths of the parts along this axis: [2, 3]."""
    stacks: list[_Stack]
    """The stacks right of the arrow, ``q in`` and ``in k``."""

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Divide a tensor into its stacks of matrices (..., rows, columns)."""
        # 1. Give each axis a dim of its own, and cut the divided axis into its parts, here q and k.
        parts = tensor.reshape(self.lengths).split(self.part_lengths, dim=self.divided_axis)
        # 2. Bring the axes of each part into the order of its stack, and merge those in parentheses, as in "(h d)".
        matrices: list[Tensor] = []
        for stack in self.stacks:
            part = parts[stack.part_index].permute(stack.order)
            matrices.append(part.reshape(stack.shape))
        return matrices

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Undo `split`: join stacks of matrices into a tensor."""
        # 1. Give each axis of a stack a dim of its own, and bring these dims into their order in the tensor.
        part_at: dict[int, Tensor] = {}
        for stack, matrices_of_stack in zip(self.stacks, matrices, strict=True):
            # For each axis of the tensor, its index in the stack, which undoes `order`.
            inverse_order = sorted(range(len(stack.order)), key=stack.order.__getitem__)
            part_at[stack.part_index] = matrices_of_stack.reshape(stack.lengths).permute(
                inverse_order
            )
        # 2. Concatenate the parts in their order left of the arrow, here q and k.
        if len(part_at) == 1:  # the whole tensor, which is not copied
            return part_at[0].reshape(self.shape)
        parts = [part_at[index] for index in range(len(part_at))]
        return torch.cat(parts, dim=self.divided_axis).reshape(self.shape)


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern that divides tensors into matrices, such as ``"(qkv=3 out) in -> qkv out in"``; see `parse`."""

    text: str
    dims: tuple[Dim, ...]
    """The left side of the pattern: the dims of the tensor."""
    results: tuple[tuple[Group, ...], ...]
    """The right side of the pattern: for each stack of matrices, its dims (batch dims, rows, columns)."""
    sizes: Mapping[str, int] = field(hash=False)
    """The sizes in the pattern, such as {"qkv": 3}. All others follow from the shape of the tensor."""

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Divide a tensor into matrices: return a stack (..., rows, columns) for each result right of the arrow.

        Raises:
            ValueError: the shape of the tensor does not fit the pattern.

        >>> stacks = parse("(q=2 + k=3) in -> q in, in k").split(torch.zeros(5, 4))
        >>> [tuple(stack.shape) for stack in stacks]
        [(2, 4), (4, 3)]
        """
        return self.division(tensor.shape).split(tensor)

    def join(self, matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Undo `split`: join stacks of matrices (..., rows, columns) into a tensor of this shape.

        >>> pattern = parse("(q=2 + k=3) in -> q in, in k")
        >>> pattern.join([torch.zeros(2, 4), torch.ones(4, 3)], (5, 4))[:, 0]
        tensor([0., 0., 1., 1., 1.])
        """
        return self.division(shape).join(matrices)

    def division(self, shape: Sequence[int]) -> Division:
        """Apply the pattern to a shape: return how it divides all tensors of this shape.

        Raises:
            ValueError: the shape does not fit the pattern.
        """
        dims, results, size_of = self._sized(shape)
        axes = _joined(dims)  # [("q", "k"), ("in",)] for ``(q + k) in``
        divided_axis = _divided_axis(axes)
        part_names = axes[divided_axis]  # ("q", "k")
        stacks: list[_Stack] = []
        for result in results:
            names = _joined(result)  # ["in", "k"] for ``in k``
            (part_name,) = set(part_names) & set(names)
            stack = _Stack(
                part_index=part_names.index(part_name),
                order=_order(result, axes),
                lengths=[size_of[name] for name in names],
                shape=_shape(result, size_of),
            )
            stacks.append(stack)
        return Division(
            shape=shape,
            lengths=_lengths(axes, size_of),
            divided_axis=divided_axis,
            part_lengths=[size_of[name] for name in part_names],
            stacks=stacks,
        )

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if this pattern can divide a tensor of this shape into matrices."""
        try:
            self._sized(shape)
        except ValueError:
            return False
        return True

    @property
    def is_stack(self) -> bool:
        """True if all dims of the tensor before the last two count matrices, such as the experts of a layer.

        They must then be batch dims of every result: dims before its rows and columns.

        >>> parse("expert out in -> expert out in").is_stack, parse("out in -> out in").is_stack
        (True, False)
        """
        leading_names: set[str] = set()  # of the dims before the last two: {"expert"}
        for dim in self.dims[:-2]:
            names = _joined(dim)
            if len(names) > 1:  # as in ``(e h) out in``
                return False
            leading_names.update(names)
        for result in self.results:
            batch_names = _joined(result[:-2])  # the names before the rows and the columns
            # In ``e out in -> (e out) in``, for example, the result is one matrix, and no stack.
            if not leading_names.issubset(batch_names):
                return False
        return len(leading_names) > 0  # without such a dim, the tensor is one matrix

    @property
    def flattens_more_dims(self) -> bool:
        """True if the pattern also fits tensors with more dims, and then mixes their first dim into the matrices."""
        has_dots = any(_DOTS in _joined(dim) for dim in self.dims)
        first_dim_is_in_matrices = not _names_in_matrices(self.results).isdisjoint(
            _joined(self.dims[0])
        )
        return has_dots and first_dim_is_in_matrices

    @property
    def is_transposed(self) -> bool:
        """True if the tensor stores the columns of its matrices (input features) before their rows.

        It is True for ``"in out -> out in"``.
        """
        rows, columns = self.results[0][-2:]  # the names ("out",) and ("in",)
        names_of_dims = list(map(_joined, self.dims))
        dim_of_rows = _first_with(set(rows), names_of_dims)  # 1
        dim_of_columns = _first_with(set(columns), names_of_dims)  # 0
        return dim_of_rows > dim_of_columns

    def independent(self, shape: Sequence[int]) -> Units | None:
        """Divide a tensor of this shape into units: equal, contiguous parts that contain whole matrices.

        A rank whose shard contains a unit can update it without other ranks. None if the tensor is empty or is one
        unit, if a unit has no dim for its columns, if units are divided in different ways, or if the shape does not fit
        the pattern.

        In ``"(heads=8 (k=3 + v=5)) in -> heads k in, heads v in"``, the units are the 8 heads. For the shape (64, 16),
        the result is ``Units((8, 16), "units (k=3 + v=5) in=16 -> units k in, units v in", False)``. The comments
        continue this example.
        """
        if 0 in shape:
            return None
        try:
            dims, results, size_of = self._sized(shape)
        except ValueError:  # the shape does not fit
            return None

        # A unit begins with the first axis that belongs to rows or columns of a matrix, here (k + v). The axes before
        # it, here heads, count the units.
        matrix_names = _names_in_matrices(results)
        # The dim in which the unit begins.
        row_dim = _first_with(matrix_names, list(map(_joined, dims)))
        first = _first_with(matrix_names, dims[row_dim])
        counting_axes = [*_joined(dims[:row_dim]), *dims[row_dim][:first]]
        has_no_columns = row_dim == len(shape) - 1
        if not counting_axes or has_no_columns:
            return None

        # The rows of a unit are what remains of the dim in which it begins, here (k + v). Its columns are all later
        # dims, here in.
        row_axes = dims[row_dim][first:]
        column_axes = _joined(dims[row_dim + 1 :])

        # The matrices of a unit are the results without the names that count units, here k in and v in.
        unit_results = _without_names(results, set(_joined(counting_axes)))
        has_parts = any(len(axis) > 1 for axis in (*row_axes, *column_axes))
        is_divided_in_several_ways = len(unit_results) > 1 and not has_parts
        if is_divided_in_several_ways:  # as in "(q=2 + k=2) a b -> q a b, k b a"
            return None

        # One result, without batch dims.
        is_one_matrix = len(unit_results) == 1 and len(unit_results[0]) == 2
        begins_a_dim = first == 0  # not here: heads and (k + v) are in one dim
        row_text = _dim_text(row_axes, size_of)
        column_text = _dim_text(column_axes, size_of)
        result_texts = [f"units {' '.join(map(_group_text, result))}" for result in unit_results]
        return Units(
            shape=(prod(_lengths(row_axes, size_of)), prod(_lengths(column_axes, size_of))),
            pattern=f"units {row_text} {column_text} -> {', '.join(result_texts)}",
            are_matrices=is_one_matrix and begins_a_dim,
        )

    def _sized(self, shape: Sequence[int]) -> _Sized:
        """Apply the pattern to a shape: write ``...`` out, and find the size of each name.

        For ``"... out in -> ... out in"`` and the shape (8, 3, 4), the names are ``dim_0``, ``out`` and ``in`` with the
        sizes 8, 3 and 4. The only result is ``dim_0 out in``.

        Raises:
            ValueError: the shape does not fit the pattern.
        """
        # 1. Replace ``...`` by as many dims, "dim_0", "dim_1" and so on, as the other dims of the pattern leave.
        dot_names = [f"dim_{index}" for index in range(len(shape) - len(self.dims) + 1)]
        dims: list[Dim] = []
        for dim in self.dims:
            if dim == ((_DOTS,),):
                dims += [((name,),) for name in dot_names]
            else:
                dims.append(dim)
        if len(dims) != len(shape):
            raise ValueError(
                f"found {len(shape)} dims, expected {len(dims)} for the pattern {self.text!r}: write one name or "
                "parentheses for each dim left of the arrow, or '...' for any number of dims"
            )
        results = [_with_dots(result, dot_names) for result in self.results]
        # 2. Find the size of each name: (heads=8 d) of size 32 has heads of size 8 and d of size 4.
        size_of: dict[str, int] = {}
        for dim, size in zip(dims, shape, strict=True):
            size_of.update(self._sizes_in(dim, size))
        return _Sized(dims, results, size_of)

    def _sizes_in(self, dim: Dim, size: int) -> dict[str, int]:
        """Return the size of each name in a dim of this size.

        The pattern may leave out one size. The dim ``(heads=2 (k + v=5))`` of size 16 gives ``{"heads": 2, "k": 3,
        "v": 5}``: the axis ``(k + v=5)`` has the length 16 / 2 = 8, and k the size 8 - 5 = 3.
        """
        length = size  # of the axis that has the part without a size: 16 / 2
        for axis in dim:
            if all(name in self.sizes for name in axis):
                # Rounded if it does not divide; a check below raises then.
                length //= self._known_length(axis)
        size_of: dict[str, int] = {}
        for axis in dim:
            for name in axis:
                if name in self.sizes:
                    size_of[name] = self.sizes[name]
                else:
                    # The size that the other parts leave: 8 - 5.
                    size_of[name] = length - self._known_length(axis)
        lengths = _lengths(dim, size_of)
        # In ``(k + v=5)`` of size 4, nothing is left for k.
        is_too_small = any(part_size < 0 for part_size in size_of.values())
        # In other cases, the sizes in the pattern do not divide the size of the dim.
        if is_too_small or prod(lengths) != size:
            raise ValueError(
                f"a dim of size {size} does not divide into {_dim_text(dim, self.sizes)} of {self.text!r}: correct a "
                "size in the pattern"
            )
        return size_of

    def _known_length(self, axis: Group) -> int:
        """Return the sum of the sizes in the pattern for the parts of an axis."""
        return sum([self.sizes.get(name, 0) for name in axis])


def _lengths(axes: Sequence[Group], size_of: Mapping[str, int]) -> list[int]:
    """Return the length of each axis, the sum of the sizes of its parts: [5, 4] for the axes q + k and in."""
    lengths: list[int] = []
    for axis in axes:
        lengths.append(sum([size_of[name] for name in axis]))
    return lengths


def _shape(result: Sequence[Group], size_of: Mapping[str, int]) -> list[int]:
    """Return the shape of a result: the product of the sizes of the names in each dim."""
    shape: list[int] = []
    for group in result:
        shape.append(prod([size_of[name] for name in group]))
    return shape


def _divided_axis(axes: Sequence[Group]) -> int:
    """Return the index of the axis that has several parts, or 0 if none has: axis 0 then has one part, the whole."""
    for index, axis in enumerate(axes):
        if len(axis) > 1:
            return index
    return 0


def _order(result: Sequence[Group], axes: Sequence[Group]) -> list[int]:
    """Return the permutation of the axes from their order in the tensor to their order in a result.

    For ``in k`` and the axes q + k and in, it is [1, 0].
    """
    axis_of: dict[str, int] = {}  # from a name to the index of its axis: {"q": 0, "k": 0, "in": 1}
    for index, axis in enumerate(axes):
        for name in axis:
            axis_of[name] = index
    return [axis_of[name] for name in _joined(result)]


def _first_with(names: set[str], groups: Sequence[Sequence[object]]) -> int:
    """Return the index of the first group that has one of these names: 1 for {"v", "in"} and ``heads (k + v) in``."""
    index = 0
    while names.isdisjoint(groups[index]):
        index += 1
    return index


def _names_in_matrices(results: Sequence[Sequence[Group]]) -> set[str]:
    """Return the names that belong to the rows or columns of a matrix: the last two dims of a result."""
    names: set[str] = set()
    for result in results:
        names.update(_joined(result[-2:]))
    return names


def _without_names(results: list[list[Group]], names: set[str]) -> list[list[Group]]:
    """Return the results without some names, such as "h" for the heads: ``h k in, h v in`` becomes ``k in, v in``.

    A dim that consists of these names alone is left out. Results that become equal are returned once.
    """
    unique_results: list[list[Group]] = []
    for result in results:
        groups: list[Group] = []  # the names in each dim of this result
        for group in result:
            remaining_names = tuple([name for name in group if name not in names])
            if remaining_names:  # ``(h k)`` becomes ``k``, and ``h`` is left out
                groups.append(remaining_names)
        if groups not in unique_results:  # ``q h in, k h in`` without q and k is ``h in``, once
            unique_results.append(groups)
    return unique_results


def _with_dots(result: Sequence[Group], dot_names: list[str]) -> list[Group]:
    """Replace ``...`` in a result by the names of the dims for which it is short: ``dot_names``.

    A result is the pattern of a stack of matrices, with the names in each of its dims, such as ``... out in``.

    >>> _with_dots([("...",), ("out",), ("in",)], ["dim_0", "dim_1"])
    [('dim_0',), ('dim_1',), ('out',), ('in',)]
    >>> _with_dots([("out",), ("...",)], ["dim_0", "dim_1"])
    [('out',), ('dim_0', 'dim_1')]
    """
    groups: list[Group] = []  # the names in each dim of the result
    # Rows and columns stay one dim each, so all names are put into that dim.
    first_of_matrix = len(result) - 2
    for index, group in enumerate(result):
        if _DOTS not in group:
            groups.append(group)
        elif group == (_DOTS,) and index < first_of_matrix:  # each name is a batch dim of its own
            groups += [(name,) for name in dot_names]
        else:  # such as ``(in ...)``, which becomes ("in", "dim_0", "dim_1")
            position = group.index(_DOTS)
            groups.append((*group[:position], *dot_names, *group[position + 1 :]))
    return groups


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Parse the text of a pattern that divides a tensor into matrices; its syntax is described in `MatrixView`.

    Raises:
        ValueError: the pattern is malformed; the message contains the pattern and the rule that it breaks.

    >>> stack = parse("(qkv=3 out) in -> qkv out in").split(torch.zeros(96, 32))[0]
    >>> stack.shape
    torch.Size([3, 32, 32])
    """
    sides = text.split("->")  # the dims of the tensor, and the dims of its matrices
    if len(sides) != 2:
        raise ValueError(
            f"{text!r} has {len(sides) - 1} arrows, expected one: write the dims of the parameter, '->' and the dims "
            "of its matrices, as in '(qkv=3 out) in -> qkv out in'"
        )
    # The functions below raise `_Malformed` without the text of the whole pattern, which is added here.
    try:
        items, sizes = _items(sides[0])
        dims = tuple(map(_dim, items))
        results = tuple(map(_result, sides[1].split(",")))
        _check_dims(dims, sizes)
        _check_results(dims, results)
    except _Malformed as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Pattern(text, dims, results, sizes)


class _Malformed(Exception):
    """An error in the text of a pattern. `parse` adds the text to the message."""


_Item = str | list["_Item"]
"""A name such as "h", or what parentheses contain: ["h", "d"]."""


def _items(text: str) -> tuple[list[_Item], dict[str, int]]:
    """Parse one side of a pattern into nested lists, one for each pair of parentheses, and the sizes of its names.

    >>> _items("(h=8 d) in")
    ([['h', 'd'], 'in'], {'h': 8})
    """
    # A stack of lists: the one of the whole side, and one for each parenthesis that is not closed yet.
    # After "(h=8 d" it is ``[[], ["h", "d"]]``.
    open_lists: list[list[_Item]] = [[]]
    sizes: dict[str, int] = {}
    position = 0
    while text[position:].strip():
        token = _TOKEN.match(text, position)
        if token is None:
            raise _Malformed(
                f"cannot read {text[position:].strip()!r}, expected names, name=size, '...', '+' or parentheses; "
                "spaces separate axes, and commas only results"
            )
        position = token.end()
        if token[1] == "(":  # token[1] is the token without the spaces before it
            open_lists.append([])
        elif token[1] == ")":
            # The innermost list is complete: it becomes an item of the list around it.
            closed_list = open_lists.pop()
            if not open_lists:  # the list of the whole side was closed, as in "a) b"
                raise _Malformed("a closing parenthesis has no opening one")
            open_lists[-1].append(closed_list)
        else:
            name, _, size = token[1].partition("=")  # also "h = 8"
            open_lists[-1].append(name.strip())
            if size:
                sizes[name.strip()] = int(size)
    if len(open_lists) > 1:
        raise _Malformed("an opening parenthesis has no closing one")
    return open_lists[0], sizes


def _dim(item: _Item) -> Dim:
    """Convert one dim left of the arrow from names to axes, outermost first. An axis is a tuple of its parts.

    An ``item`` is a name, or the list of the names within parentheses. The four possible forms are::

        a               item "a"                        (("a",),)             one axis
        (a b)           item ["a", "b"]                 (("a",), ("b",))      two axes
        (a + b)         item ["a", "+", "b"]            (("a", "b"),)         one axis with two parts
        (a (b + c))     item ["a", ["b", "+", "c"]]     (("a",), ("b", "c"))  two axes, the second with two parts
    """
    if isinstance(item, str) or "+" in item:  # the forms ``a`` and ``(a + b)``
        return (_axis(item),)
    return tuple(map(_axis, item))  # the forms ``(a b)`` and ``(a (b + c))``


def _axis(item: _Item) -> Group:
    """Return the names of the parts of an axis: ("k", "v") for ``["k", "+", "v"]``, and ("h",) for a name "h"."""
    if isinstance(item, str):
        return (_name(item),)
    parts = item[::2]  # the items 0, 2, ... must be names
    signs = item[1::2]  # and the items between them plus signs
    if len(parts) < 2 or signs != ["+"] * (len(parts) - 1):
        raise _Malformed(
            "parentheses within parentheses hold parts with '+' between them, as in (heads (k + v))"
        )
    return tuple(map(_name, parts))


def _name(item: _Item) -> str:
    """Return an item if it is a name. Raise an error if it is a plus sign, or the list of a pair of parentheses."""
    if item == "+":
        raise _Malformed("found '+' where the name of an axis must be")
    if not isinstance(item, str):
        raise _Malformed("found 'parentheses' where the name of an axis must be")
    return item


def _result(text: str) -> tuple[Group, ...]:
    """Parse the text of a result, such as ``h (k d) in``, into the names in each of its dims.

    These are ``(("h",), ("k", "d"), ("in",))``. A result is the pattern of one stack of matrices, right of the arrow.
    """
    items, sizes = _items(text)
    rows_and_columns = items[-2:]  # neither may be a bare ``...`` or empty parentheses
    if len(items) < 2 or _DOTS in rows_and_columns or [] in rows_and_columns:
        raise _Malformed(
            f"the result {text.strip()!r} must end with two dims, the rows and the columns of a matrix: write each as "
            "a name or as names in parentheses, such as 'out (h w)' or 'out (...)'"
        )
    if sizes:  # as in ``heads=8 d in``
        raise _Malformed(
            "found a size right of the arrow: write it on the left side, as in '(heads=8 d) in -> heads d in'"
        )
    groups: list[Group] = []
    for item in items:
        if isinstance(item, str):  # a name without parentheses
            groups.append((_name(item),))
        else:
            groups.append(tuple(map(_name, item)))
    return tuple(groups)


def _check_dims(dims: Sequence[Dim], sizes: Mapping[str, int]) -> None:
    """Check the left side of a pattern: each name occurs once, and all sizes follow from the shape of a tensor.

    ``in in`` and ``(a b) in`` are errors: from 12 rows, neither the size of a nor the size of b follows.
    """
    names: set[str] = set()
    for dim in dims:
        for name in _joined(dim):
            if name in names:
                raise _Malformed(f"{name!r} occurs twice on the left")
            names.add(name)
    # Read the sizes within each dim: None for a name without a size, so [8, None] for ``(heads=8 d)``.
    for dim in dims:
        names_of_dim = _joined(dim)
        sizes_of_dim = list(map(sizes.get, names_of_dim))
        if 0 in sizes_of_dim:
            raise _Malformed("a size is 0; sizes are at least 1")
        if sizes_of_dim.count(None) > 1:
            raise _Malformed(
                "a dim has several axes without a size, expected at most one: give the others a size, as in (heads=8 d)"
            )
        if len(names_of_dim) > 1 and _DOTS in names_of_dim:
            raise _Malformed(
                "'...' is any number of whole dims, and cannot be inside parentheses on the left"
            )


def _check_results(dims: Sequence[Dim], results: Sequence[Sequence[Group]]) -> None:
    """Check the right side of a pattern: one result for each part of a divided axis, with all other names in it.

    The left side ``(h=8 (k=128 + v=64)) in`` has the parts k and v. It requires a result with the names h, k and in,
    and one with h, v and in, both in any order. Without such parts, one result must have all names.
    """
    plain_names, part_names = _plain_and_part_names(dims)  # ["h", "in"] and ["k", "v"]
    # A list of names for each result, in sorted order, since a result may have them in any order.
    expected_names: list[list[str]] = []  # [["h", "in", "k"], ["h", "in", "v"]]
    for part in part_names:
        expected_names.append(sorted([*plain_names, part]))
    if not part_names:  # no axis is divided
        expected_names.append(sorted(plain_names))
    names_of_results = [sorted(_joined(result)) for result in results]
    # Results may have another order than the parts.
    if sorted(names_of_results) != sorted(expected_names):
        texts = [f"one result with each of {', '.join(names)} once" for names in expected_names]
        raise _Malformed(f"right of the arrow, write {' and '.join(texts)}, separated by commas")


def _plain_and_part_names(dims: Sequence[Dim]) -> tuple[list[str], list[str]]:
    """Return the names of the plain axes, and of the parts of the axis that is divided by '+'.

    >>> dims = parse("(h=8 (k=128 + v=64)) in -> h k in, h v in").dims
    >>> _plain_and_part_names(dims)
    (['h', 'in'], ['k', 'v'])
    """
    plain_names: list[str] = []
    part_names: list[str] = []
    for axis in _joined(dims):
        if len(axis) == 1:  # a plain axis has one part, itself
            plain_names += axis
        elif part_names:  # an earlier axis has parts too
            raise _Malformed("several axes are divided by '+'; expected at most one")
        else:
            part_names += axis
    return plain_names, part_names


def _joined(groups: Iterable[Iterable[T]]) -> list[T]:
    """Return the items of all groups in one list: ["h", "d", "in"] for [("h", "d"), ("in",)]."""
    return list(chain.from_iterable(groups))


def _group_text(group: Group) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})"


def _dim_text(dim: Sequence[Group], sizes: Mapping[str, int]) -> str:
    """Return one dim of a pattern as text: ``in``, ``(heads=8 d)``, ``(k=3 + v=5)`` or ``(heads=8 (k=3 + v=5))``."""
    if len(dim) != 1:  # several axes, or () for a dim of size 1 without a name
        axis_texts = [_dim_text([axis], sizes) for axis in dim]
        return f"({' '.join(axis_texts)})"
    (axis,) = dim
    part_texts: list[str] = []
    for name in axis:
        if name in sizes:
            part_texts.append(f"{name}={sizes[name]}")
        else:
            part_texts.append(name)
    if len(axis) > 1:
        return f"({' + '.join(part_texts)})"
    return part_texts[0]
