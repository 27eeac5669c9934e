"""PyTorch's generic optimizer checks, and its checks of distributed state dicts, on our optimizers."""

from pathlib import Path

import pytest

pytest.importorskip("expecttest")

from torch.testing._internal.common_optimizers import OptimizerInfo

from tests.peers import state_dicts as ranks
from tests.peers.optimizers import inputs_of
from tests.peers.torch_optim import CHECKS, cases
from tests.processes import World

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(("check", "info", "at"), cases(), ids=lambda x: x.name if isinstance(x, OptimizerInfo) else x)
def test_of_an_optimizer(check: str, info: OptimizerInfo, at: int) -> None:
    CHECKS[check](info, inputs_of(info)[at])


@pytest.mark.dist
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"cpu_offload": True}], ids=str)
def test_of_distributed_state_dicts(world: World, options: dict[str, bool]) -> None:
    world.check(2, ranks.verified, options=options)


def test_the_page_shows_how_many_checks_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "peers.md").read_text()
    assert f"re-implemented | {len(CHECKS)} |" in page
