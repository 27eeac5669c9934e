"""Groups that schedulers, loggers and engines read and edit: order, keys, and what follows the tensors."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import muonfx as mfx
from tests import variants
from tests.optimizer.test_adapter import assert_equal, make_model, net, params_of, set_grads

MIXED = {
    "a.bias": (3,),
    "b.weight": (3, 4),
    "c.weight": (4, 3),
    "d.bias": (4,),
    "e.frozen": (2, 2),
    "f.scaled": (5,),
}
MIXED_LABELS = {"a": "adamw", "b": "muon", "c": "muon", "d": "adamw", "e": "frozen", "f": "sign"}


def mixed(frozen: mfx.Transform | None) -> mfx.Transform:
    """A partition whose labels are in another order than its groups are to be."""
    parts = {"adamw": mfx.adamw(1e-3), "muon": mfx.muon(0.02), "sign": mfx.scale(-0.1)}
    labels = {name: MIXED_LABELS[name[0]] for name in MIXED}
    if frozen is None:
        return mfx.partition(parts, labels | {"e.frozen": None})
    return mfx.partition(parts | {"frozen": frozen}, labels)


@pytest.mark.parametrize("frozen", [mfx.set_to_zero(), None], ids=["set_to_zero", "left out"])
@given(names=st.permutations(list(MIXED)))
def test_the_order_of_groups_is_not_that_of_parameters(
    frozen: mfx.Transform | None, names: list[str]
):
    params = {name: nn.Parameter(torch.zeros(MIXED[name])) for name in names}
    groups = mfx.TransformOptimizer(params, mixed(frozen)).param_groups
    labels = ["muon", "adamw", "sign"]  # what has the label None is in no group
    assert [group["label"] for group in groups] == labels + ([] if frozen is None else ["frozen"])
    assert groups[0]["lr"] == 0.02


def test_the_callers_groups_keep_their_order_and_are_split_in_the_fixed_one():
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in MIXED.items()}
    given = [
        {"params": [(n, params[n]) for n in names]}
        for names in (["f.scaled"], ["a.bias", "b.weight"])
    ]
    optimizer = mfx.TransformOptimizer(
        [*given, {"params": [("c.weight", params["c.weight"])]}], mixed(None)
    )
    assert [group["label"] for group in optimizer.param_groups] == ["sign", "muon", "adamw", "muon"]


def test_groups_have_torchs_keys_once_each():
    muon, adamw = mfx.Muon(
        make_model(), lr=0.02, momentum=0.9, betas=(0.8, 0.99), weight_decay=0.3
    ).param_groups
    common = {"params", "param_names", "label", "lr", "weight_decay", "momentum"}
    assert muon.keys() == common
    assert adamw.keys() == common | {"betas", "eps", "scale_by_adam.eps_root"}
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.02, 0.9, 0.3)
    assert (adamw["betas"], adamw["momentum"], adamw["eps"]) == ((0.8, 0.99), 0.8, 1e-8)


@pytest.mark.parametrize(
    ("tx", "entries"),
    [
        (mfx.scale_by_rms(), {"alpha": 0.9, "eps": 1e-8}),
        (mfx.scale_by_lion(), {"betas": (0.9, 0.99), "momentum": 0.9}),
        (mfx.contrib.scale_by_dion(2), {"momentum": 0.95}),
        (mfx.contrib.scale_by_dion2(2), {"momentum": 0.95}),
        (
            mfx.contrib.scale_by_namo(mfx.identity()),
            {"betas": (0.95, 0.99), "momentum": 0.95, "eps": 1e-8},
        ),
        (mfx.contrib.scale_by_prodigy(), {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8}),
        (mfx.contrib.scale_by_shampoo(), {"eps": 1e-4}),
        (mfx.contrib.scale_by_soap(), {"betas": (0.95, 0.95), "momentum": 0.95, "eps": 1e-8}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_numbers_of_other_transforms_have_torchs_keys_too(
    tx: mfx.Transform, entries: dict[str, Any]
):
    (group,) = mfx.TransformOptimizer(
        nn.Linear(4, 4, bias=False), mfx.chain(tx, mfx.scale(-1.0))
    ).param_groups
    assert {key: group.get(key) for key in entries} == entries


@pytest.mark.parametrize(
    ("entries", "rates"),
    [
        ({"lr": 0.5}, [0.5, 0.5]),
        ({"adamw.lr": 0.5}, [0.02, 0.5]),
        ({"lr": 0.25, "adamw.lr": 0.5}, [0.25, 0.5]),
        ({"muon.lr": 0.25, "adamw.lr": 0.5}, [0.25, 0.5]),
    ],
)
def test_a_key_with_a_label_sets_the_number_of_this_label(
    entries: dict[str, float], rates: list[float]
):
    model = make_model()
    named = list(model.named_parameters())
    groups = mfx.Muon(
        [{"params": named, **entries}], lr=0.02, adamw_lr=0.003, model=model
    ).param_groups
    assert [group["lr"] for group in groups] == rates
    assert not any(key.endswith(".lr") for group in groups for key in group)


def test_a_name_that_two_transforms_claim_is_left_to_neither():
    (group,) = mfx.TransformOptimizer(
        make_model(), mfx.chain(mfx.momentum(0.5), ("again", mfx.momentum(0.9)), DOWN)
    ).param_groups
    assert (group["momentum.decay"], group["again.decay"]) == (0.5, 0.9)
    assert "momentum" not in group


@pytest.mark.parametrize(
    ("place", "changes", "arguments"),
    [
        (0, {"momentum": 0.5}, {"momentum": 0.5}),
        (1, {"betas": (0.5, 0.6)}, {"betas": (0.5, 0.6)}),
        (1, {"momentum": 0.5}, {"betas": (0.5, 0.95)}),
        (1, {"betas": (0.9, 0.6)}, {"betas": (0.9, 0.6)}),
        (1, {"betas": (0.5, 0.95), "momentum": 0.5}, {"betas": (0.5, 0.95)}),
        (0, {"momentum": np.float32(0.5)}, {"momentum": 0.5}),
        (1, {"betas": (np.float32(0.5), np.float32(0.75))}, {"betas": (0.5, 0.75)}),
    ],
)
def test_what_is_written_into_a_group_counts_at_the_next_step(
    place: int, changes: dict, arguments: dict
):
    model, twin = make_model(), make_model()
    optimizer, wanted = mfx.Muon(model), mfx.Muon(twin, **arguments)
    optimizer.param_groups[place].update(changes)
    for step in range(2):
        for m, o in ((model, optimizer), (twin, wanted)):
            set_grads(m, step)
            o.step()
    assert_equal(params_of(model), params_of(twin))
    for ours, theirs in zip(optimizer.param_groups, wanted.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


@pytest.mark.parametrize(
    "make", [mfx.Muon, lambda m: mfx.TransformOptimizer(m, mfx.lion(1e-3)), torch.optim.SGD]
)
def test_one_cycle_drives_the_momentum_of_every_group(make):
    model = make_model()
    optimizer = (
        make(model) if make is not torch.optim.SGD else make(model.parameters(), momentum=0.9)
    )
    max_lr = [0.1, 0.01][: len(optimizer.param_groups)]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr, total_steps=10, cycle_momentum=True
    )
    seen = []
    for step in range(5):
        set_grads(model, step)
        optimizer.step()
        for group in optimizer.param_groups:
            assert group.get("betas", (group["momentum"],))[0] == group["momentum"]
        seen.append(optimizer.param_groups[-1]["momentum"])
        scheduler.step()
    assert seen == pytest.approx([0.95, 0.9, 0.85, 0.8549516, 0.869098], abs=1e-3)


@given(
    rates=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.2]), st.sampled_from([0.0, 0.1])),
        min_size=2,
        max_size=4,
    )
)
def test_groups_may_agree_about_a_number_and_disagree_in_turn(rates: list[tuple[float, float]]):
    """As schedules do that end at the same rate. Compared with groups that always disagree: with one more of them."""
    optimizers = []
    for has_third in (False, True):
        params = {name: nn.Parameter(torch.ones(3)) for name in "abc"}
        groups = [
            {"params": {name: params[name]}, "lr": 0.1} for name in ("abc" if has_third else "ab")
        ]
        optimizers.append((params, mfx.TransformOptimizer(groups, mfx.lion(0.1))))
    for step, pair in enumerate(rates):
        for params, optimizer in optimizers:
            for group, rate in zip(optimizer.param_groups, (*pair, 0.7), strict=False):
                group["lr"] = rate
            for param in params.values():
                param.grad = torch.arange(3.0) - step
            optimizer.step()
    assert all(torch.equal(optimizers[0][0][name], optimizers[1][0][name]) for name in "ab")


# ------------------------------------------------------------------------------------------------- numbers as tensors


def _by_matrices(model: nn.Module) -> dict[str, str]:
    return {name: "muon" if param.ndim > 1 else "adamw" for name, param in model.named_parameters()}


def _added_later(rate: torch.Tensor) -> mfx.Muon:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(
        model[0].named_parameters("0"), lr=1.0, model=model, labels=_by_matrices(model)
    )
    for pair in model[1].named_parameters("1"):
        optimizer.add_param_group({"params": [pair], "lr": rate})
    del optimizer.param_groups[:2]
    return optimizer


def _muon(**numbers: Any) -> mfx.Muon:
    return mfx.Muon(nn.Linear(4, 4), labels=_by_matrices, **numbers)


def _loaded_into_floats(rate: torch.Tensor) -> mfx.Muon:
    optimizer = _muon(lr=1.0)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file has other values
        optimizer.load_state_dict(saved)
    return optimizer


def _assigned(rate: torch.Tensor) -> mfx.Muon:
    optimizer = _muon(lr=1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    set_grads(nn.ParameterDict({"a": optimizer.param_groups[0]["params"][0]}), 0)
    optimizer.step()
    return optimizer


SHARED_RATE: dict[str, Callable[[torch.Tensor], mfx.Muon]] = {
    "constructor": lambda rate: _muon(lr=rate),
    "both rates": lambda rate: _muon(lr=rate, adamw_lr=rate),
    "groups": lambda rate: mfx.Muon(
        [{"params": dict(nn.Linear(4, 4).named_parameters()), "lr": rate}],
        labels={"weight": "muon", "bias": "adamw"},
    ),
    "add_param_group": _added_later,
    "load_state_dict": _loaded_into_floats,
    "assigned": _assigned,
    "copy": lambda rate: copy.deepcopy(_muon(lr=rate)),
    "pickle": lambda rate: pickle.loads(pickle.dumps(_muon(lr=rate))),
}


@pytest.mark.parametrize("how", SHARED_RATE)
def test_each_group_owns_its_rate_if_the_rate_is_a_tensor(how: str):
    optimizer = SHARED_RATE[how](torch.tensor(0.5))
    first, second = optimizer.param_groups
    assert first["lr"] is not second["lr"]
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5])
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125]


@pytest.mark.parametrize(
    "numbers",
    [
        {"lr": 0.5},
        {"weight_decay": 0.5},
        {"momentum": 0.5},
        {"betas": (0.5, 0.5)},
        {"lr": 0.5, "weight_decay": 0.5, "momentum": 0.5, "betas": (0.5, 0.5)},
    ],
)
def test_no_tensor_is_the_number_of_two_groups_or_of_two_arguments(numbers: dict[str, Any]):
    number = torch.tensor(0.5)
    as_tensors = {key: (number, number) if key == "betas" else number for key in numbers}
    optimizer = _muon(**as_tensors)
    tensors = [
        value
        for group in optimizer.param_groups
        for key in ("lr", "weight_decay", "momentum", "betas")
        for value in torch.utils._pytree.tree_leaves(group.get(key))
        # The first of betas.
        if isinstance(value, torch.Tensor) and not (key == "momentum" and "betas" in group)
    ]
    assert number not in {*tensors}
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("is_given_at_construction", [True, False])
def test_a_tensor_of_several_groups_that_the_caller_changes_changes_none_and_is_warned_of(
    is_given_at_construction: bool,
):
    rate = torch.tensor(0.5)
    model = nn.Linear(4, 4)
    if is_given_at_construction:
        optimizer = mfx.Muon(model, lr=rate, labels=_by_matrices)
    else:
        optimizer = mfx.Muon(model, labels=_by_matrices)
        for group in optimizer.param_groups:
            group["lr"] = rate
    set_grads(model, 0)
    optimizer.step()
    rate.fill_(0.25)
    with pytest.warns(
        UserWarning, match=r"that was given for .*learning_rate' was changed in place"
    ):
        optimizer.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]
    optimizer.step()


@pytest.mark.parametrize("labels", [("muon", "adamw"), ("muon+adamw",)])
def test_a_tensor_that_is_put_into_one_group_is_followed(labels: tuple[str, ...]):
    model = nn.Linear(4, 4)
    if len(labels) == 2:
        optimizer = mfx.Muon(model, labels=_by_matrices)
    else:  # a group that is added later may have parameters of both labels
        model.requires_grad_(False)
        whole = nn.ModuleDict({"late": model, "first": nn.Linear(4, 4)})
        optimizer = mfx.Muon(whole, labels=_by_matrices)
        optimizer.param_groups.reverse()
        optimizer.add_param_group({"params": model.requires_grad_().parameters()})
        optimizer.param_groups.reverse()
    assert optimizer.param_groups[0]["label"] == labels[0]
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    set_grads(model, 0)
    optimizer.step()
    rate.fill_(0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_number_of_all_groups_may_be_tensors_of_one_value_in_each():
    model = nn.Linear(4, 4)
    tx = mfx.as_tensors(
        mfx.chain(
            mfx.clip_by_global_norm(0.5), mfx.muon_with_adamw(0.1, labels=_by_matrices(model))
        )
    )
    optimizer = mfx.TransformOptimizer(model, tx)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_grads(model, 0)
    optimizer.step()
    for group in optimizer.param_groups:
        group["clip_by_global_norm.max_norm"].mul_(0.5)
    optimizer.step()
    before = params_of(model)
    optimizer.param_groups[1]["clip_by_global_norm.max_norm"].mul_(0.5)
    with pytest.raises(ValueError, match=r"different values of 'clip_by_global_norm\.max_norm'"):
        optimizer.step()
    assert_equal(before, params_of(model))


# ------------------------------------------------------------------------------------------------- what is a route


def test_a_partition_within_a_transform_that_runs_as_a_whole_splits_groups_too():
    inner = mfx.partition(
        {"one": mfx.scale_by_adam(), "two": mfx.momentum()},
        lambda p: {n: "two" if p[n].ndim > 1 else "one" for n in p},
    )
    optimizer = mfx.TransformOptimizer(
        make_model(), mfx.chain(mfx.cautious(inner), mfx.scale_by_learning_rate(0.1))
    )
    assert [(group["label"], group["cautious.min_share"]) for group in optimizer.param_groups] == [
        ("two", 1e-3),
        ("one", 1e-3),
    ]


# ----------------------------------------------------------------------------------------- tensors that a model names


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()


def test_tensors_without_names_are_routed_and_stepped_as_their_model_is() -> None:
    """As engines and callers of torch's own optimizers give them: a list, or lists with and without decay."""
    models = [net() for _ in range(3)]
    decayed = [param for param in models[2].parameters() if param.ndim > 1]
    others = [param for param in models[2].parameters() if param.ndim < 2]
    optimizers = [
        mfx.Muon(models[0], weight_decay=0.1),
        mfx.Muon(models[1].parameters(), weight_decay=0.1, model=models[1]),
        mfx.Muon(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.1}],
            model=models[2],
        ),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        _trained(model, optimizer)
    assert [group["label"] for group in optimizers[1].param_groups] == ["muon", "adamw"]
    for model in models[1:]:
        assert all(map(torch.equal, models[0].parameters(), model.parameters()))


