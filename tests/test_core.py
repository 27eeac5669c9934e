"""Chains, names, extras, errors, donation and the parts of recipes, by example; the laws are in tests/transforms."""

import copy
import re
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonfx as mfx
from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.transform import within
from muonfx.core.value import named_numbers, prepared
from muonfx.testing.violation import require_same


def test_a_chains_state_is_keyed_by_the_transforms_names():
    params = {"w": torch.zeros(2, 2)}
    tx = mfx.chain(mfx.momentum(), mfx.scale(2.0), ("rate", mfx.scale(3.0)), mfx.scale(4.0))
    assert list(tx.init(params)) == ["momentum", "scale", "rate", "scale_2"]
    assert tx.init(params)["momentum"].trace["w"].shape == (2, 2)


def test_the_order_of_a_partitions_transforms_means_nothing_and_their_labels_do():
    one, two = mfx.scale(1.0), mfx.scale(2.0)
    labels = {"w": "a", "v": "b"}
    assert mfx.partition({"a": one, "b": two}, labels) == mfx.partition(
        {"b": two, "a": one}, labels
    )
    assert (
        mfx.partition({"a": one, "b": two}, labels).fingerprint
        == mfx.partition({"b": two, "a": one}, labels).fingerprint
    )
    assert mfx.partition({"a": one, "b": two}, labels) != mfx.partition(
        {"b": one, "a": two}, labels
    )
    assert mfx.orthogonalize(
        view=mfx.MatrixView({"q*": "in out -> out in", "*": "out in -> out in"})
    ) != mfx.orthogonalize(view=mfx.MatrixView({"*": "out in -> out in", "q*": "in out -> out in"}))
    sweep = mfx.stack(
        [mfx.partition({"a": one, "b": two}, labels), mfx.partition({"b": one, "a": two}, labels)]
    )
    params = {"w": torch.ones(1), "v": torch.ones(1)}
    updates = torch.func.vmap(lambda tx: tx.update(params, tx.init(params), params)[0])(sweep)
    assert updates["w"].flatten().tolist() == [1.0, 2.0]
    assert updates["v"].flatten().tolist() == [2.0, 1.0]


def test_replace_makes_another_value_and_names_what_there_is():
    tx = mfx.momentum(0.9)
    assert tx.replace(decay=0.5) == mfx.momentum(0.5)
    assert tx == mfx.momentum(0.9)
    with pytest.raises(
        TypeError,
        match=r"momentum has no argument beta \(did you mean 'decay'\?\); it has decay, nesterov",
    ):
        tx.replace(beta=0.5)
    with pytest.raises(AttributeError, match=re.escape("use .replace(decay=...)")):
        tx.decay = 0.5
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), found 2.0"):
        tx.replace(decay=2.0)


def test_numeric_arguments_are_listed_by_dotted_name():
    masked = mfx.chain(
        mfx.masked(mfx.scale_by_adam(), {"w": True}),
        mfx.scale_by_learning_rate(mfx.constant_schedule(1)),
    )
    assert list(named_numbers(masked)) == [
        "masked.inner.b1",
        "masked.inner.b2",
        "masked.inner.eps",
        "masked.inner.eps_root",
        "scale_by_learning_rate.learning_rate.value",
    ]
    named = mfx.hyperparams(mfx.chain(mfx.momentum(0.5), ("rate", mfx.scale(-1))))
    assert named == {"momentum.decay": 0.5, "rate.factor": -1.0}
    assert all(isinstance(value, float) for value in named.values())
    with pytest.raises(
        KeyError, match=r"no hyperparameter rate.*; there are momentum.decay, rate.factor"
    ):
        with_hyperparams(mfx.chain(mfx.momentum(0.5), ("rate", mfx.scale(-1))), {"rate": 1.0})


def drops_a_leaf(updates, state, params=None):
    return {"w": updates["w"]}, state


def adds_to_its_state(updates, state, params=None):
    return updates, {**state, "more": torch.zeros(())}


