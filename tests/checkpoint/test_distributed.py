"""Many processes: what any number of ranks has saved, any other number loads, under any layout."""

import re
from pathlib import Path

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import CorruptError, FlatPiece, MismatchError, WriteError, data
from tests.checkpoint import workers
from tests.checkpoint.common import assert_same_tree, copies
from tests.checkpoint.workers import SIZES, tree_of
from tests.processes import World, errors_of

ck = mfx.checkpoint
dist = pytest.mark.dist


@dist
@pytest.mark.parametrize("savers", SIZES)
def test_what_some_ranks_save_any_number_loads(world: World, tmp_path: Path, savers: int):
    for seed in range(3):
        path = tmp_path / str(seed)
        world.check(savers, workers.save_mixed, path=path, seed=seed, step=seed, extra={"ranks": savers})
        state, params = tree_of(seed), tree_of(seed + 1)["momentum"].trace
        # one process, no group
        assert_same_tree(ck.load(path, like=state), state)
        assert_same_tree(ck.load_params(path, like=params), params)
        found = ck.verify(path)
        assert (found.step, found.extra) == (seed, {"ranks": savers})
        for loaders in SIZES:
            world.check(loaders, workers.load_mixed, path=path, seed=seed, layout=10 * seed + loaders)
        world.check(2, workers.load_plainly, path=path, seed=seed)


@dist
@pytest.mark.parametrize("kind", ["plain", "flat", "rows", "columns", "replicated", "grid"])
def test_each_layout_stores_the_logical_tensors(world: World, tmp_path: Path, kind: str):
    """Names, shapes and dtypes are those that one process writes, and every element is stored once."""
    world.check(4, workers.save_mixed, path=tmp_path / "many", seed=3, kinds=(kind,))
    ck.save(tmp_path / "one", tree_of(3), params=tree_of(4)["momentum"].trace)
    many, one = ck.inspect(tmp_path / "many"), ck.inspect(tmp_path / "one")
    assert {name: leaf.spec for name, leaf in many.leaves.items()} == {
        name: leaf.spec for name, leaf in one.leaves.items()
    }
    stored = sum(file.nbytes - file.header_nbytes for file in many.files)
    assert stored == one.nbytes
    assert_same_tree(dict(sorted(ck.read(tmp_path / "many").items())), dict(sorted(ck.read(tmp_path / "one").items())))
    for path in (tmp_path / "many", tmp_path / "one"):
        world.check(4, workers.load_mixed, path=path, seed=3, layout=3, kinds=(kind,))


