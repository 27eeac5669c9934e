"""`matrixwise`: the author's step sees stacks of matrices, and nothing of how leaves hold them."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx.testing import check_transform

VIEW = mfx.MatrixView()


class Sides(NamedTuple):
    trace: Any
    longest: Any


@mfx.matrixwise
def with_both_slots(*, dtype: Any = "auto", view: mfx.MatrixView = VIEW):
    """A state like the parameters, and one as long as the longer side of each matrix."""

    def start(matrix: Tensor) -> Tensor:
        return matrix.new_zeros((*matrix.shape[:-2], 1, max(matrix.shape[-2:])))

    def step(u: Tensor, s: Sides) -> tuple[Tensor, Sides]:
        trace = s.trace + u
        longest = s.longest + trace.square().mean((-2, -1), keepdim=True)
        return trace * longest.mean(-1, keepdim=True), Sides(trace, longest)

    return Sides(mfx.Slot(dtype), mfx.MatrixSlot(start, dtype)), step


@mfx.matrixwise(reads_params=True)
def returns_its_inputs(*, view: mfx.MatrixView = VIEW):
    def step(u: Tensor, s: dict[str, Tensor], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return u, s

    return {"first": mfx.Slot(start="params"), "norm": mfx.MatrixSlot(lambda m: m.square().sum((-2, -1), True))}, step


@pytest.mark.parametrize("tx", [with_both_slots(), returns_its_inputs(view=mfx.MatrixView(((-2,), (-1,))))])
def test_a_transform_of_ones_own_obeys_the_laws(tx: mfx.Transform):
    check_transform(tx, max_examples=5)


def test_blocks_of_any_sizes_have_the_state_that_they_have_as_parameters():
    torch.manual_seed(0)
    grads = [{"a": torch.randn(2, 5), "b": torch.randn(7, 5)} for _ in range(3)]
    apart, whole = with_both_slots(), with_both_slots(view=mfx.MatrixView(blocks=(2, 7)))
    state, joined = apart.init(grads[0]), whole.init({"w": torch.zeros(9, 5)})
    for step in grads:
        updates, state = apart.update(step, state)
        together, joined = whole.update({"w": torch.cat([step["a"], step["b"]])}, joined)
        torch.testing.assert_close(together["w"], torch.cat([updates["a"], updates["b"]]))
    assert joined.longest["w"].shape == (5 + 7,)


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (mfx.core.EmptyState(), TypeError, "returns a state and a step, found EmptyState"),
        (({"n": 3}, lambda u, s: (u, s)), TypeError, "returns a state of Slot and MatrixSlot, found 3 at 'n'"),
        ((mfx.core.EmptyState(), lambda u, s: (u.sum(), s)), ValueError, r"returns shape \(\), expected \(2, 2\)"),
    ],
)
def test_a_constructor_or_step_of_another_form_is_refused(returned: Any, error: type[Exception], said: str):
    @mfx.matrixwise
    def odd(*, view: mfx.MatrixView = VIEW):
        return returned

    with pytest.raises(error, match=said):
        odd().update({"w": torch.ones(2, 2)}, odd().init({"w": torch.ones(2, 2)}))


def test_a_constructor_without_a_view_is_refused():
    with pytest.raises(TypeError, match="no argument view; give it a keyword argument view: MatrixView"):

        @mfx.matrixwise
        def blind():
            return mfx.core.EmptyState(), lambda u, s: (u, s)
