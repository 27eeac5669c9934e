"""DeepSpeed's AutoTP, pipeline stages, experts and schedulers on the real, unmodified package, on two ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import deepspeed as ours
from tests.engines.deepspeed_parallel_worker import (
    EXPERT_CASES,
    NAMES,
    PIPELINE_CASES,
    SCHEDULERS,
    SCHEDULERS_BY_GROUP,
    TENSOR_CASES,
)
from tests.engines.processes import launched, real, result_of

REAL = [*real("deepspeed", "transformers", timeout=1000), pytest.mark.dist]

FP32 = 2e-6
"""The largest difference of parameters from one process: sums are added in another order."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of all cases, by rank."""
    return launched(
        "deepspeed_parallel_worker.py", 2, NAMES, tmp_path_factory.mktemp("deepspeed"), limit=850
    )


class TestReal:
    """On the real package."""

    pytestmark = REAL

    @pytest.mark.parametrize("name", [*TENSOR_CASES, *EXPERT_CASES])
    def test_the_matrices_of_autotp_and_the_experts_of_all_ranks_are_updated_as_in_one_process(
        self, results: list[dict[str, Any]], name: str
    ) -> None:
        assert result_of(results, name)["worst"] <= FP32

    @pytest.mark.parametrize("name", [*TENSOR_CASES, *PIPELINE_CASES, *EXPERT_CASES])
    def test_ranks_with_different_parameters_save_and_resume_to_the_bit(
        self, results: list[dict[str, Any]], name: str
    ) -> None:
        case = result_of(results, name)
        assert case["unchanged"], "a load into the engine that has saved changes nothing"
        assert case["loaded"]
        assert case["resumed"]

    def test_a_checkpoint_has_the_layers_of_all_stages_and_all_experts(
        self, results: list[dict[str, Any]]
    ) -> None:
        for name in PIPELINE_CASES:
            saved = result_of(results, name)["saved"]
            layers = [f"params/{layer}.{kind}" for layer in range(4) for kind in ("bias", "weight")]
            assert [key for key in saved if key.startswith("params/")] == layers
        expert = "moe.deepspeed_moe.experts.deepspeed_experts.{}.0.weight"
        for name in EXPERT_CASES:
            saved = result_of(results, name)["saved"]
            for index in range(4):
                assert f"params/{expert.format(index)}" in saved
                assert f"muon/momentum/trace/{expert.format(index)}" in saved

    def test_a_checkpoint_of_two_stages_continues_in_one_stage_and_back(
        self, results: list[dict[str, Any]]
    ) -> None:
        assert result_of(results, "on other ranks") == {
            "loaded": True,
            "close": True,
            "loaded back": True,
        }

    def test_one_name_with_different_values_on_two_ranks_is_an_error(
        self, results: list[dict[str, Any]]
    ) -> None:
        case = result_of(results, "unequal values")
        assert "'params/0.weight'" in case["error_text"]
        assert "rank 1" in case["error_text"]
        assert not case["written"]

    @pytest.mark.parametrize("stage", [0, 1])
    @pytest.mark.parametrize("when", ["first", "later"])
    def test_a_wrong_rate_on_one_rank_is_an_error_on_all_in_any_step_and_changes_nothing(
        self, results: list[dict[str, Any]], stage: int, when: str
    ) -> None:
        first, second = [rank[f"wrong rate, stage {stage}"][when] for rank in results]
        assert (
            "rank 1: ValueError: 'lr' in a group must be a number, found 'fast'"
            in first["error_text"]
        )
        assert second["error_text"].startswith("ValueError: 'lr' in a group must be a number")
        assert first["unchanged"]
        assert second["unchanged"]

    def test_stages_with_other_kinds_of_parameters_are_reported(
        self, results: list[dict[str, Any]]
    ) -> None:
        (text,) = result_of(results, "unequal stages")["warnings"]
        assert "['muon', 'adamw'] on rank 0 and ['adamw'] on rank 1" in text
        assert "use ZeRO stage 0" in text

    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_a_scheduler_with_one_rate_for_all_groups_is_refused(
        self, results: list[dict[str, Any]], name: str
    ) -> None:
        error_text = result_of(results, "schedulers")["one rate"][name]["refused"]
        assert "muon 0.02, adamw 0.003" in error_text
        assert '"warmup_max_lr": [0.02, 0.003]' in error_text

    @pytest.mark.parametrize("name", SCHEDULERS_BY_GROUP)
    def test_a_scheduler_with_a_rate_for_each_group_is_accepted(
        self, results: list[dict[str, Any]], name: str
    ) -> None:
        ratio = result_of(results, "schedulers")["a rate for each group"][name]["ratio"]
        assert ratio == pytest.approx(0.02 / 0.003, rel=0.1)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_partition_that_autotp_does_not_describe_is_refused_by_name() -> None:
    model: Any = _model()
    model[1].weight.tensor_model_parallel = True
    model[1].is_tp_parallel = True
    optimizer = ours.optimizer(model, mfx.chain(mfx.momentum(), mfx.scale(-0.1)))
    before = model[1].weight.detach().clone()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model[1].mp_group = torch.distributed.group.WORLD
        with pytest.raises(ValueError, match=r"'1\.weight'.*AutoTP.*exclude this layer"):
            optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(model[1].weight, before)


def test_a_state_without_an_engine_is_saved_and_loaded_as_one_tree(tmp_path: Path) -> None:
    model = _model()
    optimizer = ours.Muon(model)
    path = ours.save(SimpleNamespace(optimizer=optimizer), tmp_path / "a")
    assert "muon/momentum/trace/1.weight" in mfx.checkpoint.read(path)
    ours.load(SimpleNamespace(optimizer=optimizer), path)
