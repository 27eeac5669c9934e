"""Division of updates by the root of a running mean square."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.leafwise import Leaf, Slot, StateDtype, StepCount, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = ["DebiasedRmsState", "RmsState", "scale_by_rms"]


class RmsState(NamedTuple):
    """State of `scale_by_rms`."""

    nu: PyTree
    """Averages of the squared gradient, like the parameters, in ``nu_dtype``; a `QuantizedState` if quantized."""


class DebiasedRmsState(NamedTuple):
    """State of `scale_by_rms` with ``debias=True``."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    nu: PyTree
    """Averages of the squared gradient, like the parameters, in ``nu_dtype``; a `QuantizedState` if quantized."""


@leafwise(short_names={"alpha": "decay", "eps": "eps"}, position="sets_size")
def scale_by_rms(
    decay: ScalarOrSchedule = 0.9,
    eps: ScalarOrSchedule = 1e-8,
    *,
    eps_in_sqrt: bool = True,
    debias: bool = False,
    nu_dtype: StateDtype = "auto",
):
    r"""Divide updates by the root of their averaged square.

    $v_t = \beta v_{t-1} + (1 - \beta) g_t^2$, and the update is $g_t / \sqrt{v_t + \epsilon}$, or
    $g_t / (\sqrt{v_t} + \epsilon)$ with ``eps_in_sqrt=False``.

    Args:
        decay: $\beta$, in [0, 1).
        eps: $\epsilon$, not negative.
        eps_in_sqrt: add $\epsilon$ inside the root.
        debias: divide the average by the weight that it has gathered, $1 - \beta^t$, as Adam does; with
            ``eps_in_sqrt=False`` the result is `scale_by_adam` with b1 of 0. All parameters share the count t.
        nu_dtype: storage dtype of the average, as for `Slot`.

    Returns:
        A transform with an `RmsState`, or with a `DebiasedRmsState` if ``debias``.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto".
        TypeError: the dtype is neither floating point nor quantized.

    Follows Hinton's RMSProp (lecture 6e of 2012) and Optax's transform of this name, where ``debias`` is
    ``bias_correction``.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.scale_by_rms(0.75)
        >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([ 2.0000, -2.0000])}
    """
    decay = checks.in_unit_interval("decay", decay)
    eps = checks.at_least("eps", eps, 0.0)
    slot = Slot(nu_dtype, "nu_dtype", signed=False)

    def divide(u: Leaf, nu: Leaf) -> Leaf:
        return u / (nu + eps).sqrt() if eps_in_sqrt else u / (nu.sqrt() + eps)

    def step(u: Leaf, s: RmsState):
        nu = (s.nu * decay).addcmul(u, u, value=1.0 - decay)
        return divide(u, nu), RmsState(nu)

    def debiased(u: Leaf, s: DebiasedRmsState):
        count = s.count + 1
        nu = (s.nu * decay).addcmul(u, u, value=1.0 - decay)
        return divide(u, nu * (1.0 / (1.0 - ew.power(decay, count)))), DebiasedRmsState(count, nu)

    if debias:
        count: Any = StepCount()
        return DebiasedRmsState(count, slot), debiased
    return RmsState(slot), step
