"""The plain-Muon line of modded-nanogpt's optimization track, with ``mfx.muon`` in place of its own Muon.

The track fixes data, batch size and architecture, and counts the steps to a validation loss of 3.28:
https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_3_optimization

Its baseline, result 36, is Muon with a tuned AdamW for all other parameters, and takes 3,250 steps. This file has the
same data format, batches, architecture, initialization, hyperparameters and schedule, and its own code. It was tested
with a tiny model on a CPU, and has not run on a GPU.

With the track's data (``python data/cached_fineweb10B.py 20`` in a checkout of modded-nanogpt) on 1, 2, 4 or 8 GPUs:

    torchrun --standalone --nproc_per_node=8 benchmarks/track/modded_nanogpt.py --data data/fineweb10B --seed 0

A result counts for the track if ``(3.28 - mean) * sqrt(runs)`` of the final losses is at least 0.004. The track accepts
no imports of optimizer libraries, so this file reproduces its line, and is no submission.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import muonfx as mfx

TARGET = 3.28

HEADER = 256
"""Number of int32 values before the tokens of a file: a magic number, the version, the number of tokens, zeros."""
MAGIC, VERSION = 20240520, 1

MUON_RATE, MUON_DECAY = 0.025, 0.05
ADAM_RATES = {"embedding": 0.7, "head": 0.004, "vector": 0.015}
ADAM_DECAY = 0.001
COOLDOWN = 0.7
"""The part of the run in which all rates fall linearly to zero."""
NEWTON_SCHULZ = [(2.0, -1.5, 0.5)] * 12
"""Coefficients of the track's Newton-Schulz iteration: twelve equal steps, in bf16."""


@dataclass(frozen=True)
class Config:
    """The run. The defaults are the track; smaller values are for tests."""

    width: int = 768
    depth: int = 12
    head: int = 128
    """Width of an attention head."""
    vocabulary: int = 50304
    context: int = 1024
    batch: int = 512
    """Sequences in a step, over all ranks."""
    microbatch: int = 64
    """Sequences in a forward pass on one rank."""
    validation_tokens: int = 20 * 524288
    steps: int = 3250


# --------------------------------------------------------------------------------------------------------------- data


def read_tokens(path: Path) -> Tensor:
    """Return the tokens of a ``.bin`` file, int32.

    Raises:
        ValueError: the file has another header, or fewer tokens than its header says.
    """
    header = np.fromfile(path, dtype=np.int32, count=HEADER)
    if header.size < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(
            f"{path}: found the header {header[:2].tolist()}, expected {[MAGIC, VERSION]}: other data"
        )
    tokens = np.fromfile(path, dtype=np.uint16, offset=4 * HEADER)
    if tokens.size != header[2]:
        raise ValueError(
            f"{path}: found {tokens.size} tokens, expected {header[2]}: download the file again"
        )
    return torch.from_numpy(tokens.astype(np.int32))


