"""A run that has changed since its checkpoint: state is carried over where it fits, and each leaf is accounted for."""

import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonfx as mfx
from tests.checkpoint.common import bits, folder, grads_like, trained
from tests.processes import Here, World

ck = mfx.checkpoint

KINDS = {
    "muon": mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float32), mfx.scale(-0.1)),
    "adamw": mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.1)),
    "lion": mfx.chain(mfx.scale_by_lion(), mfx.scale(-0.1)),
}
NAMES = ("wte", "up", "down", "b")


def params_of(rows: int = 6, names: tuple[str, ...] = NAMES, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"wte": (rows, 4), "up": (8, 4), "down": (4, 8), "b": (8, 1)}
    return {name: torch.randn(shapes[name], generator=draw) for name in names}


def partition(labels: dict[str, str]) -> mfx.Transform:
    return mfx.partition(
        {label: KINDS[label.partition("-")[0]] for label in sorted(set(labels.values()))}, labels
    )


def leaves_of(state: Any) -> dict[str, Tensor]:
    """The leaves of a state by their names in a checkpoint."""
    with folder() as root:
        return ck.read(ck.save(root / "state", state))


def check_account(found: ck.Continuation, like: Any, path: Path) -> None:
    """Each leaf of the new state and each of the checkpoint is in the account once, and the values are what it says."""
    saved = {name: leaf for name, leaf in ck.read(path).items() if not name.startswith("params/")}
    initial = leaves_of(like)
    values = leaves_of(found.state)
    names = [*found.kept, *found.moved, *found.grown, *found.new]
    assert sorted(names) == sorted(initial)
    sources = {**{name: name for name in found.kept}, **found.moved, **found.grown}
    assert set(found.dropped) == saved.keys() - sources.values()
    for name, value in values.items():
        if name in found.grown:
            rows = len(saved[sources[name]])
            assert torch.equal(value[:rows], saved[sources[name]])
            assert torch.equal(value[rows:], initial[name][rows:])
        elif name in sources:
            assert bits(value) == bits(saved[sources[name]])
        else:
            assert bits(value) == bits(initial[name])
    text = str(found)
    for name in [*found.moved, *found.grown, *found.new, *found.dropped]:
        assert name in text


# -------------------------------------------------------------------------------------------------------------- labels


LABELS = st.fixed_dictionaries(
    {name: st.sampled_from(["muon", "adamw", "lion", "adamw-2"]) for name in NAMES}
)


@settings(max_examples=60)
@given(before=LABELS, after=LABELS)
def test_each_parameter_keeps_its_state_if_its_new_label_has_the_same_variables(
    before: dict[str, str], after: dict[str, str]
) -> None:
    params = params_of()
    _, state = trained(partition(before), params)
    like = partition(after).init(params)
    kinds = {
        name: (before[name].partition("-")[0], after[name].partition("-")[0]) for name in NAMES
    }
    with folder() as root:
        path = ck.save(root / "run", state, params=params)
        if not any(old == new for old, new in kinds.values()):
            with pytest.raises(ck.MismatchError, match=r"no leaf of the checkpoint fits `like`"):
                ck.load_changed(path, like)
            return
        found = ck.load_changed(path, like)
        check_account(found, like, path)
    for name, (old, new) in kinds.items():
        is_new = any(leaf.endswith(f"/{name}") for leaf in found.new)
        assert is_new != (old == new)
    partition(after).update(grads_like(params, 5), found.state, params)


@settings(max_examples=20)
@given(labels=LABELS)
def test_of_an_unchanged_run_all_is_kept(labels: dict[str, str]) -> None:
    params = params_of()
    tx = partition(labels)
    _, state = trained(tx, params)
    with folder() as root:
        path = ck.save(root / "run", state, tx=tx)
        found = ck.load_changed(path, tx.init(params))
    assert leaves_of(found.state).keys() == set(found.kept)
    assert [found.moved, found.grown, found.new, found.dropped] == [{}, {}, (), ()]
    assert str(found) == f"{len(found.kept)} leaves kept"
    for name, leaf in leaves_of(state).items():
        assert bits(leaves_of(found.state)[name]) == bits(leaf)


def saved_after(tx: mfx.Transform, params: dict[str, Tensor], root: Path, steps: int = 2) -> Path:
    return ck.save(root / "run", trained(tx, params, steps)[1], tx=tx)


def test_a_divided_label_has_its_count_twice(tmp_path: Path) -> None:
    params = params_of()
    path = saved_after(partition(dict.fromkeys(NAMES, "adamw")), params, tmp_path, steps=3)
    after = partition({"wte": "adamw-2", "up": "adamw", "down": "adamw", "b": "adamw-3"})
    found = ck.load_changed(path, after.init(params))
    counts = {name: leaf for name, leaf in leaves_of(found.state).items() if name.endswith("count")}
    assert len(counts) == 3
    assert {int(count) for count in counts.values()} == {3}
    found.state["adamw"]["scale_by_adam"].count.add_(1)  # each has its own
    assert int(found.state["adamw-2"]["scale_by_adam"].count) == 3


