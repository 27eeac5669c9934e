"""Names of dtypes, and casts that are exact where we say so."""

import pytest
import torch

from muonfx.tree.dtypes import dtype_named, name_of_dtype, safetensors_name, widens

ALL = [dtype_named(name) for name in map(name_of_dtype, vars(torch).values()) if name]
SMALL = [dtype for dtype in dict.fromkeys(ALL) if dtype.itemsize <= 2 and dtype is not torch.bool]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


@pytest.mark.parametrize("old", SMALL, ids=str)
def test_widening_is_exact_for_every_value(old):
    values = every_value(old)
    wider = [new for new in dict.fromkeys(ALL) if new != old and widens(old, new)]
    assert wider
    for new in wider:
        back = values.to(new).to(old)
        # One NaN is as good as another.
        same = (back.view(torch.uint8) == values.view(torch.uint8)).view(len(values), -1).all(dim=1)
        assert (same | values.to(torch.float64).isnan()).all() if old.is_floating_point else same.all(), new


def test_nothing_widens_into_another_kind_or_into_less():
    for old in dict.fromkeys(ALL):
        for new in dict.fromkeys(ALL):
            if old != new and widens(old, new):
                assert old.is_floating_point == new.is_floating_point
                assert old.is_complex == new.is_complex
                assert not widens(new, old)
                assert new.itemsize > old.itemsize
                assert old is not torch.bool
    assert not widens(torch.int64, torch.float64)
    assert not widens(torch.float16, torch.bfloat16)


def test_names_of_dtypes_read_back():
    assert all(dtype_named(name_of_dtype(dtype)) == dtype for dtype in ALL)
    assert len(set(ALL)) == 20
    assert (name_of_dtype(torch.qint8), dtype_named("qint8"), dtype_named(None)) == (None, None, None)
    assert safetensors_name(torch.float32) == "F32"
