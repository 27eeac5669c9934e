"""``torch.optim.Muon`` and ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muonfx.checkpoint.convert._sources import Entry, Given, Group, Keys, Optim, Options, Source, muon_chain
from muonfx.core import Transform
from muonfx.recipes import adamw
from muonfx.tree import PyTree

__all__ = ["from_torch_optimizer", "to_torch_optimizer", "torch_recipe"]

_KELLER = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def _kind(group: Group, entry: Entry) -> str:
    if "ns_coefficients" in group:
        return "muon"
    if "amsgrad" in group:
        return "adamw"
    raise ValueError(
        f"expected a group of torch.optim.Muon or torch.optim.AdamW, found one with the keys {sorted(group)}"
    )


def _recipe(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if kind == "adamw":
        refused = [key for key in ("amsgrad", "maximize") if group.get(key)]
        if not group.get("decoupled_weight_decay", True) and float(group["weight_decay"]):
            refused.append("weight_decay of torch.optim.Adam, which is not decoupled,")
        if refused:
            raise ValueError(f"there is no chain for {' and '.join(refused)}")
        b1, b2 = map(float, group["betas"])
        return adamw(
            float(group["lr"]), b1=b1, b2=b2, eps=float(group["eps"]), weight_decay=float(group["weight_decay"])
        )
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


SOURCE = Source(
    "torch.optim",
    _kind,
    {"muon": Keys("momentum_buffer"), "adamw": Keys("exp_avg", "exp_avg_sq", "step")},
    heavy_ball=False,
    recipe=_recipe,
    make_step=lambda step: torch.tensor(float(step)),
)


def from_torch_optimizer(
    optimizer: Given, tx: Transform, params: PyTree, *, names: Sequence[str] | None = None, step: int | None = None
) -> PyTree:
    """Make a transform's state from that of ``torch.optim.Muon``, ``torch.optim.AdamW``, or both.

    Args:
        optimizer: the optimizer or its ``state_dict()``; a list of these where a model has one for its matrices and
            one for the rest.
        tx: the transform; `torch_recipe` makes the one that goes on as the optimizer would.
        params: the parameters, such as ``dict(model.named_parameters())``: where an optimizer is given that holds
            these very tensors, its parameters get their names from here.
        names: the names in the optimizer's order, for a state dict without names.
        step: how many steps were taken, where the transform counts and the optimizer does not.

    Returns:
        The state: copies, in the dtypes that the transform pins.

    Raises:
        ValueError: names are not known, or source and transform do not fit; the message lists every difference.

    Example:
        >>> model = torch.nn.Linear(4, 3, bias=False)
        >>> optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> params = dict(model.named_parameters())
        >>> state = from_torch_optimizer(optimizer, torch_recipe(optimizer, params), params)
        >>> bool((state["momentum"].trace["weight"] == optimizer.state[model.weight]["momentum_buffer"]).all())
        True
    """
    return SOURCE.read(optimizer, tx, params, names, step)


def to_torch_optimizer(
    state: PyTree,
    optimizer: Optim,
    params: PyTree,
    *,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Make a state dict for ``torch.optim.Muon`` or ``torch.optim.AdamW`` from a transform's state.

    The groups and their hyperparameters stay those of the optimizer; of the state, each optimizer gets what belongs to
    its parameters. torch casts what it loads to each parameter's dtype.

    Args:
        state: of a chain with momentum (an average) or Adam.
        optimizer: the optimizer, fresh or not, or its ``state_dict()``.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.

    Returns:
        What ``optimizer.load_state_dict`` takes.

    Raises:
        ValueError: a parameter of the optimizer has no such state.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Linear(4, 3)
        >>> params = dict(model.named_parameters())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> saved = to_torch_optimizer(mfx.adamw(1e-3).init(params), optimizer, params)
        >>> optimizer.load_state_dict(saved)
        >>> sorted(optimizer.state[model.bias])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    return SOURCE.write(state, optimizer, params, names)


def torch_recipe(
    optimizer: Given, params: PyTree, *, names: Sequence[str] | None = None, dtype: torch.dtype | str = "auto"
) -> Transform:
    """Make the chain that ``torch.optim.Muon`` or ``torch.optim.AdamW`` computes, from what stands in its groups.

    Args:
        optimizer: as in `from_torch_optimizer`.
        params: as in `from_torch_optimizer`.
        names: as in `from_torch_optimizer`.
        dtype: of the iteration; torch has bf16 on every device.

    Returns:
        A chain; where groups differ, a partition. Learning rates are those of the moment, as numbers.

    Raises:
        ValueError: a setting that no chain has, such as ``amsgrad``.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3, 4))
        >>> torch_recipe(torch.optim.Muon([weight], lr=0.1), {"w": weight})  # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(), orthogonalize(coefficients='keller'), scale_by_shape(rule='original'),
              add_decayed_weights(weight_decay=0.1), scale_by_learning_rate(learning_rate=0.1))
    """
    return SOURCE.transform(optimizer, params, names, dtype=dtype)
