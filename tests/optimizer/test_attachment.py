"""An optimizer that would train nothing, or not what it seems to train, raises or warns."""

import copy
import gc
import pickle
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import muonfx as mfx
from muonfx import sharding
from muonfx.engines import deepspeed
from tests.optimizer.test_over_ranks import EXACT, FULL, quiet, whole
from tests.processes import Here, on_ranks

# These warnings are also issued if only names are known.
pytestmark = pytest.mark.filterwarnings("ignore:default_labels saw names")


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 4, dtype=next(model.parameters()).dtype)).square().sum().backward()


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )
    return model


class LoRA(nn.Module):
    """A frozen layer with two factors."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _given(model: nn.Module, how: str):
    """An optimizer that has its model, by one of several arguments."""
    match how:
        case "model":
            return mfx.Muon(model)
        case "groups":
            return mfx.Muon([{"params": model}])
        case "tensors":
            return mfx.Muon(model.parameters(), model=model)
        case _:
            return mfx.Muon(model.named_parameters(), model=model)


def one_replaced(model: nn.Module) -> nn.Module:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return model


def exchanged(model: nn.Module) -> nn.Module:
    """The biases' tensors stand in one another's places, each with the values of its place."""
    first, last = model[0].bias, model[4].bias
    values = [first.detach().clone(), last.detach().clone()]
    model[0].bias, model[4].bias = last, first
    with torch.no_grad():
        model[0].bias.copy_(values[0])
        model[4].bias.copy_(values[1])
    return model


CHANGES = {
    "assigned": assigned,
    "one replaced": one_replaced,
    "exchanged": exchanged,
    "none": lambda model: model,
}
PUT = {"by the model": False, "into the groups too, as engines do": True}
CLEARED = {
    "by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "to zeros by the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
}
BETWEEN = {
    "nothing": lambda optimizer: None,
    "saved": lambda optimizer: optimizer.state_dict(),
    "loaded": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "a number": lambda optimizer: optimizer.param_groups[0].update(lr=0.01),
}


@given(
    st.sampled_from(["model", "groups", "tensors", "pairs"]),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(CHANGES)),
            st.sampled_from(sorted(PUT)),
            st.sampled_from(sorted(CLEARED)),
            st.sampled_from(sorted(BETWEEN)),
        )
    ),
)
def test_whatever_a_model_puts_in_a_parameters_place_is_trained_with_its_state(
    how: str, steps: list[tuple[str, str, str, str]]
):
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
        )

    model, twin = net(), net()
    optimizer, other = _given(model, how), mfx.Muon(twin)
    for step, (change, put, cleared, between) in enumerate(steps):
        CHANGES[change](model)
        if PUT[put]:
            for group in optimizer.param_groups:
                group["params"] = [model.get_parameter(name) for name in group["param_names"]]
        for m, o in ((model, optimizer), (twin, other)):
            BETWEEN[between](o)
            CLEARED[cleared](m, o)
            torch.manual_seed(step)
            backward(m)
            o.step()
    optimizer.zero_grad()
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, wanted)
        assert all(
            torch.equal(optimizer.state[param][key], leaf)
            for key, leaf in other.state[wanted].items()
        )


def test_a_step_on_gradients_of_tensors_that_the_model_has_no_more_is_an_error():
    model = made()
    optimizer = mfx.Muon(model)
    backward(model)
    assigned(model)
    before = optimizer.transform_state["muon"]["momentum"].trace["0.weight"].clone()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"'0\.weight' of the model was replaced between backward\(\) and step\(\)",
        ):
            optimizer.step()
    assert torch.equal(optimizer.transform_state["muon"]["momentum"].trace["0.weight"], before)


def test_an_engine_may_wrap_a_layer_and_put_its_new_parameters_into_the_groups():
    """As accelerate does under FSDP2 with activation checkpointing. The wrapper changes the names in the model."""
    model, twin = made(), made()
    optimizer, other = mfx.Muon(model), mfx.Muon(twin)
    for m, o in ((model, optimizer), (twin, other)):
        torch.manual_seed(0)
        backward(m)
        o.step()
    names = [group["param_names"] for group in optimizer.param_groups]
    former_params = list(model.parameters())
    model[0] = checkpoint_wrapper(model[0])
    assigned(model)
    new_param_of = dict(zip(former_params, model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [new_param_of.get(param, param) for param in group["params"]]
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad()
        torch.manual_seed(1)
        backward(m)
        o.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert [group["param_names"] for group in optimizer.param_groups] == names


@pytest.mark.parametrize("how", ["put into the groups", "given by the model's names"])
def test_copies_that_somebody_trains_in_the_place_of_parameters_stay(how: str):
    """As an engine does that steps on fp32 masters of a bf16 model."""
    model = made()
    copies = {
        name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()
    }
    optimizer = mfx.Muon(model) if "groups" in how else mfx.Muon(list(copies.items()), model=model)
    for group in optimizer.param_groups:
        group["params"] = [copies[name] for name in group["param_names"]]
    for skipped in (None, "0.bias"):
        for name, param in copies.items():
            param.grad = None if name == skipped else torch.ones_like(param)
        optimizer.step()
        optimizer.state_dict()
    assert all(
        one is copies[n]
        for g in optimizer.param_groups
        for n, one in zip(g["param_names"], g["params"], strict=True)
    )


@pytest.mark.parametrize("then", ["replaced", "added"])
def test_a_number_that_a_scheduler_wrote_stays_when_groups_change(then: str):
    model, late = made(), nn.Linear(4, 4)
    optimizer = mfx.Muon(model)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    momentum = [group["momentum"] for group in optimizer.param_groups]
    if then == "replaced":
        assigned(model)
    else:
        optimizer.add_param_group(
            {"params": [(f"late.{n}", p) for n, p in late.named_parameters()]}
        )
    backward(model)
    optimizer.step()
    assert [group["momentum"] for group in optimizer.param_groups][:2] == momentum
    assert optimizer.param_groups[1]["betas"][0] == momentum[1]


def test_the_models_of_groups_are_told_apart_and_one_that_only_lent_its_parameters_need_not_live():
    first, second = made(), made()
    optimizer = mfx.Muon(
        [{"params": first}, {"params": [(f"b.{n}", p) for n, p in second.named_parameters()]}]
    )
    held = mfx.Muon(nn.ModuleDict({"a": first, "b": second}))  # a container that is gone at once
    assigned(first)
    assigned(second)
    for one, trained in ((optimizer, [first]), (held, [first, second])):
        one.zero_grad()
        now = {id(param) for group in one.param_groups for param in group["params"]}
        assert all(id(param) in now for model in trained for param in model.parameters())
        assert len(now) == 8


def test_layers_are_followed_also_if_the_model_that_held_them_is_gone():
    first, last = made()[::2]
    optimizer = mfx.Muon(nn.Sequential(first, last), lr=0.1)
    gc.collect()
    for _ in range(3):
        assigned(first)
        assigned(last)
        backward(nn.Sequential(first, last))
        before = first.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(first.weight, before)


def test_a_state_that_was_written_after_parameters_were_replaced_stays():
    model = made()
    optimizer = mfx.Muon(model)
    assigned(model)
    optimizer.zero_grad()
    trace = optimizer.transform_state["muon"]["momentum"].trace["0.weight"]
    trace.fill_(7.0)  # as torch.distributed.checkpoint loads, in place
    backward(model)
    wanted = (0.95 * 7.0 + (1 - 0.95) * model[0].weight.grad).clone()
    optimizer.step()
    torch.testing.assert_close(
        optimizer.transform_state["muon"]["momentum"].trace["0.weight"], wanted
    )


def test_a_compiled_step_finds_what_was_replaced_before_gradients_were_cleared():
    model = made()
    optimizer = mfx.TransformOptimizer(
        model, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    )
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for change in (None, assigned):
        if change is not None:
            change(model)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        backward(model)
        step()
        assert all(
            not torch.equal(param, was)
            for param, was in zip(model.parameters(), before, strict=True)
        )


def cut(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data[:3]


def replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn(3, 4))


@pytest.mark.parametrize("change", [cut, replaced])
def test_a_parameter_of_another_shape_is_an_error_at_each_step_and_changes_nothing(change):
    model = made()
    optimizer = mfx.Muon(model if change is replaced else dict(model.named_parameters()))
    change(model)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"'0\.weight' has shape \(3, 4\), expected \(6, 4\), as at construction",
        ):
            optimizer.step()
        now = [group["params"] for group in optimizer.param_groups]
        assert all(
            a is b
            for old, new in zip(groups, now, strict=True)
            for a, b in zip(old, new, strict=True)
        )


@pytest.mark.parametrize(
    ("change", "stranger"),
    [
        (
            lambda model: parametrizations.weight_norm(model[0]),
            "0.parametrizations.weight.original0",
        ),
        (lambda model: model.append(nn.Linear(4, 4)), "3.weight"),
        (lambda model: model.__setitem__(0, LoRA(model[0])), "0.down"),
    ],
    ids=["weight_norm", "a new layer", "LoRA"],
)
def test_parameters_that_a_model_got_later_are_warned_of_by_name(change, stranger):
    model = made()
    optimizer = mfx.Muon(model)
    change(model)
    backward(model)
    with pytest.warns(UserWarning, match=rf"are not in the optimizer, such as '{stranger}'"):
        optimizer.step()
    optimizer.step()  # it is said once


def test_a_lora_model_of_which_nothing_of_old_is_trained_is_an_error():
    model = made()
    optimizer = mfx.Muon(model)
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    backward(model)
    with pytest.raises(
        ValueError,
        match=r"none of the 4 parameters has a gradient, but '0\.down' of the model has one",
    ):
        optimizer.step()


def converted(model: nn.Sequential, optimizer: mfx.Muon, dtype: torch.dtype, how: str) -> Any:
    if how == "load_state_dict(assign=True)":
        state = {name: value.to(dtype) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        model.to(dtype)
    if how == "to(dtype), then copied":
        return copy.deepcopy((model, optimizer))
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    "how", ["to(dtype)", "to(dtype), then copied", "load_state_dict(assign=True)"]
)
@pytest.mark.parametrize("new_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:weight decay has no effect")  # in bfloat16
def test_the_state_of_a_converted_model_gets_the_dtypes_of_a_new_optimizers_state(
    dtype: torch.dtype, new_dtype: torch.dtype, how: str, steps: int
):
    model = made().to(dtype)
    optimizer = mfx.Muon(model)
    for _ in range(steps):
        backward(model)
        optimizer.step()
    trace = optimizer.state[model[0].weight]["muon.momentum.trace"].clone()
    model, optimizer = converted(model, optimizer, new_dtype, how)
    optimizer.state_dict()
    new_state_dtype = torch.float64 if new_dtype == torch.float64 else torch.float32
    new_trace = optimizer.state[model[0].weight]["muon.momentum.trace"]
    assert new_trace.dtype == new_state_dtype
    assert torch.equal(new_trace, trace.to(new_state_dtype))
    before = [param.detach().clone() for param in model.parameters()]
    backward(model)
    optimizer.step()
    for entries in optimizer.state.values():
        assert {leaf.dtype for leaf in entries.values() if leaf.is_floating_point()} == {
            new_state_dtype
        }
    for param, former in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param, former)


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@on_ranks(2)
def test_a_model_that_is_converted_in_place_over_ranks_is_warned_of_once(here: Here, kind: str):
    model = made()
    layout = None
    if kind == "replicated":
        layout = sharding.replicated(dict(model.named_parameters()), here.group)
    else:
        fully_shard(model, mesh=here.mesh)
    with quiet():
        optimizer = mfx.Muon(model, layout=layout)
    model.double()
    for param in model.parameters():  # without forward, after which FSDP2 converts no model
        param.grad = torch.ones_like(param)
    with pytest.warns(
        UserWarning, match=r"converted from torch\.float32 to torch\.float64"
    ) as found:
        optimizer.step()
    assert len(found) == 1
    optimizer.step()
    assert optimizer.state[model[0].weight]["muon.momentum.trace"].dtype == torch.float32


@pytest.mark.parametrize("how", ["add_param_group", "written into a group"])
@on_ranks(2)
def test_the_state_of_a_converted_model_over_ranks_follows_where_a_parameter_is_added(
    here: Here, how: str
):
    model = made()
    for param in model[2].parameters():
        param.requires_grad_(False)
    with quiet():
        optimizer = mfx.Muon(fully_shard(model, mesh=here.mesh))
    model.double()
    for param in model.parameters():
        param.requires_grad_()
        param.grad = torch.ones_like(param)
    with quiet():
        if how == "add_param_group":
            optimizer.add_param_group({"params": model[2].parameters()})
        else:
            optimizer.param_groups[0]["params"] += [model[2].weight]
            model[2].bias.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*was converted")
        optimizer.step()
    assert optimizer.state[model[0].weight]["muon.momentum.trace"].dtype == torch.float64


@on_ranks(2)
def test_the_state_over_ranks_follows_parameters_of_another_dtype_that_replace_others(here: Here):
    model = made()
    layout = sharding.replicated(dict(model.named_parameters()), here.group)
    tx = mfx.chain(
        mfx.momentum(),
        mfx.orthogonalize(),
        mfx.normalize_neurons(),
        mfx.scale_by_learning_rate(0.1),
    )
    model = model[0]
    with quiet():
        optimizer = mfx.TransformOptimizer({"0.weight": model.weight}, tx, layout=layout)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict()["state"][0])
    weight = nn.Parameter(model.weight.detach().double())
    optimizer.param_groups[0]["params"] = [weight]
    followed = optimizer.state_dict()["state"][0]
    assert followed["momentum.trace"].dtype == torch.float64
    for key, leaf in saved.items():
        assert torch.equal(whole(leaf).to(followed[key].dtype), whole(followed[key]))


def test_a_state_of_the_dtype_of_its_parameters_is_not_rounded_by_a_model_that_is_converted_and_back():
    model = made()
    tx = mfx.chain(mfx.momentum(dtype=None), mfx.scale_by_learning_rate(0.1))
    optimizer = mfx.TransformOptimizer(model, tx)
    backward(model)
    optimizer.step()
    trace = optimizer.state[model[0].weight]["momentum.trace"].clone()
    model.bfloat16()
    optimizer.state_dict()
    model.float()
    optimizer.state_dict()
    assert torch.equal(optimizer.state[model[0].weight]["momentum.trace"], trace)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.filterwarnings("ignore:weight decay has no effect")  # in bfloat16
def test_a_model_may_be_converted_in_place_and_a_pinned_state_keeps_its_dtypes(dtype):
    model = made()
    tx = mfx.chain(mfx.momentum(dtype=torch.float32), mfx.scale_by_learning_rate(0.1))
    optimizer = mfx.TransformOptimizer(model, tx)
    model.to(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    kept = {key: leaf.dtype for key, leaf in optimizer.state[model[0].weight].items()}
    backward(model)
    optimizer.step()
    assert all(
        not torch.equal(param, was) for param, was in zip(model.parameters(), before, strict=True)
    )
    assert {key: leaf.dtype for key, leaf in optimizer.state[model[0].weight].items()} == kept


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[2].weight.requires_grad_(False),
        lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
        torch.compile,
        lambda model: setattr(model, "also", model[0]),
        lambda model: model[0].register_parameter("unused", nn.Parameter(torch.ones(2))),
    ],
    ids=["frozen", "pruned", "compiled", "shared", "unused"],
)
def test_what_leaves_parameters_in_place_is_no_fault(change):
    model = made()
    optimizer = mfx.Muon(model)
    change(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_model_of_torchscript_is_trained():
    model = made()
    twin = copy.deepcopy(model)
    for trained in (torch.jit.script(model), twin):  # the script has the parameters of the model
        optimizer = mfx.Muon(trained)
        torch.manual_seed(1)  # the inputs of `backward`
        for _ in range(2):
            backward(trained)
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, expected)


def test_tied_weights_are_trained_by_the_one_that_is_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(model)
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    backward(model)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_the_state_follows_a_model_that_has_moved():
    model = made()
    optimizer = mfx.Muon(dict(model.named_parameters()))
    backward(model)
    optimizer.step()
    bound, param = optimizer._parameters.tracked, model[2].weight
    trace = optimizer.state[param]["muon.momentum.trace"].clone()
    # There is one device here.
    bound["2.weight"] = bound["2.weight"]._replace(device=torch.device("cuda"))
    assert torch.equal(trace, optimizer.state_dict()["state"][1]["muon.momentum.trace"])
    assert bound["2.weight"].device == param.device
    optimizer.step()
    assert not torch.equal(trace, optimizer.state[param]["muon.momentum.trace"])


def _on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return made()


@pytest.mark.parametrize("how", ["model", "tensors"])
def test_parameters_on_the_meta_device_are_found_once_they_are_real(how):
    model, twin = _on_meta(), made()
    optimizer = _given(model, how)
    with pytest.raises(
        ValueError, match=r"'0\.weight' is on the meta device, as are 4 of 4 parameters: .*to_empty"
    ):
        optimizer.step()
    with pytest.raises(ValueError, match="on the meta device"):
        optimizer.load_state_dict(mfx.Muon(twin).state_dict())
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    other = mfx.Muon(twin)
    for m, o in ((model, optimizer), (twin, other)):
        for step in range(2):
            torch.manual_seed(step)
            o.zero_grad()
            backward(m)
            o.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    optimizer.load_state_dict(other.state_dict())


def test_some_parameters_on_the_meta_device_are_refused():
    model = _on_meta()
    with pytest.raises(
        ValueError, match=r"'meta\.weight' is on the meta device, as are 1 of 2 parameters"
    ):
        mfx.Muon({"meta.weight": model[0].weight, "real.weight": made()[0].weight})
    optimizer = mfx.Muon(made())
    with pytest.raises(ValueError, match="'late' is on the meta device"):
        optimizer.add_param_group({"params": [("late", model[0].weight)]})
    assert len(optimizer.param_groups) == 2


def test_a_model_of_which_nothing_goes_to_muon_is_warned_of():
    with pytest.warns(UserWarning, match="found no parameter with the label 'muon'"):
        mfx.Muon(nn.LayerNorm(4))
    with pytest.warns(
        UserWarning,
        match=r"AdamW trains 1 of 1 parameters.*all have fewer than two dims: .*fully_shard",
    ):
        mfx.Muon({"piece": nn.Parameter(torch.zeros(12))})
    backbone = nn.Sequential(made().requires_grad_(False), nn.Linear(4, 2))
    with pytest.warns(
        UserWarning, match=r"dims are frozen, such as '0\..*if add_param_group adds them later"
    ):
        mfx.Muon(
            backbone,
            labels=lambda model: mfx.default_labels(
                model, [(mfx.routing.path("1.weight"), "adamw")]
            ),
        )
    factors = {
        "lora_A": nn.Parameter(torch.zeros(2, 4)),
        "base": nn.Parameter(torch.zeros(4, 4), False),
    }
    # The advice first.
    with pytest.warns(UserWarning, match=r"use torch\.optim\.AdamW.*'lora_A' is 'adamw'"):
        mfx.Muon(factors, labels={"lora_A": "adamw", "base": None})
    adapted = nn.Sequential(made().requires_grad_(False), LoRA(nn.Linear(4, 4)))
    rules = [(mfx.routing.path("1.down"), "adamw"), (mfx.routing.path("1.up"), "adamw")]
    with pytest.warns(
        UserWarning, match=r"AdamW trains 2 of .*labels: '1\.down' is 'adamw'"
    ):  # not the frozen ones first
        mfx.Muon(adapted, labels=lambda model: mfx.default_labels(model, rules))
    mfx.Muon(made())


def test_an_optimizer_keeps_no_model_alive_and_knows_only_a_model_copied_before_it():
    model = made()
    optimizer = mfx.Muon(model)
    twin_model, twin = copy.deepcopy((model, optimizer))
    alone = copy.deepcopy(optimizer)
    backward(twin_model)
    twin.step()
    assert optimizer._parameters.models == [model]
    assert twin._parameters.models == [twin_model]
    assert alone._parameters.models == []
    del model, twin_model
    gc.collect()
    assert optimizer._parameters.models == []
    assert twin._parameters.models == []


class WithOptimizer(nn.Module):
    """A model that has its optimizer as an attribute, so that the optimizer is copied while the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = made()
        self.layers[0].requires_grad_(False)
        self.optimizer = mfx.Muon(self)


