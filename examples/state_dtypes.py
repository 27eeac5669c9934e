"""The validation loss of a small GPT for each dtype of the optimizer state, from the same weights and batches.

``python examples/state_dtypes.py`` trains the model of ``train_gpt.py --quick`` for more steps, or with ``--full`` the
default model. It writes results/state_dtypes.json (or state_dtypes_full.json) and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import options
import torch
import train_gpt
from gpt import GPT
from runs import write_json
from text import read_corpus

import muonfx as mfx

RESULTS = Path(__file__).parent / "results"

# More than train_gpt.py offers: one codebook for all state, and second moments rounded to the nearest level.
DYNAMIC = mfx.int8(code="dynamic")
FURTHER = {
    "int8, all linear": (mfx.int8(), mfx.int8(), mfx.int8(stochastic=True)),
    "int8, all dynamic": (DYNAMIC, DYNAMIC, DYNAMIC.replace(stochastic=True)),
    "int8, nearest": (mfx.int8(), DYNAMIC, mfx.int8()),
}


def bytes_of_state(config: options.Config) -> dict[str, float]:
    """Return the bytes of optimizer state per parameter: over all parameters, and over matrices."""
    model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
    params = {name: param.detach().to("meta") for name, param in model.named_parameters()}
    tx = train_gpt.make_optimizer(config, mfx.default_labels(model, muon="hidden", other="rest"))
    state = tx.init(params)
    named = list(zip(mfx.tree.names(state), mfx.tree.leaves(state), strict=True))

    def ratio(names: list[str]) -> float:
        held = sum(leaf.nbytes for path, leaf in named if path.endswith(tuple(f".{name}" for name in names)))
        return held / sum(params[name].numel() for name in names)

    return {"all": ratio(list(params)), "large leaves": ratio([n for n, p in params.items() if p.numel() >= 4096])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"])
    parser.add_argument("--dtypes", nargs="+", default=[*options.STATE_DTYPES, *FURTHER])
    parser.add_argument("--out", type=Path, default=Path("runs") / "state-dtypes")
    given = parser.parse_args()
    options.STATE_DTYPES.update(FURTHER)
    result = RESULTS / ("state_dtypes_full.json" if given.full else "state_dtypes.json")
    size = {} if given.full else options.QUICK
    changes = {**size, "steps": given.steps, "validate_every": given.steps, "validation_batches": 16, "threads": 1}
    base = dataclasses.replace(options.DEFAULT, **changes)
    found: dict[str, Any] = {"versions": {"torch": torch.__version__, "muonfx": mfx.__version__}}
    for optimizer in given.optimizers:
        for dtype in given.dtypes:
            config = dataclasses.replace(options.tuned(base, optimizer), state_dtype=dtype)
            losses = [trained(dataclasses.replace(config, seed=seed), given.out) for seed in range(given.seeds)]
            found[f"{optimizer}, {dtype}"] = {
                "bytes_per_parameter": bytes_of_state(config),
                "final_validation_losses": losses,
                "config": dataclasses.asdict(config),
            }
            write_json(result, found)
    print(table(found))


def trained(config: options.Config, out: Path) -> float:
    """Train and return the final validation loss."""
    out.mkdir(parents=True, exist_ok=True)
    return train_gpt.train(config, read_corpus(), out)["final_validation_loss"]


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table of the losses and, for each seed, the differences from fp32."""
    lines = [
        "| optimizer, state | bytes per parameter | validation loss | difference from fp32, each seed |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, row in found.items():
        if name == "versions":
            continue
        losses = row["final_validation_losses"]
        exact = found[f"{name.split(', ')[0]}, fp32"]["final_validation_losses"]
        differences = ", ".join(f"{loss - other:+.4f}" for loss, other in zip(losses, exact, strict=True))
        lines.append(
            f"| {name} | {row['bytes_per_parameter']['all']:.2f} | {statistics.mean(losses):.4f} | {differences} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
