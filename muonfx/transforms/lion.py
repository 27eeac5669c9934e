"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import NamedTuple

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.leafwise import Leaf, Slot, StateDtype, leafwise
from muonfx.tree import PyTree

__all__ = ["LionState", "scale_by_lion"]


class LionState(NamedTuple):
    """State of `scale_by_lion`."""

    mu: PyTree
    """The average gradient, like the parameters, in ``mu_dtype``; a `QuantizedState` if it is quantized."""


@leafwise(
    short_names={"betas": ("b1", "b2"), "momentum": "b1"},
    position="sets_size",
)
def scale_by_lion(b1: ScalarOrSchedule = 0.9, b2: ScalarOrSchedule = 0.99, *, mu_dtype: StateDtype = "auto"):
    r"""Replace updates by the sign of $\beta_1 m_{t-1} + (1 - \beta_1) g_t$.

    The average is $m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t$.

    Args:
        b1: weight of the average in the update, in [0, 1).
        b2: decay rate of the average, in [0, 1).
        mu_dtype: storage dtype of the average, as for `Slot`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto".
        TypeError: the dtype is neither floating point nor quantized.

    Follows Chen et al. (arXiv 2302.06675).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.scale_by_lion()
        >>> tx.update({"w": torch.tensor([3.0, -0.01])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([ 1., -1.])}
    """
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)

    def step(u: Leaf, s: LionState):
        return s.mu.lerp(u, 1.0 - b1).sign(), LionState(s.mu.lerp(u, 1.0 - b2))

    return LionState(Slot(mu_dtype, "mu_dtype")), step
