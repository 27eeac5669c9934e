"""PyTorch's generic optimizer checks, and its checks of distributed state dicts, on our optimizers."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

pytest.importorskip("expecttest")

from torch.testing._internal.common_optimizers import OptimizerInfo
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

import muonfx as mfx
from tests.peers.torch_optim import CHECKS, cases, inputs_of
from tests.processes import Here, on_ranks

pytestmark = pytest.mark.engines


# It is meant to be.
@pytest.mark.filterwarnings("ignore:load_state_dict. the state dict was saved with other numbers")
@pytest.mark.parametrize(
    ("check", "info", "at"), cases(), ids=lambda x: x.name if isinstance(x, OptimizerInfo) else x
)
def test_of_an_optimizer(check: str, info: OptimizerInfo, at: int) -> None:
    CHECKS[check](info, inputs_of(info)[at])


class Verify(VerifyStateDictMixin, TestCase):
    """Torch's checks, as they are."""


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"cpu_offload": True}], ids=str)
@on_ranks(2)
def test_of_distributed_state_dicts(here: Here, options: dict[str, bool]) -> None:
    """Train a model whole and sharded; compare their state dicts, and load the sharded one into a new optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded = fully_shard(copy.deepcopy(model), mesh=here.mesh)
    part = mfx.orthogonalize(dtype=torch.float32)
    one, other = (mfx.Muon(m, orthogonalize=part) for m in (model, sharded))
    for net, optimizer in ((model, one), (sharded, other)):
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            net(torch.randn(5, 8)).square().sum().backward()
            optimizer.step()
    given = StateDictOptions(**options)
    saved_model, saved = get_state_dict(sharded, other, options=given)
    verify = Verify()
    verify._verify_msd(model.state_dict(), saved_model, given)
    verify._verify_osd(model, one, one.state_dict(), saved)
    if not options:
        verify._verify_osd_by_load(model, one, mfx.Muon(model, orthogonalize=part), saved)


def test_the_page_shows_how_many_checks_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "why.md").read_text()
    assert f"re-implemented | {len(CHECKS)} |" in page
