"""Ranks agree on what they must agree on: or an error on all, or a warning, says what differs and between which."""

import warnings
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import polar, sharding
from muonfx.polar import policy
from muonfx.sharding import ShardingError
from tests.processes import Failed, Here, World
from tests.sharding.cases import bits, some
from tests.sharding.counting import counting

pytestmark = pytest.mark.dist


# ------------------------------------------------------------------------------------------------------ what ranks do


def machines_differ(here: Here, dtype: Any) -> torch.dtype:
    """Rank 0 has bf16 products and the others have none; the dtype in which all of them orthogonalize."""
    params = {"a": some(6, 5), "b": some(7, 4)}
    with mock.patch.object(policy, "cpu_has_bf16", return_value=here.rank == 0):
        layout = sharding.zero(params, here.group)
        over = sharding.sharded(mfx.chain(mfx.momentum(0.0, nesterov=False), mfx.orthogonalize(dtype=dtype)), layout)
        local = layout.shard(params)
        found = layout.gather(over.update(local, over.init(local), local)[0])
    return next(
        d
        for d in (torch.float32, torch.bfloat16)
        if same(found, {n: polar.orthogonalize(p, dtype=d) for n, p in params.items()})
    )


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(bits(found[name]) == bits(wanted[name]) for name in wanted)


# ------------------------------------------------------------------------------------------------------------ replicas


def laid_out(here: Here, kind: str, seeds: dict[str, int]) -> Any:
    """A layout and parameters, each drawn from a seed of its own on this rank."""
    shapes = {"a": (8, 6), "b": (5,), "c": (4, 4)}
    params: dict[str, Any] = {name: some(*shape, seed=seeds.get(name, 0)) for name, shape in shapes.items()}
    if kind == "replicated":
        return sharding.replicated(params, here.group), params
    if kind == "flat":
        layout = sharding.zero(params, here.group, partition="flat")
        return layout, layout.shard(params)
    on, placements = (here.grid, {"hsdp": [Replicate(), Shard(0)]}) if kind == "hsdp" else (here.mesh, {})
    rows = placements.get(kind, [Shard(0)])
    plain = kind == "plain beside DTensors"
    params["a"] = distribute_tensor(params["a"], on, rows, src_data_rank=None)
    if not plain:
        params["b"] = distribute_tensor(params["b"], on, [Replicate()] * on.ndim, src_data_rank=None)
    if kind == "hsdp":
        params["c"] = distribute_tensor(params["c"], on, [Shard(1), Replicate()], src_data_rank=None)
    return sharding.from_dtensors(params), params


def replicas_differ(here: Here, kind: str, name: str, on: int, how: str) -> list[str]:
    """What is said where one rank has made a parameter with another seed; then they are made equal."""
    layout, params = laid_out(here, kind, {name: 17} if here.rank == on else {})
    tx = mfx.chain(mfx.momentum(), mfx.masked(mfx.orthogonalize(dtype=torch.float32), mfx.select.ndim(min=2)))
    said: list[str] = []
    if how == "optimizer":
        weights = {key: nn.Parameter(leaf) for key, leaf in params.items()}
        given = layout if kind == "replicated" else None
        try:
            mfx.TransformOptimizer(weights, tx, layout=given)
        except sharding.ShardingError as error:
            said.append(str(error))
        sharding.broadcast(weights, layout, donate=True)
        mfx.TransformOptimizer(weights, tx, layout=given)
        params = {key: weight.detach() for key, weight in weights.items()}
    else:
        over = sharding.sharded(tx, layout)
        try:
            over.init(params)
        except sharding.ShardingError as error:
            said.append(str(error))
        before = [bits(leaf.to_local() if hasattr(leaf, "to_local") else leaf) for leaf in params.values()]
        made = sharding.broadcast(params, layout)
        assert [bits(leaf.to_local() if hasattr(leaf, "to_local") else leaf) for leaf in params.values()] == before
        params = made
        over.update(params, over.init(params), params)
    plain = {key: leaf.to_local() if hasattr(leaf, "to_local") else leaf for key, leaf in params.items()}
    for piece, holders in layout.holders(name).items():
        if here.rank in holders:
            wanted = piece.cut(some(*layout.specs[name].shape, seed=17 if holders[0] == on else 0))
            assert torch.equal(plain[name], wanted), "made equal to the first holder's"
    return said


