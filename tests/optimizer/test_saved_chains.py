"""A state dict of another chain is loaded with a warning; what differs without another update gives none."""

import copy
import functools
import io
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import muonfx as mfx
from muonfx.placement.offload import offload
from tests.processes import Here, on_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:.*assuming the intent",
    "ignore:view.*matches none",
)

FUSED = "(part=3 out) in -> part out in"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(8, 4), nn.Linear(4, 12), nn.Linear(12, 4, bias=False), nn.Linear(4, 8)
    )


def muon_for(model: Any, **options: Any) -> mfx.Muon:
    options.setdefault(
        "orthogonalize", mfx.orthogonalize(view=mfx.MatrixView({"*1.weight": FUSED}))
    )
    return mfx.Muon(model, **options)


def labelled(matrix: mfx.Transform, rest: mfx.Transform | None = None) -> mfx.TransformOptimizer:
    """An optimizer with a chain for matrices and one for all other parameters, none of which has state."""
    model = net()
    tx = mfx.partition(
        {"matrix": matrix, "rest": rest or mfx.scale(-0.1)}, default_labels_of(model)
    )
    return mfx.TransformOptimizer(model, tx, model=model)


def default_labels_of(model: nn.Module) -> dict[str, str]:
    labels = mfx.default_labels(model)
    return {name: "matrix" if label == "muon" else "rest" for name, label in labels.items()}


