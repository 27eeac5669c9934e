"""Faults between ranks, None or NaN on some, and named cases that were once wrong."""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint.save import start, wait_for_save
from muonfx.polar.many import Orthogonalizer
from muonfx.sharding import ShardingError
from muonfx.testing.transforms import halve
from tests.checkpoint.common import bits
from tests.processes import Failed, Here, ProcessEnded, World, on_ranks
from tests.sharding.cases import (
    Flat,
    LayoutCase,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    flat,
    laid_out,
    model,
    some,
    two_groups,
)
from tests.sharding.test_law import plain

pytestmark = pytest.mark.dist


SMALL = model(steps=3, a=(6, 5), b=(7, 4), c=(3, 9), d=Leaf((5,)))
TX = two_groups(SMALL.labels)


def killed_in_mid_step(
    here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, on: int
) -> None:
    """A step in which one rank ends while matrices are computed."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    sharded = sharding.sharded(tx, layout)
    state = sharded.init(layout.shard(params))
    if here.rank == on:
        Orthogonalizer.__call__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    for step in range(model.steps):
        _, state = sharded.update(layout.shard(model.grads(step)), state, layout.shard(params))


def troubled(model: Model, step: int, rank: int) -> dict[str, Any]:
    """Gradients of one rank, of which some are None and, seldom, one has a NaN."""
    draw = torch.Generator().manual_seed(step * 101 + rank)
    grads: dict[str, Any] = {
        name: torch.randn(leaf.shape, generator=draw).to(leaf.dtype)
        for name, leaf in model.leaves.items()
    }
    chance = torch.rand(2 * len(grads), generator=draw).tolist()
    for place, (name, leaf) in enumerate(model.leaves.items()):
        if chance[2 * place] < 0.2:
            grads[name] = None
        elif chance[2 * place + 1] < 0.02 and leaf.numel:
            grads[name].view(-1)[step % leaf.numel] = float("nan")
    return grads


@pytest.mark.slow
def test_a_rank_that_is_killed_in_mid_step_makes_the_others_fail_in_time():
    own = World(3)
    try:
        found = own.run(3, killed_in_mid_step, model=SMALL, tx=TX, case=Zero(1, "flat"), on=1)
    finally:
        own.close()
    assert all(isinstance(result, Failed) for result in found), found
    assert isinstance(found[1].error, ProcessEnded)
    for survivor in (found[0], found[2]):
        assert isinstance(survivor.error, ShardingError), survivor.trace
        assert "another rank has ended" in str(survivor.error)


ABCD = Placed(dict.fromkeys("abcd", ("0",)))
SOAKS = [Zero(2, "flat"), Zero(1, "whole"), Replicated(), ABCD, Flat(tuple("dacb"), (0, 3, 20, 30))]


@pytest.mark.parametrize(
    "steps", [40, pytest.param(1000, marks=[pytest.mark.deep, pytest.mark.slow])]
)
@pytest.mark.parametrize("case", SOAKS, ids=["flat", "whole", "ddp", "rows", "cuts"])
@on_ranks(3)
def test_a_soak_with_none_and_nan_here_and_there(here: Here, case: LayoutCase, steps: int):
    """The parameters of one process that has the mean of the same gradients, and as many skipped steps."""
    drawn = Model(
        {
            "a": Leaf((4, 3), "muon"),
            "b": Leaf((5, 2), "muon"),
            "c": Leaf((3,)),
            "d": Leaf((2, 2), "muon"),
        },
        3,
    )
    params, tx = drawn.params(), mfx.skip_nonfinite(two_groups(drawn.labels))
    layout = laid_out(case, params, here, tx)
    local, sharded = layout.shard(params), sharding.sharded(tx, layout)
    state, wanted = sharded.init(local), tx.init(params)
    for step in range(steps):
        each = [troubled(drawn, step, rank) for rank in range(here.size)]
        reduced = layout.reduce_scatter(each[here.rank])
        pieces = {name: None if leaf is None else plain(leaf) for name, leaf in reduced.items()}
        updates, state = sharded.update(pieces, state, local)
        local = mfx.apply_updates(local, updates)
        grads: dict[str, Any] = {}
        for name in params:
            there = [own[name] for own in each if own[name] is not None]
            grads[name] = sum(there) / here.size if there else None
        updates, wanted = tx.update(grads, wanted, params)
        params = mfx.apply_updates(params, updates)
    assert int(state.skipped) == int(wanted.skipped)
    assert 0 < int(state.skipped) < steps
    assert {name: bits(leaf) for name, leaf in layout.gather(local).items()} == {
        n: bits(p) for n, p in params.items()
    }


@pytest.mark.parametrize("trouble", ["none", "nan"])
@on_ranks(3)
def test_replicas_stay_the_same_whatever_one_of_them_has(here: Here, trouble: str):
    params = {"a": some(4, 4), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    tx = sharding.sharded(mfx.skip_nonfinite(mfx.momentum(0.9)), layout)
    grads: dict[str, Any] = {"a": torch.ones(4, 4), "b": torch.ones(3)}
    if here.rank == 1:
        grads["a"] = None if trouble == "none" else torch.full((4, 4), float("nan"))
    updates, state = tx.update(grads, tx.init(params), params)
    held = [bits(leaf) for leaf in mfx.tree.tensors((updates, state))]
    found: list[Any] = [None] * here.size
    dist.all_gather_object(found, held, group=here.group)
    assert found == [held] * here.size
    assert int(state.skipped) == (trouble == "nan")
    assert trouble == "nan" or bool((updates["a"] != 0).all())


@on_ranks(4)
def test_parameters_whose_placements_have_changed_are_an_error(here: Here):
    params = {
        "a": distribute_tensor(some(4, 4), here.grid, [Replicate(), Shard(0)], src_data_rank=None)
    }
    layout = sharding.from_dtensors(params)
    tx = sharding.sharded(mfx.add_decayed_weights(0.1), layout)
    state = tx.init(params)
    other = {"a": params["a"].redistribute(placements=[Shard(0), Replicate()])}
    with pytest.raises(ShardingError, match=r"has the placements .* expected"):
        tx.update(other, state, other)


@on_ranks(2)
def test_a_dtensor_with_a_local_tensor_of_another_shape_is_an_error(here: Here):
    params = {"a": distribute_tensor(some(4, 4), here.mesh, [Shard(0)], src_data_rank=None)}
    layout = sharding.from_dtensors(params, here.group)
    tx = sharding.sharded(mfx.momentum(), layout)
    state = tx.init(params)
    longer = DTensor.from_local(
        some(3, 4), here.mesh, [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1)
    )
    calls: list[Callable[[], Any]] = [
        lambda: layout.gather({"a": longer}),
        lambda: tx.init({"a": longer}),
        lambda: tx.update({"a": longer}, state, params),
        lambda: tx.update(params, state, {"a": longer}),
    ]
    for call in calls:
        with pytest.raises(
            ShardingError, match=r"'a' has shape \(3, 4\), expected \(2, 4\) under the layout"
        ):
            call()


@pytest.mark.parametrize("placement", [Replicate(), Partial("sum")])
@on_ranks(2)
def test_a_dtensor_as_the_gradient_of_a_plain_parameter_counts_as_a_whole(
    here: Here, placement: Replicate | Partial
):
    params = {
        "a": distribute_tensor(some(4, 4), here.mesh, [Shard(0)], src_data_rank=None),
        "norm": some(4),
    }
    layout = sharding.from_dtensors(params, here.group)
    tx = sharding.sharded(mfx.momentum(), layout)
    whole = some(4, seed=1)
    part = whole
    if placement.is_partial():
        part = whole * 0.25 if here.rank == 0 else whole * 0.75
    gradient = DTensor.from_local(part, here.mesh, [placement], run_check=False)
    updates, _ = tx.update({**params, "norm": gradient}, tx.init(params), params)
    expected, _ = tx.update({**params, "norm": whole}, tx.init(params), params)
    assert torch.allclose(plain(updates["norm"]), plain(expected["norm"]))
    assert not isinstance(updates["norm"], DTensor)


@on_ranks(2)
def test_a_dtensor_where_ranks_hold_parts_of_a_plain_parameter_is_an_error(here: Here):
    params = {"a": some(4, 4)}
    layout = sharding.zero(params, here.group, partition="flat")
    tx = sharding.sharded(mfx.momentum(), layout)
    local = layout.shard(params)
    gradient = distribute_tensor(some(4, 4), here.mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(
        ShardingError, match=r"'a' has the placements .* expected a plain tensor .* from_dtensors"
    ):
        tx.update({"a": gradient}, tx.init(local), local)


def fail() -> None:
    raise ValueError("no room")


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("what", ["gradients", "a pattern", "gathering", "a failed save"])
@on_ranks(3)
def test_a_warning_that_is_an_error_on_one_rank_is_one_on_all(
    here: Here, tmp_path: Path, what: str, on: int
):
    """Afterwards every verb works under strict warnings: neither ours nor torch's is one."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    local, tx = layout.shard(params), mfx.momentum()
    if what == "a pattern":
        view = mfx.MatrixView({"*.qvk": "(part=3 out) in -> part out in"})
        tx = mfx.masked(mfx.orthogonalize(view=view), {"a": True, "b": False})
    if what == "gathering":
        tx = mfx.stateless(halve)  # of the whole tree
    grads = (
        {name: leaf + here.rank for name, leaf in local.items()} if what == "gradients" else local
    )

    def warns() -> None:
        if what == "a failed save":
            saving = start(tmp_path, fail)
            wait_for_save()
            assert saving.done
            mfx.checkpoint.save(tmp_path / "new", params, group=here.group)
        over = sharding.sharded(tx, layout)
        over.update(grads, over.init(local), local)

    with warnings.catch_warnings():
        warnings.simplefilter("error" if here.rank == on else "ignore")
        kinds = (UserWarning if here.rank == on else ShardingError, mfx.checkpoint.CheckpointError)
        with pytest.raises(kinds, match=None if here.rank == on else f"rank {on}: "):
            warns()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if here.rank == 0 else "ignore")
        over = sharding.sharded(mfx.scale_by_adam(), layout)
        state = over.init(local)
        for _ in range(2):
            _, state = over.update(layout.reduce_scatter(params), state, local)
        sharding.broadcast(layout.shard(layout.gather(local)), layout)


