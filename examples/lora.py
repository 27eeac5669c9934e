"""LoRA: a small GPT, pretrained on Python's source, is fine-tuned on Python's manual by low-rank factors alone.

``python examples/lora.py`` trains the GPT of gpt.py, freezes it, and adds a pair of trainable factors A and B to each
matrix of its blocks. It tunes them with AdamW, with Muon, and with Muon for B and AdamW for A, in about a minute on two
CPU cores. Both texts come with Python. ``--plot PATH`` draws the result. ``--rates`` repeats the search for the
learning rates below.

`mfx.default_labels` sends the factors to AdamW. Muon gives the update of a weight matrix equal singular values, but
the weight here is the product B A, whose update is dB A + B dA. The factors can still be orthogonalized separately,
both or only B (`mfx.contrib.lora_labels`); `make_optimizer` has the three choices.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from gpt import GPT
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F

import muonfx as mfx

BATCH, CONTEXT, RANK = 16, 64, 8
# The best rates of --rates, by the validation loss of seed 100, which is used nowhere else.
RATES = {"AdamW": 0.02, "Muon": 0.02, "Muon on B": 0.01}
TRIED = (0.0025, 0.005, 0.01, 0.02, 0.04)
Params = dict[str, Tensor]


class LoRA(nn.Module):
    """A frozen linear layer plus a trained low-rank correction: x to (W + scale B A) x. B is initialized to zero."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.lora_A = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return self.linear(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)

    def merged(self) -> nn.Linear:
        """Return an equivalent linear layer without factors."""
        self.linear.weight.data += self.scale * self.lora_B.detach() @ self.lora_A.detach()
        return self.linear


def add_lora(model: GPT, rank: int) -> None:
    """Freeze the model and add factors to all linear layers of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, layer in list(part.named_children()):
                setattr(part, name, LoRA(layer, rank))


def make_optimizer(name: str, rate: float, steps: int) -> mfx.Transform:
    """Return one optimizer for all factors; the rest of the model is frozen, so no labels are needed."""
    schedule = mfx.warmup_cosine_decay_schedule(rate, warmup_steps=max(1, steps // 20), total_steps=steps)
    # "auto" would time this CPU; with fp32 the results are the same on every machine up to rounding.
    # "auto" would time this CPU; with fp32 the results are the same on every machine up to rounding.
    fp32 = mfx.orthogonalize(dtype=torch.float32)
    if name == "Muon":
        return mfx.muon(schedule, orthogonalize=fp32)
    if name == "Muon on B":
        return mfx.muon_with_adamw(
            schedule,
            orthogonalize=fp32,
            weight_decay=0.0,
            adamw_weight_decay=0.0,
            labels=mfx.contrib.lora_labels,
        )
    return mfx.adamw(schedule, b2=0.95, weight_decay=0.0)


def windows(text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw random windows of the text: inputs, and targets one byte later, each (count, CONTEXT) int64."""
    drawn = text[torch.randint(len(text) - CONTEXT, (count, 1)) + torch.arange(CONTEXT + 1)].long()
    return drawn[:, :-1], drawn[:, 1:]


