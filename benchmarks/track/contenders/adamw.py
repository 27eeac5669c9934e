"""``torch.optim.AdamW`` with one learning rate for all parameters."""

import torch

from benchmarks.track.parts import DECAY, clipped

SETTINGS = {"rate": 0.005}
STEPS = 600


def optimizer(model, steps, rate):
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}], lr=rate, betas=(0.9, 0.95)
    )
    adamw.add_param_group({"params": vectors, "weight_decay": 0.0})
    return clipped(model, steps, adamw)
