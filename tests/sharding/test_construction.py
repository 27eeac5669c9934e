"""A constructor that fails on one rank is an error on all ranks in seconds, not after the timeout of the group."""

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World, errors_of, on_ranks

pytestmark = pytest.mark.dist
SOON = 30
"""Seconds: half of the group's timeout, and far longer than the few messages take on a busy machine."""


def failing(model: Any) -> Any:
    raise RuntimeError("a file is missing")


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "a rate": {"lr": -1.0},
    "a type": {"lr": "x"},
    "labels": {"labels": failing},
    "bytes": {"bucket_bytes": 0},
    "an unknown option": {"momenta": 1},
}


def construct(here: Here, mistake: str, *, is_wrong: bool) -> None:
    """Construct an optimizer or a sharded transform; ``is_wrong`` says whether this rank makes the mistake."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    if mistake == "a shape" and is_wrong:
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    params = {name: param.detach() for name, param in model.named_parameters()}
    layout = sharding.replicated(params, here.group)
    tx = mfx.muon_with_adamw(0.1, labels=mfx.default_labels(model))
    rate = 0.1
    if is_wrong:
        rate = -1.0
    if mistake == "a layout":
        mfx.Muon(model, layout=failing if is_wrong else sharding.replicated)
    elif mistake == "a rate beside a layout of a group":
        mfx.Muon(model, lr=rate, layout=partial(sharding.replicated, group=here.group))
    elif mistake == "DTensors":
        params = {
            name: distribute_tensor(param, here.mesh, [Shard(0)]) for name, param in params.items()
        }
        labels = {name: "muon" if param.ndim == 2 else "adamw" for name, param in params.items()}
        mfx.Muon(params, lr=rate, labels=labels)
    elif mistake == "sharded":
        sharding.sharded(tx, layout, bucket_bytes=0 if is_wrong else 1 << 20).init(params)
    elif mistake == "a group":
        groups = [{"params": list(model.named_parameters()), "lr": rate}]
        mfx.TransformOptimizer(groups, tx, layout=layout)
    elif is_wrong:
        mfx.Muon(model, **{"lr": 0.1, "layout": layout, **WRONG_OPTIONS.get(mistake, {})})
    else:
        mfx.Muon(model, lr=0.1, layout=layout)


def construct_timed(here: Here, mistake: str) -> None:
    """Make a mistake on the last rank; the error begins with the seconds until it is raised."""
    started = time.monotonic()
    try:
        construct(here, mistake, is_wrong=here.rank == here.size - 1)
    except Exception as error:
        raise RuntimeError(f"{time.monotonic() - started:.1f} {error}") from error


@pytest.mark.parametrize(
    ("mistake", "size"),
    [
        ("a rate", 3),
        *((mistake, 2) for mistake in (*WRONG_OPTIONS, "a shape", "sharded", "a group")),
        ("a rate beside a layout of a group", 2),  # the other ranks of the job construct nothing
        *((mistake, 4) for mistake in ("a layout", "DTensors")),  # on the default group
    ],
)
def test_a_mistake_in_a_constructor_on_one_rank_is_an_error_on_all_in_seconds(
    world: World, mistake: str, size: int
):
    errors = errors_of(world.run(size, construct_timed, mistake=mistake))
    for rank, error in enumerate(errors):
        seconds, _, text = str(error).partition(" ")
        assert float(seconds) < SOON, (rank, error)
        assert rank == size - 1 or f"rank {size - 1}" in text, (rank, error)


@on_ranks(2)
def test_ranks_construct_again_after_an_error_on_one_of_them(here: Here):
    """An error on one rank, twice; the same error on both ranks; and then none."""
    for wrong_ranks in ((1,), (1,), (0, 1)):
        with pytest.raises((ValueError, sharding.ShardingError), match=r"lr|learning_rate"):
            construct(here, "a rate", is_wrong=here.rank in wrong_ranks)
    construct(here, "a rate", is_wrong=False)