def test_the_count_of_a_label_whose_parameters_are_all_new_starts_again(tmp_path: Path) -> None:
    """The old count would make the first updates of AdamW too large: its averages start at zero."""
    params = params_of()
    path = saved_after(
        partition(dict.fromkeys(NAMES, "muon") | {"b": "adamw"}), params, tmp_path, steps=3
    )
    after = partition(dict.fromkeys(NAMES, "adamw") | {"b": "muon", "up": "muon"})
    found = ck.load_changed(path, after.init(params))
    assert found.kept == ("muon/momentum/trace/up",)
    assert int(found.state["adamw"]["scale_by_adam"].count) == 0


def test_a_state_that_would_start_again_as_a_whole_is_an_error(tmp_path: Path) -> None:
    params = params_of()
    adam, momentum = KINDS["adamw"], KINDS["muon"]
    states = saved_after(adam, params, tmp_path)
    with pytest.raises(
        ck.MismatchError, match=r"loaded:\s.*fits `like`.*'scale_by_adam/mu.*'momentum/trace"
    ):
        ck.load_changed(states, momentum.init(params))
    only_params = ck.save(tmp_path / "params", None, params=params)
    with pytest.raises(ck.MismatchError, match=r"it has no state, and `like` has 'momentum/trace"):
        ck.load_changed(only_params, momentum.init(params))
    # A chain without a state has nothing to start again.
    assert ck.load_changed(states, mfx.scale(-0.1).init(params)).kept == ()


def test_labels_with_other_counts_do_not_become_one(tmp_path: Path) -> None:
    params = params_of()
    before = partition({"wte": "adamw", "up": "adamw-2", "down": "muon", "b": "adamw"})
    _, state = trained(before, params)
    after = partition({"wte": "adamw", "up": "adamw", "down": "muon", "b": "adamw"})
    path = ck.save(tmp_path / "equal", state)
    assert ck.load_changed(path, after.init(params)).dropped == ("adamw-2/scale_by_adam/count",)
    state["adamw-2"]["scale_by_adam"].count.add_(1)
    path = ck.save(tmp_path / "other", state)
    with pytest.raises(
        ck.MismatchError, match=r"'adamw/scale_by_adam/count' [\s\S]*a label of their own"
    ):
        ck.load_changed(path, after.init(params))


# ----------------------------------------------------------------------------------------- parameters, sizes and chains


def test_a_larger_vocabulary_keeps_its_first_rows(tmp_path: Path) -> None:
    labels = {"wte": "adamw", "up": "muon", "down": "muon", "b": "adamw"}
    tx = mfx.chain(partition(labels), mfx.ema_params(0.9))
    path = saved_after(tx, params_of(rows=6), tmp_path)
    like = tx.init(params_of(rows=9, seed=1))
    found = ck.load_changed(path, like)
    check_account(found, like, path)
    assert sorted(found.grown) == [
        "ema_params/average/wte",
        "partition/adamw/scale_by_adam/mu/wte",
        "partition/adamw/scale_by_adam/nu/wte",
    ]
    assert not found.new
    fresh = ck.load_changed(path, like, rename={"*/wte": "*/old"})  # as for the head of new classes
    assert (fresh.grown, sorted(fresh.new)) == ({}, sorted(found.grown))
    smaller = ck.load_changed(path, tx.init(params_of(rows=5)))
    assert sorted(smaller.new) == sorted(found.grown)  # rows cannot be dropped in silence


@pytest.mark.parametrize("rows", [600, 640, 1200])
def test_state_in_eight_bits_grows_too(rows: int, tmp_path: Path) -> None:
    tx = mfx.momentum(0.9, dtype=mfx.int8())
    params = {"wte": torch.randn(600, 50, generator=torch.Generator().manual_seed(0))}
    _, state = trained(tx, params)
    path = ck.save(tmp_path / "run", state)
    larger = {"wte": torch.zeros(rows, 50)}
    found = ck.load_changed(path, tx.init(larger))
    zeros = {"wte": torch.zeros(600, 50)}
    expected, _ = tx.update(zeros, state, params)
    updates, _ = tx.update({"wte": torch.zeros(rows, 50)}, found.state, larger)
    torch.testing.assert_close(updates["wte"][:600], expected["wte"], rtol=0, atol=0)
    assert not updates["wte"][600:].any()


def test_a_state_that_only_partly_fits_is_not_mixed(tmp_path: Path) -> None:
    """SOAP's left factor has as many rows as the parameter; its right one does not change."""
    tx = mfx.contrib.scale_by_soap()
    path = saved_after(tx, {"wte": torch.randn(6, 4), "up": torch.randn(4, 4)}, tmp_path)
    found = ck.load_changed(path, tx.init({"wte": torch.zeros(9, 4), "up": torch.zeros(4, 4)}))
    assert not found.grown
    assert "left/up" in found.kept
    assert not any(name.endswith("/wte") for name in found.kept)


