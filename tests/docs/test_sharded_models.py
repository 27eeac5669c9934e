"""The chain of docs/sharded-models.md gives the update of one process on two ranks."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import muonfx as mfx
from tests.processes import Here, on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "sharded-models.md"


class Model(nn.Module):
    """An embedding, two blocks, of which each has a matrix and a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def chain_of_the_page() -> str:
    """Return the block of code that defines ``my_tx``, with products in fp32."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "my_tx =" in block]
    return code.replace("view=labels.view()", "view=labels.view(), dtype=torch.float32")


def train(mesh: Any, shard: Any) -> Model:
    """Run the code of the page and two steps on the whole batch."""
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {"torch": torch, "mfx": mfx, "model": model, "mesh": mesh, "fully_shard": shard}
    exec(chain_of_the_page(), names)
    for step in range(2):
        tokens = torch.arange(12).view(3, 4) + step
        names["optimizer"].zero_grad()
        model(tokens).square().mean().backward()
        names["optimizer"].step()
    return model


@on_ranks(2)
def test_a_chain_under_fsdp2(here: Here) -> None:
    sharded = train(here.mesh, fully_shard)
    whole = train(None, lambda module, mesh: module)
    gathered = {name: cast(DTensor, shard).full_tensor() for name, shard in sharded.named_parameters()}
    torch.testing.assert_close(gathered, dict(whole.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "stated"), [(torch.bfloat16, 0.016), (torch.float32, 3e-5)])
def test_products_magnify_a_small_difference_of_gradients_as_the_page_says(dtype: torch.dtype, stated: float) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(256, 32) @ torch.randn(32, 256)
    other_gradient = gradient * (1 + 1e-7 * torch.randn_like(gradient))
    update, other_update = (mfx.polar.orthogonalize(x, dtype=dtype) for x in (gradient, other_gradient))
    difference = float((other_update - update).norm() / update.norm())
    assert stated / 2 < difference < 2 * stated
