"""Construct an optimizer on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from muonfx import tree
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.layout import Layout
from muonfx.sharding.transform import Sharded
from muonfx.sharding.waiting import construction

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def constructed_together(constructor: Constructor) -> Constructor:
    """Decorate the constructor of an optimizer: an error on one rank is raised on all ranks that construct it."""

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        if args and isinstance(args[0], Iterator):
            args = [*args[0]], *args[1:]  # an iterator can be read only once
        with construction(lambda: _group_of(args, options)):
            constructor(self, *args, **options)

    return cast("Constructor", construct)


def _group_of(args: Sequence[Any], options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that construct an optimizer with these arguments; None if it is alone."""
    if not dist.is_initialized():
        return None
    layout = options.get("layout")
    for argument in (*args, *options.values()):
        if isinstance(argument, Sharded):
            layout = argument.layout
    if isinstance(layout, Layout):
        return layout.group
    if layout is not None:
        group = getattr(layout, "keywords", {}).get("group")  # of a functools.partial
        return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    params = args[0] if args else options.get("params")
    leaves = params.parameters() if isinstance(params, torch.nn.Module) else tree.leaves(params)
    meshes = [leaf.device_mesh for leaf in leaves if is_dtensor(leaf)]
    is_of_all = bool(meshes) and all(mesh.size() == dist.get_world_size() for mesh in meshes)
    return dist.group.WORLD if is_of_all else None
