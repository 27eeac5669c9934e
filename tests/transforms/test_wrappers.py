"""Wrappers: micro-batches make one step, a step with a NaN or an infinity changes nothing, and None is no update."""

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.testing.examples import copied_tree
from muonfx.testing.violation import bits_equal, is_close, require_close, require_same, tolerance_of

dense = kit.params_and_grads(nones=False, steps=(1, 1))
inner_transforms = kit.transforms(
    ["momentum", "scale_by_adam", "clip_by_global_norm", "scale", "scale_by_lion", "chain"]
)


@given(inner_transforms, st.sampled_from([1, 2, 4]), dense)
def test_equal_micro_batches_make_one_step(inner: mfx.Transform, every: int, example: kit.Example):
    # Two, or four, equal numbers add up exactly, and a power of two divides exactly.
    params, (grads,) = example.precise()
    tx = mfx.accumulate(inner, every, dtype=torch.float64)
    state, inner_state = tx.init(params), inner.init(params)
    for _ in range(2):
        expected, inner_state = inner.update(grads, inner_state, params)
        for micro in range(every):
            updates, state = tx.update(grads, state, params)
            if micro < every - 1:
                assert not any(leaf.any() for leaf in tree.tensors(updates))
        for found, wanted in zip(
            tree.leaves((updates, state.inner)), tree.leaves((expected, inner_state)), strict=True
        ):
            assert found is wanted or is_close(
                found, wanted, tolerance_of(inner, expected, inner_state)
            )


@given(st.integers(1, 5), dense)
def test_a_sum_is_the_sum(every: int, example: kit.Example):
    params, (grads,) = example.precise()
    tx = mfx.accumulate(mfx.identity(), every, mean=False, dtype=torch.float64)
    state = tx.init(params)
    for micro in range(every):
        updates, state = tx.update(tree.map(lambda g, m=micro: g * m, grads), state, params)
    for found, grad in zip(tree.leaves(updates), tree.leaves(grads), strict=True):
        assert is_close(found, grad * sum(range(every)), 1e-12)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("inner", [mfx.momentum(0.9), mfx.scale_by_adam(), mfx.identity()])
def test_donation_changes_no_value_where_the_inner_transform_runs(inner: mfx.Transform, mean: bool):
    params, steps = kit.Example.of({"w": (4, 3), "b": (3,)}, steps=4)
    tx = mfx.accumulate(inner, 2, mean=mean)
    state, donated_state = tx.init(params), tx.init(params)
    history: list[tuple[Any, Any]] = []
    for grads in steps:
        expected, state = tx.update(grads, state, params)
        found, donated_state = tx.update(copied_tree(grads), donated_state, params, donate=True)
        history.append((found, expected))
        assert all(
            map(bits_equal, tree.leaves((found, donated_state)), tree.leaves((expected, state)))
        )
    # A later step has not changed an earlier update: none shares memory with the state.
    assert all(map(bits_equal, *map(tree.leaves, zip(*history, strict=True))))


def test_the_caller_may_say_where_the_last_micro_batch_is_and_the_inner_transform_runs_only_there():
    given: list[float] = []

    def probe(updates: Any, params: Any) -> Any:
        given.append(float(updates["w"]))
        return updates

    tx = mfx.accumulate(mfx.stateless(probe), 100)
    state = tx.init({"w": torch.zeros(1)})
    for value, boundary in (
        (1.0, False),
        (3.0, True),
        (5.0, True),
        (1.0, False),
        (2.0, False),
        (6.0, True),
    ):
        updates, state = tx.update({"w": torch.tensor([value])}, state, boundary=boundary)
        assert bool(updates["w"].any()) == boundary
    assert given == [2.0, 5.0, 3.0]
    assert int(state.count) == 0


