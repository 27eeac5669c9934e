"""Setup of every test and doctest: one thread, a fixed seed, and a hypothesis profile."""

import importlib.util
import os

# Set before torch is imported. With one thread, the order of summation is the same on every machine, and two pytest
# workers do not compete for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis.internal.conjecture.providers
import pytest
import torch

# Set before muonfx is imported, because torch.compile imports Triton. Without a GPU, Triton kernels run in Triton's
# interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import muonfx as mfx

torch.set_num_threads(1)

# The module of kernels cannot be imported without Triton, so its doctests are not collected.
if importlib.util.find_spec("triton") is None:
    collect_ignore = ["muonfx/polar/kernels/symmetric.py"]

# `ci` draws the same examples in every run, so a failure is caused by the change under test; `deep` draws new examples.
# Neither has a deadline, because a slow machine must not fail a test.
_common = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
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
