"""Dion (arXiv 2504.05295) with rank 16, a quarter of the width."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_dion(rank=16),
        mfx.scale_by_shape("spectral"),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
