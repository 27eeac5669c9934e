"""DeepSpeed's schedulers write one learning rate into all groups: refused, if the groups have different rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from muonfx.engines import deepspeed as ours
from muonfx.engines.huggingface import MuonFactory


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def _arguments(config: dict[str, Any]) -> Any:
    """Return training arguments of transformers with a configuration of DeepSpeed."""
    return SimpleNamespace(
        learning_rate=0.02,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        deepspeed_plugin=SimpleNamespace(deepspeed_config=config),
    )


def _step_at(optimizer: ours.ZeroOptimizer, model: nn.Module, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    model(torch.arange(4)).square().sum().backward()
    optimizer.step()


def test_a_rate_of_muon_in_the_group_of_adamw_is_refused_before_anything_changes() -> None:
    model = _model()
    optimizer = ours.Muon(model, lr=0.02, adamw_lr=3e-4)
    _step_at(optimizer, model, 0.0)  # the start of a warmup
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"muon 0\.02, adamw 0\.0003.*\[0\.02, 0\.0003\]"):
        _step_at(optimizer, model, 0.02)
    assert all(map(torch.equal, before, model.parameters()))


def test_the_error_at_a_step_names_the_keys_of_each_scheduler_and_a_loop() -> None:
    """An optimizer does not know what has written the rate: the scheduler may be OneCycle, or there is none."""
    model = _model()
    optimizer = ours.Muon(model, lr=0.02, adamw_lr=3e-4)
    with pytest.raises(ValueError, match="loop or callback") as error:
        _step_at(optimizer, model, 0.02)
    for key in ("warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"):
        assert f'"{key}"' in str(error.value)


def test_an_equal_rate_below_all_requested_rates_warns_once_and_is_refused_when_it_changes() -> (
    None
):
    model = _model()
    optimizer = ours.Muon(model, lr=0.02, adamw_lr=3e-4)
    with pytest.warns(UserWarning, match=r"1e-05 in all groups"):
        _step_at(optimizer, model, 1e-5)
    _step_at(optimizer, model, 1e-5)
    with pytest.raises(ValueError, match=r"0\.0001 in all groups"):
        _step_at(optimizer, model, 1e-4)


def test_rates_that_have_differed_may_become_equal() -> None:
    """A schedule that ends at one minimum for all groups, such as CosineAnnealingLR, is no mistake."""
    model = _model()
    optimizer = ours.Muon(model, lr=0.02, adamw_lr=3e-4)
    optimizer.step()
    _step_at(optimizer, model, 1e-3)


def test_groups_with_one_requested_rate_accept_any_rate() -> None:
    model = _model()
    optimizer = ours.Muon(model, lr=0.02, adamw_lr=0.02)
    _step_at(optimizer, model, 0.01)
    _step_at(optimizer, model, 0.005)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}},
        {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}},  # its default is one number
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.02}},
    ],
)
def test_one_rate_in_a_configuration_is_refused_when_the_optimizer_is_made(
    scheduler: dict[str, Any],
) -> None:
    config = {
        "optimizer": {"type": "muonfx.Muon", "params": {"lr": 0.02, "adamw_lr": 3e-4}},
        "scheduler": scheduler,
    }
    key = "cycle_max_lr" if scheduler["type"] == "OneCycle" else "warmup_max_lr"
    with pytest.raises(
        ValueError, match=rf'muon 0\.02, adamw 0\.0003.*"{key}": \[0\.02, 0\.0003\]'
    ):
        ours.initialize(_model(), config)
    with pytest.raises(ValueError, match='remove "scheduler"'):
        MuonFactory()(_model(), args=_arguments({"scheduler": scheduler}), adamw_lr=3e-4)


def test_a_rate_for_each_group_in_a_configuration_is_accepted() -> None:
    for params in ({"warmup_max_lr": [0.02, 3e-4]}, {"warmup_num_steps": 3}):
        config = {"scheduler": {"type": "WarmupLR", "params": params}}
        MuonFactory()(_model(), args=_arguments(config), adamw_lr=3e-4)
