"""Variants of Muon follow the formulas of their papers, each written out in float64 with exact polar factors."""

import re
from collections.abc import Callable
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import muonfx as mfx
from muonfx import sharding
from muonfx import testing as kit
from muonfx.polar.cost import newton_schulz_cost
from muonfx.transforms.matrices import STACK
from tests import formulas, variants
from tests.formulas import EXACT, Step, average

RATE, DECAY, BETA = 0.1, 0.3, 0.9
DOCS = Path(__file__).parents[2] / "docs"
SHAPES = {"tall": (6, 4), "wide": (3, 5)}


def assert_follows(tx: mfx.Transform, step: Step, rtol: float = 1e-9) -> None:
    example = kit.Example.of(SHAPES, steps=4, dtype=torch.float64)
    formulas.assert_follows(tx, step, example, rtol=rtol, atol=1e-10)


def cost_of(tx: mfx.Transform, params: dict[str, Tensor]) -> float:
    """The operations by which a parameter is given to a rank: those declared, and ten for each element."""
    return sharding.plan_for(tx, sharding.zero(params, 1, partition="whole")).runs[0].shards[0].cost


def polar(x: Tensor) -> Tensor:
    return mfx.polar.polar_factor(x)


def normed(x: Tensor) -> Tensor:
    return x / torch.linalg.matrix_norm(x)


DIRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "spectral": lambda m: polar(m) * (m.shape[0] / m.shape[1]) ** 0.5,
    "sign": lambda m: m.sign() / m.shape[1],
    "rows": lambda m: m / m.norm(dim=1, keepdim=True) / m.shape[1] ** 0.5,
    "columns": lambda m: m / m.norm(dim=0, keepdim=True) * m.shape[0] ** 0.5,
    "embedding": lambda m: m / m.norm(dim=1, keepdim=True) * m.shape[1] ** 0.5,
}


def test_the_chains_that_the_page_shows_are_the_chains_that_are_tested():
    block = re.search(
        r"## The chains\n.*?```python\n(.*?)```", (DOCS / "muon-variants.md").read_text(), re.DOTALL
    )
    assert block is not None
    shown: dict[str, Any] = {}
    exec(block[1], shown)
    for make in variants.SIMPLE:
        settings = {} if make is variants.muon_hyperball else {"weight_decay": 0.1}
        assert shown[make.__name__.removeprefix("muon_")] == make(shown["rate"], **settings)


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("norm", DIRECTIONS)
def test_scion(norm: str, constrained: bool):
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        return (1 - RATE * constrained) * x - RATE * 5.0 * DIRECTIONS[norm](average(memory, "m", g))

    labels = dict.fromkeys(SHAPES, "role")
    settings: dict[str, Any] = {
        "orthogonalize": EXACT,
        "constrained": constrained,
        "labels": labels,
    }
    assert_follows(
        mfx.contrib.scion(RATE, decay=BETA, norms={"role": (norm, 5.0)}, **settings), step
    )


def test_scion_takes_vectors_and_default_labels():
    params = {
        "h.0.fc.weight": torch.zeros(4, 4),
        "wte.weight": torch.zeros(8, 4),
        "ln.bias": torch.zeros(4),
    }
    tx = mfx.contrib.scion(1.0, constrained=False, labels=mfx.routing.default_labels_by_name)
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["wte.weight"].unique().tolist() == [-750.0]
    torch.testing.assert_close(updates["ln.bias"], -torch.ones(4))
    assert 40 < torch.linalg.matrix_norm(updates["h.0.fc.weight"], 2) < 55


def test_adamuon():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        o = polar(average(memory, "m", g))
        second = average(memory, "v", o.square(), 0.8) / (1 - 0.8**t)
        ratio = o / (second.sqrt() + 1e-8)
        return x - RATE * (0.2 * x.numel() ** 0.5 * normed(ratio) + DECAY * x)

    settings: dict[str, Any] = {
        "decay": BETA,
        "second_decay": 0.8,
        "nesterov": False,
        "weight_decay": DECAY,
    }
    assert_follows(variants.adamuon(RATE, orthogonalize=EXACT, **settings), step, rtol=1e-7)


