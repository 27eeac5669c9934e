"""What may be loaded into what: widening yes, all else by name only, and one error that lists all of it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import MismatchError, NotFoundError
from muonfx.polar import policy
from muonfx.tree.dtypes import NAMES, widens
from tests.checkpoint.common import assert_same_tree, grads_like, small_params, trained

ck = mfx.checkpoint
W, B = "blocks.0.up.weight", "blocks.0.up.bias"


@pytest.fixture
def saved(tmp_path: Path):
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_adam())
    params, state = trained(tx, small_params())
    path = ck.save(tmp_path / "step-000000002", state, tx=tx, params=params, step=2)
    return path, tx, params, state


def test_issue_7746_a_bf16_model_with_fp32_momentum_resumes(tmp_path: Path):
    """bf16 parameters and gradients, momentum pinned to fp32: saved, loaded, and the next step is the next step."""
    tx = mfx.muon(1e-2, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    params, state = trained(tx, {"w": torch.randn(6, 4).bfloat16()})
    ck.save(tmp_path, state, tx=tx, params=params, step=2)
    params_again = ck.load_params(tmp_path, like={"w": torch.empty(6, 4, dtype=torch.bfloat16)})
    again = ck.load(tmp_path, like=mfx.spec(tx, params_again))
    assert again["momentum"].trace["w"].dtype == torch.float32
    assert_same_tree(again, state)
    grads = grads_like(params, 5)
    assert grads["w"].dtype == torch.bfloat16
    updates, after = tx.update(grads, again, params_again)
    assert updates["w"].dtype == torch.bfloat16
    assert after["momentum"].trace["w"].dtype == torch.float32
    assert_same_tree((updates, after), tx.update(grads, state, params))


def test_issue_7746_mirrored_bf16_momentum_in_an_fp32_run(tmp_path: Path):
    """bf16 momentum stays bf16 in an fp32 run that pins it so, widens into one that pins fp32, and never turns back."""
    half, full = mfx.momentum(dtype=torch.bfloat16), mfx.momentum(dtype=torch.float32)
    params, state = trained(half, {"w": torch.randn(6, 4)})
    ck.save(tmp_path / "half", state, params=params)
    again = ck.load(tmp_path / "half", like=mfx.spec(half, params))
    assert again.trace["w"].dtype == torch.bfloat16
    grads = grads_like(params, 5)
    assert_same_tree(half.update(grads, again, params), half.update(grads, state, params))
    wide = ck.load(tmp_path / "half", like=mfx.spec(full, params), allow_other_chain=True)
    assert_same_tree(wide.trace, {"w": state.trace["w"].float()})
    ck.save(tmp_path / "full", wide)
    with pytest.raises(MismatchError, match=r"narrowing: 'trace/w' is torch.float32 .* torch.bfloat16 is wanted"):
        ck.load(tmp_path / "full", like=mfx.spec(half, params))
    assert_same_tree(ck.load(tmp_path / "full", mfx.spec(half, params), cast={"trace": torch.bfloat16}), state)


ALL = [*NAMES]
SMALL = [dtype for dtype in ALL if dtype.itemsize <= 2 and dtype is not torch.bool]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


@pytest.mark.parametrize("old", SMALL, ids=str)
def test_widening_is_exact_for_every_value(old):
    values = every_value(old)
    wider = [new for new in ALL if new != old and widens(old, new)]
    assert wider
    for new in wider:
        back = values.to(new).to(old)
        # One NaN is as good as another.
        same = (back.view(torch.uint8) == values.view(torch.uint8)).view(len(values), -1).all(dim=1)
        assert (same | values.to(torch.float64).isnan()).all() if old.is_floating_point else same.all(), new


def test_nothing_widens_into_another_kind_or_into_less():
    for old in ALL:
        for new in ALL:
            if old != new and widens(old, new):
                assert (old.is_floating_point, old.is_complex) == (new.is_floating_point, new.is_complex)
                assert new.itemsize > old.itemsize
                assert old is not torch.bool
    assert not widens(torch.int64, torch.float64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.float64),
        (torch.uint8, torch.int8),
        (torch.bool, torch.int64),
        (torch.float32, torch.complex64),
    ],
)
def test_widening_needs_no_word_and_nothing_else_is_cast_without_one(
    tmp_path: Path, old: torch.dtype, new: torch.dtype
):
    state = {"a": torch.ones(2, dtype=old), "b": torch.ones(2)}
    ck.save(tmp_path, state)
    like = {"a": torch.zeros(2, dtype=new), "b": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(MismatchError) as caught:
        ck.load(tmp_path, like=like)
    assert caught.value.problems == (f"narrowing: 'a' is {old} in the checkpoint, and {new} is wanted",)
    assert f"cast={{'a': {new}}}" in str(caught.value)
    back = ck.load(tmp_path, like=like, cast={"a": new})
    assert_same_tree(back, mfx.tree.map(torch.ones_like, like))


def test_one_error_lists_everything_that_does_not_fit(saved):
    path, tx, params, _ = saved
    other = mfx.chain(mfx.momentum(dtype=torch.bfloat16), mfx.scale_by_lion())
    wanted = {**{name: p for name, p in params.items() if name != B}, "embed.weight": torch.zeros(9, 4)}
    with pytest.raises(MismatchError) as caught:
        ck.load(path, like=mfx.spec(other, wanted))
    problems, message = "\n".join(caught.value.problems), str(caught.value)
    for expected in (
        f"chain:     the checkpoint was made by {tx!r} (fingerprint {tx.fingerprint}), expected {other!r}",
        "missing:   'scale_by_lion/mu/embed.weight', (9, 4) float32, is not in the checkpoint",
        f"extra:     'momentum/trace/{B}' is in the checkpoint and not in `like`",
        "reshaped:  'momentum/trace/embed.weight' has shape (8, 4), expected (9, 4)",
        f"narrowing: 'momentum/trace/{W}' is torch.float32 in the checkpoint, and torch.bfloat16 is wanted",
    ):
        assert expected in problems
    assert len(caught.value.problems) == 1 + 3 + (1 + 8 + 1) + 1 + 3
    remedies = "allow_missing=", "allow_extra=", "allow_other_chain=True", "cast=", "rename=", "nothing was loaded"
    assert all(words in message for words in (*remedies, str(path)))


def test_a_missing_leaf_keeps_what_like_has(saved):
    path, tx, params, state = saved
    grown = {**params, "new": torch.ones(2, 2)}
    like = mfx.tree.map(lambda leaf: leaf + 3, tx.init(grown))
    with pytest.raises(MismatchError, match="missing"):
        ck.load(path, like=like)
    for allowed in (True, "*/new", ["momentum/trace/new", "scale_by_adam/mu/new", "*/nu/new"]):
        back = ck.load(path, like=like, allow_missing=allowed)
        assert torch.equal(back["momentum"].trace["new"], torch.full((2, 2), 3.0))
        assert back["momentum"].trace["new"] is not like["momentum"].trace["new"]
        assert torch.equal(back["momentum"].trace[W], state["momentum"].trace[W])
    with pytest.raises(MismatchError, match="scale_by_adam/mu/new"):
        ck.load(path, like=like, allow_missing="momentum")
    with pytest.raises(ValueError, match=r"no values to keep: give a state"):
        ck.load(path, like=mfx.spec(tx, grown), allow_missing=True)


def test_an_extra_leaf_is_left_out_on_request(saved):
    path, tx, params, state = saved
    fewer = {name: p for name, p in params.items() if name != W}
    for call in (lambda: ck.load(path, like=mfx.spec(tx, fewer)), lambda: ck.load_params(path, like=fewer)):
        with pytest.raises(MismatchError, match=f"extra: .*{W}' is in the checkpoint and not in `like`"):
            call()
    back = ck.load(path, like=mfx.spec(tx, fewer), allow_extra=f"*/{W}")
    assert torch.equal(back["momentum"].trace[B], state["momentum"].trace[B])
    only = mfx.spec(mfx.chain(mfx.momentum()), params)
    back = ck.load(path, like=only, allow_extra="scale_by_adam", allow_other_chain=True)
    assert_same_tree(back, {"momentum": state["momentum"]})
    assert ck.load_params(path, like=fewer, allow_extra=True).keys() == fewer.keys()


def test_leaves_are_renamed_by_name_or_by_level(saved):
    path, _, params, state = saved
    moved = mfx.chain(("first", mfx.momentum()), ("second", mfx.scale_by_adam()))
    levels = {"momentum": "first", "scale_by_adam": "second"}
    back = ck.load(path, like=mfx.spec(moved, params), rename=levels, allow_other_chain=True)
    assert_same_tree(back, {"first": state["momentum"], "second": state["scale_by_adam"]})
    new = {"renamed" if name == W else name: p for name, p in params.items()}
    assert torch.equal(ck.load_params(path, new, rename={f"params/{W}": "params/renamed"})["renamed"], params[W])
    # Of two entries that fit, the one of more levels applies.
    rename = {**levels, f"momentum/trace/{W}": "first/trace/renamed"}
    like = mfx.spec(mfx.chain(("first", mfx.momentum())), new)
    back = ck.load(path, like=like, rename=rename, allow_extra="second", allow_other_chain=True)
    assert torch.equal(back["first"].trace["renamed"], state["momentum"].trace[W])


def test_cast_allows_a_dtype_and_does_not_change_it(saved):
    path, tx, params, state = saved
    with pytest.raises(MismatchError, match=r"has dtype torch.float32 in `like`, and cast= gives torch.bfloat16"):
        ck.load(path, like=mfx.spec(tx, params), cast={"momentum": torch.bfloat16})
    with pytest.raises(MismatchError, match=r"cast: 'momentun' matches no leaf"):
        ck.load(path, like=state, cast={"momentun": torch.float32})
    assert_same_tree(ck.load(path, like=state, cast={"momentum": torch.float32}), state)


def test_a_fingerprint_is_compared_where_both_sides_have_one(saved, tmp_path: Path):
    path, tx, params, state = saved
    other = mfx.chain(mfx.momentum(nesterov=False), mfx.scale_by_adam())
    for arguments in ({"like": mfx.spec(other, params)}, {"like": state, "tx": other}):
        with pytest.raises(MismatchError, match=r"chain: .*nesterov=False"):
            ck.load(path, **arguments)
        assert_same_tree(ck.load(path, **arguments, allow_other_chain=True), state)
    assert_same_tree(ck.load(path, like=state), state)
    assert_same_tree(ck.load(path, like=mfx.spec(other, params), tx=tx), state)
    another_rate = mfx.chain(mfx.momentum(0.5), mfx.scale_by_adam(0.1))
    assert_same_tree(ck.load(path, like=state, tx=another_rate), state)
    ck.save(tmp_path / "unsigned", state)
    assert_same_tree(ck.load(tmp_path / "unsigned", like=state, tx=other), state)


def test_an_absent_leaf_is_no_leaf(tmp_path: Path):
    state = {"a": torch.ones(2), "b": None}
    ck.save(tmp_path, state)
    assert list(ck.read(tmp_path)) == ["a"]
    assert_same_tree(ck.load(tmp_path, like=state), state)
    for like, problem in (({"a": torch.ones(2), "b": torch.ones(2)}, "missing"), ({"a": None, "b": None}, "extra")):
        with pytest.raises(MismatchError, match=problem):
            ck.load(tmp_path, like=like)


@pytest.mark.parametrize(
    ("state", "more", "message"),
    [
        ({"a": {"b": 1.0}}, {}, "'a/b' is a float, expected a tensor"),
        ({"a": torch.ones(1).to_sparse()}, {}, "'a' must be a dense tensor"),
        ({"a": torch.ones(1, device="meta")}, {}, "'a' must be a dense tensor with values"),
        ({1.5: torch.ones(1)}, {}, "keys must be strings or ints"),
        ({"a": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, {}, "dtype torch.float4_e2m1fn_x2"),
        ({}, {"extra": {"x": {1, 2}}}, "extra must be JSON"),
        ({}, {"extra": {"x": float("nan")}}, "extra must be JSON"),
        ({}, {"extra": {"x": (1, 2)}}, "would be loaded with other values: x"),
        ({}, {"extra": {"x": {1: 2}}}, "would be loaded with other values: x"),
        ({}, {"step": -1}, "step must be"),
        ({}, {"tx": "momentum"}, "tx must be"),
        ({}, {"keep": 0}, "keep must be"),
        ({}, {"keep": 1}, "step_path"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path, state, more, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        ck.save(tmp_path / "here", state, **more)
    assert not (tmp_path / "here").exists()


def test_what_is_not_there_is_said(tmp_path: Path, saved):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, f"latest.. returns the newest, {saved[0]}"),
        (tmp_path / "empty", "stopped before it was done"),
        (tmp_path / "file", "this is a file"),
    ):
        for act in (ck.inspect, ck.verify, lambda path: ck.load(path, like={})):
            with pytest.raises(NotFoundError, match=message):
                act(path)


@pytest.mark.parametrize("dtype", [mfx.int8(), mfx.fp8()], ids=["int8", "fp8"])
def test_codes_are_never_taken_for_values(tmp_path: Path, dtype: mfx.QuantizedDtype):
    params = {"w": torch.randn(64, 96)}
    path = ck.save(tmp_path / "a", mfx.momentum(dtype=dtype).init(params))
    rename = {"trace/codes/w": "trace/w"}
    with pytest.raises(ck.MismatchError, match=r"holds codes of .* which have no meaning as torch\.float32"):
        ck.load(path, mfx.momentum().init(params), rename=rename, allow_extra=True, cast={"trace": torch.float32})


AUTO = mfx.chain(mfx.momentum(), mfx.masked(mfx.orthogonalize(), mfx.select.ndim(min=2)), mfx.scale(-0.1))


def saved_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, tx: mfx.Transform, dtype: torch.dtype, *, has_bf16: bool, **more: Any
) -> Any:
    """Save the state of a machine with or without bf16; with more arguments, in the background or with parameters."""
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: has_bf16)
    params = {"w": torch.ones(2, 3, dtype=dtype)}
    state = tx.init(params)
    save = ck.save_async if more.get("wait") else ck.save
    made = save(path, state, tx=tx, params=params if more.get("with_params") else None)
    if more.get("wait"):
        made.wait()
    return state


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("by_spec", [False, True])
def test_another_dtype_is_a_warning_with_both(tmp_path: Path, monkeypatch, by_spec: bool, wait: bool):
    like = saved_there(tmp_path, monkeypatch, AUTO, torch.float32, has_bf16=True, wait=wait)
    assert ck.inspect(tmp_path).products == {"masked.inner": "bfloat16"}
    like = mfx.spec(AUTO, {"w": torch.ones(2, 3)}) if by_spec else like
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ck.load(tmp_path, like=like, tx=AUTO)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: False)
    said = "'masked.inner' were computed in bfloat16 and are now in float32.*dtype=torch.bfloat16"
    with pytest.warns(UserWarning, match=said):
        ck.load(tmp_path, like=like, tx=AUTO)


PINNED = mfx.chain(mfx.momentum(dtype=torch.float32), mfx.orthogonalize(), mfx.scale(-0.1))
GIVEN = mfx.orthogonalize(dtype=torch.float32)


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize(
    ("tx", "dtype", "with_params"),
    [
        (AUTO, torch.float64, False),
        (AUTO, torch.float64, True),
        (PINNED, torch.float64, True),
        (mfx.orthogonalize(), torch.float64, True),
        (mfx.orthogonalize(), torch.float64, False),
        (mfx.momentum(), torch.float32, False),
        (GIVEN, torch.float32, True),
        (GIVEN, torch.float64, True),
    ],
)
def test_what_no_machine_decides_is_no_warning(tmp_path: Path, monkeypatch, tx, dtype, with_params: bool, now: bool):
    like = saved_there(tmp_path, monkeypatch, tx, dtype, has_bf16=not now, with_params=with_params)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: now)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ck.load(tmp_path, like=like, tx=tx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tx", [PINNED, mfx.orthogonalize()], ids=["pinned", "stateless"])
def test_parameters_that_are_saved_decide_whatever_the_state_is(tmp_path: Path, monkeypatch, tx, dtype):
    like = saved_there(tmp_path, monkeypatch, tx, dtype, has_bf16=False, with_params=True)
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: True)
    with pytest.warns(UserWarning, match="were computed in float32 and are now in bfloat16"):
        ck.load(tmp_path, like=like, tx=tx)
