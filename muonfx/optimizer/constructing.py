"""Construct an optimizer on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from muonfx import tree
from muonfx.sharding.communication.waiting import construction
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.transform import Sharded

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def constructed_together(constructor: Constructor) -> Constructor:
    """Decorate ``__init__(self, params, ...)`` of an optimizer: an error on one rank is raised on all its ranks.

    Without this, the other ranks would wait for the failed rank until a timeout.
    """

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        """Call ``constructor(self, params, ...)``; if it raises on this rank, raise on the other ranks, too."""
        # After an error, `_group_in` reads `params` again, and an iterator can be read once only.
        if args:  # the first is ``params``
            params, *others = args
            args = (_without_iterators(params), *others)
        elif "params" in options:
            options["params"] = _without_iterators(options["params"])
        # `construction` sends an error of the constructor to the ranks of this group, which it finds only then.
        with construction(lambda: _group_in(args, options)):
            constructor(self, *args, **options)

    return cast("Constructor", construct)


def _without_iterators(params: Any) -> Any:
    """Return the argument ``params`` of an optimizer with a list in place of each iterator, so that it can be reread.

    >>> _without_iterators([{"params": iter(["w", "b"]), "lr": 0.1}])
    [{'params': ['w', 'b'], 'lr': 0.1}]

    An iterator that two groups have becomes a list of both, so that its parameters are found to be given twice.
    """
    if isinstance(params, Iterator):  # such as model.parameters()
        params = list(params)
    if not isinstance(params, list | tuple):  # a model, or a dict from names to tensors
        return params
    list_of: dict[Iterator[Any], list[Any]] = {}
    items: list[Any] = []
    for item in params:
        if isinstance(item, dict) and isinstance(item.get("params"), Iterator):  # a param group
            iterator = item["params"]
            if iterator not in list_of:
                list_of[iterator] = list(iterator)
            items.append({**item, "params": list_of[iterator]})
        else:
            items.append(item)
    return items


def _group_in(args: Sequence[Any], options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that construct an optimizer together, from the arguments of the optimizer.

    For example, ``Muon(model, layout=zero(params))`` is constructed on all ranks of the layout, and ``Muon(model)`` of
    plain parameters on this rank alone, so that the result is None.
    """
    params = args[0] if args else options.get("params")
    return group_of(params, _layout_in(args, options))


def group_of(params: Any, layout: object) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that create an optimizer's state together; None if this process is alone.

    Args:
        params: the parameters: a model, or tensors in any container.
        layout: their layout, a function that creates one, or None.
    """
    if not dist.is_initialized():  # one process
        return None
    if isinstance(layout, Layout):
        return layout.group
    if layout is not None:
        return _group_of_function(layout)
    # Without a layout, only DTensors are distributed. Plain parameters belong to this process.
    return _group_of_meshes(params)


def _layout_in(args: Sequence[Any], options: Mapping[str, Any]) -> object:
    """Return the layout in the arguments of an optimizer, or the function that creates one, or None.

    It is the argument ``layout``, or in the transform, as in ``TransformOptimizer(model, sharded(tx, layout))``.
    """
    for argument in (*args, *options.values()):
        if isinstance(argument, Sharded):
            return argument.layout
    return options.get("layout")


def _group_of_function(layout: object) -> dist.ProcessGroup | None:
    """Return the group of a function that creates a layout: the one in ``partial(zero, group=...)``, or all ranks."""
    if isinstance(layout, functools.partial):
        group = layout.keywords.get("group")
        if isinstance(group, dist.ProcessGroup):
            return group
    return dist.group.WORLD


def _group_of_meshes(params: Any) -> dist.ProcessGroup | None:
    """Return the process group of the ranks over which DTensors are sharded; None without DTensors.

    In a pipeline, a stage has one mesh, of some ranks only, whose group is returned. Several meshes of some ranks have
    no common group yet, and the result is None, because this rank cannot create one alone.
    """
    tensors: Iterable[Any] = tree.leaves(params)
    if isinstance(params, torch.nn.Module):
        tensors = params.parameters()
    meshes = {tensor.device_mesh for tensor in tensors if is_dtensor(tensor)}
    mesh_sizes = {mesh.size() for mesh in meshes}
    # Other meshes, as of norms under tensor parallelism, are parts of it.
    if dist.get_world_size() in mesh_sizes:
        return dist.group.WORLD
    if len(meshes) == 1:
        mesh = meshes.pop()
        if mesh.ndim == 1:
            return mesh.get_group()
    return None
