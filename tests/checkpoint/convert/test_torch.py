"""Runs of other optimizers go on here: torch.optim's Muon and AdamW live, in either direction, and others as recorded.

scripts/record_conversions.py recorded eight steps; here three of them are followed by five.
"""

import copy
import json
import runpy
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import muonfx as mfx
from muonfx.checkpoint import convert
from tests.processes import Here, World


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(up=nn.Linear(6, 9), act=nn.Tanh(), down=nn.Linear(9, 4))
    return nn.Sequential(layers).to(dtype)


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, in two groups, and AdamW for the rest."""
    groups = [
        {"params": [model.up.weight]},
        {"params": [model.down.weight], "lr": 0.03, "adjust_lr_fn": "match_rms_adamw"},
    ]
    biases = [model.up.bias, model.down.bias]
    return [
        torch.optim.Muon(groups, lr=0.02),
        torch.optim.AdamW(biases, lr=0.01, betas=(0.8, 0.9), eps=1e-7),
    ]


def loss_of(params: dict[str, Tensor], model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(model.up.weight.dtype)
    return (torch.func.functional_call(model, params, (x,)) - x[:, :4].sin()).square().mean()


def run_torch(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(dict(model.named_parameters()), model, step).backward()
        for optimizer in optimizers:
            optimizer.step()


def run_ours(
    tx: mfx.Transform, state: Any, params: dict[str, Tensor], model: nn.Module, steps: range
) -> Any:
    for step in steps:
        grads = torch.func.grad(lambda params, step=step: loss_of(params, model, step))(params)
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params, state


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.fixture(autouse=True)
def iterate_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch iterates in bf16, in which a wrong momentum can look right."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)


def near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(
        found, {name: value.detach() for name, value in wanted.items()}, rtol=2e-5, atol=2e-5
    )


def test_a_run_goes_on_there_and_here():
    model = model_of()
    optimizers = optimizers_of(model)
    run_torch(model, optimizers, range(3))
    params = dict(model.named_parameters())
    tx = convert.recipe("torch", optimizers, params, dtype=torch.float32)
    ours, state = run_ours(
        tx, convert.read("torch", optimizers, tx, params), copied(model), model, range(3, 6)
    )
    run_torch(model, optimizers, range(3, 6))
    near(ours, params)
    again = convert.read("torch", optimizers, tx, params)
    torch.testing.assert_close(mfx.tree.leaves(state), mfx.tree.leaves(again), rtol=1e-4, atol=1e-6)
    # and back
    model.load_state_dict(ours)
    others = optimizers_of(model)
    for optimizer in others:
        optimizer.load_state_dict(convert.write("torch", state, optimizer, params))
    run_torch(model, others, range(6, 10))
    near(run_ours(tx, state, ours, model, range(6, 10))[0], params)


def test_the_recipe_has_a_chain_for_each_set_of_numbers():
    model = model_of()
    params = dict(model.named_parameters())
    tx = convert.recipe("torch", optimizers_of(model), params)
    assert list(tx.arguments["transforms"]) == ["adamw", "muon", "muon_2"]
    labels = {
        "up.weight": "muon",
        "down.weight": "muon_2",
        "up.bias": "adamw",
        "down.bias": "adamw",
    }
    assert tx.arguments["labels"] == labels
    numbers = mfx.hyperparams(tx)
    expected = {
        "muon_2.scale_by_learning_rate.learning_rate": 0.03,
        "adamw.scale_by_adam.b1": 0.8,
        "adamw.scale_by_adam.eps": 1e-7,
    }
    assert {name: numbers[name] for name in expected} == expected
    own = torch.optim.Muon(
        [model.up.weight], ns_steps=3, ns_coefficients=(2.0, -1.5, 0.5), nesterov=False
    )
    chain = convert.recipe("torch", own, params)
    assert repr(chain).startswith(
        "chain(momentum(nesterov=False), orthogonalize(coefficients=((2.0, -1.5, 0.5),"
    )


def test_a_state_dict_has_its_names_or_is_given_them():
    model = model_of()
    params = dict(model.named_parameters())
    named, unnamed = (
        torch.optim.AdamW(model.named_parameters()),
        torch.optim.AdamW(model.parameters()),
    )
    for optimizer in (named, unnamed):
        run_torch(model, [optimizer], range(1))
    tx = convert.recipe("torch", named.state_dict(), params)
    for optimizer, names in ((named, None), (unnamed, list(params))):
        state = convert.read("torch", optimizer.state_dict(), tx, params, names=names)
        assert torch.equal(
            state["scale_by_adam"].mu["up.bias"], optimizer.state[model.up.bias]["exp_avg"]
        )
    for names, message in (
        (None, "found no names for 4 parameters: pass names="),
        (list(params)[1:], "found 3 names for 4 parameters"),
        (["elsewhere", *list(params)[1:]], "found the names 'elsewhere', expected names of params"),
    ):
        with pytest.raises(ValueError, match=message):
            convert.read("torch", unnamed.state_dict(), tx, params, names=names)


def test_several_state_dicts_have_lists_of_names():
    model = model_of()
    params = dict(model.named_parameters())
    optimizers = optimizers_of(model)
    run_torch(model, optimizers, range(2))
    tx = convert.recipe("torch", optimizers, params)
    expected = mfx.tree.leaves(convert.read("torch", optimizers, tx, params))
    saved = [optimizer.state_dict() for optimizer in optimizers]
    names = [["up.weight", "down.weight"], ["up.bias", "down.bias"]]
    assert convert.recipe("torch", saved, params, names=names) == tx
    assert bits_equal(
        mfx.tree.leaves(convert.read("torch", saved, tx, params, names=names)), expected
    )
    with pytest.raises(
        ValueError, match=r"found 4 names for 2 parameters: .*for several, a list of such lists"
    ):
        convert.read("torch", saved, tx, params, names=[*names[0], *names[1]])
    with pytest.raises(ValueError, match="found 1 lists of names for 2 optimizers or state dicts"):
        convert.read("torch", saved, tx, params, names=names[:1])


def test_the_names_in_a_state_dict_of_torch_checkpoints_are_used():
    model = model_of()
    params = dict(model.named_parameters())
    optimizers = optimizers_of(model)
    run_torch(model, optimizers, range(2))
    tx = convert.recipe("torch", optimizers, params)
    expected = convert.read("torch", optimizers, tx, params)
    by_name = get_optimizer_state_dict(model, optimizers)
    assert convert.recipe("torch", by_name, params) == tx
    assert bits_equal(
        mfx.tree.leaves(convert.read("torch", by_name, tx, params)), mfx.tree.leaves(expected)
    )
    written = convert.write("torch", expected, by_name, params)
    assert torch.equal(
        written["state"]["up.weight"]["momentum_buffer"],
        by_name["state"]["up.weight"]["momentum_buffer"],
    )


def bits_equal(leaves: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(leaf, other) for leaf, other in zip(leaves, others, strict=True))


def continue_shards(here: Here) -> None:
    """Convert live optimizers of a model under FSDP2, and compare further steps of both."""
    model = model_of()
    fully_shard(model.up, mesh=here.mesh)
    fully_shard(model, mesh=here.mesh)
    optimizers = optimizers_of(model)
    train_shards(model, optimizers, range(3))
    params = dict(model.named_parameters())
    tx = convert.recipe("torch", optimizers, params, dtype=torch.float32)
    state = convert.read("torch", optimizers, tx, params)
    with pytest.raises(
        ValueError, match=r"found a DTensor, expected a Tensor, as in params: .*full_tensor"
    ):
        convert.read(
            "torch",
            optimizers[1],
            mfx.adamw(0.01),
            dict(model_of().named_parameters()),
            names=["up.bias", "down.bias"],
        )
    copy_of_model = model_of()
    fully_shard(copy_of_model.up, mesh=here.mesh)
    fully_shard(copy_of_model, mesh=here.mesh)
    for name, param in copy_of_model.named_parameters():
        param.data.copy_(params[name].detach())
    ours = mfx.TransformOptimizer(copy_of_model, tx)
    ours.load_transform_state(state)
    train_shards(model, optimizers, range(3, 6))
    train_shards(copy_of_model, [ours], range(3, 6))
    for name, param in copy_of_model.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(), params[name].full_tensor(), rtol=2e-2, atol=2e-3
        )


def train_shards(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        (model(x) - x[:, :4].sin()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.dist
def test_live_optimizers_under_fsdp2_are_converted_without_gathering(pair: World):
    pair.check(2, continue_shards)


def switch_from_adamw(here: Here, path: Path) -> None:
    """Continue AdamW by Muon: all that AdamW still trains keeps its moments, and the momentum of Muon is zero."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(up=nn.Linear(6, 9), mid=nn.Linear(9, 9), head=nn.Linear(9, 4))
    )
    fully_shard(model, mesh=here.mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    train_shards(model, [adamw], range(3))
    params = dict(model.named_parameters())
    tx = convert.recipe("torch", adamw, params)
    same = mfx.TransformOptimizer(model, tx)
    same.load_transform_state(convert.read("torch", adamw, tx, params))
    saved = mfx.checkpoint.save(path / "adamw", same)
    optimizer = mfx.Muon(model, lr=0.01, adamw_lr=0.02)
    account = mfx.checkpoint.load_changed(saved, optimizer)
    labels = mfx.describe(optimizer).labels
    assert set(labels.values()) == {"muon", "adamw"}
    for name, param in params.items():
        if labels[name] == "muon":
            assert f"muon/momentum/trace/{name}" in account.new
            assert not optimizer.state[param]["muon.momentum.trace"].full_tensor().any()
        else:
            state = optimizer.state[param]
            assert state["adamw.scale_by_adam.count"] == 3
            for moment, key in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
                found = state[f"adamw.scale_by_adam.{moment}"].full_tensor()
                assert torch.equal(found, adamw.state[param][key].full_tensor())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    train_shards(model, [optimizer], range(3, 5))


@pytest.mark.dist
def test_adamw_continues_as_muon_and_the_rest_keeps_its_moments_on_ranks(
    pair: World, tmp_path: Path
):
    pair.check(2, switch_from_adamw, path=tmp_path)


def test_a_wider_state_is_exact_and_a_narrower_one_refused():
    model = model_of(torch.bfloat16)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    wide = mfx.scale_by_adam()
    state = convert.read("torch", optimizer, wide, params)
    assert state.mu["up.weight"].dtype == torch.float32
    assert torch.equal(state.mu["up.weight"], optimizer.state[model.up.weight]["exp_avg"].float())
    optimizer.state[model.up.weight]["exp_avg"] = torch.zeros(9, 6)
    with pytest.raises(
        ValueError, match=r"mu/up.weight: would narrow from torch.float32 to torch.bfloat16"
    ):
        convert.read("torch", optimizer, mfx.scale_by_adam(mu_dtype=None, nu_dtype=None), params)


def test_state_of_float64_parameters_arrives_whole_and_goes_on_as_torch_does():
    model = model_of(torch.float64)
    params, optimizer = (
        dict(model.named_parameters()),
        torch.optim.AdamW(model.named_parameters(), lr=1e-2),
    )
    run_torch(model, [optimizer], range(3))
    tx = convert.recipe("torch", optimizer, params)
    ours, _ = run_ours(
        tx, convert.read("torch", optimizer, tx, params), copied(model), model, range(3, 6)
    )
    run_torch(model, [optimizer], range(3, 6))
    torch.testing.assert_close(ours, copied(model), rtol=1e-12, atol=1e-12)


def saved(entry: Any, group: Any = None) -> dict[str, Any]:
    adamw = {
        "params": [0],
        "param_names": ["w"],
        "amsgrad": False,
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
    }
    return {"state": {0: entry}, "param_groups": [{**adamw, "weight_decay": 0.0, **(group or {})}]}


ENTRY = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(2.0)}
PARAMS = {"w": torch.zeros(3)}
NAMED = {"params": [0], "param_names": ["w"]}