@pytest.mark.parametrize("coefficients", ["keller", "exact"])
def test_normuon(coefficients: str):
    """Algorithm 1, whose updates have the same size if Newton-Schulz is not exact."""
    orthogonalize = EXACT
    if coefficients == "keller":
        orthogonalize = mfx.orthogonalize(coefficients="keller", dtype=torch.float64)

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m = average(memory, "m", g)
        o, _ = orthogonalize.update({"o": m}, orthogonalize.init({"o": m}))
        v = average(memory, "v", o["o"].square().mean(dim=1, keepdim=True), 0.8)
        normalized = o["o"] / (v.sqrt() + 1e-8)
        return x - RATE * DECAY * x - RATE * 0.2 * x.numel() ** 0.5 * normed(normalized)

    settings: dict[str, Any] = {"decay": BETA, "neuron_decay": 0.8, "weight_decay": DECAY}
    assert_follows(variants.paper_normuon(RATE, orthogonalize=orthogonalize, **settings), step)


def test_the_recipe_of_normuon_keeps_the_norm_that_newton_schulz_returns():
    """Its updates have the size of the paper's, times the norm of O over the norm of an orthogonal matrix."""
    orthogonalize = mfx.orthogonalize(coefficients="keller", dtype=torch.float64)
    params, (grads,) = kit.Example.of(SHAPES, steps=1, dtype=torch.float64)

    def first_updates(tx: mfx.Transform) -> dict[str, Tensor]:
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates

    factors = first_updates(orthogonalize)
    updates = first_updates(mfx.normuon(RATE, orthogonalize=orthogonalize))
    of_paper = first_updates(variants.paper_normuon(RATE, orthogonalize=orthogonalize))
    for name, update in updates.items():
        relative_norm = torch.linalg.matrix_norm(factors[name]) / min(update.shape) ** 0.5
        assert not 0.99 < relative_norm < 1.01
        torch.testing.assert_close(update, relative_norm * of_paper[name])


def test_polargrad():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m = average(memory, "m", g)
        return x - RATE * (torch.linalg.matrix_norm(m, "nuc") * polar(m) + DECAY * x)

    assert_follows(
        variants.polargrad(RATE, decay=BETA, weight_decay=DECAY, orthogonalize=EXACT), step
    )


def test_namo():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m, v = average(memory, "m", g), average(memory, "v", g.square().sum(), 0.8)
        alpha = (
            (1 - 0.8**t) ** 0.5 / (1 - BETA**t) * torch.linalg.matrix_norm(m) / (v.sqrt() + 1e-8)
        )
        return x - RATE * alpha * (polar(m) + DECAY * x)

    inner = mfx.chain(EXACT, mfx.add_decayed_weights(DECAY))
    assert_follows(
        mfx.chain(mfx.contrib.scale_by_namo(inner, BETA, 0.8), mfx.scale_by_learning_rate(RATE)),
        step,
    )
    ruled = variants.namo(
        RATE, b1=BETA, b2=0.8, weight_decay=DECAY, lr_scaling="fan_in", orthogonalize=EXACT
    )
    assert "scale_by_namo(chain(orthogonalize" in repr(ruled)


def test_musgd():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m = average(memory, "m", g)
        muon = polar(BETA * m + (1 - BETA) * g) * max(1, x.shape[0] / x.shape[1]) ** 0.5
        g = g + DECAY * x
        memory["sgd"] = BETA * memory.get("sgd", 0.0) + g
        return x - RATE * (0.4 * muon + 0.7 * (g + BETA * memory["sgd"]))

    assert_follows(
        variants.musgd(
            RATE, muon=0.4, sgd=0.7, decay=BETA, weight_decay=DECAY, orthogonalize=EXACT
        ),
        step,
    )


def test_muon_hyperball():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        radius = memory.setdefault("radius", torch.linalg.matrix_norm(x))
        return normed(x - RATE * radius * normed(polar(average(memory, "m", g)))) * radius

    tx = variants.muon_hyperball(RATE, decay=BETA, nesterov=False, orthogonalize=EXACT)
    assert_follows(tx, step)


def test_weights_at_zero_are_on_no_sphere():
    params = {"w": torch.zeros(3, 4)}
    tx = variants.muon_hyperball(RATE)
    updates, _ = tx.update({"w": torch.eye(3, 4)}, tx.init(params), params)
    assert 0.08 < torch.linalg.matrix_norm(updates["w"], 2) < 0.12


@pytest.mark.parametrize("name", ["keep_weight_norms", "match_weight_norms", "radial_brake"])
def test_the_update_of_weights_at_zero_does_not_change(name: str):
    tx = getattr(mfx.contrib, name)()
    params, grads = {"w": torch.zeros(3, 4)}, {"w": torch.eye(3, 4)}
    assert torch.equal(tx.update(grads, tx.init(params), params)[0]["w"], grads["w"])


