"""Placed transforms: steps in buckets are those on all leaves, bit for bit, and nothing is kept without bound."""

import sys

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx import testing as kit
from muonfx import tree
from muonfx.core.hyperparams import hyperparams
from muonfx.core.visit import visit
from muonfx.optimizer.stepping import add_in_place
from muonfx.placement import Where, placed
from muonfx.placement.placed import PlacedTransforms
from muonfx.polar import explain

SHAPES = {"a": (6, 4), "b": (4, 10), "bias": (7,)}
PARAMS = {name: torch.ones(shape) for name, shape in SHAPES.items()}


def test_a_users_own_route_is_found_by_running_init_on_placeholders():
    @mfx.transform(combinator=mfx.core.Combinator(mfx.Locality.ELEMENT))
    def only_biases(inner: mfx.Transform):
        def init(params):
            return {"mine": inner.init({name: p for name, p in params.items() if "bias" in name})}

        def update(updates, state, params=None):
            mine = {name: u for name, u in updates.items() if "bias" in name}
            out, after = inner.update(mine, state["mine"])
            return {**updates, **out}, {"mine": after}

        return init, update

    _, inner = visit(only_biases(mfx.momentum()), PARAMS)
    assert (inner.param_names, inner.state, inner.name) == (("bias",), ("mine",), "inner")


@pytest.mark.filterwarnings("ignore:partition. no parameter")
@given(kit.transforms(matrices=True), kit.params_and_grads(ranks=(2, 4), nones=False))
def test_states_and_numbers_are_where_a_visit_says(tx: mfx.Transform, example: kit.Example):
    everywhere = mfx.masked(tx, lambda p: tree.map(lambda _: True, p))
    try:
        tx = mfx.skip_nonfinite(mfx.chain(("first", tx), ("second", everywhere)))
    except (UserWarning, ValueError):  # one that may be there once only, as a learning rate
        reject()
    params = tree.map(lambda leaf: leaf.to("meta"), example.params)
    if not tree.leaves(params):
        return
    numbers = hyperparams(tx)
    state = dict.fromkeys(tree.paths(tx.init(params)))
    visits = list(visit(tx, params))
    own = [name for visited in visits for name in visited.numbers.names]
    assert sorted(own) == sorted(numbers)
    for visited in visits:
        if not visited.calls and visited.state is not None:
            paths = tree.paths(visited.tx.init(visited.params))
            assert {(*visited.state, *path) for path in paths} <= state.keys()


@pytest.mark.filterwarnings("ignore:partition. no parameter")
@given(kit.transforms(matrices=True), kit.params_and_grads(ranks=(2, 4), nones=False))
def test_a_placed_transform_has_the_numbers_and_the_state_of_the_original(
    tx: mfx.Transform, example: kit.Example
):
    result = placed(tx, example.params, Where(bucket_bytes=64))
    # In their order. A chain in groups has other names, such as "0.momentum.decay", which nothing reads.
    assert [*hyperparams(result).values()] == [*hyperparams(tx).values()]
    assert tree.paths(result.functions.init(example.params)) == tree.paths(tx.init(example.params))


def test_a_transform_that_is_resolved_to_one_with_other_numbers_is_refused():
    @mfx.transform(locality=mfx.Locality.ELEMENT, resolve=lambda tx, params: mfx.scale(3.0))
    def becomes_a_scale():
        return mfx.identity().functions

    with pytest.raises(TypeError, match=r"becomes_a_scale.*numeric arguments"):
        placed(becomes_a_scale(), PARAMS)


