"""Transforms that wrap others or watch the run give the parameters that Optax's give, in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import muonfx as mfx

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("optax") is None or find_spec("jax") is None, reason="needs optax: make engines"),
]

STEPS = 30
FP64 = 1e-12
"""The largest difference of parameters, relative to their size, in all steps."""

Params = dict[str, torch.Tensor]
Trajectory = list[dict[str, Any]]


def start() -> Params:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in (("w", (5, 4)), ("b", (5,)))}


def gradient(params: Any) -> dict[str, Any]:
    """The gradient of a quadratic of uneven curvature around 1, for torch and for jax."""
    return {"w": 3.0 * (params["w"] - 1.0), "b": 0.5 * (params["b"] - 1.0)}


def loss(params: Any) -> Any:
    return 1.5 * ((params["w"] - 1.0) ** 2).sum() + 0.25 * ((params["b"] - 1.0) ** 2).sum()


@pytest.fixture(scope="module")
def theirs() -> Any:
    import jax  # a reference that may be missing

    jax.config.update("jax_enable_x64", True)
    import optax

    return optax


def our_run(tx: mfx.Transform, see: Callable[[Any, Params], Any] = lambda state, params: params) -> list[Any]:
    params, seen = start(), []
    state = tx.init(params)
    given = {"value": 0.0} if "value" in (tx.understood_extras or ()) else {}
    for _ in range(STEPS):
        extras = {name: loss(params) for name in given}
        updates, state = tx.update(gradient(params), state, params, **extras)
        params = mfx.apply_updates(params, updates)
        seen.append(see(state, params))
    return seen


def their_run(
    optax: Any, tx: Any, see: Callable[[Any, Any], Any] = lambda state, params: params, wrap: Any = None, **given: Any
) -> list[Any]:
    import jax
    import jax.numpy as jnp

    def step(params: Any, state: Any) -> Any:
        at = getattr(params, "fast", params)
        extras = {name: value(at) for name, value in given.items()}
        updates, state = tx.update(gradient(at), state, params, **extras)
        params = optax.apply_updates(params, updates)
        return params, state, see(state, params)

    params: Any = {name: jnp.asarray(p.numpy()) for name, p in start().items()}
    params = wrap(params) if wrap else params
    state, seen, step = tx.init(params), [], jax.jit(step)
    for _ in range(STEPS):
        params, state, shown = step(params, state)
        seen.append(shown)
    return seen


def require_close(ours: list[Any], theirs: list[Any], bound: float = FP64) -> None:
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in mine:
            torch.testing.assert_close(
                mine[name],
                torch.tensor(other[name].tolist(), dtype=torch.float64),
                rtol=bound,
                atol=bound,
                msg=lambda text, at=f"step {step}, {name}": f"{at}: {text}",
            )


RATE = 0.1


@pytest.mark.parametrize("warms_up", [False, True])
def test_schedule_free(theirs: Any, warms_up: bool):
    their_rate = (lambda count: 0.01 * count.clip(0, 10)) if warms_up else RATE
    our_rate = mfx.linear(0.0, RATE, 10) if warms_up else RATE
    tx = mfx.contrib.schedule_free(
        mfx.chain(mfx.scale_by_adam(b1=0.0), mfx.scale_by_learning_rate(our_rate)), our_rate, b1=0.9
    )
    reference = theirs.contrib.schedule_free(theirs.adam(their_rate, b1=0.0), their_rate, b1=0.9)
    ours = our_run(tx, lambda state, params: (params, mfx.contrib.schedule_free_eval_params(state, params)))
    others = their_run(
        theirs, reference, lambda state, params: (params, theirs.contrib.schedule_free_eval_params(state, params))
    )
    for which in (0, 1):
        require_close([seen[which] for seen in ours], [seen[which] for seen in others])


def test_lookahead(theirs: Any):
    tx = mfx.contrib.lookahead(mfx.adamw(RATE, weight_decay=0.0), 4, 0.3)
    reference = theirs.lookahead(theirs.adam(RATE), 4, 0.3)
    ours = our_run(tx, lambda state, params: (params, state.slow))
    others = their_run(theirs, reference, lambda _, params: params, wrap=theirs.LookaheadParams.init_synced)
    require_close([fast for fast, _ in ours], [params.fast for params in others])
    require_close([slow for _, slow in ours], [params.slow for params in others])


@pytest.mark.parametrize("name", ["conditionally_transform", "conditionally_mask"])
def test_conditional_transforms(theirs: Any, name: str):
    tx = mfx.chain(
        getattr(mfx.contrib, name)(mfx.momentum(0.9, heavy_ball=True, nesterov=False), third), mfx.scale(-RATE / 10)
    )
    module = theirs if hasattr(theirs, name) else theirs.transforms
    reference = theirs.chain(getattr(module, name)(theirs.trace(0.9), third), theirs.scale(-RATE / 10))
    require_close(our_run(tx), their_run(theirs, reference))


def third(count: Any) -> Any:
    return count % 3 != 1


@pytest.mark.parametrize(
    "settings",
    [
        {"patience": 2},
        {"patience": 1, "cooldown": 2, "min_scale": 0.2},
        {"patience": 1, "rtol": 0.0, "atol": 0.5},
    ],
)
def test_reduce_on_plateau(theirs: Any, settings: dict[str, Any]):
    # A rate at which the loss rises and falls.
    tx = mfx.chain(mfx.scale_by_learning_rate(0.7), mfx.contrib.reduce_on_plateau(0.5, **settings))
    reference = theirs.chain(theirs.sgd(0.7), theirs.contrib.reduce_on_plateau(0.5, **settings))
    ours = our_run(tx, lambda state, params: {**params, "scale": state["reduce_on_plateau"].scale})
    require_close(
        ours,
        their_run(theirs, reference, lambda state, params: {**params, "scale": state[-1].scale}, value=loss),
    )
    assert ours[-1]["scale"] < 1.0


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        ({}, {}),
        (
            {"b1": 0.8, "b2": 0.95, "weight_decay": 0.1, "estim_lr0": 1e-3, "estim_lr_coef": 0.5},
            {"betas": (0.8, 0.95), "weight_decay": 0.1, "estim_lr0": 1e-3, "estim_lr_coef": 0.5},
        ),
        ({"safeguard_warmup": True, "estim_lr0": 1e-2}, {"safeguard_warmup": True, "estim_lr0": 1e-2}),
    ],
    ids=["default", "decay", "safeguard"],
)
def test_prodigy(theirs: Any, ours: dict[str, Any], others: dict[str, Any]):
    mine = our_run(
        mfx.chain(mfx.contrib.scale_by_prodigy(0.7, **ours), mfx.scale(-1.0)),
        lambda state, params: {**params, "rate": state["scale_by_prodigy"].estim_lr},
    )
    reference = theirs.contrib.prodigy(0.7, **others)
    require_close(mine, their_run(theirs, reference, lambda state, params: {**params, "rate": state.estim_lr}))
    assert mine[-1]["rate"] > 1.1 * ours.get("estim_lr0", 1e-6)


@pytest.mark.parametrize("name", ["ademamix", "dog", "dowg"])
def test_the_scaling_of(theirs: Any, name: str):
    ours, other = {
        "ademamix": (
            mfx.contrib.scale_by_ademamix(0.8, 0.95, 0.99, mfx.linear(0.0, 2e5, 1_000_000)),
            lambda: theirs.contrib.ademamix(1.0, 0.8, 0.95, 0.99, lambda count: 0.2 * count),
        ),
        "dog": (mfx.contrib.scale_by_dog(1e-2), lambda: theirs.contrib.dog(1.0, ("heuristic", 1e-2))),
        "dowg": (mfx.contrib.scale_by_dowg(1e-2), lambda: theirs.contrib.dowg(1.0, 1e-2)),
    }[name]
    chained = theirs.chain(other(), theirs.scale(RATE))
    require_close(our_run(mfx.chain(ours, mfx.scale(-RATE))), their_run(theirs, chained))


def test_sam(theirs: Any):
    tx, params, mine = mfx.adamw(RATE, weight_decay=0.0), start(), []
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(mfx.contrib.sam_gradient(gradient, params, mfx.contrib.sam(0.3)), state, params)
        params = mfx.apply_updates(params, updates)
        mine.append(params)
    climb = theirs.chain(theirs.contrib.normalize(), theirs.sgd(0.3))
    reference = theirs.contrib.sam(theirs.adam(RATE), climb, opaque_mode=True)
    require_close(mine, their_run(theirs, reference, grad_fn=lambda params: lambda at, _: gradient(at)))


@pytest.mark.skipif(find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer: make engines")
def test_adaptive_sam():
    from pytorch_optimizer import SAM

    params = start()
    theirs = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    reference = SAM(list(theirs.values()), torch.optim.SGD, rho=0.3, adaptive=True, lr=RATE)
    for _ in range(STEPS):
        for name, grad in gradient(theirs).items():
            theirs[name].grad = grad.detach()
        reference.first_step()
        for name, grad in gradient(theirs).items():
            theirs[name].grad = grad.detach()
        reference.second_step()
        step = mfx.contrib.sam_gradient(gradient, params, mfx.contrib.sam(0.3, adaptive=True))
        params = mfx.tree.map(lambda p, g: p - RATE * g, params, step)
        for name in params:
            # They take the norm in fp32.
            torch.testing.assert_close(params[name], theirs[name].detach(), rtol=1e-6, atol=1e-6)
