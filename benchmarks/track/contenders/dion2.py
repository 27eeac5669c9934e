"""Dion2 (arXiv 2512.16928), which orthogonalizes the largest quarter of the rows."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_dion2(),
        mfx.scale_by_shape("spectral"),
        mfx.add_decayed_weights(DECAY),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps)
