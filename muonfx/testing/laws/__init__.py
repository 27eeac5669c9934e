"""The laws, one family per file: properties that every transform must have.

Each law is a function ``law(tx, params, steps)`` of a transform, parameters and the gradients of each step, which
raises `LawViolation` if the law does not hold. `check_transform` checks them in the order of the imports below. For
example, a transform that does not accept a gradient of None breaks the law about this first, and not a later law.
"""

# ruff: noqa: F403 - the registry LAWS lists what the families define
# isort: off
from muonfx.testing.laws.structure import *
from muonfx.testing.laws.purity import *
from muonfx.testing.laws.values import *
from muonfx.testing.laws.ambient import *
from muonfx.testing.laws.representation import *
from muonfx.testing.laws.algebra import *
from muonfx.testing.laws.donation import *
from muonfx.testing.laws.locality import *
from muonfx.testing.laws.declarations import *
from muonfx.testing.laws.batching import *
from muonfx.testing.laws.numbers import *
from muonfx.testing.laws.calculus import *
from muonfx.testing.laws.compiling import *
# isort: on

from muonfx.testing.law import LAWS

__all__ = list(LAWS)  # pyright: ignore[reportUnsupportedDunderAll]
