"""torch.compile: one graph, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from muonfx.polar import KNOWN, orthogonalize, orthogonalize_many

from .strategies import gap, problem

# The compiler imports torch.jit, which announces its end.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", list(KNOWN))
def test_traced_equals_eager(name: str) -> None:
    x = problem(0, 6, 9, batch=(2,)).x.float()
    run = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    assert (
        gap(run(x, coefficients=name, dtype=torch.float32), orthogonalize(x, coefficients=name, dtype=torch.float32))
        < 1e-5
    )


@pytest.mark.parametrize("coefficients", [[(3.0, -3.0, 1.0), (1.5, -0.5)], torch.tensor([[3.0, -3.0, 1.0]])])
def test_explicit_coefficients_and_auto_dtype_trace(coefficients) -> None:
    x = problem(0, 9, 6).x.float()
    run = torch.compile(
        lambda z: orthogonalize(z, coefficients=coefficients, steps=3), fullgraph=True, backend="aot_eager"
    )
    assert gap(run(x), orthogonalize(x, coefficients=coefficients, steps=3)) < 0.2  # "auto" may be bf16


def test_many_traces_without_recompiling() -> None:
    traces: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        traces.append(len(graph.graph.nodes))
        return graph.forward

    run = torch.compile(lambda *z: orthogonalize_many(z, dtype=torch.float32), fullgraph=True, backend=backend)
    for seed in range(3):
        xs = [problem(seed, *shape).x.float() for shape in ((4, 6), (6, 4), (5, 5), (4, 6))]
        for found, expected in zip(run(*xs), orthogonalize_many(xs, dtype=torch.float32), strict=True):
            assert gap(found, expected) < 1e-5
    assert len(traces) == 1


def test_gradient_through_a_traced_function() -> None:
    x = problem(0, 4, 6, "gaussian").x.requires_grad_()
    run = torch.compile(lambda z: orthogonalize(z, steps=2).sum(), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(run(x), x)
    (expected,) = torch.autograd.grad(orthogonalize(x, steps=2).sum(), x)
    assert gap(found, expected) < 1e-11


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
