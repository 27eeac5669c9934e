"""A wrong argument is an error at the call; names and patterns that do nothing are reported, with a suggestion."""

import re
import types
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx import routing, sharding
from muonfx.core.order import signs
from tests.public import NAMES

MODEL = torch.nn.Linear(2, 2)
NAMESPACE: dict[str, Any] = {
    **vars(mfx),
    **NAMES,
    "torch": torch,
    "mfx": mfx,
    "MODEL": MODEL,
    "W": {"w": torch.zeros(2)},
    "HEADS": {f"attn.{name}.weight": torch.zeros(6, 3) for name in ("q_proj", "k_proj", "qkv")},
    "SGD": torch.optim.SGD([torch.zeros(1)]),
}

WRONG = {
    # numbers outside their range
    "momentum(-0.1)": r"decay must be in \[0, 1\), found -0.1",
    "scale_by_learning_rate(-1.0)": "learning_rate must be at least 0",
    "scale_by_adam(b2=1.0)": r"b2 must be in \[0, 1\)",
    "scale_by_adam(eps=-1.0)": "eps must be at least 0",
    "add_decayed_weights(-0.1)": "weight_decay must be at least 0",
    "clip_by_global_norm(0.0)": "max_norm must be above 0",
    "contrib.scale_by_factored_rms(min_dim_size_to_factor=0)": "min_dim_size_to_factor must be an int of 1",
    "accumulate(momentum(), 0)": "every must be an int of 1 or more",
    "contrib.scale_by_dion(rank=0)": "rank must be .*found 0",
    "contrib.scale_by_namo(identity(), b2=-0.1)": "b2 must be in .*found -0.1",
    "contrib.scale_by_prodigy(b1=1.0)": "b1",
    "contrib.scale_by_prodigy(estim_lr0=0.0)": "estim_lr0",
    "contrib.reduce_on_plateau(factor=1.0)": "factor",
    "contrib.reduce_on_plateau(patience=0)": "patience",
    "contrib.reduce_on_plateau(min_scale=-1.0)": "min_scale",
    "contrib.reduce_on_plateau(rtol=0.0, atol=0.0)": "rtol",
    "contrib.schedule_free(scale(-0.1), 0.1, b1=0.0)": "b1",
    # factors of parameters, which would reverse them
    "contrib.radial_brake(inward=3.0)": "inward must be from 0 to 1, found 3.0",
    "contrib.radial_brake(1.5)": "outward must be from 0 to 1, found 1.5",
    "contrib.radial_brake(linear_schedule(0.5, 2.0, 10))": "radial_brake: at step 10, outward must be from 0 to 1",
    "subtract_decayed_weights(1.5)": "weight_decay must be from 0 to 1, found 1.5",
    "contrib.scion(1.5)": "learning_rate must be from 0 to 1, found 1.5",
    "contrib.reduce_on_plateau(min_scale=2.0)": "min_scale must be from 0 to 1, found 2.0",
    "contrib.sam(-1.0)": "rho must be at least 0",
    "contrib.scion(norms={'muon': ('sign', -1.0)})": r"scion: norms\['muon'\] has the radius -1.0",
    "contrib.scion(norms={'muon': ('spectrum', 1.0)})": r"scion: norms\['muon'\] has the norm 'spectrum', expected",
    "AttentionHeads('*', 3, 2)": "heads must be a multiple of key_heads, found 3 and 2",
    "AttentionHeads('*', 2, query_dims=(2, 2))": "query_dims must be .* with 0 <= first < end",
    "AttentionHeads('*', 0)": "heads must be an int of 1 or more",
    "qk_clip(AttentionHeads('*', 2), alpha=1.5)": "alpha must be from 0 to 1",
    "int8(block=0)": "block must be an int of 1 or more, found 0",
    "warmup_cosine_decay_schedule(1.0, 20, 10)": "warmup_steps must be at most total_steps",
    # Optax's third argument is a share, alpha, and its first of a warmup is the start.
    "cosine_decay_schedule(1e-3, 100, 0.1)": "too many positional arguments; .* takes start, steps, end=",
    "warmup_cosine_decay_schedule(0, 1, 10, 100)": "too many .* takes peak, warmup_steps, total_steps, start=, end=",
    "exponential_decay(1.0, 0, 0.5)": "steps must be an int of 1 or more, found 0",
    "exponential_decay(1.0, 1, 0.0)": "rate must be above 0, found 0.0",
    "momentum(linear_schedule(-0.5, 0.9, 4))": r"momentum: at step 0, decay must be in \[0, 1\)",
    "momentum(linear_schedule(0.5, 1.0, 40))": r"momentum: at step 100, decay must be in \[0",
    "scale_by_learning_rate(exponential_decay(0.0, 1, 2.0))": "at step 10000, learning_rate must be finite, found nan",
    # declarations
    "transform(locality='ELEMENT')": "locality must be a Locality",
    "transform(locality=0)": "locality must be a Locality",
    "transform(combinator=Locality.TREE)": "combinator must be a Combinator",
    "transform(reads_params='no')": "reads_params must be True, False or a function",
    "transform(reads_params=0)": "reads_params must be True, False or a function",
    "transform(matrices=True)": "matrices must be a MatrixWork",
    # predicates and labels
    "routing.ndim()": "give either the exact number, or min, max or both",
    "routing.ndim(2, min=1)": "give either the exact number, or min, max or both",
    "routing.path()": "needs at least one pattern",
    "routing.path(['a'])": r"path: found \['a'\], expected a string; pass several",
    "routing.module_type()": "needs at least one type",
    "routing.module_type(3)": "module_type: found 3, expected a class",
    "routing.where('x')": "where: found 'x', expected a function of a ParamInfo",
    "routing.ndim(2) and routing.path('*')": r"ndim\(2\) has no truth value by itself: call it on a ParamInfo",
    "routing.ndim(2) | 'x'": "unsupported operand",
    "routing.Labels({'w': 3})": "parameter 'w': found the label 3, expected a string",
    "routing.Labels({3: 'w'})": "found 3 as a parameter name",
    # names that are not in a registry
    "scale_by_shape('moonshot')": 'scale_by_shape: lr_scaling must be "fan_in" or .*, found .moonshot',
    "orthogonalize(coefficients='kellr')": "keller",
    "normalize_neurons(axis='columns')": 'axis must be "longer" or "rows", found .columns',
    "monitor(metrics=('size',))": "found the metrics",
    "Slot(start='ones')": 'start must be "params" or "zeros", found .ones',
    "int8(code='log')": 'int8: code must be "dynamic" or "linear", found .log.',
    "fp8(format='e3m4')": 'fp8: format must be "e4m3" or "e5m2", found .e3m4.',
    "sharding.offload(momentum(), to='cpu:0')": "to: found 'cpu:0', expected \"cpu\" or the path of a folder",
    "sharding.offload(momentum(), to='disk')": "to: found 'disk', expected \"cpu\" or the path of a folder",
    "sharding.offload(momentum(), bucket_bytes=0)": "bucket_bytes: found 0",
    # values of another kind, and arguments that contradict each other
    "sharding.offload(momentum(), to=3)": "to must be",
    "sharding.offload('momentum')": r"tx must be a muonfx\.Transform",
    "momentum(lambda count: 0.9)": r"pass muonfx\.schedule\(lambda: f\)\(\)",
    "muon(MODEL)": r"learning_rate .*found Linear.*muonfx\.Muon\(model\)",
    "adamw(MODEL.parameters())": r"learning_rate .*muonfx\.Muon\(model\)",
    "adamw('1e-3')": "learning_rate .*found '1e-3': .*float.*YAML reads 1e-3 as a text, and 1.0e-3 as a number",
    "Muon(MODEL, adamw_lr='1E-3')": "adamw_lr .*found '1E-3': .*YAML reads 1e-3 as a text",
    "adamw(torch.float32)": "learning_rate .*found torch.float32",
    "adamw(torch.optim.AdamW)": "learning_rate .*found <class",
    "adamw(torch.optim.lr_scheduler.ConstantLR(SGD))": "learning_rate .*a torch scheduler acts on an optimizer",
    "adamw(linear_schedule)": r"learning_rate .*found <function linear_schedule.*call it, as in linear_schedule\(\)",
    "Muon(MODEL, muon())": r"lr .*it is a transform; .*muonfx\.TransformOptimizer\(model, transform\)",
    "Muon(MODEL, weight_decay={'embedding': 0.1})": r"weight_decay .*found {'embedding': 0.1}$",
    "momentum(dtype=int8)": r"momentum: dtype .*found <function int8.*call it, as in int8\(\)",
    "scale_by_adam(nu_dtype=fp8)": r"nu_dtype .*call it, as in fp8\(\)",
    "ema_params(dtype='int8')": r"dtype .*or muonfx\.int8\(\)",
    "muonclip(1e-3, heads=AttentionHeads('*', 2), labels={})": r"multiple values for argument 'heads'.*\*\*options",
    "chain(rate=scale(1.0))": r"no argument 'rate'; chain takes \*transforms",
    "orthogonalize(dtype='bf16')": r"dtype .*pass a torch\.dtype without quotes",
    "adamw(1e-3, maximize=True)": r"'maximize' .*muonfx\.scale\(-1\.0\)",
    "Muon(MODEL, foreach=True)": "'foreach' .*leave it out",
    "Muon(None)": r"params must be a model, .*found NoneType",
    "Muon(1e-3)": r"found float; the model comes first: Muon\(model, lr=0\.001\)",
    "Muon([{'parameters': MODEL}])": "a param group must have the key 'params', found 'parameters'",
    "Muon(MODEL, lr=0.1).add_param_group(MODEL)": r"a param group must be a dict, .*found Linear",
    "Muon(MODEL, lr=0.1).load_state_dict('run.pt')": r"load_state_dict: .*torch\.load\(path\).* found str",
    "Muon(MODEL, labels=lambda model: None)": "Muon: labels must be .*found a function that returns None",
    "Muon(MODEL, labels=lambda name: 'muon')": "Muon: labels must be .*found a function that returns 'muon'",
    "TransformOptimizer(None, adamw())": r"params must be a model, .*found NoneType",
    "masked({'w': True}, scale(0.1))": "masked: found {'w': True} before the transform, expected the transform first",
    "masked(routing.ndim(2), scale(0.1))": r"masked: found ndim\(2\) before the transform, expected the",
    "masked(lambda params: {'w': True}, scale(0.1))": "masked: found <function .* before the transform, expected",
    "masked(3, True)": "masked: inner must be a muonfx.Transform, found 3",
    "momentum(nesterov=linear_schedule(0.5, 0.9, 4))": "momentum: nesterov must be True or False, found linear",
    "normalize_neurons(dtype=int8())": r'"auto", a floating-point torch.dtype or None, found int8\(\)',
    "accumulate(scale(1.0), 2, dtype=int8())": r'"auto", a floating-point torch.dtype or None, found int8\(\)',
    "master_params(scale(1.0), dtype=int8())": r'"auto", a floating-point torch.dtype or None, found int8\(\)',
    "Slot(torch.int64, 'mu_dtype')": "mu_dtype must be",
    "momentum(heavy_ball=True, debias=True)": "no bias to correct",
    "accumulate(momentum(), linear_schedule(0.5, 0.9, 4))": "accumulate: every must be an int, found linear",
    "MatrixView(3)": "MatrixView: found 3, expected a pattern",
    "MatrixView('out in')": "has 0 arrows, expected one",
    "MatrixView('(a=0 out) in -> a out in')": "a size is 0",
    "join_schedules([constant_schedule(1.0)], [3])": "found 1 schedules and 1 boundaries, expected 2 schedules",
    "qk_clip('*.attn')": r"heads must be an AttentionHeads or a tuple of these, found '\*\.attn'",
    "AttentionHeads('*', 2, key_dims=4)": r"key_dims must be a tuple \(first, end\)",
    "masked(scale(2.0), routing.module_type(torch.nn.Embedding))": "mask: .* expected a condition on names and shapes",
    "momentum().init({'a': {'b': torch.zeros(1)}, 'a.b': torch.zeros(1)})": "found two leaves named 'a.b'",
    "muon().init({'bias': torch.zeros(3)})": r"'bias' has shape \(3,\), expected at least two dims: give vectors",
    "partition({'slow': scale(1.0)}, {'w': 'fast'}).init(W)": "has the label 'fast', expected .*'slow': change",
    "partition({'slow': scale(1.0)}, {}).init(W)": "no value for 'w'",
    "partition({'slow': scale(1.0)}, ['slow']).init(W)": r"labels: found \['slow'\], expected a dict from .* are 'w'",
    "partition({'a': scale(1.0)}, ['a', 'a']).init([W['w']])": r"found \['a', 'a'\], expected a dict .*or a tree",
    "partition({'slow': scale(1.0)}, lambda params: 'slow').init(W)": "a function that returns 'slow', expected a dict",
    "partition({'slow': scale(1.0)}, lambda params: None).init(W)": "a function that returns None, expected a dict",
    "masked(scale(1.0), lambda params: {'w'}).init(W)": "a function that returns {'w'}, .*to True or False, or a tree",
    "partition({'slow': scale}, {'w': 'slow'})": r"transforms\['slow'\] must be a muonfx.Transform",
    "apply_updates(W, adamw().update(W, adamw().init(W), W))": r"apply_updates: .*\(updates, state\), pass the first",
    "add_decayed_weights(0.1, lambda name, p: p.ndim > 1).init(W)": (
        r"missing 1 .*\n?.*add_decayed_weights: mask: the function is called once.*routing\.where"
    ),
    "masked(scale(1.0), {'w': 'yes'}).init(W)": "the value for 'w' is 'yes', expected True or False",
    "stateless(3)": "stateless: function must be a function",
    "add_updates()": "add_updates: found no transform, expected at least one",
    "qk_clip(AttentionHeads('*', 5)).init(HEADS)": "expected equal blocks",
    "qk_clip(AttentionHeads('*', 5, query='qkv', key='qkv')).init(HEADS)": "equal",
    "qk_clip(AttentionHeads('*', 2, axis=2)).init(HEADS)": "expected a dim 2",
    # something else in the place of a transform, a state, labels or parameters
    "contrib.schedule_free_eval_params(momentum().init(W), W)": "no ScheduleFreeState",
    "describe(default_labels(MODEL))": r"describe\(labels, model\)",
    "describe({}, W)": "no label for 'w'",
    "describe({'w': 'a', 'v': 'a'}, W)": "labels for 'v'",
    "describe(default_labels)": r"describe\(labels, model\)",
    "describe({'w': 'a'})": r"describe\(labels, model\)",
    "describe(SGD)": "found SGD, whose groups have no names and labels, expected a muonfx.TransformOptimizer",
    "diagnose(3)": r"found int, expected a muonfx\.TransformOptimizer",
    "summary(3)": "found int with no tensor",
    "summary(SGD)": "found SGD with no tensor",
    "summary((W, scale(1.0)))": r"found a pair \(state, transform\), expected",
    "chain(momentum)": r"argument 0 must be a Transform or .* found .* call it to .*momentum\(",
    "chain([momentum()])": r"unpack it: \*transforms",
    "chain(('rate', scale(1.0)), ('rate', scale(2.0)))": "found the name 'rate', expected a nonempty name",
    "orthogonalize(view=MatrixView('(a=4 + b=4) c -> a c, b c')).init({'w': torch.zeros(12, 6)})": (
        r"'w' has shape \(12, 6\): a dim of size 12 does not divide into \(a=4 \+ b=4\)"
    ),
    "orthogonalize(view=MatrixView('(a=5 b) c -> a b c')).init({'w': torch.zeros(12, 6)})": "12 does not divide into",
    "with_hyperparams(momentum(0.9), {'decya': 0.5})": r"decya \(did you mean 'decay'\?\)",
    "stateless(lambda u, p: {}).update({'w': torch.ones(2)}, core.EmptyState())": "the function returns .* missing 'w'",
    "add_updates(identity(), momentum)": "add_updates: argument 1 must be a Transform .*: momentum",
    "contrib.reduce_on_plateau().update(W, contrib.reduce_on_plateau().init(W), W, value=True)": (
        "found value=True, expected the loss as a real number or real tensor"
    ),
    "contrib.reduce_on_plateau().update(W, contrib.reduce_on_plateau().init(W), W, value=torch.tensor(1j))": (
        r"found value=tensor\(0.\+1.j\), expected the loss as a real number or real tensor"
    ),
    "cautious(3)": "cautious: inner must be a muonfx.Transform, found 3",
    "contrib.schedule_free(torch.sum, 0.1)": "inner must be a muonfx.Transform, found the function sum",
    "stack([adamw(), adamw])": "stack: expected a transform, found adamw; call the factory",
    "stack([Muon(MODEL), Muon(MODEL)])": r"stack\(optimizer.tx\)",
    "stack([scale(1.0), momentum()])": r"stack: transform 1 is momentum\(\), expected .* transform 0, scale\(factor=1",
    "stack([adamw(), adamw(), adamw(nesterov=True)])": "transform 2 is .*nesterov=True.* transform 0",
    "stack([muon(), muon(mask=routing.path('a'))])": r"transform 1 is .*mask=routing\.path\('a'\)",
    "stack([adamw(), adamw(linear_schedule(1, 0, 8))])": "transform 1 is .*linear_schedule",
    "stack([accumulate(scale(1.0), 2), accumulate(momentum(), 2)])": r"is accumulate\(momentum\(\)",
    "stack([partition({'a': scale(1.0)}, {}), partition({'b': scale(1.0)}, {})])": "transform 1 is partition.{'b",
    "hyperparams(momentum)": "expected a transform, found momentum; call the factory",
    "hyperparams(Muon(MODEL, lr=0.1))": r"hyperparams\(optimizer.tx\)",
    "TransformOptimizer(scale(1.0), MODEL)": "the model Linear; the model comes first",
    "TransformOptimizer(MODEL, muon)": r"the function muon; call it .*: muon\(...\)",
    "sharding.plan_for(muon, sharding.zero({'w': torch.zeros(2, 2)}, 2))": r"found the function muon; call it",
}


