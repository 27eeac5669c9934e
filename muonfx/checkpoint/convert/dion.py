"""Dion's Muon, https://github.com/microsoft/dion: the class ``dion.Muon`` with AdamW and Lion groups beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muonfx.checkpoint.convert._sources import Entry, Given, Group, Keys, Optim, Options, Source, muon_chain
from muonfx.core import Transform
from muonfx.recipes import adamw, lion
from muonfx.transforms.scale import ShapeRule
from muonfx.tree import PyTree

__all__ = ["dion_recipe", "from_dion", "to_dion"]

_RULES: dict[str | None, ShapeRule | None] = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: None}


def _kind(group: Group, entry: Entry) -> str:
    if group.get("algorithm") not in ("muon", "adamw", "lion"):
        raise ValueError(f"expected a group of dion.Muon, found the algorithm {group.get('algorithm')!r}")
    return group["algorithm"]


def _recipe(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if group.get("cautious_wd"):
        raise ValueError("there is no chain for cautious_wd")
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    b1, b2 = (float(group[key]) for key in ("beta1", "beta2"))
    if kind == "adamw":
        return adamw(rate, b1=b1, b2=b2, eps=float(group["epsilon"]), weight_decay=decay)
    if kind == "lion":
        return lion(rate, b1=b1, b2=b2, weight_decay=decay)
    where: dict[str, Any] = {"dims": ((-2,), (-1,))} if len(shape) > 2 and not group["flatten"] else {}
    heads, blocks = group.get("num_heads"), group.get("split_sizes")
    if blocks is not None or (heads is not None and heads > 1):
        where["blocks"] = heads if blocks is None else tuple(blocks)
    return muon_chain(
        group["mu"],
        nesterov=group["nesterov"],
        heavy_ball=True,
        rule=_RULES[group["adjust_lr"]],
        lr=rate,
        weight_decay=decay,
        options=options,
        **where,
    )


SOURCE = Source(
    "Dion's Muon",
    _kind,
    {"muon": Keys("momentum"), "adamw": Keys("momentum", "variance", "step_dev"), "lion": Keys("momentum")},
    heavy_ball=True,
    recipe=_recipe,
    make_step=lambda step: torch.tensor(float(step)),
)


def from_dion(
    optimizer: Given, tx: Transform, params: PyTree, *, names: Sequence[str] | None = None, step: int | None = None
) -> PyTree:
    """Make a transform's state from that of ``dion.Muon``.

    Args:
        optimizer: the optimizer or its ``state_dict()``, of whole tensors: of DTensors, take ``full_tensor()`` first.
        tx: the transform; `dion_recipe` makes the one that goes on as the optimizer would.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        step: as in `from_torch_optimizer`.

    Raises:
        ValueError: names are not known, or source and transform do not fit; the message lists every difference.

    Example:
        >>> import muonfx as mfx
        >>> group = {"params": [0], "algorithm": "muon", "step": 3}
        >>> saved = {"state": {0: {"momentum": torch.ones(3, 2)}}, "param_groups": [group]}
        >>> params = {"w": torch.zeros(3, 2)}
        >>> from_dion(saved, mfx.momentum(heavy_ball=True), params, names=["w"]).trace["w"].sum()
        tensor(6.)
    """
    return SOURCE.read(optimizer, tx, params, names, step)


def to_dion(
    state: PyTree,
    optimizer: Optim,
    params: PyTree,
    *,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Make a state dict for ``dion.Muon`` from a transform's state.

    Args:
        state: as in `to_torch_optimizer`, with momentum as a sum (``heavy_ball=True``); Lion's too.
        optimizer: the optimizer, or its ``state_dict()``.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.

    Raises:
        ValueError: a parameter of the optimizer has no such state.

    Example:
        >>> import muonfx as mfx
        >>> saved = {"state": {}, "param_groups": [{"params": [0], "algorithm": "lion", "step": 0}]}
        >>> params = {"w": torch.zeros(3, 2)}
        >>> list(to_dion(mfx.scale_by_lion().init(params), saved, params, names=["w"])["state"][0])
        ['momentum']
    """
    return SOURCE.write(state, optimizer, params, names)


def dion_recipe(
    optimizer: Given,
    params: PyTree,
    *,
    names: Sequence[str] | None = None,
    coefficients: str = "polar_express_5",
    dtype: torch.dtype | str = "auto",
) -> Transform:
    """Make the chain that ``dion.Muon`` computes, from what stands in its groups.

    Args:
        optimizer: as in `from_dion`.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        coefficients: of the iteration, which the groups do not say: "quintic" for ``use_polar_express=False``.
        dtype: of the iteration; the original has bf16 on every device.

    Raises:
        ValueError: ``cautious_wd`` is set.

    Example:
        >>> group = dict(
        ...     params=[0],
        ...     algorithm="muon",
        ...     lr=0.01,
        ...     mu=0.95,
        ...     beta1=0.9,
        ...     beta2=0.95,
        ...     weight_decay=0.01,
        ...     epsilon=1e-8,
        ...     nesterov=False,
        ...     adjust_lr="spectral_norm",
        ...     flatten=False,
        ...     cautious_wd=False,
        ... )
        >>> dion_recipe({"state": {}, "param_groups": [group]}, {"w": torch.zeros(3, 2)}, names=["w"])
        ... # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(nesterov=False, heavy_ball=True), orthogonalize(), scale_by_shape(rule='spectral'),
              add_decayed_weights(weight_decay=0.01), scale_by_learning_rate(learning_rate=0.01))
    """
    return SOURCE.transform(optimizer, params, names, coefficients=coefficients, dtype=dtype)
