"""Optimizers of models on the meta device: the state is created again once the parameters have values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import muonfx as mfx
from muonfx import sharding
from tests.optimizer.test_over_ranks import EXACT, whole
from tests.processes import Here, on_ranks

CHAINS: dict[str, Callable[[], mfx.Transform]] = {
    "adam": lambda: mfx.adamw(0.1, weight_decay=0.0),
    "state on owners": lambda: mfx.normuon(0.1, orthogonalize=mfx.orthogonalize(**EXACT)),
    "schedule_free": lambda: mfx.contrib.schedule_free(mfx.scale_by_learning_rate(0.1), 0.1),
    "master_params": lambda: mfx.master_params(
        mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    ),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return layers()


def sharded(model: nn.Module, kind: str, here: Here) -> None:
    if kind == "fsdp":
        fully_shard(model, mesh=here.mesh)
    elif kind == "tp":
        parallelize_module(model, here.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def optimizer_of(model: nn.Module, chain: str, kind: str, here: Here) -> mfx.TransformOptimizer:
    layout = None
    if kind == "replicated":
        layout = sharding.replicated(dict(model.named_parameters()), here.group)
    return mfx.TransformOptimizer(model, CHAINS[chain](), layout=layout)


def load_weights(model: nn.Module) -> None:
    """Write the weights of `layers` into a model, sharded or not."""
    weights = layers().state_dict()
    with torch.no_grad():
        for name, param in model.named_parameters():
            weight: Tensor = weights[name]
            if isinstance(param, DTensor):
                weight = distribute_tensor(
                    weight, param.device_mesh, param.placements, src_data_rank=None
                )
            param.copy_(weight)


def assign(model: nn.Module) -> None:
    """Replace each parameter by a tensor with the same values."""
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def step_alike(pairs: list[tuple[nn.Module, Any]]) -> None:
    """Make a step of each optimizer, and check that the parameters of all models have the same bits."""
    for model, optimizer in pairs:
        optimizer.zero_grad()
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
    for params in zip(*[model.parameters() for model, _ in pairs], strict=True):
        first, *others = [whole(param) for param in params]
        assert all(torch.equal(first, other) for other in others)


ORDERS = {
    "optimizer, shard, materialize": ["optimizer", "shard", "materialize"],
    "shard, optimizer, materialize": ["shard", "optimizer", "materialize"],
    "a state dict on meta": ["shard", "optimizer", "state_dict", "zero_grad", "materialize"],
    "materialized twice": ["shard", "optimizer", "materialize", "zero_grad", "materialize"],
    "assigned after zero_grad": [
        "optimizer",
        "shard",
        "materialize",
        "zero_grad",
        "assign",
        "zero_grad",
        "assign",
    ],
}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["fsdp", "tp", "replicated"])
@pytest.mark.parametrize("order", ORDERS)
@on_ranks(2)
def test_an_optimizer_on_meta_steps_as_any_other(here: Here, order: str, kind: str):
    for chain in CHAINS:
        model, twin = on_meta(), layers()
        optimizer: Any = None
        for action in ORDERS[order]:
            match action:
                case "optimizer":
                    optimizer = optimizer_of(model, chain, kind, here)
                case "shard":
                    sharded(model, kind, here)
                case "state_dict":
                    get_optimizer_state_dict(model, optimizer)
                case "zero_grad":
                    optimizer.zero_grad()
                case "assign":
                    assign(model)
                case _:
                    model.to_empty(device="cpu")
                    load_weights(model)
        sharded(twin, kind, here)
        twin_optimizer = optimizer_of(twin, chain, kind, here)
        pairs = [(model, optimizer), (twin, twin_optimizer)]
        step_alike(pairs)
        step_alike(pairs)
        optimizer.load_state_dict(twin_optimizer.state_dict())
        step_alike(pairs)


@pytest.mark.dist
@on_ranks(2)
def test_a_state_dict_is_saved_and_loaded_before_the_weights(here: Here):
    """`get_optimizer_state_dict` allocates what a checkpoint of torch is loaded into, before the weights are known."""
    model, twin = on_meta(), layers()
    for other in (model, twin):
        fully_shard(other, mesh=here.mesh)
    optimizer, twin_optimizer = mfx.Muon(model), mfx.Muon(twin)
    twin(torch.ones(3, 8)).square().sum().backward()
    twin_optimizer.step()
    model.to_empty(device="cpu")
    entries = get_optimizer_state_dict(model, optimizer)["state"]
    assert not any(leaf.is_meta for leaves in entries.values() for leaf in leaves.values())
    optimizer.load_state_dict(twin_optimizer.state_dict())
    model.load_state_dict(twin.state_dict())
    step_alike([(model, optimizer), (twin, twin_optimizer)])


@pytest.mark.parametrize(
    "between", ["nothing", "zero_grad", "state_dict", "param_groups", "cleared"]
)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_model_is_materialized_twice_in_one_process(chain: str, between: str):
    model, twin = on_meta(), layers()
    optimizer, twin_optimizer = (mfx.TransformOptimizer(m, CHAINS[chain]()) for m in (model, twin))
    for _ in range(2):
        model.to_empty(device="cpu")
        match between:
            case "zero_grad":
                optimizer.zero_grad()
            case "state_dict":
                optimizer.state_dict()
            case "param_groups":
                assert optimizer.param_groups[0]["params"][0] is model[0].weight
            case "cleared":
                optimizer.state.clear()
            case _:
                pass
        model.load_state_dict(layers().state_dict())
    for _ in range(2):
        step_alike([(model, optimizer), (twin, twin_optimizer)])


def test_a_group_is_added_to_an_optimizer_on_meta():
    model, twin = on_meta(), layers()
    optimizers: list[mfx.TransformOptimizer] = []
    for other in (model, twin):
        tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
        optimizer = mfx.TransformOptimizer(other[:2].parameters(), tx, model=other)
        optimizer.add_param_group({"params": other[2].parameters()})
        optimizers.append(optimizer)
    model.to_empty(device="cpu")
    model.load_state_dict(layers().state_dict())
    for _ in range(2):
        step_alike([(model, optimizers[0]), (twin, optimizers[1])])


@pytest.mark.parametrize("is_on_meta", [False, True])
def test_a_parameter_is_replaced_twice_and_the_groups_are_read_between(is_on_meta: bool):
    model, twin = on_meta() if is_on_meta else layers(), layers()
    optimizer, twin_optimizer = mfx.Muon(model), mfx.Muon(twin)
    for _ in range(3):
        model.to_empty(device="cpu")
        model.load_state_dict(layers().state_dict(), assign=True)
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
    step_alike([(model, optimizer), (twin, twin_optimizer)])
    for _ in range(3):
        assign(model)
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
    step_alike([(model, optimizer), (twin, twin_optimizer)])


def test_tensors_that_an_engine_puts_into_the_groups_take_precedence():
    model, twin = layers(), layers()
    optimizer, twin_optimizer = mfx.Muon(model), mfx.Muon(twin)
    assign(model)
    copies = [nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["params"] = copies
    assign(model)
    twin_params = twin_optimizer.param_groups[0]["params"]
    for param in (*copies, *twin_params):
        param.grad = param.detach().square()
    optimizer.step()
    twin_optimizer.step()
    assert all(map(torch.equal, copies, twin_params))


@pytest.mark.parametrize("between", ["zero_grad", "state_dict", "param_groups", "step"])
def test_a_model_that_moves_to_meta_and_back_keeps_the_state_of_its_optimizer(between: str):
    """No method of the optimizer replaces state with values by a state on the meta device."""
    model, twin = layers(), layers()
    optimizer, twin_optimizer = mfx.Muon(model), mfx.Muon(twin)
    pairs: list[tuple[nn.Module, Any]] = [(model, optimizer), (twin, twin_optimizer)]
    step_alike(pairs)
    model.to("meta")
    if between == "param_groups":
        assert optimizer.param_groups[0]["params"][0].is_meta
    else:
        with pytest.raises(ValueError, match="is on the meta device, as are 3 of 3 parameters"):
            getattr(optimizer, between)()
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    step_alike(pairs)
