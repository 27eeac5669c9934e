"""Steps written for one leaf obey every law, run on all leaves at once, and have the operators of tensors."""

import gc
import math
import operator
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import muonfx as mfx
from muonfx import testing as kit


class TwoMoments(NamedTuple):
    """A state with a scalar between two trees."""

    first: Any
    steps: Any
    second: Any


@mfx.leafwise
def rms_scaled(decay: float = 0.9, eps: float = 1e-3, dtype: Any = "auto"):
    def step(u: mfx.Leaf, s: TwoMoments):
        second = s.second * decay + (1 - decay) * u * u
        steps = s.steps + 1
        bias = 1 - decay ** steps.to(torch.float64)
        first = 0.5 * (s.first + u)
        return first / (torch.sqrt(second / bias + eps) + eps), TwoMoments(first, steps, second)

    return TwoMoments(mfx.Slot(dtype), mfx.StepCount(), mfx.Slot(signed=False)), step


@mfx.leafwise
def swaps_its_trees(factor: float = 0.5):
    def step(u: mfx.Leaf, s: TwoMoments):
        return s.first + s.second * factor, TwoMoments(s.second, s.steps + 1, s.first + u)

    return TwoMoments(mfx.Slot(None), mfx.StepCount(), mfx.Slot()), step


@mfx.leafwise
def keeps_the_gradient(factor: float = 0.5):
    def step(u: mfx.Leaf, s: Any):
        both = s["a"] * factor + u
        return u, {"a": both, "b": both, "last": u, "last_but_one": s["last"]}

    return {
        "a": mfx.Slot(),
        "b": mfx.Slot(torch.bfloat16),
        "last": mfx.Slot(None),
        "last_but_one": mfx.Slot(None),
    }, step


@mfx.leafwise
def trades_its_trees(factor: float = 0.5):
    """A tree that is returned in the place of another one, and a value that is returned for several trees."""

    def step(u: mfx.Leaf, s: Any):
        both = s["a"] * factor + u
        return both, {"a": s["b"], "b": s["a"], "c": both, "d": both}

    return {"a": mfx.Slot(None), "b": mfx.Slot(None), "c": mfx.Slot(None), "d": mfx.Slot()}, step


@mfx.leafwise(reads_params=True)
def gives_out_its_state(factor: float = 0.5):
    def step(u: mfx.Leaf, s: Any, p: mfx.Leaf):
        return s["kept"], {"kept": s["kept"], "sum": (s["sum"] + u) * factor, "param": p}

    return {
        "kept": mfx.Slot(None, start="params"),
        "sum": mfx.Slot(None),
        "param": mfx.Slot(None),
    }, step


@mfx.leafwise
def views_and_writes(factor: float = 0.5):
    """A result that may be a view of a tensor that the next operation could overwrite."""

    def step(u: mfx.Leaf, s: Any):
        doubled = u * 2.0
        same = doubled.contiguous()
        turned = doubled * factor
        kept = s["kept"].view_as(u)
        return same + turned, {"kept": kept, "sum": s["kept"] + u}

    return {"kept": mfx.Slot(), "sum": mfx.Slot()}, step


@mfx.leafwise
def functions_of_torch(floor: float = 0.25):
    def step(u: mfx.Leaf, s: tuple[Any]):
        near = torch.where(u > 0, u.clamp(max=3.0), torch.atan(u))
        kept = torch.maximum(s[0], abs(near) + floor)
        return -near / (1.0 - (-kept)) - torch.lerp(u, s[0], torch.sigmoid(u)), (kept,)

    return (mfx.Slot(),), step


@mfx.leafwise(locality=mfx.Locality.LEAF)
def normalized(decay: float = 0.9, dtype: Any = "auto"):
    def step(u: mfx.Leaf, s: Any):
        trace = s["trace"].lerp(u, 1 - decay)
        square = (trace * trace).sum()
        return trace / torch.sqrt(square + 1e-6) + 0.0 * (square + trace), {"trace": trace}

    return {"trace": mfx.Slot(dtype)}, step


