"""A tree of 8-bit tensors, as part of a transform's state.

Codes, scales and keys are three trees with the structure of the parameters. So the name of a state tensor ends in the
name of its parameter (``trace.codes.blocks.0.up.weight``), which checkpoints, layouts and the torch optimizer look up.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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


class QuantizedTrees:
    """Creates, reads and writes one tree of a transform's state, such as its momenta, in a quantized dtype."""

    def __init__(
        self, dtype: QuantizedDtype, role: str, *, signed: bool, start: Literal["zeros", "params"] = "zeros"
    ) -> None:
        signed_codec, unsigned_codec, self.seed = dtype.resolved
        self.codec: Codec = signed_codec if signed else unsigned_codec
        self.role = role  # such as "mu": two trees of one parameter get different noise
        self.start = start

    def init(self, params: PyTree) -> QuantizedState | KeyedQuantizedState:
        """Return the first state in eight bits: zeros, or the parameters rounded to nearest.

        If rounding is stochastic, the state also has a seed for each parameter.

        >>> state = QuantizedTrees(mfx.int8(), "mu", signed=True).init({"w": torch.zeros(5000)})
        >>> state.codes["w"].dtype, state.scales["w"]  # a scale for each block of 2048 elements
        (torch.int8, tensor([0., 0., 0.]))
        """
        # Both take a parameter, and return its codes and scales.
        encode = self.codec.zeros if self.start == "zeros" else self.codec.encode
        present = Present(params)
        leaves = present.pick(params)  # a list of the parameters that are not None
        state = _with_codes(QuantizedState(None, None), present, list(map(encode, leaves)))
        if self.seed is None:  # rounding is to nearest
            return state
        # A seed is a hash of the seed of the dtype, the name of this tree, such as "mu", and the name of the parameter.
        keys = keys_of(f"{self.seed}/{self.role}", present.names(), leaves)
        return KeyedQuantizedState(state.codes, state.scales, present.fill(keys))

    def read(self, present: Present, state: QuantizedState | KeyedQuantizedState) -> list[Tensor]:
        """Decode the leaves of ``state`` at the positions ``present``; return a list of new fp32 tensors."""
        codes = present.pick(state.codes)
        scales = present.pick(state.scales)
        return list(map(self.codec.decode, codes, scales))

    def write(
        self,
        present: Present,
        values: list[Tensor],
        state: QuantizedState | KeyedQuantizedState,
        *,
        reuse: bool,
    ) -> QuantizedState | KeyedQuantizedState:
        """Return ``state`` with new ``values`` encoded in eight bits, one for each position in ``present``.

        ``values`` are fp32 tensors, such as the new momentum of each parameter that has a gradient. The leaves of
        ``state`` at other positions, at which a parameter has no gradient, stay. Nothing is overwritten:
        ``reuse`` is not used.

        >>> trees, params = QuantizedTrees(mfx.int8(), "mu", signed=True), {"w": torch.zeros(5000)}
        >>> state = trees.write(Present(params), [torch.ones(5000)], trees.init(params), reuse=False)
        >>> state.codes["w"][:2], state.scales["w"]  # each element is 127 / 127 times the scale 1.0
        (tensor([127, 127], dtype=torch.int8), tensor([1., 1., 1.]))
        """
        if not isinstance(state, KeyedQuantizedState):  # rounding is to nearest
            return _with_codes(state, present, list(map(self.codec.encode, values)))
        # Rounding is stochastic, with noise from a key (a seed) for each value.
        keys = present.pick(state.keys)
        new_state = _with_codes(state, present, list(map(self.codec.encode, values, keys)))
        next_keys = [key + 1 for key in keys]  # other noise at the next write
        return KeyedQuantizedState(new_state.codes, new_state.scales, present.fill(next_keys, state.keys))


def _with_codes(
    state: QuantizedState | KeyedQuantizedState, present: Present, encoded_leaves: list[Encoded]
) -> QuantizedState:
    """Return a state with the codes and scales of ``encoded_leaves``, one for each position in ``present``.

    All other positions keep the codes and scales that they have in ``state``. They are None if it has no trees yet:

    >>> x = torch.ones(1)
    >>> _with_codes(QuantizedState(None, None), Present({"w": x, "b": None}), [Encoded(codes=2 * x, scales=3 * x)])
    QuantizedState(codes={'w': tensor([2.]), 'b': None}, scales={'w': tensor([3.]), 'b': None})
    """
    new_codes = [encoded.codes for encoded in encoded_leaves]
    new_scales = [encoded.scales for encoded in encoded_leaves]
    codes = present.fill(new_codes, state.codes)
    scales = present.fill(new_scales, state.scales)
    return QuantizedState(codes, scales)
