"""None is no update: a sum of None and `x` is `x`, and what was gathered for a leaf is not lost with its gradient."""

from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing.violation import require_close

GATHERED = mfx.accumulate(mfx.scale(-0.1), 2)
UPHILL = mfx.accumulate(mfx.identity(), 2)
AROUND = {
    "add_updates, first": mfx.add_updates(GATHERED, mfx.scale(1.0)),
    "add_updates, second": mfx.add_updates(mfx.scale(1.0), GATHERED),
    "add_updates, both": mfx.add_updates(GATHERED, GATHERED, GATHERED),
    "cautious": mfx.cautious(UPHILL),
    "masked": mfx.masked(GATHERED, {"a": True, "b": True}),
    "master_params": mfx.master_params(GATHERED),
    "partition": mfx.partition({"x": GATHERED, "y": mfx.scale(1.0)}, {"a": "y", "b": "x"}),
    "scale_by_dual_norm": mfx.contrib.scale_by_dual_norm(UPHILL),
    "schedule_free": mfx.contrib.schedule_free(GATHERED, 0.1),
    "skip_nonfinite": mfx.skip_nonfinite(GATHERED),
}


def run(tx: mfx.Transform, zeros: bool) -> Any:
    """The history of four micro-batches; the second has no gradient for `b`, or zeros."""
    params, steps = kit.Example.of({"a": (3, 4), "b": (3, 4)}, steps=4)
    steps[1]["b"] = torch.zeros(3, 4) if zeros else None
    return kit.examples.history(tx, params, steps)


@pytest.mark.parametrize("name", AROUND)
def test_a_gathered_gradient_is_not_lost_where_the_last_one_is_none(name: str):
    require_close("the run", run(AROUND[name], zeros=False), run(AROUND[name], zeros=True), "with zeros", 0.0)


def test_namo_says_that_it_has_no_scale_for_a_gathered_gradient():
    with pytest.raises(ValueError, match=r"scale_by_namo: inner returns an update for 'b'.*accumulate\(scale_by_namo"):
        run(mfx.contrib.scale_by_namo(UPHILL), zeros=False)
