"""Eight-bit storage: what a leaf becomes when it is encoded and decoded, and state as transforms keep it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import muonfx as mfx
from muonfx import testing as kit
from muonfx.compact.codec import Codec
from muonfx.compact.noise import key_of, uniform

DTYPES = {
    "linear": mfx.int8,
    "dynamic": lambda **given: mfx.int8(code="dynamic", **given),
    "e4m3": mfx.fp8,
    "e5m2": lambda **given: mfx.fp8(format="e5m2", **given),
}
BOOKS = [(name, signed) for name in DTYPES for signed in (True, False)]


def codec(name: str, signed: bool, block: int = 16) -> Codec:
    resolved = DTYPES[name](block=block, min_size=0).resolved
    return resolved.signed if signed else resolved.unsigned


def stored(own: Codec, x: Tensor, key: Tensor | None = None) -> Tensor:
    return own.decode(*own.encode(x, key))


def values(seed: int, shape: tuple[int, ...], spread: float, exponent: int, signed: bool) -> Tensor:
    """Magnitudes over many orders, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * spread
    sign = torch.randn(shape, generator=generator).sign() if signed else 1.0
    some = torch.rand(shape, generator=generator) > 0.1
    return torch.ldexp(
        (drawn.clamp(-20, 20).exp() * sign * some).to(torch.float32), torch.tensor(exponent)
    )


SHAPES = st.sampled_from(((), (1,), (5,), (16,), (17,), (3, 7), (2, 3, 16), (0, 3), (33, 1)))
CASES = given(
    book=st.sampled_from(BOOKS),
    shape=SHAPES,
    block=st.sampled_from((1, 4, 16, 2048)),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from((0.1, 1.0, 3.0)),
    exponent=st.integers(-40, 40),
)


@CASES
def test_codes_have_the_shape_of_the_leaf_and_each_block_a_scale(
    book, shape, block, seed, spread, exponent
):
    own = codec(*book, block)
    x = values(seed, shape, spread, exponent, book[1])
    found = own.encode(x)
    blocks = [part.abs().max() for part in x.reshape(-1).split(block) if part.numel()]
    assert found.codes.shape == x.shape
    assert found.codes.dtype == own.book.dtype
    assert torch.equal(found.scales, torch.stack(blocks) if blocks else torch.zeros(0))
    for device in ("cpu", "meta"):
        zero, expected = own.zeros(x.to(device)), own.encode(torch.zeros_like(x, device=device))
        assert mfx.tree.spec(zero) == mfx.tree.spec(expected) == mfx.tree.spec(found)
    assert torch.equal(own.decode(*own.zeros(x)), torch.zeros(shape))


@CASES
def test_an_element_moves_by_at_most_half_the_gap_between_its_neighbours(
    book, shape, block, seed, spread, exponent
):
    own = codec(*book, block)
    x = values(seed, shape, spread, exponent, book[1])
    scales = own.encode(x).scales.repeat_interleave(block)[: x.numel()].double()
    levels = torch.tensor(own.book.levels, dtype=torch.float64)
    given_, kept = (
        (leaf.reshape(-1).double().abs() / scales).nan_to_num() for leaf in (x, stored(own, x))
    )
    if not book[1]:  # what is not zero does not become zero
        given_ = torch.where(given_ > 0, given_.clamp(min=float(levels[1])), given_)
    # The levels are even, or as a float type has them, after the roots.
    for _ in range(getattr(own.book, "roots", 0)):
        given_, kept, levels = given_.sqrt(), kept.sqrt(), levels.sqrt()
    above = torch.searchsorted(levels, given_).clamp(1, len(levels) - 1)
    half = (levels[above] - levels[above - 1]) / 2
    assert ((kept - given_).abs() <= half + 2e-6 * given_).all()


@CASES
@example(book=("linear", False), shape=(33, 1), block=16, seed=1, spread=3.0, exponent=-140)
@example(book=("dynamic", True), shape=(33, 1), block=16, seed=1, spread=3.0, exponent=-140)
def test_what_was_decoded_is_stored_as_it_is(book, shape, block, seed, spread, exponent):
    own = codec(*book, block)
    once = own.encode(values(seed, shape, spread, exponent, book[1]))
    again = own.encode(own.decode(*once))
    assert torch.equal(again.scales, once.scales)
    assert torch.equal(own.decode(*again), own.decode(*once))
    if exponent >= -40:  # subnormal numbers may have several codes
        assert torch.equal(again.codes.view(torch.uint8), once.codes.view(torch.uint8))


@CASES
def test_a_power_of_two_goes_to_the_scales_alone(book, shape, block, seed, spread, exponent):
    own = codec(*book, block)
    x = values(seed, shape, spread, 0, book[1])
    one, other = own.encode(x), own.encode(torch.ldexp(x, torch.tensor(exponent)))
    assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    assert torch.equal(torch.ldexp(one.scales, torch.tensor(exponent)), other.scales)


