"""``torch.optim.Muon`` for the hidden matrices and ``torch.optim.AdamW`` for the rest."""

import torch

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, clipped

SETTINGS = {"rate": 0.01}


def optimizer(model, steps, rate, decay=DECAY, rest=ADAM_RATE):
    labels = mfx.default_labels(model)
    matrices = [param for name, param in model.named_parameters() if labels[name] == "muon"]
    others = [param for name, param in model.named_parameters() if labels[name] == "adamw"]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    other_matrices = [param for param in others if param.ndim >= 2]
    vectors = [param for param in others if param.ndim < 2]
    adamw = torch.optim.AdamW(other_matrices, lr=rest, betas=(0.9, 0.95), weight_decay=decay)
    adamw.add_param_group({"params": vectors, "weight_decay": 0.0})
    return clipped(model, steps, muon, adamw)