def _copied_pair() -> tuple[nn.Sequential, mfx.Muon]:
    model = made()
    model[0].requires_grad_(False)
    return copy.deepcopy((model, mfx.Muon(model)))


def _copied_model_with_its_optimizer() -> tuple[nn.Sequential, mfx.Muon]:
    copied = copy.deepcopy(WithOptimizer())
    return copied.layers, copied.optimizer


@pytest.mark.parametrize("copied", [_copied_pair, _copied_model_with_its_optimizer])
def test_a_copied_optimizer_follows_the_copied_model(
    copied: Callable[[], tuple[nn.Sequential, mfx.Muon]],
):
    """Weights that replace others in the copy are trained, and frozen layers that are trained later are errors."""
    model, optimizer = copied()
    model[2].weight = nn.Parameter(torch.randn(4, 6))
    before = model[2].weight.detach().clone()
    backward(model)
    optimizer.step()
    assert model[2].weight in optimizer.state
    assert not torch.equal(model[2].weight, before)
    model[0].requires_grad_(True)
    backward(model)
    with pytest.raises(ValueError, match=r"0\.weight' has a gradient, but it was frozen"):
        optimizer.step()
    before = model[0].weight.detach().clone()
    optimizer.add_param_group({"params": model[0].parameters()})
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