@mfx.leafwise(reads_params=True)
def by_a_norm_over_all_leaves(scale: float = 0.5):
    def step(u: mfx.Leaf, s: Any, p: mfx.Leaf, *, sum_over_leaves: Any):
        both = u + scale * p
        norm = sum_over_leaves((both * both).sum(dtype=torch.float64)).sqrt()
        largest = torch.maximum(s["largest"], norm)
        return both / (1.0 + largest), {"largest": largest, "last": both}

    return {"largest": mfx.Number(0.25), "last": mfx.Slot()}, step


TINY = {"block": 4, "min_size": 0}
CASES = [
    rms_scaled(dtype=torch.bfloat16),
    swaps_its_trees(),
    trades_its_trees(),
    keeps_the_gradient(),
    gives_out_its_state(),
    views_and_writes(),
    functions_of_torch(),
    normalized(dtype=mfx.fp8(**TINY, stochastic=True)),
    by_a_norm_over_all_leaves(),
]
COMPILED = [name for name, law in kit.LAWS.items() if law.family == "compiling"]


@pytest.mark.parametrize("tx", CASES, ids=repr)
def test_any_step_obeys_every_law(tx: mfx.Transform):
    report = kit.check_transform(tx, skip=COMPILED, max_examples=8)
    assert len(report.held) >= 20


@pytest.mark.parametrize(
    "tx", [rms_scaled(), functions_of_torch(), by_a_norm_over_all_leaves()], ids=repr
)
def test_a_step_compiles_into_one_graph(tx: mfx.Transform):
    kit.check_transform(tx, laws=["compiled_update_equals_eager"], max_examples=5)


@mfx.leafwise
def scaled_by_square(factor: float = 0.5):
    def step(u: mfx.Leaf, s: Any):
        return u * factor**2, s

    return (), step


def test_a_number_that_is_a_tensor_is_read_at_every_call():
    factor = torch.tensor(3.0, requires_grad=True)
    tx = scaled_by_square(factor)
    with torch.no_grad():
        tx.update({"w": torch.ones(2)}, ())
    for _ in range(2):
        loss = tx.update({"w": torch.ones(2)}, ())[0]["w"].sum()
        assert torch.autograd.grad(loss, factor)[0] == 12.0
    with torch.no_grad():
        factor.fill_(2.0)
    assert tx.update({"w": torch.ones(2)}, ())[0]["w"].tolist() == [4.0, 4.0]


def test_a_step_of_numbers_is_called_once():
    calls = []

    def step(u: mfx.Leaf, s: Any):
        calls.append(1)
        return u * 2.0, s

    tx = made(step)
    for _ in range(3):
        tx.update(GRADS, ())
    assert calls == [1]


def test_a_tensor_that_a_step_reads_from_outside_may_change():
    factor, offsets = torch.tensor(2.0), torch.tensor([1.0])
    tx = made(lambda u, s: (torch.where(u > 0, u, offsets) * factor, s))
    grads = {"w": torch.tensor([1.0, -1.0])}
    assert tx.update(grads, ())[0]["w"].tolist() == [2.0, 2.0]
    factor.fill_(3.0)
    offsets.fill_(5.0)
    assert tx.update(grads, ())[0]["w"].tolist() == [3.0, 15.0]


def test_a_saved_step_runs_in_transforms_of_torch_func_and_on_donated_tensors():
    tx = made(lambda u, s: (u * 2.0 + 1.0, s))
    eager = tx.update({"w": torch.ones(2)}, ())[0]["w"]
    batched = torch.func.vmap(lambda u: tx.update({"w": u}, ())[0]["w"])(torch.ones(3, 2))
    gradient = torch.func.grad(lambda u: tx.update({"w": u}, ())[0]["w"].sum())(torch.ones(2))
    compiled = torch.compile(
        lambda u: tx.update({"w": u}, ())[0]["w"], fullgraph=True, backend="eager"
    )(torch.ones(2))
    donated = tx.update({"w": torch.ones(2)}, (), donate=True)[0]["w"]
    assert batched.tolist() == [eager.tolist()] * 3
    assert gradient.tolist() == [2.0, 2.0]
    assert (
        compiled.tolist()
        == donated.tolist()
        == tx.update({"w": torch.ones(2)}, ())[0]["w"].tolist()
    )


