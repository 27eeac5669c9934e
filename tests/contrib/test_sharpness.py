"""`sam` and `sam_gradient`: the step of a given length, the gradient behind it, and the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World

PARAMS = {
    "w": torch.arange(12.0, dtype=torch.float64).reshape(4, 3) - 5.5,
    "b": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
    "s": torch.tensor(2.0, dtype=torch.float64),
}


def gradient(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a function of each element alone, so that a piece knows its own."""
    return {name: p**3 - p for name, p in params.items()}


def test_the_step_has_its_length_and_the_gradient_is_the_one_behind_it():
    grads = gradient(PARAMS)
    step, _ = mfx.contrib.sam(0.25).update(grads, mfx.core.EmptyState())
    torch.testing.assert_close(float(mfx.tree.norm(step)), 0.25)
    behind = gradient(mfx.apply_updates(PARAMS, step))
    for name, found in mfx.contrib.sam_gradient(gradient, PARAMS, mfx.contrib.sam(0.25)).items():
        assert torch.equal(found, behind[name])


def test_a_gradient_of_zero_gives_no_step_and_a_nan_shows():
    zero = {"w": torch.zeros(2)}
    assert torch.equal(mfx.contrib.sam().update(zero, mfx.core.EmptyState())[0]["w"], torch.zeros(2))
    bad = {"w": torch.tensor([float("nan"), 1.0])}
    assert mfx.contrib.sam().update(bad, mfx.core.EmptyState())[0]["w"].isnan().all()


def run_sharded(here: Here, partition: str, adaptive: bool) -> list[float]:
    tx = mfx.contrib.sam(0.25, adaptive=adaptive)
    if partition == "dtensors":
        local: Any = {
            name: distribute_tensor(p, here.mesh, [Shard(0) if p.ndim else Replicate()]) for name, p in PARAMS.items()
        }
        layout = sharding.from_dtensors(local)
    else:
        layout = sharding.zero(PARAMS, here.group, partition=partition)
        local = layout.shard(PARAMS)
    found = mfx.contrib.sam_gradient(gradient, local, sharding.sharded(tx, layout))
    if partition == "dtensors":
        found = {name: grad.full_tensor() for name, grad in found.items()}
    else:
        found = layout.gather(found)
    expected = mfx.contrib.sam_gradient(gradient, PARAMS, tx)
    return [float((found[name] - expected[name]).abs().max()) for name in PARAMS]


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_takes_its_piece_of_one_step(world: World, size: int):
    for partition in ("whole", "flat", "dtensors"):
        for errors in world.check(size, run_sharded, partition=partition, adaptive=partition == "flat"):
            assert max(errors) <= 1e-12


def test_what_comes_beside_the_gradient_is_that_of_the_parameters_themselves():
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return params["w"].square().sum()

    given = {"w": PARAMS["w"]}
    grads, value = mfx.contrib.sam_gradient(torch.func.grad_and_value(loss), given, has_aux=True)
    assert float(value) == float(loss(given))
    torch.testing.assert_close(grads, mfx.contrib.sam_gradient(torch.func.grad(loss), given))
