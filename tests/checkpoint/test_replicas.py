"""Replicas that differ are never mixed: one name with different values on different ranks is an error of the save."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx.checkpoint import FlatShard
from muonfx.checkpoint.index import Chunk, DataFile
from muonfx.checkpoint.leaves import whole_box
from muonfx.checkpoint.writer import (
    PlannedLeaf,
    ProposedLeaf,
    WrittenShards,
    merged,
    plan_of,
    shards_to_write,
)
from muonfx.sharding.shards.boxes import Box
from tests.checkpoint.common import assert_same_tree, copies
from tests.processes import Here, World, errors_of

ck = mfx.checkpoint
pytestmark = pytest.mark.dist


def whole_tree() -> dict[str, Any]:
    """Leaves of several dtypes, in a tree of two levels."""
    draw = torch.Generator().manual_seed(0)
    return {
        "first": torch.randn(8, 6, generator=draw),
        "layers": {
            "half": torch.randn(4, 8, generator=draw).to(torch.bfloat16),
            "codes": torch.randint(-100, 100, (16,), generator=draw, dtype=torch.int8),
            "count": torch.tensor(7),
            "last": torch.randn(3, 4, generator=draw),
        },
    }


def replica_of(leaf: Tensor, layout: str, here: Here) -> Any:
    """A leaf of which the last two ranks hold the same part."""
    if layout == "hsdp" and leaf.ndim:
        return distribute_tensor(
            leaf.clone(), here.grid, [Replicate(), Shard(0)], src_data_rank=None
        )
    if layout == "meshes of one rank":
        alone = DeviceMesh("cpu", [here.rank], _init_backend=False)
        return DTensor.from_local(leaf.clone(), alone, [Replicate()], run_check=False)
    if layout == "replicated" and leaf.ndim:
        return distribute_tensor(leaf.clone(), here.mesh, [Replicate()], src_data_rank=None)
    if layout == "flat" and leaf.ndim:  # the last rank holds the same interval as the first
        half = leaf.numel() // 2
        start = 0
        if here.rank == 1:
            start = half
        return FlatShard.cut(leaf.clone(), start, min(start + half, leaf.numel()))
    return leaf.clone()


def local_values(leaf: Any) -> Tensor:
    if isinstance(leaf, FlatShard):
        return leaf.data
    return getattr(leaf, "_local_tensor", leaf)


def save_with_another_bit(
    here: Here,
    path: Path,
    layout: str,
    name: str | None,
    ranks: tuple[int, ...],
    *,
    in_background: bool,
) -> None:
    """Save a tree of replicas, in which a few ranks have one other bit in the leaf ``name``."""
    tree = mfx.tree.map(lambda leaf: replica_of(leaf, layout, here), whole_tree())
    if name is not None and here.rank in ranks:
        leaves = {"first": tree["first"], **tree["layers"]}
        values = local_values(leaves[name]).reshape(-1).view(torch.uint8)
        values[-1] ^= 1
    if in_background:
        ck.save_async(path, tree, group=here.background).wait(60)
    else:
        ck.save(path, tree, group=here.group)


LAYOUTS = [
    ("plain", 3, (2,), r"rank 2 than on rank 0", False),
    ("plain", 3, (1, 2), r"ranks 1, 2 than on rank 0", True),
    ("replicated", 2, (1,), r"rank 1 than on rank 0", False),
    ("meshes of one rank", 2, (1,), r"rank 1 than on rank 0", False),
    ("hsdp", 4, (3,), r"rank 3 than on rank 1 in \[", True),
    ("flat", 3, (2,), r"rank 2 than on rank 0 in \[", False),
]


@pytest.mark.parametrize(("layout", "size", "ranks", "where", "in_background"), LAYOUTS)
def test_replicas_that_differ_in_one_bit_are_an_error_that_names_leaf_and_ranks(
    world: World,
    tmp_path: Path,
    layout: str,
    size: int,
    ranks: tuple[int, ...],
    where: str,
    in_background: bool,
):
    path = tmp_path / "saved"
    arguments: dict[str, Any] = {
        "path": path,
        "layout": layout,
        "ranks": ranks,
        "in_background": in_background,
    }
    world.check(size, save_with_another_bit, name=None, **arguments)
    assert_same_tree(ck.load(path, like=whole_tree()), whole_tree())
    before = copies(path)
    for name, leaf_name in {
        "first": "first",
        "half": "layers/half",
        "codes": "layers/codes",
    }.items():
        errors = errors_of(world.run(size, save_with_another_bit, name=name, **arguments))
        assert len({str(error) for error in errors}) == 1  # equally on every rank
        assert isinstance(errors[0], ck.CheckpointError)
        assert f"the leaf {leaf_name!r} has other values on " in str(errors[0])
        assert re.search(where, str(errors[0]))
        assert copies(path) == before  # the previous checkpoint, and no other file
    errors_of(
        world.run(
            size, save_with_another_bit, name="first", **{**arguments, "path": tmp_path / "new"}
        )
    )
    assert not (tmp_path / "new").exists()


def save_values(here: Here, path: Path, bits: list[int]) -> None:
    """Save one float32 per rank, given by its bits."""
    value = struct.unpack("<i", struct.pack("<I", bits[here.rank]))[0]
    ck.save(
        path, {"w": torch.tensor([value], dtype=torch.int32).view(torch.float32)}, group=here.group
    )


def test_bits_are_compared_so_nan_equals_itself_and_signed_zeros_differ(
    world: World, tmp_path: Path
):
    nan, other_nan, negative_zero = 0x7FC00000, 0x7FC00001, 0x80000000
    world.check(2, save_values, path=tmp_path / "nan", bits=[nan, nan])
    for bits in ([nan, other_nan], [0, negative_zero]):
        error, _ = errors_of(world.run(2, save_values, path=tmp_path / "x", bits=bits))
        assert "'w' has other values on rank 1 than on rank 0" in str(error)


def save_wrongly(here: Here, path: Path, mistake: str) -> None:
    """Save with something else on the last rank."""
    tree: dict[str, Any] = {"w": torch.ones(4, 4), "extra": torch.ones(2)}
    tx: Any = mfx.momentum(0.9)
    is_last = here.rank == here.size - 1
    if mistake == "missing leaf" and is_last:
        del tree["extra"]
    if mistake == "additional leaf" and is_last:
        tree["new"] = torch.ones(2)
    if mistake == "None" and is_last:
        tree["extra"] = None
    if mistake == "other number" and is_last:
        tx = mfx.momentum(0.8)
    if mistake == "other schedule" and is_last:
        tx = mfx.momentum(mfx.linear_schedule(0.0, 0.9, 10))
    if mistake == "other number in a tensor":
        tx = mfx.momentum(torch.tensor(0.9 - 0.1 * is_last))
    if mistake == "summands":
        tree["w"] = DTensor.from_local(torch.ones(4, 4), here.mesh, [Partial()], run_check=False)
    if mistake == "overlapping shards":  # an equal part and a part that overlaps it
        tree["w"] = FlatShard.cut(torch.ones(4, 4), 0, 16 - 4 * is_last)
    ck.save(path, tree, tx=tx, group=here.group)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("missing leaf", "'extra' is a plain tensor on ranks 0, 1 and missing on rank 2"),
        ("additional leaf", "'new' is a plain tensor on rank 2 and missing on ranks 0, 1"),
        ("None", "'extra' is a plain tensor on ranks 0, 1 and missing on rank 2"),
        ("other number", "different tx="),
        ("other schedule", "different tx="),
        ("other number in a tensor", "different tx="),
        ("summands", "'w' has the placements"),
        ("overlapping shards", "the shards of 'w' on all ranks overlap"),
    ],
)
def test_trees_and_transforms_that_differ_are_errors_before_anything_is_written(
    world: World, tmp_path: Path, mistake: str, message: str
):
    for error in errors_of(world.run(3, save_wrongly, path=tmp_path / "x", mistake=mistake)):
        assert isinstance(error, ck.CheckpointError)
        assert message in str(error)
    assert not (tmp_path / "x").exists()


def save_a_stage_each(here: Here, path: Path) -> None:
    """Save another leaf on each rank, marked as what this rank holds."""
    leaf = torch.full((3, 2), float(here.rank))
    piece = FlatShard.cut(leaf, 0, leaf.numel())
    ck.save(path, {f"stage{here.rank}": piece, "shared": torch.ones(2)}, group=here.group)


def test_ranks_may_hold_different_leaves_if_they_say_so(world: World, tmp_path: Path):
    world.check(3, save_a_stage_each, path=tmp_path)
    found = ck.read(tmp_path)
    assert {name: leaf[0, 0].item() for name, leaf in found.items() if name != "shared"} == {
        "stage0": 0.0,
        "stage1": 1.0,
        "stage2": 2.0,
    }


def test_the_error_counts_the_other_leaves_that_differ() -> None:
    spec = mfx.tree.Spec((2,), torch.float32)
    box = whole_box((2,))
    leaves_of_rank: list[dict[str, ProposedLeaf]] = []
    for checksum in ("cpu 1", "cpu 1", "cpu 2"):
        leaves_of_rank.append(
            {name: ProposedLeaf(spec, True, {box: checksum}) for name in ("a", "b", "c")}
        )
    text = r"the leaf 'a' has other values on rank 2 than on rank 0 \(and 2 other leaves differ\), expected equal bits"
    with pytest.raises(ck.CheckpointError, match=text):
        plan_of(leaves_of_rank)


def test_all_ranks_write_about_the_same_number_of_bytes() -> None:
    """A shard that one rank holds counts first, whatever its place in the tree, and bytes count, not shards."""
    sizes = {"shared": 50, "of rank 0": 100, "small": 1, "small, too": 1}
    plan: dict[str, PlannedLeaf] = {}
    for name, size in sizes.items():
        ranks = [0] if name == "of rank 0" else [0, 1]
        plan[name] = PlannedLeaf(mfx.tree.Spec((size,), torch.float32), {whole_box((size,)): ranks})
    names_of_rank = [[shard.name for shard in shards] for shards in shards_to_write(plan, 2)]
    assert names_of_rank == [["of rank 0"], ["shared", "small", "small, too"]]


def test_the_parts_of_a_leaf_are_in_the_order_of_the_tensor() -> None:
    """Whatever rank has written which part, so that the index does not depend on the ranks."""
    boxes = [Box((2,), (2,)), Box((0,), (2,))]  # of the ranks 0 and 1
    plan = {
        "w": PlannedLeaf(
            mfx.tree.Spec((4,), torch.float32), {box: [rank] for rank, box in enumerate(boxes)}
        )
    }
    written: list[WrittenShards] = []
    for rank, box in enumerate(boxes):
        written.append(
            WrittenShards(DataFile(f"rank {rank}", 8, 0, ""), [("w", Chunk(0, 0, box, ()))])
        )
    _, leaves = merged(written, plan)
    assert [(chunk.file, chunk.box.offsets) for chunk in leaves["w"].chunks] == [
        (1, (0,)),
        (0, (2,)),
    ]
