"""State in eight bits, as transforms and the torch optimizer keep it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import muonfx as mfx
from muonfx import testing as kit

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
    told = [*COMPACT, mfx.int8(block=64), mfx.int8(min_size=0), mfx.int8(stochastic=True, seed=1), torch.float32]
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
        updates, expected = (kit.examples.updates_of(make(d), params, steps)[-1] for d in (dtype, torch.float32))
        assert torch.equal(updates["b"], expected["b"])


@pytest.mark.parametrize("dtype", COMPACT)
@given(seed=st.integers(0, 1000), decay=st.sampled_from((0.0, 0.5, 0.9, 0.95)))
def test_momentum_stays_within_what_roundings_add_up_to(dtype: mfx.QuantizedDtype, seed: int, decay: float):
    params, steps = tree_of(seed, steps=5)
    tx = mfx.momentum(decay, nesterov=False, dtype=dtype)
    exact, state = tx.replace(dtype=torch.float64), tx.init(params)
    exact_state = exact.init(params)
    codec = dtype.resolved.signed
    gaps = torch.tensor(codec.book.levels).diff().max() * (1.0 if dtype.resolved.seed is not None else 0.5)
    allowed = 0.0
    for grads in steps:
        (updates, state), (_, exact_state) = tx.update(grads, state), exact.update(grads, exact_state)
        error = (updates["w"].double() - exact_state.trace["w"]).abs().max()
        assert error <= decay * allowed + 1e-5  # what was stored before; this step's rounding shows in the next
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


@pytest.mark.parametrize("dtype", [mfx.int8(min_size=0), mfx.int8(min_size=0, code="dynamic"), mfx.fp8(min_size=0)])
def test_no_second_moment_becomes_zero_and_no_update_explodes(dtype: mfx.QuantizedDtype):
    tx = mfx.scale_by_adam(0.9, 0.999, mu_dtype=dtype, nu_dtype=dtype)
    grads = {"w": torch.logspace(0, -15, 2048)}
    state = tx.init(grads)
    for _ in range(20):
        updates, state = tx.update(grads, state)
        # Where fp32 has 1: half a step above the smallest of the fourth powers, a root is too small by (2 / 3) ** 2.
        assert updates["w"].abs().max() <= 2.25 + 0.05


# ------------------------------------------------------------------------------------------------------- derivatives


def test_an_update_has_its_derivative_and_what_is_stored_has_none():
    params, steps = tree_of(steps=2)
    compact, plain = (mfx.momentum(0.9, nesterov=False, dtype=d) for d in (mfx.int8(), torch.float32))

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
    decoded = compact.arguments["dtype"].resolved.signed.decode(state.trace.codes["w"], state.trace.scales["w"])
    by_hand = ((decoded - steps[1]["w"]) * params["w"]).sum()
    assert float(mfx.hyperparams(slope)["decay"]) == pytest.approx(float(by_hand), rel=1e-3)


# ----------------------------------------------------------------------------------------------- as a torch optimizer


def optimized(dtype: Any) -> mfx.TransformOptimizer:
    tx = mfx.chain(mfx.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype), mfx.scale_by_learning_rate(1e-2))
    return mfx.TransformOptimizer(nn.Linear(80, 90), tx)


@pytest.mark.parametrize(
    ("saved", "own"), [(torch.float32, mfx.int8()), (mfx.int8(), torch.float32), (mfx.int8(), mfx.fp8())]
)
def test_a_state_of_another_dtype_is_not_loaded(saved: Any, own: Any):
    old, new = optimized(saved), optimized(own)
    before = new.state_dict()
    with pytest.raises(ValueError, match="nothing was loaded"):
        new.load_state_dict(old.state_dict())
    kit.violation.require_same("the state", new.state_dict()["state"], before["state"], "before the load")


def test_compact_states_survive_fake_tensors():
    tx = mfx.momentum(dtype=mfx.int8(code="dynamic", min_size=0, block=64))
    for _ in range(2):
        with FakeTensorMode():
            params = {"w": torch.zeros(128)}
            tx.update(params, tx.init(params), params)
        params = {"w": torch.randn(128)}
        updates, _ = tx.update(params, tx.init(params), params)
        assert type(updates["w"]) is torch.Tensor
