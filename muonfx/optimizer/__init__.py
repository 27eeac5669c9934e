"""Any transform as a ``torch.optim.Optimizer``."""

from muonfx.optimizer.adapter import TransformOptimizer
from muonfx.optimizer.muon import Muon

__all__ = ["Muon", "TransformOptimizer"]
