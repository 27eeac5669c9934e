"""An interval of a flattened shard: what ZeRO leaves to a rank of the rows or columns of tensor parallelism."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.position import ShardPosition, Span


@st.composite
def spans_of_dim(draw: st.DrawFn) -> tuple[int, list[Span]]:
    """Draw the size of a dim, and some disjoint spans of its indices in ascending order."""
    size = draw(st.integers(1, 7))
    ends = draw(st.lists(st.integers(0, size), min_size=2, max_size=6, unique=True).map(sorted))
    spans = [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
    return size, spans


@given(st.lists(spans_of_dim(), min_size=1, max_size=3), st.data())
def test_an_interval_of_a_shard_has_the_elements_of_the_flattened_shard(
    dims: list[tuple[int, list[Span]]], data: st.DataObject
) -> None:
    shape = [size for size, _ in dims]
    shard = ShardPosition.grid([spans for _, spans in dims])
    whole = torch.arange(float(prod(shape))).reshape(shape)
    flattened = shard.cut(whole).reshape(-1)
    start = data.draw(st.integers(0, shard.numel))
    stop = data.draw(st.integers(start, shard.numel))
    interval = shard.interval_of_shard(start, stop)
    assert torch.equal(interval.cut(whole), flattened[start:stop])
    pasted = torch.full_like(whole, -1.0)
    interval.paste(flattened[start:stop], pasted)
    assert torch.equal(pasted[pasted >= 0].sort().values, flattened[start:stop].sort().values)
    assert torch.equal(pasted[pasted >= 0], whole[pasted >= 0])
    leaf = FlatShard(tuple(shape), 0, flattened[start:stop], interval)
    assert torch.equal(leaf.empty_like().copy_(leaf).data, leaf.data)
    for box in leaf.boxes:
        index = tuple(slice(offset, end) for offset, end in zip(box.offsets, box.ends, strict=True))
        assert torch.equal(leaf.values_in(box), whole[index])


def test_a_checkpoint_stores_a_permuted_shard_in_the_order_of_the_whole_tensor(
    tmp_path: Path,
) -> None:
    """A rank may hold every element of a tensor in another order, if it holds columns of several parts."""
    whole = torch.arange(12.0).reshape(3, 4)
    columns = [ShardPosition.grid([((0, 3),), span]) for span in (((0, 2),), ((2, 4),))]
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        group = torch.distributed.group.WORLD
        boxes = [box for piece in columns for box in piece.interval_of_shard(0, 6).boxes]
        data = torch.cat([piece.cut(whole).reshape(-1) for piece in columns])
        leaf = FlatShard((3, 4), 0, data, ShardPosition((12,), tuple(boxes)))
        path = mfx.checkpoint.save(tmp_path / "a", {"w": leaf}, group=group)
        loaded = mfx.checkpoint.load(path, like={"w": leaf.empty_like()}, group=group)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(mfx.checkpoint.read(path)["w"], whole)
    assert torch.equal(loaded["w"].data, data)
