"""Momentum, Adam, RMSProp and Lion: transforms that keep running averages of gradients or of their squares."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.formulas import bias_correction
from muonfx.transforms.leafwise import Leaf, Slot, StateDtype, StepCount, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew


class MomentumState(NamedTuple):
    """State of the transform `momentum`: the running average of the gradients."""

    trace: PyTree
    """The average of the gradients: a tree like the parameters in the storage dtype, or a `QuantizedState`."""


class DebiasedMomentumState(NamedTuple):
    """State of the transform `momentum` with ``debias=True``: a step count and the average of the gradients."""

    count: PyTree  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, a 0-d int64 tensor."""
    trace: PyTree
    """The average of the gradients: a tree like the parameters in the storage dtype, or a `QuantizedState`."""


@leafwise(short_names={"momentum": "decay"})
def momentum(
    decay: ScalarOrSchedule = 0.95,
    *,
    nesterov: bool = True,
    debias: bool = False,
    heavy_ball: bool = False,
    dtype: StateDtype = "auto",
):
    r"""Replace gradients by their running average.

    The average is $m_t = \beta m_{t-1} + (1 - \beta) g_t$. The update is $m_t$, or with Nesterov's look-ahead
    $\beta m_t + (1 - \beta) g_t$. With ``heavy_ball`` the average is a sum, $m_t = \beta m_{t-1} + g_t$, and the
    look-ahead is $g_t + \beta m_t$.

    Args:
        decay: $\beta$, in [0, 1).
        nesterov: use Nesterov's look-ahead.
        debias: correct the bias of the average by dividing by $1 - \beta^t$, as Adam does. With Nesterov, both terms
            are divided, as in NAdam: $\beta m_t / (1 - \beta^{t+1}) + (1 - \beta) g_t / (1 - \beta^t)$. All parameters
            share the step count t.
        heavy_ball: sum gradients instead of averaging them. A sum has no bias to correct.
        dtype: storage dtype of the average: "auto" (float32, or float64 for float64 parameters), a floating or
            quantized dtype, or None for the dtype of each parameter. Arithmetic runs in the wider dtype of gradient
            and state, at least fp32.

    Returns:
        A transform with a `MomentumState`, or with a `DebiasedMomentumState` if ``debias``.

    Raises:
        ValueError: ``decay`` is out of range, ``debias`` is combined with ``heavy_ball``, or ``dtype`` is a string
            other than "auto".
        TypeError: ``dtype`` is neither a floating-point dtype nor a quantized one.

    Follows ``torch.optim.Muon`` (EMA form), ``torch.optim.SGD`` (heavy ball) and ``optax.contrib.muon`` (bias
    correction).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.momentum(0.9, nesterov=False)
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}))
        >>> state.trace["w"]
        tensor([0.1000, 0.1000])
    """
    decay = checks.in_unit_interval("decay", decay)
    if debias and heavy_ball:
        raise ValueError(
            "debias corrects an average; a heavy-ball sum (heavy_ball=True) has no bias to correct"
        )
    slot = Slot(dtype)

    def average(g: Leaf, s: MomentumState):
        """Return m = decay m + (1 - decay) g, or with Nesterov's look-ahead decay m + (1 - decay) g for the new m."""
        m = s.trace.lerp(g, 1.0 - decay)
        if nesterov:
            return g.lerp(m, decay), MomentumState(m)
        return m, MomentumState(m)

    def sum_up(g: Leaf, s: MomentumState):
        """Return m = decay m + g, or with Nesterov's look-ahead decay m + g for the new m."""
        m = s.trace * decay + g
        if nesterov:
            return g.add(m, alpha=decay), MomentumState(m)
        return m, MomentumState(m)

    def debiased_average(g: Leaf, s: DebiasedMomentumState):
        """Return m / (1 - decay^t), as Adam does; with Nesterov momentum, m counts for step t + 1, as in NAdam.

        The average m starts at zero, so it is too small at first. After one gradient of 1 with a decay of 0.9, it is
        0.1, and the division by 1 - 0.9 makes it 1.
        """
        t = s.count + 1
        m = s.trace.lerp(g, 1.0 - decay)
        correction = bias_correction(decay, t)
        if not nesterov:
            return m * (1.0 / correction), DebiasedMomentumState(t, m)
        # (1 - decay) g / (1 - decay^t) + decay m / (1 - decay^(t + 1))
        next_correction = bias_correction(decay, t + 1)
        weight_of_g = ew.scalar_like(1.0 - decay, correction) / correction
        weight_of_m = ew.scalar_like(decay, next_correction) / next_correction
        out = (g * weight_of_g).add(m, alpha=weight_of_m)
        return out, DebiasedMomentumState(t, m)

    if debias:
        return DebiasedMomentumState(StepCount(), slot), debiased_average
    if heavy_ball:
        return MomentumState(slot), sum_up
    return MomentumState(slot), average


