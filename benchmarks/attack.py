"""Attack any pair of functions that save and load a checkpoint: kills, flipped bits, truncated files, other dtypes.

``attack(save, load, folder)`` takes ``save(state, path)``, which writes a dict of tensors and replaces what is at the
path, and ``load(state, path)``, which overwrites the tensors of a dict of the same names. Every save that is killed and
every load runs in a forked process. A load ends in one of three ways:

- *whole*: the values are those of one save;
- *refused*: it raises an error, or ends by a signal;
- *wrong*: it returns other values, without an error.

After a kill, whole is good: the earlier or the new checkpoint. After damage, whole (in bytes that no value needs) and
refused are good. Run ``python -m benchmarks checkpoint_attack``.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import muonfx as mfx
from benchmarks import report

State = dict[str, Tensor]
Save = Callable[[State, Path], object]
Load = Callable[[State, Path], object]

SHAPES = {"embed": (16, 8), "up": (8, 24), "bias": (24,)}
_FOLDER_CALLS = frozenset(
    {"open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "shutil.rmtree"}
)
"""Calls that Python reports to audit hooks before they touch a file."""
MOST_CALLS = 200

PAGE = report.DOCS / "checkpoint-reliability.md"


def state_of(number: float, dtype: torch.dtype = torch.float32) -> State:
    """Return a state in which every element is ``number``, so that a mixture of two saves can be recognized."""
    return {name: torch.full(shape, number, dtype=dtype) for name, shape in SHAPES.items()}


def attack(save: Save, load: Load, folder: Path, *, flips: int = 60) -> dict[str, Any]:
    """Attack a pair of functions in an empty folder.

    Args:
        save: ``save(state, path)`` writes tensors to a path, which may have a checkpoint.
        load: ``load(state, path)`` overwrites the tensors of a dict with the values at a path.
        folder: an empty folder for the checkpoints.
        flips: how many bits to flip, one at a time, spread over all files.

    Returns:
        For each attack the number of loads by outcome: ``{"kills": {"whole": 17}, "flipped bits": {"refused": 60}}``.
    """
    return {
        "kills": dict(_kills(save, load, folder / "kills")),
        "flipped bits": dict(_flips(save, load, folder / "flips", flips)),
        "truncated or missing files": dict(_truncations(save, load, folder / "truncated")),
        "fp32 into bf16": dict(_narrowing(save, load, folder / "narrow")),
    }


# ----------------------------------------------------------------------------------------------------------- processes


def _in_child(call: Callable[[], int]) -> int | None:
    """Return the exit code of a forked process that calls a function; None if it raised or was ended by a signal."""
    child = os.fork()
    if not child:
        code = 255
        with suppress(BaseException), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = call()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 255:
        return None
    return os.WEXITSTATUS(status)


def _saving(save: Save, number: float, path: Path) -> Callable[[], int]:
    """Return a function for `_in_child` that saves a state whose elements are all ``number``."""

    def save_state() -> int:
        save(state_of(number), path)
        return 0

    return save_state


def _outcome(load: Load, path: Path, *expected: State) -> str:
    """Return how a load ends: "whole" if its values are those of one of the ``expected`` states."""

    def load_and_compare() -> int:
        state = {name: torch.full_like(value, -1.0) for name, value in expected[0].items()}
        load(state, path)
        for values in expected:
            if all(torch.equal(state[name], value) for name, value in values.items()):
                return 0
        return 1

    code = _in_child(load_and_compare)
    if code is None:
        return "refused"
    return "whole" if code == 0 else "wrong"


# ------------------------------------------------------------------------------------------------------------- attacks


_kill_at: list[Any] = []
"""The folder, the number of calls to survive, and of calls so far; empty in a process that is not to be killed."""


def _count(path: object) -> None:
    """Count a call that touches a file of the folder, and end the process if its turn has come."""
    if (
        not _kill_at
        or not isinstance(path, str | os.PathLike)
        or not os.fspath(path).startswith(_kill_at[0])
    ):
        return
    _kill_at[2] += 1
    if _kill_at[2] > _kill_at[1]:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Count a call that Python reports to its audit hooks."""
    if _kill_at and event in _FOLDER_CALLS and not isinstance(arguments[0], int):
        _count(os.fsdecode(arguments[0]))


@contextmanager
def _killed(folder: Path, call: int) -> Generator[None]:
    """Kill this process at the call with this number, from 0, that touches the folder, flushing of files included."""
    flush = os.fsync

    def counted_flush(handle: int) -> None:
        _count(os.readlink(f"/proc/self/fd/{handle}"))
        flush(handle)

    sys.addaudithook(_hook)
    _kill_at[:] = [str(folder.resolve()), call, 0]
    with patch.object(os, "fsync", counted_flush):
        yield
    _kill_at.clear()


def _kills(save: Save, load: Load, path: Path) -> Counter[str]:
    """Replace a checkpoint, and kill the writer at each of its calls in turn."""
    outcomes: Counter[str] = Counter()
    for call in range(MOST_CALLS):
        _in_child(_saving(save, 1.0, path))

        def save_until_killed(call: int = call) -> int:
            with _killed(path, call):
                save(state_of(2.0), path)
            return 0

        if _in_child(save_until_killed) == 0:  # the save has fewer calls
            break
        outcomes[_outcome(load, path, state_of(1.0), state_of(2.0))] += 1
    return outcomes


