"""Noise that is a function of seed, step, name and place, and of nothing else."""

import pytest
import torch
from torch import Tensor

import muonfx as mfx

ZEROS = {"w": torch.zeros(40, 50), "v": torch.zeros(40, 50)}


def noise(tx: mfx.Transform, params: dict[str, Tensor], steps: int = 1) -> list[dict[str, Tensor]]:
    state, found = tx.init(params), []
    for _ in range(steps):
        updates, state = tx.update(params, state)
        found.append(updates)
    return found


def test_another_seed_step_or_leaf_gives_other_noise():
    first, second = noise(mfx.contrib.add_noise(1.0, 0.0), ZEROS, 2)
    (other,) = noise(mfx.contrib.add_noise(1.0, 0.0, seed=1), ZEROS)
    several = [first["w"], first["v"], second["w"], second["v"], other["w"], other["v"]]
    correlations = torch.corrcoef(torch.stack([leaf.flatten() for leaf in several])) - torch.eye(6)
    assert correlations.abs().max() < 0.1


def test_neighbours_and_dims_do_not_matter():
    """A leaf's noise is that of its name and of places in its flattened form."""
    (both,) = noise(mfx.contrib.add_noise(1.0, 0.0), ZEROS)
    (alone,) = noise(mfx.contrib.add_noise(1.0, 0.0), {"w": torch.zeros(40 * 50)})
    assert torch.equal(both["w"].flatten(), alone["w"])


def test_the_variance_falls_with_the_steps():
    for step, updates in enumerate(noise(mfx.contrib.add_noise(0.25, 0.5), {"w": torch.zeros(100_000)}, 4), start=1):
        assert float(updates["w"].var()) == pytest.approx(0.25 / step**0.5, rel=0.02)
        assert float(updates["w"].mean()) == pytest.approx(0.0, abs=0.01)


def test_a_batch_has_noise_of_its_own_where_its_keys_differ():
    tx = mfx.contrib.add_noise(1.0, 0.0)
    state = tx.init({"w": torch.zeros(5)})
    keys = {"w": state.keys["w"] + torch.tensor([0, 1 << 40])}
    batch = torch.func.vmap(
        lambda key: tx.update({"w": torch.zeros(5)}, state._replace(keys=key))[0]["w"], in_dims=({"w": 0},)
    )(keys)
    assert torch.equal(batch[0], tx.update({"w": torch.zeros(5)}, state)[0]["w"])
    assert not torch.equal(batch[0], batch[1])
