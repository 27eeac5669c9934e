"""Steps bucket by bucket are those of the transforms on all leaves, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.optimizer.stepping import add_in_place
from muonfx.program.execute import Executor
from muonfx.program.placement import Arguments

SHAPES = {
    "a.weight": (12, 40),
    "b.weight": (40, 12),
    "c.weight": (12, 40),
    "d.weight": (3, 12, 5),
    "e.bias": (700,),
    "f.bias": (3,),
    "g.bias": (),
    "h.weight": (0, 4),
}
LABELS = {name: "muon" if name.endswith("weight") else "adamw" for name in SHAPES}


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_its_input():
    """Its state is the last update: the very tensor, where that was donated."""

    def init(params):
        return {"last": mfx.tree.map(torch.zeros_like, params)}

    def update(updates, state, params=None, *, donate=mfx.core.contract.NOTHING):
        own = updates if donate.updates else mfx.tree.map(torch.clone, updates)
        at = mfx.tree.Present(updates)
        last = at.fill(at.pick(own), state["last"])
        return at.fill([a + b for a, b in zip(at.pick(own), at.pick(state["last"]), strict=True)]), {"last": last}

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def takes_turns():
    """Two moments that change places at each step."""

    def init(params):
        return (mfx.tree.map(torch.zeros_like, params), mfx.tree.map(torch.ones_like, params))

    def update(updates, state, params=None, *, donate=mfx.core.contract.NOTHING):
        at = mfx.tree.Present(updates)
        now, before = (at.pick(one) for one in state)
        return at.fill([u * a for u, a in zip(at.pick(updates), now, strict=True)]), (
            at.fill(before, state[0]),
            at.fill(now, state[1]),
        )

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def by_place():
    """Its state knows leaves by their place, and not by name."""

    def init(params):
        return {"sum": tuple(torch.zeros_like(leaf) for leaf in params.values())}

    def update(updates, state, params=None):
        total = tuple(s if u is None else s + u for s, u in zip(state["sum"], updates.values(), strict=True))
        return {n: None if u is None else s.clone() for (n, u), s in zip(updates.items(), total, strict=True)}, {
            "sum": total
        }

    return init, update


MUON = mfx.chain(
    mfx.momentum(),
    mfx.masked(mfx.scale(0.5), mfx.select.path("a.*")),
    mfx.orthogonalize(dtype=torch.bfloat16, steps=2),
    mfx.scale_by_shape(),
    mfx.add_decayed_weights(0.1, mfx.select.path("[ab].*")),
    mfx.scale_by_learning_rate(mfx.schedules.linear_schedule(0.1, 0.0, 5)),
)
CHAINS = {
    "muon with adamw": mfx.partition({"muon": MUON, "adamw": mfx.adamw(1e-2)}, LABELS),
    "with numbers as tensors": mfx.partition({"muon": mfx.as_tensors(MUON), "adamw": mfx.lion(1e-2)}, LABELS),
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
        {"muon": mfx.masked(mfx.momentum(debias=True), mfx.select.path("[ad].*"))},
        {name: "muon" if name.endswith("weight") else None for name in SHAPES},
    ),
    "compact state": mfx.chain(mfx.scale_by_adam(mu_dtype=mfx.int8(), nu_dtype=torch.bfloat16), mfx.scale(-0.1)),
    "behind a sum over leaves": mfx.chain(mfx.clip_by_global_norm(1.0), mfx.adamw(1e-2)),
    "state that is what was given": mfx.partition(
        {
            "muon": mfx.chain(
                mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16, steps=2), keeps_its_input(), takes_turns()
            ),
            "adamw": mfx.chain(keeps_its_input(), takes_turns(), mfx.scale(-0.1)),
        },
        LABELS,
    ),
    "updates in another dtype than gradients": mfx.master_params(
        mfx.partition({"muon": MUON, "adamw": mfx.adamw(1e-2)}, LABELS)
    ),
    "state by place": mfx.chain(by_place(), mfx.masked(mfx.scale(2.0), mfx.select.path("a.*"))),
    "a label without leaves": mfx.partition(
        {"muon": mfx.momentum(), "adamw": mfx.scale_by_adam(), "none": mfx.scale_by_adam()}, LABELS
    ),
    "nothing": mfx.identity(),
}


def stepped(tx, layout, dtype, *, absent, donate, bucket_bytes=None):
    """Parameters and state after three steps of an executor that applies updates."""
    torch.manual_seed(0)

    def drawn():
        return {name: layout(torch.randn(shape)).to(dtype) for name, shape in SHAPES.items()}

    params = drawn()
    executor = Executor(bucket_bytes=bucket_bytes)
    state = executor.init(tx, params)
    for step in range(3):
        grads = drawn()
        if step == 1:
            grads |= dict.fromkeys(absent)
        given = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        call = Arguments(grads, state, params, mfx.Donation(donate, True), {}, add_in_place)
        with torch.no_grad():
            _, state = executor.update(tx, call)
        assert donate or all(grads[name] is None or torch.equal(grads[name], given[name]) for name in grads)
    return params, state


LAYOUTS = (lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x)


@pytest.mark.filterwarnings("ignore:partition. no parameter has the label .none.")
@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_values_are_those_of_all_leaves_at_once(chain, data) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    absent = data.draw(st.sets(st.sampled_from(sorted(SHAPES))))
    donate = data.draw(st.booleans())
    bucket_bytes = data.draw(st.sampled_from([100, 1000, 5000]))
    wanted, found = (
        stepped(CHAINS[chain], layout, dtype, absent=absent, donate=donate, bucket_bytes=some)
        for some in (None, bucket_bytes)
    )
    assert mfx.tree.names(found) == mfx.tree.names(wanted)
    for name, x, y in zip(mfx.tree.names(found), mfx.tree.leaves(found), mfx.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name