def _files(path: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def _flips(save: Save, load: Load, path: Path, number: int) -> Counter[str]:
    """Flip one bit at a time, at positions spread over all files."""
    _in_child(_saving(save, 1.0, path))
    files = _files(path)
    sizes = [file.stat().st_size for file in files]
    outcomes: Counter[str] = Counter()
    for position in range(number):
        offset = position * sum(sizes) // number
        index = 0
        while offset >= sizes[index]:
            offset -= sizes[index]
            index += 1
        file = files[index]
        data = file.read_bytes()
        flipped = data[offset] ^ (1 << position % 8)
        file.write_bytes(data[:offset] + bytes([flipped]) + data[offset + 1 :])
        outcomes[_outcome(load, path, state_of(1.0))] += 1
        file.write_bytes(data)
    return outcomes


def _truncations(save: Save, load: Load, path: Path) -> Counter[str]:
    """Cut each file to half of its bytes, by the last byte and to nothing, and remove it."""
    _in_child(_saving(save, 1.0, path))
    outcomes: Counter[str] = Counter()
    for file in _files(path):
        data = file.read_bytes()
        for end in (len(data) // 2, len(data) - 1, 0):
            file.write_bytes(data[:end])
            outcomes[_outcome(load, path, state_of(1.0))] += 1
        file.unlink()
        outcomes[_outcome(load, path, state_of(1.0))] += 1
        file.write_bytes(data)
    return outcomes


def _narrowing(save: Save, load: Load, path: Path) -> Counter[str]:
    """Load values of float32 into bfloat16, which rounds them."""
    _in_child(_saving(save, 1 / 3, path))
    return Counter([_outcome(load, path, state_of(float("nan"), torch.bfloat16))])


# ---------------------------------------------------------------------------------------------------------- candidates


def candidates() -> dict[str, tuple[Save, Load]]:
    """Return the pairs to attack by name: the storages of torch.distributed.checkpoint that import, and ours."""
    import torch.distributed.checkpoint as dcp

    def by_dcp(writer: Callable[[Any], Any], reader: Callable[[Any], Any]) -> tuple[Save, Load]:
        def save(state: State, path: Path) -> None:
            dcp.save(dict(state), storage_writer=writer(str(path)), no_dist=True)

        def load(state: State, path: Path) -> None:
            dcp.load(state, storage_reader=reader(str(path)), no_dist=True)

        return save, load

    pairs = {"torch: FileSystemWriter": by_dcp(dcp.FileSystemWriter, dcp.FileSystemReader)}
    with suppress(ImportError):
        from torch.distributed.checkpoint.hf_storage import (
            HuggingFaceStorageReader,
            HuggingFaceStorageWriter,
        )

        pairs["torch: HuggingFaceStorageWriter"] = by_dcp(
            HuggingFaceStorageWriter, HuggingFaceStorageReader
        )
    pairs["muonfx: Writer"] = by_dcp(mfx.checkpoint.Writer, mfx.checkpoint.Reader)

    def save(state: State, path: Path) -> None:
        mfx.checkpoint.save(path, state)

    def load(state: State, path: Path) -> None:
        mfx.tree.map(
            lambda value, saved: value.copy_(saved), state, mfx.checkpoint.load(path, like=state)
        )

    pairs["muonfx: save and load"] = (save, load)
    return pairs


def outcomes() -> list[dict[str, Any]]:
    """Attack every candidate, and return a row for each."""
    rows: list[dict[str, Any]] = []
    for name, (save, load) in candidates().items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"candidate": name, **attack(save, load, Path(folder))})
    return rows


# --------------------------------------------------------------------------------------------------------------- table


def lost(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row: how many attempts ended badly, of how many.

    >>> lost(
    ...     {
    ...         "candidate": "a",
    ...         "kills": {"whole": 3, "refused": 1},
    ...         "fp32 into bf16": {"refused": 1},
    ...     }
    ... )
    {'kills': '1 of 4', 'fp32 into bf16': '0 of 1'}
    """
    cells: dict[str, str] = {}
    for attacked, counts in row.items():
        if attacked != "candidate":
            bad = counts.get("wrong", 0)
            if attacked == "kills":
                bad += counts.get("refused", 0)
            cells[attacked] = f"{bad} of {sum(counts.values())}"
    return cells


HEADS = {
    "kills": "checkpoint lost, by kills",
    "flipped bits": "wrong values loaded: flipped bits",
    "truncated or missing files": "truncated or missing files",
    "fp32 into bf16": "fp32 rounded to bf16 in silence",
}


def table() -> str:
    """Return the table of the attack, from ``results/checkpoint_attack.json``."""
    result = report.load("checkpoint_attack")
    if result is None:
        return ""
    lines = [[row["candidate"], *[lost(row)[name] for name in HEADS]] for row in result["rows"]]
    return f"{report.table(['storage', *HEADS.values()], lines)}\n\n{report.machine_line(result, 'one thread')}\n"


SECTIONS = {"attack": table}
