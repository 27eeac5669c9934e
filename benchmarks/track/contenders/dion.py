"""Dion (arXiv 2504.05295) with rank 16, a quarter of the width."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.dion(schedule(rate, steps), rank=16, weight_decay=DECAY)
    return with_adamw(model, hidden, steps)
