"""A recipe inside another chain: its leaves have other names, and the error prints the renaming that loads them."""

import re

import pytest
import torch

import muonfx as mfx
from muonfx import checkpoint, tree
from muonfx.select import default_labels_by_name
from muonfx.tree.renaming import new_names

PARAMS = {"h.0.fc.weight": torch.ones(3, 3), "h.1.fc.weight": torch.ones(3, 3), "wte.weight": torch.ones(4, 3)}


def recipe() -> mfx.Transform:
    return mfx.muon_with_adamw(0.1, orthogonalize=mfx.orthogonalize(dtype=torch.float32), labels=default_labels_by_name)


def stepped(tx: mfx.Transform):
    """A state with values of its own in each leaf."""
    state = tx.init(PARAMS)
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        grads = {name: torch.randn(param.shape, generator=draw) for name, param in PARAMS.items()}
        _, state = tx.update(grads, state, PARAMS)
    return state


def printed(message: str) -> dict[str, str] | None:
    """The renaming in an error, read as a user would paste it."""
    found = re.search(r"^  if only the names of leaves differ: rename=(.*)$", message, re.MULTILINE)
    return None if found is None or "name in the checkpoint" in found[1] else eval(found[1])


CLIP = mfx.clip_by_global_norm(1.0)
ADAM = mfx.adamw(0.1)
ALL = dict.fromkeys(PARAMS, "all")
WRAPPED = {
    "in a chain": (recipe(), lambda tx: mfx.chain(CLIP, tx)),
    "named": (recipe(), lambda tx: mfx.chain(CLIP, ("opt", tx))),
    "named chain": (ADAM, lambda tx: mfx.chain(CLIP, ("opt", tx))),
    "two chains": (recipe(), lambda tx: mfx.chain(CLIP, ("outer", mfx.chain(CLIP, ("inner", tx))))),
    "partition around": (ADAM, lambda tx: mfx.partition({"all": tx}, ALL)),
    "partition in a chain": (ADAM, lambda tx: mfx.chain(CLIP, mfx.partition({"all": tx}, ALL))),
    "accumulate": (recipe(), lambda tx: mfx.accumulate(tx, 2)),
    "skip_nonfinite": (recipe(), lambda tx: mfx.skip_nonfinite(tx)),
    "ema beside": (recipe(), lambda tx: mfx.chain(tx, mfx.ema_params(0.9))),
    "bare": (mfx.momentum(), lambda tx: mfx.chain(tx, mfx.scale(-1.0))),
    "suffix": (mfx.chain(("a", mfx.momentum()), ("a_2", mfx.momentum(0.5))), lambda tx: mfx.chain(CLIP, ("a", tx))),
}


@pytest.mark.parametrize(("inner", "wrap"), WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("into", [True, False], ids=["into", "out of"])
@pytest.mark.filterwarnings("ignore:accumulate|default_labels")
def test_the_printed_renaming_loads_a_recipe_into_another_chain_and_out_of_it(inner, wrap, into, tmp_path):
    outer = wrap(inner)
    source, target = (inner, outer) if into else (outer, inner)
    state = stepped(source)
    path = checkpoint.save(tmp_path / "saved", state, tx=source)
    like = target.init(PARAMS)
    with pytest.raises(checkpoint.MismatchError) as caught:
        checkpoint.load(path, like=like, tx=target)
    rename = printed(str(caught.value))
    assert rename is not None
    loaded = checkpoint.load(
        path, like=like, tx=target, rename=rename, allow_other_chain=True, allow_missing=into, allow_extra=not into
    )
    saved = checkpoint.read(path)
    mine = checkpoint.read(checkpoint.save(tmp_path / "again", loaded))
    names, wrong = new_names({name: name for name in saved}, rename)
    assert not wrong
    shared = {new: old for old, new in names.items() if new in mine}
    # Every leaf of the recipe has arrived, bit for bit.
    assert len(shared) == min(len(saved), len(mine)) == len(tree.leaves(inner.init(PARAMS)))
    for new, old in shared.items():
        assert torch.equal(mine[new], saved[old])


UNCLEAR = {
    "two of a kind": (mfx.momentum(), mfx.chain(("one", mfx.momentum()), ("other", mfx.momentum()))),
    "another transform": (mfx.chain(mfx.scale_by_lion(), CLIP), mfx.chain(mfx.scale_by_adam(), CLIP)),
    "another field": (mfx.chain(mfx.momentum(), CLIP), mfx.chain(("opt", mfx.chain(mfx.scale_by_lion(), CLIP)))),
}


@pytest.mark.parametrize(("source", "target"), UNCLEAR.values(), ids=UNCLEAR)
def test_leaves_that_could_have_several_partners_or_have_none_are_not_guessed(source, target, tmp_path):
    path = checkpoint.save(tmp_path / "saved", stepped(source))
    with pytest.raises(checkpoint.MismatchError) as caught:
        checkpoint.load(path, like=target.init(PARAMS))
    assert "what to do" in str(caught.value)
    assert printed(str(caught.value)) is None