@dist
@pytest.mark.parametrize("number", [12, pytest.param(1000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_of_any_shape_and_cut_go_there_and_back(world: World, tmp_path: Path, size: int, number: int):
    for start in range(0, number, 50):
        world.check(size, workers.random_pieces, path=tmp_path, seeds=range(start, min(number, start + 50)))


@dist
def test_a_save_in_the_background_keeps_what_was_there_when_it_began(world: World, tmp_path: Path):
    for seed in (1, 2):
        results = world.check(4, workers.save_in_background, path=tmp_path / str(seed), seed=seed)
        assert_same_tree(ck.load(tmp_path / str(seed), like=tree_of(seed)), tree_of(seed))
        assert sum(written for written, _ in results) == ck.inspect(tmp_path / str(seed)).nbytes
        assert all(in_order for _, in_order in results)


def errors(results: list[object]) -> list[BaseException]:
    found = errors_of(results)
    assert len({(type(error), str(error)) for error in found}) == 1  # on every rank alike
    return found


@dist
@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("no tensor", ck.CheckpointError, r"rank 1: .*'bad' is a float, expected a tensor"),
        ("other shape", ck.CheckpointError, r"rank 0: .*matrix' is \((8|9), 6\) float32 on rank \d .* on rank \d"),
        ("other dtype", ck.CheckpointError, r"rank 0: .*matrix' is \(8, 6\) float\d\d on rank \d .* on rank \d"),
        ("no space", WriteError, r"rank 1: .* not written: No space left.*the previous checkpoint is unchanged"),
        ("not shared", WriteError, r"rank 0: .* do all ranks use one file system\?"),
        ("hole", ck.CheckpointError, r"rank 0: .*piece.*"),
        ("overlap", ck.CheckpointError, r"rank 0: .*piece.*overlap"),
    ],
)
def test_trouble_on_one_rank_is_an_error_on_all_and_changes_nothing(world: World, tmp_path, trouble, kind, message):
    path = tmp_path / "here"
    world.check(2, workers.save_mixed, path=path, seed=4, kinds=("plain", "flat"))
    before = copies(path)
    error, _ = errors(world.run(2, workers.save_with_trouble, path=path, seed=4, trouble=trouble, on=1))
    assert type(error) is kind
    assert re.search(message, str(error))
    assert copies(path) == before
    errors(world.run(2, workers.save_with_trouble, path=tmp_path / "new", seed=4, trouble=trouble, on=1))
    assert not list(tmp_path.glob("new/*"))


@dist
def test_a_load_that_does_not_fit_is_one_error_on_all(world: World, tmp_path: Path):
    world.check(2, workers.save_mixed, path=tmp_path, seed=4, kinds=("plain", "flat"))
    for on, ranks in ((None, "ranks 0, 1: "), (1, "rank 1: ")):
        error, _ = errors(world.run(2, workers.load_with_trouble, path=tmp_path, seed=4, on=on))
        assert isinstance(error, MismatchError)
        assert str(error).startswith(ranks)
        assert error.problems == ("missing:   'new', (2,) float32, is not in the checkpoint",)
    error, _ = errors(world.run(2, workers.load_with_trouble, path=tmp_path / "nowhere", seed=4))
    assert isinstance(error, ck.NotFoundError)


@dist
def test_a_missing_or_damaged_shard_is_named_on_all(world: World, tmp_path: Path, monkeypatch):
    path = tmp_path / "here"
    world.check(4, workers.save_mixed, path=path, seed=4)
    monkeypatch.setattr(data, "_MOST_OPEN", 2)
    assert_same_tree(ck.load(path, like=tree_of(4)), tree_of(4))  # with fewer open files than ranks have written
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 4
    whole = shards[2].read_bytes()
    shards[2].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for message in ("is damaged in", f"{shards[2].name}: the data file cannot be read"):
        error, *_ = errors(world.run(4, workers.load_mixed, path=path, seed=4, layout=1, kinds=("plain",)))
        assert isinstance(error, CorruptError)
        assert message in str(error)
        shards[2].unlink(missing_ok=True)
    with pytest.raises(CorruptError, match=shards[2].name):
        ck.load(path, like=tree_of(4))


@dist
@pytest.mark.parametrize(("what", "done"), [("save", "WriteError: .* written"), ("load", "CheckpointError: .* loaded")])
def test_a_rank_that_calls_alone_is_told_which_ranks_did_not(world: World, tmp_path: Path, what: str, done: str):
    said, other = world.check(2, workers.one_alone, path=tmp_path, what=what)
    together = rf": nothing.*all ranks must call checkpoint\.{what} together, but rank 1 did not.*"
    assert re.fullmatch(done.replace(".* ", ".* was not ") + together, said)
    assert not other


@dist
def test_the_newest_are_kept_by_ranks_too(world: World, tmp_path: Path):
    for step in range(4):
        world.check(2, workers.save_mixed, path=ck.step_path(tmp_path, step), seed=4, step=step, keep=2)
    assert [path.name for path in ck.checkpoints(tmp_path)] == ["step-000000002", "step-000000003"]
    assert sorted(tmp_path.iterdir()) == ck.checkpoints(tmp_path)
    # at one path, more than once, by fewer ranks: nothing of the larger save is left
    world.check(4, workers.save_mixed, path=tmp_path / "one", seed=1)
    world.check(1, workers.save_mixed, path=tmp_path / "one", seed=2)
    assert len(list((tmp_path / "one").iterdir())) == 2
    assert_same_tree(ck.load(tmp_path / "one", like=tree_of(2)), tree_of(2))


@dist
@pytest.mark.parametrize(
    ("what", "argument"),
    [("save", "path"), ("save", "step"), ("save", "extra"), ("load", "path"), ("load", "allow_extra")],
)
def test_arguments_that_differ_are_named_with_the_ranks(world: World, tmp_path: Path, what: str, argument: str):
    for name in ("one", "two"):
        ck.save(tmp_path / name, tree_of(0))
    before = sorted(tmp_path.rglob("*"))
    error, *_ = errors(world.run(3, workers.call_differently, path=tmp_path, what=what, argument=argument))
    assert f"the ranks {what} with different {argument}=" in str(error)
    assert "ranks 0, 1: " in str(error)
    assert "rank 2: " in str(error)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_piece_without_a_group_is_refused(tmp_path: Path):
    piece = FlatPiece((4,), 0, torch.zeros(2))
    with pytest.raises(TypeError, match="'w' is a FlatPiece, of which each rank holds a part: pass group="):
        ck.save(tmp_path / "x", {"w": piece})
    ck.save(tmp_path / "y", {"w": torch.zeros(4)})
    with pytest.raises(TypeError, match="'w' is a FlatPiece, of which each rank holds a part: pass group="):
        ck.load(tmp_path / "y", like={"w": piece})


def test_a_piece_must_lie_within_its_tensor():
    for start, values, message in (
        (-1, torch.zeros(2), "lie within"),
        (3, torch.zeros(2), "lie within"),
        (0, torch.zeros(2, 2), "one dim"),
    ):
        with pytest.raises(ValueError, match=message):
            FlatPiece((2, 2), start, values)


def test_a_save_in_the_background_of_one_process(tmp_path: Path):
    state = {"w": torch.arange(5.0), "half": torch.ones(3, dtype=torch.bfloat16)}
    kept, extra, seen = mfx.tree.map(torch.clone, state), {"losses": [1.0]}, []
    path = ck.step_path(tmp_path, 1)
    saving = ck.save_async(path, state, step=1, extra=extra, keep=1, progress=lambda done, total: seen.append(done))
    extra["losses"].append(2.0)
    state["w"].zero_()
    assert saving.wait(60) == path
    assert saving.done
    assert_same_tree(ck.load(path, like=state), kept)
    assert ck.inspect(path).extra == {"losses": [1.0]}
    assert seen[-1] == 26
    with pytest.raises(TypeError, match="'a' is a float"):
        ck.save_async(tmp_path / "x", {"a": 1.0})
