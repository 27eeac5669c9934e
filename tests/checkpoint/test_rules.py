"""Rules of loading: readable, unique names; widening without a word, all else by name only, and one error for all."""

import copy
import itertools
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.checkpoint import MismatchError, NotFoundError
from muonfx.checkpoint.leaves import PARAMS, in_section, name_of, named_tensors
from muonfx.polar import policy
from muonfx.routing import default_labels_by_name
from muonfx.tree.dtypes import NAMES, widens
from tests.checkpoint.common import assert_same_tree, bits, grads_like, small_params, trained

ck = mfx.checkpoint
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
    assert list(named_tensors({"w": leaf, "params": leaf, "a/b": leaf}, PARAMS)) == [
        "params/a~1b",
        "params/params",
        "params/w",
    ]
    assert list(named_tensors({"w": leaf, "params": {"w": leaf}})) == ["~2params/w", "w"]
    assert list(named_tensors(leaf, PARAMS)) == ["params"]


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
        0.1,
        0.01,
        labels=mfx.default_labels(model),
        orthogonalize=mfx.orthogonalize(dtype=torch.float32),
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
        assert list(mfx.spec(tx, params)) == [
            name for name in names if not name.startswith("params/")
        ]
    for one, other in PAIRS:
        tx, params, state = made[other]
        assert_same_tree(ck.load(tmp_path / one, like=tx.init(params), tx=tx), state)
        assert_same_tree(ck.load_params(tmp_path / one, like=params), params)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[bytes]:
    params = list(model.parameters())
    for param, grad in zip(
        params, grads_like([param.detach() for param in params], seed), strict=True
    ):
        param.grad = grad
    optimizer.step()
    return [bits(param) for param in params]


def test_an_optimizers_state_dict_under_any_wrappers_loads_under_any_other():
    models = {wrapper: model_of(wrapper) for wrapper in WRAPPERS}
    made = {
        wrapper: mfx.TransformOptimizer(model, transform_for(model))
        for wrapper, model in models.items()
    }
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
        assert (
            mfx.partition(parts, dict.fromkeys(params, "adamw")).fingerprint == by_hand.fingerprint
        )


def test_names_that_are_equal_without_wrappers_are_refused(tmp_path: Path):
    leaf = nn.Parameter(torch.zeros(2))
    both = {"up": leaf, "_orig_mod.up": nn.Parameter(torch.zeros(2))}
    with pytest.raises(
        ValueError, match="two leaves have the name 'trace/up' when the prefixes of wrappers"
    ):
        ck.save(
            tmp_path / "a",
            mfx.momentum().init({name: param.detach() for name, param in both.items()}),
        )
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
        (None, "lacks 'first.bias'"),
        ({"0": "first"}, "lacks 'second.bias'"),
        ({"0": "first", "1": "second", "2": "third"}, "'2' matches no parameter"),
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
        assert torch.equal(mine["scale_by_adam.mu"], theirs["scale_by_adam.mu"])
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        for group in saved["param_groups"]
    ]
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
    with pytest.raises(
        MismatchError, match=r"rename: .*both 'mu/encoder.a' and 'mu/encoder.b' would be 'mu/one'"
    ):
        ck.load(path, like=like, rename={"*/encoder.a": "*/one", "*/encoder.b": "*/one"})
    with pytest.raises(MismatchError, match=r"rename: .*'_orig_mod\.x' matches no leaf"):
        ck.load(path, like=like, rename={"_orig_mod.x": "y"})