def nests_its_state(updates, state, params=None):
    return updates, {"seen": {"now": state["seen"]}}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            lambda updates, state, params=None: (None, state),
            "wrong: the updates that it returns .* missing 'b', 'w'",
        ),
        (
            drops_a_leaf,
            "wrong: the updates that it returns must have the structure of .* missing 'b'",
        ),
        (
            adds_to_its_state,
            "wrong: the state that it returns must have the structure of .* unexpected 'more'",
        ),
        (
            nests_its_state,
            "wrong: the state that it returns must have the structure of .* unexpected 'seen.now'",
        ),
    ],
    ids=["none", "a leaf fewer", "a state that grows", "a state that nests"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_member_of_a_chain_that_changes_a_structure_is_named(update, message: str, first: bool):
    @mfx.transform
    def wrong():
        return lambda params: {"seen": torch.zeros(())}, update

    tx = mfx.chain(wrong(), mfx.momentum()) if first else mfx.chain(mfx.momentum(), wrong())
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params)


def init(params):
    return mfx.core.EmptyState()


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda updates, state: (updates, state), r"found \(updates, state\)$"),
        (
            lambda updates, state, params, value: (updates, state),
            r".*: if value is an extra .*, write a \* before it$",
        ),
    ],
)
def test_an_update_that_cannot_be_called_is_refused_when_it_is_made(update, message):
    @mfx.transform
    def wrong():
        return init, update

    with pytest.raises(
        TypeError, match=rf"^wrong: update must accept .*\(updates, state, params\), {message}"
    ):
        wrong()


def test_a_function_of_updates_alone_makes_no_stateless_transform():
    with pytest.raises(
        TypeError,
        match=r"^stateless: function must accept .*\(updates, params\), found \(updates\)$",
    ):
        mfx.stateless(lambda updates: updates)


def test_an_update_that_is_called_without_the_parameters_that_it_reads_says_so():
    def update(updates, state, params=None):
        return mfx.tree.map(torch.add, updates, params), state

    @mfx.transform
    def adds_the_parameters():
        return init, update

    with pytest.raises(
        ValueError, match=r"tree 2 is None.*parameters, call update\(updates, state, params\)"
    ):
        adds_the_parameters().update({"w": torch.ones(2)}, mfx.core.EmptyState())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            None,
            r"wrong: the decorated function must return \(init, update\), two functions, found NoneType",
        ),
        (init, "found function"),
        ((init, 3), "found tuple"),
        (
            (init, lambda updates, state, params=None: updates),
            r"must return \(updates, state\), found dict",
        ),
        (
            (init, lambda updates, state, params=None: None),
            r"must return \(updates, state\), found NoneType",
        ),
        (
            (init, lambda updates, state, params=None: ({"v": updates["w"]}, state)),
            "the updates that it returns must",
        ),
    ],
)
def test_a_function_that_makes_no_transform_is_told_what_to_return(returned, message):
    @mfx.transform
    def wrong():
        return returned

    def one_step(params):
        tx = wrong()
        tx.update(params, tx.init(params), params)

    with pytest.raises((TypeError, ValueError), match=message):
        one_step({"w": torch.ones(2)})


def test_a_model_in_the_place_of_its_parameters_is_told_what_to_give():
    model, tx = nn.Linear(2, 2), mfx.momentum()
    for given in (model, model.parameters(), model.named_parameters()):
        with pytest.raises(TypeError, match=r"by name, such as dict\(model.named_parameters\(\)\)"):
            tx.init(given)
    params = dict(model.named_parameters())
    with pytest.raises(
        TypeError, match=r"updates .* p.grad for name, p in model.named_parameters\(\)"
    ):
        tx.update(model, tx.init(params), params)
    with pytest.raises(TypeError, match=r"dict\(model.named_parameters\(\)\)"):
        mfx.apply_updates(model, params)


