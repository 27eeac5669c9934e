"""DeepSpeed: one client optimizer for ZeRO stages 0 to 3, with and without offload.

DeepSpeed flattens the parameters of each group, cuts the buffer (stages 1 and 2) or each parameter (stage 3) among the
ranks, puts this rank's part in fp32 into ``param_groups`` in the place of the parameters, and steps on that. Here the
pieces of the parameters are found in it again: that is a layout, and the step is that of `muonfx.sharding.sharded`.
The state lies in ``optimizer.state`` of the flat tensor as flat tensors of its length, so that DeepSpeed saves, loads
and shows it as it does Adam's.
"""

from muonfx.engines.deepspeed.checkpoint import load, save
from muonfx.engines.deepspeed.making import Muon, initialize, optimizer
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer

__all__ = ["Muon", "ZeroOptimizer", "initialize", "load", "optimizer", "save"]
