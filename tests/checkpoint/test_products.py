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
    path: Path, monkeypatch: pytest.MonkeyPatch, tx: mfx.Transform, dtype: torch.dtype, *, has_bf16: bool, **more: Any
) -> Any:
    """Save the state of a machine with or without bf16; with more arguments, in the background or with parameters."""
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: has_bf16)
    params = {"w": torch.ones(2, 3, dtype=dtype)}
    state = tx.init(params)
    save = mfx.checkpoint.save_async if more.get("wait") else mfx.checkpoint.save
    made = save(path, state, tx=tx, params=params if more.get("with_params") else None)
    if more.get("wait"):
        made.wait()
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


PINNED = mfx.chain(mfx.momentum(dtype=torch.float32), mfx.orthogonalize(), mfx.scale(-0.1))
GIVEN = mfx.orthogonalize(dtype=torch.float32)


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize(
    ("tx", "dtype", "with_params"),
    [
        (AUTO, torch.float64, False),
        (AUTO, torch.float64, True),
        (PINNED, torch.float64, True),
        (mfx.orthogonalize(), torch.float64, True),
        (mfx.orthogonalize(), torch.float64, False),
        (mfx.momentum(), torch.float32, False),
        (GIVEN, torch.float32, True),
        (GIVEN, torch.float64, True),
    ],
)
def test_what_no_machine_decides_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tx: mfx.Transform, dtype: torch.dtype, with_params: bool, now: bool
):
    like = saved(tmp_path, monkeypatch, tx, dtype, has_bf16=not now, with_params=with_params)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: now)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfx.checkpoint.load(tmp_path, like=like, tx=tx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tx", [PINNED, mfx.orthogonalize()], ids=["pinned", "stateless"])
def test_parameters_that_are_saved_decide_whatever_the_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tx: mfx.Transform, dtype: torch.dtype
):
    like = saved(tmp_path, monkeypatch, tx, dtype, has_bf16=False, with_params=True)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: True)
    with pytest.warns(UserWarning, match="were computed in float32 and are now in bfloat16"):
        mfx.checkpoint.load(tmp_path, like=like, tx=tx)
