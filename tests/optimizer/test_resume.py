"""The sources of a resumed run: the table in docs/checkpoints.md, row by row."""

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

import muonfx as mfx

RATE = "scale_by_learning_rate.learning_rate"


def optimizer_for(tx: mfx.Transform, steps: int = 0) -> mfx.TransformOptimizer:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = mfx.TransformOptimizer(model, tx, model=model)
    optimizer.model = model  # type: ignore[attr-defined]
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer: Any) -> float:
    """Step on a gradient of 1, and return the change: the rate, if the chain has nothing else."""
    (param,) = optimizer.param_groups[0]["params"]
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    optimizer.step()
    return float((before - param.detach()).item())


def by_torch_save(old: Any, new: Any) -> None:
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    new.load_state_dict(torch.load(file, weights_only=True))


def by_torch_dcp(old: Any, new: Any) -> None:
    saved = copy.deepcopy(get_optimizer_state_dict(old.model, old))
    set_optimizer_state_dict(new.model, new, saved)


def by_checkpoint(old: Any, new: Any) -> None:
    path = mfx.checkpoint.save(tempfile.mkdtemp(), old.transform_state, tx=old.transform)
    saved = mfx.checkpoint.load(path, like=new.transform_state, tx=new.transform)
    mfx.tree.map(lambda own, loaded: own.copy_(loaded), new.transform_state, saved)


WAYS: dict[str, Callable[[Any, Any], None]] = {
    "torch.save": by_torch_save,
    "torch's DCP": by_torch_dcp,
    "mfx.checkpoint": by_checkpoint,
}


def messages_of(how: str, old: Any, new: Any) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        WAYS[how](old, new)
    return [str(warning.message) for warning in caught if "other numbers" in str(warning.message)]


def cosine(peak: float, total: int) -> mfx.Schedule:
    return mfx.warmup_cosine_decay_schedule(peak, 2, total)


