"""`muonfx.engines.deepspeed` under the real, unmodified DeepSpeed: parameters of one process, and a resume to the bit.

One group of processes for each number of ranks runs all of its cases, since importing DeepSpeed takes seconds.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import deepspeed as ours
from muonfx.engines.deepspeed.making import require_own_step
from tests.engines.deepspeed_worker import (
    CASES,
    EXPORTED,
    OVERFLOWS,
    PORTABLE,
    SAVED_AFTER,
    WARMUP,
    WRITTEN,
    ZERO,
)
from tests.engines.processes import launched, real, result_of

REAL = [*real("deepspeed", timeout=900), pytest.mark.dist]
NAMES = {
    "ranks_2": (
        *CASES,
        *OVERFLOWS,
        "round robin",
        "unequal steps",
        "written weights",
        "loaded into the model alone",
        "saved and loaded",
    ),
    "ranks_1": ("stage 2", "under another layout"),
    "ranks_3": ("stage 2", "stage 3, zero.Init", "under another layout"),
}
"""The cases that are run, by group of processes; the first leaves checkpoints behind."""

FP32, BF16 = 2e-6, 0.02
"""The largest difference of parameters in five steps: in bf16, gradients and what they come from are rounded."""

Found = dict[str, list[dict[str, Any]]]


def largest_difference(case: dict[str, Any]) -> float:
    if case.get("equal"):  # the gradients have the bits of one process
        return 0.0
    return BF16 if "bf16" in case else FP32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of all cases, by group of processes; of each rank."""
    folder = tmp_path_factory.mktemp("deepspeed")
    results: Found = {}
    for group, names in NAMES.items():
        (folder / group).mkdir()
        results[group] = launched(
            "deepspeed_worker.py", int(group.split("_")[1]), names, folder / group
        )
    return results


class TestReal:
    """On the real package."""

    pytestmark = REAL

    @pytest.mark.parametrize(
        ("group", "name"),
        [(group, name) for group, names in NAMES.items() for name in names if name in CASES],
    )
    def test_parameters_are_those_of_one_process_and_a_resumed_run_is_the_same_run(
        self, found: Found, group: str, name: str
    ) -> None:
        case = result_of(found[group], name)
        assert case["worst"] <= largest_difference(CASES[name])
        assert case["resumed"]
        assert case["exported"] is (True if name in EXPORTED else None)
        assert not case["wrong"], "frozen and has moved, or trained and has not"
        labels = CASES[name].get("labels", ["muon", "adamw"])
        assert case["labels"] == labels
        has_momentum = "matrices" not in CASES[name] and "muon" in labels
        if group == "ranks_2" and CASES[name]["zero"].get("stage") and has_momentum:
            assert case["state"] == [23, 7]  # DeepSpeed's own tool gathers the momentum
        shares = WARMUP[SAVED_AFTER:] if "warmup" in CASES[name] else [1.0, 1.0]
        rates = [{"muon": 0.02, "adamw": 0.003}[label] for label in labels]
        assert case["rates"] == [[rate * share for rate in rates] for share in shares] * 2

    def test_a_wrong_mapping_is_refused_by_name(self, found: Found) -> None:
        said = result_of(found["ranks_2"], "round robin")["refused"]
        assert said.startswith("'")
        assert "round_robin_gradients" in said

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_ranks_that_would_step_differently_at_stage_0_raise_one_error_and_change_nothing(
        self, found: Found, dtype: str
    ) -> None:
        first, second = [rank["unequal steps"] for rank in found["ranks_2"]]
        muon, adamw = "param_groups[0] ('muon')", "param_groups[1] ('adamw')"
        differences = {
            "lr": f"numbers in {adamw}: 'lr' is 0.003 on rank 0 and 0.5 on rank 1",
            "betas": f"numbers in {adamw}: 'betas' is [0.9, 0.95] on rank 0 and [0.5, 0.95] on rank 1",
            "weight_decay": f"numbers in {muon}: 'weight_decay' is 0.1 on rank 0 and 0.5 on rank 1",
            "count": f"step counts of {muon}: 'adamw.scale_by_adam.count' is 1 on rank 0 and 2 on rank 1",
        }
        for key, text in differences.items():
            error_text = first[f"{dtype}, {key}"]
            assert text in error_text
            assert error_text == second[f"{dtype}, {key}"]
        assert (
            "rank 1: ValueError: 'momentum' in a group must be a number"
            in first[f"{dtype}, momentum"]
        )
        assert second[f"{dtype}, momentum"].startswith("'momentum' in a group must be a number")
        assert first[f"{dtype}, unchanged"]
        assert second[f"{dtype}, unchanged"]

    def test_weights_that_a_first_step_would_overwrite_are_refused_until_a_refresh(
        self, found: Found
    ) -> None:
        case = result_of(found["ranks_2"], "loaded into the model alone")
        assert "engine.optimizer.refresh_fp32_params()" in case["refused"]
        assert case["from loaded"]

    @pytest.mark.parametrize("name", WRITTEN)
    def test_weights_that_are_written_into_the_model_are_lost_with_a_warning_and_kept_after_a_refresh(
        self, found: Found, name: str
    ) -> None:
        # At stage 3, rank 0 writes the weights of all ranks.
        case = found["ranks_2"][0]["written weights"][name]
        assert case["exchanged and back"] == [True, []]
        assert case["refreshed"] == [True, []]
        is_kept, (text,) = case["not refreshed"]
        assert not is_kept
        assert "call engine.optimizer.refresh_fp32_params()" in text
        assert case["again"] == [False, []]

    @pytest.mark.parametrize("name", OVERFLOWS)
    def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped_by_all(
        self, found: Found, name: str
    ) -> None:
        case = result_of(found["ranks_2"], name)
        assert case["skipped"] == 1
        assert case["same"]
        assert all(map(math.isfinite, case["sums"]))

    @pytest.mark.parametrize("group", ["ranks_1", "ranks_3"])
    @pytest.mark.parametrize("source", PORTABLE)
    def test_any_stage_and_number_of_ranks_continues_what_save_has_written(
        self, found: Found, group: str, source: str
    ) -> None:
        ended = result_of(found[group], "under another layout")
        for goal in PORTABLE[source]:
            case = ended[f"{source}: {goal}"]
            assert case["loaded"], goal
            assert case["worst"] <= largest_difference(CASES[source]), goal

    def test_making_an_engine_takes_no_step_and_a_load_restores_the_bits_of_the_model(
        self, found: Found
    ) -> None:
        cases = result_of(found["ranks_2"], "saved and loaded")
        assert all(case == [True, True, True] for case in cases.values()), cases
        assert len(cases) == 2 * len(ZERO)


