"""The sets of coefficients: what they are, what they do to a singular value, and what is refused."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch

from muonfx.polar import (
    CANS_RAW,
    POLAR_EXPRESS_RAW,
    PRESETS,
    Coefficients,
    band,
    coefficients,
    orthogonalize,
    scalar_polynomial,
    with_safety,
)

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
        ("newton", ValueError, "keller, quintic, polar_express, polar_express_5, cans, aol, deepseek_v4, cubic"),
        ([], ValueError, "no steps"),
        ((), ValueError, "no steps"),
        ([(1.0,)], ValueError, "found 1 numbers"),
        ([(1.0, 2.0, 3.0, 4.0)], ValueError, "found 4 numbers"),
        ([(1.5, -0.5), (math.nan, 1.0, 1.0)], ValueError, "step 1: found nan"),
        ([(math.inf, 1.0, 1.0)], ValueError, "finite"),
        ((1.5, -0.5, 0.0), TypeError, "one for each step"),
        ([("1.5", "-0.5")], TypeError, "found str"),
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
        *((lambda s=s: with_safety("keller", s), "above 0") for s in (0.0, -1.0, math.nan, math.inf)),
        (lambda: Coefficients("mine", ((1.5, -0.5),), norm_safety=math.nan), r"expected a number from 0\.001 to 1000"),
        (lambda: Coefficients("mine", ((1.5, -0.5),), norm_safety=0.0), r"expected a number from 0\.001 to 1000"),
        *(
            (lambda r=r: Coefficients("mine", ((1.5, -0.5),) * 5, restarts=r), "expected ascending numbers of steps")
            for r in ((0, 2), (3, 2), (1.5,))
        ),
        *((lambda low=low: band("keller", low), "lower") for low in (0.0, -0.1, 1.5, math.nan)),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
