"""A state saved under one layout continues under any other, on another number of ranks, or in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding.shards.dtensors import to_dtensors
from tests.checkpoint.common import bits
from tests.processes import Here, World, on_ranks
from tests.sharding.cases import (
    Flat,
    LayoutCase,
    Leaf,
    Model,
    Params,
    Placed,
    Replicated,
    Zero,
    laid_out,
    model,
    muon,
)
from tests.sharding.test_law import assert_equal, plain

pytestmark = pytest.mark.dist

DRAWN = model(
    steps=4,
    a=(6, 5),
    b=(9, 4),
    stack=Leaf((5, 3, 7), "stack"),
    conv=(4, 3, 2),
    c=Leaf((7,)),
    e=Leaf((10, 3)),
)
ALL = list(DRAWN.leaves)


def chain_of(kind: str) -> mfx.Transform:
    stack = mfx.chain(
        mfx.orthogonalize(dtype=torch.float32, view=mfx.MatrixView("... out in -> ... out in")),
        mfx.normalize_neurons(view=mfx.MatrixView("... out in -> ... out in")),
    )
    matrices = mfx.chain(
        mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float32), mfx.normalize_neurons()
    )
    if kind == "compact":
        matrices = mfx.chain(mfx.momentum(0.9, dtype=mfx.int8(min_size=1)), muon())
    tx = mfx.partition(
        {"muon": matrices, "stack": stack, "adamw": mfx.scale_by_adam()}, DRAWN.labels
    )
    tx = mfx.chain(mfx.clip_by_global_norm(3.0), tx, mfx.scale_by_learning_rate(0.1))
    return {"accumulate": mfx.accumulate(tx, 3), "tensors": mfx.as_tensors(tx)}.get(kind, tx)


LAYOUTS: dict[str, LayoutCase] = {
    "replicated": Replicated(),
    "whole": Zero(1, "whole"),
    "flat": Zero(3, "flat"),
    "cuts": Flat(tuple(reversed(ALL)), (0, 11, 90, 90, DRAWN.numel)),
    "rows": Placed(dict.fromkeys(ALL, ("0",))),
    "grid": Placed(
        {
            name: ("0", "1") if len(leaf.shape) > 1 else ("0", "0")
            for name, leaf in DRAWN.leaves.items()
        },
        grid=True,
    ),
}


def steps(
    tx: Any, state: Any, local: Any, enter: Any, drawn: Model, turns: range
) -> tuple[Any, Any]:
    for turn in turns:
        updates, state = tx.update(enter(drawn.grads(turn)), state, local)
        local = mfx.apply_updates(local, updates)
    return local, state


def save(here: Here, path: Path, kind: str, case: LayoutCase) -> None:
    params = DRAWN.params()
    layout, tx = laid_out(case, params, here), chain_of(kind)
    sharded, local = sharding.sharded(tx, layout), layout.shard(params)
    local, state = steps(sharded, sharded.init(local), local, layout.shard, DRAWN, range(2))
    mfx.checkpoint.save(path, state, params=local, tx=sharded)


def go_on(here: Here, path: Path, kind: str, case: LayoutCase) -> Params:
    blank = {name: torch.zeros_like(leaf) for name, leaf in DRAWN.params().items()}
    layout, tx = laid_out(case, blank, here), chain_of(kind)
    sharded, local = sharding.sharded(tx, layout), layout.shard(blank)
    state = mfx.checkpoint.load(path, like=sharded.init(local), tx=sharded)
    local = mfx.checkpoint.load_params(path, like=local, tx=sharded)
    local, _ = steps(sharded, state, local, layout.shard, DRAWN, range(2, 4))
    return layout.gather(local)


@pytest.mark.parametrize(
    ("kind", "saved", "sizes", "loaded"),
    [
        ("plain", "replicated", (2, 4), "flat"),
        ("plain", "whole", (3, 2), "rows"),
        ("plain", "flat", (4, 3), "whole"),
        ("plain", "cuts", (4, 4), "grid"),
        ("compact", "rows", (2, 4), "cuts"),
        ("compact", "grid", (4, 1), "replicated"),
        ("accumulate", "cuts", (4, 2), "rows"),
        ("tensors", "rows", (3, 4), "flat"),
    ],
)
def test_a_run_goes_on_under_another_layout(
    world: World, tmp_path: Path, kind: str, saved: str, sizes: Any, loaded: str
):
    world.check(sizes[0], save, path=tmp_path / "ck", kind=kind, case=LAYOUTS[saved])
    for found in world.check(
        sizes[1], go_on, path=tmp_path / "ck", kind=kind, case=LAYOUTS[loaded]
    ):
        assert_as_straight(kind, found)


def test_one_process_goes_on_with_what_ranks_have_saved_and_back(world: World, tmp_path: Path):
    world.check(4, save, path=tmp_path / "four", kind="plain", case=LAYOUTS["cuts"])
    tx, params = chain_of("plain"), DRAWN.params()
    state = mfx.checkpoint.load(tmp_path / "four", like=tx.init(params), tx=tx)
    params = mfx.checkpoint.load_params(tmp_path / "four", like=params)
    mfx.checkpoint.save(tmp_path / "one", state, params=params, tx=tx)
    assert_as_straight(
        "plain", steps(tx, state, params, lambda grads: grads, DRAWN, range(2, 4))[0]
    )
    for found in world.check(3, go_on, path=tmp_path / "one", kind="plain", case=LAYOUTS["flat"]):
        assert_as_straight("plain", found)


def assert_as_straight(kind: str, found: Params) -> None:
    """Compare parameters with those of one process that never saved."""
    tx, params = chain_of(kind), DRAWN.params()
    for name, leaf in steps(tx, tx.init(params), params, lambda grads: grads, DRAWN, range(4))[
        0
    ].items():
        assert_equal(found[name], leaf, False, name)


def by_hand(here: Here, path: Path, case: LayoutCase) -> None:
    """Save and load by hand and by itself, and compare bits; a view that is taken twice is the same."""
    params = DRAWN.params()
    layout, tx = laid_out(case, params, here), chain_of("plain")

    def enter(whole: Params) -> Params:
        return to_dtensors(layout, layout.shard(whole))

    sharded, local = sharding.sharded(tx, layout), enter(params)
    local, state = steps(sharded, sharded.init(local), local, enter, DRAWN, range(2))
    logical, group = sharding.to_global(sharded, state), here.group
    mfx.checkpoint.save(
        path / "by hand", logical, params=layout.to_global(local), tx=sharded, group=group
    )
    with pytest.raises(ValueError, match="pass group="):
        mfx.checkpoint.save_async(path / "by itself", state, params=local, tx=sharded)
    mfx.checkpoint.save_async(
        path / "by itself", state, params=local, tx=sharded, group=group
    ).wait()
    blank = sharded.init(enter(params))
    again = mfx.checkpoint.load(
        path / "by hand", like=sharding.to_global(sharded, blank), tx=sharded
    )
    again = sharding.from_global(sharded, again)
    mine = mfx.checkpoint.load(path / "by itself", like=blank, tx=sharded)
    for one in (again, sharding.from_global(sharded, again), mine):
        assert_trees_equal(one, state)
    assert_trees_equal(mfx.checkpoint.load_params(path / "by hand", like=local, tx=sharded), local)
    assert str(mfx.tree.leaves(sharding.to_global(sharded, logical))) == str(
        mfx.tree.leaves(logical)
    )
    # `Layout.to_global` wrapped a DTensor into another, which torch refuses; `from_global` returned no DTensor.
    assert_trees_equal(layout.from_global(layout.to_global(local)), local)
    # ZeRO-1 and 2 leave whole parameters on each rank, and shard the state only.
    if isinstance(case, Flat):
        mfx.checkpoint.save(path / "whole", None, params=params, tx=sharded, group=group)
        empty = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
        assert_trees_equal(
            mfx.checkpoint.load_params(path / "whole", like=empty, tx=sharded), params
        )


def assert_trees_equal(one: Any, other: Any) -> None:
    assert mfx.tree.names(one) == mfx.tree.names(other)
    for name, a, b in zip(
        mfx.tree.names(one), mfx.tree.leaves(one), mfx.tree.leaves(other), strict=True
    ):
        assert (a is None) == (b is None), name
        assert a is None or (type(a) is type(b) and bits(plain(a)) == bits(plain(b))), name


@pytest.mark.parametrize("layout", ["replicated", "whole", "cuts", "rows"])
def test_the_global_view_is_the_one_that_is_taken_by_hand(
    world: World, tmp_path: Path, layout: str
):
    world.check(4 if layout == "cuts" else 2, by_hand, path=tmp_path, case=LAYOUTS[layout])
    one, other = (mfx.checkpoint.read(tmp_path / name) for name in ("by hand", "by itself"))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    index = mfx.checkpoint.inspect(tmp_path / "by itself")  # it does not depend on the layout
    assert (index.chain, index.fingerprint) == (
        repr(chain_of("plain")),
        chain_of("plain").fingerprint,
    )
    if layout == "cuts":
        assert_trees_equal(
            mfx.checkpoint.load_params(tmp_path / "whole", like=DRAWN.params()), DRAWN.params()
        )


@pytest.mark.parametrize("what", ["state", "params", "structure"])
@on_ranks(2)
def test_a_state_of_another_layout_is_refused_on_all_ranks(here: Here, tmp_path: Path, what: str):
    params = DRAWN.params()
    layout = laid_out(LAYOUTS["flat"], params, here)
    sharded, local = sharding.sharded(chain_of("plain"), layout), layout.shard(params)
    state = sharded.init(local)
    mfx.checkpoint.save(tmp_path / "good", state, params=local, tx=sharded)
    if here.rank == 1:  # what is wrong on one rank is said on all
        if what == "state":
            leaves, treedef = mfx.tree.flatten(state)
            leaves[mfx.tree.names(state).index("partition.adamw.mu.c")] = torch.zeros(99)
            state = mfx.tree.unflatten(treedef, leaves)
        elif what == "params":
            local["c"] = torch.zeros(99)
        else:
            state = {"trace": local["c"]}
    said = {
        "state": r"'partition.adamw.mu.c' has shape \(99,\)",
        "params": r"'c' has shape \(99,\)",
    }
    for use in (
        lambda: mfx.checkpoint.save(tmp_path / "bad", state, params=local, tx=sharded),
        lambda: (
            mfx.checkpoint.load_params(tmp_path / "good", like=local, tx=sharded)
            if what == "params"
            else mfx.checkpoint.load(tmp_path / "good", like=state, tx=sharded)
        ),
    ):
        with pytest.raises(
            mfx.checkpoint.CheckpointError, match=f"rank 1: .*{said.get(what, 'it does not fit')}"
        ):
            use()
    assert not (tmp_path / "bad").exists()


def test_a_wrong_leaf_of_a_state_is_named_before_it_is_converted():
    params = {"a": torch.zeros(4, 4), "frozen": None}
    layout = sharding.zero(params, 1, partition="flat")
    tx = sharding.sharded(mfx.momentum(), layout)
    local = layout.shard(params)
    state = tx.init(local)
    assert mfx.tree.names(state) == ["trace.a", "trace.frozen"]
    longer = mfx.tree.map(lambda _: torch.zeros(99), state)
    for use in (
        lambda: sharding.to_global(tx, longer, local),
        lambda: tx.update(local, longer, local),
    ):
        with pytest.raises(ValueError, match=r"'trace\.a' has shape \(99,\) .* expected \(16,\)"):
            use()


def test_a_state_is_converted_after_a_step_with_a_tree_of_another_structure_and_the_same_names():
    flat = {"a.w": torch.zeros(4, 4)}
    nested = {"a": {"w": torch.zeros(4, 4)}}
    layout = sharding.zero(flat, 1, partition="flat")
    tx = sharding.sharded(mfx.accumulate(mfx.momentum(), every=2), layout)
    shards = layout.shard(nested)
    tx.update(shards, tx.init(shards), shards, boundary=True)
    params = layout.shard(flat)
    converted = sharding.to_global(tx, tx.init(params), params)
    assert all(
        isinstance(leaf, mfx.checkpoint.FlatShard)
        for leaf in mfx.tree.leaves(converted.inner.trace)
    )


def test_a_state_of_init_on_meta_tensors_is_converted_without_the_parameters():
    nested = {"a": {"w": torch.zeros(4, 4), "x": torch.zeros(4, 4)}}
    layout = sharding.zero(nested, 1, partition="flat")
    tx = sharding.sharded(mfx.momentum(), layout)
    state = tx.init(mfx.tree.map(lambda shard: shard.to("meta"), layout.shard(nested)))
    converted = sharding.to_global(tx, state)
    assert isinstance(converted.trace["a"]["w"], mfx.checkpoint.FlatShard)
    assert mfx.tree.names(sharding.from_global(tx, converted)) == mfx.tree.names(state)


def test_a_state_is_saved_and_loaded_with_a_transform_that_was_not_used_yet(tmp_path: Path):
    nested = {"a": {"w": torch.zeros(4, 4), "x": torch.zeros(4, 4)}}

    def build() -> Any:
        return sharding.sharded(mfx.momentum(), sharding.zero(nested, 1, partition="flat"))

    tx = build()
    local = tx.layout.shard(nested)
    state = tx.init(local)
    mfx.checkpoint.save(tmp_path / "saved", state, params=local, tx=build())
    loaded = mfx.checkpoint.load(tmp_path / "saved", like=state, tx=build())
    assert mfx.tree.names(loaded) == mfx.tree.names(state)
    with pytest.raises(ValueError, match=r"missing 'trace\.a\.w'.* unexpected 'trace\.b'"):
        sharding.to_global(build(), {"trace": {"b": torch.zeros(16)}})
