"""Hyperball with Muon (Wen et al., 2025): constant weight norms, no decay; matrices that start at zero get Muon."""

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, FP32, adamw, schedule

SETTINGS = {"rate": 0.02, "zero": 0.01}


def optimizer(model, steps, rate, zero):
    hyperball = mfx.chain(
        mfx.momentum(),
        FP32,
        mfx.contrib.match_weight_norms(),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
        mfx.contrib.keep_weight_norms(),
    )
    parts = {
        "muon": hyperball,
        "zero": mfx.muon(schedule(zero, steps), weight_decay=DECAY, orthogonalize=FP32),
        "adamw": adamw(ADAM_RATE, steps),
    }
    labels = dict(mfx.default_labels(model))
    labels |= {
        name: "zero"
        for name, p in model.named_parameters()
        if labels[name] == "muon" and not p.any()
    }
    tx = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.partition(parts, labels))
    return mfx.TransformOptimizer(model, tx).step