@pytest.mark.parametrize("what", ["allow_missing", "allow_extra"])
def test_a_pattern_that_allows_nothing_is_an_error(tmp_path: Path, what: str):
    state = {"trace": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    path = ck.save(tmp_path / "a", state)
    for pattern in ("tracer", ["trace", "*.c"], "trace/a*z"):
        with pytest.raises(MismatchError, match=f"{what}: .* matches no leaf"):
            ck.load(path, like=state, **{what: pattern})
    # They are there: the next checkpoint may lack them.
    ck.load(path, like=state, **{what: ["trace/a", "*/b"]})


MODEL = {
    "h.0.fc.weight": torch.ones(3, 3),
    "h.1.fc.weight": torch.ones(3, 3),
    "wte.weight": torch.ones(4, 3),
}


def recipe() -> mfx.Transform:
    return mfx.muon_with_adamw(
        0.1, orthogonalize=mfx.orthogonalize(dtype=torch.float32), labels=default_labels_by_name
    )


def printed(message: str) -> dict[str, str] | None:
    """The renaming in an error, read as a user would paste it."""
    found = re.search(r"^  if only the names of leaves differ: rename=(.*)$", message, re.MULTILINE)
    return None if found is None or "name in the checkpoint" in found[1] else eval(found[1])


@pytest.mark.parametrize("adds", [True, False], ids=["added", "removed"])
def test_the_printed_renaming_adds_and_removes_a_prefix_of_parameter_names(adds: bool, tmp_path):
    prefixed = {f"model.{name}": leaf for name, leaf in MODEL.items()}
    before, after = (MODEL, prefixed) if adds else (prefixed, MODEL)
    saved = trained(ADAM, before)[1]
    path = ck.save(tmp_path, saved)
    with pytest.raises(ck.MismatchError) as caught:
        ck.load(path, like=ADAM.init(after))
    loaded = ck.load(path, like=ADAM.init(after), rename=printed(str(caught.value)))
    assert_same_tree(tree.leaves(loaded), tree.leaves(saved))


CLIP = mfx.clip_by_global_norm(1.0)
ADAM = mfx.adamw(0.1)
ONE_LABEL = dict.fromkeys(MODEL, "all")
LABELS = {"adamw": "adamw", "muon": "muon"}
WRAPPED = {  # the transform, a wrapper of it, and the first levels of names inside and outside
    "in a chain": (recipe(), lambda tx: mfx.chain(CLIP, tx), LABELS, "partition/"),
    "named": (recipe(), lambda tx: mfx.chain(CLIP, ("opt", tx)), LABELS, "opt/"),
    "named chain": (
        ADAM,
        lambda tx: mfx.chain(CLIP, ("opt", tx)),
        {"scale_by_adam": "scale_by_adam"},
        "opt/",
    ),
    "two chains": (
        recipe(),
        lambda tx: mfx.chain(CLIP, ("outer", mfx.chain(CLIP, ("inner", tx)))),
        LABELS,
        "outer/inner/",
    ),
    "partition around": (
        ADAM,
        lambda tx: mfx.partition({"all": tx}, ONE_LABEL),
        {"scale_by_adam": "scale_by_adam"},
        "all/",
    ),
    "accumulate": (recipe(), lambda tx: mfx.accumulate(tx, 2), LABELS, "inner/"),
    "skip_nonfinite": (recipe(), lambda tx: mfx.skip_nonfinite(tx), LABELS, "inner/"),
    "ema beside": (recipe(), lambda tx: mfx.chain(tx, mfx.ema_params(0.9)), LABELS, "partition/"),
    "bare": (
        mfx.momentum(),
        lambda tx: mfx.chain(tx, mfx.scale(-1.0)),
        {"trace": "trace"},
        "momentum/",
    ),
    "suffix": (
        mfx.chain(("a", mfx.momentum()), ("a_2", mfx.momentum(0.5))),
        lambda tx: mfx.chain(CLIP, ("a", tx)),
        {"a": "a", "a_2": "a_2"},
        "a/",
    ),
}


@pytest.mark.parametrize(("inner", "wrap", "levels", "outside"), WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("into", [True, False], ids=["into", "out of"])
@pytest.mark.filterwarnings("ignore:accumulate|default_labels")
def test_a_recipe_is_found_in_another_chain_and_out_of_it(
    inner, wrap, levels, outside, into, tmp_path
):
    outer = wrap(inner)
    source, target = (inner, outer) if into else (outer, inner)
    path = ck.save(tmp_path / "saved", trained(source, MODEL)[1], tx=source)
    like = target.init(MODEL)
    with pytest.raises(ck.MismatchError, match="allow_other_chain=True, which loads "):
        ck.load(path, like=like, tx=target)
    allowed = {"allow_other_chain": True, "allow_missing": into, "allow_extra": not into}
    with pytest.warns(UserWarning, match="found other names than in `like`, loaded "):
        loaded = ck.load(path, like=like, tx=target, **allowed)
    outwards = {old: outside + new for old, new in levels.items()}
    rename = outwards if into else {new: old for old, new in outwards.items()}
    assert_same_tree(loaded, ck.load(path, like=like, tx=target, rename=rename, **allowed))
    # Without a warning: nothing is left to find.
    ck.load(path, like=loaded, tx=target, rename=rename, **allowed)


def adam_of(*names: str) -> mfx.Transform:
    """Adam for each parameter of `MODEL`, with the labels ``names`` in turn."""
    labels = dict(zip(MODEL, names, strict=True))
    return mfx.chain(
        mfx.partition({name: mfx.scale_by_adam() for name in names}, labels), mfx.scale(-0.1)
    )


SPLIT = {
    "in two": ("head", "rest", "rest"),
    "renamed": ("rest", "rest", "rest"),
    "in three": ("one", "two", "three"),
    "one label more": ("adamw", "head", "adamw"),
}


@pytest.mark.parametrize("labels", SPLIT.values(), ids=SPLIT)
@pytest.mark.parametrize("ready", [True, False], ids=["state", "spec"])
def test_a_label_that_is_split_keeps_the_state_of_each_parameter(labels, ready, tmp_path):
    before, after = adam_of("adamw", "adamw", "adamw"), adam_of(*labels)
    path = ck.save(tmp_path / "saved", trained(before, MODEL)[1], tx=before)
    like = after.init(MODEL) if ready else mfx.spec(after, MODEL)
    with pytest.warns(UserWarning, match="loaded 'partition/adamw' as 'partition/"):
        loaded = ck.load(path, like=like, tx=after, allow_other_chain=True)
    saved = ck.read(path)
    for name, label in zip(MODEL, labels, strict=True):
        state = loaded["partition"][label]
        assert torch.equal(state.mu[name], saved[f"partition/adamw/mu/{name}"])
        assert torch.equal(state.nu[name], saved[f"partition/adamw/nu/{name}"])
        assert torch.equal(state.count, saved["partition/adamw/count"])
    assert len({leaf.data_ptr() for leaf in tree.leaves(loaded)}) == len(tree.leaves(loaded))
    # The next update equals the update under the earlier label.
    old = before.update(MODEL, ck.load(path, like=before.init(MODEL), tx=before), MODEL)[0]
    new = after.update(MODEL, loaded, MODEL)[0]
    assert_same_tree(old, new)


def test_a_transform_more_keeps_the_others_and_is_named_in_the_error(tmp_path):
    before = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    state = trained(before, MODEL)[1]
    path = ck.save(tmp_path / "saved", state, tx=before)
    for after, new in (
        (
            mfx.chain(mfx.momentum(), mfx.scale_by_rms(), mfx.scale_by_learning_rate(0.1)),
            "scale_by_rms",
        ),
        (
            mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1), mfx.ema_params()),
            "ema_params",
        ),
    ):
        like = after.init(MODEL)
        with pytest.raises(MismatchError) as caught:
            ck.load(path, like=like, tx=after)
        (advice,) = re.findall(r"allow_missing=(\[.*\])$", str(caught.value), re.MULTILINE)
        assert eval(advice) == [new]
        loaded = ck.load(
            path, like=like, tx=after, allow_missing=eval(advice), allow_other_chain=True
        )
        assert_same_tree(loaded, {**like, "momentum": state["momentum"]})


