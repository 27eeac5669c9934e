"""`all_gather` under the transforms of ``torch.func``, and the verbs that refuse them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import Layout, ShardingError
from tests.processes import Here, on_ranks
from tests.sharding.cases import some

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, Callable[[Any, Any], Layout]] = {
    "whole": sharding.zero,
    "flat": lambda params, group: sharding.zero(params, group, partition="flat"),
    "replicated": sharding.replicated,
}
Tree = dict[str, Tensor]


def inner(a: Tree, b: Tree) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def loss_of(rank: int) -> Callable[[Tree], Tensor]:
    """A loss that is another on every rank, in which parameters meet each other."""
    return lambda whole: (
        (rank + 1) * ((whole["a"] @ whole["b"]).pow(3).sum() + whole["a"].pow(2).sum())
    )


def mean(trees: list[Tree]) -> Tree:
    return {name: torch.stack([one[name] for one in trees]).mean(0) for name in trees[0]}


def hvp(function: Callable[[Tree], Tensor], v: Tree) -> Callable[[Tree], Tree]:
    return grad(lambda values: inner(grad(function)(values), v))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_all_gather_has_all_derivatives_and_batches(here: Here, kind: str):
    whole, other = ({"a": some(5, 3), "b": some(3), "e": torch.zeros(0, 2)} for _ in range(2))
    other = {name: leaf.flip(0) + 1 for name, leaf in other.items()}
    layout = LAYOUTS[kind](whole, here.group)
    mine, along = layout.shard(whole), layout.shard(other)
    losses = [loss_of(rank) for rank in range(here.size)]
    own = losses[here.rank]

    def loss(local: Tree) -> Tensor:
        return own(layout.all_gather(local))

    def pieces(of_each: Callable[[Callable[[Tree], Tensor]], Tree]) -> Tree:
        """This rank's shards of the gradients of the sum of all ranks' losses."""
        return layout.shard(mean([of_each(one) for one in losses]))

    def same(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found, wanted)

    gradient = pieces(lambda one: grad(one)(whole))
    same(grad(loss)(mine), gradient)
    same(vjp(loss, mine)[1](torch.ones(()))[0], gradient)
    same(jvp(loss, (mine,), (along,)), jvp(own, (whole,), (other,)))
    same(jacrev(loss)(mine), gradient)
    # Twice differentiated.
    second = pieces(lambda one: hvp(one, other)(whole))
    same(hvp(loss, along)(mine), second)
    same(jvp(grad(loss), (mine,), (along,)), (gradient, second))
    # Batches, also of one argument of two, and around and within derivatives.
    stacked = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in whole.items()}
    stacks = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in mine.items()}
    same(vmap(loss)(stacks), vmap(own)(stacked))
    found = vmap(lambda a, b: loss({"a": a, "b": b, "e": mine["e"]}), (0, None))(
        stacks["a"], mine["b"]
    )
    same(found, vmap(lambda a: own(whole | {"a": a}))(stacked["a"]))
    each = [
        pieces(lambda one, k=k: grad(one)({n: x[k] for n, x in stacked.items()})) for k in range(2)
    ]
    same(
        vmap(grad(loss))(stacks), {name: torch.stack([one[name] for one in each]) for name in whole}
    )
    same(grad(lambda values: vmap(loss)(values).sum())(stacks), vmap(grad(loss))(stacks))
    same(
        jacfwd(lambda scale: loss({n: scale * x for n, x in mine.items()}))(torch.ones(())),
        inner(grad(own)(whole), whole),
    )
    # The same outside of torch.func.
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in mine.items()}
    first = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    same(dict(zip(leaves, first, strict=True)), gradient)
    again = torch.autograd.grad(
        inner(dict(zip(leaves, first, strict=True)), along), list(leaves.values())
    )
    same(dict(zip(leaves, again, strict=True)), second)
    expected = jvp(own, (whole,), (other,))
    with fwd.dual_level():
        dual = loss({name: fwd.make_dual(leaf, along[name]) for name, leaf in mine.items()})
        same(tuple(fwd.unpack_dual(dual)), expected)
    # Verbs of tensors that no transform has touched work within one.
    found = grad(
        lambda x: (x * layout.gather(mine)["a"] * layout.reduce_scatter(whole)["b"].numel()).sum()
    )
    same(found(torch.ones(5, 3)), whole["a"] * mine["b"].numel())


@pytest.mark.parametrize(("size", "on"), [(1, None), (2, None), (3, 1)])
@on_ranks()
def test_the_other_verbs_refuse_tensors_of_a_transform_by_name(here: Here, on: int | None):
    """Under each transform, which is used on one rank or on all."""
    is_here = on in (None, here.rank)
    whole = {"a": some(4, 4), "b": some(3)}
    layout = LAYOUTS["flat"](whole, here.group)
    mine, tx = layout.shard(whole), sharding.sharded(mfx.momentum(), layout)
    state = tx.init(mine)
    verbs: dict[str, tuple[Tree, Callable[[Tree], Any]]] = {
        "layout.gather": (mine, layout.gather),
        "layout.reduce_scatter": (whole, layout.reduce_scatter),
        "layout.shard": (whole, layout.shard),
        "broadcast": (mine, lambda values: sharding.broadcast(values, layout)),
        "init of a sharded": (mine, tx.init),
        "update of a sharded": (mine, lambda values: tx.update(values, state, mine)[0]),
    }
    said: dict[str, str] = {}
    for verb, (values, function) in verbs.items():

        def total(values: Tree, function: Callable[[Tree], Any] = function) -> Tensor:
            return sum((leaf.sum() for leaf in mfx.tree.tensors(function(values))), torch.zeros(()))

        stacks = {name: torch.stack([leaf, leaf]) for name, leaf in values.items()}
        for transform, call in {
            "grad": lambda total=total, values=values: grad(total)(values),
            "jvp": lambda total=total, values=values: jvp(total, (values,), (values,)),
            "vmap": lambda total=total, stacks=stacks: vmap(total)(stacks),
        }.items():
            try:
                _ = call() if is_here else total(values)
            except ShardingError as error:
                said[f"{verb} {transform}"] = str(error)
    assert len(said) == (18 if is_here else 15)  # layout.shard is between no ranks
    for case, text in said.items():
        assert case.rpartition(" ")[0] in text
        assert "of a torch.func transform" in text
        assert is_here or f"rank {on}: " in text
