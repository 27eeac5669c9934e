"""Dion2 (arXiv 2512.16928), which orthogonalizes the largest quarter of the rows."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    return with_adamw(model, mfx.contrib.dion2(schedule(rate, steps), weight_decay=DECAY), steps)
