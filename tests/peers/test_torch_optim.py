"""PyTorch's generic optimizer checks on our optimizers."""

import pytest

pytest.importorskip("expecttest")

from torch.testing._internal.common_optimizers import OptimizerInfo

from tests.peers.optimizers import inputs_of
from tests.peers.torch_optim import CHECKS, cases

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(("check", "info", "at"), cases(), ids=lambda x: x.name if isinstance(x, OptimizerInfo) else x)
def test_of_torch(check: str, info: OptimizerInfo, at: int) -> None:
    CHECKS[check](info, inputs_of(info)[at])
