"""Manage a folder of checkpoints: name them by step, find the newest undamaged one, remove old ones and leftovers."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Literal, TypeVar

from muonfx.checkpoint.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    NotFoundError,
    ReplacedError,
)
from muonfx.checkpoint.files import (
    LONGEST_LOCK,
    close_read,
    lock,
    open_regular,
    read_regular,
    this_boot,
)
from muonfx.checkpoint.index import (
    INDEX,
    Index,
    lock_name,
    read_index,
    save_id_of,
    unfinished_index_name,
)
from muonfx.checkpoint.reader import DataReader
from muonfx.core.checks import positive_int
from muonfx.internal.display import format_bytes

StrPath = str | os.PathLike[str]
"""The path of a folder."""

_STEP = re.compile(r"step-(\d+)")


def step_path(folder: StrPath, step: int) -> Path:
    """Return the path for the checkpoint of a training step: ``folder/step-<step>``, with nine digits.

    Raises:
        ValueError: ``step`` is not an int of 0 or more.

    >>> step_path("runs/a", 100).name
    'step-000000100'
    """
    check_step(step)
    return Path(folder) / f"step-{step:09}"


def check_step(step: object) -> None:
    """Raise ValueError unless ``step`` is an int from 0 to 2**63 - 1."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        raise ValueError(f"step must be an int of 0 or more, found {step!r}")


def folder_named(path: StrPath) -> Path:
    """Return the absolute path of a folder, which need not exist; raise if ``path`` cannot name a folder.

    Without this check, ``None`` or a name with a zero byte would be an error in the middle of a save, and the empty
    string would be the current folder.
    """
    # os.fspath may return bytes
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path must be a str or a path, found {path!r}")
    text = os.fspath(path)
    try:
        is_name = text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a name that the file system cannot have
        is_name = False
    if not is_name:
        raise ValueError(f"path must name a folder, found {text!r}")
    return Path(text).absolute()


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, such as 100 for ``step-000000100``; None for other names."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        return None
    return int(match[1])


def inspect(path: StrPath) -> Index:
    """Describe a checkpoint without reading tensors: step, extra values, transform, and the shape of each leaf.

    The result also has the dtype of each leaf, and the versions of muonfx and torch that wrote the checkpoint.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        CorruptError: the file ``index.json`` of the checkpoint is damaged.
        FormatError: the checkpoint was written by a newer version of muonfx.
        CheckpointError: the file cannot be read.

    >>> import tempfile
    >>> index = mfx.checkpoint.inspect(
    ...     mfx.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=3, extra={"seed": 0})
    ... )
    >>> index.step, index.extra, index.leaves["w"].spec
    (3, {'seed': 0}, Spec(shape=(2,), dtype=torch.float32))
    """
    path = folder_named(path)
    with _errors_of_index(path):
        return read_index(path / INDEX)


@contextmanager
def _errors_of_index(path: Path) -> Generator[None]:
    """Convert an OSError of the ``with`` block, which reads the index of a checkpoint, to an error of this package.

    The index is the file ``index.json``. The error is `NotFoundError` without an index, `CheckpointError` for a path
    that cannot be opened, such as without permission, and `CorruptError` for all others, such as a defect of the disk.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(_why_no_checkpoint(path)) from None
    except OSError as error:
        message = f"{path / INDEX}: cannot be read: {error.strerror}"
        # These refuse access to the path, and do not show that the file is damaged.
        is_path_refused = error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.ENAMETOOLONG,
            errno.ELOOP,
        )
        if is_path_refused:
            raise CheckpointError(message) from error
        raise CorruptError(message) from error


@contextmanager
def inspect_and_keep(path: Path) -> Generator[Index]:
    """Yield the index of a checkpoint. In the ``with`` block, saves do not remove the data files that it names.

    The caller opens the files in the block. Open files can be read later, even if a save has removed them meanwhile.
    Raise `ReplacedError` if a save replaced the checkpoint before its index could be locked.
    """
    with ExitStack() as stack:  # closes the index at the end of the block, which ends the lock
        # The context ends before the caller's block, whose errors are of other files.
        with _errors_of_index(path):
            file = open_regular(path / INDEX)
            stack.callback(close_read, file)
            lock(file, shared=True)  # a save that replaces this index waits until the lock ends
            index = read_index(path / INDEX)
            # A save replaces ``index.json`` by another file. If it has done so, it may not have waited for the lock.
            is_still_at_path = os.path.samestat(os.fstat(file.fileno()), os.stat(path / INDEX))
            if not is_still_at_path:
                raise ReplacedError(f"{path} was replaced while it was read")
        yield index


ATTEMPTS = 10
"""Number of attempts to read a checkpoint that is being replaced.

