"""A leaf of a state belongs to its parameter, whatever the parameter is called."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.tree.members import ownership_of

FIELDS = ("count", "mu", "nu", "trace", "scale_by_adam")


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("others", [(), ("w",), FIELDS])
def test_a_parameter_may_have_the_name_of_a_field_of_the_state(name: str, others: tuple[str, ...]):
    params = {key: torch.zeros(2, 3) for key in {name, *others}}
    state = mfx.chain(mfx.scale_by_adam(), mfx.momentum()).init(params)
    for ownership, path in zip(ownership_of(state, params), mfx.tree.paths(state), strict=True):
        if path == ("scale_by_adam", "count"):
            assert ownership == (None, path)
        else:
            assert ownership == (path[-1], path[:-1])


def test_parameters_in_a_named_tuple_are_told_from_the_fields_of_a_state():
    params = namedtuple("Params", "mu trace")(torch.zeros(2), torch.zeros(3))
    state = mfx.scale_by_adam().init(params)
    owners = [ownership.parameter for ownership in ownership_of(state, params)]
    assert owners == [None, "mu", "trace", "mu", "trace"]


@pytest.mark.parametrize("name", FIELDS[:-1])
def test_an_optimizer_shows_the_step_count_with_every_parameter(name: str):
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(())), "w": nn.Parameter(torch.ones(3))})
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    (model[name] + model["w"].sum()).backward()
    optimizer.step()
    for param in model.values():
        entries = optimizer.state[param]
        assert set(entries) == {f"scale_by_adam.{field}" for field in ("count", "mu", "nu")}
        assert entries["scale_by_adam.mu"].shape == param.shape