PARAMS = {"a": torch.ones(2, 3), "b": {"c": torch.ones(3)}}


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"a": torch.ones(2, 3)}, "updates must have the structure of params: missing 'b.c'"),
        (
            {"a": torch.ones(2, 3), "b": {"c": torch.ones(3), "d": torch.ones(1)}},
            "unexpected 'b.d'",
        ),
        (
            {"a": torch.ones(3, 2), "b": {"c": torch.ones(3)}},
            r"'a' has shape \(3, 2\), its parameter has \(2, 3\)",
        ),
        (
            {"a": torch.ones(2, 3), "b": {"c": torch.ones(3, dtype=torch.int64)}},
            "'b.c' must be dense and real",
        ),
    ],
)
def test_bad_updates_are_named_and_change_nothing(updates, message):
    tx = mfx.chain(mfx.momentum(), mfx.scale(-0.1))
    state = tx.init(PARAMS)
    before = copy.deepcopy(state)
    with pytest.raises((ValueError, TypeError), match=message):
        tx.update(updates, state, PARAMS, donate=True)
    require_same("the state", state, before, "before the update")


def test_a_state_of_another_chain_or_other_parameters_is_refused():
    tx, other = mfx.chain(mfx.momentum()), mfx.chain(mfx.scale_by_adam())
    with pytest.raises(
        ValueError, match=r"state: it does not fit chain .*missing 'momentum.trace.a'"
    ):
        tx.update(PARAMS, other.init(PARAMS), PARAMS)
    smaller = {"a": torch.ones(1, 3), "b": {"c": torch.ones(3)}}
    with pytest.raises(
        ValueError, match=r"'momentum.trace.a' has shape \(1, 3\) .* expected \(2, 3\)"
    ):
        tx.update(PARAMS, tx.init(smaller), PARAMS)
    low = mfx.chain(mfx.momentum(dtype=torch.bfloat16)).init(PARAMS)
    with pytest.raises(
        ValueError, match=r"'momentum.trace.a' .* dtype torch.bfloat16, expected .* torch.float32"
    ):
        tx.update(PARAMS, low, PARAMS)


def test_a_transform_receives_the_extras_that_it_names_and_a_chain_passes_all_on():
    seen: dict[str, object] = {}

    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def listening():
        def update(updates, state, params=None, *, value, step=None):
            seen.update(value=value, step=step)
            return updates, state

        return (lambda params: mfx.core.EmptyState()), update

    tx = mfx.chain(mfx.scale(1.0), mfx.masked(mfx.chain(listening()), {"w": True}))
    params = {"w": torch.ones(1)}
    tx.update(params, tx.init(params), params, value=3)
    assert seen == {"value": 3, "step": None}
    for face in (tx, mfx.sharding.offload(tx)):
        with pytest.raises(
            TypeError,
            match=r"argument vlaue= \(did you mean 'value'\?\), expected only step= or value=",
        ):
            face.update(params, face.init(params), params, value=3, vlaue=5)
    with pytest.raises(
        TypeError, match="listening: the extra argument value= is missing: call update"
    ):
        tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match="expected no extra argument"):
        mfx.chain().update(params, {}, params, boundary=True)


def test_a_transform_that_takes_any_extra_is_given_all_and_nothing_is_misspelt():
    seen: dict[str, object] = {}

    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def takes_all():
        def update(updates, state, params=None, *, donate=None, **extras):
            seen.update(extras)
            return updates, state

        return (lambda params: mfx.core.EmptyState()), update

    tx = mfx.chain(mfx.accumulate(takes_all(), 1), mfx.scale(1.0))
    params = {"w": torch.ones(1)}
    tx.update(params, tx.init(params), params, boundary=True, anything=3)
    assert seen == {"anything": 3}


def test_a_transform_that_does_not_promise_is_never_written_behind():
    """It returns its own state as the updates: the next in the chain must not write into them."""

    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def careless():
        def update(updates, state, params=None):
            total = mfx.tree.map(torch.add, state, updates)
            return total, total

        return (lambda params: mfx.tree.map(torch.zeros_like, params)), update

    tx = mfx.chain(careless(), mfx.scale(-0.1))
    params = {"w": torch.ones(2)}
    state = tx.init(params)
    for step in range(1, 4):
        _, state = tx.update({"w": torch.ones(2)}, state, params, donate=True)
        assert torch.equal(state["careless"]["w"], torch.full((2,), float(step)))