A reader locks the index while it opens the data files. The first attempt fails if the index is replaced in the moment
before the lock, or if ranks have read different ones; in the second, all ranks use the index that rank 0 has locked.
More attempts are needed only on file systems without locks, and if there are more data files than can be held open.
"""

Result = TypeVar("Result")


def retried(path: object, attempt: Callable[[int], Result]) -> Result:
    """Call a function that reads a checkpoint, again if a save replaced the checkpoint meanwhile; return its result.

    This is ``attempt(0)``. If that raises `ReplacedError`, it is ``attempt(1)``, then ``attempt(2)``, and so on.
    """
    for number in range(ATTEMPTS):
        with suppress(ReplacedError):  # the loop continues after this error only
            return attempt(number)
    raise ReplacedError(
        f"{path} was replaced {ATTEMPTS} times while it was read: pause its writer, or read a copy"
    )


def with_reader(path: Path, work: Callable[[DataReader], Result]) -> Result:
    """Open all files of a checkpoint and return ``work(reader)``; read again if a save replaced it meanwhile."""
    return retried(path, lambda attempt: _read_once(path, work))


def _read_once(path: Path, work: Callable[[DataReader], Result]) -> Result:
    """Open the checkpoint that is at the path now, and return ``work(reader)``; raise if a save replaces it meanwhile.

    ``work`` is such as `DataReader.verify`. `with_reader` calls this again after the error, a `ReplacedError`.
    """
    with ExitStack() as stack:  # closes the data files
        # While the index is locked, open all data files: no save removes them in this time.
        with inspect_and_keep(path) as index, replacement(path, index):
            reader = stack.enter_context(DataReader(path, index))
            reader.check_files()
        # The lock has ended, so that a save need not wait for a long read. Open files can be read to the end.
        with replacement(path, index):
            return work(reader)


@contextmanager
def replacement(path: Path, index: Index) -> Generator[None]:
    """In the ``with`` block, convert a `CorruptError` to a `ReplacedError` if another save replaced the checkpoint.

    A file that is missing may be damage, or the work of a save that has replaced the checkpoint since the ``index`` was
    read. In the second case the path now has an index with another id, and it helps to read again.
    """
    try:
        yield
    except CorruptError as error:
        if inspect(path).save_id != index.save_id:
            raise ReplacedError(f"{path} was replaced while it was read") from error
        raise


def _why_no_checkpoint(path: Path) -> str:
    """Return the message of an error that there is no checkpoint at a path, with the most likely reason.

    For example "there is no checkpoint at runs/a: no such folder". Other reasons are that the path is a file of
    torch.save, a folder of torch's own storage, or a folder that contains checkpoints.
    """
    # If the reason cannot be found out, the last message has none.
    with suppress(OSError, CheckpointError):
        if not path.exists():
            return f"there is no checkpoint at {path}: no such folder"
        if not path.is_dir():
            advice = ""
            if _is_of_torch_save(path):
                advice = _TORCH_SAVE_ADVICE
            return f"there is no checkpoint at {path}: a checkpoint is a folder, this is a file{advice}"
        inner = checkpoints(path)
        if inner:
            return f"{path} is a folder of checkpoints, not a checkpoint: latest() returns the newest, {inner[-1]}"
        if (path / _TORCH_STORAGE_INDEX).is_file():
            return f"there is no checkpoint in {path}: the folder is of torch's own storage{_TORCH_STORAGE_ADVICE}"
    return (
        f"there is no checkpoint in {path}: it has no {INDEX}, which a save writes last: pass the folder that save "
        "returned, and if that save was interrupted, an earlier checkpoint"
    )


_TORCH_STORAGE_INDEX = ".metadata"  # the file that the FileSystemWriter of torch writes last
_TORCH_STORAGE_ADVICE = (
    ": load it by torch.distributed.checkpoint.load, without storage_reader, into an optimizer as it was saved from; "
    "if this is an optimizer of torch, convert it by muonfx.checkpoint.convert.recipe and read. Then "
    "muonfx.checkpoint.save(folder, optimizer) writes a checkpoint, which load_changed reads"
)
_TORCH_SAVE_ADVICE = (
    " of torch.save: read it by torch.load with weights_only=True. If it has the state dict of this optimizer, call "
    "optimizer.load_state_dict; of another optimizer, muonfx.checkpoint.convert.read. Then "
    "muonfx.checkpoint.save(folder, optimizer) writes a checkpoint"
)


def _is_of_torch_save(path: Path) -> bool:
    """Return True if a file is a zip archive that begins as torch.save writes it. Nothing is unpickled."""
    with open_regular(path) as file:
        start = file.read(512)
    return start.startswith(b"PK\3\4") and b"/data.pkl" in start


def checkpoints(folder: StrPath) -> list[Path]:
    """Return the paths of the complete checkpoints in a folder, in ascending order of step.

    These are the folders named by `step_path` that contain an index; an interrupted save has none. Only names are read;
    `verify` checks the contents. Symbolic links are followed, and a link to nowhere is in the list.

    Raises:
        CheckpointError: the folder cannot be read.

    >>> checkpoints("no/such/folder")
    []
    """
    step_folders = _by_step(folder_named(folder))
    return [path for path in step_folders if _has_index(path)]


def _has_index(path: Path) -> bool:
    """Return whether a folder has an index, or may have one, which an attempt to read it will show.

    A link to nowhere may have one, because the disk that it refers to may be missing for a short time.
    """
    try:
        is_link_to_nowhere = path.is_symlink() and not path.is_dir()
        return is_link_to_nowhere or (path / INDEX).exists()
    except OSError:  # the folder cannot be read
        return True


def _by_step(folder: Path) -> list[Path]:
    """Return the folders named as ``step-000000100``, and links of such names, in ascending order of step.

    There are none if the folder does not exist.
    """
    step_folders: list[Path] = []
    with _errors_of_folder(folder), suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if step_of(path) is not None and (path.is_dir() or path.is_symlink()):
                step_folders.append(path)
    return sorted(step_folders, key=lambda path: (step_of(path), path))


@contextmanager
def _errors_of_folder(folder: Path) -> Generator[None]:
    """Convert an OSError of the ``with`` block, which looks at the names in a folder, to a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be read: {error.strerror}") from error