UNCLEAR = {
    "two of a kind": (
        mfx.momentum(),
        mfx.chain(("one", mfx.momentum()), ("other", mfx.momentum())),
    ),
    "another transform": (
        mfx.chain(mfx.scale_by_lion(), CLIP),
        mfx.chain(mfx.scale_by_adam(), CLIP),
    ),
    "a part of its fields": (
        mfx.chain(mfx.scale_by_adam(), CLIP),
        mfx.chain(mfx.scale_by_lion(), CLIP),
    ),
    "another field": (
        mfx.chain(mfx.momentum(), CLIP),
        mfx.chain(("opt", mfx.chain(mfx.scale_by_lion(), CLIP))),
    ),
    "two labels in one": (adam_of("one", "two", "two"), adam_of("adamw", "adamw", "adamw")),
    "into a label that was there": (adam_of("one", "two", "two"), adam_of("two", "two", "two")),
}


@pytest.mark.parametrize(("source", "target"), UNCLEAR.values(), ids=UNCLEAR)
def test_leaves_that_could_have_several_partners_or_have_none_are_not_guessed(
    source, target, tmp_path
):
    path = ck.save(tmp_path / "saved", trained(source, MODEL)[1])
    for allow_extra in (False, True):
        with pytest.raises(ck.MismatchError) as caught:
            ck.load(path, like=target.init(MODEL), allow_other_chain=True, allow_extra=allow_extra)
        assert "missing:" in str(caught.value)
        assert "what to do" in str(caught.value)
        assert "which loads" not in str(caught.value)


W, B = "blocks.0.up.weight", "blocks.0.up.bias"


@pytest.fixture
def saved(tmp_path: Path):
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_adam())
    params, state = trained(tx, small_params())
    path = ck.save(tmp_path / "step-000000002", state, tx=tx, params=params, step=2)
    return path, tx, params, state