def test_a_model_and_a_transform_that_it_cannot_step_are_refused() -> None:
    for given in (None, {"w": torch.zeros(2)}):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            ours.Muon(given)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="gradient_clipping"):
        ours.optimizer(model, mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale(-0.1)))
    plateau = mfx.partition(
        {"all": mfx.chain(mfx.contrib.reduce_on_plateau(), mfx.scale(-0.1))}, lambda _: "all"
    )
    with pytest.raises(
        ValueError, match=r"requires the extra argument 'value' in each step, and DeepSpeed"
    ):
        ours.optimizer(model, plateau)
    labels = {name: None if "1." in name else "sgd" for name, _ in model.named_parameters()}
    tx = mfx.partition({"sgd": mfx.scale(-0.1)}, labels)
    with pytest.raises(ValueError, match=r"'1\.(bias|weight)' requires grad"):
        ours.optimizer(model, tx)
    model[1].requires_grad_(requires_grad=False)
    assert len(ours.optimizer(model, tx).param_groups) == 1


def test_numbers_of_a_configuration_are_those_of_the_groups() -> None:
    params: Any = {
        "lr": 0.1,
        "momentum": 0.8,
        "betas": [0.7, 0.6],
        "adamw_lr": 0.2,
        "weight_decay": 0.3,
    }
    labels: Any = {"0.weight": "muon", "0.bias": "adamw"}
    muon, adamw = ours.Muon(nn.Sequential(nn.Linear(2, 2)), **params, labels=labels).param_groups
    assert [muon[key] for key in ("lr", "momentum", "weight_decay")] == [0.1, 0.8, 0.3]
    assert [adamw[key] for key in ("lr", "betas", "weight_decay")] == [0.2, (0.7, 0.6), 0.3]


