"""Property tests of transforms: laws, and hypothesis strategies that generate examples.

A law is a property that every transform must have, such as not modifying its inputs. An example consists of parameters
and the gradients of some steps. `check_transform` checks every law that applies to a transform, on generated examples,
and reports the smallest counterexample. Laws and strategies can also be used in other tests.
Requires hypothesis: ``pip install 'muonfx[testing]'``.
"""

try:
    import hypothesis as _  # noqa: F401
except ImportError as error:  # pragma: no cover - the extra is installed wherever this is tested
    raise ImportError("muonfx.testing needs hypothesis: pip install 'muonfx[testing]'") from error

from muonfx.testing import laws
from muonfx.testing.check import LawReport, check_transform, laws_for, suitable_params
from muonfx.testing.examples import DTYPES, Example, Pair, params_and_grads, standard_examples
from muonfx.testing.extras import with_extras
from muonfx.testing.law import LAWS, Law, law
from muonfx.testing.optimizers import OPTIMIZER_LAWS, OptimizerLaw, OptimizerReport, check_optimizer
from muonfx.testing.transforms import MATRIX_ONLY, arguments, chains, schedules, transforms
from muonfx.testing.violation import LawViolation, LawViolations

# fmt: off
__all__ = [
    # checking a transform
    "check_transform", "laws_for", "suitable_params", "with_extras", "LawReport", "LawViolation", "LawViolations",
    # checking any torch optimizer
    "check_optimizer", "OptimizerReport", "OptimizerLaw", "OPTIMIZER_LAWS",
    # laws
    "laws", "LAWS", "Law", "law",
    # examples
    "Example", "DTYPES", "Pair", "params_and_grads", "standard_examples",
    # transforms to check
    "MATRIX_ONLY", "arguments", "transforms", "chains", "schedules",
]
# fmt: on


def __dir__() -> list[str]:
    return sorted(__all__)
