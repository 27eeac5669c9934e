"""Match the leaves of an optimizer state, such as momenta, to their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.tree.structure import Key, PyTree, TypedPath, flatten, leaves, names, paths, typed_paths, unflatten

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

    state_leaves, treedef = flatten(state)
    owners: list[str | None] = [None] * len(state_leaves)
    if like:
        owners = parameters_of(state, params)
    return unflatten(treedef, [mapped(leaf, name) for leaf, name in zip(state_leaves, owners, strict=True)])


class Ownership(NamedTuple):
    """To which parameter a leaf of a state belongs, and the path of the part of the state that it is in."""

    parameter: str | None
    """The dotted name of the parameter; None for a leaf of no single parameter, such as a step count."""
    path: Path
    """The path of the leaf without the parameter: ("momentum", "trace") for ("momentum", "trace", "mlp.weight")."""


def parameters_of(state: PyTree, params: PyTree) -> list[str | None]:
    """Return a list with the name of the parameter of each leaf of a state; None for leaves such as step counts."""
    return [ownership.parameter for ownership in ownership_of(state, params)]


def ownership_of(state: PyTree, params: PyTree) -> list[Ownership]:
    """Return for each leaf of a state the parameter to which it belongs.

    A state has nodes whose children are some or all parameters and nothing else, such as the dict of all momenta. All
    leaves below such a child belong to its parameter, whether one tensor or a whole record. The field of a NamedTuple
    is never a parameter, even if a parameter has its name, unless the parameters are in a NamedTuple themselves.
    """
    state_paths = typed_paths(state)
    name_of = dict(zip(typed_paths(params), names(params), strict=True))
    if () in name_of:
        return _of_one_tensor(state, name_of[()], leaves(params)[0])
    for name in list(name_of.values()):
        name_of[(Key(name),)] = name  # the flat dicts of `partition` have dotted names as keys
    find_part = functools.partial(_part_of_parameter, name_of, sorted({len(path) for path in name_of}, reverse=True))
    mixed_nodes = _mixed_nodes(state_paths, find_part)

    owners: list[Ownership] = []
    for path in state_paths:
        part, start = _best_part(path, find_part, mixed_nodes)
        entries = tuple([key.entry for key in path])
        if part is None:
            owners.append(Ownership(None, entries))
        else:
            owners.append(Ownership(name_of[part], entries[:start] + entries[start + len(part) :]))
    return owners


FindPart = Callable[[TypedPath, int], TypedPath | None]


def _part_of_parameter(
    name_of: Mapping[TypedPath, str], lengths: Sequence[int], path: TypedPath, start: int
) -> TypedPath | None:
    """Return the longest part of a path, from an index on, that is the path of a parameter; None if there is none."""
    for length in lengths:
        part = path[start : start + length]
        if len(part) == length and part in name_of:
            return part
    return None


def _mixed_nodes(state_paths: Sequence[TypedPath], find_part: FindPart) -> set[TypedPath]:
    """Return the paths of the nodes of a state that have a child that is no parameter."""
    mixed: set[TypedPath] = set()
    for path in state_paths:
        for start in range(len(path) + 1):
            if find_part(path, start) is None:
                mixed.add(path[:start])
    return mixed


def _best_part(path: TypedPath, find_part: FindPart, mixed_nodes: Set[TypedPath]) -> tuple[TypedPath | None, int]:
    """Return the part of a path that is a parameter, and its index; (None, 0) if the leaf belongs to no parameter."""
    best_part: TypedPath | None = None
    best_start = 0
    for start in range(len(path)):
        part = find_part(path, start)
        if part is None or path[:start] in mixed_nodes:
            continue
        # Several nodes may match. Longer paths and deeper nodes are less likely to match by coincidence.
        if best_part is None or len(part) >= len(best_part):
            best_part = part
            best_start = start
    return best_part, best_start


def _of_one_tensor(state: PyTree, name: str, param: Any) -> list[Ownership]:
    """Return the ownership for parameters that are a single tensor: leaves of its shape belong to it."""
    owners: list[Ownership] = []
    for path, leaf in zip(paths(state), leaves(state), strict=True):
        is_like_param = isinstance(leaf, Tensor) and isinstance(param, Tensor) and leaf.shape == param.shape
        owners.append(Ownership(name if is_like_param else None, path))
    return owners
