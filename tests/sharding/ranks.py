"""What the tests of known failures, bytes and faults have ranks do."""

import os
import signal
from typing import Any

import torch

import muonfx as mfx
from muonfx import polar, sharding
from tests.processes import Here
from tests.sharding.cases import LayoutCase, Model, bits, laid_out
from tests.sharding.law import plain


def from_own_gradients(
    here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, op: str = "mean"
) -> dict[str, Any]:
    """Steps in which every rank has gradients of its own, which are reduced to pieces; the last whole update."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    local = layout.shard(params)
    sharded = sharding.sharded(tx, layout)
    state = sharded.init(local)
    updates: Any = None
    for step in range(model.steps):
        pieces = layout.reduce_scatter(model.grads(step, here.rank), op)
        updates, state = sharded.update(pieces, state, local)
    return layout.gather(updates)


def reduced_by_own(here: Here, model: Model, case: LayoutCase, op: str) -> dict[str, Any]:
    """Gradients of its own on each rank, reduced and put together again."""
    layout = laid_out(case, model.params(), here)
    return layout.gather(layout.reduce_scatter(model.grads(0, here.rank), op))


def killed_in_mid_step(here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, on: int) -> None:
    """A step in which one rank ends while matrices are computed."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    sharded = sharding.sharded(tx, layout)
    state = sharded.init(layout.shard(params))
    if here.rank == on:
        polar.orthogonalize_many = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    for step in range(model.steps):
        _, state = sharded.update(layout.shard(model.grads(step)), state, layout.shard(params))


def different(here: Here, what: str, on: int) -> None:
    """Make a transform on each rank, another one on one of them."""
    leaves = {"a": torch.zeros(4, 5), "b": torch.zeros(3), "c": torch.zeros(6, 2)}
    tx = mfx.chain(mfx.momentum(0.9), mfx.masked(mfx.orthogonalize(), mfx.select.ndim(min=2)))
    size = here.size
    odd = here.rank == on
    if odd and what == "a name":
        leaves["d"] = leaves.pop("b")
    if odd and what == "a parameter more":
        leaves["d"] = torch.zeros(2)
    if odd and what == "a shape":
        leaves["a"] = torch.zeros(5, 4)
    if odd and what == "a dtype":
        leaves["a"] = leaves["a"].double()
    if odd and what == "a number in the chain":
        tx = mfx.chain(mfx.momentum(0.8), mfx.masked(mfx.orthogonalize(), mfx.select.ndim(min=2)))
    if odd and what == "the chain":
        tx = mfx.scale(0.1)
    kind = "flat" if odd and what == "the layout" else "whole"
    layout = sharding.zero(leaves, here.group, partition=kind)
    assert layout.size == size
    sharding.sharded(tx, layout).init(layout.shard(leaves))


def bad_gradients_on_one_rank(here: Here, trouble: str, on: int) -> dict[str, Any]:
    """A good step, then one with trouble on one rank, then a good one."""
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 5), "b": torch.randn(3), "c": torch.randn(6, 2)}
    layout = sharding.zero(params, here.group, partition="whole")
    tx = sharding.sharded(mfx.chain(mfx.momentum(), mfx.masked(mfx.orthogonalize(), mfx.select.ndim(min=2))), layout)
    local = layout.shard(params)
    state = tx.init(local)
    _, state = tx.update(local, state, local)
    before = [bits(leaf) for leaf in mfx.tree.tensors(state)]
    bad = dict(local)
    if here.rank == on:
        bad |= {"a": torch.zeros(7, 7)} if trouble == "shape" else {"a": None} if trouble == "none" else {}
        bad = {"x": torch.zeros(1)} if trouble == "structure" else bad
    said = ""
    try:
        tx.update(bad, state, local, **({"boundry": True} if trouble == "extra" and here.rank == on else {}))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert [bits(leaf) for leaf in mfx.tree.tensors(state)] == before
    updates, _ = tx.update(local, state, local)
    return {"said": said, "after": [bits(leaf) for leaf in layout.gather(updates).values()]}


def skipped(here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, on: int, step_of_nan: int) -> Any:
    """Steps, one of which has a NaN in the gradient of one rank; whether that one left all as it was."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    local, sharded = layout.shard(params), sharding.sharded(mfx.skip_nonfinite(tx), layout)
    state = sharded.init(local)
    quiet = True
    for step in range(model.steps):
        grads = model.grads(step, here.rank)
        if step == step_of_nan and here.rank == on:
            first = next(name for name, leaf in model.leaves.items() if leaf.numel)
            grads[first] = grads[first].clone().fill_(float("nan"))
        before = [bits(leaf) for leaf in mfx.tree.tensors(state.inner)]
        updates, state = sharded.update(layout.reduce_scatter(grads), state, local)
        if step == step_of_nan:
            quiet = before == [bits(leaf) for leaf in mfx.tree.tensors(state.inner)]
            quiet = quiet and all(bool((leaf == 0).all()) for leaf in mfx.tree.tensors(updates))
    finite = all(bool(leaf.isfinite().all()) for leaf in mfx.tree.tensors((updates, state)))
    return quiet, finite, int(state.skipped)


def soak(here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, steps: int) -> Any:
    """Many steps with None and NaN here and there; the parameters in the end, and how many steps were skipped."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    local, sharded = layout.shard(params), sharding.sharded(mfx.skip_nonfinite(tx), layout)
    state = sharded.init(local)
    for step in range(steps):
        reduced = layout.reduce_scatter(troubled(model, step, here.rank))
        grads = {name: None if leaf is None else plain(leaf) for name, leaf in reduced.items()}
        updates, state = sharded.update(grads, state, local)
        local = mfx.apply_updates(local, updates)
    whole = layout.gather(local)
    return {name: bits(leaf) for name, leaf in whole.items()}, int(state.skipped)


def troubled(model: Model, step: int, rank: int) -> dict[str, Any]:
    """Gradients of one rank, of which some are None and, seldom, one has a NaN."""
    draw = torch.Generator().manual_seed(step * 101 + rank)
    grads: dict[str, Any] = {
        name: torch.randn(leaf.shape, generator=draw).to(leaf.dtype) for name, leaf in model.leaves.items()
    }
    chance = torch.rand(2 * len(grads), generator=draw).tolist()
    for place, (name, leaf) in enumerate(model.leaves.items()):
        if chance[2 * place] < 0.2:
            grads[name] = None
        elif chance[2 * place + 1] < 0.02 and leaf.numel:
            grads[name].view(-1)[step % leaf.numel] = float("nan")
    return grads


def none_on_some(here: Here, model: Model, case: LayoutCase) -> dict[str, Any]:
    """The first parameter without gradient on rank 0, the second on all ranks."""
    layout = laid_out(case, model.params(), here)
    grads = model.grads(0, here.rank)
    first, second, *_ = grads
    grads |= {second: None} | ({first: None} if here.rank == 0 else {})
    return layout.gather(layout.reduce_scatter(grads, "mean"))


def kinds_of_pieces(here: Here, model: Model, case: LayoutCase) -> tuple[list[str], list[str]]:
    """What `shard` and `reduce_scatter` give: the types of their leaves."""
    layout = laid_out(case, model.params(), here)
    trees = layout.shard(model.params()), layout.reduce_scatter(model.grads(0))
    shard, reduced = ([type(leaf).__name__ for leaf in mfx.tree.leaves(tree)] for tree in trees)
    return shard, reduced
