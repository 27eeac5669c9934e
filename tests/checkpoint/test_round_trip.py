"""What is saved comes back bit for bit, and the next step is the one that would have been taken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import muonfx as mfx
from muonfx import testing as kit
from muonfx.tree.dtypes import dtype_named, name_of_dtype
from tests.checkpoint.common import assert_same_tree, bits, folder, grads_like, small_params, threads, trained
from tests.transforms.test_every_transform import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    pytest.mark.filterwarnings("ignore:dims. .*matches none of"),  # a case has settings by name, for names of all kinds
    pytest.mark.filterwarnings("ignore:blocks. .*matches none of"),
]

ck, Donation = mfx.checkpoint, mfx.Donation
ALL_DTYPES = sorted({name for name in map(name_of_dtype, vars(torch).values()) if name})


@given(kit.trees())
def test_load_after_save_is_the_identity(values):
    with folder() as path:
        ck.save(path / "here", values)
        assert_same_tree(ck.load(path / "here", like=values), values)
        back = ck.load(path / "here", like=mfx.tree.map(lambda leaf: leaf.to("meta"), values))
        assert_same_tree(back, values)


@given(kit.trees(), kit.trees())
def test_parameters_and_state_do_not_get_in_each_others_way(state, params):
    with folder() as path:
        ck.save(path, state, params=params)
        assert_same_tree(ck.load(path, like=state), state)
        assert_same_tree(ck.load_params(path, like=params), params)


@given(kit.trees())
def test_the_data_are_ordinary_safetensors(values):
    with folder() as path:
        ck.save(path, values)
        (data,) = path.glob("*.safetensors")
        plain = load_file(data)
        ours = ck.read(path)
        assert plain.keys() == ours.keys() == ck.inspect(path).leaves.keys()
        assert all(bits(plain[name]) == bits(ours[name]) for name in ours)


@given(kit.trees(nones=False))
def test_the_strides_are_those_of_like(values):
    with folder() as path:
        ck.save(path, values)
        for leaf, like in zip(mfx.tree.leaves(ck.load(path, like=values)), mfx.tree.leaves(values), strict=True):
            assert leaf.stride() == torch.empty_like(like).stride()


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_is_kept(tmp_path: Path, name: str):
    dtype = dtype_named(name)
    raw = torch.randint(0, 256, (6, 4, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    whole = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(6, 4)
    state = {"whole": whole, "turned": whole.t(), "part": whole[1::2, 1:], "scalar": whole[0, 0], "none": whole[:0]}
    ck.save(tmp_path, state)
    back = ck.load(tmp_path, like=state)
    for key, leaf in state.items():
        assert leaf.dtype == back[key].dtype
        assert bits(leaf) == bits(back[key]), key
    load_file(next(tmp_path.glob("*.safetensors")))  # anybody can open it


def test_a_state_goes_where_like_is_or_where_it_is_told_to(tmp_path: Path):
    state = {"w": torch.randn(3, 4), "half": torch.ones(2).bfloat16()}
    ck.save(tmp_path, state)
    blank = mfx.tree.map(lambda leaf: leaf.to("meta"), state)
    assert_same_tree(ck.load(tmp_path, like=blank), state)
    assert_same_tree(ck.load(tmp_path, like=ck.StateSpec.of(state), device="cpu"), state)
    assert ck.load(tmp_path, like=state, device="meta")["w"].device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_state_on_a_device_goes_on_there(tmp_path: Path, name: str):
    for place, tx in enumerate(CASES[name]):
        for dtype in kit.DTYPES:
            example = kit.Example.of({"w": (4, 3), "k": (3, 2, 2)}, steps=2, dtype=dtype).map(lambda leaf: leaf.cuda())
            params, steps = example
            _, state = tx.update(steps[0], tx.init(params), params)
            path = ck.save(tmp_path / f"{place}{dtype}", state, tx=tx, params=params)
            loaded = ck.load(path, like=tx.init(params), tx=tx)
            devices = [leaf.device for leaf in mfx.tree.tensors(state)]
            assert [leaf.device for leaf in mfx.tree.tensors(loaded)] == devices
            assert_same_tree(loaded, state)
            assert_same_tree(tx.update(steps[1], loaded, params), tx.update(steps[1], state, params))
            assert_same_tree(ck.load(path, like=mfx.spec(tx, params)), mfx.tree.map(lambda leaf: leaf.cpu(), state))


def test_leaves_that_share_storage_are_written_one_by_one(tmp_path: Path):
    leaf = torch.arange(6.0)
    state = {"a": leaf, "b": leaf, "c": leaf[2:], "d": leaf[:1].expand(4), "e": leaf[::2][:1]}
    back = ck.load(ck.save(tmp_path, state), like=state)
    assert_same_tree(back, state)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 5


@pytest.mark.parametrize("number", [1, 3])
def test_a_leaf_of_many_blocks(tmp_path: Path, number: int):
    state = {"big": torch.randn(3, 700_001), "odd": torch.randint(-128, 127, (9_000_001,), dtype=torch.int8)}
    seen: list[tuple[int, int]] = []
    ck.save(tmp_path, state, progress=lambda done, total: seen.append((done, total)))
    turned = {"big": state["big"].t().contiguous().t(), "odd": state["odd"]}
    with threads(number):
        assert_same_tree(ck.load(tmp_path, like=state), state)
        assert_same_tree(ck.load(tmp_path, like=turned), turned)
        ck.verify(tmp_path)
    total = sum(leaf.nbytes for leaf in state.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)
    assert len(seen) == 6


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
    assert_same_tree(ck.load(path, like=mfx.spec(tx, params)), state)
    again = ck.load_params(path, like=params)
    # Strides too: kernels of other strides may round in another order.
    assert_same_tree(again, params)
    assert_same_tree(tx.update(steps[-1], loaded, params), tx.update(steps[-1], state, params))
    donated = tx.update(steps[-1], mfx.tree.map(torch.clone, state), params, donate=Donation(False, True))
    assert_same_tree(tx.update(steps[-1], loaded, params, donate=Donation(False, True)), donated)


@settings(max_examples=100)
@given(kit.transforms(matrices=True), kit.params_and_grads(ranks=(2, 4)))
def test_every_transform_goes_on_as_if_nothing_had_happened(tx: mfx.Transform, example: kit.Example):
    with folder() as path:
        continues(tx, example, path)


@given(kit.chains(), kit.params_and_grads())
def test_every_chain_goes_on_as_if_nothing_had_happened(members: list[mfx.Transform], example: kit.Example):
    with folder() as path:
        continues(mfx.chain(*members), example, path)


EVERY_CASE = [pytest.param(tx, id=f"{name}-{i}") for name, cases in CASES.items() for i, tx in enumerate(cases)]


@pytest.mark.parametrize("tx", EVERY_CASE)
def test_every_case_with_every_parameter_dtype(tx: mfx.Transform, tmp_path: Path):
    for dtype in kit.DTYPES:
        example = kit.Example.of({"w": (4, 3), "k": (3, 2, 2), "none": (0, 3)}, steps=2, dtype=dtype)
        continues(tx, example, tmp_path / str(dtype))


STATE_DTYPES = [None, *kit.DTYPES]


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_every_state_dtype_with_every_parameter_dtype(tmp_path: Path, state_dtype: torch.dtype | None):
    tx = mfx.chain(
        mfx.momentum(dtype=state_dtype),
        mfx.scale_by_adam(mu_dtype=state_dtype, nu_dtype=state_dtype),
        mfx.scale_by_lion(mu_dtype=state_dtype),
        mfx.normalize_neurons(dtype=state_dtype),
        mfx.ema_params(0.9, dtype=state_dtype),
    )
    for dtype in kit.DTYPES:
        continues(tx, kit.Example.of({"w": (4, 3)}, steps=2, dtype=dtype), tmp_path / str(dtype))


# ------------------------------------------------------------------------------------------------ in a fresh process

FRESH = """
import sys, json, torch
sys.path[:0] = json.loads(sys.argv[2])
torch.set_num_threads(1)
import muonfx as mfx
from muonfx import testing as kit
from tests.checkpoint.common import grads_like, small_params
from tests.checkpoint.test_round_trip import chain_of, ck
for dtype in kit.DTYPES:
    path = f"{sys.argv[1]}/{dtype}"
    tx = chain_of()
    params = ck.load_params(path, like=small_params(dtype))
    state = ck.load(path, like=mfx.spec(tx, params))
    updates, state = tx.update(grads_like(params, 7), state, params)
    ck.save(path + "-next", state, params=updates, tx=tx)