WRONG_PARAMS: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "None in a group": (
        lambda model: [{"params": None}],
        TypeError,
        "'params' of a param group must be a model, .* found NoneType",
    ),
    "a number in a group": (
        lambda model: [{"params": 3}],
        TypeError,
        "'params' of a param group must be a model, .* found int",
    ),
    "a name in a group": (
        lambda model: [{"params": "weight"}],
        TypeError,
        "'params' of a param group must be a model, .* found str",
    ),
    "empty groups": (
        lambda model: [{"params": []}, {"params": []}],
        ValueError,
        "found no parameters; pass a model that has some",
    ),
    "an iterator that was read before": (
        lambda model: iter(()),
        ValueError,
        r"model\.named_parameters\(\), which can be read only once",
    ),
    "an iterator in two groups": (
        lambda model: [{"params": named} for named in [model.named_parameters()] * 2],
        ValueError,
        "'weight' is given twice",
    ),
    "a pair of a name and None": (
        lambda model: [*model.named_parameters(), ("bias", None)],
        TypeError,
        "params: 'bias' must be a tensor, found NoneType",
    ),
    "a name with None": (
        lambda model: {"weight": model.weight, "bias": None},
        TypeError,
        "params: 'bias' must be a tensor, found NoneType",
    ),
    "a name with None in a group": (
        lambda model: [{"params": {"weight": model.weight, "bias": None}}],
        TypeError,
        "params: 'bias' must be a tensor, found NoneType",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_PARAMS)