@pytest.mark.filterwarnings("ignore:Muon. found no parameter with the label")
@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_argument_is_named_at_the_call(code: str):
    with pytest.raises((KeyError, TypeError, ValueError), match=WRONG[code]):
        eval(code, NAMESPACE)


GRADS = {"w": torch.ones(2, 2)}
READ_PARAMS = {
    "add_decayed_weights": mfx.add_decayed_weights(0.1),
    "subtract_decayed_weights": mfx.subtract_decayed_weights(0.1),
    "keep_weight_norms": mfx.contrib.keep_weight_norms(),
    "match_weight_norms": mfx.contrib.match_weight_norms(),
    "sam": mfx.contrib.sam(adaptive=True),
    "scale_by_prodigy": mfx.contrib.scale_by_prodigy(),
    "schedule_free": mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1),
}


@pytest.mark.parametrize("name", READ_PARAMS)
def test_a_transform_that_reads_the_parameters_requires_them(name: str):
    tx = READ_PARAMS[name]
    with pytest.raises(ValueError, match=f"^{name}.* needs the parameters: call update"):
        tx.update(GRADS, tx.init(GRADS))


PARAMS = {
    "h.0.attn.qkv.weight": torch.zeros(6, 2),
    "h.0.mlp.fc.weight": torch.zeros(4, 2),
    "h.0.norm.weight": torch.zeros(2),
    "wte.weight": torch.zeros(8, 2),
}
LABELS = {
    name: "muon" if name.startswith("h.") and leaf.ndim == 2 else "adamw"
    for name, leaf in PARAMS.items()
}


