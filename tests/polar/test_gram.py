"""The Gram form, products by blocks, results in place; and scratch, which is bounded and counted in bytes."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import PeakBytes
from muonfx.polar import PRESETS, Workspace, band, explain, orthogonalize, orthogonalize_many
from muonfx.polar.policy import SMALLEST_GRAM

from .strategies import DTYPES, SPECTRA, Problem, gap, problem, problems, relative, tolerance

EQUIVARIANT = tuple(name for name in PRESETS if name != "aol")
sets = st.sampled_from(EQUIVARIANT)


@given(problems(), sets, st.randoms(use_true_random=False))
def test_gram_is_the_same_polynomial_under_any_restarts(p: Problem, name: str, random) -> None:
    steps = len(PRESETS[name].steps)
    restarts = sorted(random.sample(range(1, steps), random.randint(0, min(2, steps - 1))))
    # Without restarts a float64 run of ten steps amplifies its rounding by the square of all slopes: keep stages short.
    cut = replace(PRESETS[name], restarts=tuple(sorted({*restarts, *range(3, steps, 3)})))
    y = orthogonalize(p.x, coefficients=cut, method="gram")
    assert relative(y, orthogonalize(p.x, coefficients=name, method="standard")) < 1e-6


@given(problems(), st.sampled_from(list(PRESETS)), st.sampled_from([torch.float64, torch.float32]))
def test_gram_equals_standard_within_the_dtype(p: Problem, name: str, dtype: torch.dtype) -> None:
    x = p.x.to(dtype)
    gram, plain = (
        orthogonalize(x, coefficients=name, method=m, dtype=dtype) for m in ("gram", "standard")
    )
    assert relative(gram, plain) < 10 * tolerance("polar_express", dtype)


CASES = [
    (torch.bfloat16, (256, 512)),
    pytest.param(torch.bfloat16, (256, 4096), marks=pytest.mark.deep),  # half of the time of all
    pytest.param(torch.bfloat16, (512, 1024), marks=pytest.mark.slow),
    pytest.param(torch.float16, (256, 512), marks=pytest.mark.slow),
    (torch.float32, (256, 512)),
]


@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_gram_rounds_no_more_than_half_as_much_again_as_standard(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    peak = band(name).peak
    products = "blocks" if shape[0] >= 512 else "batched"  # as on a CPU
    for kind in SPECTRA:
        x = problem(sum(shape), *shape, kind).x.to(dtype)
        exact = orthogonalize(x.double(), coefficients=name, method="standard")
        plain = orthogonalize(x, coefficients=name, method="standard", dtype=dtype)
        gram = orthogonalize(x, coefficients=name, method="gram", dtype=dtype, products=products)
        assert relative(gram, exact) <= 1.5 * relative(plain, exact), kind
        assert torch.linalg.matrix_norm(gram.double(), 2) <= 1.05 * peak, kind


def test_policy_stays_with_standard_where_gram_would_round_more_or_cost_more() -> None:
    def taken(shape: tuple[int, int], **settings) -> str:
        return explain(shape, **{"dtype": torch.bfloat16, **settings}).method

    assert taken((512, 2048)) == taken((2048, 512)) == "gram"
    assert taken((512, 512)) == taken((1024, 1024)) == "standard"
    assert taken((SMALLEST_GRAM - 1, 4096)) == "standard"
    assert taken((512, 2048), coefficients="aol") == "standard"
    unsafe = explain(
        (512, 2048),
        dtype=torch.bfloat16,
        coefficients=replace(PRESETS["polar_express"], restarts=(2, 4, 6)),
    )
    # The set's restarts are not safe in bf16.
    assert max(len(stage.steps) for stage in unsafe.stages[:-1]) == 1
    assert taken((512, 2048), coefficients=torch.ones(3, 3)) == "standard"


@pytest.mark.parametrize("dtype", [*DTYPES])
@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (2, 260, 300), (300, 300)])
def test_large_matrices_take_the_same_path_alone_and_among_others(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    # fp16 products take minutes on a CPU
    compute = torch.float32 if dtype == torch.float16 else dtype
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    copy = x.clone()
    alone = orthogonalize(x, dtype=compute)
    assert torch.equal(x, copy)
    assert torch.equal(orthogonalize_many([other, x, x.mT], dtype=compute)[1], alone)
    assert torch.equal(orthogonalize_many([x, other], dtype=compute, max_scratch_bytes=1)[0], alone)
    small = {torch.float64: 1e-10, torch.float32: 1e-3}.get(compute, 0.1)
    assert gap(orthogonalize(x.requires_grad_(), dtype=compute).detach(), alone) < small


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scratch", [None, 1])
@pytest.mark.parametrize(
    "shapes",
    [
        [(5, 8)],
        [(4, 5, 8), (8, 5)],
        [(300, 400), (400, 300), (300, 400)],
        [(3, 300, 300), (300, 300), (0, 4)],
    ],
)
def test_donated_inputs_take_the_results(
    shapes: list[tuple[int, ...]], scratch: int | None, compute: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(shape, generator=generator) for shape in shapes]
    expected = orthogonalize_many(xs, dtype=compute)
    own = [x.clone() for x in xs]
    found = orthogonalize_many(own, dtype=compute, donate=True, max_scratch_bytes=scratch)
    assert all(y is x and torch.equal(y, e) for y, x, e in zip(found, own, expected, strict=True))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_large_matrices_of_any_magnitude_keep_their_polynomial(compute: torch.dtype) -> None:
    drawn = (
        torch.randn(256, 257, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 8
    )
    for magnitude in (1e-36, 1e-20, 1.0, 1e20, 1e38):
        x = (drawn * magnitude).float()
        found = orthogonalize(x, dtype=compute, steps=1)
        assert gap(found, orthogonalize(x.double(), steps=1)) < {torch.float32: 1e-5}.get(
            compute, 0.02
        ), magnitude


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [6, 8, 12])
@pytest.mark.parametrize("name", ["keller", "polar_express_5"])
def test_more_steps_than_a_set_has_keep_short_stages(
    name: str, steps: int, dtype: torch.dtype
) -> None:
    # keller's own restarts (2, 4) once ended there: a stage of four steps and more, garbage on a matrix of low rank
    assert (
        max(
            len(stage.steps) for stage in explain((256, 512), coefficients=name, steps=steps).stages
        )
        <= 2
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator) @ torch.randn(16, 512, generator=generator)
    exact = orthogonalize(x.double(), coefficients=name, steps=steps, method="standard")
    gram, plain = (
        orthogonalize(x, coefficients=name, steps=steps, method=m, dtype=dtype)
        for m in ("gram", "standard")
    )
    assert relative(gram, exact) < 2 * relative(plain, exact)


# torch.jit, with which torch derives products, warns.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_large_matrices_carry_tangents() -> None:
    x, t = torch.randn(
        2, 256, 260, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind()
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(orthogonalize(forward_ad.make_dual(x, t)))
    expected, wanted = torch.func.jvp(orthogonalize, (x,), (t,))
    assert torch.equal(y, expected)
    assert gap(tangent, wanted) < 1e-9


@pytest.mark.parametrize("side", [8, 300])
def test_donated_inputs_that_share_memory_have_the_same_values(side: int) -> None:
    stack = torch.randn(2, side, side, generator=torch.Generator().manual_seed(0))
    for views in ([0, 0], [slice(None), 0], [slice(None), slice(None)], [0, 1]):
        base = stack.clone()
        expected = orthogonalize_many([stack[i] for i in views], dtype=torch.float32)
        found = orthogonalize_many([base[i] for i in views], dtype=torch.float32, donate=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    parameter = torch.nn.Parameter(stack[0].clone())
    with torch.no_grad():
        assert orthogonalize_many([parameter], donate=True)[0] is parameter


def test_donated_matrices_at_following_offsets_of_two_buffers_stay_apart() -> None:
    buffers = torch.randn(2, 2, 300, 300, generator=torch.Generator().manual_seed(0)).unbind()
    xs = [buffers[0].clone()[0], buffers[1].clone()[1]]
    expected = orthogonalize_many(xs, dtype=torch.float32)
    found = orthogonalize_many(xs, dtype=torch.float32, donate=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, 8), (2, 8, 4)],
        [(4, 8), (8, 4)],
        [(4, 8), (4, 8)],
        [(3, 256, 300), (300, 256), (256, 300)],
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_new_results_keep_no_more_memory_than_they_take(
    shapes: list[tuple[int, ...]], donate: bool, compute: torch.dtype
) -> None:
    xs = [torch.randn(shape) for shape in shapes]
    # Overwritten in no case, since its elements share memory.
    xs.append(xs[0].new_ones(()).expand(shapes[0]))
    new = [
        y
        for y, x in zip(orthogonalize_many(xs, dtype=compute, donate=donate), xs, strict=True)
        if y is not x
    ]
    storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in new}
    assert sum(storages.values()) == sum(y.nbytes for y in new)


@pytest.mark.parametrize("steps", [[(10.0, -30.0, 40.0)] * 8, [(10.0, 0.0, 0.0)] * 60])
def test_polynomials_that_diverge_give_what_they_give(steps: list) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for method in ("gram", "standard"):
        assert (
            not orthogonalize(x, coefficients=steps, method=method, dtype=torch.float32)
            .isfinite()
            .all()
        )


@pytest.mark.parametrize("products", ["batched", "blocks"])
def test_polynomials_without_a_linear_term_are_computed_by_blocks_too(products: str) -> None:
    x = torch.randn(256, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = [(1.25, 0.0, -0.25)] * 8
    exact = orthogonalize(x, coefficients=steps, method="standard", products="batched")
    assert torch.allclose(
        orthogonalize(x, coefficients=steps, method="standard", products=products),
        exact,
        atol=1e-12,
    )


KiB, MiB = 1 << 10, 1 << 20
NUMBERS = 64
"""Bytes of a small matrix in addition to its plan's: a norm and a power of two, which for a 1 x 1 matrix count."""

