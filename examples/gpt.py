"""A small modern GPT over bytes: pre-norm blocks, rotary positions, causal attention, squared-ReLU MLP, untied head.

Its parameters have the usual names, so ``muonfx.default_labels`` recognizes them: the matrices in a block are hidden
matrices, the embedding and the head are not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
HEAD = 32
"""Width of an attention head."""


class GPT(nn.Module):
    """A byte-level GPT, from tokens (batch, time) int64 to logits of the next byte (batch, time, 256).

    Args:
        width: width of the residual stream, a multiple of `HEAD`.
        depth: number of blocks.
        context: maximum length of a sequence.
        seed: seed of the initial weights.
    """

    def __init__(self, *, width: int, depth: int, context: int, seed: int) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(context), 1000.0 ** -torch.linspace(0, 1, HEAD // 2))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.reset(torch.Generator().manual_seed(seed))

    def reset(self, generator: torch.Generator) -> None:
        """Draw the weights: zero for the head and the outputs of the blocks, else normal with std 1 / sqrt(fan in)."""
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(
                    weight, std=1.0 if name == "embed.weight" else weight.shape[1] ** -0.5, generator=generator
                )

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the logits of the byte after each token; the first token has the position ``start``."""
        x = self.embed(tokens)
        rotation = self.rotation[:, start : start + tokens.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention, then an MLP; each reads the normalized residual stream and adds to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal attention with rotary positions. Query, key and value are separate matrices for Muon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = self.attend(rotate(query, rotation), rotate(key, rotation), value)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of three tensors (batch, heads, time, `HEAD`)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class MLP(nn.Module):
    """A linear layer to four times the width, squared ReLU, and a linear layer back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        return self.down(F.relu(self.up(x)).square())


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of features (one of the first half, one of the second) by the angle of its position."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor], context: int, seed: int, *, prompt: str = "\ndef ", length: int = 400
) -> str:
    """Sample a continuation of a prompt, byte by byte, at temperature 0.7."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = logits_of(text[:, -context:])[:, -1].float()
        text = torch.cat([text, torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace").strip("\n")
