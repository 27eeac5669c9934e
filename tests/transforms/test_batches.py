"""Matrices in batches: each one has the same bits alone and with any others."""

from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import polar
from tests.public import NO_MATCH
from tests.transforms.tables import EVERY_CASE, Case

pytestmark = NO_MATCH

SIDES = [(1, 7), (3, 5), (7, 16), (33, 20), (65, 129), (40, 40)]
LARGE = [(260, 256), (64, 1100)]
"""Matrices of more than 65,536 elements, which are computed in place."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float32},
    {"method": "gram"},
    {"coefficients": "aol"},
]


def _drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads split the products of a lone matrix, and the matrices of a batch."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sides", [*SIDES, *LARGE])
def test_a_matrix_has_the_same_bits_alone_and_beside_others(
    sides: tuple[int, int], dtype: torch.dtype, settings: dict[str, Any]
):
    rows, columns = sides
    wide = [_drawn((rows, columns), dtype, seed) for seed in range(2)]
    tall = [_drawn((columns, rows), dtype, seed) for seed in range(2, 4)]
    transposed_view = _in_transposed_memory(tall[0])
    alone = [polar.orthogonalize(x, **settings) for x in (*wide, *tall)]
    batches = [
        wide,
        tall,
        [wide[0], tall[0]],
        [tall[1], wide[1], tall[0], wide[0]],
        [transposed_view, tall[1]],
    ]
    expected = [
        alone[:2],
        alone[2:],
        [alone[0], alone[2]],
        [alone[3], alone[1], alone[2], alone[0]],
        alone[2:],
    ]
    for number, (batch, results) in enumerate(zip(batches, expected, strict=True)):
        for donate in (False, True):
            copies = [x.clone(memory_format=torch.preserve_format) for x in batch]
            found = polar.orthogonalize_many(copies, donate=donate, **settings)
            for place, (x, result) in enumerate(zip(found, results, strict=True)):
                assert torch.equal(x, result), (number, place, donate)
    stacked = polar.orthogonalize(torch.stack(tall), **settings)
    assert torch.equal(stacked[1], alone[3])
    assert torch.equal(polar.orthogonalize(transposed_view, **settings), alone[2])


OF_MATRICES = [
    case
    for case in EVERY_CASE
    if case.values[0].tx.locality is not mfx.Locality.TREE
    and case.values[0].name not in ("qk_clip", "muonclip")
]


@pytest.mark.parametrize("case", OF_MATRICES)
def test_the_update_of_a_leaf_has_the_same_bits_alone_and_beside_others(case: Case):
    shapes = {
        "w": (9, 14),
        "twin": (9, 14),
        "tall": (33, 20),
        "tall twin": (33, 20),
        "wide": (20, 33),
        "column": (33, 1),
    }
    params, steps = Case(case.name, case.tx, shapes).example(3)
    together = case.run(params, steps)
    for name in shapes:
        for change in (torch.clone, _in_transposed_memory):
            alone = case.run(
                {name: change(params[name])}, [{name: change(grads[name])} for grads in steps]
            )
            for updates, expected in zip(alone, together, strict=True):
                assert torch.equal(updates[name], expected[name]), (name, change.__name__)


def _in_transposed_memory(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT
