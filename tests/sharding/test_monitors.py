"""A monitor with ``by_leaf`` over ranks: one all-reduce, no gather, and the values of one process."""

import warnings
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, on_ranks
from tests.sharding.cases import some
from tests.sharding.counting import Counted, counting

PARAMS: dict[str, Any] = {"up": some(4, 5), "bias": some(3), "down": some(6, 2), "gain": some()}


def second_step(
    here: Here, tx: mfx.Transform, layout: Any, grads: dict[str, Any]
) -> tuple[Counted, Any]:
    """Count the messages of the second step, and return its state. The first step also compares the replicas."""
    sharded = sharding.sharded(tx, layout)
    _, state = sharded.update(layout.shard(grads), sharded.init(layout.shard(PARAMS)))
    with counting(here) as counted:
        _, state = sharded.update(layout.shard(grads), state)
    return counted, state


@pytest.mark.parametrize("partition", ["flat", "whole"])
@on_ranks(2)
def test_norms_of_leaves_are_summed_by_one_all_reduce(here: Here, partition: Any):
    tx = mfx.monitor("u", by_leaf=True)
    grads = {name: leaf * 3 for name, leaf in PARAMS.items()}
    _, expected_state = tx.update(grads, tx.init(PARAMS))
    layout = sharding.zero(PARAMS, here.group, partition=partition)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of gathering
        counted, state = second_step(here, tx, layout, grads)
    without_monitor, _ = second_step(here, mfx.scale(1.0), layout, grads)
    assert counted.exchanged == 0
    assert counted.calls["all_reduce"] == without_monitor.calls["all_reduce"] + 1
    numbers = counted.sent["all_reduce"] - without_monitor.sent["all_reduce"]
    assert numbers == len(PARAMS) * 3 * 8  # three fp64 sums for each leaf
    assert list(mfx.metrics(state)) == list(mfx.metrics(expected_state))
    for name, expected in mfx.metrics(expected_state).items():
        torch.testing.assert_close(mfx.metrics(state)[name], expected, rtol=1e-6, atol=0.0)


@on_ranks(2)
def test_a_metric_of_whole_matrices_says_what_to_do_instead(here: Here):
    layout = sharding.zero(PARAMS, here.group, partition="flat")
    with pytest.warns(
        UserWarning, match="monitor has the locality TREE.*call muonfx.diagnose now and then"
    ):
        sharding.sharded(mfx.monitor("u", ("orthogonality_error",)), layout).init(
            layout.shard(PARAMS)
        )
