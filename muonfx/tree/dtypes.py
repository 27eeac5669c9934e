"""Dtypes that a checkpoint can hold, their names in files, and the exact casts between them."""

from __future__ import annotations

import torch

SAFETENSORS_NAMES = {  # known to every safetensors since 0.4
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
"""The safetensors name of each dtype that has one."""
_AS_BYTES = (
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
)

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*SAFETENSORS_NAMES, *_AS_BYTES)}
"""The name of each dtype that a checkpoint can hold. Quantized dtypes are not supported."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
"""The dtype of each name."""

_INTS = [torch.int8, torch.int16, torch.int32, torch.int64]
_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]

# Every value of the key's dtype is a value of each listed dtype.
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


def widens(old: torch.dtype, new: torch.dtype) -> bool:
    """Return True if a cast between dtypes of one kind is exact for every value."""
    return old == new or new in _WIDER.get(old, ())