def test_issue_7746_a_bf16_model_with_fp32_momentum_resumes(tmp_path: Path):
    """bf16 parameters and gradients, momentum pinned to fp32: saved, loaded, and the next step is the next step."""
    tx = mfx.muon(1e-2, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    params, state = trained(tx, {"w": torch.randn(6, 4).bfloat16()})
    ck.save(tmp_path, state, tx=tx, params=params, step=2)
    params_again = ck.load_params(tmp_path, like={"w": torch.empty(6, 4, dtype=torch.bfloat16)})
    again = ck.load(tmp_path, like=mfx.spec(tx, params_again))
    assert again["momentum"].trace["w"].dtype == torch.float32
    assert_same_tree(again, state)
    grads = grads_like(params, 5)
    assert grads["w"].dtype == torch.bfloat16
    updates, after = tx.update(grads, again, params_again)
    assert updates["w"].dtype == torch.bfloat16
    assert after["momentum"].trace["w"].dtype == torch.float32
    assert_same_tree((updates, after), tx.update(grads, state, params))


def test_issue_7746_mirrored_bf16_momentum_in_an_fp32_run(tmp_path: Path):
    """bf16 momentum stays bf16 in an fp32 run that pins it so, widens into one that pins fp32, and never turns back."""
    half, full = mfx.momentum(dtype=torch.bfloat16), mfx.momentum(dtype=torch.float32)
    params, state = trained(half, {"w": torch.randn(6, 4)})
    ck.save(tmp_path / "half", state, params=params)
    again = ck.load(tmp_path / "half", like=mfx.spec(half, params))
    assert again.trace["w"].dtype == torch.bfloat16
    grads = grads_like(params, 5)
    assert_same_tree(half.update(grads, again, params), half.update(grads, state, params))
    wide = ck.load(tmp_path / "half", like=mfx.spec(full, params), allow_other_chain=True)
    assert_same_tree(wide.trace, {"w": state.trace["w"].float()})
    ck.save(tmp_path / "full", wide)
    with pytest.raises(
        MismatchError, match=r"narrowing: 'trace/w' is torch.float32 .* expected torch.bfloat16"
    ):
        ck.load(tmp_path / "full", like=mfx.spec(half, params))
    assert_same_tree(
        ck.load(tmp_path / "full", mfx.spec(half, params), cast={"trace": torch.bfloat16}), state
    )


ALL = [*NAMES]
SMALL = [dtype for dtype in ALL if dtype.itemsize <= 2 and dtype is not torch.bool]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


@pytest.mark.parametrize("old", SMALL, ids=str)
def test_widening_is_exact_for_every_value(old):
    values = every_value(old)
    wider = [new for new in ALL if new != old and widens(old, new)]
    assert wider
    for new in wider:
        back = values.to(new).to(old)
        # One NaN is as good as another.
        same = (back.view(torch.uint8) == values.view(torch.uint8)).view(len(values), -1).all(dim=1)
        assert (
            (same | values.to(torch.float64).isnan()).all() if old.is_floating_point else same.all()
        ), new


def test_nothing_widens_into_another_kind_or_into_less():
    for old in ALL:
        for new in ALL:
            if old != new and widens(old, new):
                assert (old.is_floating_point, old.is_complex) == (
                    new.is_floating_point,
                    new.is_complex,
                )
                assert new.itemsize > old.itemsize
                assert old is not torch.bool
    assert not widens(torch.int64, torch.float64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.float64),
        (torch.uint8, torch.int8),
        (torch.bool, torch.int64),
        (torch.float32, torch.complex64),
    ],
)
def test_widening_needs_no_word_and_nothing_else_is_cast_without_one(
    tmp_path: Path, old: torch.dtype, new: torch.dtype
):
    state = {"a": torch.ones(2, dtype=old), "b": torch.ones(2)}
    ck.save(tmp_path, state)
    like = {"a": torch.zeros(2, dtype=new), "b": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(MismatchError) as caught:
        ck.load(tmp_path, like=like)
    assert caught.value.problems == (f"narrowing: 'a' is {old} in the checkpoint, expected {new}",)
    assert f"cast={{'a': {new}}}" in str(caught.value)
    back = ck.load(tmp_path, like=like, cast={"a": new})
    assert_same_tree(back, mfx.tree.map(torch.ones_like, like))


def test_one_error_lists_everything_that_does_not_fit(saved):
    path, _, params, _ = saved
    other = mfx.chain(mfx.momentum(dtype=torch.bfloat16), mfx.scale_by_lion())
    wanted = {
        **{name: p for name, p in params.items() if name != B},
        "embed.weight": torch.zeros(9, 4),
    }
    with pytest.raises(MismatchError) as caught:
        ck.load(path, like=mfx.spec(other, wanted))
    problems, message = "\n".join(caught.value.problems), str(caught.value)
    for expected in (
        "chain:     momentum.dtype: not set in the checkpoint, torch.bfloat16 here",
        "chain:     scale_by_adam: scale_by_adam() in the checkpoint, not set here",
        "chain:     scale_by_lion: not set in the checkpoint, scale_by_lion() here",
        "missing:   'scale_by_lion/mu/embed.weight', (9, 4) float32, is not in the checkpoint",
        f"extra:     'momentum/trace/{B}' is in the checkpoint and not in `like`",
        "reshaped:  'momentum/trace/embed.weight' has shape (8, 4) in the checkpoint, expected (9, 4)",
        f"narrowing: 'momentum/trace/{W}' is torch.float32 in the checkpoint, expected torch.bfloat16",
    ):
        assert expected in problems
    assert len(caught.value.problems) == 3 + 3 + (1 + 8 + 1) + 1 + 3
    remedies = (
        "allow_missing=",
        "allow_extra=",
        "allow_other_chain=True",
        "cast=",
        "rename=",
        "nothing was loaded",
    )
    assert all(words in message for words in (*remedies, str(path)))


def test_of_another_chain_only_the_arguments_that_differ_are_named(tmp_path: Path):
    def chain_of(view: str, rate: float, steps: int = 10) -> mfx.Transform:
        schedule = mfx.cosine_decay_schedule(rate, steps)
        orthogonalize = mfx.orthogonalize(view=mfx.MatrixView({"*.fc.weight": view}))
        labels = {name: "muon" if name == "h.0.fc.weight" else "adamw" for name in MODEL}
        return mfx.muon_with_adamw(
            schedule, labels=labels, orthogonalize=orthogonalize, lr_scaling="spectral"
        )

    tx = chain_of("(q=2 + k=1) in -> q in, k in", 0.1)
    path = ck.save(tmp_path / "saved", tx.init(MODEL), tx=tx)
    other = chain_of("whole in -> whole in", 0.2)
    with pytest.raises(MismatchError) as caught:
        ck.load(path, like=other.init(MODEL), tx=other)
    view = "['*.fc.weight']: '(q=2 + k=1) in -> q in, k in' in the checkpoint, 'whole in -> whole in' here"
    assert caught.value.problems == (
        f"chain:     muon.orthogonalize.view{view}",
        f"chain:     muon.scale_by_shape.view{view}",
    )
    assert "cosine" not in str(caught.value)


def test_labels_that_differ_are_named_as_an_argument(tmp_path: Path):
    def chain_of(embed: str) -> mfx.Transform:
        labels = {name: "slow" if "0" in name else "fast" for name in MODEL} | {"wte.weight": embed}
        return mfx.partition(
            {"slow": mfx.momentum(), "fast": mfx.momentum(nesterov=embed == "fast")}, labels
        )

    path = ck.save(tmp_path / "saved", chain_of("fast").init(MODEL), tx=chain_of("fast"))
    other = chain_of("slow")
    with pytest.raises(MismatchError) as caught:
        ck.load(path, like=other.init(MODEL), tx=other)
    problems = [problem for problem in caught.value.problems if problem.startswith("chain:")]
    assert problems == [
        "chain:     labels['wte.weight']: 'fast' in the checkpoint, 'slow' here",
        "chain:     fast.nesterov: not set in the checkpoint, False here",
    ]


def test_the_advice_to_round_works_as_written(tmp_path: Path):
    def optimizer_for(
        mu: Any, nu: Any, model: Mapping[str, torch.Tensor] = MODEL
    ) -> mfx.TransformOptimizer:
        params = {name: torch.nn.Parameter(param.clone()) for name, param in model.items()}
        adam = mfx.scale_by_adam(mu_dtype=mu, nu_dtype=nu)
        return mfx.TransformOptimizer(params, mfx.chain(mfx.momentum(), adam, mfx.scale(-0.1)))

    path = ck.save(tmp_path, optimizer_for(torch.float32, torch.float32))
    optimizer = optimizer_for(torch.bfloat16, torch.float16)
    written = "{'scale_by_adam/mu': torch.bfloat16, 'scale_by_adam/nu': torch.float16}"
    with pytest.raises(MismatchError) as caught:
        ck.load(path, optimizer, allow_other_chain=True)
    assert f"to round: cast={written} (" in str(caught.value)
    with pytest.raises(MismatchError) as caught:
        ck.load(path, optimizer, allow_other_chain=True, cast={"scale_by_adam/mu": torch.bfloat16})
    assert f"to round: cast={written} (" in str(caught.value)  # with the patterns of the caller
    with pytest.raises(
        MismatchError, match=re.escape(f"mfx.checkpoint.load(path, optimizer, cast={written})")
    ):
        ck.load_changed(path, optimizer)
    loaded = ck.load(path, optimizer, allow_other_chain=True, cast=eval(written))
    assert {leaf.dtype for leaf in loaded["scale_by_adam"].nu.values()} == {torch.float16}


def test_the_advice_for_other_shapes_works_as_written(tmp_path: Path):
    def optimizer_for(width: int) -> mfx.TransformOptimizer:
        params = {
            "fc": torch.nn.Parameter(torch.ones(4, 4)),
            "head": torch.nn.Parameter(torch.ones(width, 4)),
        }
        return mfx.TransformOptimizer(
            params, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
        )

    path = ck.save(
        tmp_path, optimizer_for(4), params={"fc": torch.ones(4, 4), "head": torch.ones(4, 4)}
    )
    optimizer = optimizer_for(3)
    with pytest.raises(
        MismatchError, match=r"to keep what fits: mfx\.checkpoint\.load_changed\(path, optimizer\)"
    ):
        ck.load(path, optimizer)
    assert ck.load_changed(path, optimizer).new == ("momentum/trace/head",)
    with pytest.raises(MismatchError) as caught:
        ck.load_params(path, {"fc": torch.zeros(4, 4), "head": torch.zeros(3, 4)})
    assert "load_params(path, like={the parameters that fit}, allow_extra=['params/head'])" in str(
        caught.value
    )
    loaded = ck.load_params(path, like={"fc": torch.zeros(4, 4)}, allow_extra=["params/head"])
    assert torch.equal(loaded["fc"], torch.ones(4, 4))


def test_a_missing_leaf_keeps_what_like_has(saved):
    path, tx, params, state = saved
    grown = {**params, "new": torch.ones(2, 2)}
    like = mfx.tree.map(lambda leaf: leaf + 3, tx.init(grown))
    with pytest.raises(MismatchError, match="missing"):
        ck.load(path, like=like)
    for allowed in (True, "*/new", ["momentum/trace/new", "scale_by_adam/mu/new", "*/nu/new"]):
        back = ck.load(path, like=like, allow_missing=allowed)
        assert torch.equal(back["momentum"].trace["new"], torch.full((2, 2), 3.0))
        assert back["momentum"].trace["new"] is not like["momentum"].trace["new"]
        assert torch.equal(back["momentum"].trace[W], state["momentum"].trace[W])
    with pytest.raises(MismatchError, match="scale_by_adam/mu/new"):
        ck.load(path, like=like, allow_missing="momentum")
    with pytest.raises(
        ValueError, match=r"spec without values .* expected a state with values to keep"
    ):
        ck.load(path, like=mfx.spec(tx, grown), allow_missing=True)


def test_an_extra_leaf_is_left_out_on_request(saved):
    path, tx, params, state = saved
    fewer = {name: p for name, p in params.items() if name != W}
    for call in (
        lambda: ck.load(path, like=mfx.spec(tx, fewer)),
        lambda: ck.load_params(path, like=fewer),
    ):
        with pytest.raises(
            MismatchError, match=f"extra: .*{W}' is in the checkpoint and not in `like`"
        ):
            call()
    back = ck.load(path, like=mfx.spec(tx, fewer), allow_extra=f"*/{W}")
    assert torch.equal(back["momentum"].trace[B], state["momentum"].trace[B])
    only = mfx.spec(mfx.chain(mfx.momentum()), params)
    back = ck.load(path, like=only, allow_extra="scale_by_adam", allow_other_chain=True)
    assert_same_tree(back, {"momentum": state["momentum"]})
    assert ck.load_params(path, like=fewer, allow_extra=True).keys() == fewer.keys()


def test_leaves_are_renamed_by_name_or_by_level(saved):
    path, _, params, state = saved
    moved = mfx.chain(("first", mfx.momentum()), ("second", mfx.scale_by_adam()))
    levels = {"momentum": "first", "scale_by_adam": "second"}
    back = ck.load(path, like=mfx.spec(moved, params), rename=levels, allow_other_chain=True)
    assert_same_tree(back, {"first": state["momentum"], "second": state["scale_by_adam"]})
    new = {"renamed" if name == W else name: p for name, p in params.items()}
    assert torch.equal(
        ck.load_params(path, new, rename={f"params/{W}": "params/renamed"})["renamed"], params[W]
    )
    # Of two entries that fit, the one of more levels applies.
    rename = {**levels, f"momentum/trace/{W}": "first/trace/renamed"}
    like = mfx.spec(mfx.chain(("first", mfx.momentum())), new)
    back = ck.load(path, like=like, rename=rename, allow_extra="second", allow_other_chain=True)
    assert torch.equal(back["first"].trace["renamed"], state["momentum"].trace[W])


def test_cast_allows_a_dtype_and_does_not_change_it(saved):
    path, tx, params, state = saved
    with pytest.raises(
        MismatchError, match=r"has dtype torch.float32 in `like`, and cast= gives torch.bfloat16"
    ):
        ck.load(path, like=mfx.spec(tx, params), cast={"momentum": torch.bfloat16})
    with pytest.raises(MismatchError, match=r"cast: 'momentun' matches no leaf"):
        ck.load(path, like=state, cast={"momentun": torch.float32})
    assert_same_tree(ck.load(path, like=state, cast={"momentum": torch.float32}), state)


def test_a_fingerprint_is_compared_where_both_sides_have_one(saved, tmp_path: Path):
    path, tx, params, state = saved
    other = mfx.chain(mfx.momentum(nesterov=False), mfx.scale_by_adam())
    for arguments in ({"like": mfx.spec(other, params)}, {"like": state, "tx": other}):
        with pytest.raises(
            MismatchError, match=r"chain: .*nesterov: not set in the checkpoint, False here"
        ):
            ck.load(path, **arguments)
        assert_same_tree(ck.load(path, **arguments, allow_other_chain=True), state)
    assert_same_tree(ck.load(path, like=state), state)
    assert_same_tree(ck.load(path, like=mfx.spec(other, params), tx=tx), state)
    another_rate = mfx.chain(mfx.momentum(0.5), mfx.scale_by_adam(0.1))
    with pytest.warns(UserWarning, match="saved with other numbers"):
        assert_same_tree(ck.load(path, like=state, tx=another_rate), state)
    ck.save(tmp_path / "unsigned", state)
    assert_same_tree(ck.load(tmp_path / "unsigned", like=state, tx=other), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_in_a_tensor_is_the_number_of_a_float(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
):
    params = {W: torch.ones(2, 3)}
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    with_tensor = mfx.chain(
        mfx.momentum(), mfx.scale_by_learning_rate(torch.full(shape, 0.1, dtype=dtype))
    )
    ck.save(tmp_path / "float", tx.init(params), tx=tx)
    ck.save(tmp_path / "tensor", with_tensor.init(params), tx=with_tensor)
    ck.load(tmp_path / "float", like=tx.init(params), tx=with_tensor)  # a warning would be an error
    ck.load(tmp_path / "tensor", like=tx.init(params), tx=tx)
    other = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.11))
    with pytest.warns(
        UserWarning, match="learning_rate: torch.tensor.* in the checkpoint, 0.11 here"
    ):
        ck.load(tmp_path / "tensor", like=tx.init(params), tx=other)


