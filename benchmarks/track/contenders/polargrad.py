"""PolarGrad (arXiv 2505.21799)."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.momentum(nesterov=False),
        mfx.contrib.scale_by_dual_norm(FP32),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
