"""Which optimizers obey which laws of `muonfx.testing.check_optimizer`: the table of docs/optimizer-laws.md."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import muonfx as mfx
from benchmarks import report
from benchmarks.peers import versioned
from muonfx.testing import OPTIMIZER_LAWS, check_optimizer

HIDDEN = ("up.weight", "down.weight", "row.weight", "column.weight", "empty.weight", "usual.weight")
"""The hidden matrices of the models of `check_optimizer`. They are the parameters of optimizers for matrices alone."""


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """Return the hidden matrices of a model."""
    return [param for name, param in model.named_parameters() if name in HIDDEN]


def others(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not `hidden`."""
    return [param for name, param in model.named_parameters() if name not in HIDDEN]


def muonfx_muon(model: nn.Module) -> Optimizer:
    return mfx.Muon(model, lr=0.01, adamw_lr=0.02, weight_decay=0.1)


def muonfx_soap(model: nn.Module) -> Optimizer:
    soap = mfx.chain(mfx.contrib.scale_by_soap(), mfx.scale_by_learning_rate(0.01))
    labels = {name: "soap" if name in HIDDEN else "adamw" for name, _ in model.named_parameters()}
    return mfx.TransformOptimizer(
        model, mfx.partition({"soap": soap, "adamw": mfx.adamw(0.01)}, labels)
    )


def muonfx_adamw(model: nn.Module) -> Optimizer:
    return mfx.TransformOptimizer(model, mfx.adamw(0.01, weight_decay=0.1))


def torch_adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def torch_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def torch_nadam(model: nn.Module) -> Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.01)


def torch_adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def torch_muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon(hidden(model), lr=0.01)


def pytorch_optimizer_muon(model: nn.Module) -> Optimizer:
    package = importlib.import_module("pytorch_optimizer")
    groups = [
        {"params": hidden(model), "use_muon": True},
        {"params": others(model), "use_muon": False},
    ]
    return package.Muon(groups, lr=0.01, adamw_lr=0.01)


def pytorch_optimizer_soap(model: nn.Module) -> Optimizer:
    return importlib.import_module("pytorch_optimizer").SOAP(model.parameters(), lr=0.01)


def heavyball_muon(model: nn.Module) -> Optimizer:
    return importlib.import_module("heavyball").Muon(hidden(model), lr=0.01)


def reference_muon(model: nn.Module) -> Optimizer:
    module = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    muon = {
        "params": hidden(model),
        "lr": 0.01,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "use_muon": True,
    }
    adam = {
        "params": others(model),
        "lr": 0.01,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "weight_decay": 0.0,
    }
    return module.SingleDeviceMuonWithAuxAdam([muon, {**adam, "use_muon": False}])


@dataclass(frozen=True)
class Candidate:
    """An optimizer to check, with the package that it belongs to."""

    name: str
    package: str
    build: Callable[[nn.Module], Optimizer]


CANDIDATES = [
    Candidate("mfx.Muon", "muonfx", muonfx_muon),
    Candidate("mfx SOAP with AdamW", "muonfx", muonfx_soap),
    Candidate("mfx AdamW", "muonfx", muonfx_adamw),
    Candidate("torch AdamW", "torch", torch_adamw),
    Candidate("torch SGD", "torch", torch_sgd),
    Candidate("torch NAdam", "torch", torch_nadam),
    Candidate("torch Adafactor", "torch", torch_adafactor),
    Candidate("torch Muon", "torch", torch_muon),
    Candidate("pytorch_optimizer Muon", "pytorch_optimizer", pytorch_optimizer_muon),
    Candidate("pytorch_optimizer SOAP", "pytorch_optimizer", pytorch_optimizer_soap),
    Candidate("heavyball Muon", "heavyball", heavyball_muon),
    Candidate("Keller Jordan's Muon with Adam", "deepspeed", reference_muon),
]


def rows() -> list[dict[str, Any]]:
    """Check each candidate whose package is installed, and return a row of the result for each."""
    checked: list[dict[str, Any]] = []
    for candidate in CANDIDATES:
        if importlib.util.find_spec(candidate.package) is None:
            print(f"{candidate.name}: {candidate.package} is not installed")
            continue
        result = check_optimizer(candidate.build)
        checked.append(
            {
                "optimizer": candidate.name,
                "package": versioned(candidate.package),
                "function": candidate.build.__name__,
                "held": list(result.held),
                "failures": result.failures,
                "left_out": result.left_out,
            }
        )
    return checked


# ------------------------------------------------------------------------------------------------------------ the page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "optimizer-laws.md"


def laws() -> str:
    """Return the table of the laws, with the number of optimizers that obey each."""
    results = _saved_rows()
    lines: list[list[str]] = []
    for name, law in OPTIMIZER_LAWS.items():
        held = sum(name in row["held"] for row in results)
        checked = held + sum(name in row["failures"] for row in results)
        lines.append([f"`{name}`", law.sentence, f"{held} of {checked}"])
    return report.table(["law", "sentence", "obeyed by"], lines) + "\n"


def optimizers() -> str:
    """Return the table of the optimizers, with the number of laws that each one obeys."""
    lines: list[list[str]] = []
    for row in _saved_rows():
        checked = len(row["held"]) + len(row["failures"])
        lines.append([row["optimizer"], row["package"], f"{len(row['held'])} of {checked}"])
    return report.table(["optimizer", "package", "laws that hold"], lines) + "\n"


def failures() -> str:
    """Return what was found for each law that does not hold, by optimizer. Equal findings are one item."""
    parts: list[str] = []
    for row in _saved_rows():
        laws_by_finding: dict[str, list[str]] = {}
        for name, found in row["failures"].items():
            laws_by_finding.setdefault(_as_text(found), []).append(f"`{name}`")
        items = [f"- {', '.join(names)}: {found}" for found, names in laws_by_finding.items()]
        if items:
            parts.append("\n".join([f"**{row['optimizer']}** (`{row['function']}`)\n", *items]))
    return "\n\n".join(parts) + "\n"


def _as_text(found: str) -> str:
    """Return what was found as Markdown, shortened, with no mark that Markdown would read."""
    text = found if len(found) <= 240 else f"{found[:240]}..."
    return re.sub(r"([<>*_`|$])", r"\\\1", text)


def _saved_rows() -> list[dict[str, Any]]:
    result = report.load("optimizer_laws")
    return result["rows"] if result is not None else []


SECTIONS: dict[str, Callable[[], str]] = {
    "optimizers": optimizers,
    "laws": laws,
    "failures": failures,
}