def said(init: Any, params: Any = PARAMS) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init(params)
    return [str(warning.message) for warning in caught]


def muon_with_adamw(view: Any = None, mask: Any = None) -> mfx.Transform:
    orthogonalize = mfx.orthogonalize(dtype=torch.float32, view=mfx.MatrixView(view))
    return mfx.muon_with_adamw(0.1, labels=LABELS, orthogonalize=orthogonalize, mask=mask)


THREE = "(part=3 out) in -> part out in"
NOTHING_MATCHES = [
    (
        muon_with_adamw({"*.qvk.weight": THREE}),
        r"view: '\*.qvk.weight' .* 4 parameters; close: 'h.0.attn.qkv",
    ),
    (
        muon_with_adamw({"*.experts.*": THREE}),
        r"view: '\*.experts.\*' matches none .* they are 'h.0",
    ),
    (
        muon_with_adamw({"*.weight": "out in -> out in", "*.qkv.*": THREE}),
        r"'\*.qkv.\*' matches only names .*qkv",
    ),
    (
        muon_with_adamw(mask=~routing.path("*.nrom.*")),
        r"mask: '\*.nrom.\*' matches none .* close: 'h.0.norm.weight'",
    ),
    (
        mfx.masked(mfx.scale(2.0), routing.path("wpe.*") & routing.ndim(2)),
        "mask: 'wpe.*' matches none",
    ),
    (mfx.add_decayed_weights(0.1, routing.path("*.fcc.*")), "mask: .* close: 'h.0.mlp.fc.weight'"),
    (
        mfx.skip_nonfinite(mfx.accumulate(mfx.masked(mfx.scale(2.0), routing.path("wpe.*")), 2)),
        "mask: 'wpe",
    ),
]


