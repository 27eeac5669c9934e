"""Clipping of elements, units, leaves, and the whole tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonfx.core import Donation, EmptyState, Locality, checks, transform
from muonfx.core.combine import no_state
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.scale import of_leaves, of_lists, of_pairs
from muonfx.tree import Present, PyTree, norm
from muonfx.tree import elementwise as ew

__all__ = ["adaptive_grad_clip", "clip_by_block_rms", "clip_by_global_norm", "clip_by_value", "global_norm"]

SumOverLeaves = Callable[[PyTree], Tensor]


@transform(locality=Locality.ELEMENT)
def clip_by_value(limit: ScalarOrSchedule):
    """Limit every element to [-limit, limit]. NaN stays NaN.

    Args:
        limit: positive.

    Raises:
        ValueError: ``limit`` is not positive and finite.

    >>> import muonfx as mfx
    >>> mfx.clip_by_value(1.0).update({"w": torch.tensor([-3.0, 0.5])}, mfx.core.EmptyState())[0]
    {'w': tensor([-1.0000,  0.5000])}
    """
    limit = checks.positive("limit", limit)
    return of_lists(lambda leaves, _: ew.clamp(leaves, -limit, limit))


@transform(locality=Locality.LEAF, reads_params=False)
def clip_by_block_rms(threshold: ScalarOrSchedule):
    """Scale down each leaf whose root mean square exceeds a threshold.

    Args:
        threshold: positive.

    Raises:
        ValueError: ``threshold`` is not positive and finite.

    Follows Adafactor's update clipping (arXiv 1804.04235) and Optax's transform of this name.

    >>> import muonfx as mfx
    >>> mfx.clip_by_block_rms(1.0).update({"w": torch.full((2,), 3.0)}, mfx.core.EmptyState())[0]
    {'w': tensor([1., 1.])}
    """
    threshold = checks.positive("threshold", threshold)

    def clip(leaf: Tensor) -> Tensor:
        if leaf.numel() == 0:
            return leaf
        wide = leaf.to(ew.wide_dtype(leaf.dtype))
        rms = ew.safe_sqrt(wide.square().mean())
        ratio = rms / ew.scalar_like(threshold, rms)
        return (wide / ratio.clamp(min=1.0)).to(leaf.dtype)

    return of_leaves(clip)


@transform(locality=Locality.LEAF)
def adaptive_grad_clip(clipping: ScalarOrSchedule, eps: ScalarOrSchedule = 1e-3):
    """Scale down each unit of a leaf whose norm exceeds a fraction of the norm of the parameter's unit.

    A unit is an output feature in PyTorch's layouts, (out, in) and (out, in, height, width): its norm is taken over all
    dims but the first. A leaf in which at most one side exceeds 1 is one unit.

    Args:
        clipping: the largest ratio of the two norms, positive.
        eps: the least norm of a parameter's unit, positive, so that a parameter that starts at zero can move.

    Raises:
        ValueError: ``clipping`` or ``eps`` is not positive and finite; at `update`, ``params`` is missing.

    Follows Brock et al. (arXiv 2102.06171) and Optax's transform of this name, whose units follow JAX's layouts,
    (in, out) and (height, width, in, out).

    >>> import muonfx as mfx
    >>> params, grads = {"w": torch.ones(2, 4)}, {"w": torch.tensor([[1.0] * 4, [0.01] * 4])}
    >>> mfx.adaptive_grad_clip(0.1).update(grads, mfx.core.EmptyState(), params)[0]["w"][:, 0]
    tensor([0.1000, 0.0100])
    """
    clipping = checks.positive("clipping", clipping)
    eps = checks.positive("eps", eps)

    def clip(leaf: Tensor, param: Tensor) -> Tensor:
        if leaf.numel() == 0:
            return leaf
        is_vector = sum(size > 1 for size in leaf.shape) <= 1
        dims = tuple(range(0 if is_vector else 1, leaf.ndim))
        allowed = clipping * _norm(param, dims).clamp(min=eps)
        length = _norm(leaf, dims)
        exceeds = length > allowed
        factor = torch.where(exceeds, allowed / torch.where(exceeds, length, 1.0), 1.0)
        factor = torch.where(length.isnan(), length, factor)
        wide = ew.wide_dtype(leaf.dtype)
        return (leaf.to(wide) * factor.to(wide)).to(leaf.dtype)

    return of_pairs("adaptive_grad_clip", lambda leaves, params: list(map(clip, leaves, params)))


def _norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    # fp64 holds the square of any fp32 number; gradients that need clipping may overflow fp32.
    x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True) if dims else x.abs()


@transform(locality=Locality.TREE)
def clip_by_global_norm(max_norm: ScalarOrSchedule):
    """Scale all updates down together when the norm of the whole tree exceeds a bound.

    Args:
        max_norm: positive; a bound of the 2-norm over all elements of all leaves. The norm is computed in fp64, and
            does not overflow unless the norm itself does. A norm of more than 1e38 times ``max_norm`` costs fp32
            updates their last digits. A NaN makes all updates NaN. An infinity makes its own element NaN and all
            others zero: put `skip_nonfinite` around the chain.

    Raises:
        ValueError: ``max_norm`` is not positive and finite.

    >>> import muonfx as mfx
    >>> mfx.clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, mfx.core.EmptyState())[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    max_norm = checks.positive("max_norm", max_norm)

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        sum_over_leaves: SumOverLeaves,
        donate: Donation = NOTHING,
    ):
        at = Present(updates)
        leaves = at.pick(updates)
        # A rank without leaves takes part too: the sum is a collective of all ranks.
        norm = norm_over_leaves(updates, sum_over_leaves)
        exceeds = norm > max_norm
        factor = torch.where(exceeds, ew.scalar_like(max_norm, norm) / torch.where(exceeds, norm, 1.0), 1.0)
        factor = torch.where(norm.isnan(), norm, factor)
        return at.fill(ew.cast_like(ew.mul(leaves, factor, reuse=donate.updates), leaves)), state

    return no_state, update


