"""SOAP with the factors of KL-SOAP (arXiv 2509.03378) in front of `orthogonalize`."""

import muonfx as mfx
from benchmarks.track.parts import DECAY, FP32, schedule, with_adamw

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.soap_muon(schedule(rate, steps), factors="kl", weight_decay=DECAY, orthogonalize=FP32)
    return with_adamw(model, hidden, steps)
