"""The dtypes in which the transforms of a chain compute their matrix products."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from muonfx.core.contract import Transform
from muonfx.core.recorded import dotted, part_names

__all__ = ["product_dtypes"]


def product_dtypes(tx: Transform, held: Iterable[torch.dtype], device: torch.device) -> dict[str, str]:
    """Resolve the dtypes of matrix products, by the dotted name of the transform; none for other transforms.

    Machines may resolve a dtype of "auto" differently, and then compute other numbers.

    Args:
        tx: the transform, with those that it calls.
        held: the dtypes of the parameters: "auto" keeps float64 and is one dtype for all others.
        device: the device to compute on.

    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16))
    >>> product_dtypes(tx, [torch.float32], torch.device("cpu"))
    {'orthogonalize': 'bfloat16'}
    """
    dtype = torch.float64 if set(held) == {torch.float64} else torch.float32
    return _resolved(tx, dtype, device, "")


def _resolved(tx: Transform, dtype: torch.dtype, device: torch.device, name: str) -> dict[str, str]:
    declared, found = tx.declaration.rounds_to, dict[str, str]()
    if declared is not None:
        found[name or tx.name] = str(declared(tx, dtype, device)).removeprefix("torch.")
    for own, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Transform):
            found |= _resolved(part, dtype, device, f"{dotted(name)}{own}" if own else name)
    return found