def test_parameters_come_and_go(tmp_path: Path) -> None:
    labels = dict.fromkeys(NAMES, "adamw")
    path = saved_after(partition(labels), params_of(names=("wte", "up", "down")), tmp_path)
    like = partition(labels).init(params_of(names=("up", "down", "b")))
    found = ck.load_changed(path, like)
    check_account(found, like, path)
    assert {name.rpartition("/")[2] for name in found.dropped} == {"wte"}
    assert {name.rpartition("/")[2] for name in found.new} == {"b"}


def test_an_inserted_layer_is_new_and_the_layer_after_it_keeps_its_state(tmp_path: Path) -> None:
    labels = {f"layers.{index}.{name}": "adamw" for index in range(3) for name in ("w", "b")}
    params = {name: torch.full((2, 2), 1.0 + index) for index, name in enumerate(labels)}
    two_layers = {name: param for name, param in params.items() if not name.startswith("layers.2.")}
    path = saved_after(partition(dict.fromkeys(two_layers, "adamw")), two_layers, tmp_path)
    like = partition(labels).init(params)
    found = ck.load_changed(path, like, rename={"*/layers.1.*": "*/layers.2.*"})
    check_account(found, like, path)
    moments = [f"adamw/scale_by_adam/{moment}" for moment in ("mu", "nu")]
    assert found.moved == {
        f"{m}/layers.2.{name}": f"{m}/layers.1.{name}" for m in moments for name in ("w", "b")
    }
    assert set(found.new) == {f"{m}/layers.1.{name}" for m in moments for name in ("w", "b")}
    assert found.dropped == ()
    for wrong, message in (
        ({"*/layer.1.*": "*/x.*"}, "matches no"),
        ({"*/layers.1.*": "*/layers.0.*"}, "both 'adamw"),
    ):
        with pytest.raises(ck.MismatchError, match=f"rename: .*{message}"):
            ck.load_changed(path, like, rename=wrong)


RECIPE = partition({"wte": "adamw", "up": "muon", "down": "muon", "b": "adamw"})

