"""Whatever can be written in Python about a part can be written in JSON, with the same errors."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import deepspeed, llamafactory
from muonfx.engines.huggingface import MuonFactory
from muonfx.engines.parts import with_parts

VIEW = {"*.up": "... out in -> ... out in", "*.kv": "out (k=4 + v=2) -> out k, out v"}
PART = mfx.orthogonalize(
    coefficients=((2.0, -1.5, 0.5),),
    steps=3,
    dtype=torch.float32,
    view=mfx.MatrixView(VIEW),
)
WRITTEN = json.loads(
    json.dumps({"coefficients": [[2.0, -1.5, 0.5]], "steps": 3, "dtype": "float32", "view": VIEW})
)


def test_a_part_in_json_is_the_part_in_python():
    assert with_parts({"lr": 0.1, "orthogonalize": WRITTEN}) == {"lr": 0.1, "orthogonalize": PART}
    assert with_parts({"orthogonalize": PART}) == {"orthogonalize": PART}
    of_all = with_parts({"orthogonalize": {"view": "in out -> out in"}})["orthogonalize"]
    assert of_all.arguments["view"] == mfx.MatrixView("in out -> out in")


ARGS: Any = SimpleNamespace(
    learning_rate=0.002,
    weight_decay=0.1,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-8,
    deepspeed_plugin=None,
)
"""Training arguments of transformers with the numbers that `muonfx.Muon` has by default."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: deepspeed.Muon(model(), **options).tx,
        lambda **options: llamafactory.muon(model(), {"name": "muonfx", "lr": 2e-3, **options}).tx,
        lambda **options: MuonFactory()(model(), args=ARGS, **options).tx,
    ],
    ids=["deepspeed", "llamafactory", "huggingface"],
)
def test_every_engine_takes_parts_as_muon_does(make: Any):
    part = {"coefficients": "keller", "view": {"1.weight": "(part=3 out) in -> part out in"}}
    view = mfx.MatrixView({"1.weight": "(part=3 out) in -> part out in"})
    expected = mfx.Muon(
        model(),
        orthogonalize=mfx.orthogonalize(coefficients="keller", view=view),
        lr_scaling="original",
    )
    assert make(orthogonalize=part, lr_scaling="original") == expected.tx
    with pytest.raises(
        TypeError, match=r"orthogonalize: there is no argument 'coeficients'.*'coefficients'"
    ):
        make(orthogonalize={"coeficients": "keller"})
    with pytest.raises(TypeError, match="MatrixView: found 3, expected a pattern"):
        make(orthogonalize={"view": {"1.weight": 3}})
    with pytest.raises(
        TypeError, match=r"there is no argument 'coefficients' \(here: orthogonalize=.*coefficients"
    ):
        make(coefficients="keller")
    for unknown, meant in (("adam_lr", "adamw_lr"), ("decay", "momentum="), ("b1", "betas=")):
        with pytest.raises(TypeError, match=f"there is no argument '{unknown}'.*{meant}"):
            make(**{unknown: 0.5})
    with pytest.raises(ValueError, match="dtype"):
        make(orthogonalize={"dtype": "float33"})
