"""What 0.1 wrote: every later version reads it, bit for bit, and goes on from it as 0.1 did.

The files were written once by `scripts/record_0_1.py`, on 0.1. They are never written again.
"""

import json
import platform
import random
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import muonfx as mfx
from muonfx.checkpoint.fingerprints import fingerprint_0_1
from muonfx.checkpoint.names import named_leaves, plain_names
from muonfx.identity import public_name
from muonfx.recorded import _default_text
from muonfx.testing.transforms import by_rank, halve
from muonfx.wrappers import unwrapped
from tests.checkpoint.common import bits

ck = mfx.checkpoint
FOLDER = Path(__file__).parent / "recorded_0_1"
CASES = json.loads((FOLDER / "cases.json").read_text())
CHAINS: dict[str, tuple[str, str]] = CASES["chains"]
BEFORE, AFTER = CASES["steps"]
NAMES: dict[str, Any] = {
    **vars(mfx.select),
    **vars(mfx.polar),
    **vars(mfx),
    "torch": torch,
    "halve": halve,
    "by_rank": by_rank,
}

# Another machine rounds elementwise kernels in another way too: fused multiply-adds.
SAME_MACHINE = CASES["torch"] == torch.__version__ and CASES["machine"] == [
    platform.machine(),
    torch.backends.cpu.get_cpu_capability(),
]

WIDER_TODAY = {"wrapped"}
"""Where momentum runs over a master in float64: 0.1 held it in fp32, today it is as wide as its parameter (0045)."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    pytest.mark.filterwarnings("ignore:default_labels saw names"),  # 0.1 had no other way to say it
]


def values(what: str, shape: list[int]) -> torch.Tensor:
    """As in the script that recorded."""
    draw = random.Random(what)
    return torch.tensor([draw.gauss(0, 1) for _ in range(prod(shape))], dtype=torch.float32).reshape(shape)


def tree_of(kind: str, what: str) -> dict[str, torch.Tensor]:
    return {name: values(f"{what}/{name}", shape) for name, shape in CASES["shapes"][kind].items()}


def transform_of(name: str) -> mfx.Transform:
    return eval(CHAINS[name][1], dict(NAMES))


def as_recorded(found: torch.Tensor, recorded: torch.Tensor, case: str) -> torch.Tensor:
    """What was widened by loading, back in the dtype that 0.1 had: of an exact widening the bits are the same."""
    widened = case in WIDER_TODAY and (found.dtype, recorded.dtype) == (torch.float64, torch.float32)
    return found.to(recorded.dtype) if widened else found


def assert_as_recorded(found: dict[str, torch.Tensor], recorded: dict[str, torch.Tensor], case: str) -> None:
    """Bitwise where no product of matrices is in between: those are meant to get better, within their tolerance."""
    assert found.keys() == recorded.keys()
    found = {name: as_recorded(leaf, recorded[name], case) for name, leaf in found.items()}
    code = CHAINS[case][1]
    exact = SAME_MACHINE and "orthogonalize" not in code and "muon" not in code
    exact = exact and "monitor" not in code  # whose norms are summed in float64 by now
    for name, leaf in recorded.items():
        if case in WIDER_TODAY:  # it rounds less than 0.1 did
            torch.testing.assert_close(found[name], leaf, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: name + text)
        elif exact:
            assert bits(found[name]) == bits(leaf), name
        elif leaf.is_floating_point() and leaf.dtype.itemsize > 1:
            torch.testing.assert_close(found[name], leaf, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: name + text)


def plainly_named(leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names without wrappers, which 0.1 wrote down with them."""
    return {plain: leaves[name] for name, plain in plain_names(leaves).items()}


@pytest.mark.parametrize("name", CHAINS)
def test_a_checkpoint_of_0_1_loads_bitwise_and_goes_on_as_it_did(name: str):
    kind, _ = CHAINS[name]
    tx, path = transform_of(name), FOLDER / "checkpoints" / name
    blank = tree_of(kind, "nothing")
    state = ck.load(path, like=tx.init(blank), tx=tx)
    params = ck.load_params(path, like=blank)
    # read by another code than ours
    raw = plainly_named(load_file(next(path.glob("*.safetensors"))))
    loaded = dict([*named_leaves(state), *named_leaves(params, "params")])
    assert {name for name, leaf in loaded.items() if leaf is not None} == raw.keys()
    assert all(bits(as_recorded(loaded[key], leaf, name)) == bits(leaf) for key, leaf in raw.items())

    for step in range(BEFORE, BEFORE + AFTER):
        updates, state = tx.update(tree_of(kind, f"grads/{step}"), state, params)
        params = mfx.apply_updates(params, updates)
    found = {n: leaf for n, leaf in [*named_leaves(state), *named_leaves(params, "params")] if leaf is not None}
    assert_as_recorded(found, plainly_named(load_file(path / "after")), name)


