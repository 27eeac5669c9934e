"""The dtype of a state: by default at least fp32, never narrower than its parameter; else as pinned."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing.violation import bits_equal
from tests.public import NAMES

pytestmark = pytest.mark.filterwarnings("ignore:partition. no parameter has the label")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FACTORIES = {name: value for name, value in NAMES.items() if hasattr(value, "definition")}
PINNED = {
    name: [argument for argument, own in factory.definition.parameters.items() if "StateDtype" in str(own.annotation)]
    for name, factory in FACTORIES.items()
    if name != "scale_by_prodigy"  # of all but the first parameters, which keep their own
}
PINNED = {name: arguments for name, arguments in PINNED.items() if arguments}
REQUIRED = {"inner": mfx.scale(-0.1), "every": 2, "sync_period": 2, "slow_step_size": 0.5, "learning_rate": 0.1}
MIXED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TREES = [(dtype, dtype) for dtype in DTYPES] + [MIXED]
EVERY = pytest.mark.parametrize("name", PINNED)


def made(name: str, **given: Any) -> mfx.Transform:
    parameters = FACTORIES[name].definition.parameters.items()
    return FACTORIES[name](**{n: REQUIRED[n] for n, own in parameters if own.default is own.empty}, **given)


def drawn(dtypes: tuple[torch.dtype, ...], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{place}": torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype)
        for place, dtype in enumerate(dtypes)
    }


def found(state: Any, params: dict[str, Tensor]) -> dict[str, set[torch.dtype]]:
    """The dtypes of the leaves of a state, by the parameter that they belong to."""
    named = [pair for pair in zip(mfx.tree.names(state), mfx.tree.leaves(state), strict=True) if pair[1] is not None]
    return {name: {leaf.dtype for place, leaf in named if place.endswith(f".{name}")} for name in params}


def by_default(params: dict[str, Tensor]) -> dict[str, set[torch.dtype]]:
    return {name: {torch.float64 if param.dtype == torch.float64 else torch.float32} for name, param in params.items()}


@EVERY
@pytest.mark.parametrize("pinned", ["auto", *DTYPES, None], ids=str)
def test_the_default_is_fp32_or_float64_a_dtype_pins_every_leaf_and_none_is_each_parameters_own(name: str, pinned: Any):
    assert all(FACTORIES[name].definition.parameters[argument].default == "auto" for argument in PINNED[name])
    tx = made(name) if pinned == "auto" else made(name, **dict.fromkeys(PINNED[name], pinned))
    for dtypes in TREES:
        params = drawn(dtypes)
        expected = {leaf: {pinned or param.dtype} for leaf, param in params.items()}
        expected = by_default(params) if pinned == "auto" else expected
        state = tx.init(params)
        assert found(state, params) == expected
        assert found(tx.init(mfx.tree.map(lambda p: p.to("meta"), params)), params) == expected
        for seed in (1, 2):
            _, state = tx.update(drawn(dtypes, seed), state, params)
            assert found(state, params) == expected


@EVERY
def test_a_dtype_that_pins_nothing_is_refused_at_the_call(name: str):
    for argument in PINNED[name]:
        for wrong in ("fp32", torch.int8, torch.complex64, 32):
            with pytest.raises((TypeError, ValueError), match=rf"{argument} must be \"auto\""):
                made(name, **{argument: wrong})


@EVERY
def test_a_leaf_is_updated_in_a_mixed_tree_as_alone(name: str):
    tx, params = made(name), drawn(MIXED)
    steps = [drawn(MIXED, seed) for seed in (1, 2, 3)]
    together = kit.examples.history(tx, params, steps)
    for leaf, param in params.items():
        alone = kit.examples.history(tx, {leaf: param}, [{leaf: grads[leaf]} for grads in steps])
        for (updates, _), (own, _) in zip(together, alone, strict=True):
            assert bits_equal(updates[leaf], own[leaf]), leaf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale_by_adam", "accumulate"])
def test_mixed_trees_compile(name: str):
    example = kit.Example(drawn(MIXED), [drawn(MIXED, seed) for seed in (1, 2)])
    kit.laws.compiled_update_equals_eager(made(name), *example)


NUMBERS_AS_TENSORS = [
    mfx.scale_by_adam(nesterov=True),
    mfx.scale_by_rms(mfx.linear_schedule(0.9, 0.5, 5)),
    mfx.momentum(mfx.linear_schedule(0.9, 0.5, 5)),
    mfx.as_tensors(mfx.scale_by_lion()),
    mfx.as_tensors(mfx.adamw(0.1)),
]


@pytest.mark.parametrize("tx", NUMBERS_AS_TENSORS, ids=repr)
@given(seed=st.integers(0, 99), donate=st.booleans())
def test_a_leaf_gets_what_it_gets_alone_whatever_the_dtypes_beside_it(tx: mfx.Transform, seed: int, donate: bool):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"scalar": (), "wide": (3,), "narrow": (3,), "wide scalar": (), "low": (2,)}
    dtypes = {"wide": torch.float64, "wide scalar": torch.float64, "low": torch.bfloat16}
    params, *steps = (
        {name: torch.randn(shape, generator=generator).to(dtypes.get(name)) for name, shape in shapes.items()}
        for _ in range(3)
    )
    state, alone = tx.init(params), {name: tx.init({name: param}) for name, param in params.items()}
    for grads in steps:
        updates, state = tx.update({name: grad.clone() for name, grad in grads.items()}, state, params, donate=donate)
        for name in shapes:
            own, alone[name] = tx.update({name: grads[name].clone()}, alone[name], {name: params[name]})
            assert torch.equal(updates[name], own[name]), name
