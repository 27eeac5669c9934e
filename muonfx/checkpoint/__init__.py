"""Checkpoints: states that survive, and conversion from and to other optimizers."""
