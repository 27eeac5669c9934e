"""The law of the sharding layer, on real processes: under every layout, what one process computes, and its state."""

import hashlib
from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import FlatShard
from muonfx.testing.transforms import halve, with_value
from tests import variants
from tests.checkpoint.common import bits
from tests.processes import Here, World
from tests.sharding.cases import (
    Case,
    Flat,
    FullyShardedTensorParallel,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    cases,
    grids,
    grouped_chains,
    is_exact,
    laid_out,
    model,
    models,
    muon,
    placed,
    two_groups,
)

pytestmark = pytest.mark.dist


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
            assert [bits(plain(leaf)) for leaf in mfx.tree.tensors((local, weights))] == before, (
                "inputs changed"
            )
        for name, like in wanted.items():
            assert (updates[name] is None) == (like is None), name
            if like is not None:
                assert isinstance(updates[name], DTensor) == isinstance(weights[name], DTensor), (
                    name
                )
                assert tuple(plain(updates[name]).shape) == tuple(layout.position(name).shape), name
                assert updates[name].dtype == like.dtype, name
        gathered = layout.gather(
            {name: None if leaf is None else plain(leaf) for name, leaf in updates.items()}
        )
        for name, leaf in gathered.items():
            if leaf is not None:
                assert_equal(leaf, wanted[name], case.exact, f"step {step}, update of {name!r}")
                digest.update(bits(leaf))
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
            leaf,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
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
    assert not exact, (
        f"{what}: {off:.3g} off, expected the same bits; {found.flatten()[:6]}, {wanted.flatten()[:6]}"
    )
    tolerance = TOLERANCES.get(wanted.dtype, 0.0)
    torch.testing.assert_close(
        a,
        b,
        rtol=0.0,
        atol=tolerance * scale,
        equal_nan=True,
        msg=lambda m: f"{what}: {off:.3g} off\n{m}",
    )


# --------------------------------------------------------------------------------------------------------------- states


def whole_state(here: Here, tx: Any, state: Any) -> list[Any]:
    """The leaves of a sharded state, joined from the shards of all ranks."""
    logical = mfx.tree.leaves(sharding.to_global(tx, state))
    mine = [_told(leaf) for leaf in logical]
    told: list[Any] = [None] * here.size
    dist.all_gather_object(told, mine, group=here.group)
    return [_joined([theirs[place] for theirs in told]) for place in range(len(mine))]


def _told(leaf: Any) -> Any:
    if isinstance(leaf, FlatShard):
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
        present = [
            said if said[0] == "plain" else ("plain", said[3].view(said[1])) for said in present
        ]
    assert len(kinds) == 1, f"one leaf is described in several ways: {kinds}"
    if kinds == {"plain"}:
        assert len({bits(said[1]) for said in present}) == 1, (
            "ranks hold different values of one leaf"
        )
        return present[0][1]
    (shape,) = {said[1] for said in present}
    whole, counted = (
        present[0][3].new_zeros(prod(shape)),
        torch.zeros(prod(shape), dtype=torch.int64),
    )
    for _, _, start, data in present:
        whole[start : start + data.numel()] = data
        counted[start : start + data.numel()] += 1
    assert bool((counted == 1).all()), "elements of a leaf that no rank, or more than one, holds"
    return whole.view(shape)


def assert_same_state(
    here: Here, tx: Any, state: Any, wanted: Any, exact: bool, digest: Any
) -> None:
    leaves, treedef = mfx.tree.flatten(wanted)
    assert mfx.tree.flatten(state)[1] == treedef, "the state has another structure"
    found = whole_state(here, tx, state)
    for name, leaf, like in zip(mfx.tree.names(wanted), found, leaves, strict=True):
        assert (leaf is None) == (like is None), f"state {name!r}"
        if leaf is not None:
            assert_equal(leaf, like, exact or not leaf.is_floating_point(), f"state {name!r}")
            digest.update(bits(leaf))
    # there and back: the input of the next transform
    again = sharding.from_global(tx, sharding.to_global(tx, state))
    assert mfx.tree.flatten(again)[1] == treedef
    for one, other in zip(
        map(held, mfx.tree.leaves(again)), map(held, mfx.tree.leaves(state)), strict=True
    ):
        assert (one is None) == (other is None)
        if one is None:
            continue
        # Layouts of DTensors give DTensors. Their local tensors at an owner have the shape of the whole leaf, while a
        # plain state at an owner has the shape of the stack that it computes with.
        own = (
            plain(one).view(other.shape)
            if isinstance(one, DTensor) and type(other) is Tensor
            else plain(one)
        )
        assert bits(own) == bits(plain(other))


