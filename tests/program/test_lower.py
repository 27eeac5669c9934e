"""A program follows from structure, names and shapes alone; each leaf and each number is in it once."""

import pytest
import torch
from hypothesis import given, reject

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.core.combine import chain_entries
from muonfx.core.hyperparams import hyperparams
from muonfx.core.recorded import dotted, parts_of
from muonfx.program import lower
from muonfx.program.nodes import Around, ChainNode, Stage

SHAPES = {"a": (6, 4), "b": (4, 10), "bias": (7,)}
LABELS = {"a": "muon", "b": "muon", "bias": "adamw"}
PARAMS = {name: torch.ones(shape) for name, shape in SHAPES.items()}
WHOLE = mfx.skip_nonfinite(
    mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition(
            {"muon": mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons()), "adamw": mfx.adamw(0.1)},
            LABELS,
        ),
        mfx.stateless(lambda updates, params: updates),
    )
)


def leaf_nodes(node):
    """The nodes that do something themselves: members of stages, and what calls nobody."""
    if isinstance(node, Stage):
        return [member.node for member in node.members]
    if isinstance(node, ChainNode | Around):
        return [one for child in node.children for one in leaf_nodes(child)]
    return [node]


def test_kinds_of_nodes_and_the_leaves_of_routes():
    text = str(lower(WHOLE, PARAMS))
    kinds = ", ".join(line.split(":")[0].strip() for line in text.splitlines()[1:])
    routed = "chain, elementwise, elementwise, elementwise, chain, elementwise, matrix stage"  # AdamW, then Muon
    assert kinds == f"around, chain, sum over leaves, route, {routed}, whole tree"
    assert "matrix stage: orthogonalize, normalize_neurons" in text
    (route,) = [node for node in lower(WHOLE, PARAMS).nodes() if node.kind == "route"]
    assert [sorted(child.names) for child in route.children] == [["bias"], ["a", "b"]]


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


def test_a_number_changes_no_program():
    one, other = (lower(mfx.muon_with_adamw(rate, labels=LABELS), PARAMS) for rate in (0.1, 0.2))
    assert [n.tx.treedef for n in one.nodes()] == [n.tx.treedef for n in other.nodes()]
    assert hyperparams(one.root.tx) != hyperparams(other.root.tx)


@pytest.mark.parametrize("tx", [WHOLE, mfx.accumulate(mfx.master_params(WHOLE), 2)])
def test_every_leaf_of_a_chain_reaches_every_transform_of_it(tx: mfx.Transform):
    for node in lower(tx, PARAMS).nodes():
        if chain_entries(node.tx) is not None:
            assert all(child.names == node.names for child in node.children)
