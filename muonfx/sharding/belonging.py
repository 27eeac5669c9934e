"""Which parameter a leaf of a state belongs to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.tree import PyTree

__all__ = ["owners_of"]

Path = tuple[Any, ...]


def owners_of(state: PyTree, params: PyTree) -> list[str | None]:
    """For each leaf of a state, the name of the parameter that it belongs to; None for a counter, say.

    Somewhere in the state is a node with the parameters below it, or with some of them, and with nothing else: what
    lies below one of them there, be it a tensor or a whole record of them, belongs to it.

    >>> import muonfx as mfx
    >>> import torch
    >>> params = {"w": torch.zeros(2), "count": torch.zeros(3)}
    >>> owners_of(mfx.scale_by_adam().init(params), params)
    [None, 'count', 'w', 'count', 'w']
    >>> params = [torch.zeros(2), [torch.zeros(3)]]
    >>> owners_of({"trace": params}, params)
    ['0', '1.0']
    """
    names = tree.names(params)
    ends: dict[Path, str] = {(name,): name for name in names}  # as a partition hands them on
    ends |= dict(zip(tree.paths(params), names, strict=True))
    paths = tree.paths(state)
    if () in ends:
        shape = tree.leaves(params)[0].shape
        return [ends[()] if isinstance(x, Tensor) and x.shape == shape else None for x in tree.leaves(state)]
    depths = sorted({len(end) for end in ends}, reverse=True)

    def below(path: Path, k: int) -> tuple[int, str] | None:
        return next(((n, ends[path[k : k + n]]) for n in depths if path[k : k + n] in ends), None)

    others = {path[:k] for path in paths for k in range(len(path) + 1) if below(path, k) is None}

    def owner_of(path: Path) -> str | None:
        # Several nodes may look so: a longer path to a parameter is less of a coincidence, and so is a deeper node.
        found = [(*hit, k) for k in range(len(path)) if path[:k] not in others and (hit := below(path, k)) is not None]
        return max(found, key=lambda hit: (hit[0], hit[2]))[1] if found else None

    return [owner_of(path) for path in paths]