def norm_over_leaves(updates: PyTree, sum_over_leaves: SumOverLeaves) -> Tensor:
    """Return the 2-norm over the leaves of all ranks, in fp64 if the device supports it; finite if the norm is."""

    def squares(norms: Tensor) -> Tensor:
        # The square overflows beyond 1e154. A fixed power of two needs no collective for the largest norm.
        return torch.stack([norms, norms * _small(norms)], dim=-1).square()

    total = sum_over_leaves(squared_norms(updates, squares))
    if total.ndim == 0:  # there are no leaves
        return total
    plain, scaled = ew.safe_sqrt(total).unbind()
    return torch.where(plain.isfinite(), plain, scaled / _small(total))


def _small(like: Tensor) -> float:
    """Return a power of two that keeps the square of any finite norm finite."""
    return 2.0**-513 if like.dtype == torch.float64 else 2.0**-65


def squared_norms(updates: PyTree, square: Callable[[Tensor], Tensor] = torch.square) -> PyTree:
    """Return the squared 2-norm of each leaf as a 0-d tensor, in fp64 if the device supports it."""
    at = Present(updates)
    found = ew.norms(at.pick(updates))
    if len({(norm.device, norm.dtype) for norm in found}) == 1 and not torch.compiler.is_compiling():
        return at.fill(list(square(torch.stack(found)).unbind()))  # three kernel launches in all, not per leaf
    return at.fill([square(norm) for norm in found])


def global_norm(updates: PyTree) -> Tensor:
    """The 2-norm over all elements of all leaves of a tree; `muonfx.tree.norm` is the same.

    Returns:
        A 0-d tensor, fp64 where the device has it.

    >>> float(global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}))
    5.0
    """
    return norm(updates)
