"""`muonfx.optimizer.ownership`: an optimizer that was put in the place of ours is noticed at its first step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import deepspeed


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _loaded(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = mfx.Muon(model)
    optimizer.load_state_dict(mfx.Muon(_model()).state_dict())
    return optimizer


def _added(model: nn.Sequential) -> torch.optim.Optimizer:
    optimizer = mfx.Muon(model[0].parameters(), model=model)
    optimizer.add_param_group({"params": model[1].parameters()})
    return optimizer


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": mfx.Muon,
    "of DeepSpeed": deepspeed.Muon,
    "loaded": _loaded,
    "with a group added": _added,
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("copied", [False, True])
def test_another_optimizer_on_the_groups_is_refused_before_anything_changes(name: str, copied: bool) -> None:
    model = _model()
    optimizer = MADE[name](model)
    groups = optimizer.param_groups
    if name == "of DeepSpeed":
        del optimizer  # as in a loop that has only what the engine returned
    other = torch.optim.AdamW(copy.copy(groups) if copied else groups, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"AdamW steps on groups .*'muon'.*zero_force_ds_cpu"):
        other.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, with its groups, as SAM's is."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("name", MADE)
def test_wrappers_copies_and_plain_groups_step(name: str) -> None:
    def changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        model(torch.ones(1, 4)).sum().backward()
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        return not torch.equal(before["0.weight"], model.state_dict()["0.weight"])

    model = _model()
    assert changed(model, Wrapper(MADE[name](model)))
    optimizer: torch.optim.Optimizer = MADE[name](model)
    assert changed(model, torch.optim.SGD([dict(group) for group in optimizer.param_groups], lr=0.1))


def test_copies_of_our_optimizer_own_their_groups() -> None:
    for again in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        model, optimizer = again((model := _model(), mfx.Muon(model)))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="SGD steps on groups"):
            torch.optim.SGD(optimizer.param_groups, lr=0.1).step()
