"""Adam's scaling of updates by running first and second moments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.leafwise import Leaf, Slot, StateDtype, StepCount, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = ["AdamState", "scale_by_adam"]


class AdamState(NamedTuple):
    """State of `scale_by_adam`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    mu: PyTree
    """Averages of the gradient, like the parameters, in ``mu_dtype``; a `QuantizedState` if it is quantized."""
    nu: PyTree
    """Averages of the squared gradient, like the parameters, in ``nu_dtype``; a `QuantizedState` if quantized."""


@leafwise(
    short_names={"betas": ("b1", "b2"), "momentum": "b1", "eps": "eps"},
    position="sets_size",
)
def scale_by_adam(
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: ScalarOrSchedule = 1e-8,
    *,
    eps_root: ScalarOrSchedule = 0.0,
    nesterov: bool = False,
    mu_dtype: StateDtype = "auto",
    nu_dtype: StateDtype = "auto",
):
    r"""Divide the averaged gradient by the root of the averaged squared gradient.

    $m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t$, $v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$, and the update is
    $\hat m_t / (\sqrt{\hat v_t + \epsilon_{root}} + \epsilon)$ with $\hat m_t = m_t / (1 - \beta_1^t)$,
    $\hat v_t = v_t / (1 - \beta_2^t)$.

    Args:
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment, in [0, 1).
        eps: added outside the root, not negative.
        eps_root: added inside the root, not negative; give a small one to differentiate through updates whose gradients
            can be exactly zero, where the root has no derivative.
        nesterov: use Nesterov momentum, as NAdam does:
            $\hat m_t = \beta_1 m_t / (1 - \beta_1^{t+1}) + (1 - \beta_1) g_t / (1 - \beta_1^t)$.
        mu_dtype: storage dtype of the first moment, as for `Slot`.
        nu_dtype: storage dtype of the second moment, as for `Slot`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto".
        TypeError: a dtype is neither floating point nor quantized.

    The square of a gradient beyond 1.8e19 overflows fp32 (beyond 1.3e154, fp64). The second moment of the element is
    then infinite, and the element stays fixed, as in torch. `clip_by_global_norm` in front keeps squares finite.

    Follows Kingma and Ba (arXiv 1412.6980), and equals ``torch.optim.AdamW`` without weight decay if every parameter
    has a gradient at every step. All parameters share the count t, as in Optax; torch counts for each parameter.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.scale_by_adam()
        >>> updates, state = tx.update({"w": torch.tensor([3.0, -0.01])}, tx.init({"w": torch.zeros(2)}))
        >>> updates["w"]
        tensor([ 1.0000, -1.0000])
    """
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)
    eps = checks.at_least("eps", eps, 0.0)
    eps_root = checks.at_least("eps_root", eps_root, 0.0)

    def step(u: Leaf, s: AdamState):
        count = s.count + 1
        mu = s.mu.lerp(u, 1.0 - b1)
        nu = (s.nu * b2).addcmul(u, u, value=1.0 - b2)

        # m / c1 / (sqrt(v / c2 + eps_root) + eps), numerator and denominator multiplied by sqrt(c2) to save a pass
        c1, c2 = 1.0 - ew.power(b1, count), 1.0 - ew.power(b2, count)
        inside = nu if isinstance(eps_root, float) and eps_root == 0.0 else nu + eps_root * c2
        ahead = (mu * (b1 * c1 / (1.0 - ew.power(b1, count + 1)))).add(u, alpha=1.0 - b1) if nesterov else mu
        out = ahead / (inside.sqrt() + eps * c2.sqrt()) * (c2.sqrt() / c1)
        return out, AdamState(count, mu, nu)

    count: Any = StepCount()
    return AdamState(count, Slot(mu_dtype, "mu_dtype"), Slot(nu_dtype, "nu_dtype", signed=False)), step
