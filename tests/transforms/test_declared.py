"""Declarations that a new factory can forget: each test asks every public factory that they apply to."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import select
from muonfx import testing as kit
from muonfx.core.order import signs
from tests.public import NAMES
from tests.transforms.test_every_transform import CASES, SHAPES, WITH_HEADS

ROWS_AND_COLUMNS = ((-2,), (-1,))
EVERY = [pytest.param(tx, id=f"{name}-{place}") for name, cases in CASES.items() for place, tx in enumerate(cases)]


def within(tx: mfx.Transform) -> Iterator[mfx.Transform]:
    """A transform and all that it calls."""
    yield tx
    for part in tx.children:
        yield from within(part)


def factories() -> dict[str, Callable[..., mfx.Transform]]:
    """Every public factory and recipe by name."""
    return {name: NAMES[name] for name in kit.arguments()}


# --------------------------------------------------------------------------------------------------- patterns

TYPO: dict[str, Any] = {
    "view": mfx.MatrixView(dims={"typo*": ROWS_AND_COLUMNS}),
    "orthogonalize": mfx.orthogonalize(view=mfx.MatrixView(blocks={"typo*": 2})),
    "mask": select.path("typo*"),
    "heads": mfx.AttentionHeads("typo*", heads=2),
}
INNER = mfx.scale(1.0)
REQUIRED: dict[str, Any] = {"inner": INNER, "heads": (), "labels": {"w": "muon"}, "limit": 1.0}
PATTERNS = [
    pytest.param(factory, argument, id=f"{name}-{argument}")
    for name, factory in factories().items()
    for argument in inspect.signature(factory).parameters
    if argument in TYPO
]


@pytest.mark.filterwarnings("ignore:partition. no parameter has the label")
@pytest.mark.parametrize(("factory", "argument"), PATTERNS)
def test_a_pattern_that_matches_no_parameter_is_reported_at_init(factory: Callable[..., mfx.Transform], argument: str):
    parameters = inspect.signature(factory).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD} | (
        {"labels"} & {p.name for p in parameters}
    )
    given = {name: REQUIRED[name] for name in required if name in REQUIRED} | {argument: TYPO[argument]}
    given |= dict.fromkeys(required - given.keys(), 1.0)
    tx = factory(**given)
    if argument == "heads":
        with pytest.raises(ValueError, match=r"heads: 'typo\*.* matches none"):
            tx.init({"w": torch.ones(2, 2)})
    else:
        with pytest.warns(UserWarning, match=rf"({argument}|dims|blocks): 'typo\*' matches none") as caught:
            tx.init({"w": torch.ones(2, 2)})
        assert {found.filename for found in caught} == {__file__}


# ----------------------------------------------------------------------------------------------------- extras

WITH_EXTRAS = {
    (part.factory.__name__, extra): part
    for tx in [case for cases in CASES.values() for case in cases] + [*WITH_HEADS.values()]
    for part in within(tx)
    if "muonfx.testing" not in part.factory.__module__ and "tests" not in part.factory.__module__
    for extra in part.extras.named & (part.understood_extras or frozenset())
}
HEADS_PARAMS = {name: torch.ones(shape) for name, shape in SHAPES.items()}


def test_the_extras_that_public_transforms_read_are_these():
    assert {extra for _, extra in WITH_EXTRAS} == {"boundary", "max_logits", "value"}


@pytest.mark.parametrize(("name", "extra"), WITH_EXTRAS)
@pytest.mark.parametrize("wrong", ["no", 1j, torch.ones(2, dtype=torch.complex64)], ids=str)
def test_an_extra_of_a_wrong_kind_is_named_before_anything_is_done(name: str, extra: str, wrong: Any):
    tx = WITH_EXTRAS[name, extra]
    if not tx.children:
        tx = mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.1), tx)
    state = tx.init(HEADS_PARAMS)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: {extra} must be"):
        tx.update(HEADS_PARAMS, state, HEADS_PARAMS, **{extra: wrong})
    live = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in HEADS_PARAMS.items()}
    optimizer = mfx.TransformOptimizer(live, mfx.chain(mfx.scale(-0.1), tx) if signs(tx) == {1} else tx)
    for param in live.values():
        param.grad = torch.ones_like(param)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: {extra} must be"):
        optimizer.step(**{extra: wrong})
    assert all(torch.equal(param, HEADS_PARAMS[path]) for path, param in live.items())


# ------------------------------------------------------------------------------------------------------ order

GRADS = {"a.weight": torch.tensor([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0], [-1.0, 0.75, 0.5], [0.3, -0.2, 1.5]])}


def first_update(tx: mfx.Transform, size: float, params: float) -> torch.Tensor:
    """The first update for gradients of a size, at parameters of a size."""
    at = mfx.tree.map(lambda g: params * g.flip(0), GRADS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label or a pattern of a case has no parameter here
        return tx.update(mfx.tree.map(lambda g: size * g, GRADS), tx.init(at), at)[0]["a.weight"]


@pytest.mark.parametrize("tx", EVERY)
def test_the_direction_of_updates_is_what_is_said_of_it(tx: mfx.Transform):
    direction = (first_update(tx, 1e3, 0.0) * GRADS["a.weight"]).sum()
    assert signs(tx) - {0} in (set(), {1}, {-1})
    assert 1 not in signs(tx) or direction >= 0
    assert -1 not in signs(tx) or direction <= 0


@pytest.mark.parametrize("tx", [param for param in EVERY if not param.values[0].children])
def test_a_transform_that_sets_the_size_of_updates_declares_it(tx: mfx.Transform):
    if tx.position in ("turns", "either_sign"):
        return
    if tx.position == "sets_size":
        torch.testing.assert_close(first_update(tx, 1e3, 1.0), first_update(tx, 4e3, 1.0), rtol=0.03, atol=0.03)
    else:
        small, larger = first_update(tx, 0.01, 1.0), first_update(tx, 0.04, 1.0)
        assert not torch.allclose(small, larger, rtol=1e-3) or not (small.any() or larger.any())
