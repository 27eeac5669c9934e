"""The products of quack-kernels on a CPU, with a package of the same signature that computes with torch.

tests/test_gpu.py runs the real package.
"""

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.polar import PRESETS, explain, orthogonalize, policy, quack
from muonfx.polar.iteration import newton_schulz
from muonfx.polar.products import Buffered, Functional
from muonfx.polar.stages import staged
from muonfx.polar.workspace import Workspace
from tests.processes import run_python

CPU = torch.device("cpu")
SIDE = 320  # replaces `SMALLEST_SIDE`, so that a test is fast
SHAPE = (SIDE, SIDE + 80)

STAND_IN = """
import torch

calls = []

def gemm_symmetric(
    A, B, C=None, out=None, out_dtype=None, dynamic_scheduler=False, alpha=1.0, beta=1.0, split_k=1, split_k_mode=0
):
    assert B.data_ptr() == A.data_ptr() and B.stride() == A.mT.stride(), "B is the transpose of A"
    assert A.dtype in (torch.bfloat16, torch.float16)
    for x in (A, out) if C is None else (A, C, out):
        assert x.ndim == 3 and x.data_ptr() % 16 == 0, "16 bytes are moved at a time"
        assert 1 in x.stride()[1:]
        assert all(stride == 1 or (stride > 0 and stride % 8 == 0) for stride in x.stride())
    calls.append(tuple(A.shape))
    exact = alpha * (A.float() @ B.float())
    if C is not None:
        exact += beta * C.float()
    upper = wrong(exact).triu()
    return out.copy_(upper + upper.triu(1).mT)

def wrong(exact):
    return exact
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The interface of a quack that computes with torch; this CPU counts as a GPU on which quack is used."""
    package = tmp_path / "quack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "gemm_interface.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("quack", "quack.gemm_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(quack, "is_capable", lambda device: device.type == "cpu")
    monkeypatch.setattr(quack, "SMALLEST_SIDE", SIDE)
    quack._failure.cache_clear()
    yield importlib.import_module("quack.gemm_interface")
    quack._failure.cache_clear()
    for name in ("quack", "quack.gemm_interface"):
        sys.modules.pop(name, None)


def test_products_that_pass_the_self_test_are_used(installed: Any) -> None:
    before = torch.random.get_rng_state()
    plan = explain(SHAPE, dtype=torch.bfloat16)
    assert (plan.products, plan.small_products) == ("quack", "quack")
    assert "quack-kernels passed its self-test on cpu" in str(plan)
    assert torch.equal(before, torch.random.get_rng_state())
    tested = len(installed.calls)

    x = torch.randn(2, *SHAPE)
    exact = orthogonalize(x.double())
    for matrix in (x, x.mT):
        result = orthogonalize(matrix, dtype=torch.bfloat16).double()
        reference = exact if matrix is x else exact.mT
        assert (result - reference).norm() < 0.03 * reference.norm()
    assert installed.calls[tested:]
    assert all(SIDE in shape for shape in installed.calls[tested:]), "the self-test ran again"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tall", [True, False])
def test_the_whole_iteration_is_that_of_torch(
    installed: Any, tall: bool, dtype: torch.dtype
) -> None:
    n = 40
    x = torch.randn(2, n, 2 * n, generator=torch.Generator().manual_seed(n))
    x = (x / torch.linalg.matrix_norm(x, keepdim=True)).to(dtype)
    stages = staged(PRESETS["quintic"].steps, (2, 3), 1 / n, 2.0)
    batch = (x.mT if tall else x).contiguous().clone()
    on = Buffered(
        batch, tall=tall, how="quack", small="quack", workspace=Workspace(), results=Workspace()
    )
    result = newton_schulz(batch, stages, on)
    expected = newton_schulz(x, stages, Functional())
    assert ((result.mT if tall else result) - expected).norm() < 0.02 * expected.norm()
    assert len(installed.calls) > 2 * len(stages)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_compiled_step_uses_the_products(installed: Any, method: str) -> None:
    run = functools.partial(orthogonalize, dtype=torch.bfloat16, method=method)
    x = torch.randn(2, *SHAPE)
    expected = run(x)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compiled(x)  # traces
    before = len(installed.calls)
    result = compiled(x)
    assert len(installed.calls) - before >= 5
    assert (result - expected).norm() < 0.02 * expected.norm()


def test_compiled_derivatives_and_vmap_do_without_the_products(installed: Any) -> None:
    run = functools.partial(orthogonalize, dtype=torch.bfloat16)
    x = torch.randn(2, *SHAPE)
    direction = torch.randn(2, *SHAPE)
    run(x)  # with the products, after the self-test
    before = len(installed.calls)

    def slope(x: torch.Tensor) -> torch.Tensor:
        return (run(x) * direction).sum()

    for function in (torch.func.grad(slope), torch.func.vmap(run)):
        expected = function(x)
        torch._dynamo.reset()
        result = torch.compile(function, backend="aot_eager")(x)
        assert (result - expected).norm() < 0.05 * expected.norm()
    leaf = x.clone().requires_grad_()
    torch._dynamo.reset()
    torch.compile(slope, backend="aot_eager")(leaf).backward()
    assert leaf.grad is not None
    expected = torch.func.grad(slope)(x)
    assert (leaf.grad - expected).norm() < 0.05 * expected.norm()
    assert len(installed.calls) == before


def slightly_wrong(exact: torch.Tensor) -> torch.Tensor:
    exact[-1, 3, 5] *= 1.05
    return exact


def unfinished(exact: torch.Tensor) -> torch.Tensor:
    exact[:, :, -1] = torch.nan
    return exact


def raising(exact: torch.Tensor) -> torch.Tensor:
    raise OSError("no compiler for this device")


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "slightly wrong": (
        slightly_wrong,
        r"X X\^T of 2 x 264 x 136 in torch.bfloat16 has .* times the error of rounding",
    ),
    "unfinished": (unfinished, "has nan times the error"),
    "raising": (raising, "OSError: no compiler for this device"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_products_that_fail_the_self_test_are_replaced_by_those_of_torch(
    installed: Any, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    function, message = WRONG[mistake]
    monkeypatch.setattr(installed, "wrong", function)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    tx = mfx.orthogonalize(dtype=torch.bfloat16)
    warned = f"quack-kernels failed its self-test on cpu, so torch's products are used: .*{message}"
    with pytest.warns(RuntimeWarning, match=warned):
        result = tx.update({"w": x}, mfx.core.EmptyState())[0]["w"]
    tested = len(installed.calls)
    with warnings.catch_warnings(action="error"):  # once a process
        assert torch.equal(result, orthogonalize(x, dtype=torch.bfloat16))
        plan = explain(SHAPE, dtype=torch.bfloat16)
    assert torch.equal(result, orthogonalize(x, products="batched", dtype=torch.bfloat16))
    assert (plan.products, plan.small_products) == ("batched", "batched")
    assert re.search(f"quack-kernels failed its self-test on cpu: .*{message}", str(plan))
    assert len(installed.calls) == tested


def test_an_installed_quack_that_cannot_be_imported_is_a_warning(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "quack.gemm_interface")
    (tmp_path / "quack" / "gemm_interface.py").write_text("raise OSError('libcute.so: broken')")
    with pytest.warns(
        RuntimeWarning, match=r"torch's products are used: OSError: libcute\.so: broken"
    ):
        assert explain(SHAPE, dtype=torch.bfloat16).products == "batched"


def test_a_quack_that_is_not_installed_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "is_capable", lambda device: True)
    monkeypatch.setattr(quack.importlib.util, "find_spec", lambda name: None)
    quack._failure.cache_clear()
    with warnings.catch_warnings(action="error"):
        plan = explain((4096, 4096), dtype=torch.bfloat16)
    quack._failure.cache_clear()
    assert (plan.products, plan.reasons[2]) == ("batched", "quack-kernels is not installed")


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((SIDE - 8, 4096), torch.bfloat16, f"not used below a side of {SIDE}"),
        ((SIDE + 1, 4096), torch.bfloat16, "sides that are multiples of 8"),
        ((SIDE, 4097), torch.float16, "sides that are multiples of 8"),
        ((4096, 4096), torch.float32, "not used for torch.float32"),
        ((4096, 4096), torch.float64, "not used for torch.float64"),
    ],
)
def test_other_matrices_use_torch_and_test_nothing(
    installed: Any, shape: tuple[int, int], dtype: torch.dtype, reason: str
) -> None:
    plan = explain(shape, dtype=dtype)
    assert (plan.products, plan.small_products) == ("batched", "batched")
    assert reason in plan.reasons[2]
    assert not installed.calls


