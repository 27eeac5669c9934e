"""Laws that transforms are held to, and strategies that feed them: for muonfx's own transforms and for yours.

`check_transform` runs every law that applies to one transform on drawn trees of parameters and gradients, and shows the
smallest example on which one breaks. The laws can be called one by one, and the strategies used in tests of your own.
Needs hypothesis: ``pip install 'muonfx[testing]'``.
"""

try:
    import hypothesis as _  # noqa: F401
except ImportError as error:  # pragma: no cover - the extra is installed wherever this is tested
    raise ImportError("muonfx.testing needs hypothesis: pip install 'muonfx[testing]'") from error

from muonfx.testing import laws
from muonfx.testing.check import Report, check_transform, laws_for, suitable_params
from muonfx.testing.examples import Example
from muonfx.testing.law import LAWS, Law, law
from muonfx.testing.strategies import DTYPES, Pair, Spectrum, matrices, params_and_grads, spectra, trees
from muonfx.testing.transforms import MATRIX_ONLY, arguments, chains, schedules, transforms
from muonfx.testing.violation import LawViolation

__all__ = [
    # checking a transform
    "check_transform",
    "laws_for",
    "suitable_params",
    "Report",
    "LawViolation",
    # laws
    "laws",
    "LAWS",
    "Law",
    "law",
    # what they are checked on
    "Example",
    "DTYPES",
    "Pair",
    "Spectrum",
    "matrices",
    "spectra",
    "trees",
    "params_and_grads",
    # transforms to check
    "MATRIX_ONLY",
    "arguments",
    "transforms",
    "chains",
    "schedules",
]


def __dir__() -> list[str]:
    return sorted(__all__)
