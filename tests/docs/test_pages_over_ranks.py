"""The code of the pages about ranks runs on two and three ranks, with the process group that the tests have."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.processes import Failed, Here, World
from tests.test_docs import ROOT, run_page

pytestmark = pytest.mark.dist
PAGES = ["checkpoints.md", "muonclip.md", "sharding.md", "sharding-agreement.md"]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """Processes whose default group has as many ranks as there are of them."""
    if request.param == 2:
        yield request.getfixturevalue("pair")
    else:
        made = World(request.param)
        yield made
        made.close()


def read_out(here: Here, page: str, folder: Path) -> int:
    """Run a page as torchrun would: every rank types it in, in one folder."""
    torch.manual_seed(0)
    os.chdir(folder)
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return run_page(ROOT / "docs" / page)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_on_ranks(ranks: World, tmp_path: Path, page: str):
    if page == "muonclip.md" and ranks.size == 3:
        pytest.skip("its tensor parallelism shares out two key heads")
    found = ranks.run(ranks.size, read_out, page=page, folder=tmp_path)
    traces = [result.trace for result in found if isinstance(result, Failed)]
    assert not traces, "\n".join(traces)
    assert min(found) > 1
