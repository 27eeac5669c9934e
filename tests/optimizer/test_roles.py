"""A learning rate and a weight decay for each role of a parameter: `muon_with_adamw` and `Muon`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonfx as mfx
from muonfx.routing import Labels, default_labels, default_labels_by_name

FP32 = mfx.orthogonalize(dtype=torch.float32)
RATES = {"embedding": 0.3, "head": 0.004, "vector": 0.01}
DECAYS = {"embedding": 0.0, "head": 0.5, "vector": 0.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.up(self.norm(self.embed(tokens))).relu())


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def trained(tx: mfx.Transform, params: dict[str, Tensor]) -> dict[str, Tensor]:
    state = tx.init(params)
    for step in range(3):
        torch.manual_seed(step)
        grads = {name: torch.randn_like(param) for name, param in params.items()}
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        assert torch.equal(found[name], wanted[name]), name


def by_hand(labels: Labels, rates: dict[str, Any], decays: dict[str, float]) -> mfx.Transform:
    """Muon at the rate 0.02 and an AdamW for each role, written without the recipe."""
    matrices = mfx.muon(0.02, weight_decay=0.1, orthogonalize=FP32)
    elements = {role: mfx.adamw(rates[role], b2=0.95, weight_decay=decays[role]) for role in rates}
    return mfx.partition({"hidden": matrices, **elements}, labels)


@pytest.mark.parametrize("head", [0.004, mfx.linear_schedule(0.004, 0.0, 3)])
def test_numbers_by_role_equal_a_partition_by_hand(head: Any):
    params, labels = params_of(Net()), default_labels(Net(), roles=True)
    rates = {**RATES, "head": head}
    for given, decays in ((DECAYS, DECAYS), (0.1, dict.fromkeys(RATES, 0.1))):
        tx = mfx.muon_with_adamw(
            0.02, rates, adamw_weight_decay=given, labels=labels, orthogonalize=FP32
        )
        assert_same(trained(tx, params), trained(by_hand(labels, rates, decays), params))
    tx = mfx.muon_with_adamw(0.02, adamw_weight_decay=DECAYS, labels=labels, orthogonalize=FP32)
    assert_same(
        trained(tx, params), trained(by_hand(labels, dict.fromkeys(DECAYS, 0.02), DECAYS), params)
    )


def test_equal_numbers_by_role_equal_one_number():
    params = params_of(Net())
    one = mfx.muon_with_adamw(0.02, 0.01, labels=default_labels(Net()), orthogonalize=FP32)
    roles = default_labels(Net(), roles=True)
    several = mfx.muon_with_adamw(
        0.02, dict.fromkeys(RATES, 0.01), labels=roles, orthogonalize=FP32
    )
    assert_same(trained(several, params), trained(one, params))
    assert pickle.loads(pickle.dumps(several)) == several


def test_labels_of_your_own_have_their_numbers():
    labels = {"a": "hidden", "b": "slow", "c": "fast", "d": None}
    tx = mfx.muon_with_adamw(
        0.02, {"slow": 0.1, "fast": 1.0}, labels=labels, adamw_weight_decay=0.0
    )
    updates, _ = tx.update(ones := {name: torch.ones(2, 2) for name in labels}, tx.init(ones), ones)
    assert updates["d"] is None
    assert torch.allclose(10 * updates["b"], updates["c"])


ROLES = default_labels(Net(), roles=True)
EXPECTED = (
    r"expected one for each label of AdamW's parameters .*, 'embedding', 'head', 'vector': correct"
)
NO_ROLE = r"'muon' is no role, expected 'hidden' .*: give labels=muonfx.default_labels\(model, roles=True\)"
WRONG = [
    (
        {"labels": ROLES},
        r"parameters have the labels 'embedding', .*, expected 'muon', 'adamw' or None: change .*",
    ),
    (
        {"rates": {"embedding": 0.3, "vector": 0.1}, "labels": ROLES},
        rf"has numbers for .*, 'vector', {EXPECTED}",
    ),
    (
        {"rates": RATES | {"other": 0.1}, "labels": ROLES},
        rf"has numbers for .*, 'other', {EXPECTED}",
    ),
    (
        {"rates": RATES | {"hidden": 0.1}, "labels": ROLES},
        rf"has numbers for .*, 'hidden', {EXPECTED}",
    ),
    (
        {"rates": {"embeding": 0.3, "head": 0.01, "vector": 0.02}, "labels": ROLES},
        rf"has numbers for 'embeding', .*, {EXPECTED}",
    ),
    (
        {"rates": RATES, "decays": {"head": 0.1}, "labels": ROLES},
        rf"adamw_weight_decay has numbers for 'head', {EXPECTED}",
    ),
    (
        {"rates": {"embedings": 0.3, "heads": 0.01, "vector": 0.02}, "labels": ROLES},
        r"correct the dict \(did you mean 'embedding'\?\) \(did you mean 'head'\?\), or the labels, .*roles=True\)$",
    ),
    (
        {"rates": RATES, "labels": {**ROLES, "head.weight": "embedding"}},
        r"has numbers for .*'head'.*correct the dict, .*tied to the embedding has the label 'embedding'",
    ),
    ({"rates": RATES, "labels": default_labels(Net())}, NO_ROLE),
    ({"rates": {"muon": 0.02, "adamw": 0.01}, "labels": default_labels(Net())}, NO_ROLE),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_labels_and_numbers_that_do_not_fit_are_an_error_before_init(
    given: dict[str, Any], message: str
):
    labels, rates, decays = given["labels"], given.get("rates"), given.get("decays", 0.1)
    with pytest.raises(ValueError, match=f"^muon_with_adamw: .*{message}"):
        mfx.muon_with_adamw(0.02, rates, adamw_weight_decay=decays, labels=labels)
    with pytest.raises(ValueError, match=f"^Muon: .*{message}"):
        mfx.Muon(Net(), adamw_lr=rates, adamw_weight_decay=decays, labels=labels)


def test_a_number_of_another_type_is_an_error_that_names_its_role():
    with pytest.raises(
        TypeError,
        match=r"^muon_with_adamw: adamw_learning_rate\['head'\] must be a number .*'fast'",
    ):
        mfx.muon_with_adamw(0.02, {**RATES, "head": "fast"}, labels=ROLES)  # pyright: ignore
    with pytest.raises(
        TypeError, match=r"^Muon: adamw_weight_decay\['head'\] must be a number .*None"
    ):
        mfx.Muon(Net(), adamw_weight_decay={**RATES, "head": None})  # pyright: ignore


def test_labels_by_a_function_are_checked_when_they_are_known():
    for labels in (default_labels, default_labels_by_name):
        for rates in (RATES, {"muon": 0.02, "adamw": 0.01}, {"adamw": 0.01}):
            with pytest.raises(
                ValueError,
                match=f"^muon_with_adamw: adamw_learning_rate has numbers by role.*{NO_ROLE}",
            ):
                mfx.muon_with_adamw(0.02, rates, labels=labels)
    # The labels are not known yet, but AdamW would train "muon".
    with pytest.raises(ValueError, match=NO_ROLE):
        mfx.muon_with_adamw(
            0.02, {"muon": 0.02, "adamw": 0.01}, labels=lambda p: default_labels_by_name(p)
        )
    tx = mfx.muon_with_adamw(
        0.02, {"embedding": 0.3}, labels=lambda p: default_labels_by_name(p, roles=True)
    )
    with pytest.raises(
        ValueError, match=r"has the label '.*', expected a label that has .*, 'embedding', 'hidden'"
    ):
        tx.init(params_of(Net()))


def test_muon_has_a_group_for_each_role_whose_rate_a_scheduler_changes():
    model = Net()
    optimizer = mfx.Muon(model, 0.02, adamw_lr=RATES, adamw_weight_decay=DECAYS, orthogonalize=FP32)
    assert [group["label"] for group in optimizer.param_groups] == ["hidden", *RATES]
    assert {group["label"]: group["lr"] for group in optimizer.param_groups} == {
        "hidden": 0.02,
        **RATES,
    }
    assert {group["label"]: group["weight_decay"] for group in optimizer.param_groups} == {
        "hidden": 0.1,
        **DECAYS,
    }
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.arange(16)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [
        0.01,
        *(rate / 2 for rate in RATES.values()),
    ]


def test_muon_steps_like_the_recipe_and_loads_its_state():
    model, other = Net(), Net()
    options: dict[str, Any] = {"adamw_lr": RATES, "orthogonalize": FP32}
    optimizer = mfx.Muon(model, 0.02, **options)
    tx = by_hand(default_labels(model, roles=True), RATES, dict.fromkeys(RATES, 0.1))
    params = params_of(model)
    state = tx.init(params)
    for _ in range(2):
        model(torch.arange(16)).square().sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(params_of(model), params)
    loaded = mfx.Muon(other, 0.02, **options)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    for own, its in ((model, optimizer), (other, loaded)):
        own(torch.arange(16)).square().sum().backward()
        its.step()
    assert_same(params_of(other), params_of(model))


def test_parameters_that_muon_gets_later_have_the_rate_of_their_role():
    model = Net()
    optimizer = mfx.Muon(model, 0.02, adamw_lr=RATES)
    late = {
        "late.weight": nn.Parameter(torch.zeros(4, 4)),
        "late.bias": nn.Parameter(torch.zeros(4)),
    }
    with pytest.warns(UserWarning, match="saw names and shapes"):
        optimizer.add_param_group({"params": late})
    found = {
        name: group["label"] for group in optimizer.param_groups for name in group["param_names"]
    }
    assert (found["late.weight"], found["late.bias"]) == ("hidden", "vector")
    with pytest.raises(
        ValueError, match=r"'router.weight' has the label 'other', expected a label that has"
    ):
        optimizer.add_param_group({"params": {"router.weight": nn.Parameter(torch.zeros(4, 4))}})