@on_ranks(2)
def test_an_error_of_one_rank_is_sent_once_if_the_others_warn_together(here: Here):
    layout, local = flat(here, {"a": some(4, 5), "b": some(3)})
    if here.rank == 1:
        local["a"] = torch.ones(99)
    with pytest.raises(ShardingError, match=r"'a' has shape \(99,\)"):
        # `halve` takes the whole tree, so rank 0 warns in `init` while rank 1 sends its error.
        sharding.sharded(mfx.stateless(halve), layout).init(local)
    ranks = torch.ones(())  # an error that was sent twice would arrive in this all-reduce
    dist.all_reduce(ranks, group=here.group)
    assert ranks.item() == 2


def placed(here: Here, tensor: Tensor, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, here.mesh, list(placements), src_data_rank=None)


class PerParameter(NamedTuple):
    number: Tensor
    average: Tensor


@mfx.transform(locality=mfx.Locality.MATRIX)
def recorded_by_parameter():
    """Keeps a record for each parameter, not a tree for each field."""

    def init(params: Any) -> Any:
        return mfx.tree.map(lambda p: PerParameter(torch.zeros(()), torch.zeros_like(p)), params)

    def update(updates: Any, state: Any, params: Any = None):
        out: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for name, u in updates.items():
            if u is None:
                out[name], after[name] = None, state[name]
                continue
            average = state[name].average * 0.9 + u
            out[name], after[name] = (
                average @ average.mT @ average,
                PerParameter(state[name].number + 1, average),
            )
        return out, after

    return init, update


