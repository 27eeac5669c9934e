"""What every test and doctest runs under: one thread, a fixed seed, warnings as errors, and a hypothesis profile."""

import importlib.util
import os

# Before torch is imported. One thread: sums come out in one order on every machine, and two pytest workers do not fight
# over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis.internal.conjecture.providers
import pytest
import torch

# Before muonfx is imported, which by way of torch.compile imports Triton: where no GPU is at hand, Triton's kernels run
# in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import muonfx as mfx

torch.set_num_threads(1)

# Kernels cannot be imported without Triton, so their doctests cannot be collected.
if importlib.util.find_spec("triton") is None:
    collect_ignore = ["muonfx/polar/kernels/symmetric.py"]

# `ci` draws the same examples in every run, so a failure comes from the change under test; `deep` draws new ones.
# Neither has a deadline: a busy machine is not a failure.
_common = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, **_common)
hypothesis.settings.register_profile("deep", max_examples=1000, **_common)
profile = os.environ.get("MUONFX_HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(profile)
if profile == "ci":
    # hypothesis also draws constants from the source of every imported module, which differs between pytest workers.
    no_constants = hypothesis.internal.conjecture.providers._local_constants
    hypothesis.internal.conjecture.providers._get_local_constants = lambda: no_constants


@pytest.fixture(autouse=True)
def _seed(doctest_namespace: dict[str, object]) -> None:
    """Seed torch before each test, and put the two names into doctests that every example starts with."""
    torch.manual_seed(0)
    doctest_namespace["torch"] = torch
    doctest_namespace["mfx"] = mfx
