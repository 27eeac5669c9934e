"""The law of wrapped models: what is saved under any wrappers loads under any other, bit for bit."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import muonfx as mfx
from muonfx.checkpoint import MismatchError
from tests.checkpoint.common import assert_same_tree, bits, grads_like

ck = mfx.checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Net(nn.Module):
    """A model with parts that are called as wrappers are, honestly."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.module, self.head = nn.Embedding(8, 4), Block(), nn.Linear(4, 8)


def checkpointed(model: nn.Module) -> nn.Module:
    inner: Any = model
    while not isinstance(inner, Net):
        inner = next(iter(inner.children()))
    inner.module.up = checkpoint_wrapper(inner.module.up)
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "parallel": nn.DataParallel,
    "compiled": torch.compile,
    "checkpointed": checkpointed,
    "compiled, parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "averaged": torch.optim.swa_utils.AveragedModel,
    "all": lambda model: nn.DataParallel(torch.compile(nn.DataParallel(checkpointed(model)))),
}
PAIRS = list(itertools.product(WRAPPERS, WRAPPERS))


def model_of(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    return WRAPPERS[wrapper](Net())


def transform_for(model: nn.Module) -> mfx.Transform:
    return mfx.muon_with_adamw(
        0.1, 0.01, labels=mfx.default_labels(model), orthogonalize=mfx.orthogonalize(dtype=torch.float32)
    )


def functional(wrapper: str) -> tuple[mfx.Transform, dict[str, torch.Tensor], Any]:
    """Parameters by the wrapped names, and a state after a step with the gradients of the plain order."""
    model = model_of(wrapper)
    params = {name: param.detach() for name, param in model.named_parameters()}
    tx = transform_for(model)
    grads = dict(zip(params, grads_like(list(params.values()), 1), strict=True))
    _, state = tx.update(grads, tx.init(params), params)
    return tx, params, state


def test_a_checkpoint_under_any_wrappers_has_plain_names_and_loads_under_any_other(tmp_path: Path):
    made = {wrapper: functional(wrapper) for wrapper in WRAPPERS}
    plain = sorted(f"params/{name}" for name in made["plain"][1])
    for wrapper, (tx, params, state) in made.items():
        names = sorted(ck.read(ck.save(tmp_path / wrapper, state, tx=tx, params=params)))
        assert [name for name in names if name.startswith("params/")] == plain
        assert "muon/momentum/trace/up.weight" in names  # alone there, and within `module`
        assert list(mfx.spec(tx, params)) == [name for name in names if not name.startswith("params/")]
    for one, other in PAIRS:
        tx, params, state = made[other]
        assert_same_tree(ck.load(tmp_path / one, like=tx.init(params), tx=tx), state)
        assert_same_tree(ck.load_params(tmp_path / one, like=params), params)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[bytes]:
    params = list(model.parameters())
    for param, grad in zip(params, grads_like([param.detach() for param in params], seed), strict=True):
        param.grad = grad
    optimizer.step()
    return [bits(param) for param in params]


def test_an_optimizers_state_dict_under_any_wrappers_loads_under_any_other():
    models = {wrapper: model_of(wrapper) for wrapper in WRAPPERS}
    made = {wrapper: mfx.TransformOptimizer(model, transform_for(model)) for wrapper, model in models.items()}
    saved, values, expected = {}, [], []
    for wrapper, optimizer in made.items():
        step(models[wrapper], optimizer, 1)
        saved[wrapper] = copy.deepcopy(optimizer.state_dict())
        values = [param.detach().clone() for param in models[wrapper].parameters()]
        expected = step(models[wrapper], optimizer, 2)
    for one, other in PAIRS:
        for param, value in zip(models[other].parameters(), values, strict=True):
            param.data.copy_(value)
        made[other].load_state_dict(saved[one])
        assert step(models[other], made[other], 2) == expected, (one, other)


def test_labels_are_found_under_any_wrappers():
    parts = {"muon": mfx.momentum(), "adamw": mfx.scale_by_adam()}
    plain = mfx.partition(parts, mfx.default_labels(Net()))
    by_hand = mfx.partition(parts, dict.fromkeys(dict(Net().named_parameters()), "adamw"))
    for one, other in PAIRS:
        params = {name: param.detach() for name, param in model_of(other).named_parameters()}
        tx = mfx.partition(parts, mfx.default_labels(model_of(one)))
        state = tx.init(params)
        assert (len(state["muon"].trace), len(state["adamw"].mu)) == (2, 5)
        assert tx.fingerprint == plain.fingerprint
        assert mfx.partition(parts, dict.fromkeys(params, "adamw")).fingerprint == by_hand.fingerprint


def test_names_that_are_equal_without_wrappers_are_refused(tmp_path: Path):
    leaf = nn.Parameter(torch.zeros(2))
    both = {"up": leaf, "_orig_mod.up": nn.Parameter(torch.zeros(2))}
    with pytest.raises(ValueError, match="two leaves have the name 'trace/up' when the prefixes of wrappers"):
        ck.save(tmp_path / "a", mfx.momentum().init({name: param.detach() for name, param in both.items()}))
    assert not (tmp_path / "a").exists()


def test_an_optimizers_parameters_are_renamed_on_load():
    old, new = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Module()
    new.first, new.second = nn.Linear(4, 4), nn.Linear(4, 4)
    tx = mfx.adamw(0.1)
    one, other = mfx.TransformOptimizer(old, tx), mfx.TransformOptimizer(new, tx)
    step(old, one, 1)
    saved = one.state_dict()
    before = mfx.tree.map(torch.clone, other.transform_state)
    for rename, problem in (
        (None, "has no 'first.bias'"),
        ({"0": "first"}, "has no 'second.bias'"),
        ({"0": "first", "1": "second", "2": "third"}, "there is no parameter '2'"),
        ({"0": "first", "1": "first"}, "would both be 'first.weight'"),
        ({"*.weight": "first"}, "same number of"),
    ):
        with pytest.raises(ValueError, match=problem):
            other.load_state_dict(saved, rename=rename)
        assert_same_tree(other.transform_state, before)
    levels = {"0": "first", "1": "second"}
    for rename in (levels, {"0.*": "first.*", "1.*": "second.*"}):
        other.load_state_dict(saved, rename=rename)
        mine, theirs = one.state[old[1].weight], other.state[new.second.weight]
        assert torch.equal(mine["scale_by_adam/mu"], theirs["scale_by_adam/mu"])
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in saved["param_groups"]]
    with pytest.raises(ValueError, match="the state dict has no 'param_names'"):
        other.load_state_dict({**saved, "param_groups": groups}, rename=levels)


