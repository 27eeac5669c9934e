"""A chain is, step for step, the optimizer that it writes down: torch's Muon, AdamW, SGD; others by formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from tests.formulas import EXACT, Step, assert_follows, average

SHAPES = {"square": (16, 16), "wide": (8, 24), "tall": (24, 8), "row": (1, 12), "big": (64, 48)}
STEPS = 10


def draw(dtype: torch.dtype = torch.float32) -> kit.Example:
    return kit.Example.of(SHAPES, steps=STEPS, dtype=dtype, seed=1)


def run_torch(
    make, params: dict[str, Tensor], steps: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    live = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    optimizer = make(list(live.values()))
    seen = []
    for grads in steps:
        for name, param in live.items():
            param.grad = grads[name].clone()
        optimizer.step()
        seen.append({name: param.detach().clone() for name, param in live.items()})
    return seen


def run_ours(
    tx: mfx.Transform, params: dict[str, Tensor], steps: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    state, seen = tx.init(params), []
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        seen.append(params)
    return seen


def follows(tx: mfx.Transform, step: Step, rtol: float = 1e-14, atol: float = 1e-14) -> None:
    assert_follows(tx, step, draw(torch.float64), rtol=rtol, atol=atol)


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"]
)


@pytest.mark.parametrize("lr_scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torch_optim_muon(lr_scaling, nesterov, monkeypatch):
    params, steps = draw(torch.float64)
    # torch iterates in bf16 whatever the parameters are, and nothing is comparable to 1e-12 after that: let it not.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.to(torch.float64, copy=True))
    theirs = run_torch(
        lambda ps: torch.optim.Muon(
            ps, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=lr_scaling
        ),
        params,
        steps,
    )
    monkeypatch.undo()
    tx = mfx.muon(
        0.02,
        decay=0.9,
        nesterov=nesterov,
        weight_decay=0.1,
        orthogonalize=mfx.orthogonalize(coefficients="keller", dtype=torch.float64),
        lr_scaling=lr_scaling,
    )
    torch.testing.assert_close(run_ours(tx, params, steps), theirs, rtol=1e-12, atol=1e-12)


@PRECISIONS
def test_adamw_is_torch_optim_adamw(dtype, bound):
    params, steps = draw(dtype)
    theirs = run_torch(
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
        params,
        steps,
    )
    ours = run_ours(mfx.adamw(1e-2, b1=0.8, b2=0.95, weight_decay=0.1), params, steps)
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@PRECISIONS
@pytest.mark.parametrize("nesterov", [True, False])
def test_heavy_ball_is_torch_optim_sgd(nesterov, dtype, bound):
    params, steps = draw(dtype)
    theirs = run_torch(
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=nesterov), params, steps
    )
    tx = mfx.chain(
        mfx.momentum(0.9, nesterov=nesterov, heavy_ball=True), mfx.scale_by_learning_rate(0.1)
    )
    torch.testing.assert_close(run_ours(tx, params, steps), theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("nesterov", [True, False])
def test_debiased_momentum_follows_optax_definition(nesterov):
    """optax.contrib.muon: mu_hat = beta * mu / (1 - beta**(t + 1)) + (1 - beta) * g / (1 - beta**t), t from 1."""
    beta = 0.9

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        mu = average(memory, "mu", g, beta)
        if nesterov:
            return x + beta * mu / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        return x + mu / (1 - beta**t)

    follows(mfx.momentum(beta, nesterov=nesterov, debias=True, dtype=None), step, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_adam_follows_its_definition(nesterov):
    b1, b2, eps, eps_root = 0.8, 0.95, 0.1, 0.01

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m = average(memory, "m", g, b1) / (1 - b1**t)
        if nesterov:
            m = b1 * memory["m"] / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        v = average(memory, "v", g.square(), b2) / (1 - b2**t)
        return x + m / ((v + eps_root).sqrt() + eps)

    follows(mfx.scale_by_adam(b1, b2, eps, eps_root=eps_root, nesterov=nesterov), step, rtol=1e-12)


@pytest.mark.parametrize("eps_in_sqrt", [True, False])
@pytest.mark.parametrize("debias", [True, False])
def test_rms_follows_its_definition(eps_in_sqrt, debias):
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        v = average(memory, "v", g.square(), 0.8)
        if debias:
            v = v / (1 - 0.8**t)
        return x + (g / (v + 0.1).sqrt() if eps_in_sqrt else g / (v.sqrt() + 0.1))

    follows(mfx.scale_by_rms(0.8, 0.1, eps_in_sqrt=eps_in_sqrt, debias=debias), step, rtol=1e-12)


def test_lion_follows_its_definition():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        ahead = 0.9 * memory.get("m", 0.0) + 0.1 * g
        average(memory, "m", g, 0.99)
        return x - 1e-3 * (ahead.sign() + 0.1 * x)

    follows(mfx.lion(1e-3, b1=0.9, b2=0.99, weight_decay=0.1), step, rtol=1e-12)


def test_normuon_follows_its_definition():
    """NorMuon, algorithm 1: rows over the root of their second moment, then 0.2 sqrt(mn) / norm."""

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        o = mfx.polar.polar_factor(average(memory, "m", g, 0.95))
        v = average(memory, "v", o.square().mean(dim=1, keepdim=True))
        normalized = o / (v.sqrt() + 1e-12)
        return x + normalized * 0.2 * normalized.numel() ** 0.5 / torch.linalg.matrix_norm(
            normalized
        )

    tx = mfx.chain(
        mfx.momentum(0.95, nesterov=False, dtype=None),
        EXACT,
        mfx.normalize_neurons(0.9, 1e-12, dtype=None),
        mfx.scale_by_shape("match_rms_adamw"),
    )
    follows(tx, step, rtol=1e-6, atol=1e-8)


def test_cautious_updates_follow_their_definition_in_float64():
    """Cautious Optimizers, algorithm 2: elements with the sign of the gradient, over their share."""

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m = average(memory, "m", g)
        agrees = (m * g > 0).double()
        return x + m * agrees / agrees.mean()

    follows(mfx.cautious(mfx.momentum(0.9, nesterov=False)), step, rtol=1e-12)


SPIKE = {
    "normalize_neurons": mfx.normalize_neurons(0.0),
    "scale_by_namo": mfx.contrib.scale_by_namo(mfx.identity(), 0.0, 0.0),
    "scale_by_shampoo": mfx.contrib.scale_by_shampoo(0.0),
    "scale_by_soap": mfx.contrib.scale_by_soap(0.0, 0.0),
}


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("name", SPIKE)
def test_with_a_decay_of_zero_a_large_gradient_is_forgotten(name: str, as_tensors: bool):
    """The last, small gradient was lost in the difference from the average, which is the large one."""
    tx = mfx.as_tensors(SPIKE[name]) if as_tensors else SPIKE[name]
    small = {"w": torch.tensor([[1.0, 2.0], [3.0, -1.0]])}
    after = {}
    for size in (1.0, 2.0**20):
        state = tx.init(small)
        for factor in (1.0, size, 1.0):
            updates, state = tx.update({"w": factor * small["w"]}, state, small)
        after[size] = updates["w"]
    torch.testing.assert_close(after[2.0**20], after[1.0], rtol=1e-6, atol=0.0)


# ------------------------------------------------------------------------------------------------------ weight decay

RATE, DECAY = 0.1, 0.3


def test_cautious_decay_is_algorithm_1_of_its_paper():
    def step(t: int, x: Tensor, u: Tensor, memory: dict[str, Any]) -> Tensor:
        return x - RATE * (u + DECAY * x * (u * x >= 0))

    tx = mfx.chain(mfx.add_decayed_weights(DECAY, cautious=True), mfx.scale_by_learning_rate(RATE))
    follows(tx, step)


def test_independent_decay_does_not_know_the_learning_rate():
    decay = mfx.subtract_decayed_weights(DECAY)
    follows(
        mfx.chain(mfx.scale_by_learning_rate(RATE), decay),
        lambda t, x, g, memory: x - RATE * g - DECAY * x,
    )
    follows(
        mfx.chain(mfx.scale_by_learning_rate(0.0), decay), lambda t, x, g, memory: (1 - DECAY) * x
    )


def test_decay_with_the_square_of_the_learning_rate_is_a_schedule_of_its_shape():
    tx = mfx.chain(
        mfx.add_decayed_weights(mfx.cosine_decay_schedule(DECAY, steps=8)),
        mfx.scale_by_learning_rate(mfx.cosine_decay_schedule(RATE, steps=8)),
    )

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        rate = RATE * (1 + math.cos(math.pi * min(t - 1, 8) / 8)) / 2
        return x - rate * g - DECAY * rate**2 / RATE * x

    follows(tx, step)


@pytest.mark.parametrize("make", [mfx.add_decayed_weights, mfx.subtract_decayed_weights])
def test_caution_is_not_lost_to_underflow_or_zero(make: Any):
    params = {"w": torch.tensor([1e-30, -1e-30, 1e-30, 0.0, 2.0])}
    updates = {"w": torch.tensor([1e-30, 1e-30, -1e-30, 1.0, 0.0])}
    tx = make(0.5, cautious=True)
    sign = 1 if make is mfx.add_decayed_weights else -1
    updates = {"w": sign * updates["w"]}
    out = tx.update(updates, tx.init(params), params)[0]["w"]
    assert (out - updates["w"] == sign * torch.tensor([5e-31, 0.0, 0.0, 0.0, 1.0])).all()
