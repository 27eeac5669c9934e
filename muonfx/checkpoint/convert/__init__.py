"""From and to other optimizers: state dicts of PyTorch's kind, DeepSpeed's universal folders, Optax's trees.

Each source has a ``from_...`` that makes a transform's state, a ``..._recipe`` that makes the chain which goes on as
the source would, and where it makes sense a ``to_...``. Nothing is ever unpickled but tensors and plain values.
"""

from muonfx.checkpoint.convert.deepspeed import deepspeed_recipe, from_deepspeed, read_deepspeed
from muonfx.checkpoint.convert.dion import dion_recipe, from_dion, to_dion
from muonfx.checkpoint.convert.keller import from_keller, keller_recipe, to_keller
from muonfx.checkpoint.convert.moonlight import from_moonlight, moonlight_recipe, to_moonlight
from muonfx.checkpoint.convert.optax import from_optax, optax_recipe, to_optax
from muonfx.checkpoint.convert.torch_optim import from_torch_optimizer, to_torch_optimizer, torch_recipe

__all__ = [
    "deepspeed_recipe",
    "dion_recipe",
    "from_deepspeed",
    "from_dion",
    "from_keller",
    "from_moonlight",
    "from_optax",
    "from_torch_optimizer",
    "keller_recipe",
    "moonlight_recipe",
    "optax_recipe",
    "read_deepspeed",
    "to_dion",
    "to_keller",
    "to_moonlight",
    "to_optax",
    "to_torch_optimizer",
    "torch_recipe",
]


def __dir__() -> list[str]:
    return sorted(__all__)
