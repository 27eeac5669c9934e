"""Weights that are loaded between the construction of an optimizer and its first step: as if loaded before."""

import copy
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import muonfx as mfx
from muonfx.optimizer.stepping import Stepping
from tests.processes import Here, World, errors_of, on_ranks

RATE = 1e-3
CHAINS: dict[str, Callable[[], mfx.Transform]] = {
    "schedule_free": lambda: mfx.contrib.schedule_free(
        mfx.chain(mfx.scale_by_adam(b1=0.0), mfx.scale_by_learning_rate(RATE)), RATE
    ),
    "prodigy": lambda: mfx.chain(mfx.contrib.scale_by_prodigy(), mfx.scale(-1.0)),
    "keep_weight_norms": lambda: mfx.chain(
        mfx.scale_by_learning_rate(RATE), mfx.contrib.keep_weight_norms()
    ),
    "ema_params": lambda: mfx.chain(mfx.scale_by_learning_rate(RATE), mfx.ema_params(0.9)),
    "master_params": lambda: mfx.master_params(mfx.scale_by_learning_rate(RATE)),
    "muon": lambda: mfx.muon(RATE),
}


def weights(seed: int) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))


def optimizer_of(name: str) -> tuple[nn.Linear, mfx.TransformOptimizer]:
    model = nn.Linear(6, 6, bias=False)
    nn.init.zeros_(model.weight)
    return model, mfx.TransformOptimizer(model, CHAINS[name]())


def trained(model: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the weights after three steps, and the sums of the tensors in the state."""
    for _ in range(3):
        optimizer.zero_grad()
        (model.weight - 3.0).square().sum().backward()
        optimizer.step()
    sums = [value.double().sum() for _, value in sorted(optimizer.state[model.weight].items())]
    return torch.stack([*model.weight.detach().flatten().double(), *sums])


def expected(name: str) -> torch.Tensor:
    model = nn.Linear(6, 6, bias=False)
    model.load_state_dict({"weight": weights(1)})
    return trained(model, mfx.TransformOptimizer(model, CHAINS[name]()))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_loaded_weights_are_those_that_the_state_is_made_from(name: str, assign: bool):
    model, optimizer = optimizer_of(name)
    model.load_state_dict({"weight": weights(1)}, assign=assign)
    assert torch.equal(trained(model, optimizer), expected(name))


@pytest.mark.parametrize("name", CHAINS)
def test_weights_written_in_a_moved_model_are_followed(name: str):
    model, optimizer = optimizer_of(name)
    model.double().float()
    with torch.no_grad():
        model.weight.copy_(weights(1))
    assert torch.equal(trained(model, optimizer), expected(name))


@pytest.mark.parametrize("name", CHAINS)
def test_a_copied_optimizer_follows_the_weights_of_the_copied_model(name: str):
    model, optimizer = copy.deepcopy(optimizer_of(name))
    model.load_state_dict({"weight": weights(1)})
    assert torch.equal(trained(model, optimizer), expected(name))


@pytest.mark.parametrize("name", CHAINS)
def test_a_loaded_state_is_kept(name: str):
    """A run is resumed: the optimizer's state is loaded first, and the weights after it."""
    source, source_optimizer = optimizer_of(name)
    source.load_state_dict({"weight": weights(1)})
    trained(source, source_optimizer)
    model, optimizer = optimizer_of(name)
    optimizer.load_state_dict(source_optimizer.state_dict())
    model.load_state_dict(source.state_dict())
    assert torch.equal(trained(model, optimizer), trained(source, source_optimizer))


@pytest.mark.parametrize("through_data", [False, True])
def test_a_state_that_the_caller_has_written_is_kept(through_data: bool):
    model, optimizer = optimizer_of("muon")
    trace = optimizer.state[model.weight]["momentum.trace"]
    (trace.data if through_data else trace).fill_(2.0)
    model.load_state_dict({"weight": weights(1)})
    optimizer.state_dict()
    assert torch.equal(optimizer.state[model.weight]["momentum.trace"], torch.full((6, 6), 2.0))


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_loaded_tensor_that_equals_the_initial_one_is_kept(is_copied: bool):
    """A LoRA matrix starts at zero, where the distance of Prodigy starts also in the resumed run."""
    source, source_optimizer = optimizer_of("prodigy")
    trained(source, source_optimizer)
    model, optimizer = optimizer_of("prodigy")
    optimizer.load_state_dict(source_optimizer.state_dict())
    if is_copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    model.load_state_dict(source.state_dict())
    trained(model, optimizer)
    assert torch.equal(optimizer.state[model.weight]["scale_by_prodigy.start"], torch.zeros(6, 6))


@pytest.mark.parametrize("name", CHAINS)
def test_weights_written_through_data_are_followed(name: str):
    model, optimizer = optimizer_of(name)
    model.weight.data.copy_(weights(1))
    assert torch.equal(trained(model, optimizer), expected(name))


@pytest.mark.parametrize("name", CHAINS)
def test_weights_loaded_before_a_move_are_followed(name: str):
    model, optimizer = optimizer_of(name)
    model.load_state_dict({"weight": weights(1)})
    model.weight = nn.Parameter(model.weight.detach().double())
    optimizer.zero_grad()
    model.weight = nn.Parameter(model.weight.detach().float())
    assert torch.equal(trained(model, optimizer), expected(name))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_that_is_started_again_is_of_the_weights_that_are_loaded(
    steps: int, is_shown: bool, assign: bool
):
    model, optimizer = optimizer_of("schedule_free")
    if steps:
        trained(model, optimizer)
    optimizer.state.clear()
    if is_shown:
        optimizer.state_dict()
    model.load_state_dict({"weight": weights(1)}, assign=assign)
    assert torch.equal(trained(model, optimizer), expected("schedule_free"))


def test_weights_of_an_added_group_are_followed_until_its_first_step():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].requires_grad_(False)
    optimizer = mfx.TransformOptimizer(model, CHAINS["prodigy"]())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    starts = [
        optimizer.state[model[0].weight]["scale_by_prodigy.start"].clone(),
        weights(1)[:4, :4],
    ]
    model[1].requires_grad_()
    optimizer.add_param_group({"params": [("1.weight", model[1].weight)]})
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[1].weight.copy_(starts[1])
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert all(
        torch.equal(optimizer.state[layer.weight]["scale_by_prodigy.start"], start)
        for layer, start in zip(model, starts, strict=True)
    )


