"""Lower a transform to a program once, then execute the program at every step.

A program is a sequence of typed nodes that follows from structure, names and shapes, never from values. `offload` keeps
the state in host memory or on disk between steps.
"""

from muonfx.program.lower import lower
from muonfx.program.nodes import Program

__all__ = ["Program", "lower"]
