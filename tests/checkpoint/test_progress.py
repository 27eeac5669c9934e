"""A long save of a large state shows its progress on a terminal, and nowhere else."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import writer
from muonfx.internal import progress

ck = mfx.checkpoint
STATE = {"w": torch.arange(1000.0)}
LINE = "\rsaving step: 3.91 KiB of 3.91 KiB\x1b[K"
ERASED = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr, where a save of 4,000 bytes counts as large, and as long from the beginning."""
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(writer, "_MANY_BYTES", 4000)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BYTES", 0.0)
    return terminal


def test_a_long_save_replaces_one_line_of_a_terminal(tmp_path: Path, terminal: Terminal):
    ck.save(tmp_path / "step", STATE)
    assert terminal.getvalue() == LINE + ERASED


def test_a_line_is_erased_after_an_error(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "DataFile", fail)  # created after the last block
    with pytest.raises(ck.WriteError, match="No space left"):
        ck.save(tmp_path / "step", STATE)
    assert terminal.getvalue() == LINE + ERASED


def test_a_short_or_small_save_shows_nothing(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    ck.save(tmp_path / "small", {"w": STATE["w"][:999]})
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BYTES", 100.0)
    ck.save(tmp_path / "short", STATE)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_in_the_background_or_on_other_ranks_or_in_a_file(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    ck.save_async(tmp_path / "background", STATE).wait()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda group=None: 1)
        ck.save(tmp_path / "rank 1", STATE)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    ck.save(tmp_path / "file", STATE)
    assert terminal.getvalue() == ""


def test_a_terminal_that_is_closed_does_not_make_a_save_fail(tmp_path: Path, terminal: Terminal):
    terminal.close()
    assert torch.equal(ck.load(ck.save(tmp_path / "step", STATE), like=STATE)["w"], STATE["w"])
