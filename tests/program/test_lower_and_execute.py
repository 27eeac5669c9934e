"""A program has each number and each leaf of the state once; its executor keeps scratch, and neither without bound."""

import pytest
import torch
from hypothesis import given, reject

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx import testing as kit
from muonfx import tree
from muonfx.core.hyperparams import hyperparams
from muonfx.core.recorded import dotted, parts_of
from muonfx.polar import explain
from muonfx.program import lower
from muonfx.program.execute import MOST_PROGRAMS, Executor
from muonfx.program.nodes import Around, ChainNode, Stage
from muonfx.program.placement import Arguments

SHAPES = {"a": (6, 4), "b": (4, 10), "bias": (7,)}
PARAMS = {name: torch.ones(shape) for name, shape in SHAPES.items()}


def leaf_nodes(node):
    """The nodes that do something themselves: members of stages, and what calls nobody."""
    if isinstance(node, Stage):
        return [member.node for member in node.members]
    if isinstance(node, ChainNode | Around):
        return [one for child in node.children for one in leaf_nodes(child)]
    return [node]


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

    root = lower(only_biases(mfx.momentum()), PARAMS).root
    assert [(child.names, child.state, child.numbers) for child in root.children] == [(("bias",), ("mine",), "inner")]


@pytest.mark.filterwarnings("ignore:partition. no parameter")
@given(kit.transforms(matrices=True), kit.params_and_grads(ranks=(2, 4), nones=False))
def test_states_and_numbers_are_where_the_program_says(tx: mfx.Transform, example: kit.Example):
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
    seen: list[str] = []
    program = lower(tx, params)
    own = [name for node in program.transforms() for name in node.own.names]
    assert sorted(own) == sorted(numbers)
    for node in leaf_nodes(program.root):
        seen += [dotted(node.numbers) + name for name, _ in parts_of(node.tx)] if node.keeps_numbers else []
        own = tree.paths(node.tx.init(node.like))
        assert {(*node.state, *path) for path in own} <= state.keys()
    assert set(seen) <= numbers.keys()
    assert len(seen) == len(set(seen))


def test_a_steady_step_takes_no_scratch_for_its_products() -> None:
    shapes = {"tall": (512, 256), "wide": (256, 1024), "square": (256, 256)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16))
    scratch = max(explain(shape, dtype=torch.bfloat16).scratch_bytes for shape in shapes.values())
    numbers = 16 * sum(x.numel() // x.shape[-1] for x in params.values()) + 4096  # norms of rows

    executor = Executor()
    state = executor.init(tx, params)
    for step in range(4):
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        wanted, expected = tx.update(grads, state, params)
        with PeakBytes() as peak:
            call = Arguments(grads, state, params, mfx.Donation(updates=True, state=True), {})
            out, state = executor.update(tx, call)
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

    executor = Executor()
    state = expected = executor.init(made(), params)
    for _ in range(2 * MOST_PROGRAMS):
        tx = made()
        out, state = executor.update(tx, Arguments(params, state, params, mfx.Donation(), {}))
        wanted, expected = tx.update(params, expected, params)
        assert torch.equal(out["a"], wanted["a"])
    assert len(executor._programs) <= MOST_PROGRAMS
    assert len(executor._current) <= 3 * MOST_PROGRAMS  # a node for each of the three transforms
