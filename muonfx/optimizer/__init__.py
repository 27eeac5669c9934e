"""`TransformOptimizer` turns any transform into a ``torch.optim.Optimizer``; `Muon` does so for a whole model.

They have param groups, ``state_dict``, hooks and schedulers as in PyTorch, and also run on sharded parameters.
"""

from muonfx.optimizer.adapter import TransformOptimizer
from muonfx.optimizer.muon import Muon

__all__ = ["Muon", "TransformOptimizer"]
