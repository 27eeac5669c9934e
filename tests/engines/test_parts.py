"""Whatever can be written in Python about a part can be written in JSON, with the same errors."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import deepspeed, llamafactory
from muonfx.engines.huggingface import MuonFactory
from muonfx.engines.parts import with_parts

VIEW = {"dims": {"*.up": [[-2], [-1]]}, "blocks": {"*.qkv": 3, "*.kv": [4, 2]}, "block_axis": {"*.kv": -1}}
PART = mfx.orthogonalize(
    coefficients=((2.0, -1.5, 0.5),),
    steps=3,
    dtype=torch.float32,
    view=mfx.MatrixView({"*.up": ((-2,), (-1,))}, {"*.qkv": 3, "*.kv": (4, 2)}, {"*.kv": -1}),
)
WRITTEN = json.loads(json.dumps({"coefficients": [[2.0, -1.5, 0.5]], "steps": 3, "dtype": "float32", "view": VIEW}))


def test_a_part_in_json_is_the_part_in_python():
    assert with_parts({"lr": 0.1, "orthogonalize": WRITTEN}) == {"lr": 0.1, "orthogonalize": PART}
    assert with_parts({"orthogonalize": PART}) == {"orthogonalize": PART}
    assert with_parts({"orthogonalize": {"view": PART.arguments["view"]}})["orthogonalize"].arguments["view"].blocks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: deepspeed.Muon(model(), **options).tx,
        lambda **options: llamafactory.muon(model(), {"name": "muonfx", "lr": 2e-3, **options}).tx,
        lambda **options: MuonFactory()(model(), **options).tx,
    ],
    ids=["deepspeed", "llamafactory", "huggingface"],
)
def test_every_engine_takes_parts_as_muon_does(make: Any):
    part = {"coefficients": "keller", "view": {"blocks": {"1.weight": 3}}}
    view = mfx.MatrixView(blocks={"1.weight": 3})
    expected = mfx.Muon(
        model(), orthogonalize=mfx.orthogonalize(coefficients="keller", view=view), lr_scaling="original"
    )
    assert make(orthogonalize=part, lr_scaling="original") == expected.tx
    with pytest.raises(TypeError, match=r"orthogonalize: there is no argument 'coeficients'.*'coefficients'"):
        make(orthogonalize={"coeficients": "keller"})
    with pytest.raises(TypeError, match=r"MatrixView: there is no argument 'blcks' .*'blocks'"):
        make(orthogonalize={"view": {"blcks": 3}})
    with pytest.raises(TypeError, match=r"there is no argument 'coefficients' \(here: orthogonalize=.*coefficients"):
        make(coefficients="keller")
    for unknown, meant in (("adam_lr", "adamw_lr"), ("decay", "momentum="), ("b1", "betas=")):
        with pytest.raises(TypeError, match=f"there is no argument '{unknown}'.*{meant}"):
            make(**{unknown: 0.5})
    with pytest.raises(ValueError, match="dtype"):
        make(orthogonalize={"dtype": "float33"})
