"""Fitted coefficients: the published tables again, and the equioscillation that makes a fit the best one."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from muonfx.polar import POLAR_EXPRESS_RAW, PRESETS, Coefficients, band, fit_coefficients, scalar_polynomial
from muonfx.polar.fit import best_quintic


@pytest.mark.parametrize(
    ("fitted", "published"),
    [
        (fit_coefficients(8), POLAR_EXPRESS_RAW),
        (fit_coefficients(5, cushion=0.02, safety=1.02), PRESETS["polar_express_5"]),
    ],
)
def test_fit_finds_the_published_tables(fitted: Coefficients, published: Coefficients) -> None:
    torch.testing.assert_close(
        torch.tensor(fitted.steps, dtype=torch.float64),
        torch.tensor(published.steps, dtype=torch.float64),
        rtol=0,
        atol=1e-10,
    )


@pytest.mark.parametrize("low", [1e-3, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("high", [1.0, 1.7])
def test_error_of_the_best_quintic_alternates_four_times(low: float, high: float) -> None:
    step = best_quintic(low, high)
    s = torch.linspace(low, high, 400_001, dtype=torch.float64)
    error = 1 - scalar_polynomial([step], s)
    worst = error.abs().max()
    touched = s[error.abs() > worst * (1 - 1e-5)]
    runs = error[error.abs() > worst * (1 - 1e-5)].sign()
    assert touched[0] == low
    assert touched[-1] == high
    assert (runs[1:] != runs[:-1]).sum() == 3


@pytest.mark.parametrize("lower", [1e-4, 1e-3, 1e-2])
def test_composition_is_symmetric_about_one_and_better_than_the_published_sets(lower: float) -> None:
    low, high, _ = band(fit_coefficients(5, lower, cushion=0), lower)
    assert low + high == pytest.approx(2, abs=1e-6)
    for name in ("keller", "quintic", "polar_express_5", "cans"):
        other = band(name, lower)
        assert high - 1 < max(1 - other.minimum, other.maximum - 1)
    cushioned = band(fit_coefficients(5, lower), lower)
    assert cushioned.minimum + cushioned.maximum == pytest.approx(2, abs=1e-6)
    assert cushioned.maximum >= high - 1e-9


@pytest.mark.parametrize(
    ("arguments", "word", "error"),
    [
        ({"steps": 0}, "steps", ValueError),
        ({"steps": 2.5}, "steps", TypeError),
        ({"steps": True}, "steps", TypeError),
        ({"steps": 3, "lower": 0.0}, "lower", ValueError),
        ({"steps": 3, "lower": 1.0}, "lower", ValueError),
        ({"steps": 3, "cushion": 1.0}, "cushion", ValueError),
        ({"steps": 3, "safety": 0.9}, "safety", ValueError),
        ({"steps": 3, "safety": math.nan}, "safety", ValueError),
    ],
)
def test_ranges_are_checked(arguments: dict, word: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"fit_coefficients: {word} is"):
        fit_coefficients(**arguments)


@given(
    st.sampled_from([1, 2, 3, 8, 12, 20]),
    st.sampled_from([1e-6, 1e-3, 0.1, 0.5, 0.999, 1 - 1e-9]),
    st.sampled_from([0, 1e-4, 0.024, 0.3, 0.9]),
    st.sampled_from([1.0, 1.01, 1.1]),
)
@example(20, 1 - 1e-9, 0, 1.0)
def test_every_argument_in_range_has_a_fit(steps: int, lower: float, cushion: float, safety: float) -> None:
    # Once an interval has shrunk to the point 1, its ends may come out in the wrong order.
    fitted = fit_coefficients(steps, lower, cushion=cushion, safety=safety)
    assert len(fitted.steps) == steps
    low, high, peak = band(fitted, lower, points=2_001)
    assert 0 < low <= high <= peak <= 2 * safety + 1e-6
    if steps == 20 and safety == 1 and cushion < 0.1:
        assert low == pytest.approx(1, abs=1e-9)
        assert high == pytest.approx(1, abs=1e-9)
