"""Schedules by their closed forms; counts as ints and as tensors give the same."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit

STEPS = range(14)
RATE = 0.7


@given(kit.schedules(), st.integers(0, 12))
def test_a_count_as_an_int_or_a_tensor_gives_the_same(schedule: mfx.Schedule, count: int):
    found = schedule(torch.tensor(count))
    assert found.shape == ()
    assert float(found) == schedule(count)


@given(kit.schedules(), st.integers(0, 12))
def test_numbers_as_tensors_give_the_same_and_have_derivatives(schedule: mfx.Schedule, count: int):
    tensors = mfx.as_tensors(schedule)
    assert float(tensors(torch.tensor(count))) == pytest.approx(schedule(count), abs=1e-12)
    slopes = torch.func.grad(lambda drawn: drawn(torch.tensor(count)))(tensors)
    assert all(math.isfinite(slope) for slope in mfx.hyperparams(slopes).values())


@pytest.mark.parametrize("steps", [1, 4])
def test_an_exponential_is_a_power_of_its_rate(steps: int):
    for count in STEPS:
        assert mfx.exponential_decay(2.0, steps, RATE)(count) == pytest.approx(2.0 * RATE ** (count / steps))
