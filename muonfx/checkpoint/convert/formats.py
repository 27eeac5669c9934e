"""`FORMATS`: how each optimizer that can be converted stores its state, and the chain that computes the same update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from muonfx.core import Transform, chain
from muonfx.recipes import adamw, lion
from muonfx.routing.stored_patterns import in_equal_parts, in_parts
from muonfx.transforms import (
    add_decayed_weights,
    momentum,
    orthogonalize,
    scale_by_learning_rate,
    scale_by_shape,
)
from muonfx.transforms.matrices import STACK, MatrixView
from muonfx.transforms.scale import ShapeRule

Group = Mapping[str, Any]
"""A parameter group of another optimizer: hyperparameters by the optimizer's own names."""
Values = Mapping[str, Any]
"""The state that another optimizer has for one parameter, by the optimizer's own keys."""
Options = Mapping[str, Any]
"""Arguments for `orthogonalize` that the caller of `convert.recipe` gave."""


class Keys(NamedTuple):
    """The keys of one parameter's state in another optimizer, such as "exp_avg", "exp_avg_sq" and "step" in AdamW."""

    moments: tuple[str, ...]
    """The key of the momentum, or the keys of the first and the second moment."""
    step: str | None = None
    """None if the optimizer does not count the steps of each parameter."""


GROUP_STEP = "step"
"""The key of the number of steps in a group of Dion, whose AdamW used it before it counted in each parameter."""


@dataclass(frozen=True)
class Format:
    """How one other optimizer stores its state, and which chain of transforms computes the same updates."""

    title: str
    keys: Mapping[str, Keys]  # by kind: "muon", "adamw" or "lion"
    kind_of: Callable[[Group, Values], str]
    chain_of: Callable[[Group, str, torch.Size, Options], Transform]
    heavy_ball: bool = False  # True if momenta are sums, False if they are averages
    make_step: Callable[[int], object] = int  # converts a number of steps to the type in the entry


# ------------------------------------------------------------------------------------------- parts of several formats


def _adamw(group: Group, betas: Sequence[float], eps: float, weight_decay: float) -> Transform:
    """Return AdamW with the learning rate of a group; float(), since some optimizers hold numbers in tensors."""
    b1, b2 = map(float, betas)
    return adamw(float(group["lr"]), b1=b1, b2=b2, eps=float(eps), weight_decay=float(weight_decay))


def _muon_chain(
    group: Group,
    decay: float,
    weight_decay: float,
    *,
    heavy_ball: bool,
    lr_scaling: ShapeRule | None,
    arguments: Mapping[str, Any],
) -> Transform:
    """Return a Muon chain: momentum, orthogonalization, a factor by shape, weight decay, learning rate.

    Args:
        group: a parameter group of the optimizer to convert, with "lr" and maybe "nesterov".
        decay: the decay of the momentum.
        weight_decay: the weight decay.
        heavy_ball: True if the momentum is a sum of gradients, False if it is an average.
        lr_scaling: the rule of `scale_by_shape`; None for no factor.
        arguments: of `orthogonalize`, such as ``{"coefficients": "keller"}``.
    """
    # float(), since some optimizers hold these numbers in tensors.
    nesterov = group.get("nesterov", True)
    transforms = [momentum(float(decay), nesterov=nesterov, heavy_ball=heavy_ball)]
    orthogonal = orthogonalize(**arguments)
    transforms.append(orthogonal)
    if lr_scaling is not None:  # by the shapes of the same matrices
        transforms.append(scale_by_shape(lr_scaling, view=orthogonal.arguments["view"]))
    transforms.append(add_decayed_weights(float(weight_decay)))
    transforms.append(scale_by_learning_rate(float(group["lr"])))
    return chain(*transforms)


# ------------------------------------------------------------------------------------------------------- torch.optim

_KELLER = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def _torch_kind(group: Group, values: Values) -> str:
    """Return "muon" for a group of torch.optim.Muon, "adamw" for one of AdamW or Adam; only AdamW has "amsgrad"."""
    if "ns_coefficients" in group:
        return "muon"
    if "amsgrad" in group:
        return "adamw"
    raise ValueError(
        f"expected a group of torch.optim.Muon or torch.optim.AdamW, found one with the keys {sorted(group)}"
    )