def test_a_gradient_that_is_absent_in_some_micro_batches_counts_as_zero_there():
    params = {"a": torch.zeros(2), "b": torch.zeros(2), "never": torch.zeros(2)}
    tx = mfx.accumulate(mfx.momentum(0.5, nesterov=False), 2)
    start = state = tx.init(params)
    first, state = tx.update({"a": torch.ones(2), "b": None, "never": None}, state, params)
    assert first["b"] is None
    assert first["never"] is None
    second, state = tx.update({"a": None, "b": torch.ones(2), "never": None}, state, params)
    # Half of one half: the mean of one gradient and one zero, half of which enters the average.
    assert second["a"].tolist() == second["b"].tolist() == [0.25, 0.25]
    assert second["never"] is None
    assert bits_equal(state.inner.trace["never"], start.inner.trace["never"])
    third, state = tx.update(
        {"a": torch.ones(2), "b": torch.ones(2), "never": torch.ones(2)}, state, params
    )
    assert not third["never"].any()


def test_vmap_over_states_that_are_at_different_micro_batches():
    tx = mfx.accumulate(mfx.momentum(), 2)
    params, steps = kit.Example.of({"w": (2, 3)}, steps=4)
    early = tx.init(params)
    late = tx.update(steps[3], early, params)[1]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), early, late)
    expected = [early, late]
    for grads in steps[:3]:
        found, stacked = torch.func.vmap(
            lambda state, grads=grads: tx.update(grads, state, params)
        )(stacked)
        for place in (0, 1):
            updates, expected[place] = tx.update(grads, expected[place], params)
            torch.testing.assert_close(found["w"][place], updates["w"])
    assert stacked.count.tolist() == [int(state.count) for state in expected]


def test_a_state_within_a_step_may_move_to_another_container():
    tx = mfx.accumulate(mfx.scale(1.0), every=2)
    names = ("w", "b", "a")
    first, second = dict.fromkeys(names), dict.fromkeys(names)
    first["w"] = torch.ones(2)  # and then never again: only `seen` says that it is to be updated

    def begun(container: Any) -> Any:
        return tx.update(
            container(first), tx.init(container(dict.fromkeys(names, torch.zeros(2))))
        )[1]

    moved = begun(dict)._replace(seen=begun(OrderedDict).seen)
    assert moved.seen.tolist() == begun(dict).seen.tolist()
    updates, _ = tx.update(second, moved, dict.fromkeys(names, torch.zeros(2)))
    assert updates["b"] is None
    assert updates["a"] is None
    assert torch.equal(updates["w"], torch.full((2,), 0.5))


BAD = (float("nan"), float("inf"), -float("inf"))
WITH_STATE = "momentum", "scale_by_adam", "scale_by_lion", "clip_by_global_norm"
skipped_transforms = kit.transforms([*WITH_STATE, "chain", "accumulate", "monitor", "ema_params"])


def poisoned(grads: Any, place: int, element: int, bad: float) -> Any:
    """The same gradients with one bad element in one leaf, or None where there is no element at all."""
    leaves, treedef = tree.flatten(grads)
    full = [at for at, leaf in enumerate(leaves) if leaf is not None and leaf.numel()]
    if not full:
        return None
    at = full[place % len(full)]
    leaf = leaves[at].clone(memory_format=torch.contiguous_format)
    leaf.view(-1)[element % leaf.numel()] = bad
    return tree.unflatten(treedef, [leaf if i == at else other for i, other in enumerate(leaves)])