def open_all_files(path: Path) -> Index:
    """Open all files of a checkpoint, which checks their sizes and headers, and return the index.

    It takes less time than to read every byte, and shows most damage. Raise if a file is missing or damaged.
    """
    return with_reader(path, lambda reader: reader.index)


def latest(folder: StrPath, *, verify: bool = False) -> Path | None:
    """Return the path of the undamaged checkpoint with the highest step in a folder.

    Args:
        folder: the folder with the checkpoints, named by `step_path`.
        verify: True to check every byte; False to check only the index, and the size and header of each file.

    Returns:
        The path of the checkpoint; None if the folder has no undamaged checkpoint.

    Raises:
        FormatError: the checkpoint with the highest step was written by a newer version of muonfx.
        CheckpointError: the folder cannot be read.

    Warns:
        UserWarning: a checkpoint of a higher step is damaged, or is a symbolic link to nowhere; or the folder has files
            of saves that were interrupted on another machine. The message gives their paths and bytes.

    >>> latest("no/such/folder") is None
    True
    """
    folder = folder_named(folder)
    with _errors_of_folder(folder):
        _warn_of_leftovers(folder)
    for path in reversed(checkpoints(folder)):
        try:
            if verify:
                with_reader(path, DataReader.verify)
            else:
                open_all_files(path)
        except FormatError:
            raise
        except CheckpointError as error:
            is_removed = isinstance(error, NotFoundError) and not os.path.islink(path)
            if not is_removed:  # since the folder was listed
                warnings.warn(
                    f"{path.name} is not used, and an older checkpoint is tried: {error}",
                    stacklevel=2,
                )
        else:
            return path
    return None