def test_an_undeclared_transform_sees_the_whole_tree():
    @mfx.transform
    def undeclared():
        return (lambda params: mfx.core.EmptyState()), (
            lambda updates, state, params=None: (updates, state)
        )

    assert undeclared().locality is mfx.Locality.TREE
    assert mfx.chain(mfx.momentum(), undeclared()).locality is mfx.Locality.TREE
    assert mfx.chain(mfx.momentum()).locality is mfx.Locality.ELEMENT
    assert mfx.muon().locality is mfx.Locality.LEAF
    assert (
        mfx.orthogonalize(view=mfx.MatrixView("... out in -> ... out in")).locality
        is mfx.Locality.MATRIX
    )


def test_convolutions_are_flattened():
    torch.manual_seed(0)
    settings = {"dtype": torch.float64}
    conv = {"w": torch.randn(4, 3, 2, 2, dtype=torch.float64)}
    flat = {"w": conv["w"].reshape(4, 12)}
    tx = mfx.orthogonalize(**settings)
    torch.testing.assert_close(
        tx.update(conv, tx.init(conv))[0]["w"].reshape(4, 12),
        tx.update(flat, tx.init(flat))[0]["w"],
    )
    assert (
        mfx.scale_by_shape("spectral")
        .update(conv, mfx.core.EmptyState())[0]["w"]
        .equal(conv["w"] * (4 / 12) ** 0.5)
    )


def test_master_parameters_lose_no_small_update():
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    tx = mfx.master_params(mfx.scale(-1.0))
    state, low = tx.init(params), params
    small = {"w": torch.full((4,), 2.0**-10, dtype=torch.bfloat16)}
    for _ in range(64):
        updates, state = tx.update(small, state, params)
        params = mfx.apply_updates(params, updates)
        assert torch.equal(params["w"], state.master["w"].bfloat16())
        low = mfx.apply_updates(low, mfx.tree.map(torch.neg, small))
    assert torch.equal(params["w"], torch.full((4,), 1 - 64 * 2.0**-10, dtype=torch.bfloat16))
    assert torch.equal(low["w"], torch.ones(4, dtype=torch.bfloat16))  # what happens without


def step(tx: mfx.Transform, params: dict[str, Tensor], state: Any) -> tuple[dict[str, Tensor], Any]:
    loss = sum((leaf - 1.0).square().sum() for leaf in params.values())
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    updates, state = tx.update(grads, state, params)
    return mfx.apply_updates(params, updates), state


def test_a_loop_over_parameters_that_were_not_detached_is_told_that_it_keeps_every_graph():
    tx, params = mfx.adamw(0.1, weight_decay=0.1), {"w": torch.nn.Parameter(torch.zeros(3, 3))}
    kept, state = step(tx, params, tx.init(params))
    step(tx, {"w": kept["w"].detach().requires_grad_()}, state)
    with torch.no_grad():
        mfx.apply_updates(kept, tx.update({"w": torch.ones(3, 3)}, state, kept)[0])
    with pytest.warns(
        UserWarning, match=r"graph of earlier steps, such as 'w', expected detached parameters"
    ):
        step(tx, kept, state)


def test_differentiating_through_steps_is_not_warned_of():
    tx = mfx.as_tensors(mfx.chain(mfx.momentum(0.5), mfx.add_decayed_weights(0.1), mfx.scale(-0.1)))
    tx = mfx.tree.map(lambda number: number.requires_grad_(), tx)
    start = {"w": torch.zeros(3, requires_grad=True)}
    # With the gradients as functions of the parameters, and as constants.
    for create_graph in (True, False):
        params, state = start, tx.init(start)
        for _ in range(3):
            loss = (params["w"] - 1.0).square().sum()
            (grad,) = torch.autograd.grad(
                loss, [params["w"]], create_graph=create_graph, retain_graph=True
            )
            updates, state = tx.update({"w": grad}, state, params)
            params = mfx.apply_updates(params, updates)
        assert torch.autograd.grad(params["w"].sum(), mfx.tree.leaves(tx)[-1])[0] != 0