@pytest.mark.parametrize("how", ["flat", "rows"])
@pytest.mark.parametrize("name", CASES["sharded"])
def test_what_two_ranks_of_0_1_saved_loads_as_one_process_did(name: str, how: str):
    kind, _ = CHAINS[name]
    tx, path = transform_of(name), FOLDER / "sharded" / f"{name}-{how}"
    assert len(ck.verify(path).files) == 2
    blank = tree_of(kind, "nothing")
    one = FOLDER / "checkpoints" / name
    for path_of_one, read in ((one, lambda p: ck.load(p, like=mfx.spec(tx, blank))), (one, ck.read)):
        expected, found = mfx.tree.leaves(read(path_of_one)), mfx.tree.leaves(read(path))
        assert [bits(leaf) for leaf in found] == [bits(leaf) for leaf in expected]


def indices_of(saved: dict[str, Any]) -> dict[str, int]:
    """The number of each parameter in a state dict, by its name without wrappers."""
    pairs = [pair for g in saved["param_groups"] for pair in zip(g["param_names"], g["params"], strict=True)]
    plain = unwrapped(name for name, _ in pairs)
    return {plain[name]: index for name, index in pairs}


@pytest.mark.parametrize("name", CASES["optimizers"])
def test_a_state_dict_of_0_1_loads_without_pickles_and_goes_on_as_it_did(name: str):
    kind, _ = CHAINS[name]
    saved = torch.load(FOLDER / "optimizers" / f"{name}.pt", weights_only=True)
    params = {key: torch.nn.Parameter(leaf) for key, leaf in saved["model"].items()}
    optimizer = mfx.TransformOptimizer(params, transform_of(name))
    optimizer.load_state_dict(saved["optimizer"])
    indices = indices_of(saved["optimizer"])  # torch's numbers follow the order of groups
    now_at = indices_of(optimizer.state_dict())
    for leaf_name, index in indices.items():
        held, now = saved["optimizer"]["state"][index], optimizer.state_dict()["state"][now_at[leaf_name]]
        assert {key: bits(as_recorded(leaf, held[key], name)) for key, leaf in now.items()} == {
            key: bits(leaf) for key, leaf in held.items()
        }
    for step in range(BEFORE, BEFORE + AFTER):
        for key, grad in tree_of(kind, f"grads/{step}").items():
            params[key].grad = None if (name, key) == ("partition_by_name", "scale") else grad
        optimizer.step()
    found = {"model/" + key: param.detach() for key, param in params.items()}
    after = optimizer.state_dict()["state"]
    for leaf_name, index in indices.items():
        found |= {f"state/{index}/{key}": leaf for key, leaf in after[now_at[leaf_name]].items()}
    assert_as_recorded(found, load_file(FOLDER / "optimizers" / f"{name}.after"), name)


# --------------------------------------------------------------------------------------------------------- fingerprints


def test_every_fingerprint_of_0_1_is_still_known():
    recorded: dict[str, str] = json.loads((FOLDER / "fingerprints.json").read_text())
    assert len(recorded) > 300
    todays: dict[str, set[str]] = {}
    refused = 0
    for code, fingerprint in recorded.items():
        if "cautious(scale(factor=-" in code:  # 0.1 took it, and dropped every update that agreed with the gradient
            with pytest.raises(ValueError, match="inner turns downhill"):
                eval(code, dict(NAMES))
            refused += 1
            continue
        tx = eval(code, dict(NAMES))
        assert fingerprint_0_1(tx) == fingerprint, code
        todays.setdefault(tx.fingerprint, set()).add(fingerprint)
    assert refused < 20
    # today's tells apart what 0.1 told apart, and nothing else
    assert all(len(of_0_1) == 1 for of_0_1 in todays.values())
    assert len(todays) == len(set(recorded.values()))


def test_the_former_default_of_a_states_dtype_is_the_same_chain_as_the_new_one():
    for make in (
        lambda **given: mfx.momentum(**given),
        lambda **given: mfx.ema_params(**given),
        lambda **given: mfx.accumulate(mfx.scale(2.0), 2, **given),
        lambda **given: mfx.master_params(mfx.adamw(0.1), **given),
        lambda **given: mfx.normalize_neurons(**given),
    ):
        new, former, other = make(dtype="auto"), make(dtype=torch.float32), make(dtype=torch.bfloat16)
        assert make() == new != former
        assert make().fingerprint == new.fingerprint == former.fingerprint != other.fingerprint
        assert fingerprint_0_1(make()) == fingerprint_0_1(former) != fingerprint_0_1(other)
        assert repr(new) != repr(former)  # what people read tells them apart