def test_wrong_params_are_refused_by_their_place_in_the_groups(wrong: str) -> None:
    make, error, message = WRONG_PARAMS[wrong]
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(error, match=message):
        mfx.TransformOptimizer(make(model), mfx.adamw(0.1))


@pytest.mark.parametrize("params", [None, 3, "weight"])
def test_wrong_params_of_an_added_group_are_refused(params: Any) -> None:
    optimizer = mfx.TransformOptimizer(nn.Linear(2, 2), mfx.adamw(0.1))
    with pytest.raises(TypeError, match="'params' of a param group must be a model"):
        optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1


def test_tensors_without_names_are_refused_where_no_model_names_them() -> None:
    model = net()
    expected = r"expected named parameters, found Parameter: .*model=.*configure_optimizers.*ZeroRedundancyOptimizer"
    with pytest.raises(TypeError, match=expected):
        mfx.Muon(model.parameters())
    with pytest.raises(
        ValueError, match=r"a tensor of shape \(2,\) is not a parameter of the model"
    ):
        mfx.Muon([nn.Parameter(torch.zeros(2))], model=model)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, found list"):
        mfx.TransformOptimizer(model.parameters(), mfx.adamw(), model=[model])  # type: ignore[arg-type]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)


NAMES_OF_BLOCK = ["norm.weight", "norm.bias", "fc.weight", "fc.bias"]
WAYS_TO_PASS_A_BLOCK: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "tensors": lambda block: {"params": block.parameters()},
    "pairs": lambda block: {"params": block.named_parameters()},
    "dict": lambda block: {"params": dict(block.named_parameters())},
    "module": lambda block: {"params": block},
    "param_names": lambda block: {
        "params": list(block.parameters()),
        "param_names": NAMES_OF_BLOCK,
    },
}


