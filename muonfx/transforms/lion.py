"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch

from muonfx import checks
from muonfx import elementwise as ew
from muonfx.core import NOTHING, Donation, Locality, transform
from muonfx.transforms._pinned import store, widen, zeros
from muonfx.tree import Present, PyTree

__all__ = ["LionState", "scale_by_lion"]


class LionState(NamedTuple):
    """State of `scale_by_lion`."""

    mu: PyTree
    """The average gradient, like the parameters, in the pinned dtype."""


@transform(locality=Locality.ELEMENT)
def scale_by_lion(b1: float = 0.9, b2: float = 0.99, *, mu_dtype: torch.dtype | None = torch.float32):
    r"""Take the sign of $\beta_1 m_{t-1} + (1 - \beta_1) g_t$, then average with $\beta_2$.

    Args:
        b1: weight of the average in the update, in [0, 1).
        b2: decay of the average, in [0, 1).
        mu_dtype: pinned dtype of the average; None pins each parameter's own.

    Raises:
        ValueError: an argument is out of range.
        TypeError: the dtype is not floating point.

    Follows Chen et al. (arXiv 2302.06675).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.scale_by_lion()
        >>> tx.update({"w": torch.tensor([3.0, -0.01])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([ 1., -1.])}
    """
    checks.in_unit_interval("b1", b1)
    checks.in_unit_interval("b2", b2)
    checks.floating_dtype("mu_dtype", mu_dtype)

    def init(params: PyTree) -> LionState:
        return LionState(zeros(params, mu_dtype))

    def update(updates: PyTree, state: LionState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        given, old = at.pick(updates), at.pick(state.mu)
        grads, mu, _ = widen(given, old)
        signs = ew.sign(ew.lerp(mu, grads, 1.0 - b1), reuse=True)
        mu = store(ew.lerp(mu, grads, 1.0 - b2, reuse=donate.state), old, reuse=donate.state)
        return at.fill(ew.cast_like(signs, given)), LionState(at.fill(mu, state.mu))

    return init, update
