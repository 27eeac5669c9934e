"""`muonfx.diagnose`: singular values that are known, sizes of the real update, and an optimizer that is not changed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import muonfx as mfx
from tests.internal.test_display import Parsed
from tests.processes import Here, on_ranks

EXACT = mfx.orthogonalize(dtype=torch.float32)


def matrix(values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A float64 matrix with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(side, len(values), generator=generator, dtype=torch.float64))[0]
        for side in (rows, columns)
    )
    return left * values @ right.mT


def spectrum_of(momentum: Tensor, coefficients: Any = "polar_express_5", **options: Any) -> Any:
    """The spectrum of one parameter whose momentum is given."""
    tx = mfx.orthogonalize(coefficients=coefficients, dtype=torch.float64, **options)
    params = {"w": torch.ones_like(momentum)}
    (row,) = mfx.diagnose((tx, tx.init(params), params, {"w": momentum})).rows
    assert row.update_per_rate is None
    return row.spectrum


SETS = [
    "keller",
    "polar_express_5",
    "polar_express",
    "cubic",
    [(1.5, -0.5)] * 3,
    torch.tensor([[1.5, -0.5, 0.0]] * 3),
]


@given(
    st.lists(st.floats(-3, 0), min_size=1, max_size=8),
    st.sampled_from(SETS),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=40)
def test_singular_values_are_those_of_the_polynomial_of_the_known_ones(
    powers, coefficients, longer, tall
):
    values = 10 ** torch.tensor(sorted(powers), dtype=torch.float64)
    sides = (len(values) + longer, len(values)) if tall else (len(values), len(values) + longer)
    found = spectrum_of(3.0 * matrix(values, *sides), coefficients)
    known = coefficients.tolist() if isinstance(coefficients, Tensor) else coefficients
    relative = values / values.norm()
    after = mfx.polar.scalar_polynomial(known, relative)
    assert found.minimum == pytest.approx(after.min().item(), abs=1e-6)
    assert found.maximum == pytest.approx(after.max().item(), abs=1e-6)
    assert found.rms == pytest.approx(after.square().mean().sqrt().item(), abs=1e-6)
    assert sum(relative > found.tail - 1e-7) >= 0.9 * len(values)
    assert sum(relative > found.tail + 1e-7) < 0.9 * len(values)
    assert found.steps == len(mfx.polar.coefficients(known).steps)


@pytest.mark.parametrize("coefficients", ["keller", "polar_express", "cubic", "aol"])
@pytest.mark.parametrize("tail", [[0.0004, 0.003], [0.0004, 0.1], [0.003, 0.1]])
def test_the_needed_steps_are_the_fewest_after_which_nine_tenths_are_lifted(coefficients, tail):
    momentum = matrix(torch.tensor([*tail, *[1.0] * 8], dtype=torch.float64), 10, 12)
    needed = spectrum_of(momentum, coefficients).steps_needed

    def reached(steps: int) -> int:
        after = mfx.polar.orthogonalize(
            momentum, coefficients=coefficients, steps=steps, dtype=torch.float64
        )
        return int((torch.linalg.svdvals(after) >= 0.65).sum())

    assert reached(needed) >= 9 > max(map(reached, range(1, needed)), default=0)


def test_a_momentum_of_low_rank_needs_more_steps_than_there_are():
    values = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    found = spectrum_of(matrix(values, 3, 3))
    assert (found.steps_needed, found.minimum) == (None, pytest.approx(0, abs=1e-6))
    assert found.tail == pytest.approx(0, abs=1e-7)
    assert spectrum_of(torch.zeros(3, 3, dtype=torch.float64)).tail == 0.0


def test_of_a_fused_weight_the_worst_matrix_counts():
    easy, hard = (
        matrix(torch.tensor([1.0, tail], dtype=torch.float64), 2, 4) for tail in (0.9, 0.001)
    )
    alone = spectrum_of(hard)
    fused = spectrum_of(
        torch.cat([easy, hard]), view=mfx.MatrixView("(part=2 out) in -> part out in")
    )
    assert fused.steps_needed == alone.steps_needed > spectrum_of(easy).steps_needed
    assert fused.tail == pytest.approx(alone.tail)
    assert fused.minimum == pytest.approx(alone.minimum)
    assert fused.maximum == pytest.approx(max(alone.maximum, spectrum_of(easy).maximum))
    assert (
        spectrum_of(torch.stack([easy, hard]), view=mfx.MatrixView(mfx.transforms.matrices.STACK))
        == fused
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


TOKENS = torch.arange(14).reshape(2, 7) % 7


def trained(wrap=lambda tx: tx, lr=0.02, steps=2) -> tuple[Model, mfx.TransformOptimizer]:
    """A model after some steps and one more backward."""
    model = Model()
    tx = mfx.muon_with_adamw(lr, 0.003, orthogonalize=EXACT, labels=mfx.default_labels(model))
    optimizer = mfx.TransformOptimizer(model, wrap(tx))
    for step in range(steps + 1):
        if step:
            optimizer.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(TOKENS).flatten(0, 1), TOKENS.roll(1).flatten()
        ).backward()
    return model, optimizer


WRAPPERS = {
    "plain": lambda tx: tx,
    "chain": lambda tx: mfx.chain(mfx.clip_by_global_norm(1.0), ("own", tx), mfx.ema_params(0.9)),
    "skip_nonfinite": mfx.skip_nonfinite,
    "master_params": mfx.master_params,
    "offload": lambda tx: mfx.sharding.offload(tx),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_sizes_are_those_of_the_next_step_and_nothing_changes(wrapper):
    model, optimizer = trained(WRAPPERS[wrapper])
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    leaves = [leaf for leaf in mfx.tree.leaves(optimizer.transform_state) if leaf is not None]
    state = [leaf.clone() for leaf in leaves]
    found = mfx.diagnose(optimizer)
    assert str(mfx.diagnose(optimizer)) == str(found)
    assert all(map(torch.equal, state, leaves))
    assert all(torch.equal(param, params[name]) for name, param in model.named_parameters())
    optimizer.step()
    assert {row.name for row in found.rows} == params.keys()
    for row in found.rows:
        step = model.get_parameter(row.name).detach() - params[row.name]
        assert row.update_rms == pytest.approx(step.square().mean().sqrt().item(), rel=1e-3)
        assert row.weight_rms == pytest.approx(
            params[row.name].square().mean().sqrt().item(), rel=1e-5
        )
        rate = 0.02 if row.spectrum else 0.003
        assert row.update_per_rate == pytest.approx(row.update_rms / rate, rel=1e-4)
        assert (row.spectrum is not None) == (row.name in {"blocks.0.weight", "blocks.1.weight"})


def test_current_numbers_of_groups_are_used_and_may_differ():
    model, optimizer = trained()
    group = optimizer.param_groups[0]
    before = {row.name: row for row in mfx.diagnose(optimizer).rows}
    group["lr"] = 0.04
    after = {row.name: row for row in mfx.diagnose(optimizer).rows}
    for name in before:
        assert after[name].update_rms == pytest.approx(
            before[name].update_rms * (2 if before[name].spectrum else 1)
        )
        assert after[name].update_per_rate == pytest.approx(before[name].update_per_rate)
    tx = optimizer.tx
    named = dict(model.named_parameters())
    groups = [{"params": list(named.items())[:2]}, {"params": list(named.items())[2:], "lr": 0.5}]
    assert "blocks.1.weight" in dict(groups[1]["params"])
    two = mfx.TransformOptimizer(groups, tx)
    rates = {row.name: row.update_rms / row.update_per_rate for row in mfx.diagnose(two).rows}
    assert rates["blocks.0.weight"] == pytest.approx(0.02)
    assert rates["blocks.1.weight"] == pytest.approx(0.5)


def test_a_schedule_that_is_zero_leaves_the_size_before_the_rate():
    _, optimizer = trained(lr=mfx.constant_schedule(0.0))
    (row, _) = (row for row in mfx.diagnose(optimizer).rows if row.spectrum is not None)
    assert row.update_rms == row.update_per_weight == 0.0
    assert 0.1 < row.update_per_rate < 0.3


def test_the_table_has_a_row_for_each_role_and_metrics_are_flat_floats():
    _, optimizer = trained()
    found = mfx.diagnose(optimizer)
    (table, _) = found.report().parts
    (role,) = (row for row in table.rows if row.children and "weight" in row.cells[0])
    assert role.cells[0] == "blocks.*.weight (2)"
    assert [row.cells[0] for row in role.children] == ["blocks.0.weight", "blocks.1.weight"]
    assert float(role.cells[3]) == min(float(row.cells[3]) for row in role.children)
    assert float(role.cells[4]) == max(float(row.cells[4]) for row in role.children)
    assert float(role.cells[6]) == min(float(row.cells[6]) for row in role.children)
    assert (
        role.cells[7]
        == f"{max(row.spectrum.steps_needed for row in found.rows if row.spectrum)} of 5"
    )
    assert "blocks.0.weight" not in found.to_text(depth=0)
    Parsed(found._repr_html_())
    metrics = found.metrics()
    assert all(type(value) is float for value in metrics.values())
    row = next(row for row in found.rows if row.spectrum)
    prefix = f"diagnose/{row.name}/"
    assert {
        key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)
    } == {
        "update_rms": row.update_rms,
        "update_per_weight": row.update_per_weight,
        "update_per_rate": row.update_per_rate,
        **row.spectrum._asdict(),
    }


def test_a_weight_of_zeros_has_an_infinite_relative_update():
    params = {"w": torch.zeros(3, 3)}
    tx = mfx.muon(0.1, orthogonalize=EXACT)
    assert (
        mfx.diagnose((tx, tx.init(params), params, {"w": torch.eye(3)})).rows[0].update_per_weight
        == math.inf
    )


def test_a_parameter_without_gradient_has_no_row():
    params = {"a": torch.ones(3, 3), "b": torch.ones(3, 3), "empty": torch.ones(0, 3)}
    tx = mfx.muon(0.1)
    grads = {"a": torch.eye(3), "b": None, "empty": torch.ones(0, 3)}
    assert [row.name for row in mfx.diagnose((tx, tx.init(params), params, grads)).rows] == ["a"]


@pytest.mark.parametrize("wrapper", [mfx.skip_nonfinite, lambda tx: tx])
def test_gradients_that_are_not_finite_are_named(wrapper):
    params = {"a": torch.eye(3), "b": torch.eye(3), "c": torch.eye(3), "d": torch.ones(3, 3)}
    grads = {
        "a": torch.eye(3),
        "b": torch.full((3, 3), math.nan),
        "c": torch.diag(torch.tensor([math.inf, 0, 0])),
    }
    tx = wrapper(mfx.muon(0.1))
    found = mfx.diagnose((tx, tx.init(params), params, {**grads, "d": None}))
    assert found.nonfinite == ("b", "c")
    assert str(found).startswith(
        "gradients that are not finite (NaN or infinite): 'b', 'c'\nskip_nonfinite skips this"
    )
    Parsed(found._repr_html_())
    found = mfx.diagnose((tx, tx.init(params), params, params))
    assert found.nonfinite == ()
    assert str(found).startswith("parameter")


def test_a_nan_without_skip_nonfinite_has_no_spectrum():
    params = {"a": torch.eye(3), "b": torch.eye(3)}
    tx = mfx.muon(0.1)
    good, bad = mfx.diagnose(
        (tx, tx.init(params), params, {"a": torch.eye(3), "b": torch.full((3, 3), math.nan)})
    ).rows
    assert good.spectrum is not None
    assert bad.spectrum is None
    assert math.isnan(bad.update_rms)


def test_what_cannot_be_diagnosed_is_said():
    params = {"w": torch.ones(3, 3)}
    tx = mfx.muon(0.1)
    state = tx.init(params)
    with pytest.raises(
        ValueError, match="found no gradient, expected at least one: call it after backward"
    ):
        mfx.diagnose((tx, state, params, {"w": None}))
    with pytest.raises(TypeError, match=r"found tuple, expected a muonfx\.TransformOptimizer"):
        mfx.diagnose((tx, state, params))  # pyright: ignore
    sharded = mfx.sharding.sharded(tx, mfx.sharding.zero(params, 1))
    with pytest.raises(TypeError, match=r"found a sharded transform, expected .* whole trees"):
        mfx.diagnose((sharded, state, params, params))
    micro = mfx.accumulate(tx, every=2)
    with pytest.raises(ValueError, match=r"orthogonalize did not run, .* boundary=True"):
        mfx.diagnose((micro, micro.init(params), params, params))
    assert (
        mfx.diagnose((micro, micro.init(params), params, params), boundary=True).rows[0].spectrum
        is not None
    )


# ---------------------------------------------------------------------------------------------------------- over ranks


@on_ranks(2)
def test_every_rank_returns_the_values_of_one_process(here: Here):
    seen: list[dict[str, float]] = []
    for kind in ("alone", "ddp", "fsdp"):
        model, layout = Model(), {}
        names = mfx.default_labels(model)
        if kind == "ddp":
            layout = {"layout": lambda named: mfx.sharding.replicated(named, here.group)}
        elif kind == "fsdp":
            fully_shard(model.blocks[0], mesh=here.mesh)
            fully_shard(model, mesh=here.mesh)
        # Whose state is on one rank.
        muon = mfx.chain(mfx.momentum(), EXACT, mfx.normalize_neurons())
        tx = mfx.chain(
            mfx.partition({"muon": muon, "adamw": mfx.scale_by_adam()}, names),
            mfx.scale_by_learning_rate(0.01),
        )
        optimizer = mfx.TransformOptimizer(model, tx, **layout)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(TOKENS).flatten(0, 1), TOKENS.roll(1).flatten()
            ).backward()
        seen.append(mfx.diagnose(optimizer).metrics())
        assert seen[-1] == pytest.approx(seen[0], rel=1e-4)
