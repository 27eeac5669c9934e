"""Parameters that are not trained, now or for a while: frozen weights of any dtype, unfreezing, and labels of None."""

import copy
import itertools
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import muonfx as mfx
from tests.optimizer.test_adapter import assert_equal, params_of
from tests.processes import Here, on_ranks


def net(*, frozen: tuple[str, ...] = ()) -> nn.Sequential:
    """A backbone of two layers and two layers after it, with equal values at each call."""
    torch.manual_seed(0)
    backbone = nn.Sequential(OrderedDict(up=nn.Linear(4, 6), down=nn.Linear(6, 4)))
    model = nn.Sequential(
        OrderedDict(backbone=backbone, neck=nn.Linear(4, 4), head=nn.Linear(4, 2))
    )
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        optimizer.step()


def names_of(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


FREEZE = ("backbone",)


def of_model(model: nn.Module, **options: Any) -> mfx.Muon:
    return mfx.Muon(model, **options)


def of_named(model: nn.Module, **options: Any) -> mfx.Muon:
    return mfx.Muon(
        model.named_parameters(), **{"labels": mfx.routing.default_labels_by_name, **options}
    )


def of_trained(model: nn.Module, **options: Any) -> mfx.Muon:
    return mfx.Muon(
        [param for param in model.parameters() if param.requires_grad], model=model, **options
    )


def of_groups(model: nn.Module, **options: Any) -> mfx.Muon:
    pairs = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return mfx.Muon([{"params": pairs}], model=model, **options)


WAYS = pytest.mark.parametrize("make", [of_model, of_named, of_trained, of_groups])


# ---------------------------------------------------------------------------------------- what is frozen from the start


class Opaque(torch.Tensor):
    """Stands for the weights of a library that quantizes: no operation works on it."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # by nn.Parameter
            return cls(tuple(args[0].shape), args[0].dtype)
        raise AssertionError(f"{func} looked at a frozen weight")


FROZEN: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.zeros(3, 4, dtype=torch.uint8),
    "int8": lambda: torch.zeros(3, 4, dtype=torch.int8),
    "int64": lambda: torch.zeros(3, dtype=torch.int64),
    "bool": lambda: torch.zeros(3, dtype=torch.bool),
    "float8": lambda: torch.zeros(3, 4).to(torch.float8_e4m3fn),
    "complex": lambda: torch.zeros(3, 4, dtype=torch.complex64),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(3, 4, device="meta"),
    "opaque uint8": lambda: Opaque((3, 4), torch.uint8),
    "opaque float32": lambda: Opaque((3, 4), torch.float32),
}


def with_frozen(kind: str) -> nn.Module:
    model = net()
    model.backbone.quantized = nn.Module()
    model.backbone.quantized.weight = nn.Parameter(FROZEN[kind](), requires_grad=False)
    return model


def forward(model: nn.Module) -> Tensor:
    return (
        model.head(model.neck(model.backbone.down(model.backbone.up(torch.ones(2, 4)))))
        .square()
        .sum()
    )


@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize(
    "make",
    [
        of_model,
        of_named,
        of_trained,
        lambda model: mfx.TransformOptimizer(model, mfx.adamw(1e-3)),
        lambda model: mfx.TransformOptimizer(dict(model.named_parameters()), mfx.adamw(1e-3)),
        lambda model: mfx.Muon(
            [{"params": model.backbone, "lr": 1e-3}, {"params": model.head.named_parameters()}],
            labels=mfx.routing.default_labels_by_name,
        ),
    ],
    ids=["model", "named", "trained", "adamw", "dict", "groups"],
)
def test_a_frozen_leaf_is_never_looked_at(
    kind: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = with_frozen(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Muon: found no parameter|.*Sparse")
        optimizer = make(model)
    assert not any("quantized" in name for names in names_of(optimizer) for name in names)
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    mfx.summary(optimizer)
    mfx.describe(optimizer)
    mfx.describe(mfx.default_labels(model), model)
    optimizer.add_param_group({"params": {"new": nn.Parameter(torch.zeros(3)), **_renamed(model)}})
    assert names_of(optimizer)[-1] == ["new"]


def _renamed(model: nn.Module) -> dict[str, Tensor]:
    return {"frozen": model.backbone.quantized.weight}


@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize("is_detached", [False, True])
def test_a_functional_update_ignores_a_leaf_with_the_label_none(
    kind: str, is_detached: bool
) -> None:
    model = with_frozen(kind)
    labels = mfx.default_labels(model)
    tx = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.muon_with_adamw(0.1, labels=labels))
    params = dict(model.named_parameters())
    twin = dict(net().named_parameters())
    if is_detached and not kind.startswith("opaque"):
        params = {name: param.detach() for name, param in params.items()}
    weight = params["backbone.quantized.weight"]
    grads = {name: torch.ones_like(param) for name, param in twin.items()}
    with torch.no_grad():
        state = tx.init(params)
        updates, state = tx.update({**grads, "backbone.quantized.weight": None}, state, params)
        new = mfx.apply_updates(params, updates)
        alone = mfx.chain(
            mfx.clip_by_global_norm(1.0), mfx.muon_with_adamw(0.1, labels=mfx.default_labels(net()))
        )
        expected, _ = alone.update(grads, alone.init(twin), twin)
    assert updates.pop("backbone.quantized.weight") is None
    assert_equal(updates, expected)
    assert new["backbone.quantized.weight"] is weight


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_frozen_parameter_needs_no_label_in_a_functional_update(dtype: torch.dtype) -> None:
    params = {
        "w": nn.Parameter(torch.zeros(2, 2).to(dtype), requires_grad=False),
        "b": torch.ones(2),
    }
    tx = mfx.adamw(0.1)
    state = tx.init(params)
    updates, state = tx.update({"w": None, "b": torch.ones(2)}, state, params)
    assert updates["w"] is None
    with pytest.raises(TypeError, match="'w' must"):
        tx.init({"w": params["w"].detach(), "b": torch.ones(2)})


@pytest.mark.parametrize(
    "make", [of_model, lambda model: mfx.TransformOptimizer(model, mfx.adamw(1e-3))]
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_trained_leaf_of_such_a_dtype_is_an_error_by_name_with_advice(
    make: Any, dtype: torch.dtype
):
    model = net()
    model.backbone.up.weight = nn.Parameter(torch.zeros(6, 4).to(dtype))
    with pytest.raises(
        TypeError, match=rf"'backbone\.up\.weight' must .*found {dtype}.*convert it"
    ):
        make(model)


# ------------------------------------------------------------------------------------------------------ the label None


RULES = [[(mfx.routing.path("neck.*"), None)], [(mfx.routing.path("neck.*", "*.up.*"), None)]]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("make", [of_model, of_named])
def test_a_parameter_with_the_label_none_has_no_group_no_state_and_no_update(
    make: Any, rules: Any
) -> None:
    model = net()
    optimizer = make(model, labels=mfx.default_labels(model, rules))
    before = params_of(model)
    train(model, optimizer, steps=2)
    labels = mfx.default_labels(model, rules)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == (labels[name] is None)
        assert (param in optimizer.state) == (labels[name] is not None)
    with pytest.raises(ValueError, match=r"'neck\.weight' has the label None"):
        optimizer.add_param_group({"params": model.neck.named_parameters(prefix="neck")})
    train(model, optimizer)


def test_a_gradient_under_the_label_none_takes_no_part_in_clipping() -> None:
    """A parameter that is not in the optimizer has no gradient for it."""
    model, twin = net(), net(frozen=("neck",))
    tx = mfx.chain(mfx.clip_by_global_norm(1e-3), mfx.scale(-1.0))
    labels = {
        name: None if name.startswith("neck") else "all" for name, _ in model.named_parameters()
    }
    optimizer = mfx.TransformOptimizer(model, mfx.chain(mfx.partition({"all": tx}, labels)))
    train(model, optimizer)
    train(twin, mfx.TransformOptimizer(twin, tx))
    assert_equal(params_of(model), params_of(twin))


# ---------------------------------------------------------------------------------------------------------- unfreezing


@WAYS
def test_what_is_unfrozen_and_added_is_one_group_that_trains_as_from_the_start(make: Any) -> None:
    model, twin = net(frozen=FREEZE), net()
    optimizer = make(model)
    groups = len(optimizer.param_groups)
    model.backbone.requires_grad_()
    optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 2e-3})
    assert len(optimizer.param_groups) == groups + 1
    assert optimizer.param_groups[-1]["label"] == "muon+adamw"
    train(model, optimizer, steps=3)
    train(twin, mfx.Muon(twin), steps=3)
    assert_equal(params_of(model), params_of(twin))


class Wrapper:
    """Wraps an optimizer as Lightning and Fabric do: it has its methods, and reads attributes that it lacks there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def test_a_group_that_is_added_to_a_wrapper_of_the_optimizer_is_trained() -> None:
    model, twin = net(frozen=FREEZE), net()
    optimizer = mfx.Muon(model)
    wrapper: Any = Wrapper(optimizer)
    model.backbone.requires_grad_()
    wrapper.add_param_group({"params": model.backbone.parameters(), "lr": 2e-3})
    train(model, optimizer, steps=3)
    train(twin, mfx.Muon(twin), steps=3)
    assert_equal(params_of(model), params_of(twin))


def test_a_layer_may_be_wrapped_between_construction_and_unfreezing() -> None:
    model, twin = net(frozen=FREEZE), net()
    optimizer = mfx.Muon(model)
    # Its parameters have other names in the model now.
    model.backbone = checkpoint_wrapper(model.backbone)
    model.backbone.requires_grad_()
    optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 2e-3})
    train(model, optimizer, steps=3)
    train(twin, mfx.Muon(twin), steps=3)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_wrapped_layer_without_a_label_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    labels = {
        name: None if name.startswith(FREEZE) else "muon" for name, _ in model.named_parameters()
    }
    optimizer = mfx.TransformOptimizer(model, mfx.partition({"muon": mfx.adamw(1e-3)}, labels))
    model.backbone = checkpoint_wrapper(model.backbone)
    train(model, optimizer)
    assert not recwarn.list


