"""The declared cost of a transform's update, by which a sharding layer decides who computes which matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from muonfx.core.contract import Transform

LeafCost = Callable[[str, tuple[int, ...], torch.dtype], float]
"""``(name, shape, dtype) -> operations`` for one leaf of the updates; a multiply-add counts as two operations."""

_Bind = Callable[[Transform, str, torch.dtype], LeafCost]

_declared: dict[object, _Bind] = {}

B = TypeVar("B", bound=_Bind)


def declare_cost(factory: Callable[..., Transform]) -> Callable[[B], B]:
    """Declare the cost of a factory's transforms by a function ``(transform, device, compute) -> LeafCost``.

    `device` is the kind of device, and `compute` the dtype in which "auto" computes. The cost must not depend on the
    machine, because all ranks must find the same cost.
    """

    def declare(bind: B) -> B:
        _declared[factory] = bind
        return bind

    return declare


def declared_cost(tx: Transform, device: str, compute: torch.dtype) -> LeafCost | None:
    """Return the declared cost of a transform itself, without those that it calls, or None."""
    bind = _declared.get(tx.factory)
    return None if bind is None else bind(tx, device, compute)
