"""EMA-Nesterov (arXiv 2605.25395) around Muon, with a look-ahead that falls to zero."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.muon(schedule(rate, steps), weight_decay=DECAY, orthogonalize=FP32)
    ahead = mfx.contrib.ema_nesterov(0.97, mfx.linear_schedule(0.3, 0.0, steps))
    return with_adamw(model, mfx.chain(hidden, ahead), steps)
