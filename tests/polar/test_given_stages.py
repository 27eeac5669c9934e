"""Stages given as `method`: they are taken exactly, their bound is shown, and too much rounding is warned of."""

import warnings

import pytest
import torch

import muonfx as mfx
from benchmarks.operations import Counter
from benchmarks.simulator.operations import flops
from muonfx.polar import explain, orthogonalize
from muonfx.polar.cost import newton_schulz_cost
from muonfx.polar.polynomials import polynomials
from muonfx.polar.stability import growth_by_rounding

SHAPE = (256, 1024)


def lengths(plan: mfx.polar.Plan) -> list[int]:
    return [len(stage.steps) for stage in plan.stages]


def test_given_stages_are_those_of_the_same_restarts() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(x, method="gram", dtype=torch.float32)
    assert torch.equal(orthogonalize(x, method=(2, 1, 2), dtype=torch.float32), expected)
    tx = mfx.orthogonalize(method=(2, 1, 2), dtype=torch.float32)
    assert torch.equal(tx.update({"w": x}, tx.init({"w": x}))[0]["w"], expected)
    compiled = torch.compile(
        lambda y: orthogonalize(y, method=(2, 1, 2), dtype=torch.float32), backend="eager"
    )
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=2e-5)


def test_stages_that_round_too_much_are_taken_with_a_warning_and_shown() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"stages of 2 \+ 3 steps, rounding to torch.float16 .* 1.26 times"
    ):
        plan = explain(SHAPE, method=(2, 3), dtype=torch.float16)
    assert lengths(plan) == [2, 3]
    steps, _, safety, *_ = polynomials("polar_express_5")
    assert plan.bound == growth_by_rounding(steps, (2,), safety, torch.float16)
    assert "1.2571" in str(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lengths(explain(SHAPE, method=(2, 1, 2), dtype=torch.float16)) == [2, 1, 2]
        assert lengths(explain(SHAPE, method=(1, 1, 1, 1, 1), dtype=torch.bfloat16)) == [1] * 5


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ((2, 2), "expected numbers of steps of at least 1 that add up to 5"),
        ((), "expected numbers of steps of at least 1"),
        ((2, 0, 3), "expected numbers of steps of at least 1"),
        ((2.0, 3), "expected numbers of steps of at least 1"),
        ([2, 3], "or the steps of each stage"),
    ],
)
def test_malformed_stages_are_refused(method: object, words: str) -> None:
    for call in (lambda: explain(SHAPE, method=method), lambda: mfx.orthogonalize(method=method)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            call()


def test_a_tensor_of_coefficients_takes_no_stages() -> None:
    with pytest.raises(ValueError, match="which only the standard form takes"):
        explain(SHAPE, coefficients=torch.ones(5, 3), method=(2, 3))


@pytest.mark.parametrize("products", ["batched", "blocks"])
@pytest.mark.parametrize("stages", ["standard", (3, 2), (5,)])
@pytest.mark.parametrize("c", [0.375, 0.0])
def test_the_cost_counts_the_operations_that_run(
    products: str, stages: str | tuple[int, ...], c: float
) -> None:
    settings = {
        "method": stages,
        "products": products,
        "dtype": torch.float32,
        "coefficients": [(1.5, -0.5, c)] * 5,
    }
    with Counter() as counter:
        orthogonalize(torch.ones(300, 400), **settings)
    assert flops(newton_schulz_cost((300, 400), **settings)) == pytest.approx(counter.totals.flops)
