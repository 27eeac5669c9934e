"""A state saved under one layout goes on under any other, on another number of ranks, or in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World
from tests.sharding.cases import Flat, LayoutCase, Leaf, Model, Params, Placed, Replicated, Zero, laid_out, model, muon
from tests.sharding.law import assert_equal

pytestmark = pytest.mark.dist

DRAWN = model(
    steps=4, a=(6, 5), b=(9, 4), stack=Leaf((5, 3, 7), "stack"), conv=(4, 3, 2), c=Leaf((7,)), e=Leaf((10, 3))
)
ALL = list(DRAWN.leaves)


def chain_of(kind: str) -> mfx.Transform:
    stack = mfx.chain(
        mfx.orthogonalize(dtype=torch.float32, dims=((-2,), (-1,))), mfx.normalize_neurons(dims=((-2,), (-1,)))
    )
    matrices = mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float32), mfx.normalize_neurons())
    if kind == "compact":
        matrices = mfx.chain(mfx.momentum(0.9, dtype=mfx.int8(min_size=1)), muon())
    tx = mfx.partition({"muon": matrices, "stack": stack, "adamw": mfx.scale_by_adam()}, DRAWN.labels)
    tx = mfx.chain(mfx.clip_by_global_norm(3.0), tx, mfx.scale_by_learning_rate(0.1))
    return {"accumulate": mfx.accumulate(tx, 3), "inject": mfx.inject_hyperparams(tx)}.get(kind, tx)


LAYOUTS: dict[str, LayoutCase] = {
    "replicated": Replicated(),
    "whole": Zero(1, "whole", 4),
    "flat": Zero(3, "flat", 2),
    "cuts": Flat(tuple(reversed(ALL)), (0, 11, 90, 90, DRAWN.numel)),
    "rows": Placed(dict.fromkeys(ALL, ("0",))),
    "grid": Placed(
        {name: ("0", "1") if len(leaf.shape) > 1 else ("0", "0") for name, leaf in DRAWN.leaves.items()}, grid=True
    ),
}


def steps(tx: Any, state: Any, local: Any, enter: Any, drawn: Model, turns: range) -> tuple[Any, Any]:
    for turn in turns:
        updates, state = tx.update(enter(drawn.grads(turn)), state, local)
        local = mfx.apply_updates(local, updates)
    return local, state


def save(here: Here, path: Path, kind: str, case: LayoutCase) -> None:
    params = DRAWN.params()
    layout, tx = laid_out(case, params, here).of(params), chain_of(kind)
    sharded, local = sharding.sharded(tx, layout), layout.shard(params)
    local, state = steps(sharded, sharded.init(local), local, layout.shard, DRAWN, range(2))
    mfx.checkpoint.save(
        path, sharding.logical(sharded, state), params=layout.logical(local), tx=sharded, group=here.group
    )


def go_on(here: Here, path: Path, kind: str, case: LayoutCase) -> Params:
    blank = {name: torch.zeros_like(leaf) for name, leaf in DRAWN.params().items()}
    layout, tx = laid_out(case, blank, here).of(blank), chain_of(kind)
    sharded, local = sharding.sharded(tx, layout), layout.shard(blank)
    like = sharding.logical(sharded, sharded.init(local))
    state = sharding.local(sharded, mfx.checkpoint.load(path, like=like, tx=sharded, group=here.group))
    local = layout.local(mfx.checkpoint.load_params(path, like=layout.logical(local), group=here.group))
    local, _ = steps(sharded, state, local, layout.shard, DRAWN, range(2, 4))
    return layout.gather(local)


@pytest.mark.parametrize("kind", ["plain", "compact", "accumulate", "inject"])
@pytest.mark.parametrize(
    ("saved", "sizes", "loaded"),
    [
        ("replicated", (2, 4), "flat"),
        ("whole", (3, 2), "rows"),
        ("flat", (4, 3), "whole"),
        ("cuts", (4, 4), "grid"),
        ("rows", (2, 4), "cuts"),
        ("grid", (4, 1), "replicated"),
    ],
)
def test_a_run_goes_on_under_another_layout(
    world: World, tmp_path: Path, kind: str, saved: str, sizes: Any, loaded: str
):
    world.check(sizes[0], save, path=tmp_path / "ck", kind=kind, case=LAYOUTS[saved])
    wanted = straight(kind)
    for found in world.check(sizes[1], go_on, path=tmp_path / "ck", kind=kind, case=LAYOUTS[loaded]):
        for name, leaf in wanted.items():
            assert_equal(found[name], leaf, False, name)


def test_one_process_goes_on_with_what_ranks_have_saved_and_back(world: World, tmp_path: Path):
    world.check(4, save, path=tmp_path / "four", kind="plain", case=LAYOUTS["cuts"])
    tx, params = chain_of("plain"), DRAWN.params()
    state = mfx.checkpoint.load(tmp_path / "four", like=tx.init(params), tx=tx)
    params = mfx.checkpoint.load_params(tmp_path / "four", like=params)
    mfx.checkpoint.save(tmp_path / "one", state, params=params, tx=tx)
    wanted = straight("plain")
    local, _ = steps(tx, state, params, lambda grads: grads, DRAWN, range(2, 4))
    for name, leaf in wanted.items():
        assert_equal(local[name], leaf, False, name)
    for found in world.check(3, go_on, path=tmp_path / "one", kind="plain", case=LAYOUTS["flat"]):
        for name, leaf in wanted.items():
            assert_equal(found[name], leaf, False, name)


def test_what_is_saved_does_not_tell_the_layout(world: World, tmp_path: Path):
    """The chain, its fingerprint and the leaves are those of one process."""
    world.check(2, save, path=tmp_path / "ck", kind="plain", case=LAYOUTS["flat"])
    tx, params = chain_of("plain"), DRAWN.params()
    index = mfx.checkpoint.inspect(tmp_path / "ck")
    assert index.chain == repr(tx)
    assert index.fingerprint == tx.fingerprint
    wanted = mfx.spec(tx, params)
    sharded = sharding.sharded(tx, sharding.zero(params, 2))
    assert mfx.spec(sharded, params) == wanted


def straight(kind: str) -> Params:
    tx, params = chain_of(kind), DRAWN.params()
    return steps(tx, tx.init(params), params, lambda grads: grads, DRAWN, range(4))[0]


def dtensors_there_and_back(here: Here) -> None:
    params = DRAWN.params()
    layout = laid_out(LAYOUTS["rows"], params, here)
    placed = layout.dressed(layout.shard(params))
    back = layout.local(layout.logical(placed))
    for name, param in placed.items():
        assert type(back[name]) is type(param) is not torch.Tensor
        assert torch.equal(back[name].full_tensor(), params[name])


def test_parameters_that_are_dtensors_are_logical_as_they_are(world: World):
    """`Layout.logical` wrapped a DTensor into another, which torch refuses; `local` undressed it."""
    world.check(2, dtensors_there_and_back)