def held(leaf: Any) -> Any:
    """The leaf if this rank holds elements of it, else None.

    A rank without elements has None, an empty tensor, or a DTensor on a mesh of other ranks.
    """
    elsewhere = isinstance(leaf, DTensor) and leaf.device_mesh.get_coordinate() is None
    return None if leaf is None or elsewhere or not plain(leaf).numel() else leaf


SIZES = st.sampled_from((2, 3, 4, 4, 1))


def check(world: World, size: int, cases: list[Case], **more: object) -> None:
    digests = world.check(size, check_cases, cases=cases, **more)
    assert digests == [digests[0]] * size  # identical on every rank


# Several cases a message: the processes are woken less often. The error names the case; to make it smaller would take
# many rounds of all processes, and new ones after each case in which ranks fail differently.
RUN = (Phase.explicit, Phase.reuse, Phase.generate)


@settings(max_examples=2 * settings.default.max_examples, phases=RUN)
@given(
    SIZES.flatmap(
        lambda size: st.tuples(st.just(size), st.lists(cases(size), min_size=1, max_size=6))
    )
)
def test_the_sharded_transform_is_the_transform(world: World, drawn: tuple[int, list[Case]]):
    size, some = drawn
    check(world, size, some)


@st.composite
def dtensor_cases(draw: st.DrawFn, size: int) -> Case:
    made = draw(models())
    tx = draw(grouped_chains(made))
    kinds = [placed(made, 1), *(grids(made) if size == 4 else [])]
    return Case(
        made,
        tx,
        draw(st.sampled_from(kinds).flatmap(lambda kind: kind)),
        is_exact(tx, made),
        draw(st.booleans()),
    )


@settings(phases=RUN)
@given(
    SIZES.flatmap(
        lambda size: st.tuples(st.just(size), st.lists(dtensor_cases(size), min_size=1, max_size=4))
    )
)
def test_dtensors_go_in_and_come_out(world: World, drawn: tuple[int, list[Case]]):
    size, some = drawn
    check(world, size, some, dtensors=True)


# ------------------------------------------------------------------------------------------------------- named examples

SMALL = model(
    steps=3,
    embed=Leaf((10, 6)),
    up=(12, 5),
    down=(5, 13),
    odd=(7, 3),
    conv=(4, 2, 3, 1),
    norm=(5,),
    scale=(),
    cold=Leaf((3, 4), "frozen"),
)
EXACT = two_groups(SMALL.labels)
RISING = mfx.linear_schedule(0.5, 0.9, 2)
ROWS = {name: ("0",) if leaf.shape else ("r",) for name, leaf in SMALL.leaves.items()}
GRID = {name: ("r", "0") if leaf.shape else ("r", "r") for name, leaf in SMALL.leaves.items()}
BOTH = {
    name: ("0", "1") if len(leaf.shape) == 2 else ("r", "r") for name, leaf in SMALL.leaves.items()
}
SAME = {name: ("0", "0") if leaf.shape else ("r", "r") for name, leaf in SMALL.leaves.items()}