def test_an_added_group_is_initialized_once_if_no_weight_changes(monkeypatch: pytest.MonkeyPatch):
    """The initial state of all parameters takes as much memory as the state, when gradients are there, too."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].requires_grad_(False)
    optimizer = mfx.TransformOptimizer(model, CHAINS["prodigy"]())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    model[1].requires_grad_()
    optimizer.add_param_group({"params": [("1.weight", model[1].weight)]})
    monkeypatch.setattr(
        Stepping, "initial_state", lambda *_: pytest.fail("the state was initialized again")
    )
    model(torch.ones(4)).sum().backward()
    optimizer.step()


def test_state_that_is_saved_before_the_first_step_is_of_the_loaded_weights():
    model, optimizer = optimizer_of("schedule_free")
    model.load_state_dict({"weight": weights(1)})
    assert torch.equal(optimizer.state_dict()["state"][0]["z"], weights(1))


def test_weights_changed_after_the_first_step_do_not_start_the_state_again():
    model, optimizer = optimizer_of("prodigy")
    trained(model, optimizer)
    optimizer.zero_grad()
    start = optimizer.state[model.weight]["scale_by_prodigy.start"].clone()
    model.load_state_dict({"weight": weights(1)})
    trained(model, optimizer)
    assert torch.equal(optimizer.state[model.weight]["scale_by_prodigy.start"], start)


def test_a_parameter_replaced_after_backward_is_warned_of_beside_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    model(torch.ones(4)).sum().backward()
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.warns(
        UserWarning, match=r"'1\.weight' has no gradient and is not updated.*before backward"
    ):
        optimizer.step()


def test_a_parameter_replaced_after_a_step_may_be_unused():
    """The former tensor still has the gradient of the last step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    model[0](torch.ones(4)).sum().backward()
    with pytest.warns(UserWarning, match="is not updated"):
        optimizer.step()