class AdamState(NamedTuple):
    """State of `scale_by_adam`: a step count and both moments, trees like the parameters (or `QuantizedState`)."""

    count: PyTree  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, a 0-d int64 tensor."""
    mu: PyTree
    """The first moment, the average of the gradients, in ``mu_dtype``."""
    nu: PyTree
    """The second moment, the average of the squared gradients, in ``nu_dtype``."""


@leafwise(short_names={"betas": ("b1", "b2"), "momentum": "b1", "eps": "eps"}, position="sets_size")
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

    The moments are $m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t$ and $v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$. The
    update is $\hat m_t / (\sqrt{\hat v_t + \epsilon_{root}} + \epsilon)$ with $\hat m_t = m_t / (1 - \beta_1^t)$ and
    $\hat v_t = v_t / (1 - \beta_2^t)$.

    Args:
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment, in [0, 1).
        eps: added outside the root, not negative.
        eps_root: added inside the root, not negative. A small positive number bounds the derivatives of updates at
            small gradients. At a gradient of exactly zero, the derivative of the root counts as 0.
        nesterov: use Nesterov momentum, as NAdam does:
            $\hat m_t = \beta_1 m_t / (1 - \beta_1^{t+1}) + (1 - \beta_1) g_t / (1 - \beta_1^t)$.
        mu_dtype: storage dtype of the first moment: "auto" (float32, or float64 for float64 parameters), a floating or
            quantized dtype, or None for the dtype of each parameter.
        nu_dtype: storage dtype of the second moment; the same choices.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto".
        TypeError: a dtype is neither floating point nor quantized.

    The square of a gradient beyond 1.8e19 overflows fp32 (beyond 1.3e154, fp64). The second moment of the element is
    then infinite, and its parameter no longer changes, as in torch. `clip_by_global_norm` before this transform keeps
    the squares finite.

    Follows Kingma and Ba (arXiv 1412.6980). It equals ``torch.optim.AdamW`` without weight decay if every parameter has
    a gradient at every step. All parameters share the step count t, as in Optax; torch counts for each parameter.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.scale_by_adam()
        >>> updates, state = tx.update(
        ...     {"w": torch.tensor([3.0, -0.01])}, tx.init({"w": torch.zeros(2)})
        ... )
        >>> updates["w"]
        tensor([ 1.0000, -1.0000])
    """
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)
    eps = checks.at_least("eps", eps, 0.0)
    eps_root = checks.at_least("eps_root", eps_root, 0.0)

    def step(g: Leaf, s: AdamState):
        """Return Adam's update, (m / c1) / (sqrt(v / c2 + eps_root) + eps), and the new state.

        m and v are the running averages of the gradient g and of its square, and t is the number of this step. Both
        averages start at zero, which the divisions by c1 and c2 correct.
        """
        t = s.count + 1
        m = s.mu.lerp(g, 1.0 - b1)
        v = (s.nu * b2).addcmul(g, g, value=1.0 - b2)
        c1 = bias_correction(b1, t)
        c2 = bias_correction(b2, t)

        # m / c1; with Nesterov momentum, (b1 c1 / next_c1 m + (1 - b1) g) / c1
        numerator = m
        if nesterov:
            next_c1 = bias_correction(b1, t + 1)
            numerator = (m * (b1 * c1 / next_c1)).add(g, alpha=1.0 - b1)

        # sqrt(v / c2 + eps_root) + eps, multiplied by sqrt(c2) to save a pass
        radicand = v
        # A tensor is added without reading its value. For the number 0, the addition is left out.
        if isinstance(eps_root, Tensor) or eps_root != 0.0:
            radicand = v + eps_root * c2
        root_c2 = c2.sqrt()
        denominator = radicand.sqrt() + eps * root_c2

        # The denominator is sqrt(c2) times as large, so the quotient is multiplied by it.
        out = numerator / denominator * (root_c2 / c1)
        return out, AdamState(count=t, mu=m, nu=v)

    mu_slot = Slot(mu_dtype, "mu_dtype")
    nu_slot = Slot(nu_dtype, "nu_dtype", signed=False)
    return AdamState(count=StepCount(), mu=mu_slot, nu=nu_slot), step


class RmsState(NamedTuple):
    """State of the transform `scale_by_rms`: the running average of the squared gradients."""

    nu: PyTree
    """The average of the squared gradients: a tree like the parameters in ``nu_dtype``, or a `QuantizedState`."""