def train(model: GPT, tx: mfx.Transform, text: Tensor, val_batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """Train the parameters that require a gradient; return the validation loss at 0, 10, ..., 100 % of the steps."""
    params = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}

    def loss_of(params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        # functional_call uses the model's own tensors for the frozen weights, which are not in params.
        return F.cross_entropy(functional_call(model, params, (inputs,)).flatten(0, 1), targets.flatten())

    state, losses = tx.init(params), [loss_of(params, *val_batch).item()]
    for step in range(1, steps + 1):
        grads, _loss = grad_and_value(loss_of)(params, *windows(text, BATCH))
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        if step % max(1, steps // 10) == 0:
            losses.append(loss_of(params, *val_batch).item())
    model.load_state_dict(params, strict=False)
    return losses


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return three texts as bytes: Python's source, nine tenths of the manual's topics, and the last tenth."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = b"".join(file.read_bytes() for file in files)
    manual = "\n".join(topics[name] for name in sorted(topics)).encode()
    code, prose = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (source, manual))
    cut = len(prose) * 9 // 10
    return code, prose[:cut], prose[cut:]


def pretrained(code: Tensor, steps: int, width: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train a GPT on the source; return its weights and the arguments of its constructor."""
    shape = {"width": width, "depth": 2, "context": CONTEXT, "seed": 0}
    model = GPT(**shape)
    schedule = mfx.warmup_cosine_decay_schedule(0.01, warmup_steps=max(1, steps // 20), total_steps=steps)
    tx = mfx.muon_with_adamw(
        schedule, labels=mfx.default_labels(model), orthogonalize=mfx.orthogonalize(dtype=torch.float32)
    )
    torch.manual_seed(0)
    train(model, tx, code, windows(code, BATCH), steps)
    return model.state_dict(), shape


def tune(
    base: tuple[dict[str, Tensor], dict[str, int]],
    prose: Tensor,
    held_out: Tensor,
    name: str,
    rate: float,
    seed: int,
    steps: int,
) -> tuple[list[float], GPT]:
    """Tune factors on top of the pretrained weights; return the validation losses and the model."""
    weights, shape = base
    model = GPT(**shape)
    model.load_state_dict(weights)
    torch.manual_seed(0)
    val_batch = windows(held_out, 8 * BATCH)
    torch.manual_seed(seed)  # seeds both the factors and the batches
    add_lora(model, RANK)
    return train(model, make_optimizer(name, rate, steps), prose, val_batch, steps), model


def main(
    seeds: int = 3, pretraining: int = 400, steps: int = 200, width: int = 64, plot: Path | None = None
) -> dict[str, list[list[float]]]:
    code, prose, held_out = texts()
    base = pretrained(code, pretraining, width)
    runs: dict[str, list[list[float]]] = {}
    for name, rate in RATES.items():
        runs[name] = []
        for seed in range(seeds):
            losses, model = tune(base, prose, held_out, name, rate, seed, steps)
            runs[name].append(losses)
        ends = [losses[-1] for losses in runs[name]]
        print(
            f"{name:<9} rate {rate:<6g} validation loss {statistics.mean(ends):.3f} "
            f"({min(ends):.3f} to {max(ends):.3f}) nats per byte, {runs[name][0][0]:.3f} before",
            flush=True,
        )
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    print(f"trained: {trained:,} of {sum(param.numel() for param in model.parameters()):,} parameters")
    if plot is not None:
        draw(runs, steps, plot)
        print(f"plot: {plot}")
    return runs


def draw(runs: dict[str, list[list[float]]], steps: int, path: Path) -> None:
    """Draw the validation loss over the steps: each seed in a pale line, their mean in a full one."""
    from matplotlib import pyplot as plt

    colors = (mfx.plot.COLORS["orange"], mfx.plot.COLORS["blue"], mfx.plot.COLORS["green"])
    with mfx.plot.style():
        figure, ax = plt.subplots()
        for (name, seeds), color in zip(runs.items(), colors, strict=True):
            at = [steps * tenth / 10 for tenth in range(len(seeds[0]))]
            for losses in seeds:
                ax.plot(at, losses, color=color, alpha=0.25, linewidth=1)
            mean = [statistics.mean(losses) for losses in zip(*seeds, strict=True)]
            ax.plot(at, mean, color=color, marker="o", label=f"{name}, {mean[-1]:.3f}")
        ax.set(xlabel="step", ylabel="nats per byte", title="validation loss on the manual")
        ax.legend()
        figure.savefig(path)
        plt.close(figure)


def try_rates(pretraining: int = 400, steps: int = 200, width: int = 64) -> None:
    code, prose, held_out = texts()
    base = pretrained(code, pretraining, width)
    for name in RATES:
        for rate in TRIED:
            losses, _ = tune(base, prose, held_out, name, rate, 100, steps)
            print(f"{name:<9} {rate:<7g} {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the result: .svg or .png")
    parser.add_argument("--rates", action="store_true", help="compare learning rates instead")
    options = parser.parse_args()
    if options.rates:
        try_rates(steps=options.steps)
    else:
        main(options.seeds, steps=options.steps, plot=options.plot)
