"""`muonfx.Muon` under the real, unmodified Lightning: parameters of one process, and a resume to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.processes import launched, real, result_of

pytestmark = [*real("lightning"), pytest.mark.dist]
CASES = {2: ["ddp", "ddp, replicated", "fsdp2", "fsdp2, one file"], 1: ["one process"]}
MUON, ADAMW = ([rate * 0.5**step for step in range(5)] for rate in (0.02, 0.003))
REST = {
    "lr-Muon/muon-momentum": 0.95,
    "lr-Muon/adamw-momentum": 0.9,
    "lr-Muon/muon-weight_decay": 0.1,
    "lr-Muon/adamw-weight_decay": 0.1,
}
FP32 = 1e-6
"""The largest difference of parameters in five steps."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The results of all cases, by number of ranks; of each rank."""
    folder, results = tmp_path_factory.mktemp("lightning"), {}
    for size, names in CASES.items():
        own = folder / str(size)
        own.mkdir()
        results[size] = launched("lightning_worker.py", size, names, own)
    return results


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_parameters_are_those_of_one_process_a_resumed_run_is_the_same_run_and_the_log_is_true(
    found: dict[int, list[dict[str, Any]]], size: int, name: str
) -> None:
    case = result_of(found[size], name)
    assert case["worst"] <= FP32
    assert case["resumed"]
    assert case["logged"] == {"lr-Muon/muon": MUON, "lr-Muon/adamw": ADAMW, **REST}
    assert case["logged again"] == {"lr-Muon/muon": MUON[3:], "lr-Muon/adamw": ADAMW[3:], **REST}
