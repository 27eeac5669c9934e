"""A wrong number is an error wherever a number is given, before anything changes. All right numbers are accepted."""

import copy
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import muonfx as mfx

NO_NUMBER: dict[str, Any] = {
    "a text": "0.25",
    "a text of YAML": "1e-3",
    "None": None,
    "a bool": True,
    "a bool of NumPy": np.True_,
    "a bool in a tensor": torch.tensor(True),
    "complex": 0.25j,
    "complex, of NumPy": np.complex64(0.25j),
    "complex, in a tensor": torch.tensor(0.25j),
    "an array": np.array([0.25, 0.25]),
    "a decimal": Decimal("0.25"),
    "a list": [0.25],
}
"""Values that are no numbers, although some of them could be converted to one."""

OUT_OF_RANGE: dict[str, Any] = {
    "NaN": math.nan,
    "NaN of NumPy": np.float32(math.nan),
    "infinity": math.inf,
    "too large": 10**400,
    "a fraction that is too large": Fraction(10**400),
}

TWO_NUMBERS = torch.tensor([0.25, 0.25])

RIGHT: dict[str, Any] = {
    "int": 1,
    "a large int": 10**20,
    "float32 of NumPy": np.float32(0.25),
    "float64 of NumPy": np.float64(0.25),
    "int64 of NumPy": np.int64(1),
    "a fraction": Fraction(1, 4),
    "a tensor": torch.tensor(0.25),
    "an int in a tensor": torch.tensor(1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def backward(self) -> None:
        inputs = torch.ones(3, 4, dtype=self.up.weight.dtype)
        self.head(self.up(inputs)).square().sum().backward()


def muon(model: nn.Module) -> mfx.Muon:
    return mfx.Muon(model, lr=0.02, adamw_lr=0.001)


def schedule_of(value: Any) -> mfx.Schedule:
    return mfx.schedule(lambda: lambda count: value)()


RATE = mfx.scale_by_learning_rate(0.5)
PARAMS = {"w": torch.ones(2)}
PURE: dict[str, Callable[[Any], mfx.Transform]] = {
    "a transform": mfx.scale_by_learning_rate,
    "replace": lambda value: RATE.replace(learning_rate=value),
    "with_hyperparams": lambda value: mfx.with_hyperparams(RATE, {"learning_rate": value}),
    "a recipe": lambda value: mfx.lion(value),
    "a schedule": lambda value: mfx.scale_by_learning_rate(schedule_of(value)),
    "a number of a schedule": lambda value: mfx.scale_by_learning_rate(
        mfx.linear_schedule(value, 0.5, 10)
    ),
}


@pytest.mark.parametrize("kind", [*NO_NUMBER, *OUT_OF_RANGE])
@pytest.mark.parametrize("place", PURE)
def test_a_wrong_number_of_a_transform_is_an_error_that_names_the_argument(place: str, kind: str):
    value = {**NO_NUMBER, **OUT_OF_RANGE}[kind]
    with pytest.raises((TypeError, ValueError), match=r"(learning_rate|start|step|schedule) must "):
        PURE[place](value).init(PARAMS)  # `with_hyperparams` checks no ranges: the first use does


@pytest.mark.parametrize("kind", NO_NUMBER)
def test_with_hyperparams_refuses_what_is_no_number_at_once(kind: str):
    with pytest.raises(
        TypeError,
        match=r"^with_hyperparams: learning_rate must be a number or a 0-d tensor, found ",
    ):
        mfx.with_hyperparams(RATE, {"learning_rate": NO_NUMBER[kind]})


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("place", PURE)
def test_a_right_number_of_a_transform_is_accepted(place: str, kind: str):
    tx = PURE[place](RIGHT[kind])
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert updates["w"].isfinite().all()
    if place in ("a transform", "replace", "with_hyperparams"):
        assert {type(number) for number in mfx.hyperparams(tx).values()} <= {float, Tensor}


@pytest.mark.parametrize("kind", [*NO_NUMBER, *OUT_OF_RANGE, "two numbers"])
@pytest.mark.parametrize(
    "argument", ["lr", "adamw_lr", "weight_decay", "momentum", "betas", "a role"]
)
def test_a_wrong_number_of_muon_is_an_error_that_names_the_argument(argument: str, kind: str):
    value = {**NO_NUMBER, **OUT_OF_RANGE, "two numbers": TWO_NUMBERS}[kind]
    if value is None and argument == "adamw_lr":  # not wrong: None means the rate of Muon
        value = "text"
    options: dict[str, Any] = {argument: value}
    if argument == "betas":
        options = {"betas": (value, 0.95)}
    elif argument == "a role":
        labels = {
            "up.weight": "hidden",
            "up.bias": "head",
            "head.weight": "head",
            "head.bias": "head",
        }
        options = {"adamw_lr": {"head": value}, "labels": labels}
    with pytest.raises(
        (TypeError, ValueError), match=r"(lr|rate|decay|momentum|betas|b1)\S* must "
    ):
        mfx.Muon(Net(), **options)


def everything_of(model: nn.Module, optimizer: mfx.Muon) -> list[Any]:
    """Return copies of all values that a step or a load may change."""
    entries: list[Any] = []
    for group in optimizer.param_groups:
        entries += [(key, value) for key, value in group.items() if key != "params"]
    state = [leaf.clone() for values in optimizer.state.values() for leaf in values.values()]
    params = [param.detach().clone() for param in model.parameters()]
    return copy.deepcopy([*params, *state, *entries])


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return first == second


WRONG_IN_GROUPS = [*NO_NUMBER, *OUT_OF_RANGE, "two numbers"]


def wrong_entries(key: str, kind: str) -> dict[str, Any]:
    value = {**NO_NUMBER, **OUT_OF_RANGE, "two numbers": TWO_NUMBERS}[kind]
    return {"betas": (value, 0.95)} if key == "betas" else {key: value}


@pytest.mark.parametrize("kind", WRONG_IN_GROUPS)
@pytest.mark.parametrize(
    ("key", "number"), [("lr", 0), ("weight_decay", 0), ("momentum", 0), ("betas", 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:weight decay has no effect")
def test_a_wrong_number_in_a_group_is_an_error_at_the_step_before_anything_changes(
    dtype: torch.dtype, key: str, number: int, kind: str
):
    """Also where groups have different rates, and where a step warns of rounding: both compute with the rates."""
    model = Net()
    optimizer = muon(model)
    model.to(dtype)
    optimizer.follow_model()
    model.backward()
    before = everything_of(model, optimizer)
    right = dict(optimizer.param_groups[number])
    optimizer.param_groups[number].update(wrong_entries(key, kind))
    with pytest.raises((TypeError, ValueError), match=rf"^'{key}(\[0\])?' in a group must "):
        optimizer.step()
    optimizer.param_groups[number].update(right)
    assert all(map(is_same, before, everything_of(model, optimizer)))
    optimizer.step()


@pytest.mark.parametrize("kind", WRONG_IN_GROUPS)
@pytest.mark.parametrize(
    ("key", "number"), [("lr", 0), ("weight_decay", 0), ("momentum", 0), ("betas", 1)]
)
def test_a_wrong_number_in_a_state_dict_is_an_error_before_anything_changes(
    key: str, number: int, kind: str
):
    model = Net()
    optimizer = muon(model)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][number].update(wrong_entries(key, kind))
    model.backward()
    optimizer.step()
    before = everything_of(model, optimizer)
    with pytest.raises((TypeError, ValueError), match=rf"^'{key}(\[0\])?' in a group must "):
        optimizer.load_state_dict(state_dict)
    assert all(map(is_same, before, everything_of(model, optimizer)))


@pytest.mark.parametrize("kind", WRONG_IN_GROUPS)
@pytest.mark.parametrize("is_added", [False, True])
def test_a_wrong_number_in_a_new_group_is_an_error(is_added: bool, kind: str):
    model = Net()
    first = {"params": list(model.up.named_parameters(prefix="up"))}
    second = {
        "params": list(model.head.named_parameters(prefix="head")),
        **wrong_entries("lr", kind),
    }
    groups = [first] if is_added else [first, second]
    with pytest.raises((TypeError, ValueError), match=r"^'lr' in a group must "):
        mfx.TransformOptimizer(groups, mfx.lion(0.1)).add_param_group(second)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_number_in_a_group_is_accepted_edited_or_loaded(kind: str):
    updated: list[Tensor] = []
    for how in ("edited", "loaded"):
        model = Net()
        optimizer = mfx.TransformOptimizer(model, mfx.lion(0.1))
        if how == "edited":
            optimizer.param_groups[0]["lr"] = RIGHT[kind]
        else:
            state_dict = optimizer.state_dict()
            state_dict["param_groups"][0]["lr"] = RIGHT[kind]
            optimizer.load_state_dict(state_dict)
        model.backward()
        optimizer.step()
        updated.append(model.up.weight.detach())
    assert updated[0].isfinite().all()
    assert torch.equal(*updated)
    assert not torch.equal(updated[0], Net().up.weight)
