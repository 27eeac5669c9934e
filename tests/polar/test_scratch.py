"""What `orthogonalize_many` takes beyond its inputs and results is bounded by its argument, counted in bytes.

The bound: `max_scratch_bytes`, or what one matrix needs (`Plan.scratch_bytes`) where that is more. Bytes are counted at
the dispatcher (`benchmarks.measure.PeakBytes`): what an operator takes and gives back inside itself is not among them.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure import PeakBytes
from muonfx.polar import Workspace, explain, orthogonalize_many

KiB, MiB = 1 << 10, 1 << 20
NUMBERS = 64
"""Bytes that a small matrix takes beside its plan's: a norm and a power of two, which for a 1 x 1 matrix count."""

Shapes = Sequence[tuple[int, ...]]


def excess(
    shapes: Shapes, limit: int, where: str, *, held: torch.dtype = torch.float32, **settings: Any
) -> tuple[int, int]:
    """The bytes at the peak above the bound, which holds at 0 or less; and the bytes of all results.

    `where` is "new" where results are new tensors, which are not scratch; else they go to `out` or to donated inputs.
    """
    xs = [torch.ones(shape, dtype=held) for shape in shapes]
    out = [torch.empty_like(x) for x in xs] if where == "out" else None
    plans = [explain(shape[-2:], held=held, **settings) for shape in shapes]
    with PeakBytes() as peak:
        found = orthogonalize_many(xs, max_scratch_bytes=limit, out=out, donate=where == "donate", **settings)
    results = sum(y.numel() * y.itemsize for y in found)
    assert peak.most >= (results if where == "new" else 1)  # the counting sees what it must
    bound = max(limit, *(plan.scratch_bytes for plan in plans), 0)
    return peak.most - (results if where == "new" else 0) - bound, results


LARGE: dict[str, Shapes] = {
    "one": [(256, 256)],
    "wide and tall": [(256, 512), (512, 256)] * 3,
    "equal": [(300, 300)] * 7,
    "stacks": [(5, 256, 300), (256, 300), (2, 2, 300, 256), (256, 300)],
    "mixed": [(256, 256), (700, 256), (256, 256), (0, 300), (3, 260, 1000)],
}


COMPUTE = st.sampled_from([torch.float32, torch.bfloat16])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(256, 400), st.integers(256, 400)), min_size=1, max_size=4),
    st.integers(1, 8 * MiB),
    COMPUTE,
    COMPUTE,
    st.sampled_from(["standard", "gram"]),
    st.sampled_from(["batched", "blocks"]),
    st.sampled_from(["new", "out", "donate"]),
)
def test_the_bound_holds_for_every_way_of_doing_it(
    shapes: Shapes,
    limit: int,
    held: torch.dtype,
    compute: torch.dtype,
    method: str,
    products: str,
    where: str,
) -> None:
    settings = {"dtype": compute, "method": method, "products": products, "steps": 3}
    assert excess([*shapes, (256, 256)], limit, where, held=held, **settings)[0] <= 0


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)).map(lambda s: (s[0], sum(s))), min_size=1),
    st.integers(1, MiB),
    COMPUTE,
)
def test_small_wide_matrices_take_no_more_scratch_than_allowed(
    shapes: Shapes, limit: int, compute: torch.dtype
) -> None:
    assert excess(shapes, limit, "new", dtype=compute)[0] <= NUMBERS * len(shapes)


SMALL: dict[str, tuple[Shapes, str]] = {
    "out": ([(64, 64)] * 90, "out"),
    "donate": ([(64, 64)] * 90, "donate"),
    "tall": ([(96, 64), (64, 96)] * 40, "new"),
    "stacks that are cut": ([(7, 64, 96), (64, 96), (40, 32, 64)], "new"),
}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_small_matrices_take_no_more_scratch_than_allowed(name: str, compute: torch.dtype) -> None:
    shapes, where = SMALL[name]
    for limit in (1, 2 * MiB):
        assert excess(shapes, limit, where, dtype=compute)[0] <= NUMBERS * len(shapes)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["new", "donate"])
@pytest.mark.parametrize("name", LARGE)
def test_with_a_workspace_later_calls_take_no_scratch_and_give_the_same_bits(
    name: str, where: str, compute: torch.dtype
) -> None:
    xs = [torch.randn(shape) for shape in LARGE[name]]
    wanted = orthogonalize_many(xs, dtype=compute, steps=3)
    workspace = Workspace()
    kept: list[torch.Tensor] = []
    for call in range(4):
        given = [x.clone() for x in xs]
        with PeakBytes() as peak:
            found = orthogonalize_many(
                given, dtype=compute, steps=3, donate=where == "donate", workspace=workspace, max_scratch_bytes=2 * MiB
            )
        assert all(map(torch.equal, found, wanted))
        kept += found
        if call == 3:  # by then it has grown to the largest batch
            results = sum(y.numel() * y.itemsize for y in found) if where == "new" else 0
            # Results that keep the dtype of the products stay in their batch, and these in what the next took.
            batches = 2 * results if compute == torch.float32 else 0
            numbers = 16 * sum(x.numel() // x.shape[-1] for x in xs)  # norms of rows
            assert peak.most <= results + batches + numbers + 4 * KiB
    assert all(map(torch.equal, kept, wanted * 4)), "a result lay in memory that a later call has used"
    largest = max(explain(shape[-2:], dtype=compute, steps=3).scratch_bytes for shape in LARGE[name])
    assert 0 < workspace.nbytes <= max(2 * MiB, largest) + 4 * KiB


def test_a_copy_of_a_workspace_is_empty() -> None:
    workspace = Workspace()
    orthogonalize_many([torch.randn(256, 256)], workspace=workspace)
    orthogonalize_many([torch.randn(256, 256)], workspace=workspace)
    assert workspace.nbytes > 0
    assert copy.deepcopy(workspace).nbytes == 0