@WAYS
def test_the_rate_of_an_added_group_applies_to_all_of_its_members(make: Any) -> None:
    model = net(frozen=FREEZE)
    optimizer = make(model, weight_decay=0.1, adamw_weight_decay=0.0)
    model.backbone.requires_grad_()
    optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 1e-3})
    train(model, optimizer)
    group = optimizer.param_groups[-1]
    assert (group["muon.weight_decay"], group["adamw.weight_decay"], "weight_decay" in group) == (
        0.1,
        0.0,
        False,
    )
    group["lr"] = 0.0
    before = params_of(model)
    train(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith("backbone")
    # As a schedule of the decay writes it into all groups.
    group["lr"], group["weight_decay"] = 1e-3, 0.5
    train(model, optimizer)
    assert not {"muon.weight_decay", "adamw.weight_decay"} & group.keys()
    assert (
        (
            optimizer._tracked_groups.groups[-1].numbers.read(group)[
                "adamw.add_decayed_weights.weight_decay"
            ]
        )
        == 0.5
    )


def test_numbers_of_a_group_with_two_labels_are_those_of_one_group_per_label() -> None:
    """Each number of the group, and one written later."""
    models = [net(frozen=FREEZE) for _ in range(2)]
    optimizers = [mfx.Muon(model) for model in models]
    given = {"lr": 3e-3, "weight_decay": 0.2, "momentum": 0.8, "betas": (0.5, 0.6), "eps": 1e-3}
    for model in models:
        model.backbone.requires_grad_()
    optimizers[0].add_param_group({"params": models[0].backbone.parameters(), **given})
    for end, keys in (
        ("weight", ("lr", "weight_decay", "momentum")),
        ("bias", ("lr", "weight_decay", "betas", "eps")),
    ):
        params = [
            param for name, param in models[1].backbone.named_parameters() if name.endswith(end)
        ]
        optimizers[1].add_param_group({"params": params, **{key: given[key] for key in keys}})
    for lr in (3e-3, 1e-2):
        for model, optimizer in zip(models, optimizers, strict=True):
            for group in optimizer.param_groups[2:]:
                group["lr"] = lr
            train(model, optimizer)
    assert len(optimizers[1].param_groups) == len(optimizers[0].param_groups) + 1
    assert_equal(params_of(models[0]), params_of(models[1]))


def test_a_list_without_a_rate_is_one_group_per_label_if_the_labels_rates_differ() -> None:
    model = net(frozen=FREEZE)
    optimizer = mfx.Muon(model, lr=0.02, adamw_lr=1e-3)
    groups = len(optimizer.param_groups)
    model.backbone.requires_grad_()
    optimizer.add_param_group({"params": model.backbone.parameters()})
    assert [group["lr"] for group in optimizer.param_groups[groups:]] == [0.02, 1e-3]


@WAYS
def test_a_parameter_that_was_frozen_is_not_forgotten_in_silence(make: Any) -> None:
    model = net(frozen=FREEZE)
    optimizer = make(model)
    with pytest.raises(
        ValueError, match=r"'backbone\.up\.weight' is frozen: call requires_grad_\(\)"
    ):
        optimizer.add_param_group({"params": model.backbone.parameters()})
    model.backbone.requires_grad_()
    if make in (of_trained, of_groups):
        return  # these were given other parameters only
    with pytest.raises(
        ValueError,
        match=r"'backbone\.up\.weight' has a gradient, but it was frozen .*add_param_group",
    ):
        train(model, optimizer)
    optimizer.add_param_group({"params": model.backbone.parameters()})
    train(model, optimizer)


@WAYS
def test_freezing_in_mid_run_leaves_parameters_and_state_as_they_are(make: Any) -> None:
    model = net()
    optimizer = make(model, weight_decay=0.5)
    train(model, optimizer, steps=2)
    for _ in range(2):  # frozen, trained and frozen again
        model.backbone.requires_grad_(requires_grad=False)
        for param in model.backbone.parameters():
            param.grad = None
        before, state = params_of(model), copy.deepcopy(optimizer.state_dict()["state"])
        groups = names_of(optimizer)
        train(model, optimizer, steps=2)
        assert names_of(optimizer) == groups
        index_of = dict(zip(itertools.chain(*groups), itertools.count(), strict=False))
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]) == name.startswith("backbone")
            if name.startswith("backbone"):
                entries = {key: leaf for key, leaf in optimizer.state[param].items() if leaf.ndim}
                assert_equal(entries, {key: state[index_of[name]][key] for key in entries})
        model.backbone.requires_grad_()
        train(model, optimizer)