LAYOUTS = {
    "ddp": Replicated(),
    "zero1": Zero(1, "whole"),
    "zero1 for this chain": Zero(1, "whole", knows_tx=True),
    "zero2": Zero(2, "whole"),
    "zero3": Zero(3, "flat"),
    "zero3, each by itself": Zero(3, "each"),
    "fsdp2": Placed(ROWS),
}
GRIDS = {
    "hsdp": Placed(GRID, grid=True),
    "fsdp and tp": Placed(BOTH, grid=True),
    "one dim twice": Placed(SAME, grid=True),
    "fully_shard over tp": FullyShardedTensorParallel(
        {"up": "0", "down": "1", "embed": "0"} | {"odd": "r"}
    ),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_people_train_with_is_bitwise_the_same(world: World, name: str, size: int):
    check(
        world,
        size,
        [Case(SMALL, EXACT, LAYOUTS[name], exact=True, donate=donate) for donate in (False, True)],
    )


@pytest.mark.parametrize("name", GRIDS)
def test_on_the_grid_too(world: World, name: str):
    check(world, 4, [Case(SMALL, EXACT, GRIDS[name], exact=True)])
    check(world, 4, [Case(SMALL, EXACT, GRIDS[name], exact=True)], dtensors=True)


@pytest.mark.parametrize(
    "tx",
    [
        mfx.skip_nonfinite(EXACT),
        mfx.accumulate(EXACT, 2),
        mfx.as_tensors(EXACT),
        mfx.chain(mfx.clip_by_global_norm(0.1), EXACT),
        mfx.chain(mfx.monitor("before"), EXACT, mfx.monitor("after", by_leaf=True)),
        mfx.masked(EXACT, mfx.routing.ndim(min=1)),
        mfx.chain(EXACT, mfx.ema_params(0.9)),
        mfx.master_params(EXACT),
        mfx.contrib.schedule_free(
            two_groups(SMALL.labels, mfx.orthogonalize(dtype=torch.float32), b1=0.0), 0.1
        ),
        mfx.chain(mfx.contrib.sam(0.5, adaptive=True), variants.prodigy(estim_lr0=0.1)),
        mfx.chain(EXACT, with_value(mfx.contrib.reduce_on_plateau(0.5, 1))),
        mfx.chain(EXACT, mfx.stateless(halve)),
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(RISING), muon(), mfx.normalize_neurons(RISING)),
                "adamw": mfx.cautious(
                    mfx.scale_by_adam(b1=RISING), min_share=mfx.constant_schedule(0.01)
                ),
                "frozen": mfx.clip_by_global_norm(RISING),
            },
            SMALL.labels,
        ),
        mfx.partition(
            {
                "muon": mfx.chain(
                    mfx.momentum(), mfx.normalize_neurons(), muon(), mfx.normalize_neurons()
                ),
                "adamw": mfx.cautious(mfx.scale_by_lion()),
                "frozen": mfx.set_to_zero(),
            },
            SMALL.labels,
        ),
    ],
    ids=lambda tx: tx.name,
)
def test_each_way_to_wrap_a_chain(world: World, tx: mfx.Transform):
    some = [
        Zero(1, "whole"),
        Zero(1, "flat"),
        Placed(ROWS),
        Replicated(),
        Flat(tuple(SMALL.leaves), (0, 0, 7, 280)),
    ]
    check(world, 3, [Case(SMALL, tx, layout, exact=False) for layout in some])


BY_MATRICES = {
    "normalize": mfx.chain(
        mfx.contrib.normalize_rows(), mfx.contrib.normalize_columns(), mfx.scale_by_shape("fan_in")
    ),
    "unit": mfx.contrib.normalize_matrices(),
    "polar": mfx.contrib.scale_by_dual_norm(muon()),
    "namo": mfx.contrib.scale_by_namo(mfx.chain(muon(), mfx.add_decayed_weights(0.1))),
    "dion": mfx.contrib.scale_by_dion(2),
    "dion2": mfx.contrib.scale_by_dion2(),
    "soap": mfx.chain(
        mfx.contrib.scale_by_soap(),
        mfx.orthogonalize(dtype=torch.float32),
        mfx.contrib.floor_by_weight_norms(),
        mfx.scale(-0.1),
        mfx.contrib.radial_brake(),
        mfx.contrib.ema_nesterov(0.9),
    ),
    "shampoo": mfx.contrib.scale_by_shampoo(),
    "kl": mfx.contrib.scale_by_soap(factors="kl"),
    "sum": mfx.add_updates(
        muon(), ("sgd", mfx.chain(mfx.add_decayed_weights(0.1), mfx.momentum(heavy_ball=True)))
    ),
    "sphere": mfx.chain(
        muon(), mfx.contrib.match_weight_norms(), mfx.scale(-0.1), mfx.contrib.keep_weight_norms()
    ),
    "rest": mfx.chain(
        mfx.contrib.normalize_leaves(), mfx.subtract_decayed_weights(0.1, cautious=True)
    ),
}
NAMED = {"embed": "dion", "up": "sum", "down": "sphere", "odd": "unit", "conv": "polar"}
NAMED |= {"norm": "rest", "scale": "rest"}
SOAPS = dict.fromkeys(("embed", "up", "down", "odd", "conv", "cold"), "soap")
KLS = dict.fromkeys(SOAPS, "kl") | {
    "embed": "dion2",
    "odd": "dion2",
    "up": "shampoo",
    "conv": "shampoo",
}
NAMED_TOO = NAMED | {"embed": "namo", "up": "dion", "conv": "normalize", "odd": "sphere"}


