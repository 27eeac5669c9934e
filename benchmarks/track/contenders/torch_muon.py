"""``torch.optim.Muon`` for the hidden matrices and ``torch.optim.AdamW`` for the rest."""

import torch

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, clipped

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate):
    labels = mfx.default_labels(model)
    matrices = [param for name, param in model.named_parameters() if labels[name] == "muon"]
    rest = [param for name, param in model.named_parameters() if labels[name] == "adamw"]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for p in rest if p.ndim >= 2], lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=DECAY)
    adamw.add_param_group({"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0})
    return clipped(model, steps, muon, adamw)