@CASES
def test_storing_is_odd_and_monotone(book, shape, block, seed, spread, exponent):
    own = codec(*book, block)
    x = values(seed, shape, spread, exponent, book[1])
    kept = stored(own, x)
    if book[1]:
        assert torch.equal(stored(own, -x), -kept)
    for before, after in zip(
        x.reshape(-1).split(block), kept.reshape(-1).split(block), strict=True
    ):
        assert (after[before.argsort(stable=True)].diff() >= 0).all()
    assert ((x == 0) <= (kept == 0)).all()
    if not book[1]:
        assert torch.equal(x == 0, kept == 0)


@CASES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_element_makes_its_block_nan_and_no_other(
    bad, book, shape, block, seed, spread, exponent
):
    own = codec(*book, block)
    x = values(seed, shape, spread, exponent, book[1])
    if not x.numel():
        return
    place = seed % x.numel()
    spoilt = x.reshape(-1).clone()
    spoilt[place] = bad
    kept, expected = (stored(own, leaf).reshape(-1) for leaf in (spoilt.reshape(shape), x))
    inside = torch.arange(x.numel()) // block == place // block
    assert kept[inside].isnan().all()
    assert torch.equal(kept[~inside], expected[~inside])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("book", BOOKS)
def test_a_leaf_of_another_dtype_is_stored_as_its_rounding_to_fp32(book: Any, dtype: torch.dtype):
    own = codec(*book)
    x = values(0, (3, 20), 1.0, 0, book[1]).to(dtype).mT
    for found, expected in zip(own.encode(x), own.encode(x.float()), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


# ------------------------------------------------------------------------------------------------ stochastic rounding

KEYS = 4000


@pytest.mark.parametrize("book", BOOKS)
def test_stochastic_rounding_keeps_the_mean(book: Any):
    own = codec(*book, block=64)
    x = values(3, (64,), 1.5, 0, book[1])
    # There an unsigned book rounds up.
    x = torch.where(x.abs() < own.book.levels[1] * x.abs().max(), 0.0, x)
    scale = x.abs().max()
    kept = (
        torch.func.vmap(lambda key: stored(own, x, key))(2**40 + torch.arange(KEYS)).double()
        / scale
    )
    levels = torch.tensor(own.book.levels, dtype=torch.float64)
    above = torch.searchsorted(levels, x.double().abs() / scale).clamp(1, len(levels) - 1)
    gap = levels[above] - levels[above - 1]
    # Hoeffding: a mean of KEYS values within a gap is off by more than this with a probability below 1e-9 for each.
    bound = gap * math.sqrt(math.log(2e9) / (2 * KEYS)) + 1e-6
    assert ((kept.mean(0) - x.double() / scale).abs() <= bound).all()
    off = (kept - x.double() / scale).abs()
    assert (off <= gap + 1e-6).all()
    assert torch.equal(kept[0][x == 0], torch.zeros_like(kept[0][x == 0]))


def test_noise_is_even_and_independent_of_place_and_key():
    number, bins = 2**16, 64
    streams = [
        uniform(torch.tensor(key_of(name) + step), number)
        for name in ("w", "v")
        for step in (0, 1, 2)
    ]
    for noise in streams:
        assert noise.min() >= 0
        assert noise.max() < 1
        counts = torch.histc(noise, bins, 0, 1)
        chi_squared = float(((counts - number / bins) ** 2 / (number / bins)).sum())
        assert abs(chi_squared - (bins - 1)) < 6 * math.sqrt(2 * (bins - 1))
    centred = [noise.double() - noise.double().mean() for noise in streams]
    pairs = [(a, b) for i, a in enumerate(centred) for b in centred[i + 1 :]]
    pairs += [(a[:-lag], a[lag:]) for a in centred for lag in (1, 2, 16, 2048)]
    for a, b in pairs:
        correlation = float(a.dot(b) / (a.norm() * b.norm()))
        assert abs(correlation) < 6 / math.sqrt(len(a))


def test_noise_is_the_same_under_vmap_and_on_every_call():
    keys = torch.tensor([0, 1, 2**33, 2**62 - 1])
    batched = torch.func.vmap(lambda key: uniform(key, 100))(keys)
    assert torch.equal(batched, torch.stack([uniform(key, 100) for key in keys]))
    # Fixed for good: a run that is resumed with another version must see the same noise.
    assert key_of("w") == 3414830545977038386
    assert (uniform(torch.tensor(0), 3) * 2**24).tolist() == [4024455, 356967, 841734]
    assert (uniform(torch.tensor(3414830545977038386), 3) * 2**24).tolist() == [
        9959482,
        1204820,
        13442553,
    ]


COMPACT = [
    mfx.int8(),
    mfx.int8(block=256, code="dynamic"),
    mfx.int8(block=64, stochastic=True),
    mfx.fp8(),
    mfx.fp8(block=64, format="e5m2", stochastic=True),
]


def tree_of(seed: int = 0, steps: int = 6) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """One leaf above the size from which leaves are stored in eight bits, and one below."""
    return kit.Example.of({"w": (70, 90), "b": (9,)}, steps=steps, seed=seed)


# ------------------------------------------------------------------------------------------------------- as a value


@pytest.mark.parametrize("dtype", COMPACT)
def test_a_compact_dtype_is_a_value(dtype: mfx.QuantizedDtype):
    import pickle

    assert eval(repr(dtype), vars(mfx)) == dtype == pickle.loads(pickle.dumps(dtype))
    assert len({dtype, pickle.loads(pickle.dumps(dtype))}) == 1
    assert [dtype == other for other in COMPACT].count(True) == 1
    with pytest.raises(AttributeError, match=r"use \.replace"):
        dtype.block = 1  # type: ignore[attr-defined]


def test_what_a_state_means_is_in_the_fingerprint():
    told = [
        *COMPACT,
        mfx.int8(block=64),
        mfx.int8(min_size=0),
        mfx.int8(stochastic=True, seed=1),
        torch.float32,
    ]
    assert len({mfx.momentum(dtype=dtype).fingerprint for dtype in told}) == len(told)


# ------------------------------------------------------------------------------------------------------ as a state


def test_the_state_is_named_trees_like_the_parameters():
    params, _ = tree_of()
    state = mfx.chain(mfx.momentum(dtype=mfx.int8(block=1000, stochastic=True))).init(params)
    spec = dict(zip(mfx.tree.names(state), mfx.tree.leaves(state), strict=True))
    assert {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in spec.items()} == {
        "momentum.trace.codes.w": ((70, 90), torch.int8),
        "momentum.trace.codes.b": ((9,), torch.float32),
        "momentum.trace.scales.w": ((7,), torch.float32),
        "momentum.trace.scales.b": ((0,), torch.float32),
        "momentum.trace.keys.w": ((), torch.int64),
        "momentum.trace.keys.b": ((), torch.int64),
    }


def test_an_element_takes_a_byte_and_its_share_of_a_scale():
    params = {"w": torch.empty(4096, 1000, device="meta")}
    for block in (64, 2048):
        tx = mfx.scale_by_adam(mu_dtype=mfx.int8(block), nu_dtype=mfx.int8(block))
        held = sum(leaf.nbytes for leaf in mfx.tree.leaves(tx.init(params)))
        assert held / params["w"].numel() == pytest.approx(2 * (1 + 4 / block), abs=1e-5)


@pytest.mark.parametrize("dtype", COMPACT)
def test_a_small_leaf_is_as_in_fp32(dtype: mfx.QuantizedDtype):
    params, steps = tree_of()
    for make in (
        lambda d: mfx.momentum(0.9, dtype=d),
        lambda d: mfx.scale_by_adam(mu_dtype=d, nu_dtype=d),
        lambda d: mfx.scale_by_lion(mu_dtype=d),
        lambda d: mfx.ema_params(0.9, dtype=d),
    ):
        updates, expected = (
            kit.examples.updates_of(make(d), params, steps)[-1] for d in (dtype, torch.float32)
        )
        assert torch.equal(updates["b"], expected["b"])


@pytest.mark.parametrize("dtype", COMPACT)
@given(seed=st.integers(0, 1000), decay=st.sampled_from((0.0, 0.5, 0.9, 0.95)))
def test_momentum_stays_within_what_roundings_add_up_to(
    dtype: mfx.QuantizedDtype, seed: int, decay: float
):
    params, steps = tree_of(seed, steps=5)
    tx = mfx.momentum(decay, nesterov=False, dtype=dtype)
    exact, state = tx.replace(dtype=torch.float64), tx.init(params)
    exact_state = exact.init(params)
    codec = dtype.resolved.signed
    gaps = torch.tensor(codec.book.levels).diff().max() * (
        1.0 if dtype.resolved.seed is not None else 0.5
    )
    allowed = 0.0
    for grads in steps:
        (updates, state), (_, exact_state) = (
            tx.update(grads, state),
            exact.update(grads, exact_state),
        )
        error = (updates["w"].double() - exact_state.trace["w"]).abs().max()
        # The state stored before; the rounding of this step shows in the next.
        assert error <= decay * allowed + 1e-5
        allowed = decay * allowed + float(gaps * state.trace.scales["w"].max())


def test_noise_differs_by_name_by_role_and_by_step_and_not_by_company():
    dtype = mfx.int8(block=64, min_size=0, stochastic=True)
    one = torch.rand(64)
    tx = mfx.scale_by_adam(0.0, 0.0, mu_dtype=dtype, nu_dtype=dtype)
    state = tx.init({"v": one, "w": one})
    keys = [int(key) for moment in (state.mu, state.nu) for key in moment.keys.values()]
    assert len(set(keys)) == 4
    _, state = tx.update({"v": one, "w": None}, state)
    assert int(state.mu.keys["v"]) == keys[0] + 1  # after v come w of mu, and both of nu
    assert int(state.mu.keys["w"]) == keys[1]
    _, alone = tx.update({"w": one}, tx.init({"w": one}))
    _, beside = tx.update({"v": one, "w": one}, tx.init({"v": one, "w": one}))
    assert torch.equal(alone.mu.codes["w"], beside.mu.codes["w"])
    assert not torch.equal(beside.mu.codes["v"], beside.mu.codes["w"])


@pytest.mark.parametrize(
    "dtype", [mfx.int8(min_size=0), mfx.int8(min_size=0, code="dynamic"), mfx.fp8(min_size=0)]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: mfx.scale_by_adam(0.9, 0.999, mu_dtype=dtype, nu_dtype=dtype),
        lambda dtype: mfx.scale_by_rms(0.999, eps_in_sqrt=False, debias=True, nu_dtype=dtype),
    ],
    ids=["adam", "rms"],
)
def test_no_second_moment_becomes_zero_and_no_update_explodes(make: Any, dtype: mfx.QuantizedDtype):
    tx = make(dtype)
    grads = {"w": torch.logspace(0, -15, 2048)}
    state = tx.init(grads)
    for _ in range(20):
        updates, state = tx.update(grads, state)
        # Where fp32 has 1: half a step above the smallest of the fourth powers, a root is too small by (2 / 3) ** 2.
        assert updates["w"].abs().max() <= 2.25 + 0.05


