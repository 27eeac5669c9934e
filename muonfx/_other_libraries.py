"""Names in Optax, ``torch.optim``, Dion and other implementations of Muon, and the muonfx code for the same."""

from __future__ import annotations

NAMES_HERE = {
    name: here
    for here, names in {
        "transform": "GradientTransformation GradientTransformationExtraArgs",
        "TransformOptimizer": "Optimizer",
        "Muon": "MuonWithAuxAdam SingleDeviceMuonWithAuxAdam SingleDeviceMuon",
        "TransformOptimizer(model, muonfx.adamw(weight_decay=0.0))": "Adam",
        "TransformOptimizer(model, muonfx.adamw())": "AdamW",
        "TransformOptimizer(model, muonfx.lion())": "Lion",
        "TransformOptimizer(model, muonfx.chain(muonfx.momentum(heavy_ball=True, "
        "nesterov=False), muonfx.scale_by_learning_rate(0.1)))": "SGD",
        "chain": "named_chain",
        "partition": "multi_transform",
        "accumulate": "MultiSteps",
        "skip_nonfinite": "apply_if_finite zero_nans",
        "scale(muonfx.linear_schedule(1.0, 0.0, 10))": "scale_by_schedule",
        "with_hyperparams": "inject_hyperparams",
        "momentum(heavy_ball=True, nesterov=False)": "trace",
        "chain(muonfx.momentum(heavy_ball=True, nesterov=False), muonfx.scale_by_learning_rate(0.1))": "sgd",
        "momentum(nesterov=False, debias=True)": "ema",
        "adamw(weight_decay=0.0)": "adam",
        "adamw(nesterov=True, weight_decay=0.0)": "nadam",
        "adamw(nesterov=True)": "nadamw",
        "clip_by_value": "clip clip_grad_value_",
        "clip_by_global_norm": "clip_grad_norm_",
        "ema_params": "incremental_update AveragedModel",
        "normuon": "NorMuon",
        "contrib.scale_by_dion": "Dion",
        "contrib.scale_by_dion2": "Dion2",
        "contrib.scale_by_factored_rms": "adafactor Adafactor",
        "contrib.scale_by_prodigy": "prodigy Prodigy",
        "contrib.scale_by_shampoo": "shampoo Shampoo",
        "contrib.scale_by_soap": "soap SOAP",
        "contrib.match_weight_norms": "lamb lars scale_by_trust_ratio",
        "scale_by_rms": "rmsprop RMSprop",
        "muon": "scale_by_muon",
        'masked(muonfx.set_to_zero(), muonfx.routing.path("head.*"))': "freeze",
        "polar.orthogonalize": "newton_schulz newtonschulz5 zeropower_via_newtonschulz5",
        "join_schedules": "piecewise_constant_schedule piecewise_interpolate_schedule cosine_onecycle_schedule "
        "linear_onecycle_schedule sgdr_schedule",
        "cosine_decay_schedule": "cosine_schedule",
        "schedule": "polynomial_schedule",
        "warmup_stable_decay_schedule": "warmup_exponential_decay_schedule",
        "tree": "tree_utils",
        "tree.norm": "global_norm tree_norm",
        "tree.map": "tree_map tree_add tree_scale tree_vdot",
        **{f"tree.{name}": f"tree_{name}" for name in ("get", "map_params", "set")},
    }.items()
    for name in names.split()
}
"""A dict from names in Optax, ``torch.optim``, Dion and other Muon implementations to the muonfx code for the same."""

ADVICE_ON_NAMES = {
    "centralize": 'write it with transform, as `centralize` in "Everything else" of docs/concepts/transforms.md',
    "lookahead": 'write it as the example "Around another transform" of docs/concepts/transforms.md does; for averages '
    "of parameters there is muonfx.ema_params",
}
"""A dict from names in Optax that have no equivalent in muonfx to what to do instead."""