def prune(folder: StrPath, keep: int, *, written: Path | None = None) -> list[Path]:
    """Remove old checkpoints from a folder, except the ``keep`` undamaged checkpoints with the highest steps.

    A damaged checkpoint is removed only if it is older than every kept checkpoint. To remove a checkpoint, its index
    and the data files named in the index are deleted, and its folder if that is then empty. Of a symbolic link to a
    checkpoint, only the link is removed.

    Args:
        folder: the folder with the checkpoints, named by `step_path`.
        keep: the number of undamaged checkpoints to keep, at least 1.
        written: a checkpoint that is kept, as one of ``keep``, even if its step is not among the highest. `save` passes
            the new checkpoint, because an earlier run may have left checkpoints of higher steps.

    Returns:
        The paths of the removed checkpoints.

    Raises:
        ValueError: ``keep`` is not an int of 1 or more.
        CheckpointError: a checkpoint cannot be removed. The other checkpoints to remove have been removed.

    >>> prune("no/such/folder", keep=3)
    []
    """
    positive_int("keep", keep)
    paths = checkpoints(folder)
    removed: list[Path] = []
    refusals: list[str] = []
    for path in _obsolete(paths, keep, written):
        try:
            if _remove(path):
                removed.append(path)
        except OSError as error:
            refusals.append(f"{path}: {error.strerror}")
    if refusals:
        raise CheckpointError("some obsolete checkpoints cannot be removed: " + "; ".join(refusals))
    return removed


def _obsolete(paths: list[Path], keep: int, written: Path | None) -> list[Path]:
    """Return the checkpoints that `prune` removes, of all ``paths`` in ascending order of step.

    Of the steps 1, 2, 8 and 9, all good, with ``keep=2`` and step 2 just ``written``, these are 1 and 8. Step 2 can be
    the newest if a run has started again from an earlier step.
    """
    good = [path for path in paths if _is_undamaged(path)]
    if len(good) <= keep:  # none is obsolete, and damaged ones stay with them
        return []
    # In the example, 8 and 9 have the highest steps, and 2 takes the place of 8.
    kept = good[-keep:]
    if written in good and written not in kept:
        kept[0] = written
    # Now `kept` is [2, 9]. All checkpoints before 2 go, also damaged ones. Of the later ones, only good ones go.
    first_kept = paths.index(kept[0])
    obsolete = paths[:first_kept]
    for path in paths[first_kept:]:
        if path in good and path not in kept:
            obsolete.append(path)
    return obsolete


def _is_undamaged(path: Path) -> bool:
    """Return whether all files of a checkpoint can be opened, and have the sizes and headers that the index has."""
    try:
        open_all_files(path)
    except CheckpointError:
        return False
    return True


def _remove(path: Path) -> bool:
    """Remove a checkpoint, or a link to one; return False if its index is unreadable, so its files are not known.

    Only the files that the index names are removed: the folder may have files of other programs.
    """
    if path.is_symlink():  # the checkpoint that it refers to may be in use elsewhere
        path.unlink(missing_ok=True)
        return True
    try:
        index = inspect(path)
        # First, so that a partly removed checkpoint is never taken for a whole one.
        (path / INDEX).unlink()
        for file in index.files:
            (path / file.name).unlink(missing_ok=True)
    except (FileNotFoundError, NotFoundError):  # another process has removed it
        return True
    except CheckpointError:  # the index is damaged
        return False
    with suppress(OSError):  # the folder still contains other files
        path.rmdir()
    return True


