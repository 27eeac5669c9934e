"""Keller Jordan's Muon, https://github.com/KellerJordan/Muon: the classes of ``muon.py``, with Adam beside or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muonfx.checkpoint.convert._sources import Entry, Given, Group, Keys, Optim, Options, Source, muon_chain
from muonfx.core import Transform
from muonfx.recipes import adamw
from muonfx.tree import PyTree

__all__ = ["from_keller", "keller_recipe", "to_keller"]


def _kind(group: Group, entry: Entry) -> str:
    return "muon" if group.get("use_muon", "momentum" in group) else "adamw"


def keller_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """The chain of a group, for a parameter of some shape."""
    if kind == "adamw":
        b1, b2 = map(float, group["betas"])
        return adamw(
            float(group["lr"]), b1=b1, b2=b2, eps=float(group["eps"]), weight_decay=float(group["weight_decay"])
        )
    if len(shape) > 3:
        raise ValueError(
            f"shape {tuple(shape)}: its updates are scaled by the sides of the kernel, muonfx's by those of the "
            "flattened matrix, so no chain goes on in the same way; the state itself can be converted"
        )
    stacked: dict[str, Any] = {"dims": ((-2,), (-1,))} if len(shape) == 3 else {}
    steps: dict[str, Any] = {"steps": group["ns_steps"]} if group.get("ns_steps", 5) != 5 else {}  # older releases
    return muon_chain(
        group["momentum"],
        nesterov=group.get("nesterov", True),
        heavy_ball=False,
        rule="original",
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        options=options,
        coefficients="keller",
        **steps,
        **stacked,
    )


SOURCE = Source(
    "Keller Jordan's Muon",
    _kind,
    {"muon": Keys("momentum_buffer"), "adamw": Keys("exp_avg", "exp_avg_sq", "step")},
    heavy_ball=False,
    recipe=keller_chain,
)


def from_keller(
    optimizer: Given, tx: Transform, params: PyTree, *, names: Sequence[str] | None = None, step: int | None = None
) -> PyTree:
    """Make a transform's state from that of ``SingleDeviceMuonWithAuxAdam`` or another class of Keller Jordan's Muon.

    Of ``MuonWithAuxAdam`` every rank holds the momenta of its own matrices only: gather them first.

    Args:
        optimizer: the optimizer or its ``state_dict()``, or a list of these.
        tx: the transform; `keller_recipe` makes the one that goes on as the optimizer would.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        step: as in `from_torch_optimizer`.

    Raises:
        ValueError: names are not known, or source and transform do not fit; the message lists every difference.

    Example:
        >>> group = {"params": [0], "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
        >>> saved = {"state": {0: {"momentum_buffer": torch.ones(3, 2)}}, "param_groups": [group]}
        >>> params = {"w": torch.zeros(3, 2)}
        >>> tx = keller_recipe(saved, params, names=["w"])
        >>> from_keller(saved, tx, params, names=["w"])["momentum"].trace["w"].sum()
        tensor(6.)
    """
    return SOURCE.read(optimizer, tx, params, names, step)


def to_keller(
    state: PyTree,
    optimizer: Optim,
    params: PyTree,
    *,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Make a state dict for a class of Keller Jordan's Muon from a transform's state.

    Args:
        state: as in `to_torch_optimizer`.
        optimizer: the optimizer, or its ``state_dict()``.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.

    Raises:
        ValueError: a parameter of the optimizer has no such state.

    Example:
        >>> import muonfx as mfx
        >>> group = {"params": [0], "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
        >>> params = {"w": torch.zeros(3, 2)}
        >>> saved = {"state": {}, "param_groups": [group]}
        >>> list(to_keller(mfx.momentum().init(params), saved, params, names=["w"])["state"][0])
        ['momentum_buffer']
    """
    return SOURCE.write(state, optimizer, params, names)


def keller_recipe(
    optimizer: Given, params: PyTree, *, names: Sequence[str] | None = None, dtype: torch.dtype | str = "auto"
) -> Transform:
    """Make the chain that a class of Keller Jordan's Muon computes, from what stands in its groups.

    Args:
        optimizer: as in `from_keller`.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        dtype: of the iteration; the original has bf16 on every device.

    Raises:
        ValueError: a matrix parameter has four dims or more: its convolutions are scaled in another way.

    Example:
        >>> group = {
        ...     "params": [0],
        ...     "use_muon": False,
        ...     "lr": 3e-4,
        ...     "betas": (0.9, 0.95),
        ...     "eps": 1e-10,
        ...     "weight_decay": 0,
        ... }
        >>> keller_recipe({"state": {}, "param_groups": [group]}, {"b": torch.zeros(3)}, names=["b"])
        chain(scale_by_adam(b2=0.95, eps=1e-10), add_decayed_weights(), scale_by_learning_rate(learning_rate=0.0003))
    """
    return SOURCE.transform(optimizer, params, names, dtype=dtype)