@pytest.mark.parametrize(("tx", "message"), NOTHING_MATCHES)
@pytest.mark.parametrize("face", ["plain", "optimizer", "sharded", "offloaded", "meta"])
def test_a_pattern_that_matches_no_parameter_is_named_once_at_init(
    tx: mfx.Transform, message: str, face: str
):
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
        muon_with_adamw({"*.qkv.weight": THREE, "*": "out in -> out in"}),
        # Names that only the other label has: both have the same mask.
        muon_with_adamw(mask=routing.path("wte.*")),
        muon_with_adamw(mask=~routing.path("*bias", "*norm*", "*ln_?.*")),
        muon_with_adamw(mask=~(routing.path("*bias") | routing.path("*norm*"))),
        muon_with_adamw(mask=routing.ndim(min=5)),
    ],
)
def test_a_pattern_that_matches_somewhere_is_not_spoken_of(tx: mfx.Transform):
    assert said(tx.init) == []
    assert all(
        "The labels of the 0 parameters are none" in message for message in said(tx.init, {})
    )


def test_updates_and_compiled_steps_do_not_warn_of_patterns():
    tx = mfx.masked(mfx.scale(2.0), routing.path("wpe.*"))
    with pytest.warns(UserWarning, match="matches none"):
        state = tx.init(PARAMS)
    tx.update(PARAMS, state, PARAMS)
    # A test that raised while compiling leaves `Transform.update` marked as not to be compiled.
    torch._dynamo.reset()
    torch.compile(tx.update, fullgraph=True, backend="eager")(PARAMS, state, PARAMS)


