"""Prodigy: Adam with a learning rate that is estimated during training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.clip import Sum
from muonfx.transforms.formulas import bias_correction, divide_unless
from muonfx.transforms.leafwise import WideStateDtype, copies, params_for, read_wide, write, zeros
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar


class ProdigyState(NamedTuple):
    """State of `scale_by_prodigy`: Adam's moments, the estimated learning rate, and the values that it depends on."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, 0-d int64."""
    estim_lr: Tensor
    """The estimate of the learning rate, 0-d. It never decreases."""
    numerator: Tensor
    """The numerator of the estimate, 0-d."""
    mu: PyTree
    """The first moment, a weighted average of the gradients: a tree like the parameters."""
    nu: PyTree
    """The second moment, a weighted average of the squared gradients: a tree like the parameters."""
    grad_sum: PyTree
    """The weighted sum of the gradients in the estimate's denominator: a tree like the parameters."""
    start: PyTree
    """The initial parameters, in their own dtypes."""


@transform(
    locality=Locality.TREE,
    short_names={"lr": "learning_rate", "betas": ("b1", "b2"), "eps": "eps"},
    position="sets_size",
)
def scale_by_prodigy(
    learning_rate: ScalarOrSchedule = 1.0,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: ScalarOrSchedule = 1e-8,
    *,
    estim_lr0: ScalarOrSchedule = 1e-6,
    estim_lr_coef: ScalarOrSchedule = 1.0,
    weight_decay: ScalarOrSchedule = 0.0,
    safeguard_warmup: bool = False,
    dtype: WideStateDtype = "auto",
):
    r"""Scale gradients as Adam does, and multiply them by an estimate of the learning rate.

    The estimate is the largest value so far of a ratio. The numerator is a weighted sum of
    $\langle g_t, p_0 - p_t \rangle$ over the steps $t$, for the gradients $g_t$ and the initial parameters $p_0$. The
    denominator is the 1-norm of a weighted sum of the gradients. The weights decay with the age of a step. The inner
    product and the norm are over all parameters on all ranks.

    Args:
        learning_rate: a factor of the estimated rate, usually 1 or a schedule that falls from 1 to 0. It is applied
            here because it affects the estimate. It does not reverse the updates: put ``scale(-1.0)`` after this
            transform.
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment, in [0, 1); its root is the decay rate of the averages in the estimate.
        eps: added outside the root after multiplication by the estimate, not negative.
        estim_lr0: the initial estimate, positive and small.
        estim_lr_coef: a factor of the estimates after the first, positive.
        weight_decay: decoupled weight decay: this factor times the parameters is added to Adam's step before
            multiplication by the rate.
        safeguard_warmup: leave the learning rate out of the denominator of the estimate. Use it with a warmup.
        dtype: storage dtype of the moments and sums. "auto" is float32, or float64 for float64 parameters; None is the
            dtype of each parameter.

    Raises:
        ValueError: an argument is out of range, or ``dtype`` is a string other than "auto"; at `update`, ``params`` is
            missing.

    The square of a gradient beyond 1.8e19, times the squared estimate, overflows fp32. The parameter then no longer
    changes. `clip_by_global_norm` in front keeps squares finite.

    Follows Mishchenko and Defazio (arXiv 2306.06101) and Optax's ``contrib.prodigy``: Adam's bias correction is
    applied, as in Optax. The authors' package ``prodigyopt`` applies it only with ``use_bias_correction=True``; without
    it, the first update is $(1 - \beta_1) / \sqrt{1 - \beta_2}$ times as large.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.contrib.scale_by_prodigy(), mfx.scale(-1.0))
        >>> params = {"w": torch.ones(1)}
        >>> state = tx.init(params)
        >>> for _ in range(60):
        ...     updates, state = tx.update(params, state, params)  # the gradient of half the square
        ...     params = mfx.apply_updates(params, updates)
        >>> bool(state["scale_by_prodigy"].estim_lr > 1e4 * 1e-6)
        True
    """
    learning_rate = checks.at_least("learning_rate", learning_rate, 0.0)
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)
    eps = checks.at_least("eps", eps, 0.0)
    weight_decay = checks.at_least("weight_decay", weight_decay, 0.0)
    estim_lr0 = checks.positive("estim_lr0", estim_lr0)
    estim_lr_coef = checks.positive("estim_lr_coef", estim_lr_coef)
    checks.state_dtype("dtype", dtype)

    def init(params: PyTree) -> ProdigyState:
        """Return a state with the first estimate, zeros, and a copy of the parameters."""
        device = device_of(params)
        return ProdigyState(
            count=ew.new_count(device),
            estim_lr=ew.new_number(estim_lr0, device),
            numerator=ew.new_number(0.0, device),
            mu=zeros(params, dtype),
            nu=zeros(params, dtype),
            grad_sum=zeros(params, dtype),
            start=copies(params),
        )

    def update(
        updates: PyTree,
        state: ProdigyState,
        params: PyTree = None,
        *,
        sum_over_leaves: Sum,
        donate: Donation = NOTHING,
    ):
        """Update the estimate d of the learning rate and Adam's moments. Comments show the formulas of the paper.

        x0 are the initial parameters, x the current ones, g the gradients, m and v the moments, s the weighted sum of
        gradients, and r the numerator of the estimate. Except for r, they are lists with a tensor for each leaf that
        has a gradient. All tensors of a leaf have one dtype, the widest of them and at least fp32.
        """
        params = params_for("scale_by_prodigy", params)
        # The leaves that have a gradient; the state of the others does not change.
        present = Present(updates)
        g, x, x0, m, v, s = read_wide(
            present, updates, params, state.start, state.mu, state.nu, state.grad_sum
        )
        reuse = donate.state  # True if the new state may overwrite the old one

        count = state.count + 1
        d = state.estim_lr
        d0 = estim_lr0
        # Python's power rounds differently than torch's.
        sqrt_b2 = ew.new_number(b2, d.device).sqrt()
        step_size = _step_size(d, learning_rate, b1, b2, count)

        # r = sqrt(b2) r + d / d0 * step_size * <g, x0 - x>
        inner_products = present.fill(list(map(_inner_product, g, x0, x)))
        inner_product = sum_over_leaves(inner_products).to(d)
        r = sqrt_b2 * state.numerator + d / d0 * step_size * inner_product

        # s = sqrt(b2) s + d / d0 * step_size * g
        weight_in_s = d * step_size / d0
        if safeguard_warmup:
            weight_in_s = d * d / d0
        s = _decayed_sum(s, sqrt_b2, g, weight_in_s, reuse)

        # m = b1 m + (1 - b1) d g
        m = _decayed_sum(m, b1, g, (1.0 - b1) * d, reuse)

        # v = b2 v + (1 - b2) d^2 g^2
        v = ew.mul(v, b2, reuse=reuse)
        v = ew.addcmul(v, g, g, (1.0 - b2) * d * d, reuse=True)

        # d = max(d, estim_lr_coef r / |s|_1). The norm is over all leaves, also those without a gradient in this step:
        # they have contributed to r.
        grad_sum = write(present, s, state.grad_sum, reuse=reuse)
        s_norm = sum_over_leaves(tree.map(_norm, grad_sum)).to(d)
        estimate = divide_unless(~(s_norm > 0), estim_lr_coef * r, s_norm, otherwise=d)
        new_d = torch.maximum(d, estimate)

        # u = step_size * (m / (sqrt(v) + new_d eps) + weight_decay x)
        u = ew.apply("sqrt", v)
        u = ew.shift(u, new_d * eps, reuse=True)
        u = ew.div(m, u, reuse=True)
        if isinstance(weight_decay, Tensor) or weight_decay != 0.0:  # a tensor is not read here
            u = ew.add(u, x, weight_decay, reuse=True)
        u = ew.mul(u, step_size, reuse=True)

        new_state = ProdigyState(
            count=count,
            estim_lr=new_d,
            numerator=r,
            mu=write(present, m, state.mu, reuse=reuse),
            nu=write(present, v, state.nu, reuse=reuse),
            grad_sum=grad_sum,
            start=state.start,
        )
        return write(present, u, updates), new_state

    return init, update


