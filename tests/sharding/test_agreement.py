"""Ranks agree on everything that must be equal: an error on all ranks names the difference, and nothing is changed."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import polar, sharding
from muonfx.polar import policy
from muonfx.sharding import ShardingError
from tests.checkpoint.common import bits
from tests.processes import Here, on_ranks
from tests.sharding.cases import flat, some
from tests.sharding.counting import counting
from tests.sharding.test_law import plain

pytestmark = pytest.mark.dist


@contextmanager
def raises(*parts: str) -> Iterator[pytest.ExceptionInfo[ShardingError]]:
    """Require an error of the sharding layer that says all of it."""
    with pytest.raises(ShardingError) as caught:
        yield caught
    assert all(part in str(caught.value) for part in parts), caught.value


def local(leaves: dict[str, Any]) -> list[Any]:
    return [bits(plain(leaf)) for leaf in mfx.tree.tensors(leaves)]


# ------------------------------------------------------------------------------------------------------ when bound


PARAMS: dict[str, Any] = {"a": some(4, 5), "b": some(3), "c": some(6, 2)}
MASKED = mfx.masked(mfx.orthogonalize(), mfx.routing.ndim(min=2))


def labelled(label: str) -> mfx.Transform:
    return mfx.partition(
        {"x": mfx.scale(1.0), "y": mfx.scale(2.0)}, {"a": "x", "b": label, "c": "y"}
    )


BOUND: dict[str, tuple[dict[str, Any], str]] = {
    # the difference: on the odd rank, in the error
    "a name": (
        {"params": {"a": some(4, 5), "c": some(6, 2), "d": some(3)}},
        "different parameters: 'b' is",
    ),
    "a parameter more": ({"params": PARAMS | {"d": some(2)}}, "'d' is missing on rank 0"),
    "a shape": (
        {"params": PARAMS | {"a": some(5, 4)}},
        "'a' is (4, 5) torch.float32 on rank 0 and (5, 4)",
    ),
    "a dtype": (
        {"params": PARAMS | {"a": some(4, 5).double()}},
        "torch.float32 on rank 0 and (4, 5) torch.float64",
    ),
    "the order of names": ({"params": OrderedDict(reversed(PARAMS.items()))}, "different"),
    "a number": ({"tx": mfx.chain(mfx.momentum(0.8), MASKED)}, "0.9"),
    "the chain": ({"tx": mfx.scale(0.1)}, "scale"),
    "labels": ({"tx": labelled("x")}, "'b' is partition, y on rank 0 and partition, x on rank 2"),
    "the layout": ({"partition": "flat"}, "different layouts"),
    "bucket_bytes": ({"bucket_bytes": 1001}, "bucket_bytes=1001"),
    "a store": ({"tx": sharding.offload(mfx.momentum(0.9))}, "different stores of the state"),
    "muonfx": ({"version of": mfx}, f"'muonfx' is {mfx.__version__} on rank 0 and 0.0.1 on rank 2"),
    "torch": ({"version of": torch}, "'torch' is "),
    "a default dtype": (
        {"dtype": torch.float64},
        "dtype' is torch.float32 on rank 0 and torch.float64 on rank 2",
    ),
    "determinism": (
        {"deterministic": True},
        "'deterministic algorithms' is False on rank 0 and True on rank 2",
    ),
    "a precision": (
        {"precision": "medium"},
        "'float32 matmul precision' is highest on rank 0 and medium on rank 2",
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "the order of names": {"params": OrderedDict(PARAMS)},
    "labels": {"tx": labelled("y")},
    "a store": {"tx": mfx.momentum(0.9)},
}
"""The other ranks."""


@pytest.mark.parametrize(
    ("what", "on"),
    [*((what, 2) for what in BOUND), ("a name", 0), ("the layout", 0), ("a number", 0)],
)
@on_ranks(3)
def test_a_difference_when_a_chain_is_bound_is_an_error_on_all(here: Here, what: str, on: int):
    """Init of a transform, with something else on one rank."""
    given = BOUND[what][0] if here.rank == on else OTHERS.get(what, {})
    params, tx = given.get("params", PARAMS), given.get("tx", mfx.chain(mfx.momentum(0.9), MASKED))
    settings = {"bucket_bytes": given["bucket_bytes"]} if "bucket_bytes" in given else {}
    version = "0.0.1" if "version of" in given else mfx.__version__
    torch.set_default_dtype(given.get("dtype", torch.float32))
    torch.set_float32_matmul_precision(given.get("precision", "highest"))
    torch.use_deterministic_algorithms(given.get("deterministic", False))
    layout = sharding.zero(params, here.group, partition=given.get("partition", "whole"))
    try:
        with (
            mock.patch.object(given.get("version of", mfx), "__version__", version),
            raises() as caught,
        ):
            sharding.sharded(tx, layout, **settings).init(layout.shard(params))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    assert (BOUND[what][1] if on else "ranks 1, 2") in str(caught.value)


@on_ranks(2)
def test_machines_on_which_auto_differs_are_an_error_unless_a_dtype_is_given(here: Here):
    """Rank 0 has bf16 products and rank 1 has none."""
    params = {"a": some(6, 5), "b": some(7, 4)}
    layout = sharding.zero(params, here.group)
    mine = layout.shard(params)

    def orthogonalized(dtype: Any) -> Any:
        tx = mfx.chain(mfx.momentum(0.0, nesterov=False), mfx.orthogonalize(dtype=dtype))
        over = sharding.sharded(tx, layout)
        return layout.gather(over.update(mine, over.init(mine), mine)[0])

    with mock.patch.object(policy, "cpu_has_bf16", return_value=here.rank == 0):
        with raises(
            "'orthogonalize' is bfloat16 on rank 0 and float32 on rank 1", "dtype=torch.float32"
        ):
            orthogonalized("auto")
        for dtype in (torch.float32, torch.bfloat16):
            found = orthogonalized(dtype)
            assert all(
                bits(found[n]) == bits(polar.orthogonalize(p, dtype=dtype))
                for n, p in params.items()
            )


@on_ranks(2)
def test_a_library_that_fails_on_one_rank_is_an_error_on_all_before_anything_changes(here: Here):
    """If quack-kernels fails on both ranks, the products of torch are used."""
    params = {"a": some(300, 300)}
    layout = sharding.replicated(params, here.group)

    def orthogonalized(failing: tuple[int, ...], products: Any = "auto") -> torch.Tensor:
        failed = "a wrong product" if here.rank in failing else None
        with mock.patch.object(policy.quack, "failure", return_value=failed):
            tx = mfx.orthogonalize(products=products, dtype=torch.bfloat16)
            over = sharding.sharded(tx, layout)
            return over.update(params, over.init(params), params)[0]["a"]

    with (
        mock.patch.object(policy.quack, "is_capable", return_value=True),
        mock.patch.object(policy.quack, "symmetric_matmul", side_effect=AssertionError("a kernel")),
    ):
        difference = "'orthogonalize' is quack-kernels on rank 0 and torch for bfloat16 on rank 1"
        with raises(difference, 'give products="batched"'):
            orthogonalized((1,))
        expected = polar.orthogonalize(params["a"], products="batched", dtype=torch.bfloat16)
        assert torch.equal(orthogonalized((0, 1)), expected)
        assert torch.equal(orthogonalized((1,), products="batched"), expected)


@on_ranks(4)
def test_a_bind_sends_the_same_few_bytes_however_many_the_parameters(here: Here):
    """And no objects, which `counting` refuses."""
    seen = []
    for count in (2, 200):
        params = {f"blocks.{place}.weight": torch.zeros(2, 2) for place in range(count)}
        layout = sharding.replicated(params, here.group)
        with counting(here) as counted:
            sharding.sharded(mfx.momentum(), layout).init(params)
        seen.append(counted)
    assert seen[0] == seen[1]
    assert sum(seen[1].sent.values()) <= 256
    assert sum(seen[1].calls.values()) <= 3


# ------------------------------------------------------------------------------------------------------- replicas


def laid_out(here: Here, kind: str, seeds: dict[str, int]) -> Any:
    """A layout and parameters, each drawn from its own seed on this rank."""
    shapes = {"a": (8, 6), "b": (5,), "c": (4, 4)}
    params: dict[str, Any] = {
        name: some(*shape, seed=seeds.get(name, 0)) for name, shape in shapes.items()
    }
    if kind == "replicated":
        return sharding.replicated(params, here.group), params
    mesh, rows = (here.grid, [Replicate(), Shard(0)]) if kind == "hsdp" else (here.mesh, [Shard(0)])
    ways = {"a": rows}
    if kind != "plain beside DTensors":
        ways["b"] = [Replicate()] * mesh.ndim
    if kind == "hsdp":
        ways["c"] = [Shard(1), Replicate()]
    params |= {
        name: distribute_tensor(params[name], mesh, way, src_data_rank=None)
        for name, way in ways.items()
    }
    return sharding.from_dtensors(params), params


@pytest.mark.parametrize("how", ["functional", "optimizer"])
@pytest.mark.parametrize(
    ("kind", "name", "size", "on"),
    [
        ("replicated", "a", 3, 2),
        ("replicated", "b", 3, 0),
        ("hsdp", "a", 4, 3),
        ("replicate", "b", 2, 1),
        ("plain beside DTensors", "b", 3, 2),
    ],
)
@on_ranks()
def test_replicas_that_differ_at_the_start_are_an_error_and_broadcast_corrects_it(
    here: Here, kind: str, name: str, on: int, how: str
):
    """One rank has made a parameter with another seed."""
    layout, params = laid_out(here, kind, {name: 17} if here.rank == on else {})
    tx = mfx.chain(
        mfx.momentum(), mfx.masked(mfx.orthogonalize(dtype=torch.float32), mfx.routing.ndim(min=2))
    )
    ranks = f"rank {on}" if on else "ranks 1, 2"
    said = f"'{name}' has other values on {ranks} than on rank", "broadcast(params, layout)"
    if how == "optimizer":
        weights = {key: nn.Parameter(leaf) for key, leaf in params.items()}
        given = layout if kind == "replicated" else None
        with raises(*said):
            mfx.TransformOptimizer(weights, tx, layout=given)
        sharding.broadcast(weights, layout, donate=True)
        mfx.TransformOptimizer(weights, tx, layout=given)
        params = {key: weight.detach() for key, weight in weights.items()}
    else:
        over = sharding.sharded(tx, layout)
        with raises(*said):
            over.init(params)
        before = local(params)
        made = sharding.broadcast(params, layout)
        assert local(params) == before
        params = made
        over.update(params, over.init(params), params)
    for piece, holders in layout.holders(name).items():
        if here.rank in holders:
            wanted = piece.cut(some(*layout.specs[name].shape, seed=17 if holders[0] == on else 0))
            assert torch.equal(plain(params[name]), wanted), "made equal to the first holder's"


STATES = {"loaded": "mu.a", "at all owners": "nu.a", "a counter": "count", "a number": "seen/norm"}


@pytest.mark.parametrize("where", ["loaded at the start", *STATES])
@on_ranks(2)
def test_states_that_differ_between_ranks_are_an_error_and_change_nothing(here: Here, where: str):
    """One rank continues with another state; a good one can still take its place."""
    params = {"a": some(4, 4), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    tx = mfx.chain(
        mfx.scale_by_adam(), mfx.normalize_neurons(), mfx.monitor("seen"), mfx.scale(0.1)
    )
    over = sharding.sharded(mfx.masked(tx, {"a": True, "b": False}), layout, replicas="everyone")
    state = over.init(params)
    if where != "loaded at the start":
        _, state = over.update(params, state, params)
    good = mfx.tree.map(torch.clone, state)
    if here.rank == 1:
        state = bad = mfx.tree.map(torch.clone, state)
        leaf = {
            "a counter": bad["scale_by_adam"].count,
            "a number": bad["monitor"].values["seen/norm"],
            "at all owners": bad["normalize_neurons"].nu["a"],
        }.get(where, bad["scale_by_adam"].mu["a"])
        leaf.add_(1)
    if where in ("at all owners", "loaded"):
        state = sharding.from_global(over, sharding.to_global(over, state))
    with raises(STATES.get(where, "mu.a"), "rank 1"):
        over.update(params, state, params)
    over.update(params, good, params)


@on_ranks(2)
def test_gradients_that_differ_at_the_first_step_are_a_warning_on_all(here: Here):
    params = {"a": some(4, 5)}
    over = sharding.sharded(mfx.momentum(), sharding.replicated(params, here.group))
    for by in (1.0, 0.0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            over.update({"a": params["a"] + by * here.rank}, over.init(params), params)
        said = [str(warning.message) for warning in caught if warning.filename == __file__]
        assert len(said) == (by != 0)
        assert all("were gradients reduced over the ranks?" in one for one in said)


@pytest.mark.parametrize("frozen", ["before wrapping", "after wrapping"])
@on_ranks(2)
def test_a_first_gradient_that_ddp_does_not_reduce_is_a_warning_on_all(here: Here, frozen: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layout = sharding.replicated(dict(model.named_parameters()), here.group)
    optimizer = mfx.Muon(model, lr=1e-3, layout=layout)
    is_frozen_first = frozen == "before wrapping"
    model[0].requires_grad_(not is_frozen_first)
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=here.group, find_unused_parameters=True
    )
    messages_of_step: list[int] = []
    for step in range(6):
        model[0].requires_grad_(step in (2, 3, 5))
        optimizer.zero_grad()
        wrapped(some(4, 3) + here.rank).square().sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(warning.message) for warning in caught]
        assert all("'0." in text and "frozen when it wrapped the model" in text for text in texts)
        messages_of_step.append(len(texts))
    assert messages_of_step == [0, 0, int(is_frozen_first), 0, 0, 0]


# ------------------------------------------------------------------------------------------------------- in a step


@mfx.transform(locality=mfx.Locality.ELEMENT)
def reads_value():
    """Multiplies by the extra argument ``value``."""

    def update(updates: Any, state: Any, params: Any = None, *, value: float = 1.0):
        return mfx.tree.map(lambda u: u * value, updates), state

    return mfx.identity().functions.init, update


def by_closure(function: Any) -> mfx.Schedule:
    @mfx.schedule
    def falling() -> Any:
        return function

    return falling()


def functional_chain(what: str, odd: bool) -> mfx.Transform:
    """A chain with a function of the same code on all ranks, which returns something else on the odd rank."""
    rate = by_closure(lambda count: (0.2 if odd else 0.1) / (1 + count))

    def chosen(params: Any) -> Any:
        return {name: odd or name == "a" for name in params}

    def labels(params: Any) -> Any:
        return {name: "x" if one else "y" for name, one in chosen(params).items()}

    return {
        "a label function": lambda: mfx.partition(
            {"x": mfx.scale(1.0), "y": mfx.scale(2.0)}, labels
        ),
        "a mask function": lambda: mfx.masked(mfx.momentum(), chosen),
        "a mask of decay": lambda: mfx.chain(mfx.momentum(), mfx.add_decayed_weights(0.1, chosen)),
        "a mask within another": lambda: mfx.skip_nonfinite(mfx.masked(mfx.momentum(), chosen)),
        "a schedule": lambda: mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(rate)),
        "a schedule of decay": lambda: mfx.add_decayed_weights(rate),
    }[what]()


FUNCTIONS = {
    "a label function": "'b' is partition, y on rank 0 and partition, x on rank 1",
    "a mask function": "different transforms of a parameter: 'b'",
    "a mask of decay": "different chains",
    "a mask within another": "different transforms of a parameter: 'b'",
    "a schedule": "scale_by_learning_rate.learning_rate' is 0.1 on rank 0 and 0.2 on rank 1",
    "a schedule of decay": "add_decayed_weights.weight_decay' is 0.1 on rank 0 and 0.2 on rank 1",
}
RATES: dict[str, tuple[Any, Any]] = {
    "a tensor": (torch.tensor(-0.1), torch.tensor(-0.2)),
    "a new chain": (-0.1, -0.2),
}
GRADIENTS: dict[str, Any] = {
    "a gradient's dtype": lambda mine: {name: leaf.bfloat16() for name, leaf in mine.items()},
    "a gradient's shape": lambda mine: mine | {"a": torch.zeros(7, 7)},
    "a leaf fewer": lambda mine: {"a": mine["a"]},
    "another tree": lambda mine: {"x": torch.zeros(1)},
    "no tensor": lambda mine: mine | {"a": 1.0},
}


STEPS = FUNCTIONS | {
    "a tensor": "'scale.factor' is -0.1",
    "a new chain": "'scale.factor' is -0.1 on rank 0 and -0.2 on rank 1",
    "an extra": "'value' is 1.0 on rank 0 and 2.0 on rank 1",
    "an unknown extra": "boundry",
    "a counter": "'scale_by_adam.count' is 1 of torch.int64 on rank 0 and 6 of torch.int64 on rank 1",
    "a loaded state": "load on all ranks, or on none",
    "a gradient's dtype": "different dtypes",
    "a gradient's shape": "'a'",
    "a leaf fewer": "'b'",
    "another tree": "'x'",
    "no tensor": "'a'",
    "no params": "some give params, some do not",
    "another call": "different calls: rank 0 has a step",
}


@pytest.mark.parametrize("what", STEPS)
@on_ranks(3)
def test_a_difference_in_a_step_is_an_error_on_all_and_changes_nothing(here: Here, what: str):
    """A step with something else on rank 1, after a good step."""
    odd = here.rank == 1
    layout, mine = flat(here, {"a": some(4, 5), "b": some(3)})
    state: Any = None
    if what in FUNCTIONS:
        over = sharding.sharded(functional_chain(what, odd), layout)
    else:
        last = (
            [mfx.scale(RATES[what][0])]
            if what in RATES
            else [mfx.add_decayed_weights(0.1), reads_value()]
        )
        over = sharding.sharded(mfx.chain(mfx.scale_by_adam(), *last), layout)
        _, state = over.update(mine, over.init(mine), mine)
    grads = GRADIENTS[what](mine) if odd and what in GRADIENTS else mine
    weights = None if odd and what == "no params" else mine
    extras = {"value": 1.0 + odd} if what == "an extra" else {}
    if odd and what in RATES:
        over = sharding.sharded(mfx.chain(mfx.scale_by_adam(), mfx.scale(RATES[what][1])), layout)
    if odd and what == "an unknown extra":
        extras = {"boundry": True}
    if odd and what == "a counter":
        state["scale_by_adam"].count.add_(5)
    if not odd and what == "a loaded state":
        state = sharding.from_global(over, sharding.to_global(over, state))
    before = [local(values) for values in (state, mine)]

    def step() -> None:
        if what == "another call" and odd:
            layout.gather(mine)
        else:
            over.update(grads, over.init(mine) if state is None else state, weights, **extras)

    with pytest.raises((ShardingError, TypeError, ValueError) if odd else ShardingError) as caught:
        step()
    assert STEPS[what] in str(caught.value)
    assert "has ended" not in str(caught.value)
    assert [local(values) for values in (state, mine)] == before
    if what.startswith(("a gradient", "a leaf", "an", "no ")):  # and the next step is a good one
        over.update(mine, state, mine)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def reads_tree(reduces: bool = False):
    """Divides by the extra argument ``hessian``, a tree of whole tensors; with ``reduces``, by its largest value."""

    def whole(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        hessian: Any,
        shard: Any = lambda values: values,
    ):
        return mfx.tree.map(
            torch.div, updates, shard({name: hessian[name] for name in updates})
        ), state

    def largest(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        hessian: Any,
        max_over_ranks: Any = torch.clone,
    ):
        maximum = max_over_ranks(torch.stack([leaf.max() for leaf in hessian.values()]).max())
        return mfx.tree.map(lambda u: u / maximum, updates), state

    return mfx.identity().functions.init, largest if reduces else whole


def hessian_of(factor: float) -> dict[str, torch.Tensor]:
    """More elements than are compared at every step, and fewer."""
    return {"a": factor * some(10, 7).abs(), "b": factor * some(3).abs()}


@pytest.mark.parametrize("leaf", ["a", "b"])
@pytest.mark.parametrize("makes", [sharding.replicated, sharding.zero])
@on_ranks(2)
def test_extra_tensors_that_differ_are_an_error_on_all(here: Here, leaf: str, makes: Any):
    """In the first step, and the small ones in every step."""
    params = {"a": some(10, 7), "b": some(3)}
    layout = makes(params, here.group)
    mine = layout.shard(params)
    over = sharding.sharded(mfx.chain(mfx.momentum(), reads_tree()), layout)
    state = over.init(mine)
    unreduced = hessian_of(1.0) | {leaf: hessian_of(1.0 + here.rank)[leaf]}
    first = {
        "a": "the extra argument hessian.a has other values on rank 1 than on rank 0",
        "b": "'hessian.b' is",
    }
    with raises(first[leaf], "reduce"):
        over.update(mine, state, mine, hessian=unreduced)
    _, state = over.update(mine, state, mine, hessian=hessian_of(1.0))
    if leaf == "b":
        with raises("different extra arguments", "'hessian.b' is"):
            over.update(mine, state, mine, hessian=unreduced)
    else:  # large tensors are compared in the first step only, as the page on sharding states
        over.update(mine, state, mine, hessian=unreduced)


@pytest.mark.parametrize("partition", ["whole", "flat", "each"])
@on_ranks(2)
def test_a_transform_takes_its_shards_of_an_extra_tree(here: Here, partition: Any):
    """Within `masked`, which passes it some of the parameters."""
    params, hessian = {"a": some(10, 7), "b": some(3)}, hessian_of(1.0)
    tx = mfx.masked(reads_tree(), {"a": True, "b": False})
    expected, _ = tx.update(params, tx.init(params), params, hessian=hessian)
    layout = sharding.zero(params, here.group, partition=partition)
    mine, over = layout.shard(params), sharding.sharded(tx, layout)
    updates, _ = over.update(mine, over.init(mine), mine, hessian=hessian)
    torch.testing.assert_close(layout.gather(updates), expected)


@on_ranks(2)
def test_extra_tensors_that_a_transform_reduces_may_differ(here: Here):
    params = {"a": some(10, 7), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    over = sharding.sharded(reads_tree(reduces=True), layout)
    updates, _ = over.update(params, over.init(params), params, hessian=hessian_of(1.0 + here.rank))
    maximum = 2.0 * max(leaf.max() for leaf in hessian_of(1.0).values())
    torch.testing.assert_close(updates["a"], params["a"] / maximum)
    both = sharding.sharded(mfx.chain(reads_tree(reduces=True), reads_tree()), layout)
    with raises("'hessian.b' is"):
        both.update(params, both.init(params), params, hessian=hessian_of(1.0 + here.rank))


@on_ranks(2)
def test_an_extra_dtensor_is_an_error_on_all_that_names_full_tensor(here: Here):
    mesh = dist.init_device_mesh("cpu", (here.size,))
    placed = {"a": distribute_tensor(some(4, 5), mesh, [Shard(0)])}
    over = sharding.sharded(reads_tree(), sharding.from_dtensors(placed))
    state = over.init(placed)
    with pytest.raises(TypeError, match=r"hessian\.a: found a DTensor, .* full_tensor\(\)"):
        over.update(placed, state, placed, hessian=placed)
    whole = {"a": placed["a"].full_tensor()}
    updates, _ = over.update(placed, state, placed, hessian=whole)
    torch.testing.assert_close(updates["a"].full_tensor(), torch.ones(4, 5))


VERBS: dict[str, tuple[Any, str]] = {
    "gather none": (
        lambda at, mine, all_, odd: at.gather(mine | {"a": None} if odd else mine),
        "'a' is None on some",
    ),
    "gather shape": (
        lambda at, mine, all_, odd: at.gather(mine | {"a": torch.zeros(1)} if odd else mine),
        "'a'",
    ),
    "reduce a name": (
        lambda at, mine, all_, odd: at.reduce_scatter(all_ | {"c": some(1)} if odd else all_),
        "'c'",
    ),
    "reduce a leaf fewer": (
        lambda at, mine, all_, odd: at.reduce_scatter({"a": all_["a"]} if odd else all_),
        "'b'",
    ),
    "reduce integers": (
        lambda at, mine, all_, odd: at.reduce_scatter(
            {n: x.long() if odd else x for n, x in all_.items()}
        ),
        "has dtype torch.int64",
    ),
    "init none": (
        lambda at, mine, all_, odd: sharding.sharded(COMPACT, at).init(
            mine | {"a": None} if odd else mine
        ),
        "'a'",
    ),
}
COMPACT = mfx.ema_params(dtype=mfx.int8())


@pytest.mark.parametrize("what", VERBS)
@on_ranks(3)
def test_a_difference_in_a_verb_is_an_error_on_all(here: Here, what: str):
    """A verb with something wrong on rank 1."""
    params = {"a": some(4, 4), "b": some(6, 3)}
    layout, mine = flat(here, params)
    call, said = VERBS[what]
    with raises(said):
        call(layout, mine, params, here.rank == 1)


@on_ranks(2)
def test_a_parameter_that_is_none_on_one_rank_is_not_broadcast(here: Here):
    params: dict[str, Any] = {"a": some(4, 5), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    if here.rank == 1:
        params["b"] = None
    with raises("'b' is None on some ranks", "expected a tensor on all ranks that hold it"):
        sharding.broadcast(params, layout)


@on_ranks(2)
def test_broadcast_returns_none_for_a_leaf_that_is_no_parameter(here: Here):
    params: dict[str, Any] = {"a": some(4, 5, seed=here.rank), "b": None}
    layout = sharding.replicated(params, here.group)
    equal = sharding.broadcast(params, layout)
    assert torch.equal(equal["a"], some(4, 5, seed=0))
    assert equal["b"] is None


@on_ranks(3)
def test_a_difference_of_parameters_without_init_is_an_error_on_all(here: Here):
    layout, mine = flat(here, {"a": some(4, 4)} | ({"c": some(2)} if here.rank == 1 else {}))
    with raises("different parameters: 'c' is missing on rank 0"):
        sharding.sharded(mfx.scale(2.0), layout).update(mine, mfx.core.EmptyState(), mine)


@pytest.mark.parametrize("how", ["functional", "optimizers", "one layout"])
@on_ranks(2)
def test_two_of_one_shape_stepped_in_another_order_are_an_error_on_all(here: Here, how: str):
    """Two optimizers, or sharded transforms; one rank steps the second one first."""
    params = [{"a": some(4, 5), "b": some(3)} for _ in range(2)]
    layouts = [sharding.replicated(own, here.group) for own in params]
    first = 1 if here.rank == 1 else 0
    said = "all ranks must step them in the same order"
    if how == "functional":
        over = [sharding.sharded(mfx.momentum(), layout) for layout in layouts]
        states = [tx.init(own) for tx, own in zip(over, params, strict=True)]
        with raises(said):
            over[first].update(params[first], states[first], params[first])
        return
    weights = [{name: nn.Parameter(leaf) for name, leaf in own.items()} for own in params]
    if how == "one layout":
        layouts[1] = layouts[0]
    pairs = zip(weights, layouts, strict=True)
    optimizers = [
        mfx.TransformOptimizer(own, mfx.momentum(), layout=layout) for own, layout in pairs
    ]
    for weight in (weight for own in weights for weight in own.values()):
        weight.grad = torch.ones_like(weight)
    before = [local(own) for own in weights]
    with raises(said):
        optimizers[first].step()
    assert [local(own) for own in weights] == before


@on_ranks(3)
def test_a_function_that_raises_on_one_rank_is_an_error_on_all(here: Here):
    """A schedule with an error of its own on one rank, at a step that is not checked when the transform is made."""
    layout, mine = flat(here, {"a": some(4, 5)})
    rate = by_closure(
        lambda count: 0.1 / (1 + count) if here.rank or int(count) != 2 else count / (1 // 0)
    )
    over = sharding.sharded(mfx.scale_by_learning_rate(rate), layout)
    state = over.init(mine)
    for _ in range(2):
        _, state = over.update(mine, state, mine)
    with pytest.raises((ShardingError, ZeroDivisionError)) as caught:
        over.update(mine, state, mine)
    assert "ZeroDivisionError" in "".join(format_exception(caught.value))


@on_ranks(2)
def test_groups_that_hold_other_parameters_on_another_rank_are_an_error(here: Here):
    """Groups that have the same rates, for other parameters on rank 1."""
    params = {"a": nn.Parameter(some(4, 5)), "b": nn.Parameter(some(3, 3))}
    names = ("b", "a") if here.rank == 1 else ("a", "b")
    groups = [
        {"params": [(name, params[name])], "lr": lr}
        for name, lr in zip(names, (0.1, 0.2), strict=True)
    ]
    layout = sharding.replicated(params, here.group)
    for param in params.values():
        param.grad = torch.ones_like(param)
    with raises("different"):
        mfx.TransformOptimizer(groups, mfx.scale_by_learning_rate(0.1), layout=layout).step()


# --------------------------------------------------------------------------------------------------- what may differ


@on_ranks(2)
def test_donation_and_the_identity_of_a_chain_may_differ_between_ranks(here: Here):
    """Three steps in which one rank donates its state and gradients, and has built its chain again."""
    layout, mine = flat(here, {"a": some(4, 5), "b": some(3)})

    def made() -> mfx.Transform:
        return sharding.sharded(
            mfx.muon_with_adamw(0.1, labels={"a": "muon", "b": "adamw"}), layout
        )

    over = made()
    state = over.init(mine)
    for _ in range(3):
        over = made() if here.rank == 1 else over
        grads = {name: leaf.clone() for name, leaf in mine.items()}
        updates, state = over.update(grads, state, mine, donate=here.rank == 1)
        found: list[Any] = [None] * here.size
        dist.all_gather_object(found, local(layout.gather(updates)), group=here.group)
        assert found[0] == found[1]
