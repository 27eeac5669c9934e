"""`muonfx.Muon` in a loop of the real, unmodified accelerate: DDP and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.accelerate_worker import CASES
from tests.engines.processes import launched, real, result_of

pytestmark = [*real("accelerate"), pytest.mark.dist]
FP32 = 2e-6
"""The largest difference of parameters in five steps."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of all cases, of each rank."""
    return launched("accelerate_worker.py", 2, CASES, tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_one_process_and_a_resumed_run_is_the_same_run(
    found: list[dict[str, Any]], name: str
) -> None:
    case = result_of(found, name)
    assert case["strategy"] == ("FSDP" if "FSDP2" in name else "MULTI_CPU")
    assert case["worst"] <= FP32
    assert case["resumed"]
    assert case["groups"] == [["muon", 0.01], ["adamw", 0.0015]]  # half of it, as the schedule says
