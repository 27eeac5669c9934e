"""Patterns that divide a tensor into matrices, such as ``"(qkv=3 out) in -> qkv out in"``; see `MatrixView`.

The left side names the axes of each dim of the tensor, as in einops; ``a + b`` names parts that are concatenated along
an axis. The right side has a result, a stack of matrices, for the tensor or for each part. The last two dims of a
result are the rows and the columns of its matrices; the dims before them are batch dims.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_DOTS = "..."
_TOKEN = re.compile(r"\s*([A-Za-z_]\w*(?:\s*=\s*\d+)?|\.\.\.|[()+])")


class Axis(NamedTuple):
    """A named axis in a pattern, such as ``heads=8``, or one part of an axis that ``+`` divides, such as ``k=128``."""

    name: str
    size: int | None = None
    """The length of the axis; None if it follows from the shape of the tensor."""

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"


Parts = tuple[Axis, ...]
"""An axis, as the parts that are concatenated along it (``q + k + v``); a plain axis has one part, itself."""
Group = tuple[str, ...]
"""The names of the axes that form one dim right of the arrow, outermost first: ("heads", "d") for ``(heads d)``."""


class Units(NamedTuple):
    """The division of a tensor into units: equal, contiguous parts, each of which can be updated on its own.

    For a weight with one matrix per head, a unit is the rows of a head.
    """

    shape: tuple[int, int]
    """The number of rows and of columns of a unit."""
    pattern: str
    """The pattern that divides the tensor into the same matrices after a reshape to (units, rows, columns)."""
    is_plain: bool
    """True if each unit is one matrix, and leading dims of the tensor count the units, as in a stack of experts."""


class _Result(NamedTuple):
    """One result of a pattern (a stack of matrices) for a tensor of known shape."""

    start: int
    """The index at which the stack begins on the axis that ``+`` divides; 0 if there is no such axis."""
    sizes: list[int]
    """The size of each axis within the stack, in the order of the axes in the tensor."""
    order: list[int]
    """The permutation of the axes from their order in the tensor to their order in the stack."""
    shape: list[int]


class _Bound(NamedTuple):
    """The sizes of a pattern's axes for one shape of tensors, and the results computed from them."""

    sizes: list[int]
    """The size of each axis of the tensor, outermost first."""
    divided: int | None
    """The index of the axis that ``+`` divides in the pattern, as in ``(k + v)``; None if there is none."""
    results: list[_Result]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern that divides tensors into matrices, such as ``"(qkv=3 out) in -> qkv out in"``; see `parse`."""

    text: str
    dims: tuple[tuple[Parts, ...], ...]
    """The left side of the pattern: for each dim of the tensor, its axes, outermost first."""
    results: tuple[tuple[Group, ...], ...]
    """The right side of the pattern: for each stack of matrices, its dims (batch dims, rows, columns)."""

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Divide a tensor: return a stack of matrices (..., rows, columns) for each text between commas in the pattern.

        Raises:
            ValueError: the shape of the tensor does not fit the pattern.
        """
        bound = self._bound(tensor.shape)
        tensor_axes = tensor.reshape(bound.sizes)
        stacks: list[Tensor] = []
        for result in bound.results:
            part = tensor_axes
            if bound.divided is not None:
                part = part.narrow(bound.divided, result.start, result.sizes[bound.divided])
            stacks.append(part.permute(result.order).reshape(result.shape))
        return stacks

    def join(self, matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Undo `split`: join stacks of matrices (..., rows, columns) into a tensor of this shape."""
        bound = self._bound(shape)
        part_at: dict[int, Tensor] = {}  # by its start on the axis that ``+`` divides
        for result, stack in zip(bound.results, matrices, strict=True):
            permuted_sizes = [result.sizes[axis] for axis in result.order]
            order_in_tensor = [result.order.index(axis) for axis in range(len(result.order))]
            part_at[result.start] = stack.reshape(permuted_sizes).permute(order_in_tensor)
        parts = [part_at[start] for start in sorted(part_at)]
        if bound.divided is None:
            return parts[0].reshape(shape)
        return torch.cat(parts, dim=bound.divided).reshape(shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if this pattern can divide a tensor of this shape into matrices."""
        try:
            self._bound(shape)
        except ValueError:
            return False
        return True

    @property
    def is_stack(self) -> bool:
        """True if the pattern is for a stack of matrices: all dims of the tensor but the last two are batch dims."""
        leading_names: set[str] = set()
        for dim in self.dims[:-2]:
            parts = [part for axis in dim for part in axis]
            if len(parts) > 1:
                return False
            leading_names.add(parts[0].name)
        if not leading_names:
            return False
        return all(leading_names.issubset(_names(result[:-2])) for result in self.results)

    @property
    def flattens_more_dims(self) -> bool:
        """True if the pattern also fits tensors with more dims, and then mixes their first dim into the matrices."""
        has_dots = any(dim[0][0].name == _DOTS for dim in self.dims)
        in_matrices = {name for result in self.results for name in _names(result[-2:])}
        return has_dots and any(part.name in in_matrices for axis in self.dims[0] for part in axis)

    @property
    def is_transposed(self) -> bool:
        """True if the tensor stores the columns of its matrices (input features) before their rows."""
        dim_of_name: dict[str, int] = {}
        for index, dim in enumerate(self.dims):
            dim_of_name |= {part.name: index for axis in dim for part in axis}
        rows, columns = self.results[0][-2:]
        return min(dim_of_name[name] for name in rows) > min(dim_of_name[name] for name in columns)

    def independent(self, shape: Sequence[int]) -> Units | None:
        """Divide a tensor of this shape into units: equal, contiguous parts that contain whole matrices.

        A rank whose shard contains a unit can update it without other ranks. None if the tensor is empty or is one
        unit. For ``"(heads=8 (k=3 + v=5)) in -> heads k in, heads v in"``, a unit is the 8 rows of one head.
        """
        if 0 in shape:
            return None
        dims, results = self._expanded(len(shape))
        axes: list[_SizedAxis] = []
        for dim, (parts_of_axes, size) in enumerate(zip(dims, shape, strict=True)):
            axes += [_SizedAxis(dim, sizes) for sizes in self._sized(parts_of_axes, size)]
        # The axes in front of the first one that belongs to the rows or columns of a matrix count the units.
        start = _first_matrix_axis(axes, results)
        row_dim = axes[start].dim  # its remaining axes are the rows of a unit, and further dims are columns
        if start == 0 or row_dim > len(shape) - 2:
            return None
        counting_names = {name for axis in axes[:start] for name in axis.sizes}
        unit_axes = axes[start:]
        has_parts = any(len(axis.sizes) > 1 for axis in unit_axes)
        unit_results = _unique_results_without(counting_names, results)
        if len(unit_results) > 1 and not has_parts:
            return None
        rows = [axis.sizes for axis in unit_axes if axis.dim == row_dim]
        columns = [axis.sizes for axis in unit_axes if axis.dim > row_dim]
        results_text = ", ".join(" ".join(["units", *map(_group_text, result)]) for result in unit_results)
        pattern = f"units {_sized_text(rows)} {_sized_text(columns)} -> {results_text}"
        counts_whole_dims = axes[start - 1].dim < row_dim
        is_one_matrix = not has_parts and all(len(result) == 2 for result in unit_results)
        return Units((_size_of(rows), _size_of(columns)), pattern, counts_whole_dims and is_one_matrix)

    def _expanded(self, ndim: int) -> tuple[list[tuple[Parts, ...]], list[list[Group]]]:
        """Return `dims` and `results` with ``...`` replaced by named axes, for a tensor with ``ndim`` dims."""
        dots = [f"dim_{index}" for index in range(ndim - len(self.dims) + 1)]
        dims: list[tuple[Parts, ...]] = []
        for dim in self.dims:
            if dim[0][0].name == _DOTS:
                dims += [((Axis(name),),) for name in dots]
            else:
                dims.append(dim)
        if len(dims) != ndim:
            raise ValueError(
                f"found {ndim} dims, expected {len(dims)} for the pattern {self.text!r}: write one name or parentheses "
                "for each dim left of the arrow, or '...' for any number of dims"
            )
        return dims, [_with_dots(result, dots) for result in self.results]

    def _bound(self, shape: Sequence[int]) -> _Bound:
        """Compute the sizes of all axes for a tensor of this shape; raise ValueError if the shape does not fit."""
        dims, results = self._expanded(len(shape))
        axes: list[dict[str, int]] = []  # the size of each part, by name
        for dim, size in zip(dims, shape, strict=True):
            axes += self._sized(dim, size)
        axis_of_name: dict[str, int] = {}
        divided = None
        for index, sizes_of_parts in enumerate(axes):
            axis_of_name |= dict.fromkeys(sizes_of_parts, index)
            if len(sizes_of_parts) > 1:
                divided = index
        tensor_sizes = [sum(sizes_of_parts.values()) for sizes_of_parts in axes]
        bound_results: list[_Result] = []
        for result in results:
            names = _names(result)
            sizes = list(tensor_sizes)
            start = 0
            if divided is not None:
                for part, part_size in axes[divided].items():
                    if part in names:
                        sizes[divided] = part_size
                        break
                    start += part_size
            result_shape: list[int] = []
            for group in result:
                result_shape.append(prod([sizes[axis_of_name[name]] for name in group]))
            bound_results.append(_Result(start, sizes, [axis_of_name[name] for name in names], result_shape))
        return _Bound(tensor_sizes, divided, bound_results)

    def _sized(self, dim: tuple[Parts, ...], size: int) -> list[dict[str, int]]:
        """Return, for each axis in one dim, a dict from part to size: {"k": 3, "v": 5} for ``(k=3 + v)`` and size 8."""
        # At most one part in a dim has no size, as `parse` checks. The axis with this part is the open one.
        known_size = 1
        open_axis_size = 1
        known_in_open_axis = 0
        for axis in dim:
            known_in_axis = sum(part.size for part in axis if part.size is not None)
            if all(part.size is not None for part in axis):
                known_size *= known_in_axis
            else:
                known_in_open_axis = known_in_axis
        if any(part.size is None for axis in dim for part in axis):
            open_axis_size = size // known_size
        missing_size = open_axis_size - known_in_open_axis
        if known_size * open_axis_size != size or missing_size < 0:
            raise ValueError(
                f"a dim of size {size} does not divide into {_dim_text(dim)} of {self.text!r}: correct a size in the "
                "pattern"
            )
        sizes: list[dict[str, int]] = []
        for axis in dim:
            sizes.append({part.name: missing_size if part.size is None else part.size for part in axis})
        return sizes


class _SizedAxis(NamedTuple):
    """An axis of a tensor of known shape."""

    dim: int
    """The index of the dim of the tensor to which the axis belongs."""
    sizes: dict[str, int]
    """The size of each part, by name; a plain axis has one part, itself."""


def _first_matrix_axis(axes: list[_SizedAxis], results: list[list[Group]]) -> int:
    """Return the index of the first axis that belongs to the rows or columns of a matrix."""
    names_in_matrices = {name for result in results for name in _names(result[-2:])}
    index = 0
    while names_in_matrices.isdisjoint(axes[index].sizes):
        index += 1
    return index


def _unique_results_without(names: set[str], results: list[list[Group]]) -> list[list[Group]]:
    """Return each different result once, without these names and without the dims that consist of them alone.

    The names ``{"h"}`` and the results of ``h k in, h v in`` give the results of ``k in, v in``.
    """
    unique: list[list[Group]] = []
    for result in results:
        groups = [tuple(name for name in group if name not in names) for group in result]
        nonempty_groups = [group for group in groups if group]
        if nonempty_groups not in unique:
            unique.append(nonempty_groups)
    return unique


def _with_dots(result: Sequence[Group], dots: list[str]) -> list[Group]:
    """Return the dims of a result with ``...`` replaced by the names of the dims that it includes."""
    groups: list[Group] = []
    for index, group in enumerate(result):
        if group == (_DOTS,) and index < len(result) - 2:  # each of them is a batch dim of its own
            groups += [(name,) for name in dots]
            continue
        names: list[str] = []
        for name in group:
            names += dots if name == _DOTS else [name]
        groups.append(tuple(names))
    return groups


def _size_of(axes: list[dict[str, int]]) -> int:
    return prod([sum(sizes.values()) for sizes in axes])


def _sized_text(axes: list[dict[str, int]]) -> str:
    """Return the text of one dim of a pattern: ``"(heads=8 d=4)"`` for ``[{"heads": 8}, {"d": 4}]``."""
    dim: list[Parts] = []
    for sizes in axes:
        dim.append(tuple(Axis(name, size) for name, size in sizes.items()))
    return _dim_text(dim)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Parse the text of a pattern that divides a tensor into matrices; its syntax is described in `MatrixView`.

    Raises:
        ValueError: the pattern is malformed; the message contains the pattern and the rule that it breaks.

    >>> stack = parse("(qkv=3 out) in -> qkv out in").split(torch.zeros(96, 32))[0]
    >>> stack.shape
    torch.Size([3, 32, 32])
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(
            f"{text!r} has {len(sides) - 1} arrows, expected one: write the dims of the parameter, '->' and the dims "
            "of its matrices, as in '(qkv=3 out) in -> qkv out in'"
        )
    try:
        dims = tuple(map(_dim, _items(sides[0])))
        results = tuple(map(_result, sides[1].split(",")))
    except _Malformed as error:
        raise ValueError(f"{text!r}: {error}") from None
    if problem := _problem(dims, results):
        raise ValueError(f"{text!r}: {problem}")
    return Pattern(text, dims, results)


class _Malformed(Exception):
    """An error in the text of a pattern. `parse` adds the text to the message."""


_Item = str | list["_Item"]


def _items(text: str) -> list[_Item]:
    """Split one side of a pattern at spaces: ``(h=8 d) in`` into ``[["h=8", "d"], "in"]``."""
    stack: list[list[_Item]] = [[]]
    at = 0
    while text[at:].strip():
        token = _TOKEN.match(text, at)
        if token is None:
            raise _Malformed(
                f"cannot read {text[at:].strip()!r}, expected names, name=size, '...', '+' or parentheses; spaces "
                "separate axes, and commas only results"
            )
        at = token.end()
        if token[1] == "(":
            stack.append([])
        elif token[1] != ")":
            stack[-1].append(token[1].replace(" ", ""))
        elif len(stack) > 1:
            inner = stack.pop()
            stack[-1].append(inner)
        else:
            raise _Malformed("a closing parenthesis has no opening one")
    if len(stack) > 1:
        raise _Malformed("an opening parenthesis has no closing one")
    return stack[0]


def _dim(item: _Item) -> tuple[Parts, ...]:
    """Return the axes in one dim of the tensor: two for ``(a b)``, and one axis with two parts for ``(a + b)``."""
    if isinstance(item, str):
        return ((_axis(item),),)
    if "+" in item:
        return (_parts(item),)
    axes: list[Parts] = []
    for inner in item:
        axes.append(_parts(inner) if isinstance(inner, list) else (_axis(inner),))
    return tuple(axes)


def _parts(items: list[_Item]) -> Parts:
    if len(items) < 3 or items[1::2] != ["+"] * (len(items) // 2) or len(items) % 2 == 0:
        raise _Malformed("parentheses within parentheses hold parts with '+' between them, as in (heads (k + v))")
    return tuple(map(_axis, items[::2]))


def _axis(item: _Item) -> Axis:
    if not isinstance(item, str) or item == "+":
        raise _Malformed(f"found {item if item == '+' else 'parentheses'!r} where the name of an axis must be")
    name, _, size = item.partition("=")
    return Axis(name, int(size) if size else None)


def _result(text: str) -> tuple[Group, ...]:
    """Return the axis names in each dim of one result: (("qkv",), ("heads", "d"), ("in",)) for ``qkv (heads d) in``."""
    items = _items(text)
    if len(items) < 2 or _DOTS in items[-2:] or [] in items[-2:]:
        raise _Malformed(
            f"the result {text.strip()!r} must end with two dims, the rows and the columns of a matrix: write each as "
            "a name or as names in parentheses, such as 'out (h w)' or 'out (...)'"
        )
    return tuple(map(_group, items))


def _group(item: _Item) -> Group:
    """Return the axis names in one dim of a result: ("a", "b") for ``(a b)`` and ("a",) for ``a``."""
    items = [item] if isinstance(item, str) else item
    axes = [_axis(name) for name in items]
    if any(axis.size is not None for axis in axes):
        raise _Malformed(
            "found a size right of the arrow: write it on the left side, as in '(heads=8 d) in -> heads d in'"
        )
    return tuple(axis.name for axis in axes)


def _problem(dims: Sequence[tuple[Parts, ...]], results: Sequence[Sequence[Group]]) -> str | None:
    """Return the syntax rule that a parsed pattern breaks, as text for an error message; None if it breaks none."""
    axes = [axis for dim in dims for axis in dim]
    return _problem_of_dims(dims) or _problem_of_results(axes, results)


def _problem_of_dims(dims: Sequence[tuple[Parts, ...]]) -> str | None:
    """Return the rule that the left side breaks."""
    names: set[str] = set()
    for dim in dims:
        parts = [part for axis in dim for part in axis]
        for part in parts:
            if part.name in names:
                return f"{part.name!r} occurs twice on the left"
            if part.size == 0:
                return "a size is 0; sizes are at least 1"
            names.add(part.name)
        if sum(part.size is None for part in parts) > 1:
            return (
                "a dim has several axes without a size, expected at most one: give the others a size, as in (heads=8 d)"
            )
        if len(parts) > 1 and any(part.name == _DOTS for part in parts):
            return "'...' is any number of whole dims, and cannot be inside parentheses on the left"
    return None


def _problem_of_results(axes: Sequence[Parts], results: Sequence[Sequence[Group]]) -> str | None:
    """Return the rule that the right side breaks, given all axes of the left side."""
    divided_axes = [axis for axis in axes if len(axis) > 1]
    if len(divided_axes) > 1:
        return "several axes are divided by '+'; expected at most one"
    if not divided_axes and len(results) > 1:
        return "found several results, but no parts on the left: write one result, or parts as in '(q=8 + k=8) in'"
    part_names = {part.name for axis in divided_axes for part in axis}
    parts_of_results = [sorted(part_names.intersection(_names(result))) for result in results]
    if divided_axes and sorted(parts_of_results) != [[name] for name in sorted(part_names)]:
        parts = [part.name for part in divided_axes[0]]
        example = ", ".join(f"{name} in" for name in parts)
        return (
            f"the parts {' + '.join(parts)} are matrices of their own: write one result for each after the arrow, "
            f"separated by commas, as in {example!r}"
        )
    plain_names = {axis[0].name for axis in axes if len(axis) == 1}
    for result in results:
        names = _names(result)
        expected_names = sorted(plain_names | part_names.intersection(names))
        if sorted(names) != expected_names:
            text = " ".join(map(_group_text, result))
            return f"found the result {text!r}, expected each of {', '.join(expected_names)} in it once: correct it"
    return None


def _names(groups: Sequence[Group]) -> list[str]:
    return [name for group in groups for name in group]


def _group_text(group: Group) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})"


def _dim_text(dim: Sequence[Parts]) -> str:
    """Return one dim of a pattern as text: ``in``, ``(heads=8 d)``, ``(k=3 + v=5)`` or ``(heads=8 (k=3 + v=5))``."""
    axes = [" + ".join(map(str, axis)) for axis in dim]
    if len(dim) > 1:
        axes = [f"({axis})" if "+" in axis else axis for axis in axes]
    text = " ".join(axes)
    is_one_name = len(dim) == 1 and len(dim[0]) == 1
    return text if is_one_name else f"({text})"