@pytest.mark.parametrize(
    ("capability", "capable"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
)
def test_hopper_and_blackwell_are_capable(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], capable: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(quack, "cuda_capability", lambda index: capability)
    assert quack.is_capable(torch.device("cuda", 0)) == capable
    assert not quack.is_capable(CPU)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert not quack.is_capable(torch.device("cuda", 0))


def test_batched_products_and_plans_for_all_ranks_test_nothing(installed: Any) -> None:
    orthogonalize(torch.randn(SHAPE), products="batched", dtype=torch.bfloat16)
    mfx.orthogonalize(dtype=torch.bfloat16)
    request = policy.Request(*SHAPE, CPU, policy.polynomials("keller", None), portable=True)
    plan = policy.plan_in(torch.bfloat16, request)
    assert plan.products == "batched"
    assert not installed.calls


@pytest.mark.parametrize("around", ["fake tensors", "a derivative", "a default device"])
def test_the_self_test_computes_values_whatever_surrounds_its_first_use(
    installed: Any, around: str
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if around == "a derivative":
        torch.func.grad(lambda x: x * (quack.failure(CPU, torch.bfloat16) is None))(
            torch.tensor(1.0)
        )
    else:
        with FakeTensorMode() if around == "fake tensors" else torch.device("meta"):
            quack.failure(CPU, torch.bfloat16)
    assert quack.failure(CPU, torch.bfloat16) is None
    assert installed.calls


def test_the_package_imports_no_quack_and_no_triton_itself() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import muonfx, muonfx.polar.quack as quack\n"
    )
    script += "muonfx.polar.orthogonalize(torch.ones(3, 4))\n"
    script += "assert not {'quack', 'triton'} & (set(sys.modules) - before)"
    run_python("-c", script)
