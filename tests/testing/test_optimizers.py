"""`check_optimizer` finds each planted mistake by the right law, and finds none in right optimizers."""

from functools import partial

import pytest
import torch

import muonfx as mfx
from muonfx.testing import OPTIMIZER_LAWS, check_optimizer
from muonfx.testing.optimizers.runs import require_close
from muonfx.testing.violation import Breach
from tests.testing import broken_optimizers

FOUND_BY = {
    "steps_are_repeatable": ["DrawsNoise"],
    "torch_save_resumes_the_run": ["CountsOutsideOfItsState"],
    "dcp_resumes_the_run": ["CountsOutsideOfItsState"],
    "names_resume_the_run_in_another_order": ["CountsOutsideOfItsState"],
    "states_keep_their_dtypes": ["NarrowsItsState"],
    "parameters_without_gradients_stay": ["RequiresEveryGradient", "MovesFrozenParameters"],
    "zero_gradients_give_finite_values": ["DividesByTheNorm"],
    "nan_stays_in_its_parameter": ["HidesNaN", "SpreadsNaN"],
    "gradients_of_any_norm_give_finite_values": ["SquaresInFp32"],
    "unusual_shapes_are_taken": ["UnpacksTwoDims"],
    "bf16_parameters_are_trained": ["WidensParameters"],
    "frozen_parameters_stay": ["MovesFrozenParameters"],
    "rates_are_read_at_each_step": ["ReadsItsRateOnce"],
    "rates_may_be_tensors": ["TakesFloatsOnly"],
    "zero_grad_clears_every_gradient": ["ForgetsZeroGrad"],
    "closures_are_called_with_gradients_enabled": ["CallsTheClosureWithoutGradients"],
    "autocast_changes_nothing": ["MultipliesUnderAutocast"],
    "compiled_steps_equal_eager_ones": ["StepsTwiceWhenCompiled"],
    "ddp_gives_the_update_of_one_process": ["DependsOnTheRank"],
    "fsdp2_gives_the_update_of_one_process": ["NormalizesItsShard"],
    "tensor_parallel_gives_the_update_of_one_process": ["NormalizesItsShard"],
    "dcp_resumes_a_sharded_run": ["CountsOutsideOfItsState"],
}
OF_ONE_PROCESS = [name for name, law in OPTIMIZER_LAWS.items() if not law.needs_ranks]
OF_RANKS = [name for name, law in OPTIMIZER_LAWS.items() if law.needs_ranks]


def test_every_law_has_a_planted_mistake():
    assert FOUND_BY.keys() == OPTIMIZER_LAWS.keys()


@pytest.mark.parametrize("law", OF_ONE_PROCESS)
def test_a_law_finds_the_planted_mistake(law: str):
    for name in FOUND_BY[law]:
        build = partial(broken_optimizers.build, name)
        report = check_optimizer(build, laws=[law], progress=False)
        assert report.failures.keys() == {law}, name
        with pytest.raises(AssertionError, match=law):
            report.raise_failures()


@pytest.mark.slow
@pytest.mark.parametrize("law", OF_RANKS)
def test_a_law_of_ranks_finds_the_planted_mistake(law: str):
    for name in FOUND_BY[law]:
        build = partial(broken_optimizers.build, name)
        assert check_optimizer(build, laws=[law], progress=False).failures.keys() == {law}, name


@pytest.mark.slow
def test_the_error_of_one_rank_is_reported_not_the_lost_connection_of_the_others():
    build = partial(broken_optimizers.build, "FailsOnTheLastRank")
    failures = check_optimizer(
        build, laws=["ddp_gives_the_update_of_one_process"], progress=False
    ).failures
    assert "out of paper" in failures["ddp_gives_the_update_of_one_process"]


RIGHT = {
    "momentum": partial(broken_optimizers.build, "Momentum"),
    "torch AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "Muon": lambda model: mfx.Muon(model, lr=0.01, adamw_lr=0.02, weight_decay=0.1),
    "a chain": lambda model: mfx.TransformOptimizer(
        model, mfx.chain(mfx.scale_by_lion(), mfx.scale_by_learning_rate(0.01))
    ),
}


COMPILED = "compiled_steps_equal_eager_ones"  # takes longer than all others


@pytest.mark.parametrize("name", RIGHT)
def test_right_optimizers_obey_every_law_of_one_process(name: str):
    report = check_optimizer(RIGHT[name], laws=OF_ONE_PROCESS, skip=[COMPILED], progress=False)
    report.raise_failures()
    assert report.left_out == {COMPILED: "skipped"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_optimizers_compile(name: str):
    check_optimizer(RIGHT[name], laws=[COMPILED], progress=False).raise_failures()


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return mfx.Muon(model, lr=0.01, adamw_lr=0.02, weight_decay=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [muon, pytest.param(RIGHT["momentum"], marks=pytest.mark.deep)],
    ids=["Muon", "momentum"],
)
def test_right_optimizers_obey_the_laws_of_ranks(build):
    report = check_optimizer(build, laws=OF_RANKS, progress=False)
    report.raise_failures()
    assert set(report.held) == set(OF_RANKS)


def test_ranks_cannot_import_a_function_within_a_function():
    report = check_optimizer(lambda model: muon(model), laws=OF_RANKS[:1], progress=False)
    assert "define it in a module" in report.left_out[OF_RANKS[0]]


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, torch.inf), (torch.inf, 1.0), (torch.inf, torch.inf)]
)
def test_an_infinite_update_is_close_to_none(value: float, expected: float):
    with pytest.raises(Breach, match="the update of w differs by"):
        require_close(
            {"w": torch.tensor(value)},
            {"w": torch.tensor(expected)},
            {"w": torch.tensor(0.0)},
            0.1,
            "a run",
        )


def test_a_class_that_does_not_accept_a_model_is_named():
    with pytest.raises(
        TypeError,
        match=r"found the class SGD, which raised(?s:.*)return SGD\(model.parameters\(\), lr",
    ):
        check_optimizer(torch.optim.SGD)


def test_a_class_that_accepts_a_model_is_a_function_of_a_model():
    assert (
        check_optimizer(mfx.Muon, laws=["frozen_parameters_stay"], progress=False).optimizer
        == "Muon"
    )


def test_an_unknown_law_is_an_error():
    with pytest.raises(ValueError, match=r"resumes.*expected names of laws: steps_are_repeatable"):
        check_optimizer(muon, laws=["resumes"])


def test_progress_names_each_law():
    lines: list[str] = []
    check_optimizer(muon, laws=OF_ONE_PROCESS[:2], progress=lines.append)
    assert lines == [
        "Muon: law 1 of 2, steps_are_repeatable",
        "Muon: law 2 of 2, torch_save_resumes_the_run",
    ]
