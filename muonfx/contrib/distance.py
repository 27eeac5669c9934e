"""DoG and DoWG: learning rates computed from the distance to the initial parameters and the past gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from muonfx.core import Donation, InitAndUpdate, Locality, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms._pinned import copies, new_count, new_number, widest
from muonfx.transforms.clip import squared_norms
from muonfx.transforms.leafwise import params_for
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew

__all__ = ["DogState", "DowgState", "scale_by_dog", "scale_by_dowg"]

Sum = Callable[[PyTree], Tensor]
State = TypeVar("State", "DogState", "DowgState")


class DogState(NamedTuple):
    """State of `scale_by_dog`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    max_dist: Tensor
    """The largest distance from the initial parameters so far, 0-d."""
    sum_sq_norm_grads: Tensor
    """The sum of the squared norms of the gradients, 0-d."""
    start: PyTree
    """The initial parameters, in their own dtypes."""


class DowgState(NamedTuple):
    """State of `scale_by_dowg`."""

    estim_sq_dist: Tensor
    """The largest squared distance from the initial parameters so far, 0-d."""
    weighted_sq_norm_grads: Tensor
    """The sum of the squared norms of the gradients, each times ``estim_sq_dist`` at its step, 0-d."""
    start: PyTree
    """The initial parameters, in their own dtypes."""


def _functions(
    name: str,
    init: Callable[[PyTree], State],
    advance: Callable[[State, Tensor, Tensor, Callable[[], Tensor]], tuple[Tensor, State]],
) -> InitAndUpdate:
    """Build ``init`` and an update that multiplies by a factor; ``advance`` returns the factor and the new state.

    ``advance(state, square, distance, size)`` receives the squared norm of the updates, the squared distance from the
    initial parameters, and a function for the squared norm of the initial parameters that have a gradient.
    """

    def update(
        updates: PyTree, state: State, params: PyTree = None, *, sum_over_leaves: Sum, donate: Donation = NOTHING
    ):
        params = params_for(name, params)
        like = state[1]

        def total(leaves: PyTree) -> Tensor:
            return sum_over_leaves(squared_norms(leaves)).to(device=like.device, dtype=like.dtype)

        everywhere, at = Present(params), Present(updates)
        then, now = widest(everywhere.pick(state.start), everywhere.pick(params))
        square, distance = total(updates), total(everywhere.fill(ew.add(now, then, -1.0)))
        factor, state = advance(state, square, distance, lambda: total(at.fill(at.pick(state.start))))
        leaves = at.pick(updates)
        return at.fill(ew.cast_like(ew.mul(leaves, factor, reuse=donate.updates), leaves)), state

    return init, update


@transform(locality=Locality.TREE, short_names={"eps": "eps"}, position="sets_size")
def scale_by_dog(init_step: ScalarOrSchedule = 1e-6, eps: ScalarOrSchedule = 1e-8):
    r"""Scale gradients by the learning rate of DoG (distance over gradients), with no rate to tune.

    The rate is $\eta_t = \max_{s \le t} \|p_s - p_0\| / \sqrt{\sum_{s \le t} \|g_s\|^2 + \epsilon}$, with norms over
    all leaves, on all ranks. The distance is at least $\alpha (1 + \|p_0\|)$, where $p_0$ has the leaves with a
    gradient at the first step.

    Args:
        init_step: $\alpha$, positive; usually 1e-6, or 1e-4 with batch normalization.
        eps: added to the sum of squares, positive.

    Raises:
        ValueError: an argument is not positive and finite; at `update`, ``params`` is missing.

    The authors recommend evaluating an average of the parameters, as `ema_params` computes. Follows Ivgi et al.
    (arXiv 2302.12022) and Optax's transform of ``contrib.dog`` with its "heuristic" first step.

    >>> import muonfx as mfx
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> tx = mfx.contrib.scale_by_dog(0.5)
    >>> tx.update(params, tx.init(params), params)[0]
    {'w': tensor([1.8000, 2.4000])}
    """
    init_step = checks.positive("init_step", init_step)
    eps = checks.positive("eps", eps)

    def init(params: PyTree) -> DogState:
        device = device_of(params)
        return DogState(new_count(device), new_number(0.0, device), new_number(0.0, device), copies(params, None))

    def advance(state: DogState, square: Tensor, distance: Tensor, size: Callable[[], Tensor]):
        # The least distance is computed here because init cannot sum over ranks.
        least = torch.where(state.count == 0, init_step * (1.0 + ew.safe_sqrt(size())), 0.0)
        max_dist = torch.maximum(torch.maximum(state.max_dist, least), ew.safe_sqrt(distance))
        total = state.sum_sq_norm_grads + square
        return max_dist / (total + eps).sqrt(), DogState(state.count + 1, max_dist, total, state.start)

    return _functions("scale_by_dog", init, advance)


@transform(locality=Locality.TREE, short_names={"eps": "eps"}, position="sets_size")
def scale_by_dowg(init_estim_sq_dist: ScalarOrSchedule | None = None, eps: ScalarOrSchedule = 1e-4):
    r"""Scale gradients by the learning rate of DoWG (distance over weighted gradients), with no rate to tune.

    The rate is $\eta_t = r_t / (\sqrt{\sum_{s \le t} r_s \|g_s\|^2} + \epsilon)$ with $r_t = \max_{s \le t} \|p_s -
    p_0\|^2$, and norms over all leaves, on all ranks.

    Args:
        init_estim_sq_dist: the lower bound of $r_t$, positive; None is ``eps``.
        eps: added to the root, positive.

    Raises:
        ValueError: an argument is not positive and finite; at `update`, ``params`` is missing.

    Follows Khaled et al. (arXiv 2305.16284) and Optax's transform of ``contrib.dowg``.

    >>> import muonfx as mfx
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> tx = mfx.contrib.scale_by_dowg(0.25)
    >>> tx.update(params, tx.init(params), params)[0]
    {'w': tensor([0.3000, 0.4000])}
    """
    eps = checks.positive("eps", eps)
    if init_estim_sq_dist is not None:
        init_estim_sq_dist = checks.positive("init_estim_sq_dist", init_estim_sq_dist)

    def init(params: PyTree) -> DowgState:
        device = device_of(params)
        first = eps if init_estim_sq_dist is None else init_estim_sq_dist
        return DowgState(new_number(first, device), new_number(0.0, device), copies(params, None))

    def advance(state: DowgState, square: Tensor, distance: Tensor, size: Callable[[], Tensor]):
        estimate = torch.maximum(state.estim_sq_dist, distance)
        weighted = state.weighted_sq_norm_grads + estimate * square
        return estimate / (ew.safe_sqrt(weighted) + eps), DowgState(estimate, weighted, state.start)

    return _functions("scale_by_dowg", init, advance)
