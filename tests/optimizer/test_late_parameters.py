"""Parameters that come into a model after its optimizer: each that gets a gradient and is not trained is warned of."""

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations

import muonfx as mfx

MESSAGE = "have gradients and are not in the optimizer, such as "


class Tied(nn.Module):
    """An embedding, two layers and a head, tied to the embedding or not."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 8, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


def messages_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, set_to_none: bool = True
) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
    return [str(warning.message) for warning in caught if MESSAGE in str(warning.message)]


def _untie(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def _add(model: Tied) -> None:
    model.body.append(nn.Linear(4, 4))


def _adapt(model: Tied) -> None:
    model.body[0] = Adapter(model.body[0])


def _replace(model: Tied) -> None:
    model.body[1] = nn.Linear(4, 4)


def _bias(model: Tied) -> None:
    model.head.bias = nn.Parameter(torch.zeros(8))


CHANGES: dict[str, tuple[Callable[[Tied], None], str]] = {
    "untied": (_untie, "'head.weight'"),
    "added": (_add, "'body.2."),
    "adapter": (_adapt, "'body.0.low.weight'"),
    "replaced": (_replace, "'body.1."),
    "bias": (_bias, "'head.bias'"),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", CHANGES)
def test_a_new_parameter_with_a_gradient_is_warned_of_once(how: str, set_to_none: bool):
    change, name = CHANGES[how]
    model = Tied(is_tied=how == "untied")
    optimizer = mfx.Muon(model)
    for _ in range(2):
        assert messages_of(model, optimizer, set_to_none=set_to_none) == []
    change(model)
    (message,) = messages_of(model, optimizer, set_to_none=set_to_none)
    assert name in message
    assert "add_param_group" in message
    assert messages_of(model, optimizer, set_to_none=set_to_none) == []


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_head_is_warned_of_if_it_is_untied_in_a_model_of_names(is_partial: bool):
    model = Tied(is_tied=True)
    params = [model.embed.weight] if is_partial else model.parameters()
    optimizer = mfx.Muon(params, model=model)
    assert messages_of(model, optimizer) == []
    _untie(model)
    (message,) = messages_of(model, optimizer)
    assert "'head.weight'" in message


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
def test_a_module_inserted_into_a_list_is_warned_of(kind: type[nn.Module]):
    """`insert` calls no hook of registrations, and neither does a layer that existed before."""
    model = Tied(is_tied=False)
    late = nn.Linear(4, 4)
    optimizer = mfx.Muon(model)
    if kind is nn.ModuleList:
        model.layers = nn.ModuleList(model.body)
        model.body.forward = lambda x: functools.reduce(lambda y, layer: layer(y), model.layers, x)
    layers = model.layers if kind is nn.ModuleList else model.body
    assert messages_of(model, optimizer) == []
    layers.insert(0, late)
    (message,) = messages_of(model, optimizer)
    assert ".0." in message


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_replacement_is_warned_of_too(set_to_none: bool):
    model = Tied(is_tied=False)
    optimizer = mfx.Muon(model)
    for place in (0, 1, 1):
        assert messages_of(model, optimizer, set_to_none=set_to_none) == []
        model.body[place] = nn.Linear(4, 4)
        (message,) = messages_of(model, optimizer, set_to_none=set_to_none)
        assert f"'body.{place}." in message


def test_a_new_parameter_is_warned_of_when_it_first_gets_a_gradient():
    model = Tied(is_tied=False)
    optimizer = mfx.Muon(model)
    _adapt(model)
    model.body[0].low.requires_grad_(False)
    assert messages_of(model, optimizer) == []
    model.body[0].low.requires_grad_(True)
    assert len(messages_of(model, optimizer)) == 1


def test_parameters_that_are_added_to_the_optimizer_are_not_warned_of():
    model = Tied(is_tied=False)
    optimizer = mfx.Muon(model)
    messages_of(model, optimizer)
    _add(model)
    optimizer.add_param_group({"params": model.body[2].parameters()})
    assert messages_of(model, optimizer) == []


def _tie(model: Tied) -> None:
    model.head.weight = model.embed.weight


ORDINARY: dict[str, Callable[[Tied], object]] = {
    "tied": _tie,
    "frozen": lambda model: model.body.requires_grad_(False),
    "assigned": lambda model: model.load_state_dict(
        {n: v.clone() for n, v in model.state_dict().items()}, assign=True
    ),
    "another model": lambda model: Tied(is_tied=False),
    "a frozen teacher": lambda model: setattr(
        model, "teacher", Tied(is_tied=False).requires_grad_(False)
    ),
    "orthogonal": lambda model: parametrizations.orthogonal(nn.Linear(4, 4)),
    "wrapped": lambda model: setattr(model, "body", nn.Sequential(*model.body)),
}


@pytest.mark.parametrize("how", ORDINARY)
def test_no_warning_where_no_new_parameter_is_trained(how: str):
    model = Tied(is_tied=False)
    optimizer = mfx.Muon(model)
    for _ in range(2):
        assert messages_of(model, optimizer) == []
        ORDINARY[how](model)
        assert messages_of(model, optimizer) == []


def test_a_compiled_model_that_slices_its_layers_is_compiled_once():
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:  # creates a ModuleList, as the models of transformers do
                x = layer(x)
            return x

    model = Sliced()
    optimizer = mfx.Muon(model)
    graphs = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert graphs.frame_count == 1
