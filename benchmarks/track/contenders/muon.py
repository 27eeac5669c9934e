"""Muon, our default: momentum, `polar_express_5`, updates of the size of AdamW's."""

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate, decay=DECAY, rest=ADAM_RATE):
    hidden = mfx.muon(schedule(rate, steps), weight_decay=decay, orthogonalize=FP32)
    return with_adamw(model, hidden, steps, rest, decay)