# ------------------------------------------------------------------------------------------------------- derivatives


def test_an_update_has_its_derivative_and_what_is_stored_has_none():
    params, steps = tree_of(steps=2)
    compact, plain = (
        mfx.momentum(0.9, nesterov=False, dtype=d) for d in (mfx.int8(), torch.float32)
    )

    def of_the_second(tx: mfx.Transform, first: Tensor, second: Tensor) -> Tensor:
        _, state = tx.update({**steps[0], "w": first}, tx.init(params))
        updates, _ = tx.update({**steps[1], "w": second}, state)
        return (updates["w"] * params["w"]).sum()

    pair = steps[0]["w"], steps[1]["w"]
    by_both = torch.func.grad(lambda pair: of_the_second(compact, *pair))(pair)
    expected = torch.func.grad(lambda pair: of_the_second(plain, *pair))(pair)
    assert torch.equal(by_both[1], expected[1])
    assert not by_both[0].any()
    slope = torch.func.grad(lambda tx: of_the_second(tx, *pair))(mfx.as_tensors(compact))
    # The product rule without the old state's own derivative.
    _, state = compact.update(steps[0], compact.init(params))
    decoded = compact.arguments["dtype"].resolved.signed.decode(
        state.trace.codes["w"], state.trace.scales["w"]
    )
    by_hand = ((decoded - steps[1]["w"]) * params["w"]).sum()
    assert float(mfx.hyperparams(slope)["decay"]) == pytest.approx(float(by_hand), rel=1e-3)


