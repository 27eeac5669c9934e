"""Many processes: what any number of ranks has saved, any other number loads, under any layout."""

import os
import random
import re
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx.checkpoint import CorruptError, FlatShard, MismatchError, WriteError, reader
from muonfx.checkpoint.writer import Draft
from muonfx.sharding.communication import waiting
from tests.checkpoint.common import assert_same_tree, bits, copies
from tests.processes import Here, World, errors_of, on_ranks

ck = mfx.checkpoint
SIZES = (1, 2, 4)


def tree_of(seed: int) -> dict[str, Any]:
    """A state of many kinds of leaves, the same in every process."""
    draw = torch.Generator().manual_seed(seed)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if dtype in (torch.int8, torch.int64):
            return torch.randint(-100, 100, shape, generator=draw, dtype=dtype)
        return torch.randn(shape, generator=draw).to(dtype)

    side = random.Random(seed).randrange(1, 9)
    return {
        "momentum": mfx.transforms.MomentumState(
            {
                "matrix": some(8, 6),
                "odd": some(7, 5, dtype=torch.bfloat16),
                "any": some(side, 11 - side),
                "thin": some(1, 9),
                "stack": some(3, 4, 5),
                "vector": some(13),
                "empty": some(0, 3),
                "codes": some(6, 10, dtype=torch.int8),
                "double": some(4, 4, dtype=torch.float64),
            }
        ),
        "count": some(dtype=torch.int64),
        "fp8": some(5, 7).to(torch.float8_e4m3fn),
    }


