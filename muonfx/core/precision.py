"""How a chain's transforms compute their matrix products on a device: the dtypes, and whether kernels are used.

Machines may resolve "auto" to different dtypes, and kernels may fail their self-test on one device only. They then
compute different numbers, so ranks compare both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from muonfx.core.contract import Transform
from muonfx.core.recorded import dotted, part_names
from muonfx.polar import kernels


def product_dtypes(tx: Transform, held: Iterable[torch.dtype], device: torch.device) -> dict[str, str]:
    """Return the resolved dtype of matrix products by the dotted name of each transform that computes them."""
    # "auto" keeps float64, and resolves to one dtype for all other parameters.
    dtype = torch.float64 if set(held) == {torch.float64} else torch.float32
    return {
        name: str(declared(own, dtype, device)).removeprefix("torch.")
        for name, own in _named_parts(tx)
        if (declared := own.declaration.rounds_to) is not None
    }


def kernel_products(tx: Transform, device: torch.device) -> dict[str, str]:
    """Map each transform with ``products="triton"``, by dotted name, to "triton" or, if kernels fail, "batched".

    The kernels are tested on the device if they were not tested before.
    """
    asking = [name for name, own in _named_parts(tx) if own.arguments.get("products") == "triton"]
    return dict.fromkeys(asking, "batched" if asking and kernels.failure(device) else "triton")


def _named_parts(tx: Transform, name: str = "") -> Iterator[tuple[str, Transform]]:
    """Yield the transform and its parts at any depth, with their dotted names."""
    yield name or tx.name, tx
    for own, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Transform):
            yield from _named_parts(part, f"{dotted(name)}{own}" if own else name)
