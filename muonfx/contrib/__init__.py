"""Parts of Muon's variants, and further transforms from Optax; imported on first use.

Each module contains one family of transforms. The page "Variants of Muon" shows the chains that are made of them.
`scion` and `lora_labels` choose transforms for each kind of parameter.
"""

import sys
from types import ModuleType
from typing import NoReturn

from muonfx._other_libraries import NAMES_HERE
from muonfx.contrib.adafactor import FactoredRmsState, scale_by_factored_rms
from muonfx.contrib.dion import DionState, scale_by_dion
from muonfx.contrib.dion2 import Dion2State, scale_by_dion2
from muonfx.contrib.directions import NamoState, scale_by_dual_norm, scale_by_namo
from muonfx.contrib.ema_nesterov import EmaNesterovState, ema_nesterov
from muonfx.contrib.lora import lora_labels
from muonfx.contrib.norms import (
    WeightNormsState,
    floor_by_weight_norms,
    keep_weight_norms,
    match_weight_norms,
    normalize_columns,
    normalize_leaves,
    normalize_matrices,
    normalize_rows,
    radial_brake,
)
from muonfx.contrib.plateau import ReduceOnPlateauState, reduce_on_plateau
from muonfx.contrib.prodigy import ProdigyState, scale_by_prodigy
from muonfx.contrib.schedule_free import ScheduleFreeState, schedule_free, schedule_free_eval_params
from muonfx.contrib.scion import scion
from muonfx.contrib.shampoo import ShampooState, scale_by_shampoo
from muonfx.contrib.sharpness import sam, sam_gradient
from muonfx.contrib.soap import SoapState, scale_by_soap

# fmt: off
__all__ = [
    "Dion2State", "DionState", "EmaNesterovState", "FactoredRmsState", "NamoState", "ProdigyState",
    "ReduceOnPlateauState", "ScheduleFreeState", "ShampooState", "SoapState", "WeightNormsState", "ema_nesterov",
    "floor_by_weight_norms", "keep_weight_norms", "lora_labels", "match_weight_norms", "normalize_columns",
    "normalize_leaves", "normalize_matrices", "normalize_rows", "radial_brake", "reduce_on_plateau", "sam",
    "sam_gradient", "scale_by_dion", "scale_by_dion2", "scale_by_dual_norm", "scale_by_factored_rms", "scale_by_namo",
    "scale_by_prodigy", "scale_by_shampoo", "scale_by_soap", "schedule_free", "schedule_free_eval_params", "scion",
]
# fmt: on


class _ModuleOfTransforms(ModuleType):
    """A module of this package that has the name of an optimizer of Optax, such as ``contrib.prodigy``."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a TypeError with the name of the transform, as for ``contrib.prodigy(1.0)``."""
        short_name = self.__name__.rpartition(".")[2]
        raise TypeError(
            f"{self.__name__} is a module, not an optimizer; here it is muonfx.{NAMES_HERE[short_name]}"
        )


for _name in ("adafactor", "prodigy", "shampoo", "soap"):
    sys.modules[f"{__name__}.{_name}"].__class__ = _ModuleOfTransforms


def __dir__() -> list[str]:
    return sorted(__all__)
