"""Lower a transform to a program (how each of its transforms runs) once, then execute the program at every step.

A program is a tree of nodes. It depends on the transform and on the names and shapes of parameters, never on values.
`offload` keeps the state in host memory or on disk between steps.
"""

from muonfx.placement.lower import lower
from muonfx.placement.nodes import Program

__all__ = ["Program", "lower"]