def cuts(numel: int, size: int, seed: int | None) -> list[int]:
    """Where to cut a flat buffer: evenly, or anywhere."""
    if seed is None:
        step = -(-numel // size)
        return [min(numel, step * rank) for rank in range(size)] + [numel]
    return [0, *sorted(random.Random(seed).randrange(numel + 1) for _ in range(size - 1)), numel]


def laid_out(whole: Tensor, kind: str, here: Here, seed: int) -> Any:
    """This rank's part of a tensor."""
    if kind == "plain":
        return whole.clone()
    if kind == "flat" or whole.dtype is torch.float8_e4m3fn:
        at = cuts(whole.numel(), here.size, seed if seed % 2 else None)
        return FlatShard.cut(whole.clone(), at[here.rank], at[here.rank + 1])
    if kind == "grid" and here.size == 4 and whole.ndim >= 2:
        placements = [Shard(0), Shard(1)] if seed % 2 else [Replicate(), Shard(1)]
        return distribute_tensor(whole.clone(), here.grid, placements, src_data_rank=None)
    dim = {"rows": 0, "columns": 1}.get(kind)
    placement = Replicate() if dim is None or dim >= whole.ndim else Shard(dim)
    return distribute_tensor(whole.clone(), here.mesh, [placement], src_data_rank=None)


KINDS = ("plain", "flat", "rows", "columns", "replicated", "grid")


def mixed(tree: Any, here: Here, kinds: tuple[str, ...], seed: int) -> Any:
    """A tree whose leaves are laid out in drawn ways."""
    draw = random.Random(seed)
    leaves, treedef = mfx.tree.flatten(tree)
    return mfx.tree.unflatten(
        treedef, [laid_out(leaf, draw.choice(kinds), here, draw.randrange(99)) for leaf in leaves]
    )


def assert_is_layout_of(found: Any, whole: Any, wanted: Any) -> None:
    """That each leaf is laid out as wanted, and holds this rank's part of the whole."""
    for name, leaf, full, like in zip(
        mfx.tree.names(whole),
        mfx.tree.leaves(found),
        mfx.tree.leaves(whole),
        mfx.tree.leaves(wanted),
        strict=True,
    ):
        assert type(leaf) is type(like), name
        if isinstance(like, FlatShard):
            assert (leaf.shape, leaf.start, leaf.stop) == (like.shape, like.start, like.stop), name
            assert bits(leaf.data) == bits(full.reshape(-1)[like.start : like.stop]), name
        elif isinstance(like, DTensor):
            assert leaf.placements == like.placements, name
            assert bits(leaf.to_local()) == bits(like.to_local()), name
        else:
            assert bits(leaf) == bits(full), name


def save_mixed(
    here: Here, path: Path, seed: int, kinds: tuple[str, ...] = KINDS, **more: Any
) -> Path:
    state, params = tree_of(seed), tree_of(seed + 1)["momentum"].trace
    state, params = (mixed(tree, here, kinds, seed) for tree in (state, params))
    return ck.save(path, state, params=params, group=here.group, **more)


def load_mixed(
    here: Here, path: Path, seed: int, layout: int, kinds: tuple[str, ...] = KINDS, **more: Any
) -> None:
    state, params = tree_of(seed), tree_of(seed + 1)["momentum"].trace
    like = mixed(state, here, kinds, layout)
    blank = mfx.tree.map(
        lambda leaf: leaf.empty_like() if isinstance(leaf, FlatShard) else torch.empty_like(leaf),
        like,
    )
    assert_is_layout_of(ck.load(path, like=blank, group=here.group, **more), state, like)
    like = mixed(params, here, kinds, layout + 1)
    assert_is_layout_of(ck.load_params(path, like=like, group=here.group), params, like)


def save_with_trouble(here: Here, path: Path, seed: int, trouble: str, on: int) -> None:
    """Save, with something wrong on one rank, or in the shards of all."""
    state, original = mixed(tree_of(seed), here, ("plain", "flat"), seed), Draft.write

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    def elsewhere(draft: Any, where: Path, *more: Any) -> Any:
        (other := where.parents[1] / f"elsewhere-{where.name}").mkdir()
        return original(draft, other / where.name, *more)

    if trouble in ("hole", "overlap"):
        start, numel = {"hole": (4, 3), "overlap": (2, 5)}[trouble]
        state["piece"] = FlatShard((4, 2), start * here.rank, torch.zeros(numel))
    elif here.rank == on and trouble in ("no space", "not shared"):
        Draft.write = {"no space": full, "not shared": elsewhere}[trouble]
    elif here.rank == on and trouble == "no tensor":
        state["bad"] = 1.0
    elif here.rank == on:
        wrong = {
            "other shape": torch.zeros(9, 6),
            "other dtype": torch.zeros(8, 6, dtype=torch.float64),
        }
        state["momentum"].trace["matrix"] = wrong[trouble]
    try:
        ck.save(path, state, group=here.group, step=seed + 1)
    finally:
        Draft.write = original


def load_with_trouble(here: Here, path: Path, seed: int, on: int | None = None) -> None:
    """Load with another argument on one rank, or on all."""
    like = mixed(tree_of(seed), here, ("plain", "flat"), seed)
    if on in (None, here.rank):
        like["new"] = torch.zeros(2)
    ck.load(path, like=like, group=here.group)


def load_plainly(here: Here, path: Path, seed: int) -> None:
    """Load whole tensors on every rank."""
    state = tree_of(seed)
    found = ck.load(path, like=mfx.checkpoint.StateSpec.of(state), group=here.group)
    assert_is_layout_of(found, state, state)


def call_differently(here: Here, path: Path, what: str, argument: str) -> None:
    """Save or load, with an argument that is another on the last rank."""
    odd = here.rank == here.size - 1
    where = path / ("two" if odd and argument == "path" else "one")
    given: dict[str, Any] = (
        {}
        if argument == "path"
        else {argument: {"step": int(odd), "extra": {"a": odd}}.get(argument, odd)}
    )
    if what == "save":
        ck.save(where, tree_of(0), group=here.group, **given)
    else:
        ck.load(where, like=tree_of(0), group=here.group, **given)


# --------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.dist
@pytest.mark.parametrize("savers", SIZES)
def test_what_some_ranks_save_any_number_loads(world: World, tmp_path: Path, savers: int):
    for seed in range(3):
        path = tmp_path / str(seed)
        world.check(savers, save_mixed, path=path, seed=seed, step=seed, extra={"ranks": savers})
        state, params = tree_of(seed), tree_of(seed + 1)["momentum"].trace
        # one process, no group
        assert_same_tree(ck.load(path, like=state), state)
        assert_same_tree(ck.load_params(path, like=params), params)
        found = ck.verify(path)
        assert (found.step, found.extra) == (seed, {"ranks": savers})
        for loaders in SIZES:
            world.check(loaders, load_mixed, path=path, seed=seed, layout=10 * seed + loaders)
        world.check(2, load_plainly, path=path, seed=seed)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["plain", "flat", "rows", "columns", "replicated", "grid"])
