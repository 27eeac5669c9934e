"""torch.compile: one graph, the same numbers."""

from collections.abc import Iterator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from muonfx.polar import orthogonalize, orthogonalize_many
from muonfx.testing.laws.compiling import Counter

from .strategies import gap, problem

# The compiler imports torch.jit, which announces its end.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["polar_express", "aol", "cubic"])  # safety, scaled rows, two coefficients a step
def test_traced_equals_eager(name: str) -> None:
    x = problem(0, 6, 9, batch=(2,)).x.float()
    settings = {"coefficients": name, "dtype": torch.float32}
    run = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    assert gap(run(x, **settings), orthogonalize(x, **settings)) < 1e-5


def test_many_traces_without_recompiling() -> None:
    counter = Counter()
    run = torch.compile(lambda *z: orthogonalize_many(z, dtype=torch.float32), fullgraph=True, backend=counter)
    for seed in range(3):
        xs = [problem(seed, *shape).x.float() for shape in ((4, 6), (6, 4), (5, 5), (4, 6))]
        for found, expected in zip(run(*xs), orthogonalize_many(xs, dtype=torch.float32), strict=True):
            assert gap(found, expected) < 1e-5
    assert counter.graphs == 1


SHAPES = [(8, 12), (16, 40), (40, 16), (20, 20), (24, 9), (2, 8, 12), (3, 13, 9), (10, 11), (12, 31), (31, 12)]


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
def test_more_shapes_than_the_compiler_would_trace_one_by_one(settings: dict, dynamic: bool | None) -> None:
    counter = Counter()
    run = torch.compile(lambda x: orthogonalize(x, **settings), fullgraph=True, backend=counter, dynamic=dynamic)
    for shape in SHAPES:
        x = torch.randn(shape)
        assert gap(run(x), orthogonalize(x, **settings)) < (1e-5 if settings.get("dtype") == torch.float32 else 0.2)
    assert counter.graphs <= 5  # wide, tall, square and a batch; without `dynamic`, the first shape too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "dynamic"), [({"dtype": torch.float32, "method": "gram"}, True), ({"dtype": torch.bfloat16}, None)]
)
def test_large_matrices_trace_at_a_second_and_third_shape(settings: dict, dynamic: bool | None) -> None:
    run = torch.compile(lambda x: orthogonalize(x, **settings), fullgraph=True, backend=Counter(), dynamic=dynamic)
    for shape in [(256, 300), (260, 520), (320, 270), (2, 260, 264)]:
        x = torch.randn(shape)
        assert gap(run(x), orthogonalize(x, **settings)) < (1e-3 if settings["dtype"] == torch.float32 else 0.2)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (260, 300)])
def test_symbolic_traces_are_right_at_other_shapes(mode: str, shape: tuple[int, int]) -> None:
    trace = make_fx(lambda x: orthogonalize(x, dtype=torch.float32), tracing_mode=mode)(torch.randn(shape))
    other = (shape[0] + 1, shape[1] + 2) if mode == "symbolic" and max(shape) < 100 else shape
    x = torch.randn(other)
    assert gap(trace(x), orthogonalize(x, dtype=torch.float32)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, "auto"])
def test_compiled_equals_eager(dtype) -> None:
    x = problem(0, 24, 16, "gaussian", (2,)).x.float()
    run = torch.compile(lambda z: orthogonalize(z, dtype=dtype), fullgraph=True)
    for k in (1.0, 2.0**-100, 2.0**100):
        assert gap(run(x * k), orthogonalize(x, dtype=dtype)) < (1e-5 if dtype == torch.float32 else 0.2)
    assert torch.equal(run(x * 2.0**-100), run(x))
    zero = torch.zeros_like(x)
    assert torch.equal(run(zero), zero)