# ------------------------------------------------------------------------------------------------------ real processes


def wrapped(model: nn.Module, how: str, here: Here) -> nn.Module:
    if how == "fully_shard":
        return fully_shard(model, mesh=here.mesh)
    more: dict[str, Any] = {"process_group": here.group, "device_id": torch.device("cpu")}
    if how == "no_shard":
        more["sharding_strategy"] = ShardingStrategy.NO_SHARD
    with quiet():
        return FullyShardedDataParallel(
            model, use_orig_params="original" in how or how == "no_shard", **more
        )


def one_step(model: nn.Module, optimizer: Any) -> None:
    with quiet():
        model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("chain", ["muon", "normuon"])
@on_ranks(2)
def test_state_with_values_is_cut_as_its_parameters_are_cut(here: Here, chain: str):
    """Sharded after the first step, and back again: the same values of the state, and the steps of before."""
    tx = {"muon": mfx.muon, "normuon": mfx.normuon}[chain](
        0.02, orthogonalize=mfx.orthogonalize(**EXACT)
    )
    model, twin = made(), made()
    labels = mfx.default_labels(model)
    optimizer, other = (
        mfx.TransformOptimizer(m, mfx.partition({"muon": tx, "adamw": mfx.adamw(0.01)}, labels))
        for m in (model, twin)
    )
    one_step(model, optimizer)
    one_step(twin, other)
    layouts: list[Any] = []
    for how in ("plain", "fully_shard", "plain again"):
        if how == "fully_shard":
            fully_shard(model, mesh=here.mesh)
        elif how == "plain again":
            wholes = {name: whole(param).clone() for name, param in model.named_parameters()}
            model = made()
            model.load_state_dict(wholes)
            for group in optimizer.param_groups:  # as engines do
                group["params"] = [model.get_parameter(name) for name in group["param_names"]]
        saved = get_optimizer_state_dict(model, optimizer, options=FULL)
        layouts.append(type(next(model.parameters())))
        wanted = get_optimizer_state_dict(twin, other, options=FULL)
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == saved["state"][name].keys()
            assert all(
                torch.allclose(leaf, saved["state"][name][key], atol=1e-6)
                for key, leaf in leaves.items()
            )
            if how == "fully_shard":  # nothing has been computed in another order yet
                assert all(
                    torch.equal(leaf, saved["state"][name][key]) for key, leaf in leaves.items()
                )
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            one_step(m, o)
        for param, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(whole(param), right, atol=1e-5)
    assert len({*layouts}) == 2