def check_three_updates(
    here: Here, tx: mfx.Transform, params: dict[str, Tensor], bucket_bytes: int, off: float
) -> None:
    """They are near those of one process; the states are taken to the global view and back too."""
    layout, local = flat(here, params)
    own, wanted = sharding.sharded(tx, layout, bucket_bytes=bucket_bytes), tx.init(params)
    state = own.init(local)
    for step in range(3):
        grads = {name: some(*p.shape, seed=7 + step) for name, p in params.items()}
        out, state = own.update(layout.shard(grads), state, local)
        state = sharding.from_global(own, sharding.to_global(own, state))
        expected, wanted = tx.update(grads, wanted, params)
        torch.testing.assert_close(layout.gather(out), expected, rtol=0, atol=off)


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
@on_ranks(2)
def test_a_record_for_each_parameter_survives_several_buckets(here: Here, bucket_bytes: int):
    params = {"a": some(4, 4), "b": some(5, 5), "c": some(3, 3)}
    check_three_updates(here, recorded_by_parameter(), params, bucket_bytes, off=1e-4)


@on_ranks(2)
def test_a_parameter_may_be_called_as_a_field_of_a_state_is(here: Here):
    params = {"count": some(4, 4), "z": some(4, 4), "y": some(4, 4)}
    check_three_updates(here, mfx.cautious(mfx.scale_by_adam()), params, 100, off=1e-5)
    check_three_updates(here, mfx.scale_by_adam(), {"count": some(), "w": some(4)}, 100, off=1e-5)


