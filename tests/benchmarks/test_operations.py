"""Counting a step on paper: the counts of known operations, and bounds on the counts of `mfx.Muon`."""

import pytest
import torch
from torch import nn

from benchmarks import operations
from benchmarks.operations import OURS, OURS_WITH_KERNELS, TORCHS, Counter

SMALL, LARGE = "GPT-2 small", "1.3 B, 24 layers of 2048"


def counted(
    function, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> operations.Totals:
    tensors = [torch.ones(shape, dtype=dtype) for shape in shapes]
    with Counter() as counter:
        function(*tensors)
    return counter.totals


def test_a_product_counts_its_flops_and_each_tensor_once():
    totals = counted(lambda x, y: x @ y, (3, 4), (4, 5))
    assert (totals.operations, totals.flops) == (1, 2 * 3 * 4 * 5)
    assert (totals.product_bytes, totals.other_bytes) == (4 * (3 * 4 + 4 * 5 + 3 * 5), 0)


def test_a_batch_with_an_addend_reads_it_too():
    totals = counted(torch.baddbmm, (2, 3, 3), (2, 3, 4), (2, 4, 3))
    assert totals.flops == 2 * 2 * 3 * 3 * 4
    assert totals.product_bytes == 4 * 2 * (9 + 12 + 12 + 9)


def test_views_and_allocations_are_no_operations():
    totals = counted(lambda x: torch.empty_like(x.mT[:1].view(-1).detach()), (3, 4))
    assert totals.operations == totals.other_bytes == 0


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        # Reads both lists and writes the first.
        (lambda x, y: torch._foreach_add_([x, x], [y, y]), 6),
        (lambda x, y: torch._foreach_copy_([x], [y]), 2),  # does not read what it overwrites
        (lambda x, y: x.copy_(y), 2),
        (lambda x, y: torch.mul(x, y, out=y), 3),
        (lambda x, y: x.mul_(y), 3),
        (lambda x, y: x + y[:1].expand_as(x), 2.25),  # a row that is repeated is read once
    ],
)
def test_a_pass_reads_its_inputs_and_writes_its_results(function, passes: float):
    totals = counted(function, (4, 8), (4, 8))
    assert (totals.operations, totals.other_bytes) == (1, passes * 4 * 8 * 4)


def test_a_step_of_torch_has_the_flops_of_its_formula():
    hidden = nn.Linear(8, 16, bias=False)
    hidden.weight.grad = torch.ones_like(hidden.weight)
    optimizer = torch.optim.Muon(hidden.parameters())
    with Counter() as counter:
        optimizer.step()
    short, long, steps = 8, 16, 5
    assert counter.totals.flops == steps * (4 * short * short * long + 2 * short**3)


def test_bytes_outside_products_are_those_of_the_transforms():
    counter = operations.counted(SMALL, OURS)
    by_transform = counter.bytes_of_transforms
    assert sum(by_transform.values()) == counter.totals.other_bytes
    # Reads gradient and momentum twice, writes momentum and updates.
    elements = by_transform["momentum"] / 24
    assert elements == 12 * 12 * 768**2
    # Rounds to bf16 (6 bytes), reads for the norm (2), scales (4), writes the result (6); in fp16, for two thirds of
    # the elements, rounds again (4) and adds Gram matrices, of a quarter of the elements, six times (9).
    assert 18 + 13 * 2 / 3 <= by_transform["orthogonalize"] / elements < 27


@pytest.mark.slow
def test_symmetric_kernels_halve_products_of_large_matrices():
    full, halved = operations.count(LARGE, OURS), operations.count(LARGE, OURS_WITH_KERNELS)
    assert 0.65 * full.flops < halved.flops < 0.75 * full.flops
    # Below their smallest side.
    assert operations.count(SMALL, OURS_WITH_KERNELS) == operations.count(SMALL, OURS)


@pytest.mark.parametrize(
    ("model", "most_operations", "most_bytes"),
    [
        (SMALL, 116, 18.5e9),
        pytest.param(LARGE, 645, 211e9, marks=pytest.mark.slow),
        pytest.param("one layer of 8 B", 166, 35.4e9, marks=pytest.mark.slow),
    ],
)
def test_a_step_takes_at_most_so_many_operations_and_bytes(
    model: str, most_operations: int, most_bytes: float
):
    ours, torchs = operations.count(model, OURS), operations.count(model, TORCHS)
    assert ours.operations <= most_operations
    assert ours.product_bytes + ours.other_bytes <= most_bytes
    assert ours.flops <= torchs.flops