SCHEDULES: dict[str, tuple[Any, Any]] = {
    "floats and ints": (cosine(1.0, 100), cosine(0.1, 10)),
    "floats": (cosine(1.0, 100), cosine(0.1, 100)),
    "ints": (cosine(1.0, 100), cosine(1.0, 10)),
    "another kind": (cosine(1.0, 100), mfx.linear_schedule(0.1, 0.0, 10)),
    "joined": (
        mfx.join_schedules([mfx.constant_schedule(1.0), mfx.linear_schedule(1.0, 0.0, 90)], [2]),
        mfx.join_schedules([mfx.constant_schedule(0.1), mfx.linear_schedule(0.1, 0.0, 9)], [3]),
    ),
    "tensors": (cosine(torch.tensor(1.0), 100), cosine(torch.tensor(0.1), 10)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_comes_whole_from_the_code(name: str, how: str):
    before, after = SCHEDULES[name]
    old = optimizer_for(mfx.scale_by_learning_rate(before), steps=5)
    new = optimizer_for(mfx.scale_by_learning_rate(after))
    if how == "mfx.checkpoint" and name != "floats":
        with pytest.raises(mfx.checkpoint.MismatchError, match="allow_other_chain=True"):
            by_checkpoint(old, new)
        return
    messages = messages_of(how, old, new)
    assert step(new) == pytest.approx(float(after(5)), rel=1e-6)
    assert len(messages) == 1
    assert "code" in messages[0]
    source = "checkpoint" if how == "mfx.checkpoint" else "file"
    assert messages[0].count(f" in the {source}, ") == 1  # the whole schedule is reported once
    if name != "joined":
        assert messages_of(how, old, optimizer_for(mfx.scale_by_learning_rate(before))) == []


def by_optimizer_checkpoint(old: Any, new: Any) -> None:
    mfx.checkpoint.load(mfx.checkpoint.save(tempfile.mkdtemp(), old), new)


def by_load_changed(old: Any, new: Any) -> None:
    mfx.checkpoint.load_changed(mfx.checkpoint.save(tempfile.mkdtemp(), old), new)


@pytest.mark.parametrize(
    "resume", [by_torch_save, by_torch_dcp, by_optimizer_checkpoint, by_load_changed]
)
def test_a_number_of_a_schedule_that_was_written_into_the_groups_comes_from_the_file(
    resume: Callable[..., None],
):
    old = optimizer_for(mfx.adamw(cosine(1.0, 100), weight_decay=0.0), steps=1)
    old.param_groups[0][f"{RATE}.peak"] = 0.5
    step(old)
    new = optimizer_for(mfx.adamw(cosine(1.0, 100), weight_decay=0.0))
    with warnings.catch_warnings(action="error"):  # the code has not changed
        resume(old, new)
    assert new.param_groups[0][f"{RATE}.peak"] == 0.5
    assert step(new) == pytest.approx(step(old))


def test_a_written_number_of_a_schedule_that_has_changed_comes_from_the_code():
    old = optimizer_for(mfx.adamw(cosine(1.0, 100), weight_decay=0.0), steps=1)
    old.param_groups[0][f"{RATE}.peak"] = 0.5
    new = optimizer_for(mfx.adamw(cosine(1.0, 200)))
    with pytest.warns(
        UserWarning, match="peak=0.5.*in the file, .*peak=1.0.*in the code; the code's is"
    ):
        new.load_state_dict(old.state_dict())
    assert new.param_groups[0][f"{RATE}.peak"] == 1.0


def test_a_difference_of_schedules_is_reported_by_name_with_both_values():
    old = optimizer_for(mfx.adamw(cosine(1.0, 100)), steps=2)
    new = optimizer_for(mfx.adamw(cosine(0.1, 10)))
    for _ in range(2):  # each load reports it
        (message,) = messages_of("torch.save", old, new)
        for part in (RATE, "peak=1.0", "total_steps=100", "peak=0.1", "total_steps=10"):
            assert part in message


def test_a_saved_initial_rate_that_is_no_number_is_loaded_and_reported():
    saved = optimizer_for(mfx.adamw(0.5), steps=2).state_dict()
    saved["param_groups"][0]["initial_lr"] = None
    new = optimizer_for(mfx.adamw(0.25))
    with pytest.warns(UserWarning, match=r"lr: None in the file, 0\.25 in the code"):
        new.load_state_dict(saved)
    assert new.param_groups[0]["initial_lr"] is None


@mfx.schedule
def from_table(rates: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda count: rates[count.long()]


def test_a_table_of_rates_is_compared_where_a_flattened_state_dict_has_no_code_of_schedules():
    """torch drops the code if a group has several parameters."""

    def linear_with(rates: list[float]) -> tuple[nn.Linear, mfx.TransformOptimizer]:
        model = nn.Linear(1, 1)
        tx = mfx.scale_by_learning_rate(from_table(torch.tensor(rates)))
        return model, mfx.TransformOptimizer(model, tx)

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for rates, count in (([1.0, 2.0, 4.0], 0), ([1.0, 3.0, 4.0], 1), ([1.0, 2.0, 4.0, 5.0], 1)):
        saved = get_optimizer_state_dict(*linear_with([1.0, 2.0, 4.0]), options=options)
        with warnings.catch_warnings(record=True, action="always") as caught:
            set_optimizer_state_dict(*linear_with(rates), saved, options=options)
        messages = [
            str(warning.message) for warning in caught if "other numbers" in str(warning.message)
        ]
        assert len(messages) == count
        assert all("learning_rate.rates: " in message for message in messages)
        assert all("the code's is used" in message for message in messages)


NUMBERS: dict[str, tuple[dict[str, Any], Any]] = {
    "lr": ({"learning_rate": 0.25}, 0.25),
    "weight_decay": ({"weight_decay": 0.25}, 0.25),
    "betas": ({"b1": 0.25, "b2": 0.5}, (0.25, 0.5)),
    "eps": ({"eps": 0.25}, 0.25),
}


@pytest.mark.parametrize("how", ["a checkpoint", "a state dict"])
def test_a_tensor_under_two_keys_of_a_group_may_be_two_tensors_in_a_file(how: str, tmp_path: Path):
    """A file may store each entry of a group separately; here "momentum" is the first of "betas"."""
    tx = mfx.adamw(0.1, b1=torch.tensor(0.25))
    old = optimizer_for(tx, steps=1)
    new = optimizer_for(tx)
    if how == "a checkpoint":
        mfx.checkpoint.load(mfx.checkpoint.save(tmp_path / "saved", old), new)
    else:
        saved = old.state_dict()
        (group,) = saved["param_groups"]
        group["momentum"] = group["momentum"].clone()
        new.load_state_dict(saved)
    (group,) = new.param_groups
    new.state_dict()  # reads the group
    assert group["momentum"] is group["betas"][0]
    assert group["momentum"] == 0.25
    rates = step(new), step(old)
    # A checkpoint without params has the weights of the code.
    assert rates[0] == pytest.approx(rates[1], rel=1e-2)


@pytest.mark.parametrize("how", ["a checkpoint", "torch.save"])
@pytest.mark.filterwarnings("ignore:.*was saved with other numbers")
def test_a_scheduler_may_write_the_momentum_between_a_load_and_the_first_step(
    how: str, tmp_path: Path
):
    """As OneCycleLR does under gradient accumulation, or if it is created after the load, with ``last_epoch``."""
    old, new = optimizer_for(mfx.adamw(0.1)), optimizer_for(mfx.adamw(0.1))
    old.param_groups[0]["momentum"] = 0.5
    if how == "a checkpoint":
        mfx.checkpoint.load(mfx.checkpoint.save(tmp_path / "saved", old), new)
    else:
        by_torch_save(old, new)
    new.param_groups[0]["momentum"] = 0.25
    step(new)
    assert new.param_groups[0]["betas"] == (0.25, 0.999)


@pytest.mark.parametrize("number", [np.float64(0.25), np.float32(0.25)])
@pytest.mark.parametrize("how", ["a checkpoint", "torch.save"])
@pytest.mark.filterwarnings("ignore:.*was saved with other numbers")
def test_numbers_of_numpy_are_saved_as_numbers_of_python(how: str, number: Any, tmp_path: Path):
    """Scripts set ``group["lr"] = schedule[step]`` from an array."""
    old, new = optimizer_for(mfx.adamw(0.1)), optimizer_for(mfx.adamw(0.1))
    old.param_groups[0].update(
        lr=number, betas=(number, 0.75), initial_lr=number, layer=np.int64(3)
    )
    if how == "a checkpoint":
        mfx.checkpoint.load(mfx.checkpoint.save(tmp_path / "saved", old), new)
    else:
        by_torch_save(old, new)
    (group,) = new.param_groups
    assert (group["lr"], group["betas"], group["initial_lr"], group["layer"]) == (
        0.25,
        (0.25, 0.75),
        0.25,
        3,
    )
    assert {type(value) for value in (group["lr"], group["momentum"], group["initial_lr"])} == {
        float
    }


@pytest.mark.filterwarnings("ignore:.*was saved with other numbers")
def test_a_checkpoint_has_rates_in_tensors_of_one_dim(tmp_path: Path):
    @mfx.schedule
    def from_table(rates):
        return lambda count: rates[count.long().clamp(max=2)]

    table = torch.tensor([0.5, 0.25, 0.125])
    for rate in (0.1, from_table(table)):
        old, new = optimizer_for(mfx.adamw(rate)), optimizer_for(mfx.adamw(rate))
        old.param_groups[0]["initial_lr"] = torch.tensor([0.75])
        mfx.checkpoint.load(mfx.checkpoint.save(tmp_path / "saved", old), new)
        assert torch.equal(new.param_groups[0]["initial_lr"], torch.tensor([0.75]))
    assert torch.equal(new.param_groups[0]["scale_by_learning_rate.learning_rate.rates"], table)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_in_groups_come_from_a_state_dict_and_are_reported(key: str, as_tensor: bool):
    arguments, value = NUMBERS[key]
    tx = mfx.adamw(**{"learning_rate": 0.1, **arguments})
    old = optimizer_for(mfx.as_tensors(tx) if as_tensor else tx, steps=1)
    new = optimizer_for(mfx.adamw(0.1))
    (message,) = messages_of("torch.save", old, new)
    assert f", {key}: " in message
    assert "in the file" in message
    loaded = new.param_groups[0][key]
    assert (tuple(map(float, loaded)) if key == "betas" else float(loaded)) == value
    same = optimizer_for(mfx.adamw(**{"learning_rate": 0.1, **arguments}))
    assert messages_of("torch.save", old, same) == []


@pytest.mark.parametrize(
    ("key", "number"), [("learning_rate", 0.25), ("weight_decay", 0.5), ("b1", 0.5)]
)
def test_numbers_come_from_the_code_with_a_checkpoint_and_are_reported(key: str, number: float):
    old = optimizer_for(
        mfx.adamw(**{"learning_rate": 0.1, "weight_decay": 0.1, key: number}), steps=1
    )
    new = optimizer_for(mfx.adamw(0.1, weight_decay=0.1))
    before = {name: value for name, value in new.param_groups[0].items() if name != "params"}
    (message,) = messages_of("mfx.checkpoint", old, new)
    assert str(number) in message or "inspect" in message
    assert before == {
        name: value for name, value in new.param_groups[0].items() if name != "params"
    }


def test_a_rate_that_a_torch_scheduler_has_set_is_reported_by_a_checkpoint():
    old = optimizer_for(mfx.adamw(0.1), steps=1)
    scheduler = lr_scheduler.ExponentialLR(old, 0.5)
    step(old)
    scheduler.step()
    new = optimizer_for(mfx.adamw(0.1))
    (message,) = messages_of("mfx.checkpoint", old, new)
    assert "learning_rate: 0.05 in the checkpoint, 0.1 here" in message
    new.param_groups[0]["lr"] = old.param_groups[0]["lr"]
    assert messages_of("mfx.checkpoint", old, new) == []


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10),
}


@pytest.mark.parametrize("how", ["torch.save", "torch's DCP"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_resume_without_a_warning(name: str, how: str):
    old, new = (optimizer_for(mfx.adamw(0.1)) for _ in range(2))
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (old, new)]
    for _ in range(3):
        step(old)
        schedulers[0].step()
    new.model.load_state_dict(old.model.state_dict())
    assert messages_of(how, old, new) == []
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    for _ in range(3):
        assert step(old) == step(new)
        for scheduler in schedulers:
            scheduler.step()


def lowered_by_the_user(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["betas"] = (0.5, 0.75)
        group["weight_decay"] = 0.3


def lowered_on_a_plateau(optimizer: Any) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 1.0):
        scheduler.step(loss)


def lowered_for_averages(optimizer: Any) -> None:
    step(optimizer)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=1)
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize(
    "resume", [by_torch_save, by_torch_dcp, by_optimizer_checkpoint, by_load_changed]
)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("lower", [lowered_by_the_user, lowered_on_a_plateau, lowered_for_averages])
def test_a_number_that_the_saved_run_has_changed_is_no_change_of_the_code(
    lower: Callable[..., None], as_tensor: bool, resume: Callable[..., None]
):
    def created(rate: float) -> mfx.TransformOptimizer:
        tx = mfx.adamw(rate)
        return optimizer_for(mfx.as_tensors(tx) if as_tensor else tx)

    first, second, third, changed = (
        created(0.1),
        optimizer_for(mfx.adamw(0.1)),
        created(0.1),
        created(0.2),
    )
    step(first)
    lower(first)
    with warnings.catch_warnings(action="error"):
        resume(first, second)
        resume(second, third)
    assert float(third.param_groups[0]["lr"]) == pytest.approx(float(first.param_groups[0]["lr"]))
    assert float(third.param_groups[0]["lr"]) < 0.1
    with pytest.warns(UserWarning, match=r"lr: .* in the code; the file's is used"):
        resume(first, changed)


def copied_by_pickle(optimizer: mfx.Muon) -> mfx.Muon:
    return pickle.loads(pickle.dumps(optimizer))


def with_key_of_all_labels(optimizer: mfx.Muon) -> mfx.Muon:
    optimizer.param_groups[-1]["weight_decay"] = 0.3
    return optimizer


@pytest.mark.parametrize("edit", [copy.deepcopy, copied_by_pickle, with_key_of_all_labels])
def test_the_numbers_of_the_code_stay_in_copies_and_under_other_keys(
    edit: Callable[[mfx.Muon], mfx.Muon],
):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].requires_grad_()
    optimizer = mfx.Muon(model, weight_decay=0.1, adamw_weight_decay=0.0)
    model[0].requires_grad_()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})  # of two labels
    optimizer.param_groups[-1]["lr"] = 0.05
    edited = edit(optimizer)
    for param in edited.param_groups[-1]["params"]:
        param.grad = torch.ones_like(param)
    edited.step()
    saved_group = edited.state_dict()["param_groups"][-1]
    assert saved_group["lr"] == 0.05
    assert saved_group["numbers_in_code"]["lr"] == 0.1
    assert saved_group["numbers_in_code"].keys() <= saved_group.keys()


