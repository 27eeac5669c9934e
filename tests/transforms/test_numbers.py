"""Numbers and states: the same bits wherever a number is kept, and the dtype of each state as pinned."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from muonfx.core import ScheduledState
from muonfx.tree import elementwise as ew
from tests.public import NAMES, NO_MATCH
from tests.transforms.test_every_transform import EVERY_CASE, SHAPES

pytestmark = NO_MATCH

SCALES = (1e-45, 1e-30, 1.0, 1e20, 3e38)
"""Of gradients: from the least number of fp32 to the largest, past the squares that overflow."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def followed(tx: mfx.Transform) -> mfx.Transform:
    """Make each number of a transform, and of those within it, a constant schedule."""
    made = tx.with_children(list(map(followed, tx.children))) if tx.children else tx
    numbers = {name: value for name, value in made.arguments.items() if isinstance(value, float)}
    return (
        made.replace(**{name: mfx.constant_schedule(value) for name, value in numbers.items()})
        if numbers
        else made
    )


WAYS: dict[str, Callable[[mfx.Transform], mfx.Transform]] = {
    "as tensors": mfx.as_tensors,
    "scheduled": followed,
}


def run(
    tx: mfx.Transform, params: dict[str, Tensor], steps: list[dict[str, Tensor]]
) -> tuple[list[Any], Any]:
    found = kit.examples.history(tx, params, steps)
    return [updates for updates, _ in found], found[-1][1]