@pytest.mark.parametrize("name", ["keep_weight_norms", "radial_brake"])
def test_weights_may_become_zero(name: str):
    tx = getattr(mfx.contrib, name)()
    params, grads = {"w": torch.ones(3, 4)}, {"w": -torch.ones(3, 4)}
    assert torch.equal(tx.update(grads, tx.init(params), params)[0]["w"], grads["w"])


@pytest.mark.parametrize("rank", [1, 2, 100])
def test_dion(rank: int):
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        total = memory.get("m", 0.0) + g
        if t == 1:
            columns = mfx.contrib.scale_by_dion(rank).init({"w": x}).basis["w"]
            assert columns.shape == (x.shape[1], min(rank, *x.shape))
            memory["q"] = columns
        left, _ = torch.linalg.qr(total @ memory["q"])
        right = total.T @ left
        memory["m"] = total - (1 - BETA) * left @ right.T
        memory["q"] = right / right.norm(dim=0, keepdim=True)
        return (1 - RATE * DECAY) * x - RATE * (x.shape[0] / x.shape[1]) ** 0.5 * left @ memory[
            "q"
        ].T

    assert_follows(variants.dion(RATE, rank=rank, decay=BETA, weight_decay=DECAY), step)


def test_a_column_of_zeros_keeps_its_start_in_dion():
    tx = mfx.contrib.scale_by_dion(2)
    grads = {"w": torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])}
    start = tx.init(grads)
    assert start.basis["w"].min() < 0 < start.basis["w"].max()
    for gradient, zero_columns in ((grads["w"], [1]), (torch.zeros(2, 3), [0, 1])):
        _, state = tx.update({"w": gradient}, start)
        assert torch.equal(state.basis["w"][:, zero_columns], start.basis["w"][:, zero_columns])
    derivative = torch.func.grad(lambda gradient: tx.update({"w": gradient}, start)[0]["w"].sum())
    assert not derivative(torch.zeros(2, 3)).any()


@pytest.mark.parametrize("shrink", [1, 2, 100])
def test_dion2(shrink: int):
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        total = memory.get("m", 0.0) + g
        rows = total if x.shape[0] <= x.shape[1] else total.T
        selected = rows.abs().sum(1).topk(ceil(rows.shape[0] / shrink)).indices
        update = torch.zeros_like(rows)
        update[selected] = mfx.polar.orthogonalize(rows[selected])
        rows[selected] *= BETA
        memory["m"] = total
        update = update if rows is total else update.T
        return (1 - RATE * DECAY) * x - RATE * (x.shape[0] / x.shape[1]) ** 0.5 * update

    assert_follows(variants.dion2(RATE, shrink=shrink, decay=BETA, weight_decay=DECAY), step)


@given(st.integers(0, 999), st.sampled_from((torch.float32, torch.bfloat16)))
def test_rows_of_equal_norms_are_selected_in_order_however_they_are_summed(
    seed: int, dtype: torch.dtype
):
    """Each row has the same magnitudes in another order, so that floating-point sums differ by rounding."""
    draw = torch.Generator().manual_seed(seed)
    row = (8 * torch.randn(33, generator=draw)).exp().to(dtype)  # more than the 53 bits of fp64
    matrix = torch.stack([row[torch.randperm(33, generator=draw)] for _ in range(8)])
    tx = mfx.contrib.scale_by_dion2(2)
    out = tx.run({"w": matrix}, tx.init({"w": matrix}), None)[0]["w"]
    assert out.any(1).tolist() == [True] * 4 + [False] * 4
    turned = tx.run({"w": matrix.mT.contiguous()}, tx.init({"w": matrix.mT}), None)[0]["w"]
    assert turned.any(0).tolist() == [True] * 4 + [False] * 4


def test_a_row_that_is_not_finite_is_selected():
    tx, grads = mfx.contrib.scale_by_dion2(), {"w": torch.ones(8, 9)}
    grads["w"][5, 3], grads["w"][7, 1] = torch.nan, torch.inf
    out = tx.run(grads, tx.init(grads), None)[0]["w"]
    assert out.isnan().any(1).tolist() == [False] * 5 + [True, False, True]
    assert not out[:5].any()


def test_the_cost_of_dion2_is_of_the_selected_rows():
    params = {"w": torch.zeros(64, 96)}
    every = mfx.contrib.scale_by_dion2(4), mfx.contrib.scale_by_dion2(1), mfx.orthogonalize()
    costs = [cost_of(tx, params) - 10 * 64 * 96 for tx in every]
    assert costs[1] == costs[2] > 0
    assert costs[0] == newton_schulz_cost((16, 96)).load