def test_a_configuration_that_lets_engines_exchange_the_optimizer_is_refused() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    muon = {"optimizer": {"type": "muonfx.Muon"}, "zero_force_ds_cpu_optimizer": True}
    with pytest.raises(ValueError, match='write "zero_force_ds_cpu_optimizer": false'):
        ours.initialize(nn.Linear(2, 2), {**muon, "zero_optimization": zero})
    for config in (
        {"zero_optimization": {**zero, "offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {**zero, "offload_optimizer": None}},
        {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False},
        {},
    ):
        require_own_step(config)
    with pytest.raises(ValueError, match="\"optimizer\" of the type 'AdamW'"):
        require_own_step({"optimizer": {"type": "AdamW"}})


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "1.weight": lambda model: model[1].requires_grad_(),
    "0.weight": lambda model: model[0].requires_grad_(requires_grad=False),
    "2.weight": lambda model: model.append(nn.Linear(4, 4, bias=False)),
    "0.(weight|bias)": lambda model: model.__setitem__(0, nn.Identity()),
}
"""Changes of the trained parameters, by the parameter that the error names."""


@pytest.mark.parametrize("steps", [0, 1])  # before the first step, and after it
@pytest.mark.parametrize("named", CHANGES)
def test_what_is_trained_may_not_change_after_construction(
    named: str, steps: int, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(requires_grad=False))
    made = _stepped(model, mfx.chain(mfx.momentum(), mfx.scale(-0.1)), steps)
    before = copy.deepcopy(model.state_dict())
    CHANGES[named](model)
    for attempt in (made.step, lambda: ours.save(SimpleNamespace(optimizer=made), tmp_path / "a")):
        with pytest.raises(ValueError, match=f"'{named}' require"):
            attempt()
    assert all(
        torch.equal(before[name], value)
        for name, value in model.state_dict().items()
        if name in before
    )


@pytest.mark.parametrize("steps", [0, 1])  # before the first step, and after it
def test_a_number_out_of_range_in_the_last_group_is_refused_before_the_first_group_steps(
    steps: int,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    labels = mfx.routing.default_labels(model)
    made = _stepped(model, mfx.muon_with_adamw(0.1, labels=labels), steps)
    before = copy.deepcopy(model.state_dict())
    assert len(made.param_groups) > 1
    made.param_groups[-1]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"'lr' in a group must be at least 0, found -1.0"):
        made.step()
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    made.param_groups[-1]["lr"] = 0.1
    made.step()


def _stepped(model: nn.Module, tx: mfx.Transform, steps: int = 1) -> ours.ZeroOptimizer:
    made = ours.optimizer(model, tx)
    for _ in range(steps):
        made.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        made.step()
    return made


def test_a_loaded_state_keeps_its_dtype_and_counts_also_after_a_step() -> None:
    tx = mfx.chain(mfx.momentum(0.9, dtype=torch.bfloat16), mfx.scale(-0.1))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    own = _stepped(model, tx)
    later = nn.Linear(4, 4)
    again = _stepped(later, tx)
    fresh = copy.deepcopy(model)
    later.load_state_dict(model.state_dict())
    pairs = ((model, own), (later, again), (fresh, ours.optimizer(fresh, tx)))
    saved = own.state_dict()
    for _, one in pairs[1:]:
        one.load_state_dict(saved)
    for net, one in pairs:
        one.zero_grad()
        net(torch.ones(1, 4)).square().sum().backward()
        one.step()
        trace = one.state[net.weight]["momentum.trace"]
        assert trace.dtype == torch.bfloat16
        assert torch.equal(trace, own.state[model.weight]["momentum.trace"])
        assert torch.equal(net.weight, model.weight)


def _load_warnings(saved: ours.ZeroOptimizer, loading: ours.ZeroOptimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loading.load_state_dict(saved.state_dict())
    return [str(warning.message) for warning in caught]


def test_a_load_with_other_numbers_is_warned_of_and_takes_those_of_the_file() -> None:
    saved = ours.Muon(nn.Linear(4, 4), lr=1e-3, weight_decay=0.1)
    made = ours.Muon(nn.Linear(4, 4), lr=1e-4, weight_decay=0.01)
    for optimizer in (saved, made):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1  # by a scheduler of DeepSpeed, which leaves no "initial_lr"
    (text,) = _load_warnings(saved, made)
    assert "weight_decay: 0.1 in the file, 0.01 in the code; the file's is used" in text
    assert "lr: 0.001 in the file, 0.0001 in the code; the file's is used" in text
    assert "org_lrs" in text
    assert made.param_groups[0]["weight_decay"] == 0.1
    assert "requested_lr" not in made.param_groups[0]
    assert "chain_code" not in made.param_groups[0]


def test_a_state_without_the_rate_from_construction_is_refused() -> None:
    saved = ours.Muon(nn.Linear(4, 4)).state_dict()
    del saved["param_groups"][0]["requested_lr"]
    with pytest.raises(
        ValueError, match="no hyperparameter 'requested_lr' for the group of 'weight'"
    ):
        ours.Muon(nn.Linear(4, 4)).load_state_dict(saved)


def test_a_load_by_another_chain_is_warned_of() -> None:
    saved = ours.Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=1e-3)
    keller = mfx.orthogonalize(coefficients="keller")
    made = ours.Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=1e-3, orthogonalize=keller)
    (text,) = _load_warnings(saved, made)
    assert "saved with another chain" in text
    assert "keller" in text


