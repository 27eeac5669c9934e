"""Print the defaults that differ, as in docs/beside-others.md, read from the signatures of Optax, torch and muonfx."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax
import torch
from optax import contrib

import muonfx as mfx

Place = tuple[Callable[..., Any], str] | None

ROWS: list[tuple[str, Place, Place, Place]] = [
    (
        "AdamW, weight decay",
        (optax.adamw, "weight_decay"),
        (torch.optim.AdamW, "weight_decay"),
        (mfx.adamw, "weight_decay"),
    ),
    ("AdamW, Nesterov", (optax.adamw, "nesterov"), None, (mfx.adamw, "nesterov")),
    ("momentum, decay", None, (torch.optim.SGD, "momentum"), (mfx.momentum, "decay")),
    (
        "momentum, Nesterov",
        (optax.trace, "nesterov"),
        (torch.optim.SGD, "nesterov"),
        (mfx.momentum, "nesterov"),
    ),
    ("momentum, bias correction", (optax.ema, "debias"), None, (mfx.momentum, "debias")),
    ("Lion, weight decay", (optax.lion, "weight_decay"), None, (mfx.lion, "weight_decay")),
    (
        "RMS, decay",
        (optax.scale_by_rms, "decay"),
        (torch.optim.RMSprop, "alpha"),
        (mfx.scale_by_rms, "decay"),
    ),
    (
        "RMS, epsilon within the root",
        (optax.scale_by_rms, "eps_in_sqrt"),
        None,
        (mfx.scale_by_rms, "eps_in_sqrt"),
    ),
    ("Muon, learning rate", None, (torch.optim.Muon, "lr"), (mfx.muon, "learning_rate")),
    ("Muon, momentum", (contrib.muon, "beta"), (torch.optim.Muon, "momentum"), (mfx.muon, "decay")),
    (
        "Muon, Nesterov",
        (contrib.muon, "nesterov"),
        (torch.optim.Muon, "nesterov"),
        (mfx.muon, "nesterov"),
    ),
    (
        "Muon, coefficients",
        (contrib.muon, "ns_coeffs"),
        (torch.optim.Muon, "ns_coefficients"),
        (mfx.orthogonalize, "coefficients"),
    ),
    (
        "Muon, weight decay",
        (contrib.muon, "weight_decay"),
        (torch.optim.Muon, "weight_decay"),
        (mfx.muon, "weight_decay"),
    ),
    (
        "Muon for all, weight decay",
        (contrib.muon, "weight_decay"),
        None,
        (mfx.muon_with_adamw, "weight_decay"),
    ),
    (
        "its AdamW, weight decay",
        (contrib.muon, "adam_weight_decay"),
        None,
        (mfx.muon_with_adamw, "adamw_weight_decay"),
    ),
    ("its AdamW, second decay", (contrib.muon, "adam_b2"), None, (mfx.muon_with_adamw, "adam")),
    ("its AdamW, Nesterov", (contrib.muon, "nesterov"), None, (mfx.muon_with_adamw, "adam")),
    (
        "Prodigy, weight decay",
        (contrib.prodigy, "weight_decay"),
        None,
        (mfx.contrib.scale_by_prodigy, "weight_decay"),
    ),
]


def _default(place: tuple[Callable[..., Any], str]) -> str:
    function, argument = place
    return repr(inspect.signature(function).parameters[argument].default)


def _cell(place: Place) -> str:
    if place is None:
        return ""
    _, argument = place
    return f"`{argument}={_default(place)}`"


def table() -> str:
    """Return the table of the defaults that differ, as Markdown."""
    lines = ["| | Optax | torch | muonfx |", "| --- | --- | --- | --- |"]
    for what, *places in ROWS:
        defaults = {_default(place) for place in places if place is not None}
        if len(defaults) > 1:
            cells = " | ".join(map(_cell, places))
            lines.append(f"| {what} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
