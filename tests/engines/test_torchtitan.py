"""`muonfx.engines.torchtitan` in torchtitan's own container, with its schedulers and its checkpoints."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import fields, make_dataclass
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import torchtitan as ours
from tests.engines.processes import launched, real, result_of

pytestmark = real("torchtitan", "spmd_types")
FP32 = 1e-6
"""The largest difference of parameters in five steps."""


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_are_those_of_one_optimizer_and_a_resumed_run_is_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    found = launched(
        "torchtitan_worker.py", size, ["container"], tmp_path_factory.mktemp(f"ranks{size}")
    )
    case = result_of(found, "container")
    assert case["worst"] <= FP32
    assert case["resumed"] == [True, True]
    warm, *loaded = case["logged"]
    # frozen parameters are in no group
    assert warm == pytest.approx({"lr/Muon/0": 0.02 / 2, "lr/Muon/1": 0.003 / 2})
    assert loaded == [pytest.approx({"lr/Muon/0": 0.02 * 2 / 3, "lr/Muon/1": 0.003 * 2 / 3})] * 2
    assert case["up"] == [
        "state.up.weight.adamw.scale_by_adam.count",
        "state.up.weight.muon.momentum.trace",
    ]


def test_fields_of_torchtitans_own_optimizers_are_refused() -> None:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
    ignored = {
        "param_groups": groups,
        "implementation": "foreach",
        "optimizer_factory_kwargs_by_name": {"AdamW": {}},
    }
    assert ignored.keys() == {one.name for one in fields(OptimizersContainer.Config)}
    for name, value in ignored.items():
        config: Any = ours.muon(0.02)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"{name}: found "):
            config.build(model_parts=[nn.Linear(2, 2)])


def test_a_state_dict_of_another_chain_is_reported_also_if_the_parts_are_divided_otherwise() -> (
    None
):
    def container(first: int, **options: Any) -> Any:
        layers = [(f"layer{index}", nn.Linear(4, 12)) for index in range(3)]
        parts = [
            nn.Sequential(OrderedDict(layers[:first])),
            nn.Sequential(OrderedDict(layers[first:])),
        ]
        return ours.muon(0.02, **options).build(model_parts=parts)

    def messages_of(old: Any, new: Any) -> list[str]:
        with warnings.catch_warnings(record=True, action="always") as caught:
            new.load_state_dict(old.state_dict())
        return [
            str(warning.message) for warning in caught if "another chain" in str(warning.message)
        ]

    view = mfx.MatrixView({"layer[01].weight": "(part=3 out) in -> part out in"})
    options = {"orthogonalize": mfx.orthogonalize(view=view)}
    # One of the parts has no parameter with this pattern.
    with warnings.catch_warnings(action="ignore"):
        old, same = container(1, **options), container(2, **options)
        plain, other = container(1), container(2)
    assert messages_of(old, same) == []
    assert messages_of(plain, other) == []
    (message,) = messages_of(old, other)
    assert "group 'muon', orthogonalize.view: MatrixView(" in message
    assert "'(part=3 out) in -> part out in'" in message
    earlier = {
        key: value for key, value in old.state_dict().items() if not key.endswith("chain_code")
    }
    other.load_state_dict(earlier)


def test_a_resumed_run_has_the_rates_of_the_code_in_every_step() -> None:
    from torchtitan.components.optimizer import LRSchedulersContainer

    def made(lr: float) -> tuple[Any, Any]:
        model = nn.Linear(4, 4)
        optimizers = ours.muon(lr, adamw_lr=0.4).build(model_parts=[model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
            optimizers=optimizers, training_steps=8
        )
        model(torch.ones(1, 4)).sum().backward()
        return optimizers, schedulers

    def trained(optimizers: Any, schedulers: Any) -> list[list[float]]:
        rates = []
        for _ in range(2):
            rates.append([group["lr"] for group in optimizers.optimizers[0].param_groups])
            optimizers.step()
            schedulers.step()
        return rates

    (saved, saved_schedulers), (resumed, schedulers) = made(0.1), made(0.2)
    assert trained(saved, saved_schedulers)[1] == [0.1 * 2 / 4, 0.4 * 2 / 4]
    difference = "group 'muon', lr: 0.1 in the file, 0.2 in the code; the code's are used"
    with pytest.warns(UserWarning, match=difference) as caught:
        resumed.load_state_dict(saved.state_dict())
    assert len(caught) == 1
    with warnings.catch_warnings(action="ignore"):  # torchtitan calls a method that torch warns of
        schedulers.load_state_dict(saved_schedulers.state_dict())
    assert trained(resumed, schedulers) == [[0.2 * 3 / 4, 0.4 * 3 / 4], [0.2, 0.4]]


def test_the_command_line_overrides_a_rate() -> None:
    import tyro
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.manager import custom_registry

    config = make_dataclass("Training", [("optimizer", OptimizersContainer.Config)])
    args = ["--optimizer.lr", "0.01"]
    given: Any = tyro.cli(
        config,
        default=config(ours.muon(0.02, lr_scaling="spectral")),
        args=args,
        registry=custom_registry,
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = given.optimizer.build(model_parts=[model]).optimizers[0].param_groups
    assert [(group["label"], group["lr"]) for group in groups] == [("muon", 0.01), ("adamw", 0.01)]


def test_roles_may_be_in_some_model_parts_only_and_must_be_in_one() -> None:
    rates = {"embedding": 0.3, "head": 0.02}

    def parts() -> list[nn.Module]:
        first = OrderedDict(tok_embeddings=nn.Embedding(8, 4), up=nn.Linear(4, 4, bias=False))
        last = OrderedDict(down=nn.Linear(4, 4, bias=False), lm_head=nn.Linear(4, 8, bias=False))
        return [nn.Sequential(first), nn.Sequential(last)]

    first, last = ours.muon(0.1, adamw_lr=rates).build(model_parts=parts()).optimizers
    assert [(group["label"], group["lr"]) for group in first.param_groups] == [
        ("hidden", 0.1),
        ("embedding", 0.3),
    ]
    assert [(group["label"], group["lr"]) for group in last.param_groups] == [
        ("hidden", 0.1),
        ("head", 0.02),
    ]
    for wrong in ({**rates, "heads": 0.1}, {"head": 0.02}):
        with pytest.raises(ValueError, match="adamw_lr"):
            ours.muon(0.1, adamw_lr=wrong).build(model_parts=parts())
