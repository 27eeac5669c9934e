"""`torch.distributed.checkpoint.state_dict` lists parameters by path; state follows these, and may be partial."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import muonfx as mfx
from tests.optimizer.test_adapter import assert_equal

DROPPED = {"some": ["1.weight", "2.bias"], "a whole group": ["1.weight", "2.weight", "3.weight"]}


def _trained(steps: int, *, is_reversed: bool = False) -> tuple[Any, mfx.Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    named = list(model.named_parameters())
    optimizer = mfx.Muon(named[::-1] if is_reversed else named, labels=mfx.default_labels(model))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _by_name(model: nn.Module, optimizer: mfx.Muon) -> dict[str, torch.Tensor]:
    return {
        f"{name}: {key}": leaf.clone()
        for name, param in model.named_parameters()
        for key, leaf in optimizer.state[param].items()
    }


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}], ids=str)
def test_an_optimizer_whose_parameters_were_given_in_another_order_loads_by_path(options: dict[str, bool]):
    model, optimizer = _trained(2)
    other, loaded = _trained(1, is_reversed=True)
    given = StateDictOptions(**options)
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer, options=given), options=given)
    assert_equal(_by_name(other, loaded), _by_name(model, optimizer))


def test_another_order_is_refused_if_names_and_paths_have_nothing_in_common():
    model, _ = _trained(0)
    optimizers = []
    for order in (1, -1):
        pairs = [(name.replace("1.", "first."), param) for name, param in model[1:2].named_parameters(prefix="1")]
        optimizers.append(mfx.TransformOptimizer([(f"x.{n}", p) for n, p in pairs][::order], mfx.adamw(0.1)))
    part = model[1]
    saved = get_optimizer_state_dict(part, optimizers[0])
    with pytest.raises(
        ValueError, match=r"by paths such as 'bias', the optimizer by names such as 'x\..*another order"
    ):
        set_optimizer_state_dict(part, optimizers[1], saved)
    set_optimizer_state_dict(part, optimizers[0], saved)


@pytest.mark.parametrize("dropped", DROPPED)
def test_parameters_that_a_checkpoint_lacks_start_anew_without_strict_as_in_torch(dropped: str):
    """Torch drops their state and makes it again at the next step."""
    lacking = DROPPED[dropped]
    model, optimizer = _trained(2)
    optimizer.param_groups[0]["lr"] = 0.25
    saved: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for name in lacking:
        del saved["state"][name]
    for group in saved["param_groups"]:
        group["param_names"] = [name for name in group["param_names"] if name not in lacking]
        group["params"] = [name for name in group["params"] if name not in lacking]
    saved["param_groups"] = [group for group in saved["param_groups"] if group["params"]]
    other, loaded = _trained(3)
    before = _by_name(other, loaded)
    with pytest.raises(RuntimeError, match="Missing optimizer state for parameter"):
        set_optimizer_state_dict(other, loaded, copy.deepcopy(saved))
    assert_equal(_by_name(other, loaded), before)
    with pytest.warns(UserWarning, match=rf"nothing of {len(lacking)} parameters, such as '1\.weight': .* starts anew"):
        set_optimizer_state_dict(other, loaded, saved, options=StateDictOptions(strict=False))
    wanted = _by_name(model, optimizer)
    for key in wanted:
        if key.split(":")[0] in lacking and not key.endswith("count"):
            wanted[key].zero_()
    assert_equal(_by_name(other, loaded), wanted)
    assert loaded.param_groups[0]["lr"] == (2e-3 if dropped == "a whole group" else 0.25)


def test_a_state_dict_by_position_must_be_whole():
    _, optimizer = _trained(2)
    saved = optimizer.state_dict()
    del saved["state"][0]
    with pytest.raises(ValueError, match=r"'1\.weight' has no 'muon/momentum/trace'"):
        optimizer.load_state_dict(saved)
