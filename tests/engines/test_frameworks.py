"""`muonfx.Muon` under unmodified accelerate, Lightning and transformers: as in one process, resumed to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.accelerate_worker import CASES as ACCELERATE
from tests.engines.processes import launched, real, result_of

FABRIC = {2: ["ddp", "ddp, replicated", "fsdp2"], 1: ["one process"]}
TRANSFORMERS = {2: ["tensor parallel", "fsdp"]}
LIGHTNING = {2: ["ddp", "ddp, replicated", "fsdp2", "fsdp2, one file"], 1: ["one process"]}
LIGHTNING_MOVES = {
    2: ["ddp to fsdp2", "fsdp2, one file, to ddp"],
    1: ["ddp to one rank", "fsdp2 to one rank", "fsdp2, one file, to one rank"],
}
"""Runs that continue under another strategy, or on one rank what two have saved."""
MUON, ADAMW = ([rate * 0.5**step for step in range(5)] for rate in (0.02, 0.003))
REST = {
    "lr-Muon/muon-momentum": 0.95,
    "lr-Muon/adamw-momentum": 0.9,
    "lr-Muon/muon-weight_decay": 0.1,
    "lr-Muon/adamw-weight_decay": 0.1,
}
pytestmark = pytest.mark.dist
Found = Callable[[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of all cases of a framework, of each rank, by the number of ranks."""
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    shared_folder = tmp_path_factory.mktemp("frameworks")

    def of(framework: str, size: int) -> list[dict[str, Any]]:
        if (framework, size) not in results:
            lightning = {ranks: [*LIGHTNING[ranks], *LIGHTNING_MOVES[ranks]] for ranks in (2, 1)}
            by_size = {"accelerate": {2: ACCELERATE}, "lightning": lightning, "fabric": FABRIC}
            names = {**by_size, "tensor_parallel": TRANSFORMERS}[framework][size]
            folder = shared_folder / f"{framework}_{size}"
            folder.mkdir()
            results[framework, size] = launched(f"{framework}_worker.py", size, names, folder)
        return results[framework, size]

    return of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=real("accelerate")) for name in ACCELERATE]
)
def test_accelerate(found: Found, name: str) -> None:
    case = result_of(found("accelerate", 2), name)
    assert case["strategy"] == ("FSDP" if "FSDP2" in name else "MULTI_CPU")
    assert case["worst"] <= 2e-6
    assert case["resumed"]
    assert case["groups"] == [["muon", 0.01], ["adamw", 0.0015]]  # half of it, as the schedule says


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=real("lightning"))
        for size, names in LIGHTNING.items()
        for name in names
    ],
)
def test_lightning_whose_log_is_true(found: Found, size: int, name: str) -> None:
    case = result_of(found("lightning", size), name)
    assert case["worst"] <= 1e-6
    assert case["resumed"]
    assert case["logged"] == {"lr-Muon/muon": MUON, "lr-Muon/adamw": ADAMW, **REST}
    assert case["logged again"] == {"lr-Muon/muon": MUON[3:], "lr-Muon/adamw": ADAMW[3:], **REST}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=real("lightning"))
        for size, names in LIGHTNING_MOVES.items()
        for name in names
    ],
)
def test_a_lightning_run_continues_under_another_strategy_or_on_one_rank(
    found: Found, size: int, name: str
) -> None:
    found("lightning", 2)  # the files that one rank continues
    case = result_of(found("lightning", size), name)
    assert case["worst again"] <= 1e-6
    assert case["logged again"] == {"lr-Muon/muon": MUON[3:], "lr-Muon/adamw": ADAMW[3:], **REST}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=real("lightning"))
        for size, names in FABRIC.items()
        for name in names
    ],
)
def test_fabric(found: Found, size: int, name: str) -> None:
    case = result_of(found("fabric", size), name)
    assert case["worst"] <= 1e-6
    assert case["resumed"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=real("transformers")) for name in TRANSFORMERS[2]]
)
def test_a_model_that_transformers_has_partitioned(found: Found, name: str) -> None:
    case = result_of(found("tensor_parallel", 2), name)
    assert case["worst"] <= 2e-6
    assert case["resumed"]
