"""Many matrices at once equal one after another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.polar import PRESETS, orthogonalize, orthogonalize_many

from .strategies import DTYPES, gap, tolerance

shapes = st.tuples(
    st.lists(st.integers(0, 3), max_size=2), st.sampled_from([0, 1, 5, 8]), st.sampled_from([0, 1, 5, 8])
)


def tensors(shapes: list, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [
        torch.randn(*batch, m, n, dtype=torch.float64, generator=generator).to(dtype)
        for (batch, m, n), dtype in zip(shapes, dtypes, strict=False)
    ]


@given(
    st.lists(shapes, max_size=8),
    st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    st.sampled_from(list(PRESETS)),
    st.sampled_from([None, 1, 3000]),
)
def test_many_equals_a_loop(shapes: list, dtypes: list[torch.dtype], name: str, scratch: int | None) -> None:
    xs = tensors(shapes, dtypes)
    copies, versions = [x.clone() for x in xs], [x._version for x in xs]
    found = orthogonalize_many(xs, coefficients=name, dtype=torch.float64, max_scratch_bytes=scratch)
    assert len(found) == len(xs)
    for y, x, copy, version in zip(found, xs, copies, versions, strict=True):
        one = orthogonalize(x, coefficients=name, dtype=torch.float64)
        assert (y.shape, y.dtype, x._version) == (x.shape, x.dtype, version)
        # Another order of summation, then one rounding to the dtype of x.
        slack = 0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps
        assert gap(y, one) <= 2 * tolerance(name, torch.float64) + slack
        assert torch.equal(x, copy)
        assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_equals_a_loop_in_low_precision(dtype: torch.dtype) -> None:
    xs = tensors([((), 16, 24), ((), 24, 16), ((2,), 16, 24), ((), 16, 16)], [torch.float32] * 4)
    for y, x in zip(orthogonalize_many(xs, dtype=dtype), xs, strict=True):
        assert gap(y, orthogonalize(x, dtype=dtype)) < {torch.float32: 2e-5, torch.float16: 0.03}.get(dtype, 0.2)


def test_one_group_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[torch.Size] = []
    real = torch.bmm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append(a.shape)
        return real(a, b)

    monkeypatch.setattr(torch, "bmm", counted)
    xs = tensors([((), 4, 6), ((), 6, 4), ((3,), 4, 6), ((0,), 4, 6), ((2, 2), 6, 4)], [torch.float32] * 5)
    orthogonalize_many(xs, steps=1)
    assert products == [(9, 4, 6)]
    products.clear()
    orthogonalize_many(xs, steps=1, max_scratch_bytes=1)
    assert products == [(1, 4, 6)] * 9


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 8, 12), (256, 300), (300, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_memory_changes_no_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape)
    other = x.mT.contiguous().mT
    assert not other.is_contiguous()
    (wanted,) = orthogonalize_many([x], dtype=dtype)
    (found,) = orthogonalize_many([other], dtype=dtype)
    assert torch.equal(found, wanted)