@pytest.mark.parametrize(
    ("source", "tx", "message"),
    [
        (
            saved({**ENTRY, "exp_avg": torch.ones(4)}),
            mfx.scale_by_adam(),
            r"mu/w: shape \(4,\), expected \(3,\)",
        ),
        (saved(ENTRY), mfx.momentum(), r"trace/w: the source has a adamw state"),
        (saved(ENTRY), mfx.scale(1.0), r"'w' has a adamw state that the transform does not keep"),
        (
            saved(ENTRY),
            mfx.momentum(heavy_ball=True),
            r"sums gradients, expected an average .*momentum\(heavy_ball=False\)$",
        ),
        (
            saved(ENTRY),
            mfx.chain(mfx.scale_by_adam(), mfx.ema_params()),
            r"ema_params: found a EmaParamsState, which has no counterpart",
        ),
        (saved(ENTRY), mfx.scale_by_adam(mu_dtype=mfx.int8()), r"states in eight bits"),
        (
            saved({}, {"amsgrad": True}),
            mfx.scale_by_adam(),
            r"count: the source does not count steps; give step=",
        ),
        (
            {"state": {}, "param_groups": [{**NAMED, "nesterov": 1}]},
            mfx.momentum(),
            r"found one with the keys",
        ),
        (
            [saved(ENTRY), saved(ENTRY)],
            mfx.scale_by_adam(),
            r"found 'w' in two optimizers or groups",
        ),
        ({"model": 1}, mfx.momentum(), r"expected an optimizer or its state_dict\(\), found dict"),
    ],
)
def test_what_does_not_fit_is_named(source: Any, tx: mfx.Transform, message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        convert.read("torch", source, tx, PARAMS)


CONV = {
    "params": [0],
    "use_muon": True,
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "param_names": ["conv"],
}
KELLER = {"state": {0: {"momentum_buffer": torch.ones(4, 3, 2, 2)}}, "param_groups": [CONV]}
OF_CONV = {"conv": torch.zeros(4, 3, 2, 2)}


@pytest.mark.parametrize(
    ("format", "source", "params", "message"),
    [
        (
            "torch",
            saved(ENTRY, {"amsgrad": True}),
            PARAMS,
            "'w': found amsgrad, without an equivalent in muonfx",
        ),
        (
            "torch",
            saved(ENTRY, {"maximize": True}),
            PARAMS,
            "'w': found maximize, without an equivalent in muonfx",
        ),
        (
            "torch",
            {"state": {}, "param_groups": [{**NAMED, "amsgrad": False}]},
            PARAMS,
            "'w': its group in torch.optim has no 'betas', only",
        ),
        (
            "torch",
            torch.optim.Muon([("w", torch.nn.Parameter(torch.randn(8, 4)))], lr=0.1, eps=1e3),
            {"w": torch.zeros(8, 4)},
            "eps=1000.* has no equivalent in muonfx",
        ),
        (
            "keller",
            KELLER,
            OF_CONV,
            r"'conv': shape \(4, 3, 2, 2\) has no equivalent .* scales updates by the sides of the kernel",
        ),
        ("kelller", {}, {}, r"format: found 'kelller', expected one of .* \(did you mean 'keller'"),
    ],
)
def test_what_has_no_chain_is_named(format: Any, source: Any, params: Any, message: str):
    with pytest.raises(ValueError, match=message):
        convert.recipe(format, source, params)


def test_a_convolution_of_kellers_has_a_state():
    assert convert.read("keller", KELLER, mfx.momentum(), OF_CONV).trace["conv"].sum() == 48


def test_parameters_at_different_steps_need_a_decision():
    both = {"v": torch.zeros(3), "w": torch.zeros(3)}
    source = saved(ENTRY, {"params": [0, 1], "param_names": ["w", "v"]})
    source["state"][1] = {**ENTRY, "step": torch.tensor(7.0)}
    with pytest.raises(
        ValueError, match=r"count is one for all parameters, the source has 2 \('w'\), 7 \('v'\)"
    ):
        convert.read("torch", source, mfx.scale_by_adam(), both)
    assert int(convert.read("torch", source, mfx.scale_by_adam(), both, step=7).count) == 7
    with pytest.raises(
        ValueError, match="step: found 5, but the source counts 2 steps; leave step= out"
    ):
        convert.read("torch", saved(ENTRY), mfx.scale_by_adam(), PARAMS, step=5)


def test_a_schedule_goes_on_where_it_was():
    tx = mfx.chain(
        mfx.scale_by_adam(), mfx.scale_by_learning_rate(mfx.cosine_decay_schedule(1.0, 10))
    )
    state = convert.read("torch", saved(ENTRY), tx, PARAMS)
    assert int(state["scale_by_learning_rate"].count) == 2
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(mfx.cosine_decay_schedule(1.0, 10)))
    group = {"params": [0], "param_names": ["w"], "ns_coefficients": (3.4445, -4.775, 2.0315)}
    muon = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [group]}
    with pytest.raises(
        ValueError,
        match=r"scale_by_learning_rate/count: the source does not count steps; give step=",
    ):
        convert.read("torch", muon, tx, PARAMS)
    assert int(convert.read("torch", muon, tx, PARAMS, step=5)["scale_by_learning_rate"].count) == 5


