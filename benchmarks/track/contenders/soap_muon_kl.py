"""SOAP with the factors of KL-SOAP (arXiv 2509.03378) in front of `orthogonalize`."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_soap(factors="kl"),
        FP32,
        mfx.scale_by_shape(),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