def test_an_absent_leaf_is_no_leaf(tmp_path: Path):
    state = {"a": torch.ones(2), "b": None}
    ck.save(tmp_path, state)
    assert list(ck.read(tmp_path)) == ["a"]
    assert_same_tree(ck.load(tmp_path, like=state), state)
    for like, problem in (
        ({"a": torch.ones(2), "b": torch.ones(2)}, "missing"),
        ({"a": None, "b": None}, "extra"),
    ):
        with pytest.raises(MismatchError, match=problem):
            ck.load(tmp_path, like=like)


@pytest.mark.parametrize(
    ("state", "more", "message"),
    [
        ({"a": {"b": 1.0}}, {}, "'a/b' is a float, expected a tensor"),
        ({"a": torch.ones(1).to_sparse()}, {}, "'a' must be a dense tensor"),
        ({"a": torch.ones(1, device="meta")}, {}, "'a' must be a dense tensor with values"),
        ({1.5: torch.ones(1)}, {}, "expected a string or an int: keys are part of the leaf names"),
        ({"a": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, {}, "dtype torch.float4_e2m1fn_x2"),
        ({}, {"extra": {"x": {1, 2}}}, "extra must be JSON"),
        ({}, {"extra": {"x": float("nan")}}, "extra must be JSON"),
        ({}, {"extra": {"x": (1, 2)}}, "extra: found values that JSON changes: x"),
        ({}, {"extra": {"x": {1: 2}}}, "extra: found values that JSON changes: x"),
        ({}, {"step": -1}, "step must be"),
        ({}, {"tx": "momentum"}, "tx must be"),
        ({}, {"keep": 0}, "keep must be"),
        ({}, {"keep": 1}, "step_path"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path, state, more, message: str
):
    with pytest.raises((TypeError, ValueError), match=message):
        ck.save(tmp_path / "here", state, **more)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("key", ["mine", "lr"])
def test_a_number_on_the_meta_device_is_named_and_nothing_is_written(tmp_path: Path, key: str):
    optimizer = mfx.TransformOptimizer({W: torch.ones(2, 3)}, mfx.adamw(0.1))
    optimizer.param_groups[0][key] = torch.tensor(0.5, device="meta")
    with pytest.raises((TypeError, ValueError), match=rf"{key}.* on the meta device"):
        ck.save(tmp_path / "here", optimizer)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"allow_missing": 3},
            r"^allow_missing must be True, False, or names .*found 3: .*allow_missing=\['momentum",
        ),
        ({"allow_extra": None}, "^allow_extra must be .*found None"),
        ({"allow_extra": [torch.ones(1)]}, "^allow_extra must be .*found .tensor"),
        ({"allow_other_chain": "no"}, "^allow_other_chain must be True or False, found 'no'"),
        ({"cast": torch.bfloat16}, r"^cast must be a dict .*found torch.bfloat16: .*cast=\{"),
        (
            {"cast": {"trace": "bf16"}},
            "^cast: 'trace' has the value 'bf16', expected a torch.dtype",
        ),
    ],
)
def test_what_allows_differences_is_checked(tmp_path: Path, rules, message: str):
    state = mfx.momentum().init({"w": torch.ones(2, 2)})
    ck.save(tmp_path, state)
    with pytest.raises(TypeError, match=message):
        ck.load(tmp_path, like=state, **rules)