def test_nested_parameters_go_by_their_dotted_names():
    params = {"block": [{"w": torch.zeros(3)}]}
    source = saved(ENTRY, {"param_names": ["block.0.w"]})
    state = convert.read("torch", source, mfx.scale_by_adam(), params)
    assert torch.equal(state.mu["block"][0]["w"], ENTRY["exp_avg"])
    assert convert.write("torch", state, source, params)["state"][0]["step"] == 2


def test_what_a_torch_optimizer_would_not_get_is_named():
    with pytest.raises(
        ValueError, match=r"'w' has a adamw state in torch.optim; the muonfx state has a muon state"
    ):
        convert.write("torch", mfx.momentum().init(PARAMS), saved(ENTRY), PARAMS)


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / 10)


def scheduled(
    model: nn.Module, make: Any, steps: range
) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Optimizers of torch and their schedulers after some steps."""
    optimizers = optimizers_of(model)
    schedulers = [make(optimizer) for optimizer in optimizers]
    run_scheduled(model, optimizers, schedulers, steps)
    return optimizers, schedulers


def run_scheduled(model: nn.Module, optimizers: Any, schedulers: Any, steps: range) -> None:
    for step in steps:
        run_torch(model, optimizers, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()


def stepped(scheduler: Any, steps: int) -> Any:
    """Step a new scheduler as docs/conversion.md does."""
    with warnings.catch_warnings(action="ignore"):
        for _ in range(steps):
            scheduler.step()
    return scheduler


def rates_of(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> dict[str, float]:
    """The current rate of each parameter."""
    name_of = {param: name for name, param in model.named_parameters()}
    rates: dict[str, float] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rates.update({name_of[param]: group["lr"] for param in group["params"]})
    return rates


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 20),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, warmup),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "SequentialLR": sequential,
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_run_under_a_scheduler_goes_on_with_the_same_rates_and_steps(make: Any):
    model = model_of()
    optimizers, schedulers = scheduled(model, make, range(4))
    params = dict(model.named_parameters())
    tx = convert.recipe("torch", optimizers, params, rate="initial_lr", dtype=torch.float32)
    ours = copy.deepcopy(model)
    optimizer = mfx.TransformOptimizer(ours, tx)
    optimizer.load_transform_state(convert.read("torch", optimizers, tx, params))
    scheduler = stepped(make(optimizer), schedulers[0].last_epoch)
    for step in range(4, 8):
        assert rates_of([optimizer], ours) == rates_of(optimizers, model)
        run_scheduled(model, optimizers, schedulers, range(step, step + 1))
        run_scheduled(ours, [optimizer], [scheduler], range(step, step + 1))
    near(dict(ours.named_parameters()), params)


def test_the_one_group_of_moonlight_becomes_two_under_a_scheduler():
    run = recorded("moonlight")
    params, saved = shaped(run["params"]), tensors(run["state_dict"])
    (group,) = saved["param_groups"]
    base_rate = group["lr"]
    source = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=base_rate)
    theirs = stepped(lr_scheduler.LambdaLR(source, warmup), 4)
    group |= {"lr": source.param_groups[0]["lr"], "initial_lr": base_rate}
    tx = convert.recipe("moonlight", saved, params, names=run["names"], rate="initial_lr")
    weights = {name: torch.nn.Parameter(param) for name, param in params.items()}
    optimizer = mfx.TransformOptimizer(weights, tx)
    optimizer.load_transform_state(convert.read("moonlight", saved, tx, params, names=run["names"]))
    ours = stepped(lr_scheduler.LambdaLR(optimizer, warmup), theirs.last_epoch)
    for _ in range(7):
        assert [group["lr"] for group in optimizer.param_groups] == [
            source.param_groups[0]["lr"]
        ] * 2
        ours.step()
        theirs.step()


def test_a_rate_that_a_scheduler_changed_needs_a_decision():
    model = model_of()
    optimizers, _ = scheduled(model, SCHEDULERS["LambdaLR"], range(4))
    params = dict(model.named_parameters())
    message = r"changed the rate of 'up.weight' in torch.optim from 0.02 .* to 0.01 .*, and the chain has 0.01. Pass"
    with pytest.warns(UserWarning, match=message):
        tx = convert.recipe("torch", optimizers, params)
    assert convert.recipe("torch", optimizers, params, rate="lr") == tx
    rate = "muon.scale_by_learning_rate.learning_rate"
    assert mfx.hyperparams(tx)[rate] == 0.01
    assert (
        mfx.hyperparams(convert.recipe("torch", optimizers, params, rate="initial_lr"))[rate]
        == 0.02
    )
    # groups whose rates are equal at this step stay apart
    muon = optimizers[0]
    for group in muon.param_groups:
        group.update(lr=0.0, adjust_lr_fn=None)
    assert list(
        convert.recipe("torch", muon, params, rate="initial_lr").arguments["transforms"]
    ) == ["muon", "muon_2"]
    with pytest.raises(
        ValueError, match=r"'up.weight': its group in torch.optim has no 'initial_lr'"
    ):
        convert.recipe("torch", optimizers_of(model), params, rate="initial_lr")
    with pytest.raises(ValueError, match="rate: found 'base', expected 'lr' or 'initial_lr'"):
        convert.recipe("torch", optimizers, params, rate="base")


def test_a_sum_does_not_fit_the_average_of_muon():
    run = recorded("moonlight")
    weights = {name: torch.nn.Parameter(param) for name, param in shaped(run["params"]).items()}
    tx = mfx.muon_with_adamw(1e-3, labels=dict.fromkeys(weights, "muon"))
    message = r"averages gradients, expected a sum as in the source: use the chain of convert.recipe, .* muonfx.Muon"
    with pytest.raises(ValueError, match=message):
        convert.read("moonlight", tensors(run["state_dict"]), tx, weights, names=run["names"])


HERE = Path(__file__).parent
TOLERANCE = 1e-4
"""Of fp32, through an iteration that makes small errors larger; the originals were recorded in fp32 instead of bf16."""


RECORDER = SimpleNamespace(
    **runpy.run_path(str(HERE.parents[2] / "scripts" / "record_conversions.py"))
)


def shaped(flat: dict[str, list[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(flat[name]).view(shape) for name, shape in RECORDER.SHAPES.items()}


def recorded(kind: str) -> dict[str, Any]:
    return json.loads((HERE / "recorded" / f"{kind}.json").read_text(encoding="utf-8"))


def tensors(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with its indices and tensors, which JSON has as strings and lists."""
    entries = {
        int(index): {
            key: torch.tensor(value) if isinstance(value, list) else value
            for key, value in entry.items()
        }
        for index, entry in saved["state"].items()
    }
    return {"state": entries, "param_groups": saved["param_groups"]}