def _step_size(d: Tensor, learning_rate: Scalar, b1: Scalar, b2: Scalar, t: Tensor) -> Tensor:
    """Return ``d * learning_rate * sqrt(1 - b2^t) / (1 - b1^t)``, which contains Adam's bias correction at step t.

    ``d`` is the estimate of the learning rate, and ``learning_rate`` the factor that the user has given.
    """
    root_c2 = bias_correction(b2, t).sqrt()
    c1 = bias_correction(b1, t)
    step_size = d * learning_rate * (root_c2 / c1)
    return ew.new_number(step_size, d.device)


def _decayed_sum(
    sums: list[Tensor], decay: Scalar, terms: list[Tensor], weight: Scalar, reuse: bool
) -> list[Tensor]:
    """Return ``decay * sum + weight * term`` for each tensor; ``reuse`` overwrites the sums."""
    decayed = ew.mul(sums, decay, reuse=reuse)
    return ew.add(decayed, terms, weight, reuse=True)


def _inner_product(g: Tensor, x0: Tensor, x: Tensor) -> Tensor:
    """Return ``<g, x0 - x>`` for one leaf."""
    return _sum(g * (x0 - x))


def _norm(s: Tensor) -> Tensor:
    """Return the 1-norm of one leaf."""
    return _sum(s.abs())


def _sum(x: Tensor) -> Tensor:
    """Return the sum of all elements, in fp64 if the device supports it."""
    if x.device.type == "mps":
        return x.sum()
    return x.sum(dtype=torch.float64)
