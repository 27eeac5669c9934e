"""Runs of other optimizers, recorded by scripts/record_conversions.py, are gone on with after three of eight steps."""

import copy
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx.checkpoint import convert

HERE = Path(__file__).parent
TOLERANCE = 1e-4
"""Of fp32, through an iteration that makes small errors larger; the originals were recorded in fp32 instead of bf16."""


RECORDER = SimpleNamespace(**runpy.run_path(str(HERE.parents[2] / "scripts" / "record_conversions.py")))


def shaped(flat: dict[str, list[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(flat[name]).view(shape) for name, shape in RECORDER.SHAPES.items()}


def recorded(kind: str) -> dict[str, Any]:
    return json.loads((HERE / "recorded" / f"{kind}.json").read_text(encoding="utf-8"))


def tensors(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with its indices and tensors, which JSON has as strings and lists."""
    entries = {
        int(index): {key: torch.tensor(value) if isinstance(value, list) else value for key, value in entry.items()}
        for index, entry in saved["state"].items()
    }
    return {"state": entries, "param_groups": saved["param_groups"]}


CASES = ("keller", "moonlight", "dion")


def go_on(tx: mfx.Transform, state: Any, params: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    for step in range(RECORDER.BEFORE, RECORDER.BEFORE + RECORDER.AFTER):
        updates, state = tx.update(shaped(RECORDER.gradients(step)), state, params)
        params = mfx.apply_updates(params, updates)
    return state, params


def require_near(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor], tolerance: float):
    """Within a share of how far the parameters went."""
    for name, value in wanted.items():
        moved = (value - start[name]).norm()
        assert moved > 0.05
        assert (found[name] - value).norm() <= tolerance * moved, name


@pytest.mark.parametrize("kind", CASES)
def test_a_run_goes_on_as_the_original_does(kind: str):
    run = recorded(kind)
    params = shaped(run["params"])
    saved = tensors(run["state_dict"])
    tx = convert.recipe(kind, saved, params, names=run["names"], dtype=torch.float32)
    state, after = go_on(tx, convert.read(kind, saved, tx, params, names=run["names"]), params)
    require_near(after, shaped(run["params_after"]), params, TOLERANCE)
    with pytest.raises(AssertionError):  # and not without the state
        require_near(go_on(tx, tx.init(params), params)[1], shaped(run["params_after"]), params, TOLERANCE)
    expected = convert.read(kind, tensors(run["state_dict_after"]), tx, params, names=run["names"])
    for name, found, wanted in zip(
        mfx.tree.names(state), mfx.tree.leaves(state), mfx.tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", CASES)
def test_there_and_back_is_the_same(kind: str):
    run = recorded(kind)
    params, saved = shaped(run["params"]), tensors(run["state_dict"])
    tx = convert.recipe(kind, saved, params, names=run["names"])
    empty = copy.deepcopy(saved)
    for entry in empty["state"].values():
        for key, value in entry.items():
            entry[key] = torch.zeros_like(value) if isinstance(value, Tensor) else value
    state = convert.read(kind, saved, tx, params, names=run["names"])
    back = convert.write(kind, state, empty, params, names=run["names"])
    assert back["param_groups"] == saved["param_groups"]
    assert back["state"].keys() == saved["state"].keys()
    for index, entry in saved["state"].items():
        assert back["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(back["state"][index][key]), torch.as_tensor(value)), (index, key)


def test_older_groups_of_keller_keep_their_numbers():
    group = {"params": [0], "lr": 0.02, "momentum": 0.95, "nesterov": False, "ns_steps": 3, "weight_decay": 0.0}
    found = repr(
        convert.recipe("keller", {"state": {}, "param_groups": [group]}, {"w": torch.zeros(3, 2)}, names=["w"])
    )
    assert "nesterov=False" in found
    assert "steps=3" in found
