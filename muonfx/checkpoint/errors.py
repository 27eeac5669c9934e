"""The errors of checkpoints, with a common base class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or used; the base class of all checkpoint errors."""


class NotFoundError(CheckpointError):
    """There is no checkpoint at the given path."""


class FormatError(CheckpointError):
    """A checkpoint has a format that this version of muonfx cannot read."""


class WriteError(CheckpointError):
    """A checkpoint could not be written, for example because the disk is full.

    Either the previous checkpoint is unchanged, or the new one is complete and a later operation has failed.
    """

    def __init__(self, message: str, written: bool = False) -> None:
        super().__init__(message)
        self.written = written
        """True if the new checkpoint is complete at the path. If that cannot be known, the message says so."""


class CorruptError(CheckpointError):
    """A checkpoint is damaged: a file is missing, truncated, or changed."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced while it was read; it is read again, and the error is raised if that happens often."""


class LostRanksError(CheckpointError):
    """The communication with the other ranks has failed, usually because a process has ended."""


class MismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the state to load into; the message lists the first differences of each kind."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
        """All differences between the checkpoint and the requested state, one sentence each."""


def first_of_each_kind(problems: Iterable[str], most: int = 10) -> list[str]:
    """Return the first ``most`` error texts of each kind, and then a line for each kind that counts the rest.

    The kind of an error text is the word before its first colon, such as "missing" in "missing:   'trace/w'".

    >>> first_of_each_kind(["missing: 'a'", "missing: 'b'", "missing: 'c'", "extra: 'd'"], most=1)
    ["missing: 'a'", "extra: 'd'", 'missing: ... and 2 more']
    """
    lines: list[str] = []
    count_of_start: Counter[str] = Counter()  # by the start of the text, such as "missing: "
    for problem in problems:
        kind, _, _ = problem.partition(":")
        start = f"{kind}: "
        if not kind.isidentifier():  # a text without a kind, such as "'w' has no state"
            start = ""
        count_of_start[start] += 1
        if count_of_start[start] <= most:
            lines.append(problem)
    for start, count in count_of_start.items():
        if count > most:
            lines.append(f"{start}... and {count - most} more")
    return lines


def mismatch(where: str, problems: Sequence[str], advice: Sequence[str]) -> MismatchError:
    """Return the error of a checkpoint at the path ``where`` that does not fit, with sentences about what to do."""
    text = f"{where} does not fit, nothing was loaded:\n  " + "\n  ".join(
        first_of_each_kind(problems)
    )
    if advice:
        # The dict has each sentence once, in order.
        text += "\nwhat to do:\n  " + "\n  ".join(dict.fromkeys(advice))
    return MismatchError(text, problems)


def reshaped(name: str, stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return the error text for a leaf that has another shape in the checkpoint."""
    return f"reshaped:  {name!r} has shape {stored_shape} in the checkpoint, expected {shape}"


def narrowing(name: str, stored_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Return the error text for a leaf whose values in the checkpoint would be rounded to a narrower dtype."""
    return f"narrowing: {name!r} is {stored_dtype} in the checkpoint, expected {dtype}"