def test_a_group_of_an_earlier_version_has_no_numbers_of_the_code():
    old = optimizer_for(mfx.adamw(0.1), steps=1)
    lowered_by_the_user(old)
    saved = old.state_dict()
    del saved["param_groups"][0]["numbers_in_code"]
    with pytest.warns(
        UserWarning, match=r"lr: 0\.05 in the file, 0\.1 in the code; the file's is used"
    ):
        optimizer_for(mfx.adamw(0.1)).load_state_dict(saved)


@pytest.mark.parametrize("how", WAYS)
def test_counts_and_moments_come_from_the_file(how: str):
    old, new = optimizer_for(mfx.adamw(0.1), steps=3), optimizer_for(mfx.adamw(0.1), steps=1)
    assert messages_of(how, old, new) == []
    for a, b in zip(*(mfx.tree.leaves(one.transform_state) for one in (old, new)), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_groups_with_different_rates_warns_of_a_rate_that_has_changed(
    tmp_path: Path,
):
    """`transform` has one rate, that of the first group."""

    def optimizer_of(rates: tuple[float, float]) -> mfx.TransformOptimizer:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [
            {"params": list(model[i].named_parameters(str(i))), "lr": rates[i]} for i in range(2)
        ]
        return mfx.TransformOptimizer(groups, mfx.adamw(1e-3))

    saved = optimizer_of((0.1, 0.2))
    path = mfx.checkpoint.save(tmp_path, saved.transform_state, tx=saved.transform)
    same = optimizer_of((0.1, 0.2))
    mfx.checkpoint.load(path, like=same.transform_state, tx=same.transform)
    other = optimizer_of((0.3, 0.2))
    with pytest.warns(UserWarning, match=r"learning_rate: 0\.1 in the checkpoint, 0\.3 here"):
        mfx.checkpoint.load(path, like=other.transform_state, tx=other.transform)


def test_numbers_of_parameters_that_a_file_format_made_texts_are_read():
    saved = optimizer_for(mfx.adamw(0.01), steps=2).state_dict()
    as_texts = {str(number): entries for number, entries in saved["state"].items()}
    optimizer = optimizer_for(mfx.adamw(0.01))
    with warnings.catch_warnings(action="error"):
        optimizer.load_state_dict({**saved, "state": as_texts})
    loaded = optimizer.state_dict()["state"]
    for key, value in saved["state"][0].items():
        assert torch.equal(loaded[0][key], value)


def test_state_that_no_group_lists_is_an_error_and_loads_nothing():
    saved = optimizer_for(mfx.adamw(0.01), steps=2).state_dict()
    optimizer = optimizer_for(mfx.adamw(0.01))
    with pytest.raises(
        ValueError, match=r"has the keys 7, 'extra', expected only items of 'params'"
    ):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 7: {}, "extra": {}}})
    assert optimizer.transform_state["scale_by_adam"].count.item() == 0


