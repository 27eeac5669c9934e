"""`muonfx.engines.torchtitan` in torchtitan's own container, with its schedulers and its checkpoints."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import Any

import pytest
from torch import nn

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
    found = launched("torchtitan_worker.py", size, ["container"], tmp_path_factory.mktemp(f"ranks{size}"))
    case = result_of(found, "container")
    assert case["worst"] <= FP32
    assert case["resumed"] == [True, True]
    warm, *loaded = case["logged"]
    # frozen parameters are in no group
    assert warm == pytest.approx({"lr/Muon/0": 0.02 / 2, "lr/Muon/1": 0.003 / 2})
    assert loaded == [pytest.approx({"lr/Muon/0": 0.02 * 2 / 3, "lr/Muon/1": 0.003 * 2 / 3})] * 2
    assert case["up"] == ["state.up.weight.adamw.scale_by_adam.count", "state.up.weight.muon.momentum.trace"]


def test_fields_of_torchtitans_own_optimizers_are_refused() -> None:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
    ignored = {"param_groups": groups, "implementation": "foreach", "optimizer_factory_kwargs_by_name": {"AdamW": {}}}
    assert ignored.keys() == {one.name for one in fields(OptimizersContainer.Config)}
    for name, value in ignored.items():
        config: Any = ours.muon(0.02)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"{name}: found "):
            config.build(model_parts=[nn.Linear(2, 2)])


def test_the_command_line_overrides_a_rate() -> None:
    import tyro
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.manager import custom_registry

    config = make_dataclass("Training", [("optimizer", OptimizersContainer.Config)])
    args = ["--optimizer.lr", "0.01"]
    given: Any = tyro.cli(
        config, default=config(ours.muon(0.02, lr_scaling="spectral")), args=args, registry=custom_registry
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = given.optimizer.build(model_parts=[model]).optimizers[0].param_groups
    assert [(group["label"], group["lr"]) for group in groups] == [("muon", 0.01), ("adamw", 0.01)]
