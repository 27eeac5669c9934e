"""Text tables for the terminal: one checkpoint, a folder of checkpoints, and a comparison of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from muonfx.checkpoint.catalog import checkpoints, with_reader
from muonfx.checkpoint.data import Reader, bytes_of
from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.index import Index, as_text, shortened
from muonfx.checkpoint.spec import described
from muonfx.checkpoint.target import matches
from muonfx.tree.display import Table, format_bytes, printable

__all__ = ["differences", "of_checkpoint", "of_folder"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format rows as a text table; the columns in ``right`` are right-aligned."""
    return Table.of(head, list(rows), right).to_text()


def of_checkpoint(path: Path, index: Index, pattern: str = "*") -> str:
    """Return the report of a checkpoint, with the leaves that match a pattern."""
    chosen = {name: leaf for name, leaf in index.leaves.items() if pattern == "*" or matches(pattern, name)}
    return str(index.report(path, chosen))


def of_folder(folder: Path) -> str:
    """Return a table with one line for each checkpoint in a folder."""
    rows: list[tuple[str, ...]] = []
    for path in checkpoints(folder):
        try:
            index = with_reader(path, lambda index, reader: index)
            rows.append((path.name, str(index.step), str(len(index.leaves)), format_bytes(index.nbytes), "looks whole"))
        except CheckpointError as error:
            rows.append((path.name, "?", "?", "?", str(error)))
    return table(("checkpoint", "step", "leaves", "bytes", "state"), rows, right=(1, 2, 3))


def differences(one: Path, other: Path, most: int | None = 10) -> list[str]:
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
        *(table(("leaf", "difference"), shown).splitlines() if shown else []),
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
