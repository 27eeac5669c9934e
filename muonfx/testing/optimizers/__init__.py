"""Laws for any `torch.optim.Optimizer`: what a training loop, a checkpoint and a sharded model rely on."""

from muonfx.testing.optimizers import laws as _  # noqa: F401 - fills OPTIMIZER_LAWS, before the laws of ranks
from muonfx.testing.optimizers.check import OptimizerReport, check_optimizer
from muonfx.testing.optimizers.law import OPTIMIZER_LAWS, OptimizerLaw

__all__ = ["OPTIMIZER_LAWS", "OptimizerLaw", "OptimizerReport", "check_optimizer"]
