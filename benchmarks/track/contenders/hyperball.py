"""Hyperball with Muon (Wen et al., 2025): constant weight norms, no decay."""

import muonfx as mfx
from benchmarks.track.parts import FP32, schedule, with_adamw

SETTINGS = {"rate": 0.02}


def optimizer(model, steps, rate):
    hidden = mfx.contrib.muon_hyperball(schedule(rate, steps), orthogonalize=FP32)
    return with_adamw(model, hidden, steps)
