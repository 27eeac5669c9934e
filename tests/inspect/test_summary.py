"""`muonfx.summary`: every leaf once, bytes that add up, and the same totals from every rank."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import muonfx as mfx
from tests.internal.test_display import Parsed

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]

leaves = st.none() | st.builds(
    lambda shape, dtype: torch.empty(shape, dtype=dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
)
names = st.text(min_size=1, max_size=5)
trees = st.recursive(
    leaves,
    lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)


def bytes_in(values) -> int:
    return sum(t.numel() * t.element_size() for t in mfx.tree.leaves(values) if t is not None)


def leaf_rows(rows) -> int:
    return sum(leaf_rows(row.children) if row.children else 1 for row in rows)


@given(trees.filter(lambda values: values is not None))
@settings(max_examples=25)
def test_every_leaf_is_there_once_and_bytes_add_up(values):
    found = mfx.summary(values)
    assert [leaf.path for leaf in found.leaves] == [
        tuple(map(str, path)) for path in mfx.tree.paths(values)
    ]
    assert found.nbytes == found.total_nbytes == bytes_in(values) == sum(found.by_dtype().values())
    table = found.report().parts[0]
    assert leaf_rows(table.rows) == len(found.leaves)
    assert table.footers[0].cells[0].split()[2] == str(
        sum(t is not None for t in mfx.tree.leaves(values))
    )
    Parsed(found._repr_html_())


def params_for_ranks():
    return {
        "wte": torch.zeros(16, 8),
        "fc": torch.zeros(8, 8),
        "up": torch.zeros(64, 8),
        "b": torch.zeros(8),
    }


LABELS = {"wte": "adamw", "fc": "muon", "up": "muon", "b": None}
CHAINS = [
    mfx.chain(mfx.clip_by_global_norm(1.0), mfx.muon_with_adamw(0.02, 1e-3, labels=LABELS)),
    mfx.masked(
        mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons(), mfx.scale(-1.0)),
        {"wte": True, "fc": True, "up": True, "b": False},
    ),
    mfx.skip_nonfinite(mfx.momentum()),
]


@pytest.mark.parametrize("tx", CHAINS)
@pytest.mark.parametrize("partition", ["whole", "flat", "each", None])
def test_what_ranks_hold_adds_up_to_what_each_says_of_all(tx, partition):
    params = params_for_ranks()
    made = (
        mfx.sharding.replicated(params, 3)
        if partition is None
        else mfx.sharding.zero(params, 3, partition=partition)
    )
    seen = []
    for rank in range(3):
        layout = dataclasses.replace(made, rank=rank)
        seen.append(mfx.summary(mfx.sharding.sharded(tx, layout), layout.shard(params)))
    assert sum(one.nbytes for one in seen) == seen[0].total_nbytes
    for leaf, *others in zip(*(one.leaves for one in seen), strict=True):
        assert sum(one.nbytes for one in (leaf, *others)) == leaf.total_nbytes
        assert all(
            (one.shape, one.owner, one.path) == (leaf.shape, leaf.owner, leaf.path)
            for one in others
        )
        held = [rank for rank, one in enumerate((leaf, *others)) if one.nbytes]
        if leaf.owner.startswith("rank "):
            assert held == [int(leaf.owner.split()[1])]
        elif leaf.owner == "every rank":
            assert held == [0, 1, 2]
    alone = mfx.summary(tx, params)
    assert [leaf.name for leaf in alone.leaves] == [leaf.name for leaf in seen[0].leaves]
    assert [leaf.shape for leaf in alone.leaves] == [leaf.shape for leaf in seen[0].leaves]


def test_a_transform_and_parameters_give_the_state_that_init_makes():
    params = params_for_ranks()
    planned, made = mfx.summary(CHAINS[0], params), mfx.summary(CHAINS[0].init(params), params)
    assert str(planned) == str(made)
    assert mfx.summary((CHAINS[0], CHAINS[0].init(params)), params).leaves == made.leaves
    with pytest.raises(TypeError, match="summary of chain needs parameters"):
        mfx.summary(CHAINS[0])


def test_an_optimizer_and_a_model_are_summarized():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    optimizer = mfx.Muon(model)
    found = mfx.summary(optimizer)
    assert found.leaves == mfx.summary(optimizer.transform_state).leaves
    assert (
        found.params_nbytes == bytes_in(dict(model.named_parameters())) == mfx.summary(model).nbytes
    )
    layout = mfx.sharding.zero(dict(model.named_parameters()), 1, partition="flat")
    sharded = mfx.TransformOptimizer(
        layout.shard(dict(model.named_parameters())), mfx.momentum(), layout=layout
    )
    assert mfx.summary(sharded).total_nbytes == bytes_in(dict(model.named_parameters()))


def test_a_state_of_another_chain_is_refused():
    params = params_for_ranks()
    layout = mfx.sharding.zero(params, 1, partition="flat")
    tx = mfx.sharding.sharded(mfx.momentum(), layout)
    with pytest.raises(ValueError, match="it does not fit momentum"):
        mfx.summary((tx, mfx.scale_by_adam().init(layout.shard(params))), layout.shard(params))
