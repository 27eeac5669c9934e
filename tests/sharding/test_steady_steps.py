"""Laws of steady steps: what follows from shapes and structure is found at the first step, and never again."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import muonfx as mfx
from muonfx import sharding
from muonfx.program import execute
from muonfx.sharding import binding
from muonfx.sharding.shards import Piece

SHAPES = {"a": (6, 4), "b": (4, 6), "bias": (8,)}
LABELS = {"a": "muon", "b": "muon", "bias": "adamw"}


class Arrived:
    def wait(self) -> None:
        """Nothing is under way."""


def nothing_comes(received: torch.Tensor, *args: Any, **kwargs: Any) -> Arrived:
    """The pretended group's own refuses a rank that only receives."""
    received.zero_()
    return Arrived()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often plans, windows and pieces are made, and constructors called; on one of two pretended ranks."""
    found: dict[str, int] = {}

    def counted(what: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[what] = found.get(what, 0) + 1
            return function(*args, **kwargs)

        return call

    def count(what: str, owner: Any, name: str) -> None:
        monkeypatch.setattr(owner, name, counted(what, getattr(owner, name)))

    count("plans", binding, "plan_run")
    count("lowered", execute, "lower_node")
    count("windows", Piece, "window")
    count("grids", Piece, "grid")
    count("intervals", Piece, "interval")
    count("resolved", mfx.Transform, "resolve")
    for factory in (mfx.orthogonalize, mfx.partition, mfx.momentum, mfx.scale_by_adam):
        constructor = counted(f"built {factory.__name__}", factory.definition.constructor)
        monkeypatch.setattr(factory, "definition", dataclasses.replace(factory.definition, constructor=constructor))
    monkeypatch.setattr(dist, "all_to_all_single", nothing_comes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()


def chain(rate: float = 0.1) -> mfx.Transform:
    return mfx.chain(
        mfx.partition(
            {"muon": mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.float32)), "adamw": mfx.scale_by_adam()},
            LABELS,
        ),
        mfx.scale_by_learning_rate(rate),
    )


def laid_out(kind: str) -> tuple[Any, dict[str, Any]]:
    """A layout, and local tensors."""
    if kind == "from_dtensors":
        mesh = init_device_mesh("cpu", (2,))
        params = {n: DTensor.from_local(torch.ones(s[0] // 2, *s[1:]), mesh, [Shard(0)]) for n, s in SHAPES.items()}
        return sharding.from_dtensors(params), params
    whole = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    if kind == "replicated":
        return sharding.replicated(whole), whole
    layout = sharding.zero(whole, partition=kind)
    return layout, layout.shard(whole)


KINDS = pytest.mark.parametrize("kind", ["replicated", "whole", "flat", "from_dtensors"])


@KINDS
def test_a_later_step_with_another_number_makes_no_piece_plan_or_window_and_builds_nothing(
    done: dict[str, int], kind: str
):
    layout, params = laid_out(kind)
    tx = sharding.sharded(chain(), layout)
    before, state = tx.update(params, tx.init(params), params)
    assert done["plans"]
    done.clear()
    tx.update(params, state, params)
    assert done == {}
    state = tx.init(params)
    done.clear()
    after, _ = mfx.with_hyperparams(tx, {"scale_by_learning_rate.learning_rate": 0.2}).update(params, state, params)
    assert done == {}
    for name in SHAPES:
        torch.testing.assert_close(2 * before[name], after[name])


@KINDS
def test_a_rate_that_a_scheduler_changes_resolves_plans_and_builds_nothing_but_itself(done: dict[str, int], kind: str):
    layout, params = laid_out(kind)
    held = {name: torch.nn.Parameter(leaf) for name, leaf in params.items()}
    optimizer = mfx.TransformOptimizer(held, sharding.sharded(chain(), layout))

    def step() -> None:
        for name, param in held.items():
            param.grad = params[name].clone()
        optimizer.step()

    step()
    done.clear()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    step()
    assert done == {}