@pytest.mark.parametrize("stepped", [False, True])
@on_ranks(2)
def test_parameters_that_fsdp2_has_gathered_for_a_while_are_not_followed(here: Here, stepped: bool):
    """A pass without gradients leaves a root of FSDP2 gathered: plain tensors stand in the model for a while."""
    model, twin = (fully_shard(made(), mesh=here.mesh) for _ in range(2))
    optimizer, other = (
        mfx.Muon(m, orthogonalize=mfx.orthogonalize(**EXACT)) for m in (model, twin)
    )
    if stepped:
        one_step(model, optimizer)
        one_step(twin, other)
    with torch.no_grad(), quiet():
        model(torch.ones(3, 4))
    assert not isinstance(next(model.parameters()), DTensor)
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert all(
        isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]
    )
    other.zero_grad()
    other.load_state_dict(saved)
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


def sharded_by(kind: str, model: nn.Sequential, here: Here) -> nn.Sequential:
    if kind == "fewer ranks after the forward":
        fully_shard(model[0], reshard_after_forward=2)
        return fully_shard(model)
    parallelize_module(model, here.grid["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=here.grid["outer"])


@pytest.mark.parametrize("kind", ["tensor parallel", "fewer ranks after the forward"])
@on_ranks(4)
def test_dtensors_that_fsdp2_has_put_into_a_model_for_a_while_are_not_followed(
    here: Here, kind: str
):
    model, twin = (sharded_by(kind, made(), here) for _ in range(2))
    optimizer, other = (
        mfx.Muon(m, orthogonalize=mfx.orthogonalize(**EXACT)) for m in (model, twin)
    )
    params = list(model.parameters())
    with torch.no_grad(), quiet():
        model(torch.ones(3, 4))
    assert any(
        current is not param for current, param in zip(model.parameters(), params, strict=True)
    )
    optimizer.zero_grad()
    assert {param for group in optimizer.param_groups for param in group["params"]} == set(params)
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


@on_ranks(2)
def test_a_parameter_that_fsdp2_ignores_is_followed(here: Here):
    """It is a plain tensor, as those that FSDP2 gathers for a while."""
    model, twin = made(), made()
    for m in (model, twin):
        fully_shard(m, mesh=here.mesh, ignored_params={m[2].weight})
    optimizer, other = (
        mfx.Muon(m, orthogonalize=mfx.orthogonalize(**EXACT)) for m in (model, twin)
    )
    one_step(model, optimizer)
    one_step(twin, other)
    one_replaced(model)
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad()
        one_step(m, o)
    assert_same_bits(model, twin)


def assert_same_bits(model: nn.Module, twin: nn.Module) -> None:
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(param), whole(wanted))


@on_ranks(2)
def test_a_rank_clears_gradients_alone(here: Here):
    """Gradients are cleared on one rank only after the model was sharded: nothing is exchanged before the step."""
    model, twin = made(), made()
    optimizer = mfx.Muon(model, orthogonalize=mfx.orthogonalize(**EXACT))
    fully_shard(model, mesh=here.mesh)
    other = mfx.Muon(fully_shard(twin, mesh=here.mesh), orthogonalize=mfx.orthogonalize(**EXACT))
    if here.rank == 0:
        optimizer.zero_grad()
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


@on_ranks(2)
def test_a_wrong_shape_on_one_rank_is_an_error_on_all(here: Here):
    model = made()
    optimizer = mfx.Muon(
        model, layout=sharding.replicated(dict(model.named_parameters()), here.group)
    )
    if here.rank == 0:
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 4))
    model(torch.ones(3, 4)).square().sum().backward()
    with pytest.raises(
        (ValueError, sharding.ShardingError),
        match=r"'0\.weight' has shape \(3, 4\), expected \(6, 4\)",
    ):
        optimizer.step()