@given(
    skipped_transforms,
    kit.params_and_grads(),
    st.integers(0, 99),
    st.integers(0, 99),
    st.sampled_from(BAD),
)
def test_a_bad_step_updates_nothing_and_the_run_is_that_of_the_inner_transform_without_it(
    inner: mfx.Transform, example: kit.Example, place: int, element: int, bad: float
):
    params, steps = example
    tx = mfx.skip_nonfinite(inner)
    state, inner_state = tx.init(params), inner.init(params)
    skipped = 0
    for grads in steps:
        spoilt = poisoned(grads, place, element, bad)
        if spoilt is not None:
            before = copied_tree(state.inner)
            updates, state = tx.update(spoilt, state, params)
            skipped += 1
            require_same("the inner state", state.inner, before, "before the bad step")
            for update, grad in zip(tree.leaves(updates), tree.leaves(grads), strict=True):
                # The last micro-batch of an `accumulate` also updates leaves of which only earlier ones had a gradient.
                assert update is not None or grad is None
                assert update is None or not update.any()
                assert update is None or grad is None or update.dtype == grad.dtype
            assert (int(state.skipped), int(state.in_a_row)) == (skipped, 1)
        updates, state = tx.update(grads, state, params)
        expected, inner_state = inner.update(grads, inner_state, params)
        require_same(
            "the run", (updates, state.inner), (expected, inner_state), "without the bad step"
        )
        assert (int(state.skipped), int(state.in_a_row)) == (skipped, 0)


def test_a_bad_last_micro_batch_without_a_gradient_of_a_leaf_updates_nothing():
    tx = mfx.skip_nonfinite(mfx.accumulate(mfx.scale_by_adam(), 2))
    params = {"b": torch.ones(2), "w": torch.ones(2)}
    state = tx.init(params)
    _, state = tx.update({"b": torch.ones(2), "w": torch.ones(2)}, state, params)
    updates, after = tx.update({"b": torch.full((2,), torch.nan), "w": None}, state, params)
    assert not any(update.any() for update in updates.values() if update is not None)
    require_same("the inner state", after.inner, state.inner, "before the bad step")


def test_large_finite_gradients_are_no_fault():
    largest = torch.finfo(torch.float16).max
    tx = mfx.skip_nonfinite(mfx.identity())
    updates, state = tx.update(
        {"w": torch.full((9,), largest, dtype=torch.float16)}, tx.init({"w": torch.zeros(9)})
    )
    assert int(state.skipped) == 0
    assert float(updates["w"][0]) == largest


def test_derivatives_stay_finite_where_a_step_is_skipped():
    tx = mfx.skip_nonfinite(mfx.scale(2.0))
    state = tx.init({"w": torch.zeros(2)})

    def total(w: torch.Tensor) -> torch.Tensor:
        return tx.update({"w": w}, state)[0]["w"].sum()

    assert torch.func.grad(total)(torch.tensor([1.0, 2.0])).tolist() == [2.0, 2.0]
    assert torch.func.grad(total)(torch.tensor([1.0, float("inf")])).tolist() == [0.0, 0.0]


def test_vmap_skips_each_member_of_a_batch_by_itself():
    tx = mfx.skip_nonfinite(mfx.momentum(0.5, nesterov=False))
    state = tx.init({"w": torch.zeros(1)})
    grads = {"w": torch.tensor([[1.0], [float("nan")], [2.0]])}
    updates, states = torch.func.vmap(lambda g: tx.update(g, state))(grads)
    assert updates["w"].flatten().tolist() == [0.5, 0.0, 1.0]
    assert states.skipped.tolist() == [0, 1, 0]


GATHERED = mfx.accumulate(mfx.scale(-0.1), 2)
UPHILL = mfx.accumulate(mfx.identity(), 2)
AROUND = {
    "add_updates, first": mfx.add_updates(GATHERED, mfx.scale(1.0)),
    "add_updates, second": mfx.add_updates(mfx.scale(1.0), GATHERED),
    "add_updates, both": mfx.add_updates(GATHERED, GATHERED, GATHERED),
    "cautious": mfx.cautious(UPHILL),
    "masked": mfx.masked(GATHERED, {"a": True, "b": True}),
    "master_params": mfx.master_params(GATHERED),
    "partition": mfx.partition({"x": GATHERED, "y": mfx.scale(1.0)}, {"a": "y", "b": "x"}),
    "scale_by_dual_norm": mfx.contrib.scale_by_dual_norm(UPHILL),
    "schedule_free": mfx.contrib.schedule_free(GATHERED, 0.1),
    "skip_nonfinite": mfx.skip_nonfinite(GATHERED),
}


