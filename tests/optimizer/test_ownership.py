"""`muonfx.optimizer.ownership`: an optimizer that an engine put in the place of ours is noticed at its first step."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import deepspeed

Made = tuple[nn.Module, torch.optim.Optimizer]


def _made(kind: Callable[[nn.Module], torch.optim.Optimizer]) -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, kind(model)


def _loaded(kind: Callable[[nn.Module], torch.optim.Optimizer]) -> Made:
    model, optimizer = _made(kind)
    optimizer.load_state_dict(_made(kind)[1].state_dict())
    return model, optimizer


def _with_a_group_added() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(model[0].parameters(), model=model)
    optimizer.add_param_group({"params": model[1].parameters()})
    return model, optimizer


OURS: dict[str, Callable[[], Made]] = {
    "of DeepSpeed": lambda: _made(deepspeed.Muon),
    "of DeepSpeed, loaded": lambda: _loaded(deepspeed.Muon),
    "Muon": lambda: _made(mfx.Muon),
    "loaded": lambda: _loaded(mfx.Muon),
    "with a group added": _with_a_group_added,
    "copied": lambda: copy.deepcopy(_made(mfx.Muon)),
    "pickled": lambda: pickle.loads(pickle.dumps(_made(mfx.Muon))),
}


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, with its groups, as SAM's is."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("how", OURS)
def test_only_the_optimizer_its_wrappers_and_owners_of_copies_step_on_its_groups(how: str) -> None:
    model, optimizer = OURS[how]()

    def changes(one: torch.optim.Optimizer) -> bool:
        before = copy.deepcopy(model.state_dict())
        model(torch.ones(1, 4)).sum().backward()
        try:
            one.step()
        finally:
            changed = [not torch.equal(before[key], value) for key, value in model.state_dict().items()]
            assert any(changed) == all(changed)
        return all(changed)

    assert changes(Wrapper(optimizer))
    assert changes(torch.optim.SGD([dict(group) for group in optimizer.param_groups], lr=0.1))
    groups = optimizer.param_groups
    if "DeepSpeed" in how:
        del optimizer  # as in a loop that has only the result of the engine
    other = torch.optim.AdamW(groups, lr=0.1)
    with pytest.raises(RuntimeError, match=r"AdamW steps on groups .*'muon'.*zero_force_ds_cpu"):
        changes(other)