def states_differ(here: Here, where: str) -> list[str]:
    """What is said where one rank goes on with another state, and where a good one takes its place again."""
    params = {"a": some(4, 4), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    tx = mfx.chain(mfx.scale_by_adam(), mfx.normalize_neurons(), mfx.monitor("seen"), mfx.scale(0.1))
    tx = mfx.masked(tx, {"a": True, "b": False})
    over = sharding.sharded(tx, layout, replicas="everyone")
    state = over.init(params)
    if where != "loaded at the start":
        _, state = over.update(params, state, params)
    good = mfx.tree.map(torch.clone, state)
    if here.rank == 1:
        bad = mfx.tree.map(torch.clone, state)
        if where == "a counter":
            bad["scale_by_adam"].count.add_(1)
        elif where == "a number":
            bad["monitor"].values["seen/norm"].add_(0.5)
        elif where == "at all owners":
            bad["normalize_neurons"].nu["a"].add_(1)
        else:
            bad["scale_by_adam"].mu["a"].add_(1)
        state = bad
    if where in ("at all owners", "taken back"):
        state = sharding.from_global(over, sharding.to_global(over, state))
    said: list[str] = []
    try:
        over.update(params, state, params)
    except sharding.ShardingError as error:
        said.append(str(error))
    over.update(params, good, params)
    return said


# --------------------------------------------------------------------------------------------- what else may differ


def by_closure(rate: float) -> mfx.Schedule:
    @mfx.schedule
    def falling() -> Any:
        return lambda count: rate / (1 + count)

    return falling()


def differing_functions(what: str, odd: bool) -> mfx.Transform:
    """A chain with a function of one code on all ranks, which returns something else on the odd rank."""

    def chosen(params: Any) -> Any:
        return {name: odd or name == "a" for name in params}

    if what == "a label function":
        parts = {"x": mfx.scale(1.0), "y": mfx.scale(2.0)}
        return mfx.partition(parts, lambda params: {name: "x" if one else "y" for name, one in chosen(params).items()})
    if what == "a mask function":
        return mfx.masked(mfx.momentum(), chosen)
    if what == "a mask of decay":
        return mfx.chain(mfx.momentum(), mfx.add_decayed_weights(0.1, chosen))
    if what == "a mask within another":
        return mfx.skip_nonfinite(mfx.masked(mfx.momentum(), chosen))
    if what == "a schedule":
        return mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(by_closure(0.2 if odd else 0.1)))
    assert what == "a schedule of decay"
    return mfx.add_decayed_weights(by_closure(0.2 if odd else 0.1))


def functions_differ(here: Here, what: str) -> None:
    """A step of a chain with a function that depends on the rank; it changes nothing."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    over, local = sharding.sharded(differing_functions(what, here.rank == here.size - 1), layout), layout.shard(params)
    state = over.init(local)
    before = [bits(leaf) for leaf in mfx.tree.tensors((state, local))]
    try:
        over.update(local, state, local)
    finally:
        assert [bits(leaf) for leaf in mfx.tree.tensors((state, local))] == before


def offloaded_on_one_rank(here: Here) -> None:
    """A state that one rank alone keeps in host memory."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    tx = mfx.momentum()
    sharding.sharded(sharding.offload(tx) if here.rank == 1 else tx, layout).init(layout.shard(params))


