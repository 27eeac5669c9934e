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


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_an_exponential_is_a_power_of_its_rate(begin: int, steps: int):
    for count in STEPS:
        times = max(0, count - begin) / steps
        assert mfx.exponential_decay(2.0, steps, RATE, begin=begin)(count) == pytest.approx(2.0 * RATE**times)
        stairs = mfx.exponential_decay(2.0, steps, RATE, begin=begin, staircase=True)(count)
        assert stairs == pytest.approx(2.0 * RATE ** math.floor(times))


@pytest.mark.parametrize(("rate", "end"), [(0.5, 0.3), (2.0, 3.0)])
def test_an_exponential_stops_at_its_end(rate: float, end: float):
    bound = max if rate < 1 else min
    for count in STEPS:
        assert mfx.exponential_decay(1.0, 2, rate, end=end)(count) == pytest.approx(bound(end, rate ** (count / 2)))


def test_a_polynomial_of_power_one_is_a_line():
    for count in STEPS:
        assert mfx.polynomial_schedule(1.0, 0.2, 9)(count) == pytest.approx(mfx.linear_schedule(1.0, 0.2, 9)(count))
        left = 1 - min(max(count - 2, 0), 9) / 9
        assert mfx.polynomial_schedule(1.0, 0.2, 9, 3.0, begin=2)(count) == pytest.approx(0.2 + 0.8 * left**3)


@pytest.mark.parametrize("interpolation", ["linear", "cosine"])
def test_a_cycle_begins_peaks_and_ends_where_it_says(interpolation: str):
    cycle = mfx.onecycle_schedule(2.0, 20, interpolation, pct_start=0.25, div_factor=4.0, final_div_factor=10.0)
    values = [cycle(count) for count in range(30)]
    assert [values[0], values[5], values[20], values[29]] == pytest.approx([0.5, 2.0, 0.05, 0.05])
    assert values[:6] == sorted(values[:6])
    assert values[5:] == sorted(values[5:], reverse=True)


def test_each_restart_is_a_cosine_of_its_own():
    restarts = mfx.sgdr_schedule(1.0, 4, 3, growth=2, decay=0.5, warmup_steps=1, start=0.1, end=0.01)
    first = 0
    for cycle in range(3):
        alone = mfx.warmup_cosine_decay_schedule(0.5**cycle, 1, 4 * 2**cycle, 0.1, 0.01)
        for count in range(4 * 2**cycle):
            assert restarts(first + count) == pytest.approx(alone(count))
        first += 4 * 2**cycle
    assert restarts(first + 100) == pytest.approx(0.01)
