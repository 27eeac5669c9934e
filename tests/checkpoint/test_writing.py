"""Renames in doubt, paths that cannot be, and errors that cannot be sent; `test_faults` fails the system calls."""

import errno
import os
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, WriteError, catalog
from tests.checkpoint.common import copies
from tests.processes import Failed, Here, World

ck = mfx.checkpoint
OLD = {"w": torch.arange(1000.0), "b": torch.zeros(3)}
NEW = {"w": torch.arange(1000.0) + 1, "b": torch.ones(3)}


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["refused", "^C"]
)
@pytest.mark.parametrize("readable", [True, False], ids=["", "unreadable"])
@pytest.mark.parametrize("done", [True, False], ids=["done all the same", "not done"])
def test_a_rename_that_may_have_been_done_takes_nothing_back(
    tmp_path: Path, monkeypatch, error: BaseException, done: bool, readable: bool
):
    """As network file systems report it, and an interrupt leaves it."""
    path = tmp_path / "one"
    ck.save(path, OLD, step=8)
    replace, read = os.replace, catalog.read_index

    def refused(source: Path, target: Path) -> None:
        if done:
            replace(source, target)
        if not readable:
            monkeypatch.setattr(catalog, "read_index", unreadable)
        raise error

    def unreadable(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises((WriteError, KeyboardInterrupt)) as caught:
        ck.save(path, NEW, step=9)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(catalog, "read_index", read)
    assert ck.verify(path).step == (9 if done else 8)
    if isinstance(caught.value, WriteError):
        assert caught.value.written is (done if readable else None)
    ck.clean(path)
    assert len(list(path.iterdir())) == 2


BAD_PATHS = {
    "NUL": ("a\0b", ValueError, "path must name a folder"),
    "too long": ("x" * 300, CheckpointError, "name too long"),
    "below a file": ("file/x", CheckpointError, "Not a directory|no such folder"),
    "a file": ("file", CheckpointError, "a checkpoint is a folder"),
    "no path": (None, TypeError, "path must be a str or a path, found None"),
    "bytes": (b"x", TypeError, "path must be a str or a path, found b'x'"),
}


def attempts(path: Any, group: Any) -> list[BaseException]:
    """The errors of a save, a save in the background, and a load."""
    found: list[BaseException] = []
    for attempt in (
        lambda: ck.save(path, OLD, group=group),
        lambda: ck.save_async(path, OLD, group=group).wait(),
        lambda: ck.load(path, like=OLD, group=group),
    ):
        with pytest.raises((CheckpointError, ValueError, TypeError)) as caught:
            attempt()
        found.append(caught.value)
    return found


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_cannot_be_is_an_error_of_ours(tmp_path: Path, kind: str):
    name, error, message = BAD_PATHS[kind]
    (tmp_path / "file").write_text("mine")
    path = os.path.join(str(tmp_path), name) if isinstance(name, str) else name
    for found in attempts(path, None):
        assert isinstance(found, error), found
        assert re.search(message, str(found)), found
    for look in (ck.latest, ck.checkpoints, lambda path: ck.prune(path, 1)):
        if kind in ("below a file", "a file"):
            assert not look(path)
        else:
            with pytest.raises(error, match="name too long" if kind == "too long" else message):
                look(path)


def bad_path_on_one_rank(here: Here, folder: Path, name: Any) -> list[tuple[str, str]]:
    path = os.path.join(str(folder), name) if isinstance(name, str) else name
    found = attempts(path if here.rank == 1 else folder / "good", here.background)
    return [(type(error).__name__, str(error)) for error in found]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["NUL", "below a file", "no path"])
def test_a_path_that_cannot_be_on_one_rank_is_an_error_on_all(world: World, tmp_path: Path, kind: str):
    name, _, message = BAD_PATHS[kind]
    (tmp_path / "file").write_text("mine")
    ck.save(tmp_path / "good", OLD)
    before = copies(tmp_path / "good")
    one, other = world.check(2, bad_path_on_one_rank, folder=tmp_path, name=name)
    # A load or a save says what is wrong with the path, or that the ranks' paths differ.
    assert [kind for kind, _ in one] == [kind for kind, _ in other]
    for _, text in one + other:
        assert "rank 1: " in text
        assert re.search(f"{message}|with different path=", text), text
    assert copies(tmp_path / "good") == before


class Odd(Exception):
    """Cannot be made again from what it was pickled as."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("odd")


def odd_progress(here: Here, path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if here.rank == 1:
            raise Odd(1, 2)

    half = ck.FlatPiece.cut(OLD["w"], 500 * here.rank, 500 * (here.rank + 1))
    ck.save(path, {"w": half}, group=here.group, progress=progress)


@pytest.mark.dist
def test_an_error_that_cannot_be_sent_reaches_all_ranks_in_words(world: World, tmp_path: Path):
    for result in world.run(2, odd_progress, path=tmp_path / "one"):
        assert isinstance(result, Failed)
        assert isinstance(result.error, CheckpointError), result.trace
        assert "rank 1: " in str(result.error)
        assert "Odd: odd" in str(result.error)


def test_the_recorded_chain_has_the_numbers_of_the_save(tmp_path: Path):
    """The record of a transform is kept for the next save, but not if a tensor in it may change in place."""
    rate = torch.tensor(0.5)
    tx = mfx.chain(mfx.momentum(), mfx.scale(rate))
    for number in (0.5, 0.25):
        rate.fill_(number)
        ck.save(tmp_path, tx.init(OLD), tx=tx)
        assert f"torch.tensor({number}" in str(ck.inspect(tmp_path).chain)
    tx = mfx.orthogonalize()
    for dtype, product in ((torch.float32, "float32"), (torch.float64, "float64"), (torch.float32, "float32")):
        params = {"w": torch.ones(2, 2, dtype=dtype)}
        index = ck.inspect(ck.save(tmp_path, tx.init(params), tx=tx, params=params))
        assert index.products == {"orthogonalize": product}
        assert index.chain == repr(tx)