@WAYS
def test_unfreezing_freezing_and_unfreezing_again_keeps_the_added_group(make: Any) -> None:
    model = net(frozen=FREEZE)
    optimizer = make(model)
    train(model, optimizer)
    model.backbone.requires_grad_()
    optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 1e-3})
    groups = names_of(optimizer)
    for is_trained in (True, False, True):
        model.backbone.requires_grad_(is_trained)
        before = params_of(model)
        train(model, optimizer)
        assert torch.equal(model.backbone.up.weight, before["backbone.up.weight"]) != is_trained
    assert names_of(optimizer) == groups
    with pytest.raises(ValueError, match="is given twice"):
        optimizer.add_param_group({"params": model.backbone.parameters()})


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5**step
    ),
    "ExponentialLR": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, 10
    ),
    "LinearLR": torch.optim.lr_scheduler.LinearLR,
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=10
    ),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_treats_an_added_list_as_that_of_a_torch_optimizer(scheduler: str) -> None:
    outcomes = []
    for make in (
        lambda model: mfx.Muon(
            model.neck, lr=1.0, labels=dict.fromkeys(("weight", "bias"), "adamw")
        ),
        None,
    ):
        model = net()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Muon: found no parameter")
            optimizer = (
                torch.optim.AdamW(model.neck.parameters(), lr=1.0) if make is None else make(model)
            )
        schedule = SCHEDULERS[scheduler](optimizer)
        seen: list[Any] = []
        arguments = [1.0] if scheduler == "ReduceLROnPlateau" else []
        for step in range(4):
            if step == 2:
                new: Any = (
                    model.head.parameters()
                    if make is None
                    else {"w": model.head.weight, "b": model.head.bias}
                )
                labels: dict[str, Any] = (
                    {"labels": {"w": "muon", "b": "adamw"}} if make is not None else {}
                )
                optimizer._labels = labels.get("labels")  # type: ignore[attr-defined]
                optimizer.add_param_group({"params": new, "lr": 0.1})
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            try:
                schedule.step(*arguments)
            except (ValueError, KeyError) as error:
                # LambdaLR has one function per group from the start.
                seen.append((type(error), str(error)))
            seen.append([group["lr"] for group in optimizer.param_groups])
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