@pytest.mark.parametrize("way", WAYS_TO_PASS_A_BLOCK)
def test_added_blocks_have_the_names_of_the_model(way: str) -> None:
    model = nn.Sequential(Residual(), Residual(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    optimizer = mfx.Muon(
        model,
        labels=lambda model: mfx.default_labels(model, [(mfx.routing.path("2.weight"), "muon")]),
    )
    for index in (1, 0):
        model[index].requires_grad_()
        optimizer.add_param_group({**WAYS_TO_PASS_A_BLOCK[way](model[index]), "lr": 0.1})
        assert optimizer.param_groups[-1]["param_names"] == [
            f"{index}.{name}" for name in NAMES_OF_BLOCK
        ]
    labels = optimizer.tx.arguments["labels"]
    assert labels.reason("0.norm.weight") == "norm (module type LayerNorm)"


def test_given_names_count_at_construction() -> None:
    model = nn.Sequential(Residual(), nn.Linear(4, 4))
    labels = {
        name: "muon" if param.ndim > 1 else "adamw" for name, param in model[0].named_parameters()
    }
    optimizer = mfx.Muon(model[0].named_parameters(), model=model, labels=labels)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(NAMES_OF_BLOCK)


def test_added_tensors_of_no_known_model_keep_their_names() -> None:
    model = nn.Sequential(Residual())
    for optimizer in (mfx.Muon(model), mfx.Muon(dict(model.named_parameters()), labels=_by_dims)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names without module types
            optimizer.add_param_group({"params": nn.Linear(4, 4).named_parameters()})
        names = [name for group in optimizer.param_groups[2:] for name in group["param_names"]]
        assert sorted(names) == ["bias", "weight"]


def _by_dims(params: dict[str, Tensor]) -> dict[str, str]:
    return {name: "muon" if param.ndim > 1 else "adamw" for name, param in params.items()}


ALONE = mfx.scale_by_adam()
DOWN = mfx.scale_by_learning_rate(0.1)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def of_ones_own():
    """Says nothing of the direction."""
    return mfx.scale(-0.1).functions


@pytest.mark.parametrize(
    ("tx", "rising"),
    [
        (ALONE, "2 of 2 parameters, such as 'weight'"),
        (mfx.chain(ALONE, mfx.scale(0.1)), "2 of 2"),
        (
            mfx.skip_nonfinite(mfx.accumulate(mfx.chain(ALONE, mfx.master_params(ALONE)), 2)),
            "2 of 2",
        ),
        (mfx.chain(mfx.adamw(0.1), mfx.scale(-1.0)), "2 of 2"),
        (mfx.masked(mfx.adamw(0.1), mfx.routing.ndim(2)), "1 of 2 parameters, such as 'bias'"),
        (
            mfx.partition({"a": ALONE, "b": mfx.adamw(0.1)}, {"weight": "a", "bias": "b"}),
            "1 of 2 .* 'weight'",
        ),
        (
            mfx.partition({"a": mfx.identity(), "b": mfx.adamw(0.1)}, {"weight": "a", "bias": "b"}),
            "1 of 2 .* 'weight'",
        ),
        (mfx.add_updates(DOWN, mfx.scale(0.5)), "2 of 2"),
        (
            mfx.chain(
                mfx.partition({"a": ALONE, "b": DOWN}, {"weight": "a", "bias": "b"}), mfx.momentum()
            ),
            "1 of 2 .* 'weight'",
        ),
    ],
    ids=repr,
)
def test_parameters_whose_updates_increase_the_loss_are_warned_of(tx: mfx.Transform, rising: str):
    with pytest.warns(
        UserWarning,
        match=rf"would increase the loss: the updates of {rising}.* scale_by_learning_rate",
    ) as caught:
        mfx.TransformOptimizer(torch.nn.Linear(2, 2), tx)
    assert [found.filename for found in caught] == [__file__]


@pytest.mark.parametrize(
    "tx",
    [
        mfx.scale(-0.1),
        mfx.scale(torch.tensor(0.1)),  # its sign is not known
        variants.prodigy(),
        mfx.chain(ALONE, of_ones_own()),
        mfx.stateless(lambda updates, params: mfx.tree.map(torch.neg, updates)),
        mfx.partition({"a": mfx.set_to_zero(), "b": mfx.adamw(0.1)}, {"weight": "a", "bias": "b"}),
        mfx.partition({"b": mfx.adamw(0.1)}, {"weight": None, "bias": "b"}),
        mfx.chain(mfx.masked(ALONE, mfx.routing.ndim(2)), DOWN),
        mfx.skip_nonfinite(mfx.contrib.schedule_free(DOWN, 0.1)),
    ],
    ids=repr,
)
def test_nothing_is_said_where_updates_go_downhill_or_may(tx: mfx.Transform):
    mfx.TransformOptimizer(torch.nn.Linear(2, 2), tx)


# -------------------------------------------------------------------------------------- lists that users edit

# Two parameters of each shape, so that only identity distinguishes them.
SHAPES = {
    "a.weight": (3, 3),
    "b.weight": (3, 3),
    "c.weight": (3, 3),
    "a.bias": (3,),
    "b.bias": (3,),
    "c.bias": (3,),
}
MATRICES = [name for name in SHAPES if name.endswith("weight")]
VECTORS = [name for name in SHAPES if name.endswith("bias")]
LABELS = {name: "muon" if name in MATRICES else "adamw" for name in SHAPES}


class Pair:
    """An optimizer whose lists are edited, and its twin whose lists are not."""

    def __init__(self, groups: list[list[str]]) -> None:
        self.step_count = 0
        self.params, self.optimizer = self._made(groups)
        self.twin_params, self.twin = self._made(groups)

    @staticmethod
    def _made(groups: list[list[str]]) -> tuple[dict[str, nn.Parameter], mfx.Muon]:
        generator = torch.Generator().manual_seed(0)
        params = {
            name: nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in SHAPES.items()
        }
        given = [{"params": [(name, params[name]) for name in names]} for names in groups]
        return params, mfx.Muon(
            given, lr=0.1, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
        )

    def step(self) -> None:
        """Step on both, on the same gradients by name, and compare all that is kept by name."""
        self.step_count += 1
        for params, optimizer in ((self.params, self.optimizer), (self.twin_params, self.twin)):
            generator = torch.Generator().manual_seed(self.step_count)
            for name, shape in SHAPES.items():
                params[name].grad = torch.randn(shape, generator=generator)
            optimizer.step()
        self.check()

    def check(self) -> None:
        saved, wanted = self.optimizer.state_dict(), self.twin.state_dict()
        assert_equal(self.params, self.twin_params)
        for name in SHAPES:
            assert_equal(
                self.optimizer.state[self.params[name]], self.twin.state[self.twin_params[name]]
            )
            assert_equal(_saved_state(saved, name), _saved_state(wanted, name))
        for group in self.optimizer.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            assert all(self.params[name] is param for name, param in named)


def _saved_state(saved: dict[str, Any], name: str) -> Any:
    (index,) = (
        index
        for group in saved["param_groups"]
        for own, index in zip(group["param_names"], group["params"], strict=True)
        if own == name
    )
    return saved["state"][index]


def _by_path(optimizer: mfx.Muon) -> dict[str, torch.Tensor]:
    paths = map(str, mfx.tree.paths(optimizer.transform_state))
    return dict(zip(paths, mfx.tree.leaves(optimizer.transform_state), strict=True))


def _shuffled(draw: st.DataObject, optimizer: torch.optim.Optimizer) -> None:
    """Permute, within groups and among those of one label, and the groups themselves."""
    groups = optimizer.param_groups
    for label in ("muon", "adamw"):
        own = [group for group in groups if group["label"] == label]
        all_params = [param for group in own for param in group["params"]]
        params = [
            all_params[at] for at in draw.draw(st.permutations(range(len(all_params))), "params")
        ]
        for group in own:
            cut = len(params) if group is own[-1] else draw.draw(st.integers(0, len(params)), "cut")
            group["params"], params = params[:cut], params[cut:]
    groups[:] = [groups[at] for at in draw.draw(st.permutations(range(len(groups))), "groups")]


@given(draw=st.data())
def test_names_and_state_follow_the_tensors_through_all_lists(draw: st.DataObject):
    pair = Pair([["a.weight", "b.weight", "a.bias"], ["c.weight", "b.bias", "c.bias"]])
    pair.step()
    for _ in range(2):
        match draw.draw(
            st.sampled_from(["shuffle", "copy dicts", "replace list", "remove"]), "edit"
        ):
            case "shuffle":
                _shuffled(draw, pair.optimizer)
            case "copy dicts":
                pair.optimizer.param_groups[:] = [
                    dict(group) for group in pair.optimizer.param_groups
                ]
            case "replace list":
                pair.optimizer.param_groups = list(reversed(pair.optimizer.param_groups))
            case "remove":
                place = draw.draw(st.integers(0, len(pair.optimizer.param_groups) - 1), "place")
                removed = pair.optimizer.param_groups.pop(place)
                if removed["params"]:
                    with pytest.raises(ValueError, match="parameters were removed, such as"):
                        pair.optimizer.step()
                pair.optimizer.param_groups.append(removed)
        if draw.draw(st.booleans(), "copied"):
            twin = copy.deepcopy((pair.params, pair.optimizer))
            pair.params, pair.optimizer = twin
        pair.step()
    names = [name for group in pair.optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(SHAPES)


def test_a_moved_parameter_has_the_numbers_of_its_new_group():
    pair = Pair([["a.weight", "b.weight", *VECTORS], ["c.weight"]])
    pair.step()
    muon, _, other = pair.optimizer.param_groups
    other["lr"] = 0.0
    other["params"].append(muon["params"].pop(0))
    before = {name: param.detach().clone() for name, param in pair.params.items()}
    pair.optimizer.step()
    still = {name for name, param in pair.params.items() if torch.equal(param, before[name])}
    assert still == {"a.weight", "c.weight"}
    assert [group["param_names"] for group in pair.optimizer.param_groups] == [
        ["b.weight"],
        VECTORS,
        ["c.weight", "a.weight"],
    ]


def test_new_tensors_take_the_places_of_the_former_ones_and_not_those_of_moved_ones():
    pair = Pair([list(SHAPES)])
    pair.step()
    muon = pair.optimizer.param_groups[0]
    new = nn.Parameter(pair.params["b.weight"].detach().clone())
    a, _, c = muon["params"]
    muon["params"][:] = [c, a, new]
    with pytest.raises(
        ValueError, match=r"'c\.weight' is listed 2 times .*takes the name of its place"
    ):
        pair.optimizer.step()
    muon["params"][:] = [a, new, c]
    pair.params["b.weight"] = new
    pair.step()


def test_a_momentum_is_followed_if_groups_are_replaced_and_their_transform_is_read() -> None:
    """To read the former groups would record the new momentum, and the next step would take it for the former one."""
    optimizer = mfx.Muon(net())
    optimizer.param_groups[1]["momentum"] = 0.5  # as OneCycleLR does
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    assert mfx.hyperparams(optimizer.transform)["adamw.scale_by_adam.b1"] == 0.5
    optimizer.state_dict()  # reads the groups
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.95)


Edit = Callable[[list[dict[str, Any]]], object]
REFUSED: dict[str, tuple[Edit, type[Exception], str]] = {
    "extended by itself": (
        lambda g: g.extend(g),
        ValueError,
        r"'a\.weight' is listed 2 times and would be updated",
    ),
    "popped": (
        lambda g: g.pop(),
        ValueError,
        r"3 of 6 parameters were removed, such as 'a\.bias': put them back",
    ),
    "a parameter popped": (
        lambda g: g[0]["params"].pop(),
        ValueError,
        r"1 of 6 .*, such as 'c\.weight'",
    ),
    "inserted": (
        lambda g: g.insert(0, {"params": [torch.ones(2)]}),
        ValueError,
        r"\[0\]: found a new tensor of shape \(2,\) .*add_param_group",
    ),
    "appended": (
        lambda g: g[0]["params"].append(torch.ones(2)),
        ValueError,
        "found a new tensor .* and 4 params, expected 3",
    ),
    "moved to other transforms": (
        lambda g: g[0]["params"].append(g[1]["params"].pop()),
        ValueError,
        r"'a\.weight' \(label 'muon'\) and 'c\.bias' \(label 'adamw'\) are in one group",
    ),
    "without momentum": (
        lambda g: g[0].pop("momentum"),
        ValueError,
        r"the group of 'a\.weight' \(label 'muon'\) has no 'momentum', .*set it \(it was 0\.95\)",
    ),
    "lr is None": (
        lambda g: g[0].update(lr=None),
        TypeError,
        "'lr' in a group must be a number .*found None",
    ),
    "lr is text": (
        lambda g: g[0].update(lr="0.1"),
        ValueError,
        "'lr' in a group must be a number, found '0.1'",
    ),
    "lr is text of YAML": (
        lambda g: g[0].update(lr="1e-3"),
        ValueError,
        "found '1e-3': .* YAML reads .* 1.0e-3",
    ),
    "lr is True": (
        lambda g: g[0].update(lr=True),
        TypeError,
        "'lr' in a group must be a number .*found True",
    ),
    "lr is two numbers": (
        lambda g: g[0].update(lr=torch.ones(2)),
        ValueError,
        r"of one element, found shape \(2,\)",
    ),
    "lr is NaN": (
        lambda g: g[0].update(lr=float("nan")),
        ValueError,
        "'lr' in a group must be finite",
    ),
    "lr is negative": (
        lambda g: g[0].update(lr=-1.0),
        ValueError,
        "'lr' in a group must be at least 0, found -1",
    ),
    "two keys of one number": (
        lambda g: g[1].update(betas=(0.5, 0.95), momentum=0.6),
        ValueError,
        r"'betas' and 'momentum' in a group both set .*b1, to 0\.5 and 0\.6",
    ),
    "one beta": (
        lambda g: g[1].update(betas=0.5),
        ValueError,
        r"'betas' in a group must be 2 numbers, found 0\.5",
    ),
    "a large beta": (
        lambda g: g[1].update(betas=(0.5, 1.5)),
        ValueError,
        r"'betas\[1\]' in a group must be",
    ),
}


@pytest.mark.parametrize("edit", REFUSED)
def test_edits_that_cannot_be_followed_are_refused_before_anything_changes(edit: str):
    """Named: what was found, and what to do. The groups that were there before go on."""
    change, error, message = REFUSED[edit]
    pair = Pair([list(SHAPES)])
    pair.step()
    kept = [{**group, "params": list(group["params"])} for group in pair.optimizer.param_groups]
    before = {name: param.detach().clone() for name, param in pair.params.items()}
    state = {name: leaf.clone() for name, leaf in _by_path(pair.optimizer).items()}
    change(pair.optimizer.param_groups)
    with pytest.raises(error, match=message):
        pair.optimizer.step()
    assert_equal(before, dict(pair.params))
    assert_equal(state, _by_path(pair.optimizer))
    pair.optimizer.param_groups[:] = kept
    pair.step()


@pytest.mark.parametrize(
    ("where", "shape"), [("argument", ()), ("argument", (1, 1)), ("groups", (1,))]
)
def test_a_tensor_of_one_element_is_a_number_that_schedulers_write_into(
    where: str, shape: tuple[int, ...]
):
    rate = torch.full(shape, 0.1)
    models = [net() for _ in range(2)]
    options = {"momentum": 0.9, "weight_decay": 0.01, "betas": (0.8, 0.9)}
    if where == "argument":
        as_tensors = {key: torch.full(shape, options[key]) for key in ("momentum", "weight_decay")}
        betas = tuple(torch.full(shape, beta) for beta in options["betas"])
        optimizer = mfx.Muon(models[0], lr=rate, betas=betas, **as_tensors)
    else:
        optimizer = mfx.Muon(models[0], **options)
        for group in optimizer.param_groups:
            group["lr"] = rate
    twin = mfx.Muon(models[1], lr=0.1, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, twin)]
    for _ in range(3):
        for model, one, scheduler in zip(models, (optimizer, twin), schedulers, strict=True):
            one.zero_grad()
            model(torch.arange(8)).square().sum().backward()
            one.step()
            scheduler.step()
        torch.testing.assert_close(params_of(models[0]), params_of(models[1]))
    assert all(float(group["lr"]) == pytest.approx(0.0125) for group in optimizer.param_groups)
    assert [group["lr"].shape for group in optimizer.param_groups] == [
        shape if where == "groups" else ()
    ] * 2
    again = mfx.Muon(copy.deepcopy(models[0]), lr=0.1, **options)
    again.load_state_dict(optimizer.state_dict())
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert [float(group["lr"]) for group in again.param_groups] == rates


def test_a_number_on_the_meta_device_is_refused_before_any_change():
    """An optimizer that is created under ``torch.device("meta")`` may have its rate there."""
    model = net()
    optimizer = mfx.Muon(model, lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    model(torch.arange(8)).square().sum().backward()
    before = copy.deepcopy(params_of(model))
    with pytest.raises(ValueError, match="'lr' in a group is a tensor on the meta device"):
        optimizer.step()
    torch.testing.assert_close(params_of(model), before, rtol=0, atol=0)


GROUPS_OF_ITERATORS = {
    "names": lambda model: [{"params": model.named_parameters(), "lr": 0.5}],
    "tensors": lambda model: [{"params": model.parameters(), "lr": 0.5}],
    "two groups": lambda model: ({"params": layer.parameters(), "lr": 0.5} for layer in model),
}


@pytest.mark.parametrize("groups_of", GROUPS_OF_ITERATORS.values(), ids=GROUPS_OF_ITERATORS)
@pytest.mark.parametrize(
    "make",
    [mfx.Muon, lambda groups, model: mfx.TransformOptimizer(groups, mfx.adamw(), model=model)],
)
def test_groups_may_have_iterators_as_in_torch(groups_of, make):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(groups_of(model), model=model)
    assert {param for group in optimizer.param_groups for param in group["params"]} == {
        *model.parameters()
    }
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_an_optimizer_prints_its_numbers_and_at_most_ten_names_of_each_group():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    text = repr(mfx.Muon(model, lr=0.5, labels=mfx.routing.default_labels_by_name))
    assert text.startswith("Muon (\nParameter Group 0\n    label: muon\n    lr: 0.5\n")
    assert "20 parameters: 0.weight, 1.weight, " in text
    assert "9.weight and 10 more" in text


@pytest.mark.parametrize(
    ("key", "advice"), [("adamw_lr", "'lr'"), ("adamw_weight_decay", "'weight_decay'")]
)
def test_an_argument_of_muon_in_a_group_is_warned_of(key: str, advice: str):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    labels = {
        name: "muon" if param.ndim == 2 else "adamw" for name, param in model.named_parameters()
    }
    groups = [{"params": list(model.named_parameters()), "lr": 1e-4, key: 4e-4}]
    with pytest.warns(
        UserWarning,
        match=f"'{key}' .* make a group of the parameters of AdamW, and give it {advice}",
    ):
        mfx.Muon(groups, lr=1e-3, labels=labels)


def test_the_state_dict_of_adamw_is_refused_with_advice():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    labels = {
        name: "muon" if param.ndim == 2 else "adamw" for name, param in model.named_parameters()
    }
    optimizer = mfx.Muon(model, labels=labels)
    saved = torch.optim.AdamW(model.parameters()).state_dict()
    advice = "if another optimizer saved it, such as AdamW, load the weights only, and start with a new state"
    with pytest.raises(
        ValueError, match=rf"its groups have \[4\] parameters, expected \[2, 2\], .*{advice}"
    ):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=rf"no 'param_names' .* rename= needs names; {advice}"):
        optimizer.load_state_dict(saved, rename={"0": "layers.0"})


@pytest.mark.parametrize("has_names", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_the_state_of_another_optimizer_is_refused_with_the_call_that_converts_it(
    name: str, has_names: bool
):
    model = nn.Linear(4, 4, bias=False)
    params = [*model.named_parameters()] if has_names else [*model.parameters()]
    other: torch.optim.Optimizer = getattr(torch.optim, name)(params)
    model.weight.grad = torch.ones_like(model.weight)
    other.step()
    state_dict = other.state_dict()
    tx = mfx.adamw(0.1) if name == "AdamW" else mfx.chain(mfx.momentum(), mfx.scale(-0.1))
    optimizer = mfx.TransformOptimizer(model, tx)
    with pytest.raises(ValueError, match=r"another optimizer saved .*convert\.read\('torch', .*"):
        optimizer.load_state_dict(state_dict)
    # As the message advises.
    named = dict(model.named_parameters())
    state = mfx.checkpoint.convert.read("torch", state_dict, optimizer.tx, named, names=["weight"])
    optimizer.load_transform_state(state)
    leaves = [*optimizer.state[model.weight].values()]
    for saved_leaf in state_dict["state"][0].values():
        assert any(torch.equal(saved_leaf, leaf.to(saved_leaf.dtype)) for leaf in leaves)


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("NAdam", {}), ("RMSprop", {"momentum": 0.9}), ("Adamax", {})],
)
def test_the_state_of_an_optimizer_that_no_converter_reads_is_refused_with_other_advice(
    name: str, options: dict[str, float]
):
    model = nn.Linear(4, 4, bias=False)
    other: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    model.weight.grad = torch.ones_like(model.weight)
    other.step()
    optimizer = mfx.TransformOptimizer(
        model, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    )
    with pytest.raises(ValueError, match=r"convert reads no state of this optimizer: load the"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.filterwarnings("ignore:each step would increase the loss")
def test_a_transform_with_the_keys_of_another_optimizer_loads_its_own_state():
    @mfx.leafwise
    def decayed_sum() -> Any:
        def step(update: Any, state: Any) -> Any:
            total = 0.9 * state["momentum_buffer"] + update
            return total, {"momentum_buffer": total}

        return {"momentum_buffer": mfx.Slot()}, step

    optimizer = mfx.TransformOptimizer(nn.Linear(2, 2), decayed_sum())
    assert "momentum_buffer" in next(iter(optimizer.state.values()))
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("key", ["lr", "betas", "my_key"])
def test_a_saved_number_on_the_meta_device_is_refused_with_its_group(key: str):
    optimizer = mfx.TransformOptimizer(nn.Linear(2, 2), mfx.adamw(0.1))
    state_dict = optimizer.state_dict()
    meta = torch.tensor(0.5, device="meta")
    state_dict["param_groups"][0][key] = (0.9, meta) if key == "betas" else meta
    before = dict(optimizer.param_groups[0])
    for load in (
        lambda: optimizer.load_state_dict(state_dict),
        lambda: optimizer.load_transform_state(
            optimizer.transform_state, state_dict["param_groups"]
        ),
    ):
        with pytest.raises(ValueError, match=rf"'{key}' of group None .* on the meta device"):
            load()
    assert optimizer.param_groups[0] == before


def test_a_state_dict_of_another_chain_or_model_is_refused_with_advice():
    saved = mfx.TransformOptimizer(nn.Linear(4, 4), mfx.adamw(0.1)).state_dict()
    clipped = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.adamw(0.1))
    others = [
        mfx.TransformOptimizer(nn.Linear(4, 4), clipped),
        mfx.TransformOptimizer(nn.Linear(4, 5), mfx.adamw(0.1)),
        mfx.TransformOptimizer(nn.Sequential(nn.Linear(4, 4)), mfx.adamw(0.1)),
    ]
    for optimizer in others:
        with pytest.raises(
            ValueError, match=r"load_changed\(path, optimizer\).*a file of torch\.save"
        ):
            optimizer.load_state_dict(saved)


def test_the_groups_of_a_split_group_have_their_own_copies_of_a_tensor_of_the_caller():
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in MIXED.items()}
    scale = torch.ones(2)
    optimizer = mfx.TransformOptimizer([{"params": params, "layer_scale": scale}], mixed(None))
    for group in optimizer.param_groups:
        assert torch.equal(group["layer_scale"], torch.ones(2))
        group["layer_scale"].zero_()
    assert scale.tolist() == [1.0, 1.0]


