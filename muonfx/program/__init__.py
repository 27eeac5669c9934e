"""A chain as a program, which is lowered once and executed at every step."""

from muonfx.program.lower import lower
from muonfx.program.nodes import Program

__all__ = ["Program", "lower"]
