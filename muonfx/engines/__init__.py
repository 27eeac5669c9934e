"""Adapters for training engines, which need no patches: Muon on the layout that the engine has made."""

from muonfx.engines import deepspeed, huggingface, llamafactory, torchtitan

__all__ = ["deepspeed", "huggingface", "llamafactory", "torchtitan"]