# ------------------------------------------------------------------------------------------- groups that are assigned


@WAYS
def test_groups_that_are_assigned_may_have_parameters_that_were_frozen(make: Any) -> None:
    """As Lightning does when it resumes: before it loads the state, and before it unfreezes anything."""
    model = net(frozen=FREEZE)
    optimizer = make(model)
    model.backbone.requires_grad_()
    optimizer.add_param_group(
        {"params": model.backbone.parameters(), "lr": 1e-3, "name": "backbone"}
    )
    train(model, optimizer, steps=2)
    stored = [{**group, "params": list(group["param_names"])} for group in optimizer.param_groups]
    saved = copy.deepcopy(optimizer.state_dict())

    later = net(frozen=FREEZE)
    later.load_state_dict(model.state_dict())
    resumed = make(later)
    named = dict(later.named_parameters())
    resumed.param_groups = [
        {**group, "params": [named[name] for name in group["params"]]} for group in stored
    ]
    resumed.load_state_dict(saved)
    for name, param in model.named_parameters():
        assert_equal(resumed.state[named[name]], optimizer.state[param])
    assert resumed.param_groups[-1]["name"] == "backbone"
    later.backbone.requires_grad_()
    for own, one in ((model, optimizer), (later, resumed)):
        train(own, one)
    assert_equal(params_of(model), params_of(later))


