"""PolarGrad (arXiv 2505.21799)."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.polargrad(schedule(rate, steps), weight_decay=DECAY, orthogonalize=FP32)
    return with_adamw(model, hidden, steps)
