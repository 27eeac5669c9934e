"""Muon, and AdamW with a tuned learning rate for each role: embedding, head and vectors."""

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, FP32, schedule

SETTINGS = {"rate": 0.01, "embedding": ADAM_RATE, "head": ADAM_RATE, "vector": ADAM_RATE}


def optimizer(model, steps, rate, **roles):
    tx = mfx.muon_with_adamw(
        schedule(rate, steps),
        {role: schedule(own, steps) for role, own in roles.items()},
        orthogonalize=FP32,
        weight_decay=DECAY,
        adamw_weight_decay=DECAY,
        labels=mfx.default_labels(model, roles=True),
        mask=mfx.routing.ndim(min=2),
    )
    return mfx.TransformOptimizer(model, mfx.chain(mfx.clip_by_global_norm(1.0), tx)).step