def test_a_sum_over_leaves_skips_gradients_of_none_and_is_a_plain_sum():
    grads = {"a": torch.tensor([3.0, 0.0]), "b": None, "c": torch.tensor(4.0)}
    tx, params = (
        by_a_norm_over_all_leaves(0.0),
        {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(())},
    )
    updates, state = tx.update(grads, tx.init(params), params)
    assert tx.locality is mfx.Locality.TREE
    assert state["largest"].dtype == torch.float64
    assert state["largest"] == 5.0
    assert updates["a"].tolist() == [0.5, 0.0]
    assert updates["b"] is None
    assert state["last"]["b"].tolist() == [0.0] * 3


def test_values_that_a_sum_has_computed_are_not_computed_again():
    tx, params = by_a_norm_over_all_leaves(), {"w": torch.randn(2, 2)}
    state = tx.init(params)
    with Calls() as calls:
        tx.update(params, state, params)
    assert (
        sum(
            number
            for name, number in calls.found.items()
            if "foreach_addcmul" in name or "foreach_add." in name
        )
        == 1
    )


def test_a_sum_of_values_with_the_shapes_of_leaves_is_an_error():
    tx = made(lambda u, s, *, sum_over_leaves: (u * sum_over_leaves(u * u), s))
    with pytest.raises(
        ValueError, match="found a value with the shapes of the leaves: reduce it first"
    ):
        tx.update(GRADS, ())
    tx = made(lambda u, s, *, sum_over_leaves: (u * sum_over_leaves(1.0), s))
    with pytest.raises(TypeError, match="sum_over_leaves adds up a value of each leaf"):
        tx.update(GRADS, ())


@pytest.mark.parametrize(
    ("options", "slot"), [({"locality": mfx.Locality.LEAF}, mfx.Slot()), ({}, mfx.Slot(mfx.int8()))]
)
def test_a_sum_over_leaves_needs_a_formula_of_elements(options: Any, slot: mfx.Slot):
    message = "bad: found the locality LEAF and a step with sum_over_leaves.*leave out locality= and quantized dtypes"
    with pytest.raises(TypeError, match=message):
        made(lambda u, s, *, sum_over_leaves: (u, s), (slot,), **options)


def test_a_step_names_its_extra_arguments():
    tx = made(lambda u, s, *, value: (u * value, (torch.maximum(s[0], value),)), (mfx.Number(1),))
    updates, state = tx.update(GRADS, tx.init(GRADS), value=torch.tensor(2.0))
    assert updates["w"].tolist() == [2.0, 2.0]
    assert state[0].tolist() == 2.0
    assert tx.extras.required == {"value"}
    with pytest.raises(TypeError, match="bad: the extra argument value= is missing"):
        tx.update(GRADS, state)


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("donate", [False, True])
def test_many_leaves_take_no_more_calls_than_one(donate: bool):
    tx = mfx.momentum()
    found = []
    for number in (1, 7):
        params = {f"p{i}": torch.randn(2, 2) for i in range(number)}
        grads = {name: torch.randn(2, 2) for name in params}
        state = tx.init(params)
        with Calls() as calls:
            tx.run(grads, state, params, donate=mfx.Donation(donate, donate))
        found.append(calls.found)
    assert found[0] == found[1]
    assert any("_foreach_" in name for name in found[0])


