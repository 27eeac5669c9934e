"""Every operator of a tensor is the same operator in a `leafwise` step, or an error that names it."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muonfx as mfx

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
LOGIC = ("and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "abs", "invert")
NUMBERS: list[Any] = [0, 1, -2, 3, 0.5, -1.5, True, torch.tensor(2), torch.tensor(0.25)]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "where": lambda x, y: torch.where(x > y, x, -1.0),
    "masked_fill": lambda x, y: x.masked_fill(x <= y, 0.5),
    "sub, alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "add, alpha": lambda x, y: x.add(y, alpha=2),
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "by keyword": lambda x, y: torch.add(input=x, other=y),
    "isfinite": lambda x, y: torch.isfinite(x / y),
    "to int": lambda x, y: (x + y).to(torch.int64),
    "logical_not": lambda x, y: torch.logical_not(x),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Expression = tuple[Any, ...]


def expressions(depth: int) -> st.SearchStrategy[Expression]:
    """Expressions of `u`, `p` and numbers."""
    atom = st.one_of(st.sampled_from([("u",), ("p",)]), st.sampled_from(NUMBERS).map(lambda x: ("number", x)))
    if depth == 0:
        return atom
    inner = expressions(depth - 1)
    binary = st.tuples(st.sampled_from(ARITHMETIC + LOGIC + COMPARISONS + tuple(FUNCTIONS)), inner, inner)
    return st.one_of(atom, st.tuples(st.sampled_from(UNARY), inner), binary)


def value(expression: Expression, u: Any, p: Any) -> Any:
    """The value of an expression, by the operators of whatever it is given."""
    kind, *parts = expression
    if kind in ("u", "p"):
        return u if kind == "u" else p
    if kind == "number":
        return parts[0]
    found = [value(part, u, p) for part in parts]
    return FUNCTIONS[kind](*found) if kind in FUNCTIONS else getattr(operator, kind)(*found)


@mfx.leafwise(reads_params=True)
def computed(expression: Any):
    def step(u: mfx.Leaf, s: Any, p: mfx.Leaf):
        return value(expression, u, p), s

    return mfx.core.EmptyState(), step


def drawn(dtypes: tuple[torch.dtype, ...], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Updates and parameters of some dtypes, with zeros, equal elements and small integers among them."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        {
            f"{i}.{j}": (torch.randint(-4, 5, shape, generator=generator) / 2).to(dtype)
            for i, dtype in enumerate(dtypes)
            for j, shape in enumerate([(3, 4), (5,), ()])
        }
        for _ in range(2)
    ]
    return made[0], made[1]


@given(
    expression=expressions(3),
    dtypes=st.sampled_from([(dtype,) for dtype in DTYPES] + [DTYPES]),
    seed=st.integers(0, 99),
    donate=st.booleans(),
)
def test_a_step_is_what_the_operators_of_tensors_are(
    expression: Expression, dtypes: tuple[torch.dtype, ...], seed: int, donate: bool
):
    updates, params = drawn(dtypes, seed)
    expected: dict[str, Tensor] = {}
    for name, u in updates.items():
        wide = torch.promote_types(u.dtype, torch.float32)
        try:
            made = value(expression, u.to(wide), params[name].to(wide))
        except (RuntimeError, TypeError):  # an operator that tensors of this dtype have not
            return
        if not isinstance(made, Tensor) or made.shape != u.shape:
            return
        expected[name] = made.to(u.dtype)
    found, _ = computed(expression).update(updates, mfx.core.EmptyState(), params, donate=donate)
    for name, own in expected.items():
        torch.testing.assert_close(
            found[name], own, rtol=1e-5 if own.dtype.itemsize > 2 else 1e-2, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS])
def test_each_operator_alone(name: str):
    updates, params = drawn(DTYPES, 0)
    number = ("number", 1.5)
    for sides in ((("u",), ("p",)), (("u",), number), (number, ("u",))):
        found, _ = computed((name, *sides)).update(updates, mfx.core.EmptyState(), params)
        for leaf, u in updates.items():
            wide = torch.promote_types(u.dtype, torch.float32)
            own = value((name, *sides), u.to(wide), params[leaf].to(wide)).to(u.dtype)
            assert torch.equal(found[leaf].nan_to_num(7.0), own.nan_to_num(7.0)), (leaf, sides)


def test_an_in_place_operator_rebinds_the_name():
    @mfx.leafwise
    def rebound():
        def step(u: mfx.Leaf, s: Any):
            same = u
            same *= 2.0
            s["sum"] += u
            return u + same, s

        return {"sum": mfx.Slot()}, step

    tx, u = rebound(), torch.tensor([1.0, -3.0])
    updates, state = tx.update({"w": u}, tx.init({"w": u}))
    assert updates["w"].tolist() == [3.0, -9.0]
    assert state["sum"]["w"].tolist() == u.tolist() == [1.0, -3.0]


ONLY_VALUES = "represents every leaf of a tree, so Python cannot .*; use torch.where, or write the transform"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not": (lambda u: not u, ONLY_VALUES),
    "if equal": (lambda u: 1.0 if u == 0 else u, ONLY_VALUES),
    "in": (lambda u: 1.0 in u, ONLY_VALUES),
    "in a list": (lambda u: u in [1.0], ONLY_VALUES),
    "iteration": (lambda u: list(u), ONLY_VALUES),
    "len": (lambda u: len(u), ONLY_VALUES),
    "index": (lambda u: u[0], ONLY_VALUES),
    "assignment": (lambda u: operator.setitem(u, 0, 1.0), ONLY_VALUES),
    "matmul": (lambda u: u @ u, ONLY_VALUES),
    "reflected matmul": (lambda u: [1.0] @ u, ONLY_VALUES),
    "float": (lambda u: float(u), ONLY_VALUES),
    "range": (lambda u: range(u), ONLY_VALUES),
    "shape": (lambda u: u.shape, "has no shape; write the transform with muonfx.transform"),
    "numel": (lambda u: u / u.numel(), "numel of a leaf is int, and a step works with tensors only; write the"),
    "item": (lambda u: u.sum().item(), "item of a leaf is float"),
    "equal to None": (lambda u: u == None, "eq of a leaf is bool"),  # noqa: E711
    "mul_": (lambda u: u.mul_(2.0), "mul_ writes in place; use mul"),
    "torch.relu_": (lambda u: torch.relu_(u), "relu_ writes in place"),
    "inplace=True": (lambda u: torch.nn.functional.elu(u, inplace=True), "elu writes in place"),
    "out=": (lambda u: torch.add(u, u, out=u), "add writes in place"),
    "add_ to a tensor": (lambda u: torch.zeros(3).add_(u), "add_ writes in place"),
    "assignment to a tensor": (lambda u: operator.setitem(torch.zeros(3), 0, u), "__setitem__ writes in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_leaf_cannot_do_is_an_error_by_name(name: str):
    function, message = REFUSED[name]

    @mfx.leafwise
    def refused():
        return mfx.core.EmptyState(), lambda u, s: (function(u), s)

    with pytest.raises((TypeError, AttributeError), match=f"leafwise: .*{message}"):
        refused().update({"w": torch.ones(3)}, mfx.core.EmptyState())


@pytest.mark.parametrize(
    ("error", "message", "update", "kept"),
    [
        (ValueError, r"update of shape \(\) for 'b', expected its shape \(3,\)", lambda u: u.sum(), None),
        (
            ValueError,
            r"state of shape \(1, 3\) for 'b', expected its shape \(3,\)",
            None,
            lambda u: u[None] if isinstance(u, Tensor) else u.unsqueeze(0),
        ),
        (TypeError, "update of torch.complex64 for 'b', expected real numbers", lambda u: u * 1j, None),
        (TypeError, "state of torch.complex64 for 'b'", None, lambda u: torch.complex(u, u)),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_another_shape_or_complex_numbers_are_an_error(error: Any, message: str, update: Any, kept: Any, donate: bool):
    @mfx.leafwise
    def wrong():
        def step(u: mfx.Leaf, s: Any):
            return (update or (lambda u: u))(u), {"kept": (kept or (lambda u: u))(u)}

        return {"kept": mfx.Slot()}, step

    tx, params = wrong(), {"a": None, "b": torch.ones(3)}
    with pytest.raises(error, match=f"wrong: the step returns an? {message}"):
        tx.update(params, tx.init(params), params, donate=donate)
