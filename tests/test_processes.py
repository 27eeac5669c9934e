"""The pool of processes that other tests rely on: errors are returned in full, and a lost rank is replaced."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.processes import Failed, Here, ProcessEnded, World

pytestmark = pytest.mark.dist


def add_up(here: Here, start: int) -> tuple[int, int]:
    total = torch.tensor(start + here.rank)
    dist.all_reduce(total, group=here.group)
    return int(total), torch.get_num_threads()


def fail(here: Here) -> None:
    raise ValueError("none of that")


def end(here: Here, on: int) -> None:
    if here.rank == on:
        os._exit(3)
    add_up(here, 0)


def fail_each_in_its_own_way(here: Here, skipped: int | None) -> None:
    if here.rank != skipped:
        dist.all_reduce(torch.zeros(()), group=here.group, async_op=True)
    raise ValueError(f"rank {here.rank}")


def process(here: Here) -> int:
    return os.getpid()


def test_an_error_comes_back_with_its_trace(world: World):
    before = world.check(2, process)
    for found in world.run(2, fail):
        assert isinstance(found, Failed)
        assert type(found.error) is ValueError
        assert "none of that" in found.trace
        assert "in fail" in found.trace
    # An equal error on all ranks leaves nothing incomplete.
    assert world.check(2, process) == before
    with pytest.raises(AssertionError, match="none of that"):
        world.check(2, fail)


@pytest.mark.slow
def test_a_pool_goes_on_after_errors_that_leave_it_in_step_and_is_made_anew_after_all_others():
    """Errors that differ, a rank that has skipped a collective, and a rank that has died."""
    own = World(2)
    try:
        first = own.check(2, process)
        assert all(
            isinstance(found, Failed)
            for found in own.run(2, fail_each_in_its_own_way, skipped=None)
        )
        assert own.check(2, process) == first
        assert all(
            isinstance(found, Failed) for found in own.run(2, fail_each_in_its_own_way, skipped=1)
        )
        assert own.is_closed
        alive, dead = own.run(2, end, on=1)  # on new processes
        assert isinstance(alive, Failed)
        assert not isinstance(alive.error, TimeoutError)
        assert isinstance(dead.error, ProcessEnded)
        assert own.is_closed
    finally:
        own.close()
