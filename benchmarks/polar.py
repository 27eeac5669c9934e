"""Time and quality of orthogonalization, compared with other packages, and the scratch memory of muonfx.

The inputs are single matrices and small batches. Every candidate runs with its package's defaults and, if its
coefficients can be chosen, with the same five quintic steps. Quality is measured on the same shapes
(`benchmarks.quality`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from benchmarks.measure import PeakBytes, interleaved, summary
from benchmarks.peers import COMMON, Function, functions, plain, versioned
from benchmarks.quality import SPECTRA, judge_against, matrix
from muonfx import polar

Shape = tuple[int, ...]

SHAPES: tuple[Shape, ...] = (
    (512, 512),
    (512, 2048),
    (1024, 1024),
    (1024, 4096),
    (4, 512, 512),
    (64, 128, 128),
)
BASELINE = "torch.optim.Muon"
_SETTINGS = [
    (dtype, method, products)
    for dtype in (torch.bfloat16, torch.float32)
    for method in ("standard", "gram")
    for products in ("batched", "blocks")
]


def ours(shape: Shape) -> Iterator[Function]:
    """Yield ours: automatic choices with common and with default coefficients, then every method explicitly."""
    short = min(shape[-2:])
    for name, coefficients in (("muonfx", COMMON), ("muonfx, polar_express_5", "polar_express_5")):
        call = partial(polar.orthogonalize, coefficients=coefficients)
        yield Function(name, call, coefficients, coefficients != COMMON, "muonfx")
    for dtype, method, products in _SETTINGS:
        if products == "blocks" and short <= 128:
            continue  # smaller than a block
        name = f"muonfx, {method}, {products}, {str(dtype).removeprefix('torch.')}"
        call = partial(
            polar.orthogonalize, coefficients=COMMON, dtype=dtype, method=method, products=products
        )
        yield Function(name, call, COMMON, False, "muonfx")


def candidates(shape: Shape, compiled: bool) -> list[Function]:
    """Return all candidates for a shape, the baseline first."""
    return [*functions(compiled=compiled), *ours(shape)]


def about(one: Function, shape: Shape) -> dict[str, Any]:
    """Return the part of a row that describes its candidate."""
    row = {
        "shape": list(shape),
        "candidate": one.name,
        "coefficients": one.coefficients,
        "default": one.default,
    }
    row["package"] = versioned(one.package)
    if one.package == "muonfx":
        settings = getattr(one.call, "keywords", {})
        plan = polar.explain(shape[-2:], **settings)
        row["plan"] = {"method": plan.method, "products": plan.products, "dtype": str(plan.dtype)}
    return row


def speed(
    rounds: int,
    shapes: Sequence[Shape] = SHAPES,
    *,
    compiled: bool = True,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return the milliseconds of each candidate at each shape, and the ratio to torch's, which is timed twice.

    `seconds` is the time limit for one case, see `interleaved`.
    """
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        them = candidates(shape, compiled)
        runs: dict[str, Callable[[], object]] = {one.name: partial(one.call, x) for one in them}
        runs[f"{BASELINE} again"] = runs[BASELINE]
        times = summary(interleaved(runs, rounds=rounds, seconds=seconds), BASELINE)
        again = them[0]._replace(name=f"{BASELINE} again")
        rows += [{**about(one, shape), **times[one.name]} for one in (*them, again)]
    return rows


def quality(shapes: Sequence[Shape] = SHAPES, *, compiled: bool = True) -> list[dict[str, Any]]:
    """Return the error and singular values of the first matrix of a batch, for each candidate, shape and spectrum."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for spectrum in SPECTRA:
            x = torch.stack(
                [
                    matrix(spectrum, shape[-2:], seed)
                    for seed in range(shape[0] if len(shape) > 2 else 1)
                ]
            )
            x = x if len(shape) > 2 else x[0]
            first = x[0] if x.ndim > 2 else x
            # One result per name of coefficients.
            exact = cache(partial(plain, first, torch.float64))
            for one in candidates(shape, compiled):
                found = one.call(x)
                found = found[0] if x.ndim > 2 else found
                judged = judge_against(found, exact(one.coefficients))
                rows.append({**about(one, shape), "spectrum": spectrum, **judged._asdict()})
    return rows


# ------------------------------------------------------------------------------------------------------- scratch

MiB = 1 << 20
LISTS: dict[str, list[Shape]] = {
    "4 x 512^2, 2 x 2048x512, 2 x 512x2048": [(512, 512)] * 4
    + [(2048, 512)] * 2
    + [(512, 2048)] * 2,
    "8 x 1024^2": [(1024, 1024)] * 8,
    "16 x 256^2, as one stack": [(16, 256, 256)],
    "300 x 64x64": [(64, 64)] * 300,
    "150 x 64x32, 150 x 32x64": [(64, 32), (32, 64)] * 150,
}
LIMITS = (1, 2 * MiB, 8 * MiB, 32 * MiB)


def peak_bytes(
    xs: Sequence[torch.Tensor], limit: int | None, where: str, dtype: torch.dtype, **settings: Any
) -> tuple[int, int]:
    """Return the peak bytes that `orthogonalize_many` allocates, and the bytes of the results among them.

    Args:
        xs: the matrices; overwritten if `where` is "donate".
        limit: the argument `max_scratch_bytes`.
        where: "new" for results in new memory, or "donate" for results that overwrite the matrices.
        dtype: dtype of the products.
        **settings: other arguments of `orthogonalize_many`.
    """
    with PeakBytes() as peak:
        found = polar.orthogonalize_many(
            xs, max_scratch_bytes=limit, donate=where == "donate", dtype=dtype, **settings
        )
    return peak.most, sum(y.numel() * y.itemsize for y in found) if where == "new" else 0


def scratch(
    lists: Mapping[str, Sequence[Shape]] = LISTS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
) -> list[dict[str, Any]]:
    """Return the scratch bytes for lists of float32 matrices, by limit, dtype of products and memory of results."""
    rows: list[dict[str, Any]] = []
    for name, shapes in lists.items():
        for dtype in dtypes:
            one = max(polar.explain(shape[-2:], dtype=dtype).scratch_bytes for shape in shapes)
            for where in ("new", "donate"):
                row: dict[str, Any] = {
                    "list": name,
                    "dtype": str(dtype),
                    "results": where,
                    "one matrix": one,
                }
                for limit in LIMITS:
                    xs = [
                        torch.randn(shape, generator=torch.Generator().manual_seed(0))
                        for shape in shapes
                    ]
                    peak, results = peak_bytes(xs, limit, where, dtype)
                    row[str(limit)] = peak - results
                rows.append(row)
    return rows
