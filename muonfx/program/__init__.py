"""Programs: a transform is lowered to a program once and executed at every step."""

from muonfx.program.lower import lower
from muonfx.program.nodes import Program

__all__ = ["Program", "lower"]
