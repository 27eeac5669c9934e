"""Norms, mean squares and clipping: updates of any size give the same, NaN stays where it is, definitions hold."""

from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing.violation import is_close

SHAPES = {"w": (4, 6), "b": (3,), "k": (2, 3, 5)}
BY_MATRIX: dict[str, Any] = {
    "rows": mfx.contrib.normalize_rows(),
    "columns": mfx.contrib.normalize_columns(),
    "matrices": mfx.contrib.normalize_matrices(),
    "sphere": mfx.contrib.match_weight_norms(),
}
EACH: dict[str, Any] = BY_MATRIX | {
    "leaves": mfx.contrib.normalize_leaves(),
}


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: (64 * leaf).round() / 64 for name, leaf in drawn.items()}  # so that 2**-120 times it is exact in fp32


def matrices(seed: int) -> dict[str, Tensor]:
    return {"w": drawn(seed)["w"].float()}


def updated(tx: mfx.Transform, grads: dict[str, Tensor], params: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return tx.update(grads, tx.init(grads), params)[0]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("exponent", [-120, -30, 1, 60, 120])
def test_updates_of_any_size_give_the_same(name: str, exponent: int):
    draw = matrices if name in BY_MATRIX else drawn
    grads, params = ({n: leaf.float() for n, leaf in draw(seed).items()} for seed in (1, 0))
    scaled, zero = ({n: leaf * factor for n, leaf in grads.items()} for factor in (2.0**exponent, 0.0))
    once, again = updated(EACH[name], grads, params), updated(EACH[name], scaled, params)
    assert all(torch.equal(once[leaf], again[leaf]) for leaf in grads)
    assert not any(leaf.any() for leaf in updated(EACH[name], zero, params).values())


@pytest.mark.parametrize("exponent", [-120, 120])
def test_weights_keep_their_norm_at_any_size(exponent: int):
    params, grads = ({"w": matrices(seed)["w"] * 2.0**exponent} for seed in (0, 1))
    tx = mfx.contrib.keep_weight_norms()
    after = mfx.apply_updates(params, tx.update(grads, tx.init(params), params)[0])["w"]
    assert is_close((after * 2.0**-exponent).norm(), (params["w"] * 2.0**-exponent).norm(), 1e-6)
    assert not is_close(after * 2.0**-exponent, params["w"] * 2.0**-exponent, 0.1)


@pytest.mark.parametrize("name", BY_MATRIX)
def test_nan_stays_in_its_matrix(name: str):
    grads = {"w": torch.ones(2, 3, 4)}
    grads["w"][1, 1, 1] = torch.nan
    tx = EACH[name].replace(view=mfx.MatrixView(((-2,), (-1,))))
    out = updated(tx, grads, {"w": torch.ones(2, 3, 4)})["w"]
    assert out[0].isfinite().all()
    assert out[1].isnan().any()


def after(tx: mfx.Transform, steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return kit.examples.updates_of(tx, steps[0], steps)[-1]


def test_debiased_it_is_adam_without_a_first_moment():
    steps = [drawn(seed) for seed in range(4)]
    rms = after(mfx.scale_by_rms(0.99, 1e-6, eps_in_sqrt=False, debias=True), steps)
    torch.testing.assert_close(rms, after(mfx.scale_by_adam(0.0, 0.99, 1e-6), steps))


def factored(least: int = 2) -> mfx.Transform:
    return mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=least, eps=0.0)


def test_squares_of_rank_one_lose_nothing_by_being_factored():
    rows, columns = torch.rand(4, 1, dtype=torch.float64) + 0.1, torch.rand(1, 6, dtype=torch.float64) + 0.1
    steps = [{"w": size * rows * columns} for size in (1.0, 3.0, 0.5)]
    torch.testing.assert_close(after(factored(), steps), after(factored(100), steps))


def test_what_is_factored_has_no_mean_squares_of_elements():
    state = factored().init(drawn(0) | {"thin": torch.zeros(1, 9)})
    shapes = {name: [tuple(own[name].shape) for own in state[1:]] for name in state.v}
    assert shapes == {
        "w": [(4,), (6,), (0,)],
        "b": [(0,), (0,), (3,)],
        "k": [(2, 3), (2, 5), (0,)],
        "thin": [(0,), (0,), (1, 9)],
    }


SIZES = {
    torch.float32: (1e-30, 1e-6, 1.0, 1e10, 1e19, 1e25, 1e37),
    torch.bfloat16: (1e-30, 1.0, 1e25, 1e37),
    torch.float64: (1e-300, 1e-30, 1.0, 1e25, 1e160, 1e300),
}
CASES = [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes]


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "size"), CASES, ids=str)
def test_a_clipped_norm_is_the_bound_or_the_norm_itself_at_any_size(dtype: torch.dtype, size: float, max_norm: float):
    plain = {"w": torch.randn(10, 4, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    norm = torch.cat([leaf.flatten() for leaf in plain.values()]).norm() * size
    grads = {name: (leaf * size).to(dtype) for name, leaf in plain.items()}
    updates, _ = mfx.clip_by_global_norm(max_norm).update(grads, mfx.core.EmptyState())
    expected = min(float(norm), max_norm)
    scaled = torch.cat([leaf.double().flatten() for leaf in updates.values()]) / expected
    assert is_close(scaled.norm(), torch.ones((), dtype=torch.float64), 3e-3 if dtype != torch.float64 else 1e-12)
    assert is_close(mfx.tree.norm(grads) / norm, torch.ones((), dtype=torch.float64), 3e-3)
