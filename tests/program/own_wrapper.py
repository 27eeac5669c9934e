"""A wrapper of a user's own, of which nothing in muonfx knows, and what ranks do with it in tests."""

from typing import Any, NamedTuple

import torch

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here


class DampedState(NamedTuple):
    factor: torch.Tensor
    inner: Any


@mfx.transform(locality=lambda inner, decay: inner.locality, combinator=mfx.core.Combinator(mfx.Locality.ELEMENT))
def damped(inner: mfx.Transform, decay: float = 0.5):
    """Scale the inner updates by a number that is kept in the state, and falls at every step."""

    def init(params):
        return DampedState(torch.ones(()), inner.init(params))

    def update(updates, state, params=None, **extras):
        out, inner_state = inner.update(updates, state.inner, params, **extras)
        scaled = mfx.tree.map(lambda u: (u * state.factor).to(u.dtype), out)
        return scaled, DampedState(state.factor * decay, inner_state)

    return init, update


SHAPES = {"a": (6, 4), "b": (4, 10), "bias": (7,)}
LABELS = {"a": "muon", "b": "muon", "bias": "adamw"}


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def chain() -> mfx.Transform:
    inner = mfx.muon_with_adamw(0.1, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    return mfx.chain(mfx.clip_by_global_norm(1.0), damped(inner, decay=0.75))


def three_steps(tx: mfx.Transform, layout: Any = None) -> dict[str, torch.Tensor]:
    """The parameters after three steps, whole."""
    params = values(0) if layout is None else layout.shard(values(0))
    state = tx.init(params)
    for step in range(1, 4):
        grads = values(step) if layout is None else layout.shard(values(step))
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params if layout is None else layout.gather(params)


def on_ranks(here: Here, kind: str, offloaded: bool) -> dict[str, torch.Tensor]:
    params = values(0)
    layout = (
        sharding.replicated(params, here.group)
        if kind == "replicated"
        else sharding.zero(params, here.group, partition=kind)
    )
    tx = sharding.offload(chain(), bucket_bytes=64) if offloaded else chain()
    return three_steps(sharding.sharded(tx, layout), layout)
