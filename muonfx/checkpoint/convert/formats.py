"""`FORMATS`: how PyTorch, Keller Jordan's Muon, Moonlight and Dion store their optimizer state."""

from __future__ import annotations

from typing import Any

import torch

from muonfx.checkpoint.convert._sources import Entry, Group, Keys, Options, Source, muon_chain
from muonfx.core import Transform
from muonfx.recipes import adamw, lion
from muonfx.select import MatrixView
from muonfx.transforms.scale import ShapeRule

__all__ = ["FORMATS", "keller_chain"]

_STACKED = ((-2,), (-1,))
"""The dims of a leaf whose leading dims index independent matrices."""


def _adamw(group: Group, betas: Any, eps: Any, weight_decay: Any) -> Transform:
    b1, b2 = map(float, betas)
    return adamw(float(group["lr"]), b1=b1, b2=b2, eps=float(eps), weight_decay=float(weight_decay))


# ------------------------------------------------------------------------------------------------------- torch.optim

_KELLER = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def _torch_kind(group: Group, entry: Entry) -> str:
    if "ns_coefficients" in group:
        return "muon"
    if "amsgrad" in group:
        return "adamw"
    raise ValueError(
        f"expected a group of torch.optim.Muon or torch.optim.AdamW, found one with the keys {sorted(group)}"
    )


def _torch_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if kind == "adamw":
        refused = [key for key in ("amsgrad", "maximize") if group.get(key)]
        if not group.get("decoupled_weight_decay", True) and float(group["weight_decay"]):
            refused.append("weight_decay of torch.optim.Adam, which is not decoupled,")
        if refused:
            raise ValueError(f"there is no chain for {' and '.join(refused)}")
        return _adamw(group, group["betas"], group["eps"], group["weight_decay"])
    if float(group["eps"]) != _EPS:
        raise ValueError(f"there is no chain for eps={group['eps']}: muonfx divides by the norm alone; expected {_EPS}")
    steps = (tuple(group["ns_coefficients"]),) * group["ns_steps"]
    return muon_chain(
        group["momentum"],
        nesterov=group["nesterov"],
        heavy_ball=False,
        rule=group["adjust_lr_fn"] or "original",
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        options=options,
        coefficients="keller" if steps == (_KELLER,) * 5 else steps,
    )


# ------------------------------------------------------------------------------------------------------ Keller Jordan


def _keller_kind(group: Group, entry: Entry) -> str:
    return "muon" if group.get("use_muon", "momentum" in group) else "adamw"


def keller_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """Return the chain of a group of Keller Jordan's Muon for a parameter of the given shape."""
    if kind == "adamw":
        return _adamw(group, group["betas"], group["eps"], group["weight_decay"])
    if len(shape) > 3:
        raise ValueError(
            f"shape {tuple(shape)}: its updates are scaled by the sides of the kernel, muonfx's by those of the "
            "flattened matrix, so no chain continues in the same way; the state itself can be converted"
        )
    steps: dict[str, Any] = {"steps": group["ns_steps"]} if group.get("ns_steps", 5) != 5 else {}  # in older releases
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
        **({"view": MatrixView(_STACKED)} if len(shape) == 3 else {}),
    )


# ---------------------------------------------------------------------------------------------------------- Moonlight


def _moonlight_kind(group: Group, entry: Entry) -> str:
    if "use_muon" not in entry:
        raise ValueError("expected Moonlight's Muon, which keeps 'use_muon' for each parameter; found none")
    return "muon" if entry["use_muon"] else "adamw"


def _moonlight_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if kind == "adamw":
        return _adamw(group, group["adamw_betas"], group["adamw_eps"], group["wd"])
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


# --------------------------------------------------------------------------------------------------------------- Dion

_RULES: dict[str | None, ShapeRule | None] = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: None}


def _dion_kind(group: Group, entry: Entry) -> str:
    if group.get("algorithm") not in ("muon", "adamw", "lion"):
        raise ValueError(f"expected a group of dion.Muon, found the algorithm {group.get('algorithm')!r}")
    return group["algorithm"]


def _dion_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if group.get("cautious_wd"):
        raise ValueError("there is no chain for cautious_wd")
    betas = [float(group[key]) for key in ("beta1", "beta2")]
    if kind == "adamw":
        return _adamw(group, betas, group["epsilon"], group["weight_decay"])
    if kind == "lion":
        return lion(float(group["lr"]), b1=betas[0], b2=betas[1], weight_decay=float(group["weight_decay"]))
    heads, sizes = group.get("num_heads"), group.get("split_sizes")
    blocks = tuple(sizes) if sizes is not None else heads if heads is not None and heads > 1 else None
    return muon_chain(
        group["mu"],
        nesterov=group["nesterov"],
        heavy_ball=True,
        rule=_RULES[group["adjust_lr"]],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        options=options,
        view=MatrixView(_STACKED if len(shape) > 2 and not group["flatten"] else None, blocks),
    )


_ADAMW = Keys("exp_avg", "exp_avg_sq", "step")

FORMATS: dict[str, Source] = {
    "torch": Source(
        "torch.optim",
        _torch_kind,
        {"muon": Keys("momentum_buffer"), "adamw": _ADAMW},
        heavy_ball=False,
        chain_of=_torch_chain,
        make_step=lambda step: torch.tensor(float(step)),
    ),
    "keller": Source(
        "Keller Jordan's Muon",
        _keller_kind,
        {"muon": Keys("momentum_buffer"), "adamw": _ADAMW},
        heavy_ball=False,
        chain_of=keller_chain,
    ),
    "moonlight": Source(
        "Moonlight's Muon",
        _moonlight_kind,
        {"muon": Keys("momentum_buffer"), "adamw": Keys("moment1", "moment2", "step")},
        heavy_ball=True,
        chain_of=_moonlight_chain,
    ),
    "dion": Source(
        "Dion's Muon",
        _dion_kind,
        {"muon": Keys("momentum"), "adamw": Keys("momentum", "variance", "step_dev"), "lion": Keys("momentum")},
        heavy_ball=True,
        chain_of=_dion_chain,
        make_step=lambda step: torch.tensor(float(step)),
    ),
}
"""The formats with param_groups and a state for each parameter, by name."""
