"""The sets of coefficients and fitted ones, what they do to a singular value, and every argument that is refused."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from muonfx.polar import (
    CANS_RAW,
    POLAR_EXPRESS_RAW,
    PRESETS,
    Coefficients,
    band,
    coefficients,
    explain,
    fit_coefficients,
    orthogonalize,
    orthogonalize_many,
    polar_factor,
    scalar_polynomial,
    with_safety,
)
from muonfx.polar.fit import best_quintic

EVERY = [*PRESETS.values(), CANS_RAW, POLAR_EXPRESS_RAW]

# Quoted to three decimals: minimum and maximum for normalised singular values of at least 0.01, overall maximum.
QUOTED = [
    ("keller", None, (0.682, 1.134, 1.202)),
    ("quintic", None, (0.978, 1.032, 1.145)),
    (POLAR_EXPRESS_RAW, 5, (0.876, 1.124, 1.124)),
    (CANS_RAW, None, (0.884, 1.120, 1.120)),
    ("cans", None, (0.867, 1.113, 1.113)),
    ("polar_express", 5, (0.870, 1.124, 1.124)),
    ("polar_express", None, (1.0, 1.0, 1.0)),
    ("polar_express_5", None, (0.859, 1.141, 1.141)),
    ("polar_express_4", None, (0.783, 1.217, 1.217)),
    ("aol", None, (0.941, 1.050, 1.050)),
    ("deepseek_v4", None, (1.0, 1.001, 1.002)),
    ("cubic", None, (0.773, 1.300, 1.300)),
]


@pytest.mark.parametrize(("value", "steps", "quoted"), QUOTED)
def test_quoted_bands_are_those_of_the_scalar_polynomial(value, steps, quoted) -> None:
    assert band(value, 0.01, steps=steps) == pytest.approx(quoted, abs=5.1e-4)


@pytest.mark.parametrize("value", EVERY, ids=lambda value: value.name)
def test_a_set_is_a_value(value: Coefficients) -> None:
    assert eval(repr(value)) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)
    assert coefficients(value) is value


def test_safety_divides_the_input_of_every_step_but_the_last() -> None:
    safe = with_safety("keller", 1.05)
    s = torch.linspace(0, 1, 101, dtype=torch.float64)
    y = s
    for i, step in enumerate(PRESETS["keller"].steps):
        y = scalar_polynomial([step], y if i == 4 else y / 1.05)
    torch.testing.assert_close(scalar_polynomial(safe, s), y, rtol=1e-12, atol=1e-12)
    assert safe.steps[-1] == PRESETS["keller"].steps[-1]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            "newton",
            ValueError,
            "keller, quintic, polar_express, polar_express_5, polar_express_4, cans, aol, deepseek_v4, cubic",
        ),
        ([], ValueError, "no steps"),
        ((), ValueError, "no steps"),
        ([(1.0,)], ValueError, r"found \(1.0,\), expected finite Python numbers"),
        ([(1.0, 2.0, 3.0, 4.0)], ValueError, r"found \(1.0, 2.0, 3.0, 4.0\), expected finite"),
        ([(1.5, -0.5), (math.nan, 1.0, 1.0)], ValueError, r"step 1: found \(nan, 1.0, 1.0\)"),
        ([(math.inf, 1.0, 1.0)], ValueError, "finite"),
        ((1.5, -0.5, 0.0), TypeError, "found 1.5, .* for each step"),
        ([("1.5", "-0.5")], TypeError, r"found \('1.5', '-0.5'\)"),
        (["ab"], TypeError, "found 'ab'"),
        ([(torch.tensor(1.5), -0.5)], TypeError, "one tensor of shape"),
        (3, TypeError, "found int"),
        (None, TypeError, "found NoneType"),
        (torch.ones(3), ValueError, "expected \\(steps, 3\\)"),
        (torch.ones(0, 3), ValueError, "steps >= 1"),
        (torch.ones(2, 4), ValueError, "found a tensor of shape \\(2, 4\\)"),
        (torch.ones(2, 3, dtype=torch.int32), TypeError, "floating"),
    ],
)
def test_malformed_coefficients_are_refused(value, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        orthogonalize(torch.eye(3), coefficients=value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda s=s: with_safety("keller", s), "above 0")
            for s in (0.0, -1.0, math.nan, math.inf)
        ),
        (
            lambda: Coefficients("mine", ((1.5, -0.5),), norm_safety=math.nan),
            r"expected a number from 0\.001 to 1000",
        ),
        (
            lambda: Coefficients("mine", ((1.5, -0.5),), norm_safety=0.0),
            r"expected a number from 0\.001 to 1000",
        ),
        *(
            (
                lambda r=r: Coefficients("mine", ((1.5, -0.5),) * 5, restarts=r),
                "expected ascending numbers of steps",
            )
            for r in ((0, 2), (3, 2), (1.5,))
        ),
        *((lambda low=low: band("keller", low), "lower") for low in (0.0, -0.1, 1.5, math.nan)),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("fitted", "published"),
    [
        (fit_coefficients(8), POLAR_EXPRESS_RAW),
        (fit_coefficients(5, cushion=0.02, safety=1.02), PRESETS["polar_express_5"]),
        (fit_coefficients(4, 0.003, safety=1.01), PRESETS["polar_express_4"]),
    ],
)
def test_fit_finds_the_published_tables(fitted: Coefficients, published: Coefficients) -> None:
    torch.testing.assert_close(
        torch.tensor(fitted.steps, dtype=torch.float64),
        torch.tensor(published.steps, dtype=torch.float64),
        rtol=0,
        atol=1e-9,  # the solver of torch 2.10 differs from that of 2.13 by 1.3e-10
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
def test_composition_is_symmetric_about_one_and_better_than_the_published_sets(
    lower: float,
) -> None:
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
    with pytest.raises(error, match=f"^{word}: found"):
        fit_coefficients(**arguments)


@given(
    st.sampled_from([1, 2, 3, 8, 12, 20]),
    st.sampled_from([1e-6, 1e-3, 0.1, 0.5, 0.999, 1 - 1e-9]),
    st.sampled_from([0, 1e-4, 0.024, 0.3, 0.9]),
    st.sampled_from([1.0, 1.01, 1.1]),
)
@example(20, 1 - 1e-9, 0, 1.0)
def test_every_argument_in_range_has_a_fit(
    steps: int, lower: float, cushion: float, safety: float
) -> None:
    # Once an interval has shrunk to the point 1, its ends may come out in the wrong order.
    fitted = fit_coefficients(steps, lower, cushion=cushion, safety=safety)
    assert len(fitted.steps) == steps
    low, high, peak = band(fitted, lower, points=2_001)
    assert 0 < low <= high <= peak <= 2 * safety + 1e-6
    if steps == 20 and safety == 1 and cushion < 0.1:
        assert low == pytest.approx(1, abs=1e-9)
        assert high == pytest.approx(1, abs=1e-9)


GOOD = torch.eye(3)
BAD = [
    (torch.ones(3), ValueError, r"found shape \(3,\), expected \(\.\.\., m, n\)"),
    (torch.ones(()), ValueError, r"found shape \(\)"),
    (torch.ones(3, 3, dtype=torch.int64), TypeError, "found dtype torch.int64"),
    (torch.ones(3, 3, dtype=torch.bool), TypeError, "found dtype torch.bool"),
    (torch.ones(3, 3, dtype=torch.complex64), TypeError, "found dtype torch.complex64"),
    (torch.ones(3, 3).to(torch.float8_e4m3fn), TypeError, ".*expected one of torch.float64"),
    ([[1.0]], TypeError, "found list"),
    (None, TypeError, "found NoneType"),
    (torch.eye(2).to_sparse(), TypeError, r"found layout torch\.sparse_coo"),
]


@pytest.mark.parametrize(("x", "error", "words"), BAD)
def test_what_is_not_a_floating_matrix_is_refused(x, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="x: " + words):
        orthogonalize(x)
    with pytest.raises(error, match=r"xs\[1\]: " + words):
        orthogonalize_many([GOOD, x])
    with pytest.raises(error, match="x: " + words):
        polar_factor(x)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": 0}, ValueError, "steps: found 0, expected at least 1"),
        ({"steps": -2}, ValueError, "steps: found -2"),
        ({"steps": 2.0}, TypeError, "steps: found 2.0"),
        ({"steps": True}, TypeError, "steps: found True"),
        ({"steps": 0, "coefficients": torch.ones(2, 3)}, ValueError, "steps: found 0"),
        (
            {"dtype": "bfloat16"},
            ValueError,
            "dtype: found 'bfloat16', expected 'auto' or a torch.dtype",
        ),
        ({"dtype": torch.int8}, TypeError, "dtype: found torch.int8"),
        ({"dtype": torch.complex64}, TypeError, "dtype: found torch.complex64"),
        ({"dtype": None}, TypeError, "dtype: found None"),
        (
            {"method": "fast"},
            ValueError,
            "method: found 'fast', expected 'auto', 'standard' or 'gram'",
        ),
        ({"method": None}, ValueError, "method: found None"),
        (
            {"method": "gram", "coefficients": torch.ones(2, 3)},
            ValueError,
            "method: found 'gram' with a tensor",
        ),
        ({"products": "cublas"}, ValueError, "products: found 'cublas'"),
        (
            {"products": "quack"},
            ValueError,
            "products: found 'quack', expected 'auto', 'batched' or 'blocks'",
        ),
        ({"max_scratch_bytes": 0}, ValueError, "max_scratch_bytes: found 0"),
    ],
)
@pytest.mark.parametrize("x", [GOOD, torch.ones(0, 3)])
def test_malformed_options_are_refused(
    x: torch.Tensor, options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        orthogonalize(x, **options)
    with pytest.raises(error, match=words):
        orthogonalize_many([x], **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *(
            (lambda rtol=rtol: polar_factor(GOOD, rtol=rtol), ValueError, "rtol")
            for rtol in (-0.1, 1.0, float("nan"))
        ),
        *(
            (lambda shape=shape: explain(shape), TypeError, r"shape must be \(rows, columns\)")
            for shape in ((32,), (2, 3, 4), (4.0, 4), 128, torch.ones(2, 2))
        ),
    ],
)
def test_other_malformed_arguments_are_refused(
    call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


PAGE = Path(__file__).parents[2] / "docs" / "the-default-coefficients.md"


def root_mean_square(matrix: torch.Tensor, name: str) -> float:
    """Return the root mean square of the singular values of a matrix that was orthogonalized by a set in fp32."""
    orthogonal = orthogonalize(matrix, coefficients=name, dtype=torch.float32)
    return orthogonal.norm().item() / math.sqrt(min(matrix.shape))


@pytest.mark.parametrize(
    ("rows", "ratios"),
    [((64, 128), (0.84, 0.88)), ((256,), (0.89, 0.94)), ((512,), (0.90, 0.96))],
    ids=str,
)
def test_the_page_has_the_ratio_of_the_sizes_of_two_sets(
    rows: tuple[int, ...], ratios: tuple[float, float]
):
    least, largest = ratios
    assert f"{least:.2f} to {largest:.2f} for {' and '.join(map(str, rows))}" in PAGE.read_text()
    generator = torch.Generator().manual_seed(0)
    for row_count in rows:
        for columns in (row_count, 2 * row_count, 4 * row_count):
            measured: list[float] = []
            for _ in range(4):
                matrix = torch.randn(row_count, columns, generator=generator)
                measured.append(
                    root_mean_square(matrix, "keller") / root_mean_square(matrix, "polar_express_5")
                )
            assert least - 0.01 < sum(measured) / len(measured) < largest + 0.01


def test_the_page_has_the_sizes_of_the_updates_of_the_study():
    generator = torch.Generator().manual_seed(0)
    ranges = {"polar_express_5": (1.00, 1.03), "quintic": (0.99, 1.00), "keller": (0.86, 0.89)}
    for name, (least, largest) in ranges.items():
        for columns in (128, 512):
            size = root_mean_square(torch.randn(128, columns, generator=generator), name)
            assert least - 0.005 < size < largest + 0.005
        end = f"{least:.2f} to {largest:.2f} after "
        assert end in PAGE.read_text()
