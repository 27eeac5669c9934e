"""Match the leaves of an optimizer state, such as momenta, to their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from muonfx.tree.structure import PyTree, flatten, leaves, names, paths, unflatten

Path = tuple[Any, ...]


def map_params(function: Callable[[Any, Any], Any], state: PyTree, params: PyTree) -> PyTree:
    """Apply a function to each leaf of a state that belongs to a parameter and has its shape, such as a momentum.

    All other leaves, such as step counts and quantized codes, are unchanged.

    Args:
        function: called with the leaf of the state and its parameter; returns the new leaf.
        state: the state of a transform for these parameters.
        params: the tree of parameters.

    Returns:
        A copy of the state with the new leaves.

    Follows Optax's ``tree_map_params``, which calls its function with the leaf only.

    >>> import muonfx as mfx
    >>> params = {"w": torch.zeros(2), "b": torch.zeros(1)}
    >>> state = mfx.scale_by_adam().init(params)
    >>> map_params(lambda leaf, param: leaf + 1, state, params)
    AdamState(count=tensor(0), mu={'w': tensor([1., 1.]), 'b': tensor([1.])}, nu={'w': tensor([1., 1.]), ...})
    """
    like = dict(zip(names(params), leaves(params), strict=True))

    def mapped(leaf: Any, name: str | None) -> Any:
        param = None if name is None else like[name]
        fits = isinstance(param, Tensor) and isinstance(leaf, Tensor) and leaf.shape == param.shape
        return function(leaf, param) if fits else leaf

    found, treedef = flatten(state)
    owners = parameters_of(state, params) if like else [None] * len(found)
    return unflatten(treedef, [mapped(leaf, name) for leaf, name in zip(found, owners, strict=True)])


def parameters_of(state: PyTree, params: PyTree) -> list[str | None]:
    """Return a list with the name of the parameter of each leaf of a state; None for leaves such as step counts."""
    # A state has nodes whose children are some or all parameters and nothing else. All leaves below such a child belong
    # to its parameter, whether one tensor or a whole record.
    known = names(params)
    ends: dict[Path, str] = {(name,): name for name in known}  # the flat dicts of `partition` have dotted names as keys
    ends |= dict(zip(paths(params), known, strict=True))
    found = paths(state)
    if () in ends:
        shape = leaves(params)[0].shape
        return [ends[()] if isinstance(x, Tensor) and x.shape == shape else None for x in leaves(state)]
    depths = sorted({len(end) for end in ends}, reverse=True)

    def below(path: Path, k: int) -> tuple[int, str] | None:
        return next(
            ((n, ends[path[k : k + n]]) for n in depths if k + n <= len(path) and path[k : k + n] in ends), None
        )

    others = {path[:k] for path in found for k in range(len(path) + 1) if below(path, k) is None}

    def parameter_of(path: Path) -> str | None:
        # Several nodes may match. Longer parameter paths and deeper nodes are less likely to match by coincidence.
        hits = [(*hit, k) for k in range(len(path)) if path[:k] not in others and (hit := below(path, k)) is not None]
        return max(hits, key=lambda hit: (hit[0], hit[2]))[1] if hits else None

    return [parameter_of(path) for path in found]
