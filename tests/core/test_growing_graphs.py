"""Parameters that were not detached: their autograd graph would grow with every step of a run."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import muonfx as mfx

Params = dict[str, Tensor]

CHAINS = {
    "adamw": mfx.adamw(0.1, weight_decay=0.1),
    "an average": mfx.chain(mfx.scale_by_learning_rate(0.1), mfx.ema_params(0.9)),
    "an average and a decay": mfx.chain(mfx.adamw(0.1, weight_decay=0.1), mfx.ema_params(0.9)),
    "a master copy": mfx.master_params(mfx.adamw(0.1)),
    "muon": mfx.muon(0.1),
    "schedule free": mfx.contrib.schedule_free(mfx.scale_by_learning_rate(0.1), 0.1),
    "accumulated": mfx.accumulate(
        mfx.chain(mfx.scale_by_learning_rate(0.1), mfx.ema_params(0.9)), 2
    ),
}


def loss(params: Params) -> Tensor:
    return params["w"].square().sum()


def grads_by_autograd(params: Params) -> Params:
    return dict(zip(params, torch.autograd.grad(loss(params), [*params.values()]), strict=True))


GRADS: dict[str, Callable[[Params], Params]] = {
    "autograd": grads_by_autograd,
    "torch.func": torch.func.grad(loss),
}


def run(tx: mfx.Transform, grad: Callable[[Params], Params], steps: int) -> list[str]:
    params = {"w": torch.ones(2, 2, requires_grad=True)}
    state = tx.init(params)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(steps):
            updates, state = tx.update(grad(params), state, params)
            params = mfx.apply_updates(params, updates)
    return [
        str(warning.message)
        for warning in caught
        if "autograd graph of earlier steps" in str(warning.message)
    ]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("how", "steps"), [("autograd", 3), ("torch.func", 12)])
def test_parameters_that_were_not_detached_are_warned_of_in_every_chain(
    name: str, how: str, steps: int
):
    messages = run(CHAINS[name], GRADS[how], steps)
    assert messages
    assert "'w'" in messages[0]
    assert how == "autograd" or name == "accumulated" or len(messages) == 1


def test_an_unrolled_inner_loop_is_no_mistake():
    assert run(CHAINS["adamw"], GRADS["torch.func"], 5) == []


def test_a_run_that_is_differentiated_by_its_rate_is_no_mistake():
    assert (
        run(
            mfx.scale_by_learning_rate(torch.tensor(0.1, requires_grad=True)),
            GRADS["torch.func"],
            12,
        )
        == []
    )
    assert (
        run(
            mfx.scale_by_learning_rate(torch.tensor(0.1, requires_grad=True)), GRADS["autograd"], 12
        )
        == []
    )


def test_detached_parameters_are_no_mistake():
    tx = mfx.adamw(0.1)
    params = {"w": torch.ones(2, 2)}
    state = tx.init(params)
    with warnings.catch_warnings(action="error"):
        for _ in range(12):
            updates, state = tx.update(torch.func.grad(loss)(params), state, params)
            params = mfx.apply_updates(params, updates)
