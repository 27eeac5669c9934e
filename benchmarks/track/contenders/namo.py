"""NAMO (arXiv 2602.17080), with updates of the size of AdamW's."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    inner = mfx.chain(FP32, mfx.scale_by_shape(), mfx.add_decayed_weights(DECAY))
    hidden = mfx.chain(
        mfx.contrib.scale_by_namo(inner), mfx.scale_by_learning_rate(schedule(rate, steps))
    )
    return with_adamw(model, hidden, steps)
