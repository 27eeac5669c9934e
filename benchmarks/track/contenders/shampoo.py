"""Shampoo (arXiv 1802.09568) for the hidden matrices, with updates rescaled to a fixed root mean square."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    return with_adamw(model, mfx.contrib.shampoo(schedule(rate, steps), weight_decay=DECAY), steps)