def test_what_is_not_there_is_said(tmp_path: Path, saved):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, f"latest.. returns the newest, {saved[0]}"),
        (tmp_path / "empty", "which a save writes last"),
        (tmp_path / "file", "this is a file$"),
    ):
        for act in (ck.inspect, ck.verify, lambda path: ck.load(path, like={})):
            with pytest.raises(NotFoundError, match=message):
                act(path)


# Torch means that it saves in one process.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_the_storage_of_torch_is_named_with_what_to_do(tmp_path: Path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    message = r"folder is of torch's own storage: load it by torch\.distributed\.checkpoint\.load.*convert\.recipe"
    for function in (mfx.checkpoint.inspect, mfx.checkpoint.verify, mfx.checkpoint.read):
        with pytest.raises(NotFoundError, match=message):
            function(tmp_path)


def test_a_file_of_torch_save_is_named_with_what_to_do(tmp_path: Path):
    torch.save({"state": {0: torch.ones(2)}}, tmp_path / "optimizer.pt")
    with pytest.raises(
        NotFoundError,
        match=r"this is a file of torch.save: .*torch\.load.*load_state_dict.*convert",
    ):
        ck.load(tmp_path / "optimizer.pt", like={})


def test_other_archives_and_pipes_are_plain_files(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("data.txt", "x")
    (tmp_path / "empty").touch()
    for path in tmp_path.iterdir():
        with pytest.raises(NotFoundError, match=r"this is a file$"):
            ck.load(path, like={})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        ck.load(tmp_path / "pipe", like={})


@pytest.mark.parametrize("dtype", [mfx.int8(), mfx.fp8()], ids=["int8", "fp8"])
def test_codes_are_never_taken_for_values(tmp_path: Path, dtype: mfx.QuantizedDtype):
    params = {"w": torch.randn(64, 96)}
    path = ck.save(tmp_path / "a", mfx.momentum(dtype=dtype).init(params))
    rename = {"trace/codes/w": "trace/w"}
    with pytest.raises(
        ck.MismatchError, match=r"holds codes of .* which have no meaning as torch\.float32"
    ):
        ck.load(
            path,
            mfx.momentum().init(params),
            rename=rename,
            allow_extra=True,
            cast={"trace": torch.float32},
        )


@pytest.mark.parametrize("place", ["a label", "one tensor"])
def test_codes_are_found_at_any_level_of_a_name(tmp_path: Path, place: str):
    tx, params = mfx.momentum(dtype=mfx.int8()), torch.randn(64, 96)
    if place == "a label":
        tx, params = (
            mfx.chain(mfx.partition({"codes": tx}, {"w": "codes"}), mfx.scale_by_adam()),
            {"w": params},
        )
    state = tx.init(params)
    path = ck.save(tmp_path / "a", state)
    wider = tree.map(lambda leaf: leaf.to(torch.int16) if leaf.dtype == torch.int8 else leaf, state)
    with pytest.raises(
        ck.MismatchError, match=r"holds codes of torch\.int8, which have no meaning as torch\.int16"
    ):
        ck.load(path, wider)


AUTO = mfx.chain(
    mfx.momentum(), mfx.masked(mfx.orthogonalize(), mfx.routing.ndim(min=2)), mfx.scale(-0.1)
)


def saved_there(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tx: mfx.Transform,
    dtype: torch.dtype,
    *,
    has_bf16: bool,
    **more: Any,
) -> Any:
    """Save the state of a machine with or without bf16; with more arguments, in the background or with parameters."""
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: has_bf16)
    params = {"w": torch.ones(2, 3, dtype=dtype)}
    state = tx.init(params)
    save = ck.save_async if more.get("wait") else ck.save
    made = save(path, state, tx=tx, params=params if more.get("with_params") else None)
    if more.get("wait"):
        made.wait()
    return state


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("by_spec", [False, True])
def test_another_dtype_is_a_warning_with_both(
    tmp_path: Path, monkeypatch, by_spec: bool, wait: bool
):
    like = saved_there(tmp_path, monkeypatch, AUTO, torch.float32, has_bf16=True, wait=wait)
    assert ck.inspect(tmp_path).products == {"masked.inner": "bfloat16"}
    like = mfx.spec(AUTO, {"w": torch.ones(2, 3)}) if by_spec else like
    ck.load(tmp_path, like=like, tx=AUTO)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: False)
    said = "'masked.inner' were computed in bfloat16 and are now in float32.*dtype=torch.bfloat16"
    with pytest.warns(UserWarning, match=said):
        ck.load(tmp_path, like=like, tx=AUTO)


