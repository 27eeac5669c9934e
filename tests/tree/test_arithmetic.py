"""The norm of a tree, and which leaves of a state are like parameters."""

import pytest
import torch
from hypothesis import given

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree


@given(kit.params_and_grads())
def test_a_norm_is_the_norm_of_one_vector(example: kit.Example):
    doubles = tree.map(lambda leaf: leaf.double(), example.params)
    flat = [torch.zeros(0, dtype=torch.float64), *(leaf.flatten() for leaf in tree.tensors(doubles))]
    torch.testing.assert_close(tree.norm(doubles), torch.cat(flat).norm())


def test_sums_of_many_small_numbers_are_right_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ones = {"w": torch.ones(100_000, dtype=dtype)}
        assert float(tree.norm(ones)) == pytest.approx(100_000**0.5, rel=1e-12)


PARAMS = {"h.w": torch.zeros(3, 2), "count": torch.zeros(4), "s": torch.zeros(())}


def marked(tx: mfx.Transform) -> dict[str, bool]:
    """By name, which leaves of a state are taken for those of parameters."""
    found = tree.map_params(lambda leaf, param: True, tx.init(PARAMS), PARAMS)
    return {name: leaf is True for name, leaf in tree.named_leaves(found)}


def test_moments_are_like_parameters_and_counters_are_not():
    found = marked(mfx.chain(mfx.scale_by_adam(), mfx.momentum(mfx.constant_schedule(0.9)), mfx.ema_params(0.9)))
    others = {"scale_by_adam.count", "momentum.count"}
    assert {name for name, is_like in found.items() if not is_like} == others


def test_codes_without_the_parameters_shape_are_left_out():
    found = marked(mfx.momentum(dtype=mfx.int8(block=2, min_size=0)))
    assert all(is_like == name.startswith("trace.codes") for name, is_like in found.items() if not name.endswith(".s"))


def test_the_function_gets_the_leaf_and_the_parameter():
    tx = mfx.partition({"a": mfx.momentum(), "b": mfx.scale_by_adam()}, {"h.w": "a", "count": "b", "s": None})
    seen: list[tuple[object, ...]] = []

    def look(leaf: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(leaf.shape), tuple(param.shape)))
        return leaf + 1.0

    changed = tree.map_params(look, tx.init(PARAMS), PARAMS)
    assert sorted(seen) == [((3, 2), (3, 2)), *[((4,), (4,))] * 2]
    assert bool((tree.get(changed, "mu.count") == 1.0).all())


def test_a_parameter_alone_and_parameters_that_are_absent():
    one = torch.zeros(3)
    state = tree.map_params(lambda leaf, param: leaf + 1, mfx.scale_by_adam().init(one), one)
    assert (int(state.count), state.mu.tolist()) == (0, [1.0] * 3)
    some = {"w": torch.zeros(2), "gone": None}
    assert tree.map_params(lambda leaf, param: leaf + 1, mfx.momentum().init(some), some).trace["gone"] is None
