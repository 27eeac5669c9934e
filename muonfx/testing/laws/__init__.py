"""The laws, one family per file: each is a function ``law(tx, params, steps)`` that raises `LawViolation`.

`check_transform` checks them in the order of the imports below. A transform that does not accept an absent leaf
therefore breaks that law, and not a later law whose example has an absent leaf.
"""

# ruff: noqa: F403 - each family lists its laws
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
from muonfx.testing.laws import (
    structure,
    purity,
    values,
    algebra,
    donation,
    locality,
    declarations,
    batching,
    calculus,
    compiling,
)
# isort: on

__all__: list[str] = []
__all__ += structure.__all__
__all__ += purity.__all__
__all__ += values.__all__
__all__ += algebra.__all__
__all__ += donation.__all__
__all__ += locality.__all__
__all__ += declarations.__all__
__all__ += batching.__all__
__all__ += calculus.__all__
__all__ += compiling.__all__
