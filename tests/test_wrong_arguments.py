"""A wrong argument is an error at the call that names the argument, and what was found."""

from typing import Any

import pytest
import torch

import muonfx as mfx
from tests.public import NAMES

MODEL = torch.nn.Linear(2, 2)
NAMESPACE: dict[str, Any] = {
    **vars(mfx),
    **NAMES,
    "torch": torch,
    "mfx": mfx,
    "MODEL": MODEL,
    "W": {"w": torch.zeros(2)},
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
    "contrib.clip_singular_values(0.0)": "threshold must be above 0, found 0.0",
    "contrib.clip_singular_values(steps=0)": "steps: found 0",
    "contrib.scale_by_dion(rank=0)": "rank must be .*found 0",
    "contrib.scale_by_namo(identity(), b2=-0.1)": "b2 must be in .*found -0.1",
    "contrib.scale_by_prodigy(b1=1.0)": "b1",
    "contrib.scale_by_prodigy(estim_lr0=0.0)": "estim_lr0",
    "contrib.reduce_on_plateau(factor=1.0)": "factor",
    "contrib.reduce_on_plateau(patience=0)": "patience",
    "contrib.reduce_on_plateau(min_scale=-1.0)": "min_scale",
    "contrib.reduce_on_plateau(rtol=0.0, atol=0.0)": "rtol",
    "contrib.schedule_free(scale(-0.1), 0.1, b1=0.0)": "b1",
    "contrib.sam(-1.0)": "rho must be at least 0",
    "AttentionHeads('*', 3, 2)": "heads must be a multiple of key_heads, found 3 and 2",
    "AttentionHeads('*', 2, query_dims=(2, 2))": "query_dims must be .* with 0 <= first < end",
    "AttentionHeads('*', 0)": "heads must be an int of 1 or more",
    "qk_clip(AttentionHeads('*', 2), alpha=1.5)": "alpha must be from 0 to 1",
    "int8(block=0)": "block must be an int of 1 or more, found 0",
    "warmup_cosine_decay_schedule(1.0, 20, 10)": "warmup_steps must be at most total_steps",
    "exponential_decay(1.0, 0, 0.5)": "steps must be an int of 1 or more, found 0",
    "exponential_decay(1.0, 1, 0.0)": "rate must be above 0, found 0.0",
    "momentum(linear_schedule(-0.5, 0.9, 4))": r"momentum: at step 0, decay must be in \[0, 1\)",
    "momentum(linear_schedule(0.5, 1.0, 40))": r"momentum: at step 100, decay must be in \[0",
    # names that are not in a registry
    "scale_by_shape('moonshot')": 'scale_by_shape: lr_scaling must be "fan_in" or .*, found .moonshot',
    "orthogonalize(coefficients='kellr')": "keller",
    "normalize_neurons(axis='columns')": 'axis must be "longer" or "rows", found .columns',
    "monitor(metrics=('size',))": "unknown metrics",
    "contrib.scale_by_factored_rms(dtype='fp32')": 'dtype must be "auto"',
    "Slot(start='ones')": 'start must be "params" or "zeros", found .ones',
    "int8(code='log')": 'int8: code must be "dynamic" or "linear", found .log.',
    "fp8(format='e3m4')": 'fp8: format must be "e4m3" or "e5m2", found .e3m4.',
    "sharding.offload(momentum(), to='disk')": "to: found 'disk', expected \"cpu\" or the path of a folder",
    "sharding.offload(momentum(), bucket_bytes=0)": "bucket_bytes: found 0",
    "sharding.offload(momentum(), compute='gpu')": 'compute must be "auto" or "cpu" or "device", found',
    # values of another kind, and arguments that contradict each other
    "sharding.offload(momentum(), to=3)": "to must be",
    "sharding.offload('momentum')": r"tx must be a muonfx\.Transform",
    "momentum(lambda count: 0.9)": "turn a function of the step count into a schedule",
    "momentum(nesterov=linear_schedule(0.5, 0.9, 4))": "momentum: nesterov must be True or False, found linear",
    "momentum(dtype=torch.int8)": 'dtype must be "auto", a floating-point',
    "normalize_neurons(dtype=int8())": r'"auto", a floating-point torch.dtype or None, found int8\(\)',
    "accumulate(scale(1.0), 2, dtype=int8())": r'"auto", a floating-point torch.dtype or None, found int8\(\)',
    "master_params(scale(1.0), dtype=int8())": r'"auto", a floating-point torch.dtype or None, found int8\(\)',
    "Slot(torch.int64, 'mu_dtype')": "mu_dtype must be",
    "momentum(heavy_ball=True, debias=True)": "no bias to correct",
    "accumulate(momentum(), linear_schedule(0.5, 0.9, 4))": "accumulate: every must be an int, found linear",
    "MatrixView(blocks=0)": "blocks must be None, a count",
    "MatrixView(dims=(0, 1))": "dims must be None or",
    "MatrixView(dims=((0,),))": "dims must be None or",
    "join_schedules([constant_schedule(1.0)], [3])": "one schedule more than boundaries",
    "qk_clip('*.attn')": r"heads must be an AttentionHeads or a tuple of these, found '\*\.attn'",
    "AttentionHeads('*', 2, key_dims=4)": r"key_dims must be a tuple \(first, end\)",
    "masked(scale(2.0), select.module_type(torch.nn.Embedding))": "mask: .* needs module types, which named tensors",
    "momentum().init({'a': {'b': torch.zeros(1)}, 'a.b': torch.zeros(1)})": "two leaves are named 'a.b'",
    "muon().init({'bias': torch.zeros(3)})": r"'bias' has shape \(3,\); a matrix is needed. Route vectors elsewhere",
    "partition({'slow': scale(1.0)}, {'w': 'fast'}).init(W)": "'w' has the label 'fast'; the transforms are for 'slow'",
    "partition({'slow': scale(1.0)}, {}).init(W)": "no value for 'w'",
    "partition({'slow': scale}, {'w': 'slow'})": "the entry for label 'slow' must be a Transform",
    "masked(scale(1.0), {'w': 'yes'}).init(W)": "the value for 'w' is 'yes', expected bool",
    "stateless(3)": "stateless: function must be a function",
    "add_updates()": "add_updates: give at least one transform",
    # something else in the place of a transform
    "chain(momentum)": "argument 0 must be a Transform .*call the factory to get a transform",
    "chain([momentum()])": r"chain\(\*transforms\)",
    "chain(('rate', scale(1.0)), ('rate', scale(2.0)))": "'rate' is empty, has a '.' or '/', or is taken",
    "orthogonalize(view=MatrixView(blocks=(4, 4))).init({'w': torch.zeros(12, 6)})": r"blocks \(4, 4\) add up to 8",
    "orthogonalize(view=MatrixView(blocks=5)).init({'w': torch.zeros(12, 6)})": "12 rows cannot be cut into 5 equal",
    "with_hyperparams(momentum(0.9), {'decya': 0.5})": r"decya \(did you mean 'decay'\?\)",
    "stateless(lambda u, p: {}).update({'w': torch.ones(2)}, core.EmptyState())": "the function returns .* missing 'w'",
    "add_updates(identity(), momentum)": "add_updates: argument 1 must be a Transform .*call the factory",
    "cautious(3)": "cautious: inner must be a muonfx.Transform, found 3",
    "contrib.schedule_free(torch.sum, 0.1)": "inner must be a muonfx.Transform, found the function sum",
    "hyperparams(momentum)": "expected a transform, found momentum; call the factory",
    "hyperparams(Muon(MODEL, lr=0.1))": r"hyperparams\(optimizer.tx\)",
    "TransformOptimizer(scale(1.0), MODEL)": "the model Linear; the model comes first",
    "TransformOptimizer(MODEL, muon)": r"the function muon; call it .*: muon\(...\)",
    "sharding.plan_for(muon, sharding.zero({'w': torch.zeros(2, 2)}, 2))": r"found the function muon; call it",
}


@pytest.mark.filterwarnings("ignore:Muon. no parameter has the label")
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
