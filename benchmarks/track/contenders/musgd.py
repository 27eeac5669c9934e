"""MuSGD of Ultralytics: the sum of Muon and SGD."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.05}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.musgd(schedule(rate, steps), weight_decay=DECAY, orthogonalize=FP32)
    return with_adamw(model, hidden, steps)