def batches(
    paths: Sequence[Path], tokens_per_batch: int, context: int, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs int32 and targets int64 of one rank, shape (sequences, context), in the order of the files.

    A rank reads its contiguous part of each batch. The rest of a file that has no whole batch is skipped.
    """
    tokens_per_rank = tokens_per_batch // ranks
    for path in paths:
        tokens = read_tokens(path)
        for start in range(0, len(tokens) - tokens_per_batch - 1, tokens_per_batch):
            first = start + rank * tokens_per_rank
            window = tokens[first : first + tokens_per_rank + 1]
            yield window[:-1].view(-1, context), window[1:].long().view(-1, context)


# -------------------------------------------------------------------------------------------------------------- model


class Gains(nn.Module):
    """RMS normalization with a gain for each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        return F.rms_norm(x, (x.shape[-1],), self.gains.to(x.dtype))


class Linear(nn.Linear):
    """A linear layer with a bias, whose parameters are fp32 and whose product has the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class Attention(nn.Module):
    """Causal attention with normalized queries and keys, and rotary positions for half of the features."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value = (
            Linear(width, width),
            Linear(width, width),
            Linear(width, width),
        )
        self.out = Linear(width, width)
        rotated = (1 / 1024) ** torch.linspace(0, 1, head // 4)
        self.register_buffer(
            "frequencies", torch.cat([rotated, torch.zeros(head // 4)]), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        query, key, value = [
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        query = self.rotate(F.rms_norm(query, (self.head,)))
        key = self.rotate(F.rms_norm(key, (self.head,)))
        mixed = F.scaled_dot_product_attention(query, key, value, scale=0.12, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate each pair of features (one of the first half, one of the second) by the angle of its position."""
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(
            x.dtype
        )


class MLP(nn.Module):
    """A linear layer to four times the width, squared ReLU, and a linear layer back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention, then an MLP; each reads the normalized residual stream and adds to it."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Gains(width), Gains(width)
        self.attention = Attention(width, head)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The track's GPT: its embedding is bf16, and so are all activations."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width, dtype=torch.bfloat16)
        self.embed_norm, self.norm = Gains(config.width), Gains(config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.head) for _ in range(config.depth))
        self.head = Linear(config.width, config.vocabulary)

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the weights: zero for biases, the head and the outputs of the blocks."""
        for name, param in self.named_parameters():
            if name.endswith("gains"):
                param.fill_(1.0)
            elif name.endswith(("bias", "out.weight", "down.weight", "head.weight")):
                param.zero_()
            elif name == "embed.weight":
                param.normal_()
            else:
                param.normal_(std=(0.33 / param.shape[-1]) ** 0.5)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all tokens; ``inputs`` and ``targets`` have the shape (batch, time)."""
        x = self.embed_norm(self.embed(inputs))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        logits = 15 * logits * (logits.square() + 15**2).rsqrt()  # between -15 and 15
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# ----------------------------------------------------------------------------------------------------------- training


def make_optimizer(model: nn.Module, steps: int) -> mfx.TransformOptimizer:
    """Return Muon for the matrices of the blocks and AdamW for embedding, head, gains and biases."""

    def schedule(rate: float) -> mfx.Schedule:
        return mfx.warmup_stable_decay_schedule(rate, 0, round(COOLDOWN * steps), steps)

    tx = mfx.muon_with_adamw(
        schedule(MUON_RATE),
        {role: schedule(rate) for role, rate in ADAM_RATES.items()},
        orthogonalize=mfx.orthogonalize(coefficients=NEWTON_SCHULZ, dtype=torch.bfloat16),
        lr_scaling="original",
        weight_decay=MUON_DECAY,
        adam=mfx.scale_by_adam(0.8, 0.95, eps=1e-10),
        adamw_weight_decay=ADAM_DECAY,
        labels=mfx.default_labels(model, roles=True),
    )
    layout = None
    if ranks() > 1:
        # Divides the orthogonalization.
        layout = mfx.sharding.replicated(dict(model.named_parameters()))
    with warnings.catch_warnings():
        # A step changes the bf16 embedding by less than its rounding, on the track too.
        warnings.filterwarnings("ignore", "weight decay has no effect on 1 of")
        return mfx.TransformOptimizer(model, tx, layout=layout)


def ranks() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all ranks."""
    if ranks() > 1:
        dist.all_reduce(tensor)


def validates(step: int, steps: int) -> bool:
    """Return True if the validation loss is measured before this step: every 125 steps, every 25 in the last tenth."""
    interval = 25 if step >= 0.9 * steps else 125
    return step == steps or step % interval == 0


@torch.no_grad()
def validation_loss(model: nn.Module, data: tuple[Tensor, Tensor], config: Config) -> float:
    """Return the mean loss of the validation tokens of all ranks."""
    total = torch.zeros((), device=data[0].device)
    for inputs, targets in zip(
        data[0].split(config.microbatch), data[1].split(config.microbatch), strict=True
    ):
        total += model(inputs, targets)
    sum_over_ranks(total)
    return total.item() / config.validation_tokens


def train(config: Config, data: Path, seed: int, device: torch.device) -> dict[int, float]:
    """Train one model, print the track's lines, and return the validation loss by step.

    Args:
        config: the run.
        data: the folder of ``fineweb_train_*.bin`` and ``fineweb_val_*.bin``.
        seed: the seed of the initial weights.
        device: the device of this rank.

    Raises:
        ValueError: a file is missing or damaged, there are too few tokens, or the ranks do not divide the batch.
    """
    if config.batch % ranks():
        raise ValueError(
            f"batch: found {config.batch} sequences for {ranks()} ranks, expected a multiple"
        )
    training = batches(
        files_of(data, "train"), config.batch * config.context, config.context, rank(), ranks()
    )
    validation = batches(
        files_of(data, "val"), config.validation_tokens, config.context, rank(), ranks()
    )
    validation_data = on_device(next_batch(validation, data), device)

    torch.manual_seed(seed)  # the same weights on all ranks
    model = GPT(config)
    model.reset()
    model.to(device)
    if device.type == "cuda":
        model.compile(dynamic=False)
    optimizer = make_optimizer(model, config.steps)

    losses: dict[int, float] = {}
    began = time.perf_counter()
    for step in range(config.steps + 1):
        if validates(step, config.steps):
            losses[step] = validation_loss(model, validation_data, config)
            if rank() == 0:
                seconds = time.perf_counter() - began
                print(
                    f"step:{step}/{config.steps} val_loss:{losses[step]:.5f} seconds:{seconds:.1f}",
                    flush=True,
                )
        if step == config.steps:
            break
        inputs, targets = on_device(next_batch(training, data), device)
        for micro in zip(
            inputs.split(config.microbatch), targets.split(config.microbatch), strict=True
        ):
            model(*micro).backward()
        for param in model.parameters():
            assert param.grad is not None
            sum_over_ranks(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def files_of(data: Path, split: str) -> list[Path]:
    """Return the files ``fineweb_<split>_*.bin`` of a folder in order."""
    paths = sorted(data.glob(f"fineweb_{split}_*.bin"))
    if not paths:
        raise ValueError(
            f"--data: found no fineweb_{split}_*.bin in {data}: give the folder of the track's files"
        )
    return paths


def next_batch(loader: Iterator[tuple[Tensor, Tensor]], data: Path) -> tuple[Tensor, Tensor]:
    """Return the next batch."""
    batch = next(loader, None)
    if batch is None:
        raise ValueError(
            f"--data: {data} has too few tokens: download more of its files, or give fewer --steps"
        )
    return batch


def on_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on a device."""
    return batch[0].to(device), batch[1].to(device)


def main() -> None:
    """Train with the track's configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder of fineweb_train_*.bin and fineweb_val_*.bin",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Config.steps)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    losses = train(Config(steps=options.steps), options.data, options.seed, device)
    if rank() == 0:
        print(f"{losses[options.steps]:.5f} after {options.steps} steps; the target is {TARGET}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
