"""Faults: a step with a NaN or an infinity changes no state and updates nothing, wherever the bad value is."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.testing.examples import copied_tree
from muonfx.testing.violation import require_same

BAD = (float("nan"), float("inf"), -float("inf"))
inner_transforms = kit.transforms(
    [
        "momentum",
        "scale_by_adam",
        "scale_by_lion",
        "clip_by_global_norm",
        "chain",
        "accumulate",
        "monitor",
        "ema_params",
    ]
)


def poisoned(grads: Any, place: int, element: int, bad: float) -> Any:
    """The same gradients with one bad element in one leaf, or None where there is no element at all."""
    leaves, treedef = tree.flatten(grads)
    full = [at for at, leaf in enumerate(leaves) if leaf is not None and leaf.numel()]
    if not full:
        return None
    at = full[place % len(full)]
    leaf = leaves[at].clone(memory_format=torch.contiguous_format)
    leaf.view(-1)[element % leaf.numel()] = bad
    return tree.unflatten(treedef, [leaf if i == at else other for i, other in enumerate(leaves)])


@given(inner_transforms, kit.params_and_grads(), st.integers(0, 99), st.integers(0, 99), st.sampled_from(BAD))
def test_a_bad_step_updates_nothing_and_the_run_is_that_of_the_inner_transform_without_it(
    inner: mfx.Transform, example: kit.Example, place: int, element: int, bad: float
):
    params, steps = example
    tx = mfx.skip_nonfinite(inner)
    state, inner_state = tx.init(params), inner.init(params)
    skipped = 0
    for grads in steps:
        spoilt = poisoned(grads, place, element, bad)
        if spoilt is not None:
            before = copied_tree(state.inner)
            updates, state = tx.update(spoilt, state, params)
            skipped += 1
            require_same("the inner state", state.inner, before, "before the bad step")
            for update, grad in zip(tree.leaves(updates), tree.leaves(grads), strict=True):
                assert (update is None) == (grad is None)
                assert update is None or (update.dtype == grad.dtype and not update.any())
            assert (int(state.skipped), int(state.in_a_row)) == (skipped, 1)
        updates, state = tx.update(grads, state, params)
        expected, inner_state = inner.update(grads, inner_state, params)
        require_same("the run", (updates, state.inner), (expected, inner_state), "without the bad step")
        assert (int(state.skipped), int(state.in_a_row)) == (skipped, 0)


def test_large_finite_gradients_are_no_fault():
    largest = torch.finfo(torch.float16).max
    tx = mfx.skip_nonfinite(mfx.identity())
    updates, state = tx.update({"w": torch.full((9,), largest, dtype=torch.float16)}, tx.init({"w": torch.zeros(9)}))
    assert int(state.skipped) == 0
    assert float(updates["w"][0]) == largest


def test_derivatives_stay_finite_where_a_step_is_skipped():
    tx = mfx.skip_nonfinite(mfx.scale(2.0))
    state = tx.init({"w": torch.zeros(2)})

    def total(w: torch.Tensor) -> torch.Tensor:
        return tx.update({"w": w}, state)[0]["w"].sum()

    assert torch.func.grad(total)(torch.tensor([1.0, 2.0])).tolist() == [2.0, 2.0]
    assert torch.func.grad(total)(torch.tensor([1.0, float("inf")])).tolist() == [0.0, 0.0]


def test_vmap_skips_each_member_of_a_batch_by_itself():
    tx = mfx.skip_nonfinite(mfx.momentum(0.5, nesterov=False))
    state = tx.init({"w": torch.zeros(1)})
    grads = {"w": torch.tensor([[1.0], [float("nan")], [2.0]])}
    updates, states = torch.func.vmap(lambda g: tx.update(g, state))(grads)
    assert updates["w"].flatten().tolist() == [0.5, 0.0, 1.0]
    assert states.skipped.tolist() == [0, 1, 0]
