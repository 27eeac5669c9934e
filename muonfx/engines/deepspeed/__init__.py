"""Muon for DeepSpeed: one client optimizer for ZeRO stages 0 to 3, with and without offload.

DeepSpeed flattens the parameters of each group and partitions the buffer (stages 1 and 2) or each parameter (stage 3)
among the ranks. It replaces the parameters in ``param_groups`` with this rank's partition in fp32 and steps on that.
This module locates the shards of the parameters in the partition, which gives a layout for `muonfx.sharding.sharded`.
The state is stored in ``optimizer.state`` of the flat tensor as flat tensors of the same length, so that DeepSpeed
saves, loads and displays it like Adam's state.
"""

from muonfx.engines.deepspeed.checkpoint import load, save
from muonfx.engines.deepspeed.making import Muon, initialize, optimizer
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer

__all__ = ["Muon", "ZeroOptimizer", "initialize", "load", "optimizer", "save"]
