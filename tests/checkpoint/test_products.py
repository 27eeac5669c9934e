"""A checkpoint records the dtypes of matrix products, and a load warns if they are others now."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.polar import policy

AUTO = mfx.chain(mfx.momentum(), mfx.masked(mfx.orthogonalize(), mfx.select.ndim(min=2)), mfx.scale(-0.1))


def saved(
    path: Path, monkeypatch: pytest.MonkeyPatch, tx: mfx.Transform, dtype: torch.dtype, *, has_bf16: bool, wait: bool
) -> Any:
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: has_bf16)
    state = tx.init({"w": torch.ones(2, 3, dtype=dtype)})
    if wait:
        mfx.checkpoint.save_async(path, state, tx=tx).wait()
    else:
        mfx.checkpoint.save(path, state, tx=tx)
    return state


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("by_spec", [False, True])
def test_another_dtype_is_a_warning_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_spec: bool, wait: bool
):
    like = saved(tmp_path, monkeypatch, AUTO, torch.float32, has_bf16=True, wait=wait)
    assert mfx.checkpoint.inspect(tmp_path).products == {"masked.inner": "bfloat16"}
    like = mfx.spec(AUTO, {"w": torch.ones(2, 3)}) if by_spec else like
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfx.checkpoint.load(tmp_path, like=like, tx=AUTO)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: False)
    said = "'masked.inner' were computed in bfloat16 and are now in float32.*dtype=torch.bfloat16"
    with pytest.warns(UserWarning, match=said):
        mfx.checkpoint.load(tmp_path, like=like, tx=AUTO)


@pytest.mark.parametrize(
    ("tx", "dtype"),
    [(AUTO, torch.float64), (mfx.momentum(), torch.float32), (mfx.orthogonalize(dtype=torch.float32), torch.float32)],
)
def test_what_no_machine_decides_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tx: mfx.Transform, dtype: torch.dtype
):
    like = saved(tmp_path, monkeypatch, tx, dtype, has_bf16=True, wait=False)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfx.checkpoint.load(tmp_path, like=like, tx=tx)
