"""Schedules beside Optax's, at every step."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muonfx as mfx

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("optax") is None, reason="needs optax: make engines"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # JAX's own
]

if find_spec("optax") is not None:
    import jax
    import numpy as np
    import optax

BOUND = 1e-12
"""The largest difference in double precision, relative to the largest magnitude."""


@pytest.fixture(autouse=True, scope="module")
def _double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


VALUES = st.floats(0.01, 4.0)
LENGTHS = st.integers(1, 9)
BEGINS = st.integers(0, 4)
WAYS = st.sampled_from(("linear", "cosine"))


def exponentials(start: float, steps: int, rate: float, begin: int, stairs: bool, end: float | None) -> Any:
    return (
        mfx.exponential(start, steps, rate, begin=begin, staircase=stairs, end=end),
        optax.exponential_decay(start, steps, rate, begin, stairs, end),
    )


def polynomials(start: float, end: float, steps: int, power: float, begin: int) -> Any:
    ours = mfx.polynomial(start, end, steps, power, begin)
    return ours, optax.polynomial_schedule(start, end, power, steps, begin)


def one_cycles(peak: float, steps: int, way: str, first: float, last: float) -> Any:
    shares = {"pct_start": 0.3} | ({"pct_final": 0.85} if way == "linear" else {})
    more = shares | {"div_factor": first, "final_div_factor": last}
    theirs = optax.linear_onecycle_schedule if way == "linear" else optax.cosine_onecycle_schedule
    return mfx.one_cycle(peak, steps, way, **more), theirs(steps, peak, **more)


def restarts(peak: float, steps: int, cycles: int, growth: int, decay: float, start: float, end: float) -> Any:
    each = [
        {
            "init_value": start,
            "peak_value": peak * decay**cycle,
            "decay_steps": steps * growth**cycle,
            "warmup_steps": 1,
            "end_value": end,
        }
        for cycle in range(cycles)
    ]
    ours = mfx.sgdr(peak, steps, cycles, growth=growth, decay=decay, warmup_steps=1, start=start, end=end)
    return ours, optax.sgdr_schedule(each)


PAIRS: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
    "exponential": lambda: st.builds(exponentials, VALUES, LENGTHS, VALUES, BEGINS, st.booleans(), st.none() | VALUES),
    "polynomial": lambda: st.builds(polynomials, VALUES, VALUES, LENGTHS, st.sampled_from((1.0, 0.5, 3.0)), BEGINS),
    # from 4 steps on: with fewer Optax's boundaries fall together, and one of them is lost
    "one cycle": lambda: st.builds(one_cycles, VALUES, st.integers(4, 20), WAYS, VALUES, VALUES),
    "sgdr": lambda: st.builds(
        restarts, VALUES, st.integers(2, 6), st.integers(1, 3), st.integers(1, 2), VALUES, VALUES, VALUES
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_schedule_is_optaxs_at_every_step(name: str):
    counts = range(25)

    @settings(max_examples=5)
    @given(PAIRS[name]())
    def compare(pair: Any) -> None:
        ours, theirs = pair
        wanted = np.asarray([float(theirs(jax.numpy.asarray(count))) for count in counts])
        found = [ours(count) for count in counts]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=BOUND * max(1.0, float(np.abs(wanted).max())))

    compare()
