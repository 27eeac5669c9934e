"""Derivatives, the transforms of torch.func, and torch.compile: one graph, the same numbers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from muonfx.polar import PRESETS, iteration, many, orthogonalize, orthogonalize_many, policy
from muonfx.testing.laws.compiling import Counter

from .strategies import TOLERANCE, gap, problem

# torch's own forward-mode tables go through torch.jit, which announces its end.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

NAMES = ["polar_express_5", "aol", "cubic"]
SHAPES = [(2, 3), (3, 2), (2, 2), (1, 3)]


def matrix(*shape: int, batch: tuple[int, ...] = ()) -> torch.Tensor:
    """A well-conditioned float64 matrix, so that finite differences mean something."""
    x = problem(3, *shape, "gaussian", batch).x
    eye = torch.eye(*shape, dtype=torch.float64)
    return x + eye


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_first_and_second_derivatives(shape: tuple[int, int], name: str) -> None:
    run = functools.partial(orthogonalize, coefficients=name, steps=2)
    batch, one = matrix(*shape, batch=(2,)).requires_grad_(), matrix(*shape).requires_grad_()
    assert torch.autograd.gradcheck(run, (batch,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (one,))


def test_derivatives_are_in_fp32_after_a_call_without_derivatives() -> None:
    run = many.Orthogonalizer("keller")
    x = problem(0, 8, 12).x.bfloat16()
    run([x])
    y = x.clone().requires_grad_()
    assert torch.equal(run([y])[0], orthogonalize(y, coefficients="keller"))
    assert not torch.equal(run([y])[0], run([x])[0])


@pytest.mark.parametrize("width", [2, 3])
def test_derivatives_with_respect_to_coefficients(width: int) -> None:
    table = torch.tensor([[3.0, -3.0, 1.0], [1.5, -0.5, 0.1]], dtype=torch.float64)[
        :, :width
    ].requires_grad_()
    x = matrix(2, 3).requires_grad_()

    def run(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return orthogonalize(z, coefficients=t, steps=3)

    assert torch.autograd.gradcheck(run, (x, table), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, table))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tensor_of_coefficients_is_the_same_numbers(dtype: torch.dtype) -> None:
    x = problem(0, 8, 12, "clustered").x
    steps = PRESETS["keller"].steps
    table = torch.tensor(steps, dtype=torch.float64)
    y = orthogonalize(x, coefficients=table, dtype=dtype)
    assert gap(y, orthogonalize(x, coefficients=steps, dtype=dtype)) < TOLERANCE[dtype]


def test_coefficients_can_be_mapped_over() -> None:
    x = problem(0, 5, 7, batch=(2,)).x.float()
    tables = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        run = functools.partial(lambda d, t: orthogonalize(x, coefficients=t, dtype=d), dtype)
        mapped = vmap(run)(tables)
        loop = torch.stack([run(t) for t in tables])
        assert mapped.dtype == torch.float32
        bound = 1e-4 if dtype == torch.float32 else 0.2
        torch.testing.assert_close(mapped, loop, rtol=bound, atol=bound)
    slopes = vmap(grad(lambda t: orthogonalize(x, coefficients=t, dtype=torch.float32).sum()))(
        tables
    )
    assert slopes.shape == tables.shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_vmap_equals_a_loop(shape: tuple[int, int], name: str) -> None:
    x = problem(1, *shape, "gaussian", (3, 2)).x
    run = functools.partial(orthogonalize, coefficients=name)
    loop = torch.stack([run(z) for z in x])
    assert gap(vmap(run)(x), loop) < 1e-12
    assert gap(vmap(vmap(run))(x), loop) < 1e-12
    assert gap(vmap(run, in_dims=-1, out_dims=-1)(x.movedim(0, -1)).movedim(-1, 0), loop) < 1e-12
    many = vmap(lambda z, w: orthogonalize_many([z, w.mT, z], coefficients=name))(x, x)
    for found, expected in zip(many, (loop, loop.mT, loop), strict=True):
        if name != "aol" or expected is loop or shape[0] != shape[1]:
            assert gap(found, expected if expected is loop else run(x.mT)) < 1e-12


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_fp64", [False, True])  # True: as in a compiled step on a GPU
def test_derivatives_at_zero_are_finite(
    monkeypatch: pytest.MonkeyPatch, in_fp64: bool, dtype: torch.dtype, name: str
) -> None:
    if in_fp64:
        monkeypatch.setattr(iteration, "frobenius_normalized", iteration.normalized_in_fp64)
    zero = torch.zeros(2, 3, 4)
    zero[1, 1, 1] = 1.0  # next to a matrix that is not zero
    run = functools.partial(orthogonalize, coefficients=name, dtype=dtype)
    _, tangent = jvp(run, (zero,), (torch.ones_like(zero),))
    _, pull = vjp(run, zero)
    assert tangent.isfinite().all()
    assert pull(torch.ones_like(zero))[0].isfinite().all()
    x = zero.requires_grad_()
    (once,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), x)
    assert twice[0].isfinite().all()


def test_many_is_differentiable() -> None:
    xs = [
        matrix(2, 3).requires_grad_(),
        matrix(3, 2).requires_grad_(),
        matrix(2, 3, batch=(2,)).requires_grad_(),
    ]
    assert torch.autograd.gradcheck(
        lambda *z: tuple(orthogonalize_many(z, steps=2)), tuple(xs), check_forward_ad=True
    )
    assert torch.autograd.gradgradcheck(lambda *z: tuple(orthogonalize_many(z, steps=1)), tuple(xs))
    small = grad(
        lambda z: sum(y.sum() for y in orthogonalize_many([z, z.mT], max_scratch_bytes=1))
    )(xs[0].detach())
    assert gap(small, grad(lambda z: 2 * orthogonalize(z).sum())(xs[0].detach())) < 1e-11


# ------------------------------------------------------------------------------------------------ "auto" in derivatives


@pytest.fixture
def has_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which "auto" is bf16."""
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: True)


