"""Adapters that run muonfx in unmodified DeepSpeed, Hugging Face, torchtitan and LLaMA-Factory.

Each adapter constructs the optimizer in the form that the framework requires. The DeepSpeed adapter also locates the
shards of the parameters in DeepSpeed's flat tensors.
"""

from muonfx.engines import deepspeed, huggingface, llamafactory, torchtitan

__all__ = ["deepspeed", "huggingface", "llamafactory", "torchtitan"]
