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
    assert is_close(mfx.tree.norm(grads) / norm, torch.ones((), dtype=torch.float64), 3e-3)


def test_second_moments_are_finite_behind_a_clipped_norm():
    tx = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale_by_adam())
    params = {"w": torch.zeros(4)}
    updates, state = tx.update({"w": torch.full((4,), 1e30)}, tx.init(params), params)
    assert state["scale_by_adam"].nu["w"].isfinite().all()
    torch.testing.assert_close(updates["w"], torch.ones(4))
