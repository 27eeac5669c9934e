"""NAMO (arXiv 2602.17080), with updates of the size of AdamW's."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.namo(schedule(rate, steps), weight_decay=DECAY, orthogonalize=FP32)
    return with_adamw(model, hidden, steps)
