"""Whatever fails while a checkpoint is read is a clear error of the checkpoint, on all ranks that read it together."""

from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import CheckpointError
from tests.checkpoint.common import assert_same_tree
from tests.checkpoint.faults import faults
from tests.processes import Failed, Here, World

ck = mfx.checkpoint
STATE = {"w": torch.arange(1000.0).reshape(10, 100), "b": torch.zeros(3)}

READS: dict[str, Any] = {
    "load": lambda path: ck.load(path, like=STATE),
    "load of transposed": lambda path: ck.load(path, like=STATE | {"w": torch.zeros(100, 10).T}),
    "load_params": lambda path: ck.load_params(path, like=STATE),
    "read": ck.read,
    "verify": ck.verify,
    "inspect": ck.inspect,
    "latest": lambda path: ck.latest(path.parent),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("always", [False, True], ids=["once", "from then on"])
def test_a_read_that_fails_at_any_call_is_an_error_of_the_checkpoint(tmp_path: Path, what: str, always: bool):
    path = ck.save(ck.step_path(tmp_path, 1), STATE, params=STATE)
    at, failed = 0, set[str]()
    while True:
        with faults(tmp_path, at, always=always, reads=True) as fault:
            try:
                result = READS[what](path)
                said = str(result) if what == "latest" else ""  # which may do without the answer to a call
            except CheckpointError as error:
                said = str(error)
            except UserWarning as warning:  # `latest`, of one that it does not use
                said = str(warning)
        if not fault.failed:
            break
        failed.add(fault.failed.split()[0])
        assert str(tmp_path) in said or path.name in said, fault.failed
        at += 1
    assert_same_tree(ck.load(path, like=STATE), STATE)
    assert {"stat", "open", "fstat", "close"} <= failed
    assert what == "inspect" or {"preadv", "seek"} <= failed


def load_with_a_fault(here: Here, path: Path, on: int) -> list[tuple[str, str]]:
    """The calls that failed on one rank, one a load, and what this rank was told."""
    found: list[tuple[str, str]] = []
    at = 0
    while True:
        said = ""
        with faults(path, at if here.rank == on else -1, reads=True) as fault:
            try:
                ck.load(path, like=STATE, group=here.group)
            except CheckpointError as error:
                said = str(error)
        found.append((fault.failed, said))
        last: list[Any] = [None] * here.size
        torch.distributed.all_gather_object(last, fault.failed, group=here.group)
        if not any(last):
            return found
        at += 1


@pytest.mark.dist
@pytest.mark.parametrize(("size", "on"), [(2, 0), (2, 1), (3, 1)])
def test_a_read_that_fails_on_one_rank_is_the_same_error_on_all(world: World, tmp_path: Path, size: int, on: int):
    path = ck.save(tmp_path / "here", STATE)
    results = world.check(size, load_with_a_fault, path=path, on=on)
    assert len({len(found) for found in results}) == 1
    failed = [call for call, _ in results[on]]
    assert {call.split()[0] for call in failed[:-1]} >= {"stat", "open", "fstat", "close", "preadv", "seek"}
    for place, call in enumerate(failed[:-1]):
        (said,) = {found[place][1] for found in results}
        assert f"rank {on}: " in said, call


# ---------------------------------------------------------------------------------------- arguments that differ


def differing(here: Here, path: Path, what: str) -> None:
    odd = here.rank == here.size - 1
    if what.startswith("save "):
        more: dict[str, Any] = {"step": 1, "extra": {"a": 1}}
        if what == "save step" and odd:
            more["step"] = 2
        if what == "save extra" and odd:
            more["extra"] = {"a": 2}
        ck.save(path / ("odd" if what == "save path" and odd else "even"), STATE, group=here.group, **more)
        return
    more = {"allow_extra": True} if what == "load allow_extra" and odd else {}
    where = {"load path": "two", "load path to nothing": "none"}.get(what, "one") if odd else "one"
    ck.load(path / where, like=STATE, group=here.group, **more)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("save path", "the ranks save with different path="),
        ("save step", "the ranks save with different step="),
        ("save extra", "the ranks save with different extra="),
        ("load path", "the ranks load with different path="),
        ("load path to nothing", "the ranks load different paths"),
        ("load allow_extra", "the ranks load with different allow_extra="),
    ],
)
def test_arguments_that_differ_are_named_with_the_ranks(world: World, tmp_path: Path, size: int, what: str, said: str):
    for name in ("one", "two"):
        ck.save(tmp_path / name, STATE)
    before = sorted(tmp_path.rglob("*"))
    found = world.run(size, differing, path=tmp_path, what=what)
    assert all(isinstance(result, Failed) for result in found)
    texts = {str(result.error) for result in found}
    assert all(type(result.error) in (CheckpointError, ck.NotFoundError) for result in found), found
    (text,) = texts
    assert said in text
    assert f"{'rank 0' if size == 2 else 'ranks 0, 1'}: " in text
    assert f"rank {size - 1}: " in text
    assert "path" not in what or (str(tmp_path / "one") in text) == what.startswith("load")
    assert sorted(tmp_path.rglob("*")) == before
