"""Moonlight's Muon, https://github.com/MoonshotAI/Moonlight: the class in ``examples/toy_train.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muonfx.checkpoint.convert._sources import Entry, Given, Group, Keys, Optim, Options, Source, muon_chain
from muonfx.core import Transform
from muonfx.recipes import adamw
from muonfx.tree import PyTree

__all__ = ["from_moonlight", "moonlight_recipe", "to_moonlight"]


def _kind(group: Group, entry: Entry) -> str:
    if "use_muon" not in entry:
        raise ValueError("expected Moonlight's Muon, which keeps 'use_muon' for each parameter; found none")
    return "muon" if entry["use_muon"] else "adamw"


def _recipe(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if kind == "adamw":
        b1, b2 = map(float, group["adamw_betas"])
        return adamw(float(group["lr"]), b1=b1, b2=b2, eps=float(group["adamw_eps"]), weight_decay=float(group["wd"]))
    return muon_chain(
        group["momentum"],
        nesterov=group["nesterov"],
        heavy_ball=True,
        rule="match_rms_adamw",
        lr=group["lr"],
        weight_decay=group["wd"],
        options=options,
        coefficients="keller",
        steps=group["ns_steps"],
    )


SOURCE = Source(
    "Moonlight's Muon",
    _kind,
    {"muon": Keys("momentum_buffer"), "adamw": Keys("moment1", "moment2", "step")},
    heavy_ball=True,
    recipe=_recipe,
)


def from_moonlight(
    optimizer: Given, tx: Transform, params: PyTree, *, names: Sequence[str] | None = None, step: int | None = None
) -> PyTree:
    """Make a transform's state from that of Moonlight's Muon.

    Args:
        optimizer: the optimizer or its ``state_dict()``.
        tx: the transform; `moonlight_recipe` makes the one that goes on as the optimizer would.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        step: as in `from_torch_optimizer`.

    Raises:
        ValueError: names are not known, or source and transform do not fit; the message lists every difference.

    Example:
        >>> import muonfx as mfx
        >>> saved = {
        ...     "state": {0: {"use_muon": True, "momentum_buffer": torch.ones(3, 2)}},
        ...     "param_groups": [{"params": [0]}],
        ... }
        >>> params = {"w": torch.zeros(3, 2)}
        >>> from_moonlight(saved, mfx.momentum(heavy_ball=True), params, names=["w"]).trace["w"].sum()
        tensor(6.)
    """
    return SOURCE.read(optimizer, tx, params, names, step)


def to_moonlight(
    state: PyTree,
    optimizer: Optim,
    params: PyTree,
    *,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Make a state dict for Moonlight's Muon from a transform's state.

    Args:
        state: as in `to_torch_optimizer`, with momentum as a sum (``heavy_ball=True``).
        optimizer: the optimizer, or its ``state_dict()``.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.

    Raises:
        ValueError: a parameter of the optimizer has no such state.

    Example:
        >>> import muonfx as mfx
        >>> saved = {"state": {0: {"use_muon": True}}, "param_groups": [{"params": [0]}]}
        >>> params = {"w": torch.zeros(3, 2)}
        >>> list(to_moonlight(mfx.momentum(heavy_ball=True).init(params), saved, params, names=["w"])["state"][0])
        ['use_muon', 'momentum_buffer']
    """
    return SOURCE.write(state, optimizer, params, names)


def moonlight_recipe(
    optimizer: Given, params: PyTree, *, names: Sequence[str] | None = None, dtype: torch.dtype | str = "auto"
) -> Transform:
    """Make the chain that Moonlight's Muon computes, from what stands in its groups.

    Its AdamW adds eps to a root that is not yet corrected for bias, ours to one that is: relative to an update the
    difference is at most 3.5 eps over the corrected root, at the first step with the default betas, and fades.

    Args:
        optimizer: as in `from_moonlight`.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        dtype: of the iteration; the original has bf16 on every device.

    Example:
        >>> group = {"params": [0], "lr": 1e-3, "wd": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
        >>> saved = {"state": {0: {"use_muon": True}}, "param_groups": [group]}
        >>> moonlight_recipe(saved, {"w": torch.zeros(3, 2)}, names=["w"])  # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(heavy_ball=True), orthogonalize(coefficients='keller', steps=5), scale_by_shape(),
              add_decayed_weights(weight_decay=0.1), scale_by_learning_rate(learning_rate=0.001))
    """
    return SOURCE.transform(optimizer, params, names, dtype=dtype)