def test_each_layout_stores_the_logical_tensors(world: World, tmp_path: Path, kind: str):
    """Names, shapes and dtypes are those that one process writes, and every element is stored once."""
    world.check(4, save_mixed, path=tmp_path / "many", seed=3, kinds=(kind,))
    ck.save(tmp_path / "one", tree_of(3), params=tree_of(4)["momentum"].trace)
    many, one = ck.inspect(tmp_path / "many"), ck.inspect(tmp_path / "one")
    assert {name: leaf.spec for name, leaf in many.leaves.items()} == {
        name: leaf.spec for name, leaf in one.leaves.items()
    }
    stored = sum(file.nbytes - file.header_nbytes for file in many.files)
    assert stored == one.nbytes
    assert_same_tree(
        dict(sorted(ck.read(tmp_path / "many").items())),
        dict(sorted(ck.read(tmp_path / "one").items())),
    )
    for path in (tmp_path / "many", tmp_path / "one"):
        world.check(4, load_mixed, path=path, seed=3, layout=3, kinds=(kind,))


@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        *(pytest.param(range(at, at + 50), marks=pytest.mark.deep) for at in range(12, 1000, 50)),
    ],
)
@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_pieces_of_any_shape_and_cut_go_there_and_back(here: Here, tmp_path: Path, seeds: range):
    """Arrays of drawn shapes, cut in drawn ways, saved and loaded under other cuts."""
    for seed in seeds:
        draw, path = random.Random(seed), tmp_path / str(seed)
        shapes = [[draw.choice(range(6)) for _ in range(draw.randrange(4))] for _ in range(6)]
        whole = {
            str(place): torch.arange(float(prod(shape))).reshape(shape)
            for place, shape in enumerate(shapes)
        }
        own = slice(here.rank, here.rank + 2)
        one, other = (
            {
                name: FlatShard.cut(
                    leaf, *cuts(leaf.numel(), here.size, 7 * seed + turn + int(name))[own]
                )
                for name, leaf in whole.items()
            }
            for turn in (0, 1)
        )
        ck.save(path, one, group=here.group)
        assert_is_layout_of(ck.load(path, like=other, group=here.group), whole, other)


@pytest.mark.parametrize("seed", [1, 2])
@on_ranks(4)
def test_a_save_in_the_background_keeps_what_was_there_when_it_began(
    here: Here, tmp_path: Path, seed: int
):
    """The state is overwritten at once."""
    state = mixed(tree_of(seed), here, KINDS, seed)
    saving = ck.save_async(tmp_path / "saved", state, group=here.background, step=seed)
    for leaf in mfx.tree.leaves(state):
        local = (
            leaf.data
            if isinstance(leaf, FlatShard)
            else leaf.to_local()
            if isinstance(leaf, DTensor)
            else leaf
        )
        local.zero_()
    assert saving.wait(60) == tmp_path / "saved"
    assert saving.done
    assert_same_tree(ck.load(tmp_path / "saved", like=tree_of(seed)), tree_of(seed))


