"""Training engines, each unmodified: a layout that the engine has made, and a thin face over it."""

from muonfx.engines import deepspeed, huggingface, llamafactory, torchtitan

__all__ = ["deepspeed", "huggingface", "llamafactory", "torchtitan"]