CASES = ("keller", "moonlight", "dion")


def go_on(
    tx: mfx.Transform, state: Any, params: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    for step in range(RECORDER.BEFORE, RECORDER.BEFORE + RECORDER.AFTER):
        updates, state = tx.update(shaped(RECORDER.gradients(step)), state, params)
        params = mfx.apply_updates(params, updates)
    return state, params


def require_near(
    found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor], tolerance: float
):
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
        require_near(
            go_on(tx, tx.init(params), params)[1], shaped(run["params_after"]), params, TOLERANCE
        )
    expected = convert.read(kind, tensors(run["state_dict_after"]), tx, params, names=run["names"])
    torch.testing.assert_close(
        mfx.tree.leaves(state), mfx.tree.leaves(expected), rtol=1e-5, atol=1e-6
    )


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
            assert torch.equal(
                torch.as_tensor(back["state"][index][key]), torch.as_tensor(value)
            ), (index, key)


def test_older_groups_of_keller_keep_their_numbers():
    group = {
        "params": [0],
        "lr": 0.02,
        "momentum": 0.95,
        "nesterov": False,
        "ns_steps": 3,
        "weight_decay": 0.0,
    }
    found = repr(
        convert.recipe(
            "keller", {"state": {}, "param_groups": [group]}, {"w": torch.zeros(3, 2)}, names=["w"]
        )
    )
    assert "nesterov=False" in found
    assert "steps=3" in found


def test_the_steps_of_dions_groups_are_read_and_written():
    run = recorded("dion")
    params, saved = shaped(run["params"]), tensors(run["state_dict"])
    steps = saved["param_groups"][0]["step"]
    del saved["state"][2]["step_dev"]  # earlier releases count in the groups alone
    recipe = convert.recipe("dion", saved, params, names=run["names"])
    schedule = mfx.scale(mfx.cosine_decay_schedule(1.0, 10))
    tx = mfx.chain(recipe, schedule)  # it counts the steps of the groups of Muon, too
    state = convert.read("dion", saved, tx, params, names=run["names"])
    assert int(state["partition"]["adamw"]["scale_by_adam"].count) == steps
    assert int(state["scale"].count) == steps

    new_groups = [{**group, "step": 0} for group in saved["param_groups"]]
    new = {"state": {}, "param_groups": new_groups}
    back = convert.write("dion", state, new, params, names=run["names"])
    assert back["param_groups"] == saved["param_groups"]
    assert all(group["step"] == 0 for group in new_groups)
