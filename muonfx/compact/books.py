"""Codebooks: the magnitudes between 0 and 1 that 8-bit codes represent, and the rounding of numbers to them.

A *level* is an fp32 magnitude that a code represents. The levels of a codebook begin with 0 and end with 1, so the
largest element of a block (the block's scale) is stored exactly, and encoding a decoded tensor changes nothing. A
*signed* codebook has each level with both signs. An *unsigned* codebook has up to twice as many levels, and only zero
has level 0, because updates divide by second moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from muonfx.internal.tracing import functorch_is_active


@dataclass(frozen=True)
class Book:
    """A codebook: the magnitudes in [0, 1] (levels) that 8-bit codes represent, and the dtype of the codes."""

    signed: bool
    dtype: torch.dtype
    levels: tuple[float, ...]

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Round each magnitude in [0, 1] to the nearest level, and return its code, not yet cast to ``dtype``."""
        raise NotImplementedError

    def between(self, magnitudes: Tensor, noise: Tensor) -> Tensor:
        """Round each magnitude at random to the level below or above it; return the code of this level.

        Levels are the magnitudes that codes represent. Between the levels 0.2 and 0.3, a magnitude of 0.23 becomes 0.3
        with a probability of 0.3, else 0.2. So the mean is preserved. ``noise`` is uniform in [0, 1).
        """
        levels = table(self.levels, magnitudes.device)
        # The index is that of the largest level that is not above the magnitude.
        index = torch.bucketize(magnitudes, levels, right=True) - 1
        index = index.clamp(0, len(self.levels) - 2)  # the largest level has none above it
        low = _look_up(levels, index)
        high = _look_up(levels, index + 1)
        fraction = (magnitudes - low) / (high - low)  # 0.3 for the magnitude 0.23
        rounds_up = noise < fraction
        return self._code_at(index + rounds_up.to(torch.int64))

    def _code_at(self, index: Tensor) -> Tensor:
        """Return the codes of the levels at these indices: the indices themselves, except for codes of a float type."""
        return index

    def fractions(self, codes: Tensor) -> Tensor:
        """Decode 8-bit codes to fp32 numbers in [-1, 1]. The caller multiplies them by the scale of their block."""
        raise NotImplementedError

    def encode(self, fractions: Tensor, present: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the 8-bit codes of fp32 numbers in [-1, 1], such as 127 for 1.0 and -64 for -0.5.

        Args:
            fractions: the numbers: elements of a tensor, divided by the scale of their block. If the codebook is
                unsigned, they are in [0, 1].
            present: True where an element is positive. An unsigned codebook does not round such an element to zero,
                because updates divide by second moments.
            noise: numbers in [0, 1) for rounding at random; None rounds to nearest.
        """
        magnitudes = fractions.abs()
        if not self.signed:
            smallest_level = self.levels[1]  # above zero
            magnitudes = torch.where(present, magnitudes.clamp(min=smallest_level), magnitudes)
            # Now no element that is present can get the code 0.
        codes = self.nearest(magnitudes) if noise is None else self.between(magnitudes, noise)
        if self.signed:  # so far these are codes of magnitudes
            codes = torch.where(fractions < 0, -codes, codes)
        return codes.to(self.dtype)


@dataclass(frozen=True)
class Listed(Book):
    """A codebook with any increasing list of levels (magnitudes in [0, 1]). A code is the index of its level."""

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Return the index of the level nearest to each magnitude; a midpoint is rounded to the lower level."""
        levels = table(self.levels, magnitudes.device)
        # The boundaries are the midpoints.
        return torch.bucketize(magnitudes, (levels[1:] + levels[:-1]) / 2)

    def fractions(self, codes: Tensor) -> Tensor:
        """Decode 8-bit codes to fp32 numbers: look up the level of each code in a table.

        The code -128, which `encode` never makes, becomes NaN.

        >>> dynamic(signed=True).fractions(torch.tensor([127, 0, -127], dtype=torch.int8))
        tensor([ 1.,  0., -1.])
        """
        levels = self.levels
        index = codes.to(torch.int32)
        # The table has the levels of the codes from -128 to 127, so -128 is at the index 0.
        if self.signed:
            negative = tuple([-level for level in reversed(self.levels[1:])])
            levels = (math.nan, *negative, *self.levels)
            index = index + 128
        return _look_up(table(levels, codes.device), index)


@dataclass(frozen=True)
class Scaled(Book):
    """A codebook whose codes are numbers from 0 to ``largest``: divided by it and squared ``roots`` times, the levels.

    The codes are integers, or the finite numbers of an 8-bit float type.
    """

    largest: float
    roots: int

    def nearest(self, magnitudes: Tensor) -> Tensor:
        """Return the code of each magnitude in [0, 1]: the nearest integer to ``largest`` times its root.

        ``roots`` is the number of square roots that are taken: for 2 of them and a largest code of 255, the code of
        0.0001 is ``round(255 * 0.1)``. Codes of a float type are not rounded here, but when they are cast to it.
        """
        codes = _root(magnitudes, self.roots) * self.largest
        if self.dtype.is_floating_point:
            return codes
        return codes.round()

    def _code_at(self, index: Tensor) -> Tensor:
        """Return the codes of the levels at these indices: for a float type, the numbers of which these are levels."""
        if not self.dtype.is_floating_point:
            return index
        levels = table(self.levels, index.device)
        return self.nearest(_look_up(levels, index))

    def fractions(self, codes: Tensor) -> Tensor:
        """Decode 8-bit codes to fp32 numbers: divide by the largest code, then square ``roots`` times.

        >>> grid(signed=True).fractions(
        ...     torch.tensor([127, -64, 0], dtype=torch.int8)
        ... )  # largest 127, no square roots
        tensor([ 1.0000, -0.5039,  0.0000])
        """
        return _square(codes.to(torch.float32) / self.largest, self.roots)


def _root(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.sqrt()
    return x


def _square(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.square()
    return x


def grid(*, signed: bool) -> Scaled:
    """Return the "linear" codebook of `int8`: signed levels ``k / 127``, or unsigned levels ``(k / 255)**4``.

    A codebook contains the levels, the magnitudes from 0 to 1 that 8-bit codes represent.

    >>> grid(signed=True).fractions(
    ...     torch.tensor([127, -64, 0], dtype=torch.int8)
    ... )  # -64 represents -64 / 127
    tensor([ 1.0000, -0.5039,  0.0000])
    """
    # Second moments of a block span many orders of magnitude. On log-normal blocks of 2048 with a standard deviation
    # of 2, the rms error of 1/sqrt(nu) is 1.7 %, against 3.1 % (dynamic), 9.8 % (square roots) and 56 % (even levels).
    dtype = torch.uint8
    largest_code = 255
    # The number of square roots that are taken before a magnitude is stored: the fourth root.
    roots = 2
    if signed:
        dtype = torch.int8
        largest_code = 127
        roots = 0
    # The fractions go from 0 to 1.
    fractions = torch.arange(largest_code + 1, dtype=torch.float32, device="cpu") / largest_code
    levels = _square(fractions, roots)
    return Scaled(signed, dtype, tuple(levels.tolist()), largest_code, roots)


def dynamic(*, signed: bool) -> Listed:
    """Return the "dynamic" codebook of `int8`, from Dettmers et al. (arXiv 2110.02861), with both -1 and 1.

    A codebook contains the levels, the magnitudes from 0 to 1 that 8-bit codes represent. These are denser near zero.
    """
    dtype = torch.uint8
    bits = 7
    if signed:
        dtype = torch.int8
        bits = 6  # one bit is the sign
    # Leading zero bits of a code count decades: 0.1 to 1, 0.01 to 0.1, and so on. The bits after the first one divide
    # the decade into cells of equal size, and a level is the middle of a cell.
    levels: list[float] = []
    for zeros in range(bits + 1):
        cells = 2 ** (bits - zeros)  # each leading zero leaves one bit less
        for cell in range(cells):
            middle = (cell + 0.5) / cells
            levels.append(10.0**-zeros * (0.1 + 0.9 * middle))
    levels.sort()
    # The published codebook has 1 but not -1; omitting the smallest level makes room for both.
    fp32_levels = torch.tensor([0.0, *levels[1:], 1.0], dtype=torch.float32, device="cpu")
    return Listed(signed, dtype, tuple(fp32_levels.tolist()))


FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The 8-bit float types by name; a name gives the bits of the exponent and of the mantissa."""


def float8(format: str, *, signed: bool) -> Scaled:
    """Return the codebook of the 8-bit float type "e4m3" or "e5m2": the magnitudes that its numbers represent.

    They are its finite numbers, divided by the largest one, so they are from 0 to 1. The unsigned codebook of "e4m3"
    is for second moments, which span more orders of magnitude. It stores the square root of each: its levels are the
    squares of these quotients.
    """
    dtype = FLOAT8[format]
    # How many square roots are taken of a stored magnitude.
    roots = 1 if format == "e4m3" and not signed else 0
    # These are the bits of all numbers that are not negative.
    bits = torch.arange(128, dtype=torch.uint8, device="cpu")
    numbers = bits.view(dtype).to(torch.float32)  # the same bits, read as floats
    largest = torch.finfo(dtype).max
    fractions = numbers[numbers.isfinite()] / largest
    levels = _square(fractions, roots)
    return Scaled(signed, dtype, tuple(levels.tolist()), largest, roots)


_tables: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def _look_up(numbers: Tensor, indices: Tensor) -> Tensor:
    # ``numbers[indices]`` would read the value of a 0-d tensor in a compiled graph.
    return numbers.index_select(0, indices.reshape(-1)).reshape(indices.shape)


def table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers, such as the levels of a codebook, as an fp32 vector on a device.

    The vector is cached. It is not while torch traces or in inference mode, because such a tensor must not be used
    elsewhere.
    """
    # A tensor that is made during tracing belongs to the trace.
    is_traced = (
        torch.compiler.is_compiling()
        or functorch_is_active()
        or _get_current_dispatch_mode() is not None
    )
    if is_traced or torch.is_inference_mode_enabled():
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    key = (numbers, device)
    if key not in _tables:
        _tables[key] = torch.tensor(numbers, dtype=torch.float32, device=device)
    return _tables[key]
