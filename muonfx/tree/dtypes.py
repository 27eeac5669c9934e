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
"""A dict from dtype to its name in safetensors files, such as "BF16"."""
_AS_BYTES = (
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
)

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*SAFETENSORS_NAMES, *_AS_BYTES)}
"""A dict from each dtype that a checkpoint can hold to its name, such as "bfloat16"; without quantized dtypes."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
"""A dict from the name of each of these dtypes, such as "bfloat16", to the dtype."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a cast from one dtype to another of the same kind keeps every value, as from bf16 to fp32.

    A checkpoint may then be loaded into a state of the wider dtype. The kinds are ints, floats and complex numbers. A
    cast from int8 to fp32 keeps all values, but gives False.
    """
    if source == target or (source, target) == (torch.complex64, torch.complex128):
        return True
    if source.is_floating_point and target in _FLOATS:
        return _widens_floats(torch.finfo(source), torch.finfo(target))
    for dtype in (source, target):
        if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
            return False
    # For two ints, the range of the target must contain the source's range: uint8 fits int16, int8 does not fit uint16.
    narrow = torch.iinfo(source)
    wide = torch.iinfo(target)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _widens_floats(narrow: torch.finfo, wide: torch.finfo) -> bool:
    """Return True if ``wide`` has as fine steps, as large numbers and as small (subnormal) numbers as ``narrow``."""
    keeps_subnormals = narrow.tiny * narrow.eps >= wide.tiny * wide.eps
    return narrow.eps >= wide.eps and narrow.max <= wide.max and keeps_subnormals