# ----------------------------------------------------------------------------------------------- as a torch optimizer


def optimized(dtype: Any) -> mfx.TransformOptimizer:
    tx = mfx.chain(
        mfx.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype), mfx.scale_by_learning_rate(1e-2)
    )
    return mfx.TransformOptimizer(nn.Linear(80, 90), tx)


@pytest.mark.parametrize(
    ("saved", "own"),
    [(torch.float32, mfx.int8()), (mfx.int8(), torch.float32), (mfx.int8(), mfx.fp8())],
)
def test_a_state_of_another_dtype_is_not_loaded(saved: Any, own: Any):
    old, new = optimized(saved), optimized(own)
    before = new.state_dict()
    with pytest.raises(ValueError, match="nothing was loaded"):
        new.load_state_dict(old.state_dict())
    kit.violation.require_same(
        "the state", new.state_dict()["state"], before["state"], "before the load"
    )


def test_compact_states_survive_fake_tensors():
    tx = mfx.momentum(dtype=mfx.int8(code="dynamic", min_size=0, block=64))
    for _ in range(2):
        with FakeTensorMode():
            params = {"w": torch.zeros(128)}
            tx.update(params, tx.init(params), params)
        params = {"w": torch.randn(128)}
        updates, _ = tx.update(params, tx.init(params), params)
        assert type(updates["w"]) is torch.Tensor