def test_a_load_of_the_same_run_is_not_warned_of_in_the_midst_of_a_schedule() -> None:
    saved = ours.Muon(nn.Linear(4, 4), lr=1e-3, adamw_lr=4e-3)
    made = ours.Muon(nn.Linear(4, 4), lr=1e-3, adamw_lr=4e-3)
    for group in saved.param_groups:
        group["lr"] *= 0.5
    assert _load_warnings(saved, made) == []
    assert made.param_groups[0]["lr"] == saved.param_groups[0]["lr"]


def test_a_schedule_is_that_of_the_code_after_a_load() -> None:
    def optimizer(steps: int, peak: float) -> ours.ZeroOptimizer:
        rate = mfx.cosine_decay_schedule(peak, steps)
        return ours.optimizer(
            nn.Linear(4, 4), mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(rate))
        )

    made = optimizer(20, 0.2)
    numbers = dict(made.param_groups[0])
    (text,) = _load_warnings(optimizer(10, 0.1), made)
    assert "the code's is used" in text
    assert made.param_groups[0] == numbers


def test_a_state_of_other_groups_is_refused_before_anything_is_loaded() -> None:
    saved = _stepped(nn.Linear(4, 4), mfx.scale(-0.1)).state_dict()
    made = _stepped(nn.Linear(4, 4), mfx.chain(mfx.momentum(), mfx.scale(-0.2)))
    with pytest.raises(ValueError, match="no hyperparameter 'momentum'"):
        made.load_state_dict(saved)
    assert made.param_groups[0]["momentum"] == 0.95
    made.step()
    with pytest.raises(ValueError, match="groups with the parameters"):
        ours.optimizer(nn.Sequential(nn.Linear(4, 4)), mfx.scale(-0.1)).load_state_dict(saved)


@pytest.mark.parametrize("steps", [0, 1])  # before the first step, and after it
@pytest.mark.parametrize(
    ("key", "made_of", "said"),
    [
        ("momentum.trace", None, "'momentum.trace', .* is missing"),
        ("scale_by_lion.mu", torch.Tensor.clone, "'scale_by_lion.mu', .* belongs to another"),
        ("momentum.trace", torch.Tensor.double, "has shape .* and dtype torch.float64"),
        ("momentum.trace", torch.Tensor.flatten, "'momentum.trace', .* has shape"),
    ],
)
def test_a_state_of_another_chain_is_refused_by_name(
    steps: int, key: str, made_of: Callable[[torch.Tensor], torch.Tensor] | None, said: str
) -> None:
    tx = mfx.chain(mfx.momentum(), mfx.scale(-0.1))
    model = nn.Linear(4, 4)
    saved = _stepped(nn.Linear(4, 4), tx).state_dict()
    for entries in saved["state"].values():
        trace = entries["momentum.trace"]
        if made_of is None:
            del entries[key]
            entries["other"] = trace
        else:
            entries[key] = made_of(trace)
    made = _stepped(model, tx, steps)
    made.load_state_dict(saved)
    model(torch.ones(1, 4)).square().sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=said):
        made.step()
    assert torch.equal(model.weight, before)