def chain_messages(load: Callable[[], Any]) -> list[str]:
    """The warnings of another chain that a load gives."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        load()
    return [str(warning.message) for warning in caught if "another chain" in str(warning.message)]


def by_torch_save(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def messages_of(old: Any, new: Any, **options: Any) -> list[str]:
    saved = by_torch_save(old.state_dict())
    return chain_messages(lambda: new.load_state_dict(saved, **options))


# --------------------------------------------------------------------------------------------------------- differences

RATE = mfx.scale_by_learning_rate(0.1)
STEPS = [(3.4, -4.7, 2.0)] * 5

OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a view": (
        lambda: muon_for(net()),
        lambda: muon_for(
            net(),
            orthogonalize=mfx.orthogonalize(
                view=mfx.MatrixView({"*1.weight": "whole in -> whole in"})
            ),
        ),
        f"group 'muon', '1.weight', orthogonalize.view: '{FUSED}' in the checkpoint, 'whole in -> whole in' here",
    ),
    "a polynomial": (
        lambda: muon_for(net(), orthogonalize=mfx.orthogonalize()),
        lambda: muon_for(net(), orthogonalize=mfx.orthogonalize(coefficients="keller")),
        "group 'muon', orthogonalize.coefficients: not set in the checkpoint, 'keller' here",
    ),
    "the number of steps": (
        lambda: muon_for(net(), orthogonalize=mfx.orthogonalize(coefficients=STEPS)),
        lambda: muon_for(net(), orthogonalize=mfx.orthogonalize(coefficients=STEPS[:4])),
        "group 'muon', orthogonalize.coefficients: [(3.4, -4.7, 2.0), ",
    ),
    "nesterov": (
        lambda: labelled(mfx.chain(mfx.momentum(0.9), RATE)),
        lambda: labelled(mfx.chain(mfx.momentum(0.9, nesterov=False), RATE)),
        "group 'matrix', momentum.nesterov: not set in the checkpoint, False here",
    ),
    "the order": (
        lambda: labelled(mfx.chain(mfx.momentum(0.9), mfx.scale_by_sign(), RATE)),
        lambda: labelled(mfx.chain(mfx.scale_by_sign(), mfx.momentum(0.9), RATE)),
        "group 'matrix', ...chain(momentum(decay=0.9), scale_by_sign(), ",
    ),
    "a transform without state": (
        lambda: labelled(mfx.chain(mfx.momentum(0.9), mfx.scale_by_sign(), RATE)),
        lambda: labelled(mfx.chain(mfx.momentum(0.9), RATE)),
        "group 'matrix', scale_by_sign: scale_by_sign() in the checkpoint, not set here",
    ),
    "a transform within another": (
        lambda: labelled(mfx.chain(mfx.cautious(mfx.momentum(0.9)), RATE)),
        lambda: labelled(mfx.chain(mfx.cautious(mfx.momentum(0.9, nesterov=False)), RATE)),
        "group 'matrix', cautious.momentum.nesterov: not set in the checkpoint, False here",
    ),
    "a mask": (
        lambda: labelled(
            mfx.chain(
                mfx.add_decayed_weights(0.1, mask=lambda params: dict.fromkeys(params, True)), RATE
            )
        ),
        lambda: labelled(mfx.chain(mfx.add_decayed_weights(0.1, mask=mfx.routing.ndim(3)), RATE)),
        "group 'matrix', add_decayed_weights.mask: ",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_chain_of_the_same_state_is_reported(name: str):
    old, new, difference = OTHERS[name]
    (message,) = messages_of(old(), new())
    assert difference in message
    assert messages_of(old(), old()) == []
    assert messages_of(new(), new()) == []


def test_the_warning_names_the_parameters_of_another_pattern_only():
    (message,) = messages_of(muon_for(net()), muon_for(net(), orthogonalize=mfx.orthogonalize()))
    assert "'1.weight', orthogonalize.view" in message
    assert "2.weight" not in message
    assert "adamw" not in message


def test_a_label_with_other_transforms_is_reported():
    def optimizer_with(label: str) -> mfx.TransformOptimizer:
        signs = mfx.chain(mfx.scale_by_sign(), mfx.scale(-0.1))
        params = {
            "w": nn.Parameter(torch.ones(2)),
            "v": nn.Parameter(torch.ones(2)),
            "u": nn.Parameter(torch.ones(2)),
        }
        labels = {"w": label, "v": "signs", "u": "values"}
        tx = mfx.partition({"values": mfx.chain(mfx.scale(-0.1)), "signs": signs}, labels)
        return mfx.TransformOptimizer(
            [{"params": [(name, param)]} for name, param in params.items()], tx
        )

    (message,) = messages_of(optimizer_with("values"), optimizer_with("signs"))
    assert (
        "group 'signs', scale_by_sign: not set in the checkpoint, scale_by_sign() here" in message
    )


# ------------------------------------------------------------------------------------------------------ no false alarm


def test_numbers_and_schedules_are_reported_as_before():
    schedules = [mfx.warmup_cosine_decay_schedule(0.1, 2, total) for total in (10, 20)]
    old, new = (
        labelled(mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(one))) for one in schedules
    )
    assert messages_of(old, new) == []
    assert (
        messages_of(
            muon_for(net(), lr=0.1, momentum=0.9), muon_for(net(), lr=0.2, betas=(0.8, 0.9))
        )
        == []
    )
    as_tensors = labelled(mfx.as_tensors(mfx.chain(mfx.momentum(0.9), RATE)))
    assert messages_of(labelled(mfx.chain(mfx.momentum(0.5), RATE)), as_tensors) == []


RISING = mfx.linear_schedule(0.5, 0.9, 10)


@pytest.mark.parametrize(
    "tx",
    [
        mfx.momentum(RISING),
        mfx.scale_by_adam(b1=RISING, b2=RISING),
        mfx.scale_by_lion(b1=RISING),
        mfx.scale_by_rms(decay=RISING),
        mfx.clip_by_global_norm(RISING),
        mfx.cautious(mfx.momentum(RISING)),
    ],
    ids=repr,
)
def test_a_number_with_a_range_may_be_a_schedule(tx: mfx.Transform):
    assert messages_of(labelled(mfx.chain(tx, RATE)), labelled(mfx.chain(tx, RATE))) == []


def test_another_order_of_parameters_groups_and_labels_is_no_other_chain():
    model = net()
    named = list(model.named_parameters())
    options: dict[str, Any] = {"labels": mfx.default_labels(model)}
    old, new = muon_for(named, **options), muon_for(named[::-1], **options)
    assert messages_of(old, new) == []
    new.param_groups.reverse()
    assert messages_of(old, new) == []
    saved = old.state_dict()
    saved["param_groups"].reverse()
    assert chain_messages(lambda: new.load_state_dict(saved)) == []


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_and_added_parameters_are_no_other_chain(frozen: int):
    """The views and labels of the chain then have other parameters."""
    old, model = muon_for(net()), net()
    model[frozen].requires_grad_(requires_grad=False)
    new = muon_for(model)
    assert messages_of(old, new) == []
    assert messages_of(new, muon_for(net())) == []
    model[frozen].requires_grad_()
    new.add_param_group({"params": list(model[frozen].parameters())})
    saved = new.state_dict()
    with pytest.raises(ValueError, match="groups"):  # its own group, as before
        old.load_state_dict(saved)
    assert messages_of(new, new) == []
    thawed = muon_for(frozen_net := net())
    assert messages_of(thawed, muon_for(frozen_net)) == []


def test_an_added_group_is_compared_with_a_run_that_adds_it_too():
    def with_added(**options: Any) -> mfx.Muon:
        model = net()
        model[1].requires_grad_(requires_grad=False)
        optimizer = muon_for(model, **options)
        model[1].requires_grad_()
        optimizer.add_param_group({"params": [model[1].weight]})
        return optimizer

    assert messages_of(with_added(), with_added()) == []
    (message,) = messages_of(with_added(), with_added(orthogonalize=mfx.orthogonalize()))
    assert "orthogonalize.view" in message


class Wrapped(nn.Module):
    """A model under a wrapper that adds a prefix to the names, as DistributedDataParallel and torch.compile do."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, net())


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_names_of_a_wrapped_model_and_renamed_ones_are_no_other_chain(prefix: str):
    wrapped, plain = muon_for(Wrapped(prefix)), muon_for(net())
    assert messages_of(wrapped, plain) == []
    assert messages_of(plain, wrapped) == []
    other = muon_for(Wrapped("encoder"))
    rename = {str(index): f"encoder.{index}" for index in range(4)}
    assert messages_of(muon_for(net()), other, rename=rename) == []
    assert messages_of(muon_for(net(), orthogonalize=mfx.orthogonalize()), other, rename=rename)


