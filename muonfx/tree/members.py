"""Match the leaves of an optimizer state, such as momenta, to their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.tree.structure import (
    Key,
    PyTree,
    TypedPath,
    entries_of_path,
    flatten,
    leaves,
    named_leaves,
    names,
    paths,
    typed_paths,
    unflatten,
)

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
    param_of = dict(named_leaves(params))
    state_leaves, treedef = flatten(state)
    for index, name in enumerate(parameters_of(state, params)):
        if name is not None and _have_one_shape(state_leaves[index], param_of[name]):
            state_leaves[index] = function(state_leaves[index], param_of[name])
    return unflatten(treedef, state_leaves)


def _have_one_shape(leaf: object, param: object) -> bool:
    """Return True if both are tensors of the same shape."""
    return isinstance(leaf, Tensor) and isinstance(param, Tensor) and leaf.shape == param.shape


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
    param_paths = typed_paths(params)
    if param_paths == [()]:  # the parameters are one tensor
        return _ownership_of_one_tensor(state, leaves(params)[0])
    name_of = dict(zip(param_paths, names(params), strict=True))
    for name in names(params):
        name_of[(Key(name),)] = name  # the flat dicts of `partition` have dotted names as keys
    state_paths = typed_paths(state)
    sections_of_paths = [_sections(path, name_of) for path in state_paths]
    mixed_nodes = _mixed_nodes(state_paths, sections_of_paths)
    ownerships: list[Ownership] = []
    for path, sections in zip(state_paths, sections_of_paths, strict=True):
        ownerships.append(_ownership_of_path(path, sections, name_of, mixed_nodes))
    return ownerships


def _ownership_of_path(
    path: TypedPath, sections: Sequence[_Section], name_of: Mapping[TypedPath, str], mixed_nodes: Set[TypedPath]
) -> Ownership:
    """Return the ownership of the leaf of a state at a path. ``name_of`` has the parameters by their paths.

    If ("mlp", "weight") is a parameter, ("trace", "mlp", "weight") belongs to it, and the rest of the path is
    ("trace",). ``sections`` are the sections of the path that are parameters.
    """
    # A section below a node that has other children, too, is a parameter by coincidence only.
    candidates = [section for section in sections if path[: section.start] not in mixed_nodes]
    # Longer paths and deeper nodes are less likely to match by coincidence.
    section = max(candidates, key=_length_and_depth, default=None)
    if section is None:
        return Ownership(None, entries_of_path(path))
    name = name_of[path[section.start : section.stop]]
    path_without_name = path[: section.start] + path[section.stop :]
    return Ownership(name, entries_of_path(path_without_name))


class _Section(NamedTuple):
    """The indices in a path between which it is the path of a parameter.

    In ("trace", "mlp", "weight"), the parameter ("mlp", "weight") is from 1 to 3.
    """

    start: int
    stop: int


def _sections(path: TypedPath, name_of: Mapping[TypedPath, str]) -> list[_Section]:
    """Return, for each index in a path, the longest section from there on that is a parameter, if there is one."""
    sections: list[_Section] = []
    for start in range(len(path)):
        for stop in range(len(path), start, -1):
            if path[start:stop] in name_of:
                sections.append(_Section(start, stop))
                break
    return sections


def _mixed_nodes(state_paths: Sequence[TypedPath], sections_of_paths: Sequence[Sequence[_Section]]) -> set[TypedPath]:
    """Return the paths of the nodes of a state that have a child that is no parameter."""
    mixed: set[TypedPath] = set()
    for path, sections in zip(state_paths, sections_of_paths, strict=True):
        starts = {section.start for section in sections}
        for start in range(len(path)):
            if start not in starts:
                mixed.add(path[:start])
    return mixed


def _length_and_depth(section: _Section) -> tuple[int, int]:
    return section.stop - section.start, section.start


def _ownership_of_one_tensor(state: PyTree, param: object) -> list[Ownership]:
    """Return the ownership if the parameters are one tensor, with the name "": leaves of its shape belong to it."""
    owners: list[Ownership] = []
    for path, leaf in zip(paths(state), leaves(state), strict=True):
        name = "" if _have_one_shape(leaf, param) else None
        owners.append(Ownership(name, path))
    return owners
