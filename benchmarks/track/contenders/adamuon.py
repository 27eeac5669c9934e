"""AdaMuon (arXiv 2507.11005)."""

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate, decay=DECAY, rest=ADAM_RATE):
    hidden = mfx.chain(
        mfx.momentum(),
        FP32,
        mfx.scale_by_rms(0.95, eps_in_sqrt=False, debias=True),
        mfx.contrib.normalize_matrices(),
        mfx.scale(0.2),
        mfx.add_decayed_weights(decay),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
    )
    return with_adamw(model, hidden, steps, rest, decay)
