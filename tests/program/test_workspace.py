"""Scratch of matrix products is kept by whoever carries out steps, from one step to the next."""

import torch

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx.polar import explain
from muonfx.program.execute import Executor
from muonfx.program.placement import ALONE, Arguments


def test_a_steady_step_takes_no_scratch_for_its_products() -> None:
    shapes = {"tall": (512, 256), "wide": (256, 1024), "square": (256, 256)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16))
    scratch = max(explain(shape, dtype=torch.bfloat16).scratch_bytes for shape in shapes.values())
    numbers = 16 * sum(x.numel() // x.shape[-1] for x in params.values()) + 4096  # norms of rows

    executor = Executor(ALONE)
    state = executor.init(tx, params)
    for step in range(4):
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        wanted, expected = tx.update(grads, state, params)
        with PeakBytes() as peak:
            call = Arguments(grads, state, params, mfx.Donation(updates=True, state=True), {})
            out, state = executor.update(tx, call)
        assert all(torch.equal(out[name], wanted[name]) for name in shapes)
        assert all(map(torch.equal, mfx.tree.leaves(state), mfx.tree.leaves(expected)))
        if step == 0:
            assert peak.most >= scratch
    assert peak.most <= numbers
