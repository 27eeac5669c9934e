"""Code books: the magnitudes between 0 and 1 that eight bits can stand for, and how a number becomes one of them.

A *level* is a magnitude that a code stands for; the levels of a book begin with 0 and end with 1, so that the largest
element of a block, which is the block's scale, is stored exactly, and encoding what was decoded changes nothing. A
*signed* book has each level with both signs; an *unsigned* one has no signs, so up to twice as many levels, and its
level 0 is for zero alone: a second moment that rounded to zero would make an update divide by it. Levels are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from muonfx.tree.tracing import functorch_is_active

__all__ = ["FLOAT8", "Book", "Float8", "Grid", "Listed", "dynamic", "float8", "grid"]


@dataclass(frozen=True)
class Book:
    """Levels, and the dtype of the codes that stand for them; a kind of book says how to find the nearest one."""

    signed: bool
    dtype: torch.dtype
    levels: tuple[float, ...]

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Round magnitudes in [0, 1] to codes; integers, or fp32 that the cast to the codes' dtype rounds."""
        raise NotImplementedError

    def between(self, magnitudes: Tensor, noise: Tensor) -> Tensor:
        """Round to one of the two neighbouring levels, to the upper one with the probability that keeps the mean."""
        levels = table(self.levels, magnitudes.device)
        below = (torch.bucketize(magnitudes, levels, right=True) - 1).clamp(0, len(self.levels) - 2)
        low, high = _look_up(levels, below), _look_up(levels, below + 1)
        return below + (noise < (magnitudes - low) / (high - low)).to(torch.int64)

    def fractions(self, codes: Tensor) -> Tensor:
        """What codes stand for, in [-1, 1]; fp32."""
        raise NotImplementedError

    def encode(self, fractions: Tensor, present: Tensor, noise: Tensor | None = None) -> Tensor:
        """Codes for fractions.

        Args:
            fractions: fp32, of any shape; in [-1, 1], or in [0, 1] for an unsigned book.
            present: where an unsigned book must not round to zero; bool.
            noise: numbers in [0, 1), of the same shape, for stochastic rounding; None: to the nearest level.
        """
        magnitudes = fractions.abs()
        if not self.signed:
            magnitudes = torch.where(present, magnitudes.clamp(min=self.levels[1]), magnitudes)
        codes = self.nearest(magnitudes) if noise is None else self.between(magnitudes, noise)
        return (torch.where(fractions < 0, -codes, codes) if self.signed else codes).to(self.dtype)


@dataclass(frozen=True)
class Grid(Book):
    """Levels that are evenly spaced once so many square roots were taken of them: the code is a level's place."""

    roots: int

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Round to the nearest level, after the roots were taken."""
        return (_root(magnitudes, self.roots) * (len(self.levels) - 1)).round()

    def fractions(self, codes: Tensor) -> Tensor:
        """Divide by the number of steps and undo the roots."""
        return _square(codes.to(torch.float32) / (len(self.levels) - 1), self.roots)


@dataclass(frozen=True)
class Listed(Book):
    """Any increasing levels: the code is a level's place in the list."""

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Round to the nearest level; half way, down."""
        levels = table(self.levels, magnitudes.device)
        return torch.bucketize(magnitudes, (levels[1:] + levels[:-1]) / 2)

    def fractions(self, codes: Tensor) -> Tensor:
        """Look codes up; -128, as which nothing is encoded, is NaN."""
        if not self.signed:
            return _look_up(table(self.levels, codes.device), codes.to(torch.int32))
        negative = tuple(-level for level in reversed(self.levels[1:]))
        both = table((float("nan"), *negative, *self.levels), codes.device)
        return _look_up(both, codes.to(torch.int32) + 128)


@dataclass(frozen=True)
class Float8(Book):
    """The finite numbers of an 8-bit float type, divided by the largest; squared as often as ``roots`` says."""

    roots: int

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Scale to the type's range, after the roots were taken; the cast rounds."""
        return _root(magnitudes, self.roots) * torch.finfo(self.dtype).max

    def between(self, magnitudes: Tensor, noise: Tensor) -> Tensor:
        """As every book, but a code is the number itself and not its place."""
        return self.nearest(_look_up(table(self.levels, magnitudes.device), super().between(magnitudes, noise)))

    def fractions(self, codes: Tensor) -> Tensor:
        """Divide by the largest number and undo the roots."""
        return _square(codes.to(torch.float32) / torch.finfo(self.dtype).max, self.roots)


def _root(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.sqrt()
    return x


def _square(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.square()
    return x


def grid(*, signed: bool) -> Grid:
    """127 even steps with both signs; for what has no sign, 255 steps between fourth powers.

    Second moments of one block differ by many orders of magnitude, and what is made of them is one over their square
    root. Where they are log-normal with a standard deviation of 2, blocks of 2048, that root comes back with an error
    of 1.7 % (root mean square), 3.1 % from the dynamic book, 9.8 % from even square roots and 56 % from even levels.

    >>> even, fourth = grid(signed=True), grid(signed=False)
    >>> len(even.levels), len(fourth.levels), f"{fourth.levels[1]:.1e}"
    (128, 256, '2.4e-10')
    """
    steps, roots, dtype = (127, 0, torch.int8) if signed else (255, 2, torch.uint8)
    levels = _square(torch.arange(steps + 1, dtype=torch.float32) / steps, roots)
    return Grid(signed, dtype, tuple(levels.tolist()), roots)


def dynamic(*, signed: bool) -> Listed:
    """The dynamic tree of Dettmers et al. (arXiv 2110.02861), with both ends exact.

    A code's leading zero bits count decades, and the bits behind the first one divide the decade evenly. The published
    book has 1 but not -1; here the smallest level makes room for both.

    >>> book = dynamic(signed=True)
    >>> len(book.levels), f"{book.levels[1]:.2g}", book.levels[-1]
    (128, '3.2e-06', 1.0)
    """
    bits = 6 if signed else 7
    levels: list[float] = []
    for zeros in range(bits + 1):
        cells = 2 ** (bits - zeros)
        levels += [10.0**-zeros * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
    kept = torch.tensor([0.0, *sorted(levels)[1:], 1.0], dtype=torch.float32)
    return Listed(signed, torch.int8 if signed else torch.uint8, tuple(kept.tolist()))


FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The 8-bit float types by name: bits of the exponent, bits of the mantissa."""


def float8(format: str, *, signed: bool) -> Float8:
    """The numbers of a type; of e4m3, squares of them for what has no sign, where its range would not do.

    >>> len(float8("e4m3", signed=True).levels), len(float8("e5m2", signed=True).levels)
    (127, 124)
    """
    dtype, roots = FLOAT8[format], 1 if format == "e4m3" and not signed else 0
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).to(torch.float32)
    levels = _square(numbers[numbers.isfinite()] / torch.finfo(dtype).max, roots)
    return Float8(signed, dtype, tuple(levels.tolist()), roots)


_tables: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def _look_up(numbers: Tensor, places: Tensor) -> Tensor:
    """``numbers[places]``, also where the places are 0-d: for such an index a compiler asks the value."""
    return numbers.index_select(0, places.reshape(-1)).reshape(places.shape)


def table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers as an fp32 vector on a device; kept, unless whoever is tracing would find it there later."""
    watched = torch.compiler.is_compiling() or functorch_is_active() or _get_current_dispatch_mode() is not None
    if watched or torch.is_inference_mode_enabled():
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    if (numbers, device) not in _tables:
        _tables[numbers, device] = torch.tensor(numbers, dtype=torch.float32, device=device)
    return _tables[numbers, device]