@pytest.mark.usefixtures("has_bf16")
def test_auto_is_at_least_fp32_where_derivatives_are_taken_and_nowhere_else() -> None:
    x = problem(3, 6, 9, "gaussian").x.float()
    fp32 = functools.partial(orthogonalize, dtype=torch.float32)
    bf16 = functools.partial(orthogonalize, dtype=torch.bfloat16)
    assert torch.equal(orthogonalize(x), bf16(x))
    assert torch.equal(vmap(orthogonalize)(x[None]), vmap(bf16)(x[None]))
    with torch.no_grad():
        assert torch.equal(orthogonalize(x.clone().requires_grad_()), bf16(x))
    assert torch.equal(orthogonalize(x.clone().requires_grad_()), fp32(x))
    with forward_ad.dual_level():
        assert torch.equal(
            forward_ad.unpack_dual(orthogonalize(forward_ad.make_dual(x, x))).primal, fp32(x)
        )
    taken: list[Callable[[Any], Any]] = [
        lambda run: grad(lambda z: run(z)[0, 0])(x),
        lambda run: jvp(run, (x,), (torch.ones_like(x),)),
        lambda run: vjp(run, x)[1](torch.ones_like(x)),
        lambda run: jacrev(run)(x),
        lambda run: jacfwd(run)(x),
        lambda run: vmap(grad(lambda z: run(z)[0, 0]))(x[None]),
        lambda run: grad(lambda z: vmap(run)(z)[0, 0, 0])(x[None]),
    ]
    for take in taken:
        torch.testing.assert_close(take(orthogonalize), take(fp32), rtol=0, atol=0)
    assert grad(lambda z: orthogonalize(z.to(torch.bfloat16))[0, 0].float())(x).isfinite().all()
    assert torch.equal(
        grad(lambda z: bf16(z)[0, 0])(x),
        grad(lambda z: orthogonalize(z, dtype=torch.bfloat16)[0, 0])(x),
    )


@pytest.mark.usefixtures("has_bf16")
@pytest.mark.parametrize("taken", ["none", "grad", "jvp", "autograd"])
def test_auto_under_a_compiler_is_as_without(taken: str) -> None:
    x = problem(3, 6, 9, "gaussian").x.float()
    runs: dict[str, Callable[[torch.Tensor], Any]] = {
        "none": orthogonalize,
        "grad": grad(lambda z: orthogonalize(z)[0, 0]),
        "jvp": lambda z: jvp(orthogonalize, (z,), (z,)),
        "autograd": orthogonalize,
    }
    x = x.requires_grad_(taken == "autograd")
    torch._dynamo.reset()
    compiled = torch.compile(runs[taken], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), runs[taken](x), rtol=1e-6, atol=1e-6)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Safety, scaled rows, two coefficients a step.
