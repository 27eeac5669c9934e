"""Frozen layers, groups and files of Lightning, PEFT, bitsandbytes, timm and lerobot, each unmodified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.processes import launched, real, result_of


def found(name: str, folder: Path) -> dict[str, Any]:
    return result_of(launched("freezing_worker.py", 1, [name], folder), name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=real("lightning")) for n in ("the model", "a list", "torch")]
)
def test_backbone_finetuning_unfreezes_and_resumes_before_and_after_it(
    name: str, tmp_path: Path
) -> None:
    case = found(f"Lightning, {name}", tmp_path)
    norms, rates = zip(*case["seen"], strict=True)
    assert norms[0] == norms[1]  # frozen
    assert len({*norms[1:]}) == 3  # trained from the third epoch on
    assert [len(epoch) for epoch in rates] == [len(rates[0])] * 2 + [len(rates[0]) + 1] * 2
    assert [epoch[-1] for epoch in rates[2:]] == [1e-3, 2e-3]
    assert case["resumed before"]
    assert case["seen again"] == case["seen"][1:]
    assert case["kept after"]
    assert case["state after"]
    assert case["rates after"] == rates[-1]


@pytest.mark.parametrize("_", [pytest.param(None, marks=real("lightning"))], ids=[""])
def test_parameters_that_backbone_finetuning_leaves_out_are_named_and_can_be_added(
    _: None, tmp_path: Path
) -> None:
    case = found("Lightning, equal values", tmp_path)
    assert case["refused"].startswith("'backbone.1.weight' has a gradient")
    assert "Lightning's BackboneFinetuning" in case["refused"]
    assert case["added"] == ["backbone.1.bias", "backbone.1.weight"]
    assert case["trained"]


@pytest.mark.parametrize(("bits", "dtype"), [("4 bits", "torch.uint8"), ("8 bits", "torch.int8")])
@pytest.mark.parametrize(
    "_", [pytest.param(None, marks=real("transformers", "peft", "bitsandbytes"))], ids=[""]
)
def test_qlora_trains_in_the_trainer(_: None, bits: str, dtype: str, tmp_path: Path) -> None:
    case = found(f"QLoRA, {bits}", tmp_path)
    assert dtype in case["dtypes"]
    assert case["moved"] == case["members"] == ["lora_A", "lora_B"]
    assert case["labels"] == ["muon", "adamw"]
    assert (case["summary"], case["described"], case["files"]) == (True, True, True)


@pytest.mark.parametrize("_", [pytest.param(None, marks=real("timm"))], ids=[""])
def test_groups_of_timms_layer_decay_keep_their_scales(_: None, tmp_path: Path) -> None:
    case = found("timm", tmp_path)
    assert case["scales"] > 2
    assert (case["kept"], case["scaled"], case["saved"]) == (True, True, True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=real("lerobot")) for n in ("Muon", "matrices", "a slash in keys")],
)
def test_lerobot_saves_and_loads_an_optimizer(name: str, tmp_path: Path) -> None:
    assert found(f"lerobot, {name}", tmp_path)["resumed"]
