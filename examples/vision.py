"""A small convolutional network on handwritten digits: Muon with AdamW, compared with AdamW alone.

``python examples/vision.py`` trains with both and three seeds each, in less than a minute on two CPU cores. The 1,797
images of 8 x 8 pixels come with scikit-learn; nothing is downloaded. ``--plot PATH`` draws the result. ``--rates``
repeats the search for the learning rates below.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F

import muonfx as mfx

BATCH = 64
# The best rates of --rates, by the mean validation loss of seeds 100 to 102, which are used nowhere else.
RATES = {"Muon": 0.004, "AdamW": 0.064}
TRIED = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)


def make_model() -> nn.Module:
    """Return a network from images (batch, 1, 8, 8) to logits (batch, 10)."""
    model = nn.Sequential()
    model.stem = nn.Conv2d(1, 32, 3, padding=1)  # default_labels excludes "stem" and "head"
    model.act1 = nn.ReLU()
    model.body1 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
    model.act2 = nn.ReLU()
    model.body2 = nn.Conv2d(64, 64, 3, stride=2, padding=1)
    model.act3 = nn.ReLU()
    model.flatten = nn.Flatten()
    model.head = nn.Linear(256, 10)
    return model


def make_optimizer(name: str, model: nn.Module, rate: float, steps: int) -> mfx.Transform:
    """Return an optimizer. Muon treats a kernel (out, in, height, width) as a matrix with ``out`` rows."""
    schedule = mfx.warmup_cosine_decay_schedule(rate, warmup_steps=max(1, steps // 20), total_steps=steps)
    if name == "Muon":
        # "auto" would time this CPU; with fp32 the results are the same on every machine up to rounding.
        return mfx.muon_with_adamw(
            schedule, labels=mfx.default_labels(model), orthogonalize=mfx.orthogonalize(dtype=torch.float32)
        )
    return mfx.adamw(schedule, b2=0.95, weight_decay=0.1, mask=mfx.routing.ndim(min=2))


def split(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return 1,297 training and 500 validation images: (count, 1, 8, 8) float32 from 0 to 1, and (count,) int64."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = torch.tensor(digits, dtype=torch.int64)
    return (images[order[:-500]], labels[order[:-500]]), (images[order[-500:]], labels[order[-500:]])


def train(name: str, rate: float, seed: int, epochs: int) -> list[tuple[float, float]]:
    """Train with the weights and batches of a seed; return the validation loss and error rate after each epoch."""
    (images, labels), (val_images, val_labels) = split(seed)
    torch.manual_seed(seed)
    model = make_model()
    params = {name: param.detach() for name, param in model.named_parameters()}
    batches = len(images) // BATCH
    tx = make_optimizer(name, model, rate, epochs * batches)
    state = tx.init(params)

    def loss_of(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (images,)), labels)

    results = []
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: batches * BATCH].view(batches, BATCH):
            grads, _loss = grad_and_value(loss_of)(params, images[batch], labels[batch])
            updates, state = tx.update(grads, state, params)
            params = mfx.apply_updates(params, updates)
        logits = functional_call(model, params, (val_images,))
        wrong = (logits.argmax(dim=1) != val_labels).float().mean().item()
        results.append((F.cross_entropy(logits, val_labels).item(), wrong))
    return results


def main(seeds: int = 3, epochs: int = 10, plot: Path | None = None) -> dict[str, list[list[tuple[float, float]]]]:
    model = make_model()
    print(mfx.describe(model), "\n")
    runs: dict[str, list[list[tuple[float, float]]]] = {}
    for name, rate in RATES.items():
        begin = time.perf_counter()
        runs[name] = [train(name, rate, seed, epochs) for seed in range(seeds)]
        seconds = (time.perf_counter() - begin) / seeds
        losses, errors = zip(*(run[-1] for run in runs[name]), strict=True)
        print(
            f"{name:<6} rate {rate:<6g} validation loss {spread(losses, '{:.3f}')}, "
            f"wrong {spread(errors, '{:.1%}')} after {epochs} epochs; {seconds:.1f} s per run"
        )
    if plot is not None:
        draw(runs, plot)
        print(f"plot: {plot}")
    return runs


def spread(values: tuple[float, ...], form: str) -> str:
    """Format the mean and the range over the seeds."""
    return f"{form} ({form} to {form})".format(statistics.mean(values), min(values), max(values))


def draw(runs: dict[str, list[list[tuple[float, float]]]], path: Path) -> None:
    """Draw loss and error over the epochs: each seed in a pale line, their mean in a full one."""
    from matplotlib import pyplot as plt

    colors = {"Muon": mfx.plot.COLORS["blue"], "AdamW": mfx.plot.COLORS["orange"]}
    titles = ("validation loss (nats per image)", "misclassified images of 500 (%)")
    with mfx.plot.style():
        figure, panels = plt.subplots(1, 2)
        for which, (ax, title, unit) in enumerate(zip(panels, titles, (1, 100), strict=True)):
            for name, seeds in runs.items():
                curves = [[unit * point[which] for point in run] for run in seeds]
                epochs = range(1, len(curves[0]) + 1)
                for curve in curves:
                    ax.plot(epochs, curve, color=colors[name], alpha=0.25, linewidth=1)
                mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
                ax.plot(epochs, mean, color=colors[name], label=f"{name}, {mean[-1]:.2g} at the end")
            ax.set(xlabel="epoch", yscale="log", title=title)
            ax.legend()
        figure.savefig(path)
        plt.close(figure)


def try_rates(epochs: int) -> None:
    for name in RATES:
        for rate in TRIED:
            losses, errors = zip(*(train(name, rate, seed, epochs)[-1] for seed in (100, 101, 102)), strict=True)
            print(f"{name:<6} {rate:<7g} {spread(losses, '{:.3f}')}, wrong {spread(errors, '{:.1%}')}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the result: .svg or .png")
    parser.add_argument("--rates", action="store_true", help="compare learning rates instead")
    options = parser.parse_args()
    if options.rates:
        try_rates(options.epochs)
    else:
        main(options.seeds, options.epochs, options.plot)
