"""The errors of checkpoints, with a common base class."""

from __future__ import annotations

from collections.abc import Iterable

# fmt: off
__all__ = [
    "CheckpointError", "CorruptError", "FormatError", "MismatchError", "NotFoundError", "ReplacedError", "WriteError",
    "first_of_each_kind",
]
# fmt: on


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

    def __init__(self, message: str, written: bool | None = False) -> None:
        super().__init__(message)
        self.written = written
        """True if the new checkpoint is at the path; None if that cannot be known."""

    def __reduce__(self) -> tuple[type[WriteError], tuple[str, bool | None]]:
        """Pickle both arguments, since torch sends errors from one rank to the others."""
        return type(self), (str(self), self.written)


class CorruptError(CheckpointError):
    """A checkpoint is damaged: a file is missing, truncated, or changed."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced while it was read; loading retries, and raises this error after 100 attempts."""


class MismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the state to load into; the message lists the first differences of each kind."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
        """All differences between the checkpoint and the requested state, one sentence each."""

    def __reduce__(self) -> tuple[type[MismatchError], tuple[str, tuple[str, ...]]]:
        """Pickle both arguments, since torch sends errors from one rank to the others."""
        return type(self), (str(self), self.problems)


def first_of_each_kind(problems: Iterable[str], most: int = 10) -> list[str]:
    """Return the first ``most`` error texts of each kind, and for longer lists a line that counts the rest.

    The kind of an error text is the word before its first colon, such as "missing".
    """
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kind, colon, _ = problem.partition(":")
        kinds.setdefault(f"{kind}{colon}" if colon and kind.isidentifier() else "", []).append(problem)
    return [
        line
        for kind, lines in kinds.items()
        for line in (*lines[:most], *[f"{kind} ... and {len(lines) - most} more".strip()] * (len(lines) > most))
    ]
