"""Counting a compiled step on paper: known kernels, and fewer bytes than the step that Python runs."""

from functools import partial

import pytest
import torch

from benchmarks import operations, operations_compiled
from benchmarks.operations import OURS, OURS_WITH_KERNELS, TORCHS, Counter
from benchmarks.operations_compiled import Step

pytest.importorskip(
    "triton",
    reason="inductor lowers a graph of a CUDA device only with triton (pip install triton)",
)
pytestmark = pytest.mark.slow

OPTIONS = {"key_width": 256, "is_gated": False, "bias": True}


def compiled(function, *shapes: tuple[int, ...]) -> operations.Totals:
    with operations.paper_device(Counter(), symmetric_kernels=False):
        inputs = [torch.empty(shape, device="cuda") for shape in shapes]
        return operations_compiled.totals_of(operations_compiled.scheduled(Step(function, inputs)))


def test_elementwise_operations_are_one_kernel_that_reads_its_inputs_once():
    totals = compiled(lambda x, y: (x * y + y).sin() * x, (64, 64), (64, 64))
    assert (totals.operations, totals.other_bytes, totals.product_bytes) == (1, 3 * 64 * 64 * 4, 0)


def test_a_foreach_kernel_keeps_what_only_it_uses_in_registers():
    def add_scaled(x, y):
        scaled = torch._foreach_mul([x, y], 3.0)
        return torch._foreach_add(scaled, [y, x])

    totals = compiled(add_scaled, (64, 64), (64, 64))
    assert (totals.operations, totals.other_bytes) == (1, 4 * 64 * 64 * 4)


def test_a_product_has_the_flops_and_bytes_of_its_shapes():
    totals = compiled(lambda x, y: x @ y, (32, 64), (64, 16))
    assert (totals.operations, totals.flops) == (1, 2 * 32 * 64 * 16)
    assert (totals.product_bytes, totals.other_bytes) == (4 * (32 * 64 + 64 * 16 + 32 * 16), 0)


def test_a_compiled_step_needs_fewer_kernels_and_bytes(monkeypatch: pytest.MonkeyPatch):
    model_name = "one small layer"
    monkeypatch.setitem(
        operations.MODELS, model_name, partial(operations.Block, 256, 1024, **OPTIONS)
    )
    for candidate in (OURS, TORCHS):
        eager = operations.count(model_name, candidate)
        in_one_graph = operations_compiled.count(model_name, candidate)
        assert in_one_graph.flops == eager.flops
        assert in_one_graph.operations < eager.operations
        assert in_one_graph.other_bytes < 0.7 * eager.other_bytes


@pytest.mark.parametrize(
    ("model_name", "candidate", "most_gigabytes", "most_milliseconds"),
    [
        ("GPT-2 small", OURS, 9, 4.5),
        ("1.3 B, 24 layers of 2048", OURS, 112, 102),
        ("1.3 B, 24 layers of 2048", OURS_WITH_KERNELS, 114, 79),
        ("one layer of 8 B", OURS, 20.5, 31),
        ("one layer of 8 B", OURS_WITH_KERNELS, 21, 24),
    ],
)
def test_a_compiled_step_stays_within_its_bounds(
    model_name: str, candidate: str, most_gigabytes: float, most_milliseconds: float
):
    ours = operations_compiled.count(model_name, candidate)
    torchs = operations_compiled.count(model_name, TORCHS)
    assert ours.product_bytes + ours.other_bytes <= most_gigabytes * 1e9
    assert ours.seconds <= most_milliseconds / 1e3
    assert ours.seconds < torchs.seconds


def test_a_compiled_step_has_the_symmetric_products_of_the_step_that_python_runs():
    model_name = "one layer of 8 B"
    eager = operations.count(model_name, OURS_WITH_KERNELS)
    assert operations_compiled.count(model_name, OURS_WITH_KERNELS).flops == eager.flops
