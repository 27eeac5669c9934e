"""MuSGD of Ultralytics: the sum of Muon and SGD."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.05}


def optimizer(model, steps, rate):
    muon = mfx.chain(mfx.momentum(), FP32, mfx.scale_by_shape("original"), mfx.scale(0.5))
    sgd = mfx.chain(mfx.add_decayed_weights(DECAY), mfx.momentum(heavy_ball=True), mfx.scale(0.5))
    hidden = mfx.chain(
        mfx.add_updates(("muon", muon), ("sgd", sgd)),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
