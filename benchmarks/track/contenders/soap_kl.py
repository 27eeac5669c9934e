"""KL-SOAP (arXiv 2509.03378) for the hidden matrices."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    return with_adamw(model, mfx.contrib.soap(schedule(rate, steps), factors="kl", weight_decay=DECAY), steps)