def test_the_warnings_of_init_are_given_once_if_weights_are_loaded():
    model, tx = nn.Linear(6, 6, bias=False), CHAINS["muon"]()
    with pytest.warns(UserWarning, match="no parameter has the label 'b'"):
        optimizer = mfx.TransformOptimizer(
            model, mfx.partition({"a": tx, "b": tx}, {"weight": "a"})
        )
    model.load_state_dict({"weight": weights(1)})
    model(torch.ones(6)).sum().backward()
    optimizer.step()  # initializes the state again


def test_a_list_of_betas_is_read_after_a_change_in_place():
    model = nn.Linear(3, 3)
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    group = optimizer.param_groups[0]
    group["betas"] = [0.9, 0.999]
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    group["betas"][0] = 0.5
    optimizer.step()
    assert group["momentum"] == 0.5
    assert optimizer.snapshot()[0] != mfx.adamw(0.1)


def test_added_bf16_parameters_warn_of_lost_decay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = mfx.TransformOptimizer(
            [{"params": model, "weight_decay": 0.0}], mfx.adamw(1e-3, weight_decay=0.1)
        )
    model[0].requires_grad_()
    with pytest.warns(UserWarning, match=r"weight decay has no effect on 1 of .* '0\.weight'"):
        optimizer.add_param_group({"params": [("0.weight", model[0].weight)], "weight_decay": 0.1})


@pytest.mark.parametrize(
    ("argument", "value", "name"),
    [
        ("lr", -1.0, "lr"),
        ("weight_decay", -0.1, "weight_decay"),
        ("momentum", 1.5, "momentum"),
        ("adamw_lr", -1.0, "adamw_lr"),
        ("adamw_weight_decay", float("nan"), "adamw_weight_decay"),
        ("betas", (1.0, 0.9), "betas[0]"),
        ("betas", (0.9, 1.0), "betas[1]"),
    ],
)
def test_an_error_of_the_constructor_names_the_argument(argument: str, value: object, name: str):
    with pytest.raises(ValueError, match=f"^{re.escape(name)} must be "):
        mfx.Muon(nn.Linear(4, 4), **{argument: value})  # pyright: ignore[reportArgumentType]


# -------------------------------------------------------------------------------------------------------- over ranks


def sharded_optimizer(here: Here, name: str, kind: str) -> tuple[nn.Linear, mfx.TransformOptimizer]:
    model = nn.Linear(6, 6, bias=False)
    nn.init.zeros_(model.weight)
    if kind == "fsdp":
        fully_shard(model, mesh=here.mesh)
        return model, mfx.TransformOptimizer(model, CHAINS[name]())
    layout = mfx.sharding.replicated(dict(model.named_parameters()), here.group)
    return model, mfx.TransformOptimizer(model, CHAINS[name](), layout=layout)