def clean(path: StrPath) -> list[Path]:
    """Remove the files of interrupted saves from a checkpoint, or from all checkpoints in a folder.

    A save leaves files behind if its process is killed. The next save removes them, except those of another machine,
    for which it cannot be found out if their save still runs. Do not call this function during a save on another
    machine: it would also remove the files of that save. The files of running saves of this machine stay.

    Args:
        path: a checkpoint, or a folder of checkpoints, named by `step_path`. A checkpoint whose folder or index cannot
            be read is skipped, because any of its files may be in use.

    Returns:
        The removed files. Folders that become empty are removed, too.

    Raises:
        CheckpointError: a file cannot be removed.

    >>> clean("no/such/folder")
    []
    """
    path = folder_named(path)
    removed: list[Path] = []
    try:
        for folder in [path, *_by_step(path)]:
            removed += _leftover_files(folder, ("dead", "unknown"), remove=True)
            _remove_if_empty(folder, path)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be removed: {error.strerror}") from error
    return removed


def remove_files_of_killed_saves(path: Path) -> None:
    """Remove the files that killed saves have left in the folder of a checkpoint, and in the other ones of its series.

    The series of "runs/step-000000100" is all such folders in "runs". A save calls this at its end, because a killed
    save could not remove its files. Those of saves that are running, or may run on another machine, stay.
    """
    folders = [path]
    if step_of(path) is not None:  # named as "step-000000100"
        folders = _by_step(path.parent)
    for folder in folders:
        # An ordinary checkpoint has an index and no lock. It is skipped, since to read its index would take time.
        if not _has_lock(folder) and _may_exist(folder / INDEX):
            continue
        _leftover_files(folder, ("dead",), remove=True)
        _remove_if_empty(folder, path)


def _has_lock(folder: Path) -> bool:
    """Return whether a folder has a file ".save-<id>.lock", which a save locks while it runs, and leaves if killed."""
    return any(lock_name(save_id) in names for save_id, names in _names_by_save(folder).items())


def _remove_if_empty(folder: Path, kept: Path) -> None:
    """Remove a folder of a series that is empty, as that of a save that was killed before it wrote a file."""
    if folder != kept:
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()


def _warn_of_leftovers(folder: Path) -> None:
    """Warn of files of saves that ended on another machine or still run there, which no save removes.

    They may take many gigabytes, and this machine cannot find out whether such a save still runs. ``folder`` contains
    checkpoints.
    """
    files: list[Path] = []
    for checkpoint in _by_step(folder):
        files += _leftover_files(checkpoint, ("unknown",))
    nbytes = _data_bytes(files)
    if nbytes > 0:  # a save that has only just begun has none, and gives no reason to warn
        warnings.warn(
            f"{folder}: found {format_bytes(nbytes)} in {len(files)} files of saves that were interrupted on another "
            f"machine or still run there, such as {files[0]}: if no save is running, remove them with "
            f"muonfx.checkpoint.clean({str(folder)!r})",
            stacklevel=3,
        )


def _data_bytes(files: Iterable[Path]) -> int:
    """Return the number of bytes in the files of saves, without their locks."""
    nbytes = 0
    for file in files:
        if file.suffix != ".lock":
            with suppress(OSError):  # removed since it was listed
                nbytes += file.stat().st_size
    return nbytes


def warn_of_later_steps(path: Path) -> None:
    """Warn if the parent folder of a new checkpoint has checkpoints of later steps, which `latest` would return.

    If "step-000000100" was just written, and the folder has "step-000000500" of an earlier run, a restart would
    continue that run.
    """
    step = step_of(path)
    if step is None:  # the folder has another name, so it belongs to no series
        return
    step_paths = checkpoints(path.parent)
    if not step_paths:  # the new checkpoint was removed meanwhile
        return
    newest = step_paths[-1]  # they are in ascending order
    newest_step = step_of(newest)
    if newest_step is not None and newest_step > step:
        warnings.warn(
            f"{path.name} was written, but the folder has later steps, up to {newest.name}, which latest() "
            "returns: if you restarted from an earlier step on purpose, move the later checkpoints to another folder",
            stacklevel=2,
        )