def test_a_steady_step_takes_no_scratch_for_its_products() -> None:
    shapes = {"tall": (512, 256), "wide": (256, 1024), "square": (256, 256)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16))
    scratch = max(explain(shape, dtype=torch.bfloat16).scratch_bytes for shape in shapes.values())
    numbers = 16 * sum(x.numel() // x.shape[-1] for x in params.values()) + 4096  # norms of rows

    run = placed(tx, params)
    state = run.functions.init(params)
    for step in range(4):
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        wanted, expected = tx.update(grads, state, params)
        with PeakBytes() as peak:
            out, state = run.run(
                grads, state, params, donate=mfx.Donation(updates=True, state=True)
            )
        assert all(torch.equal(out[name], wanted[name]) for name in shapes)
        assert all(map(torch.equal, mfx.tree.leaves(state), mfx.tree.leaves(expected)))
        if step == 0:
            assert peak.most >= scratch
    assert peak.most <= numbers


def test_a_chain_made_anew_at_each_step_is_not_remembered_for_ever() -> None:
    params = {"a": torch.ones(4, 4), "b": torch.ones(4)}

    def made() -> mfx.Transform:
        labels = lambda tree: dict.fromkeys(tree, "x")  # noqa: E731  a function of its own at each call
        return mfx.skip_nonfinite(mfx.partition({"x": mfx.momentum()}, labels))

    transforms = PlacedTransforms(Where())
    state = expected = transforms(made(), params).functions.init(params)
    for _ in range(2 * PlacedTransforms.LIMIT):
        tx = made()
        out, state = transforms(tx, params).run(params, state, params)
        wanted, expected = tx.update(params, expected, params)
        assert torch.equal(out["a"], wanted["a"])
    assert sum(map(len, transforms._results.values())) <= PlacedTransforms.LIMIT


def test_a_transform_that_steps_on_two_shapes_in_turn_is_placed_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed_for: list[object] = []

    def counted(
        tx: mfx.Transform, params: object, *args: object, **kwargs: object
    ) -> mfx.Transform:
        placed_for.append(params)
        return placed(tx, params, *args, **kwargs)

    monkeypatch.setattr(sys.modules[PlacedTransforms.__module__], "placed", counted)
    transforms, tx = PlacedTransforms(Where()), mfx.momentum()
    for shape in [(2, 3), (4, 5)] * 3:
        transforms(tx, {"weight": torch.ones(shape)})
    assert len(placed_for) == 2


MANY_SHAPES = {
    "a.weight": (12, 40),
    "b.weight": (40, 12),
    "c.weight": (12, 40),
    "d.weight": (3, 12, 5),
    "e.bias": (700,),
    "f.bias": (3,),
    "g.bias": (),
    "h.weight": (0, 4),
}
LABELS = {name: "muon" if name.endswith("weight") else "adamw" for name in MANY_SHAPES}


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_its_input():
    """Its state is the last update: the very tensor, where that was donated."""

    def init(params):
        return {"last": mfx.tree.map(torch.zeros_like, params)}

    def update(updates, state, params=None, *, donate=mfx.core.donation.NOTHING):
        own = updates if donate.updates else mfx.tree.map(torch.clone, updates)
        at = mfx.tree.Present(updates)
        last = at.fill(at.pick(own), state["last"])
        return at.fill(
            [a + b for a, b in zip(at.pick(own), at.pick(state["last"]), strict=True)]
        ), {"last": last}

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def takes_turns():
    """Two moments that change places at each step."""

    def init(params):
        return (mfx.tree.map(torch.zeros_like, params), mfx.tree.map(torch.ones_like, params))

    def update(updates, state, params=None, *, donate=mfx.core.donation.NOTHING):
        at = mfx.tree.Present(updates)
        now, before = (at.pick(one) for one in state)
        return at.fill([u * a for u, a in zip(at.pick(updates), now, strict=True)]), (
            at.fill(before, state[0]),
            at.fill(now, state[1]),
        )

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def by_place():
    """Its state identifies leaves by their position, not by name."""

    def init(params):
        return {"sum": tuple(torch.zeros_like(leaf) for leaf in params.values())}

    def update(updates, state, params=None):
        total = tuple(
            s if u is None else s + u for s, u in zip(state["sum"], updates.values(), strict=True)
        )
        return {
            n: None if u is None else s.clone()
            for (n, u), s in zip(updates.items(), total, strict=True)
        }, {"sum": total}

    return init, update


MUON = mfx.chain(
    mfx.momentum(),
    mfx.masked(mfx.scale(0.5), mfx.routing.path("a.*")),
    mfx.orthogonalize(dtype=torch.bfloat16, steps=2),
    mfx.scale_by_shape(),
    mfx.add_decayed_weights(0.1, mfx.routing.path("[ab].*")),
    mfx.scale_by_learning_rate(mfx.schedules.linear_schedule(0.1, 0.0, 5)),
)
CHAINS = {
    "muon with adamw": mfx.partition({"muon": MUON, "adamw": mfx.adamw(1e-2)}, LABELS),
    "with numbers as tensors": mfx.partition(
        {"muon": mfx.as_tensors(MUON), "adamw": mfx.lion(1e-2)}, LABELS
    ),
    "matrix transforms first, next to each other and last": mfx.partition(
        {
            "muon": mfx.chain(
                mfx.orthogonalize(dtype=torch.bfloat16, steps=2),
                mfx.momentum(nesterov=False),
                mfx.orthogonalize(dtype=torch.bfloat16, steps=2),
                mfx.normalize_neurons(),
            ),
            "adamw": mfx.chain(mfx.cautious(mfx.scale_by_adam()), mfx.set_to_zero()),
        },
        LABELS,
    ),
    "some left out, some passed on": mfx.partition(
        {"muon": mfx.masked(mfx.momentum(debias=True), mfx.routing.path("[ad].*"))},
        {name: "muon" if name.endswith("weight") else None for name in MANY_SHAPES},
    ),
    "compact state": mfx.chain(
        mfx.scale_by_adam(mu_dtype=mfx.int8(), nu_dtype=torch.bfloat16), mfx.scale(-0.1)
    ),
    "behind a sum over leaves": mfx.chain(mfx.clip_by_global_norm(1.0), mfx.adamw(1e-2)),
    "state that is what was given": mfx.partition(
        {
            "muon": mfx.chain(
                mfx.momentum(),
                mfx.orthogonalize(dtype=torch.bfloat16, steps=2),
                keeps_its_input(),
                takes_turns(),
            ),
            "adamw": mfx.chain(keeps_its_input(), takes_turns(), mfx.scale(-0.1)),
        },
        LABELS,
    ),
    "updates in another dtype than gradients": mfx.master_params(
        mfx.partition({"muon": MUON, "adamw": mfx.adamw(1e-2)}, LABELS)
    ),
    "state by place": mfx.chain(by_place(), mfx.masked(mfx.scale(2.0), mfx.routing.path("a.*"))),
    "a label without leaves": mfx.partition(
        {"muon": mfx.momentum(), "adamw": mfx.scale_by_adam(), "none": mfx.scale_by_adam()}, LABELS
    ),
    "nothing": mfx.identity(),
}


def stepped(tx, layout, dtype, *, absent, donate, bucket_bytes=None):
    """Parameters and state after three steps that add the updates to the parameters."""
    torch.manual_seed(0)

    def drawn():
        return {name: layout(torch.randn(shape)).to(dtype) for name, shape in MANY_SHAPES.items()}

    params = drawn()
    run = placed(tx, params, Where(bucket_bytes=bucket_bytes))
    state = run.functions.init(params)
    for step in range(3):
        grads = drawn()
        if step == 1:
            grads |= dict.fromkeys(absent)
        given = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        donation = mfx.Donation(donate, True)
        with torch.no_grad():
            updates, state = run.run(
                grads, state, params, donate=donation, apply_to_params=add_in_place
            )
        assert set(updates.values()) == {None}
        assert donate or all(
            grads[name] is None or torch.equal(grads[name], given[name]) for name in grads
        )
    return params, state


LAYOUTS = (lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x)


@pytest.mark.filterwarnings("ignore:partition. no parameter has the label .none.")
@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_values_are_those_of_all_leaves_at_once(chain, data) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    absent = data.draw(st.sets(st.sampled_from(sorted(MANY_SHAPES))))
    donate = data.draw(st.booleans())
    bucket_bytes = data.draw(st.sampled_from([100, 1000, 5000]))
    wanted, found = (
        stepped(CHAINS[chain], layout, dtype, absent=absent, donate=donate, bucket_bytes=some)
        for some in (None, bucket_bytes)
    )
    kit.violation.require_same("parameters and state", found, wanted, "of all leaves at once")


def test_an_offloaded_member_of_a_chain_does_not_apply_its_updates() -> None:
    """Only the last group adds updates to the parameters, and the numbers of the member keep their names."""
    ends = []
    for first in (mfx.momentum(0.5), mfx.sharding.offload(mfx.momentum(0.5))):
        model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(leaf.clone()) for name, leaf in PARAMS.items()}
        )
        tx = mfx.chain(first, mfx.clip_by_global_norm(1.0), mfx.scale_by_learning_rate(0.1))
        optimizer = mfx.TransformOptimizer(model, tx)
        for _ in range(2):
            for param in model.values():
                param.grad = torch.ones_like(param)
            optimizer.step()
        assert optimizer.param_groups[0]["momentum"] == 0.5
        ends.append({name: param.detach() for name, param in model.items()})
    kit.violation.require_same("parameters", ends[1], ends[0], "without offload")


