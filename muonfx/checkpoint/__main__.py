"""Inspect checkpoints from the command line: ``python -m muonfx.checkpoint`` inspect, verify, clean.

The exit code is 0 on success, 1 if a checkpoint is damaged, and 2 if there is no checkpoint to read.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from muonfx.checkpoint.errors import CheckpointError, CorruptError
from muonfx.checkpoint.folder import checkpoints, clean, inspect, with_reader
from muonfx.checkpoint.load import verify
from muonfx.tree.display import Table, format_bytes, printable


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Arguments that cannot be parsed end the process with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m muonfx.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")
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
    if not (found := checkpoints(path)):
        print(inspect(path))
        return 0
    rows: list[tuple[str, ...]] = []
    for inner in found:
        try:
            index = with_reader(inner, lambda reader: reader.index)
            cells = str(index.step), str(len(index.leaves)), format_bytes(index.nbytes), "looks whole"
        except CheckpointError as error:
            cells = "?", "?", "?", str(error)
        rows.append((inner.name, *cells))
    print(Table(("checkpoint", "step", "leaves", "bytes", "state"), rows, right=(1, 2, 3)).to_text())
    return 0


def _verify(path: Path) -> int:
    code = 0
    for inner in checkpoints(path) or [path]:
        try:
            index = verify(inner)
        except CorruptError as error:
            print(f"{inner}: damaged: {printable(error)}")
            code = 1
        else:
            print(f"{inner}: good, {len(index.leaves)} leaves, {format_bytes(index.nbytes)}")
    return code


def _clean(path: Path) -> int:
    removed = clean(path)
    print("\n".join([*map(str, removed), f"{len(removed)} files removed"]))
    return 0


def run_in_pipe() -> int:
    """Run `main`; if the reader of standard output ends early, as ``| head`` does, end in silence."""
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