def stepped_in_another_order(here: Here, how: str) -> None:
    """Two optimizers, or sharded transforms, of one shape; one rank steps the second one first."""
    params = [{"a": some(4, 5), "b": some(3)} for _ in range(2)]
    layouts = [sharding.replicated(own, here.group) for own in params]
    order = (1, 0) if here.rank == 1 else (0, 1)
    if how == "functional":
        over = [sharding.sharded(mfx.momentum(), layout) for layout in layouts]
        states = [tx.init(own) for tx, own in zip(over, params, strict=True)]
        for place in order:
            over[place].update(params[place], states[place], params[place])
        return
    weights = [{name: nn.Parameter(leaf) for name, leaf in own.items()} for own in params]
    shared = layouts[0] if how == "one layout" else None
    optimizers = [
        mfx.TransformOptimizer(own, mfx.momentum(), layout=shared or layout)
        for own, layout in zip(weights, layouts, strict=True)
    ]
    for own in weights:
        for weight in own.values():
            weight.grad = torch.ones_like(weight)
    before = [bits(weight) for own in weights for weight in own.values()]
    try:
        for place in order:
            optimizers[place].step()
    finally:
        assert [bits(weight) for own in weights for weight in own.values()] == before


def different_calls(here: Here) -> None:
    """One rank gathers while the others take a step."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    over, local = sharding.sharded(mfx.momentum(), layout), layout.shard(params)
    state = over.init(local)
    if here.rank == 1:
        layout.gather(local)
    else:
        over.update(local, state, local)


def function_raises_on_one_rank(here: Here) -> None:
    """A schedule with an error of its own on one rank."""
    params = {"a": some(4, 5)}
    layout = sharding.zero(params, here.group, partition="flat")

    @mfx.schedule
    def falling() -> Any:  # step 2 is none of those that are checked when the transform is made
        return lambda count: 0.1 / (1 + count) if here.rank or int(count) != 2 else count / (1 // 0)

    over, local = sharding.sharded(mfx.scale_by_learning_rate(falling()), layout), layout.shard(params)
    state = over.init(local)
    for _ in range(3):
        _, state = over.update(local, state, local)


def at_bind(here: Here, what: str) -> None:
    """Make a transform on each rank, with something that differs on rank 1."""
    odd = here.rank == 1
    params: Any = {"a": some(4, 5), "b": some(3)}
    tx, settings = mfx.momentum(0.9), {}
    if what == "a version":
        with mock.patch.object(mfx, "__version__", "0.0.1" if odd else mfx.__version__):
            layout = sharding.zero(params, here.group)
            sharding.sharded(tx, layout).init(layout.shard(params))
        return
    if what == "a default dtype" and odd:
        torch.set_default_dtype(torch.float64)
    if what == "a precision" and odd:
        torch.set_float32_matmul_precision("medium")
    if what == "bucket_bytes":
        settings["bucket_bytes"] = 1000 + odd
    if what == "the order of names":
        params = OrderedDict(reversed(params.items())) if odd else OrderedDict(params)
    if what == "labels":
        labels = {"a": "x", "b": "x" if odd else "y"}
        tx = mfx.partition({"x": mfx.scale(1.0), "y": mfx.scale(2.0)}, labels)
    try:
        layout = sharding.replicated(params, here.group)
        sharding.sharded(tx, layout, **settings).init(params)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def warned_at_bind(here: Here, what: str) -> list[str]:
    """The warnings of a bind with something that differs on rank 1, but is no error."""
    odd = here.rank == 1
    params = {"a": some(4, 5)}
    layout = sharding.replicated(params, here.group)
    tx = mfx.momentum()
    version = "9.9" if odd and what == "torch" else torch.__version__
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(torch, "__version__", version):
        warnings.simplefilter("always")
        over = sharding.sharded(tx, layout)
        state = over.init(params)
        if what == "gradients":
            params_ = {"a": params["a"] + here.rank}
            over.update(params_, state, params)
    return [str(warning.message) for warning in caught if "muonfx" in warning.filename]


def in_a_step(here: Here, what: str) -> None:
    """A step with something that differs on rank 1; one without it before."""
    odd = here.rank == 1
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    tx: mfx.Transform = mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.1))
    extras: dict[str, Any] = {}
    if what == "an extra":
        tx = mfx.chain(tx, reads_value())
        extras = {"value": 1.0}
    if what == "a tensor":
        tx = mfx.chain(mfx.scale_by_adam(), mfx.scale(torch.tensor(-0.1)))
    over, local = sharding.sharded(tx, layout), layout.shard(params)
    _, state = over.update(local, over.init(local), local, **extras)
    before = [bits(leaf) for leaf in mfx.tree.tensors(state)]
    if odd and what == "a tensor":
        changed = mfx.with_hyperparams(tx, {"scale.factor": torch.tensor(-0.2)})
        over = mfx.tree.unflatten(mfx.tree.flatten(over)[1], mfx.tree.leaves(changed))
    if odd and what == "an extra":
        extras = {"value": 2.0}
    if odd and what == "a counter":
        state["scale_by_adam"].count.add_(5)
        before = [bits(leaf) for leaf in mfx.tree.tensors(state)]
    if odd and what == "a new chain":
        over = sharding.sharded(mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.3)), layout)
    try:
        over.update(local, state, local, **extras)
    finally:
        assert [bits(leaf) for leaf in mfx.tree.tensors(state)] == before


def a_chain_made_anew_on_one_rank(here: Here) -> bool:
    """The same chain, built again on one rank alone: not an error, and no rank waits for another."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    over, local = sharding.sharded(mfx.momentum(0.9), layout), layout.shard(params)
    _, state = over.update(local, over.init(local), local)
    again = sharding.sharded(mfx.momentum(0.9), layout) if here.rank == 1 else over
    again.update(local, state, local)
    return True


