"""A monitor with ``by_leaf``: each value belongs to its parameter, in the state of an optimizer and its state dict."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muonfx as mfx
from muonfx.tree.members import parameters_of
from tests.checkpoint.common import bits

WATCHED = mfx.chain(
    mfx.monitor("grad", by_leaf=True),
    mfx.adamw(0.1),
    mfx.monitor("step", ("orthogonality_error",), by_leaf=True),
)


def layers(number: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(number)])


def steps(model: nn.Module, optimizer: Any, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def values(optimizer: Any) -> dict[str, bytes]:
    return {name: bits(value) for name, value in mfx.metrics(optimizer).items()}


def test_each_parameter_has_only_its_own_values_in_a_state_dict():
    model = layers(5)
    optimizer = mfx.TransformOptimizer(model, WATCHED)
    steps(model, optimizer, 1)
    saved: Any = get_optimizer_state_dict(model, optimizer)["state"]
    assert len(saved) == 10
    keys = {
        "monitor.values.grad/norm",
        "monitor.values.grad/rms",
        "monitor_2.values.step/orthogonality_error",
    }
    for name, entries in saved.items():
        assert {key for key in entries if "monitor" in key} == keys, name
        assert torch.equal(
            entries["monitor.values.grad/rms"], mfx.metrics(optimizer)[f"grad/{name}/rms"]
        )


def test_a_resumed_run_has_the_same_bits(tmp_path: Path):
    model = layers(2)
    optimizer = mfx.TransformOptimizer(model, WATCHED)
    steps(model, optimizer, 2)
    mfx.checkpoint.save(tmp_path / "saved", optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    at_save = values(optimizer)
    steps(model, optimizer, 2)
    for how in ("state dict", "checkpoint"):
        resumed_model = layers(2)
        resumed_model.load_state_dict(saved[0])
        resumed = mfx.TransformOptimizer(resumed_model, WATCHED)
        if how == "checkpoint":
            mfx.checkpoint.load(tmp_path / "saved", resumed)
        else:
            resumed.load_state_dict(saved[1])
        assert values(resumed) == at_save, how
        steps(resumed_model, resumed, 2)
        assert values(resumed) == values(optimizer), how
        for name, param in resumed_model.named_parameters():
            assert torch.equal(param, model.get_parameter(name)), (how, name)


def test_a_leaf_without_a_gradient_keeps_its_values():
    tx = mfx.monitor("u", by_leaf=True)
    params = {"w": torch.ones(2, 2), "b": torch.ones(3)}
    _, state = tx.update(params, tx.init(params))
    grads: dict[str, Tensor | None] = {"w": None, "b": torch.full((3,), 2.0)}
    _, state = tx.update(grads, state)
    found = {name: round(float(value), 4) for name, value in mfx.metrics(state).items()}
    assert found == {"u/b/norm": 3.4641, "u/b/rms": 2.0, "u/w/norm": 2.0, "u/w/rms": 1.0}


def test_a_parameter_may_have_the_name_of_a_metric():
    params = {"norm": torch.ones(2), "rms": torch.full((4,), 3.0)}
    tx = mfx.monitor("norm", by_leaf=True)
    _, state = tx.update(params, tx.init(params))
    owners = parameters_of(state, params)
    assert owners == ["norm", "rms", "norm", "rms"]
    assert float(mfx.metrics(state)["norm/rms/rms"]) == 3.0