Shapes = Sequence[tuple[int, ...]]


def excess(
    shapes: Shapes, limit: int, where: str, *, held: torch.dtype = torch.float32, **settings: Any
) -> tuple[int, int]:
    """The bytes at the peak above the bound, which holds at 0 or less; and the bytes of all results.

    The bound is `max_scratch_bytes`, or what one matrix needs (`Plan.scratch_bytes`) if that is more. Bytes are counted
    at the dispatcher: the allocations within one operator are not among them.
    `where` is "new" if results are new tensors, which are not scratch; with "donate" they overwrite the inputs.
    """
    xs = [torch.ones(shape, dtype=held) for shape in shapes]
    plans = [explain(shape[-2:], held=held, **settings) for shape in shapes]
    with PeakBytes() as peak:
        found = orthogonalize_many(
            xs, max_scratch_bytes=limit, donate=where == "donate", **settings
        )
    results = sum(y.numel() * y.itemsize for y in found)
    assert peak.most >= (results if where == "new" else 1)  # the counting sees what it must
    bound = max(limit, *(plan.scratch_bytes for plan in plans), 0)
    return peak.most - (results if where == "new" else 0) - bound, results


class BatchSizes(TorchDispatchMode):
    """Records how many matrices each batched product has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.found.add(args[0].shape[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("threads", "sizes"), [(1, {3}), (2, {2}), (4, {3})])
def test_a_batch_on_a_cpu_has_a_multiple_of_the_threads_where_it_has_more_than_they(
    threads: int, sizes: set[int], keep_threads: None
):
    xs = [torch.ones(256, 256)] * 6
    room_for_three = 3 * explain((256, 256)).scratch_bytes
    torch.set_num_threads(threads)
    with BatchSizes() as batches:
        orthogonalize_many(xs, max_scratch_bytes=room_for_three)
    assert batches.found == sizes


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Restore the number of threads after a test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


LARGE: dict[str, Shapes] = {
    "one": [(256, 256)],
    "wide and tall": [(256, 512), (512, 256)] * 3,
    "equal": [(300, 300)] * 7,
    "stacks": [(5, 256, 300), (256, 300), (2, 2, 300, 256), (256, 300)],
    "mixed": [(256, 256), (700, 256), (256, 256), (0, 300), (3, 260, 1000)],
}


COMPUTE = st.sampled_from([torch.float32, torch.bfloat16])


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(256, 400), st.integers(256, 400)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 8 * MiB),
    COMPUTE,
    COMPUTE,
    st.sampled_from(["standard", "gram"]),
    st.sampled_from(["batched", "blocks"]),
    st.sampled_from(["new", "donate"]),
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
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 64)).map(lambda s: (s[0], sum(s))), min_size=1
    ),
    st.integers(1, MiB),
    COMPUTE,
)
def test_small_wide_matrices_take_no_more_scratch_than_allowed(
    shapes: Shapes, limit: int, compute: torch.dtype
) -> None:
    assert excess(shapes, limit, "new", dtype=compute)[0] <= NUMBERS * len(shapes)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_small_wide_and_tall_matrices_take_no_more_scratch_than_allowed(
    compute: torch.dtype,
) -> None:
    shapes = [(96, 64), (64, 96)] * 40
    for limit in (1, 2 * MiB):
        assert excess(shapes, limit, "new", dtype=compute)[0] <= NUMBERS * len(shapes)


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
                given,
                dtype=compute,
                steps=3,
                donate=where == "donate",
                workspace=workspace,
                max_scratch_bytes=2 * MiB,
            )
        assert all(map(torch.equal, found, wanted))
        kept += found
        if call == 3:  # by then it has grown to the largest batch
            results = sum(y.numel() * y.itemsize for y in found) if where == "new" else 0
            # Results that keep the dtype of the products stay in their batch, and these in what the next took.
            batches = 2 * results if compute == torch.float32 else 0
            numbers = 16 * sum(x.numel() // x.shape[-1] for x in xs)  # norms of rows
            assert peak.most <= results + batches + numbers + 4 * KiB
    assert all(map(torch.equal, kept, wanted * 4)), (
        "a result lay in memory that a later call has used"
    )
    largest = max(
        explain(shape[-2:], dtype=compute, steps=3).scratch_bytes for shape in LARGE[name]
    )
    assert 0 < workspace.nbytes <= max(2 * MiB, largest) + 4 * KiB


def test_a_copy_of_a_workspace_is_empty() -> None:
    workspace = Workspace()
    orthogonalize_many([torch.randn(256, 256)], workspace=workspace)
    orthogonalize_many([torch.randn(256, 256)], workspace=workspace)
    assert workspace.nbytes > 0
    assert copy.deepcopy(workspace).nbytes == 0
