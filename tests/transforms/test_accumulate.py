"""Gradient accumulation: k micro-batches make one step, and the inner transform runs once."""

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.testing.violation import bits_equal, is_close, tolerance_of

dense = kit.params_and_grads(nones=False, steps=(1, 1))
inner_transforms = kit.transforms(
    ["momentum", "scale_by_adam", "clip_by_global_norm", "scale", "scale_by_lion", "chain"]
)


@given(inner_transforms, st.sampled_from([1, 2, 4]), dense)
def test_equal_micro_batches_make_one_step(inner: mfx.Transform, every: int, example: kit.Example):
    # Two, or four, equal numbers add up exactly, and a power of two divides exactly.
    params, (grads,) = example.precise()
    tx = mfx.accumulate(inner, every, dtype=torch.float64)
    state, inner_state = tx.init(params), inner.init(params)
    for _ in range(2):
        expected, inner_state = inner.update(grads, inner_state, params)
        for micro in range(every):
            updates, state = tx.update(grads, state, params)
            if micro < every - 1:
                assert not any(leaf.any() for leaf in tree.tensors(updates))
        for found, wanted in zip(
            tree.leaves((updates, state.inner)), tree.leaves((expected, inner_state)), strict=True
        ):
            assert found is wanted or is_close(found, wanted, tolerance_of(inner, expected, inner_state))


@given(st.integers(1, 5), dense)
def test_a_sum_is_the_sum(every: int, example: kit.Example):
    params, (grads,) = example.precise()
    tx = mfx.accumulate(mfx.identity(), every, mean=False, dtype=torch.float64)
    state = tx.init(params)
    for micro in range(every):
        updates, state = tx.update(tree.map(lambda g, m=micro: g * m, grads), state, params)
    for found, grad in zip(tree.leaves(updates), tree.leaves(grads), strict=True):
        assert is_close(found, grad * sum(range(every)), 1e-12)


def test_the_caller_may_say_where_the_last_micro_batch_is():
    tx = mfx.accumulate(mfx.identity(), 100)
    state, made = tx.init({"w": torch.zeros(1)}), []
    for value, boundary in ((1.0, False), (3.0, True), (5.0, True), (1.0, False), (2.0, False), (6.0, True)):
        updates, state = tx.update({"w": torch.tensor([value])}, state, boundary=boundary)
        made.append(float(updates["w"]))
    assert made == [0.0, 2.0, 5.0, 0.0, 0.0, 3.0]
    assert int(state.count) == 0


def test_a_gradient_that_is_absent_in_some_micro_batches_counts_as_zero_there():
    params = {"a": torch.zeros(2), "b": torch.zeros(2), "never": torch.zeros(2)}
    tx = mfx.accumulate(mfx.momentum(0.5, nesterov=False), 2)
    start = state = tx.init(params)
    first, state = tx.update({"a": torch.ones(2), "b": None, "never": None}, state, params)
    assert first["b"] is None
    assert first["never"] is None
    second, state = tx.update({"a": None, "b": torch.ones(2), "never": None}, state, params)
    # Half of one half: the mean of one gradient and one zero, half of which enters the average.
    assert second["a"].tolist() == second["b"].tolist() == [0.25, 0.25]
    assert second["never"] is None
    assert bits_equal(state.inner.trace["never"], start.inner.trace["never"])
    third, state = tx.update({"a": torch.ones(2), "b": torch.ones(2), "never": torch.ones(2)}, state, params)
    assert not third["never"].any()


def test_vmap_over_states_that_are_at_different_micro_batches():
    tx = mfx.accumulate(mfx.momentum(), 2)
    params, steps = kit.Example.of({"w": (2, 3)}, steps=4)
    early = tx.init(params)
    late = tx.update(steps[3], early, params)[1]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), early, late)
    expected = [early, late]
    for grads in steps[:3]:
        found, stacked = torch.func.vmap(lambda state, grads=grads: tx.update(grads, state, params))(stacked)
        for place in (0, 1):
            updates, expected[place] = tx.update(grads, expected[place], params)
            torch.testing.assert_close(found["w"][place], updates["w"])
    assert stacked.count.tolist() == [int(state.count) for state in expected]


def test_a_state_within_a_step_may_move_to_another_container():
    tx = mfx.accumulate(mfx.scale(1.0), every=2)
    names = ("w", "b", "a")
    first, second = dict.fromkeys(names), dict.fromkeys(names)
    first["w"] = torch.ones(2)  # and then never again: only `seen` says that it is to be updated

    def begun(container: Any) -> Any:
        return tx.update(container(first), tx.init(container(dict.fromkeys(names, torch.zeros(2)))))[1]

    moved = begun(dict)._replace(seen=begun(OrderedDict).seen)
    assert moved.seen.tolist() == begun(dict).seen.tolist()
    updates, _ = tx.update(second, moved, dict.fromkeys(names, torch.zeros(2)))
    assert updates["b"] is None
    assert updates["a"] is None
    assert torch.equal(updates["w"], torch.full((2,), 0.5))
