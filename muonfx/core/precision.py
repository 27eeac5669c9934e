"""The dtype and the library with which the transforms of a chain compute matrix products on a device.

The dtype "auto" may differ between types of machines. quack-kernels may be missing on one machine, or fail its
self-test on one device. Ranks would then compute different values, so they compare the results of these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from muonfx.core.transform import Transform
from muonfx.core.value import dotted, part_names
from muonfx.polar import quack


def product_dtypes(tx: Transform, held: Iterable[torch.dtype], device: torch.device) -> dict[str, str]:
    """Return a dict from the name of each transform to the dtype of its matrix products, such as "bfloat16".

    ``held`` are the dtypes of the parameters. Transforms without matrix products are left out.
    """
    # For float64 parameters, "auto" is float64. For all others it is one dtype.
    dtype = torch.float64 if set(held) == {torch.float64} else torch.float32
    return {
        name: str(declared(own, dtype, device)).removeprefix("torch.")
        for name, own in _named_parts(tx)
        if (declared := own.declaration.matrices.rounds_to) is not None
    }


def product_libraries(tx: Transform, held: Iterable[torch.dtype], device: torch.device) -> dict[str, str]:
    """Map the name of each transform with ``products="auto"`` to the library of its large symmetric products.

    The library is "quack-kernels" or "torch"; see `muonfx.polar.quack`. ``held`` are the dtypes of the parameters.
    """
    compute_dtypes = product_dtypes(tx, held, device)
    libraries: dict[str, str] = {}
    for name, part in _named_parts(tx):
        if name in compute_dtypes and part.arguments.get("products") == "auto":
            failure = quack.failure(device, getattr(torch, compute_dtypes[name]))
            libraries[name] = "quack-kernels" if failure is None else "torch"
    return libraries


def _named_parts(tx: Transform, name: str = "") -> Iterator[tuple[str, Transform]]:
    """Yield (dotted name, transform) pairs for a transform and all transforms that it calls."""
    yield name or tx.name, tx
    for own, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Transform):
            yield from _named_parts(part, f"{dotted(name)}{own}" if own else name)