def test_fp32_state_of_float64_parameters_loads_by_widening_and_not_back(tmp_path: Path):
    """0.1 gave float64 parameters a state in fp32; today's is float64."""
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    now = mfx.adamw(0.1)
    then = now.replace(transforms=_pinned_as_in_0_1(now))
    _, state = then.update(params, then.init(params), params)
    assert state["scale_by_adam"].mu["w"].dtype == torch.float32
    path = ck.save(tmp_path / "then", state, params=params, tx=then)
    loaded = ck.load(path, like=now.init(params), tx=now)
    for found, saved in zip(mfx.tree.leaves(loaded), mfx.tree.leaves(state), strict=True):
        assert torch.equal(found, saved.to(found.dtype))
        assert found.dtype == (torch.float64 if saved.is_floating_point() else torch.int64)
    back = ck.save(tmp_path / "now", loaded, tx=now)
    with pytest.raises(ck.MismatchError, match=r"narrowing: 'scale_by_adam/mu/w' is torch.float64 in the checkpoint"):
        ck.load(back, like=then.init(params), tx=then)

    optimizers = [mfx.TransformOptimizer({"w": torch.nn.Parameter(params["w"].clone())}, tx) for tx in (then, now)]
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].grad = params["w"]
        optimizer.step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for narrow, wide in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        for key, leaf in narrow.items():
            assert torch.equal(wide[key], leaf.to(wide[key].dtype))
            assert wide[key].dtype == (torch.float64 if leaf.is_floating_point() else torch.int64)


def _pinned_as_in_0_1(tx: mfx.Transform) -> tuple[mfx.Transform, ...]:
    wide = {"mu_dtype": torch.float32, "nu_dtype": torch.float32}
    return tuple(
        part.replace(**wide) if part.factory is mfx.scale_by_adam else part for part in tx.arguments["transforms"]
    )


def test_another_chain_is_refused_by_a_checkpoint_of_0_1():
    tx, path = transform_of("muon"), FOLDER / "checkpoints" / "muon"
    blank = tree_of("matrices", "nothing")
    other = mfx.muon(0.1, nesterov=False, dtype=torch.float32)
    with pytest.raises(ck.MismatchError, match=r"chain: .*nesterov=False"):
        ck.load(path, like=tx.init(blank), tx=other)
    ck.load(path, like=tx.init(blank), tx=other, allow_other_chain=True)


def test_a_fingerprint_of_a_later_rule_says_to_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tx, blank = mfx.momentum(), {"w": torch.zeros(2, 2)}
    monkeypatch.setattr(mfx.Transform, "fingerprint", "3:0123456789abcdef")
    path = ck.save(tmp_path / "a", tx.init(blank), tx=tx)
    monkeypatch.undo()
    with pytest.raises(ck.MismatchError, match=r"fingerprint 3:01.*fingerprint 2:(.|\n)*a later muonfx.*upgrade"):
        ck.load(path, like=mfx.spec(tx, blank))


CHANGED_SINCE_0_1 = {
    # The state's dtype: torch.float32 then, and today "auto", which is another for float64 parameters alone (0045).
    **dict.fromkeys(
        [
            "accumulate.dtype",
            "ema_params.dtype",
            "master_params.dtype",
            "momentum.dtype",
            "normalize_neurons.dtype",
            "scale_by_adam.mu_dtype",
            "scale_by_adam.nu_dtype",
            "scale_by_lion.mu_dtype",
        ],
        ("torch.float32", "'auto'"),
    )
}
"""Defaults that were changed on purpose, with those of 0.1 and of today: each has a decision, and its factory says by
``former_defaults`` that both mean one state."""


def test_defaults_that_fingerprints_leave_out_are_those_of_0_1():
    """One that changes would give a checkpoint another meaning, silently: give the new one another name instead."""
    recorded: dict[str, dict[str, str | None]] = json.loads((FOLDER / "signatures.json").read_text())
    known = {public_name(factory): factory for factory in vars(mfx).values() if hasattr(factory, "definition")}
    looked_at = 0
    changed: dict[str, tuple[str, str]] = {}
    for path, arguments in recorded.items():
        name = path.rpartition(".")[2]
        factory = known.get(f"muonfx.{name}")
        for argument, default in arguments.items() if factory is not None else ():
            if default is None or argument not in factory.definition.parameters:
                continue
            # what 0.1 wrote as a repr
            then = {"<Locality.TREE: 3>": "Locality.TREE"}.get(default, default)
            today = _default_text(factory.definition, argument)
            if today != then and repr(factory.definition.former_defaults.get(argument)) == then:
                changed[f"{name}.{argument}"] = (then, today)
            else:
                assert today == then, (path, argument)
            looked_at += 1
    assert looked_at > 50
    assert changed == CHANGED_SINCE_0_1