def errors(results: list[object]) -> list[BaseException]:
    found = errors_of(results)
    assert len({(type(error), str(error)) for error in found}) == 1  # equally on every rank
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("no tensor", ck.CheckpointError, r"rank 1: .*'bad' is a float, expected a tensor"),
        (
            "other shape",
            ck.CheckpointError,
            r"rank 0: .*matrix' is \((8|9), 6\) float32 on rank \d .* on rank \d",
        ),
        (
            "other dtype",
            ck.CheckpointError,
            r"rank 0: .*matrix' is \(8, 6\) float\d\d on rank \d .* on rank \d",
        ),
        (
            "no space",
            WriteError,
            r"rank 1: .* not written: No space left.*the previous checkpoint is unchanged",
        ),
        ("not shared", WriteError, r"rank 0: .* do all ranks use one file system\?"),
        ("hole", ck.CheckpointError, r"rank 0: .*piece.*"),
        ("overlap", ck.CheckpointError, r"rank 0: .*piece.*overlap"),
    ],
)
def test_trouble_on_one_rank_is_an_error_on_all_and_changes_nothing(
    world: World, tmp_path, trouble, kind, message
):
    path = tmp_path / "here"
    world.check(2, save_mixed, path=path, seed=4, kinds=("plain", "flat"))
    before = copies(path)
    error, _ = errors(world.run(2, save_with_trouble, path=path, seed=4, trouble=trouble, on=1))
    assert type(error) is kind
    assert re.search(message, str(error))
    assert copies(path) == before
    errors(world.run(2, save_with_trouble, path=tmp_path / "new", seed=4, trouble=trouble, on=1))
    assert not list(tmp_path.glob("new/*"))


@pytest.mark.dist
def test_a_load_that_does_not_fit_is_one_error_on_all(world: World, tmp_path: Path):
    world.check(2, save_mixed, path=tmp_path, seed=4, kinds=("plain", "flat"))
    for on, ranks in ((None, "ranks 0, 1: "), (1, "rank 1: ")):
        error, _ = errors(world.run(2, load_with_trouble, path=tmp_path, seed=4, on=on))
        assert isinstance(error, MismatchError)
        assert str(error).startswith(ranks)
        assert error.problems == ("missing:   'new', (2,) float32, is not in the checkpoint",)
    error, _ = errors(world.run(2, load_with_trouble, path=tmp_path / "nowhere", seed=4))
    assert isinstance(error, ck.NotFoundError)


@pytest.mark.dist
def test_a_missing_or_damaged_shard_is_named_on_all(world: World, tmp_path: Path, monkeypatch):
    path = tmp_path / "here"
    world.check(4, save_mixed, path=path, seed=4)
    monkeypatch.setattr(reader, "_MOST_OPEN", 2)
    # With fewer open files than ranks have written.
    assert_same_tree(ck.load(path, like=tree_of(4)), tree_of(4))
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 4
    whole = shards[2].read_bytes()
    shards[2].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for message in ("is damaged in", f"{shards[2].name}: the data file cannot be read"):
        error, *_ = errors(world.run(4, load_mixed, path=path, seed=4, layout=1, kinds=("plain",)))
        assert isinstance(error, CorruptError)
        assert message in str(error)
        shards[2].unlink(missing_ok=True)
    with pytest.raises(CorruptError, match=shards[2].name):
        ck.load(path, like=tree_of(4))


