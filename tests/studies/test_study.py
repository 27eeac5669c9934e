"""`muonfx.study`: each run is the run that a loop of one's own makes, together or alone, interrupted or not."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import muonfx as mfx
from muonfx.studies import Task

STEPS = 7


def init(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(4, generator=generator)}


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 4, generator=generator)


def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (inputs @ params["w"].T + params["b"] - targets).square().mean()


TASK = Task(init, batch, loss, validation=batch(99, 0))


def muon(rate: float) -> mfx.Transform:
    labels = {"w": "muon", "b": "adamw"}
    return mfx.muon_with_adamw(
        rate, rate, labels=labels, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
    )


OPTIMIZERS = {"muon": muon, "adamw": mfx.adamw}


def by_hand(tx: mfx.Transform, seed: int, steps: int) -> tuple[list[float], list[float]]:
    """The training loss of each step, and the validation loss after it, of a loop as one writes it."""
    params = init(seed)
    state = tx.init(params)
    training, validation = [], []
    for step in range(steps):
        grads, value = torch.func.grad_and_value(loss)(params, batch(seed, step))
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        training.append(value.item())
        validation.append(loss(params, TASK.validation).item())
    return training, validation


def run_of(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


# ---------------------------------------------------------------------------------------------------------- the runs


@pytest.mark.parametrize("vmap", [True, False])
def test_each_run_is_the_run_of_a_loop(vmap: bool) -> None:
    rows = mfx.study(
        TASK,
        OPTIMIZERS,
        rates=[0.01, 0.1],
        seeds=[3, 5],
        steps=STEPS,
        report_every=1,
        vmap=vmap,
        progress=False,
    )
    for name, make in OPTIMIZERS.items():
        for rate in (0.01, 0.1):
            for seed in (3, 5):
                run = run_of(rows, optimizer=name, rate=rate, seed=seed)
                training, validation = by_hand(make(rate), seed, STEPS)
                assert [row["step"] for row in run] == list(range(1, STEPS + 1))
                assert [row["loss"] for row in run] == pytest.approx(training, rel=1e-4)
                assert [row["validation_loss"] for row in run] == pytest.approx(
                    validation, rel=1e-4
                )


@settings(max_examples=20)
@given(
    steps=st.integers(1, 12),
    report_every=st.none() | st.integers(1, 15),
    seeds=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    rates=st.lists(st.sampled_from([0.01, 0.1, 1.0]), min_size=1, max_size=2, unique=True),
)
def test_rows_are_in_order_and_the_mean_of_their_losses_is_the_mean_of_all(
    steps: int, report_every: int | None, seeds: list[int], rates: list[float]
) -> None:
    rows = mfx.study(
        TASK,
        {"adamw": mfx.adamw},
        rates=rates,
        seeds=seeds,
        steps=steps,
        report_every=report_every,
        progress=False,
    )
    keys = [(row["rate"], row["seed"], row["step"]) for row in rows]
    assert sorted(keys, key=lambda key: (rates.index(key[0]), seeds.index(key[1]), key[2])) == keys
    assert len(set(keys)) == len(keys)
    for rate in rates:
        for seed in seeds:
            run = run_of(rows, rate=rate, seed=seed)
            assert run[-1]["step"] == steps
            starts = [0, *(row["step"] for row in run[:-1])]
            total = sum(
                row["loss"] * (row["step"] - start) for row, start in zip(run, starts, strict=True)
            )
            assert total == pytest.approx(sum(by_hand(mfx.adamw(rate), seed, steps)[0]), rel=1e-4)


def test_each_optimizer_may_have_rates_of_its_own() -> None:
    rates = {"muon": [0.1], "adamw": [0.01, 0.001]}
    rows = mfx.study(TASK, OPTIMIZERS, rates=rates, seeds=[0], steps=1, progress=False)
    assert [(row["optimizer"], row["rate"]) for row in rows] == [
        ("muon", 0.1),
        ("adamw", 0.01),
        ("adamw", 0.001),
    ]


def test_a_run_that_diverges_leaves_the_others_alone() -> None:
    rows = mfx.study(
        TASK,
        {"sgd": mfx.scale_by_learning_rate},
        rates=[0.1, 1e30],
        seeds=[0],
        steps=STEPS,
        progress=False,
    )
    training, _ = by_hand(mfx.scale_by_learning_rate(0.1), 0, STEPS)
    assert run_of(rows, rate=0.1)[-1]["loss"] == pytest.approx(training[-1], rel=1e-5)
    assert not math.isfinite(run_of(rows, rate=1e30)[-1]["loss"])


def test_progress_shows_the_lowest_loss_of_the_runs_that_have_not_diverged() -> None:
    lines: list[str] = []
    optimizers = {"sgd": mfx.scale_by_learning_rate}
    rows = mfx.study(
        TASK, optimizers, rates=[0.1, 1e30], seeds=[0], steps=STEPS, progress=lines.append
    )
    assert lines[-1].endswith(f"lowest loss {run_of(rows, rate=0.1)[-1]['loss']:.4g}")


@pytest.mark.parametrize("vmap", [True, False])
def test_a_module_with_attention_and_dropout_trains(vmap: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 12)

        def forward(self, inputs: Tensor) -> Tensor:
            query, key, value = self.project(inputs).chunk(3, -1)
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return nn.functional.dropout(attended, 0.1)

    task = Task.of_module(
        Attends,
        lambda seed, step: torch.ones(2, 5, 4),
        lambda model, inputs: (model(inputs) - 1).square().mean(),
    )
    before = torch.get_rng_state()
    task.init(3)
    assert torch.equal(torch.get_rng_state(), before)
    rows = mfx.study(
        task, {"adamw": mfx.adamw}, rates=[0.01], seeds=[0, 1], steps=5, vmap=vmap, progress=False
    )
    assert "validation_loss" not in rows[0]
    for seed in (0, 1):
        run = run_of(rows, seed=seed)
        assert run[-1]["loss"] < run[0]["loss"]


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 4))


def loss_of_model(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def with_noise_in_the_loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return loss(params, (inputs, targets + torch.randn_like(targets)))


RANDOM_TASKS = {
    "dropout": Task.of_module(with_dropout, batch, loss_of_model, validation=batch(99, 0)),
    "noise": TASK._replace(loss=with_noise_in_the_loss),
}


@pytest.mark.parametrize("name", RANDOM_TASKS)
@pytest.mark.parametrize("vmap", [True, False])
def test_equal_optimizers_draw_equal_random_numbers_and_those_of_the_caller_are_kept(
    name: str, vmap: bool
) -> None:
    task = RANDOM_TASKS[name]
    optimizers = {"first": mfx.adamw, "second": mfx.adamw}
    arguments = {
        "rates": [0.01, 0.1],
        "seeds": [0, 1],
        "steps": STEPS,
        "vmap": vmap,
        "progress": False,
    }
    state_before = torch.get_rng_state()
    rows = mfx.study(task, optimizers, **arguments)
    assert torch.equal(torch.get_rng_state(), state_before)
    torch.rand(1)
    assert mfx.study(task, optimizers, **arguments) == rows
    first = run_of(rows, optimizer="first")
    assert [row | {"optimizer": "second"} for row in first] == run_of(rows, optimizer="second")


def init_of_dropout(seed: int) -> dict[str, Tensor]:
    return RANDOM_TASKS["dropout"].init(0)


def test_random_numbers_depend_on_the_seed_and_the_step_alone() -> None:
    still = {"still": lambda rate: mfx.scale_by_learning_rate(1e-30 * rate)}
    same_batch = RANDOM_TASKS["dropout"]._replace(
        init=init_of_dropout, batch=lambda seed, step: batch(0, 0)
    )
    arguments = {"steps": 3, "report_every": 1, "progress": False}
    rows = mfx.study(same_batch, still, rates=[0.1, 0.2], seeds=[0, 1], **arguments)
    assert len({row["loss"] for row in rows}) == 6  # for two seeds and three steps
    alone = mfx.study(same_batch, still, rates=[0.2], seeds=[1], vmap=False, **arguments)
    assert alone == run_of(rows, rate=0.2, seed=1)


def test_a_loss_that_draws_from_another_generator_is_refused() -> None:
    generator = torch.Generator()
    task = TASK._replace(
        loss=lambda params, batch: loss(params, batch) + torch.rand((), generator=generator)
    )
    with pytest.raises(
        ValueError, match="loss: two calls from the same random state of torch gave "
    ):
        mfx.study(task, OPTIMIZERS, rates=[0.1], seeds=[0], steps=2, progress=False)


@pytest.mark.parametrize("vmap", [True, False])
def test_the_validation_loss_of_a_module_is_measured_in_eval_mode(vmap: bool) -> None:
    task = Task.of_module(with_dropout, batch, loss_of_model, validation=batch(99, 0))
    rows = mfx.study(
        task,
        {"still": lambda rate: mfx.scale_by_learning_rate(0.0 * rate)},
        rates=[1.0],
        seeds=[0, 1],
        steps=3,
        vmap=vmap,
        progress=False,
    )
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = loss_of_model(with_dropout().eval(), batch(99, 0)).item()
        run = run_of(rows, seed=seed)
        assert [row["validation_loss"] for row in run] == pytest.approx([expected] * 3)
        assert len({row["loss"] for row in run}) == 3


def with_a_frozen_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("vmap", [True, False])
def test_frozen_parameters_of_a_module_are_not_trained(vmap: bool) -> None:
    task = Task.of_module(with_a_frozen_layer, batch, loss_of_model, validation=batch(99, 0))
    assert list(task.init(0)) == ["2.weight", "2.bias"]
    arguments = {"rates": [0.1], "seeds": [0, 1], "steps": STEPS, "vmap": vmap, "progress": False}
    (last_row,) = run_of(mfx.study(task, {"adamw": mfx.adamw}, **arguments), seed=0, step=STEPS)
    torch.manual_seed(0)
    model = with_a_frozen_layer()
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of_model(model, batch(0, step)).backward()
        optimizer.step()
    assert last_row["validation_loss"] == pytest.approx(
        loss_of_model(model, batch(99, 0)).item(), rel=1e-4
    )


def test_a_module_without_trained_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="make_model: found no parameter with requires_grad"):
        Task.of_module(lambda: with_dropout().requires_grad_(False), batch, loss_of_model)


class Encodes(nn.Module):
    """A module with a method that a loss may call, and an attribute that it may read."""

    penalty = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)

    def encode(self, inputs: Tensor) -> Tensor:
        return self.encoder(inputs).tanh()


def regularized_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    squares = [param.square().sum() for param in model.parameters()]
    decay = model.penalty * sum(squares) + model.encoder.weight.abs().sum()
    return (model.encode(inputs) - targets).square().mean() + decay


@pytest.mark.parametrize("vmap", [True, False])
def test_a_loss_may_read_parameters_attributes_and_methods_of_a_module(vmap: bool) -> None:
    task = Task.of_module(Encodes, batch, regularized_loss)
    params = task.init(3)
    gradients = torch.func.grad(task.loss)(params, batch(3, 0))
    torch.manual_seed(3)
    model = Encodes()
    regularized_loss(model, batch(3, 0)).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad)
    rows = mfx.study(
        task,
        {"adamw": mfx.adamw},
        rates=[0.1],
        seeds=[0, 1],
        steps=STEPS,
        vmap=vmap,
        progress=False,
    )
    assert run_of(rows, seed=1)[-1]["loss"] < run_of(rows, seed=1)[0]["loss"]


def test_buffers_and_frozen_parameters_do_not_depend_on_the_state_of_the_caller() -> None:
    tasks = [Task.of_module(with_a_frozen_layer, batch, loss_of_model) for _ in range(2)]
    assert tasks[0].loss(tasks[0].init(1), batch(0, 0)) == tasks[1].loss(
        tasks[1].init(1), batch(0, 0)
    )


def test_the_module_in_eval_mode_has_the_buffers_of_the_module() -> None:
    class Projects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("random", torch.randn(3, 4))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.random * self.scale

    task = Task.of_module(Projects, batch, loss_of_model, validation=batch(99, 0))
    assert task.validation_loss is not None
    params = task.init(0)
    assert torch.equal(task.validation_loss(params, batch(0, 0)), task.loss(params, batch(0, 0)))


def test_a_task_may_have_a_loss_for_validation_alone() -> None:
    task = TASK._replace(validation_loss=lambda params, batch: loss(params, batch) + 1)
    arguments = {"rates": [0.1], "seeds": [0, 1], "steps": 2, "progress": False}
    rows = mfx.study(task, OPTIMIZERS, **arguments)
    expected = mfx.study(TASK, OPTIMIZERS, **arguments)
    for row, row_with_loss in zip(rows, expected, strict=True):
        assert row["loss"] == row_with_loss["loss"]
        assert row["validation_loss"] == pytest.approx(row_with_loss["validation_loss"] + 1)


def schedule_free(rate: float) -> mfx.Transform:
    return mfx.contrib.schedule_free(
        mfx.chain(mfx.scale_by_adam(b1=0.0), mfx.scale_by_learning_rate(rate)), rate
    )


def with_average(rate: float) -> mfx.Transform:
    return mfx.chain(mfx.adamw(rate), mfx.ema_params(0.5))


@pytest.mark.parametrize("vmap", [True, False])
@pytest.mark.parametrize(
    ("make", "average"),
    [
        (schedule_free, mfx.contrib.schedule_free_eval_params),
        (with_average, lambda state, params: mfx.tree.get(state, "average")),
    ],
)
def test_validation_losses_are_those_of_eval_params(make: Any, average: Any, vmap: bool) -> None:
    optimizers = {"averaged": make, "adamw": mfx.adamw}
    arguments = {"rates": [0.1, 0.3], "seeds": [0], "steps": STEPS, "vmap": vmap, "progress": False}
    rows = mfx.study(TASK, optimizers, eval_params={"averaged": average}, **arguments)
    params = init(0)
    tx = make(0.3)
    state = tx.init(params)
    for step in range(STEPS):
        updates, state = tx.update(torch.func.grad(loss)(params, batch(0, step)), state, params)
        params = mfx.apply_updates(params, updates)
    (row,) = run_of(rows, optimizer="averaged", rate=0.3, step=STEPS)
    expected = loss(average(state, params), TASK.validation).item()
    assert row["validation_loss"] == pytest.approx(expected, rel=1e-4)
    assert row["validation_loss"] != pytest.approx(loss(params, TASK.validation).item(), rel=1e-3)
    assert run_of(rows, optimizer="adamw") == mfx.study(TASK, {"adamw": mfx.adamw}, **arguments)


def test_schedule_free_without_eval_params_is_warned_of() -> None:
    arguments = {"rates": [0.1, 0.3], "seeds": [0], "steps": 1, "progress": False}
    with pytest.warns(
        UserWarning, match=r"pass eval_params=\{'free': muonfx.contrib.schedule_free_eval_params\}"
    ):
        mfx.study(TASK, {"free": schedule_free}, **arguments)
    mfx.study(TASK._replace(validation=None), {"free": schedule_free}, **arguments)  # no warning


# ---------------------------------------------------------------------------------------------------------- progress


def test_progress_is_a_line_for_each_report() -> None:
    lines: list[str] = []
    mfx.study(
        TASK, OPTIMIZERS, rates=[0.1], seeds=[0, 1], steps=4, report_every=2, progress=lines.append
    )
    assert [line.partition(",")[0] for line in lines] == [
        "muon: step 2 of 4",
        "muon: step 4 of 4",
        "adamw: step 2 of 4",
        "adamw: step 4 of 4",
    ]


# ---------------------------------------------------------------------------------------------------------- a folder


class Interrupted(Exception):
    pass


def interrupted_at(step: int) -> Task:
    """The task until a step, which is none of those whose batches are compared: the first, the middle, the last."""

    def batch_until(seed: int, at: int) -> tuple[Tensor, Tensor]:
        if at == step:
            raise Interrupted
        return batch(seed, at)

    return TASK._replace(batch=batch_until)


@pytest.mark.parametrize("vmap", [True, False])
@pytest.mark.parametrize("step", [1, 4, 5])
def test_an_interrupted_study_goes_on_with_the_same_bits(
    step: int, vmap: bool, tmp_path: Path
) -> None:
    arguments = {
        "rates": [0.01, 0.1],
        "seeds": [0, 1],
        "steps": STEPS,
        "report_every": 2,
        "vmap": vmap,
    }
    expected = mfx.study(TASK, OPTIMIZERS, **arguments, progress=False)
    with pytest.raises(Interrupted):
        mfx.study(interrupted_at(step), OPTIMIZERS, **arguments, folder=tmp_path, progress=False)
    assert mfx.study(TASK, OPTIMIZERS, **arguments, folder=tmp_path, progress=False) == expected
    lines: list[str] = []  # what is complete is not trained again
    assert (
        mfx.study(
            interrupted_at(1), OPTIMIZERS, **arguments, folder=tmp_path, progress=lines.append
        )
        == expected
    )
    assert not lines


def other_from_step_5(seed: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(seed, step)
    return (inputs, targets) if step < 5 else (inputs, targets + 1)


def other_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(seed + 7, step)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"task": TASK._replace(batch=other_batch)}, "first losses"),
        ({"task": TASK._replace(batch=other_from_step_5)}, "averages of the batches at step 6"),
        ({"task": TASK._replace(init=lambda seed: init(seed + 1))}, "first losses"),
        ({"task": TASK._replace(validation=batch(98, 0))}, "validation losses at step 7"),
        ({"task": TASK._replace(validation=None)}, "validation losses at step 7"),
        (
            {"task": TASK._replace(validation_loss=lambda params, batch: 2 * loss(params, batch))},
            "validation losses",
        ),
        (
            {
                "optimizers": {
                    "muon": lambda rate: mfx.chain(mfx.clip_by_global_norm(1.0), muon(rate))
                }
            },
            "transform",
        ),
        ({"optimizers": {"muon": lambda rate: mfx.adamw(rate)}}, "transform"),
        (
            {"optimizers": {"muon": lambda rate: muon(rate + 1e-9)}},
            r"[a-z_.]*learning_rate[a-z_.]*",
        ),
        ({"rates": [0.1, 0.3]}, "rates"),
        ({"seeds": [0, 2]}, "seeds"),
        ({"seeds": [0, 1, 2]}, "seeds"),
        ({"steps": STEPS + 1}, "reports"),
        ({"report_every": 3}, "reports"),
    ],
)
def test_a_folder_of_another_study_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    arguments = {
        "task": TASK,
        "optimizers": {"muon": muon},
        "rates": [0.1, 0.2],
        "seeds": [0, 1],
        "steps": STEPS,
        "folder": tmp_path,
        "progress": False,
    }
    rows = mfx.study(**arguments)
    with pytest.raises(ValueError, match=f"folder: .*another study: {named}.* was"):
        mfx.study(**arguments | changes)
    assert mfx.study(**arguments) == rows


@pytest.mark.parametrize("vmap", [True, False])
def test_numbers_of_another_study_are_named(vmap: bool, tmp_path: Path) -> None:
    arguments = {
        "rates": [0.1, 0.2],
        "seeds": [0],
        "steps": 2,
        "folder": tmp_path,
        "vmap": vmap,
        "progress": False,
    }
    mfx.study(TASK, {"adamw": lambda rate: mfx.adamw(rate, b2=0.95)}, **arguments)
    with pytest.raises(
        ValueError,
        match=r"study: scale_by_adam.b2 was 0.95, and is now 0.9; [a-z_.]*weight_decay was",
    ):
        mfx.study(
            TASK, {"adamw": lambda rate: mfx.adamw(rate, b2=0.9, weight_decay=0.1)}, **arguments
        )


def test_transforms_of_other_structures_are_shown() -> None:
    def one_or_the_other(rate: float) -> mfx.Transform:
        return mfx.adamw(rate) if rate < 0.15 else mfx.scale(-rate)

    with pytest.raises(
        ValueError, match=r"'a'\]: its transforms of 2 runs .*vmap=False \(.*is scale\(.*chain\("
    ):
        mfx.study(
            TASK, {"a": one_or_the_other}, rates=[0.1, 0.2], seeds=[0], steps=2, progress=False
        )


def test_a_folder_with_validation_losses_of_other_parameters_is_refused(tmp_path: Path) -> None:
    arguments = {"rates": [0.1], "seeds": [0], "steps": 4, "folder": tmp_path, "progress": False}
    averages = {"averaged": lambda state, params: mfx.tree.get(state, "average")}
    mfx.study(TASK, {"averaged": with_average}, **arguments)
    with pytest.raises(ValueError, match="another study: validation losses at step 4 was"):
        mfx.study(TASK, {"averaged": with_average}, eval_params=averages, **arguments)


def test_a_folder_without_validation_losses_is_refused_for_a_task_with_them(tmp_path: Path) -> None:
    arguments = {"rates": [0.1], "seeds": [0, 1], "steps": 2, "folder": tmp_path, "progress": False}
    mfx.study(TASK._replace(validation=None), OPTIMIZERS, **arguments)
    with pytest.raises(
        ValueError, match=r"another study: validation losses at step 2 was \[nan, nan\]"
    ):
        mfx.study(TASK, OPTIMIZERS, **arguments)


def test_another_validation_batch_is_refused_after_a_start_at_which_all_have_the_same_loss(
    tmp_path: Path,
) -> None:
    def cross_entropy(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(inputs @ params["w"].T, targets.argmax(1))

    task = Task(
        lambda seed: {"w": torch.zeros(4, 3)}, batch, cross_entropy, validation=batch(99, 0)
    )
    arguments = {"rates": [0.1], "seeds": [0], "steps": 2, "folder": tmp_path, "progress": False}
    rows = mfx.study(task, {"adamw": mfx.adamw}, **arguments)
    with pytest.raises(ValueError, match="another study: validation losses at step 2 was"):
        mfx.study(task._replace(validation=batch(98, 0)), {"adamw": mfx.adamw}, **arguments)
    assert mfx.study(task, {"adamw": mfx.adamw}, **arguments) == rows


@pytest.mark.parametrize("vmap", [True, False])
def test_a_study_with_dropout_goes_on_with_the_same_bits(vmap: bool, tmp_path: Path) -> None:
    task = Task.of_module(with_dropout, batch, loss_of_model, validation=batch(99, 0))
    task = task._replace(validation_loss=None)  # with dropout, too
    arguments = {
        "rates": [0.1],
        "seeds": [0, 1],
        "steps": 6,
        "report_every": 2,
        "vmap": vmap,
        "progress": False,
    }
    expected = mfx.study(task, {"adamw": mfx.adamw}, **arguments)
    interrupted = task._replace(batch=interrupted_at(4).batch)
    with pytest.raises(Interrupted):
        mfx.study(interrupted, {"adamw": mfx.adamw}, **arguments, folder=tmp_path)
    torch.rand(1)  # the state of the caller does not matter
    assert mfx.study(task, {"adamw": mfx.adamw}, **arguments, folder=tmp_path) == expected


def batch_with_missing_targets(seed: int, step: int) -> dict[str, Any]:
    inputs, targets = batch(seed, step)
    targets[0, 0] = torch.nan
    inputs_with_phase = torch.complex(inputs, inputs + 1)
    return {
        "inputs": inputs,
        "targets": targets,
        "empty": torch.zeros(0),
        "complex": inputs_with_phase,
    }


def loss_without_missing_targets(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    known_targets = batch["targets"].nan_to_num()
    return loss(params, (batch["inputs"], known_targets))


@pytest.mark.parametrize("vmap", [True, False])
def test_batches_with_nan_complex_numbers_or_no_elements_are_saved(
    vmap: bool, tmp_path: Path
) -> None:
    task = Task(init, batch_with_missing_targets, loss_without_missing_targets)
    arguments = {
        "rates": [0.1],
        "seeds": [0, 1],
        "steps": 2,
        "folder": tmp_path,
        "vmap": vmap,
        "progress": False,
    }
    rows = mfx.study(task, {"adamw": mfx.adamw}, **arguments)
    assert mfx.study(task, {"adamw": mfx.adamw}, **arguments) == rows


def test_seeds_of_numpy_are_saved_too(tmp_path: Path) -> None:
    arguments = {"rates": [0.1, 0.2], "steps": 2, "folder": tmp_path, "progress": False}
    rows = mfx.study(TASK, OPTIMIZERS, seeds=np.arange(2), **arguments)
    assert mfx.study(TASK, OPTIMIZERS, seeds=[0, 1], **arguments) == rows


@pytest.mark.parametrize("name", ["a/b", "..", "ä 1", "CON", "a%2Fb"])
def test_any_name_is_a_folder_within_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    mfx.study(
        TASK, {name: mfx.adamw}, rates=[0.1, 0.2], seeds=[0], steps=1, folder=folder, progress=False
    )
    assert [path.parent for path in folder.iterdir()] == [folder]
    assert list(tmp_path.iterdir()) == [folder]


# ------------------------------------------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizers": {}}, "optimizers: found none"),
        ({"seeds": []}, "seeds: found"),
        ({"seeds": [1, 1]}, "seeds: found"),
        ({"rates": []}, "rates: found"),
        ({"rates": [0.1, 0.1]}, "rates: found"),
        ({"rates": {"muon": [0.1]}}, "rates: found rates for .*expected rates for"),
        (
            {"eval_params": {"moun": dict}},
            r"eval_params: found \['moun'\], expected names of \['adamw', 'muon'\]",
        ),
        ({"steps": 0}, "steps: found 0"),
        ({"report_every": 0}, "report_every: found 0"),
        (
            {
                "optimizers": {
                    "either": lambda rate: mfx.scale(-rate) if rate < 0.05 else mfx.adamw(rate)
                }
            },
            "optimizers.'either'.*vmap=False",
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "task": TASK,
        "optimizers": OPTIMIZERS,
        "rates": [0.01, 0.1],
        "seeds": [0, 1],
        "steps": 2,
    }
    with pytest.raises(ValueError, match=message):
        mfx.study(**arguments | changes, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch": lambda seed, step: (torch.randn(8, 3), torch.randn(8, 4))},
            "batch: two calls with seed 3 and step",
        ),
        (
            {"init": lambda seed: {"w": torch.randn(4, 3), "b": torch.zeros(4)}},
            "init: two calls with seed 3 differ",
        ),
    ],
)
def test_a_task_that_differs_between_two_calls_is_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mfx.study(
            TASK._replace(**changes), OPTIMIZERS, rates=[0.1], seeds=[3], steps=2, progress=False
        )


@pytest.mark.parametrize(("argument", "value"), [("seeds", 3), ("rates", 0.1)])
def test_a_number_in_place_of_a_list_is_named(argument: str, value: Any) -> None:
    arguments: dict[str, Any] = {"rates": [0.1], "seeds": [0], "steps": 2, "progress": False}
    with pytest.raises(TypeError, match=f"{argument}: found {value}, expected a "):
        mfx.study(TASK, OPTIMIZERS, **arguments | {argument: value})


def test_a_transform_in_place_of_a_function_of_a_rate_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"optimizers\['adamw'\]: found a transform, .*lambda rate: "
    ):
        mfx.study(TASK, {"adamw": mfx.adamw(1e-3)}, rates=[0.1], seeds=[0], steps=2, progress=False)  # type: ignore[dict-item]


ONE_RUN: dict[str, Any] = {"rates": [0.1], "seeds": [3], "steps": 2, "progress": False}
SEVERAL_RUNS: dict[str, Any] = {"rates": [0.1, 0.2], "seeds": [0, 1], "steps": 2, "progress": False}


@pytest.mark.parametrize("rate", ["1e-3", True, None, 0.1j])
def test_a_rate_that_is_no_number_is_named(rate: Any) -> None:
    with pytest.raises(TypeError, match=r"^study: rates must be a number or a 0-d tensor, found "):
        mfx.study(TASK, OPTIMIZERS, **{**ONE_RUN, "rates": [rate]})


def result_of(value: Any) -> Any:
    return lambda *_: value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch": result_of({"x": torch.ones(2), "n": 3})},
            "batch: found 3 at 'n', expected a tree of tensors",
        ),
        (
            {"validation": {"x": torch.ones(2), "n": 3}},
            "validation: found 3 at 'n', expected a tree of tensors",
        ),
        ({"init": result_of({"w": 1.0})}, "init: found 1.0 at 'w', expected a tree of tensors"),
        (
            {"loss": result_of(torch.ones(2))},
            r"loss: found a result of shape \(2,\), expected a 0-d tensor",
        ),
        ({"loss": result_of(2.0)}, "loss: found a result of type float, expected a 0-d tensor"),
        (
            {"validation_loss": result_of(2.0)},
            "validation_loss: found a result of type float, expected a 0-d",
        ),
    ],
)
def test_a_function_of_a_task_with_a_result_of_another_type_is_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        mfx.study(TASK._replace(**changes), OPTIMIZERS, **ONE_RUN)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ([mfx.adamw], "optimizers: found a list, expected a dict from name to a function"),
        (
            {"a": lambda rate: torch.optim.AdamW},
            r"optimizers\['a'\]: found a function that returns <class .*AdamW'>",
        ),
    ],
)
def test_optimizers_of_another_type_are_named(optimizers: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mfx.study(TASK, optimizers, **ONE_RUN)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "eval_params: found a result of type NoneType, expected a dict"),
        ({"w": torch.ones(4, 3)}, r"eval_params: found a dict of \['w'\], expected \['w', 'b'\]"),
    ],
)
@pytest.mark.parametrize("arguments", [ONE_RUN, SEVERAL_RUNS])
def test_other_results_of_eval_params_are_named(
    result: Any, message: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=message):
        mfx.study(TASK, {"adamw": mfx.adamw}, eval_params={"adamw": result_of(result)}, **arguments)


def test_batches_whose_shapes_depend_on_the_seed_train_one_after_another() -> None:
    def batch_of_another_size(seed: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(seed, step)
        return inputs[: 4 + seed], targets[: 4 + seed]

    task = TASK._replace(batch=batch_of_another_size)
    with pytest.raises(
        ValueError, match=r"batch: found shapes .*'0': \(4, 3\).* for seed 1, .*: pass vmap=False"
    ):
        mfx.study(task, OPTIMIZERS, **SEVERAL_RUNS)
    assert mfx.study(task, OPTIMIZERS, **SEVERAL_RUNS, vmap=False)


def loss_with_item(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(params, batch) * loss(params, batch).item()


def loss_with_branch(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    value = loss(params, batch)
    if value < 1:
        return value
    return 2 * value


@pytest.mark.parametrize("loss_of_one_run", [loss_with_item, loss_with_branch])
def test_a_loss_that_vmap_does_not_support_trains_one_after_another(loss_of_one_run: Any) -> None:
    task = TASK._replace(loss=loss_of_one_run)
    with pytest.raises(
        ValueError, match=r"vmap: found True, but these runs cannot .*: pass vmap=False"
    ):
        mfx.study(task, OPTIMIZERS, **SEVERAL_RUNS)
    assert mfx.study(task, OPTIMIZERS, **SEVERAL_RUNS, vmap=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: mfx.chain(mfx.scale_by_adam(), mfx.scale(rate)),
        lambda rate: mfx.chain(mfx.scale_by_adam(), mfx.add_decayed_weights(rate)),
    ],
)
def test_an_optimizer_that_increases_the_loss_is_warned_of(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"optimizers\['up'\]: each step would increase the loss"):
        mfx.study(TASK, {"adamw": mfx.adamw, "up": make}, **SEVERAL_RUNS)


def test_an_optimizer_that_does_not_use_its_rate_is_warned_of() -> None:
    with pytest.warns(
        UserWarning,
        match=r"optimizers\['same'\]: the transforms for the rates 0.1 and 0.2 are equal",
    ):
        mfx.study(TASK, {"same": lambda rate: mfx.adamw(0.1)}, **SEVERAL_RUNS)
    scheduled = {"scheduled": lambda rate: mfx.adamw(mfx.cosine_decay_schedule(rate, 2))}
    mfx.study(TASK, scheduled, **SEVERAL_RUNS)  # no warning


def test_a_loss_without_a_gradient_is_warned_of() -> None:
    task = TASK._replace(loss=lambda params, batch: loss(params, batch).detach())
    with pytest.warns(
        UserWarning, match="loss: its gradient in the first step is zero for all parameters"
    ):
        mfx.study(task, OPTIMIZERS, **SEVERAL_RUNS)


def test_transforms_of_any_structure_train_one_after_another() -> None:
    either = {"either": lambda rate: mfx.scale(-rate) if rate < 0.05 else mfx.adamw(rate)}
    rows = mfx.study(
        TASK, either, rates=[0.01, 0.1], seeds=[0], steps=3, vmap=False, progress=False
    )
    assert run_of(rows, rate=0.01)[-1]["loss"] == pytest.approx(
        by_hand(mfx.scale(-0.01), 0, 3)[0][-1], rel=1e-5
    )


def test_a_model_with_running_statistics_is_refused():
    def task(**options: Any) -> Task:
        def make_model() -> nn.Module:
            return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, **options))

        return Task.of_module(
            make_model,
            lambda seed, step: torch.ones(4, 2),
            lambda model, x: model(x).square().mean(),
        )

    with pytest.raises(
        ValueError, match=r"'1' is a BatchNorm1d with running statistics.*track_running_stats=False"
    ):
        task()
    rows = mfx.study(
        task(track_running_stats=False),
        {"a": mfx.adamw},
        rates=[0.1],
        seeds=[0],
        steps=2,
        progress=False,
    )
    assert len(rows) > 0
