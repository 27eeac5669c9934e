"""The algebra of combinators: chains associate, identity is neutral, partition and mask are what their names say."""

import copy
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.testing.violation import require_same
from tests.public import NAMES

pytestmark = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    # Drawn chains make no sense, and obey the laws.
    pytest.mark.filterwarnings("ignore:chain. .*learning rate"),
]

examples = kit.params_and_grads()
members = kit.transforms()


def updates_of(tx: mfx.Transform, example: kit.Example) -> list[Any]:
    return kit.examples.updates_of(tx, *example)


def assert_same(found: Any, expected: Any) -> None:
    require_same("the updates", found, expected, "those of the other form")


def bracketed(members: Sequence[mfx.Transform], cuts: Sequence[int]) -> mfx.Transform:
    """The chain of some members with brackets around the runs between the cuts."""
    bounds = [0, *sorted(min(cut, len(members)) for cut in cuts), len(members)]
    return mfx.chain(*(mfx.chain(*members[a:b]) for a, b in itertools.pairwise(bounds)))


@given(kit.chains(), st.lists(st.integers(0, 4), max_size=3), examples)
def test_brackets_do_not_matter(
    members: list[mfx.Transform], cuts: list[int], example: kit.Example
):
    assert_same(
        updates_of(bracketed(members, cuts), example), updates_of(mfx.chain(*members), example)
    )


@given(kit.chains(), examples)
def test_a_chain_is_the_fold_of_its_members(members: list[mfx.Transform], example: kit.Example):
    states = [tx.init(example.params) for tx in members]
    expected = []
    for grads in example.steps:
        updates = grads
        for place, tx in enumerate(members):
            updates, states[place] = tx.update(updates, states[place], example.params)
        expected.append(updates)
    assert_same(updates_of(mfx.chain(*members), example), expected)


@given(kit.chains(min_size=1))
def test_a_chain_is_as_wide_as_its_widest_member(members: list[mfx.Transform]):
    assert mfx.chain(*members).locality == max(tx.locality for tx in members)


LABELS = ("left", "right", None)


def labelled(params: Any, choices: Sequence[int]) -> dict[str, str | None]:
    return {
        name: LABELS[choices[place % len(choices)]] for place, name in enumerate(tree.names(params))
    }


def only(values: Any, wanted: Sequence[bool]) -> Any:
    """The leaves at some places as a flat dict by name."""
    pairs = zip(tree.names(values), tree.leaves(values), wanted, strict=True)
    return {name: leaf for name, leaf, use in pairs if use}


@given(
    members, members, st.lists(st.integers(0, 2), min_size=4, max_size=4), examples, st.booleans()
)
def test_partition_is_a_loop_over_its_groups_in_any_order(
    left: mfx.Transform, right: mfx.Transform, choices: list[int], example: kit.Example, swap: bool
):
    labels = labelled(example.params, choices)
    groups = {"left": left, "right": right}
    if swap:
        groups = dict(reversed(groups.items()))
    found = updates_of(mfx.partition(groups, labels), example)
    expected = [dict.fromkeys(tree.names(example.params)) for _ in example.steps]
    for label, tx in reversed(groups.items()):
        wanted = [own == label for own in labels.values()]
        group = kit.Example(
            only(example.params, wanted), [only(grads, wanted) for grads in example.steps]
        )
        for step, updates in enumerate(updates_of(tx, group)):
            expected[step].update(updates)
    treedef = tree.flatten(example.params)[1]
    assert_same(found, [tree.unflatten(treedef, list(step.values())) for step in expected])


@given(members, st.lists(st.booleans(), min_size=4, max_size=4), examples)
def test_a_mask_is_a_partition_with_identity(
    tx: mfx.Transform, choices: list[bool], example: kit.Example
):
    names = tree.names(example.params)
    mask = {name: choices[place % 4] for place, name in enumerate(names)}
    labels = {name: "in" if use else "out" for name, use in mask.items()}
    split = mfx.partition({"in": tx, "out": mfx.identity()}, labels)
    assert_same(updates_of(mfx.masked(tx, mask), example), updates_of(split, example))


def nested(depth: int) -> mfx.Transform:
    tx = mfx.scale(2.0)
    for _ in range(depth - 1):
        tx = mfx.chain(tx)
    return tx


@pytest.mark.parametrize(
    "tx",
    [
        mfx.chain(*[mfx.scale(1.0 + i / 1e6) for i in range(400)]),
        mfx.partition({f"l{i}": mfx.momentum() for i in range(400)}, {"w": "l7"}),
        nested(64),
    ],
    ids=["chain of 400", "partition with 400 labels", "nested 64 deep"],
)
def test_long_and_deep_transforms_are_values_like_others(tx: mfx.Transform):
    params = {"w": torch.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].isfinite().all()
    assert pickle.loads(pickle.dumps(tx)) == tx == copy.deepcopy(tx) == tx.replace(**tx.arguments)
    assert hash(tx) == hash(copy.deepcopy(tx))
    assert eval(repr(tx), {**vars(mfx), **NAMES}) == tx
    assert pickle.loads(pickle.dumps(tx)).fingerprint == tx.fingerprint
    leaves, treedef = tree.flatten(tx)
    assert tree.unflatten(treedef, leaves) == tx
    assert len(mfx.hyperparams(tx)) == len(leaves)
