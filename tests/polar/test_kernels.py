"""The symmetric products: a GPU's own kernels where there is one, else the same kernels in Triton's interpreter.

The law is one: a result is the upper triangle of `alpha p q^T + beta addend + identity I`, mirrored.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonfx.polar.kernels import available, device, symmetric_matmul
from muonfx.polar.kernels.tiles import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_TILES = (None, Tile(16, 16, 16, group=2), Tile(16, 32, 16, group=3, share=False), Tile(32, 32, 32, group=1))

# numpy, which the interpreter is made of, warns of infinity times zero; torch's tables for forward mode go through
# torch.jit, which announces its end.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
with_kernels = pytest.mark.skipif(not available(DEVICE), reason="Triton is missing, or the GPU is too old")


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def spaced_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -2).flatten(-3, -2)[..., ::2, :]


def spaced_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def framed(x: torch.Tensor) -> torch.Tensor:
    """Inside a larger tensor of NaN: what is read beyond an edge shows."""
    frame = x.new_full((x.shape[0] + 2, x.shape[1] + 3, x.shape[2] + 5), torch.nan)
    frame[1:-1, 1:-2, 2:-3] = x
    return frame[1:-1, 1:-2, 2:-3]


def batch_innermost(x: torch.Tensor) -> torch.Tensor:
    return x.permute(1, 0, 2).contiguous().permute(1, 0, 2)


LAYOUTS = (contiguous, transposed, spaced_rows, spaced_columns, framed, batch_innermost)
layouts = st.sampled_from(LAYOUTS)
factors = st.sampled_from([0.0, 1.0, -0.5, 2.031, 1 / 3])


@dataclass(frozen=True)
class Case:
    """The arguments of one call, on `DEVICE`."""

    recipe: str
    p: torch.Tensor = field(repr=False)
    q: torch.Tensor | None = field(repr=False)
    addend: torch.Tensor | None = field(repr=False)
    factors: tuple[float, float, float]

    def options(self) -> dict[str, object]:
        alpha, beta, identity = self.factors
        return {"addend": self.addend, "alpha": alpha, "beta": beta, "identity": identity}


@st.composite
def cases(draw: Callable, dtype: torch.dtype, most: int = 70, batches: tuple[int, int] = (0, 3)) -> Case:
    b, n, k = draw(st.integers(*batches)), draw(st.integers(1, most)), draw(st.integers(1, 130))
    seed, apart, added = draw(st.integers(0, 10**6)), draw(st.booleans()), draw(st.booleans())
    shapes = [draw(layouts) for _ in range(3)]
    alpha, beta, identity = draw(factors), draw(factors), draw(factors)
    generator = torch.Generator().manual_seed(seed)

    def matrices(rows: int, columns: int, layout: Callable) -> torch.Tensor:
        return layout(torch.randn(b, rows, columns, generator=generator).to(dtype).to(DEVICE))

    p, q, addend = matrices(n, k, shapes[0]), matrices(n, k, shapes[1]), matrices(n, n, shapes[2])
    recipe = f"b={b} n={n} k={k} seed={seed} {[layout.__name__ for layout in shapes]}"
    return Case(recipe, p, q if apart else None, addend if added else None, (alpha, beta if added else 0.0, identity))


def mirrored(x: torch.Tensor) -> torch.Tensor:
    return x.triu() + x.triu(1).mT


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The law in float64, and how far a result may lie from it: k products and three sums in fp32, one rounding.

    A tensor core cuts where a sum in software would round, so a sum's errors count twice.
    """
    alpha, beta, identity = case.factors
    p = case.p.double()
    q = p if case.q is None else case.q.double()
    diagonal = identity * torch.eye(p.shape[1], dtype=torch.float64, device=DEVICE)
    added = torch.zeros_like(diagonal) if case.addend is None else beta * case.addend.double()
    exact = alpha * (p @ q.mT) + added + diagonal
    size = abs(alpha) * (p.abs() @ q.abs().mT) + added.abs() + diagonal.abs()
    narrow = torch.finfo(case.p.dtype)
    sums = 2 * (p.shape[2] + 4) * torch.finfo(torch.float32).eps * size
    bound = sums + narrow.eps / 2 * (exact.abs() + sums) + narrow.smallest_normal * narrow.eps
    return mirrored(exact), mirrored(bound)


def run(case: Case, tile: Tile | None = None) -> torch.Tensor:
    """The call, or the kernel cut in a given way."""
    if tile is None or case.p.shape[0] == 0:
        return symmetric_matmul(case.p, case.q, **case.options())
    from muonfx.polar.kernels.launch import launch

    out = case.p.new_full((case.p.shape[0], case.p.shape[1], case.p.shape[1]), torch.nan)
    launch(case.p, case.q, case.addend, *case.factors, out, tile)
    return out


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_result_is_the_mirrored_upper_triangle_of_the_formula(dtype: torch.dtype, data: st.DataObject) -> None:
    case, tile = data.draw(cases(dtype)), data.draw(st.sampled_from(SMALL_TILES))
    before = [None if x is None else x.clone() for x in (case.p, case.q, case.addend)]
    found = run(case, tile)
    exact, bound = expected(case)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert torch.equal(found, found.mT)
    assert ((found.double() - exact).abs() <= bound).all()
    for x, y in zip((case.p, case.q, case.addend), before, strict=True):
        assert x is None or torch.equal(x, y)


