"""The track at two sizes: its search, its resumption, and the speeds that its page reports."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.track import scaling, sizes
from benchmarks.track.scaling import (
    FACTORS,
    LARGE,
    LENGTHS,
    REFERENCE,
    SEEDS,
    SMALL,
    START_RATES,
    Record,
    Run,
)
from benchmarks.track.task import GPT, module_of

SETTINGS = {name: {"rate": 0.01, "decay": 0.1, "rest": 0.06} for name in START_RATES}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scaling.json"
    monkeypatch.setattr(scaling, "PATH", path)
    return path


def make_results(speeds: dict[str, dict[str, float]]) -> dict[str, object]:
    """Results in which a contender's loss is -log(speed * steps), and each seed adds a constant."""
    rows = []
    for size, speed_of in speeds.items():
        for run in scaling.measurements(size, SETTINGS):
            loss = 5 - math.log(speed_of[run.contender] * run.steps) + 0.1 * run.seed
            rows.append(run._asdict() | {"loss": loss})
    return {"settings": SETTINGS, "rows": rows}


SPEEDS = {
    SMALL: {REFERENCE: 1.0, "torch_muon": 1.2, "muon": 1.3, "normuon": 1.4, "adamuon": 2.5},
    LARGE: {REFERENCE: 1.0, "torch_muon": 1.2, "muon": 1.56, "normuon": 1.4, "adamuon": 2.5},
}


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_speed_is_the_ratio_of_steps_to_the_same_loss(size: str):
    for contender, speed in sizes.speeds(make_results(SPEEDS), size).items():
        assert speed.mean == pytest.approx(SPEEDS[size][contender])
        # A seed changes both by the same factor.
        assert speed.log_error == pytest.approx(0, abs=1e-9)


def test_the_change_from_one_size_to_the_next_has_both_errors():
    small, large = sizes.Speed([], 1.3, 0.03), sizes.Speed([], 1.56, 0.04)
    assert sizes._change_text([small, large]) == "+20 % ± 5"
    assert sizes._change_text([None, None]) == ""


def test_the_section_says_what_the_table_shows(monkeypatch: pytest.MonkeyPatch):
    results = make_results(SPEEDS) | {"machine": {"gpu": None, "cpu": "x", "bf16": [], "load": 0.0}}
    results["machine"] |= {"torch": "2", "python": "3"}
    monkeypatch.setattr(sizes.report, "load", lambda name: results)
    text = sizes.section()
    assert (
        "**mfx.Muon**: AdamW needs 1.30 ± 0.00 times its steps at 0.23 M, and 1.56 ± 0.00 at 0.85 M"
        in text
    )
    assert "(+20 % ± 0: its advantage grew)" in text
    del results["rows"][-1]
    assert sizes.section().startswith("Not finished: 1 runs are missing.")


def test_a_change_within_two_standard_errors_is_no_change():
    pair = {SMALL: sizes.Speed([], 1.3, 0.03), LARGE: sizes.Speed([], 1.4, 0.04)}
    speeds_at = {size: dict.fromkeys(list(sizes.NAMES)[1:], speed) for size, speed in pair.items()}
    assert sizes._findings(speeds_at).count("(+8 % ± 5: no change was shown)") == 4


def test_the_check_is_compared_with_the_run_of_the_same_length():
    results = make_results(SPEEDS)
    for run in scaling.checks("rate", SETTINGS):
        results["rows"].append(run._asdict() | {"loss": 1.0})
    base = sizes._loss_at(results, REFERENCE, SETTINGS[REFERENCE])
    assert base == pytest.approx(5 - math.log(scaling.steps_of(LARGE)))
    assert f"{1.0 - base:+.3f}" in sizes._check_table(results)


def test_finished_runs_are_not_repeated(path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def train(task, contender, settings, steps, seed):
        calls.append((contender, settings, steps, seed))
        return {"loss": 1.5}

    monkeypatch.setattr(scaling, "train", train)
    run = Run(SMALL, "muon", SETTINGS["muon"], 10, 0)
    assert Record().trained(run) == 1.5
    assert Record().trained(run) == 1.5
    assert len(calls) == 1
    Record().trained(run._replace(seed=1))
    assert len(calls) == 2


def test_results_of_another_text_are_not_mixed(path: Path):
    path.write_text(json.dumps({"text": "another", "settings": {}, "rows": []}))
    with pytest.raises(SystemExit, match="another text"):
        Record()


def test_the_search_takes_each_number_to_a_minimum(path: Path, monkeypatch: pytest.MonkeyPatch):
    best = {"rate": 0.0141, "decay": 0.4, "rest": 0.0424}

    def train(task, contender, settings, steps, seed):
        assert seed == scaling.TUNING_SEED
        return {"loss": sum(abs(math.log(settings[name] / best[name])) for name in best)}

    monkeypatch.setattr(scaling, "train", train)
    assert scaling.tuned(Record(), "muon") == best


def test_a_run_has_a_token_for_each_parameter_and_whole_seeds_come_first():
    assert scaling.steps_of(SMALL) * 8 * 128 == pytest.approx(229_952, rel=1e-2)
    runs = list(scaling.measurements(LARGE, SETTINGS))
    per_seed = len(START_RATES) + len(LENGTHS) - 1
    assert [run.seed for run in runs] == [seed for seed in SEEDS for _ in range(per_seed)]


@pytest.mark.parametrize("contender", START_RATES)
@pytest.mark.parametrize("name", FACTORS)
def test_each_tuned_number_reaches_the_optimizer(contender: str, name: str):
    def trained(settings: dict[str, float]) -> torch.Tensor:
        model = GPT(width=32, depth=1, context=8, seed=0)
        step = module_of(contender).optimizer(model, 20, **settings)
        for seed in range(2):
            tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(seed))
            torch.nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), tokens.flatten()
            ).backward()
            step()
            model.zero_grad()
        return torch.nn.utils.parameters_to_vector(model.parameters())

    settings = SETTINGS[contender]
    assert not torch.equal(trained(settings), trained(scaling.moved(settings, name, FACTORS[name])))
