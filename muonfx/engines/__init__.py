"""Adapters that run muonfx in unmodified DeepSpeed, Hugging Face, torchtitan and LLaMA-Factory.

Each adapter makes the optimizer in the form that the engine requires. The adapter of DeepSpeed also locates the shards
of the parameters in DeepSpeed's flat tensors.
"""

from muonfx.engines import deepspeed, huggingface, llamafactory, torchtitan

__all__ = ["deepspeed", "huggingface", "llamafactory", "torchtitan"]
