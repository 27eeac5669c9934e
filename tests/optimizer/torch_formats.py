"""What ranks do in the tests of the optimizer's state in torch's own formats."""

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import muonfx as mfx
from muonfx import sharding
from tests.optimizer.sharded_optimizers import (
    assert_same_state,
    chains,
    close,
    groups_of,
    leaves_of,
    local,
    made,
    named,
    quiet,
    sharded,
    train,
    whole,
)
from tests.processes import Here

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def optimized(kind: str, here: Here, **more: Any) -> tuple[Any, Any]:
    net, options = sharded(kind, here)
    return net, mfx.TransformOptimizer(groups_of(named(net), "two"), chains(made())["by label"], **options, **more)


def alone(steps: int) -> tuple[Any, Any]:
    net = made()
    optimizer = mfx.TransformOptimizer(groups_of(named(net), "two"), chains(net)["by label"])
    train(net, optimizer, range(steps))
    return net, optimizer


def goes_on(net: Any, optimizer: Any) -> None:
    """Two more steps lead to where four in one process lead."""
    train(net, optimizer, range(2, 4))
    one, other = alone(4)
    for name, param in named(net).items():
        close(param, named(one)[name], name)
    assert_same_state(optimizer, other)


def with_weights_of(net: Any, steps: int) -> None:
    """Give a model the weights that one process has after some steps."""
    values = {name: param.detach() for name, param in named(alone(steps)[0]).items()}
    for name, param in named(net).items():
        like = param.detach()
        if isinstance(like, DTensor):
            from torch.distributed.tensor import distribute_tensor

            like.copy_(distribute_tensor(values[name], like.device_mesh, like.placements, src_data_rank=None))
        else:
            like.copy_(values[name])


def save_full(here: Here, kind: str, path: Path) -> None:
    """The usual line for a full state dict; rank 0 has all, as one process has it, and writes it."""
    with quiet():
        net, optimizer = optimized(kind, here)
        train(net, optimizer, range(2))
        found = get_optimizer_state_dict(net, optimizer, options=FULL)
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


def load_full(here: Here, kind: str, path: Path, broadcast: bool) -> None:
    """The usual line for loading it: rank 0 reads and sends, or every rank reads."""
    with quiet():
        net, optimizer = optimized(kind, here)
        with_weights_of(net, 2)
        saved = torch.load(path, weights_only=True) if not broadcast or dist.get_rank() == 0 else {}
        options = BROADCAST if broadcast else StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(net, optimizer, saved, options=options)
        goes_on(net, optimizer)


def rank_0_saves(here: Here, kind: str, path: Path) -> None:
    """Under data parallelism one rank alone asks for the state, and nobody waits for it."""
    with quiet():
        net, optimizer = optimized(kind, here)
        train(net, optimizer, range(2))
        if here.rank == here.size - 1:
            found = optimizer.state_dict()
            assert {type(leaf) for leaves in found["state"].values() for leaf in leaves.values()} == {torch.Tensor}
            torch.save(found, path)
        train(net, optimizer, range(2, 3))
        dist.barrier(here.group)


def all_load(here: Here, kind: str, path: Path) -> None:
    with quiet():
        net, optimizer = optimized(kind, here)
        with_weights_of(net, 2)
        optimizer.load_state_dict(torch.load(path, weights_only=True))
        goes_on(net, optimizer)


def each_saves(here: Here, kind: str, path: Path) -> None:
    """Every rank writes what it has, and loads its own into the same storage."""
    with quiet():
        net, optimizer = optimized(kind, here)
        train(net, optimizer, range(2))
        torch.save(optimizer.state_dict(), f"{path}.{here.rank}")
        leaves = [local(leaf) for leaf in leaves_of(optimizer)]
        before = [leaf.clone() for leaf in leaves]
        for leaf in leaves:
            leaf.zero_()
        optimizer.load_state_dict(torch.load(f"{path}.{here.rank}", weights_only=True))
        assert [local(leaf).data_ptr() for leaf in leaves_of(optimizer)] == [leaf.data_ptr() for leaf in leaves]
        assert all(map(torch.equal, leaves, before))
        goes_on(net, optimizer)


def load_of_rank(here: Here, kind: str, path: Path, ranks: list[int]) -> None:
    """Every rank loads what some rank has written; nothing may change where that is refused."""
    with quiet():
        _, optimizer = optimized(kind, here)
        saved = torch.load(f"{path}.{ranks[here.rank]}", weights_only=True)
        before = [local(leaf).clone() for leaf in leaves_of(optimizer)]
        try:
            optimizer.load_state_dict(saved)
        except Exception:
            for leaf, kept in zip(leaves_of(optimizer), before, strict=True):
                assert torch.equal(local(leaf), kept)
            raise


def alone_with_patience(here: Here, kind: str, what: str, seconds: float) -> list[str]:
    """One rank alone calls what all must; the others go on with collectives of their own. Afterwards all can do it."""
    from datetime import timedelta

    from muonfx.sharding import rendezvous

    with quiet():
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


def loads_of_two_moments(here: Here, kind: str) -> None:
    """One rank loads an older state than the others."""
    with quiet():
        net, optimizer = optimized(kind, here)
        found = []
        for step in range(2):
            train(net, optimizer, range(step, step + 1))
            state = optimizer.state_dict()
            held = {i: {k: v.clone() for k, v in leaves.items()} for i, leaves in state["state"].items()}
            found.append({"state": held, "param_groups": state["param_groups"]})
        optimizer.load_state_dict(found[0 if here.rank == 1 else 1])
        before = {name: whole(param).clone() for name, param in named(net).items()}
        try:
            optimizer.step()
        finally:
            for name, param in named(net).items():
                assert torch.equal(whole(param), before[name]), name


def one_rank_loads_alone(here: Here, kind: str) -> None:
    """A rank alone loads an earlier state: its state dict has that state, and the next step is an error on all."""
    with quiet():
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


def in_another_order(here: Here, groups: str) -> None:
    """One rank gives its parameters, and its groups, in another order: the same training."""
    with quiet():
        net, _ = sharded("fsdp", here)
        params = named(net)
        if here.rank == 1:
            params = dict(reversed(params.items()))
        given = groups_of(params, groups)
        if here.rank == 1 and groups == "two":
            given = given[::-1]
        optimizer = mfx.TransformOptimizer(given, chains(made())["by label"])
        one = made()
        other = mfx.TransformOptimizer(groups_of(named(one), groups), chains(one)["by label"])
        for n, o in ((net, optimizer), (one, other)):
            train(n, o, range(3))
        for name, param in named(net).items():
            close(whole(param), named(one)[name].detach(), name)
        optimizer.load_state_dict(optimizer.state_dict())
        assert_same_state(optimizer, other)