@mfx.transform(locality=mfx.Locality.ELEMENT)
def reads_value():
    """Multiplies by the extra ``value``."""

    def init(params: Any) -> mfx.core.EmptyState:
        return mfx.core.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, *, value: float = 1.0):
        return mfx.tree.map(lambda u: u * value, updates), state

    return init, update


def groups_swapped(here: Here) -> None:
    """A torch optimizer whose groups have the same rates, for other parameters on rank 1."""
    params = {"a": nn.Parameter(some(4, 5)), "b": nn.Parameter(some(3, 3))}
    first, second = ("b", "a") if here.rank == 1 else ("a", "b")
    groups = [
        {"params": [(first, params[first])], "lr": 0.1},
        {"params": [(second, params[second])], "lr": 0.2},
    ]
    optimizer = mfx.TransformOptimizer(
        groups, mfx.scale_by_learning_rate(0.1), layout=sharding.replicated(params, here.group)
    )
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()


def bytes_of_bind(here: Here, count: int) -> tuple[int, int]:
    """What a rank sends to bind a chain over so many parameters, and in how many calls; no objects may be sent."""
    params = {f"blocks.{place}.weight": torch.zeros(2, 2) for place in range(count)}
    layout = sharding.replicated(params, here.group)
    with counting(here) as counted:
        sharding.sharded(mfx.momentum(), layout).init(params)
    return sum(counted.sent.values()), sum(counted.calls.values())


def donating_on_one_rank(here: Here) -> list[Any]:
    """Three steps in which one rank gives its state and gradients away and the others do not."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    over, local = sharding.sharded(mfx.muon_with_adamw(0.1, labels={"a": "muon", "b": "adamw"}), layout), {}
    local = layout.shard(params)
    state, found = over.init(local), []
    for _ in range(3):
        grads = {name: leaf.clone() for name, leaf in local.items()}
        updates, state = over.update(grads, state, local, donate=here.rank == 1)
        found.append({name: bits(leaf) for name, leaf in layout.gather(updates).items()})
    return found


def loaded_on_one_rank(here: Here, everywhere: bool) -> None:
    """A step after a load of a state without counters, of which each rank has a piece of its own."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.zero(params, here.group, partition="flat")
    over, local = sharding.sharded(mfx.momentum(), layout), layout.shard(params)
    _, state = over.update(local, over.init(local), local)
    if everywhere or here.rank == 0:
        state = sharding.from_global(over, sharding.to_global(over, state))
    _, state = over.update(local, state, local)
    over.update(local, state, local)


