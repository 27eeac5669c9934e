"""The Gram route: cut matrices are orthogonalized where they are, within rounding of what one process gets."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding.gram import gram_bytes
from tests.processes import Here, World
from tests.sharding.cases import Case, Flat, Leaf, Params, Placed, laid_out, model, muon
from tests.sharding.counting import Counted, counting

pytestmark = pytest.mark.dist

LONG = model(steps=1, wide=(6, 200), tall=(301, 5), square=(20, 20), bias=(7,))
ACROSS = Placed({"wide": ("1",), "tall": ("0",), "square": ("0",), "bias": ("0",)})


def step(here: Here, case: Case, gram: bool = True, scale: float = 1.0) -> tuple[Params, Counted]:
    params = case.model.params()
    layout = laid_out(case.layout, params, here)
    tx = sharding.sharded(case.tx, layout, gram=gram)
    grads = {name: None if leaf is None else leaf * scale for name, leaf in case.model.grads(0).items()}
    state = tx.init(layout.shard(params))
    local = layout.shard(grads)
    with counting(here) as counted:
        updates, _ = tx.update(local, state)
    return layout.gather(updates), counted


def only_matrices(tx: mfx.Transform) -> mfx.Transform:
    return mfx.masked(tx, mfx.select.ndim(min=2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficients", ["polar_express_5", "keller", "cubic"])
def test_it_is_as_near_to_float64_as_one_process_is(world: World, size: int, dtype: torch.dtype, coefficients: str):
    tx = only_matrices(mfx.orthogonalize(dtype=dtype, coefficients=coefficients))
    exact = only_matrices(mfx.orthogonalize(dtype=torch.float64, coefficients=coefficients))
    grads = LONG.grads(0)
    wanted = exact.update({name: leaf.double() for name, leaf in grads.items()}, exact.init(LONG.params()))[0]
    alone = tx.update(grads, tx.init(LONG.params()))[0]
    for found, _ in world.check(size, step, case=Case(LONG, tx, ACROSS, exact=False)):
        for name in ("wide", "tall", "square"):
            ours, theirs = (float((x[name] - wanted[name]).norm() / wanted[name].norm()) for x in (found, alone))
            assert ours <= 1.5 * theirs + 1e-6, name


def test_it_is_the_same_on_every_rank_and_for_any_power_of_two(world: World):
    tx = only_matrices(muon())
    found = [world.check(3, step, case=Case(LONG, tx, ACROSS, exact=False), scale=2.0**k) for k in (0, -60, 80)]
    first = found[0][0][0]
    for updates, _ in (result for results in found for result in results):
        assert all(torch.equal(updates[name], first[name]) for name in ("wide", "tall", "square"))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bytes_are_those_of_packed_triangles(world: World, size: int):
    tx = only_matrices(mfx.orthogonalize(dtype=torch.float32))
    case = Case(model(steps=1, wide=(6, 200), tall=(301, 5)), tx, Placed({"wide": ("1",), "tall": ("0",)}), exact=False)
    for _, counted in world.check(size, step, case=case):
        assert counted.exchanged == 0
        triangles = sum(gram_bytes(n, 3, size) for n in (6, 5))
        small = 2 * 8 * 8  # the agreement, two largest magnitudes, two sums of squares
        assert triangles - 8 <= counted.else_sent <= triangles + small


def test_it_is_taken_only_where_it_sends_less(world: World):
    layout = {4: (12, 40), 3: (12, 40)}
    for size, shape in layout.items():
        params = {"w": torch.zeros(shape), "long": torch.zeros(4, 400)}
        cut = sharding.flat(params, size, order=["w", "long"], cuts=[0, *[500 * r for r in range(1, size)], 2080])
        assert {share.route for run in sharding.plan_for(muon(), cut, gram=True).runs for share in run.spread} == set()
    columns = dict.fromkeys(("w", "long"), ("1",))
    drawn = model(steps=1, w=(12, 40), long=(4, 400))
    found = world.check(4, routes, case=Case(drawn, muon(), Placed(columns), exact=False))
    assert found == [{"w": "owner", "long": "gram"}] * 4


def routes(here: Here, case: Case) -> dict[str, str]:
    layout = laid_out(case.layout, case.model.params(), here)
    plan = sharding.plan_for(case.tx, layout, gram=True)
    return {share.name: share.route for run in plan.runs for share in run.shares + run.spread}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_own_matrix(world: World, bad: float):
    case = Case(LONG, only_matrices(muon()), ACROSS, exact=False)
    for found in world.check(3, with_bad_element, case=case, bad=bad):
        assert not found["wide"].isfinite().any()
        assert found["tall"].isfinite().all()
        assert found["square"].isfinite().all()


def with_bad_element(here: Here, case: Case, bad: float) -> Params:
    params, grads = case.model.params(), case.model.grads(0)
    grads["wide"][3, 150] = bad
    layout = laid_out(case.layout, params, here)
    tx = sharding.sharded(case.tx, layout, gram=True)
    return layout.gather(tx.update(layout.shard(grads), tx.init(layout.shard(params)))[0])


def test_zero_stays_zero_and_an_empty_piece_does_no_harm(world: World):
    drawn = model(steps=1, thin=(2, 3), zero=(3, 90), bias=Leaf((5,)))
    case = Case(drawn, only_matrices(muon()), Placed({"thin": ("1",), "zero": ("1",), "bias": ("0",)}), exact=False)
    for found, _ in world.check(4, step, case=case, scale=0.0):
        assert all(not leaf.any() for leaf in (found["thin"], found["zero"]))


@given(n=st.integers(1, 40), stages=st.integers(1, 6), ranks=st.integers(2, 64), m=st.integers(1, 4000))
def test_it_pays_from_about_k_p_over_2_on(n: int, stages: int, ranks: int, m: int):
    """For even cuts in fp32: fewer bytes where m / n > K P / 2, but for the diagonal."""
    owner = 2 * n * m * 4 * (ranks - 1) / ranks**2
    if m / n > stages * ranks / 2 * (n + 1) / n * 1.001:
        assert gram_bytes(n, stages, ranks) < owner
    if m / n < stages * ranks / 2 * (n + 1) / n * 0.999:
        assert gram_bytes(n, stages, ranks) > owner


def test_flat_pieces_of_whole_rows_go_that_way_too(world: World):
    drawn = model(steps=1, tall=(120, 4))
    case = Case(drawn, only_matrices(muon()), Flat(("tall",), (0, 40, 400, 480)), exact=False)
    alone = case.tx.update(drawn.grads(0), case.tx.init(drawn.params()))[0]
    for found, counted in world.check(3, step, case=case):
        assert counted.exchanged == 0
        torch.testing.assert_close(found["tall"], alone["tall"], atol=2e-5, rtol=0)
    uneven = Case(drawn, case.tx, Flat(("tall",), (0, 41, 400, 480)), exact=False)
    assert all(counted.exchanged or here for here, (_, counted) in enumerate(world.check(3, step, case=uneven)))


def test_without_being_asked_for_it_is_never_taken(world: World):
    case = Case(LONG, only_matrices(muon()), ACROSS, exact=True)
    alone: Any = case.tx.update(LONG.grads(0), case.tx.init(LONG.params()))[0]
    for found, counted in world.check(3, step, case=case, gram=False):
        assert counted.exchanged > 0
        assert all(torch.equal(found[name], alone[name]) for name in ("wide", "tall", "square"))
