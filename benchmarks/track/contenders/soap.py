"""SOAP (arXiv 2409.11321) for the hidden matrices."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.soap(schedule(rate, steps), weight_decay=DECAY)
    return with_adamw(model, hidden, steps)
