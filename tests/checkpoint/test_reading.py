"""Arguments that differ between ranks are errors that name the ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import CheckpointError
from tests.processes import Failed, Here, World

ck = mfx.checkpoint
STATE = {"w": torch.arange(1000.0).reshape(10, 100), "b": torch.zeros(3)}


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
    ck.load(path / ("two" if what == "load path" and odd else "one"), like=STATE, group=here.group, **more)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("save path", "the ranks save with different path="),
        ("save step", "the ranks save with different step="),
        ("save extra", "the ranks save with different extra="),
        ("load path", "the ranks load with different path="),
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
    assert all(type(result.error) is CheckpointError for result in found), found
    (text,) = texts
    assert said in text
    assert f"{'rank 0' if size == 2 else 'ranks 0, 1'}: " in text
    assert f"rank {size - 1}: " in text
    assert "path" not in what or (str(tmp_path / "one") in text) == what.startswith("load")
    assert sorted(tmp_path.rglob("*")) == before
