"""The law, as ranks check it: the sharded transform gives what the transform gives, and so does its state."""

import hashlib
from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import FlatPiece
from tests.processes import Here
from tests.sharding.cases import Case, bits, laid_out

T = TypeVar("T")
# Of what is not exact, relative to the largest element.
TOLERANCES = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_cases(here: Here, cases: list[Case], dtensors: bool = False) -> list[str]:
    """Check each case; return the digests of this rank's results, to be compared between ranks."""
    return [noted(check_case, here, case, dtensors) for case in cases]


def noted(check: Callable[..., T], here: Here, case: Case, *settings: Any) -> T:
    """Check a case; an error names the case."""
    try:
        return check(here, case, *settings)
    except BaseException as error:
        error.add_note(f"in {case!r}")
        raise


def check_case(here: Here, case: Case, dtensors: bool = False) -> str:
    params = case.model.params()
    layout = laid_out(case.layout, params, here, case.tx)
    tx = sharding.sharded(case.tx, layout)
    assert mfx.hyperparams(tx) == mfx.hyperparams(case.tx)
    digest = hashlib.sha256()

    def enter(whole: Any) -> Any:
        local = layout.shard(whole)
        return as_dtensors(local, layout, here, case, params) if dtensors else local

    state, wanted_state = tx.init(enter(params)), case.tx.init(params)
    for step in range(case.model.steps):
        grads = case.model.grads(step)
        local, weights = enter(grads), enter(params)
        before = [bits(plain(leaf)) for leaf in mfx.tree.tensors((local, weights))]
        updates, state = tx.update(local, state, weights, donate=case.donate)
        wanted, wanted_state = case.tx.update(grads, wanted_state, params)
        if not case.donate:
            assert [bits(plain(leaf)) for leaf in mfx.tree.tensors((local, weights))] == before, "inputs changed"
        for name, like in wanted.items():
            assert (updates[name] is None) == (like is None), name
            if like is not None:
                assert isinstance(updates[name], DTensor) == isinstance(weights[name], DTensor), name
                assert tuple(plain(updates[name]).shape) == tuple(layout.piece(name).shape), name
                assert updates[name].dtype == like.dtype, name
        gathered = layout.gather({name: None if leaf is None else plain(leaf) for name, leaf in updates.items()})
        for name, leaf in gathered.items():
            if leaf is not None:
                assert_equal(leaf, wanted[name], case.exact, f"step {step}, update of {name!r}")
                digest.update(bits(leaf)[2])
        params = mfx.apply_updates(params, wanted)
    assert_same_state(here, tx, state, wanted_state, case.exact, digest)
    return digest.hexdigest()


def as_dtensors(local: Any, layout: Any, here: Here, case: Case, params: Any) -> Any:
    """The local tensors of a tree as DTensors, where its parameters are."""
    likes = case.layout.dtensors(params, here)

    def at(name: str, leaf: Tensor | None) -> Any:
        like = likes[name]
        if leaf is None or not isinstance(like, DTensor):
            return leaf
        return DTensor.from_local(
            leaf, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    return {name: at(name, leaf) for name, leaf in local.items()}


def plain(leaf: Tensor) -> Tensor:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def assert_equal(found: Tensor, wanted: Tensor, exact: bool, what: str) -> None:
    assert found.dtype == wanted.dtype, what
    assert found.shape == wanted.shape, what
    if bits(found) == bits(wanted):
        return
    a, b = found.double(), wanted.double()
    scale = max(1.0, float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())) if b.numel() else 1.0
    off = float((a - b).abs().max()) / scale if b.numel() else 0.0
    assert not exact, f"{what}: {off:.3g} off, expected the same bits; {found.flatten()[:6]}, {wanted.flatten()[:6]}"
    tolerance = TOLERANCES.get(wanted.dtype, 0.0)
    torch.testing.assert_close(
        a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{what}: {off:.3g} off\n{m}"
    )


# --------------------------------------------------------------------------------------------------------------- states


def whole_state(here: Here, tx: Any, state: Any) -> list[Any]:
    """The leaves of a sharded state, put together from what each rank holds of them."""
    logical = mfx.tree.leaves(sharding.to_global(tx, state))
    mine = [_told(leaf) for leaf in logical]
    told: list[Any] = [None] * here.size
    dist.all_gather_object(told, mine, group=here.group)
    return [_joined([theirs[place] for theirs in told]) for place in range(len(mine))]


def _told(leaf: Any) -> Any:
    if isinstance(leaf, FlatPiece):
        return "flat", tuple(leaf.shape), leaf.start, leaf.data.clone()
    if isinstance(leaf, DTensor):
        return "plain", leaf.full_tensor()
    return None if leaf is None else ("plain", leaf)


def _joined(told: list[Any]) -> Tensor | None:
    present = [said for said in told if said is not None]
    if not present:
        return None
    kinds = {said[0] for said in present}
    if any(not prod(said[1] if said[0] == "flat" else said[1].shape) for said in present):
        kinds = {"plain"}  # nothing in it: each rank may call it what it likes
        present = [said if said[0] == "plain" else ("plain", said[3].view(said[1])) for said in present]
    assert len(kinds) == 1, f"one leaf is described in several ways: {kinds}"
    if kinds == {"plain"}:
        assert len({bits(said[1]) for said in present}) == 1, "ranks hold different values of one leaf"
        return present[0][1]
    (shape,) = {said[1] for said in present}
    whole, counted = present[0][3].new_zeros(prod(shape)), torch.zeros(prod(shape), dtype=torch.int64)
    for _, _, start, data in present:
        whole[start : start + data.numel()] = data
        counted[start : start + data.numel()] += 1
    assert bool((counted == 1).all()), "elements of a leaf that no rank, or more than one, holds"
    return whole.view(shape)


def assert_same_state(here: Here, tx: Any, state: Any, wanted: Any, exact: bool, digest: Any) -> None:
    leaves, treedef = mfx.tree.flatten(wanted)
    assert mfx.tree.flatten(state)[1] == treedef, "the state has another structure"
    found = whole_state(here, tx, state)
    for name, leaf, like in zip(mfx.tree.names(wanted), found, leaves, strict=True):
        assert (leaf is None) == (like is None), f"state {name!r}"
        if leaf is not None:
            assert_equal(leaf, like, exact or not leaf.is_floating_point(), f"state {name!r}")
            digest.update(bits(leaf)[2])
    # there and back: what the transform goes on with
    again = sharding.from_global(tx, sharding.to_global(tx, state))
    assert mfx.tree.flatten(again)[1] == treedef
    for one, other in zip(map(held, mfx.tree.leaves(again)), map(held, mfx.tree.leaves(state)), strict=True):
        assert (one is None) == (other is None)
        if one is None:
            continue
        # Layouts of DTensors give DTensors. Their local tensors at an owner have the shape of the whole leaf, while a
        # plain state at an owner has the shape of the stack that it computes with.
        own = plain(one).view(other.shape) if isinstance(one, DTensor) and type(other) is Tensor else plain(one)
        assert bits(own) == bits(plain(other))


def held(leaf: Any) -> Any:
    """The leaf if this rank holds elements of it, else None.

    A rank without elements has None, an empty tensor, or a DTensor on a mesh of other ranks.
    """
    elsewhere = isinstance(leaf, DTensor) and leaf.device_mesh.get_coordinate() is None
    return None if leaf is None or elsewhere or not plain(leaf).numel() else leaf
