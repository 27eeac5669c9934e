"""Checkpoints from before one executor carried out chains go on bit by bit: alone, offloaded, sharded, in torch.

The files were written once by `scripts/record_0_2.py`, at commit 50332ad. They are never written again.
"""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint.names import named_leaves
from tests.checkpoint.common import bits
from tests.checkpoint.test_recorded_0_1 import NAMES, values

ck = mfx.checkpoint
FOLDER = Path(__file__).parent / "recorded_0_2"
CASES: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text())
BEFORE, AFTER = CASES["steps"]
SAME_MACHINE = CASES["torch"] == torch.__version__ and CASES["machine"] == [
    platform.machine(),
    torch.backends.cpu.get_cpu_capability(),
]
NAMED = pytest.mark.parametrize("name", CASES["chains"])
FORMS = {
    "alone": lambda tx, params: tx,
    "offloaded": lambda tx, params: sharding.offload(tx, bucket_bytes=1 << 20),
    "sharded": lambda tx, params: sharding.sharded(tx, sharding.replicated(params, 1)),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    pytest.mark.filterwarnings("ignore:default_labels saw names"),
]


def tree_of(name: str, what: str) -> dict[str, torch.Tensor]:
    shapes = CASES["shapes"][CASES["chains"][name][0]]
    return {leaf: values(f"{what}/{leaf}", shape) for leaf, shape in shapes.items()}


def assert_as_recorded(state: Any, params: Any, name: str) -> None:
    found = {n: leaf for n, leaf in [*named_leaves(state), *named_leaves(params, "params")] if leaf is not None}
    recorded = load_file(FOLDER / "checkpoints" / name / "after")
    assert found.keys() == recorded.keys()
    for leaf, value in recorded.items():
        if SAME_MACHINE:
            assert bits(found[leaf]) == bits(value), leaf
        else:
            torch.testing.assert_close(found[leaf], value, rtol=2e-3, atol=2e-3)


@NAMED
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_goes_on_as_it_did(name: str, form: str):
    blank = tree_of(name, "nothing")
    inner = eval(CASES["chains"][name][1], dict(NAMES))
    tx, path = FORMS[form](inner, blank), FOLDER / "checkpoints" / name
    state, params = ck.load(path, like=tx.init(blank), tx=inner), ck.load_params(path, like=blank)
    for step in range(BEFORE, BEFORE + AFTER):
        updates, state = tx.update(tree_of(name, f"grads/{step}"), state, params)
        params = mfx.apply_updates(params, updates)
    assert_as_recorded(state, params, name)


@NAMED
def test_under_the_torch_optimizer_a_checkpoint_goes_on_as_it_did(name: str):
    tx = eval(CASES["chains"][name][1], dict(NAMES))
    path = FOLDER / "checkpoints" / name
    params = ck.load_params(path, like=tree_of(name, "nothing"))
    optimizer = mfx.TransformOptimizer({leaf: nn.Parameter(value) for leaf, value in params.items()}, tx)
    model = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True))
    for group in optimizer.param_groups:
        model |= dict(zip(group["param_names"], group["params"], strict=True))
    state = ck.load(path, like=optimizer.transform_state, tx=tx)
    for mine, loaded in zip(mfx.tree.tensors(optimizer.transform_state), mfx.tree.tensors(state), strict=True):
        mine.copy_(loaded)
    for step in range(BEFORE, BEFORE + AFTER):
        for leaf, grad in tree_of(name, f"grads/{step}").items():
            model[leaf].grad = None if (name, leaf) == ("partition_by_name", "scale") else grad
        optimizer.step()
    after = {leaf: param.detach() for leaf, param in model.items()}
    assert_as_recorded(optimizer.transform_state, after, name)
