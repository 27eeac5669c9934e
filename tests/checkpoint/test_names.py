"""Names of leaves: readable, unique, with an exact inverse, and unmoved by what else is in the chain."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx.checkpoint.names import PARAMS, in_section, name_of, named_leaves

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
