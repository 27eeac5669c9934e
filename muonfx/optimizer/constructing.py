"""Construct an optimizer on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Decorate the constructor of an optimizer: an error on one rank is raised on all ranks that construct it."""

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        if args:  # the first is ``params``
            args = (_without_iterators(args[0]), *args[1:])
        elif "params" in options:
            options["params"] = _without_iterators(options["params"])
        with construction(lambda: _group_of(args, options)):
            constructor(self, *args, **options)

    return cast("Constructor", construct)


def _without_iterators(params: Any) -> Any:
    """Return parameters or groups with lists for iterators such as ``model.parameters()``.

    Both the constructor and the search for the process group read them, and an iterator can be read once.
    """
    if isinstance(params, Iterator):
        params = list(params)
    if not isinstance(params, list | tuple):
        return params
    items: list[Any] = []
    for item in params:
        if isinstance(item, dict) and isinstance(item.get("params"), Iterator):
            items.append({**item, "params": list(item["params"])})
        else:
            items.append(item)
    return items


def _group_of(args: Sequence[Any], options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that construct an optimizer with these arguments; None if it is alone.

    The layout of the parameters has it, or else the parameters themselves, if they are DTensors.
    """
    if not dist.is_initialized():
        return None
    layout = options.get("layout")  # a layout, a function that creates one, or None
    for argument in (*args, *options.values()):
        if isinstance(argument, Sharded):  # a transform with a layout, as ``sharded(tx, layout)`` returns it
            layout = argument.layout
    if isinstance(layout, Layout):
        return layout.group
    if layout is not None:
        return _group_of_function(layout)
    params = args[0] if args else options.get("params")
    return dist.group.WORLD if _are_on_all_ranks(params) else None


def _group_of_function(layout: object) -> dist.ProcessGroup | None:
    """Return the group of a function that creates a layout: the one in ``partial(zero, group=...)``, or all ranks."""
    if isinstance(layout, functools.partial):
        group = layout.keywords.get("group")
        if isinstance(group, dist.ProcessGroup):
            return group
    return dist.group.WORLD


def _are_on_all_ranks(params: Any) -> bool:
    """Return True if some parameters are DTensors, and each of their meshes has all ranks."""
    tensors = params.parameters() if isinstance(params, torch.nn.Module) else tree.leaves(params)
    mesh_sizes = {tensor.device_mesh.size() for tensor in tensors if is_dtensor(tensor)}
    return mesh_sizes == {dist.get_world_size()}
