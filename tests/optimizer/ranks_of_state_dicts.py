"""The functions that ranks run in the tests of state dicts over processes: torch's own formats, and who loads what."""

import copy
import gc
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import rendezvous
from muonfx.sharding.shards import IntervalTensor
from tests.optimizer.ranks import (
    FULL,
    alone,
    assert_same,
    chains,
    close,
    goes_on,
    groups_of,
    made,
    named,
    optimized,
    quiet,
    sharded,
    train,
    whole,
)
from tests.processes import Here

BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def local_leaves(optimizer: Any) -> list[Tensor]:
    leaves = [leaf for held in optimizer.state.values() for leaf in held.values()]
    return [
        leaf.piece.data if isinstance(leaf, IntervalTensor) else getattr(leaf, "_local_tensor", leaf) for leaf in leaves
    ]


def with_weights_of(net: Any, steps: int) -> None:
    """Give a model the weights that one process has after some steps."""
    values = {name: param.detach() for name, param in named(alone(steps)[0]).items()}
    for name, param in named(net).items():
        like = param.detach()
        if isinstance(like, DTensor):
            like.copy_(distribute_tensor(values[name], like.device_mesh, like.placements, src_data_rank=None))
        else:
            like.copy_(values[name])


@quiet()
def save_full(here: Here, kind: str, path: Path) -> None:
    """The usual line for a full state dict; rank 0 has all, as one process has it, and writes it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_optimizer_state_dict(net, optimizer, options=options)
    if dist.get_rank() == 0:
        one, other = alone(2)
        wanted = get_optimizer_state_dict(one, other)
        assert found["state"].keys() == wanted["state"].keys()
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == found["state"][name].keys(), name
            for key, leaf in leaves.items():
                assert type(found["state"][name][key]) is torch.Tensor
                close(found["state"][name][key], leaf, f"{name} {key}")
        torch.save(found, path)


@quiet()
def load_full(here: Here, kind: str, path: Path, broadcast: bool) -> None:
    """The usual line for loading it: rank 0 reads and sends, or every rank reads."""
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    saved = torch.load(path, weights_only=True) if not broadcast or dist.get_rank() == 0 else {}
    set_optimizer_state_dict(net, optimizer, saved, options=BROADCAST if broadcast else FULL)
    goes_on(net, optimizer)


@quiet()
def rank_0_saves(here: Here, kind: str, path: Path) -> None:
    """Under data parallelism one rank alone asks for the state, and no other rank waits for it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    if here.rank == here.size - 1:
        found = optimizer.state_dict()
        assert {type(leaf) for leaves in found["state"].values() for leaf in leaves.values()} == {torch.Tensor}
        torch.save(found, path)
    train(net, optimizer, range(2, 3))
    dist.barrier(here.group)


@quiet()
def all_load(here: Here, kind: str, path: Path) -> None:
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    goes_on(net, optimizer)


@quiet()
def each_saves(here: Here, kind: str, path: Path) -> None:
    """Every rank writes what it has, and loads its own into the same storage."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    torch.save(optimizer.state_dict(), f"{path}.{here.rank}")
    leaves = local_leaves(optimizer)
    before = [leaf.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.zero_()
    optimizer.load_state_dict(torch.load(f"{path}.{here.rank}", weights_only=True))
    assert [leaf.data_ptr() for leaf in local_leaves(optimizer)] == [leaf.data_ptr() for leaf in leaves]
    assert all(map(torch.equal, leaves, before))
    goes_on(net, optimizer)


@quiet()
def load_of_rank(here: Here, kind: str, path: Path, ranks: list[int]) -> None:
    """Every rank loads what some rank has written; nothing may change where that is refused."""
    _, optimizer = optimized(kind, here)
    saved = torch.load(f"{path}.{ranks[here.rank]}", weights_only=True)
    before = [leaf.clone() for leaf in local_leaves(optimizer)]
    try:
        optimizer.load_state_dict(saved)
    except Exception:
        assert all(map(torch.equal, local_leaves(optimizer), before))
        raise


@quiet()
def alone_with_patience(here: Here, kind: str, what: str, seconds: float) -> list[str]:
    """One rank alone calls what all must; the others go on with collectives of their own. Afterwards all can do it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    said: list[str] = []
    kept = rendezvous._timeout, rendezvous.PATIENCE
    rendezvous._timeout, rendezvous.PATIENCE = (lambda group: timedelta(seconds=seconds)), timedelta(seconds=0.2)
    try:
        if here.rank == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    if what == "save":
                        optimizer.state_dict()
                    else:
                        optimizer.load_state_dict(saved if what == "load" else {**saved, "state": {}})
                except sharding.ShardingError as error:
                    said = [str(error), *[str(one.message) for one in caught]]
    finally:
        rendezvous._timeout, rendezvous.PATIENCE = kept
    dist.all_reduce(torch.ones(3), group=here.group)
    train(net, optimizer, range(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    return said


@quiet()
def loads_of_two_moments(here: Here, kind: str) -> None:
    """One rank loads an older state than the others."""
    net, optimizer = optimized(kind, here)
    found = []
    for step in range(2):
        train(net, optimizer, range(step, step + 1))
        found.append(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(found[0 if here.rank == 1 else 1])
    before = {name: whole(param).clone() for name, param in named(net).items()}
    try:
        optimizer.step()
    finally:
        for name, param in named(net).items():
            assert torch.equal(whole(param), before[name]), name


@quiet()
def one_rank_loads_alone(here: Here, kind: str) -> None:
    """A rank alone loads an earlier state: its state dict has that state, and the next step is an error on all."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(1, 2))
    if here.rank == 1:
        optimizer.load_state_dict(saved)
        for index, leaves in optimizer.state_dict()["state"].items():
            for key, leaf in leaves.items():
                assert torch.equal(leaf, saved["state"][index][key]), key
    optimizer.step()


@quiet()
def in_another_order(here: Here) -> None:
    """One rank gives its parameters, and its groups, in another order: the same training."""
    net, _ = sharded("fsdp", here)
    params, order = list(named(net).items()), -1 if here.rank == 1 else 1
    optimizer = mfx.TransformOptimizer(groups_of(dict(params[::order]), "two")[::order], chains(made())["by label"])
    train(net, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same((net, optimizer), alone(3))
