"""Setup of every test and doctest: one thread, a fixed seed, and a hypothesis profile."""

import os
import sys
from collections.abc import Iterator

# Set before torch is imported. With one thread, the order of summation is the same on every machine, and two pytest
# workers do not compete for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis.internal.conjecture.providers
import pytest
import torch

import muonfx as mfx

torch.set_num_threads(1)

# `ci` draws the same examples in every run, so a failure is caused by the change under test; `deep` draws new examples.
# Neither has a deadline, because a slow machine must not fail a test.
_common = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, **_common)
hypothesis.settings.register_profile("deep", max_examples=1000, **_common)
profile = os.environ.get("MUONFX_HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(profile)
if profile == "ci":
    # hypothesis also draws constants from the source of imported modules, which differ between pytest workers.
    no_constants = hypothesis.internal.conjecture.providers._local_constants
    hypothesis.internal.conjecture.providers._get_local_constants = lambda: no_constants


@pytest.fixture(autouse=True)
def _seed(doctest_namespace: dict[str, object]) -> None:
    """Seed torch before each test, and define `torch` and `mfx` for doctests."""
    torch.manual_seed(0)
    doctest_namespace["torch"] = torch
    doctest_namespace["mfx"] = mfx


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    """Close the figures of each test, since matplotlib warns of more than 20."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