def test_a_partition_without_some_label_says_which_labels_there_are_and_why():
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4))
    tx = mfx.muon_with_adamw(0.1, labels=mfx.default_labels(model))
    found = said(tx.init, {name: param.detach() for name, param in model.named_parameters()})
    assert len(found) == 1
    assert "no parameter has the label 'muon'" in found[0]
    assert "The labels of the 3 parameters are 'adamw' for 3" in found[0]
    assert (
        "'0.weight' is 'adamw': embedding (module type Embedding), '1.bias' is 'adamw': norm"
        in found[0]
    )


def test_monitors_of_one_name_are_an_error_where_they_are_read():
    tx = mfx.chain(mfx.monitor("seen"), mfx.scale(2.0), mfx.monitor("seen"))
    with pytest.raises(ValueError, match="found 'seen/norm' in two monitors"):
        mfx.metrics(tx.init(PARAMS))


UNUSABLE = {
    "fp8": (torch.zeros(2, 2).to(torch.float8_e4m3fn), "found torch.float8_e4m3fn.*: convert it"),
    "complex": (torch.zeros(2, dtype=torch.complex64), "found torch.complex64"),
    "int": (torch.zeros(2, dtype=torch.int64), "found torch.int64.* leave it out"),
    "bool": (torch.zeros(2, dtype=torch.bool), "found torch.bool.* leave it out"),
    "sparse": (
        torch.zeros(2, 2).to_sparse(),
        "must be dense .*found torch.float32, torch.sparse_coo",
    ),
    "mkldnn": (torch.zeros(2, 2).to_mkldnn(), "must be dense .*found torch.float32, torch._mkldnn"),
    "jagged": (
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
        "must be dense .*found torch.float32, a nested tensor",
    ),
    "lazy": (nn.UninitializedParameter(), "has no shape yet, since it belongs to a lazy module"),
    "number": (1.0, "must be a tensor or None, found float"),
}


