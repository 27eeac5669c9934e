"""Every public transform and recipe, each with a small tree of parameters that it accepts."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from tests import variants
from tests.transforms.test_every_transform import CASES, SHAPES, TWO_STEPS, WITH_HEADS

Tensors = dict[str, Tensor]

MATRICES = {"w": (4, 6), "twin": (4, 6), "tall": (5, 3), "stack": (2, 3, 4)}
VECTORS = {"b": (7,), "s": ()}

BY_NAME = {"orthogonalize": TWO_STEPS, "labels": mfx.routing.default_labels_by_name}
VARIANTS: dict[str, mfx.Transform] = {
    "adamuon": variants.adamuon(0.1, orthogonalize=TWO_STEPS),
    "dion": variants.dion(0.1, rank=2),
    "dion2": variants.dion2(0.1, shrink=2),
    "musgd": variants.musgd(0.1, orthogonalize=TWO_STEPS),
    "muon_hyperball": variants.muon_hyperball(0.1, orthogonalize=TWO_STEPS),
    "namo": variants.namo(0.1, orthogonalize=TWO_STEPS),
    "paper_normuon": variants.paper_normuon(0.1, orthogonalize=TWO_STEPS),
    "polargrad": variants.polargrad(0.1, orthogonalize=TWO_STEPS),
    "prodigy": variants.prodigy(estim_lr0=0.1),
    "scion": mfx.contrib.scion(0.1, **BY_NAME),
    "shampoo": variants.shampoo(0.1),
    "soap": variants.soap(0.1),
    "soap_muon": variants.soap_muon(0.1, orthogonalize=TWO_STEPS),
}
"""The chains of variants, and the recipe of `muonfx.contrib`."""


class Case(NamedTuple):
    """A transform and the shapes of the parameters that it is tried on."""

    name: str
    tx: mfx.Transform
    shapes: dict[str, tuple[int, ...]]

    def example(
        self, steps: int, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensors, list[Tensors]]:
        """Return random parameters and the gradients of several steps."""
        params, grads = kit.Example.of(self.shapes, steps=steps, dtype=dtype)
        return params, grads

    def run(self, params: Tensors, steps: list[Tensors]) -> list[Tensors]:
        """Return the updates of several steps from the initial state."""
        return kit.examples.updates_of(self.tx, params, steps)


def _shapes_for(tx: mfx.Transform) -> dict[str, tuple[int, ...]]:
    """Return shapes that a transform accepts: with vectors and a number, unless it needs matrices."""
    if tx.name == "given_logits":
        return dict(SHAPES)
    everything = MATRICES | VECTORS
    params = {name: torch.ones(shape) for name, shape in everything.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a pattern of the case may match none of these names
            tx.update(params, tx.init(params), params)
    except ValueError:
        return dict(MATRICES)
    return everything


def _all_cases() -> list[Any]:
    named: list[tuple[str, str, mfx.Transform]] = []
    for name, transforms in CASES.items():
        named += [(f"{name}-{number}", name, tx) for number, tx in enumerate(transforms)]
    named += [(f"{name}-heads", name, tx) for name, tx in WITH_HEADS.items()]
    named += [(name, name, tx) for name, tx in VARIANTS.items()]
    return [
        pytest.param(Case(name, tx, _shapes_for(tx)), id=identity) for identity, name, tx in named
    ]


EVERY_CASE = _all_cases()
"""A pytest parameter with a `Case` for every public transform, for its further settings, and for every recipe."""
