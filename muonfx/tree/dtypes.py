"""The dtypes that a checkpoint can hold, their names in files, and which of them widen exactly into which."""

from __future__ import annotations

import torch

__all__ = ["dtype_named", "name_of_dtype", "safetensors_name", "widens"]

# What every safetensors since 0.4 has a name for.
_SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# What it has none for: stored as bytes.
_AS_BYTES = (
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
)

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_SAFETENSORS, *_AS_BYTES)}

_INTS = [torch.int8, torch.int16, torch.int32, torch.int64]
_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]

# Every value of the first is a value of each of the others.
_WIDER: dict[torch.dtype, set[torch.dtype]] = {
    torch.uint8: {*_INTS[1:], torch.uint16, torch.uint32, torch.uint64},
    torch.uint16: {*_INTS[2:], torch.uint32, torch.uint64},
    torch.uint32: {torch.int64, torch.uint64},
    **{dtype: set(_INTS[place + 1 :]) for place, dtype in enumerate(_INTS)},
    **{dtype: set(_FLOATS) for dtype in _FP8},
    torch.float8_e8m0fnu: set(_FLOATS[1:]),
    torch.float16: {torch.float32, torch.float64},
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.complex64: {torch.complex128},
}


def name_of_dtype(dtype: torch.dtype) -> str | None:
    """A dtype's name in a checkpoint; None for one that cannot be stored (a quantized one, say).

    >>> name_of_dtype(torch.bfloat16)
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    return name if name in _BY_NAME else None


def dtype_named(name: object) -> torch.dtype | None:
    """The dtype of a name; None if there is no such.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    return _BY_NAME.get(name) if isinstance(name, str) else None


def safetensors_name(dtype: torch.dtype) -> str | None:
    """What safetensors calls a dtype; None if it is stored as bytes.

    >>> safetensors_name(torch.bfloat16), safetensors_name(torch.complex64)
    ('BF16', None)
    """
    return _SAFETENSORS.get(dtype)


def widens(old: torch.dtype, new: torch.dtype) -> bool:
    """True if every value of one dtype is a value of another, of the same kind: whether a cast is exact.

    >>> widens(torch.bfloat16, torch.float32), widens(torch.float32, torch.bfloat16)
    (True, False)
    >>> widens(torch.int64, torch.float64), widens(torch.float16, torch.bfloat16)
    (False, False)
    """
    return old == new or new in _WIDER.get(old, ())