def test_a_group_that_is_appended_gets_the_numbers_that_it_lacks() -> None:
    model = net(frozen=FREEZE)
    optimizer = mfx.Muon(model)
    model.backbone.requires_grad_()
    optimizer.param_groups.append(
        {"params": [model.backbone.up.weight, model.backbone.up.bias], "lr": 1e-3}
    )
    optimizer.zero_grad()
    train(model.neck, optimizer)
    assert optimizer.param_groups[-1]["momentum"] == 0.95
    assert names_of(optimizer)[-1] == ["backbone.up.weight", "backbone.up.bias"]


# ------------------------------------------------------------------------------------------------------------- resuming


def saved_by(make: Any, frozen: tuple[str, ...]) -> tuple[nn.Module, mfx.Muon, dict[str, Any]]:
    model = net(frozen=frozen)
    optimizer = make(model)
    train(model, optimizer, steps=2)
    return model, optimizer, copy.deepcopy(optimizer.state_dict())


@WAYS
def test_a_state_from_before_freezing_loads_without_what_is_frozen(make: Any) -> None:
    model, optimizer, saved = saved_by(make, ())
    later = net(frozen=FREEZE)
    resumed = make(later)
    with pytest.warns(
        UserWarning, match=r"the state of .*'backbone\.down\.bias'.* was not loaded"
    ) as caught:
        resumed.load_state_dict(saved)
    assert len(caught) == 1
    for name, param in later.named_parameters():
        if param in resumed.state:
            assert_equal(resumed.state[param], optimizer.state[model.get_parameter(name)])
    train(later, resumed)


@WAYS
def test_a_state_from_before_unfreezing_starts_what_is_new_at_its_initial_state(make: Any) -> None:
    model, optimizer, saved = saved_by(make, FREEZE)
    later = net()
    resumed = make(later)
    with pytest.warns(
        UserWarning, match=r"found no state of .*'backbone\.down\.bias'.* initial"
    ) as caught:
        resumed.load_state_dict(saved)
    assert len(caught) == 1
    for name, param in later.named_parameters():
        if name.startswith("backbone"):
            assert not any(leaf.any() for leaf in resumed.state[param].values() if leaf.ndim)
        else:
            assert_equal(resumed.state[param], optimizer.state[model.get_parameter(name)])
    train(later, resumed)


