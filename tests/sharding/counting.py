"""Count what a rank sends to others, at the collectives, and how many matrices it orthogonalizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx import sharding
from muonfx.polar.many import Orthogonalizer
from tests.processes import Here
from tests.sharding.cases import LayoutCase, Model, laid_out


@dataclass
class Counted:
    """Bytes to others by collective, and Newton-Schulz iterations."""

    sent: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    matrices: int = 0

    def add(self, what: str, nbytes: int) -> None:
        self.sent[what] = self.sent.get(what, 0) + nbytes
        self.calls[what] = self.calls.get(what, 0) + 1

    @property
    def exchanged(self) -> int:
        return self.sent.get("all_to_all_single", 0)

    @property
    def else_sent(self) -> int:
        return sum(self.sent.values()) - self.exchanged


def _to_others(name: str, args: tuple[Any, ...], rank: int, size: int) -> int:
    """The bytes that a rank sends in one call of a collective, by the best known algorithm."""
    if name == "all_to_all_single":
        _, given, _, splits = (*args, None, None)[:4]
        rows = splits or [given.shape[0] // size] * size
        row = prod(given.shape[1:]) * given.element_size()
        return row * (sum(rows) - rows[rank])
    nbytes = args[0].numel() * args[0].element_size()
    return 2 * nbytes * (size - 1) // size if name == "all_reduce" else nbytes * (size - 1)


def count_calls(found: dict[str, int], what: str, function: Any) -> Any:
    """Return the function, made to count its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found[what] = found.get(what, 0) + 1
        return function(*args, **kwargs)

    return call


_COLLECTIVES = ("all_to_all_single", "all_reduce", "broadcast")
_OTHERS = (
    "all_to_all",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
)
_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


@contextmanager
def counting(here: Here) -> Iterator[Counted]:
    """Count in this context; objects may not be sent at all, as they have no place in a step."""
    counted = Counted()

    def watched(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order = {
                "all_to_all_single": ("output", "input", "output_split_sizes", "input_split_sizes")
            }.get(name, ())
            given = (*args, *[kwargs[key] for key in order[len(args) :] if key in kwargs])
            counted.add(name, _to_others(name, given, here.rank, here.size))
            return real(*args, **kwargs)

        return call

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError(
            "an object was sent in a step, or a collective was called that is not counted"
        )

    orthogonalize = Orthogonalizer.__call__

    def counted_call(self: Orthogonalizer, xs: Any, **settings: Any) -> Any:
        counted.matrices += sum(prod(x.shape[:-2]) for x in xs if x.numel())
        return orthogonalize(self, xs, **settings)

    calls = {name: watched(name) for name in _COLLECTIVES} | dict.fromkeys(
        _OTHERS + _OBJECTS, refused
    )
    with (
        mock.patch.multiple(dist, **calls),
        mock.patch.object(Orthogonalizer, "__call__", counted_call),
    ):
        yield counted


def count_steps(
    here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, how: str = "functional"
) -> list[Counted]:
    """The bytes and calls of each step, as a function or as an optimizer."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    local, sharded = layout.shard(params), sharding.sharded(tx, layout)
    held = {name: torch.nn.Parameter(leaf) for name, leaf in local.items()}
    optimizer = mfx.TransformOptimizer(held, sharded) if how == "optimizer" else None
    state = sharded.init(local) if optimizer is None else None
    found: list[Counted] = []
    for step in range(model.steps):
        grads = layout.shard(model.grads(step))
        for name, param in held.items():
            param.grad = grads[name]
        with counting(here) as counted:
            if optimizer is None:
                _, state = sharded.update(grads, state, local)
            else:
                optimizer.step()
        found.append(counted)
    return found


def count_reductions(here: Here, model: Model, case: LayoutCase) -> tuple[Counted, Counted]:
    """The bytes that a ZeRO loop itself sends, to reduce gradients and to gather parameters."""
    params = model.params()
    layout = laid_out(case, params, here)
    local = layout.shard(params)
    grads = {name: torch.ones_like(leaf) for name, leaf in params.items()}
    with counting(here) as reducing:
        layout.reduce_scatter(grads)
    with counting(here) as gathering:
        layout.gather(local)
    return reducing, gathering
