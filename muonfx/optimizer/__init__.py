"""`TransformOptimizer`, which turns any transform into a ``torch.optim.Optimizer``, and `Muon` for a whole model.

Both have param groups, ``state_dict`` and hooks, work with PyTorch's schedulers, and run on sharded parameters.
"""

from muonfx.optimizer.muon import Muon
from muonfx.optimizer.transform_optimizer import TransformOptimizer

__all__ = ["Muon", "TransformOptimizer"]