def _engine(model: nn.Module, steps: int) -> tuple[SimpleNamespace, mfx.Transform]:
    """An optimizer without an engine, in the place where an engine has it; after some steps."""
    tx = mfx.muon_with_adamw(0.02, 1e-3, labels=mfx.default_labels(model))
    return SimpleNamespace(optimizer=_stepped(model, tx, steps)), tx


def test_a_run_without_an_engine_reads_what_is_saved_and_writes_what_is_loaded(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    engine, tx = _engine(first, 2)
    path = ours.save(engine, tmp_path / "a", step=2)
    alone, last = copy.deepcopy(first), copy.deepcopy(first)
    plain = mfx.TransformOptimizer(alone, tx)
    saved = mfx.checkpoint.load(path, like=plain.transform_state, tx=tx)
    mfx.tree.map(lambda own, loaded: own.copy_(loaded), plain.transform_state, saved)
    again = mfx.checkpoint.save(
        tmp_path / "b",
        plain.transform_state,
        tx=tx,
        params={n: p.detach() for n, p in alone.named_parameters()},
    )
    with torch.no_grad():
        last[0].weight.zero_()
    other, _ = _engine(last, 1)
    ours.load(other, again)
    for model, one in ((first, engine.optimizer), (alone, plain), (last, other.optimizer)):
        one.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        one.step()
        assert all(map(torch.equal, first.parameters(), model.parameters()))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_save_before_the_first_step_makes_no_state_and_keeps_a_loaded_one(
    is_loaded: bool, tmp_path: Path
) -> None:
    tx = mfx.chain(mfx.scale(0.0), mfx.ema_params(0.9))  # the scale 0 keeps the weights
    model = nn.Linear(4, 4)
    engine = SimpleNamespace(optimizer=ours.optimizer(model, tx))
    if is_loaded:
        other = SimpleNamespace(optimizer=_stepped(nn.Linear(4, 4), tx))
        ours.load(engine, ours.save(other, tmp_path / "a"))
    average = model.weight.detach().clone()
    ours.save(engine, tmp_path / "b")
    with torch.no_grad():
        model.weight.fill_(0.5)
    model(torch.ones(1, 4)).sum().backward()
    engine.optimizer.step()
    expected = 0.9 * average + 0.05 if is_loaded else model.weight
    torch.testing.assert_close(engine.optimizer.state[model.weight]["ema_params.average"], expected)


def test_a_load_that_fails_before_the_first_step_makes_no_state(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    tx = mfx.chain(mfx.scale(0.0), mfx.ema_params(0.9))  # the scale 0 keeps the weights
    optimizer = ours.optimizer(model, tx)
    with pytest.raises(mfx.checkpoint.NotFoundError):
        ours.load(SimpleNamespace(optimizer=optimizer), tmp_path / "a")
    with torch.no_grad():
        model.weight.fill_(0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[model.weight]["ema_params.average"], model.weight.detach()
    )


@pytest.mark.parametrize(("steps", "peak"), [(100, 0.5), (200, 1.0)])
def test_a_written_number_comes_from_the_checkpoint_unless_its_schedule_has_changed(
    steps: int, peak: float
) -> None:
    key = "scale_by_learning_rate.learning_rate.peak"

    def created(steps: int) -> Any:
        return ours.optimizer(
            nn.Linear(2, 2), mfx.adamw(mfx.warmup_cosine_decay_schedule(1.0, 2, steps))
        )

    optimizer = created(100)
    optimizer.param_groups[0][key] = 0.5
    resumed = created(steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0][key] == peak
    schedule_has_changed = steps != 100
    assert any("peak=0.5" in str(warning.message) for warning in caught) == schedule_has_changed


def test_nothing_is_loaded_of_a_checkpoint_of_another_chain(tmp_path: Path) -> None:
    engine, _ = _engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 1)
    path = ours.save(engine, tmp_path / "a")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    made = ours.optimizer(model, mfx.chain(mfx.momentum(), mfx.scale(-0.1)))
    with pytest.raises(mfx.checkpoint.MismatchError, match="does not fit"):
        ours.load(SimpleNamespace(optimizer=made), path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(TypeError, match="its optimizer is"):
        ours.load(SimpleNamespace(optimizer=torch.optim.SGD(model.parameters())), path)
