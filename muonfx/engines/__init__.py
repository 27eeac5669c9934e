"""Adapters for DeepSpeed, Hugging Face, torchtitan and LLaMA-Factory, which run unmodified.

Each adapter makes the optimizer that the engine requires. For DeepSpeed it also reads the layout of the shards.
"""

from muonfx.engines import deepspeed, huggingface, llamafactory, torchtitan

__all__ = ["deepspeed", "huggingface", "llamafactory", "torchtitan"]
