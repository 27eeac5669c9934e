"""Names and patterns that do nothing are said, with those that may have been meant; good ones are not spoken of."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx import select, sharding
from muonfx.core.order import signs

PARAMS = {
    "h.0.attn.qkv.weight": torch.zeros(6, 2),
    "h.0.mlp.fc.weight": torch.zeros(4, 2),
    "h.0.norm.weight": torch.zeros(2),
    "wte.weight": torch.zeros(8, 2),
}
LABELS = {name: "muon" if name.startswith("h.") and leaf.ndim == 2 else "adamw" for name, leaf in PARAMS.items()}


def said(init: Any, params: Any = PARAMS) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init(params)
    return [str(warning.message) for warning in caught]


def muon_with_adamw(mask: Any = None, **view: Any) -> mfx.Transform:
    orthogonalize = mfx.orthogonalize(dtype=torch.float32, view=mfx.MatrixView(**view))
    return mfx.muon_with_adamw(0.1, labels=LABELS, orthogonalize=orthogonalize, mask=mask)


NOTHING_MATCHES = [
    (muon_with_adamw(blocks={"*.qvk.weight": 3}), r"blocks: '\*.qvk.weight' .* 4 parameters; close: 'h.0.attn.qkv"),
    (muon_with_adamw(dims={"*.experts.*": ((-2,), (-1,))}), r"dims: '\*.experts.\*' matches none .* they are 'h.0"),
    (muon_with_adamw(blocks={"*.weight": None, "*.qkv.*": 3}), r"'\*.qkv.\*' matches only names .* 'h.0.attn.qkv"),
    (muon_with_adamw(mask=~select.path("*.nrom.*")), r"mask: '\*.nrom.\*' matches none .* close: 'h.0.norm.weight'"),
    (mfx.masked(mfx.scale(2.0), select.path("wpe.*") & select.ndim(2)), "mask: 'wpe.*' matches none"),
    (mfx.add_decayed_weights(0.1, select.path("*.fcc.*")), "mask: .* close: 'h.0.mlp.fc.weight'"),
    (mfx.skip_nonfinite(mfx.accumulate(mfx.masked(mfx.scale(2.0), select.path("wpe.*")), 2)), "mask: 'wpe"),
]


@pytest.mark.parametrize(("tx", "message"), NOTHING_MATCHES)
@pytest.mark.parametrize("face", ["plain", "optimizer", "sharded", "offloaded", "meta"])
def test_a_pattern_that_matches_no_parameter_is_named_once_at_init(tx: mfx.Transform, message: str, face: str):
    layout = sharding.zero(PARAMS, 1)
    named = {name: nn.Parameter(leaf.clone()) for name, leaf in PARAMS.items()}
    downhill = tx if signs(tx) == {-1} else mfx.chain(tx, mfx.scale(-0.1))
    inits = {
        "plain": lambda: said(tx.init),
        "optimizer": lambda: said(lambda params: mfx.TransformOptimizer(params, downhill), named),
        "sharded": lambda: said(sharding.sharded(tx, layout).init, layout.shard(PARAMS)),
        "offloaded": lambda: said(sharding.offload(tx).init),
        "meta": lambda: said(tx.init, {name: leaf.to("meta") for name, leaf in PARAMS.items()}),
    }
    found = inits[face]()
    assert len(found) == 1, found
    assert re.search(message, found[0]), found[0]


@pytest.mark.parametrize(
    "tx",
    [
        muon_with_adamw(blocks={"*.qkv.weight": 3, "*": 1}, dims={"h.*": None}),
        # What only the other label has: the mask is one for both.
        muon_with_adamw(mask=select.path("wte.*")),
        muon_with_adamw(mask=~select.path("*bias", "*norm*", "*ln_?.*")),
        muon_with_adamw(mask=~(select.path("*bias") | select.path("*norm*"))),
        muon_with_adamw(mask=select.ndim(min=5)),
    ],
)
def test_a_pattern_that_matches_somewhere_is_not_spoken_of(tx: mfx.Transform):
    assert said(tx.init) == []
    assert all("there are no parameters" in message for message in said(tx.init, {}))


def test_updates_and_compiled_steps_do_not_warn_of_patterns():
    tx = mfx.masked(mfx.scale(2.0), select.path("wpe.*"))
    with pytest.warns(UserWarning, match="matches none"):
        state = tx.init(PARAMS)
    tx.update(PARAMS, state, PARAMS)
    torch._dynamo.reset()  # a test that raised while compiling leaves `Transform.update` marked as not to be compiled
    torch.compile(tx.update, fullgraph=True, backend="eager")(PARAMS, state, PARAMS)


def test_a_partition_without_some_label_says_which_labels_there_are_and_why():
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4))
    tx = mfx.muon_with_adamw(0.1, labels=mfx.default_labels(model))
    found = said(tx.init, {name: param.detach() for name, param in model.named_parameters()})
    assert len(found) == 1
    assert "no parameter has the label 'muon'" in found[0]
    assert "The labels of the 3 parameters are 'adamw' for 3" in found[0]
    assert "'0.weight' is 'adamw': embedding (module type Embedding); '1.bias' is 'adamw': norm" in found[0]


def test_monitors_of_one_name_are_an_error_where_they_are_read():
    tx = mfx.chain(mfx.monitor("seen"), mfx.scale(2.0), mfx.monitor("seen"))
    with pytest.raises(ValueError, match="two monitors measure 'seen/norm'"):
        mfx.metrics(tx.init(PARAMS))


UNUSABLE = {
    "fp8": (torch.zeros(2, 2).to(torch.float8_e4m3fn), "found torch.float8_e4m3fn; train a copy in bfloat16 or wider"),
    "complex": (torch.zeros(2, dtype=torch.complex64), "found torch.complex64; view it as real"),
    "int": (torch.zeros(2, dtype=torch.int64), "found torch.int64; leave it out"),
    "bool": (torch.zeros(2, dtype=torch.bool), "found torch.bool; leave it out"),
    "sparse": (
        torch.zeros(2, 2).to_sparse(),
        r"must be dense, found torch.sparse_coo; make it dense with .to_dense\(\)",
    ),
    "mkldnn": (torch.zeros(2, 2).to_mkldnn(), "must be dense, found torch._mkldnn"),
    "jagged": (
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
        "must be dense, found a nested tensor",
    ),
    "lazy": (nn.UninitializedParameter(), "has no shape yet, since it belongs to a lazy module"),
    "number": (1.0, "must be a tensor or None, found float"),
}


@pytest.mark.parametrize(("leaf", "message"), [pytest.param(*row, id=kind) for kind, row in UNUSABLE.items()])
@pytest.mark.parametrize("tx", [mfx.momentum(), mfx.muon(0.1), mfx.scale(1.0)], ids=["momentum", "muon", "scale"])
def test_a_parameter_that_cannot_be_trained_is_named_at_init(leaf: Any, message: str, tx: mfx.Transform):
    params = {"good": torch.zeros(2, 2), "blocks": [{"bad": leaf}]}
    for face in (tx, sharding.offload(tx)):
        with pytest.raises(TypeError, match=f"params: 'blocks.0.bad' .*{message}"):
            face.init(params)


@pytest.mark.parametrize("kind", [kind for kind in UNUSABLE if kind != "lazy"])
def test_a_gradient_that_cannot_be_used_is_named_before_anything_changes(kind: str):
    leaf, message = UNUSABLE[kind]
    tx = mfx.momentum()
    params = {"w": torch.zeros(2, 2)}
    state = tx.init(params)
    with pytest.raises(TypeError, match=f"updates: 'w' .*{message}"):
        tx.update({"w": leaf}, state)
