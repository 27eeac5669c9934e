"""Nodes that are found and replaced by path and type."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx

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
