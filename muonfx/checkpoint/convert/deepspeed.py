"""Read DeepSpeed's ``MuonWithAuxAdam`` from a universal checkpoint, the form in which ZeRO's shards are merged.

``ds_to_universal.py`` writes a folder ``zero`` with a folder for each parameter, which contains a file for each of its
states. Converters before DeepSpeed's pull request 8609 support the states of Adam only and fail on Muon's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.convert._files import read_plain
from muonfx.checkpoint.convert._leaves import Leaf, filled, flat
from muonfx.checkpoint.convert._sources import Entry, Group, Options, composed
from muonfx.checkpoint.convert.formats import keller_chain
from muonfx.core import Transform
from muonfx.tree import PyTree

__all__ = ["read", "read_folder", "recipe"]

Entries = Mapping[str, Entry]


def read_folder(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the optimizer states of a universal checkpoint by parameter name, without the weights in "fp32"."""
    root = Path(path)
    root = root / "zero" if (root / "zero").is_dir() else root
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.name == "zero" else []
    if not folders:
        raise FileNotFoundError(
            f"{path}: expected a universal checkpoint, a folder with a folder 'zero' of one folder for each parameter; "
            "make one with DeepSpeed's ds_to_universal.py"
        )
    found: dict[str, dict[str, object]] = {}
    for folder in folders:
        files = sorted(file for file in folder.glob("*.pt") if file.stem != "fp32")
        found[folder.name] = {file.stem: _read(file) for file in files}
    return found


def _read(file: Path) -> object:
    value = read_plain(file)
    return value["param"] if isinstance(value, Mapping) and "param" in value else value


def _entries(source: str | Path | Entries) -> Entries:
    return read_folder(source) if isinstance(source, str | Path) else source


def _kind(entry: Entry) -> str:
    return "muon" if "momentum_buffer" in entry else "adamw"


def read(source: str | Path | Entries, tx: Transform, params: PyTree, step: int | None) -> PyTree:
    """Make the state of a transform from the state of DeepSpeed's Muon."""
    shapes = {name: param.shape for name, param in flat(params).items()}
    leaves: dict[str, Leaf] = {}
    for name, entry in _entries(source).items():
        first = entry.get("momentum_buffer", entry.get("exp_avg"))
        second, counted = entry.get("exp_avg_sq"), entry.get("step")
        shaped = [_shaped(value, shapes.get(name)) for value in (first, second)]
        leaves[name] = Leaf(_kind(entry), shaped[0], shaped[1], None if counted is None else int(counted))
    return filled(tx, params, leaves, heavy_ball=False, step=step)


def _shaped(value: Tensor | None, shape: torch.Size | None) -> Tensor | None:
    if value is None or shape is None or value.ndim != 1 or value.numel() != shape.numel():
        return value
    return value.reshape(shape)


def recipe(source: str | Path | Entries, params: PyTree, config: Group, options: Options) -> Transform:
    """Return the chain of DeepSpeed's Muon: Muon for parameters with a saved momentum, Adam for the rest."""
    # Missing entries have DeepSpeed's defaults. Its iteration is Keller Jordan's polynomial, in its Gram form and in
    # fp16 if the device supports it.
    given = dict(config)
    both = {"weight_decay": given.get("weight_decay", 0.0)}
    groups: dict[str, Group] = {
        "muon": {
            **both,
            "lr": given.get("muon_lr", given.get("lr", 0.02)),
            "momentum": given.get("momentum", 0.95),
        },
        "adamw": {
            **both,
            "lr": given.get("adam_lr", given.get("lr", 3e-4)),
            "betas": given.get("betas", (0.9, 0.95)),
            "eps": given.get("eps", 1e-10),
        },
    }
    shapes = {name: param.shape for name, param in flat(params).items()}
    found: dict[str, tuple[str, Transform]] = {}
    for name, entry in _entries(source).items():
        if name not in shapes:
            raise ValueError(f"no parameter is called {name!r}")
        kind = _kind(entry)
        found[name] = kind, keller_chain(groups[kind], kind, shapes[name], options)
    return composed(found)