def test_masks_by_name_and_outer_masks_are_no_other_chain():
    def optimizer_for(names: list[str]) -> mfx.TransformOptimizer:
        params = {name: nn.Parameter(torch.ones(2)) for name in names}
        mask = {name: name != "b" for name in names}
        tx = mfx.chain(
            mfx.masked(mfx.momentum(0.9), mask), mfx.add_decayed_weights(0.1, mask=mask), RATE
        )
        return mfx.TransformOptimizer(
            params, tx, model=nn.ParameterDict({**params, "d": torch.ones(2)})
        )

    assert messages_of(optimizer_for(["a", "b", "c"]), optimizer_for(["c", "b", "a"])) == []
    old, new = optimizer_for(["a", "b"]), optimizer_for(["a", "b"])
    assert messages_of(old, new) == []


def test_offload_and_a_copy_are_no_other_chain():
    tx = mfx.chain(mfx.momentum(0.9), RATE)
    model = net()
    offloaded = mfx.TransformOptimizer(model, offload(tx))
    assert messages_of(offloaded, mfx.TransformOptimizer(net(), tx)) == []
    optimizer = muon_for(net())
    assert messages_of(copy.deepcopy(optimizer), optimizer) == []


# -------------------------------------------------------------------------------------------------------- the record


def test_the_record_is_in_state_dicts_only_and_is_json():
    optimizer = muon_for(net())
    saved = optimizer.state_dict()
    record = json.loads(saved["param_groups"][0]["chain_code"])
    assert record[0] == 3  # parameters
    assert record[1][0].startswith("chain(momentum(), orthogonalize(")
    optimizer.load_state_dict(saved)
    assert all(
        "chain_code" not in group for group in [*optimizer.param_groups, *optimizer.saved_groups()]
    )


WITHOUT_VIEW = {"orthogonalize": mfx.orthogonalize()}


@pytest.mark.parametrize(
    ("before", "now"), [({}, WITHOUT_VIEW), (WITHOUT_VIEW, {})], ids=["view removed", "view added"]
)
@pytest.mark.parametrize("from_rank_0", [False, True])
@on_ranks(4)  # all processes of the tests, because torch sends from rank 0 in the default group
def test_a_full_state_dict_of_more_or_fewer_chains_is_compared_on_all_ranks(
    here: Here, from_rank_0: bool, before: dict[str, Any], now: dict[str, Any]
):
    """torch merges a full state dict item by item with the state dict of the new optimizer."""
    saved = muon_for(alone := net(), **before)
    full = get_optimizer_state_dict(alone, saved, options=StateDictOptions(full_state_dict=True))
    model = net()
    for layer in model:
        fully_shard(layer, mesh=here.mesh)
    new = muon_for(model, **now)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    (message,) = chain_messages(lambda: set_optimizer_state_dict(model, new, full, options=options))
    assert "'1.weight', orthogonalize.view" in message