@on_ranks(2)
def test_a_rank_saves_alone_after_parameters_were_assigned_where_each_has_all(here: Here):
    model = made()
    optimizer = mfx.Muon(
        model, layout=sharding.replicated(dict(model.named_parameters()), here.group)
    )
    one_step(model, optimizer)
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )
    if here.rank == 0:
        optimizer.state_dict()
    optimizer.zero_grad()
    one_step(model, optimizer)
    for param in model.parameters():
        first = param.detach().clone()
        dist.broadcast(first, dist.get_global_rank(here.group, 0), group=here.group)
        assert torch.equal(first, param)


FSDP1 = {
    ("made before", "fsdp1"): "'_flat_param' of the model has one and is not among them",
    ("made before", "fsdp1, original parameters"): "as at construction",
    ("made after", "fsdp1"): "FSDP1",
    ("made after", "fsdp1, original parameters"): "FSDP1",
}


@pytest.mark.parametrize(("when", "how"), FSDP1)
@on_ranks(2)
def test_what_fsdp1_leaves_of_parameters_is_refused(here: Here, when: str, how: str):
    model = made()
    optimizer = mfx.Muon(model) if when == "made before" else None
    sharded = wrapped(model, how, here)
    with pytest.raises(ValueError, match=r"fully_shard \(FSDP2") as caught:
        _ = one_step(sharded, optimizer) if optimizer else mfx.Muon(sharded)
    assert FSDP1[when, how] in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "error"), [({"lr": -1.0}, ValueError), ({"weight_dacay": 0.1}, UserWarning)]
)
@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_in_the_first_step_after_a_model_was_sharded(
    here: Here, entry: dict[str, float], error: type[Exception]
):
    """A rate out of range is found where the state moves to the shards, and the other key in the checks after that."""
    model = made()
    optimizer = mfx.Muon(model)
    group = optimizer.param_groups[0]
    fully_shard(model, mesh=here.mesh)
    if here.rank == 1:
        group.update(entry)
    model(torch.randn(3, 4)).square().sum().backward()
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(Exception, match=next(iter(entry))) as caught,
    ):
        optimizer.step()
    assert caught.type is (error if here.rank == 1 else sharding.ShardingError)
    ranks = torch.ones(())  # a message that only one rank has sent would arrive in this all-reduce
    dist.all_reduce(ranks, group=here.group)
    assert ranks.item() == 2