@on_ranks(2)
def test_a_state_begins_with_the_numbers_of_its_own_transform(here: Here):
    layout, local = flat(here, {"a": some(4, 4)})
    for b1 in (0.9, 0.5):
        tx = mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1, b1)
        assert float(sharding.sharded(tx, layout).init(local).b1) == b1


@on_ranks(2)
def test_two_transforms_over_one_layout_do_not_share_global_shapes(here: Here):
    layout, local = flat(here, {"a": some(4, 4), "b": some(5)})
    first, second = (
        sharding.sharded(mfx.momentum(0.9), layout),
        sharding.sharded(mfx.scale_by_adam(), layout),
    )
    state = first.init({"a": local["a"]})
    second.init({"b": local["b"]})
    assert sharding.to_global(first, state).trace["a"].shape == (4, 4)


@on_ranks(2)
def test_a_gradient_that_is_none_on_some_ranks_counts_as_zeros_of_its_own_dtype(here: Here):
    layout, _ = flat(here, {"a": torch.ones(2, 2), "b": torch.ones(2)})
    grads: dict[str, Any] = {
        "a": torch.ones(2, 2).bfloat16(),
        "b": torch.full((2,), 3.0).bfloat16(),
    }
    found = layout.gather(layout.reduce_scatter(grads | ({"b": None} if here.rank == 0 else {})))
    assert found["b"].dtype == torch.bfloat16
    assert (found["a"].tolist(), found["b"].tolist()) == ([[1.0, 1.0], [1.0, 1.0]], [1.5, 1.5])


@on_ranks(2)
def test_nothing_to_reduce_is_reduced_to_nothing(here: Here):
    params = {"a": some(2, 2), "e": torch.zeros(0, 3)}
    zeros = [sharding.zero(params, here.group, partition=kind) for kind in ("whole", "flat")]
    for layout in (sharding.replicated(params, here.group), *zeros):
        assert layout.reduce_scatter({"a": None, "e": None}) == {"a": None, "e": None}
        assert layout.reduce_scatter({"a": None, "e": torch.zeros(0, 3)})["e"].numel() == 0