@pytest.mark.parametrize(
    "tx",
    [
        mfx.momentum(),
        mfx.momentum(nesterov=False),
        mfx.momentum(heavy_ball=True),
        mfx.scale_by_adam(mu_dtype=torch.bfloat16),
        mfx.accumulate(mfx.momentum(), 4),
    ],
    ids=repr,
)
def test_donated_storage_serves_again(tx: mfx.Transform):
    params, grads = ({"w": torch.randn(4, 3)} for _ in range(2))
    state = tx.init(params)
    here = [leaf.data_ptr() for leaf in mfx.tree.leaves(state) if leaf.ndim == 2]
    updates, state = tx.update(grads, state, params, donate=True)
    assert [leaf.data_ptr() for leaf in mfx.tree.leaves(state) if leaf.ndim == 2] == here
    assert tx.name != "momentum" or updates["w"].data_ptr() == grads["w"].data_ptr()


def test_a_step_leaves_no_cycle_that_keeps_tensors_alive():
    tx, params = mfx.scale_by_adam(), {"w": torch.randn(4, 3, dtype=torch.bfloat16)}
    state = tx.init(params)
    tx.update(params, state, params)  # keeps what it expects of a state
    gc.disable()
    try:
        gc.collect()
        before = sum(issubclass(type(found), Tensor) for found in gc.get_objects())
        tx.update(params, state, params)
        assert sum(issubclass(type(found), Tensor) for found in gc.get_objects()) == before
    finally:
        gc.enable()


GRADS = {"w": torch.ones(2)}


def made(step: Any, state: Any = (), **options: Any) -> mfx.Transform:
    @mfx.leafwise(**options)
    def bad():
        return state, step

    return bad()


@pytest.mark.parametrize("start", [0.25, 1, np.float32(0.25), Fraction(1, 4), -math.inf])
def test_a_number_may_start_at_any_real_number(start: Any):
    tx = made(lambda u, s: (u, s), (mfx.Number(start),))
    (number,) = tx.init({"w": torch.zeros(2)})
    assert number.dtype == torch.float64
    assert number.item() == float(start)


@pytest.mark.parametrize(
    "start", [math.nan, np.float32("nan"), 10**400], ids=["nan", "nan of NumPy", "too large"]
)
def test_a_number_that_starts_at_no_value_is_refused(start: Any):
    with pytest.raises(ValueError, match="Number: start must be"):
        mfx.Number(start)


@pytest.mark.parametrize("start", [True, 1j, "0.5", None, torch.tensor(True), torch.tensor(1j)])
def test_a_number_that_starts_at_no_real_number_is_refused(start: Any):
    with pytest.raises(TypeError, match="Number: start must be a number or a tensor, found"):
        mfx.Number(start)


@pytest.mark.parametrize(
    ("step", "state", "message"),
    [
        (
            lambda u, s: (torch.ones(2), s),
            (),
            "bad: the step returns an update of type Tensor, not one made of",
        ),
        (lambda u, s: u, (), r"bad: the step must return \(update, state\), found a Leaf"),
        (
            lambda u, s: (u, (1.0,)),
            (mfx.Slot(),),
            r"returns a float for '0' of its state, declared as Slot",
        ),
        (
            lambda u, s: (u, (u,)),
            (mfx.StepCount(),),
            r"returns a Leaf for '0' of its state, declared as StepCount",
        ),
        (
            lambda u, s: (u, s),
            {"n": mfx.StepCount()},
            r"returns the count 'n' of its state unchanged.*the count \+ 1",
        ),
        (
            lambda u, s: (u, {"a": u}),
            (mfx.Slot(),),
            "bad: the step returns another state than declared.*tuple",
        ),
        (
            lambda u, s: (u, s),
            (1.0,),
            "bad: a leafwise .* a state of Slot and StepCount and Number, found 1.0 at '0'",
        ),
        (
            lambda u, s: (u, s),
            {"p": mfx.Slot(start="params")},
            "'p' starts at the parameters declares reads_params",
        ),
        (
            lambda u, s, p: (u, s),
            (),
            r"bad: a leafwise .* step takes three .*\(u, s, p\), declares reads_params=True",
        ),
        (None, (), "bad: a leafwise constructor returns a state and a step, found"),
    ],
)
def test_a_step_that_cannot_be_carried_out_says_why(step: Any, state: Any, message: str):
    with pytest.raises(TypeError, match=message):
        made(step, state).update(GRADS, made(step, state).init(GRADS), GRADS)