@pytest.mark.parametrize("name", ["polar_express", "aol", "cubic"])
def test_traced_equals_eager(name: str) -> None:
    x = problem(0, 6, 9, batch=(2,)).x.float()
    settings = {"coefficients": name, "dtype": torch.float32}
    run = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    assert gap(run(x, **settings), orthogonalize(x, **settings)) < 1e-5


def test_many_traces_without_recompiling() -> None:
    counter = Counter()
    run = torch.compile(
        lambda *z: orthogonalize_many(z, dtype=torch.float32), fullgraph=True, backend=counter
    )
    for seed in range(3):
        xs = [problem(seed, *shape).x.float() for shape in ((4, 6), (6, 4), (5, 5), (4, 6))]
        for found, expected in zip(
            run(*xs), orthogonalize_many(xs, dtype=torch.float32), strict=True
        ):
            assert gap(found, expected) < 1e-5
    assert counter.graphs == 1


MANY_SHAPES = [
    (8, 12),
    (16, 40),
    (40, 16),
    (20, 20),
    (24, 9),
    (2, 8, 12),
    (3, 13, 9),
    (10, 11),
    (12, 31),
    (31, 12),
]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.float16, "coefficients": "aol"},
        {"dtype": torch.float32, "coefficients": [(3.0, -3.0, 1.0), (1.5, -0.5)], "steps": 3},
        {"dtype": torch.float32, "max_scratch_bytes": 1},
    ],
    ids=str,
)
def test_more_shapes_than_the_compiler_would_trace_one_by_one(
    settings: dict, dynamic: bool | None
) -> None:
    counter = Counter()
    run = torch.compile(
        lambda x: orthogonalize(x, **settings), fullgraph=True, backend=counter, dynamic=dynamic
    )
    for shape in MANY_SHAPES:
        x = torch.randn(shape)
        assert gap(run(x), orthogonalize(x, **settings)) < (
            1e-5 if settings.get("dtype") == torch.float32 else 0.2
        )
    # Wide, tall, square and a batch; without `dynamic`, the first shape too.
    assert counter.graphs <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "dynamic"),
    [({"dtype": torch.float32, "method": "gram"}, True), ({"dtype": torch.bfloat16}, None)],
)
def test_large_matrices_trace_at_a_second_and_third_shape(
    settings: dict, dynamic: bool | None
) -> None:
    run = torch.compile(
        lambda x: orthogonalize(x, **settings), fullgraph=True, backend=Counter(), dynamic=dynamic
    )
    for shape in [(256, 300), (260, 520), (320, 270), (2, 260, 264)]:
        x = torch.randn(shape)
        assert gap(run(x), orthogonalize(x, **settings)) < (
            1e-3 if settings["dtype"] == torch.float32 else 0.2
        )


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (260, 300)])
def test_symbolic_traces_are_right_at_other_shapes(mode: str, shape: tuple[int, int]) -> None:
    trace = make_fx(lambda x: orthogonalize(x, dtype=torch.float32), tracing_mode=mode)(
        torch.randn(shape)
    )
    other = (shape[0] + 1, shape[1] + 2) if mode == "symbolic" and max(shape) < 100 else shape
    x = torch.randn(other)
    assert gap(trace(x), orthogonalize(x, dtype=torch.float32)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, "auto"])
def test_compiled_equals_eager(dtype) -> None:
    x = problem(0, 24, 16, "gaussian", (2,)).x.float()
    run = torch.compile(lambda z: orthogonalize(z, dtype=dtype), fullgraph=True)
    for k in (1.0, 2.0**-100, 2.0**100):
        assert gap(run(x * k), orthogonalize(x, dtype=dtype)) < (
            1e-5 if dtype == torch.float32 else 0.2
        )
    assert torch.equal(run(x * 2.0**-100), run(x))
    zero = torch.zeros_like(x)
    assert torch.equal(run(zero), zero)
