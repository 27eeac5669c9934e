"""Adapters for DeepSpeed, Hugging Face, torchtitan and LLaMA-Factory, which run unmodified.

Each adapter reads the layout of the engine's shards and runs the same chain on it.
"""

from muonfx.engines import deepspeed, huggingface, llamafactory, torchtitan

__all__ = ["deepspeed", "huggingface", "llamafactory", "torchtitan"]
