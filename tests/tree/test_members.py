"""Which leaves of a state are like parameters."""

import torch

import muonfx as mfx
from muonfx import tree

PARAMS = {"h.w": torch.zeros(3, 2), "count": torch.zeros(4), "s": torch.zeros(())}


def marked(tx: mfx.Transform) -> dict[str, bool]:
    """By name, which leaves of a state are taken for those of parameters."""
    found = tree.map_params(lambda leaf, param: True, tx.init(PARAMS), PARAMS, others=lambda leaf: False)
    return dict(zip(tree.names(found), tree.leaves(found), strict=True))


def test_moments_are_like_parameters_and_counters_are_not():
    found = marked(mfx.chain(mfx.scale_by_adam(), mfx.momentum(mfx.constant_schedule(0.9)), mfx.ema_params(0.9)))
    others = {"scale_by_adam.count", "momentum.count"}
    assert {name for name, is_like in found.items() if not is_like} == others


def test_codes_without_the_parameters_shape_are_left_out():
    found = marked(mfx.momentum(dtype=mfx.int8(block=2, min_size=0)))
    assert all(is_like == name.startswith("trace.codes") for name, is_like in found.items() if not name.endswith(".s"))


def test_the_function_gets_the_leaf_the_parameter_and_the_rest():
    tx = mfx.partition({"a": mfx.momentum(), "b": mfx.scale_by_adam()}, {"h.w": "a", "count": "b", "s": None})
    specs = {"h.w": ("rows", "columns"), "count": ("rows",), "s": ()}
    seen: list[tuple[object, ...]] = []

    def look(leaf: torch.Tensor, param: torch.Tensor, spec: tuple[str, ...]) -> torch.Tensor:
        seen.append((tuple(leaf.shape), tuple(param.shape), spec))
        return leaf + 1.0

    changed = tree.map_params(look, tx.init(PARAMS), PARAMS, specs)
    assert sorted(seen) == [((3, 2), (3, 2), ("rows", "columns")), *[((4,), (4,), ("rows",))] * 2]
    assert bool((tree.get(changed, "mu.count") == 1.0).all())


def test_a_parameter_alone_and_parameters_that_are_absent():
    one = torch.zeros(3)
    state = tree.map_params(lambda leaf, param: leaf + 1, mfx.scale_by_adam().init(one), one)
    assert (int(state.count), state.mu.tolist()) == (0, [1.0] * 3)
    some = {"w": torch.zeros(2), "gone": None}
    assert tree.map_params(lambda leaf, param: leaf + 1, mfx.momentum().init(some), some).trace["gone"] is None
