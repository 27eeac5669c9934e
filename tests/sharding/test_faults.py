"""Faults between ranks: an error that says what is wrong, on every rank, in time; and never a hang."""

import time
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.sharding import ShardingError
from tests.processes import Failed, ProcessEnded, World
from tests.sharding import ranks
from tests.sharding.cases import Flat, Leaf, Model, Placed, Replicated, Zero, bits, model, two_groups

pytestmark = pytest.mark.dist

SMALL = model(steps=3, a=(6, 5), b=(7, 4), c=(3, 9), d=Leaf((5,)))
TX = two_groups(SMALL.labels)
ROWS = Placed(dict.fromkeys(SMALL.leaves, ("0",)))


@pytest.mark.parametrize("layout", [ROWS, Zero(1, "flat"), Zero(1, "whole")], ids=["rows", "flat", "whole"])
def test_a_rank_that_is_killed_in_mid_step_makes_the_others_fail_in_time(layout: Any):
    own = World(3, timeout=6)
    try:
        started = time.monotonic()
        found = own.run(3, ranks.killed_in_mid_step, model=SMALL, tx=TX, case=layout, on=1)
        assert time.monotonic() - started < 60
    finally:
        own.close()
    assert all(isinstance(result, Failed) for result in found), found
    assert isinstance(found[1].error, ProcessEnded)
    for survivor in (found[0], found[2]):
        assert isinstance(survivor.error, ShardingError), survivor.trace
        assert "another rank has ended" in str(survivor.error)


def failures(found: list[Any]) -> list[BaseException]:
    assert all(isinstance(result, Failed) for result in found), found
    return [result.error for result in found]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a name", "'[bd]'"),
        ("a parameter more", "'d'"),
        ("a shape", "'a'"),
        ("a dtype", "'a'"),
        ("a number in the chain", r"0\.[89]"),
        ("the chain", "scale"),
        ("the layout", "layout"),
    ],
)
@pytest.mark.parametrize("on", [0, 2])
def test_ranks_that_have_something_different_are_told_so_at_init(world: World, what: str, said: str, on: int):
    for error in failures(world.run(3, ranks.different, what=what, on=on)):
        assert isinstance(error, ShardingError)
        with pytest.raises(ShardingError, match=said):
            raise error


@pytest.mark.parametrize("trouble", ["shape", "structure", "none"])
@pytest.mark.parametrize("on", [0, 1])
def test_bad_gradients_on_one_rank_are_an_error_on_all_and_change_nothing(world: World, trouble: str, on: int):
    found = world.check(2, ranks.bad_gradients_on_one_rank, trouble=trouble, on=on)
    assert found[0]["after"] == found[1]["after"]  # and the next step is as good as any
    heard = [bool(rank["said"]) for rank in found]
    if trouble == "none":  # counted as zero by all, or refused by all
        assert heard in ([True, True], [False, False])
    else:
        assert heard == [True, True]
        assert any(name in found[on]["said"] for name in ("'a'", "x"))


@pytest.mark.parametrize("layout", [ROWS, Zero(1, "flat"), Zero(1, "whole"), Replicated()])
@pytest.mark.parametrize("on", [0, 2])
def test_a_nan_on_one_rank_skips_the_step_on_all(world: World, layout: Any, on: int):
    found = world.check(3, ranks.skipped, model=SMALL, tx=TX, case=layout, on=on, step_of_nan=1)
    assert found == [(True, True, 1)] * 3


def alone(drawn: Model, tx: mfx.Transform, steps: int, size: int) -> tuple[dict[str, torch.Tensor], int]:
    """What one process makes of the same gradients."""
    params, tx = drawn.params(), mfx.skip_nonfinite(tx)
    state = tx.init(params)
    for step in range(steps):
        each = [ranks.troubled(drawn, step, rank) for rank in range(size)]
        grads: dict[str, Any] = {}
        for name, leaf in params.items():
            there = [own[name] for own in each if own[name] is not None]
            total = torch.zeros_like(leaf)
            for grad in there:
                total = total + grad
            grads[name] = total / size if there else None
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params, int(state.skipped)


def soaked(world: World, layout: Any, steps: int) -> None:
    drawn = Model({"a": Leaf((4, 3), "muon"), "b": Leaf((5, 2), "muon"), "c": Leaf((3,)), "d": Leaf((2, 2), "muon")}, 3)
    found = world.check(3, ranks.soak, model=drawn, tx=two_groups(drawn.labels), case=layout, steps=steps)
    params, skipped = alone(drawn, two_groups(drawn.labels), steps, 3)
    assert {count for _, count in found} == {skipped}
    assert 0 < skipped < steps
    assert found[1:] == found[:-1]  # identical on all ranks
    for name, leaf in params.items():
        assert found[0][0][name] == bits(leaf), name


SOAKS = [Zero(2, "flat"), Zero(1, "whole"), Replicated(), Placed(dict.fromkeys("abcd", ("0",)))]


@pytest.mark.parametrize("layout", SOAKS, ids=["flat", "whole", "ddp", "rows"])
def test_a_short_soak_with_none_and_nan_here_and_there(world: World, layout: Any):
    soaked(world, layout, 40)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.parametrize("layout", [*SOAKS, Flat(tuple("dacb"), (0, 3, 20, 30))], ids=lambda kind: repr(kind)[:20])
def test_a_thousand_steps_with_none_and_nan_here_and_there(world: World, layout: Any):
    soaked(world, layout, 1000)