def test_two_keys_of_one_number_follow_each_other_in_any_order_of_declaration():
    @mfx.leafwise(short_names={"momentum": "b1", "betas": ("b1", "b2")})
    def scale_by_decays(b1: float = 0.5, b2: float = 0.25):
        return mfx.core.EmptyState(), lambda u, s: (u * b1 + u * b2, s)

    param = nn.Parameter(torch.zeros(1))
    optimizer = mfx.TransformOptimizer(
        {"w": param}, mfx.chain(scale_by_decays(), mfx.scale_by_learning_rate(1.0))
    )
    (group,) = optimizer.param_groups
    for key, value, betas in (
        ("momentum", 0.75, (0.75, 0.25)),
        ("lr", 2.0, (0.75, 0.25)),
        ("betas", (0.0, 1.0), (0, 1)),
    ):
        group[key] = value
        param.data.zero_()
        param.grad = torch.ones(1)
        optimizer.step()
        assert group["betas"] == betas
        assert group["momentum"] == betas[0]
        assert param.item() == -group["lr"] * sum(betas)


def test_a_group_that_selects_no_parameter_is_warned_of():
    model = make_model()
    named = list(model.named_parameters())
    selected = [(name, param) for name, param in named if name.startswith("embed.")]
    groups = [{"params": named}, {"params": selected, "lr": 0.5}]
    labels = {name: "muon" if param.ndim == 2 else "adamw" for name, param in named}
    for build in (
        partial(mfx.Muon, labels=labels),
        partial(mfx.TransformOptimizer, tx=mfx.adamw(1e-3)),
    ):
        with pytest.warns(UserWarning, match="group 1 has no parameters") as warned:
            build(groups, model=model)
        assert len(warned) == 1


