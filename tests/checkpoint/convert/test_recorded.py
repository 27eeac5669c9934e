"""Runs of other optimizers, recorded by scripts/record_conversions.py, are gone on with after three of eight steps."""

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx.checkpoint import convert
from muonfx.checkpoint.convert import sources

HERE = Path(__file__).parent
TOLERANCE = 1e-4
"""Of fp32, through an iteration that makes small errors larger; the originals were recorded in fp32 instead of bf16."""


def _recorder() -> ModuleType:
    path = HERE.parents[2] / "scripts" / "record_conversions.py"
    spec = importlib.util.spec_from_file_location("record_conversions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECORDER = _recorder()


def shaped(flat: dict[str, list[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(flat[name]).view(shape) for name, shape in RECORDER.SHAPES.items()}


def recorded(kind: str) -> dict[str, Any]:
    return json.loads((HERE / "recorded" / f"{kind}.json").read_text(encoding="utf-8"))


def tensors(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with its indices and tensors, which JSON has as strings and lists."""
    entries = {
        int(index): {key: torch.tensor(value) if isinstance(value, list) else value for key, value in entry.items()}
        for index, entry in saved["state"].items()
    }
    return {"state": entries, "param_groups": saved["param_groups"]}


CASES = ("keller", "moonlight", "dion")


def go_on(tx: mfx.Transform, state: Any, params: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    for step in range(RECORDER.BEFORE, RECORDER.BEFORE + RECORDER.AFTER):
        updates, state = tx.update(shaped(RECORDER.gradients(step)), state, params)
        params = mfx.apply_updates(params, updates)
    return state, params


def require_near(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor], tolerance: float):
    """Within a share of how far the parameters went."""
    for name, value in wanted.items():
        moved = (value - start[name]).norm()
        assert moved > 0.05
        assert (found[name] - value).norm() <= tolerance * moved, name


@pytest.mark.parametrize("kind", CASES)
def test_a_run_goes_on_as_the_original_does(kind: str):
    run = recorded(kind)
    params = shaped(run["params"])
    saved = tensors(run["state_dict"])
    tx = convert.recipe(kind, saved, params, names=run["names"], dtype=torch.float32)
    state, after = go_on(tx, convert.read(kind, saved, tx, params, names=run["names"]), params)
    require_near(after, shaped(run["params_after"]), params, TOLERANCE)
    expected = convert.read(kind, tensors(run["state_dict_after"]), tx, params, names=run["names"])
    for name, found, wanted in zip(
        mfx.tree.names(state), mfx.tree.leaves(state), mfx.tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", CASES)
def test_without_the_state_a_run_does_not_go_on_as_the_original(kind: str):
    run = recorded(kind)
    params = shaped(run["params"])
    tx = convert.recipe(kind, tensors(run["state_dict"]), params, names=run["names"], dtype=torch.float32)
    _, after = go_on(tx, tx.init(params), params)
    with pytest.raises(AssertionError):
        require_near(after, shaped(run["params_after"]), params, TOLERANCE)


@pytest.mark.parametrize("kind", CASES)
def test_there_and_back_is_the_same(kind: str):
    run = recorded(kind)
    params, saved = shaped(run["params"]), tensors(run["state_dict"])
    tx = convert.recipe(kind, saved, params, names=run["names"])
    empty = copy.deepcopy(saved)
    for entry in empty["state"].values():
        for key, value in entry.items():
            entry[key] = torch.zeros_like(value) if isinstance(value, Tensor) else value
    state = convert.read(kind, saved, tx, params, names=run["names"])
    back = convert.write(kind, state, empty, params, names=run["names"])
    assert back["param_groups"] == saved["param_groups"]
    assert back["state"].keys() == saved["state"].keys()
    for index, entry in saved["state"].items():
        assert back["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(back["state"][index][key]), torch.as_tensor(value)), (index, key)


# -------------------------------------------------------------------------------------------------------- DeepSpeed


def entries(saved: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: torch.tensor(value) if isinstance(value, list) else value for key, value in entry.items()}
        for name, entry in saved.items()
    }


def test_deepspeeds_universal_folder_goes_on_as_the_original_does(tmp_path: Path):
    run = recorded("deepspeed")
    params = shaped(run["params"])
    for name, entry in entries(run["state_dict"]).items():
        folder = tmp_path / "zero" / name
        folder.mkdir(parents=True)
        torch.save({"param": params[name].flatten(), "cat_dim": 0}, folder / "fp32.pt")
        for key, value in entry.items():
            whole = value if key == "step" else {"param": value, "cat_dim": 0, "vocab_tensor": False}
            torch.save(whole, folder / f"{key}.pt")
    config = {"muon_lr": RECORDER.NUMBERS["lr"], "adam_lr": RECORDER.NUMBERS["adam_lr"], "weight_decay": 0.1}
    tx = convert.recipe("deepspeed", tmp_path, params, config=config, dtype=torch.float32)
    state, after = go_on(tx, convert.read("deepspeed", tmp_path, tx, params), params)
    require_near(after, shaped(run["params_after"]), params, TOLERANCE)
    expected = convert.read("deepspeed", entries(run["state_dict_after"]), tx, params)
    for found, wanted in zip(mfx.tree.leaves(state), mfx.tree.leaves(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Surprise:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code ran')",)


def test_deepspeeds_folder_cannot_run_code(tmp_path: Path):
    folder = tmp_path / "zero" / "w"
    folder.mkdir(parents=True)
    torch.save(Surprise(), folder / "momentum_buffer.pt")
    with pytest.raises(ValueError, match=r"momentum_buffer.pt: expected tensors and plain values"):
        sources.read_folder(tmp_path)
    (folder / "momentum_buffer.pt").write_bytes(b"not a file of torch")
    with pytest.raises(ValueError, match=r"momentum_buffer.pt: expected tensors and plain values"):
        sources.read_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"ds_to_universal.py"):
        sources.read_folder(tmp_path / "elsewhere")


# ------------------------------------------------------------------------------------------------------------ Optax


class MuonState(NamedTuple):
    count: Any
    mu: Any
    ns_coeffs: Any


class ScaleByAdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


class MaskedNode(NamedTuple):
    pass


class MaskedState(NamedTuple):
    inner_state: Any


class PartitionState(NamedTuple):
    inner_states: Any


def optax_state(run: dict[str, Any], suffix: str = "") -> PartitionState:
    """The tree that optax 0.2 has, from what was recorded of it."""
    np = pytest.importorskip("numpy")
    hole = MaskedNode()
    muon, adam = run[f"muon{suffix}"], run[f"adam{suffix}"]

    def arrays(found: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        return {name: np.asarray(found[name], "float32") if name in names else hole for name in RECORDER.SHAPES}

    count = np.asarray(muon["count"], "int32")
    own = MuonState(count, arrays(muon["mu"], ("up", "down")), np.asarray(muon["ns_coeffs"]))
    other = ScaleByAdamState(count, *(arrays(adam[key], ("bias",)) for key in ("mu", "nu")))
    return PartitionState({"muon": MaskedState((own, hole)), "adam": MaskedState((other, hole, hole))})


def optax_chain(params: dict[str, Tensor]) -> mfx.Transform:
    return convert.recipe(
        "optax", {"learning_rate": RECORDER.NUMBERS["lr"], "weight_decay": 0.1, "adam_weight_decay": 0.05}, params
    )


def test_an_optax_run_goes_on_as_the_original_does():
    run = recorded("optax")
    params = shaped(run["params"])
    tx = optax_chain(params)
    state, after = go_on(tx, convert.read("optax", optax_state(run), tx, params, transpose=True), params)
    # Optax multiplies in fp32, and scales by sqrt(max(1, outputs / inputs)) of its transposed kernels: the same number.
    require_near(after, shaped(run["params_after"]), params, TOLERANCE)
    expected = convert.read("optax", optax_state(run, "_after"), tx, params, transpose=True)
    for found, wanted in zip(mfx.tree.leaves(state), mfx.tree.leaves(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_optax_there_and_back_is_the_same():
    np = pytest.importorskip("numpy")
    run = recorded("optax")
    params = shaped(run["params"])
    state = convert.read("optax", optax_state(run), optax_chain(params), params, transpose=True)
    back = convert.write("optax", state, optax_state(run, "_after"), transpose=True)
    ours, theirs = back.inner_states, optax_state(run).inner_states
    for label, count in (("muon", 2), ("adam", 1)):
        found, wanted = ours[label].inner_state[0], theirs[label].inner_state[0]
        assert found.count == wanted.count == RECORDER.BEFORE
        assert found.count.dtype == wanted.count.dtype
        present = [name for name in params if not isinstance(wanted.mu[name], MaskedNode)]
        same = [np.array_equal(found.mu[name], wanted.mu[name]) for name in present]
        assert same == [True] * count
    assert np.array_equal(ours["adam"].inner_state[0].nu["bias"], theirs["adam"].inner_state[0].nu["bias"])


def test_an_optax_tree_without_muon_is_named():
    with pytest.raises(ValueError, match=r"found no state of optax.contrib.muon"):
        convert.read("optax", {"count": 3}, mfx.momentum(), {"w": torch.zeros(2, 2)}, transpose=False)


def test_older_groups_of_keller_keep_their_numbers():
    group = {"params": [0], "lr": 0.02, "momentum": 0.95, "nesterov": False, "ns_steps": 3, "weight_decay": 0.0}
    found = repr(
        convert.recipe("keller", {"state": {}, "param_groups": [group]}, {"w": torch.zeros(3, 2)}, names=["w"])
    )
    assert "nesterov=False" in found
    assert "steps=3" in found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: convert.recipe("kelller", {}, {}),
            r"format: found 'kelller', expected one of .* \(did you mean 'keller'",
        ),
        (lambda: convert.write("deepspeed", {}, {}), "'deepspeed' can be read only"),
        (lambda: convert.read("optax", {}, mfx.momentum(), {}), "transpose: 'optax' needs True or False"),
        (lambda: convert.read("torch", {}, mfx.momentum(), {}, transpose=True), "other formats take none"),
        (lambda: convert.recipe("deepspeed", {}, {}), "config: 'deepspeed' needs"),
        (lambda: convert.recipe("torch", {}, {}, config={}), "other formats take no config"),
    ],
)
def test_arguments_that_do_not_fit_the_format_are_named(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_names_have_the_form_of_the_format():
    with pytest.raises(TypeError, match="names: expected a list"):
        convert.read("torch", {}, mfx.momentum(), {}, names={"a": "b"})
    with pytest.raises(TypeError, match="names: expected a mapping"):
        convert.read("optax", {}, mfx.momentum(), {}, names=["a"], transpose=True)
