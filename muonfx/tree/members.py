"""Match the leaves of an optimizer state, such as momenta, to their parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
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

    Raises:
        TypeError: ``function`` cannot be called, for example because a transform was given first, as in Optax.

    Follows Optax's ``tree_map_params``, which calls its function with the leaf only.

    >>> import muonfx as mfx
    >>> params = {"w": torch.zeros(2), "b": torch.zeros(1)}
    >>> state = mfx.scale_by_adam().init(params)
    >>> map_params(lambda leaf, param: leaf + 1, state, params)
    AdamState(count=tensor(0), mu={'w': tensor([1., 1.]), 'b': tensor([1.])}, nu={'w': tensor([1., 1.]), ...})
    """
    if not callable(function):
        raise TypeError(
            f"map_params: found {type(function).__name__} as the first argument, expected a function of a leaf and its "
            "parameter: write map_params(function, state, params), without the transform that Optax takes first"
        )
    param_of = dict(named_leaves(params))
    # The names of the parameters are in the order of the leaves of the state, with None for a step count.
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
    """Return for each leaf of a state the parameter to which it belongs: ``momenta["w"]`` to the parameter "w".

    A state has nodes whose children are some or all parameters and nothing else, such as the dict of all momenta. All
    leaves below such a child belong to its parameter, whether one tensor or a whole record. The field of a NamedTuple
    is never a parameter, even if a parameter has its name, unless the parameters are in a NamedTuple themselves.

    >>> state = {"momenta": {"b": 0.0, "w": 0.0}, "options": {"b": 0.9, "eps": 1e-8}}
    >>> [ownership.parameter for ownership in ownership_of(state, params={"b": 1.0, "w": 2.0})]
    ['b', 'w', None, None]

    The node "options" is *mixed*: it has "eps", which is no parameter, so its "b" is not the parameter "b".
    """
    param_paths = typed_paths(params)
    param_names = names(params)
    if param_paths == [()]:  # the parameters are one tensor
        return _ownership_of_one_tensor(state, leaves(params)[0])
    # `name_of` leads from the path of a parameter to its name: {("w",): "w"}. `partition` has flat dicts with dotted
    # names,
    # so a name alone is a path too.
    name_of = dict(zip(param_paths, param_names, strict=True))
    name_of |= {(Key(name),): name for name in param_names}
    state_paths = typed_paths(state)
    mixed_nodes: set[TypedPath] = set()  # such as ("options",)
    for path in state_paths:
        for depth in range(len(path)):
            if not _begins_with_parameter(path[depth:], name_of):
                mixed_nodes.add(path[:depth])
    return [_ownership_of_path(path, name_of, mixed_nodes) for path in state_paths]


def _begins_with_parameter(path: TypedPath, name_of: Mapping[TypedPath, str]) -> bool:
    """Return True if a path begins with the path of a parameter, as ("mlp", "weight", "trace") with ("mlp", "weight").

    ``name_of`` has the paths of all parameters as keys.
    """
    for stop in range(1, len(path) + 1):  # noqa: SIM110 - `any` would call a generator for each of them
        if path[:stop] in name_of:
            return True
    return False


def _ownership_of_path(
    path: TypedPath, name_of: Mapping[TypedPath, str], mixed_nodes: Container[TypedPath]
) -> Ownership:
    """Return the ownership of the leaf of a state at a path: which part of the path is the path of a parameter.

    If ("mlp", "weight") is a parameter, ("trace", "mlp", "weight") belongs to it, and the rest of the path is
    ("trace",). A name directly below one of the ``mixed_nodes``, which have children that are no parameters, does not
    count: it equals the name of a parameter by coincidence.
    """
    # The longest part counts, and of equally long ones the last: they are the least likely to match by coincidence.
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            before = path[:start]
            part = path[start : start + length]
            after = path[start + length :]
            if part in name_of and before not in mixed_nodes:
                return Ownership(name_of[part], entries_of_path(before + after))
    return Ownership(None, entries_of_path(path))


def _ownership_of_one_tensor(state: PyTree, param: object) -> list[Ownership]:
    """Return the ownership of each leaf of a state if the parameters are a single tensor, not a dict of tensors.

    The name of this tensor is "". A leaf of its shape, such as a momentum, belongs to it, and a step count does not.
    """
    owners: list[Ownership] = []
    for path, leaf in zip(paths(state), leaves(state), strict=True):
        name = "" if _have_one_shape(leaf, param) else None
        owners.append(Ownership(name, path))
    return owners