def saved_with_counts(first: int, last: int) -> tuple[mfx.TransformOptimizer, dict[str, Any]]:
    """Return a new optimizer, and a state dict with one count for the first parameter and another for the last."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    saved = optimizer.state_dict()
    for key in saved["state"]:
        count = torch.tensor(last if key == max(saved["state"]) else first)
        saved["state"][key] = {**saved["state"][key], "scale_by_adam.count": count}
    return optimizer, saved


@pytest.mark.parametrize(("first", "last"), [(3, 0), (0, 3)])
def test_a_count_of_zero_gives_way_to_the_count_of_other_parameters(first: int, last: int):
    # as `dcp.load` with allow_partial_load=True leaves the count of a parameter that was not in the file
    optimizer, saved = saved_with_counts(first, last)
    optimizer.load_state_dict(saved)
    (param, *_) = optimizer.param_groups[0]["params"]
    assert optimizer.state[param]["scale_by_adam.count"] == 3


def test_two_values_of_a_count_are_an_error_and_load_nothing():
    optimizer, saved = saved_with_counts(3, 2)
    with pytest.raises(
        ValueError,
        match=r"'scale_by_adam.count' is 2, and 3 for others, but all parameters share it",
    ):
        optimizer.load_state_dict(saved)
    (param, *_) = optimizer.param_groups[0]["params"]
    assert optimizer.state[param]["scale_by_adam.count"] == 0


def test_nan_that_all_parameters_share_is_loaded():
    def created() -> mfx.TransformOptimizer:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return mfx.TransformOptimizer(
            model, mfx.chain(mfx.adamw(0.1), mfx.contrib.reduce_on_plateau(0.5, 1))
        )

    optimizer, saved = created(), created().state_dict()
    for entries in saved["state"].values():
        entries["reduce_on_plateau.best_value"] = torch.tensor(torch.nan, dtype=torch.float64)
    optimizer.load_state_dict(saved)
    assert optimizer.transform_state["reduce_on_plateau"].best_value.isnan()


def test_a_resumed_run_takes_rates_that_are_multiplied_in_the_groups_and_the_scheduler():
    """The pages on Lightning and accelerate advise it."""

    def created() -> tuple[mfx.Muon, lr_scheduler.CosineAnnealingLR]:
        optimizer = mfx.Muon(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=1e-3, adamw_lr=4e-3
        )
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def rates_of_five_steps(
        optimizer: mfx.Muon, scheduler: lr_scheduler.CosineAnnealingLR
    ) -> list[float]:
        rates: list[float] = []
        for _ in range(5):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.ones_like(param)
            optimizer.step()
            rates += [group["lr"] for group in optimizer.param_groups]
            scheduler.step()
        return rates

    optimizer, scheduler = created()
    rates_of_five_steps(optimizer, scheduler)
    resumed, resumed_scheduler = created()
    resumed.load_state_dict(optimizer.state_dict())
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    for group in resumed.param_groups:
        group["lr"] *= 0.1
        group["initial_lr"] *= 0.1
    resumed_scheduler.base_lrs = [rate * 0.1 for rate in resumed_scheduler.base_lrs]
    tenth = [rate * 0.1 for rate in rates_of_five_steps(optimizer, scheduler)]
    assert rates_of_five_steps(resumed, resumed_scheduler) == pytest.approx(tenth)
