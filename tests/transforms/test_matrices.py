"""Leaves as matrices, in blocks and in stacks; norms, mean squares and clipping at any size."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing.examples import updates_of
from muonfx.testing.violation import is_close
from muonfx.transforms.matrices import STACK
from tests.public import NAMES

EXACT = {"dtype": torch.float64, "coefficients": "quintic"}

TAKE_BLOCKS = {
    "orthogonalize": lambda **kw: mfx.orthogonalize(**EXACT, **kw),
    "row-scaled orthogonalize": lambda **kw: mfx.orthogonalize(
        dtype=torch.float64, coefficients="aol", **kw
    ),
    "normalize_neurons": lambda **kw: mfx.normalize_neurons(0.5, dtype=torch.float64, **kw),
    "scale_by_shape": lambda **kw: mfx.scale_by_shape("original", **kw),
    "keep_weight_norms": lambda **kw: mfx.contrib.keep_weight_norms(dtype=torch.float64, **kw),
    "match_weight_norms": mfx.contrib.match_weight_norms,
    "floor_by_weight_norms": mfx.contrib.floor_by_weight_norms,
    "radial_brake": mfx.contrib.radial_brake,
    "scale_by_shampoo": mfx.contrib.scale_by_shampoo,
    "scale_by_soap": lambda **kw: mfx.contrib.scale_by_soap(max_precondition_size=5, **kw),
    "scale_by_dion2": lambda **kw: mfx.contrib.scale_by_dion2(2, coefficients="quintic", **kw),
    "scale_by_dion": lambda **kw: mfx.contrib.scale_by_dion(2, dtype=torch.float64, **kw),
    "scale_by_dual_norm": lambda **kw: mfx.contrib.scale_by_dual_norm(
        mfx.orthogonalize(**EXACT, **kw), **kw
    ),
    "scale_by_namo": lambda **kw: mfx.contrib.scale_by_namo(mfx.orthogonalize(**EXACT, **kw), **kw),
    "normalize_rows": mfx.contrib.normalize_rows,
    "normalize_columns": mfx.contrib.normalize_columns,
    "normalize_matrices": mfx.contrib.normalize_matrices,
    "chain": lambda **kw: mfx.chain(
        mfx.momentum(0.9, dtype=torch.float64),
        mfx.orthogonalize(**EXACT, **kw),
        mfx.normalize_neurons(0.5, dtype=torch.float64, **kw),
        mfx.scale_by_shape("spectral", **kw),
    ),
}


def fuse(values: dict[str, Tensor], axis: int) -> dict[str, Tensor]:
    return {"attn.qkv": torch.cat([values[name] for name in "qkv"], dim=axis), "out": values["out"]}


@pytest.mark.parametrize("name", TAKE_BLOCKS)
@given(
    st.integers(0, 99),
    st.sampled_from([(4, 4, 4), (6, 3, 2)]),
    st.booleans(),
    st.sampled_from((-2, -1)),
)
def test_parts_are_as_separate_parameters(
    name: str, seed: int, sizes: Any, counted: bool, axis: int
):
    make = TAKE_BLOCKS[name]
    shapes = {
        n: (size, 5) if axis == -2 else (5, size) for n, size in zip("qkv", sizes, strict=True)
    } | {"out": (5, 5)}
    params, steps = kit.Example.of(shapes, steps=3, dtype=torch.float64, seed=seed)
    apart = updates_of(make(), params, steps)
    is_batch = counted and len(set(sizes)) == 1
    parts = "(part=3 side)" if is_batch else "(q={} + k={} + v={})".format(*sizes)
    results = ["side"] if is_batch else list("qkv")
    sides = "{} in" if axis == -2 else "out {}"
    right = ", ".join("part " * is_batch + sides.format(result) for result in results)
    view = mfx.MatrixView({"*.qkv": f"{sides.format(parts)} -> {right}"})
    together = updates_of(
        make(view=view), fuse(params, axis), [fuse(grads, axis) for grads in steps]
    )
    for step, (mine, expected) in enumerate(zip(together, apart, strict=True)):
        for leaf, want in fuse(expected, axis).items():
            assert is_close(mine[leaf], want, 1e-12), (step, leaf)


def test_every_transform_with_a_view_is_held_to_it():
    takes = {
        name
        for name, factory in NAMES.items()
        if hasattr(factory, "definition") and "view" in factory.definition.parameters
    }
    assert takes <= set(TAKE_BLOCKS)


@given(st.integers(0, 99))
def test_neurons_of_the_longer_side_are_those_of_the_transpose(seed: int):
    shapes = {"wide": (3, 5), "tall": (5, 3), "square": (4, 4)}
    params, steps = kit.Example.of(shapes, steps=3, dtype=torch.float64, seed=seed)
    turned, *turned_steps = ({**values, "wide": values["wide"].mT} for values in (params, *steps))
    longer = updates_of(mfx.normalize_neurons(axis="longer"), params, steps)
    for mine, rows in zip(
        longer, updates_of(mfx.normalize_neurons(), turned, turned_steps), strict=True
    ):
        assert is_close(mine["wide"], rows["wide"].mT, 1e-12)
        assert all(torch.equal(mine[name], rows[name]) for name in ("tall", "square"))


def test_a_step_that_builds_its_transforms_again_compiles_with_a_view():
    view = mfx.MatrixView({"qkv": "... (part=2 out) in -> ... part out in", "*": STACK})
    table = torch.tensor(mfx.polar.coefficients("keller").steps)
    tx = mfx.chain(
        mfx.orthogonalize(view=view, coefficients=table), mfx.normalize_neurons(view=view)
    )
    grads = {"qkv": torch.randn(4, 3), "out": torch.randn(3, 3)}
    torch.compiler.reset()
    compiled = torch.compile(
        lambda tx, grads, state: tx.update(grads, state)[0], fullgraph=True, backend="eager"
    )
    found = compiled(mfx.as_tensors(tx), grads, tx.init(grads))
    torch.testing.assert_close(found, tx.update(grads, tx.init(grads))[0])


@pytest.mark.parametrize("exponent", [-100, 60, 120])
def test_neurons_keep_their_norm_at_any_size(exponent: int):
    factor = 2.0**exponent
    generator = torch.Generator().manual_seed(0)
    tx = mfx.normalize_neurons()
    state = tx.init({"w": torch.zeros(3, 4)})
    for _ in range(3):
        plain = torch.randn(3, 4, generator=generator)
        updates, state = tx.update({"w": plain * factor}, state)
        assert state.nu["w"].isfinite().all()
        assert is_close((updates["w"] / factor).norm(), plain.norm(), 1e-5)


@pytest.mark.parametrize("name", sorted(TAKE_BLOCKS.keys() - {"scale_by_shape"}))
def test_a_vector_is_named_at_init(name: str):
    with pytest.raises(ValueError, match=r"'bias' has shape \(3,\), expected at least two dims"):
        TAKE_BLOCKS[name]().init({"bias": torch.zeros(3), "w": torch.zeros(3, 3)})


VIEW = mfx.MatrixView()


class Sides(NamedTuple):
    trace: Any
    longest: Any


@mfx.matrixwise
def with_both_slots(*, dtype: Any = "auto", view: mfx.MatrixView = VIEW):
    """A state like the parameters, and one as long as the longer side of each matrix."""

    def start(matrix: Tensor) -> Tensor:
        return matrix.new_zeros((*matrix.shape[:-2], 1, max(matrix.shape[-2:])))

    def step(u: Tensor, s: Sides) -> tuple[Tensor, Sides]:
        trace = s.trace + u
        longest = s.longest + trace.square().mean((-2, -1), keepdim=True)
        return trace * longest.mean(-1, keepdim=True), Sides(trace, longest)

    return Sides(mfx.Slot(dtype), mfx.MatrixSlot(start, dtype)), step


@mfx.matrixwise(reads_params=True)
def returns_its_inputs(*, view: mfx.MatrixView = VIEW):
    def step(u: Tensor, s: dict[str, Tensor], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return u, s

    return {
        "first": mfx.Slot(start="params"),
        "norm": mfx.MatrixSlot(lambda m: m.square().sum((-2, -1), True)),
    }, step


@mfx.matrixwise
def returns_its_state_as_update(*, view: mfx.MatrixView = VIEW):
    def step(u: Tensor, s: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        average = 0.9 * s["average"] + 0.1 * u
        return average, {"average": average, "again": average}

    return {"average": mfx.Slot("auto"), "again": mfx.Slot("auto")}, step


def test_a_state_that_is_the_update_is_not_overwritten_by_the_next_transform():
    tx = mfx.chain(returns_its_state_as_update(), mfx.scale(-0.1))
    params = {"w": torch.zeros(2, 2)}
    _, state = tx.update({"w": torch.ones(2, 2)}, tx.init(params), params, donate=True)
    for leaf in mfx.tree.leaves(state["returns_its_state_as_update"]):
        assert torch.equal(leaf, torch.full((2, 2), 0.1))


def test_a_step_that_returns_no_state_is_an_error_that_says_so():
    @mfx.matrixwise
    def without_state(*, view: mfx.MatrixView = VIEW):
        return {"average": mfx.Slot("auto")}, lambda u, s: u

    params = {"w": torch.zeros(2, 2)}
    tx = without_state()
    with pytest.raises(
        TypeError, match=r"without_state: the step must return \(update, state\), found a Tensor"
    ):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(
    "tx",
    [
        with_both_slots(),
        returns_its_inputs(view=mfx.MatrixView(STACK)),
        returns_its_state_as_update(),
    ],
    ids=str,
)
def test_a_transform_of_ones_own_obeys_the_laws(tx: mfx.Transform):
    # `with_both_slots` squares 1e-18 in fp32
    skip = ["large_and_small_gradients_give_finite_updates"]
    # Its updates are third powers of gradients: 1e-9 is 0 in float16.
    if tx.name == "with_both_slots":
        skip.append("narrow_gradients_are_computed_in_wider_dtypes")
    kit.check_transform(tx, max_examples=5, skip=skip)


def test_blocks_of_any_sizes_have_the_state_that_they_have_as_parameters():
    torch.manual_seed(0)
    grads = [{"a": torch.randn(2, 5), "b": torch.randn(7, 5)} for _ in range(3)]
    apart, whole = (
        with_both_slots(),
        with_both_slots(view=mfx.MatrixView("(a=2 + b=7) in -> a in, b in")),
    )
    state, joined = apart.init(grads[0]), whole.init({"w": torch.zeros(9, 5)})
    for step in grads:
        updates, state = apart.update(step, state)
        together, joined = whole.update({"w": torch.cat([step["a"], step["b"]])}, joined)
        torch.testing.assert_close(together["w"], torch.cat([updates["a"], updates["b"]]))
    assert joined.longest["w"].shape == (5 + 7,)


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (mfx.core.EmptyState(), TypeError, "returns a state and a step, found EmptyState"),
        (
            (mfx.core.EmptyState(), lambda u, s, p: (u, s)),
            TypeError,
            "step takes three .* declares reads_params=True",
        ),
        (
            ({"n": 3}, lambda u, s: (u, s)),
            TypeError,
            "returns a state of Slot and MatrixSlot, found 3 at 'n'",
        ),
        (
            (mfx.core.EmptyState(), lambda u, s: (u.sum(), s)),
            ValueError,
            r"returns shape \(\), expected \(1, 2, 2\)",
        ),
    ],
)
def test_a_constructor_or_step_of_another_form_is_refused(
    returned: Any, error: type[Exception], said: str
):
    @mfx.matrixwise
    def odd(*, view: mfx.MatrixView = VIEW):
        return returned

    with pytest.raises(error, match=said):
        odd().update({"w": torch.ones(2, 2)}, odd().init({"w": torch.ones(2, 2)}))


def test_a_view_that_may_be_passed_by_position_is_refused():
    whole = mfx.MatrixView()

    def centered(view: mfx.MatrixView = whole) -> Any:
        return mfx.core.EmptyState(), lambda u, s: (u, s)

    with pytest.raises(
        TypeError,
        match=r"argument view of centered .*by position, expected .*: write \*, view: Mat",
    ):
        mfx.matrixwise(centered)


def test_a_constructor_without_a_view_is_refused():
    with pytest.raises(
        TypeError, match="no argument view; give it a keyword argument view: MatrixView"
    ):

        @mfx.matrixwise
        def blind():
            return mfx.core.EmptyState(), lambda u, s: (u, s)


SHAPES = {"w": (4, 6), "b": (3,), "k": (2, 3, 5)}
BY_MATRIX: dict[str, Any] = {
    "rows": mfx.contrib.normalize_rows(),
    "columns": mfx.contrib.normalize_columns(),
    "matrices": mfx.contrib.normalize_matrices(),
    "sphere": mfx.contrib.match_weight_norms(),
    "dion": mfx.contrib.scale_by_dion(2),
    "dion2": mfx.contrib.scale_by_dion2(2),
}
EACH: dict[str, Any] = BY_MATRIX | {
    "leaves": mfx.contrib.normalize_leaves(),
}


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    # So that 2**-120 times it is exact in fp32.
    return {name: (64 * leaf).round() / 64 for name, leaf in drawn.items()}


def matrices(seed: int) -> dict[str, Tensor]:
    return {"w": drawn(seed)["w"].float()}


def updated(
    tx: mfx.Transform, grads: dict[str, Tensor], params: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    return tx.update(grads, tx.init(grads), params)[0]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("exponent", [-120, -30, 1, 60, 120])
def test_updates_of_any_size_give_the_same(name: str, exponent: int):
    draw = matrices if name in BY_MATRIX else drawn
    grads, params = ({n: leaf.float() for n, leaf in draw(seed).items()} for seed in (1, 0))
    scaled, zero = (
        {n: leaf * factor for n, leaf in grads.items()} for factor in (2.0**exponent, 0.0)
    )
    once, again = updated(EACH[name], grads, params), updated(EACH[name], scaled, params)
    assert all(torch.equal(once[leaf], again[leaf]) for leaf in grads)
    assert not any(leaf.any() for leaf in updated(EACH[name], zero, params).values())


@pytest.mark.parametrize("exponent", [-120, 120])
def test_weights_keep_their_norm_at_any_size(exponent: int):
    params, grads = ({"w": matrices(seed)["w"] * 2.0**exponent} for seed in (0, 1))
    tx = mfx.contrib.keep_weight_norms()
    after = mfx.apply_updates(params, tx.update(grads, tx.init(params), params)[0])["w"]
    assert is_close((after * 2.0**-exponent).norm(), (params["w"] * 2.0**-exponent).norm(), 1e-6)
    assert not is_close(after * 2.0**-exponent, params["w"] * 2.0**-exponent, 0.1)


@pytest.mark.parametrize("name", BY_MATRIX)
def test_nan_stays_in_its_matrix(name: str):
    grads = {"w": torch.ones(2, 3, 4)}
    grads["w"][1, 1, 1] = torch.nan
    tx = EACH[name].replace(view=mfx.MatrixView(STACK))
    out = updated(tx, grads, {"w": torch.ones(2, 3, 4)})["w"]
    assert out[0].isfinite().all()
    assert out[1].isnan().any()


def after(tx: mfx.Transform, steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return kit.examples.updates_of(tx, steps[0], steps)[-1]


def test_debiased_it_is_adam_without_a_first_moment():
    steps = [drawn(seed) for seed in range(4)]
    rms = after(mfx.scale_by_rms(0.99, 1e-6, eps_in_sqrt=False, debias=True), steps)
    torch.testing.assert_close(rms, after(mfx.scale_by_adam(0.0, 0.99, 1e-6), steps))


def factored(least: int = 2) -> mfx.Transform:
    return mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=least, eps=0.0)


def test_squares_of_rank_one_lose_nothing_by_being_factored():
    rows, columns = (
        torch.rand(4, 1, dtype=torch.float64) + 0.1,
        torch.rand(1, 6, dtype=torch.float64) + 0.1,
    )
    steps = [{"w": size * rows * columns} for size in (1.0, 3.0, 0.5)]
    torch.testing.assert_close(after(factored(), steps), after(factored(100), steps))


def test_what_is_factored_has_no_mean_squares_of_elements():
    state = factored().init(drawn(0) | {"thin": torch.zeros(1, 9)})
    shapes = {name: [tuple(own[name].shape) for own in state[1:]] for name in state.v}
    assert shapes == {
        "w": [(4,), (6,), (0,)],
        "b": [(0,), (0,), (3,)],
        "k": [(2, 3), (2, 5), (0,)],
        "thin": [(0,), (0,), (1, 9)],
    }


SIZES = {
    torch.float32: (1e-30, 1e-6, 1.0, 1e10, 1e19, 1e25, 1e37),
    torch.bfloat16: (1e-30, 1.0, 1e25, 1e37),
    torch.float64: (1e-300, 1e-30, 1.0, 1e25, 1e160, 1e300),
}
CASES = [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes]


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "size"), CASES, ids=str)
def test_a_clipped_norm_is_the_bound_or_the_norm_itself_at_any_size(
    dtype: torch.dtype, size: float, max_norm: float
):
    plain = {"w": torch.randn(10, 4, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    norm = torch.cat([leaf.flatten() for leaf in plain.values()]).norm() * size
    grads = {name: (leaf * size).to(dtype) for name, leaf in plain.items()}
    updates, _ = mfx.clip_by_global_norm(max_norm).update(grads, mfx.core.EmptyState())
    expected = min(float(norm), max_norm)
    scaled = torch.cat([leaf.double().flatten() for leaf in updates.values()]) / expected
    assert is_close(
        scaled.norm(),
        torch.ones((), dtype=torch.float64),
        3e-3 if dtype != torch.float64 else 1e-12,
    )
    assert is_close(mfx.tree.norm(grads) / norm, torch.ones((), dtype=torch.float64), 3e-3)


# -------------------------------------------------------------------------------------- small leaves in one stack

STACKED = {
    **{
        name: TAKE_BLOCKS[name]
        for name in TAKE_BLOCKS
        if name.startswith(("normalize", "keep", "match"))
    },
    "longer neurons": lambda **kw: mfx.normalize_neurons(0.5, axis="longer", **kw),
    "scale_by_dual_norm": lambda **kw: mfx.contrib.scale_by_dual_norm(mfx.scale_by_sign(), **kw),
    "scale_by_namo": lambda **kw: mfx.contrib.scale_by_namo(mfx.scale_by_sign(), **kw),
    "normalize_leaves": lambda view: mfx.contrib.normalize_leaves(),
    "clip_by_block_rms": lambda view: mfx.clip_by_block_rms(0.5),
}


def only(values: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_of_one_shape_have_the_bits_that_each_has_alone(name: str, dtype: torch.dtype):
    tx = STACKED[name](
        view=mfx.MatrixView(
            {"qkv*": "(part=3 out) in -> part out in", "parts*": "(a=2 + b=7) in -> a in, b in"}
        )
    )
    kinds = {
        "w": (9, 33),
        "tall": (40, 5),
        "qkv": (9, 8),
        "parts": (9, 4),
        "row": (1, 7),
        "large": (200, 180),
    }
    shapes = {f"{kind}{n}": shape for kind, shape in kinds.items() for n in range(3)}
    params, steps = kit.Example.of(shapes, steps=2, dtype=dtype)
    # One leaf has no gradient, and one another memory order.
    steps[1]["w1"], steps[1]["w2"] = None, steps[1]["w2"].mT.contiguous().mT
    together = updates_of(tx, params, steps)
    for n in "012":
        own = [name for name in shapes if name.endswith(n)]
        alone = updates_of(tx, only(params, own), [only(grads, own) for grads in steps])
        for found, expected in zip(together, alone, strict=True):
            for leaf in own:
                is_absent = found[leaf] is None and expected[leaf] is None
                assert is_absent or torch.equal(found[leaf], expected[leaf]), leaf


class Products(TorchDispatchMode):
    """Counts multiplications."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ in ("mul", "div", "mm", "bmm")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", [*STACKED, "scale_by_dion", "scale_by_dion2"])
def test_more_leaves_of_one_shape_take_no_more_calls(name: str):
    def products(leaves: int) -> int:
        params, (grads,) = kit.Example.of({f"w{n}": (16, 8) for n in range(leaves)}, steps=1)
        state = tx.init(params)
        with Products() as counted:
            tx.run(grads, state, params)  # `update` also compares the state with a new one
        return counted.number

    tx = (STACKED | TAKE_BLOCKS)[name](view=mfx.MatrixView())
    if name == "scale_by_dion":
        tx = tx.replace(rank=4)  # matrices whose sides are multiples of 4 are stacked on every CPU
    assert products(20) == products(2) > 0