ARGUMENTS_HERE = {
    "lr": ("learning_rate",),
    "learning_rate": ("lr",),
    "wd": ("weight_decay",),
    "beta": ("decay", "momentum"),
    "momentum": ("decay",),
    "decay": ("momentum",),
    "betas": ("b1", "b2"),
    "b1": ("betas",),
    "b2": ("betas",),
    "bias_correction": ("debias",),
    "ns_steps": ("steps",),
    "ns_coefficients": ("coefficients",),
    "ns_coeffs": ("coefficients",),
    "num_ns_steps": ("steps",),
    "coefficient_type": ("coefficients",),
    "adjust_lr_fn": ("lr_scaling",),
    "adjust_lr": ("lr_scaling",),
    "scale_mode": ("lr_scaling",),
    "mu": ("momentum", "decay"),
    "muon_beta2": ("neuron_decay",),
    "use_nesterov": ("nesterov",),
    "num_heads": ("heads",),
    "cautious_wd": ("cautious",),
    "epsilon": ("eps",),
    "adam_b1": ("b1", "betas"),
    "adam_b2": ("b2", "betas"),
    "adam_learning_rate": ("adamw_learning_rate", "adamw_lr"),
    "weight_decay_mask": ("mask",),
    "init_value": ("start",),
    "peak_value": ("peak",),
    "end_value": ("end",),
    "transition_steps": ("steps",),
    "decay_steps": ("total_steps", "steps"),
}
"""A dict from arguments in other libraries to their names in muonfx."""

_DTYPE_OF_STATE = (
    "the dtype of a state is an option of its transform, as in muonfx.chain(muonfx.momentum(dtype=...), ...) or "
    "muonfx.scale_by_adam(mu_dtype=..., nu_dtype=...)"
)

_LOOKS_AHEAD = "Muon's momentum always looks ahead; muonfx.muon(nesterov=False) does not"

_VIEW = (
    "orthogonalize=muonfx.orthogonalize(view=muonfx.MatrixView(...)) divides a parameter into matrices; "
    "muonfx.default_labels does so for known layers"
)

_EPS = (
    "Muon's normalization takes none; AdamW's is an option of muonfx.scale_by_adam, as in "
    "muonfx.muon_with_adamw(adam=muonfx.scale_by_adam(eps=1e-8))"
)

_CLIPPING = (
    "muonfx.TransformOptimizer(model, muonfx.chain(muonfx.clip_by_global_norm(1.0), "
    "muonfx.Muon.transform_for(model))), or torch.nn.utils.clip_grad_norm_ before the step"
)

ADVICE_ON_ARGUMENTS = {
    **dict.fromkeys(("nesterov", "use_nesterov"), _LOOKS_AHEAD),
    "distributed_mesh": "leave it out under FSDP2 and tensor parallelism, whose parameters have their mesh; under DDP, "
    "layout=muonfx.sharding.replicated",
    **dict.fromkeys(
        ("flatten", "num_heads", "split_sizes", "split_qkv", "qkv_split_shapes"), _VIEW
    ),
    "use_polar_express": 'it is the default; False is orthogonalize=muonfx.orthogonalize(coefficients="quintic")',
    "cautious_wd": "muonfx.add_decayed_weights(..., cautious=True) in a chain",
    "maximize": "minimize -loss, or put muonfx.scale(-1.0) first in a chain",
    "foreach": "leave it out, tensors are always updated together",
    "fused": "leave it out, tensors are always updated together",
    "capturable": "leave it out, counts are always tensors on the device",
    **dict.fromkeys(
        ("max_grad_norm", "max_norm", "clip_norm", "grad_clip", "gradient_clip_val"), _CLIPPING
    ),
    **dict.fromkeys(("eps", "epsilon"), _EPS),
    "rules": "labels=lambda model: muonfx.default_labels(model, rules)",
    **dict.fromkeys(("state_dtype", "momentum_dtype", "mu_dtype", "nu_dtype"), _DTYPE_OF_STATE),
}
"""A dict from arguments in other libraries that have no equivalent in muonfx to what to do instead."""

ARGUMENTS_OF_PARTS = (
    (
        "orthogonalize",
        ("coefficients", "steps", "method", "products", "view"),
        "muonfx.orthogonalize({}=...)",
    ),
    (
        "orthogonalize",
        ("dtype",),
        f"muonfx.orthogonalize({{}}=...) for products; {_DTYPE_OF_STATE}",
    ),
    ("view", ("pattern",), "muonfx.MatrixView({}=...)"),
    ("orthogonalize", ("pattern",), "muonfx.orthogonalize(view=muonfx.MatrixView({}=...))"),
    ("adam", ("b1", "b2", "eps"), "muonfx.scale_by_adam({}=...)"),
    ("end", ("alpha",), "{} * start"),  # Optax's alpha is a share of the start
)
"""Rows for arguments that belong in the value of another one: the other one, the arguments, and code for the value."""
