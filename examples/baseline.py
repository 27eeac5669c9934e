"""PyTorch's own Muon and AdamW with ``init`` and ``update``, for the same training loop as a transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muonfx import Schedule


class TorchMuon:
    """``torch.optim.Muon`` for the hidden matrices and ``torch.optim.AdamW`` for the rest, with the same settings.

    These optimizers modify the parameters in place, so every update is None.
    """

    def __init__(
        self, labels: Mapping[str, Any], hidden: Schedule, rest: Schedule, *, weight_decay: float, max_norm: float
    ) -> None:
        self.labels, self.schedules, self.weight_decay, self.max_norm = labels, (hidden, rest), weight_decay, max_norm

    def init(self, params: dict[str, Tensor]) -> dict[str, Any]:
        """Build the optimizers on these tensors and return their state, which ``update`` modifies in place."""
        matrices = [param for name, param in params.items() if self.labels[name] == "hidden"]
        others = [param for name, param in params.items() if self.labels[name] == "rest"]
        tables, vectors = [p for p in others if p.ndim >= 2], [p for p in others if p.ndim < 2]
        muon = torch.optim.Muon(matrices, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(
            [{"params": tables, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
        )
        self.optimizers = (muon, adamw)
        self._make_state(params)
        state = {id(p): dict(s) for optimizer in self.optimizers for p, s in optimizer.state.items()}
        return {"count": torch.tensor(0), "leaves": {name: state[id(param)] for name, param in params.items()}}

    def _make_state(self, params: dict[str, Tensor]) -> None:
        """Create the optimizers' states, which ``torch.optim`` otherwise creates at the first step, by a step of 0."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for param in group["params"]:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
            for slots in optimizer.state.values():
                for slot in slots.values():
                    slot.zero_()

    def update(
        self, grads: dict[str, Tensor], state: dict[str, Any], params: dict[str, Tensor], *, donate: bool
    ) -> tuple[dict[str, None], dict[str, Any]]:
        """Take one step in place."""
        for name, param in params.items():
            param.grad = grads[name]
        torch.nn.utils.clip_grad_norm_(params.values(), self.max_norm)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = float(schedule(state["count"]))
            optimizer.step()
        state["count"] += 1
        return dict.fromkeys(params), state
