"""The quantized dtypes `int8` and `fp8`, which transforms accept as the dtype of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec

from muonfx.compact.books import Book, dynamic, float8, grid
from muonfx.compact.codec import Codec
from muonfx.core import checks
from muonfx.core.value import Recorded, make_factory


class Resolved(NamedTuple):
    """The codecs (which encode and decode tensors) of a quantized dtype, and its seed of stochastic rounding."""

    signed: Codec
    """The codec for values of either sign."""
    unsigned: Codec
    """The codec for values that are never negative, such as second moments."""
    seed: int | None
    """The seed of stochastic rounding; None rounds to nearest."""


class QuantizedDtype(Recorded):
    """A dtype that stores a state in eight bits per element and an fp32 scale per block; made by `int8` or `fp8`.

    It is a frozen value. It prints as the code that constructs it, and can be compared, hashed and pickled. A
    checkpoint records it, as part of the fingerprint (a hash of the structure) of the transform.

    >>> import muonfx as mfx
    >>> mfx.int8() == mfx.int8(block=2048), mfx.momentum(dtype=mfx.int8(block=256))
    (True, momentum(dtype=int8(block=256)))
    """

    @property
    def resolved(self) -> Resolved:
        """The codecs (which encode and decode tensors) and the rounding seed that the dtype's arguments define."""
        return self._built


P = ParamSpec("P")

Code = Literal["linear", "dynamic"]
"""How the levels of `int8` are spaced."""

Format = Literal["e4m3", "e5m2"]
"""The float types of `fp8`."""


def _compact(constructor: Callable[P, Resolved]) -> Callable[P, QuantizedDtype]:
    return make_factory(QuantizedDtype, constructor)


_BOOKS: dict[str, tuple[Book, Book]] = {
    "linear": (grid(signed=True), grid(signed=False)),
    "dynamic": (dynamic(signed=True), dynamic(signed=False)),
    "e4m3": (float8("e4m3", signed=True), float8("e4m3", signed=False)),
    "e5m2": (float8("e5m2", signed=True), float8("e5m2", signed=False)),
}
"""The signed and the unsigned codebook of each code of `int8` and each format of `fp8`."""


def _resolve(book: str, block: int, min_size: int, stochastic: bool, seed: int) -> Resolved:
    """Check the arguments of `int8` or `fp8`; return a codec for signed and one for unsigned tensors, and the seed.

    A codec encodes tensors in eight bits and decodes them. ``book`` is the name of its codebook: a ``code`` of `int8`,
    such as "linear", or a ``format`` of `fp8`. The seed is None for rounding to nearest.
    """
    checks.positive_int("block", block)
    checks.whole_number("min_size", min_size)
    checks.whole_number("seed", seed)
    signed_book, unsigned_book = _BOOKS[book]
    signed = Codec(signed_book, block, min_size)
    unsigned = Codec(unsigned_book, block, min_size)
    return Resolved(signed, unsigned, seed if stochastic else None)


@_compact
def int8(
    block: int = 2048,
    *,
    code: Code = "linear",
    min_size: int = 4096,
    stochastic: bool = False,
    seed: int = 0,
):
    r"""Return a dtype for optimizer state: 8-bit integers with an fp32 scale for each block of elements.

    A state tensor is flattened and split into blocks of ``block`` consecutive elements. The scale of a block is its
    largest magnitude, and each element is rounded to one of at most 255 levels between minus and plus the scale.
    Tensors that are never negative, such as Adam's second moments, use unsigned levels, and only an exact zero is
    stored as zero.

    Args:
        block: the number of elements that share a scale; an element takes $1 + 4 / block$ bytes. Smaller blocks are
            more accurate.
        code: "linear" for signed levels ``scale * k / 127`` and unsigned levels ``scale * (k / 255)**4``, or "dynamic"
            for the codebook of Dettmers et al., whose levels are denser near zero. "dynamic" is more accurate for
            Adam's first moments, because Adam divides small first moments by small roots of second moments.
        min_size: tensors of fewer elements are stored in fp32.
        stochastic: round up or down at random, such that the mean is preserved. Rounding to nearest loses every change
            below half the distance between two levels, so use stochastic rounding for second moments and averaged
            parameters with decay rates above about 0.99. The state contains a counter for each tensor, which seeds the
            noise and grows by one per update, so runs are reproducible.
        seed: the seed of stochastic rounding. The first counter of a tensor is a hash of the seed and of its name.

    Returns:
        A `QuantizedDtype`: the ``dtype`` of `momentum` or `ema_params`, the ``mu_dtype`` or ``nu_dtype`` of
        `scale_by_adam`, or the ``mu_dtype`` of `scale_by_lion`.

    Raises:
        ValueError: an argument is out of range.

    Follows Dettmers et al., "8-bit optimizers via block-wise quantization" (arXiv 2110.02861).

    Example:
        >>> import muonfx as mfx
        >>> import torch
        >>> tx = mfx.momentum(0.9, nesterov=False, dtype=mfx.int8(block=4, min_size=0))
        >>> grads = {"w": torch.tensor([10.0, -5.0, 0.1, 0.0])}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> state.trace.codes, state.trace.scales
        ({'w': tensor([127, -64,   1,   0], dtype=torch.int8)}, {'w': tensor([1.])})
    """
    return _resolve(code, block, min_size, stochastic, seed)


@_compact
def fp8(
    block: int = 2048,
    *,
    format: Format = "e4m3",
    min_size: int = 4096,
    stochastic: bool = False,
    seed: int = 0,
):
    """Return a dtype for optimizer state: 8-bit floats with an fp32 scale for each block of elements.

    A state tensor is split into blocks with a scale each, as by `int8`, but each element is then stored as an 8-bit
    float. In torch 2.13, ``torch.save`` supports float8 tensors, but ``pickle.dumps``, ``torch.equal`` and
    ``torch.promote_types`` do not.

    Args:
        block: the number of elements that share a scale.
        format: "e4m3" has a relative rounding error of at most 1/16 for elements above 3e-5 of the scale; "e5m2" has an
            error of at most 1/8 for elements above 1e-9 of the scale. For tensors that are never negative, "e4m3"
            stores square roots, and so covers elements above 1e-9 of the scale too.
        min_size: tensors of fewer elements are stored in fp32.
        stochastic: round up or down at random, as in `int8`.
        seed: the seed of stochastic rounding, as in `int8`.

    Returns:
        A `QuantizedDtype`, which transforms accept like the result of `int8`.

    Raises:
        ValueError: an argument is out of range.

    Follows Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433).

    Example:
        >>> import muonfx as mfx
        >>> import torch
        >>> tx = mfx.momentum(0.9, nesterov=False, dtype=mfx.fp8(block=4, min_size=0))
        >>> grads = {"w": torch.tensor([10.0, -5.0, 0.1, 0.0])}
        >>> tx.update(grads, tx.init(grads))[1].trace.codes
        {'w': tensor([ 448.0000, -224.0000,    4.5000,    0.0000], dtype=torch.float8_e4m3fn)}
    """
    return _resolve(format, block, min_size, stochastic, seed)
