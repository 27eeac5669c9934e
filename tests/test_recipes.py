"""Recipes are made of their parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.core.contract import within


@pytest.mark.parametrize("make", [mfx.muon, mfx.normuon, mfx.muon_with_adamw])
def test_the_orthogonalizing_part_and_its_view_reach_every_matrix_transform(make: Callable[..., mfx.Transform]) -> None:
    view = mfx.MatrixView(blocks={"*": 2})
    part = mfx.orthogonalize(method="gram", view=view)
    labels = {"labels": {"w": "muon"}} if make is mfx.muon_with_adamw else {}
    found = list(within(make(0.1, orthogonalize=part, **labels)))
    assert part in found
    assert {tx.arguments["view"] for tx in found if "view" in tx.arguments} == {view}


def test_the_view_of_a_part_is_the_first_one_within_it() -> None:
    view = mfx.MatrixView(blocks={"*": 2})
    part = mfx.chain(mfx.scale(2.0), mfx.contrib.normalize_rows(view=view))
    assert mfx.scale_by_shape(view=view) in within(mfx.muon(0.1, orthogonalize=part))
    assert mfx.scale_by_shape() in within(mfx.muon(0.1, orthogonalize=mfx.scale_by_sign()))


def test_the_optimizer_adds_the_views_of_the_routing_to_those_of_its_part() -> None:
    model = torch.nn.MultiheadAttention(8, 2)
    part = mfx.orthogonalize(view=mfx.MatrixView(blocks={"out_proj.*": 2}))
    (found,) = {tx.arguments["view"] for tx in within(mfx.Muon(model, orthogonalize=part).tx) if "view" in tx.arguments}
    assert found.of(["out_proj.weight", "in_proj_weight"]) == [mfx.MatrixView(blocks=2), mfx.MatrixView(blocks=3)]


@pytest.mark.parametrize("part", ["keller", {"steps": 3}, mfx.orthogonalize, None])
@pytest.mark.parametrize("make", [mfx.muon, mfx.normuon, mfx.muon_with_adamw, mfx.contrib.scion, mfx.contrib.namo])
def test_a_part_that_is_no_transform_is_refused_by_name(make: Callable[..., Any], part: Any) -> None:
    with pytest.raises(TypeError, match=r"^orthogonalize must be a muonfx.Transform, found"):
        make(0.1, orthogonalize=part)


def test_nesterov_reaches_adam_and_is_not_shown_by_default() -> None:
    ahead = mfx.scale_by_adam(0.9, 0.95, nesterov=True)
    assert repr(ahead) in repr(mfx.adamw(0.1, b2=0.95, nesterov=True))
    assert repr(ahead) in repr(mfx.muon_with_adamw(0.1, adam=ahead))
    assert mfx.adamw(0.1, nesterov=False).fingerprint == mfx.adamw(0.1).fingerprint
    assert "nesterov" not in repr(mfx.adamw(0.1)) + repr(mfx.muon_with_adamw(0.1))
