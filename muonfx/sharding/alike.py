"""All ranks agree on the leaves of a tree: their names, which are there, and of which dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.sharding.agreement import LARGE, agree, number_of
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout, is_dtensor, local_of
from muonfx.tree import PyTree

__all__ = ["DTYPES", "UNPLACED", "Different", "agree_on_leaves"]

DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}, key=str))
UNPLACED = 64
"""Added to the code of a gradient that is not placed as its parameter is, but partial, say."""


class Different(ShardingError):
    """A fact that must be the same on all ranks is not; ``what`` says which."""

    def __init__(self, what: str) -> None:
        super().__init__(f"nothing was changed on any rank: the ranks have different {what}")
        self.what = what


def agree_on_leaves(
    values: PyTree,
    layout: Layout,
    problem: Exception | None = None,
    facts: Mapping[str, int] | None = None,
    wishes: Sequence[tuple[bool, Callable[[], None]]] = (),
) -> tuple[list[int], list[bool]]:
    """Agree on the leaves of a tree: the same names on all ranks, and a leaf's dtype the same wherever it is there.

    Args:
        values: local or whole tensors; None is absent.
        layout: whose ranks are meant, and whose parameters the leaves are.
        problem: what is wrong here, if anything.
        facts: small numbers that must be the same on all ranks, by what they are, for the error.
        wishes: what all ranks do together, once these numbers are the same, if any of them wishes it; whether this one
            does, and what to do.

    Returns:
        For each leaf a code of its dtype, 0 where it is absent on all ranks; and whether it is absent on some.

    Raises:
        Different: facts differ.
        ShardingError: leaves differ, or something is wrong on another rank.
    """
    group = layout.group
    assert group is not None
    names, leaves = tree.names(values), tree.leaves(values)
    # As many numbers on all ranks, whatever tree each of them has: one for each parameter of the layout.
    place_of = {name: place for place, name in enumerate(layout.names)}
    codes = [0] * len(place_of)
    for name, leaf in zip(names, leaves, strict=True):
        if name in place_of and isinstance(local_of(leaf), Tensor):
            codes[place_of[name]] = _code(name, leaf, layout)
    same = {"trees": number_of(names), **(facts or {})}
    twice = [number for fact in same.values() for number in (fact, LARGE - fact)]
    # The largest of a number and of its opposite tell whether all are one.
    lowest = [LARGE - code if code else 0 for code in codes]
    absent = [int(code == 0) for code in codes]
    found = agree([*(int(wish) for wish, _ in wishes), *twice, *codes, *lowest, *absent], group, problem)
    wished, found = found[: len(wishes)], found[len(wishes) :]
    for place, what in enumerate(same):
        if found[2 * place] != LARGE - found[2 * place + 1]:
            raise Different(what)
    for (_, act), by_any in zip(wishes, wished, strict=True):
        if by_any:
            act()
    found = found[len(twice) :]
    most, least, some = (found[i * len(codes) : (i + 1) * len(codes)] for i in range(3))
    for name, place in place_of.items():
        if most[place] and most[place] != LARGE - least[place]:
            raise ShardingError(
                f"nothing was changed on any rank: {name!r} has different dtypes or placements on different ranks"
            )
    at = [place_of[name] for name in names]
    return [most[place] for place in at], [bool(some[place]) for place in at]


def _code(name: str, leaf: Any, layout: Layout) -> int:
    wanted = layout.dtensors.get(name)
    placed = not is_dtensor(leaf) or wanted is None or leaf._spec.placements == wanted.placements
    return 1 + DTYPES.index(leaf.dtype) + (0 if placed else UNPLACED) if leaf.dtype in DTYPES else 0
