"""An executor keeps scratch from step to step, and what follows from structure, and neither without bound."""

import torch

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx.polar import explain
from muonfx.program.execute import MOST_PROGRAMS, Executor
from muonfx.program.placement import Arguments


def test_a_steady_step_takes_no_scratch_for_its_products() -> None:
    shapes = {"tall": (512, 256), "wide": (256, 1024), "square": (256, 256)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16))
    scratch = max(explain(shape, dtype=torch.bfloat16).scratch_bytes for shape in shapes.values())
    numbers = 16 * sum(x.numel() // x.shape[-1] for x in params.values()) + 4096  # norms of rows

    executor = Executor()
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


def test_a_chain_made_anew_at_each_step_is_not_remembered_for_ever() -> None:
    params = {"a": torch.ones(4, 4), "b": torch.ones(4)}

    def made() -> mfx.Transform:
        labels = lambda tree: dict.fromkeys(tree, "x")  # noqa: E731  a function of its own at each call
        return mfx.skip_nonfinite(mfx.partition({"x": mfx.momentum()}, labels))

    executor = Executor()
    state = expected = executor.init(made(), params)
    for _ in range(2 * MOST_PROGRAMS):
        tx = made()
        out, state = executor.update(tx, Arguments(params, state, params, mfx.Donation(), {}))
        wanted, expected = tx.update(params, expected, params)
        assert torch.equal(out["a"], wanted["a"])
    assert len(executor._programs) <= MOST_PROGRAMS
    assert len(executor._current) <= 3 * MOST_PROGRAMS  # a node for each of the three transforms
