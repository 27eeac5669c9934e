"""A user's own wrapper runs in every place that the built-in wrappers run in, without a mention of it in muonfx."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx import sharding
from muonfx.placement.store import folder_of
from tests.processes import Here, on_ranks


class DampedState(NamedTuple):
    factor: torch.Tensor
    inner: Any


@mfx.transform(
    locality=lambda inner, decay: inner.locality,
    combinator=mfx.core.Combinator(mfx.Locality.ELEMENT),
)
def damped(inner: mfx.Transform, decay: float = 0.5):
    """Scale the inner updates by a number that is kept in the state, and falls at every step."""

    def init(params):
        return DampedState(torch.ones(()), inner.init(params))

    def update(updates, state, params=None, **extras):
        out, inner_state = inner.update(updates, state.inner, params, **extras)
        scaled = mfx.tree.map(lambda u: (u * state.factor).to(u.dtype), out)
        return scaled, DampedState(state.factor * decay, inner_state)

    return init, update


@mfx.transform(
    locality=lambda inner, steps: inner.locality,
    combinator=mfx.core.Combinator(mfx.Locality.ELEMENT),
)
def first_steps(inner: mfx.Transform, steps: int):
    """Apply the inner transform in the first steps; it chooses between its old and its new state."""

    def init(params):
        return {"count": torch.zeros((), dtype=torch.int64), "inner": inner.init(params)}

    def update(updates, state, params=None, **extras):
        def chosen(new, old):
            return torch.where(state["count"] < steps, new, old)

        new_updates, new_inner = inner.run(updates, state["inner"], params, **extras)
        new_state = {
            "count": state["count"] + 1,
            "inner": mfx.tree.map(chosen, new_inner, state["inner"]),
        }
        return mfx.tree.map(chosen, new_updates, updates), new_state

    return init, update


SHAPES = {"a": (6, 4), "b": (4, 10), "bias": (7,)}
LABELS = {"a": "muon", "b": "muon", "bias": "adamw"}


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def chain() -> mfx.Transform:
    inner = mfx.muon_with_adamw(
        0.1, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
    )
    return mfx.chain(mfx.clip_by_global_norm(1.0), damped(inner, decay=0.75))


def three_steps(tx: mfx.Transform, layout: Any = None) -> dict[str, torch.Tensor]:
    """The parameters after three steps, whole."""
    enter, leave = (dict, dict) if layout is None else (layout.shard, layout.gather)
    params = enter(values(0))
    state = tx.init(params)
    for step in range(1, 4):
        updates, state = tx.update(enter(values(step)), state, params)
        params = mfx.apply_updates(params, updates)
    return leave(params)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", ["replicated", "whole", "flat"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_sharded_and_offloaded_it_is_what_it_is_in_one_process(
    here: Here, kind: str, offloaded: bool
):
    make = (
        sharding.replicated
        if kind == "replicated"
        else functools.partial(sharding.zero, partition=kind)
    )
    layout = make(values(0), here.group)
    tx = sharding.offload(chain(), bucket_bytes=64) if offloaded else chain()
    found = three_steps(sharding.sharded(tx, layout), layout)
    torch.testing.assert_close(found, three_steps(chain()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_a_sharded_member_of_a_chain_does_not_apply_its_updates(here: Here, wrapped: bool):
    layout = sharding.replicated(values(0), here.group)

    def trained(member: mfx.Transform) -> dict[str, torch.Tensor]:
        model = nn.ParameterDict({name: nn.Parameter(value) for name, value in values(0).items()})
        optimizer = mfx.TransformOptimizer(model, mfx.chain(member, mfx.scale(-0.1)))
        for step in range(1, 4):
            for name, grad in values(step).items():
                model[name].grad = grad
            optimizer.step()
        return {name: param.detach() for name, param in model.items()}

    member = sharding.sharded(mfx.momentum(), layout)
    expected = trained(mfx.momentum())
    if wrapped:
        member = first_steps(member, steps=9)
    torch.testing.assert_close(trained(member), expected, rtol=0, atol=0)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_offloaded_in_one_process_it_is_the_same_bit_by_bit(to: str, tmp_path):
    tx = sharding.offload(chain(), "cpu" if to == "cpu" else tmp_path, bucket_bytes=1 << 20)
    torch.testing.assert_close(three_steps(tx), three_steps(chain()), rtol=0, atol=0)


def test_a_state_that_a_wrapper_chooses_is_stored_again(tmp_path):
    # Of the locality TREE, so that the inner transforms store their states themselves.
    tx = first_steps(mfx.chain(mfx.clip_by_global_norm(1.0), mfx.momentum()), steps=2)
    offloaded = sharding.offload(tx, str(tmp_path))
    params = {"w": torch.zeros(64, 64)}
    state, expected = offloaded.init(params), tx.init(params)
    for step in range(4):
        grads = {"w": torch.full((64, 64), step + 1.0)}
        updates, state = offloaded.update(grads, state, params, donate=step % 2 == 1)
        expected_updates, expected = tx.update(grads, expected, params)
        torch.testing.assert_close(updates, expected_updates, rtol=0, atol=0)
        (trace,) = [leaf for leaf in mfx.tree.tensors(state) if leaf.ndim]
        assert folder_of(trace) == str(tmp_path)


def test_under_the_torch_optimizer_it_is_the_same_and_its_numbers_are_in_the_groups():
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in values(0).items()})
    optimizer = mfx.TransformOptimizer(model, chain())
    for step in range(1, 4):
        for name, grad in values(step).items():
            model[name].grad = grad
        optimizer.step()
    expected = three_steps(chain())
    torch.testing.assert_close(
        {name: p.detach() for name, p in model.items()}, expected, rtol=1e-6, atol=1e-6
    )
    assert {group["damped.decay"] for group in optimizer.param_groups} == {0.75}
