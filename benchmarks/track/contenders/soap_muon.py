"""SOAP in front of `orthogonalize`, as in records of modded-nanogpt."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_soap(),
        FP32,
        mfx.scale_by_shape(),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
