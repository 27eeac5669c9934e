"""DeepSpeed's ``MuonWithAuxAdam``, from a universal checkpoint: the form into which ZeRO's shards are put together.

``ds_to_universal.py`` writes a folder ``zero`` with a folder for each parameter, and in it a file for each of its
states. Converters before DeepSpeed's pull request 8609 know Adam's states only, and stop at Muon's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.convert._files import read_plain
from muonfx.checkpoint.convert._leaves import Leaf, filled, flat
from muonfx.checkpoint.convert._sources import Entry, Group, composed
from muonfx.checkpoint.convert.keller import keller_chain
from muonfx.core import Transform
from muonfx.tree import PyTree

__all__ = ["deepspeed_recipe", "from_deepspeed", "read_deepspeed"]

Entries = Mapping[str, Entry]


def read_deepspeed(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read a universal checkpoint's optimizer states; nothing is unpickled but tensors and plain values.

    Args:
        path: the checkpoint's folder, or the folder ``zero`` in it.

    Returns:
        For each parameter its states by name: "momentum_buffer", or "exp_avg", "exp_avg_sq" and "step"; the weights,
        "fp32", are left out.

    Raises:
        FileNotFoundError: there is no folder ``zero``.
        ValueError: a file holds something else than a tensor and plain values; the message names it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "zero" / "up.weight"
        >>> folder.mkdir(parents=True)
        >>> torch.save({"param": torch.ones(2, 3), "cat_dim": 0}, folder / "momentum_buffer.pt")
        >>> read_deepspeed(folder.parent.parent)
        {'up.weight': {'momentum_buffer': tensor([[1., 1., 1.], [1., 1., 1.]])}}
    """
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
    return read_deepspeed(source) if isinstance(source, str | Path) else source


def _kind(entry: Entry) -> str:
    return "muon" if "momentum_buffer" in entry else "adamw"


def from_deepspeed(source: str | Path | Entries, tx: Transform, params: PyTree, *, step: int | None = None) -> PyTree:
    """Make a transform's state from that of DeepSpeed's Muon.

    Args:
        source: a universal checkpoint's folder, or what `read_deepspeed` makes of it.
        tx: the transform; `deepspeed_recipe` makes the one that goes on as the optimizer would.
        params: the parameters, by the names that DeepSpeed has for them.
        step: how many steps were taken, where the transform counts and the source does not.

    Raises:
        ValueError: source and transform do not fit; the message lists every difference.

    Example:
        >>> import muonfx as mfx
        >>> source = {"up.weight": {"momentum_buffer": torch.ones(6)}}  # ZeRO flattens
        >>> from_deepspeed(source, mfx.momentum(), {"up.weight": torch.zeros(2, 3)}).trace["up.weight"].shape
        torch.Size([2, 3])
    """
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


def deepspeed_recipe(
    source: str | Path | Entries,
    params: PyTree,
    optimizer: Group,
    *,
    dtype: torch.dtype | str = "auto",
) -> Transform:
    """Make the chain that DeepSpeed's Muon computes, from what stands in the run's config.

    What has a momentum in the checkpoint goes to Muon, the rest to Adam. DeepSpeed's iteration is Keller Jordan's
    polynomial, in its Gram form and in fp16 where the device allows it.

    Args:
        source: as in `from_deepspeed`.
        params: as in `from_deepspeed`.
        optimizer: ``config["optimizer"]["params"]``: "lr", or "muon_lr" and "adam_lr"; "momentum", "betas", "eps" and
            "weight_decay". What is missing has DeepSpeed's default.
        dtype: of the iteration.

    Raises:
        ValueError: the checkpoint has a parameter of another name.

    Example:
        >>> source = {"up.weight": {"momentum_buffer": torch.ones(6)}}
        >>> deepspeed_recipe(source, {"up.weight": torch.zeros(2, 3)}, {"muon_lr": 0.02})
        ... # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(), orthogonalize(coefficients='keller'), scale_by_shape(rule='original'),
              add_decayed_weights(), scale_by_learning_rate(learning_rate=0.02))
    """
    given = dict(optimizer)
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
        found[name] = kind, keller_chain(groups[kind], kind, shapes[name], {"dtype": dtype})
    return composed(found)
