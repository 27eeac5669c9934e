"""No step of a recipe makes the host wait for the device: the operators that wait are counted at the dispatcher.

Updates run on meta tensors, from which a copy to the host is an error. A torch optimizer requires tensors with values.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import muonfx as mfx
from muonfx import recipes
from tests import variants

aten = torch.ops.aten
# Operators whose result has a size or a value that the host must know.
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
}
MATRICES = {
    "h.0.attn.q_proj.weight": (48, 32),
    "h.0.attn.k_proj.weight": (48, 32),
    "h.0.fc.weight": (300, 400),
}
OTHERS = {"h.0.fc.bias": (300,), "wte.weight": (64, 32)}
HEADS = mfx.AttentionHeads("*.attn", heads=2)
LABELS = mfx.routing.default_labels_by_name
LABELLED: dict[str, Callable[[Any], mfx.Transform]] = {
    "muon_with_adamw": lambda rate: mfx.muon_with_adamw(rate, labels=LABELS),
    "muonclip": lambda rate: mfx.muonclip(HEADS, rate, labels=LABELS),
    "scion": lambda rate: mfx.contrib.scion(rate, labels=LABELS),
}
SIMPLE = {name: getattr(mfx, name) for name in recipes.__all__ if name not in LABELLED}
SIMPLE |= {make.__name__: make for make in variants.SIMPLE}
SIMPLE["prodigy"] = lambda rate: variants.prodigy(learning_rate=rate)
RATES = {"a number": 0.01, "a schedule": mfx.warmup_cosine_decay_schedule(0.01, 2, 10)}


class Synchronizations(TorchDispatchMode):
    """Keeps the operators for which the host waits for a device, on whatever device they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if func in WAITING or by_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def drawn(shapes: dict[str, tuple[int, ...]], device: str) -> dict[str, Tensor]:
    return {name: torch.full(shape, 0.5, device=device) for name, shape in shapes.items()}


def built(name: str, rate: Any) -> tuple[mfx.Transform, dict[str, tuple[int, ...]]]:
    """A recipe with a learning rate, and shapes of parameters that it accepts."""
    if name in LABELLED:
        return LABELLED[name](rate), MATRICES | OTHERS
    return SIMPLE[name](rate), MATRICES


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", [*LABELLED, *SIMPLE])
@pytest.mark.parametrize("donate", [False, True])
def test_no_update_of_a_recipe_waits_for_the_device(name: str, rate: str, donate: bool):
    tx, shapes = built(name, RATES[rate])
    params = drawn(shapes, "meta")
    state = tx.init(params)
    logits = (
        {"max_logits": {"h.0.attn": torch.empty(2, device="meta")}} if name == "muonclip" else {}
    )
    with Synchronizations() as counted:
        for _ in range(3):
            _, state = tx.update(drawn(shapes, "meta"), state, params, donate=donate, **logits)
    assert counted.found == []
    assert {leaf.device.type for leaf in mfx.tree.leaves(state)} == {"meta"}


@pytest.mark.parametrize("name", [*LABELLED, *SIMPLE])
def test_no_step_of_a_torch_optimizer_waits_for_the_device(name: str):
    tx, shapes = built(name, 0.01)
    params = {key: torch.nn.Parameter(value) for key, value in drawn(shapes, "cpu").items()}
    optimizer = mfx.TransformOptimizer(params, tx)
    logits = {"max_logits": {"h.0.attn": torch.ones(2)}} if name == "muonclip" else {}
    with Synchronizations() as counted:
        for _ in range(3):
            for param in params.values():
                param.grad = torch.empty_like(param)
            optimizer.step(**logits)
    assert counted.found == []


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        ("_local_scalar_dense", lambda x: x.sum().item()),
        ("_local_scalar_dense", lambda x: 1 if x.sum() > 0 else 0),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 0]),
        ("equal", lambda x: torch.equal(x, x)),
    ],
)
def test_the_counter_sees_what_waits(operator: str, call: Callable[[Tensor], object]):
    with Synchronizations() as counted:
        call(torch.ones(3))
    assert [name.split(".")[1] for name in counted.found] == [operator]
