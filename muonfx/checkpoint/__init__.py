"""Checkpoints: states that survive, and conversion from and to other optimizers."""

from muonfx.checkpoint import convert

__all__ = ["convert"]