@with_kernels
@settings(max_examples=15)
@given(cases(torch.float32, most=40), layouts)
def test_out_is_written_and_nothing_beside_it(case: Case, layout: Callable) -> None:
    shape = (case.p.shape[0], case.p.shape[1], case.p.shape[1])
    out = layout(torch.zeros(shape, device=DEVICE))
    if shape[1] > 1 and out.stride(2) != 1:
        with pytest.raises(ValueError, match="out: found strides"):
            symmetric_matmul(case.p, case.q, out=out, **case.options())
        return
    around = torch.empty(0, device=DEVICE).set_(out.untyped_storage())
    frame = around.clone()
    assert symmetric_matmul(case.p, case.q, out=out, **case.options()) is out
    assert torch.equal(out, run(case))
    out.zero_()
    assert torch.equal(around.nan_to_num(-1.0), frame.nan_to_num(-1.0))


@with_kernels
@settings(max_examples=15)
@given(cases(torch.bfloat16, most=40, batches=(2, 3)), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_what_is_not_finite_stays_in_its_matrix(case: Case, value: float, data: st.DataObject) -> None:
    tile = data.draw(st.sampled_from(SMALL_TILES))
    b, n, k = case.p.shape
    at = data.draw(st.integers(0, b - 1)), data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    clean = run(case, tile)
    case.p[at] = value
    found = run(case, tile)
    others = [i for i in range(b) if i != at[0]]
    assert torch.equal(found[others], clean[others])
    row = found[at[0], at[1]]
    assert not row[at[1] :].isfinite().any()  # infinity times zero is NaN, so `alpha` does not matter
    assert torch.equal(found.isfinite(), found.isfinite().mT)


@with_kernels
@settings(max_examples=10)
@given(cases(torch.float32, most=40, batches=(1, 3)), st.sampled_from(SMALL_TILES))
def test_a_matrix_does_not_know_its_batch(case: Case, tile: Tile | None) -> None:
    found = run(case, tile)
    for i in range(case.p.shape[0]):
        q, addend = (None if x is None else x[i : i + 1] for x in (case.q, case.addend))
        assert torch.equal(run(Case("alone", case.p[i : i + 1], q, addend, case.factors), tile)[0], found[i])


@with_kernels
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_nothing_to_sum_is_zero(shape: tuple[int, int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    assert torch.equal(symmetric_matmul(x), x @ x.mT)


@with_kernels
def test_an_addend_with_no_weight_is_not_read() -> None:
    x = torch.randn(1, 5, 6, device=DEVICE)
    nan = torch.full((1, 5, 5), torch.nan, device=DEVICE)
    assert torch.equal(symmetric_matmul(x, addend=nan), symmetric_matmul(x))


@with_kernels
def test_only_the_upper_triangle_of_the_addend_counts() -> None:
    x, addend = torch.randn(1, 33, 6, device=DEVICE), torch.randn(1, 33, 33, device=DEVICE)
    below = addend.triu() + torch.full_like(addend, torch.nan).tril(-1)
    found = symmetric_matmul(x, addend=below, beta=1.0)
    assert torch.equal(found, symmetric_matmul(x, addend=addend, beta=1.0))


# ------------------------------------------------------------------------------------------------------ under a tracer


@with_kernels
class TestTracing:
    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @staticmethod
    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not available(x.device):
            raise AssertionError("available is a constant to a tracer, and true here")
        gram = symmetric_matmul(x, out=out)
        return symmetric_matmul(gram, addend=gram, alpha=2.0, beta=-1.0) + gram.sum()

    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_a_compiled_product_is_the_same_product(self, backend: str) -> None:
        run = torch.compile(self.step, fullgraph=True, backend=backend)
        for shape in ((1, 5, 7), (2, 18, 5)):
            x = torch.randn(shape, device=DEVICE)
            ours, theirs = x.new_zeros(shape[0], shape[1], shape[1]), x.new_zeros(shape[0], shape[1], shape[1])
            torch.testing.assert_close(run(x, ours), self.step(x, theirs))
            assert torch.equal(ours, theirs)

    def test_the_operator_keeps_the_rules_of_operators(self) -> None:
        x, y = torch.randn(2, 4, 5, device=DEVICE), torch.randn(2, 4, 4, device=DEVICE)
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
        for q, addend in ((None, None), (x.clone(), y.clone())):
            arguments = (x, q, addend, 1.0, 0.5, 0.0, torch.zeros_like(y))
            torch.library.opcheck(torch.ops.muonfx.symmetric_matmul.default, arguments, test_utils=tests)


# ------------------------------------------------------------------------------------------------------------ bad input

GOOD = torch.ones(2, 3, 4)
SQUARE = torch.ones(2, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([[1.0]],), {}, TypeError, "p: found list, expected a torch.Tensor"),
        ((GOOD[0],), {}, ValueError, r"p: found shape \(3, 4\), expected \(b, n, k\)"),
        ((GOOD.double(),), {}, TypeError, "p: found torch.float64, expected one of torch.float32"),
        ((GOOD.int(),), {}, TypeError, "p: found torch.int32"),
        ((GOOD, GOOD.half()), {}, TypeError, "q: found torch.float16, expected p's torch.float32"),
        ((GOOD, GOOD[:1]), {}, ValueError, r"q: found shape \(1, 3, 4\), expected p's \(2, 3, 4\)"),
        ((GOOD, GOOD.to("meta")), {}, ValueError, "q: found device meta, expected p's cpu"),
        ((GOOD,), {"addend": GOOD}, ValueError, r"addend: found shape \(2, 3, 4\), expected \(2, 3, 3\)"),
        ((GOOD,), {"addend": SQUARE.bfloat16()}, TypeError, "addend: found torch.bfloat16"),
        ((GOOD,), {"beta": 0.5}, ValueError, "beta: found 0.5 without an addend"),
        ((GOOD,), {"alpha": torch.tensor(1.0)}, TypeError, "alpha: found Tensor, expected a number"),
        ((GOOD,), {"identity": "1"}, TypeError, "identity: found str"),
        ((GOOD,), {"beta": True, "addend": SQUARE}, TypeError, "beta: found bool"),
        ((GOOD.to("meta"),), {}, RuntimeError, "found device meta, expected a CUDA device of capability 8.0"),
    ],
)
def test_malformed_arguments_are_refused(arguments, options, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        symmetric_matmul(*arguments, **options)


@with_kernels
@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (torch.ones(2, 3, 4), ValueError, r"out: found shape \(2, 3, 4\), expected \(2, 3, 3\)"),
        (torch.ones(2, 3, 3).half(), TypeError, "out: found torch.float16"),
        (torch.ones(2, 3, 3).mT, ValueError, r"out: found strides .* expected unit stride"),
        (torch.ones(1, 3, 3).expand(2, 3, 3), ValueError, "no two entries in one place"),
        (torch.ones(2, 1, 3).expand(2, 3, 3), ValueError, "no two entries in one place"),
        (torch.ones(40).as_strided((2, 3, 3), (5, 3, 1)), ValueError, "no two entries in one place"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, error: type[Exception], words: str) -> None:
    on_device = torch.empty(0, dtype=out.dtype, device=DEVICE).set_(
        out.untyped_storage().to(device=DEVICE), out.storage_offset(), out.shape, out.stride()
    )
    with pytest.raises(error, match=words):
        symmetric_matmul(GOOD.to(DEVICE), out=on_device)


@with_kernels
@pytest.mark.parametrize("name", ["p", "q", "addend"])
def test_out_may_not_share_memory_with_an_input(name: str) -> None:
    bank = torch.ones(5, 3, 3, device=DEVICE)
    arguments = {"p": bank[2:4].clone(), "q": bank[2:4].clone(), "addend": bank[2:4].clone(), "beta": 1.0}
    arguments[name] = bank[2:4]
    with pytest.raises(ValueError, match=f"out: found a tensor that shares memory with {name}"):
        symmetric_matmul(**arguments, out=bank[1:3])
    assert torch.equal(symmetric_matmul(**arguments, out=bank[:2]), torch.full_like(bank[:2], 4.0))


def test_derivatives_and_maps_are_refused() -> None:
    x = torch.ones(1, 2, 3)
    with pytest.raises(RuntimeError, match=r"a gradient of its input.*use torch\.baddbmm"):
        symmetric_matmul(x.clone().requires_grad_())
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match="symmetric_matmul: found a"):
            transform(lambda z: symmetric_matmul(z).sum())(x[None] if transform is torch.func.vmap else x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="a forward derivative"):
            symmetric_matmul(dual)


@with_kernels
def test_without_grad_mode_parameters_are_welcome() -> None:
    x = torch.ones(1, 2, 3, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not symmetric_matmul(x).requires_grad


# -------------------------------------------------------------------------------------------------------- availability


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")
def test_where_triton_is_there_the_kernels_are() -> None:
    """Without this, a kernel that Triton refuses would be a run of skipped tests."""
    old = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] < 8
    assert available(DEVICE) != old


def test_other_devices_have_no_kernels() -> None:
    assert not available(torch.device("meta"))
    assert not available(torch.device("cuda", 10**6))


@pytest.mark.parametrize("error", [ImportError("no such module"), OSError("libtriton.so: broken"), RuntimeError("?")])
def test_without_a_working_triton_there_are_none(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "triton":
                raise error

    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] == "triton" or name.endswith((".kernels.launch", ".kernels.symmetric"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert device._interpreted.__wrapped__() is None


def test_the_package_itself_never_imports_triton(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('this Triton is broken')")
    script = """
import torch, sys
import muonfx.polar.kernels as kernels
device = torch.device("cpu")
assert kernels.available(device) is False
try:
    kernels.symmetric_matmul(torch.ones(1, 2, 3))
except RuntimeError as error:
    assert "TRITON_INTERPRET" in str(error)
else:
    raise AssertionError("no kernel, and no error")
"""
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}", "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | environment)
