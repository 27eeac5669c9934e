"""Shampoo (arXiv 1802.09568) for the hidden matrices, with updates rescaled to a fixed root mean square."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_shampoo(),
        mfx.momentum(nesterov=False),
        mfx.contrib.normalize_matrices(),
        mfx.scale(0.2),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