@on_ranks(2)
def test_a_closure_that_raises_on_one_rank_is_an_error_on_all_in_the_step_that_moves_the_state(
    here: Here,
):
    model = made()
    optimizer = mfx.Muon(model)
    fully_shard(model, mesh=here.mesh)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        if here.rank == 1:
            raise ValueError("a loss that is not finite")
        return loss

    began = time.monotonic()
    error = ValueError if here.rank == 1 else sharding.ShardingError
    with pytest.raises(error, match="a loss that is not finite"), quiet():
        optimizer.step(closure)
    assert time.monotonic() - began < 20
    ranks = torch.ones(())  # a message that only one rank has sent would arrive in this all-reduce
    dist.all_reduce(ranks, group=here.group)
    assert ranks.item() == 2


def wrong_shape(model: nn.Sequential, optimizer: mfx.TransformOptimizer) -> None:
    mesh = model[2].weight.device_mesh
    model[2].weight = nn.Parameter(distribute_tensor(torch.ones(3, 3), mesh, src_data_rank=None))


def wrong_entry(model: nn.Sequential, optimizer: mfx.TransformOptimizer) -> None:
    entries = next(iter(optimizer.state.values()))
    key = next(iter(entries))
    entries[key] = entries[key].double()


def wrong_label(model: nn.Sequential, optimizer: mfx.TransformOptimizer) -> None:
    LABEL_OF_BIASES[0] = "other"


