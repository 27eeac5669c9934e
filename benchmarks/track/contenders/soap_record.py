"""A record of modded-nanogpt: SOAP, `orthogonalize`, NorMuon's rows, update floors, radial brake and EMA-Nesterov."""

import muonfx as mfx
from benchmarks.track.parts import FP32, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.chain(
        mfx.contrib.scale_by_soap(b2=0.9),
        FP32,
        mfx.normalize_neurons(),
        mfx.scale_by_shape("match_rms_adamw"),
        mfx.contrib.floor_by_weight_norms(0.35),
        mfx.scale_by_learning_rate(schedule(rate, steps)),
        mfx.contrib.radial_brake(),
        mfx.contrib.ema_nesterov(0.97, mfx.linear_schedule(0.3, 0.0, steps)),
    )
    return with_adamw(model, hidden, steps)
