"""The rows of the table of Optax: a transform in a row computes the same updates, or the row says otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from tests.engines.references.optax_values import double_precision, drawn, to_jax

jax = pytest.importorskip("jax", reason="needs optax: make engines")
optax = pytest.importorskip("optax", reason="needs optax: make engines")
import numpy as np  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PAGE = (Path(__file__).parents[3] / "docs" / "beside-others.md").read_text()
RATE = 0.1
SHAPES = {"w": (4, 3), "v": (3, 5)}
"""Matrices, because some rows say "by matrix"."""

PLAIN = mfx.scale_by_learning_rate(RATE)
THEIR_PLAIN = optax.scale_by_learning_rate(RATE)
SHRINKING = 1 / (1 + RATE**2) ** 0.5
"""The factor by which Fromage multiplies weights."""

SCALINGS: dict[str, tuple[mfx.Transform, Any]] = {
    "add_decayed_weights": (mfx.add_decayed_weights(0.1), optax.add_decayed_weights(0.1)),
    "clip": (mfx.clip_by_value(0.5), optax.clip(0.5)),
    "clip_by_block_rms": (mfx.clip_by_block_rms(0.5), optax.clip_by_block_rms(0.5)),
    "clip_by_global_norm": (mfx.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
    "ema": (mfx.momentum(0.9, nesterov=False), optax.ema(0.9, debias=False)),
    "trace": (mfx.momentum(0.9, heavy_ball=True, nesterov=False), optax.trace(0.9)),
    "identity": (mfx.identity(), optax.identity()),
    "set_to_zero": (mfx.set_to_zero(), optax.set_to_zero()),
    "scale": (mfx.scale(0.3), optax.scale(0.3)),
    "scale_by_adam": (mfx.scale_by_adam(), optax.scale_by_adam()),
    "scale_by_factored_rms": (mfx.contrib.scale_by_factored_rms(), optax.scale_by_factored_rms()),
    "scale_by_lion": (mfx.scale_by_lion(), optax.scale_by_lion()),
    "scale_by_sign": (mfx.scale_by_sign(), optax.scale_by_sign()),
    "scale_by_rms": (mfx.scale_by_rms(), optax.scale_by_rms()),
    "scale_by_trust_ratio": (mfx.contrib.match_weight_norms(), optax.scale_by_trust_ratio()),
}
"""For names of Optax, both transforms without a learning rate."""

OPTIMIZERS: dict[str, tuple[mfx.Transform, Any]] = {
    "MultiSteps": (mfx.accumulate(mfx.adamw(RATE), 3), optax.MultiSteps(optax.adamw(RATE, weight_decay=0.01), 3)),
    "adam": (mfx.adamw(RATE, weight_decay=0.0), optax.adam(RATE)),
    "adamw": (mfx.adamw(RATE, weight_decay=0.1), optax.adamw(RATE, weight_decay=0.1)),
    "nadam": (mfx.adamw(RATE, weight_decay=0.0, nesterov=True), optax.nadam(RATE)),
    "adafactor": (
        mfx.chain(mfx.contrib.scale_by_factored_rms(), mfx.clip_by_block_rms(1.0), PLAIN),
        optax.adafactor(RATE, multiply_by_parameter_scale=False),
    ),
    "lamb": (mfx.chain(mfx.scale_by_adam(eps=1e-6), mfx.contrib.match_weight_norms(), PLAIN), optax.lamb(RATE)),
    "lars": (
        mfx.chain(mfx.contrib.match_weight_norms(), mfx.momentum(0.9, heavy_ball=True, nesterov=False), PLAIN),
        optax.lars(RATE, trust_coefficient=1.0),
    ),
    "lion": (mfx.lion(RATE), optax.lion(RATE, weight_decay=0.0)),
    "rmsprop": (mfx.chain(mfx.scale_by_rms(), PLAIN), optax.rmsprop(RATE)),
    "sgd": (mfx.chain(mfx.momentum(0.9, heavy_ball=True, nesterov=False), PLAIN), optax.sgd(RATE, 0.9)),
    "sign_sgd": (mfx.chain(mfx.scale_by_sign(), PLAIN), optax.sign_sgd(RATE)),
    "signum": (mfx.chain(mfx.momentum(0.9, nesterov=False), mfx.scale_by_sign(), PLAIN), optax.signum(RATE, 0.9)),
    "fromage": (
        mfx.chain(
            mfx.contrib.match_weight_norms(),
            mfx.scale_by_learning_rate(RATE * SHRINKING),
            mfx.subtract_decayed_weights(1 - SHRINKING),
        ),
        optax.fromage(RATE),
    ),
}
"""For names of Optax, both optimizers, with a learning rate."""

ROWS = OPTIMIZERS | {
    name: (mfx.chain(tx, PLAIN), optax.chain(reference, THEIR_PLAIN)) for name, (tx, reference) in SCALINGS.items()
}


@pytest.fixture(autouse=True, scope="module")
def _double_precision() -> Iterator[None]:
    with double_precision():
        yield


def cells_of(name: str) -> list[str]:
    """The cells of the row that begins with a name of Optax."""
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and line.count("|") == 4]
    (row,) = [row for row in rows if re.search(rf"`(contrib\.)?{name}`", row.split("|")[1])]
    return [cell.strip() for cell in row.split("|")[1:4]]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_same_transform(name: str) -> None:
    tx, reference = ROWS[name]
    params = drawn(SHAPES, 0)
    their_params = to_jax(params)
    state = tx.init(params)
    their_state = reference.init(their_params)
    for step in range(7):
        gradients = drawn(SHAPES, step + 1)
        their_gradients = to_jax(gradients)
        updates, state = tx.update(gradients, state, params)
        params = mfx.apply_updates(params, updates)
        their_updates, their_state = reference.update(their_gradients, their_state, their_params)
        their_params = optax.apply_updates(their_params, their_updates)
    for leaf, param in params.items():
        np.testing.assert_allclose(param.numpy(), np.asarray(their_params[leaf]), rtol=2e-6, atol=2e-6)
    assert cells_of(name)[1] != "–"


@pytest.mark.parametrize("name", ["normalize", "normalize_by_update_norm", "scale_by_param_block_norm"])
def test_a_row_names_nothing_that_computes_another_update(name: str) -> None:
    assert cells_of(name)[1] == "–"


def test_the_row_of_apply_every_tells_the_mean_from_the_sum() -> None:
    assert "not the sum" in cells_of("apply_every")[2]
    gradients = {"w": torch.ones(2, 2)}
    their_gradients = {"w": jax.numpy.ones((2, 2))}
    tx = mfx.accumulate(mfx.scale(1.0), 2)
    reference = optax.apply_every(2)
    state = tx.init(gradients)
    their_state = reference.init(their_gradients)
    for _ in range(2):
        updates, state = tx.update(gradients, state, gradients)
        their_updates, their_state = reference.update(their_gradients, their_state)
    assert float(updates["w"][0, 0]) == 1.0
    assert float(their_updates["w"][0, 0]) == 2.0


def test_the_page_on_optax_writes_a_prefix_tree_by_paths() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-optax.md").read_text()
    assert '`{"a": "x"}` is `mfx.routing.labels(params, [(mfx.routing.path("a.*"), "x")])`' in page
    inner = {"x": mfx.scale_by_learning_rate(1.0), "y": mfx.scale_by_learning_rate(2.0)}
    params = {"a": {"w": torch.ones(2)}, "c": [torch.ones(2)]}
    with pytest.raises(ValueError, match=r"found no value for 'a.w', .* muonfx.routing.labels\(params, "):
        mfx.partition(inner, {"a": "x", "c": "y"}).init(params)
    labels = mfx.routing.labels(params, [(mfx.routing.path("a.*"), "x"), (mfx.routing.path("c.*"), "y")])
    tx = mfx.partition(inner, labels)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["a"]["w"].tolist() == [-1.0, -1.0]
    assert updates["c"][0].tolist() == [-2.0, -2.0]