def test_an_extra_argument_with_a_default_may_be_left_out():
    def step(u: mfx.Leaf, s: Any, *, value: float = 2.0):
        return u * value, s

    tx = mfx.chain(made(step))
    state = tx.init(GRADS)
    for extras, factor in (({}, 2.0), ({"value": 3.0}, 3.0), ({}, 2.0)):
        updates, _ = tx.update(GRADS, state, **extras)
        assert torch.equal(updates["w"], GRADS["w"] * factor)


@mfx.leafwise
def doubles():
    return mfx.core.EmptyState(), lambda u, s, *, value=2.0: (u * value, s)


@pytest.mark.slow
def test_a_compiled_step_of_new_numbers_is_one_graph_with_an_absent_parameter():
    example = kit.Example.of({"w": (2, 3), "b": (3,)}, steps=3)
    without_b = example.map_trees(lambda values: {"w": values["w"], "b": None})
    for tx in (mfx.chain(mfx.momentum(), doubles()), mfx.accumulate(mfx.momentum(), 2)):
        kit.laws.changing_a_number_does_not_recompile(tx, *without_b)


def test_a_step_that_reads_parameters_asks_for_them():
    tx = made(lambda u, s, p: (u + p, s), reads_params=True)
    assert tx.reads_params
    assert not made(lambda u, s: (u, s)).reads_params
    with pytest.raises(
        ValueError, match=r"bad needs the parameters: call update\(updates, state, params\)"
    ):
        tx.update(GRADS, ())


@pytest.mark.parametrize("step", [lambda u, s: (u, s), lambda u: (u, ())])
def test_a_step_without_an_argument_for_the_parameters_is_refused(step: Any):
    message = (
        r"bad: a leafwise constructor with reads_params=True returns a step of three .*, found \(u"
    )
    with pytest.raises(TypeError, match=message):
        made(step, reads_params=True)
    assert made(lambda *operands: operands[:2], reads_params=True).update(GRADS, (), GRADS) == (
        GRADS,
        (),
    )


def test_a_step_may_read_parameters_as_they_will_be():
    tx = made(lambda u, s, p: (p * 1.0, s), reads_params="updated")
    params = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    updates = {"w": torch.tensor([1e-3, 0.5])}
    found = tx.update(updates, (), params)[0]["w"]
    assert torch.equal(found, mfx.apply_updates(params, updates)["w"].float())
    with pytest.raises(
        TypeError, match="reads_params must be True, False or \"updated\", found 'after'"
    ):
        made(lambda u, s, p: (p, s), reads_params="after")


def test_a_compact_slot_makes_the_leaf_the_unit():
    assert rms_scaled().locality is mfx.Locality.ELEMENT
    assert rms_scaled(dtype=mfx.int8()).locality is mfx.Locality.LEAF
    assert normalized(dtype=mfx.int8()).locality is mfx.Locality.LEAF


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
    atom = st.one_of(
        st.sampled_from([("u",), ("p",)]), st.sampled_from(NUMBERS).map(lambda x: ("number", x))
    )
    if depth == 0:
        return atom
    inner = expressions(depth - 1)
    binary = st.tuples(
        st.sampled_from(ARITHMETIC + LOGIC + COMPARISONS + tuple(FUNCTIONS)), inner, inner
    )
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