def run(tx: mfx.Transform, zeros: bool) -> Any:
    """The history of four micro-batches; the second has no gradient for `b`, or zeros."""
    params, steps = kit.Example.of({"a": (3, 4), "b": (3, 4)}, steps=4)
    steps[1]["b"] = torch.zeros(3, 4) if zeros else None
    return kit.examples.history(tx, params, steps)


@pytest.mark.parametrize("name", AROUND)
def test_a_gathered_gradient_is_not_lost_where_the_last_one_is_none(name: str):
    require_close(
        "the run", run(AROUND[name], zeros=False), run(AROUND[name], zeros=True), "with zeros", 0.0
    )


def test_namo_says_that_it_has_no_scale_for_a_gathered_gradient():
    with pytest.raises(
        ValueError, match=r"inner transform returned an update for 'b'.*accumulate\(scale_by_namo"
    ):
        run(mfx.contrib.scale_by_namo(UPHILL), zeros=False)


# ------------------------------------------------------------------------------------------- outside of accumulate

EVERY = mfx.accumulate(mfx.chain(mfx.scale_by_adam(), mfx.scale_by_learning_rate(0.1)), 4)
ACCUMULATED = mfx.accumulate(mfx.identity(), 4)
SLOWLY = mfx.linear_schedule(0.1, 0.0, 10)