@pytest.mark.parametrize(
    ("leaf", "message"), [pytest.param(*row, id=kind) for kind, row in UNUSABLE.items()]
)
@pytest.mark.parametrize(
    "tx", [mfx.momentum(), mfx.muon(0.1), mfx.scale(1.0)], ids=["momentum", "muon", "scale"]
)
def test_a_parameter_that_cannot_be_trained_is_named_at_init(
    leaf: Any, message: str, tx: mfx.Transform
):
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


def test_the_advice_for_a_function_of_the_step_works():
    def f(count: torch.Tensor) -> torch.Tensor:
        return 0.8 * 0.5**count

    with pytest.raises(TypeError) as caught:
        mfx.momentum(f)
    advice = re.search(r"pass (muonfx\.schedule\(.*\)\(\))", str(caught.value))
    assert advice is not None
    made = eval(advice[1], {"muonfx": mfx, "f": f})
    assert mfx.momentum(made).arguments["decay"](3) == pytest.approx(0.1)


def test_a_function_of_one_parameter_as_mask_is_told_what_it_receives():
    with pytest.raises(
        AttributeError, match=r"masked: mask: the function is called once.*routing\.where"
    ):
        mfx.masked(mfx.scale(0.5), lambda param: param.ndim > 1).init(PARAMS)


