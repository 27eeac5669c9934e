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


def _codec(dtype: QuantizedDtype, signed: bool) -> Codec:
    """Return the codec of a quantized dtype for values of either sign, or for values that are never negative."""
    return dtype.resolved.signed if signed else dtype.resolved.unsigned


def init_quantized(
    dtype: QuantizedDtype,
    name: str,
    params: PyTree,
    *,
    signed: bool = True,
    start: Literal["zeros", "params"],
) -> QuantizedState | KeyedQuantizedState:
    """Return the first state in eight bits: zeros, or the parameters rounded to nearest.

    If rounding is stochastic, the state also has a seed for each parameter. ``name`` is the name of this tree in the
    state of the transform, such as "mu": two trees of one parameter get different noise.

    >>> state = init_quantized(mfx.int8(), "mu", {"w": torch.zeros(5000)}, start="zeros")
    >>> state.codes["w"].dtype, state.scales["w"]  # a scale for each block of 2048 elements
    (torch.int8, tensor([0., 0., 0.]))
    """
    codec = _codec(dtype, signed)
    # Either function takes a parameter, and returns its codes and scales.
    encode = codec.zeros if start == "zeros" else codec.encode
    present = Present(params)
    leaves = present.pick(params)  # a list of the parameters that are not None
    state = _with_codes(QuantizedState(None, None), present, list(map(encode, leaves)))
    seed = dtype.resolved.seed
    if seed is None:  # rounding is to nearest
        return state
    # A seed is a hash of the seed of the dtype, the name of this tree, such as "mu", and the name of the parameter.
    keys = keys_of(f"{seed}/{name}", present.names(), leaves)
    return KeyedQuantizedState(state.codes, state.scales, present.fill(keys))


def read_quantized(
    dtype: QuantizedDtype,
    present: Present,
    state: QuantizedState | KeyedQuantizedState,
    *,
    signed: bool = True,
) -> list[Tensor]:
    """Decode the leaves of ``state`` at the positions ``present``; return a list of new fp32 tensors."""
    codes = present.pick(state.codes)
    scales = present.pick(state.scales)
    return list(map(_codec(dtype, signed).decode, codes, scales))


def write_quantized(
    dtype: QuantizedDtype,
    present: Present,
    values: list[Tensor],
    state: QuantizedState | KeyedQuantizedState,
    *,
    signed: bool = True,
) -> QuantizedState | KeyedQuantizedState:
    """Return ``state`` with new ``values`` encoded in eight bits, one for each position in ``present``.

    ``values`` are fp32 tensors, such as the new momentum of each parameter that has a gradient. The leaves of ``state``
    at other positions, at which a parameter has no gradient, stay. Nothing is overwritten.

    >>> params = {"w": torch.zeros(5000)}
    >>> old_state = init_quantized(mfx.int8(), "mu", params, start="zeros")
    >>> state = write_quantized(mfx.int8(), Present(params), [torch.ones(5000)], old_state)
    >>> state.codes["w"][:2], state.scales["w"]  # each element is 127 / 127 times the scale 1.0
    (tensor([127, 127], dtype=torch.int8), tensor([1., 1., 1.]))
    """
    codec = _codec(dtype, signed)
    if not isinstance(state, KeyedQuantizedState):  # rounding is to nearest
        return _with_codes(state, present, list(map(codec.encode, values)))
    # Rounding is stochastic, with noise from a key (a seed) for each value.
    keys = present.pick(state.keys)
    new_state = _with_codes(state, present, list(map(codec.encode, values, keys)))
    next_keys = [key + 1 for key in keys]  # other noise at the next write
    return KeyedQuantizedState(
        new_state.codes, new_state.scales, present.fill(next_keys, state.keys)
    )


def _with_codes(
    state: QuantizedState | KeyedQuantizedState, present: Present, encoded_leaves: list[Encoded]
) -> QuantizedState:
    """Return a state with the codes and scales of ``encoded_leaves``, one for each position in ``present``.

    All other positions keep the codes and scales that they have in ``state``. They are None if it has no trees yet:

    >>> x = torch.ones(1)
    >>> _with_codes(
    ...     QuantizedState(None, None),
    ...     Present({"w": x, "b": None}),
    ...     [Encoded(codes=2 * x, scales=3 * x)],
    ... )
    QuantizedState(codes={'w': tensor([2.]), 'b': None}, scales={'w': tensor([3.]), 'b': None})
    """
    new_codes = [encoded.codes for encoded in encoded_leaves]
    new_scales = [encoded.scales for encoded in encoded_leaves]
    codes = present.fill(new_codes, state.codes)
    scales = present.fill(new_scales, state.scales)
    return QuantizedState(codes, scales)
