"""Patterns that divide a tensor into matrices, such as ``"(qkv=3 out) in -> qkv out in"``; see `MatrixView`.

The left side names the axes of each dim of the tensor, as in einops; ``a + b`` names parts that are concatenated along
an axis. The right side has a result, a stack of matrices, for the tensor or for each part. The last two dims of a
result are the rows and the columns of its matrices; the dims before them are batch dims.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
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
        whole = tensor.reshape(bound.sizes)
        found: list[Tensor] = []
        for one in bound.results:
            part = whole if bound.divided is None else whole.narrow(bound.divided, one.start, one.sizes[bound.divided])
            found.append(part.permute(one.order).reshape(one.shape))
        return found

    def join(self, matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Undo `split`: join stacks of matrices (..., rows, columns) into a tensor of this shape."""
        bound = self._bound(shape)
        parts: dict[int, Tensor] = {}
        for one, stack in zip(bound.results, matrices, strict=True):
            axes = stack.reshape([one.sizes[at] for at in one.order])
            parts[one.start] = axes.permute([one.order.index(at) for at in range(len(one.order))])
        if bound.divided is None:
            return parts[0].reshape(shape)
        return torch.cat([parts[start] for start in sorted(parts)], dim=bound.divided).reshape(shape)

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
        front = [axis.name for dim in self.dims[:-2] for parts in dim for axis in parts]
        whole = all(len(dim) == 1 and len(dim[0]) == 1 for dim in self.dims[:-2])
        return bool(front) and whole and all(set(front) <= set(_names(result[:-2])) for result in self.results)

    @property
    def flattens_more_dims(self) -> bool:
        """True if the pattern also fits tensors with more dims, and then mixes their first dim into the matrices."""
        has_dots = any(dim[0][0].name == _DOTS for dim in self.dims)
        in_matrices = {name for result in self.results for name in _names(result[-2:])}
        return has_dots and any(part.name in in_matrices for axis in self.dims[0] for part in axis)

    @property
    def is_transposed(self) -> bool:
        """True if the tensor stores the columns of its matrices (input features) before their rows."""
        place = {axis.name: at for at, dim in enumerate(self.dims) for parts in dim for axis in parts}
        rows, columns = self.results[0][-2:]
        return min(place[name] for name in rows) > min(place[name] for name in columns)

    def independent(self, shape: Sequence[int]) -> Units | None:
        """Divide a tensor of this shape into units: equal, contiguous parts that contain whole matrices.

        A rank whose shard contains a unit can update it without other ranks. None if the tensor is empty or is one
        unit. For ``"(heads=8 (k=3 + v=5)) in -> heads k in, heads v in"``, a unit is the 8 rows of one head.
        """
        if 0 in shape:
            return None
        dims, results = self._expanded(len(shape))
        axes = [(at, axis) for at, dim in enumerate(dims) for axis in self._sized(dim, shape[at])]
        in_matrices = {name for result in results for name in _names(result[-2:])}
        count = next(number for number, (_, axis) in enumerate(axes) if not in_matrices.isdisjoint(axis))
        first = axes[count][0]  # the dim whose remaining axes are the rows of a unit
        stacked = {name for _, axis in axes[:count] for name in axis}
        rest = {tuple(tuple(n for n in group if n not in stacked) for group in result): None for result in results}
        has_parts = any(len(axis) > 1 for _, axis in axes[count:])
        if count == 0 or first > len(shape) - 2 or (len(rest) > 1 and not has_parts):
            return None
        sides = [[axis for at, axis in axes[count:] if (at > first) == is_column] for is_column in (False, True)]
        rows, columns = (prod([sum(axis.values()) for axis in side]) for side in sides)
        left = [_dim_text([tuple(map(Axis, axis, axis.values())) for axis in side]) for side in sides]
        right = [" ".join(["units", *map(_group_text, filter(None, result))]) for result in rest]
        is_plain = axes[count - 1][0] < first and not has_parts and all(not any(result[:-2]) for result in rest)
        return Units((rows, columns), f"units {' '.join(left)} -> {', '.join(right)}", is_plain)

    def _expanded(self, ndim: int) -> tuple[list[tuple[Parts, ...]], list[list[Group]]]:
        """Return `dims` and `results` with ``...`` replaced by named axes, for a tensor with ``ndim`` dims."""
        dots = [f"dim_{at}" for at in range(ndim - len(self.dims) + 1)]
        dims: list[tuple[Parts, ...]] = []
        for dim in self.dims:
            dims += [((Axis(name),),) for name in dots] if dim[0][0].name == _DOTS else [dim]
        if len(dims) != ndim:
            raise ValueError(
                f"found {ndim} dims, expected {len(dims)} for the pattern {self.text!r}: write one name or parentheses "
                "for each dim left of the arrow, or '...' for any number of dims"
            )
        results: list[list[Group]] = []
        for result in self.results:
            groups: list[Group] = []
            for group in result:
                named = [(name,) if name != _DOTS else tuple(dots) for name in group]
                groups += [(name,) for name in dots] if group == (_DOTS,) and group in result[:-2] else [sum(named, ())]
            results.append(groups)
        return dims, results

    def _bound(self, shape: Sequence[int]) -> _Bound:
        """Compute the sizes of all axes for a tensor of this shape; raise ValueError if the shape does not fit."""
        dims, results = self._expanded(len(shape))
        axes = [axis for dim, size in zip(dims, shape, strict=True) for axis in self._sized(dim, size)]
        place = {name: at for at, sizes in enumerate(axes) for name in sizes}
        divided = next((at for at, sizes in enumerate(axes) if len(sizes) > 1), None)
        whole = [sum(sizes.values()) for sizes in axes]
        bound: list[_Result] = []
        for result in results:
            sizes, start = list(whole), 0
            if divided is not None:
                names = list(axes[divided])
                chosen = next(at for at, name in enumerate(names) if name in _names(result))
                sizes[divided] = axes[divided][names[chosen]]
                start = sum(axes[divided][name] for name in names[:chosen])
            shape_of_result = [prod([sizes[place[name]] for name in group]) for group in result]
            bound.append(_Result(start, sizes, [place[name] for name in _names(result)], shape_of_result))
        return _Bound(whole, divided, bound)

    def _sized(self, dim: tuple[Parts, ...], size: int) -> Iterator[dict[str, int]]:
        """Yield, for each axis in one dim, a dict from part to size: {"k": 3, "v": 5} for ``(k=3 + v)`` and size 8."""
        sums = [sum(part.size or 0 for part in axis) for axis in dim]
        is_open = [any(part.size is None for part in axis) for axis in dim]  # for one axis at most, as `parse` checks
        known = prod([total for total, unknown in zip(sums, is_open, strict=True) if not unknown])
        rest = size // max(known, 1) if any(is_open) else 1
        missing = rest - sum(total for total, unknown in zip(sums, is_open, strict=True) if unknown)
        if known * rest != size or missing < 0:
            raise ValueError(
                f"a dim of size {size} does not divide into {_dim_text(dim)} of {self.text!r}: correct a size in the "
                "pattern"
            )
        for axis in dim:
            yield {part.name: missing if part.size is None else part.size for part in axis}


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
    return tuple([_parts(one) if isinstance(one, list) else (_axis(one),) for one in item])


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
    axes = [_axis(one) for one in ([item] if isinstance(item, str) else item)]
    if any(axis.size is not None for axis in axes):
        raise _Malformed(
            "found a size right of the arrow: write it on the left side, as in '(heads=8 d) in -> heads d in'"
        )
    return tuple(axis.name for axis in axes)