LEARNING_RATE = mfx.scale_by_learning_rate(0.1)


DECAY = mfx.add_decayed_weights(0.1)
INDEPENDENT = mfx.subtract_decayed_weights(0.1)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [mfx.momentum(), LEARNING_RATE, DECAY],
            "add_decayed_weights comes after the learning rate in 'scale_by_lear",
        ),
        (
            [mfx.adamw(0.1), mfx.masked(DECAY, {"w": True})],
            "comes after .* in 'chain'.* put it before 'chain'",
        ),
        ([LEARNING_RATE, mfx.chain(mfx.momentum(), DECAY)], "comes after the learning rate"),
        ([LEARNING_RATE, mfx.cautious(mfx.momentum())], "cautious comes after"),
        (
            [INDEPENDENT, LEARNING_RATE],
            r"comes before scale_by_learning_rate .* put it after 'scale_by_learning_rate'$",
        ),
        ([INDEPENDENT, mfx.scale(-0.1)], "subtract_decayed_weights comes before scale in 'scale'"),
        (
            [mfx.masked(INDEPENDENT, {"w": True}), mfx.adamw(0.1)],
            "before .* in 'chain'.* put it after",
        ),
        (
            [mfx.muon(0.1, weight_decay=0.0), LEARNING_RATE],
            "found learning rates in .*, expected one",
        ),
        (
            [mfx.partition({"a": mfx.lion(0.1)}, {"w": "a"}), LEARNING_RATE],
            "'partition' and 'scale_by_learning_rate'",
        ),
        ([mfx.qk_clip(()), LEARNING_RATE], "qk_clip comes before"),
        (
            [mfx.ema_params(), mfx.chain(mfx.clip_by_value(1.0), LEARNING_RATE)],
            "ema_params comes before",
        ),
        (
            [mfx.ema_params(), mfx.scale(mfx.linear_schedule(-0.1, 0.0, 10))],
            "ema_params comes before scale in 'scale'",
        ),
        (
            [mfx.master_params(mfx.momentum()), LEARNING_RATE],
            r"or move scale_by_learning_rate into master_params\(...\)$",
        ),
    ],
    ids=repr,
)
def test_an_order_that_gives_wrong_numbers_is_an_error_at_construction(members, message):
    with pytest.raises(ValueError, match=f"^chain: .*{message}"):
        mfx.chain(*members)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [LEARNING_RATE, mfx.orthogonalize()],
            "the learning rate in 'scale_by_learning_rate' comes before orthogonal",
        ),
        (
            [mfx.adamw(0.1), mfx.masked(mfx.scale_by_sign(), {"w": True})],
            "'chain' comes before scale_by_sign, whose",
        ),
        (
            [mfx.master_params(mfx.adamw(0.1)), mfx.clip_by_value(1.0)],
            "master_params .* comes before clip_by_value",
        ),
        ([mfx.adamw(0.1), mfx.ema_params(), mfx.qk_clip(())], "ema_params .* comes before qk_clip"),
    ],
    ids=repr,
)
def test_an_order_that_is_hardly_meant_is_warned_of_at_the_callers_line(members, message):
    with pytest.warns(UserWarning, match=f"^chain: .*{message}") as caught:
        tx = mfx.chain(*members)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    tx.init({"w": torch.ones(2, 2)})  # neither at a step nor where numbers change
    prepared(mfx.with_hyperparams(tx, mfx.hyperparams(tx)))


