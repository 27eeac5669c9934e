"""State dicts of optimizers that dcp.save has written: `load` and `load_changed` read them as what `save` writes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import muonfx as mfx
from tests.checkpoint.common import assert_same_tree
from tests.processes import ROOT, Here, World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ck = mfx.checkpoint

LABELS = {"1.weight": "muon.inner", "3.weight": "muon.inner", "4.weight": "muon.last"}
"""Dots, which also divide the levels of the keys in a state dict."""

LAST_IS_ADAMW = {"1.weight": "muon", "3.weight": "muon"}


def model_of(here: Here | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 7)
    )
    if here is not None:
        fully_shard(model[1], mesh=here.mesh)
        fully_shard(model, mesh=here.mesh)
    return model


def train(model: nn.Module, optimizer: Any, steps: range = range(3)) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        model(torch.randint(7, (8,), generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recipe(model: nn.Module, labels: dict[str, str]) -> mfx.Transform:
    rules = {name: labels.get(name, "adamw") for name, _ in model.named_parameters()}
    return mfx.muon_with_adamw(0.02, 0.003, labels=rules)


def with_dots(model: nn.Module) -> mfx.Transform:
    muon = mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1))
    transforms = {"muon.inner": muon, "muon.last": muon, "adamw": mfx.adamw(0.003)}
    return mfx.partition(
        transforms, {name: LABELS.get(name, "adamw") for name, _ in model.named_parameters()}
    )


def with_soap(model: nn.Module) -> mfx.Transform:
    soap = mfx.chain(mfx.contrib.scale_by_soap(), mfx.scale(-0.01))
    labels = {
        name: "soap" if param.ndim == 2 else "adamw" for name, param in model.named_parameters()
    }
    return mfx.partition({"soap": soap, "adamw": mfx.adamw(0.003)}, labels)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def trace_records() -> mfx.InitAndUpdate:
    """A momentum whose state has a dict for each parameter: the parameter is not the last level of a name."""

    def init(params: mfx.PyTree) -> dict[str, dict[str, torch.Tensor]]:
        return {name: {"sum": torch.zeros_like(param)} for name, param in params.items()}

    def update(
        updates: mfx.PyTree, state: mfx.PyTree, params: mfx.PyTree = None
    ) -> tuple[mfx.PyTree, mfx.PyTree]:
        state = {name: {"sum": state[name]["sum"] + update} for name, update in updates.items()}
        return {name: record["sum"] for name, record in state.items()}, state

    return init, update


CHAINS: dict[str, Callable[[nn.Module], mfx.Transform]] = {
    "recipe": lambda model: recipe(model, LAST_IS_ADAMW),
    "labels with dots": with_dots,
    "a schedule": lambda _: mfx.adamw(mfx.linear_schedule(0.01, 0.0, 9)),
    "eight bits": lambda _: mfx.chain(mfx.momentum(0.9, dtype=mfx.int8()), mfx.scale(-0.1)),
    "accumulate": lambda model: mfx.accumulate(recipe(model, LAST_IS_ADAMW), every=2),
    "skip_nonfinite": lambda _: mfx.skip_nonfinite(mfx.adamw(0.003)),
    "soap": with_soap,
    "records": lambda _: mfx.chain(trace_records(), mfx.scale(-0.1)),
    "prodigy": lambda _: mfx.chain(mfx.contrib.scale_by_prodigy(), mfx.scale(-1.0)),
    "ema_params": lambda model: mfx.chain(recipe(model, LAST_IS_ADAMW), mfx.ema_params(0.9)),
}


def save_by_dcp(path: Path, model: nn.Module, optimizer: Any, here: Here | None = None) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "epoch": 7,
    }
    save_state(path, state, here)


def save_state(path: Path, state: dict[str, Any], here: Here | None = None) -> None:
    group = None if here is None else here.group
    dcp.save(
        state, storage_writer=ck.Writer(path, step=3), process_group=group, no_dist=here is None
    )


def test_the_parameters_of_a_model_are_found_by_the_renaming_of_the_error(tmp_path: Path) -> None:
    model = model_of()
    save_by_dcp(tmp_path, model, mfx.TransformOptimizer(model, mfx.adamw(0.003)))
    like = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    with pytest.raises(ck.MismatchError, match=r"rename=\{'model': 'params'\}$"):
        ck.load_params(tmp_path, like)
    loaded = ck.load_params(tmp_path, like, rename={"model": "params"})
    assert all(torch.equal(loaded[name], param) for name, param in model.named_parameters())


@pytest.mark.parametrize("name", CHAINS)
def test_an_optimizer_is_loaded_as_from_its_own_checkpoint(name: str, tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.TransformOptimizer(model, CHAINS[name](model))
    train(model, saved)
    saved.param_groups[0]["weight_decay"] = 0.7
    save_by_dcp(tmp_path / "dcp", model, saved)
    ck.save(tmp_path / "own", saved, step=3)
    states: list[Any] = []
    groups: list[Any] = []
    for source in ("dcp", "own"):
        for load in (ck.load, ck.load_changed):
            optimizer = mfx.TransformOptimizer(model, CHAINS[name](model))
            with warnings.catch_warnings(action="ignore"):
                result = load(tmp_path / source, optimizer)
            if isinstance(result, ck.Continuation):
                assert not result.new
                assert not result.moved
                assert not result.dropped
                assert result.groups == "param_groups: loaded"
            states.append(optimizer.transform_state)
            groups.append(optimizer.saved_groups())
    for state in states:
        assert_same_tree(state, saved.transform_state)
    assert groups == [groups[-1]] * 4
    assert groups[0][0]["weight_decay"] == 0.7


def test_another_chain_is_a_warning_of_load_and_none_of_load_changed(tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.TransformOptimizer(model, mfx.adamw(0.003))
    train(model, saved)
    save_by_dcp(tmp_path, model, saved)
    other = mfx.adamw(0.003, nesterov=True)
    with pytest.warns(
        UserWarning, match="another chain.*nesterov: not set in the checkpoint, True here"
    ):
        ck.load(tmp_path, mfx.TransformOptimizer(model, other))
    with warnings.catch_warnings(action="error"):
        ck.load_changed(tmp_path, mfx.TransformOptimizer(model, other))


def changed(model: nn.Module) -> mfx.TransformOptimizer:
    """The last weight has moved to AdamW, a layer is frozen, and the gradients are clipped."""
    model[1].requires_grad_(False)
    tx = mfx.chain(mfx.clip_by_global_norm(1.0), recipe(model, LAST_IS_ADAMW))
    return mfx.TransformOptimizer(model, tx)


def test_the_account_of_a_changed_run_is_that_of_its_own_checkpoint(tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.TransformOptimizer(model, recipe(model, {**LAST_IS_ADAMW, "4.weight": "muon"}))
    train(model, saved)
    save_by_dcp(tmp_path / "dcp", model, saved)
    ck.save(tmp_path / "own", saved, step=3)
    expected = ck.load_changed(tmp_path / "own", changed(model))
    account = ck.load_changed(tmp_path / "dcp", changed(model))
    assert str(account) == str(expected)
    assert "partition/adamw/scale_by_adam/count" in account.moved
    assert "last_epoch=2" in account.groups
    assert_same_tree(account.state, expected.state)


def test_a_step_count_of_another_chain_is_found_without_its_name(tmp_path: Path) -> None:
    """The saved count is an entry of every parameter, and the new chain has it on another level."""
    model = nn.Linear(3, 2)
    saved = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    model(torch.ones(4, 3)).sum().backward()
    saved.step()
    save_by_dcp(tmp_path, model, saved)
    with pytest.warns(UserWarning, match="saved with other numbers"):
        account = ck.load_changed(
            tmp_path, mfx.TransformOptimizer(model, mfx.chain(("inner", mfx.adamw(0.2))))
        )
    assert account.moved["inner/scale_by_adam/count"] == "scale_by_adam/count"
    assert not account.new
    assert int(account.state["inner"]["scale_by_adam"].count) == 1


def test_parameters_may_have_numbers_for_names_or_for_keys(tmp_path: Path) -> None:
    """`optimizer.state_dict()` has numbers as keys, which DCP writes as texts."""
    params = {"0": nn.Parameter(torch.ones(3, 2)), "scale": nn.Parameter(torch.tensor(1.0))}
    tx = mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.1))
    saved = mfx.TransformOptimizer(params, tx)
    for param in params.values():
        param.grad = torch.full_like(param, 2.0)
    saved.step()
    save_state(tmp_path, {"optimizer": saved.state_dict()})
    loaded = mfx.TransformOptimizer(params, tx)
    ck.load(tmp_path, loaded)
    assert_same_tree(loaded.transform_state, saved.transform_state)


def test_a_wrapped_model_is_the_same_model(tmp_path: Path) -> None:
    model = model_of()
    compiled = torch.compile(model)
    saved = mfx.Muon(compiled, lr=0.1)
    train(model, saved)
    save_by_dcp(tmp_path, model, saved)
    loaded = mfx.Muon(model, lr=0.1)
    assert not ck.load_changed(tmp_path, loaded).new
    loaded_again = mfx.Muon(torch.nn.DataParallel(model), lr=0.1)
    assert not ck.load_changed(tmp_path, loaded_again).new


# -------------------------------------------------------------------------------------------------------------- errors


def check_refused(path: Path, model: nn.Module, reason: str) -> None:
    """Both functions raise, and the optimizer is as it was."""
    optimizer = mfx.Muon(model, lr=0.3)
    before = mfx.tree.map(torch.clone, optimizer.transform_state)
    for load in (ck.load, ck.load_changed):
        with pytest.raises(ck.MismatchError, match=reason):
            load(path, optimizer)
    assert_same_tree(optimizer.transform_state, before)


@pytest.mark.parametrize("saved_by", ["save", "dcp.save"])
def test_load_names_load_changed_for_changed_labels(saved_by: str, tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.TransformOptimizer(model, recipe(model, LAST_IS_ADAMW))
    train(model, saved)
    if saved_by == "save":
        ck.save(tmp_path, saved)
    else:
        save_by_dcp(tmp_path, model, saved)
    changed = mfx.TransformOptimizer(model, recipe(model, {**LAST_IS_ADAMW, "4.weight": "muon"}))
    advice = r"labels, layers or transforms have changed since: mfx\.checkpoint\.load_changed\(path, optimizer\) loads"
    for arguments in ({}, {"allow_other_chain": True}):
        with pytest.raises(ck.MismatchError, match=advice) as caught:
            ck.load(tmp_path, changed, **arguments)
        assert str(caught.value).count("account of the rest") == 1
    assert ck.load_changed(tmp_path, changed).new == ("muon/momentum/trace/4.weight",)


@pytest.mark.parametrize("change", ["labels", "groups"])
def test_dcp_load_of_a_changed_optimizer_raises_what_the_page_says(
    change: str, tmp_path: Path
) -> None:
    """The planner of torch raises it before the `Reader` is called, so only the page can name `load_changed`."""
    model = model_of()
    saved = mfx.TransformOptimizer(model, recipe(model, LAST_IS_ADAMW))
    changed = mfx.TransformOptimizer(model, recipe(model, {**LAST_IS_ADAMW, "4.weight": "muon"}))
    if change == "groups":
        named = list(model.named_parameters())
        saved = mfx.TransformOptimizer(model, mfx.adamw(0.003))
        changed = mfx.TransformOptimizer(
            [{"params": named[:2]}, {"params": named[2:]}], mfx.adamw(0.003)
        )
    train(model, saved)
    save_by_dcp(tmp_path, model, saved)
    error = "Missing key in checkpoint state_dict: "
    key = {"labels": "optimizer.state.4.weight.muon.", "groups": "optimizer.param_groups.1."}[
        change
    ]
    state = {"optimizer": get_optimizer_state_dict(model, changed)}
    with pytest.raises(CheckpointException, match=re.escape(error + key)):
        dcp.load(state, storage_reader=ck.Reader(tmp_path), no_dist=True)
    for page in ("changing-a-run", "sharded-models"):
        assert f"`{error}...`" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert ck.load_changed(tmp_path, changed).kept


def test_a_flattened_state_dict_is_refused_with_the_way_to_load_it(tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.Muon(model, lr=0.1)
    train(model, saved)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    save_state(tmp_path, {"optimizer": get_optimizer_state_dict(model, saved, options=options)})
    check_refused(
        tmp_path,
        model,
        r"flatten_optimizer_state_dict=True.*by dcp\.load and set_optimizer_state_dict, save it",
    )

    # The way that the message names.
    state = {"optimizer": get_optimizer_state_dict(model, mfx.Muon(model, lr=0.1), options=options)}
    dcp.load(state, storage_reader=ck.Reader(tmp_path), no_dist=True)
    loaded = mfx.Muon(model, lr=0.1)
    set_optimizer_state_dict(model, loaded, state["optimizer"], options=options)
    account = ck.load_changed(ck.save(tmp_path / "own", loaded), mfx.Muon(model, lr=0.1))
    assert_same_tree(account.state, saved.transform_state)


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.Muon(model, lr=0.1)
    train(model, saved)
    state = get_optimizer_state_dict(model, saved)
    save_state(tmp_path, {"first": state, "second": state})
    check_refused(tmp_path, model, r"several optimizers, 'first', 'second'.*nothing was loaded")


def test_a_state_alone_is_advised_to_pass_the_optimizer(tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.Muon(model, lr=0.1)
    train(model, saved)
    save_by_dcp(tmp_path, model, saved)
    with pytest.raises(
        ck.MismatchError, match="state dict of an optimizer: pass an optimizer as `like`"
    ):
        ck.load_changed(
            tmp_path,
            saved.tx.init({name: param.detach() for name, param in model.named_parameters()}),
        )


def test_an_optimizer_of_torch_has_nothing_to_keep(tmp_path: Path) -> None:
    model = model_of()
    saved = torch.optim.AdamW(model.parameters())
    train(model, saved)
    save_by_dcp(tmp_path, model, saved)
    optimizer = mfx.Muon(model, lr=0.3)
    message = r"(?s)no leaf of the checkpoint fits.*'exp_avg/0\.weight'.*torch\.optim\.AdamW.*convert.*load_changed"
    with pytest.raises(ck.MismatchError, match=message):
        ck.load_changed(tmp_path, optimizer)


# --------------------------------------------------------------------------------------------------------------- ranks


def save_on_ranks(here: Here, path: Path) -> None:
    model = model_of(here)
    optimizer = mfx.TransformOptimizer(model, recipe(model, {**LAST_IS_ADAMW, "4.weight": "muon"}))
    train(model, optimizer)
    save_by_dcp(path, model, optimizer, here)


def load_on_ranks(here: Here | None, path: Path) -> dict[str, Any]:
    model = model_of(here)
    optimizer = changed(model)
    account = ck.load_changed(path, optimizer)
    trace = account.state["partition"]["muon"]["momentum"].trace["3.weight"]
    whole = getattr(trace, "full_tensor", lambda: trace)()
    return {"account": str(account), "trace": whole.detach().clone()}


@pytest.mark.dist
def test_ranks_load_what_other_ranks_have_saved(world: World, tmp_path: Path) -> None:
    world.check(2, save_on_ranks, path=tmp_path)
    expected = load_on_ranks(None, tmp_path)
    assert "muon/momentum/trace/3.weight" in expected["account"]
    for found in world.check(2, load_on_ranks, path=tmp_path):
        assert found["account"] == expected["account"]
        assert torch.equal(found["trace"], expected["trace"])
