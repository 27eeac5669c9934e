"""A tree of 8-bit tensors, as part of a transform's state.

Codes, scales and keys are three trees with the structure of the parameters. So the name of a state tensor ends in the
name of its parameter (``trace.codes.blocks.0.up.weight``), which checkpoints, layouts and the torch optimizer look up.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from muonfx.compact.codec import Codec, Encoded
from muonfx.compact.dtypes import QuantizedDtype
from muonfx.compact.noise import keys_of
from muonfx.tree import Present, PyTree


class QuantizedState(NamedTuple):
    """A tree of state tensors, such as momenta, stored in eight bits and rounded to nearest."""

    codes: PyTree
    """For each parameter, 8-bit codes in its shape; fp32 values if it has fewer than ``min_size`` elements."""
    scales: PyTree
    """For each parameter, the largest magnitude of each block: fp32, shape (blocks,); (0,) if stored in fp32."""


class KeyedQuantizedState(NamedTuple):
    """A tree of state tensors, such as momenta, stored in eight bits and rounded stochastically."""

    codes: PyTree
    """As in `QuantizedState`."""
    scales: PyTree
    """As in `QuantizedState`."""
    keys: PyTree
    """For each parameter, the seed of its next rounding: 0-d int64, increased by one at every write."""


class Holder:
    """Creates, reads and writes one tree of a transform's state, such as its momenta, in a quantized dtype."""

    def __init__(self, dtype: QuantizedDtype, role: str, *, signed: bool) -> None:
        resolved = dtype.resolved
        self.codec: Codec = resolved.signed if signed else resolved.unsigned
        self.seed = resolved.seed
        self.role = role  # such as "mu": two trees of one parameter get different noise

    def zeros(self, params: PyTree) -> QuantizedState | KeyedQuantizedState:
        """Return a tree of zeros in eight bits, in the shapes of the parameters."""
        at = Present(params)
        return self._fresh(at, [self.codec.zeros(param) for param in at.pick(params)])

    def of(self, values: PyTree) -> QuantizedState | KeyedQuantizedState:
        """Encode a tree of tensors in eight bits, rounded to nearest."""
        at = Present(values)
        return self._fresh(at, [self.codec.encode(value) for value in at.pick(values)])

    def _fresh(self, at: Present, leaves: list[Encoded]) -> QuantizedState | KeyedQuantizedState:
        codes, scales = at.fill([leaf.codes for leaf in leaves]), at.fill([leaf.scales for leaf in leaves])
        if self.seed is None:
            return QuantizedState(codes, scales)
        keys = keys_of(f"{self.seed}/{self.role}", at.names(), [leaf.codes for leaf in leaves])
        return KeyedQuantizedState(codes, scales, at.fill(keys))

    def read(self, at: Present, held: QuantizedState | KeyedQuantizedState) -> list[Tensor]:
        """Decode the leaves at the positions ``at`` of the 8-bit tree ``held``; return a list of new fp32 tensors."""
        pairs = zip(at.pick(held.codes), at.pick(held.scales), strict=True)
        return [self.codec.decode(codes, scales) for codes, scales in pairs]

    def write(
        self, at: Present, values: list[Tensor], held: QuantizedState | KeyedQuantizedState
    ) -> QuantizedState | KeyedQuantizedState:
        """Return the 8-bit tree ``held`` in which ``values``, encoded, replace the leaves at the positions ``at``."""
        keys = at.pick(held.keys) if isinstance(held, KeyedQuantizedState) else [None] * len(values)
        leaves = [self.codec.encode(value, key) for value, key in zip(values, keys, strict=True)]
        codes = at.fill([leaf.codes for leaf in leaves], held.codes)
        scales = at.fill([leaf.scales for leaf in leaves], held.scales)
        if not isinstance(held, KeyedQuantizedState):
            return QuantizedState(codes, scales)
        return KeyedQuantizedState(codes, scales, at.fill([key + 1 for key in keys if key is not None], held.keys))