class DebiasedRmsState(NamedTuple):
    """State of the transform `scale_by_rms` with ``debias=True``: a step count and the average squared gradient."""

    count: PyTree  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, a 0-d int64 tensor."""
    nu: PyTree
    """The average of the squared gradients: a tree like the parameters in ``nu_dtype``, or a `QuantizedState`."""


@leafwise(short_names={"alpha": "decay", "eps": "eps"}, position="sets_size")
def scale_by_rms(
    decay: ScalarOrSchedule = 0.9,
    eps: ScalarOrSchedule = 1e-8,
    *,
    eps_in_sqrt: bool = True,
    debias: bool = False,
    nu_dtype: StateDtype = "auto",
):
    r"""Divide each element of the gradients by the root of the running average of its square, as RMSProp does.

    The average is $v_t = \beta v_{t-1} + (1 - \beta) g_t^2$. The update is $g_t / \sqrt{v_t + \epsilon}$, or
    $g_t / (\sqrt{v_t} + \epsilon)$ with ``eps_in_sqrt=False``.

    Args:
        decay: $\beta$, in [0, 1).
        eps: $\epsilon$, not negative.
        eps_in_sqrt: add $\epsilon$ inside the root.
        debias: correct the bias of the average by dividing by $1 - \beta^t$, as Adam does. With ``eps_in_sqrt=False``
            the result equals ``scale_by_adam(b1=0.0)``. All parameters share the step count t.
        nu_dtype: storage dtype of the average: "auto" (float32, or float64 for float64 parameters), a floating or
            quantized dtype, or None for the dtype of each parameter.

    Returns:
        A transform with an `RmsState`, or with a `DebiasedRmsState` if ``debias``.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto".
        TypeError: the dtype is neither floating point nor quantized.

    The square of a gradient beyond 1.8e19 overflows fp32. The mean square of the element is then infinite, and its
    parameter no longer changes. `clip_by_global_norm` in front keeps squares finite.

    Follows Hinton's RMSProp (lecture 6e of 2012) and Optax's ``scale_by_rms``, where ``debias`` is called
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

    def average(g: Leaf, v: Leaf) -> Leaf:
        """Return ``decay * v + (1 - decay) * g^2``."""
        return (v * decay).addcmul(g, g, value=1.0 - decay)

    def divide(g: Leaf, v: Leaf) -> Leaf:
        """Return the update for the gradient g and its mean square v."""
        if eps_in_sqrt:
            return g / (v + eps).sqrt()
        return g / (v.sqrt() + eps)

    def step(g: Leaf, s: RmsState):
        v = average(g, s.nu)
        return divide(g, v), RmsState(v)

    def debiased_step(g: Leaf, s: DebiasedRmsState):
        t = s.count + 1
        v = average(g, s.nu)
        debiased_v = v * (1.0 / bias_correction(decay, t))
        return divide(g, debiased_v), DebiasedRmsState(t, v)

    if debias:
        return DebiasedRmsState(StepCount(), slot), debiased_step
    return RmsState(slot), step


class LionState(NamedTuple):
    """State of the transform `scale_by_lion`: the running average of the gradients."""

    mu: PyTree
    """The average of the gradients: a tree like the parameters in ``mu_dtype``, or a `QuantizedState`."""


@leafwise(short_names={"betas": ("b1", "b2"), "momentum": "b1"}, position="sets_size")
def scale_by_lion(
    b1: ScalarOrSchedule = 0.9, b2: ScalarOrSchedule = 0.99, *, mu_dtype: StateDtype = "auto"
):
    r"""Replace gradients by the sign of a mean of the gradient and its running average, as Lion does.

    The update is the sign of $\beta_1 m_{t-1} + (1 - \beta_1) g_t$, and the running average is $m_t = \beta_2 m_{t-1} +
    (1 - \beta_2) g_t$.

    Args:
        b1: $\beta_1$, the weight of the average in the update, in [0, 1).
        b2: $\beta_2$, the decay rate of the average, in [0, 1).
        mu_dtype: storage dtype of the average: "auto" (float32, or float64 for float64 parameters), a floating or
            quantized dtype, or None for the dtype of each parameter.

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
        mean = s.mu.lerp(u, 1.0 - b1)
        # The sign of NaN would be 0; zero times NaN or infinity is NaN.
        out = mean.sign().add(mean, alpha=0.0)
        m = s.mu.lerp(u, 1.0 - b2)
        return out, LionState(m)

    slot = Slot(mu_dtype, "mu_dtype")
    return LionState(slot), step
