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
    with pytest.raises(ValueError, match=r"method must be .*, found 'bogus'"):
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
    with pytest.raises(ValueError, match=r"method must be .*, found 'bogus'"):
        _muon_of(model, method="bogus")


def test_an_iteration_said_loosely_and_as_a_value_is_one_chain() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 2))
    loose: dict[str, Any] = {"coefficients": "keller", "method": "gram", "dtype": torch.float32}
    value = mfx.polar.NewtonSchulz(**loose)
    named = {"labels": mfx.select.default_labels_by_name}
    for make, more in (
        (mfx.muon, {}),
        (mfx.normuon, {}),
        (mfx.muon_with_adamw, named),
        (lambda **given: _muon_of(model, **given), {}),
        (mfx.orthogonalize, {}),
    ):
        first, second = make(**loose, **more), make(newton_schulz=value, **more)
        assert first == second
        assert first.fingerprint == second.fingerprint
        assert repr(first) == repr(second)
        with pytest.raises(ValueError, match="newton_schulz stands for coefficients, method, dtype too: give one"):
            make(**loose, newton_schulz=value, **more)
        with pytest.raises(TypeError, match=r"newton_schulz must be a .*, found 'keller'"):
            make(newton_schulz="keller", **more)


def test_an_iteration_says_what_a_recipe_has_no_argument_for() -> None:
    made = mfx.normuon(newton_schulz=mfx.polar.NewtonSchulz(steps=3, products="batched"))
    assert "orthogonalize(steps=3, products='batched')" in repr(made)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [({"steps": 0}, "steps"), ({"coefficients": "kellerr"}, "kellerr"), ({"dtype": "fp32"}, "dtype")],
)
def test_an_iteration_is_checked_where_it_is_made(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        mfx.polar.NewtonSchulz(**settings)


def test_nesterov_reaches_adam_and_is_not_said_where_it_is_not_asked_for() -> None:
    ahead = mfx.scale_by_adam(0.9, 0.95, nesterov=True)
    assert repr(ahead) in repr(mfx.adamw(0.1, b2=0.95, nesterov=True))
    assert repr(ahead) in repr(mfx.muon_with_adamw(0.1, adamw_nesterov=True))
    assert mfx.adamw(0.1, nesterov=False).fingerprint == mfx.adamw(0.1).fingerprint
    assert "nesterov" not in repr(mfx.adamw(0.1)) + repr(mfx.muon_with_adamw(0.1))
