"""A chain whose "auto" is decided asks no machine, and is the same otherwise."""

from unittest import mock

import torch

import muonfx as mfx
from muonfx.core import Transform
from muonfx.polar import policy
from muonfx.program.lower import with_compute_dtype

PARAMS = {"a": torch.ones(3, 4), "b": torch.ones(2, 2, dtype=torch.float64), "c": torch.ones(2)}


def test_every_transform_that_may_say_auto_says_how_it_is_decided():
    found = [getattr(mfx, name) for name in mfx.__all__ if hasattr(getattr(mfx, name), "definition")]
    # the "auto" of a state's dtype asks no machine: it follows from the parameter's
    asking = [
        factory
        for factory in found
        if (given := factory.definition.parameters.get("dtype"))
        and given.default == "auto"
        and "State" not in given.annotation
    ]
    assert [factory.__name__ for factory in asking] == ["orthogonalize"]
    for factory in asking:
        assert factory.definition.declaration.with_compute_dtype is not None, factory.__name__


def asks(tx: Transform) -> bool:
    own = tx.factory is mfx.orthogonalize and tx.arguments["dtype"] == "auto"
    return own or any(asks(part) for part in tx.parts if isinstance(part, Transform))


def test_no_auto_is_left_however_deep_and_no_machine_is_asked():
    inner = mfx.partition(
        {"x": mfx.chain(mfx.momentum(), mfx.orthogonalize()), "y": mfx.scale(2.0)}, {"a": "x", "b": "x", "c": "y"}
    )
    tx = mfx.skip_nonfinite(mfx.inject_hyperparams(mfx.chain(inner, mfx.scale(-0.1))))
    assert asks(tx)
    decided = with_compute_dtype(tx, torch.float32)
    assert not asks(decided)
    assert mfx.hyperparams(decided) == mfx.hyperparams(tx)
    with mock.patch.object(policy, "_fastest", side_effect=AssertionError("a machine was asked")):
        updates, _ = decided.update(PARAMS, decided.init(PARAMS), PARAMS)
    by_hand = mfx.orthogonalize(dtype=torch.float64).update({"b": PARAMS["b"] * 0.1}, mfx.EmptyState())[0]["b"]
    torch.testing.assert_close(updates["b"], -0.1 * by_hand)  # float64 stays float64
    again = with_compute_dtype(mfx.with_hyperparams(tx, {"inner.inner.scale.factor": -0.2}), torch.float32)
    assert mfx.tree.flatten(again)[1] == mfx.tree.flatten(decided)[1]
    assert with_compute_dtype(decided, torch.float32) is decided
