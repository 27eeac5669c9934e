"""The dtype of a state: by default at least fp32, never narrower than its parameter; else as pinned."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing.violation import bits_equal
from tests.public import NAMES

pytestmark = pytest.mark.filterwarnings("ignore:partition. no parameter has the label")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FACTORIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "momentum": (mfx.momentum, ("dtype",)),
    "debiased momentum": (lambda **given: mfx.momentum(debias=True, **given), ("dtype",)),
    "scale_by_adam": (mfx.scale_by_adam, ("mu_dtype", "nu_dtype")),
    "scale_by_ademamix": (mfx.contrib.scale_by_ademamix, ("mu_dtype", "nu_dtype")),
    "scale_by_lion": (mfx.scale_by_lion, ("mu_dtype",)),
    "scale_by_rms": (mfx.scale_by_rms, ("nu_dtype",)),
    "scale_by_factored_rms": (mfx.scale_by_factored_rms, ("dtype",)),
    "ema_params": (mfx.ema_params, ("dtype",)),
    "normalize_neurons": (mfx.normalize_neurons, ("dtype",)),
    "keep_weight_norms": (mfx.keep_weight_norms, ("dtype",)),
    "sampled_momentum": (mfx.contrib.sampled_momentum, ("dtype",)),
    "scale_by_dion": (mfx.contrib.scale_by_dion, ("dtype",)),
    "scale_by_namo": (lambda **given: mfx.contrib.scale_by_namo(mfx.identity(), **given), ("dtype",)),
    "accumulate": (lambda **given: mfx.accumulate(mfx.identity(), 2, **given), ("dtype",)),
    "lookahead": (lambda **given: mfx.contrib.lookahead(mfx.scale(-0.1), 2, 0.5, **given), ("dtype",)),
    "schedule_free": (lambda **given: mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1, **given), ("dtype",)),
    "master_params": (lambda **given: mfx.master_params(mfx.scale(-0.1), **given), ("dtype",)),
}
TREES = {
    **{str(dtype).removeprefix("torch."): (dtype, dtype) for dtype in DTYPES},
    "mixed": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
}
EVERY = [pytest.param(make, names, id=name) for name, (make, names) in FACTORIES.items()]
EVERY_TREE = [pytest.param(dtypes, id=name) for name, dtypes in TREES.items()]


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


def test_every_argument_that_is_auto_for_a_state_is_asked_here():
    public = {name: value for name, value in NAMES.items() if hasattr(value, "definition")}
    in_signatures = {
        (name, argument)
        for name, factory in public.items()
        for argument, parameter in factory.definition.parameters.items()
        if "StateDtype" in str(parameter.annotation)
    }
    asked = {(name, argument) for name, (_, names) in FACTORIES.items() for argument in names if " " not in name}
    in_signatures.remove(("scale_by_prodigy", "dtype"))  # of all but the first parameters, which keep their own
    assert in_signatures == asked
    for name, argument in in_signatures:
        assert public[name].definition.parameters[argument].default == "auto"


@pytest.mark.parametrize("dtypes", EVERY_TREE)
@pytest.mark.parametrize(("make", "names"), EVERY)
def test_by_default_a_state_is_fp32_and_float64_for_float64_parameters(
    make: Any, names: tuple[str, ...], dtypes: tuple[torch.dtype, ...]
):
    params, tx = drawn(dtypes), make()
    state = tx.init(params)
    assert found(state, params) == by_default(params)
    assert found(tx.init(mfx.tree.map(lambda p: p.to("meta"), params)), params) == by_default(params)
    for seed in (1, 2):
        _, state = tx.update(drawn(dtypes, seed), state, params)
        assert found(state, params) == by_default(params)


@pytest.mark.parametrize("pinned", DTYPES)
@pytest.mark.parametrize(("make", "names"), EVERY)
def test_an_explicit_dtype_pins_every_leaf(make: Any, names: tuple[str, ...], pinned: torch.dtype):
    params = drawn(TREES["mixed"])
    tx = make(**dict.fromkeys(names, pinned))
    state = tx.init(params)
    assert found(state, params) == {name: {pinned} for name in params}
    assert found(tx.update(drawn(TREES["mixed"], 1), state, params)[1], params) == {name: {pinned} for name in params}


@pytest.mark.parametrize(("make", "names"), EVERY)
def test_none_pins_each_parameters_own(make: Any, names: tuple[str, ...]):
    params = drawn(TREES["mixed"])
    tx = make(**dict.fromkeys(names))
    state = tx.init(params)
    own = {name: {param.dtype} for name, param in params.items()}
    assert found(state, params) == own
    assert found(tx.update(drawn(TREES["mixed"], 1), state, params)[1], params) == own


@pytest.mark.parametrize(("make", "names"), EVERY)
def test_a_dtype_that_pins_nothing_is_refused_at_the_call(make: Any, names: tuple[str, ...]):
    for name in names:
        for wrong in ("Auto", "fp32", "float64", ""):
            with pytest.raises(ValueError, match=rf"{name} must be \"auto\".* found '{wrong}'"):
                make(**{name: wrong})
        for wrong in (torch.int8, torch.complex64, 32):
            with pytest.raises(TypeError, match=rf"{name} must be \"auto\""):
                make(**{name: wrong})


@pytest.mark.parametrize(("make", "names"), EVERY)
def test_a_leaf_is_updated_in_a_mixed_tree_as_alone(make: Any, names: tuple[str, ...]):
    tx, params = make(), drawn(TREES["mixed"])
    steps = [drawn(TREES["mixed"], seed) for seed in (1, 2, 3)]
    together = kit.examples.history(tx, params, steps)
    for name, param in params.items():
        alone = kit.examples.history(tx, {name: param}, [{name: grads[name]} for grads in steps])
        for (updates, _), (own, _) in zip(together, alone, strict=True):
            assert bits_equal(updates[name], own[name]), name


@pytest.mark.parametrize("name", ["momentum", "scale_by_adam", "accumulate", "master_params"])
def test_mixed_trees_compile(name: str):
    example = kit.Example(drawn(TREES["mixed"]), [drawn(TREES["mixed"], seed) for seed in (1, 2)])
    kit.laws.compiled_update_equals_eager(FACTORIES[name][0](), *example)


@pytest.mark.parametrize("tx", [mfx.momentum(), mfx.scale_by_adam(), mfx.master_params(mfx.adamw(0.1))], ids=repr)
def test_updates_of_float64_are_differentiable_to_float64(tx: mfx.Transform):
    """A state in fp32 rounds, and finite differences of a millionth see nothing but that."""
    params = drawn((torch.float64,))

    def after_two(first: Tensor, second: Tensor) -> Tensor:
        state = tx.init(params)
        _, state = tx.update({"w0": first}, state, params)
        return tx.update({"w0": second}, state, params)[0]["w0"]

    grads = [drawn((torch.float64,), seed)["w0"].requires_grad_() for seed in (1, 2)]
    assert gradcheck(after_two, grads)


NUMBERS_AS_TENSORS = [
    mfx.scale_by_adam(),
    mfx.scale_by_adam(nesterov=True),
    mfx.contrib.scale_by_ademamix(),
    mfx.scale_by_rms(mfx.linear(0.9, 0.5, 5)),
    mfx.momentum(mfx.linear(0.9, 0.5, 5)),
    mfx.adamw(mfx.linear(0.1, 0.2, 4)),
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
