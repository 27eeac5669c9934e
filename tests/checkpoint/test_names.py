"""Names of leaves: readable and unique, the same under any wrappers, and renamed as an error prints it."""

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.checkpoint import MismatchError
from muonfx.checkpoint.names import PARAMS, in_section, name_of, named_leaves
from muonfx.select import default_labels_by_name
from muonfx.tree.renaming import new_names
from tests.checkpoint.common import assert_same_tree, bits, grads_like, trained

ENTRIES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.text("~/012-. _", max_size=5),
    st.integers(-(10**25), 10**25),
    st.sampled_from(["params", "__metadata__", "~2params", "0", "-1", "00", "", "~"]),
)
PATHS = st.lists(ENTRIES, max_size=4).map(tuple)


@given(PATHS, PATHS)
@example(("params",), ("~2params",))
@example(("__metadata__",), ())
@example(("",), ("a", "", "b"))
@example((0, "0"), ("0", 0))
def test_two_paths_have_two_names_outside_of_the_parameters(one, other):
    same = one == other and [type(entry) for entry in one] == [type(entry) for entry in other]
    assert (name_of(one) == name_of(other)) == same
    assert name_of(one) not in ("", "__metadata__")
    assert not in_section(name_of(one), PARAMS)


def test_parameters_stand_under_a_level_of_their_own():
    leaf = torch.zeros(1)
    assert [name for name, _ in named_leaves({"w": leaf, "params": leaf, "a/b": leaf}, PARAMS)] == [
        "params/a~1b",
        "params/params",
        "params/w",
    ]
    assert [name for name, _ in named_leaves({"w": leaf, "params": {"w": leaf}})] == ["~2params/w", "w"]
    assert [name for name, _ in named_leaves(leaf, PARAMS)] == ["params"]


@pytest.mark.filterwarnings("ignore:partition. no parameter has the label")
@pytest.mark.filterwarnings("ignore:chain. .* comes before .* has used them as final")
@given(
    kit.chains(max_size=3),
    st.integers(0, 3),
    st.sampled_from([mfx.clip_by_value(1.0), mfx.monitor("seen"), mfx.ema_params(0.5)]),
)
def test_names_do_not_change_when_another_transform_joins_the_chain(members, place, new):
    params = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    if new.name in {tx.name for tx in members}:
        return
    if new.name == "ema_params":  # a chain refuses it before the learning rate
        place = len(members)
    before = mfx.spec(mfx.chain(*members), params)
    after = mfx.spec(mfx.chain(*members[:place], new, *members[place:]), params)
    assert {name: after[name] for name in before} == before.leaves
    assert all(name.startswith(f"{new.name}/") for name in after if name not in before)


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


MODEL = {"h.0.fc.weight": torch.ones(3, 3), "h.1.fc.weight": torch.ones(3, 3), "wte.weight": torch.ones(4, 3)}


def recipe() -> mfx.Transform:
    return mfx.muon_with_adamw(0.1, orthogonalize=mfx.orthogonalize(dtype=torch.float32), labels=default_labels_by_name)


def printed(message: str) -> dict[str, str] | None:
    """The renaming in an error, read as a user would paste it."""
    found = re.search(r"^  if only the names of leaves differ: rename=(.*)$", message, re.MULTILINE)
    return None if found is None or "name in the checkpoint" in found[1] else eval(found[1])


CLIP = mfx.clip_by_global_norm(1.0)
ADAM = mfx.adamw(0.1)
ALL = dict.fromkeys(MODEL, "all")
WRAPPED = {
    "in a chain": (recipe(), lambda tx: mfx.chain(CLIP, tx)),
    "named": (recipe(), lambda tx: mfx.chain(CLIP, ("opt", tx))),
    "named chain": (ADAM, lambda tx: mfx.chain(CLIP, ("opt", tx))),
    "two chains": (recipe(), lambda tx: mfx.chain(CLIP, ("outer", mfx.chain(CLIP, ("inner", tx))))),
    "partition around": (ADAM, lambda tx: mfx.partition({"all": tx}, ALL)),
    "partition in a chain": (ADAM, lambda tx: mfx.chain(CLIP, mfx.partition({"all": tx}, ALL))),
    "accumulate": (recipe(), lambda tx: mfx.accumulate(tx, 2)),
    "skip_nonfinite": (recipe(), lambda tx: mfx.skip_nonfinite(tx)),
    "ema beside": (recipe(), lambda tx: mfx.chain(tx, mfx.ema_params(0.9))),
    "bare": (mfx.momentum(), lambda tx: mfx.chain(tx, mfx.scale(-1.0))),
    "suffix": (mfx.chain(("a", mfx.momentum()), ("a_2", mfx.momentum(0.5))), lambda tx: mfx.chain(CLIP, ("a", tx))),
}


@pytest.mark.parametrize(("inner", "wrap"), WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("into", [True, False], ids=["into", "out of"])
@pytest.mark.filterwarnings("ignore:accumulate|default_labels")
def test_the_printed_renaming_loads_a_recipe_into_another_chain_and_out_of_it(inner, wrap, into, tmp_path):
    outer = wrap(inner)
    source, target = (inner, outer) if into else (outer, inner)
    state = trained(source, MODEL)[1]
    path = ck.save(tmp_path / "saved", state, tx=source)
    like = target.init(MODEL)
    with pytest.raises(ck.MismatchError) as caught:
        ck.load(path, like=like, tx=target)
    rename = printed(str(caught.value))
    assert rename is not None
    loaded = ck.load(
        path, like=like, tx=target, rename=rename, allow_other_chain=True, allow_missing=into, allow_extra=not into
    )
    saved = ck.read(path)
    mine = ck.read(ck.save(tmp_path / "again", loaded))
    names, wrong = new_names({name: name for name in saved}, rename)
    assert not wrong
    shared = {new: old for old, new in names.items() if new in mine}
    # Every leaf of the recipe has arrived, bit for bit.
    assert len(shared) == min(len(saved), len(mine)) == len(tree.leaves(inner.init(MODEL)))
    for new, old in shared.items():
        assert torch.equal(mine[new], saved[old])


UNCLEAR = {
    "two of a kind": (mfx.momentum(), mfx.chain(("one", mfx.momentum()), ("other", mfx.momentum()))),
    "another transform": (mfx.chain(mfx.scale_by_lion(), CLIP), mfx.chain(mfx.scale_by_adam(), CLIP)),
    "another field": (mfx.chain(mfx.momentum(), CLIP), mfx.chain(("opt", mfx.chain(mfx.scale_by_lion(), CLIP)))),
}


@pytest.mark.parametrize(("source", "target"), UNCLEAR.values(), ids=UNCLEAR)
def test_leaves_that_could_have_several_partners_or_have_none_are_not_guessed(source, target, tmp_path):
    path = ck.save(tmp_path / "saved", trained(source, MODEL)[1])
    with pytest.raises(ck.MismatchError) as caught:
        ck.load(path, like=target.init(MODEL))
    assert "what to do" in str(caught.value)
    assert printed(str(caught.value)) is None
