"""Inspect checkpoints from the command line: ``python -m muonfx.checkpoint`` inspect, diff, verify, clean, convert.

The exit code is 0 on success, 1 if checkpoints differ or are damaged, and 2 if there is no checkpoint to read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from muonfx.checkpoint.catalog import checkpoints, clean, inspect, with_reader
from muonfx.checkpoint.convert import cli
from muonfx.checkpoint.data import Reader, bytes_of
from muonfx.checkpoint.errors import CheckpointError, CorruptError
from muonfx.checkpoint.index import Index, as_text, shortened
from muonfx.checkpoint.loading import verify
from muonfx.checkpoint.spec import described
from muonfx.checkpoint.target import matches
from muonfx.tree.display import Table, format_bytes, printable

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; invalid arguments end the process with exit code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["convert"]:
        return cli.main(arguments[1:])
    options = _parser().parse_args(arguments)
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

    command = commands.add_parser("diff", help="what differs between two, down to the bits")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    command.add_argument("--all", action="store_true", help="every leaf, instead of the first ten of each kind")
    command.set_defaults(run=_diff)

    command = commands.add_parser("verify", help="read every byte and compare the checksums")
    command.add_argument("paths", type=Path, nargs="+", metavar="path", help="a checkpoint, or a folder of them")
    command.set_defaults(run=_verify)

    command = commands.add_parser("clean", help="remove the files of saves that were stopped; none may be in progress")
    command.add_argument("path", type=Path, help="a checkpoint, or a folder of them")
    command.set_defaults(run=_clean)

    commands.add_parser("convert", help="make one of another optimizer's checkpoint", add_help=False)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    path: Path = options.path
    if checkpoints(path):
        print(_folder_table(path))
    else:
        index = inspect(path)
        print(index.report(path, {name: leaf for name, leaf in index.leaves.items() if matches(options.match, name)}))
    return 0


def _diff(options: argparse.Namespace) -> int:
    found = _differences_of(options.first, options.second, None if options.all else 10)
    print("\n".join(found) if found else "no difference")
    return 1 if found else 0


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


def _differences_of(one: Path, other: Path, most: int | None = 10) -> list[str]:
    """List the differences of two checkpoints, at most ``most`` lines of each kind; leaves are compared bitwise."""
    return with_reader(
        one, lambda a, first: with_reader(other, lambda b, second: _differences(a, first, b, second, most))
    )


def _differences(a: Index, first: Reader, b: Index, second: Reader, most: int | None) -> list[str]:
    found = [
        f"{what}: {shortened(printable(before))} -> {shortened(printable(after))}"
        for what, before, after in (
            ("step", a.step, b.step),
            ("chain", f"{a.chain} ({a.fingerprint})", f"{b.chain} ({b.fingerprint})"),
            ("extra", as_text(a.extra), as_text(b.extra)),
            ("versions", a.versions, b.versions),
        )
        if before != after
    ]
    rows: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(a.leaves.keys() | b.leaves.keys()):
        if name not in b.leaves:
            kind, how = "only in the first", f"only in the first: {described(a.leaves[name].spec)}"
        elif name not in a.leaves:
            kind, how = "only in the second", f"only in the second: {described(b.leaves[name].spec)}"
        elif a.leaves[name].spec != b.leaves[name].spec:
            kind, how = "of another kind", f"{described(a.leaves[name].spec)} -> {described(b.leaves[name].spec)}"
        else:
            kind, how = "with other values", _values(first.read(name), second.read(name))
        if how:
            rows.setdefault(kind, []).append((name, how))
    shown = sorted(row for of_kind in rows.values() for row in of_kind[:most])
    left = {kind: len(of_kind) - most for kind, of_kind in rows.items() if most is not None and len(of_kind) > most}
    return [
        *found,
        *(Table.of(("leaf", "difference"), shown).to_text().splitlines() if shown else []),
        *(f"... and {number} more {kind}" for kind, number in left.items()),
    ]


def _values(a: Tensor, b: Tensor) -> str:
    """Describe how two tensors of equal shape and dtype differ; "" if they are equal."""
    if bytes_of(a) == bytes_of(b):
        return ""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    wide = torch.float64 if a.is_floating_point() else torch.int64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x != x) & (y != y)
    if bool(same.all()):
        return "equal numbers, other bits (the sign of a zero, or the kind of a NaN)"
    number, largest = int((~same).sum()), (x - y).abs()[~same].max().item()
    return f"{number} of {a.numel()} elements differ, by at most {largest:.3g}"


if __name__ == "__main__":
    sys.exit(main())
