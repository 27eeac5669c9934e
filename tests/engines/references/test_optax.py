"""Transforms, wrappers and schedules that bear Optax's names, compared with Optax in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonfx as mfx
from tests.engines.references.optax_values import double_precision, drawn, to_jax

jax = pytest.importorskip("jax", reason="needs optax: make engines")
optax = pytest.importorskip("optax", reason="needs optax: make engines")
import numpy as np  # noqa: E402

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # JAX's own
]

BOUND = 1e-12
"""The largest difference, relative to the largest magnitude of a leaf."""
FP32_DECAY = 1e-7
"""The same if Optax computes a decay in single precision."""
RATE = 0.1
SHAPES = {"w": (6, 9), "b": (5,), "k": (3, 4, 5), "s": ()}
CURVATURES = {"w": 3.0, "b": 0.5, "k": 1.0, "s": 2.0}


@pytest.fixture(autouse=True, scope="module")
def _double_precision() -> Iterator[None]:
    with double_precision():
        yield


def gradient(params: Any) -> dict[str, Any]:
    """The gradient of a quadratic of uneven curvature around 1, for torch and for JAX."""
    return {name: CURVATURES[name] * (param - 1.0) for name, param in params.items()}


def loss(params: Any) -> Any:
    return sum(CURVATURES[name] / 2 * ((param - 1.0) ** 2).sum() for name, param in params.items())


def require_close(found: Any, wanted: Any, where: str, bound: float = BOUND) -> None:
    for name, leaf in found.items():
        theirs, ours = np.asarray(wanted[name]), np.asarray(leaf)
        scale = max(float(np.abs(theirs).max()), 1e-30)
        assert float(np.abs(ours - theirs).max()) <= bound * scale, f"{where}, {name}"


See = Callable[[Any, Any], dict[str, Any]]
"""A function of state and parameters that returns the values to compare."""


def ours_seen(
    tx: mfx.Transform, see: See, steps: int, *, gives_loss: bool = False, ascent: Any = None
) -> list[Any]:
    params, seen = drawn(SHAPES, 0), []
    state = tx.init(params)
    for _ in range(steps):
        extras = {"value": loss(params)} if gives_loss else {}
        grads = (
            gradient(params)
            if ascent is None
            else mfx.contrib.sam_gradient(gradient, params, ascent)
        )
        updates, state = tx.update(grads, state, params, **extras)
        params = mfx.apply_updates(params, updates)
        seen.append(see(state, params))
    return seen


def theirs_seen(tx: Any, see: See, steps: int, **extras: Any) -> list[Any]:
    def step(params: Any, state: Any) -> Any:
        given = {name: of(params) for name, of in extras.items()}
        updates, state = tx.update(gradient(params), state, params, **given)
        params = optax.apply_updates(params, updates)
        return params, state, see(state, params)

    params, seen, step = to_jax(drawn(SHAPES, 0)), [], jax.jit(step)
    state = tx.init(params)
    for _ in range(steps):
        params, state, shown = step(params, state)
        seen.append(shown)
    return seen


def params_only(_: Any, params: Any) -> Any:
    return params


def compare(ours: Any, theirs: Any, steps: int = 20, bound: float = BOUND) -> None:
    """Compare two optimizers, or pairs of an optimizer and a function of the values to compare, over some steps."""
    tx, see = ours if type(ours) is tuple else (ours, params_only)
    reference, their_see = theirs if type(theirs) is tuple else (theirs, params_only)
    compare_seen(ours_seen(tx, see, steps), theirs_seen(reference, their_see, steps), bound)


def compare_seen(ours: list[Any], theirs: list[Any], bound: float = BOUND) -> None:
    for step, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        require_close(found, wanted, f"step {step}", bound)


CORRECTED = {"bias_correction": True}
SAME: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    # the name in both, positional arguments, named arguments of ours and of theirs
    ("scale_by_rms", (), {}, {}),
    (
        "scale_by_rms",
        (0.8, 1e-3),
        {"eps_in_sqrt": False, "debias": True},
        {"eps_in_sqrt": False, **CORRECTED},
    ),
    ("scale_by_sign", (), {}, {}),
    ("scale_by_factored_rms", (), {"min_dim_size_to_factor": 4}, {"min_dim_size_to_factor": 4}),
    (
        "scale_by_factored_rms",
        (),
        {"decay_rate": 0.5, "eps": 1e-6},
        {"decay_rate": 0.5, "epsilon": 1e-6},
    ),
    ("scale_by_adam", (0.8, 0.95), {"nesterov": True}, {"nesterov": True}),
]


@pytest.mark.parametrize(("name", "arguments", "ours", "theirs"), SAME)
def test_a_scaling_of_the_same_name(name: str, arguments: Any, ours: Any, theirs: Any):
    own = getattr(mfx, name, None) or getattr(mfx.contrib, name)
    pair = own(*arguments, **ours), getattr(optax, name)(*arguments, **theirs)
    more = (4, FP32_DECAY) if "factored" in name else (20, BOUND)
    compare(mfx.chain(pair[0], mfx.scale(-RATE)), optax.chain(pair[1], optax.scale(-RATE)), *more)


@pytest.mark.parametrize("warms_up", [False, True])
def test_schedule_free(warms_up: bool):
    rate = mfx.linear_schedule(0.0, RATE, 10) if warms_up else RATE
    their_rate = (lambda count: 0.01 * count.clip(0, 10)) if warms_up else RATE
    inner = mfx.chain(mfx.scale_by_adam(b1=0.0), mfx.scale_by_learning_rate(rate))
    reference = optax.contrib.schedule_free(optax.adam(their_rate, b1=0.0), their_rate, b1=0.9)
    compare(
        (mfx.contrib.schedule_free(inner, rate, b1=0.9), mfx.contrib.schedule_free_eval_params),
        (reference, optax.contrib.schedule_free_eval_params),
    )


DECAYING = {"weight_decay": 0.1, "estim_lr0": 1e-3, "estim_lr_coef": 0.5}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"b1": 0.8, "b2": 0.95, **DECAYING}, {"betas": (0.8, 0.95), **DECAYING}),
        (
            {"safeguard_warmup": True, "estim_lr0": 1e-2},
            {"safeguard_warmup": True, "estim_lr0": 1e-2},
        ),
    ],
)
def test_prodigy(ours: dict[str, Any], theirs: dict[str, Any]):
    compare(
        (
            mfx.chain(mfx.contrib.scale_by_prodigy(0.7, **ours), mfx.scale(-1.0)),
            lambda s, p: {**p, "rate": s["scale_by_prodigy"].estim_lr},
        ),
        (optax.contrib.prodigy(0.7, **theirs), lambda s, p: {**p, "rate": s.estim_lr}),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"patience": 2},
        {"patience": 1, "cooldown": 2, "min_scale": 0.2},
        {"patience": 1, "rtol": 0.0, "atol": 0.5},
    ],
)
def test_reduce_on_plateau(settings: dict[str, Any]):
    # The loss rises and falls with this rate.
    tx = mfx.chain(mfx.scale_by_learning_rate(0.7), mfx.contrib.reduce_on_plateau(0.5, **settings))
    reference = optax.chain(optax.sgd(0.7), optax.contrib.reduce_on_plateau(0.5, **settings))
    ours = ours_seen(
        tx, lambda s, p: {**p, "scale": s["reduce_on_plateau"].scale}, 30, gives_loss=True
    )
    compare_seen(
        ours, theirs_seen(reference, lambda s, p: {**p, "scale": s[-1].scale}, 30, value=loss)
    )
    assert ours[-1]["scale"] < 1.0


def test_sam():
    ours = ours_seen(
        mfx.adamw(RATE, weight_decay=0.0), params_only, 20, ascent=mfx.contrib.sam(0.3)
    )
    climb = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))
    reference = optax.contrib.sam(optax.adam(RATE), climb, opaque_mode=True)
    compare_seen(
        ours,
        theirs_seen(reference, params_only, 20, grad_fn=lambda params: lambda at, _: gradient(at)),
    )


def test_polargrad_is_muon_of_optax_with_the_dual_norm():
    keller = mfx.orthogonalize(coefficients="keller", method="standard", dtype=torch.float64)
    ours = mfx.chain(
        mfx.momentum(0.9, nesterov=False, debias=True), mfx.contrib.scale_by_dual_norm(keller)
    )
    params, grads = ({"w": drawn(SHAPES, seed)["w"]} for seed in (0, 1))
    theirs = optax.contrib.scale_by_muon(
        beta=0.9,
        nesterov=False,
        adaptive=True,
        eps=0.0,
        weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()},
    )
    state, their_state = ours.init(params), theirs.init(to_jax(params))
    for step in range(3):
        updates, state = ours.update(grads, state)
        wanted, their_state = jax.jit(theirs.update)(to_jax(grads), their_state, to_jax(params))
        require_close(updates, wanted, f"step {step}")
        grads = {"w": drawn(SHAPES, step + 2)["w"]}


# --------------------------------------------------------------------------------------------------------- schedules

VALUES = st.floats(0.01, 4.0)
LENGTHS = st.integers(1, 9)

SCHEDULES: dict[str, st.SearchStrategy[Any]] = {
    "exponential": st.builds(
        lambda start, steps, rate: (
            mfx.exponential_decay(start, steps, rate),
            optax.exponential_decay(start, steps, rate),
        ),
        *(VALUES, LENGTHS, VALUES),
    ),
    "cosine": st.builds(
        lambda start, steps, alpha: (
            mfx.cosine_decay_schedule(start, steps, end=alpha * start),
            optax.cosine_decay_schedule(start, steps, alpha),
        ),
        *(VALUES, LENGTHS, VALUES),
    ),
    "warmup and cosine": st.builds(
        lambda start, peak, warmup, decay, end: (
            mfx.warmup_cosine_decay_schedule(peak, warmup, warmup + decay, start=start, end=end),
            optax.warmup_cosine_decay_schedule(start, peak, warmup, warmup + decay, end),
        ),
        *(VALUES, VALUES, LENGTHS, LENGTHS, VALUES),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=5)
@given(data=st.data())
def test_a_schedule_is_optaxs_at_every_step(name: str, data: st.DataObject):
    ours, theirs = data.draw(SCHEDULES[name])
    wanted = np.asarray([float(theirs(jax.numpy.asarray(count))) for count in range(25)])
    found = [ours(count) for count in range(25)]
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=BOUND * max(1.0, float(np.abs(wanted).max()))
    )