OUTSIDE = {
    "independent decay": (
        (EVERY, mfx.subtract_decayed_weights(0.1)),
        "subtract_decayed_weights .*changes the param",
    ),
    "decay": (
        (ACCUMULATED, mfx.add_decayed_weights(0.1), mfx.scale(-0.1)),
        "add_decayed_weights .*changes the param",
    ),
    "decay in a mask": (
        (
            ACCUMULATED,
            mfx.masked(mfx.add_decayed_weights(0.1), mfx.routing.ndim(2)),
            mfx.scale(-0.1),
        ),
        "add_decayed_weights in 'masked' changes the parameters",
    ),
    "schedule after": (
        (ACCUMULATED, mfx.scale_by_learning_rate(SLOWLY)),
        "scale_by_learning_rate .*its schedule",
    ),
    "schedule before": (
        (mfx.scale_by_learning_rate(SLOWLY), ACCUMULATED),
        "scale_by_learning_rate .*its schedule",
    ),
    "average": ((EVERY, mfx.ema_params()), "ema_params .*changes its state"),
    "moments": ((ACCUMULATED, mfx.adamw(0.1)), "scale_by_adam in 'chain' changes its state"),
    "momentum before": (
        (mfx.momentum(), ACCUMULATED, mfx.scale(-0.1)),
        "momentum .*changes its state",
    ),
    "in a wrapper": (
        (mfx.skip_nonfinite(EVERY), mfx.ema_params()),
        "ema_params .*outside of 'skip_nonfinite'",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_acts_at_every_micro_batch_is_warned_of_by_name(name: str):
    members, message = OUTSIDE[name]
    with pytest.warns(UserWarning, match=message) as caught:
        mfx.chain(*members)
    assert "move it inside" in str(caught[0].message)


@pytest.mark.parametrize(
    "members",
    [
        (EVERY, mfx.monitor("step")),
        (mfx.clip_by_global_norm(1.0), EVERY),
        (mfx.add_decayed_weights(0.1), ACCUMULATED, mfx.scale(-0.1)),  # the mean of equal decays
        (ACCUMULATED, mfx.clip_by_value(1.0), mfx.scale_by_learning_rate(0.1)),
        (mfx.skip_nonfinite(EVERY), mfx.scale(2.0)),
        (mfx.skip_nonfinite(mfx.identity()), EVERY),
    ],
    ids=repr,
)
def test_what_an_update_of_zero_does_not_move_may_be_outside_of_accumulate(
    members: tuple[mfx.Transform, ...],
):
    with warnings.catch_warnings(action="error"):
        mfx.chain(*members)


@pytest.mark.parametrize(
    "inner",
    [
        mfx.adamw(0.1),
        mfx.as_tensors(mfx.adamw(0.1)),
        mfx.chain(
            mfx.momentum(0.9),
            mfx.orthogonalize(dtype=torch.float32),
            mfx.scale_by_learning_rate(0.1),
        ),
    ],
    ids=["adamw", "numbers in tensors", "muon"],
)
def test_a_compiled_accumulate_with_any_transform_inside_is_the_eager_one(inner: mfx.Transform):
    """Beyond tracing: AOT autograd failed for a function that overwrites a list in a branch of `torch.cond`."""
    tx = mfx.accumulate(inner, every=2)
    params = {"w": torch.randn(4, 3), "v": torch.randn(4, 3)}

    def train(update: Any) -> list[Any]:
        state = tx.init(params)
        history: list[Any] = []
        for number in range(4):
            grads = tree.map(lambda param, number=number: torch.sin(param + number), params)
            updates, state = update(grads, state, params)
            history.append(updates)
        return history

    torch.compiler.reset()
    compiled = torch.compile(tx.update, fullgraph=True, backend="aot_eager")
    require_close("compiled updates", train(compiled), train(tx.update), "eager", 1e-6)


@pytest.mark.parametrize("wrap", [None, mfx.master_params, mfx.skip_nonfinite])
def test_a_compiled_accumulate_keeps_gradients_that_the_last_micro_batch_lacks(wrap: Any):
    tx = mfx.accumulate(mfx.scale(-1.0), every=2)
    if wrap is not None:
        tx = wrap(tx)
    params, one = {"a": torch.zeros(1), "b": torch.zeros(1)}, torch.ones(1)

    def updates_of_b(update: Any) -> list[Any]:
        state = tx.init(params)
        history: list[Any] = []
        for grad in (one, None, one, one, None, None):
            updates, state = update({"a": one, "b": grad}, state, params)
            history.append(updates["b"])
        return history

    torch.compiler.reset()
    compiled = torch.compile(tx.update, backend="eager")
    expected = updates_of_b(tx.update)
    assert expected[-1] is None
    assert updates_of_b(compiled) == expected
    # Whose checks read what the compiled calls have cached.
    assert updates_of_b(tx.update) == expected
    torch.compiler.reset()
    with pytest.raises(Exception, match="_run_outside_the_graph"):
        torch.compile(tx.update, fullgraph=True, backend="eager")(
            {"a": one, "b": None}, tx.init(params), params
        )


def test_a_mask_function_that_maps_over_parameters_skips_those_that_are_none():
    params: dict[str, Any] = {"w": torch.ones(2, 2), "v": torch.ones(2), "gone": None}

    def matrices(params: Any) -> Any:
        return mfx.tree.map(lambda p: p.ndim > 1, params)

    for tx in (mfx.masked(mfx.scale(0.5), matrices), mfx.adamw(0.1, mask=matrices)):
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["gone"] is None
    with pytest.raises(TypeError, match="the value for 'v' is None, expected True or False"):
        mfx.masked(mfx.scale(0.5), lambda params: {"w": True, "v": None, "gone": None}).init(params)


@pytest.mark.parametrize("name", ["masked", "partition"])
def test_an_extra_tree_that_a_transform_does_not_cut_is_an_error_that_shows_how(name: str):
    params = {"w": torch.ones(2), "b": torch.ones(1)}

    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def divide():
        def update(updates: Any, state: Any, params: Any = None, *, hessian: Any):
            return mfx.tree.map(torch.div, updates, hessian), state

        return mfx.identity().functions.init, update

    tx = {
        "masked": mfx.masked(divide(), {"w": True, "b": False}),
        "partition": mfx.partition({"x": divide(), "y": mfx.identity()}, {"w": "x", "b": "y"}),
    }[name]
    with pytest.raises(
        ValueError,
        match=r"tree 2 does not have .* tree 1: .*partition and masked.* take its part by",
    ):
        tx.update(params, tx.init(params), params, hessian=params)