NAMES = [name for name, _ in net().named_parameters()]


@given(
    before=st.sets(st.sampled_from(NAMES), min_size=1),
    now=st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_what_is_trained_in_both_runs_is_loaded_whatever_else_was_trained(
    before: set[str], now: set[str]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Muon: found no parameter")
        model, later = net(), net()
        for own, trained in ((model, before), (later, now)):
            for name, param in own.named_parameters():
                param.requires_grad_(name in trained)
        optimizer, resumed = mfx.Muon(model), mfx.Muon(later)
    train(model, optimizer)
    saved = optimizer.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if before & now:
            resumed.load_state_dict(saved)
        else:
            with pytest.raises(ValueError, match="nothing was loaded: the state dict lacks"):
                resumed.load_state_dict(saved)
    texts = "".join(str(warning.message) for warning in caught)
    if before & now:
        assert ("was not loaded" in texts, "found no state of" in texts) == (
            bool(before - now),
            bool(now - before),
        )
    for name in before & now:
        assert_equal(
            resumed.state[later.get_parameter(name)], optimizer.state[model.get_parameter(name)]
        )


def test_a_state_of_another_model_is_still_refused() -> None:
    model, _, saved = saved_by(of_model, ())
    other = nn.Sequential(OrderedDict(neck=nn.Linear(4, 4), last=nn.Linear(4, 2)))
    with pytest.raises(
        ValueError, match=r"nothing was loaded: the state dict lacks .*'last\..*also has 'backbone"
    ):
        mfx.Muon(other).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"nothing was loaded: the state dict also has 'backbone"):
        of_named(nn.Sequential(OrderedDict(neck=model.neck))).load_state_dict(saved)


# A full state dict of more parameters than the model trains is a KeyError of torch, also for torch's own optimizers.
@pytest.mark.parametrize(
    ("before", "now", "full"),
    [((), FREEZE, False), (FREEZE, (), False), (FREEZE, (), True), (("head.bias",), (), True)],
)
def test_dcps_functions_load_across_freezing(
    before: tuple[str, ...], now: tuple[str, ...], full: bool
) -> None:
    options = StateDictOptions(full_state_dict=full, strict=False)
    model, optimizer, _ = saved_by(of_model, before)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    later = net(frozen=now)
    resumed = mfx.Muon(later)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        set_optimizer_state_dict(later, resumed, saved, options=options)
    for name in {"neck.weight", "head.bias"} - set(before):
        assert_equal(
            resumed.state[later.get_parameter(name)], optimizer.state[model.get_parameter(name)]
        )


def test_a_state_is_set_by_dcp_right_after_parameters_were_replaced() -> None:
    """`set_optimizer_state_dict` reads the groups before it calls the optimizer."""
    model, optimizer, _ = saved_by(of_model, ())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    later = net()
    resumed = mfx.Muon(later)
    later.load_state_dict(
        {name: param.clone() for name, param in model.state_dict().items()}, assign=True
    )
    set_optimizer_state_dict(later, resumed, saved)
    for own, one in ((model, optimizer), (later, resumed)):
        train(own, one)
    assert_equal(params_of(model), params_of(later))


# ------------------------------------------------------------------------------------------- state dicts as flat files


def test_a_state_dict_has_no_shared_tensors_and_no_slashes_in_its_keys() -> None:
    model = net()
    optimizer = mfx.Muon(model)
    train(model, optimizer)
    pointers: list[int] = []
    for entries in optimizer.state_dict()["state"].values():
        assert not any("/" in key for key in entries)
        pointers += [leaf.untyped_storage().data_ptr() for leaf in entries.values()]
    assert len(set(pointers)) == len(pointers)


def test_hooks_of_a_state_dict_get_the_complete_one_and_may_return_another() -> None:
    """As in torch.optim, a hook may wrap the state dict, or leave its state out."""
    model = net()
    optimizer = mfx.Muon(model)
    train(model, optimizer)
    complete = optimizer.state_dict()
    received: list[dict[str, Any]] = []

    def wrap(_: object, saved: dict[str, Any]) -> dict[str, Any]:
        received.append(saved)
        return {"wrapped": saved}

    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["wrapped"])
    saved = optimizer.state_dict()
    assert saved == {"wrapped": received[0]}
    assert received[0]["param_groups"] == complete["param_groups"]
    train(model, optimizer)
    optimizer.load_state_dict(saved)
    optimizer.register_state_dict_post_hook(
        lambda _, saved: {"groups": saved["wrapped"]["param_groups"]}
    )
    assert optimizer.state_dict() == {"groups": complete["param_groups"]}