def _torch_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """Return the chain of transforms that updates a parameter as torch.optim.Muon or AdamW does.

    ``group`` has the hyperparameters, and ``kind`` is "muon" or "adamw". ``options`` are for `orthogonalize`.
    """
    if kind == "adamw":
        _require_adamw_options(group)
        return _adamw(group, group["betas"], group["eps"], group["weight_decay"])
    if float(group["eps"]) != _EPS:
        raise ValueError(
            f"eps={group['eps']} has no equivalent in muonfx, which divides by the norm alone: expected {_EPS}"
        )
    # torch applies one polynomial in each of its steps; five times the default one is our schedule "keller".
    polynomial = tuple(group["ns_coefficients"])
    coefficients: Any = (polynomial,) * group["ns_steps"]
    if coefficients == (_KELLER,) * 5:
        coefficients = "keller"
    return _muon_chain(
        group,
        group["momentum"],
        group["weight_decay"],
        heavy_ball=False,
        lr_scaling=group["adjust_lr_fn"] or "original",
        arguments={"coefficients": coefficients, **options},
    )


def _require_adamw_options(group: Group) -> None:
    """Raise if a group of torch.optim.AdamW or Adam has an option without an equivalent here, such as "amsgrad"."""
    refused = [key for key in ("amsgrad", "maximize") if group.get(key)]
    # Adam adds the decay to the gradient.
    is_coupled = not group.get("decoupled_weight_decay", True)
    if is_coupled and float(group["weight_decay"]):
        refused.append("the coupled weight_decay of torch.optim.Adam")
    if refused:
        raise ValueError(
            f"found {' and '.join(refused)}, without an equivalent in muonfx: turn it off"
        )


# ------------------------------------------------------------------------------------------------------ Keller Jordan


def _keller_kind(group: Group, values: Values) -> str:
    """Return "muon" or "adamw". A group without "use_muon" is of `Muon` if it has "momentum"."""
    is_muon = group.get("use_muon", "momentum" in group)
    return "muon" if is_muon else "adamw"


def _keller_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """Return the chain of transforms that updates a parameter of this shape as Keller Jordan's Muon does.

    ``group`` has the hyperparameters, and ``kind`` is "muon" or "adamw". ``options`` are for `orthogonalize`.
    """
    if kind == "adamw":
        return _adamw(group, group["betas"], group["eps"], group["weight_decay"])
    if len(shape) > 3:
        raise ValueError(
            f"shape {tuple(shape)} has no equivalent in muonfx: the source scales updates by the sides of the kernel, "
            "muonfx by the sides of the flattened matrix. The state itself can be converted, with read()"
        )
    # Three dims: the source takes them as a stack of matrices.
    pattern = STACK if len(shape) == 3 else None
    arguments: dict[str, Any] = {"coefficients": "keller", "view": MatrixView(pattern)}
    if group.get("ns_steps", 5) != 5:  # newer releases have always five, the default here
        arguments["steps"] = group["ns_steps"]
    return _muon_chain(
        group,
        group["momentum"],
        group["weight_decay"],
        heavy_ball=False,
        lr_scaling="original",
        arguments={**arguments, **options},
    )


# ---------------------------------------------------------------------------------------------------------- Moonlight


def _moonlight_kind(group: Group, values: Values) -> str:
    """Return "muon" or "adamw", which Moonlight's Muon records in the state of each parameter."""
    if "use_muon" not in values:
        raise ValueError(
            "expected Moonlight's Muon, which keeps 'use_muon' for each parameter; found none"
        )
    return "muon" if values["use_muon"] else "adamw"


def _moonlight_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """Return the chain of transforms that updates a parameter as Moonlight's Muon does.

    ``group`` has the hyperparameters, and ``kind`` is "muon" or "adamw". ``options`` are for `orthogonalize`.
    """
    if kind == "adamw":
        return _adamw(group, group["adamw_betas"], group["adamw_eps"], group["wd"])
    return _muon_chain(
        group,
        group["momentum"],
        group["wd"],
        heavy_ball=True,
        lr_scaling="match_rms_adamw",
        arguments={"coefficients": "keller", "steps": group["ns_steps"], **options},
    )


