"""Tables for the terminal: one checkpoint, a folder of them, and two side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from muonfx.checkpoint.catalog import checkpoints, with_reader
from muonfx.checkpoint.data import bytes_of
from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.reading import Reader
from muonfx.checkpoint.rules import matches
from muonfx.checkpoint.spec import described

__all__ = ["differences", "of_checkpoint", "of_folder", "readable"]


def readable(text: object) -> str:
    """A text from a file, made fit for a terminal: what does not print is escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Columns as wide as they must be; those that are named flush right."""
    lines = [head, *([readable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    flush = set(right)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in flush else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def size(nbytes: int) -> str:
    """Bytes in a unit that a person reads."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def of_checkpoint(path: Path, index: Index, pattern: str = "*") -> str:
    """All that a checkpoint says about itself, and its leaves."""
    said = {
        "checkpoint": path,
        "step": "-" if index.step is None else index.step,
        "chain": f"{index.chain} (fingerprint {index.fingerprint})" if index.fingerprint is not None else "-",
        "written by": ", ".join(f"{name} {version}" for name, version in index.versions.items()),
        "extra": _as_text(index.extra) if index.extra else "-",
        "files": f"{len(index.files)}, {size(sum(file.nbytes for file in index.files))}",
    }
    wide = max(map(len, said))
    lines = [f"{key:{wide}}  {_short(readable(value))}" for key, value in said.items()]
    leaves = {name: leaf for name, leaf in index.leaves.items() if pattern == "*" or matches(pattern, name)}
    rows = [
        (
            name,
            str(leaf.spec.shape),
            str(leaf.spec.dtype).removeprefix("torch."),
            size(leaf.nbytes),
            str(len(leaf.chunks)),
        )
        for name, leaf in leaves.items()
    ]
    total = size(sum(leaf.nbytes for leaf in leaves.values()))
    body = table(("leaf", "shape", "dtype", "bytes", "parts"), rows, right=(3, 4))
    return "\n".join([*lines, "", body, "", f"{len(leaves)} leaves, {total}"])


def _short(text: str, most: int = 2000) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def of_folder(folder: Path) -> str:
    """The checkpoints in a folder, one line each."""
    rows: list[tuple[str, ...]] = []
    for path in checkpoints(folder):
        try:
            index = with_reader(path, lambda index, reader: index)
            rows.append((path.name, str(index.step), str(len(index.leaves)), size(index.nbytes), "looks whole"))
        except CheckpointError as error:
            rows.append((path.name, "?", "?", "?", str(error)))
    return table(("checkpoint", "step", "leaves", "bytes", "state"), rows, right=(1, 2, 3))


def differences(one: Path, other: Path, most: int | None = 10) -> list[str]:
    """List what differs between two checkpoints, one line each; leaves are compared bit for bit.

    Args:
        one: the first.
        other: the second.
        most: lines of each kind of difference, behind which stands how many more there are; None: all.
    """
    return with_reader(
        one, lambda a, first: with_reader(other, lambda b, second: _differences(a, first, b, second, most))
    )


def _differences(a: Index, first: Reader, b: Index, second: Reader, most: int | None) -> list[str]:
    found = [
        f"{what}: {_short(readable(before))} -> {_short(readable(after))}"
        for what, before, after in (
            ("step", a.step, b.step),
            ("chain", f"{a.chain} ({a.fingerprint})", f"{b.chain} ({b.fingerprint})"),
            ("extra", _as_text(a.extra), _as_text(b.extra)),
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
        *(table(("leaf", "difference"), shown).splitlines() if shown else []),
        *(f"... and {number} more {kind}" for kind, number in left.items()),
    ]


def _as_text(extra: object) -> str:
    try:
        return json.dumps(extra, sort_keys=True)
    except RecursionError:  # read with the stack nearly empty, shown with less room
        return "(nested too deeply to be shown)"


def _values(a: Tensor, b: Tensor) -> str:
    """How two tensors of one shape and dtype differ; "" if they do not."""
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
