"""Code that writes into ``optimizer.state``: each change has its effect or is an error."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import muonfx as mfx

MU, NU, COUNT = "scale_by_adam.mu", "scale_by_adam.nu", "scale_by_adam.count"


def trained(steps: int = 2) -> tuple[dict[str, nn.Parameter], mfx.TransformOptimizer]:
    params = {name: nn.Parameter(torch.ones(3)) for name in ("w", "v")}
    optimizer = mfx.TransformOptimizer(params, mfx.adamw(0.1))
    for _ in range(steps):
        step(params, optimizer)
    return params, optimizer


def step(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for param in params.values():
        param.grad = torch.arange(3.0) + 1.0
    optimizer.step()


def assert_same_run(first: tuple, second: tuple) -> None:
    for _ in range(2):
        for params, optimizer in (first, second):
            step(params, optimizer)
        for name, param in first[0].items():
            assert torch.equal(param, second[0][name])
    for a, b in zip(
        *(mfx.tree.leaves(optimizer.transform_state) for _, optimizer in (first, second)),
        strict=True,
    ):
        assert torch.equal(a, b)


READERS: dict[str, Callable] = {
    "step": lambda params, optimizer: None,
    "state_dict": lambda params, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "transform_state": lambda params, optimizer: optimizer.transform_state,
    "zero_grad": lambda params, optimizer: optimizer.zero_grad(),
    "snapshot": lambda params, optimizer: optimizer.snapshot(),
    "deepcopy": lambda params, optimizer: copy.deepcopy(optimizer),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("key", [MU, NU])
def test_an_assigned_tensor_is_as_good_as_one_that_is_written_into(key: str, reader: str):
    (params, optimizer), twin = trained(), trained()
    optimizer.state[params["w"]][key] = torch.full((3,), 0.5)
    twin[1].state[twin[0]["w"]][key].fill_(0.5)
    READERS[reader](params, optimizer)
    assert_same_run((params, optimizer), twin)
    saved = optimizer.state_dict()["state"][0]
    assert all(torch.equal(saved[key], optimizer.state[params["w"]][key]) for key in saved)


@pytest.mark.parametrize("reader", READERS)
def test_states_that_are_assigned_stay_with_parameters_that_are_reordered(reader: str):
    """A group that somebody has reordered still has its names in the former order."""
    (params, optimizer), twin = trained(), trained()
    twin[1].state[twin[0]["w"]][MU].fill_(0.5)
    for value, name in ((0.5, "w"), (None, "v")):
        entries = optimizer.state[params[name]]
        entries[MU] = entries[MU].clone() if value is None else torch.full((3,), value)
    optimizer.param_groups[0]["params"].reverse()
    READERS[reader](params, optimizer)
    assert_same_run((params, optimizer), twin)


@pytest.mark.parametrize("reader", READERS)
def test_initial_states_are_of_parameters_that_are_reordered(reader: str):
    """Before the first step, the state is initialized again if weights were loaded, here a copy of each parameter."""
    params = {"w": nn.Parameter(torch.ones(3)), "v": nn.Parameter(torch.zeros(2))}
    optimizer = mfx.TransformOptimizer(params, mfx.chain(mfx.scale(-0.1), mfx.ema_params(0.5)))
    optimizer.param_groups[0]["params"].reverse()
    with torch.no_grad():
        params["v"].fill_(2.0)
    READERS[reader](params, optimizer)
    average = optimizer.transform_state["ema_params"].average
    assert torch.equal(average["w"], torch.ones(3))
    assert torch.equal(average["v"], torch.full((2,), 2.0))


def test_a_count_is_assigned_for_all_parameters_together():
    (params, optimizer), twin = trained(), trained()
    for param in params.values():
        optimizer.state[param][COUNT] = torch.tensor(0)
    twin[1].state[twin[0]["w"]][COUNT].fill_(0)
    assert_same_run((params, optimizer), twin)
    before = params["w"].detach().clone()
    optimizer.state[params["w"]][COUNT] = torch.tensor(7)
    with pytest.raises(
        ValueError, match=r"count' is one tensor of all 2 parameters, .* for 1 of them, such as 'w'"
    ):
        step(params, optimizer)
    assert torch.equal(before, params["w"])


@pytest.mark.parametrize("how", ["clear", "new dicts", "pop each", "delete each"])
def test_an_emptied_state_starts_again(how: str):
    params, optimizer = trained()
    if how == "clear":
        optimizer.state.clear()
    for param in params.values():
        if how == "new dicts":
            optimizer.state[param] = {}
        elif how == "pop each":
            optimizer.state.pop(param)
        elif how == "delete each":
            del optimizer.state[param]
    fresh = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    assert_same_run((params, optimizer), (fresh, mfx.TransformOptimizer(fresh, mfx.adamw(0.1))))


def test_the_state_of_one_parameter_starts_again_without_the_count_of_all():
    params, optimizer = trained()
    other = optimizer.state[params["v"]][MU].clone()
    optimizer.state[params["w"]] = {}
    with pytest.warns(
        UserWarning, match="state of 'w' starts again, but 'scale_by_adam.count' continues"
    ):
        optimizer.zero_grad()
    assert not optimizer.state[params["w"]][MU].any()
    assert int(optimizer.state[params["w"]][COUNT]) == 2
    assert torch.equal(optimizer.state[params["v"]][MU], other)


def test_a_state_moves_to_the_tensor_that_replaces_its_parameter():
    """As in ``reset_opacity`` of 3D Gaussian splatting, which also resets one moment."""
    (params, optimizer), twin = trained(), trained()
    old = params["w"]
    entry = optimizer.state[old]
    entry[MU] = torch.zeros(3)
    del optimizer.state[old]
    params["w"] = nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = params["w"]
    optimizer.state[params["w"]] = entry
    twin[1].state[twin[0]["w"]][MU].zero_()
    assert_same_run((params, optimizer), twin)


WRONG: dict[str, tuple[Callable[[dict], object], str]] = {
    "shape": (
        lambda entry: entry.update({MU: torch.zeros(2)}),
        r"'scale_by_adam.mu' of 'w' is \(2,\) .*expected \(3,\)",
    ),
    "dtype": (
        lambda entry: entry.update({MU: torch.zeros(3).double()}),
        "'scale_by_adam.mu' of 'w' .*float64",
    ),
    "device": (
        lambda entry: entry.update({MU: torch.zeros(3, device="meta")}),
        "'scale_by_adam.mu' of 'w' .*meta",
    ),
    "number": (
        lambda entry: entry.update({COUNT: 0}),
        "'scale_by_adam.count' of 'w' is int, expected ",
    ),
    "missing": (lambda entry: entry.pop(MU), "'w' has no 'scale_by_adam.mu'"),
    "missing count": (lambda entry: entry.pop(COUNT), "'w' has no 'scale_by_adam.count'"),
    "unknown": (
        lambda entry: entry.update({"mine": torch.zeros(3)}),
        "'w' has an entry 'mine' that no transform reads",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_changes_are_errors_and_change_nothing(what: str):
    params, optimizer = trained()
    edit, message = WRONG[what]
    edit(optimizer.state[params["w"]])
    before = {name: param.detach().clone() for name, param in params.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        step(params, optimizer)
    assert all(torch.equal(before[name], param) for name, param in params.items())


def test_entries_of_another_tensor_are_an_error():
    params, optimizer = trained()
    optimizer.state[nn.Parameter(torch.zeros(4))] = {MU: torch.zeros(4)}
    with pytest.raises(
        ValueError, match=r"entries for \(4,\) torch.float32 cpu, which is no parameter"
    ):
        step(params, optimizer)


def first_moments(optimizer: mfx.TransformOptimizer) -> dict[str, torch.Tensor]:
    """Return copies of the first moments. This applies the edits of ``optimizer.state``, as a step does."""
    _, state, _, _ = optimizer.snapshot()
    return {name: moment.clone() for name, moment in state["scale_by_adam"].mu.items()}


@pytest.mark.parametrize("shard", [None, mfx.sharding.replicated, mfx.sharding.zero])
def test_the_states_of_two_parameters_may_be_exchanged(shard: Callable | None):
    params = {name: nn.Parameter(torch.ones(3)) for name in ("w", "v")}
    layout = None if shard is None else shard(params, 1)
    optimizer = mfx.TransformOptimizer(params, mfx.adamw(0.1), layout=layout)
    for number, param in enumerate(params.values(), 1):
        param.grad = torch.full((3,), float(number))
    optimizer.step()
    former = first_moments(optimizer)
    state_w, state_v = optimizer.state[params["w"]], optimizer.state[params["v"]]
    state_w[MU], state_v[MU] = state_v[MU], state_w[MU]
    exchanged = first_moments(optimizer)
    torch.testing.assert_close(exchanged, {"w": former["v"], "v": former["w"]}, rtol=0, atol=0)


@pytest.mark.parametrize("is_added", [False, True])
def test_a_state_that_is_created_in_inference_mode_can_be_stepped_outside_of_it(is_added: bool):
    """Lightning calls the hooks of validation in inference mode, where a callback may unfreeze a layer."""
    runs = []
    for is_inference in (True, False):
        params = {name: nn.Parameter(torch.ones(3)) for name in ("w", "v")}
        at_construction = {"w": params["w"]} if is_added else params
        optimizer = (
            None if not is_added else mfx.TransformOptimizer(at_construction, mfx.adamw(0.1))
        )
        with torch.inference_mode(is_inference):
            if optimizer is None:
                optimizer = mfx.TransformOptimizer(at_construction, mfx.adamw(0.1))
            else:
                optimizer.add_param_group({"params": [("v", params["v"])]})
        runs.append((params, optimizer))
    assert_same_run(*runs)
