"""MuonBP (arXiv 2510.16981): four blocks of rows at most steps, whole matrices at every fifth step."""

import torch

import muonfx as mfx
from benchmarks.track.parts import ADAM_RATE, DECAY, FP32, adamw, schedule

SETTINGS = {"rate": 0.01, "blocks": 0.01}
BLOCKS = mfx.MatrixView("(part=4 out) in -> part out in")


def optimizer(model, steps, rate, blocks):
    def transform(peak, view):
        hidden = mfx.muon(
            schedule(peak, steps), weight_decay=DECAY, orthogonalize=FP32.replace(view=view)
        )
        parts = {"muon": hidden, "adamw": adamw(ADAM_RATE, steps)}
        return mfx.chain(mfx.clip_by_global_norm(1.0), mfx.partition(parts, labels))

    labels, params = mfx.default_labels(model), dict(model.named_parameters())
    whole, by_blocks = transform(rate, mfx.MatrixView()), transform(blocks, BLOCKS)
    state, count = whole.init(params), 0

    @torch.no_grad()
    def step():
        nonlocal state, count
        tx = by_blocks if count % 5 else whole
        updates, state = tx.update(
            {name: param.grad for name, param in params.items()}, state, params, donate=True
        )
        for name, update in updates.items():
            params[name] += update
        count += 1

    return step
