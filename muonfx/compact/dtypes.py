"""The quantized dtypes `int8` and `fp8`, which transforms accept as the dtype of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec

from muonfx.compact.books import FLOAT8, Book, dynamic, float8, grid
from muonfx.compact.codec import Codec
from muonfx.core import checks
from muonfx.core.definition import make_factory
from muonfx.core.recorded import Recorded

__all__ = ["QuantizedDtype", "fp8", "int8"]


class Resolved(NamedTuple):
    """The codecs and the seed of a quantized dtype."""

    signed: Codec
    """For values of either sign."""
    unsigned: Codec
    """For values that are never negative, such as second moments."""
    seed: int | None
    """The seed of stochastic rounding; None rounds to nearest."""


class QuantizedDtype(Recorded):
    """A dtype that stores a state in eight bits per element and an fp32 scale per block; made by `int8` or `fp8`.

    It is a frozen value: it prints as the code that makes it, can be compared, hashed and pickled, and is part of the
    fingerprint of a transform that has it as an argument.

    >>> import muonfx as mfx
    >>> mfx.int8() == mfx.int8(block=2048), mfx.momentum(dtype=mfx.int8(block=256))
    (True, momentum(dtype=int8(block=256)))
    """

    @property
    def resolved(self) -> Resolved:
        """The codecs and the seed that the arguments define."""
        return self.built


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
    **{format: (float8(format, signed=True), float8(format, signed=False)) for format in FLOAT8},
}
"""The signed and the unsigned codebook of each code of `int8` and each format of `fp8`."""


def _resolve(book: str, block: int, min_size: int, stochastic: bool, seed: int) -> Resolved:
    checks.positive_int("block", block)
    checks.whole_number("min_size", min_size)
    checks.whole_number("seed", seed)
    signed, unsigned = (Codec(own, block, min_size) for own in _BOOKS[book])
    return Resolved(signed, unsigned, seed if stochastic else None)


@_compact
def int8(block: int = 2048, *, code: Code = "linear", min_size: int = 4096, stochastic: bool = False, seed: int = 0):
    r"""Store a state as 8-bit integers with an fp32 scale for each block of elements.

    An element is stored as the nearest of at most 255 levels between plus and minus the largest magnitude of its
    block, which is the scale; blocks are runs of the flattened leaf. A tensor that is never negative, such as Adam's
    second moments, has levels without a sign, and of its elements only zero is stored as zero.

    Args:
        block: the number of elements that share a scale; an element takes $1 + 4 / block$ bytes. Smaller blocks are
            more accurate.
        code: "linear" for evenly spaced levels, 1/127 of the scale apart (without a sign: fourth powers of 255 even
            steps), or "dynamic" for the tree of Dettmers et al., whose levels are denser near zero. "dynamic" is more
            accurate for Adam's first moments, whose small elements are divided by small roots.
        min_size: leaves of fewer elements are stored in fp32.
        stochastic: round up or down at random, such that the mean is preserved. Without it, a change of less than half
            a step between levels is lost in every update, so use it for second moments, or for averaged parameters,
            with decays above about 0.99. The noise is a function of a key for each leaf in the state, to which every
            update of the leaf adds one, so runs are reproducible.
        seed: the seed of the first keys, which also depend on the names of the leaves.

    Returns:
        A value to give as ``dtype`` to `momentum` or `ema_params`, and as ``mu_dtype`` or ``nu_dtype`` to
        `scale_by_adam` and `scale_by_lion`.

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
def fp8(block: int = 2048, *, format: Format = "e4m3", min_size: int = 4096, stochastic: bool = False, seed: int = 0):
    """Store a state as 8-bit floats with an fp32 scale for each block of elements.

    The encoding is that of `int8`, with the finite numbers of a float type, divided by the largest, as levels. In torch
    2.13, ``torch.save`` supports float8 tensors, but ``pickle.dumps``, ``torch.equal`` and ``torch.promote_types`` do
    not.

    Args:
        block: as in `int8`.
        format: "e4m3", with a relative rounding error of at most 1/16 for elements above 3e-5 of the scale; or "e5m2",
            with at most 1/8, above 1e-9 of the scale. Without a sign, e4m3 stores square roots, and covers elements
            above 1e-9 too.
        min_size: as in `int8`.
        stochastic: as in `int8`.
        seed: as in `int8`.

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
