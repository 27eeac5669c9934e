"""Patterns: how a tensor divides into matrices, for any shape and any way to store them."""

import re
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.transforms.matrix_pattern import parse


@st.composite
def patterns(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    """A pattern with at most one divided axis, and a shape that it fits."""
    axes = [f"a{at}" for at in range(draw(st.integers(2, 5)))]
    sizes = {axis: draw(st.integers(1, 3)) for axis in axes}
    parts = [f"p{at}" for at in range(draw(st.integers(2, 3)))] if draw(st.booleans()) else []
    divided = draw(st.sampled_from(axes)) if parts else None
    of_part = {part: draw(st.integers(1, 3)) for part in parts}
    if divided:
        sizes[divided] = sum(of_part.values())
    dims = _grouped(draw, axes, least=2)
    texts = {axis: f"{axis}={size}" for axis, size in sizes.items()}
    if divided:
        texts[divided] = " + ".join(f"{part}={size}" for part, size in of_part.items())
    left = " ".join(_written([_nested(texts[axis], len(dim)) for axis in dim]) for dim in dims)
    results = []
    for part in parts or [None]:
        names = draw(st.permutations([part if axis == divided else axis for axis in axes]))
        results.append(" ".join(_written(group) for group in _grouped(draw, names, least=2)))
    return f"{left} -> {', '.join(results)}", tuple(
        prod(sizes[axis] for axis in dim) for dim in dims
    )


def _grouped(draw: st.DrawFn, names: list[str], least: int) -> list[list[str]]:
    """Divide names into at least ``least`` groups."""
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), min_size=least - 1)))
    return [
        list(names[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(names)], strict=True)
    ]


def _nested(text: str, among: int) -> str:
    return f"({text})" if "+" in text and among > 1 else text


def _written(items: list[str]) -> str:
    return f"({' '.join(items)})" if len(items) > 1 or "+" in items[0] else items[0]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape)


@given(patterns())
def test_join_undoes_split_and_each_element_is_in_one_matrix(drawn: tuple[str, tuple[int, ...]]):
    text, shape = drawn
    pattern, leaf = parse(text), numbered(shape)
    stacks = pattern.split(leaf)
    assert torch.equal(pattern.join(stacks, shape), leaf)
    assert torch.equal(
        torch.cat([stack.flatten() for stack in stacks]).sort().values, leaf.flatten()
    )


@given(patterns())
def test_the_units_of_a_tensor_have_the_matrices_of_the_tensor(drawn: tuple[str, tuple[int, ...]]):
    text, shape = drawn
    pattern, leaf = parse(text), numbered(shape)
    units = pattern.independent(shape)
    if units is None:
        return
    apart = parse(units.pattern).split(leaf.reshape(-1, *units.shape))

    def matrices(stacks: list[torch.Tensor]) -> list[list[list[float]]]:
        return sorted(
            matrix.tolist() for stack in stacks for matrix in stack.reshape(-1, *stack.shape[-2:])
        )

    assert matrices(apart) == matrices(pattern.split(leaf))


@given(patterns())
def test_a_pattern_is_updated_as_its_matrices_are_as_parameters(drawn: tuple[str, tuple[int, ...]]):
    text, shape = drawn
    leaf = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = mfx.orthogonalize(view=mfx.MatrixView(text))
    updates = whole.update({"w": leaf}, whole.init({"w": leaf}))[0]["w"]
    apart = mfx.orthogonalize()
    for found, stack in zip(parse(text).split(updates), parse(text).split(leaf), strict=True):
        matrices = {
            str(at): matrix for at, matrix in enumerate(stack.reshape(-1, *stack.shape[-2:]))
        }
        expected = apart.update(matrices, apart.init(matrices))[0]
        torch.testing.assert_close(
            found.reshape(-1, *found.shape[-2:]), torch.stack(list(expected.values()))
        )