def different_layouts_without_init(here: Here) -> None:
    """A first update, with a parameter more on one rank."""
    params = {"a": some(4, 5), "b": some(3)} | ({"c": some(2)} if here.rank == 1 else {})
    layout = sharding.zero(params, here.group, partition="flat")
    local = layout.shard(params)
    sharding.sharded(mfx.scale(2.0), layout).update(local, mfx.core.EmptyState(), local)


# ------------------------------------------------------------------------------------------------------------- errors


def errors(found: list[Any]) -> list[str]:
    """The same error on all ranks."""
    assert all(isinstance(result, Failed) for result in found), found
    assert all(isinstance(result.error, ShardingError) for result in found), [result.trace for result in found]
    return [str(result.error) for result in found]


# ---------------------------------------------------------------------------------------------------------- "auto"


def test_machines_on_which_auto_differs_are_an_error_and_a_dtype_is_none(world: World):
    for said in errors(world.run(2, machines_differ, dtype="auto")):
        assert "'orthogonalize' is bfloat16 on rank 0 and float32 on rank 1" in said
        assert "dtype=torch.float32" in said
    for dtype in (torch.float32, torch.bfloat16):
        assert world.check(2, machines_differ, dtype=dtype) == [dtype] * 2


# -------------------------------------------------------------------------------------------------------- replicas

KINDS = {"replicated": ("a", 3), "hsdp": ("a", 4), "replicate": ("b", 2), "plain beside DTensors": ("b", 3)}


@pytest.mark.parametrize("how", ["functional", "optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_differ_at_the_start_are_an_error_and_broadcast_mends_it(world: World, kind: str, how: str):
    name, size = KINDS[kind]
    for said in world.check(size, replicas_differ, kind=kind, name=name, on=size - 1, how=how):
        assert len(said) == 1
        assert f"'{name}'" in said[0]
        assert f"rank {size - 1}" in said[0]
        assert "broadcast(params, layout)" in said[0]


def test_the_copy_that_is_odd_may_be_the_first(world: World):
    for (said,) in world.check(3, replicas_differ, kind="replicated", name="b", on=0, how="functional"):
        assert "'b' has other values on ranks 1, 2 than on rank 0" in said


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("loaded at the start", "mu.a"),
        ("taken back", "mu.a"),
        ("at all owners", "nu.a"),
        ("a counter", "count"),
        ("a number", "seen/norm"),
    ],
)
def test_states_that_differ_between_ranks_are_an_error_and_change_nothing(world: World, where: str, said: str):
    for found in world.check(2, states_differ, where=where):
        assert len(found) == 1
        assert said in found[0]
        assert "rank 1" in found[0]


# ----------------------------------------------------------------------------------------------- chains and settings


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a version", f"'muonfx' is {mfx.__version__} on rank 0 and 0.0.1 on rank 1"),
        ("a default dtype", "'default dtype' is torch.float32 on rank 0 and torch.float64 on rank 1"),
        ("a precision", "'float32 matmul precision' is highest on rank 0 and medium on rank 1"),
        ("bucket_bytes", "bucket_bytes=1001"),
        ("the order of names", "different"),
        ("labels", "'b' is partition, y on rank 0 and partition, x on rank 1"),
    ],
)
def test_what_differs_when_a_chain_is_bound_is_an_error_on_all(world: World, what: str, said: str):
    for error in errors(world.run(3, at_bind, what=what)):
        assert said in error


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("torch", "rank 1: torch 9.9"),
        ("gradients", "were gradients reduced over the ranks?"),
    ],
)
def test_what_may_differ_is_a_warning_on_all(world: World, what: str, said: str):
    for heard in world.check(2, warned_at_bind, what=what):
        assert len(heard) == 1
        assert said in heard[0]
    assert world.check(2, warned_at_bind, what="nothing") == [[], []]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a tensor", "'scale.factor' is -0.1"),
        ("an extra", "'value' is 1.0 on rank 0 and 2.0 on rank 1"),
        ("a counter", "'scale_by_adam.count' is 1 of torch.int64 on rank 0 and 6 of torch.int64 on rank 1"),
        ("a new chain", "'scale.factor' is -0.1 on rank 0 and -0.3 on rank 1"),
    ],
)
def test_what_differs_in_a_step_is_an_error_on_all_and_changes_nothing(world: World, what: str, said: str):
    for error in errors(world.run(2, in_a_step, what=what)):
        assert said in error