def load(model: nn.Linear, whole: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(model.weight, DTensor):
            whole = distribute_tensor(whole, model.weight.device_mesh, model.weight.placements)
        model.weight.copy_(whole)


def trained_over_ranks(model: nn.Linear, optimizer: mfx.TransformOptimizer) -> list[torch.Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.eye(6)).sub(3.0).square().sum().backward()
        optimizer.step()
    # Also has the tensors that another rank has computed.
    state = optimizer.state_dict()["state"][0]
    tensors = [model.weight.detach(), *[value for _, value in sorted(state.items())]]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@pytest.mark.parametrize("kind", ["fsdp", "replicated"])
@pytest.mark.parametrize("name", CHAINS)
@on_ranks(2)
def test_loaded_weights_are_followed_over_ranks(here: Here, name: str, kind: str):
    model, optimizer = sharded_optimizer(here, name, kind)
    load(model, weights(1))
    alone = nn.Linear(6, 6, bias=False)
    load(alone, weights(1))
    optimizer_alone = mfx.TransformOptimizer(alone, CHAINS[name]())
    results = trained_over_ranks(model, optimizer)
    assert all(map(torch.equal, results, trained_over_ranks(alone, optimizer_alone)))


@on_ranks(2)
def test_weights_loaded_before_sharding_are_followed(here: Here):
    model, optimizer = optimizer_of("schedule_free")
    load(model, weights(1))
    fully_shard(model, mesh=here.mesh)
    alone = nn.Linear(6, 6, bias=False)
    load(alone, weights(1))
    optimizer_alone = mfx.TransformOptimizer(alone, CHAINS["schedule_free"]())
    results = trained_over_ranks(model, optimizer)
    assert all(map(torch.equal, results, trained_over_ranks(alone, optimizer_alone)))


@on_ranks(2)
def test_a_shard_that_changes_on_one_rank_is_followed_by_all(here: Here):
    model, optimizer = sharded_optimizer(here, "schedule_free", "fsdp")
    assert isinstance(model.weight, DTensor)
    if here.rank == 1:
        model.weight.detach().to_local().fill_(2.0)
    _, state, params, _ = optimizer.snapshot()
    assert torch.equal(params["weight"][3:], torch.full((3, 6), 2.0))
    assert torch.equal(state.z["weight"], params["weight"])


@on_ranks(2)
def test_a_loaded_state_is_kept_over_ranks(here: Here):
    source, source_optimizer = sharded_optimizer(here, "prodigy", "fsdp")
    trained_over_ranks(source, source_optimizer)
    model, optimizer = sharded_optimizer(here, "prodigy", "fsdp")
    optimizer.load_state_dict(source_optimizer.state_dict())
    model.load_state_dict(source.state_dict())
    results = trained_over_ranks(model, optimizer)
    assert all(map(torch.equal, results, trained_over_ranks(source, source_optimizer)))


@pytest.mark.parametrize("attribute", ["state", "transform_state"])
@pytest.mark.parametrize("kind", ["fsdp", "zero"])
@on_ranks(2)
def test_a_write_through_a_sharded_tensor_of_the_state_is_kept(
    here: Here, kind: str, attribute: str
):
    """Also if the values do not change: the distance of Prodigy starts at the zeros that were written."""
    model = nn.Linear(6, 6, bias=False)
    nn.init.zeros_(model.weight)
    weight: torch.Tensor = model.weight
    layout = None
    if kind == "fsdp":
        fully_shard(model, mesh=here.mesh)
        weight = model.weight
    else:
        layout = mfx.sharding.zero({"weight": weight}, here.group)
        weight = nn.Parameter(layout.shard({"weight": weight.detach()})["weight"].clone())
    optimizer = mfx.TransformOptimizer({"weight": weight}, CHAINS["prodigy"](), layout=layout)
    start = optimizer.state[weight]["scale_by_prodigy.start"]
    written = start
    if attribute == "transform_state":
        written = optimizer.transform_state["scale_by_prodigy"].start["weight"]
    written.copy_(written.clone())
    with torch.no_grad():
        weight.add_(1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    local_start = start.to_local() if isinstance(start, DTensor) else start.shard.data
    assert torch.equal(local_start, torch.zeros_like(local_start))


def failing_optimizers(here: Here, name: str) -> None:
    model, optimizer = sharded_optimizer(here, name, "fsdp")
    model(torch.eye(6)).sum().backward()
    optimizer.step(**({"unknown": 1.0} if here.rank else {}))


@pytest.mark.dist
def test_an_error_of_one_rank_at_the_first_step_is_raised_on_all(world: World):
    errors = errors_of(world.run(2, failing_optimizers, name="schedule_free"))
    assert all("unknown" in str(error) for error in errors)