PINNED = mfx.chain(mfx.momentum(dtype=torch.float32), mfx.orthogonalize(), mfx.scale(-0.1))
GIVEN = mfx.orthogonalize(dtype=torch.float32)


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize(
    ("tx", "dtype", "with_params"),
    [
        (AUTO, torch.float64, False),
        (AUTO, torch.float64, True),
        (PINNED, torch.float64, True),
        (mfx.orthogonalize(), torch.float64, True),
        (mfx.orthogonalize(), torch.float64, False),
        (mfx.momentum(), torch.float32, False),
        (GIVEN, torch.float32, True),
        (GIVEN, torch.float64, True),
    ],
)
def test_what_no_machine_decides_is_no_warning(
    tmp_path: Path, monkeypatch, tx, dtype, with_params: bool, now: bool
):
    like = saved_there(tmp_path, monkeypatch, tx, dtype, has_bf16=not now, with_params=with_params)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: now)
    ck.load(tmp_path, like=like, tx=tx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tx", [PINNED, mfx.orthogonalize()], ids=["pinned", "stateless"])
def test_parameters_that_are_saved_decide_whatever_the_state_is(
    tmp_path: Path, monkeypatch, tx, dtype
):
    like = saved_there(tmp_path, monkeypatch, tx, dtype, has_bf16=False, with_params=True)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: True)
    with pytest.warns(UserWarning, match="were computed in float32 and are now in bfloat16"):
        ck.load(tmp_path, like=like, tx=tx)