def test_a_number_that_a_hook_of_a_state_dict_writes_is_saved_under_all_of_its_keys() -> None:
    model = net()
    optimizer = mfx.Muon(model)
    optimizer.register_state_dict_pre_hook(lambda own: own.param_groups[1].update(momentum=0.5))
    assert optimizer.state_dict()["param_groups"][1]["betas"] == (0.5, 0.95)


@pytest.mark.parametrize("key", ["params", "param_names"])
def test_a_state_dict_whose_group_lacks_a_parameter_or_its_name_is_refused(key: str) -> None:
    model = net()
    optimizer = mfx.Muon(model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    count = len(saved["param_groups"][0][key])
    saved["param_groups"][0][key].pop()
    with pytest.raises(ValueError, match="nothing was loaded: group 0 of the state dict") as caught:
        optimizer.load_state_dict(saved)
    assert f"has {count - 1} " in str(caught.value) or f"and {count - 1} " in str(caught.value)


# --------------------------------------------------------------------------------------------- keys of the user's own


DINO = {
    "is_last_layer": True,
    "lr_multiplier": 0.5,
    "wd_multiplier": 0.0,
    "foreach": True,
    "name": "last",
}
TIMM = {"lr_scale": 0.75, "initial_lr": 1e-3, "use_fallback": False}
SCHEDULED = {
    "max_lr": 0.1,
    "min_lr": 0.0,
    "base_momentum": 0.8,
    "max_momentum": 0.9,
    "swa_lr": 0.1,
    "layer_id": 3,
}


@pytest.mark.filterwarnings("ignore:load_state_dict. the state dict was saved with other numbers")
@pytest.mark.parametrize("keys", [DINO, TIMM, SCHEDULED])
@pytest.mark.parametrize("when", ["construction", "later"])
def test_keys_of_the_users_own_are_kept_everywhere(keys: dict[str, Any], when: str) -> None:
    model = net()
    parts = [
        list(model.backbone.named_parameters(prefix="backbone")),
        list(model.neck.named_parameters(prefix="neck")),
    ]
    if when == "construction":
        optimizer = mfx.Muon(
            [{"params": parts[0]}, {"params": parts[1], "weight_decay": 0.0, **keys}], model=model
        )
    else:
        optimizer = mfx.Muon(parts[0], model=model)
        optimizer.add_param_group({"params": parts[1], "lr": 1e-3, **keys})
    train(model, optimizer)
    own = [group for group in optimizer.param_groups if "neck.weight" in group["param_names"]]
    assert all(group[key] == value for group in own for key, value in keys.items())
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    for group in optimizer.param_groups:
        for key in keys:
            group.pop(key, None)
    optimizer.load_state_dict(saved)
    assert all(group[key] == value for group in own for key, value in keys.items())
    path_saved = get_optimizer_state_dict(model, optimizer)
    for group in own:
        group.update(dict.fromkeys(keys, 0))
    set_optimizer_state_dict(model, optimizer, path_saved)
    assert all(group[key] == value for group in own for key, value in keys.items())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("LR", "lr"),
        ("weight_dacay", "weight_decay"),
        ("weight-decay", "weight_decay"),
        ("wd", "weight_decay"),
        ("momentun", "momentum"),
        ("mu", "momentum"),
        ("use_muon", "has no effect"),
        ("algorithm", "has no effect"),
        ("epsilon", "the group has"),
        ("betas", "the group has"),
        ("beta1", "the group has"),
    ],
)
@pytest.mark.parametrize("when", ["construction", "added", "written"])
def test_a_key_close_to_a_hyperparameter_warns_once(key: str, meant: str, when: str) -> None:
    model = net()
    biases = [(name, param) for name, param in model.named_parameters() if name.endswith("bias")]
    weight = [("neck.weight", model.neck.weight)]
    message = rf"'{key}' in the group of 'neck\.weight' is kept, but .*{meant}"
    if when == "construction":
        with pytest.warns(UserWarning, match=message):
            optimizer = mfx.Muon([{"params": weight, key: 0.5}, {"params": biases}], model=model)
        train(model, optimizer)
        return
    empty = {"params": [], "weight_decay": 0.0}
    optimizer = mfx.Muon([{"params": weight if when == "written" else biases}, empty], model=model)
    if when == "added":
        with pytest.warns(UserWarning, match=message):
            optimizer.add_param_group({"params": weight, key: 0.5})
        train(model, optimizer)
        return
    optimizer.add_param_group({"params": biases})
    train(model, optimizer)
    optimizer.param_groups[0][key] = 0.5
    if key == "betas":  # as OneCycleLR writes it into all groups
        train(model, optimizer)
        return
    with pytest.warns(UserWarning, match=message):
        train(model, optimizer)
    train(model, optimizer)