def test_a_dual_norm_is_that_of_the_inner_direction():
    grads = {"w": torch.tensor([[1e-30, -2e-30], [0.0, 3e-30]])}
    tx = mfx.contrib.scale_by_dual_norm(mfx.scale_by_sign())
    torch.testing.assert_close(
        tx.update(grads, tx.init(grads))[0]["w"], 6e-30 * grads["w"].sign(), rtol=1e-6, atol=0
    )


def test_the_dual_norm_of_a_huge_gradient_of_rank_one_gives_the_gradient():
    grads = {"w": torch.full((2, 2), 3e38)}
    tx = mfx.contrib.scale_by_dual_norm(EXACT)
    torch.testing.assert_close(tx.update(grads, tx.init(grads))[0], grads)


def test_radial_brake_and_floor():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        size = torch.linalg.matrix_norm
        moved = x - RATE * g * max(1.0, 0.9 * float(size(x) / size(g)))
        growth = size(moved) - size(x)
        return normed(moved) * (size(x) + growth * (0.3 if growth > 0 else 0.7))

    brake = mfx.contrib.radial_brake(0.3, 0.7)
    tx = mfx.chain(mfx.contrib.floor_by_weight_norms(0.9), mfx.scale_by_learning_rate(RATE), brake)
    assert_follows(tx, step)


