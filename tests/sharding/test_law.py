"""The law of the sharding layer, on real processes: under every layout, what one process computes."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.testing.transforms import halve, with_value
from tests.processes import World
from tests.sharding import law
from tests.sharding.cases import (
    Case,
    Flat,
    FullyShardedTensorParallel,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    model,
    muon,
    two_groups,
)
from tests.sharding.strategies import cases, grids, grouped_chains, is_exact, models, placed

pytestmark = pytest.mark.dist

SIZES = st.sampled_from((2, 3, 4, 4, 1))


def check(world: World, size: int, cases: list[Case], **more: object) -> None:
    digests = world.check(size, law.check_cases, cases=cases, **more)
    assert digests == [digests[0]] * size  # identical on every rank


# Several cases a message: the processes are woken less often. The error names the case; to make it smaller would take
# many rounds of all processes, and new ones after each case in which ranks fail differently.
RUN = (Phase.explicit, Phase.reuse, Phase.generate)


@settings(max_examples=2 * settings.default.max_examples, phases=RUN)
@given(SIZES.flatmap(lambda size: st.tuples(st.just(size), st.lists(cases(size), min_size=1, max_size=6))))
def test_the_sharded_transform_is_the_transform(world: World, drawn: tuple[int, list[Case]]):
    size, some = drawn
    check(world, size, some)


@st.composite
def dtensor_cases(draw: st.DrawFn, size: int) -> Case:
    made = draw(models())
    tx = draw(grouped_chains(made))
    kinds = [placed(made, 1), *(grids(made) if size == 4 else [])]
    return Case(
        made, tx, draw(st.sampled_from(kinds).flatmap(lambda kind: kind)), is_exact(tx, made), draw(st.booleans())
    )


@settings(phases=RUN)
@given(SIZES.flatmap(lambda size: st.tuples(st.just(size), st.lists(dtensor_cases(size), min_size=1, max_size=4))))
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
BOTH = {name: ("0", "1") if len(leaf.shape) == 2 else ("r", "r") for name, leaf in SMALL.leaves.items()}
SAME = {name: ("0", "0") if leaf.shape else ("r", "r") for name, leaf in SMALL.leaves.items()}

LAYOUTS = {
    "ddp": Replicated(),
    "zero1": Zero(1, "whole", 8),
    "zero1 for this chain": Zero(1, "whole", 8, knows_tx=True),
    "zero2": Zero(2, "whole"),
    "zero3": Zero(3, "flat", 8),
    "zero3, each by itself": Zero(3, "each", 2),
    "fsdp2": Placed(ROWS),
}
GRIDS = {
    "hsdp": Placed(GRID, grid=True),
    "fsdp and tp": Placed(BOTH, grid=True),
    "one dim twice": Placed(SAME, grid=True),
    "fully_shard over tp": FullyShardedTensorParallel({"up": "0", "down": "1", "embed": "0"} | {"odd": "r"}),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_people_train_with_is_bitwise_the_same(world: World, name: str, size: int):
    check(world, size, [Case(SMALL, EXACT, LAYOUTS[name], exact=True, donate=donate) for donate in (False, True)])


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
        mfx.chain(mfx.monitor("before"), EXACT, mfx.monitor("after")),
        mfx.masked(EXACT, mfx.select.ndim(min=1)),
        mfx.chain(EXACT, mfx.ema_params(0.9)),
        mfx.master_params(EXACT),
        mfx.contrib.schedule_free(two_groups(SMALL.labels, mfx.orthogonalize(dtype=torch.float32), b1=0.0), 0.1),
        mfx.chain(mfx.contrib.sam(0.5, adaptive=True), mfx.contrib.prodigy(estim_lr0=0.1)),
        mfx.chain(EXACT, with_value(mfx.contrib.reduce_on_plateau(0.5, 1))),
        mfx.chain(EXACT, mfx.stateless(halve)),
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(RISING), muon(), mfx.normalize_neurons(RISING)),
                "adamw": mfx.cautious(mfx.scale_by_adam(b1=RISING), min_share=mfx.constant_schedule(0.01)),
                "frozen": mfx.clip_by_global_norm(RISING),
            },
            SMALL.labels,
        ),
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(), mfx.normalize_neurons(), muon(), mfx.normalize_neurons()),
                "adamw": mfx.cautious(mfx.scale_by_lion()),
                "frozen": mfx.set_to_zero(),
            },
            SMALL.labels,
        ),
    ],
    ids=lambda tx: tx.name,
)
def test_each_way_to_wrap_a_chain(world: World, tx: mfx.Transform):
    some = [Zero(1, "whole"), Zero(1, "flat", 2), Placed(ROWS), Replicated(), Flat(tuple(SMALL.leaves), (0, 0, 7, 280))]
    check(world, 3, [Case(SMALL, tx, layout, exact=False) for layout in some])


BY_MATRICES = {
    "normalize": mfx.chain(mfx.contrib.normalize_rows(), mfx.contrib.normalize_columns(), mfx.scale_by_shape("fan_in")),
    "unit": mfx.contrib.normalize_matrices(),
    "polar": mfx.contrib.scale_by_dual_norm(muon()),
    "namo": mfx.contrib.scale_by_namo(mfx.chain(muon(), mfx.add_decayed_weights(0.1))),
    "dion": mfx.contrib.scale_by_dion(2),
    "sum": mfx.add_updates(muon(), ("sgd", mfx.chain(mfx.add_decayed_weights(0.1), mfx.momentum(heavy_ball=True)))),
    "sphere": mfx.chain(muon(), mfx.contrib.match_weight_norms(), mfx.scale(-0.1), mfx.contrib.keep_weight_norms()),
    "rest": mfx.chain(mfx.contrib.normalize_leaves(), mfx.subtract_decayed_weights(0.1, cautious=True)),
}
NAMED = {"embed": "dion", "up": "sum", "down": "sphere", "odd": "unit", "conv": "polar"}
NAMED |= {"norm": "rest", "scale": "rest"}
NAMED_TOO = NAMED | {"embed": "namo", "up": "dion", "conv": "normalize", "odd": "sphere"}


@pytest.mark.parametrize("size", [1, 3])
def test_each_transform_of_whole_matrices(world: World, size: int):
    for labels in (NAMED | {"cold": "namo"}, NAMED_TOO | {"cold": "normalize", "down": "polar"}):
        tx = mfx.partition({label: BY_MATRICES[label] for label in sorted(set(labels.values()))}, labels)
        layouts = [Zero(1, "flat", 2), Placed(ROWS), Zero(1, "whole")]
        check(world, size, [Case(SMALL, tx, layout, exact=False) for layout in layouts])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_depends_on_names_and_places_is_the_same_wherever_a_leaf_is_cut(world: World, size: int):
    tx = mfx.chain(
        mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=3),
        mfx.scale_by_rms(),
    )
    ends = (0, 7, 100, 280)
    cut = Flat(tuple(SMALL.leaves), (*ends[:size], ends[-1]))
    some = [Zero(1, "whole"), Zero(2, "flat", 2), Placed(ROWS), Replicated(), cut]
    check(world, size, [Case(SMALL, tx, layout, exact=True) for layout in some])


HALF = model(a=(9, 5), b=(4, 16), c=(33, 2), d=Leaf((7,)))
BF16 = two_groups(HALF.labels, mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.bfloat16)))
BLOCKS = mfx.MatrixView(blocks={"qkv": 3})
EXPERTS = Model({"up": Leaf((4, 5, 3), "muon"), "down": Leaf((6, 3, 7), "muon"), "router": Leaf((4, 3))}, 1)
SILENT = Model({"a": Leaf((5, 4))}, 0, (frozenset(), frozenset({"a"})))
FUSED = mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.float32, view=BLOCKS), mfx.scale_by_shape(view=BLOCKS))
NAMED_CASES = {
    "a fused qkv is cut into its blocks": [
        Case(model(qkv=(18, 6), out=(6, 7)), FUSED, layout, exact=True)
        for layout in (Zero(1, "flat"), Zero(1, "whole"), Replicated())
    ],
    # Rounded once, at the entrance: as many bits are the same as in one process.
    "computing in bf16 may send bf16": [
        Case(HALF, BF16, layout, exact=True)
        for layout in (Zero(1, "flat"), Zero(1, "whole"), Replicated(), Placed(dict.fromkeys(HALF.leaves, ("0",))))
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
        Case(EXPERTS, two_groups(EXPERTS.labels, muon(view=mfx.MatrixView(dims))), layout, exact=False)
        for dims in (((-2,), (-1,)), None)
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