LABEL_OF_BIASES = ["usual"]


@pytest.mark.parametrize("reads", ["step", "state_dict"])
@pytest.mark.parametrize("wrong", [wrong_shape, wrong_entry, wrong_label])
@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_where_the_state_moves_to_the_shards(
    here: Here, wrong: Callable[[nn.Sequential, mfx.TransformOptimizer], None], reads: str
):
    """The other ranks would wait for the rank that has the error, until a timeout."""

    def labels(params: dict[str, torch.Tensor]) -> dict[str, str]:
        return {
            name: LABEL_OF_BIASES[0] if param.ndim == 1 else "usual"
            for name, param in params.items()
        }

    LABEL_OF_BIASES[0] = "usual"
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    model = made()
    with quiet():
        optimizer = mfx.TransformOptimizer(model, mfx.partition({"usual": tx, "other": tx}, labels))
    one_step(model, optimizer)
    fully_shard(model, mesh=here.mesh)
    model(torch.ones(3, 4)).square().sum().backward()
    if here.rank == 1:
        wrong(model, optimizer)
    began = time.monotonic()
    with pytest.raises(ValueError if here.rank == 1 else sharding.ShardingError) as caught, quiet():
        getattr(optimizer, reads)()
    assert time.monotonic() - began < 20
    if here.rank == 0:
        assert "rank 1: ValueError" in str(caught.value)