def test_a_number_that_only_one_chain_writes_is_named(tmp_path: Path) -> None:
    params = {"w": torch.zeros(2)}

    def chain(**options: float) -> mfx.Transform:
        """A chain with a function in an argument, whose code cannot be parsed."""
        return mfx.masked(mfx.scale_by_adam(**options), lambda params: dict.fromkeys(params, True))

    saved = chain(b1=0.8)
    path = ck.save(tmp_path / "run", saved.init(params), tx=saved)
    tx = chain(eps=1e-6)
    with pytest.warns(UserWarning, match="saved with other numbers") as warned:
        ck.load(path, like=tx.init(params), tx=tx)
    (warning,) = warned
    assert "scale_by_adam.b1: 0.8 in the checkpoint, not set here" in str(warning.message)
    assert "scale_by_adam.eps: not set in the checkpoint, 1e-06 here" in str(warning.message)


def test_the_advice_on_parameters_in_place_of_a_state_does_not_replace_that_on_rounding(
    tmp_path: Path,
):
    path = ck.save(tmp_path / "run", {"x": torch.ones(2)}, params={"w": torch.ones(2)})
    like = {"w": torch.ones(2), "x": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(ck.MismatchError) as caught:
        ck.load(path, like=like)
    problems, advice = str(caught.value).split("what to do:")
    assert "missing:   'w'" in problems
    assert "narrowing: 'x'" in problems
    assert "to load parameters: load_params(path, like)" in advice
    assert "to round: cast={'x': torch.bfloat16}" in advice
    assert "allow_missing" not in advice