"""


def chain_of() -> mfx.Transform:
    return mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.float32), mfx.scale_by_shape()),
                "adamw": mfx.scale_by_adam(mu_dtype=torch.bfloat16),
            },
            {"embed.weight": "adamw", "blocks.0.up.weight": "muon", "blocks.0.up.bias": "adamw", "scale": "adamw"},
        ),
        mfx.add_decayed_weights(0.1, mask=mfx.select.ndim(min=2)),
        mfx.accumulate(mfx.scale_by_learning_rate(mfx.warmup_cosine(0.1, 2, 10)), 2),
    )


def test_a_fresh_process_takes_the_same_step(tmp_path: Path):
    root = Path(__file__).resolve().parents[2]
    tx = chain_of()
    for dtype in kit.DTYPES:
        params, state = trained(tx, small_params(dtype))
        ck.save(tmp_path / str(dtype), state, tx=tx, params=params, step=2)
    command = [sys.executable, "-W", "error", "-c", FRESH, str(tmp_path), json.dumps([str(root)])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "77"}
    subprocess.run(command, check=True, env=environment)
    for dtype in kit.DTYPES:
        params, state = trained(tx, small_params(dtype))
        updates, state = tx.update(grads_like(params, 7), state, params)
        path = tmp_path / f"{dtype}-next"
        assert_same_tree(ck.load(path, like=state, tx=tx), state)
        assert_same_tree(ck.load_params(path, like=updates), updates)


# ------------------------------------------------------------------------------------------- through torch.save as well


@pytest.mark.filterwarnings("ignore:.* would move uphill")  # most cases have no learning rate
@pytest.mark.parametrize("name", sorted(CASES))
def test_weights_only_loads_of_a_torch_optimizer_go_on_bitwise(tmp_path: Path, name: str):
    for place, tx in enumerate(CASES[name]):
        for dtype in kit.DTYPES:
            example = kit.Example.of({"w": (4, 3), "k": (3, 2, 2)}, steps=1, dtype=dtype)
            models = [{key: torch.nn.Parameter(p.clone()) for key, p in example.params.items()} for _ in range(2)]
            one, other = (mfx.TransformOptimizer(model, tx) for model in models)

            def step(model, optimizer, seed):
                for key, grad in grads_like(example.params, seed).items():  # noqa: B023 - called within the loop
                    model[key].grad = grad
                optimizer.step()

            step(models[0], one, 0)
            step(models[0], one, 1)
            file = tmp_path / f"{place}.pt"
            torch.save({"model": models[0], "optimizer": one.state_dict()}, file)
            loaded = torch.load(file, weights_only=True)
            other.load_state_dict(loaded["optimizer"])
            with torch.no_grad():
                for key, param in models[1].items():
                    param.copy_(loaded["model"][key])
            assert_same_tree(other.transform_state, one.transform_state)
            for model, optimizer in zip(models, (one, other), strict=True):
                step(model, optimizer, 2)
            assert_same_tree(*models)
            assert_same_tree(other.transform_state, one.transform_state)


@st.composite
def json_values(draw):
    plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    plain |= st.text(st.characters(exclude_categories=["Cs"]))
    return draw(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)))


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values(), max_size=3), st.integers(0, 2**60)
)
def test_step_and_extra_come_back(extra, step):
    with folder() as path:
        ck.save(path, None, step=step, extra=extra)
        found = ck.inspect(path)
        assert (found.step, found.extra) == (step, extra)
