"""Donation changes no value, however the leaves of updates, state and parameters share memory."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import muonfx as mfx
from muonfx.core.donation import NOTHING
from muonfx.polar.checks import overlaps_itself
from muonfx.testing.violation import require_same
from tests.public import NO_MATCH
from tests.transforms.test_every_transform import CASES

pytestmark = NO_MATCH

LABELS = {"0.weight": "muon", "1.weight": "adamw"}
SHAPE = (4, 4)
SIZE = 16
EVERY = [tx for cases in CASES.values() for tx in cases]


def a_view(draw: st.DrawFn, buffers: list[Tensor]) -> Tensor:
    """A matrix in one of several buffers, as one of many kinds of view."""
    buffer = buffers[draw(st.integers(0, len(buffers) - 1))]
    start = draw(st.integers(0, 3)) * SIZE // 2
    kind = draw(
        st.sampled_from(("whole", "transposed", "row", "scalar", "windows", "every other", "own"))
    )
    if kind == "transposed":
        return buffer[start : start + SIZE].view(SHAPE).mT
    if kind == "row":
        return buffer[start : start + 4].expand(SHAPE)
    if kind == "scalar":
        return buffer[start].expand(SHAPE)
    if kind == "windows":
        return buffer[start : start + 7].unfold(0, 4, 1)
    if kind == "every other":
        return buffer[start % 2 :: 2][:SIZE].view(SHAPE)
    whole = buffer[start : start + SIZE].view(SHAPE)
    return whole.clone() if kind == "own" else whole


@st.composite
def entangled(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and gradients whose leaves may share memory, also with each other."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    buffers = [torch.randn(3 * SIZE, generator=generator) for _ in range(draw(st.integers(1, 3)))]
    names = "abc"
    return {n: a_view(draw, buffers) for n in names}, {n: a_view(draw, buffers) for n in names}


def with_shared_leaves(state: Any, others: list[Tensor], picks: list[int]) -> Any:
    """A state with some leaves replaced by other tensors of their shape and dtype: leaves of its own, or these."""
    leaves, treedef = mfx.tree.flatten(state)
    known = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + others
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            continue
        alike = [x for x in known if x.shape == leaf.shape and x.dtype == leaf.dtype]
        leaves[place] = alike[picks[place % len(picks)] % len(alike)]
    return mfx.tree.unflatten(treedef, leaves)


@pytest.mark.parametrize(
    "donate", [True, mfx.Donation(updates=True), mfx.Donation(state=True)], ids=str
)
@settings(max_examples=2 * settings.default.max_examples)
@given(
    tx=st.sampled_from(EVERY),
    trees=entangled(),
    picks=st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_leaves_of_any_tree_may_share_memory(
    donate: bool | mfx.Donation,
    tx: mfx.Transform,
    trees: tuple[dict[str, Tensor], dict[str, Tensor]],
    picks: list[int],
):
    params, grads = trees
    state = tx.update(mfx.tree.map(torch.clone, grads), tx.init(params), params)[1]
    state = with_shared_leaves(state, [*grads.values(), *params.values()], picks)
    expected = copy.deepcopy(tx.update(grads, state, params))
    kept = {
        "parameters": params,
        **({} if mfx.Donation.of(donate).updates else {"gradients": grads}),
        **({} if mfx.Donation.of(donate).state else {"state": state}),
    }
    before = copy.deepcopy(kept)
    found = tx.update(grads, state, params, donate=donate)
    require_same("donated", found, expected, "not donated")
    require_same("what was kept", kept, before, "before the update")


@given(trees=entangled())
def test_parameters_and_updates_may_share_memory_when_they_are_added(
    trees: tuple[dict[str, Tensor], dict[str, Tensor]],
):
    params, updates = trees
    expected = copy.deepcopy(mfx.apply_updates(params, updates))
    if any(map(overlaps_itself, params.values())):
        with pytest.raises(
            ValueError, match=r"apply_updates: params: '[abc]' has shape \(4, 4\) and strides"
        ):
            mfx.apply_updates(params, updates, donate=True)
        return
    require_same(
        "donated", mfx.apply_updates(params, updates, donate=True), expected, "not donated"
    )


def test_views_of_one_buffer_stay_donated():
    tx = mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1))
    flat = torch.randn(3, 12)
    params, grads, trace = ({"a": row[:4], "b": row[4:]} for row in flat)
    state = {
        "momentum": tx.init(params)["momentum"]._replace(trace=trace),
        "scale": mfx.core.EmptyState(),
    }
    assert mfx.tree.same_structure(state, tx.init(params))
    updates, state = tx.update(grads, state, params, donate=True)
    assert all(
        state["momentum"].trace[name].data_ptr() == trace[name].data_ptr() for name in params
    )
    assert all(updates[name].data_ptr() == grads[name].data_ptr() for name in params)
    assert mfx.apply_updates(params, updates, donate=True)["b"] is params["b"]


@pytest.mark.parametrize("transformed", ["vmap", "compile"])
def test_donation_in_a_graph_changes_no_value_and_no_input(transformed: str):
    tx = mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1))
    u, w = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))

    def step(u: Tensor, w: Tensor) -> Tensor:
        params = {"a": w, "b": w}
        updates, _ = tx.update({"a": u, "b": u}, tx.init(params), params, donate=True)
        new = mfx.apply_updates(params, updates, donate=True)
        return torch.stack([updates["a"], updates["b"], new["a"], new["b"]])

    run = (
        torch.vmap(step)
        if transformed == "vmap"
        else torch.compile(step, backend="eager", fullgraph=True)
    )
    given, weight = (u[None], w[None]) if transformed == "vmap" else (u, w)
    before = given.clone(), weight.clone()
    update = tx.update({"a": u}, tx.init({"a": w}), {"a": w})[0]["a"]
    expected = torch.stack([update, update, w + update, w + update])
    torch.testing.assert_close(run(given, weight).reshape(4, -1), expected)
    assert torch.equal(given, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("donate_grads", [False, True])
def test_an_optimizer_takes_gradients_that_share_memory(donate_grads: bool):
    tx = mfx.chain(mfx.scale(0.5), mfx.muon_with_adamw(0.1, labels=LABELS))

    def stepped(share: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        optimizer = mfx.TransformOptimizer(model, tx, donate_grads=donate_grads)
        for _ in range(2):
            grad = torch.randn(4, 3)
            parts = (grad[:3], grad[1:]) if share else (grad[:3].clone(), grad[1:].clone())
            for own, part in zip(model.parameters(), parts, strict=True):
                own.grad = part
            optimizer.step()
        return [own.detach() for own in model.parameters()]

    require_same("shared gradients", stepped(True), stepped(False), "gradients of their own")


def test_an_optimizer_names_an_expanded_parameter_before_anything_changes():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.ones(3).expand(2, 3))
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    model(torch.ones(1, 3)).sum().backward()
    before = copy.deepcopy((optimizer.state_dict(), model.bias.detach()))
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\) and strides \(0, 1\)"):
        optimizer.step()
    require_same(
        "after the error",
        (optimizer.state_dict()["state"], model.bias.detach()),
        (before[0]["state"], before[1]),
        "before",
    )


def test_a_wrapper_that_does_not_name_donate_may_read_its_inputs_after_a_call():
    """Its ``**extras`` once had ``donate``, so that the inner transform overwrote what the wrapper reads."""

    @mfx.transform
    def half_of(inner: mfx.Transform):
        def update(updates: Any, state: Any, params: Any = None, **extras: Any):
            new_updates, new_state = inner.run(updates, state, params, **extras)
            average = mfx.tree.map(lambda new, old: (new + old) / 2, new_updates, updates)
            return average, mfx.tree.map(lambda new, old: (new + old) / 2, new_state, state)

        return inner.init, update

    tx = half_of(mfx.momentum(0.5, nesterov=False))
    results = []
    for donate in (False, True):
        state = tx.init({"w": torch.zeros(2)})
        for size in (1.0, 2.0, 3.0):
            updates, state = tx.update({"w": torch.full((2,), size)}, state, donate=donate)
        results.append((updates, state))
    require_same("donated", results[1], results[0], "not donated")


DONATIONS: list[mfx.core.Donation] = []
"""What `recorded` was allowed to overwrite, call by call."""


@mfx.transform(locality=mfx.Locality.ELEMENT)
def recorded():
    def update(updates, state, params=None, *, donate=NOTHING):
        DONATIONS.append(donate)
        return updates, state

    return lambda params: mfx.core.EmptyState(), update


COMPOSED = [
    mfx.chain(recorded()),
    mfx.partition({"a": recorded()}, {"w": "a"}),
    mfx.add_updates(recorded()),
]
# `skip_nonfinite` keeps the old state, which it returns for a skipped step.
COMPOSED += [
    tx.replace(inner=recorded())
    for tx in EVERY
    if "inner" in tx.arguments and tx.name != "skip_nonfinite"
]


@pytest.mark.parametrize("tx", COMPOSED, ids=lambda tx: tx.name)
def test_a_transform_that_calls_others_donates_its_state_to_them(tx: mfx.Transform):
    if tx.name == "accumulate":
        tx = tx.replace(every=1)  # else the first call only accumulates
    if tx.name == "masked":
        tx = tx.replace(mask={"w": True})
    params = {"w": torch.ones(3, 2)}
    state = tx.init(params)
    DONATIONS.clear()
    tx.run(
        {"w": torch.ones(3, 2)}, state, params, donate=mfx.core.Donation(updates=True, state=True)
    )
    assert [donation.state for donation in DONATIONS] == [True]
