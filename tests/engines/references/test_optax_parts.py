"""Transforms and schedules that bear Optax's names, beside Optax in double precision."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import muonfx as mfx

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("optax") is None, reason="needs optax: make engines"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # JAX's own
]

if find_spec("optax") is not None:
    import jax
    import optax

BOUND = 1e-12
"""The largest difference of updates after some steps in double precision, relative to their largest magnitude."""

FP32_DECAY = 1e-7
"""The same where Optax computes a decay in single precision."""

SHAPES = {"w": (6, 9), "b": (5,), "k": (3, 4, 5), "s": ()}
STEPS = 4


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def to_jax(values: dict[str, Tensor]) -> dict[str, Any]:
    return {name: jax.numpy.asarray(leaf.numpy()) for name, leaf in values.items()}


def compare(ours: mfx.Transform, theirs: Any, bound: float) -> None:
    """Take some steps with both, and compare the updates."""
    params = drawn(0)
    state, their_state = ours.init(params), theirs.init(to_jax(params))
    for step in range(1, STEPS + 1):
        grads = drawn(step)
        updates, state = ours.update(grads, state, params)
        their_updates, their_state = theirs.update(to_jax(grads), their_state, to_jax(params))
        for name, leaf in updates.items():
            wanted = np.asarray(their_updates[name])
            scale = max(float(np.abs(wanted).max()), 1e-30)
            assert float(np.abs(leaf.numpy() - wanted).max()) <= bound * scale, f"step {step}, {name}"


TRANSFORMS: dict[str, Callable[[], tuple[mfx.Transform, Any]]] = {
    "rms": lambda: (mfx.scale_by_rms(), optax.scale_by_rms()),
    "rms, debiased": lambda: (
        mfx.scale_by_rms(0.8, 1e-3, eps_in_sqrt=False, debias=True),
        optax.scale_by_rms(0.8, 1e-3, eps_in_sqrt=False, bias_correction=True),
    ),
    "sign": lambda: (mfx.scale_by_sign(), optax.scale_by_sign()),
    "trust ratio": lambda: (mfx.scale_by_trust_ratio(), optax.scale_by_trust_ratio()),
    "trust ratio, bounded": lambda: (
        mfx.scale_by_trust_ratio(1.5, 0.1, 1e-2),
        optax.scale_by_trust_ratio(1.5, 0.1, 1e-2),
    ),
    "update norm": lambda: (mfx.normalize_by_update_norm(-2.0), optax.normalize_by_update_norm(-2.0)),
    "centralize": lambda: (mfx.centralize(), optax.centralize()),
    "factored": lambda: (
        mfx.scale_by_factored_rms(min_dim_size_to_factor=4),
        optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    ),
    "not factored": lambda: (
        mfx.scale_by_factored_rms(factored=False, decay_rate=0.5, step_offset=-3, eps=1e-6),
        optax.scale_by_factored_rms(factored=False, decay_rate=0.5, step_offset=-3, epsilon=1e-6),
    ),
    "nesterov": lambda: (
        mfx.scale_by_adam(0.8, 0.95, nesterov=True),
        optax.scale_by_adam(0.8, 0.95, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_optaxs(name: str):
    compare(*TRANSFORMS[name](), FP32_DECAY if "factored" in name else BOUND)


def test_adaptive_clipping_is_optaxs_in_the_other_layout():
    """Units are rows here and columns there, so one is given the transposed of the other."""
    params, grads = drawn(0), drawn(1)
    del params["k"], grads["k"]
    tx = mfx.adaptive_grad_clip(0.5, 0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    theirs = optax.adaptive_grad_clip(0.5, 0.1)

    def turned(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: leaf.mT if leaf.ndim == 2 else leaf for name, leaf in values.items()}

    wanted, _ = theirs.update(to_jax(turned(grads)), theirs.init(to_jax(params)), to_jax(turned(params)))
    for name, leaf in turned(updates).items():
        np.testing.assert_allclose(leaf.numpy(), np.asarray(wanted[name]), rtol=BOUND, atol=0)


def test_noise_has_optaxs_variance():
    """The numbers are others, so their sizes are compared, to three parts in a hundred."""
    ours, theirs = mfx.contrib.add_noise(0.3, 0.55), optax.add_noise(0.3, 0.55, 0)
    zeros = {"w": torch.zeros(10_000, dtype=torch.float64)}
    state, their_state = ours.init(zeros), theirs.init(to_jax(zeros))
    for _ in range(3):
        updates, state = ours.update(zeros, state)
        wanted, their_state = theirs.update(to_jax(zeros), their_state)
        assert float(updates["w"].std()) == pytest.approx(float(np.asarray(wanted["w"]).std()), rel=0.03)


def test_trees_are_searched_mapped_and_measured_as_optax_does():
    ours, theirs = drawn(0), to_jax(drawn(0))
    others, their_others = drawn(1), to_jax(drawn(1))
    assert float(mfx.tree.norm(ours)) == pytest.approx(float(optax.tree.norm(theirs)), rel=BOUND)
    assert float(mfx.tree.vdot(ours, others)) == pytest.approx(float(optax.tree.vdot(theirs, their_others)), rel=1e-10)
    pairs = [
        (mfx.tree.add(ours, others), optax.tree.add(theirs, their_others)),
        (mfx.tree.scale(0.3, ours), optax.tree.scale(0.3, theirs)),
    ]
    for found, wanted in pairs:
        for name, leaf in found.items():
            np.testing.assert_array_equal(leaf.numpy(), np.asarray(wanted[name]))

    tx, their_tx = mfx.chain(mfx.scale(1.0), mfx.scale_by_adam()), optax.chain(optax.scale(1.0), optax.scale_by_adam())
    state, their_state = mfx.tree.set(tx.init(ours), "count", torch.tensor(7)), their_tx.init(theirs)
    their_state = optax.tree.set(their_state, count=jax.numpy.asarray(7))
    assert int(mfx.tree.get(state, "count")) == int(optax.tree.get(their_state, "count")) == 7
    state = mfx.tree.map_params(lambda leaf, param, other: leaf + other, state, ours, others)
    their_state = optax.tree.map_params(their_tx, lambda leaf, other: leaf + other, their_state, their_others)
    for name, leaf in mfx.tree.get(state, "mu").items():
        np.testing.assert_array_equal(leaf.numpy(), np.asarray(optax.tree.get(their_state, "mu")[name]))
    assert int(mfx.tree.get(state, "count")) == int(optax.tree.get(their_state, "count"))
