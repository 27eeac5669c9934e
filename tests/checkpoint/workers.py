"""What the tests of checkpoints have worker processes do."""

import os
import random
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx.checkpoint import FlatPiece
from muonfx.sharding import rendezvous
from tests.checkpoint.common import bits
from tests.processes import Here

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
        return FlatPiece.cut(whole.clone(), at[here.rank], at[here.rank + 1])
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
        mfx.tree.names(whole), mfx.tree.leaves(found), mfx.tree.leaves(whole), mfx.tree.leaves(wanted), strict=True
    ):
        assert type(leaf) is type(like), name
        if isinstance(like, FlatPiece):
            assert (leaf.shape, leaf.start, leaf.stop) == (like.shape, like.start, like.stop), name
            assert bits(leaf.data) == bits(full.reshape(-1)[like.start : like.stop]), name
        elif isinstance(like, DTensor):
            assert leaf.placements == like.placements, name
            assert bits(leaf.to_local()) == bits(like.to_local()), name
        else:
            assert bits(leaf) == bits(full), name


def save_mixed(here: Here, path: Path, seed: int, kinds: tuple[str, ...] = KINDS, **more: Any) -> Path:
    state, params = tree_of(seed), tree_of(seed + 1)["momentum"].trace
    state, params = (mixed(tree, here, kinds, seed) for tree in (state, params))
    return ck.save(path, state, params=params, group=here.group, **more)


def load_mixed(here: Here, path: Path, seed: int, layout: int, kinds: tuple[str, ...] = KINDS, **more: Any) -> None:
    state, params = tree_of(seed), tree_of(seed + 1)["momentum"].trace
    like = mixed(state, here, kinds, layout)
    blank = mfx.tree.map(
        lambda leaf: leaf.empty_like() if isinstance(leaf, FlatPiece) else torch.empty_like(leaf), like
    )
    assert_is_layout_of(ck.load(path, like=blank, group=here.group, **more), state, like)
    like = mixed(params, here, kinds, layout + 1)
    assert_is_layout_of(ck.load_params(path, like=like, group=here.group), params, like)


def random_pieces(here: Here, path: Path, seeds: range) -> None:
    """Arrays of drawn shapes, cut in drawn ways, saved and loaded under other cuts."""
    for seed in seeds:
        draw = random.Random(seed)
        shapes = [[draw.choice(range(6)) for _ in range(draw.randrange(4))] for _ in range(6)]
        whole = {str(place): torch.arange(float(prod(shape))).reshape(shape) for place, shape in enumerate(shapes)}
        own = slice(here.rank, here.rank + 2)
        one, other = (
            {
                name: FlatPiece.cut(leaf, *cuts(leaf.numel(), here.size, 7 * seed + turn + int(name))[own])
                for name, leaf in whole.items()
            }
            for turn in (0, 1)
        )
        ck.save(path / str(seed), one, group=here.group)
        assert_is_layout_of(ck.load(path / str(seed), like=other, group=here.group), whole, other)


def save_in_background(here: Here, path: Path, seed: int) -> tuple[int, bool]:
    """Save in the background, overwrite the state at once, and wait."""
    state = mixed(tree_of(seed), here, KINDS, seed)
    seen: list[tuple[int, int]] = []
    saving = ck.save_async(
        path, state, group=here.background, step=seed, progress=lambda done, total: seen.append((done, total))
    )
    for leaf in mfx.tree.leaves(state):
        local = leaf.data if isinstance(leaf, FlatPiece) else leaf.to_local() if isinstance(leaf, DTensor) else leaf
        local.copy_(torch.zeros_like(local))
    assert saving.wait(60) == path
    assert saving.done
    assert all(done <= total for done, total in seen)
    return (seen[-1][0] if seen else 0), seen == sorted(seen)


def save_with_trouble(here: Here, path: Path, seed: int, trouble: str, on: int) -> None:
    """Save, with something wrong on one rank, or in the shards of all."""
    from muonfx.checkpoint import distributed

    state, original = mixed(tree_of(seed), here, ("plain", "flat"), seed), distributed.Draft.write

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    def elsewhere(draft: Any, where: Path, *more: Any) -> Any:
        (other := where.parents[1] / f"elsewhere-{where.name}").mkdir()
        return original(draft, other / where.name, *more)

    if trouble in ("hole", "overlap"):
        start, numel = {"hole": (4, 3), "overlap": (2, 5)}[trouble]
        state["piece"] = FlatPiece((4, 2), start * here.rank, torch.zeros(numel))
    elif here.rank == on and trouble in ("no space", "not shared"):
        distributed.Draft.write = {"no space": full, "not shared": elsewhere}[trouble]
    elif here.rank == on and trouble == "no tensor":
        state["bad"] = 1.0
    elif here.rank == on:
        wrong = {"other shape": torch.zeros(9, 6), "other dtype": torch.zeros(8, 6, dtype=torch.float64)}
        state["momentum"].trace["matrix"] = wrong[trouble]
    try:
        ck.save(path, state, group=here.group, step=seed + 1)
    finally:
        distributed.Draft.write = original


def load_with_trouble(here: Here, path: Path, seed: int, on: int | None = None) -> None:
    """Load, where one rank (or all) wants something else."""
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
        {} if argument == "path" else {argument: {"step": int(odd), "extra": {"a": odd}}.get(argument, odd)}
    )
    if what == "save":
        ck.save(where, tree_of(0), group=here.group, **given)
    else:
        ck.load(where, like=tree_of(0), group=here.group, **given)


def one_alone(here: Here, path: Path, what: str) -> str:
    """One rank alone saves or loads, while the others go on with other collectives; then all do it together."""
    state = tree_of(1)
    calls = {
        "save": lambda: ck.save(path, state, group=here.group),
        "load": lambda: ck.load(path, like=state, group=here.group),
    }
    calls["save"]()
    kept, said = rendezvous._timeout, ""
    if here.rank == 0:
        rendezvous._timeout = lambda group: timedelta(seconds=0.2)
        try:
            calls[what]()
        except ck.CheckpointError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            rendezvous._timeout = kept
    dist.all_reduce(torch.ones(3), group=here.group)
    calls[what]()
    return said