def _problem(dims: Sequence[tuple[Parts, ...]], results: Sequence[Sequence[Group]]) -> str | None:
    """Return the syntax rule that a parsed pattern breaks, as text for an error message; None if it breaks none."""
    axes = [axis for dim in dims for axis in dim]
    names = [part.name for axis in axes for part in axis]
    divided = [axis for axis in axes if len(axis) > 1]
    if repeated := [name for name in names if names.count(name) > 1]:
        return f"{repeated[0]!r} occurs twice on the left"
    if any(part.size == 0 for axis in axes for part in axis):
        return "a size is 0; sizes are at least 1"
    if any(sum(part.size is None for axis in dim for part in axis) > 1 for dim in dims):
        return "a dim has several axes without a size, expected at most one: give the others a size, as in (heads=8 d)"
    if any(axis[0].name == _DOTS and len(dim) + len(axis) > 2 for dim in dims for axis in dim):
        return "'...' is any number of whole dims, and cannot be inside parentheses on the left"
    if len(divided) > 1:
        return "several axes are divided by '+'; expected at most one"
    wanted = [{axis[0].name for axis in axes if len(axis) == 1}] * len(results)
    if divided:
        found = [[part.name for part in divided[0] if part.name in _names(result)] for result in results]
        if sorted(map(tuple, found)) != sorted((part.name,) for part in divided[0]):
            every = [part.name for part in divided[0]]
            return (
                f"the parts {' + '.join(every)} are matrices of their own: write one result for each after the arrow, "
                f"separated by commas, as in {', '.join(f'{name} in' for name in every)!r}"
            )
        wanted = [own | {name} for own, (name,) in zip(wanted, found, strict=True)]
    elif len(results) > 1:
        return "found several results, but no parts on the left: write one result, or parts as in '(q=8 + k=8) in'"
    for result, own in zip(results, wanted, strict=True):
        if sorted(_names(result)) != sorted(own):
            found_names = " ".join(map(_group_text, result))
            return f"found the result {found_names!r}, expected each of {', '.join(sorted(own))} in it once: correct it"
    return None


def _names(groups: Sequence[Group]) -> list[str]:
    return [name for group in groups for name in group]


def _group_text(group: Group) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})"


def _dim_text(dim: Sequence[Parts]) -> str:
    texts = [" + ".join(map(str, axis)) for axis in dim]
    if len(dim) == 1 and len(dim[0]) == 1:
        return texts[0]
    return f"({texts[0] if len(dim) == 1 else ' '.join(f'({text})' if '+' in text else text for text in texts)})"
