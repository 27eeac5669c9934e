"""The report of a routing: a table of parameter, shape, label and the rule that decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO, TypeAlias

from muonfx.select.params import ParamInfo, Params, read_names
from muonfx.select.rules import Label, Labels, listing
from muonfx.select.views import View

__all__ = ["describe", "format_labels"]

Labelling: TypeAlias = Labels | Mapping[str, Label] | Callable[[Params], Mapping[str, Label]]
"""Labels, a plain mapping of name to label, or a function of the parameters that gives one."""


def describe(labels: Labelling, params: Params, *, file: TextIO | None = None) -> None:
    """Print where every parameter goes and why, with totals for each label.

    If a parameter holds several matrices, or one stored transposed, two columns say which: their number and sides, and
    the order in which they are stored. Notes on that follow the rule.

    Args:
        labels: ``Labels``, a mapping of name to label, or a function of ``params`` such as ``default_labels``.
        params: a model, named tensors, or any pytree of tensors.
        file: where to print; standard output by default.

    Raises:
        ValueError: a parameter has no label, or a label has no parameter.

    >>> import torch
    >>> from muonfx.select import default_labels_by_name
    >>> describe(default_labels_by_name, {"wte.weight": torch.zeros(16, 8), "fc.0.weight": torch.zeros(32, 8)})
    parameter    shape   label  rule
    wte.weight   16 x 8  adamw  name component 'wte'
    fc.0.weight  32 x 8  muon   hidden matrix (2-D)
    <BLANKLINE>
    label  tensors  elements   share
    adamw        1       128   33.3%
    muon         1       256   66.7%
    total        2       384  100.0%
    """
    print(format_labels(labels, params), file=file)


def format_labels(labels: Labelling, params: Params) -> str:
    """Write the table that ``describe`` prints, as a string.

    Names are never shortened: they are what paths in rules are written from. The label None shows as ``-``.

    Args:
        labels: ``Labels``, a mapping of name to label, or a function of ``params`` such as ``default_labels``.
        params: a model, named tensors, or any pytree of tensors.

    Raises:
        ValueError: a parameter has no label, or a label has no parameter.

    >>> import torch
    >>> print(format_labels({"w": None}, {"w": torch.zeros(2, 2)}).splitlines()[1])
    w          2 x 2  -      given
    """
    params = list(params) if isinstance(params, Iterator) else params  # read twice below
    infos, absent = read_names(params)
    found = labels if isinstance(labels, Mapping) else labels(params)
    chosen = found if isinstance(found, Labels) else Labels(found)
    if missing := [info.name for info in infos if info.name not in chosen]:
        raise ValueError(f"no label for {listing(missing)}; expected one for every parameter (None leaves one out)")
    if unknown := sorted(set(chosen) - {info.name for info in infos} - set(absent)):
        raise ValueError(
            f"labels for {listing(unknown)}, which are no parameters here; make the labels from these params"
        )
    rows = [_row(info, chosen) for info in infos]
    header = ("parameter", "shape", "label", "matrices", "stored", "rule")
    # Where every parameter is what it seems, these two columns would say nothing.
    shown = range(len(header)) if chosen.views else (0, 1, 2, 5)
    table = _aligned([[row[at] for at in shown] for row in (header, *rows)], right=())
    totals = _aligned([("label", "tensors", "elements", "share"), *_totals(infos, chosen)], right=(1, 2, 3))
    return f"{table}\n\n{totals}"


def _row(info: ParamInfo, labels: Labels) -> tuple[str, ...]:
    label, reason, view = labels[info.name], labels.reason(info.name), labels.views.get(info.name)
    hidden = view is not None or (info.ndim > 1 and label in {labels[name] for name in labels.views})
    view = view or View()
    matrices = (view.matrices(info.shape), view.orientation) if hidden else ("", "")
    return info.name, _shape(info.shape), _shown(label), *matrices, "; ".join(filter(None, (reason, view.note)))


def _totals(infos: Sequence[ParamInfo], labels: Labels) -> list[tuple[str, ...]]:
    sizes: dict[Label, list[int]] = {}
    for info in infos:
        sizes.setdefault(labels[info.name], []).append(info.numel)
    everything = [info.numel for info in infos]
    ordered = sorted(sizes, key=lambda label: (label is None, label or ""))
    rows = [(_shown(label) + (" (left out)" if label is None else ""), sizes[label]) for label in ordered]
    whole = sum(everything) or 1
    return [
        (name, f"{len(group):,}", f"{sum(group):,}", f"{sum(group) / whole:.1%}")
        for name, group in [*rows, ("total", everything)]
    ]


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _shape(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides)) or "scalar"


def _shown(label: Label) -> str:
    return "-" if label is None else label