def test_a_flattened_state_dict_is_not_compared():
    """torch leaves the record out when it loads one."""
    old, new = (
        labelled(mfx.chain(mfx.momentum(0.9), RATE)),
        labelled(mfx.chain(mfx.momentum(nesterov=False), RATE)),
    )
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model_of(old), old, options=flattened)
    load = functools.partial(set_optimizer_state_dict, model_of(new), new, saved, options=flattened)
    assert chain_messages(load) == []


def test_a_load_is_complete_if_its_warning_is_turned_into_an_error():
    old, new = (
        labelled(mfx.chain(mfx.momentum(0.9), RATE)),
        labelled(mfx.chain(mfx.momentum(nesterov=False), RATE)),
    )
    old.param_groups[0]["lr"] = 0.25
    saved_groups = old.state_dict()["param_groups"]
    with warnings.catch_warnings(action="ignore"):
        warnings.filterwarnings("error", message=".*another chain")
        with pytest.raises(UserWarning, match="another chain"):
            new.load_transform_state(old.transform_state, saved_groups)
    assert new.param_groups[0]["lr"] == 0.25


def model_of(optimizer: mfx.TransformOptimizer) -> nn.Sequential:
    """A model with the parameters of an optimizer from `labelled`, which has them under the same names."""
    model = net()
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            layer, _, attribute = name.partition(".")
            setattr(model[int(layer)], attribute, param)
    return model


# ----------------------------------------------------------------------------------- torch.distributed.checkpoint

STORAGES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "torch's": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "muonfx's": (mfx.checkpoint.Writer, mfx.checkpoint.Reader),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.10's own use of it
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_record_survives_dcp(storage: str, options: dict[str, Any]):
    writer, reader = STORAGES[storage]
    path = Path(tempfile.mkdtemp())
    old, given = labelled(mfx.chain(mfx.momentum(0.9), RATE)), StateDictOptions(**options)
    saved = get_optimizer_state_dict(model_of(old), old, options=given)
    dcp.save({"optimizer": saved}, storage_writer=writer(path))

    def load(new: mfx.TransformOptimizer) -> None:
        state = {"optimizer": get_optimizer_state_dict(model_of(new), new, options=given)}
        dcp.load(state, storage_reader=reader(path))
        set_optimizer_state_dict(model_of(new), new, state["optimizer"], options=given)

    assert chain_messages(lambda: load(labelled(mfx.chain(mfx.momentum(0.9), RATE)))) == []
    (message,) = chain_messages(
        lambda: load(labelled(mfx.chain(mfx.momentum(0.9, nesterov=False), RATE)))
    )
    assert "momentum.nesterov: not set in the checkpoint, False here" in message


@pytest.mark.parametrize("storage", STORAGES)
@on_ranks(2)
def test_all_ranks_report_another_chain(here: Here, storage: str, tmp_path: Path):
    """Also if one process loads the whole state dict: the layout is no part of the record."""
    writer, reader = STORAGES[storage]

    def sharded(**options: Any) -> tuple[nn.Module, mfx.Muon]:
        model = net()
        for layer in model:
            fully_shard(layer, mesh=here.mesh)
        return model, muon_for(model, **options)

    model, old = sharded()
    state = {"optimizer": get_optimizer_state_dict(model, old)}
    dcp.save(state, storage_writer=writer(tmp_path), process_group=here.group)

    def load(**options: Any) -> list[str]:
        model, new = sharded(**options)
        loaded = {"optimizer": get_optimizer_state_dict(model, new)}
        dcp.load(loaded, storage_reader=reader(tmp_path), process_group=here.group)
        return chain_messages(lambda: set_optimizer_state_dict(model, new, loaded["optimizer"]))

    assert load() == []
    (message,) = load(orthogonalize=mfx.orthogonalize())
    assert (
        f"'1.weight', orthogonalize.view: MatrixView('{FUSED}') in the checkpoint, not set here"
        in message
    )
    whole = get_optimizer_state_dict(model, old, options=StateDictOptions(full_state_dict=True))
    if here.rank == 0:
        assert (
            chain_messages(lambda: set_optimizer_state_dict(alone := net(), muon_for(alone), whole))
            == []
        )