def plain(state: Any) -> Any:
    """The state that plain numbers have, without the counts of schedules at any depth."""
    if isinstance(state, ScheduledState):
        return plain(state.inner)
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, tuple):
        parts = [plain(value) for value in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def moments(state: Any) -> list[Any]:
    """The state without counts: a transform that takes a schedule itself has one more."""
    return [found for found in bits(plain(state)) if found is not None and found[0] != torch.int64]


def bits(values: Any) -> list[Any]:
    """The leaves, with one bit pattern for all NaNs: which of two NaNs a sum keeps is up to the kernel."""
    found: list[Any] = []
    for leaf in mfx.tree.leaves(values):
        if leaf is None:
            found.append(None)
            continue
        wide = leaf.double() if leaf.is_floating_point() else leaf
        found.append(
            (leaf.dtype, torch.where(wide.isnan(), math.nan, wide).to(wide.dtype).numpy().tobytes())
        )
    return found


def drawn(
    tx: mfx.Transform, dtype: torch.dtype, scale: float
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters and gradients that a transform takes: also vectors and numbers, where it does not need matrices."""
    shapes: dict[str, tuple[int, ...]] = {"w": (4, 37), "v": (5, 4)}
    if tx.name == "given_logits":
        shapes = dict(SHAPES)
    draw = torch.Generator().manual_seed(0)

    def tensors(size: float) -> dict[str, Tensor]:
        # As wide as it can be: a gradient of fp32 or bf16 at 3e38 may be infinite.
        return {
            name: (torch.randn(shape, generator=draw, dtype=torch.float64) * size).to(dtype)
            for name, shape in shapes.items()
        }

    for more in ({"b": (19,), "s": ()}, {"b": (19,)}, {}):
        try:
            tx.run(
                *(lambda p: (p, tx.init(p), p))(
                    {n: torch.ones(s) for n, s in (shapes | more).items()}
                )
            )
        except (ValueError, IndexError):
            continue
        shapes |= more
        break
    return tensors(1.0), [tensors(scale) for _ in range(2)]


@pytest.mark.parametrize(("name", "tx"), EVERY_CASE)
def test_a_number_gives_the_same_bits_wherever_it_is_kept(name: str, tx: mfx.Transform):
    for dtype in DTYPES:
        for scale in SCALES:
            params, steps = drawn(tx, dtype, scale)
            updates, state = run(tx, params, steps)
            for way, change in WAYS.items():
                found, kept = run(change(tx), params, steps)
                assert bits(found) == bits(updates), (way, dtype, scale)
                assert moments(kept) == moments(state), (way, dtype, scale)


# Transforms call them with fp32 or fp64 tensors only.
FOR_WIDE_TENSORS = ("shift", "lerp", "addcmul")


def _behind(
    function: Any, others: list[list[Tensor]], reuse: bool, xs: list[Tensor], number: Any
) -> list[Tensor]:
    return function(xs, *others, number, reuse=reuse)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e20, 1e38])
def test_list_arithmetic_gives_the_same_bits_for_a_number_and_a_tensor(
    dtype: torch.dtype, scale: float, reuse: bool
):
    draw = torch.Generator().manual_seed(1)
    sizes = (0, 1, 7, 8, 31, 64, 1025)

    def lists(size: float) -> list[Tensor]:
        long = [torch.randn(2 * n, generator=draw, dtype=torch.float64) * size for n in sizes]
        return [
            (x[::2] if place % 2 else x[: len(x) // 2]).to(dtype) for place, x in enumerate(long)
        ] + [torch.tensor(size, dtype=dtype)]

    for number in (0.1, 0.9, 1 - 0.95, 0.001, -0.3, 1.0, 0.0, 2.5):
        held = torch.tensor(number, dtype=torch.float64)
        xs, ys, zs = lists(1.0), lists(scale), lists(scale)
        operations: dict[str, Callable[[list[Tensor], Any], list[Tensor]]] = {
            "mul": functools.partial(ew.mul, reuse=reuse),
            "shift": functools.partial(ew.shift, reuse=reuse),
            "add": functools.partial(_behind, ew.add, [ys], reuse),
            "lerp": functools.partial(_behind, ew.lerp, [ys], reuse),
            "addcmul": functools.partial(_behind, ew.addcmul, [ys, zs], reuse),
            "clamp": lambda own, c: ew.clamp(own, -abs(c), abs(c)),
        }
        for name, operation in operations.items():
            if name in FOR_WIDE_TENSORS and dtype not in (torch.float32, torch.float64):
                continue
            assert bits(operation(ew.clone(xs), held)) == bits(operation(ew.clone(xs), number)), (
                name,
                number,
            )


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES[2:], DTYPES])
def test_a_product_with_a_number_has_the_same_bits_in_a_long_list_and_alone(
    dtypes: tuple[torch.dtype, ...], reuse: bool
):
    draw = torch.Generator().manual_seed(2)
    made = [torch.randn(n % 9, generator=draw, dtype=torch.float64) for n in range(60)]
    made += [
        torch.randn((5, 4), generator=draw, dtype=torch.float64).t(),
        torch.tensor(-0.0),
        torch.tensor(math.inf),
    ]
    xs = [x.to(dtype) for x in made for dtype in dtypes]
    numbers = [0.9, -0.0, 0.0, -1, 1e-45, 1e300, math.inf, math.nan]
    for number in numbers:
        alone = [ew.mul([x.clone()], number, reuse=reuse)[0] for x in xs]
        assert bits(ew.mul(ew.clone(xs), number, reuse=reuse)) == bits(alone), number
    each = [numbers[place % len(numbers)] for place in range(len(xs))]
    alone = [
        ew.mul([x.clone()], number, reuse=reuse)[0] for x, number in zip(xs, each, strict=True)
    ]
    assert bits(ew.mul_each(ew.clone(xs), each, reuse=reuse)) == bits(alone)


NUMBERS_OF_NARROW_LEAVES: dict[str, Callable[[Any], mfx.Transform]] = {
    "scale": mfx.scale,
    "rate": mfx.scale_by_learning_rate,
    "decay": mfx.add_decayed_weights,
    "clip": mfx.clip_by_global_norm,
    "sam": mfx.contrib.sam,
    "accumulated": lambda number: mfx.accumulate(mfx.scale(number), 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NUMBERS_OF_NARROW_LEAVES)
def test_a_number_under_vmap_is_not_rounded_to_the_dtype_of_a_narrow_leaf(
    name: str, dtype: torch.dtype
):
    """In bf16, 0.3001 would become 0.3008. In fp16, 2e-8 would become zero, and so would the update."""
    params = {"w": torch.full((3,), 30000.0, dtype=dtype), "scalar": torch.tensor(3.0, dtype=dtype)}
    grads = mfx.tree.map(torch.zeros_like, params) if name == "decay" else params

    def updates(number: Any) -> dict[str, Tensor]:
        tx = NUMBERS_OF_NARROW_LEAVES[name](number)
        return tx.update(grads, tx.init(params), params)[0]

    for number in (0.3001, 2e-8):
        batch = torch.func.vmap(updates)(torch.tensor([number, 1.0], dtype=torch.float64))
        assert bits({key: value[0] for key, value in batch.items()}) == bits(updates(number)), (
            number
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scalar_of_each_model_of_a_batch_is_scaled_as_in_a_vector(dtype: torch.dtype):
    tx, scalars = mfx.scale(0.3001), torch.linspace(1.0, 2.0, 50).to(dtype)
    batch = torch.func.vmap(lambda x: tx.update({"w": x}, mfx.core.EmptyState())[0]["w"])(scalars)
    assert torch.equal(batch, tx.update({"w": scalars}, mfx.core.EmptyState())[0]["w"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_model_of_a_narrow_batch_is_divided_by_its_own_exact_share(dtype: torch.dtype):
    """Cautious updates are divided by the share of elements that are kept, such as 0.3, which bf16 cannot represent."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(2, 3, 10, generator=generator).to(dtype)  # of two steps and three models
    tx = mfx.cautious(mfx.momentum(0.9))

    def second_update(grads: Tensor) -> Tensor:
        state = tx.init({"w": grads[0]})
        for grad in grads:
            updates, state = tx.update({"w": grad}, state)
        return updates["w"]

    batch = torch.func.vmap(second_update, in_dims=1)(grads)
    for model in range(3):
        assert torch.equal(batch[model], second_update(grads[:, model]))


def test_each_model_of_a_batch_in_fp16_is_clipped_by_its_own_exact_factor():
    grads = {"w": torch.tensor([[30000.0, 30000.0], [0.25, 0.5]], dtype=torch.float16)}
    tx = mfx.clip_by_global_norm(1e-3)  # the factor 2.4e-8 would become zero in fp16
    batch = torch.func.vmap(lambda grads: tx.update(grads, mfx.core.EmptyState())[0])(grads)
    for model in range(2):
        assert torch.equal(
            batch["w"][model], tx.update({"w": grads["w"][model]}, mfx.core.EmptyState())[0]["w"]
        )


MIXED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FACTORIES = {name: value for name, value in NAMES.items() if hasattr(value, "definition")}
PINNED = {
    name: [
        argument
        for argument, own in factory.definition.parameters.items()
        if "StateDtype" in str(own.annotation)
    ]
    for name, factory in FACTORIES.items()
    if name != "scale_by_prodigy"  # of all but the first parameters, which keep their own
}
PINNED = {name: arguments for name, arguments in PINNED.items() if arguments}
REQUIRED = {
    "inner": mfx.scale(-0.1),
    "every": 2,
    "sync_period": 2,
    "slow_step_size": 0.5,
    "learning_rate": 0.1,
}
TREES = [(dtype, dtype) for dtype in MIXED] + [MIXED]
EVERY = pytest.mark.parametrize("name", PINNED)


def made(name: str, **given: Any) -> mfx.Transform:
    parameters = FACTORIES[name].definition.parameters.items()
    return FACTORIES[name](
        **{n: REQUIRED[n] for n, own in parameters if own.default is own.empty}, **given
    )


def mixed(dtypes: tuple[torch.dtype, ...], seed: int = 0) -> dict[str, Tensor]:
    shapes = {f"w{place}": (3, 4) for place in range(len(dtypes))}
    leaves = kit.Example.of(shapes, steps=0, dtype=torch.float64, seed=seed).params
    return {
        name: leaf.to(dtype) for (name, leaf), dtype in zip(leaves.items(), dtypes, strict=True)
    }


def found(state: Any, params: dict[str, Tensor]) -> dict[str, set[torch.dtype]]:
    """The dtypes of the leaves of a state, by the parameter that they belong to."""
    named = [
        pair
        for pair in zip(mfx.tree.names(state), mfx.tree.leaves(state), strict=True)
        if pair[1] is not None
    ]
    return {
        name: {leaf.dtype for place, leaf in named if place.endswith(f".{name}")} for name in params
    }


def by_default(params: dict[str, Tensor]) -> dict[str, set[torch.dtype]]:
    return {
        name: {torch.float64 if param.dtype == torch.float64 else torch.float32}
        for name, param in params.items()
    }


@EVERY
@pytest.mark.parametrize("pinned", ["auto", *MIXED, None], ids=str)
def test_the_default_is_fp32_or_float64_a_dtype_pins_every_leaf_and_none_is_each_parameters_own(
    name: str, pinned: Any
):
    assert all(
        FACTORIES[name].definition.parameters[argument].default == "auto"
        for argument in PINNED[name]
    )
    tx = made(name) if pinned == "auto" else made(name, **dict.fromkeys(PINNED[name], pinned))
    for dtypes in TREES:
        params = mixed(dtypes)
        expected = {leaf: {pinned or param.dtype} for leaf, param in params.items()}
        expected = by_default(params) if pinned == "auto" else expected
        state = tx.init(params)
        assert found(state, params) == expected
        assert found(tx.init(mfx.tree.map(lambda p: p.to("meta"), params)), params) == expected
        for seed in (1, 2):
            _, state = tx.update(mixed(dtypes, seed), state, params)
            assert found(state, params) == expected


@EVERY
def test_a_dtype_that_pins_nothing_is_refused_at_the_call(name: str):
    for argument in PINNED[name]:
        for wrong in ("fp32", torch.int8, torch.complex64, 32):
            with pytest.raises((TypeError, ValueError), match=rf"{argument} must be \"auto\""):
                made(name, **{argument: wrong})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale_by_adam", "accumulate"])
def test_mixed_trees_compile(name: str):
    example = kit.Example(mixed(MIXED), [mixed(MIXED, seed) for seed in (1, 2)])
    kit.laws.compiled_update_equals_eager(made(name), *example)


NUMBERS_AS_TENSORS = [
    mfx.scale_by_adam(nesterov=True),
    mfx.scale_by_rms(mfx.linear_schedule(0.9, 0.5, 5)),
    mfx.momentum(mfx.linear_schedule(0.9, 0.5, 5)),
    mfx.as_tensors(mfx.scale_by_lion()),
    mfx.as_tensors(mfx.adamw(0.1)),
]


@pytest.mark.parametrize("tx", [*map(made, PINNED), *NUMBERS_AS_TENSORS], ids=repr)
@given(seed=st.integers(0, 99), donate=st.booleans())
def test_a_leaf_gets_what_it_gets_alone_whatever_the_dtypes_beside_it(
    tx: mfx.Transform, seed: int, donate: bool
):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "scalar": (),
        "wide": (3,),
        "narrow": (3,),
        "wide scalar": (),
        "low": (2,),
        "half": (3,),
    }
    dtypes = {
        "wide": torch.float64,
        "wide scalar": torch.float64,
        "low": torch.bfloat16,
        "half": torch.float16,
    }
    if tx.locality is not mfx.Locality.ELEMENT:  # it may need matrices
        shapes = dict.fromkeys(shapes, (3, 4))
    params, *steps = (
        {
            name: torch.randn(shape, generator=generator).to(dtypes.get(name))
            for name, shape in shapes.items()
        }
        for _ in range(3)
    )
    state, alone = tx.init(params), {name: tx.init({name: param}) for name, param in params.items()}
    for grads in steps:
        updates, state = tx.update(
            {name: grad.clone() for name, grad in grads.items()}, state, params, donate=donate
        )
        for name in shapes:
            own, alone[name] = tx.update(
                {name: grads[name].clone()}, alone[name], {name: params[name]}
            )
            assert torch.equal(updates[name], own[name]), name
