"""AdEMAMix: Adam with a second, slower average of the gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms._pinned import StateDtype, power
from muonfx.transforms.leafwise import Leaf, Slot, StepCount, leafwise
from muonfx.tree import PyTree

__all__ = ["AdemamixState", "scale_by_ademamix"]


class AdemamixState(NamedTuple):
    """State of `scale_by_ademamix`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    mu: PyTree
    """Fast averages of the gradient, like the parameters, in ``mu_dtype``; a `QuantizedState` if it is quantized."""
    slow_mu: PyTree
    """Slow averages of the gradient, in the same form as ``mu``."""
    nu: PyTree
    """Averages of the squared gradient, like the parameters, in ``nu_dtype``; a `QuantizedState` if quantized."""


@leafwise(short_names={"betas": ("b1", "b2"), "momentum": "b1", "eps": "eps"}, position="sets_size")
def scale_by_ademamix(
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    b3: ScalarOrSchedule = 0.9999,
    alpha: ScalarOrSchedule = 5.0,
    eps: ScalarOrSchedule = 1e-8,
    *,
    eps_root: ScalarOrSchedule = 0.0,
    mu_dtype: StateDtype = "auto",
    nu_dtype: StateDtype = "auto",
):
    r"""Divide the sum of a fast and a slow average of the gradient by the root of the averaged squared gradient.

    The update is $(\hat m_t + \alpha s_t) / (\sqrt{\hat v_t + \epsilon_{root}} + \epsilon)$, with $\hat m_t$ and
    $\hat v_t$ as in `scale_by_adam`. The slow average is $s_t = \beta_3 s_{t-1} + (1 - \beta_3) g_t$, without bias
    correction, so it grows slowly from zero.

    Args:
        b1: decay rate of the fast average, in [0, 1).
        b2: decay rate of the second moment, in [0, 1).
        b3: decay rate of the slow average, in [0, 1).
        alpha: weight of the slow average, not negative.
        eps: added outside the root, not negative.
        eps_root: added inside the root, not negative.
        mu_dtype: storage dtype of both averages of the gradient, as in `scale_by_adam`.
        nu_dtype: storage dtype of the second moment, as in `scale_by_adam`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto".
        TypeError: a dtype is neither floating point nor quantized.

    Follows Pagliardini et al. (arXiv 2409.03137) and Optax's transform of ``contrib.ademamix``.

    >>> import muonfx as mfx
    >>> tx = mfx.contrib.scale_by_ademamix(alpha=100.0)
    >>> tx.update({"w": torch.tensor([3.0, -0.01])}, tx.init({"w": torch.zeros(2)}))[0]
    {'w': tensor([ 1.0100, -1.0100])}
    """
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)
    b3 = checks.in_unit_interval("b3", b3)
    alpha = checks.at_least("alpha", alpha, 0.0)
    eps = checks.at_least("eps", eps, 0.0)
    eps_root = checks.at_least("eps_root", eps_root, 0.0)

    def step(u: Leaf, s: AdemamixState):
        count = s.count + 1
        mu = s.mu.lerp(u, 1.0 - b1)
        slow_mu = s.slow_mu.lerp(u, 1.0 - b3)
        nu = (s.nu * b2).addcmul(u, u, value=1.0 - b2)
        divisor = (nu * (1.0 / (1.0 - power(b2, count))) + eps_root).sqrt() + eps
        out = (mu * (1.0 / (1.0 - power(b1, count)))).add(slow_mu, alpha=alpha) / divisor
        return out, AdemamixState(count, mu, slow_mu, nu)

    count: Any = StepCount()
    slots = Slot(mu_dtype, "mu_dtype"), Slot(mu_dtype, "mu_dtype"), Slot(nu_dtype, "nu_dtype", signed=False)
    return AdemamixState(count, *slots), step