def groups_by_decay(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The two groups of Hugging Face's Trainer and of nanoGPT."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    decayed = [(name, param) for name, param in trained if param.ndim >= 2]
    others = [(name, param) for name, param in trained if param.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@pytest.mark.parametrize("is_model_given", [False, True])
def test_a_group_that_may_be_empty_on_purpose_is_not_warned_of(is_model_given: bool):
    """Warnings are errors in these tests."""
    without_biases = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    with_frozen_biases = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in with_frozen_biases:
        layer.bias.requires_grad_(False)
    named = list(with_frozen_biases.named_parameters())
    by_rate = [
        {"params": [(name, param) for name, param in named if param.ndim == 2]},
        {
            "params": [
                (name, param) for name, param in named if param.ndim < 2 and param.requires_grad
            ],
            "lr": 1e-4,
        },
    ]
    for groups in (groups_by_decay(with_frozen_biases), by_rate):
        model = with_frozen_biases if is_model_given else None
        mfx.TransformOptimizer(groups, mfx.adamw(1e-3), model=model)
    model = without_biases if is_model_given else None
    mfx.TransformOptimizer(groups_by_decay(without_biases), mfx.adamw(1e-3), model=model)


def test_groups_whose_parameters_an_engine_has_replaced_are_an_error_that_names_its_optimizer():
    model = torch.nn.Linear(4, 4)
    optimizer = mfx.Muon(model)
    # As DeepSpeed does.
    optimizer.param_groups[0]["params"] = [torch.zeros(16), torch.zeros(4), torch.zeros(2)]
    with pytest.raises(
        ValueError, match=r"and 3 params, expected 1.*muonfx\.engines\.deepspeed\.Muon"
    ):
        optimizer.step()


def _stepped(optimizer: mfx.Muon) -> list[str]:
    """Make a step, and return the texts of its warnings."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_one_rate_in_groups_that_were_made_with_different_rates_is_warned_of_once(kind: Any):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(model, lr=kind(1e-3), adamw_lr=kind(4e-3))
    for rates in ((1e-3, 4e-3), (0.0, 0.0), (2e-3, 1e-3)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = kind(rate)
        assert _stepped(optimizer) == []
    for group in optimizer.param_groups:
        group["lr"] = kind(1e-3)
    (text,) = _stepped(optimizer)
    assert "all groups have the learning rate 0.001" in text
    assert "made with 0.001, 0.004" in text
    assert _stepped(optimizer) == []


@pytest.mark.parametrize(
    "kind", ["equal at construction", "cosine", "cosine to one rate", "warmup", "plateau"]
)
def test_schedulers_that_keep_the_ratio_of_rates_are_not_warned_of(kind: str):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(model, lr=1e-3, adamw_lr=1e-3 if kind == "equal at construction" else 4e-3)
    schedulers = torch.optim.lr_scheduler
    scheduler: Any = schedulers.CosineAnnealingLR(
        optimizer, 5, eta_min=1e-5 if kind == "cosine to one rate" else 0.0
    )
    if kind == "warmup":
        scheduler = schedulers.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    if kind == "plateau":
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(6):
        assert _stepped(optimizer) == []
        scheduler.step(*[1.0] * (kind == "plateau"))


def _muon_with_two_rates() -> mfx.Muon:
    return mfx.Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=1e-3, adamw_lr=4e-3)


def _stepped_at(rates: Iterable[float], optimizer: mfx.Muon) -> list[str]:
    """Make a step at each rate, which is written into all groups, and return the texts of all warnings."""
    texts: list[str] = []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        texts += _stepped(optimizer)
    return texts


def test_one_low_rate_that_swa_keeps_is_warned_of():
    optimizer = _muon_with_two_rates()
    scheduler = torch.optim.swa_utils.SWALR(optimizer, 1e-4, anneal_epochs=5)
    texts: list[str] = []
    for _ in range(20):
        texts += _stepped(optimizer)
        scheduler.step()
    (text,) = texts
    assert "all groups have the learning rate 0.0001" in text


def test_a_schedule_of_one_rate_below_both_is_warned_of():
    optimizer = _muon_with_two_rates()
    (text,) = _stepped_at([9e-4 - 1e-5 * step for step in range(20)], optimizer)
    assert "all groups have the learning rate 0.00081" in text  # at the tenth step


def test_one_low_rate_after_a_load_of_two_rates_is_warned_of():
    """A run that is resumed with one rate, which does not change, is not in the first epoch of a warmup."""
    saved = _muon_with_two_rates()
    assert _stepped(saved) == []
    optimizer = _muon_with_two_rates()
    optimizer.load_state_dict(saved.state_dict())
    assert _stepped_at([5e-4] * 9, optimizer) == []
    (text,) = _stepped_at([5e-4] * 20, optimizer)
    assert "all groups have the learning rate 0.0005" in text


def test_a_first_epoch_of_a_warmup_and_a_minimum_are_not_warned_of():
    optimizer = _muon_with_two_rates()
    # As timm's warmup_lr_init, which lasts an epoch.
    assert _stepped_at([1e-4] * 30, optimizer) == []
    optimizer.param_groups[0]["lr"] = 1e-3
    assert _stepped(optimizer) == []
    assert _stepped_at([1e-6] * 30, optimizer) == []  # as min_lr of ReduceLROnPlateau
    for _ in range(3):  # the ends of three cycles of CosineAnnealingLR
        optimizer.param_groups[0]["lr"] = 1e-3
        assert _stepped(optimizer) == []
        assert _stepped_at([1e-4] * 4, optimizer) == []
