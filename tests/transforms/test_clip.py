"""Clipping by the norm of the whole tree: at any size of gradients, for which the norm can be said."""

import pytest
import torch

import muonfx as mfx
from muonfx.testing.violation import is_close

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
    assert is_close(mfx.global_norm(grads) / norm, torch.ones((), dtype=torch.float64), 3e-3)


def test_second_moments_are_finite_behind_a_clipped_norm():
    tx = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale_by_adam())
    params = {"w": torch.zeros(4)}
    updates, state = tx.update({"w": torch.full((4,), 1e30)}, tx.init(params), params)
    assert state["scale_by_adam"].nu["w"].isfinite().all()
    torch.testing.assert_close(updates["w"], torch.ones(4))


def test_no_unit_is_longer_than_its_share_of_the_parameters():
    grads = {"w": torch.randn(7, 5), "k": torch.randn(4, 3, 2), "b": torch.randn(6), "s": torch.randn(())}
    params = {name: 10 * torch.randn_like(leaf) for name, leaf in grads.items()}
    params["w"][:3] = 0.0
    tx = mfx.adaptive_grad_clip(0.1, 0.5)
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, leaf in updates.items():
        units = [x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1) for x in (leaf, params[name], grads[name])]
        norms, allowed = units[0].norm(dim=1), 0.1 * units[1].norm(dim=1).clamp(min=0.5)
        assert bool((norms <= allowed * (1 + 1e-6)).all())
        short = units[2].norm(dim=1) <= allowed
        assert torch.equal(units[0][short], units[2][short])
        torch.testing.assert_close(norms[~short], allowed[~short])


def test_adaptive_grad_clip_clips_gradients_whose_squares_overflow():
    params, tx = {"w": torch.ones(2, 4)}, mfx.adaptive_grad_clip(0.1)
    for size in (1e10, 1e30):
        clipped = tx.update({"w": torch.full((2, 4), size)}, mfx.core.EmptyState(), params)[0]["w"]
        torch.testing.assert_close(clipped, torch.full((2, 4), 0.1))
