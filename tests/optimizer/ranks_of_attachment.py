"""The functions that ranks run in the tests of models that change parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import muonfx as mfx
from muonfx import sharding
from tests.optimizer.ranks import EXACT, FULL, quiet, whole
from tests.processes import Here


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def wrapped(model: nn.Module, how: str, here: Here) -> nn.Module:
    if how == "fully_shard":
        return fully_shard(model, mesh=here.mesh)
    more: dict[str, Any] = {"process_group": here.group, "device_id": torch.device("cpu")}
    if how == "no_shard":
        more["sharding_strategy"] = ShardingStrategy.NO_SHARD
    with quiet():
        return FullyShardedDataParallel(model, use_orig_params="original" in how or how == "no_shard", **more)


def one_step(model: nn.Module, optimizer: Any) -> None:
    with quiet():
        model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


def under_fsdp1(here: Here, when: str, how: str) -> None:
    model = small()
    if when == "made after":
        mfx.Muon(wrapped(model, how, here))
    optimizer = mfx.Muon(model)
    one_step(wrapped(model, how, here), optimizer)


def switched_late(here: Here, chain: str) -> None:
    """Sharded after the first step, and back again: the same values of the state, and the steps of before."""
    tx = {"muon": mfx.muon, "normuon": mfx.normuon}[chain](0.02, orthogonalize=mfx.orthogonalize(**EXACT))
    model, twin = small(), small()
    labels = mfx.default_labels(model)
    optimizer, other = (
        mfx.TransformOptimizer(m, mfx.partition({"muon": tx, "adamw": mfx.adamw(0.01)}, labels)) for m in (model, twin)
    )
    one_step(model, optimizer)
    one_step(twin, other)
    layouts: list[Any] = []
    for how in ("plain", "fully_shard", "plain again"):
        if how == "fully_shard":
            fully_shard(model, mesh=here.mesh)
        elif how == "plain again":
            wholes = {name: whole(param).clone() for name, param in model.named_parameters()}
            model = small()
            model.load_state_dict(wholes)
            for group in optimizer.param_groups:  # as engines do
                group["params"] = [model.get_parameter(name) for name in group["param_names"]]
        saved = get_optimizer_state_dict(model, optimizer, options=FULL)
        layouts.append(type(next(model.parameters())))
        wanted = get_optimizer_state_dict(twin, other, options=FULL)
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == saved["state"][name].keys()
            assert all(torch.allclose(leaf, saved["state"][name][key], atol=1e-6) for key, leaf in leaves.items())
            if how == "fully_shard":  # nothing has been computed in another order yet
                assert all(torch.equal(leaf, saved["state"][name][key]) for key, leaf in leaves.items())
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            one_step(m, o)
        for param, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(whole(param), right, atol=1e-5)
    assert len({*layouts}) == 2


def saved_after_evaluation(here: Here, stepped: bool) -> None:
    """A pass without gradients leaves a root of FSDP2 gathered: plain tensors stand in the model for a while."""
    model, twin = (fully_shard(small(), mesh=here.mesh) for _ in range(2))
    optimizer, other = (mfx.Muon(m, orthogonalize=mfx.orthogonalize(**EXACT)) for m in (model, twin))
    if stepped:
        one_step(model, optimizer)
        one_step(twin, other)
    with torch.no_grad(), quiet():
        model(torch.ones(3, 4))
    assert not isinstance(next(model.parameters()), DTensor)
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
    other.zero_grad()
    other.load_state_dict(saved)
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


def assert_same_bits(model: nn.Module, twin: nn.Module) -> None:
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(param), whole(wanted))


def cleared_alone(here: Here) -> None:
    """Gradients are cleared on one rank only after the model was sharded: nothing is exchanged before the step."""
    model, twin = small(), small()
    optimizer = mfx.Muon(model, orthogonalize=mfx.orthogonalize(**EXACT))
    fully_shard(model, mesh=here.mesh)
    other = mfx.Muon(fully_shard(twin, mesh=here.mesh), orthogonalize=mfx.orthogonalize(**EXACT))
    if here.rank == 0:
        optimizer.zero_grad()
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


def cut_on_one_rank(here: Here) -> None:
    model = small()
    optimizer = mfx.Muon(model, layout=sharding.replicated(dict(model.named_parameters()), here.group))
    if here.rank == 0:
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 4))
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


def saved_alone(here: Here) -> None:
    model = small()
    optimizer = mfx.Muon(model, layout=sharding.replicated(dict(model.named_parameters()), here.group))
    one_step(model, optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    if here.rank == 0:
        optimizer.state_dict()
    optimizer.zero_grad()
    one_step(model, optimizer)
    for param in model.parameters():
        first = param.detach().clone()
        dist.broadcast(first, dist.get_global_rank(here.group, 0), group=here.group)
        assert torch.equal(first, param)


def trains(here: Here, how: str) -> None:
    """Two steps, between them a pass without gradients; all parameters have changed."""
    with torch.device("meta" if "meta" in how else "cpu"):
        model = small()
    if "first" in how:
        optimizer = mfx.Muon(model)
        fully_shard(model, mesh=here.mesh)
        if "meta" in how:
            model.to_empty(device="cpu")
            for param in model.parameters():
                nn.init.normal_(param)
    elif how == "compiled ddp":
        optimizer = mfx.Muon(model)
        model = torch.compile(DistributedDataParallel(model, process_group=here.group), backend="eager")
    elif how == "replicated, converted":
        optimizer = mfx.Muon(model, layout=sharding.replicated(dict(model.named_parameters()), here.group))
        model = DistributedDataParallel(model.bfloat16(), process_group=here.group)
    else:
        model = wrapped(model, how.removesuffix(", converted"), here)
        optimizer = mfx.Muon(model)
        if how.endswith("converted"):
            model.bfloat16()
    before = [whole(param).clone() for param in model.parameters()]
    for _ in range(2):
        one_step(model, optimizer)
        optimizer.zero_grad()
        with torch.no_grad(), quiet():
            # FSDP2 may leave parameters unsharded after this.
            model(torch.ones(3, 4, dtype=next(model.parameters()).dtype))
            optimizer.step()
    for param, was in zip(model.parameters(), before, strict=True):
        assert not torch.equal(whole(param), was)
