"""The line of progress that long work shows, such as `check_transform`, while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from muonfx.internal.display import format_bytes

SECONDS_BETWEEN_LINES = 3.0
"""Where a line cannot be replaced, such as in a file or a notebook, a short check stays silent."""

SECONDS_BEFORE_BYTES = 2.0
"""Work that takes less time shows no bytes."""

Report = Callable[[str], None]


@contextmanager
def reporting(progress: bool | Report) -> Generator[Report]:
    """Yield a function that shows a line of progress on stderr, or the given function. See `check_transform`.

    >>> with reporting(False) as report:
    ...     report("muon: law 1 of 58, empty_trees_are_taken")
    >>> with reporting(print) as report:
    ...     report("muon: law 1 of 58, empty_trees_are_taken")
    muon: law 1 of 58, empty_trees_are_taken
    """
    # Four cases: a function of the caller, no progress, a terminal, and a file or notebook.
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda line: None
    elif sys.stderr.isatty():
        yield _replace_line
        _replace_line("")  # erase the last line
    else:
        yield _EveryFewSeconds().report


@contextmanager
def reporting_bytes(title: str, total: int) -> Generator[Callable[[int], None]]:
    """Yield a function that is called with the number of bytes that are done, and shows it on stderr.

    It shows a line such as "saving step_10: 1.50 GiB of 4.00 GiB", on a terminal only, once the ``with`` block has
    taken two seconds. The line is erased at the end.
    """
    start = time.monotonic()
    is_shown = False  # True once there is a line to erase

    def report(done: int) -> None:
        nonlocal is_shown
        with suppress(Exception):  # a terminal that is closed meanwhile must not make the work fail
            if sys.stderr.isatty() and time.monotonic() - start >= SECONDS_BEFORE_BYTES:
                is_shown = True
                _replace_line(f"{title}: {format_bytes(done)} of {format_bytes(total)}")

    try:
        yield report
    finally:
        if is_shown:
            with suppress(Exception):
                _replace_line("")


def _replace_line(line: str) -> None:
    """Write a line over the last one of a terminal: return to its start, write, and erase what is left of it."""
    sys.stderr.write(f"\r{line}\x1b[K")
    sys.stderr.flush()


class _EveryFewSeconds:
    """Print a line on stderr, if the last one was printed at least `SECONDS_BETWEEN_LINES` ago."""

    def __init__(self) -> None:
        self._last_time = time.monotonic()

    def report(self, line: str) -> None:
        """Print the line, or drop it if it comes too soon."""
        if time.monotonic() - self._last_time < SECONDS_BETWEEN_LINES:
            return
        print(line, file=sys.stderr, flush=True)
        self._last_time = time.monotonic()
