"""What ranks do in PyTorch's checks of distributed state dicts."""

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

import muonfx as mfx
from tests.processes import Here


class Verify(VerifyStateDictMixin, TestCase):
    """Torch's checks, as they are."""


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()


def verified(here: Here, options: dict[str, bool]) -> None:
    """Train a model whole and sharded; compare their state dicts, and load the sharded one into a new optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded = fully_shard(copy.deepcopy(model), mesh=here.mesh)
    one, other = (mfx.Muon(m, orthogonalize=mfx.orthogonalize(dtype=torch.float32)) for m in (model, sharded))
    _trained(model, one)
    _trained(sharded, other)
    given = StateDictOptions(**options)
    saved_model, saved = get_state_dict(sharded, other, options=given)
    verify = Verify()
    verify._verify_msd(model.state_dict(), saved_model, given)
    verify._verify_osd(model, one, one.state_dict(), saved)
    if not options:
        verify._verify_osd_by_load(
            model, one, mfx.Muon(model, orthogonalize=mfx.orthogonalize(dtype=torch.float32)), saved
        )