def test_orders_that_are_a_matter_of_choice_are_not_warned_of():
    shaped = mfx.orthogonalize(dtype=torch.float32)
    # Decay that is orthogonalized with the gradient.
    mfx.chain(DECAY, mfx.momentum(), shaped, LEARNING_RATE)
    mfx.chain(shaped, mfx.momentum(), LEARNING_RATE)
    mfx.chain(mfx.adamw(0.1), mfx.clip_by_global_norm(1.0), mfx.ema_params(), mfx.monitor("steps"))
    mfx.chain(
        mfx.adamw(0.1),
        mfx.qk_clip(()),
        mfx.ema_params(),
        mfx.masked(mfx.monitor("steps"), {"w": True}),
    )
    mfx.chain(LEARNING_RATE, mfx.master_params(mfx.momentum()))
    mfx.chain(mfx.adamw(0.1), mfx.scale(-1.0))  # maximization
    mfx.chain(mfx.scale(-1.0), mfx.adamw(0.1))
    mfx.accumulate(mfx.skip_nonfinite(mfx.adamw(0.1)), 2)
    mfx.partition({"a": mfx.adamw(0.1), "b": mfx.lion(0.1)}, {"w": "a"})
    independent = mfx.chain(LEARNING_RATE, INDEPENDENT)
    mfx.partition({"a": independent, "b": mfx.chain(mfx.momentum(), independent)}, {"w": "a"})


@mfx.transform(locality=mfx.Locality.ELEMENT, position="learning_rate")
def a_rate_of_ones_own():
    """Turn updates downhill."""
    return mfx.scale(-0.1).functions


@pytest.mark.parametrize(
    "inner",
    [
        LEARNING_RATE,
        mfx.masked(a_rate_of_ones_own(), {"w": True}),
        mfx.scale(-0.1),
        mfx.chain(mfx.momentum(), mfx.scale(-0.1)),
        mfx.scale(mfx.linear_schedule(-0.1, 0.0, 10)),
        mfx.skip_nonfinite(mfx.scale(-0.1)),
        mfx.partition({"a": mfx.momentum(), "b": mfx.scale(-1.0)}, {"w": "a"}),
    ],
)
def test_cautious_refuses_what_turns_the_update_that_it_compares_with_the_gradient(inner):
    with pytest.raises(ValueError, match="cautious: the inner transform reverses the sign"):
        mfx.cautious(inner)


@pytest.mark.parametrize("make", [mfx.muon, mfx.normuon, mfx.muon_with_adamw])
def test_the_orthogonalizing_part_and_its_view_reach_every_matrix_transform(
    make: Callable[..., mfx.Transform],
) -> None:
    view = mfx.MatrixView({"*": "(part=2 out) in -> part out in"})
    part = mfx.orthogonalize(method="gram", view=view)
    labels = {"labels": {"w": "muon"}} if make is mfx.muon_with_adamw else {}
    found = list(within(make(0.1, orthogonalize=part, **labels)))
    assert part in found
    assert {tx.arguments["view"] for tx in found if "view" in tx.arguments} == {view}


def test_the_view_of_a_part_is_the_first_one_within_it() -> None:
    view = mfx.MatrixView({"*": "(part=2 out) in -> part out in"})
    part = mfx.chain(mfx.scale(2.0), mfx.contrib.normalize_rows(view=view))
    assert mfx.scale_by_shape(view=view) in within(mfx.muon(0.1, orthogonalize=part))
    assert mfx.scale_by_shape() in within(mfx.muon(0.1, orthogonalize=mfx.scale_by_sign()))


def test_the_optimizer_adds_the_views_of_the_routing_to_those_of_its_part() -> None:
    model = torch.nn.MultiheadAttention(8, 2)
    part = mfx.orthogonalize(view=mfx.MatrixView({"out_proj.*": "in out -> out in"}))
    (found,) = {
        tx.arguments["view"]
        for tx in within(mfx.Muon(model, orthogonalize=part).tx)
        if "view" in tx.arguments
    }
    assert found.text("out_proj.weight") == "in out -> out in"
    assert found.text("in_proj_weight") == "(part=3 out) in -> part out in"


@pytest.mark.parametrize("part", ["keller", {"steps": 3}, mfx.orthogonalize, None])
@pytest.mark.parametrize("make", [mfx.muon, mfx.normuon, mfx.muon_with_adamw, mfx.contrib.scion])
def test_a_part_that_is_no_transform_is_refused_by_name(
    make: Callable[..., Any], part: Any
) -> None:
    with pytest.raises(TypeError, match=r"^orthogonalize must be a muonfx.Transform, found"):
        make(0.1, orthogonalize=part)


