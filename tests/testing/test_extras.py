"""Transforms with extra arguments, such as ``value=loss``, are checked with the values that the user gives."""

import functools
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing import check


def no_state(params: Any):
    return mfx.core.EmptyState()


@mfx.leafwise
def scales_by_value():
    def step(u, s, *, value):
        return u * value, s

    return mfx.core.EmptyState(), step


@mfx.transform(locality=mfx.Locality.ELEMENT)
def reads_a_float():
    def update(updates, state, params=None, *, value=1.0):
        return mfx.tree.map(lambda u: u * float(value), updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def branches_on_value():
    def update(updates, state, params=None, *, value):
        if value > 0.5:
            return mfx.tree.map(lambda u: u * 0.5, updates), state
        return updates, state

    return no_state, update


first_value: dict[str, Any] = {}


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_the_first_value():
    def update(updates, state, params=None, *, value):
        first = first_value.setdefault("value", value)
        return mfx.tree.map(lambda u: (u * (value - first)).to(u.dtype), updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def promotes_by_value():
    def update(updates, state, params=None, *, value):
        return mfx.tree.map(lambda u: u * value.reshape(1), updates), state

    return no_state, update


def falling(step):
    return 1.0 / (1.0 + step)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def writes_to_its_extra():
    def update(updates, state, params=None, *, value):
        factor = value.add_(1.0)
        return mfx.tree.map(lambda u: (u * factor).to(u.dtype), updates), state

    return no_state, update


SMALL = {"max_examples": 8, "progress": False}


@pytest.mark.parametrize(
    "value", [0.7, torch.tensor(0.7), falling], ids=["number", "tensor", "function"]
)
def test_a_transform_with_a_required_extra_is_checked(value: Any):
    tx = mfx.chain(mfx.momentum(), scales_by_value())
    compiling = [name for name, law in kit.LAWS.items() if law.family == "compiling"]
    report = kit.check_transform(tx, extras={"value": value}, skip=compiling, **SMALL)
    assert len(report.held) >= 35
    assert "element_transforms_see_one_element" in report.held


@pytest.mark.slow
def test_a_compiled_update_receives_an_extra_as_a_tensor():
    laws = [name for name, law in kit.LAWS.items() if law.family in ("compiling", "values")]
    report = kit.check_transform(scales_by_value(), extras={"value": falling}, laws=laws, **SMALL)
    assert "compiled_update_equals_eager" in report.held


BUGS = [
    (reads_a_float, "vmap_over_gradients_equals_a_loop"),
    (reads_a_float, "traced_update_equals_eager"),
    (branches_on_value, "vmap_over_gradients_equals_a_loop"),
    (branches_on_value, "traced_update_equals_eager"),
    (keeps_the_first_value, "another_process_gives_the_same_bits"),
    (promotes_by_value, "updates_look_like_the_gradients"),
    (writes_to_its_extra, "update_leaves_its_inputs_unchanged"),
]


@pytest.mark.parametrize(("bug", "law"), BUGS)
def test_a_wrong_use_of_an_extra_is_found(bug: Any, law: str, monkeypatch: pytest.MonkeyPatch):
    first_value.clear()
    monkeypatch.setattr(check, "_shrunk", lambda *arguments: None)
    with pytest.raises(kit.LawViolation) as caught:
        kit.check_transform(bug(), extras={"value": 0.7}, laws=[law], **SMALL)
    assert f"with_extras({bug.__name__}()" in str(caught.value)


def test_an_extra_may_change_with_the_step():
    tx = kit.with_extras(scales_by_value(), {"value": falling})
    params, steps = {"w": torch.zeros(1)}, [{"w": torch.ones(1)}] * 3
    state = tx.init(params)
    factors: list[float] = []
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        factors.append(float(updates["w"]))
    assert factors == pytest.approx([1.0, 1 / 2, 1 / 3])


def test_a_missing_extra_is_named_with_the_argument_that_gives_it():
    with pytest.raises(
        TypeError,
        match=r"scales_by_value requires the extra argument value=.*extras=\{'value': 0.5\}",
    ):
        kit.check_transform(scales_by_value())


@pytest.mark.parametrize("value", ["0.5", torch.ones(2), True, None])
def test_an_extra_that_is_no_number_is_an_error(value: Any):
    with pytest.raises(
        TypeError, match="extras: value must be a number, a 0-d tensor or a function of the step"
    ):
        kit.check_transform(scales_by_value(), extras={"value": value})


def test_an_extra_that_no_transform_reads_is_an_error():
    with pytest.raises(
        TypeError, match=r"reads_a_float: found the extra argument values= \(did you mean 'value'"
    ):
        kit.check_transform(reads_a_float(), extras={"values": 0.5})


# ------------------------------------------------------------------------------------------ mistakes that are named


def test_an_extra_without_a_star_is_named():
    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def lacks_a_star():
        def update(updates, state, params=None, value=1.0):
            return mfx.tree.map(lambda u: u * value, updates), state

        return no_state, update

    params = {"w": torch.ones(2)}
    tx = lacks_a_star()
    message = r"lacks_a_star: the argument value of update is positional.*write a \* before it"
    with pytest.raises(TypeError, match=message):
        tx.update(params, tx.init(params), params, value=0.5)
    with pytest.raises(TypeError, match=message):
        kit.check_transform(mfx.chain(mfx.momentum(), tx), extras={"value": 0.5})


def test_a_decorator_may_supply_an_argument():
    def halved(updates):
        return mfx.tree.map(lambda u: u / 2, updates)

    @functools.wraps(halved)
    def without_params(updates, params):
        return halved(updates)

    tx = mfx.core.stateless(without_params)
    assert tx.update({"w": torch.ones(2)}, mfx.core.EmptyState())[0]["w"].tolist() == [0.5, 0.5]


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_its_state_in_a_variable():
    traces: dict[str, Any] = {}

    def init(params):
        traces["all"] = mfx.tree.map(torch.zeros_like, params)
        return mfx.core.EmptyState()

    def update(updates, state, params=None):
        traces["all"] = mfx.tree.map(lambda trace, u: 0.9 * trace + u, traces["all"], updates)
        return traces["all"], state

    return init, update


def test_a_state_outside_of_the_state_is_named():
    params = {"w": torch.ones(2)}
    tx = keeps_its_state_in_a_variable()
    message = "found a tensor on the device meta that is in no argument.*return it in the state"
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match=message) as caught:
        kit.check_transform(keeps_its_state_in_a_variable())
    assert "dims" not in str(caught.value)


def test_an_error_about_metadata_is_raised_as_it_is():
    @mfx.transform
    def changes_metadata():
        def update(updates, state, params=None):
            raise RuntimeError("cannot change the metadata of a view")

        return no_state, update

    params = {"w": torch.ones(2)}
    with pytest.raises(RuntimeError, match=r"^cannot change the metadata of a view$"):
        changes_metadata().update(params, mfx.core.EmptyState(), params)


def test_a_number_in_float64_under_vmap_is_named():
    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def multiplies(factor: float = 0.5):
        return no_state, lambda updates, state, params=None: (
            mfx.tree.map(lambda u: u * factor, updates),
            state,
        )

    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def converts(factor: float = 0.5):
        def update(updates, state, params=None):
            return mfx.tree.map(lambda u: (u * factor).to(u.dtype), updates), state

        return no_state, update

    example = kit.Example.of({"w": ()})
    law = kit.laws.vmap_over_the_transform_equals_a_loop
    with pytest.raises(
        kit.LawViolation,
        match=r"a number of the transform is a float64 tensor.*\.to\(leaf\.dtype\)",
    ):
        law(multiplies(), *example)
    law(converts(), *example)
