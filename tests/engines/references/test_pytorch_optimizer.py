"""Variants of Muon, QK-clip and adaptive SAM, compared with pytorch_optimizer."""

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx.testing import Example
from tests import formulas, variants
from tests.contrib.test_recipes import BETA, DECAY, RATE, SHAPES, power_iterated
from tests.formulas import EXACT

pytestmark = pytest.mark.engines
theirs = pytest.importorskip("pytorch_optimizer", reason="needs pytorch_optimizer: make engines")


@pytest.fixture(autouse=True)
def exact_polar_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace their polar factors, which iterate in bf16 for parameters of any dtype."""
    for module in ("scion", "muon.adamuon", "muon.base"):
        path = f"pytorch_optimizer.optimizer.{module}.zero_power_via_newton_schulz_5"
        monkeypatch.setattr(path, lambda x, *_, **__: mfx.polar.polar_factor(x))


def drawn(draw: torch.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def assert_equal(tx: mfx.Transform, make: Any, bound: float, steps: int = 4) -> None:
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        if t == 1:
            memory["param"] = torch.nn.Parameter(x.clone())
            memory["optimizer"] = make([memory["param"]])
        memory["param"].grad = g.clone()
        memory["optimizer"].step()
        return memory["param"].detach().clone()

    formulas.assert_follows(
        tx, step, Example.of(SHAPES, steps=steps, dtype=torch.float64), rtol=bound, atol=bound
    )


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
    lmo = theirs.optimizer.scion.LMONorm[kind]
    more = {"norm_type": lmo, "norm_kwargs": settings, "constraint": constrained, "scale": 5.0}
    labels = dict.fromkeys(SHAPES, "role")
    tx = mfx.contrib.scion(
        RATE,
        decay=BETA,
        norms={"role": (norm, 5.0)},
        orthogonalize=EXACT,
        constrained=constrained,
        labels=labels,
    )
    # Eps is 1e-8.
    assert_equal(tx, lambda params: theirs.SCION(params, lr=RATE, momentum=1 - BETA, **more), 1e-6)


def test_adamuon():
    def make(params: list[Tensor]) -> Any:
        group = {"params": params, "use_muon": True}
        return theirs.AdaMuon([group], lr=RATE, betas=(BETA, 0.8), weight_decay=DECAY, eps=1e-10)

    tx = variants.adamuon(
        RATE,
        decay=BETA,
        second_decay=0.8,
        eps=1e-10,
        nesterov=False,
        weight_decay=DECAY,
        orthogonalize=EXACT,
    )
    assert_equal(tx, make, 1e-8)


@pytest.mark.parametrize("longest", [100, 4])
@pytest.mark.parametrize("refresh", [1, 5])
def test_soap(refresh: int, longest: int, monkeypatch: pytest.MonkeyPatch):
    shift = 1e-9  # theirs is zero
    monkeypatch.setattr(import_module("muonfx.contrib.soap"), "_SHIFT", shift)

    def start(factors: list[Any]) -> list[Any]:
        """The bases after the first gradient, where theirs are the eigenvectors."""
        return [
            power_iterated(f, torch.eye(len(f)).to(f), shift)[0] if len(f) else f for f in factors
        ]

    monkeypatch.setattr(theirs.SOAP, "get_orthogonal_matrix", staticmethod(start))
    more = {"betas": (BETA, 0.8), "weight_decay": 0.0, "eps": 1e-10}
    more |= {"precondition_frequency": refresh, "max_precondition_dim": longest}
    direction = mfx.contrib.scale_by_soap(
        BETA, 0.8, 1e-10, refresh=refresh, max_precondition_size=longest
    )
    tx = mfx.chain(direction, mfx.scale_by_learning_rate(RATE))
    # They decompose in fp32.
    assert_equal(tx, lambda params: theirs.SOAP(params, lr=RATE, **more), 1e-5, steps=16)


def test_shampoo():
    """Theirs sums over t gradients where ours averages, so its update is smaller by the root of t."""
    weights = mfx.core.schedules.schedule(lambda: lambda count: RATE / (count + 1.0).sqrt())
    direction = mfx.contrib.scale_by_shampoo(1 - 1e-6, 1e-12)
    tx = mfx.chain(direction, mfx.scale_by_learning_rate(weights()))
    assert_equal(tx, lambda params: theirs.Shampoo(params, lr=RATE, matrix_eps=1e-12), 1e-6)


def test_adaptive_sam():
    params = drawn(torch.Generator().manual_seed(0), SHAPES)
    copies = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    reference = theirs.SAM(list(copies.values()), torch.optim.SGD, rho=0.3, adaptive=True, lr=RATE)

    def gradient(params: Any) -> dict[str, Tensor]:
        return {"tall": 3.0 * (params["tall"] - 1.0), "wide": 0.5 * (params["wide"] - 1.0)}

    for _ in range(10):
        for advance in (reference.first_step, reference.second_step):
            for name, grad in gradient(copies).items():
                copies[name].grad = grad.detach()
            advance()
        step = mfx.contrib.sam_gradient(gradient, params, mfx.contrib.sam(0.3, adaptive=True))
        params = mfx.tree.map(lambda p, g: p - RATE * g, params, step)
        # They compute the norm in fp32.
        torch.testing.assert_close(
            params, {n: own.detach() for n, own in copies.items()}, rtol=1e-6, atol=1e-6
        )


# Eight rows for each of three heads, four for the rotary queries.
ROLES = {
    "q_c": ("query", 24),
    "q_r": ("query_rotary", 12),
    "k_c": ("key", 24),
    "k_r": ("key_rotary", 4),
}
HEADS = (
    mfx.AttentionHeads("attn", 3, query="q_c", key="k_c"),
    mfx.AttentionHeads("attn", 3, query="q_r", key="k_c", rotary_dims=(0, 4)),
)


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_qk_clip(alpha: float):
    draw = torch.Generator().manual_seed(0)
    shapes = {name: (rows, 10) for name, (_, rows) in ROLES.items()}
    params = drawn(draw, shapes)
    unclipped = copy.deepcopy(params)

    def muonclip(params: dict[str, Tensor]) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": [params[name]], "use_muon": True, "qk_clip": role, "attention_name": "attn"}
            for name, (role, _) in ROLES.items()
        ]
        return theirs.MuonClip(groups, lr=0.1, qk_clip_threshold=100.0, qk_clip_alpha=alpha)

    clipping, without = muonclip(params), muonclip(unclipped)
    tx = mfx.qk_clip(HEADS, 100.0, alpha)
    for _ in range(3):
        logits = torch.tensor([400.0, 90.0, 100.0]) + 10 * torch.rand(3, generator=draw)
        before = {f"attn.{name}.weight": param.clone() for name, param in params.items()}
        for name, grad in drawn(draw, shapes).items():
            unclipped[name].copy_(params[name])
            params[name].grad, unclipped[name].grad = grad, grad.clone()
        clipping.step(attention_max_logits={"attn": logits})
        without.step()
        updates = {
            f"attn.{name}.weight": w - before[f"attn.{name}.weight"]
            for name, w in unclipped.items()
        }
        found, _ = tx.update(updates, tx.init(before), before, max_logits={"attn": logits})
        ours = mfx.apply_updates(before, found)
        for name, param in params.items():
            # Their factors are in single precision.
            torch.testing.assert_close(ours[f"attn.{name}.weight"], param, rtol=3e-7, atol=3e-7)
            assert torch.equal(param, unclipped[name]) == (name == "k_r")
