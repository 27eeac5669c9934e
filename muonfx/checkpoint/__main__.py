"""Inspect checkpoints from the command line: ``python -m muonfx.checkpoint`` inspect, verify, clean.

The exit code is 0 on success, 1 if a checkpoint is damaged, and 2 if there is no checkpoint to read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muonfx.checkpoint.catalog import checkpoints, clean, inspect, with_reader
from muonfx.checkpoint.errors import CheckpointError, CorruptError
from muonfx.checkpoint.loading import verify
from muonfx.checkpoint.target import matches
from muonfx.tree.display import Table, format_bytes, printable

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; invalid arguments end the process with exit code 2."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except CorruptError as error:
        print(f"damaged: {printable(error)}", file=sys.stderr)
        return 1
    except CheckpointError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muonfx.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("inspect", help="what a checkpoint says about itself, or a folder of them")
    command.add_argument("path", type=Path)
    command.add_argument(
        "--match", default="*", metavar="PATTERN", help="leaves: a name, levels it begins with, a glob"
    )
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="read every byte and compare the checksums")
    command.add_argument("paths", type=Path, nargs="+", metavar="path", help="a checkpoint, or a folder of them")
    command.set_defaults(run=_verify)

    command = commands.add_parser("clean", help="remove the files of saves that were stopped; none may be in progress")
    command.add_argument("path", type=Path, help="a checkpoint, or a folder of them")
    command.set_defaults(run=_clean)

    return parser


def _inspect(options: argparse.Namespace) -> int:
    path: Path = options.path
    if checkpoints(path):
        print(_folder_table(path))
    else:
        index = inspect(path)
        print(index.report(path, {name: leaf for name, leaf in index.leaves.items() if matches(options.match, name)}))
    return 0


def _verify(options: argparse.Namespace) -> int:
    code = 0
    given: list[Path] = options.paths
    for path in [inner for outer in given for inner in checkpoints(outer) or [outer]]:
        try:
            index = verify(path)
        except CorruptError as error:
            print(f"{path}: damaged: {printable(error)}")
            code = 1
        else:
            print(f"{path}: good, {len(index.leaves)} leaves, {format_bytes(index.nbytes)}")
    return code


def _clean(options: argparse.Namespace) -> int:
    removed = clean(options.path)
    print("\n".join([*map(str, removed), f"{len(removed)} files removed"]))
    return 0


def _folder_table(folder: Path) -> str:
    """Return a table with one line for each checkpoint in a folder."""
    rows: list[tuple[str, ...]] = []
    for path in checkpoints(folder):
        try:
            index = with_reader(path, lambda index, reader: index)
            rows.append((path.name, str(index.step), str(len(index.leaves)), format_bytes(index.nbytes), "looks whole"))
        except CheckpointError as error:
            rows.append((path.name, "?", "?", "?", str(error)))
    return Table.of(("checkpoint", "step", "leaves", "bytes", "state"), rows, right=(1, 2, 3)).to_text()


if __name__ == "__main__":
    sys.exit(main())
