"""How a leaf is seen as matrices: blocks are as separate parameters; `matrixwise` steps see stacks of matrices."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from muonfx.testing.examples import updates_of
from muonfx.testing.violation import is_close
from tests.public import NAMES

EXACT = {"dtype": torch.float64, "coefficients": "quintic"}

TAKE_BLOCKS = {
    "orthogonalize": lambda **kw: mfx.orthogonalize(**EXACT, **kw),
    "row-scaled orthogonalize": lambda **kw: mfx.orthogonalize(dtype=torch.float64, coefficients="aol", **kw),
    "normalize_neurons": lambda **kw: mfx.normalize_neurons(0.5, dtype=torch.float64, **kw),
    "scale_by_shape": lambda **kw: mfx.scale_by_shape("original", **kw),
    "clip_singular_values": lambda **kw: mfx.contrib.clip_singular_values(2.0, **kw),
    "keep_weight_norms": lambda **kw: mfx.contrib.keep_weight_norms(dtype=torch.float64, **kw),
    "match_weight_norms": mfx.contrib.match_weight_norms,
    "scale_by_dion": lambda **kw: mfx.contrib.scale_by_dion(2, dtype=torch.float64, **kw),
    "scale_by_dual_norm": lambda **kw: mfx.contrib.scale_by_dual_norm(mfx.orthogonalize(**EXACT, **kw), **kw),
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
@given(st.integers(0, 99), st.sampled_from([(4, 4, 4), (6, 3, 2)]), st.booleans(), st.sampled_from((-2, -1)))
def test_blocks_are_as_separate_parameters(name: str, seed: int, sizes: Any, counted: bool, axis: int):
    make = TAKE_BLOCKS[name]
    equal = len(set(sizes)) == 1
    shapes = {n: (size, 5) if axis == -2 else (5, size) for n, size in zip("qkv", sizes, strict=True)} | {"out": (5, 5)}
    params, steps = kit.Example.of(shapes, steps=3, dtype=torch.float64, seed=seed)
    apart = updates_of(make(), params, steps)
    blocks = 3 if counted and equal else sizes
    view = mfx.MatrixView(blocks={"*.qkv": blocks}, block_axis=axis)
    together = updates_of(make(view=view), fuse(params, axis), [fuse(grads, axis) for grads in steps])
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
    for mine, rows in zip(longer, updates_of(mfx.normalize_neurons(), turned, turned_steps), strict=True):
        assert is_close(mine["wide"], rows["wide"].mT, 1e-12)
        assert all(torch.equal(mine[name], rows[name]) for name in ("tall", "square"))


def test_a_step_that_builds_its_transforms_again_compiles_with_a_view():
    view = mfx.MatrixView(dims={"*": ((-2,), (-1,))}, blocks={"qkv": 2})
    table = torch.tensor(mfx.polar.coefficients("keller").steps)
    tx = mfx.chain(mfx.orthogonalize(view=view, coefficients=table), mfx.normalize_neurons(view=view))
    grads = {"qkv": torch.randn(4, 3), "out": torch.randn(3, 3)}
    torch.compiler.reset()
    compiled = torch.compile(lambda tx, grads, state: tx.update(grads, state)[0], fullgraph=True, backend="eager")
    for name, expected in tx.update(grads, tx.init(grads))[0].items():
        torch.testing.assert_close(compiled(mfx.as_tensors(tx), grads, tx.init(grads))[name], expected)


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
    with pytest.raises(ValueError, match=r"'bias' has shape \(3,\); a matrix is needed"):
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

    return {"first": mfx.Slot(start="params"), "norm": mfx.MatrixSlot(lambda m: m.square().sum((-2, -1), True))}, step


@pytest.mark.parametrize("tx", [with_both_slots(), returns_its_inputs(view=mfx.MatrixView(((-2,), (-1,))))])
def test_a_transform_of_ones_own_obeys_the_laws(tx: mfx.Transform):
    kit.check_transform(tx, max_examples=5)


def test_blocks_of_any_sizes_have_the_state_that_they_have_as_parameters():
    torch.manual_seed(0)
    grads = [{"a": torch.randn(2, 5), "b": torch.randn(7, 5)} for _ in range(3)]
    apart, whole = with_both_slots(), with_both_slots(view=mfx.MatrixView(blocks=(2, 7)))
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
        (({"n": 3}, lambda u, s: (u, s)), TypeError, "returns a state of Slot and MatrixSlot, found 3 at 'n'"),
        ((mfx.core.EmptyState(), lambda u, s: (u.sum(), s)), ValueError, r"returns shape \(\), expected \(2, 2\)"),
    ],
)
def test_a_constructor_or_step_of_another_form_is_refused(returned: Any, error: type[Exception], said: str):
    @mfx.matrixwise
    def odd(*, view: mfx.MatrixView = VIEW):
        return returned

    with pytest.raises(error, match=said):
        odd().update({"w": torch.ones(2, 2)}, odd().init({"w": torch.ones(2, 2)}))


def test_a_constructor_without_a_view_is_refused():
    with pytest.raises(TypeError, match="no argument view; give it a keyword argument view: MatrixView"):

        @mfx.matrixwise
        def blind():
            return mfx.core.EmptyState(), lambda u, s: (u, s)
