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

OPTAX_PAGE = (Path(__file__).parents[3] / "docs" / "coming-from-optax.md").read_text()
TRANSFORMS_PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "transforms.md").read_text()


def defined_by(page: str, code: str) -> dict[str, Any]:
    """The names that the first block with some code of a page defines."""
    (block, *_) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if code in block
    ]
    names: dict[str, Any] = {"torch": torch, "mfx": mfx}
    exec(block, names)
    return names


SCALINGS: dict[str, tuple[mfx.Transform, Any]] = {
    "apply_every": (mfx.accumulate(mfx.identity(), 3, mean=False), optax.apply_every(3)),
    "centralize": (
        defined_by(TRANSFORMS_PAGE, "def centralize")["centralize"](),
        optax.centralize(),
    ),
    "add_decayed_weights": (mfx.add_decayed_weights(0.1), optax.add_decayed_weights(0.1)),
    "clip": (mfx.clip_by_value(0.5), optax.clip(0.5)),
    "clip_by_block_rms": (mfx.clip_by_block_rms(0.5), optax.clip_by_block_rms(0.5)),
    "clip_by_global_norm": (mfx.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
    "ema": (mfx.momentum(0.9, nesterov=False, debias=True), optax.ema(0.9)),
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
    "MultiSteps": (
        mfx.accumulate(mfx.adamw(RATE), 3),
        optax.MultiSteps(optax.adamw(RATE, weight_decay=0.01), 3),
    ),
    "adam": (mfx.adamw(RATE, weight_decay=0.0), optax.adam(RATE)),
    "apply_if_finite": (
        mfx.skip_nonfinite(mfx.adamw(RATE)),
        optax.apply_if_finite(optax.adamw(RATE, weight_decay=0.01), 5),
    ),
    "adamw": (mfx.adamw(RATE, weight_decay=0.1), optax.adamw(RATE, weight_decay=0.1)),
    "nadam": (mfx.adamw(RATE, weight_decay=0.0, nesterov=True), optax.nadam(RATE)),
    "nadamw": (mfx.adamw(RATE, nesterov=True), optax.nadamw(RATE, weight_decay=0.01)),
    "adafactor": (
        mfx.chain(mfx.contrib.scale_by_factored_rms(), mfx.clip_by_block_rms(1.0), PLAIN),
        optax.adafactor(RATE, multiply_by_parameter_scale=False),
    ),
    "lamb": (
        mfx.chain(mfx.scale_by_adam(eps=1e-6), mfx.contrib.match_weight_norms(), PLAIN),
        optax.lamb(RATE),
    ),
    "lars": (
        mfx.chain(
            mfx.contrib.match_weight_norms(),
            mfx.momentum(0.9, heavy_ball=True, nesterov=False),
            PLAIN,
        ),
        optax.lars(RATE, trust_coefficient=1.0),
    ),
    "lion": (mfx.lion(RATE), optax.lion(RATE, weight_decay=0.0)),
    "rmsprop": (mfx.chain(mfx.scale_by_rms(), PLAIN), optax.rmsprop(RATE)),
    "sgd": (
        mfx.chain(mfx.momentum(0.9, heavy_ball=True, nesterov=False), PLAIN),
        optax.sgd(RATE, 0.9),
    ),
    "sign_sgd": (mfx.chain(mfx.scale_by_sign(), PLAIN), optax.sign_sgd(RATE)),
    "signum": (
        mfx.chain(mfx.momentum(0.9, nesterov=False), mfx.scale_by_sign(), PLAIN),
        optax.signum(RATE, 0.9),
    ),
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
    name: (mfx.chain(tx, PLAIN), optax.chain(reference, THEIR_PLAIN))
    for name, (tx, reference) in SCALINGS.items()
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
    require_equal(*ROWS[name])
    # The row of this one names an example on a page.
    assert cells_of(name)[1] != "–" or name == "centralize"


def require_equal(tx: mfx.Transform, reference: Any) -> None:
    """Compare the parameters after seven steps."""
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
        np.testing.assert_allclose(
            param.numpy(), np.asarray(their_params[leaf]), rtol=2e-6, atol=2e-6
        )


def test_the_same_muon_is_contrib_muon_with_its_adam() -> None:
    """The weights of muonfx are the transposed kernels of Optax."""
    tx = defined_by(OPTAX_PAGE, "adam = mfx.adamw")["tx"]
    reference = optax.contrib.muon(0.02)
    shapes = {**SHAPES, "b": (4,)}
    params = drawn(shapes, 0)
    their_params = to_jax(transposed(params))
    state = tx.init(params)
    their_state = reference.init(their_params)
    for step in range(5):
        gradients = drawn(shapes, step + 1)
        updates, state = tx.update(gradients, state, params)
        params = mfx.apply_updates(params, updates)
        their_updates, their_state = reference.update(
            to_jax(transposed(gradients)), their_state, their_params
        )
        their_params = optax.apply_updates(their_params, their_updates)
    for leaf, param in params.items():
        np.testing.assert_allclose(
            param.numpy(), np.asarray(their_params[leaf]).T, rtol=1e-5, atol=1e-5
        )


def transposed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: leaf.mT if leaf.ndim == 2 else leaf for name, leaf in values.items()}


HINTS: dict[str, tuple[dict[str, Any], Any]] = {
    # names of Optax: numbers that replace the numbers of the hint, and the optimizer of Optax
    "trace": ({"decay": 0.9}, optax.trace(0.9)),
    "ema": ({"decay": 0.9}, optax.ema(0.9)),
    "sgd": (
        {"momentum.decay": 0.9, "scale_by_learning_rate.learning_rate": RATE},
        optax.sgd(RATE, 0.9),
    ),
    "adam": ({"scale_by_learning_rate.learning_rate": RATE}, optax.adam(RATE)),
    "nadam": ({"scale_by_learning_rate.learning_rate": RATE}, optax.nadam(RATE)),
    "nadamw": (
        {"scale_by_learning_rate.learning_rate": RATE},
        optax.nadamw(RATE, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_the_code_in_the_error_for_a_name_of_optax_computes_the_same(name: str) -> None:
    numbers, reference = HINTS[name]
    with pytest.raises(AttributeError, match="here it is ") as caught:
        getattr(mfx, name)
    tx = eval(str(caught.value).partition("here it is ")[2], {"muonfx": mfx})
    require_equal(mfx.with_hyperparams(tx, numbers), reference)


@pytest.mark.parametrize("name", ["trace", "ema"])
def test_a_row_of_the_page_on_optax_computes_the_same(name: str) -> None:
    (row,) = [line for line in OPTAX_PAGE.splitlines() if line.startswith(f"| `{name}(decay)`")]
    (code,) = re.findall(r"`(.*)`", row.split("|")[2])
    require_equal(eval(f"mfx.{code}", {"mfx": mfx, "decay": 0.9}), getattr(optax, name)(0.9))


@pytest.mark.parametrize(
    "name", ["normalize", "normalize_by_update_norm", "scale_by_param_block_norm"]
)
def test_a_row_names_nothing_that_computes_another_update(name: str) -> None:
    assert cells_of(name)[1] == "–"


def test_the_page_on_optax_writes_a_prefix_tree_by_paths() -> None:
    assert (
        '`{"a": "x"}` is `mfx.routing.labels(params, [(mfx.routing.path("a.*"), "x")])`'
        in OPTAX_PAGE
    )
    inner = {"x": mfx.scale_by_learning_rate(1.0), "y": mfx.scale_by_learning_rate(2.0)}
    params = {"a": {"w": torch.ones(2)}, "c": [torch.ones(2)]}
    with pytest.raises(
        ValueError, match=r"found no value for 'a.w', .* muonfx.routing.labels\(params, "
    ):
        mfx.partition(inner, {"a": "x", "c": "y"}).init(params)
    labels = mfx.routing.labels(
        params, [(mfx.routing.path("a.*"), "x"), (mfx.routing.path("c.*"), "y")]
    )
    tx = mfx.partition(inner, labels)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["a"]["w"].tolist() == [-1.0, -1.0]
    assert updates["c"][0].tolist() == [-2.0, -2.0]
