"""The dtype and the library with which the transforms of a chain compute matrix products on a device.

The dtype "auto" may differ between types of machines. quack-kernels may be missing on one machine, or fail its
self-test on one device. Ranks would then compute different values, so they compare the results of these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from muonfx.core.transform import Transform
from muonfx.core.value import walk
from muonfx.polar import quack


def product_dtypes(
    tx: Transform, param_dtypes: Iterable[torch.dtype], device: torch.device
) -> dict[str, str]:
    """Return a dict from the name of each transform to the dtype of its matrix products, such as "bfloat16".

    Transforms without matrix products are left out. With the setting ``dtype="auto"``, the dtype is one in which this
    device is fast.

    >>> tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16))
    >>> product_dtypes(tx, [torch.float32], torch.device("cpu"))
    {'orthogonalize': 'bfloat16'}
    """
    # For float64 parameters, "auto" is float64. For all others it is one dtype.
    param_dtype = torch.float64 if set(param_dtypes) == {torch.float64} else torch.float32
    name_of_dtype: dict[str, str] = {}
    for name, inner in _named_transforms(tx):
        # A transform of matrices declares a function that returns the dtype for parameters of a dtype on a device.
        rounds_to = inner.declaration.matrices.rounds_to
        if rounds_to is not None:
            product_dtype = rounds_to(inner, param_dtype, device)
            name_of_dtype[name] = str(product_dtype).removeprefix("torch.")
    return name_of_dtype


def product_libraries(
    tx: Transform, param_dtypes: Iterable[torch.dtype], device: torch.device
) -> dict[str, str]:
    """Return a dict from the name of each transform with ``products="auto"`` to the library of its matrix products.

    The library is "quack-kernels", whose symmetric products are faster. If it fails for a dtype on this device, as
    `muonfx.polar.quack` finds, the library is for example "torch for float16". Ranks compare these texts, because two
    libraries would round differently.
    """
    # The result is {"orthogonalize": "bfloat16"}, for example.
    product_dtype_of = product_dtypes(tx, param_dtypes, device)
    library_of: dict[str, str] = {}
    for name, inner in _named_transforms(tx):
        chooses_library = name in product_dtype_of and inner.arguments.get("products") == "auto"
        if not chooses_library:
            continue
        dtypes = [product_dtype_of[name]]
        # Where "auto" is bf16, the matrices of some shapes are multiplied in fp16.
        if dtypes == ["bfloat16"] and inner.arguments.get("dtype") == "auto":
            dtypes.append("float16")
        library_of[name] = _library(dtypes, device)
    return library_of


def _library(dtypes: list[str], device: torch.device) -> str:
    """Return the library of symmetric products in some dtypes, such as ``["bfloat16", "float16"]``."""
    failed_dtypes = [
        dtype for dtype in dtypes if quack.failure(device, getattr(torch, dtype)) is not None
    ]
    if failed_dtypes:
        return f"torch for {', '.join(failed_dtypes)}"
    return "quack-kernels"


def _named_transforms(tx: Transform) -> Iterator[tuple[str, Transform]]:
    """Yield (name, transform) pairs for a transform and all transforms that it calls, as in "muon.orthogonalize"."""
    for name, inner in walk(tx):
        if isinstance(inner, Transform):
            yield name or inner.name, inner
