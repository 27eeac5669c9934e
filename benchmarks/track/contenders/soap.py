"""SOAP (arXiv 2409.11321) for the hidden matrices."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_soap(),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
