"""A small vision transformer on handwritten digits, with the usual initialization of such models."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VALIDATION = 500
"""Images that are not trained on, of 1,797."""


class Digits:
    """Images (count, 1, 8, 8) from -1 to 1 and their digits, in the order of `read_corpus`'s batches of text."""

    digest = "scikit-learn's digits"

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # only this study needs it

        pixels, digits = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
        self.digits = torch.tensor(digits)
        self.order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))

    def batch(self, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return random images and their digits that depend on the seed and the step alone."""
        draw = random.Random(f"{seed}:{step}")
        indices = self.order[[draw.randrange(VALIDATION, len(self.order)) for _ in range(size)]]
        return self.images[indices], self.digits[indices]

    def validation_batches(
        self, count: int, size: int, context: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return all validation images, in one batch."""
        indices = self.order[:VALIDATION]
        return [(self.images[indices], self.digits[indices])]


class ViT(nn.Module):
    """A pre-norm vision transformer, from images (batch, 1, 8, 8) to logits (batch, 10).

    Names and initialization are timm's: linear layers and positions with a standard deviation of 0.02.
    """

    def __init__(self, *, width: int, depth: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patch_embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each digit."""
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1)
        x = tokens + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Block(nn.Module):
    """Attention, then an MLP. Query, key and value are separate matrices for Muon."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        normed = self.norm1(x)
        query = self.split_heads(self.query(normed))
        key = self.split_heads(self.key(normed))
        value = self.split_heads(self.value(normed))
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))

    def split_heads(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to (batch, heads, tokens, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
