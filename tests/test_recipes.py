"""Recipes pass their settings on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import muonfx as mfx


def _muon_of(model: torch.nn.Module, **settings: Any) -> mfx.Transform:
    return mfx.Muon(model, **settings).tx


@pytest.mark.parametrize("make", [mfx.muon, mfx.normuon, mfx.muon_with_adamw])
def test_a_method_reaches_the_iteration(make: Callable[..., mfx.Transform]) -> None:
    assert "method='standard'" in repr(make(0.1, method="standard"))
    assert "method" not in repr(make(0.1))
    with pytest.raises(ValueError, match="method: found 'bogus'"):
        make(0.1, method="bogus")
    params = (
        {"w": torch.zeros(8, 24), "bias": torch.zeros(8)} if make is mfx.muon_with_adamw else {"w": torch.zeros(8, 24)}
    )
    grads = {name: torch.randn(p.shape) for name, p in params.items()}
    updates = {}
    for method in ("auto", "standard", "gram"):
        labels = {"labels": mfx.select.default_labels_by_name} if make is mfx.muon_with_adamw else {}
        tx = make(0.1, method=method, dtype=torch.float32, **labels)
        updates[method] = tx.update(grads, tx.init(params), params)[0]["w"]
    assert torch.equal(updates["auto"], updates["standard"])  # a small matrix
    assert not torch.equal(updates["gram"], updates["standard"])
    torch.testing.assert_close(updates["gram"], updates["standard"], rtol=1e-3, atol=1e-4)


def test_a_method_reaches_the_iteration_of_the_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 2))
    assert "method='gram'" in repr(_muon_of(model, method="gram"))
    with pytest.raises(ValueError, match="method: found 'bogus'"):
        _muon_of(model, method="bogus")