def test_a_chain_that_one_rank_alone_has_made_anew_is_compared_by_all(world: World):
    assert world.check(3, a_chain_made_anew_on_one_rank) == [True] * 3


def test_groups_that_hold_other_parameters_on_another_rank_are_an_error(world: World):
    for error in errors(world.run(2, groups_swapped)):
        assert "different" in error


def test_a_bind_sends_the_same_few_bytes_however_many_the_parameters(world: World):
    (few, more) = (world.check(4, bytes_of_bind, count=count) for count in (2, 200))
    assert few == more
    for sent, calls in more:
        assert sent <= 256
        assert calls <= 2


def test_a_first_update_without_init_compares_what_init_would(world: World):
    for error in errors(world.run(2, different_layouts_without_init)):
        assert "different parameters: 'c' is missing on rank 0" in error


def test_donation_may_differ_between_ranks(world: World):
    found = world.check(2, donating_on_one_rank)
    assert found[0] == found[1]


def test_a_state_that_some_ranks_have_loaded_and_others_not_is_an_error_on_all(world: World):
    for error in errors(world.run(3, loaded_on_one_rank, everywhere=False)):
        assert "load on all ranks, or on none" in error
    world.check(3, loaded_on_one_rank, everywhere=True)


# ------------------------------------------------------------------------------------ what used to hang or go unnoticed

SIZES = pytest.mark.parametrize("size", [2, 3])


@SIZES
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a label function", "'b' is partition, y on rank 0 and partition, x on rank"),
        ("a mask function", "different transforms of a parameter: 'b'"),
        ("a mask of decay", "different chains"),
        ("a mask within another", "different transforms of a parameter: 'b'"),
        ("a schedule", "scale_by_learning_rate.learning_rate' is 0.1 on rank 0 and 0.2 on rank"),
        ("a schedule of decay", "add_decayed_weights.weight_decay' is 0.1 on rank 0 and 0.2 on rank"),
    ],
)
def test_functions_with_different_results_are_an_error_on_all(world: World, what: str, said: str, size: int):
    for error in errors(world.run(size, functions_differ, what=what)):
        assert said in error


@SIZES
def test_a_function_that_raises_on_one_rank_is_an_error_on_all(world: World, size: int):
    found = world.run(size, function_raises_on_one_rank)
    assert all(isinstance(result, Failed) for result in found), found
    assert all("ZeroDivisionError" in result.trace for result in found)


@SIZES
def test_a_state_offloaded_on_one_rank_only_is_an_error_on_all(world: World, size: int):
    for error in errors(world.run(size, offloaded_on_one_rank)):
        assert "different stores of the state" in error


@SIZES
@pytest.mark.parametrize("how", ["functional", "optimizers", "one layout"])
def test_two_of_one_shape_stepped_in_another_order_are_an_error_on_all(world: World, how: str, size: int):
    for error in errors(world.run(size, stepped_in_another_order, how=how)):
        assert "all ranks must step them in the same order" in error


@SIZES
def test_different_calls_at_one_time_are_an_error_on_all(world: World, size: int):
    for error in errors(world.run(size, different_calls)):
        assert "different calls: rank 0 has a step" in error
        assert "rank 1: gathering leaves" in error