def test_nesterov_reaches_adam_and_is_not_shown_by_default() -> None:
    ahead = mfx.scale_by_adam(0.9, 0.95, nesterov=True)
    assert repr(ahead) in repr(mfx.adamw(0.1, b2=0.95, nesterov=True))
    assert repr(ahead) in repr(mfx.muon_with_adamw(0.1, adam=ahead))
    assert mfx.adamw(0.1, nesterov=False).fingerprint == mfx.adamw(0.1).fingerprint
    assert "nesterov" not in repr(mfx.adamw(0.1)) + repr(mfx.muon_with_adamw(0.1))


@mfx.core.transform(locality=mfx.Locality.LEAF)
def by_first_match(rates: dict[str, torch.Tensor]):
    def rate_of(name: str) -> torch.Tensor:
        return next(rate for pattern, rate in rates.items() if fnmatch(name, pattern))

    def update(updates, state, params=None):
        return {name: leaf * rate_of(name) for name, leaf in updates.items()}, state

    return lambda params: (), update


def test_the_order_of_a_dict_of_tensors_in_an_argument_is_kept():
    tx = by_first_match({"head*": torch.tensor(0.5), "*": torch.tensor(2.0)})
    reversed_tx = by_first_match({"*": torch.tensor(2.0), "head*": torch.tensor(0.5)})
    assert tx != reversed_tx
    assert by_first_match({"head*": 0.5, "*": 2.0}) != by_first_match({"*": 2.0, "head*": 0.5})
    with pytest.raises(ValueError, match="stack: transform 1"):
        mfx.stack([tx, reversed_tx])
    grads = {"head": torch.ones(1), "other": torch.ones(1)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates == {"head": torch.tensor([0.5]), "other": torch.tensor([2.0])}


def test_transforms_with_another_order_of_a_dict_are_not_equal_and_cannot_be_stacked():
    patterns = {"head*": torch.tensor(0.5), "*": torch.tensor(2.0)}
    tx, reordered = by_first_match(patterns), by_first_match(dict(reversed(patterns.items())))
    assert tx == by_first_match(dict(patterns))
    assert tx != reordered
    assert tx.structure != reordered.structure
    with pytest.raises(ValueError, match="stack: transform 1 is by_first_match"):
        mfx.stack([tx, reordered])


def test_the_label_none_leaves_out_a_quantized_weight_within_other_transforms():
    params = {"w": torch.ones(3, 3), "q": torch.ones(3, 3, dtype=torch.int8)}
    inner = mfx.partition({"a": mfx.momentum()}, {"w": "a", "q": None})
    for tx in (
        mfx.partition({"all": inner}, {"w": "all", "q": "all"}),
        mfx.masked(inner, {"w": True, "q": True}),
        mfx.chain(inner),
    ):
        updates, _ = tx.update({"w": params["w"], "q": None}, tx.init(params), params)
        assert updates["q"] is None
        assert updates["w"] is not None


def test_two_labels_for_one_name_without_prefixes_are_no_label():
    labels = {"w": "a", "_orig_mod.w": "b", "b": "a"}
    tx = mfx.partition({"a": mfx.scale(1.0), "b": mfx.scale(2.0)}, labels)
    with pytest.raises(ValueError, match="found no value for '_fsdp_wrapped_module"):
        tx.init({"_fsdp_wrapped_module.w": torch.ones(2), "b": torch.ones(2)})


def test_a_function_of_labels_without_params_requires_each_gradient():
    tx = mfx.partition({"matrix": mfx.momentum(), "rest": mfx.scale(1.0)}, by_ndim)
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    state = tx.init(params)
    with pytest.raises(
        ValueError,
        match=r"no parameters, and no gradient for 'w'.*update\(updates, state, params\)",
    ):
        tx.update({"w": None, "b": torch.ones(2)}, state)


def by_ndim(params: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: "matrix" if leaf.ndim == 2 else "rest" for name, leaf in params.items()}
