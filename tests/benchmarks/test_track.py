"""The track: its search, its interpolation, and a step of every contender."""

import math
import pkgutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.track import __main__ as runner
from benchmarks.track import contenders
from benchmarks.track.__main__ import FACTOR, LENGTHS, SEEDS, Record, measured, tuned
from benchmarks.track.standings import _crossing, differences, standings
from benchmarks.track.task import GPT, Task, corpus, module_of

NAMES = [module.name for module in pkgutil.iter_modules(contenders.__path__)]
WIDTH = 32


@pytest.mark.parametrize("name", NAMES)
def test_a_contender_updates_every_parameter_and_stays_finite(name: str):
    module = module_of(name)
    model = GPT(width=WIDTH, depth=1, context=8, seed=0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    step = module.optimizer(model, 20, **module.SETTINGS)
    for seed in range(4):
        tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(seed))
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        step()
        model.zero_grad()
    for name, param in model.named_parameters():
        assert param.isfinite().all()
        assert not torch.equal(param, before[name]), name


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.floats(0.0, 1.0))
def test_the_search_ends_at_a_minimum_of_the_grid(rate: float, other: float, best: float):
    def loss(settings: dict[str, float]) -> float:
        return abs(math.log(settings["rate"]) - math.log(rate)) + best * settings["other"]

    found = tuned({"rate": 0.01, "other": other}, loss)
    for factor in (FACTOR, 1 / FACTOR):
        # Values have three digits.
        assert loss(found | {"rate": found["rate"] * factor}) >= loss(found) - 1e-2


@given(st.integers(LENGTHS[2], LENGTHS[-3]), st.integers(LENGTHS[1], LENGTHS[-2]))
def test_the_steps_to_the_target_are_found_from_any_first_length(steps: int, first: int):
    target, losses = 1.0, {}

    def run(settings: dict[str, float], length: int, seed: int) -> float:
        losses.setdefault(length, {})[seed] = target - math.log(length / steps)
        return losses[length][seed]

    measured({}, first, target, run)
    assert all(found == pytest.approx(steps) for found in _crossing(losses, target))
    assert len(_crossing(losses, target)) == len(SEEDS)


def test_a_contender_that_never_reaches_the_target_has_no_steps():
    losses = {}

    def run(settings: dict[str, float], length: int, seed: int) -> float:
        losses.setdefault(length, {})[seed] = 2.0
        return 2.0

    measured({}, 300, 1.0, run)
    assert _crossing(losses, 1.0) == []
    assert max(losses) == LENGTHS[-1]


def test_standings_compare_seed_by_seed_and_ignore_tuning_runs():
    def rows(name: str, factor: float) -> list[dict[str, object]]:
        common = {"contender": name, "settings": {"rate": 0.1}, "optimizer_ms": 1.0}
        runs = [(steps, seed) for steps in (100, 200) for seed in (0, 1, 2)]
        losses = [
            common | {"steps": s, "seed": i, "loss": 1.0 - math.log(s * factor / 150) + 0.1 * i}
            for s, i in runs
        ]
        return [*losses, common | {"steps": 150, "seed": 100, "loss": -9.0}]

    found = {
        "task": {"target": 1.1},
        "tuning_seed": 100,
        "settings": {"muon": {"rate": 0.1}, "normuon": {"rate": 0.1}},
        "rows": rows("muon", 1.0) + rows("normuon", 1.1),
    }
    ranked = standings(found)
    assert [one.name for one in ranked] == ["normuon", "muon"]
    difference, error = differences(ranked)["normuon"]
    assert difference == pytest.approx(-math.log(1.1))
    assert error == pytest.approx(0.0, abs=1e-9)  # a seed changes both by the same factor


def test_results_of_another_task_or_text_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "track.json"
    record = Record(path, Task())
    record.write()
    assert Record(path, Task()).rows == []
    with pytest.raises(SystemExit, match=r"task: found .* choose another file"):
        Record(path, Task(width=32))
    monkeypatch.setattr(runner, "corpus", lambda: corpus()._replace(digest="another"))
    with pytest.raises(SystemExit, match=r"text: found .*, expected another: choose"):
        Record(path, Task())
