"""Ten steps of twelve chains give the recorded parameters, bit by bit on a machine like the recording one."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import World
from tests.trajectories.chains import CHAINS, FOLDER, digest, machine, runs

RECORDED = json.loads((FOLDER / "digests.json").read_text())
LAST = load_file(FOLDER / "last_parameters.safetensors")


@pytest.mark.dist
@pytest.mark.parametrize("name", CHAINS)
def test_a_recorded_trajectory_continues_bit_by_bit(world: World, name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = runs(world, name)
    for form, trajectory in found.items():
        for leaf, value in trajectory[-1].items():  # other machines round products differently
            wanted = LAST[f"{name}/{leaf}"]
            torch.testing.assert_close(value.detach(), wanted, rtol=5e-2, atol=5e-2, msg=lambda m, f=form: f"{f}: {m}")
        # Every form gives the same bits; they are the recorded ones on a machine like a recording one.
        assert digest(trajectory) == RECORDED.get(machine(), {}).get(name, digest(found["one process"])), form