def test_ema_nesterov():
    factors = mfx.linear_schedule(0.8, 0.0, 3)

    def step(t: int, y: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        old = memory.get("iterate", y)
        memory["iterate"] = y - RATE * g - RATE * DECAY * y
        return memory["iterate"] + factors(t - 1) * average(memory, "m", memory["iterate"] - old)

    tx = mfx.chain(
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(RATE),
        mfx.contrib.ema_nesterov(BETA, factors),
    )
    assert_follows(tx, step)


@mfx.core.schedules.schedule
def at_every(period: int, at: float, between: float) -> Callable[[Tensor], Tensor]:
    return lambda count: torch.where(count % period == 0, at, between)


def test_blocks_at_most_steps_are_a_sum_of_two_chains():
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        m = average(memory, "m", g)
        if t in (1, 4):
            return x - RATE * 0.5 * polar(m)
        return x - RATE * 0.25 * torch.cat([polar(block) for block in m.chunk(3)])

    blocks = EXACT.replace(view=mfx.MatrixView("(part=3 out) in -> part out in"))
    whole, by_blocks = (
        mfx.chain(direction, mfx.scale(at_every(3, *factors)))
        for direction, factors in ((EXACT, (0.5, 0.0)), (blocks, (0.0, 0.25)))
    )
    tx = mfx.chain(
        mfx.momentum(BETA, nesterov=False),
        mfx.add_updates(("whole", whole), ("blocks", by_blocks)),
        mfx.scale_by_learning_rate(RATE),
    )
    assert_follows(tx, step)


def inverse_root(factor: Tensor, damping: float) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    return vectors @ (values + damping * factor.norm()).pow(-0.25).diag() @ vectors.T


@pytest.mark.parametrize("refresh", [1, 3])
def test_shampoo(refresh: int):
    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        factors = [
            average(memory, f"factor{side}", f, 0.8) for side, f in enumerate((g @ g.T, g.T @ g))
        ]
        if t % refresh == 1 or refresh == 1:
            memory["roots"] = [inverse_root(factor / (1 - 0.8**t), 0.01) for factor in factors]
        left, right = memory["roots"]
        return x - RATE * left @ g @ right

    tx = mfx.chain(
        mfx.contrib.scale_by_shampoo(0.8, 0.01, refresh=refresh), mfx.scale_by_learning_rate(RATE)
    )
    formulas.assert_follows(
        tx, step, kit.Example.of(SHAPES, steps=8, dtype=torch.float64), rtol=1e-9, atol=1e-10
    )


def test_the_chain_of_shampoo_has_updates_of_one_size():
    params, steps = kit.Example.of(SHAPES, steps=3, dtype=torch.float64)
    tx = variants.shampoo(RATE)
    state = tx.init(params)
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        sizes = torch.stack([u.square().mean().sqrt() for u in updates.values()])
        torch.testing.assert_close(sizes, torch.full_like(sizes, 0.2 * RATE))


def test_shampoo_returns_gradients_until_the_refresh_that_follows_a_zero_gradient():
    tx = mfx.contrib.scale_by_shampoo(damping=1e-7, refresh=3)
    grads = {"w": torch.diag(torch.tensor([30.0, 10.0]))}
    state = tx.init(grads)
    _, state = tx.update({"w": torch.zeros(2, 2)}, state)
    for _ in range(2):
        updates, state = tx.update(grads, state)
        torch.testing.assert_close(updates["w"], grads["w"])
    updates, state = tx.update(grads, state)
    assert updates["w"].diagonal().max() < 1.5


def test_the_first_update_of_shampoo_is_the_polar_factor():
    params, (grads,) = kit.Example.of(SHAPES, steps=1, dtype=torch.float64)
    tx = mfx.contrib.scale_by_shampoo(damping=1e-13)
    updates, _ = tx.update(grads, tx.init(params))
    for name, update in updates.items():
        torch.testing.assert_close(update, polar(grads[name]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_shampoo_keeps_nan_and_overflow_in_their_matrix(bad: float):
    tx = mfx.contrib.scale_by_shampoo(view=mfx.MatrixView(STACK))
    grads = {"w": torch.eye(3).repeat(2, 1, 1)}
    grads["w"][1, 0, 1] = bad
    out = tx.run(grads, tx.init(grads), None)[0]["w"]
    torch.testing.assert_close(out[0], torch.eye(3), rtol=0, atol=1e-4)
    assert out[1].isnan().all()


def power_iterated(factor: Tensor, basis: Tensor, shift: float = 2.0**-13) -> tuple[Tensor, Tensor]:
    """The next basis, and the order of the old columns in it."""
    largest = 2.0 ** factor.abs().max().log2().floor()
    product = factor @ basis + largest * shift * basis
    order = (basis.T @ product).diagonal().argsort(descending=True)
    if torch.equal(basis, torch.eye(len(basis)).to(basis)):
        order = torch.arange(len(basis))
    q, r = torch.linalg.qr(product[:, order])
    return q * r.diagonal().sign(), order


def inverse(factor: Tensor, basis: Tensor, t: int, g: Tensor, shift: float = 2.0**-13) -> Tensor:
    """The inverse of the average of t - 1 gradients. The identity has the missing weight 0.8**(t - 1)."""
    values = (basis.T @ factor @ basis).diagonal()
    if t == 1:
        values = g.square().mean().sqrt().expand_as(values)
    else:
        values = (
            values + values.mean() * 0.8 ** (t - 1) / (1 - 0.8 ** (t - 1)) + shift * values.max()
        )
    return basis @ (1 / values).diag() @ basis.T


@pytest.mark.parametrize("factors", ["shampoo", "kl"])
@pytest.mark.parametrize(("refresh", "longest"), [(1, 100), (3, 100), (2, 4), (1, 2)])
def test_soap(refresh: int, longest: int, factors: Any):
    def squares(t: int, g: Tensor, memory: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if factors == "shampoo":
            return g @ g.T, g.T @ g
        inverses = [torch.eye(side, dtype=g.dtype) for side in g.shape]
        for side in range(2):
            if g.shape[side] <= longest:
                own = memory.get(f"factor{side}", torch.zeros_like(inverses[side]))
                inverses[side] = inverse(own, memory["bases"][side], t, g)
        return g @ inverses[1] @ g.T / g.shape[1], g.T @ inverses[0] @ g / g.shape[0]

    def step(t: int, x: Tensor, g: Tensor, memory: dict[str, Any]) -> Tensor:
        sides = [side for side in (0, 1) if x.shape[side] <= longest]
        bases = memory.setdefault("bases", [torch.eye(side, dtype=x.dtype) for side in x.shape])
        update = torch.zeros_like(x)
        if t > 1:
            m = average(memory, "m", g)
            v = average(memory, "v", (bases[0].T @ g @ bases[1]).square(), 0.8) / (
                1 - 0.8 ** (t - 1)
            )
            adam = bases[0].T @ m @ bases[1] / (1 - BETA ** (t - 1)) / (v.sqrt() + 1e-8)
            update = bases[0] @ adam @ bases[1].T
        new = squares(t, g, memory)
        for side in sides:
            factor = average(memory, f"factor{side}", new[side], 0.8)
            if (t - 1) % refresh == 0:
                bases[side], order = power_iterated(factor, bases[side])
                memory["v"] = (
                    memory["v"].index_select(side, order) if "v" in memory else torch.zeros_like(x)
                )
        return x - RATE * (update + DECAY * x)

    tx = mfx.chain(
        mfx.contrib.scale_by_soap(
            BETA, 0.8, factors=factors, refresh=refresh, max_precondition_size=longest
        ),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(RATE),
    )
    formulas.assert_follows(
        tx, step, kit.Example.of(SHAPES, steps=9, dtype=torch.float64), rtol=1e-8, atol=1e-9
    )


def test_soap_muon_orthogonalizes_the_direction_of_soap():
    params, steps = kit.Example.of(SHAPES, steps=3, dtype=torch.float64)
    muon = variants.soap_muon(RATE, lr_scaling="spectral", orthogonalize=EXACT)
    both = muon, variants.soap(1.0, weight_decay=0.0)
    states = [tx.init(params) for tx in both]
    for t, grads in enumerate(steps):
        (ours, states[0]), (direction, states[1]) = (
            tx.update(grads, state, params) for tx, state in zip(both, states, strict=True)
        )
        for name, (rows, columns) in SHAPES.items():
            wanted = (
                RATE * (rows / columns) ** 0.5 * polar(direction[name])
                if t
                else torch.zeros(rows, columns)
            )
            torch.testing.assert_close(ours[name], wanted, rtol=1e-9, atol=1e-10, check_dtype=False)


@pytest.mark.parametrize(("longest", "factors"), [(100, "shampoo"), (4, "shampoo"), (100, "kl")])
def test_soap_resumes_from_a_checkpoint_with_the_same_bits(
    longest: int, factors: Any, tmp_path: Path
):
    params, steps = kit.Example.of(SHAPES | {"stack": (2, 3, 5)}, steps=4)
    tx = mfx.contrib.scale_by_soap(factors=factors, max_precondition_size=longest)
    state = tx.init(params)
    for grads in steps[:-1]:
        _, state = tx.update(grads, state)
    mfx.checkpoint.save(tmp_path / "state", state)
    loaded = mfx.checkpoint.load(tmp_path / "state", tx.init(params))
    found, expected = tx.update(steps[-1], loaded), tx.update(steps[-1], state)
    pairs = zip(mfx.tree.tensors(found), mfx.tree.tensors(expected), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_the_bases_of_soap_become_the_eigenvectors():
    draw = torch.Generator().manual_seed(0)
    shape = {"w": torch.zeros(12, 8, dtype=torch.float64)}
    rows, columns = (
        torch.randn(n, n, generator=draw, dtype=torch.float64) for n in shape["w"].shape
    )
    tx = mfx.contrib.scale_by_soap(b2=0.99)
    state = tx.init(shape)
    for _ in range(200):
        noise = torch.randn(12, 8, generator=draw, dtype=torch.float64)
        _, state = tx.update({"w": rows @ noise @ columns}, state)
    for factor, basis in ((state.left, state.left_basis), (state.right, state.right_basis)):
        values, vectors = torch.linalg.eigh(factor["w"])
        cosines = (vectors.flip(1) * basis["w"]).sum(0).abs()
        assert cosines[values.flip(0) > 1e-3 * values.max()].min() > 0.98


def test_the_kl_factors_are_those_of_emerging_optimizers_without_damping(
    monkeypatch: pytest.MonkeyPatch,
):
    """Their ``update_kronecker_factors_kl_shampoo`` on factors of many steps, whose eigenvalues it clamps to 1e-8."""
    monkeypatch.setattr(import_module("muonfx.contrib.soap"), "_SHIFT", 0.0)
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.zeros(4, 6, dtype=torch.float64)}
    tx = mfx.contrib.scale_by_soap(b2=BETA, factors="kl")
    state = tx.init(params)
    for _ in range(300):  # 0.9**300 is 2e-14
        g = torch.randn(4, 6, generator=draw, dtype=torch.float64)
        old, (_, state) = state, tx.update({"w": g}, state)
    left, right = old.left["w"], old.right["w"]
    p, q = old.left_basis["w"], old.right_basis["w"]
    new_left = g @ q @ (1 / (q.T @ right @ q).diagonal().clamp(min=1e-8)).diag() @ q.T @ g.T / 6
    new_right = g.T @ p @ (1 / (p.T @ left @ p).diagonal().clamp(min=1e-8)).diag() @ p.T @ g / 4
    torch.testing.assert_close(
        state.left["w"], BETA * left + (1 - BETA) * new_left, rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(
        state.right["w"], BETA * right + (1 - BETA) * new_right, rtol=1e-11, atol=1e-12
    )


def test_the_bases_of_kl_factors_are_nearer_to_the_eigenvectors_of_the_covariance():
    def excess(basis: Tensor, covariance: Tensor) -> float:
        """The mean logarithm of the diagonal in the basis, minus the mean logarithm of the eigenvalues."""
        inside = (basis.T @ covariance @ basis).diagonal()
        return float(inside.log().mean() - torch.linalg.eigvalsh(covariance).log().mean())

    found = {"shampoo": torch.zeros(2), "kl": torch.zeros(2)}
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        turns = [
            torch.linalg.qr(torch.randn(n, n, generator=draw, dtype=torch.float64))[0]
            for n in (12, 20)
        ]
        rows, columns = (
            turn * torch.logspace(0, -2, len(turn), dtype=torch.float64) for turn in turns
        )
        noise = torch.randn(100, 12, 20, generator=draw, dtype=torch.float64)
        for factors, sums in found.items():
            tx = mfx.contrib.scale_by_soap(factors=factors)  # type: ignore[arg-type]
            state = tx.init({"w": noise[0]})
            for z in noise:
                _, state = tx.run({"w": rows @ z @ columns.T}, state, None)
            sums += torch.tensor(
                [
                    excess(b["w"], f @ f.T)
                    for b, f in ((state.left_basis, rows), (state.right_basis, columns))
                ]
            )
    assert (found["kl"] < 0.5 * found["shampoo"]).all(), found


@pytest.mark.parametrize("exponent", [-20, 20])
def test_the_bases_of_kl_factors_do_not_depend_on_the_size_of_gradients(exponent: int):
    params, steps = kit.Example.of(SHAPES, steps=5, dtype=torch.float64)
    tx = mfx.contrib.scale_by_soap(factors="kl")
    plain = scaled = tx.init(params)
    for grads in steps:
        _, plain = tx.update(grads, plain)
        _, scaled = tx.update({name: g * 2.0**exponent for name, g in grads.items()}, scaled)
    torch.testing.assert_close(scaled.left_basis, plain.left_basis, rtol=0, atol=1e-12)
    torch.testing.assert_close(scaled.right_basis, plain.right_basis, rtol=0, atol=1e-12)


@pytest.mark.parametrize("longest", [100, 20])
@pytest.mark.parametrize("factors", ["shampoo", "kl"])
def test_the_cost_of_soap_counts_its_products_and_five_for_each_decomposition(
    factors: Any, longest: int
):
    tx = mfx.contrib.scale_by_soap(
        factors=factors, max_precondition_size=longest, view=mfx.MatrixView(STACK)
    )
    grads = {"w": torch.randn(3, 12, 40)}
    with FlopCounterMode(display=False) as counted:
        tx.run(grads, tx.init(grads), None)
    decompositions = 3 * 5 * 2 * sum(side**3 for side in (12, 40) if side <= longest)
    assert (
        cost_of(tx, grads) == counted.get_total_flops() + decompositions + 10 * grads["w"].numel()
    )


def test_the_cost_of_shampoo_counts_its_products_and_twelve_for_each_decomposition():
    tx, grads = mfx.contrib.scale_by_shampoo(), {"w": torch.randn(12, 40)}
    with FlopCounterMode(display=False) as counted:
        tx.run(grads, tx.init(grads), None)
    decompositions = 12 * 2 * (12**3 + 40**3)
    assert (
        cost_of(tx, grads) == counted.get_total_flops() + decompositions + 10 * grads["w"].numel()
    )


def off_diagonal(factor: Tensor, basis: Tensor) -> float:
    rotated = basis.T @ factor @ basis
    return float((rotated - rotated.diagonal().diag()).norm() / rotated.norm())


def test_the_start_of_the_bases_of_soap_matters_less_than_frequent_refreshes():
    tx, at = mfx.contrib.scale_by_soap(), (3, 10, 20)
    scale = torch.logspace(0, -2, 24, dtype=torch.float64)
    from_identity, from_eigenvectors, seldom = (dict.fromkeys(at, 0.0) for _ in range(3))
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        turn = torch.linalg.qr(torch.randn(24, 24, generator=draw, dtype=torch.float64))[0]
        state, often, rarely = tx.init({"w": torch.zeros(24, 32, dtype=torch.float64)}), None, None
        for t in range(1, 21):
            noise = torch.randn(24, 32, generator=draw, dtype=torch.float64)
            _, state = tx.update({"w": (turn * scale) @ noise}, state)
            factor = state.left["w"]
            start = torch.linalg.eigh(factor)[1].flip(1)
            often = start if often is None else power_iterated(factor, often)[0]
            rarely = (
                start
                if rarely is None
                else power_iterated(factor, rarely)[0]
                if t % 10 == 1
                else rarely
            )
            if t in at:
                from_identity[t] += off_diagonal(factor, state.left_basis["w"])
                from_eigenvectors[t] += off_diagonal(factor, often)
                seldom[t] += off_diagonal(factor, rarely)
    assert all(from_identity[t] < 0.6 * seldom[t] for t in at)
    assert from_identity[20] < 1.05 * from_eigenvectors[20]


LORA = {
    "q.lora_A.default.weight": (2, 6),
    "q.lora_B.default.weight": (5, 2),
    "q.lora_B.default.bias": (5,),
    "conv.lora_B.default.weight": (5, 2, 1, 1),
    "one.lora_B.default.weight": (5, 1),
    "embed.lora_embedding_A.default": (2, 7),
    "embed.lora_embedding_B.default": (5, 2),
    "wq.lora_b.weight": (5, 2),
    "to_k.lora.up.weight": (5, 2),
    "to_k.lora.down.weight": (2, 5),
    "lora_unet_q.lora_up.weight": (5, 2),
    "lm_head.modules_to_save.default.weight": (7, 5),
}
LORA_B = {"q.lora_B.default.weight", "conv.lora_B.default.weight", "wq.lora_b.weight"}
LORA_B |= {"to_k.lora.up.weight", "lora_unet_q.lora_up.weight"}


def test_muon_trains_the_factors_b_of_lora_and_nothing_else():
    params = {name: torch.zeros(size) for name, size in LORA.items()}
    labels = mfx.contrib.lora_labels(params)
    assert {name for name, label in labels.items() if label == "muon"} == LORA_B
    assert set(labels.values()) == {"muon", "adamw"}
    frozen = torch.nn.Parameter(torch.zeros(5, 2), requires_grad=False)
    assert (
        mfx.contrib.lora_labels({"q.lora_B.other.weight": frozen})["q.lora_B.other.weight"] is None
    )


def test_lora_labels_warn_of_a_base_weight_that_may_be_frozen():
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(6, 5), "lora_B": torch.nn.Linear(2, 5)})
    model["base"].requires_grad_(False)
    named = {name: param.detach() for name, param in model.named_parameters()}
    with pytest.warns(UserWarning, match=r"'base.weight'. If they are frozen, pass the model"):
        assert mfx.contrib.lora_labels(named)["base.weight"] == "muon"
    assert mfx.contrib.lora_labels(model)["base.weight"] is None


def test_muon_with_lora_labels_is_a_partition_of_muon_and_adam():
    params, steps = kit.Example.of(
        {"q.lora_A.weight": (2, 6), "q.lora_B.weight": (5, 2)}, steps=3, dtype=torch.float64
    )
    ours = mfx.muon_with_adamw(
        0.02,
        0.01,
        orthogonalize=EXACT,
        weight_decay=0.0,
        adamw_weight_decay=0.0,
        labels=mfx.contrib.lora_labels,
    )
    theirs = mfx.partition(
        {
            "muon": mfx.muon(0.02, orthogonalize=EXACT),
            "adamw": mfx.adamw(0.01, b2=0.95, weight_decay=0.0),
        },
        {"q.lora_A.weight": "adamw", "q.lora_B.weight": "muon"},
    )
    states = [tx.init(params) for tx in (ours, theirs)]
    for grads in steps:
        (found, states[0]), (wanted, states[1]) = (
            tx.update(grads, state, params)
            for tx, state in zip((ours, theirs), states, strict=True)
        )
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def _change_by_rounding(tx: mfx.Transform, shape: tuple[int, int]) -> float:
    """Return the relative change of the sum of three updates if gradients change by 1e-7, about a unit of rounding."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(shape, generator=generator)}
    steps = [{"w": torch.randn(shape, generator=generator)} for _ in range(3)]
    noisy = [
        {"w": grads["w"] * (1 + 1e-7 * torch.randn(shape, generator=generator))} for grads in steps
    ]
    usual, changed = (
        sum(updates["w"] for updates in kit.examples.updates_of(tx, params, grads))
        for grads in (steps, noisy)
    )
    return float((usual - changed).norm() / usual.norm())


def test_soap_is_sensitive_to_rounding_on_rectangular_matrices_only():
    soap = mfx.contrib.scale_by_soap()
    one_sided = mfx.contrib.scale_by_soap(max_precondition_size=64)
    assert _change_by_rounding(soap, (32, 32)) < 1e-4
    assert _change_by_rounding(one_sided, (32, 128)) < 1e-4
    assert 0.01 < _change_by_rounding(soap, (32, 128)) < 0.6  # the docstring gives the range