# ------------------------------------------------------------------------------------------------ files of killed saves

Verdict = Literal["dead", "alive", "unknown"]
"""Whether a save was killed, or still runs. It is unknown for a save of another machine, or if its lock is unreadable.
"""


def _verdict(folder: Path, save_id: str, stack: ExitStack) -> Verdict:
    """Return "alive" if a save is still running, "dead" if it was killed, else "unknown".

    A save locks the file ".save-<id>.lock" while it runs. If the file is not locked, the save is dead. This process
    then holds the lock until the caller closes ``stack``, so that no other process removes the same files meanwhile.
    """
    path = folder / lock_name(save_id)
    try:
        boot_id = read_regular(path, LONGEST_LOCK)
        file = stack.enter_context(FileIO(path, "r+b"))
    except FileNotFoundError:
        return _verdict_without_lock(folder, save_id)
    except OSError:
        return "unknown"
    # The file contains the id that its machine got when it was started: locks may be valid on one machine only.
    is_of_this_machine = boot_id != b"" and boot_id == this_boot()
    if not is_of_this_machine:
        return "unknown"
    # A running save holds this lock, and the system releases it when its process ends.
    return "dead" if lock(file) else "alive"


def _verdict_without_lock(folder: Path, save_id: str) -> Verdict:
    """Return "dead" or "unknown" for a save that has files in a folder, but no lock file.

    A save creates its lock file first and removes it last. So it has ended, and its files are leftovers: "dead".
    """
    # A save renames its unfinished index to ``index.json``, or removes it, before it removes the lock. So this one is
    # of another program or version. It is looked for after the lock, since a save may end at this moment.
    if _may_exist(folder / unfinished_index_name(save_id)):
        return "unknown"
    return "dead"


def _may_exist(path: Path) -> bool:
    """Return True if a file exists, or if an error of the disk hides it."""
    try:
        return path.exists()
    except OSError:
        return True


def _leftover_files(
    folder: Path, verdicts: tuple[Verdict, ...], *, remove: bool = False
) -> list[Path]:
    """Return the files of saves in a checkpoint's folder that are not part of the checkpoint, and maybe remove them.

    With the ``verdicts`` ``("dead",)`` these are the files of killed saves, and with ``("unknown",)`` the files of
    saves that may still run on another machine.
    """
    leftovers: list[Path] = []
    for save_id, names in _names_by_save(folder).items():
        # Holds the lock of a dead save, so that no other process removes its files too.
        with ExitStack() as stack:
            if _verdict(folder, save_id, stack) not in verdicts:
                continue
            try:
                # The data files of the checkpoint. Read after the verdict, because a save may end at this moment.
                names_in_index = _names_in_index(folder)
            except (OSError, CheckpointError):
                return leftovers  # any file may belong to an index that cannot be read
            files = [folder / name for name in names if name not in names_in_index]
            if remove:
                for file in files:
                    file.unlink(missing_ok=True)
            leftovers += files
    return leftovers


def _names_by_save(folder: Path) -> dict[str, list[str]]:
    """Return a dict from the id of each save to the names of its files in a folder, the lock last.

    The names contain the id: "data-0123456789abcdef-00000-of-00001.safetensors". The lock is removed last, so that a
    removal that is interrupted is completed later. An unreadable folder has none.
    """
    names_of_save: dict[str, list[str]] = {}
    with suppress(OSError):
        # False sorts before True, so that a name that ends with ".lock" comes after all others.
        for name in sorted(os.listdir(folder), key=lambda name: (name.endswith(".lock"), name)):
            save_id = save_id_of(name)
            if save_id is not None:  # not a file of another program, or ``index.json``
                names_of_save.setdefault(save_id, []).append(name)
    return names_of_save


def _names_in_index(folder: Path) -> set[str]:
    """Return the names of the data files of the checkpoint in a folder; none if it has no index."""
    try:
        return {file.name for file in read_index(folder / INDEX, with_leaves=False).files}
    except FileNotFoundError:
        return set()
