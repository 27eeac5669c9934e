"""A complete training loop in one file: a small GPT learns the source of Python's standard library with Muon.

``python examples/minimal.py`` takes about a minute on two CPU cores and downloads nothing. The optimizer is a chain.
The loop calls ``tx.init`` once, then ``tx.update`` and ``mfx.apply_updates`` in each step; none modifies its inputs.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F

import muonfx as mfx


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection. Query, key and value are separate matrices for Muon."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        normed, layers = self.norm1(x), (self.query, self.key, self.value)
        heads = [layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    """A byte-level GPT that predicts the next byte."""

    def __init__(self, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time) int64 to logits (batch, time, 256)."""
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position.weight[: tokens.shape[1]])))


def windows(text: Tensor, count: int, context: int) -> tuple[Tensor, Tensor]:
    """Draw random windows of the text: inputs, and targets one byte later, each (count, context) int64."""
    starts = torch.randint(len(text) - context, (count, 1))
    drawn = text[starts + torch.arange(context + 1)].long()
    return drawn[:, :-1], drawn[:, 1:]


def main(steps: int = 300, batch: int = 16, context: int = 128, width: int = 128, depth: int = 2) -> float:
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    train, held_out = text.tensor_split([len(text) * 9 // 10])  # the last tenth is for validation
    model = GPT(width, heads=4, depth=depth, context=context)
    params = {name: param.detach() for name, param in model.named_parameters()}
    labels = mfx.default_labels(model)  # "muon" for the hidden matrices, "adamw" for embeddings, head, norms
    print(mfx.describe(labels, model), "\n")

    def loss_of(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (inputs,)).flatten(0, 1), targets.flatten())

    muon = mfx.chain(mfx.momentum(0.95, nesterov=True), mfx.orthogonalize(), mfx.scale_by_shape("match_rms_adamw"))
    tx = mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition({"muon": muon, "adamw": mfx.scale_by_adam(0.9, 0.95)}, labels),
        mfx.add_decayed_weights(0.1, mask=mfx.routing.ndim(min=2)),
        mfx.scale_by_learning_rate(mfx.warmup_cosine_decay_schedule(0.01, max(1, steps // 20), total_steps=steps)),
    )
    state = tx.init(params)
    val_batch = windows(held_out, 64, context)
    for step in range(1, steps + 1):
        grads, loss = grad_and_value(loss_of)(params, *windows(train, batch, context))
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        if step % max(1, steps // 10) == 0:
            print(f"step {step:>4}   training {loss:.3f}   validation {loss_of(params, *val_batch):.3f} nats per byte")
    return loss_of(params, *val_batch).item()


if __name__ == "__main__":
    main()