def test_leaves_are_renamed_by_patterns(tmp_path: Path):
    tx, leaf = mfx.scale_by_adam(), torch.randn(3)
    state = tx.init({"encoder.a": leaf, "encoder.b": leaf, "head": leaf})._replace(
        mu=dict.fromkeys(("encoder.a", "encoder.b", "head"), leaf)
    )
    path = ck.save(tmp_path / "a", state)
    like = tx.init({"model.enc.a": leaf, "model.enc.b": leaf, "model.head": leaf})
    by_patterns = {"*/encoder.*": "*/model.enc.*", "*/head": "*/model.head"}
    back = ck.load(path, like=like, rename=by_patterns)
    assert torch.equal(back.mu["model.enc.b"], leaf)
    with pytest.raises(MismatchError, match=r"rename: .*both 'mu/encoder.a' and 'mu/encoder.b' would be 'mu/one'"):
        ck.load(path, like=like, rename={"*/encoder.a": "*/one", "*/encoder.b": "*/one"})
    with pytest.raises(MismatchError, match=r"rename: .* no leaf '_orig_mod"):
        ck.load(path, like=like, rename={"_orig_mod.x": "y"})


@pytest.mark.parametrize("what", ["allow_missing", "allow_extra"])
def test_a_pattern_that_allows_nothing_is_an_error(tmp_path: Path, what: str):
    state = {"trace": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    path = ck.save(tmp_path / "a", state)
    for pattern in ("tracer", ["trace", "*.c"], "trace/a*z"):
        with pytest.raises(MismatchError, match=f"{what}: .* matches no leaf"):
            ck.load(path, like=state, **{what: pattern})
    ck.load(path, like=state, **{what: ["trace/a", "*/b"]})  # they are there: the next checkpoint may lack them
