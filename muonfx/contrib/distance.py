"""Learning rates from the distance to the initial parameters and the gradients so far: DoG and DoWG."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import Donation, Locality, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms._pinned import copies, new_count, new_number, widest
from muonfx.transforms.clip import squared_norms
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew

__all__ = ["DogState", "DowgState", "scale_by_dog", "scale_by_dowg"]

SumOverLeaves = Callable[[PyTree], Tensor]


class DogState(NamedTuple):
    """State of `scale_by_dog`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    max_dist: Tensor
    """The largest distance from the start so far, 0-d."""
    sum_sq_norm_grads: Tensor
    """The sum of the squared norms of the gradients, 0-d."""
    start: PyTree
    """The parameters at the start, in their own dtypes."""


class DowgState(NamedTuple):
    """State of `scale_by_dowg`."""

    estim_sq_dist: Tensor
    """The largest squared distance from the start so far, 0-d."""
    weighted_sq_norm_grads: Tensor
    """The sum of the squared norms of the gradients, each times the squared distance of its time, 0-d."""
    start: PyTree
    """The parameters at the start, in their own dtypes."""


def _squares(
    name: str, updates: PyTree, start: PyTree, params: PyTree, total: SumOverLeaves, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the squared norm of the updates and the squared distance of all parameters from the start."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    at = Present(params)
    then, now = widest(at.pick(start), at.pick(params))
    sums = total(squared_norms(updates)), total(squared_norms(at.fill(ew.add(now, then, -1.0))))
    gradients, distance = (x.to(device=like.device, dtype=like.dtype) for x in sums)
    return gradients, distance


def _scaled(updates: PyTree, factor: Tensor, donate: Donation) -> PyTree:
    at = Present(updates)
    leaves = at.pick(updates)
    return at.fill(ew.cast_like(ew.mul(leaves, factor, reuse=donate.updates), leaves))


@transform(locality=Locality.TREE, short_names={"eps": "eps"}, position="sets_size")
def scale_by_dog(init_step: ScalarOrSchedule = 1e-6, eps: ScalarOrSchedule = 1e-8):
    r"""Scale gradients by the distance from the start over the root of the sum of their squares.

    $\eta_t = \max_{s \le t} \|p_s - p_0\| / \sqrt{\sum_{s \le t} \|g_s\|^2 + \epsilon}$, with norms over all leaves, on
    all ranks. The distance counts as at least $\alpha (1 + \|p_0\|)$, of the leaves with a gradient at the first step.

    Args:
        init_step: $\alpha$, positive: 1e-6, or 1e-4 with batch normalization.
        eps: added to the sum of squares, positive.

    Raises:
        ValueError: an argument is not positive and finite; at `update`, ``params`` is missing.

    Average the parameters, as with `ema_params`. Follows Ivgi et al. (arXiv 2302.12022) and Optax's transform of
    ``contrib.dog`` with its "heuristic" first step.

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

    def update(
        updates: PyTree,
        state: DogState,
        params: PyTree = None,
        *,
        sum_over_leaves: SumOverLeaves,
        donate: Donation = NOTHING,
    ):
        like = state.max_dist
        square, moved = _squares("scale_by_dog", updates, state.start, params, sum_over_leaves, like)
        # Computed here because init cannot sum over ranks.
        at = Present(updates)
        size = sum_over_leaves(squared_norms(at.fill(at.pick(state.start)))).to(device=like.device, dtype=like.dtype)
        least = torch.where(state.count == 0, init_step * (1.0 + ew.safe_sqrt(size)), 0.0)
        max_dist = torch.maximum(torch.maximum(like, least), ew.safe_sqrt(moved))
        total = state.sum_sq_norm_grads + square
        out = _scaled(updates, max_dist / (total + eps).sqrt(), donate)
        return out, DogState(state.count + 1, max_dist, total, state.start)

    return init, update


@transform(locality=Locality.TREE, short_names={"eps": "eps"}, position="sets_size")
def scale_by_dowg(init_estim_sq_dist: ScalarOrSchedule | None = None, eps: ScalarOrSchedule = 1e-4):
    r"""Scale gradients by the squared distance from the start over the root of their sum, weighted by that distance.

    $\eta_t = r_t / (\sqrt{\sum_{s \le t} r_s \|g_s\|^2} + \epsilon)$ with $r_t = \max_{s \le t} \|p_s - p_0\|^2$, and
    norms over all leaves, on all ranks.

    Args:
        init_estim_sq_dist: the squared distance counts as at least this, positive; None is ``eps``.
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

    def update(
        updates: PyTree,
        state: DowgState,
        params: PyTree = None,
        *,
        sum_over_leaves: SumOverLeaves,
        donate: Donation = NOTHING,
    ):
        like = state.estim_sq_dist
        square, moved = _squares("scale_by_dowg", updates, state.start, params, sum_over_leaves, like)
        estimate = torch.maximum(like, moved)
        weighted = state.weighted_sq_norm_grads + estimate * square
        out = _scaled(updates, estimate / (ew.safe_sqrt(weighted) + eps), donate)
        return out, DowgState(estimate, weighted, state.start)

    return init, update
