"""Muon with the four steps of `polar_express_4`."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.muon(
        schedule(rate, steps),
        weight_decay=DECAY,
        orthogonalize=FP32.replace(coefficients="polar_express_4"),
    )
    return with_adamw(model, hidden, steps)
