"""Inspect checkpoints from the command line: ``python -m muonfx.checkpoint`` inspect, verify, clean.

The exit code is 0 on success, 1 if a checkpoint is damaged, and 2 if there is no checkpoint to read.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from muonfx.checkpoint.errors import CheckpointError, CorruptError
from muonfx.checkpoint.folder import checkpoints, clean, inspect, open_all_files
from muonfx.checkpoint.load import verify
from muonfx.internal.display import Table, format_bytes, printable


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Arguments that cannot be parsed end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m muonfx.checkpoint", description="Look at checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    # Each command has a function, which gets the path and returns the exit code.
    for name, run, text in (
        ("inspect", _inspect, "show the contents of a checkpoint, or list a folder of checkpoints"),
        ("verify", _verify, "read every byte and compare the checksums"),
        ("clean", _clean, "remove the files of saves that were stopped; none may be in progress"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("path", type=Path, help="a checkpoint, or a folder of checkpoints")
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return options.run(options.path)
    except CorruptError as error:
        print(f"damaged: {printable(error)}", file=sys.stderr)
        return 1
    except CheckpointError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2


def _inspect(path: Path) -> int:
    """Print a checkpoint, or a table of the checkpoints in a folder; return the exit code 0.

    A checkpoint that cannot be read has a row with the reason, such as a data file that is missing.
    """
    paths = checkpoints(path)
    if not paths:  # the path is a checkpoint itself
        print(inspect(path))
        return 0
    rows: list[tuple[str, ...]] = []
    for checkpoint in paths:
        try:
            index = open_all_files(checkpoint)
        except CheckpointError as error:
            rows.append((checkpoint.name, "?", "?", "?", str(error)))
        else:
            leaves = str(len(index.leaves))
            rows.append(
                (
                    checkpoint.name,
                    str(index.step),
                    leaves,
                    format_bytes(index.nbytes),
                    "looks whole",
                )
            )
    print(
        Table(("checkpoint", "step", "leaves", "bytes", "state"), rows, right=(1, 2, 3)).to_text()
    )
    return 0


def _verify(path: Path) -> int:
    """Verify every byte of a checkpoint, or of all checkpoints in a folder; return 1 if one is damaged, else 0.

    A line is such as "runs/a/step-000000100: good, 12 leaves, 1.20 MiB". After a damaged one, the others follow.
    """
    code = 0
    paths = checkpoints(path) or [path]  # without any, the path is a checkpoint itself
    for checkpoint in paths:
        try:
            index = verify(checkpoint)
        except CorruptError as error:
            print(f"{checkpoint}: damaged: {printable(error)}")
            code = 1
        else:
            print(f"{checkpoint}: good, {len(index.leaves)} leaves, {format_bytes(index.nbytes)}")
    return code


def _clean(path: Path) -> int:
    """Remove the files that ended saves have left, and print their paths; return the exit code 0."""
    removed = clean(path)
    print("\n".join([*map(str, removed), f"{len(removed)} files removed"]))
    return 0


def run_in_pipe() -> int:
    """Run `main`, and return its exit code; end in silence if the output is no longer read.

    In ``python -m muonfx.checkpoint inspect runs/a | head``, the program ``head`` closes the pipe after ten lines.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(run_in_pipe())
