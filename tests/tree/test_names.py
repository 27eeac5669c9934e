"""Names of leaves: a name without wrappers, new names for old, and nodes that are found by path or type."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.tree.renaming import new_names
from muonfx.tree.wrappers import WRAPPERS, unwrapped

COMPONENTS = st.sampled_from(["up", "module", "weight", "0", "modules", "_orig_model"])
MODELS = st.lists(st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=5, unique=True)


@given(MODELS, st.lists(st.sampled_from(["module", *sorted(WRAPPERS)]), max_size=4))
@example(["module.a", "b"], ["module"])
@example(["module"], ["module"])
def test_no_wrapper_around_a_model_changes_its_names(names, wrappers):
    wrapped = [".".join([*wrappers, name]) for name in names]
    assert list(unwrapped(wrapped).values()) == list(unwrapped(names).values())


@given(MODELS, st.data())
def test_no_wrapper_within_a_model_changes_its_names(names, data):
    def some(name: str) -> str:
        parts = name.split(".")
        place = data.draw(st.integers(0, len(parts)))
        return ".".join([*parts[:place], data.draw(st.sampled_from(sorted(WRAPPERS))), *parts[place:]])

    wrapped = [some(name) for name in names]
    assert list(unwrapped(wrapped).values()) == list(unwrapped(names).values())


@given(MODELS)
def test_names_without_wrappers_stay_and_stay_apart(names):
    plain = unwrapped(names)
    assert len(set(plain.values())) == len(names)
    assert unwrapped(plain.values()) == {name: name for name in plain.values()}
    if not all(name.startswith("module.") for name in names):
        assert plain == {name: name for name in names}


@pytest.mark.parametrize("name", ["_orig_mod", "module", "module."])
def test_a_name_of_nothing_else_stays(name: str):
    assert unwrapped([name]) == {name: name}


NAMES = ["mu/a.w", "mu/a.b", "mu/b.w", "nu/a.w", "count"]


def renamed(rename, names=NAMES, **more):
    found, wrong = new_names({name: name for name in names}, rename, **more)
    return list(found.values()), wrong


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"count": "steps"}, ["mu/a.w", "mu/a.b", "mu/b.w", "nu/a.w", "steps"]),
        ({"mu": "first"}, ["first/a.w", "first/a.b", "first/b.w", "nu/a.w", "count"]),
        ({"mu/": "x/mu/"}, ["x/mu/a.w", "x/mu/a.b", "x/mu/b.w", "nu/a.w", "count"]),
        ({"*/a.*": "*/c.*"}, ["mu/c.w", "mu/c.b", "mu/b.w", "nu/c.w", "count"]),
        ({"mu/a*": "a*"}, ["a.w", "a.b", "mu/b.w", "nu/a.w", "count"]),
        ({"mu": "first", "mu/a.w": "here"}, ["here", "first/a.b", "first/b.w", "nu/a.w", "count"]),
        ({"*": "x*", "mu/*": "y/*"}, ["y/a.w", "y/a.b", "y/b.w", "xnu/a.w", "xcount"]),
        ({}, NAMES),
    ],
)
def test_entries_mean_names_levels_and_patterns_and_the_most_exact_counts(rename, expected):
    assert renamed(rename) == (expected, [])


def test_levels_of_parameters_end_with_a_dot():
    assert renamed({"enc": "model.enc"}, ["enc.w", "encoder.w"], level=".") == (["model.enc.w", "encoder.w"], [])


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        ({"mi": "first"}, "there is no leaf 'mi'"),
        ({"m": "first"}, "there is no leaf 'm'"),
        ({"*/c.*": "*/d.*"}, "there is no leaf '*/c.*'"),
        ({"*/a.*": "*/d"}, "must have the same number"),
        ({"mu": "*"}, "must have the same number"),
        ({"count": "steps", "coun*": "x*"}, "'coun*', or more exact entries rename it"),
    ],
)
def test_an_entry_that_does_nothing_or_makes_no_sense_is_told(rename, problem):
    _, wrong = renamed(rename)
    assert len(wrong) == 1
    assert problem in wrong[0]


@pytest.mark.parametrize("rename", [{"mu": 1}, {1: "mu"}, lambda name: None])
def test_what_is_no_name_is_refused(rename):
    with pytest.raises(TypeError, match="rename"):
        renamed(rename)


@given(st.lists(st.text("ab./", min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_a_star_for_a_star_changes_nothing(names):
    assert renamed({"*": "*"}, names) == (names, [])
    assert renamed({"*": "x/*"}, names) == ([f"x/{name}" for name in names], [])


PARAMS = {"blocks.0.q": torch.zeros(2, 2), "b": torch.zeros(2)}
STATE = mfx.chain(mfx.momentum(), mfx.scale_by_adam(), ("again", mfx.scale_by_adam())).init(PARAMS)

KEYS = st.sampled_from(("a", "b", "a.b", "c"))
TREES: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.none(),
    lambda below: (
        st.dictionaries(KEYS, below, max_size=3)
        | st.dictionaries(KEYS, below, max_size=3).map(OrderedDict)
        | st.lists(below, max_size=3)
        | st.builds(mfx.transforms.MomentumState, below)
    ),
    max_leaves=8,
)


@given(TREES, st.data())
def test_what_was_set_is_found_and_nothing_else_has_changed(tree: Any, data: st.DataObject):
    path = data.draw(st.sampled_from(mfx.tree.names(tree) or [""]))

    if len(mfx.tree.get_all(tree, path)) != 1 or path not in mfx.tree.get_all(tree, path):
        return  # an empty container, two keys that read alike, or the end of a longer path
    if isinstance(mfx.tree.get(tree, path), dict | list | tuple):
        return
    before = mfx.tree.leaves(tree)
    changed = mfx.tree.set(tree, path, "new")
    assert mfx.tree.get(changed, path) == "new"
    assert mfx.tree.same_structure(changed, tree)
    differing = [(a, b) for a, b in zip(before, mfx.tree.leaves(changed), strict=True) if a is not b]
    assert [b for _, b in differing] == ["new"]
    assert mfx.tree.leaves(mfx.tree.set(changed, path, differing[0][0])) == before


def test_a_name_may_be_any_end_of_a_path():
    q = STATE["momentum"].trace["blocks.0.q"]
    assert mfx.tree.get(STATE, "momentum.trace.blocks.0.q") is q
    assert mfx.tree.get(STATE, "trace.blocks.0.q") is q
    assert mfx.tree.get(STATE, "again") is STATE["again"]
    assert mfx.tree.get(STATE, "again.mu") is STATE["again"].mu
    assert list(mfx.tree.get_all(STATE, "0.q"))[1:3] == ["again.nu.blocks.0.q", "momentum.trace.blocks.0.q"]
    assert mfx.tree.get_all(STATE, "omentum") == {}


def test_a_type_selects_nodes():
    assert mfx.tree.get(STATE, mfx.transforms.MomentumState) is STATE["momentum"]
    assert list(mfx.tree.get_all(STATE, mfx.transforms.AdamState)) == ["again", "scale_by_adam"]
    assert mfx.tree.get(STATE["again"], mfx.transforms.AdamState) is STATE["again"]


def test_a_whole_subtree_can_be_replaced_and_the_transform_goes_on():
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_adam())
    state = tx.init(PARAMS)
    other = mfx.tree.set(state, "scale_by_adam", mfx.scale_by_adam().init(PARAMS)._replace(count=torch.tensor(9)))
    assert int(tx.update(PARAMS, other)[1]["scale_by_adam"].count) == 10
    assert int(state["scale_by_adam"].count) == 0


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nu.b", r"'nu.b' matches 2 nodes: again.nu.b, scale_by_adam.nu.b; give a longer path"),
        (mfx.transforms.AdamState, "AdamState matches 2 nodes: again, scale_by_adam"),
        ("momentum.trce", "no node of the tree matches 'momentum.trce'; did you mean momentum.trace"),
        (mfx.transforms.LionState, "no node of the tree matches LionState"),
    ],
)
def test_none_and_several_are_errors_that_say_where(where: Any, message: str):
    with pytest.raises(KeyError, match=message):
        mfx.tree.get(STATE, where)
    with pytest.raises(KeyError, match=message):
        mfx.tree.set(STATE, where, None)
