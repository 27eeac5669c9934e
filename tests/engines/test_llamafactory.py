"""`muonfx.engines.llamafactory` in the registry, the trainer and the checkpoints of LLaMA-Factory's v1."""

from __future__ import annotations

import pytest
from torch import nn

from muonfx.engines import llamafactory as ours
from tests.engines.processes import launched, real, result_of

REAL = real("llamafactory", "torchdata", "omegaconf", "transformers", "peft")
BOUNDS = {"alone": 1e-6, "fsdp2": 5e-5}
"""The largest difference in five steps; sums of two ranks differ in the last bit, and AdamW divides by small ones."""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "name"), [pytest.param(1, "alone", marks=REAL), pytest.param(2, "fsdp2", marks=REAL)]
)
def test_parameters_are_those_of_one_process_and_a_resumed_run_is_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, size: int, name: str
) -> None:
    found = launched("llamafactory_worker.py", size, [name], tmp_path_factory.mktemp(name))
    case = result_of(found, name)
    assert case["worst"] <= BOUNDS[name]
    assert case["resumed"]
    if name == "alone":  # logged after the scheduler's step
        # The launcher, which has registered the optimizer there.
        assert "--optim_config" in case["said"]
        assert case["logged"] == [0.02 * 0.5**step for step in range(1, 6)]
        assert case["logged again"] == case["logged"][3:]
    else:
        assert case["rates"] == [0.02 * 0.5**3, 0.004 * 0.5**3]


def test_a_learning_rate_must_be_said() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="optim_config: found no lr"):
        ours.muon(model, {"name": "muonfx"})
    assert ours.muon(model, {"name": "muonfx"}, learning_rate=0.5).param_groups[0]["lr"] == 0.5