@pytest.mark.parametrize(
    ("text", "shape", "found"),
    [
        ("(heads=4 (k=3 + v=5)) in -> heads k in, heads v in", (32, 6), [(4, 3, 6), (4, 5, 6)]),
        ("(heads=4 (k=3 + v)) in -> (heads k) in, (heads v) in", (32, 6), [(12, 6), (20, 6)]),
        ("(ff part=2) in -> part ff in", (10, 3), [(2, 5, 3)]),
        ("out ... -> out (...)", (8, 3, 2, 2), [(8, 12)]),
        ("... in out -> ... out in", (2, 4, 5, 6), [(2, 4, 6, 5)]),
        ("... out in -> ... out in", (5, 6), [(5, 6)]),
        (
            "((q=4 + k=2 + v=2) dim) in -> q dim in, k dim in, v dim in",
            (24, 5),
            [(4, 3, 5), (2, 3, 5), (2, 3, 5)],
        ),
    ],
)
def test_the_last_two_dims_are_rows_and_columns(
    text: str, shape: tuple[int, ...], found: list[tuple[int, ...]]
):
    assert [tuple(stack.shape) for stack in parse(text).split(numbered(shape))] == found


@pytest.mark.parametrize(
    ("text", "shape", "unit"),
    [
        ("(heads=4 (k=3 + v=5)) in -> heads k in, heads v in", (32, 6), (8, 6)),
        ("((q=4 + k=2 + v=2) dim) in -> q dim in, k dim in, v dim in", (24, 5), (3, 5)),
        ("... in out -> ... out in", (4, 5, 6), (5, 6)),
        ("(groups=2 out) ... -> groups out (...)", (8, 3, 2, 2), (4, 12)),
        ("(heads=4 (k=3 + v=5)) in -> (heads k) in, (heads v) in", (32, 6), None),
        ("out (heads=4 dim) -> heads out dim", (6, 8), None),
    ],
)
def test_units_begin_after_the_leading_batch_axes(
    text: str, shape: tuple[int, ...], unit: tuple[int, int] | None
):
    found = parse(text).independent(shape)
    assert (found and found.shape) == unit


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a b", "has 0 arrows, expected one"),
        ("a b -> a", "the result .* must end with two dims, the rows and the columns"),
        ("... b -> b ...", r"such as .* 'out \(\.\.\.\)'"),
        ("(a b) c -> a b c", "a dim has several axes without a size, expected at most one"),
        ("a=0 b -> a b", "a size is 0"),
        ("a b -> a b c", "one result with each of a, b once"),
        ("a a -> a a", "'a' occurs twice on the left"),
        ("(a b=2 c -> a b", "an opening parenthesis has no closing one"),
        ("a) b -> a b", "a closing parenthesis has no opening one"),
        ("a (b=3 (c)) -> a b", r"parts with '\+' between them"),
        ("(a=1 + b=2) (c=1 + d=2) -> a c", r"several axes are divided by '\+'"),
        (
            "(a + b=2) c -> a c",
            "one result with each of a, c once and one result with each of b, c once",
        ),
        ("a b -> a b, b a", "one result with each of a, b once"),
        ("x-y z -> x z", "cannot read '-y z'"),
        ("a b -> a=2 b", "write it on the left side"),
        ("(... a=2) b -> a b", r"'\.\.\.' is any number of whole dims"),
    ],
)
def test_a_malformed_pattern_names_the_rule_that_it_breaks(text: str, problem: str):
    with pytest.raises(ValueError, match=rf"^MatrixView: {re.escape(repr(text))}.*{problem}"):
        mfx.MatrixView(text)


@pytest.mark.parametrize(
    ("text", "shape", "problem"),
    [
        ("(a=3 b) c -> a b c", (10, 4), r"a dim of size 10 does not divide into \(a=3 b\) of"),
        ("() out in -> out in", (2, 3, 4), r"a dim of size 2 does not divide into \(\) of"),
        (
            "(q=5 + k) in -> q in, k in",
            (4, 3),
            r"a dim of size 4 does not divide into \(q=5 \+ k\) of",
        ),
        ("a b -> b a", (1, 2, 3), "found 3 dims, expected 2 for the pattern 'a b -> b a'"),
    ],
)
def test_a_shape_that_does_not_fit_is_named_with_the_parameter(
    text: str, shape: tuple[int, ...], problem: str
):
    with pytest.raises(ValueError, match=rf"'w' has shape {re.escape(str(shape))}: {problem}"):
        mfx.orthogonalize(view=mfx.MatrixView(text)).init({"w": torch.zeros(shape)})