@pytest.mark.parametrize(
    ("what", "done"), [("save", "WriteError: .* written"), ("load", "CheckpointError: .* loaded")]
)
@on_ranks(2)
def test_a_rank_that_calls_alone_is_told_which_ranks_did_not(
    here: Here, tmp_path: Path, what: str, done: str
):
    """The others call other collectives meanwhile; then all do it together."""
    state, path = tree_of(1), tmp_path / "saved"
    calls = {
        "save": lambda: ck.save(path, state, group=here.group),
        "load": lambda: ck.load(path, like=state, group=here.group),
    }
    calls["save"]()
    kept = waiting._timeout
    if here.rank == 0:
        waiting._timeout = lambda group: timedelta(seconds=0.2)
        try:
            with pytest.raises(ck.CheckpointError) as caught:
                calls[what]()
        finally:
            waiting._timeout = kept
        together = (
            rf": nothing.*all ranks must call checkpoint\.{what} together, but rank 1 did not.*"
        )
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert re.fullmatch(done.replace(".* ", ".* was not ") + together, said)
    dist.all_reduce(torch.ones(3), group=here.group)
    calls[what]()


@pytest.mark.dist
def test_the_newest_are_kept_by_ranks_too(world: World, tmp_path: Path):
    for step in range(4):
        world.check(2, save_mixed, path=ck.step_path(tmp_path, step), seed=4, step=step, keep=2)
    assert [path.name for path in ck.checkpoints(tmp_path)] == ["step-000000002", "step-000000003"]
    assert sorted(tmp_path.iterdir()) == ck.checkpoints(tmp_path)
    # at one path, more than once, by fewer ranks: nothing of the larger save is left
    world.check(4, save_mixed, path=tmp_path / "one", seed=1)
    world.check(1, save_mixed, path=tmp_path / "one", seed=2)
    assert len(list((tmp_path / "one").iterdir())) == 2
    assert_same_tree(ck.load(tmp_path / "one", like=tree_of(2)), tree_of(2))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "argument"),
    [
        ("save", "path"),
        ("save", "step"),
        ("save", "extra"),
        ("load", "path"),
        ("load", "allow_extra"),
    ],
)
def test_arguments_that_differ_are_named_with_the_ranks(
    world: World, tmp_path: Path, what: str, argument: str
):
    for name in ("one", "two"):
        ck.save(tmp_path / name, tree_of(0))
    before = sorted(tmp_path.rglob("*"))
    error, *_ = errors(world.run(3, call_differently, path=tmp_path, what=what, argument=argument))
    assert f"the ranks {what} with different {argument}=" in str(error)
    assert "ranks 0, 1: " in str(error)
    assert "rank 2: " in str(error)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_piece_without_a_group_is_refused(tmp_path: Path):
    piece = FlatShard((4,), 0, torch.zeros(2))
    with pytest.raises(
        TypeError, match="'w' is a FlatShard, of which each rank holds a part: pass group="
    ):
        ck.save(tmp_path / "x", {"w": piece})
    ck.save(tmp_path / "y", {"w": torch.zeros(4)})
    with pytest.raises(
        TypeError, match="'w' is a FlatShard, of which each rank holds a part: pass group="
    ):
        ck.load(tmp_path / "y", like={"w": piece})


def test_a_piece_must_lie_within_its_tensor():
    for start, values, message in (
        (-1, torch.zeros(2), "expected a range within"),
        (3, torch.zeros(2), "expected a range within"),
        (0, torch.zeros(2, 2), "one dim"),
    ):
        with pytest.raises(ValueError, match=message):
            FlatShard((2, 2), start, values)


def test_a_save_in_the_background_of_one_process(tmp_path: Path):
    state = {"w": torch.arange(5.0), "half": torch.ones(3, dtype=torch.bfloat16)}
    kept, extra = mfx.tree.map(torch.clone, state), {"losses": [1.0]}
    path = ck.step_path(tmp_path, 1)
    saving = ck.save_async(path, state, step=1, extra=extra, keep=1)
    extra["losses"].append(2.0)
    state["w"].zero_()
    assert saving.wait(60) == path
    assert saving.done
    assert_same_tree(ck.load(path, like=state), kept)
    assert ck.inspect(path).extra == {"losses": [1.0]}
    with pytest.raises(TypeError, match="'a' is a float"):
        ck.save_async(tmp_path / "x", {"a": 1.0})