def test_a_nested_mask_fits_parameters_with_dotted_names():
    nested, flat = {"a": {"w": True, "b": False}}, {"a.w": torch.ones(1), "a.b": torch.ones(1)}
    tx = mfx.masked(mfx.scale(0.5), nested)
    updates, _ = tx.update(flat, tx.init(flat), flat)
    assert {name: update.item() for name, update in updates.items()} == {"a.w": 0.5, "a.b": 1.0}


def test_a_mask_of_a_subtree_is_told_about_patterns():
    params = {"a": {"w": torch.ones(1), "b": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"'a\.b'.*muonfx\.routing\.path"):
        mfx.masked(mfx.scale(0.5), {"a": True}).init(params)


@pytest.mark.parametrize("kind", [types.MappingProxyType, UserDict])
def test_a_mapping_that_is_no_tree_is_an_error_that_names_dict(kind: Any):
    with pytest.raises(TypeError, match=r"convert it with dict\(\.\.\.\)"):
        mfx.adamw().init(kind({"w": torch.ones(1)}))


@pytest.mark.parametrize("moved", ["updates", "params", "state"])
def test_leaves_on_two_devices_are_named(moved: str):
    tx, params = mfx.adamw(), {"w": torch.ones(2)}
    trees = {"updates": params, "params": params, "state": tx.init(params)}
    trees[moved] = mfx.tree.map(lambda leaf: leaf.to("meta"), trees[moved])
    with pytest.raises(
        ValueError, match=rf"{moved}: .* on meta.*\.to\(device\)|cpu and {moved}: .* on meta"
    ):
        tx.update(trees["updates"], trees["state"], trees["params"])


def test_an_error_on_two_devices_that_is_not_about_devices_is_raised_itself():
    def out_of_memory(updates: object, params: object):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    tx = mfx.chain(mfx.stateless(out_of_memory), mfx.momentum())
    params = {"w": torch.ones(2)}
    # The state of `offload` is on another device, too.
    state = mfx.tree.map(lambda leaf: leaf.to("meta"), tx.init(params))
    with pytest.raises(torch.OutOfMemoryError):
        tx.update(params, state, params)


def test_a_sparse_gradient_is_told_about_dense_embeddings():
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = mfx.TransformOptimizer(embedding, mfx.adamw())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"'weight'.*Embedding\(sparse=False\)"):
        optimizer.step()


@pytest.mark.parametrize("params", [MODEL.state_dict(), {"w": torch.zeros(2, 2)}])
def test_a_step_on_detached_tensors_warns_once_that_they_get_no_gradient(params: Any):
    optimizer = mfx.TransformOptimizer(params, mfx.adamw())
    with pytest.warns(UserWarning, match=r"no gradient on any of .*state_dict\(\) and detach\(\)"):
        optimizer.step()
    assert said(lambda _: optimizer.step()) == []


@pytest.mark.parametrize(
    ("argument", "call"),
    {
        "neuron_decay": lambda: mfx.normuon(neuron_decay=2.0),
        "adamw_learning_rate": lambda: mfx.muon_with_adamw(0.1, -0.1, labels={}),
        "adamw_weight_decay": lambda: mfx.muon_with_adamw(0.1, adamw_weight_decay=-0.1, labels={}),
    }.items(),
)
def test_a_recipe_names_its_own_argument(argument: str, call: Callable[[], object]):
    with pytest.raises(ValueError, match=f"^{argument} must be"):
        call()


def test_what_a_notebook_prints_is_short(tmp_path: Path):
    params = {f"{index}": torch.zeros(4, 4) for index in range(50)}
    plan = sharding.plan_for(mfx.muon(), sharding.zero(params, 4))
    saving = mfx.checkpoint.save_async(tmp_path / "a", {"w": torch.ones(2)})
    saving.wait()
    for value in (plan, saving, mfx.polar.Workspace(), sharding.zero(params, 4)):
        assert len(repr(value)) < 60 + len(str(tmp_path)), value
        assert " at 0x" not in repr(value)
