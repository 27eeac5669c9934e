"""Variants of Muon equal pytorch_optimizer's and Optax's, with the same polar factor in theirs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx

pytestmark = pytest.mark.engines
theirs = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")

EXACT = mfx.orthogonalize(coefficients=((1.875, -1.25, 0.375),), steps=40, dtype=torch.float64)
RATE, DECAY, BETA = 0.1, 0.3, 0.9
SHAPES = {"tall": (6, 4), "wide": (3, 5)}


@pytest.fixture(autouse=True)
def exact_polar_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs iterate in bf16, whatever the parameters are."""

    def exact(x: Tensor, *_: object, **__: object) -> Tensor:
        return mfx.polar.polar_factor(x)

    for module in ("scion", "muon.adamuon", "muon.base"):
        path = f"pytorch_optimizer.optimizer.{module}.zero_power_via_newton_schulz_5"
        monkeypatch.setattr(path, exact)


def draw(steps: int = 4) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        for _ in range(steps + 1)
    ]
    return drawn[0], drawn[1:]


def assert_equal(tx: mfx.Transform, make: Any, bound: float) -> None:
    params, steps = draw()
    state = tx.init(params)
    copies = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    optimizer = make(list(copies.values()))
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        for name, copy in copies.items():
            copy.grad = grads[name].clone()
        optimizer.step()
        for name, copy in copies.items():
            torch.testing.assert_close(params[name], copy.detach(), rtol=bound, atol=bound)


NORMS = {
    "spectral": ("SPECTRAL", {}),
    "sign": ("SIGN", {}),
    "rows": ("ROW", {}),
    "columns": ("COL", {}),
    "embedding": ("COL", {"transpose": True}),
}


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_scion(norm: str, constrained: bool):
    kind, settings = NORMS[norm]

    def make(params: list[Tensor]) -> Any:
        lmo = theirs.optimizer.scion.LMONorm[kind]
        more = {"norm_type": lmo, "norm_kwargs": settings, "constraint": constrained, "scale": 5.0}
        return theirs.SCION(params, lr=RATE, momentum=1 - BETA, **more)

    labels = dict.fromkeys(SHAPES, "role")
    more: dict[str, Any] = {"orthogonalize": EXACT, "constrained": constrained, "labels": labels}
    assert_equal(
        mfx.contrib.scion(RATE, decay=BETA, norms={"role": (norm, 5.0)}, **more), make, 1e-6
    )  # their eps is 1e-8


def test_adamuon():
    def make(params: list[Tensor]) -> Any:
        group = {"params": params, "use_muon": True}
        return theirs.AdaMuon([group], lr=RATE, betas=(BETA, 0.8), weight_decay=DECAY, eps=1e-10)

    tx = mfx.contrib.adamuon(
        RATE, decay=BETA, second_decay=0.8, eps=1e-10, nesterov=False, weight_decay=DECAY, orthogonalize=EXACT
    )
    assert_equal(tx, make, 1e-8)


def test_polargrad_is_muon_of_optax_with_the_dual_norm():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    optax = pytest.importorskip("optax", reason="optax is not installed")
    keller = mfx.orthogonalize(coefficients="keller", method="standard", dtype=torch.float64)
    ours = mfx.chain(
        mfx.momentum(BETA, nesterov=False, debias=True),
        mfx.contrib.scale_by_dual_norm(keller),
    )
    params, steps = draw()
    with jax.enable_x64(True):
        as_theirs = {name: jax.numpy.asarray(value.numpy()) for name, value in params.items()}
        numbers = dict.fromkeys(params, optax.contrib.MuonDimensionNumbers())
        muon = optax.contrib.scale_by_muon(
            beta=BETA, nesterov=False, adaptive=True, eps=0.0, weight_dimension_numbers=numbers
        )
        state, held, step = ours.init(params), muon.init(as_theirs), jax.jit(muon.update)
        for grads in steps:
            updates, state = ours.update(grads, state)
            found, held = step({n: jax.numpy.asarray(g.numpy()) for n, g in grads.items()}, held, as_theirs)
            for name, update in updates.items():
                torch.testing.assert_close(update, torch.tensor(jax.device_get(found[name])), rtol=1e-12, atol=1e-12)