CHAINS: dict[str, tuple[mfx.Transform, mfx.Transform, set[str]]] = {
    "clipped": (RECIPE, mfx.chain(mfx.clip_by_global_norm(1.0), RECIPE), set()),
    "no longer clipped": (mfx.chain(mfx.clip_by_global_norm(1.0), RECIPE), RECIPE, set()),
    "accumulated": (RECIPE, mfx.accumulate(RECIPE, every=2), {"count", "seen", "sums"}),
    "averaged": (RECIPE, mfx.chain(RECIPE, mfx.ema_params(0.9)), {"ema_params"}),
    "skipping": (RECIPE, mfx.skip_nonfinite(RECIPE), {"*"}),
    "with a schedule": (
        mfx.chain(RECIPE, mfx.scale_by_learning_rate(mfx.linear_schedule(1.0, 0.0, 9))),
        mfx.chain(
            mfx.clip_by_global_norm(1.0),
            RECIPE,
            mfx.scale_by_learning_rate(mfx.linear_schedule(1.0, 0.5, 9)),
        ),
        set(),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_another_chain_has_the_state_of_each_of_its_transforms(name: str, tmp_path: Path) -> None:
    before, after, new = CHAINS[name]
    params = params_of()
    path = saved_after(before, params, tmp_path)
    like = after.init(params)
    found = ck.load_changed(path, like)
    check_account(found, like, path)
    assert not found.dropped
    assert {leaf.partition("/")[0] for leaf in found.new} <= new or new == {"*"}
    for leaf in ("mu/wte", "nu/b", "trace/up", "scale_by_adam/count"):
        assert not any(other.endswith(leaf) for other in found.new)


def test_two_states_that_could_come_from_one_are_both_new(tmp_path: Path) -> None:
    params = params_of()
    _, saved = trained(KINDS["adamw"], params)
    momentum = mfx.momentum(0.9).init(params)
    path = ck.save(tmp_path / "run", {"before": saved, "other": momentum})
    twice = mfx.chain(mfx.chain(mfx.scale_by_adam()), mfx.chain(mfx.scale_by_adam()))
    like = {"first": twice.init(params), "second": twice.init(params), "other": momentum}
    found = ck.load_changed(path, like)
    check_account(found, like, path)
    assert not found.moved
    assert len(found.dropped) == len(leaves_of(saved))


def test_a_count_comes_from_whole_levels_of_a_name(tmp_path: Path) -> None:
    """The label "xadamw" ends like "adamw", and is another one."""
    params = {"w": torch.ones(2, 3)}
    adam = mfx.scale_by_adam().init(params)
    path = ck.save(tmp_path / "run", {"count": torch.tensor(7), "xadamw": {"adam": adam}})
    like = {"outer": {"count": torch.tensor(0), "adamw": {"adam": adam}}}
    found = ck.load_changed(path, like)
    assert found.moved["outer/adamw/adam/mu/w"] == "xadamw/adam/mu/w"
    assert "outer/count" in found.new


def test_a_model_in_which_all_parameters_have_other_names_is_no_changed_run(tmp_path: Path) -> None:
    params = params_of()
    path = saved_after(mfx.momentum(0.9), params, tmp_path)
    like = mfx.momentum(0.9).init({f"net.{name}": param for name, param in params.items()})
    with pytest.raises(
        ck.MismatchError, match=r"it has 'b', .*`like` has 'net\.b', [\s\S]*rename="
    ):
        ck.load_changed(path, like)


def test_a_spec_has_no_values_for_new_leaves(tmp_path: Path) -> None:
    params = params_of()
    path = saved_after(mfx.momentum(0.9), params, tmp_path)
    with pytest.raises(TypeError, match=r"like: found a StateSpec.*tx\.init\(params\)"):
        ck.load_changed(path, mfx.spec(mfx.momentum(0.9), params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_may_widen_only(dtype: torch.dtype, tmp_path: Path) -> None:
    params = params_of()
    path = saved_after(mfx.momentum(0.9), params, tmp_path)
    like = mfx.chain(mfx.momentum(0.9, dtype=dtype), mfx.scale(0.1)).init(params)
    if dtype == torch.bfloat16:
        with pytest.raises(
            ck.MismatchError, match=r"narrowing[\s\S]*state dtypes of the checkpoint"
        ) as caught:
            ck.load_changed(path, like)
        advice = "to round: mfx.checkpoint.load(path, like, cast={'momentum': torch.bfloat16}), with the arguments"
        assert advice in str(caught.value)
        with pytest.warns(UserWarning, match="loaded the whole state as 'momentum'"):
            loaded = ck.load(path, like, cast={"momentum": torch.bfloat16}, allow_other_chain=True)
        assert loaded["momentum"].trace["up"].dtype == dtype
    else:
        assert ck.load_changed(path, like).state["momentum"].trace["up"].dtype == dtype


# ---------------------------------------------------------------------------------------------------------- optimizers


def model_of(here: Here | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 7)
    )
    if here is not None:
        fully_shard(model[1], mesh=here.mesh)
        fully_shard(model, mesh=here.mesh)
    return model


def optimizer_of(model: nn.Module, labels: dict[str, str]) -> mfx.TransformOptimizer:
    rules = {name: labels.get(name, "adamw") for name, _ in model.named_parameters()}
    return mfx.TransformOptimizer(model, mfx.muon_with_adamw(0.02, 0.003, labels=rules))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        model(torch.randint(7, (8,), generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


BEFORE = {"1.weight": "muon", "3.weight": "muon", "4.weight": "muon"}
AFTER = {"1.weight": "muon", "3.weight": "muon"}


def save_run(here: Here | None, path: Path) -> dict[str, Any]:
    model = model_of(here)
    optimizer = optimizer_of(model, BEFORE)
    train(model, optimizer, range(3))
    ck.save(path, optimizer, params=dict(model.named_parameters()), step=3)
    return {}


def continue_run(here: Here | None, path: Path) -> dict[str, Any]:
    """Continue with a frozen layer and another label for the last weight."""
    model = model_of(here, seed=1)
    model[1].requires_grad_(False)
    optimizer = optimizer_of(model, AFTER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ck.load_changed(path, optimizer)
        saved = ck.load_params(path, like=dict(model.named_parameters()), tx=optimizer.transform)
    model.load_state_dict(saved, strict=False)
    train(model, optimizer, range(3, 5))
    weights = {
        name: getattr(param, "full_tensor", lambda p=param: p)()
        for name, param in model.named_parameters()
    }
    return {
        "account": str(found),
        "weights": {name: weight.detach().clone() for name, weight in weights.items()},
    }


def test_a_run_with_a_frozen_layer_and_another_label_goes_on(tmp_path: Path) -> None:
    save_run(None, tmp_path)
    found = continue_run(None, tmp_path)
    account = found["account"]
    assert "adamw/scale_by_adam/mu/4.weight  new, as init made it" in account
    assert "muon/momentum/trace/4.weight" in account
    assert "param_groups: this optimizer keeps its own" in account
    reference = model_of()
    optimizer = optimizer_of(reference, BEFORE)
    train(reference, optimizer, range(3))
    assert torch.equal(found["weights"]["1.weight"], reference[1].weight)  # frozen


@pytest.mark.dist
@pytest.mark.parametrize("savers", [1, 2])
def test_the_account_and_the_run_on_ranks_are_those_of_one_process(
    world: World, tmp_path: Path, savers: int
):
    world.check(savers, save_run, path=tmp_path)
    expected = continue_run(None, tmp_path)
    for loaders in (1, 2):
        for found in world.check(loaders, continue_run, path=tmp_path):
            assert found["account"] == expected["account"]
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


def grow_on_ranks(here: Here, path: Path) -> None:
    model = model_of(here)
    model[0] = nn.Embedding(9, 6)
    fully_shard(model[0], mesh=here.mesh)
    with pytest.raises(
        ck.MismatchError, match=r"0\.weight[\s\S]*shards cannot grow[\s\S]*in one process"
    ):
        ck.load_changed(path, optimizer_of(model, BEFORE))


PAGE = Path(__file__).parents[2] / "docs" / "changing-a-run.md"


def grow_by_the_page(here: Here | None, path: Path) -> dict[str, Tensor]:
    """Continue with nine rows of the embedding: on ranks by the code of the page, and in one process as it is."""
    model = model_of(seed=1)
    model[0] = nn.Embedding(9, 6)
    if here is None:
        params = dict(model.named_parameters())
        optimizer = optimizer_of(model, BEFORE)
        ck.load_changed(path, optimizer)
        with torch.no_grad():
            params["0.weight"][:7] = ck.read(path)["params/0.weight"]
    else:
        fully_shard(model[1], mesh=here.mesh)
        fully_shard(model, mesh=here.mesh)
        optimizer = optimizer_of(model, BEFORE)
        blocks = re.findall(
            r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        (code,) = [block for block in blocks if "full_tensor" in block]
        code = code.replace('"tok.weight"', '"0.weight"').replace("64, 32", "7, 6")
        names = {"torch": torch, "mfx": mfx, "model": model, "optimizer": optimizer, "path": path}
        exec(code, names)
    params = dict(model.named_parameters())
    rest = {name: param for name, param in params.items() if name != "0.weight"}
    group = None if here is None else here.group
    loaded = ck.load_params(path, rest, allow_extra=["params/0.weight"], group=group)
    with torch.no_grad():
        for name, param in rest.items():
            param.copy_(loaded[name])
    state = {}
    for name, param in params.items():
        for key, leaf in optimizer.state[param].items():
            state[f"{key} of {name}"] = whole(leaf).clone()
    train(model, optimizer, range(3, 5))
    return {**state, **{name: whole(param.detach()) for name, param in params.items()}}


@pytest.mark.dist
def test_a_vocabulary_grows_over_ranks_by_the_code_of_the_page(
    world: World, tmp_path: Path
) -> None:
    world.check(2, save_run, path=tmp_path)
    expected = grow_by_the_page(None, tmp_path)
    for found in world.check(2, grow_by_the_page, path=tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.dist
def test_shards_that_would_grow_are_refused_on_all_ranks(world: World, tmp_path: Path) -> None:
    world.check(2, save_run, path=tmp_path)
    world.check(2, grow_on_ranks, path=tmp_path)


ROWS = {"wq": 8, "wk": 4, "wv": 4}
"""The rows of each part of a fused weight."""
FUSED = "(q=8 + k=4 + v=4) in -> q in, k in, v in"


def attention(
    here: Here | None, divided: bool
) -> tuple[dict[str, nn.Parameter], mfx.TransformOptimizer]:
    """The weights of an attention layer, fused or not, and their optimizer."""
    draw = torch.Generator().manual_seed(0)
    tensors = {"qkv": torch.randn(16, 6, generator=draw), "norm": torch.ones(6)}
    if divided:
        tensors |= dict(zip(ROWS, tensors.pop("qkv").split([*ROWS.values()]), strict=True))
    if here is not None:
        tensors = {
            name: distribute_tensor(tensor, here.mesh, [Shard(0)])
            for name, tensor in tensors.items()
        }
    params = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    labels = {name: "adamw" if name == "norm" else "muon" for name in params}
    view = mfx.MatrixView(None if divided else {"qkv": FUSED})
    orthogonalize = mfx.orthogonalize(view=view, dtype=torch.float32)
    tx = mfx.muon_with_adamw(0.02, 0.003, labels=labels, orthogonalize=orthogonalize)
    return params, mfx.TransformOptimizer(params, tx)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(param: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return tensor
    return distribute_tensor(tensor, param.device_mesh, param.placements)


def step_attention(
    params: dict[str, nn.Parameter], optimizer: mfx.TransformOptimizer, seed: int
) -> dict[str, Tensor]:
    """Take a step on equal gradients, fused or not; return the weights as if they were divided."""
    draw = torch.Generator().manual_seed(seed)
    grads = {"qkv": torch.randn(16, 6, generator=draw), "norm": torch.randn(6, generator=draw)}
    grads |= dict(zip(ROWS, grads["qkv"].split([*ROWS.values()]), strict=True))
    for name, param in params.items():
        param.grad = placed_like(param, grads[name])
    optimizer.step()
    weights = {name: whole(param.detach()).clone() for name, param in params.items()}
    if "qkv" in weights:
        weights |= dict(zip(ROWS, weights.pop("qkv").split([*ROWS.values()]), strict=True))
    return weights


def divide_fused(here: Here | None, path: Path) -> None:
    fused, before = attention(here, divided=False)
    weights = step_attention(fused, before, seed=0)
    ck.save(path, before)
    divided, after = attention(here, divided=True)
    with torch.no_grad():
        for name, param in divided.items():
            param.copy_(placed_like(param, weights[name]))
    account = ck.load_changed(path, after)
    assert set(account.new) == {f"muon/momentum/trace/{name}" for name in ROWS}
    trace = ck.read(path)["muon/momentum/trace/qkv"]
    for name, part in zip(ROWS, trace.split([*ROWS.values()]), strict=True):
        param = divided[name]
        after.state[param]["muon.momentum.trace"].copy_(placed_like(param, part))
    expected = step_attention(fused, before, seed=1)
    found = step_attention(divided, after, seed=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_fused_parameter_that_becomes_three_keeps_its_momentum_by_rows(tmp_path: Path) -> None:
    divide_fused(None, tmp_path)


@pytest.mark.dist
def test_on_ranks_a_fused_parameter_that_becomes_three_keeps_its_momentum(
    world: World, tmp_path: Path
) -> None:
    world.check(2, divide_fused, path=tmp_path)


def narrow_on_one_rank(here: Here, path: Path) -> None:
    dtype = torch.bfloat16 if here.rank == 1 else torch.float32
    with pytest.raises(ck.MismatchError, match=r"rank 1[\s\S]*trace/wte"):
        ck.load_changed(path, mfx.momentum(0.9, dtype=dtype).init(params_of()), group=here.group)


@pytest.mark.dist
def test_an_error_on_one_rank_is_raised_on_all(world: World, tmp_path: Path) -> None:
    path = saved_after(mfx.momentum(0.9), params_of(), tmp_path)
    world.check(2, narrow_on_one_rank, path=path)


def test_an_optimizer_has_its_transform(tmp_path: Path) -> None:
    optimizer = optimizer_of(model_of(), AFTER)
    path = ck.save(tmp_path / "run", optimizer)
    with pytest.raises(TypeError, match="tx: an optimizer is loaded with its transform"):
        ck.load_changed(path, optimizer_of(model_of(), AFTER), tx=optimizer.transform)


def test_a_new_average_starts_at_weights_that_are_loaded_afterwards(tmp_path: Path) -> None:
    chain = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    path = ck.save(tmp_path / "run", mfx.TransformOptimizer(first, chain))
    optimizer = mfx.TransformOptimizer(second, mfx.chain(chain, mfx.ema_params(0.5)))
    assert ck.load_changed(path, optimizer).new == (
        "ema_params/average/bias",
        "ema_params/average/weight",
    )
    second.load_state_dict(first.state_dict())
    start = second.weight.detach().clone()
    second(torch.ones(3)).sum().backward()
    optimizer.step()
    average = optimizer.transform_state["ema_params"].average["weight"]
    torch.testing.assert_close(average, (start + second.weight.detach()) / 2)


def test_equal_groups_are_loaded_too(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model, AFTER)
    optimizer.param_groups[0]["weight_decay"] = 0.7
    path = ck.save(tmp_path / "run", optimizer)
    other = optimizer_of(model, AFTER)
    found = ck.load_changed(path, other)
    assert found.groups == "param_groups: loaded"
    assert other.param_groups[0]["weight_decay"] == 0.7


def test_groups_with_a_new_parameter_are_loaded_too(tmp_path: Path) -> None:
    optimizer = optimizer_of(model_of(), BEFORE)
    optimizer.param_groups[0]["lr"] = 0.7
    path = ck.save(tmp_path / "run", optimizer)
    deeper = model_of().append(nn.Linear(7, 7))
    other = optimizer_of(deeper, BEFORE)
    found = ck.load_changed(path, other)
    assert found.groups == "param_groups: loaded"
    assert other.param_groups[0]["lr"] == 0.7


def test_a_new_head_with_more_rows_starts_fresh_by_the_code_of_the_page(tmp_path: Path) -> None:
    def optimizer_with(classes: int) -> mfx.Muon:
        layers = {"body": nn.Linear(4, 4), "head": nn.Linear(4, classes)}
        return mfx.Muon(nn.Sequential(OrderedDict(layers)), lr=0.1)

    path = ck.save(tmp_path / "run", optimizer_with(3))
    heirs = [
        f"adamw/scale_by_adam/{key}/head.{leaf}"
        for key in ("mu", "nu")
        for leaf in ("bias", "weight")
    ]
    assert sorted(ck.load_changed(path, optimizer_with(5)).grown) == heirs
    fresh = ck.load_changed(path, optimizer_with(5), rename={"*/head.*": "*/old.*"})
    assert (fresh.grown, sorted(fresh.new)) == ({}, heirs)
    assert fresh.groups == "param_groups: loaded"


def by_layer(layers: dict[str, float]) -> mfx.TransformOptimizer:
    """An optimizer with a group for each layer; the dict has the rate of each."""
    groups = [
        {"params": [(f"{name}.weight", nn.Parameter(torch.ones(2, 2)))], "lr": rate}
        for name, rate in layers.items()
    ]
    return mfx.TransformOptimizer(
        groups, mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(0.1))
    )


def rates_by_layer(optimizer: mfx.TransformOptimizer) -> dict[str, float]:
    return {
        group["param_names"][0].partition(".")[0]: group["lr"] for group in optimizer.param_groups
    }


@pytest.mark.parametrize("load", [ck.load, ck.load_changed])
def test_the_numbers_of_groups_follow_renamed_parameters(load: Any, tmp_path: Path) -> None:
    """Also if they exchange their names, so that all names of the groups are known."""
    path = ck.save(tmp_path / "run", by_layer({"a": 0.1, "b": 0.2, "c": 0.3}))
    for rename, rates in (
        ({"*/a.*": "*/x.*"}, {"x": 0.1, "b": 0.2, "c": 0.3}),
        ({"*/a.*": "*/b.*", "*/b.*": "*/a.*"}, {"a": 0.2, "b": 0.1, "c": 0.3}),
    ):
        optimizer = by_layer(dict.fromkeys(rates, 0.9))
        with pytest.warns(UserWarning, match="the file's is used"):
            load(path, optimizer, rename=rename)
        assert rates_by_layer(optimizer) == rates


def test_the_numbers_of_an_inserted_layer_are_its_own(tmp_path: Path) -> None:
    path = ck.save(tmp_path / "run", by_layer({"0": 0.1, "1": 0.2}))
    optimizer = by_layer({"0": 0.9, "1": 0.8, "2": 0.7})
    with pytest.warns(UserWarning, match="the file's is used"):
        account = ck.load_changed(path, optimizer, rename={"*/1.*": "*/2.*"})
    assert account.groups == "param_groups: loaded"
    assert rates_by_layer(optimizer) == {"0": 0.1, "1": 0.8, "2": 0.2}


@pytest.mark.parametrize("removed", ["0", "1", "2"])
def test_groups_without_a_removed_layer_are_loaded_too(removed: str, tmp_path: Path) -> None:
    saved_rates = {"0": 0.1, "1": 0.2, "2": 0.3}
    path = ck.save(tmp_path / "run", by_layer(saved_rates))
    del saved_rates[removed]
    optimizer = by_layer(dict.fromkeys(saved_rates, 0.9))
    with pytest.warns(UserWarning, match="the file's is used"):
        account = ck.load_changed(path, optimizer)
    assert account.groups == "param_groups: loaded"
    assert rates_by_layer(optimizer) == saved_rates


# Some have another key in the code now.
@pytest.mark.filterwarnings("ignore:.*was saved with other numbers")
@pytest.mark.parametrize("wrap", ["skip_nonfinite", "chain", "partition"])
def test_the_numbers_of_groups_move_with_the_chain(wrap: str, tmp_path: Path) -> None:
    model = model_of()
    inner = mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.momentum(0.9),
        mfx.scale_by_rms(0.9),
        mfx.scale_by_learning_rate(0.1),
    )
    optimizer = mfx.TransformOptimizer(model, inner)
    keys = [key for key, value in optimizer.param_groups[0].items() if isinstance(value, float)]
    for index, key in enumerate(keys):
        optimizer.param_groups[0][key] = 0.5 + index / 64
    path = ck.save(tmp_path, optimizer)
    clipped = mfx.chain(mfx.clip_by_value(1.0), ("inner", inner))
    labels = {name: "all" for name, _ in model.named_parameters()}
    wrapped = {
        "skip_nonfinite": mfx.skip_nonfinite(inner),
        "chain": clipped,
        "partition": mfx.partition({"all": inner}, labels),
    }[wrap]
    other = mfx.TransformOptimizer(model, wrapped)
    found = ck.load_changed(path, other)
    group = other.param_groups[0]
    for index, key in enumerate(keys):
        (new_key,) = [name for name in group if name == key or name.endswith(f".{key}")]
        assert group[new_key] == 0.5 + index / 64
    assert "nothing was loaded" not in str(found)
    assert found.groups.startswith("param_groups: loaded")
    assert ("clip_by_value" in found.groups) == (wrap == "chain")


def test_a_number_that_two_transforms_could_have_is_not_given_to_both(tmp_path: Path) -> None:
    model = model_of()
    saved = mfx.TransformOptimizer(
        model, mfx.chain(mfx.clip_by_global_norm(3.0), mfx.scale_by_learning_rate(0.1))
    )
    path = ck.save(tmp_path, saved)
    inner = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale_by_learning_rate(0.1))
    other = mfx.TransformOptimizer(model, mfx.chain(mfx.clip_by_global_norm(2.0), ("inner", inner)))
    with pytest.warns(UserWarning, match="saved with other numbers"):
        account = ck.load_changed(path, other)
    group = other.param_groups[0]
    assert group["clip_by_global_norm.max_norm"] == 3.0
    assert group["inner.clip_by_global_norm.max_norm"] == 1.0
    assert "'inner.clip_by_global_norm.max_norm' stay as in this optimizer" in account.groups


def test_the_new_numbers_of_groups_stay_where_a_child_has_the_name_of_a_wrapper(
    tmp_path: Path,
) -> None:
    """ "module." is the prefix of a wrapper only if all names begin with it."""
    names = ("module.weight", "weight")
    params = {name: nn.Parameter(torch.ones(2, 2)) for name in names}
    members = [mfx.momentum(0.9), mfx.scale_by_learning_rate(0.1)]
    groups: list[Any] = [{"params": [(name, params[name])]} for name in names]
    path = ck.save(tmp_path, mfx.TransformOptimizer(groups, mfx.chain(*members)))
    scaled_groups = [
        {**group, "scale.factor": factor} for group, factor in zip(groups, (2.0, 3.0), strict=True)
    ]
    optimizer = mfx.TransformOptimizer(scaled_groups, mfx.chain(mfx.scale(1.0), *members))
    ck.load_changed(path, optimizer)
    assert [group["scale.factor"] for group in optimizer.param_groups] == [2.0, 3.0]


def test_an_account_of_other_groups_reports_no_failure(tmp_path: Path) -> None:
    path = ck.save(tmp_path, optimizer_of(model_of(), BEFORE))
    found = ck.load_changed(path, optimizer_of(model_of(), AFTER))
    assert "this optimizer keeps its own" in found.groups
    assert "nothing was loaded" not in str(found)


def test_an_account_of_other_groups_names_the_parameters_that_moved(tmp_path: Path) -> None:
    """And advises nothing that the caller has changed on purpose."""
    path = ck.save(tmp_path / "run", optimizer_of(model_of(), BEFORE), step=6)
    groups = ck.load_changed(path, optimizer_of(model_of(), AFTER)).groups
    assert (
        "because '4.weight' moved from group 'muon' to 'adamw'. The numbers of its groups come from"
        in groups
    )
    assert "at step 6:" in groups
    assert "last_epoch=5)" in groups
    for wrong_advice in ("allow_other_chain", "that was saved"):
        assert wrong_advice not in groups


def test_an_account_of_groups_of_other_parameters_without_labels(tmp_path: Path) -> None:
    weights = {name: nn.Parameter(param) for name, param in params_of().items()}
    tx = KINDS["adamw"]
    path = ck.save(tmp_path / "run", mfx.TransformOptimizer(weights, tx))
    halves = [{"params": list(weights.items())[:2]}, {"params": list(weights.items())[2:]}]
    groups = ck.load_changed(path, mfx.TransformOptimizer(halves, tx)).groups
    assert (
        "this optimizer keeps its own, because the state dict has 1 groups, expected 2: create"
        in groups
    )
    assert "which was saved without step=" in groups


# ----------------------------------------------------------------------------------------------------------- schedulers


def warmup_and_decay(step: int) -> float:
    return min(1, (step + 1) / 4) * min(1, (20 - step) / 6)


def train_with(optimizer: Any, scheduler: Any, model: nn.Module, steps: range) -> None:
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        scheduler.step()


@pytest.mark.parametrize(
    "rates", [0.004, {"embedding": 0.004, "vector": 0.004}], ids=["same groups", "other groups"]
)
def test_a_new_scheduler_goes_on_at_the_step_of_the_checkpoint(rates: Any, tmp_path: Path) -> None:
    """It is created as the account and the page show. The rates are equal, so the run is that without a break."""
    model = model_of()
    optimizer = mfx.Muon(model, lr=0.02, adamw_lr=0.004)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_and_decay)
    train_with(optimizer, scheduler, model, range(16))
    path = ck.save(tmp_path, optimizer, scheduler=scheduler, step=16)
    continued_model = model_of()
    continued_model.load_state_dict(model.state_dict())
    train_with(optimizer, scheduler, model, range(16, 19))

    continued = mfx.Muon(continued_model, lr=0.02, adamw_lr=rates)
    account = ck.load_changed(path, continued)
    step = ck.inspect(path).step
    assert step == 16
    for group in continued.param_groups:
        group.setdefault("initial_lr", group["lr"])
    new_scheduler = torch.optim.lr_scheduler.LambdaLR(
        continued, warmup_and_decay, last_epoch=step - 1
    )
    if isinstance(rates, dict):
        assert 'group.setdefault("initial_lr", group["lr"])' in account.groups
        assert "last_epoch=15)" in account.groups
    else:
        assert account.groups == "param_groups: loaded"
    assert new_scheduler.last_epoch == 16
    train_with(continued, new_scheduler, continued_model, range(16, 19))
    for name, param in continued_model.named_parameters():
        assert torch.equal(param, model.get_parameter(name)), name
    assert continued.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
