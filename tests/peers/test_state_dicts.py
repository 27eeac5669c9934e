"""PyTorch's checks of distributed state dicts, unmodified, on our optimizer over real processes."""

import pytest

from tests.processes import World

pytest.importorskip("expecttest")

from tests.peers import state_dicts as ranks

pytestmark = [pytest.mark.dist, pytest.mark.engines]

OPTIONS = [{}, {"full_state_dict": True}, {"cpu_offload": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_of_torch(world: World, options: dict[str, bool]) -> None:
    world.check(2, ranks.verified, options=options)
