"""A program has each number and each leaf of the state once, and finds the routes of a user's own wrapper."""

import pytest
import torch
from hypothesis import given, reject

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.core.hyperparams import hyperparams
from muonfx.core.recorded import dotted, parts_of
from muonfx.program import lower
from muonfx.program.nodes import Around, ChainNode, Stage

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
