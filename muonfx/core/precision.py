"""The dtypes in which a chain's transforms compute their matrix products.

Machines may resolve "auto" to different dtypes and then compute different numbers, so ranks compare these dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from muonfx.core.contract import Transform
from muonfx.core.recorded import dotted, part_names


def product_dtypes(tx: Transform, held: Iterable[torch.dtype], device: torch.device) -> dict[str, str]:
    """Return the resolved dtype of matrix products by the dotted name of each transform that computes them."""
    # "auto" keeps float64, and resolves to one dtype for all other parameters.
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
