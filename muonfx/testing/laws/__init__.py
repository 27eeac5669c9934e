"""The laws, one family per file: each is a function ``law(tx, params, steps)`` that raises `LawViolation`.

`check_transform` checks them in the order of the imports below. A transform that does not accept an absent leaf
therefore breaks that law, and not a later law whose example has an absent leaf.
"""

# ruff: noqa: F403 - the registry LAWS lists what the families define
# isort: off
from muonfx.testing.laws.structure import *
from muonfx.testing.laws.purity import *
from muonfx.testing.laws.values import *
from muonfx.testing.laws.algebra import *
from muonfx.testing.laws.donation import *
from muonfx.testing.laws.locality import *
from muonfx.testing.laws.declarations import *
from muonfx.testing.laws.batching import *
from muonfx.testing.laws.calculus import *
from muonfx.testing.laws.compiling import *
# isort: on

from muonfx.testing.law import LAWS

__all__ = list(LAWS)  # pyright: ignore[reportUnsupportedDunderAll]
