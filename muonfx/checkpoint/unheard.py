"""Saves in the background that have failed while nobody waited for them."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from pathlib import Path

__all__ = ["forget_failure", "note_failure", "warn_of_failed_saves"]

_failed: list[tuple[Path, BaseException]] = []


def note_failure(path: Path, error: BaseException) -> None:
    """Note that a save has failed; somebody may still wait for it, and hear of it then."""
    _failed.append((path, error))


def forget_failure(error: BaseException | None) -> None:
    """Note that somebody has waited, and heard."""
    _failed[:] = [(path, other) for path, other in _failed if other is not error]


def warn_of_failed_saves() -> None:
    """Tell of saves that have failed by now and that nobody has waited for: each once, when the next one begins.

    Warns:
        UserWarning: there is one.
    """
    while _failed:
        path, error = _failed.pop(0)
        warnings.warn(f"{_sentence(path, error)}: call wait() on what save_async returns", stacklevel=3)


def _sentence(path: Path, error: BaseException) -> str:
    return f"the save to {path} in the background has failed, and nobody has waited for it: {error!r}"


@atexit.register
def _tell_at_exit() -> None:
    """All threads have ended by then."""
    for path, error in _failed:
        print(f"muonfx: {_sentence(path, error)}", file=sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_failed.clear)  # they are the parent's to tell
