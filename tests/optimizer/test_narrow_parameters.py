"""Parameters in bfloat16: the master copy follows changes from outside, and a decay that rounding removes is named."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import muonfx as mfx

BF16 = torch.bfloat16


def made(tx: mfx.Transform | None = None) -> tuple[nn.Linear, mfx.TransformOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=BF16)
    return model, mfx.TransformOptimizer(
        model, mfx.master_params(mfx.adamw(1e-3)) if tx is None else tx
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, size: float = 1.0) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, size)
    optimizer.step()


@torch.no_grad()
def _in_place(model: nn.Linear, values: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        param.copy_(values[name])


def _by_data(model: nn.Linear, values: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data = values[name].clone()


CHANGES: dict[str, Callable[[nn.Linear, dict[str, torch.Tensor]], Any]] = {
    "load_state_dict": lambda model, values: model.load_state_dict(values),
    "assign=True": lambda model, values: model.load_state_dict(
        {n: v.clone() for n, v in values.items()}, assign=True
    ),
    "in place": _in_place,
    "data": _by_data,
}


@pytest.mark.parametrize("how", CHANGES)
def test_weights_that_are_loaded_stay_loaded(how: str):
    model, optimizer = made()
    step(model, optimizer)
    values = {name: torch.full_like(param, 3.0) for name, param in model.state_dict().items()}
    CHANGES[how](model, values)
    optimizer.zero_grad()
    step(model, optimizer, size=0.0)
    master = optimizer.transform_state.master
    for name, param in model.named_parameters():
        assert torch.allclose(param.float(), values[name].float(), atol=2e-2)
        assert torch.allclose(master[name], values[name].float(), atol=2e-2)


@torch.no_grad()
def test_weights_that_are_clipped_stay_clipped_and_others_keep_their_lost_bits():
    model, optimizer = made()
    for _ in range(3):
        step(model, optimizer)
    before = {name: leaf.clone() for name, leaf in optimizer.transform_state.master.items()}
    is_large = {name: param > 0.2 for name, param in model.named_parameters()}
    for param in model.parameters():
        param.clamp_(max=0.2)
    _, state, params, _ = optimizer.snapshot()
    zeros = {name: torch.zeros_like(param) for name, param in params.items()}
    state = state._replace(inner=mfx.core.EmptyState())
    master = mfx.master_params(mfx.scale(-1.0)).update(zeros, state, params)[1].master
    for name, clipped in is_large.items():
        assert torch.equal(master[name][~clipped], before[name][~clipped])
        assert torch.equal(master[name][clipped], params[name][clipped].float())


def test_steps_alone_never_change_the_master_copy():
    """The copy is a run in float32, and the parameters are the rounded copy."""
    model, optimizer = made(mfx.master_params(mfx.chain(mfx.momentum(0.5), mfx.scale(-1e-3))))
    twin = {name: param.detach().float() for name, param in model.named_parameters()}
    tx = mfx.chain(mfx.momentum(0.5), mfx.scale(-1e-3))
    state = tx.init(twin)
    for number in range(20):
        step(model, optimizer, size=0.25 + number)
        updates, state = tx.update(
            {n: torch.full_like(p, 0.25 + number) for n, p in twin.items()}, state, twin
        )
        twin = mfx.apply_updates(twin, updates)
    for name, param in model.named_parameters():
        torch.testing.assert_close(optimizer.transform_state.master[name], twin[name])
        assert torch.equal(param, optimizer.transform_state.master[name].to(BF16))


LOST: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Muon": lambda model: mfx.Muon(model, labels={"weight": "muon", "bias": "adamw"}),
    "adamw": lambda model: mfx.TransformOptimizer(model, mfx.adamw(1e-3, weight_decay=0.1)),
    "a schedule": lambda model: mfx.TransformOptimizer(
        model, mfx.adamw(mfx.warmup_cosine_decay_schedule(1e-3, 2, 10), weight_decay=0.1)
    ),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", LOST)
def test_a_decay_that_rounding_removes_is_warned_of(name: str, dtype: torch.dtype):
    with pytest.warns(
        UserWarning,
        match=r"weight decay has no effect on 2 of 2 .* in float32 .*master_params\(tx\)",
    ):
        LOST[name](nn.Linear(4, 4, dtype=dtype))


def _assigned(model: nn.Linear) -> None:
    model.load_state_dict(
        {name: leaf.to(BF16) for name, leaf in model.state_dict().items()}, assign=True
    )


CONVERTED: dict[str, tuple[str, Callable[[nn.Linear], Any]]] = {
    "to(torch.bfloat16)": ("cpu", lambda model: model.to(BF16)),
    "half()": ("cpu", lambda model: model.half()),
    "load_state_dict(assign=True)": ("cpu", _assigned),
    "to_empty()": ("meta", lambda model: model.to(BF16).to_empty(device="cpu")),
}


@pytest.mark.parametrize("how", CONVERTED)
def test_a_model_that_is_converted_after_construction_is_warned_of_once(how: str):
    device, convert = CONVERTED[how]
    model = nn.Linear(4, 4, device=device)
    optimizer = LOST["adamw"](model)
    convert(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="weight decay has no effect on 2 of 2") as warned:
        optimizer.step()
    assert len(warned) == 1
    optimizer.step()


@pytest.mark.parametrize("how", ["to(torch.bfloat16)", "half()", "load_state_dict(assign=True)"])
def test_a_model_that_is_converted_after_a_step_is_warned_of_once(how: str):
    model = nn.Linear(4, 4)
    optimizer = LOST["adamw"](model)
    for converts in (False, True):
        if converts:
            CONVERTED[how][1](model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if not converts:
            optimizer.step()
            continue
        with pytest.warns(UserWarning, match="weight decay has no effect on 2 of 2") as warned:
            optimizer.step()
        assert len(warned) == 1
    optimizer.step()


def test_a_copy_of_an_optimizer_warns_of_a_model_that_is_converted():
    model = nn.Linear(4, 4)
    model, optimizer = copy.deepcopy((model, LOST["adamw"](model)))
    model.to(BF16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="weight decay has no effect on 2 of 2"):
        optimizer.step()


def test_a_model_that_is_converted_is_not_warned_of_at_the_low_rate_of_a_warmup():
    model = nn.Linear(4, 4)
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1, weight_decay=0.1))
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001)
    model.to(BF16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings(action="error"):
        optimizer.step()


@pytest.mark.parametrize("value", ["0.1", None, [0.1], 1j, torch.ones(2)])
@pytest.mark.parametrize("is_later", [False, True])
def test_an_entry_weight_decay_that_no_transform_reads_is_the_users(value: Any, is_later: bool):
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    model = nn.Linear(4, 4, dtype=torch.float32 if is_later else BF16)
    optimizer = mfx.TransformOptimizer([{"params": model, "weight_decay": value}], tx)
    model.to(BF16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert repr(optimizer.param_groups[0]["weight_decay"]) == repr(value)


@pytest.mark.parametrize("value", ["0.1", None, [0.1], 1j, torch.ones(2)])
def test_a_wrong_weight_decay_of_bfloat16_parameters_is_refused_by_its_key(value: Any):
    model = nn.Linear(4, 4, dtype=BF16)
    with pytest.raises((TypeError, ValueError), match="weight_decay"):
        mfx.TransformOptimizer(
            [{"params": model, "weight_decay": value}], mfx.adamw(0.1, weight_decay=0.1)
        )


KEPT: dict[str, Callable[[], Any]] = {
    "float32": lambda: mfx.TransformOptimizer(nn.Linear(4, 4), mfx.adamw(1e-3, weight_decay=0.1)),
    "master_params": lambda: made(mfx.master_params(mfx.adamw(1e-3, weight_decay=0.1))),
    "no decay": lambda: made(mfx.adamw(1e-3, weight_decay=0.0)),
    "a large decay": lambda: made(mfx.adamw(0.1, weight_decay=0.1)),
    "frozen": lambda: mfx.TransformOptimizer(
        nn.Linear(4, 4, dtype=BF16).requires_grad_(False), mfx.adamw(1e-3, weight_decay=0.1)
    ),
    "numbers on the meta device": lambda: mfx.TransformOptimizer(
        nn.Linear(4, 4, dtype=BF16, device="meta"),
        mfx.as_tensors(mfx.adamw(1e-3, weight_decay=0.1), device="meta"),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_no_warning_where_the_decay_has_an_effect(name: str):
    with warnings.catch_warnings(action="error"):
        KEPT[name]()


def part_unchanged_by_a_step(rate: float) -> tuple[list[str], float]:
    """Return the warnings of Muon for a matrix in bf16, as models are initialized, and the part of it that stays."""
    torch.manual_seed(0)
    weight = nn.Parameter((0.02 * torch.randn(64, 64)).to(BF16))
    before = weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = mfx.Muon({"weight": weight}, rate, weight_decay=0.0, labels={"weight": "muon"})
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    return [str(warning.message) for warning in caught], (weight == before).float().mean().item()


def test_updates_that_rounding_removes_are_warned_of_without_a_decay():
    """Measured: 17 % of the elements stay at the rate 1e-3, 77 % at 1e-4, and 95 % at 2e-5."""
    texts, unchanged = part_unchanged_by_a_step(1e-3)
    assert texts == []
    assert unchanged < 0.3
    for rate in (1e-4, 2e-5):
        (text,) = part_unchanged_by_a_step(rate)[0]
        assert "most updates have no effect on 1 of 1 parameters, such as 'weight'" in text
        assert "muonfx.master_params(tx)" in text
        assert part_unchanged_by_a_step(rate)[1] > 0.6


def _made_of_fake_tensors() -> mfx.TransformOptimizer:
    with FakeTensorMode():
        return mfx.TransformOptimizer(
            nn.Linear(4, 4, dtype=BF16), mfx.adamw(1e-6, weight_decay=0.0)
        )


UPDATES_KEPT: dict[str, Callable[[], Any]] = {
    "float32": lambda: mfx.TransformOptimizer(nn.Linear(4, 4), mfx.adamw(1e-6, weight_decay=0.0)),
    "master_params": lambda: made(mfx.master_params(mfx.adamw(1e-6, weight_decay=0.0))),
    "zeros": lambda: mfx.TransformOptimizer(
        {"w": nn.Parameter(torch.zeros(4, dtype=BF16))}, mfx.adamw(1e-6, weight_decay=0.0)
    ),
    "only a norm": lambda: mfx.TransformOptimizer(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16(),
        mfx.adamw(1e-3, weight_decay=0.0),
    ),
    "memory without values": lambda: mfx.TransformOptimizer(
        {"w": nn.Parameter(torch.full((4,), 1e30, dtype=BF16))}, mfx.adamw(1e-3, weight_decay=0.0)
    ),
    "an unknown transform": lambda: mfx.TransformOptimizer(
        nn.Linear(4, 4, dtype=BF16),
        mfx.chain(mfx.scale_by_sign(), mfx.scale_by_learning_rate(1e-6)),
    ),
    "the meta device": lambda: mfx.TransformOptimizer(
        nn.Linear(4, 4, dtype=BF16, device="meta"), mfx.adamw(1e-6, weight_decay=0.0)
    ),
    "fake tensors": _made_of_fake_tensors,
    "no elements": lambda: mfx.TransformOptimizer(
        {"w": nn.Parameter(torch.ones(3, 0, 0, dtype=BF16))}, mfx.muon(1e-6)
    ),
}


@pytest.mark.parametrize("name", UPDATES_KEPT)
def test_no_warning_where_updates_may_have_an_effect(name: str):
    with warnings.catch_warnings(action="error"):
        UPDATES_KEPT[name]()
