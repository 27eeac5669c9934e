"""Scion (arXiv 2502.07529) for all parameters, with the authors' radii: spectral norm 50, sign norm 3000."""

import muonfx as mfx
from benchmarks.track.parts import FP32, schedule

SETTINGS = {"rate": 2**-9}


def optimizer(model, steps, rate):
    tx = mfx.contrib.scion(
        schedule(rate, steps), orthogonalize=FP32, labels=mfx.default_labels(model)
    )
    return mfx.TransformOptimizer(model, tx).step