# --------------------------------------------------------------------------------------------------------------- Dion

_DION_SCALINGS: dict[str | None, ShapeRule | None] = {
    "spectral_norm": "spectral",
    "rms_norm": "match_rms_adamw",
    None: None,
}
"""The rule of `scale_by_shape` for each ``adjust_lr`` of ``dion.Muon``; None scales nothing."""


def _dion_kind(group: Group, values: Values) -> str:
    """Return "muon", "adamw" or "lion", the algorithm of the group."""
    if group.get("algorithm") not in ("muon", "adamw", "lion"):
        raise ValueError(
            f"expected a group of dion.Muon, found the algorithm {group.get('algorithm')!r}"
        )
    return group["algorithm"]


def _dion_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """Return the chain of transforms that updates a parameter of this shape as ``dion.Muon`` does.

    ``group`` has the hyperparameters, and ``kind`` is "muon", "adamw" or "lion". ``options`` are for `orthogonalize`.
    """
    if group.get("cautious_wd"):
        raise ValueError(
            "found cautious_wd, which the chains of this function do not have: write the chain yourself, with "
            "add_decayed_weights(weight_decay, cautious=True)"
        )
    b1 = float(group["beta1"])
    b2 = float(group["beta2"])
    if kind == "adamw":
        return _adamw(group, (b1, b2), group["epsilon"], group["weight_decay"])
    if kind == "lion":
        return lion(float(group["lr"]), b1=b1, b2=b2, weight_decay=float(group["weight_decay"]))
    return _muon_chain(
        group,
        group["mu"],
        group["weight_decay"],
        heavy_ball=True,
        lr_scaling=_DION_SCALINGS[group["adjust_lr"]],
        arguments={"view": MatrixView(_dion_pattern(group, shape)), **options},
    )


def _dion_pattern(group: Group, shape: torch.Size) -> str | None:
    """Return a pattern of the matrices that ``dion.Muon`` orthogonalizes separately; None for one matrix.

    ``group`` has arguments of ``dion.Muon``: ``{"split_sizes": (64, 16, 16)}`` divides a matrix of 96 rows into blocks
    of these rows, as for query, key and value, and ``{"num_heads": 4}`` into four equal blocks.
    """
    # The two functions below write the blocks in place of "{out}".
    pattern = "... {out} in -> ... {out} in"
    sizes = group.get("split_sizes")
    if sizes:
        size_of_block = {f"part_{index}": size for index, size in enumerate(sizes)}
        return in_parts(pattern, size_of_block)
    heads = group.get("num_heads") or 1
    if sizes is None and heads > 1:
        return in_equal_parts(pattern, heads)
    if len(shape) > 2 and not group["flatten"]:  # a stack of matrices, such as experts
        return STACK
    return None


# ------------------------------------------------------------------------------------------------------------ the table

_KELLER_KEYS = {
    "muon": Keys(("momentum_buffer",)),
    "adamw": Keys(("exp_avg", "exp_avg_sq"), "step"),
}


def _float_step(step: int) -> torch.Tensor:
    """Return a number of steps as a tensor, which is how torch.optim and Dion store it."""
    return torch.tensor(float(step))


FORMATS: dict[str, Format] = {
    "torch": Format("torch.optim", _KELLER_KEYS, _torch_kind, _torch_chain, make_step=_float_step),
    "keller": Format("Keller Jordan's Muon", _KELLER_KEYS, _keller_kind, _keller_chain),
    "moonlight": Format(
        "Moonlight's Muon",
        {"muon": Keys(("momentum_buffer",)), "adamw": Keys(("moment1", "moment2"), "step")},
        _moonlight_kind,
        _moonlight_chain,
        heavy_ball=True,
    ),
    "dion": Format(
        "Dion's Muon",
        {
            "muon": Keys(("momentum",)),
            "adamw": Keys(("momentum", "variance"), "step_dev"),
            "lion": Keys(("momentum",)),
        },
        _dion_kind,
        _dion_chain,
        heavy_ball=True,
        make_step=_float_step,
    ),
}
"""A dict from the name of a format, such as "keller", to its `Format`."""
