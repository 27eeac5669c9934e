"""`Transform.tree`: every transform once, with its locality and its numbers."""

import pytest
import torch

import muonfx as mfx


def rows_of(tx: mfx.Transform):
    return [row for first in tx.tree().report().parts[0].rows for _, row in first.walk()]


def transforms_in(tx: mfx.Transform):
    return [tx] + [inner for child in tx.children for inner in transforms_in(child)]


LABELS = {"a": "muon", "b": "adamw", "c": "adamw"}
CHAINS = [
    mfx.momentum(0.9),
    mfx.muon_with_adamw(0.02, 1e-3, labels=LABELS),
    mfx.skip_nonfinite(mfx.accumulate(mfx.chain(mfx.momentum(), mfx.momentum(0.5)), 4)),
    mfx.sharding.sharded(mfx.masked(mfx.momentum(), {"w": True}), mfx.sharding.zero({"w": torch.zeros(2, 2)}, 2)),
    mfx.add_updates(mfx.momentum(), mfx.scale(2.0)),
]


@pytest.mark.parametrize("tx", CHAINS)
def test_each_transform_has_a_row_with_its_locality(tx: mfx.Transform):
    inside, rows = transforms_in(tx), rows_of(tx)
    assert [row.cells[0].rpartition(": ")[2] for row in rows] == [one.name for one in inside]
    assert [row.cells[1] for row in rows] == [one.locality.name for one in inside]


def test_names_and_numbers_are_shown():
    text = str(CHAINS[2].tree())
    assert "momentum_2: momentum" in text
    assert "decay=0.5" in text