# ------------------------------------------------------------------------------------------------------ real processes


def sharded(model: nn.Module, here: Here) -> nn.Module:
    for layer in (*model.backbone.children(), model.neck):
        fully_shard(layer, mesh=here.mesh)
    return fully_shard(model, mesh=here.mesh)


EXACT = {"orthogonalize": mfx.orthogonalize(dtype=torch.float32)}


def assert_same_values(model: nn.Module, twin: nn.Module) -> None:
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(whole, other, atol=1e-6, rtol=0)


@pytest.mark.dist
@pytest.mark.parametrize("full", [False, True])
@on_ranks(2)
def test_a_state_is_set_by_dcp_right_after_a_late_fully_shard(here: Here, full: bool) -> None:
    model, twin = net(), net()
    optimizer, other = mfx.Muon(model, **EXACT), mfx.Muon(twin, **EXACT)
    train(twin, other, steps=2)
    options = StateDictOptions(full_state_dict=full)
    saved = copy.deepcopy(get_optimizer_state_dict(twin, other, options=options))
    model.load_state_dict(twin.state_dict())
    sharded(model, here)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    for own, one in ((model, optimizer), (twin, other)):
        train(own, one, steps=2)
    assert_same_values(model, twin)


@pytest.mark.dist
@on_ranks(2)
def test_frozen_layers_are_unfrozen_over_ranks_as_in_one_process(here: Here) -> None:
    """Sharded layers of which some are frozen, and a quantized weight that is on each rank in full."""
    model, twin = net(frozen=FREEZE), net(frozen=FREEZE)
    sharded(model, here)
    for own in (model, twin):
        own.quantized = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    optimizer, other = mfx.Muon(model, **EXACT), mfx.Muon(twin, **EXACT)
    for own, one in ((model, optimizer), (twin, other)):
        train(own, one)
        own.backbone.requires_grad_()
        one.add_param_group({"params": own.backbone.parameters(), "lr": 1e-3})
        train(own, one, steps=2)
        one.load_state_dict(one.state_dict())
        own.neck.requires_grad_(requires_grad=False)
        train(own, one)
    assert names_of(optimizer) == names_of(other)
    assert_same_values(model, twin)


@pytest.mark.dist
@on_ranks(2)
def test_a_sharded_update_ignores_a_leaf_with_the_label_none(here: Here) -> None:
    params: dict[str, Tensor] = {
        "w": torch.ones(4, 4),
        "b": torch.ones(4),
        "q": torch.zeros(3, dtype=torch.uint8),
    }
    labels = {"w": "muon", "b": "adamw", "q": None}
    tx = mfx.muon_with_adamw(0.1, labels=labels)
    layout = mfx.sharding.replicated(params, here.group)
    grads = {"w": torch.eye(4), "b": torch.ones(4), "q": None}
    stx = mfx.sharding.sharded(tx, layout)
    updates, _ = stx.update(grads, stx.init(params), params)
    expected, _ = tx.update(grads, tx.init(params), params)
    assert updates.pop("q") is None
    expected.pop("q")
    for name, update in expected.items():
        torch.testing.assert_close(updates[name], update)
