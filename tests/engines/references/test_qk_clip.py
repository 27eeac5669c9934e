"""QK-clip beside pytorch_optimizer's MuonClip, behind the same update."""

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer: make engines"),
]

if find_spec("pytorch_optimizer") is not None:
    from pytorch_optimizer import MuonClip

BOUND = 3e-7
"""The largest difference relative to a weight: their factors are of single precision."""

# Eight rows for each of three heads, four for the rotary queries.
ROLES = {"q_c": ("query", 24), "q_r": ("query_rotary", 12), "k_c": ("key", 24), "k_r": ("key_rotary", 4)}
HEADS = (
    mfx.AttentionHeads("attn", 3, query="q_c", key="k_c"),
    mfx.AttentionHeads("attn", 3, query="q_r", key="k_c", rotary_dims=(0, 4)),
)


def muonclip(params: dict[str, Tensor], alpha: float) -> Any:
    groups: list[dict[str, Any]] = [
        {"params": [params[name]], "use_muon": True, "qk_clip": role, "attention_name": "attn"}
        for name, (role, _) in ROLES.items()
    ]
    return MuonClip(groups, lr=0.1, qk_clip_threshold=100.0, qk_clip_alpha=alpha)


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_clipped_weights_are_those_of_pytorch_optimizer(alpha: float):
    draw = torch.Generator().manual_seed(0)

    def drawn() -> dict[str, Tensor]:
        return {n: torch.randn(rows, 10, generator=draw, dtype=torch.float64) for n, (_, rows) in ROLES.items()}

    params = drawn()
    unclipped = copy.deepcopy(params)
    theirs, without = muonclip(params, alpha), muonclip(unclipped, alpha)
    tx = mfx.qk_clip(HEADS, 100.0, alpha)
    for _ in range(3):
        logits = torch.tensor([400.0, 90.0, 100.0]) + 10 * torch.rand(3, generator=draw)
        before = {f"attn.{name}.weight": param.clone() for name, param in params.items()}
        for name, grad in drawn().items():
            unclipped[name].copy_(params[name])
            params[name].grad, unclipped[name].grad = grad, grad.clone()
        theirs.step(attention_max_logits={"attn": logits})
        without.step()
        updates = {f"attn.{name}.weight": w - before[f"attn.{name}.weight"] for name, w in unclipped.items()}
        found, _ = tx.update(updates, tx.init(before), before, max_logits={"attn": logits})
        ours = mfx.apply_updates(before, found)
        for name, param in params.items():
            torch.testing.assert_close(ours[f"attn.{name}.weight"], param, rtol=BOUND, atol=BOUND)
            assert torch.equal(param, unclipped[name]) == (name == "k_r")
