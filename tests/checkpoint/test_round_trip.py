"""A loaded state equals the saved state bit for bit, and so does the next step."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import muonfx as mfx
from muonfx import testing as kit
from muonfx.tree.dtypes import DTYPES
from tests.checkpoint.common import (
    assert_same_tree,
    bits,
    folder,
    grads_like,
    small_params,
    threads,
    trained,
)
from tests.processes import run_python
from tests.transforms.test_every_transform import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*changes its state at every micro-batch"),
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    # A case has patterns by name, for names of all kinds.
    pytest.mark.filterwarnings("ignore:view. .*matches none of"),
]

ck, Donation = mfx.checkpoint, mfx.Donation


TREES = kit.params_and_grads().map(lambda example: example.params)


@given(TREES, TREES)
def test_load_after_save_is_the_identity(state, params):
    with folder() as path:
        ck.save(path, state, params=params)
        back = ck.load(path, like=state)
        assert_same_tree(back, state)
        assert_same_tree(
            ck.load(path, like=mfx.tree.map(lambda leaf: leaf.to("meta"), state)), state
        )
        assert_same_tree(ck.load_params(path, like=params), params)
        for leaf, like in zip(mfx.tree.tensors(back), mfx.tree.tensors(state), strict=True):
            assert leaf.stride() == torch.empty_like(like).stride()
        # The data are ordinary safetensors.
        (data,) = path.glob("*.safetensors")
        plain, ours = load_file(data), ck.read(path)
        assert plain.keys() == ours.keys() == ck.inspect(path).leaves.keys()
        assert all(bits(plain[name]) == bits(ours[name]) for name in ours)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_kept(tmp_path: Path, name: str):
    dtype = DTYPES[name]
    raw = torch.randint(
        0,
        256,
        (6, 4, dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )
    whole = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(6, 4)
    state = {
        "whole": whole,
        "turned": whole.t(),
        "part": whole[1::2, 1:],
        "scalar": whole[0, 0],
        "none": whole[:0],
    }
    ck.save(tmp_path, state)
    back = ck.load(tmp_path, like=state)
    for key, leaf in state.items():
        assert leaf.dtype == back[key].dtype
        assert bits(leaf) == bits(back[key]), key
    load_file(next(tmp_path.glob("*.safetensors")))  # other libraries can open it


def test_a_state_goes_where_it_is_told_to(tmp_path: Path):
    state = {"w": torch.randn(3, 4), "half": torch.ones(2).bfloat16()}
    ck.save(tmp_path, state)
    assert_same_tree(ck.load(tmp_path, like=ck.StateSpec.of(state), device="cpu"), state)
    assert ck.load(tmp_path, like=state, device="meta")["w"].device.type == "meta"


def test_leaves_that_share_storage_are_written_one_by_one(tmp_path: Path):
    leaf = torch.arange(6.0)
    state = {"a": leaf, "b": leaf, "c": leaf[2:], "d": leaf[:1].expand(4), "e": leaf[::2][:1]}
    back = ck.load(ck.save(tmp_path, state), like=state)
    assert_same_tree(back, state)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 5


@pytest.mark.parametrize("number", [1, 3])
def test_a_leaf_of_many_blocks(tmp_path: Path, number: int):
    state = {
        "big": torch.randn(3, 700_001),
        "odd": torch.randint(-128, 127, (9_000_001,), dtype=torch.int8),
    }
    ck.save(tmp_path, state)
    turned = {"big": state["big"].t().contiguous().t(), "odd": state["odd"]}
    with threads(number):
        assert_same_tree(ck.load(tmp_path, like=state), state)
        assert_same_tree(ck.load(tmp_path, like=turned), turned)
        ck.verify(tmp_path)


def continues(tx: mfx.Transform, example: kit.Example, path: Path) -> None:
    """Save after a step, load, and go on: as if nothing had happened."""
    params, steps = example
    steps = [*steps, steps[0]]
    state = tx.init(params)
    for grads in steps[:-1]:
        _, state = tx.update(grads, state, params)
    ck.save(path, state, tx=tx, params=params, step=len(steps) - 1)
    loaded = ck.load(path, like=tx.init(params), tx=tx)
    assert_same_tree(loaded, state)
    assert [leaf.device for leaf in mfx.tree.tensors(loaded)] == [
        leaf.device for leaf in mfx.tree.tensors(state)
    ]
    assert_same_tree(ck.load(path, like=mfx.spec(tx, params)), state)
    again = ck.load_params(path, like=params)
    # Strides too: kernels of other strides may round in another order.
    assert_same_tree(again, params)
    assert_same_tree(tx.update(steps[-1], loaded, params), tx.update(steps[-1], state, params))
    donated = tx.update(
        steps[-1], mfx.tree.map(torch.clone, state), params, donate=Donation(False, True)
    )
    assert_same_tree(tx.update(steps[-1], loaded, params, donate=Donation(False, True)), donated)


@given(
    kit.transforms(matrices=True) | kit.chains().map(lambda members: mfx.chain(*members)),
    kit.params_and_grads(ranks=(2, 4)),
)
def test_every_transform_and_chain_goes_on_as_if_nothing_had_happened(
    tx: mfx.Transform, example: kit.Example
):
    with folder() as path:
        continues(tx, example, path)


EVERY_CASE = [
    pytest.param(tx, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, tx in enumerate(cases)
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tx", EVERY_CASE)
def test_every_case_with_every_parameter_dtype(tx: mfx.Transform, tmp_path: Path, device: str):
    for dtype in kit.DTYPES:
        example = kit.Example.of(
            {"w": (4, 3), "k": (3, 2, 2), "none": (0, 3)}, steps=2, dtype=dtype
        )
        continues(tx, example.map(lambda leaf: leaf.to(device)), tmp_path / str(dtype))


def chain_of() -> mfx.Transform:
    return mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition(
            {
                "muon": mfx.chain(
                    mfx.momentum(), mfx.orthogonalize(dtype=torch.float32), mfx.scale_by_shape()
                ),
                "adamw": mfx.scale_by_adam(mu_dtype=torch.bfloat16),
            },
            {
                "embed.weight": "adamw",
                "blocks.0.up.weight": "muon",
                "blocks.0.up.bias": "adamw",
                "scale": "adamw",
            },
        ),
        mfx.add_decayed_weights(0.1, mask=mfx.routing.ndim(min=2)),
        mfx.accumulate(mfx.scale_by_learning_rate(mfx.warmup_cosine_decay_schedule(0.1, 2, 10)), 2),
    )


def take_a_step(folder: str) -> None:
    """Load, take a step, and save, in a process of its own."""
    for dtype in kit.DTYPES:
        params = ck.load_params(f"{folder}/{dtype}", like=small_params(dtype))
        state = ck.load(f"{folder}/{dtype}", like=mfx.spec(chain_of(), params))
        updates, state = chain_of().update(grads_like(params, 7), state, params)
        ck.save(f"{folder}/{dtype}-next", state, params=updates, tx=chain_of())


def test_a_fresh_process_takes_the_same_step(tmp_path: Path):
    tx = chain_of()
    expected = {}
    for dtype in kit.DTYPES:
        params, state = trained(tx, small_params(dtype))
        ck.save(tmp_path / str(dtype), state, tx=tx, params=params, step=2)
        expected[dtype] = tx.update(grads_like(params, 7), state, params)
    code = f"import tests.checkpoint.test_round_trip as t; t.take_a_step({str(tmp_path)!r})"
    run_python("-c", code, PYTHONHASHSEED="77")
    for dtype, (updates, state) in expected.items():
        path = tmp_path / f"{dtype}-next"
        assert_same_tree(ck.load(path, like=state, tx=tx), state)
        assert_same_tree(ck.load_params(path, like=updates), updates)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=3),
    st.integers(0, 2**60),
)
def test_step_and_extra_come_back(extra, step):
    with folder() as path:
        ck.save(path, None, step=step, extra=extra)
        found = ck.inspect(path)
        assert (found.step, found.extra) == (step, extra)