def drawn(
    dtypes: tuple[torch.dtype, ...], seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
        except (RuntimeError, TypeError, AttributeError):
            # An operator that these tensors or numbers have not.
            return
        except ArithmeticError:  # an operator between two plain numbers, such as a division by zero
            return
        if not isinstance(made, Tensor) or made.shape != u.shape:
            return
        expected[name] = made.to(u.dtype)
    found, _ = computed(expression).update(updates, mfx.core.EmptyState(), params, donate=donate)
    for name, own in expected.items():
        torch.testing.assert_close(
            found[name],
            own,
            rtol=1e-5 if own.dtype.itemsize > 2 else 1e-2,
            atol=1e-6,
            equal_nan=True,
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


ONLY_VALUES = "a leaf has no truth value, index, .*: use torch.where, or write the transform"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not": (lambda u: not u, ONLY_VALUES),
    "if equal": (lambda u: 1.0 if u == 0 else u, ONLY_VALUES),
    "in": (lambda u: 1.0 in u, ONLY_VALUES),
    "iteration": (lambda u: list(u), ONLY_VALUES),
    "index": (lambda u: u[0], ONLY_VALUES),
    "assignment": (lambda u: operator.setitem(u, 0, 1.0), ONLY_VALUES),
    "matmul": (lambda u: u @ u, ONLY_VALUES),
    "float": (lambda u: float(u), ONLY_VALUES),
    "range": (lambda u: range(u), ONLY_VALUES),
    "shape": (lambda u: u.shape, "has no shape; write the transform with muonfx.transform"),
    "numel": (
        lambda u: u / u.numel(),
        "numel of a leaf is int, and a step works with tensors only; write the",
    ),
    "item": (lambda u: u.sum().item(), "item of a leaf is float"),
    "equal to None": (lambda u: u == None, "eq of a leaf is bool"),  # noqa: E711
    "mul_": (lambda u: u.mul_(2.0), "mul_ writes in place; use mul"),
    "torch.relu_": (lambda u: torch.relu_(u), "relu_ writes in place"),
    "inplace=True": (lambda u: torch.nn.functional.elu(u, inplace=True), "elu writes in place"),
    "out=": (lambda u: torch.add(u, u, out=u), "add writes in place"),
    "add_ to a tensor": (lambda u: torch.zeros(3).add_(u), "add_ writes in place"),
    "assignment to a tensor": (
        lambda u: operator.setitem(torch.zeros(3), 0, u),
        "__setitem__ writes in place",
    ),
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
        (
            ValueError,
            r"update of shape \(\) for 'b', expected its shape \(3,\)",
            lambda u: u.sum(),
            None,
        ),
        (
            ValueError,
            r"state of shape \(1, 3\) for 'b', expected its shape \(3,\)",
            None,
            lambda u: u[None] if isinstance(u, Tensor) else u.unsqueeze(0),
        ),
        (
            TypeError,
            "update of torch.complex64 for 'b', expected real numbers",
            lambda u: u * 1j,
            None,
        ),
        (TypeError, "state of torch.complex64 for 'b'", None, lambda u: torch.complex(u, u)),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_another_shape_or_complex_numbers_are_an_error(
    error: Any, message: str, update: Any, kept: Any, donate: bool
):
    @mfx.leafwise
    def wrong():
        def step(u: mfx.Leaf, s: Any):
            return (update or (lambda u: u))(u), {"kept": (kept or (lambda u: u))(u)}

        return {"kept": mfx.Slot()}, step

    tx, params = wrong(), {"a": None, "b": torch.ones(3)}
    with pytest.raises(error, match=f"wrong: the step returns an? {message}"):
        tx.update(params, tx.init(params), params, donate=donate)


# --------------------------------------------------------------------------------------- numbers in tensors, 0-d leaves


@mfx.leafwise
def tanh_of_quotient(temperature: float = 2.0):
    def step(u: mfx.Leaf, s: Any):
        return torch.tanh(u / temperature), s

    return mfx.core.EmptyState(), step


@given(value=st.floats(-3, 3, width=32), temperature=st.floats(0.125, 3))
def test_a_0d_leaf_has_the_bits_of_a_vector_with_a_number_in_a_tensor(
    value: float, temperature: float
) -> None:
    # Torch would compute a 0-d fp32 leaf and a 0-d fp64 number in fp64.
    leaf = torch.tensor(value)
    results: list[float] = []
    for number in (temperature, torch.tensor(temperature, dtype=torch.float64)):
        for grad in (leaf, leaf[None]):
            update, _ = tanh_of_quotient(number).update({"w": grad}, mfx.core.EmptyState())
            results.append(update["w"].item())
    assert len(set(results)) == 1