def test_buckets_are_found_again_for_other_parameters() -> None:
    run = placed(mfx.scale(2.0), PARAMS, Where(bucket_bytes=8))
    state = run.functions.init(PARAMS)
    for absent in ("b", "a"):
        for params in (
            {**PARAMS, absent: None},
            {name: PARAMS[name] for name in PARAMS if name != absent},
        ):
            updates, _ = run.run(params, state, params)
            assert updates.keys() == params.keys()
            assert {name for name, leaf in updates.items() if leaf is not None} == PARAMS.keys() - {
                absent
            }


@mfx.transform(locality=mfx.Locality.ELEMENT)
def returns_its_state():
    """Returns the sum of the updates so far, the very tensor of its state."""

    def update(updates, state, params=None):
        total = mfx.tree.map(torch.add, updates, state)
        return total, total

    return lambda params: mfx.tree.map(torch.zeros_like, params), update


def test_a_group_does_not_overwrite_the_state_that_the_group_before_it_returned() -> None:
    run = placed(mfx.chain(returns_its_state(), mfx.clip_by_global_norm(1.0)), PARAMS)
    grads = {name: leaf.clone() for name, leaf in PARAMS.items()}
    _, state = run.run(
        grads, run.functions.init(PARAMS), PARAMS, donate=mfx.Donation(updates=True, state=True)
    )
    kit.violation.require_same(
        "state", state["returns_its_state"], PARAMS, "the sum of the updates"
    )


@mfx.transform(
    locality=lambda inner: inner.locality, combinator=mfx.core.Combinator(mfx.Locality.ELEMENT)
)
def one_by_one(inner: mfx.Transform):
    """Call the inner transform for one leaf after the other."""

    def init(params):
        return {name: inner.init({name: leaf}) for name, leaf in params.items()}

    def update(updates, state, params=None, **extras):
        results, new_state = {}, {}
        for name, leaf in updates.items():
            out, new_state[name] = inner.update({name: leaf}, state[name], **extras)
            results |= out
        return results, new_state

    return init, update


def test_a_wrapper_may_call_its_inner_transform_for_some_of_the_leaves_each_time() -> None:
    params = {name: leaf for name, leaf in PARAMS.items() if leaf.ndim > 1}
    tx = one_by_one(mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.float32)))
    wanted, _ = tx.update(params, tx.init(params), params)
    layout = mfx.sharding.zero(params, 1, partition="flat")
    local = layout.shard(params)
    sharded = mfx.sharding.sharded(tx, layout)
    updates, _ = sharded.update(local, sharded.init(local), local)
    kit.violation.require_same("updates", layout.gather(updates), wanted, "in one process")
