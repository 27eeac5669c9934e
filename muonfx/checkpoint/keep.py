"""A folder of checkpoints, one for each of some steps: their names, the newest good one, and the oldest to go."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from muonfx.checkpoint.atomic import PART
from muonfx.checkpoint.errors import CheckpointError, CorruptError, FormatError, NotFoundError
from muonfx.checkpoint.files import read_regular
from muonfx.checkpoint.index import FORMAT, INDEX, LONGEST, Index, read_parsed
from muonfx.checkpoint.reading import Reader

__all__ = ["checkpoints", "latest", "offering", "prune", "read_index", "remove", "step_path"]

_STEP = re.compile(r"step-(\d+)")


def step_path(folder: str | os.PathLike[str], step: int) -> Path:
    """Name the checkpoint of a step in a folder of checkpoints.

    Raises:
        ValueError: ``step`` is not an int of 0 or more.

    >>> step_path("runs/a", 100).name
    'step-000000100'
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an int of 0 or more, found {step!r}")
    return Path(folder) / f"step-{step:09}"


def step_of(path: Path) -> int | None:
    """The step in a name that `step_path` made; None for any other."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def read_index(path: str | os.PathLike[str]) -> Index:
    """Read what a checkpoint says about itself.

    Raises:
        NotFoundError: there is no checkpoint.
        FormatError: it has a format that is not known here.
        CorruptError: its index is damaged.
    """
    path = Path(path)
    try:
        return read_parsed(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(_why_not(path)) from None
    except OSError as error:
        raise CorruptError(f"{path / INDEX}: cannot be read: {error.strerror}", before(path)) from error
    except CorruptError as error:
        raise CorruptError(error.bare, before(path)) from error


def _why_not(path: Path) -> str:
    if not path.exists():
        return f"there is no checkpoint at {path}: no such folder"
    if not path.is_dir():
        return f"there is no checkpoint at {path}: a checkpoint is a folder, this is a file"
    if found := checkpoints(path):
        return f"{path} is no checkpoint but holds some: the newest is {found[-1]}; latest() finds it"
    return f"there is no checkpoint in {path}: no {INDEX} (was the writer stopped before it was done?)"


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """List the finished checkpoints in a folder that `step_path` named, the oldest step first.

    One whose writer was stopped before it was done has no index and is not listed. Nothing is checked.

    >>> checkpoints("no/such/folder")
    []
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return [path for path in _by_step(folder) if (path / INDEX).exists()]


def _by_step(folder: Path) -> list[Path]:
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [(step, path) for path in inside if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def _problem(path: Path, *, verify: bool) -> CheckpointError | None:
    try:
        with Reader(path, read_parsed(path)) as reader:
            reader.check_files()
            if verify:
                reader.verify()
    except CheckpointError as error:
        return error
    except OSError as error:
        return CorruptError(f"{path / INDEX}: cannot be read: {error.strerror}")
    return None


def latest(folder: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """Find the newest good checkpoint in a folder.

    Args:
        folder: where checkpoints named by `step_path` are.
        verify: read every byte of a checkpoint before calling it good; else its index, and the length and header of
            each file.

    Returns:
        Its path; None if there is none.

    Raises:
        FormatError: the newest was written by a newer version of muonfx.

    Warns:
        UserWarning: a newer one is damaged; the message says what is wrong with it.

    >>> latest("no/such/folder") is None
    True
    """
    for path in reversed(checkpoints(folder)):
        problem = _problem(path, verify=verify)
        if problem is None:
            return path
        if isinstance(problem, FormatError):
            raise problem
        warnings.warn(f"{path.name} is not used, an older checkpoint is looked for: {problem}", stacklevel=2)
    return None


def before(path: Path) -> Path | None:
    """The newest checkpoint beside another, of an earlier step, that looks whole."""
    step = step_of(path)
    if step is None:
        return None
    for other in reversed(checkpoints(path.parent)):
        if (step_of(other) or 0) < step and _problem(other, verify=False) is None:
            return other
    return None


@contextmanager
def offering(path: Path) -> Generator[None]:
    """Add an older good checkpoint to the error if this one is damaged."""
    try:
        yield
    except CorruptError as error:
        if error.previous is None and (previous := before(path)) is not None:
            raise CorruptError(error.bare, previous) from error
        raise


def prune(folder: str | os.PathLike[str], keep: int, *, written: Path | None = None) -> list[Path]:
    """Remove all checkpoints in a folder but the good ones of the highest steps, and what stopped writers left before.

    Only what `muonfx.checkpoint.save` has written is removed; any other file stays, and its folder with it. Links are
    left alone.

    Args:
        folder: where checkpoints named by `step_path` are.
        keep: how many good ones to keep, at least 1.
        written: one to keep in any case, as `save` does with its own: a run that went back to an earlier step has
            others of higher steps beside it.

    Returns:
        Those removed.

    Raises:
        ValueError: ``keep`` is not an int of 1 or more.

    >>> prune("no/such/folder", keep=3)
    []
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be an int of 1 or more, found {keep!r}")
    folder = Path(folder)
    all_of_them = _by_step(folder) if folder.is_dir() else []
    good = [path for path in all_of_them if (path / INDEX).exists() and _problem(path, verify=False) is None]
    if not good:
        return []
    own = [path for path in good if path == written]
    rest = [path for path in good if path != written]
    kept = rest[len(rest) - min(len(rest), keep - len(own)) :] + own
    order = {path: place for place, path in enumerate(all_of_them)}
    first, newest = min(order[path] for path in kept), order[good[-1]]

    def goes(path: Path) -> bool:
        if path in kept:
            return False
        if path in good or (len(good) > keep and order[path] < first):
            return True
        return order[path] < newest and not (path / INDEX).exists()

    doomed = [path for path in all_of_them if goes(path)]
    for path in doomed:
        remove(path)
    return doomed


def remove(path: Path) -> None:
    """Remove a checkpoint: the index first, so that half of it is never taken for one."""
    with suppress(FileNotFoundError):
        if not _is_foreign(path / INDEX):
            (path / INDEX).unlink()
    clean(path, [])
    with suppress(OSError):  # somebody keeps something of his own in there
        path.rmdir()


def _is_foreign(index: Path) -> bool:
    """Whether somebody else has written a file of this name: it does not name our format, be it whole or damaged."""
    try:
        return FORMAT.encode() not in read_regular(index, LONGEST)
    except FileNotFoundError:
        raise
    except OSError:  # a pipe, a device, or larger than any index
        return True


def clean(path: Path, used: list[str]) -> None:
    """Remove what saves have written into a checkpoint's folder and its index does not name."""
    for file in path.iterdir():
        ours = re.fullmatch(r"data-[0-9a-f]{16}-\d+-of-\d+\.safetensors", file.name) or file.name == f".{INDEX}{PART}"
        if ours and file.name not in used:
            with suppress(FileNotFoundError):
                file.unlink()