@pytest.mark.parametrize("change", ["to_empty", "added"])
@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_where_all_create_state(here: Here, change: str):
    """The state moves from the meta device, or is created for unfrozen parameters that were put into the groups."""
    label_of_biases = "usual"

    def labels(params: dict[str, torch.Tensor]) -> dict[str, str]:
        return {
            name: label_of_biases if param.ndim == 1 else "usual" for name, param in params.items()
        }

    tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    with torch.device("meta" if change == "to_empty" else "cpu"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    if change == "added":
        model[0].requires_grad_(False)
    fully_shard(model, mesh=here.mesh)
    with quiet():
        optimizer = mfx.TransformOptimizer(model, mfx.partition({"usual": tx, "other": tx}, labels))
    group = optimizer.param_groups[0]
    if change == "to_empty":
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.ones_(param)
    else:
        model[0].requires_grad_(True)
        group["params"] = [*group["params"], *model[0].parameters()]
    model(torch.ones(3, 4)).sum().backward()
    if here.rank == 1:
        label_of_biases = "other"
        group["lr"] = -1.0
    began = time.monotonic()
    with pytest.raises(ValueError if here.rank == 1 else sharding.ShardingError) as caught, quiet():
        optimizer.step()
    assert time.monotonic() - began < 20
    if here.rank == 0:
        assert "rank 1: ValueError" in str(caught.value)


@on_ranks(2)
def test_an_error_of_one_rank_that_adds_a_group_is_raised_on_all(here: Here):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    fully_shard(model, mesh=here.mesh)
    optimizer = mfx.TransformOptimizer(model, mfx.scale_by_learning_rate(0.1))
    model[0].requires_grad_(True)
    began = time.monotonic()
    with pytest.raises(ValueError if here.rank == 1 else sharding.ShardingError):
        optimizer.add_param_group(
            {"params": list(model[0].parameters()), "lr": -1.0 if here.rank == 1 else 0.1}
        )
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "how",
    [
        "fully_shard, optimizer first",
        "compiled ddp",
        "no_shard",
        "meta, optimizer first",
        "fully_shard, converted",
        "replicated, converted",
    ],
)
@on_ranks(2)
def test_what_trains_a_model_is_let_through(here: Here, how: str):
    """Two steps, between them a pass without gradients; all parameters have changed."""
    with torch.device("meta" if "meta" in how else "cpu"):
        model = made()
    if "first" in how:
        optimizer = mfx.Muon(model)
        fully_shard(model, mesh=here.mesh)
        if "meta" in how:
            model.to_empty(device="cpu")
            for param in model.parameters():
                nn.init.normal_(param)
    elif how == "compiled ddp":
        optimizer = mfx.Muon(model)
        model = torch.compile(
            DistributedDataParallel(model, process_group=here.group), backend="eager"
        )
    elif how == "replicated, converted":
        optimizer = mfx.Muon(
            model, layout=sharding.replicated(dict(model.named_parameters()), here.group)
        )
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


Made = tuple[nn.Module, torch.optim.Optimizer]


def _made(kind: Callable[[nn.Module], torch.optim.Optimizer]) -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, kind(model)


def _loaded(kind: Callable[[nn.Module], torch.optim.Optimizer]) -> Made:
    model, optimizer = _made(kind)
    optimizer.load_state_dict(_made(kind)[1].state_dict())
    return model, optimizer


def _with_a_group_added() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(model[0].parameters(), model=model)
    optimizer.add_param_group({"params": model[1].parameters()})
    return model, optimizer


OURS: dict[str, Callable[[], Made]] = {
    "of DeepSpeed": lambda: _made(deepspeed.Muon),
    "of DeepSpeed, loaded": lambda: _loaded(deepspeed.Muon),
    "Muon": lambda: _made(mfx.Muon),
    "loaded": lambda: _loaded(mfx.Muon),
    "with a group added": _with_a_group_added,
    "copied": lambda: copy.deepcopy(_made(mfx.Muon)),
    "pickled": lambda: pickle.loads(pickle.dumps(_made(mfx.Muon))),
}


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, with its groups, as SAM's is."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("how", OURS)
def test_only_the_optimizer_its_wrappers_and_owners_of_copies_step_on_its_groups(how: str) -> None:
    model, optimizer = OURS[how]()

    def changes(one: torch.optim.Optimizer) -> bool:
        before = copy.deepcopy(model.state_dict())
        model(torch.ones(1, 4)).sum().backward()
        try:
            one.step()
        finally:
            changed = [
                not torch.equal(before[key], value) for key, value in model.state_dict().items()
            ]
            assert any(changed) == all(changed)
        return all(changed)

    assert changes(Wrapper(optimizer))
    assert changes(torch.optim.SGD([dict(group) for group in optimizer.param_groups], lr=0.1))
    groups = optimizer.param_groups
    if "DeepSpeed" in how:
        del optimizer  # as in a loop that has only the result of the engine
    other = torch.optim.AdamW(groups, lr=0.1)
    with pytest.raises(RuntimeError, match=r"AdamW steps on groups .*'muon'.*zero_force_ds_cpu"):
        changes(other)
