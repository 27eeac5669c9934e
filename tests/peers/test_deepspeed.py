"""DeepSpeed's checks of its Muon, written anew, on ours: two real processes run them all, one after another."""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.engines.processes import launched, result_of
from tests.peers.deepspeed_muon import CASES

pytestmark = [
    pytest.mark.dist,
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: make engines"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of all checks, of each rank."""
    return launched("../peers/deepspeed_muon.py", 2, CASES, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_of_deepspeed(found: list[dict[str, Any]], name: str) -> None:
    assert result_of(found, name) == {}