@pytest.mark.parametrize("size", [1, 3])
def test_each_transform_of_whole_matrices(world: World, size: int):
    named = (
        NAMED | {"cold": "namo"},
        NAMED_TOO | {"cold": "normalize", "down": "polar"},
        NAMED | SOAPS,
        NAMED | KLS,
    )
    for labels in named:
        tx = mfx.partition(
            {label: BY_MATRICES[label] for label in sorted(set(labels.values()))}, labels
        )
        layouts = [Zero(1, "flat"), Placed(ROWS), Zero(1, "whole")]
        check(world, size, [Case(SMALL, tx, layout, exact=False) for layout in layouts])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_depends_on_names_and_places_is_the_same_wherever_a_leaf_is_cut(
    world: World, size: int
):
    tx = mfx.chain(
        mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=3),
        mfx.scale_by_rms(),
    )
    ends = (0, 7, 100, 280)
    cut = Flat(tuple(SMALL.leaves), (*ends[:size], ends[-1]))
    some = [Zero(1, "whole"), Zero(2, "flat"), Placed(ROWS), Replicated(), cut]
    check(world, size, [Case(SMALL, tx, layout, exact=True) for layout in some])


HALF = model(a=(9, 5), b=(4, 16), c=(33, 2), d=Leaf((7,)))
BF16 = two_groups(HALF.labels, mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16)))
BLOCKS = mfx.MatrixView({"qkv": "(part=3 out) in -> part out in"})
EXPERTS = Model(
    {"up": Leaf((4, 5, 3), "muon"), "down": Leaf((6, 3, 7), "muon"), "router": Leaf((4, 3))}, 1
)
SILENT = Model({"a": Leaf((5, 4))}, 0, (frozenset(), frozenset({"a"})))
FUSED = mfx.chain(
    mfx.momentum(),
    mfx.orthogonalize(dtype=torch.float32, view=BLOCKS),
    mfx.scale_by_shape(view=BLOCKS),
)
HEADS = mfx.MatrixView("(heads=3 (k=2 + v=4)) in -> heads k in, heads v in")
LATENT = mfx.chain(
    mfx.momentum(),
    mfx.orthogonalize(dtype=torch.float32, view=HEADS),
    mfx.scale_by_shape(view=HEADS),
)
NAMED_CASES = {
    "keys and values of latent attention by head": [
        Case(model(kv=(18, 6)), LATENT, layout, exact=False)
        for layout in (Zero(1, "flat"), Zero(1, "whole"), Replicated(), Placed({"kv": ("0",)}))
    ],
    "a fused qkv is cut into its blocks": [
        Case(model(qkv=(18, 6), out=(6, 7)), FUSED, layout, exact=True)
        for layout in (Zero(1, "flat"), Zero(1, "whole"), Replicated())
    ],
    # Rounded once, at the entrance: as many bits are the same as in one process.
    "computing in bf16 may send bf16": [
        Case(HALF, BF16, layout, exact=True)
        for layout in (
            Zero(1, "flat"),
            Zero(1, "whole"),
            Replicated(),
            Placed(dict.fromkeys(HALF.leaves, ("0",))),
        )
    ],
    # Two of one shape: the owner of the sharded one must not batch it with the one that every rank computes.
    "replicated beside sharded is identical on every rank": [
        Case(model(a=(13, 7), b=(13, 7)), muon(), Placed({"a": ("r",), "b": ("1",)}), exact=False)
    ],
    "bf16 weights that decay": [
        Case(
            model(a=Leaf((75, 4), "adamw", torch.bfloat16)),
            mfx.add_decayed_weights(0.1),
            Placed({"a": ("0",)}),
            exact=True,
        )
    ],
    "stacks of experts on the batch dim": [
        Case(
            EXPERTS,
            two_groups(EXPERTS.labels, muon(view=mfx.MatrixView(pattern))),
            layout,
            exact=False,
        )
        for pattern in ("... out in -> ... out in", None)
        for layout in (Placed({"up": ("0",), "down": ("0",), "router": ("r",)}), Zero(3, "flat"))
    ],
    "an undeclared transform sees a step without any gradient": [
        Case(SILENT, mfx.chain(mfx.stateless(halve), *rest), Zero(1, "whole"), exact=False)
        for rest in ([], [mfx.scale_by_adam()])
    ],
    "fewer columns than ranks under tensor parallelism": [
        Case(model(b=(5, 1)), muon(), FullyShardedTensorParallel({"b": "1"}), exact=True)
    ],
}


@pytest.mark.parametrize("name", NAMED_CASES)
def test_a_named_case(world: World, name: str):
    check(world, 4, NAMED_CASES[name])


@pytest.mark.deep
@settings(max_examples=200, phases=RUN)
@given(st.lists(cases(4), min_size=20, max_size=20))
def test_the_law_on_many_more(world: World, some: list[Case]):
    check(world, 4, some)