@on_ranks(2)
def test_a_gradient_flows_through_all_gather_to_a_dtensor(here: Here):
    placements = {"a": placed(here, some(4, 4), Shard(0))}
    leaf = torch.nn.Parameter(placements["a"])
    whole = sharding.from_dtensors(placements).all_gather({"a": leaf})["a"]
    (whole * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.full_tensor(), torch.arange(16.0).reshape(4, 4))


@on_ranks(2)
def test_gradients_that_pass_through_a_run_are_not_overwritten(here: Here):
    params = {"a": some(8, 8)}
    tx = mfx.chain(mfx.scale(-0.1), mfx.ema_params(dtype=mfx.int8()))
    for make in (sharding.replicated, sharding.zero):
        layout = make(params, here.group)
        own, local, grads = (
            sharding.sharded(tx, layout, replicas="everyone"),
            layout.shard(params),
            layout.shard(params),
        )
        before = bits(grads["a"])
        own.update(grads, own.init(local), local, donate=mfx.Donation(updates=False, state=True))
        assert bits(grads["a"]) == before


@on_ranks(2)
def test_a_state_of_dtensors_shares_nothing_with_the_one_before(here: Here):
    params = {"a": placed(here, some(4, 4), Shard(0)), "b": placed(here, some(4, 4), Shard(0))}
    tx = sharding.sharded(mfx.momentum(0.9), sharding.from_dtensors(params))
    _, first = tx.update(params, tx.init(params), params)
    _, second = tx.update({"a": params["a"], "b": None}, first, params)
    before = bits(first.trace["b"].to_local())
    tx.update(params, second, params, donate=True)
    assert bits(first.trace["b"].to_local()) == before


@on_ranks(2)
def test_dtensors_that_one_rank_lacks_are_an_error_of_all_in_a_first_step_without_init(here: Here):
    params = {"a": placed(here, some(4, 4), Shard(0)), "b": placed(here, some(4, 4), Shard(0))}
    layout = sharding.from_dtensors(params)
    state = sharding.sharded(mfx.momentum(0.9), layout).init(params)
    if here.rank == 1:
        params = {"a": params["a"], "c": params["b"]}
    with pytest.raises(ShardingError, match=r"'b'|'c'"):
        # Another structure, not only another rate: an equal one would continue the steps of the first transform.
        sharding.sharded(mfx.momentum(0.9, nesterov=False), layout).update(params, state, params)
    ranks = torch.ones(())  # an error that was sent twice would arrive in this all-reduce
    dist.all_reduce(ranks, group=here.group)
    assert ranks.item() == 2


@on_ranks(2)
def test_expanded_gradients_may_be_donated(here: Here):
    params = {"a": some(4, 4)}
    tx = mfx.momentum(0.9)
    own = sharding.sharded(tx, sharding.replicated(params, here.group))
    found, _ = own.update({"a": torch.ones(()).expand(4, 4)}, own.init(params), params, donate=True)
    assert torch.equal(found["a"], tx.update({"a": torch.ones(4, 4)}, tx.init(params))[0]["a"])


@mfx.transform(locality=mfx.Locality.LEAF)
def transposes():
    """Return the transpose, which is a view of the update where that was donated."""

    def init(params):
        return {}

    def update(updates, state, params=None, *, donate=mfx.core.donation.NOTHING):
        return mfx.tree.map(lambda u: u.mT if donate.updates else u.mT.clone(), updates), state

    return init, update


@on_ranks(2)
def test_a_result_may_be_a_view_of_a_donated_update_in_another_order(here: Here):
    params = {str(number): some(3, 3) for number in range(4)}
    own = sharding.sharded(transposes(), sharding.replicated(params, here.group), replicas="split")
    grads = {name: param.clone() for name, param in params.items()}
    found, _ = own.update(grads, own.init(params), params, donate=True)
    for name, param in params.items():
        assert torch.equal(found[name], param.mT)
