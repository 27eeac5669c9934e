"""Clipping of elements, units, leaves, and the whole tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonfx.core import Donation, EmptyState, Locality, checks, transform
from muonfx.core.combine import no_state
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.tree import Present, PyTree, map, norm
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

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        return at.fill(ew.clamp(at.pick(updates), -limit, limit)), state

    return no_state, update


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

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return map(clip, updates), state

    return no_state, update


@transform(locality=Locality.LEAF)
def adaptive_grad_clip(
    clipping: ScalarOrSchedule, eps: ScalarOrSchedule = 1e-3, axis: int | tuple[int, ...] | None = None
):
    """Scale down each unit of a leaf whose norm exceeds a share of the norm of the parameter's unit.

    Args:
        clipping: the largest ratio of the two norms, positive.
        eps: a parameter's unit counts as at least this long, so that what starts at zero can move; positive.
        axis: the dims that a norm is taken over. None: all but the first, so that a unit is an output feature in
            PyTorch's layouts, (out, in) and (out, in, height, width); the whole leaf where at most one side exceeds 1.

    Raises:
        ValueError: ``clipping`` or ``eps`` is not positive and finite; at `update`, ``params`` is missing or a leaf has
            not the dims that ``axis`` names.

    Follows Brock et al. (arXiv 2102.06171) and Optax's transform of this name, whose units are those of JAX's layouts,
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
        if leaf.ndim == 0:
            dims: tuple[int, ...] = ()
        elif axis is not None:
            dims = (axis,) if isinstance(axis, int) else axis
            if any(not -leaf.ndim <= dim < leaf.ndim for dim in dims):
                raise ValueError(f"adaptive_grad_clip: axis is {axis}, but a leaf has the shape {tuple(leaf.shape)}")
        else:
            is_vector = sum(size > 1 for size in leaf.shape) <= 1
            dims = tuple(range(0 if is_vector else 1, leaf.ndim))
        allowed = clipping * _norm(param, dims).clamp(min=eps)
        length = _norm(leaf, dims)
        exceeds = length > allowed
        factor = torch.where(exceeds, allowed / torch.where(exceeds, length, 1.0), 1.0)
        factor = torch.where(length.isnan(), length, factor)
        wide = ew.wide_dtype(leaf.dtype)
        return (leaf.to(wide) * factor.to(wide)).to(leaf.dtype)

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        if params is None:
            raise ValueError("adaptive_grad_clip needs the parameters: call update(updates, state, params)")
        at = Present(updates)
        pairs = zip(at.pick(updates), at.pick(params), strict=True)
        return at.fill([clip(leaf, param) for leaf, param in pairs]), state

    return no_state, update


def _norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    # fp64 holds the square of any fp32 number; gradients that need clipping may overflow fp32.
    x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True) if dims else x.abs()


@transform(locality=Locality.TREE)
def clip_by_global_norm(max_norm: ScalarOrSchedule):
    """Scale all updates down together when the norm of the whole tree exceeds a bound.

    Args:
        max_norm: positive; the 2-norm over all elements of all leaves. It is taken in fp64 and cannot overflow unless
            the norm itself does, where ``torch.nn.utils.clip_grad_norm_`` makes fp32 gradients beyond about 1e19 zero.
            A norm of more than 1e38 times ``max_norm`` costs fp32 updates their last digits. A NaN anywhere makes all
            updates NaN, an infinity makes its own element NaN and all others zero: put `skip_nonfinite` around the
            chain.

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
        ratio = _ratio(sum_over_leaves(_squared_norms(updates, max_norm)))
        # Exactly 1 if nothing is clipped.
        factor = torch.where(ratio > 1, 1 / torch.where(ratio > 1, ratio, 1.0), torch.ones_like(ratio))
        factor = torch.where(ratio.isnan(), ratio, factor)
        return at.fill(ew.cast_like(ew.mul(leaves, factor, reuse=donate.updates), leaves)), state

    return no_state, update


def squared_norms(updates: PyTree) -> PyTree:
    """Return the squared 2-norm of each leaf as a 0-d tensor, in fp64 if the device supports it."""
    return _squared_norms(updates, None)


def _squared_norms(updates: PyTree, unit: float | Tensor | None) -> PyTree:
    """Return the squared 2-norm of each leaf; if a unit is given, of its norm in this unit times `_small`."""
    at = Present(updates)
    found = ew.norms(at.pick(updates))

    def squared(norm: Tensor) -> Tensor:
        return (norm if unit is None else norm / unit * _small(norm)).square()

    if len({(norm.device, norm.dtype) for norm in found}) == 1 and not torch.compiler.is_compiling():
        return at.fill(list(squared(torch.stack(found)).unbind()))  # three kernel launches in all, not per leaf
    return at.fill([squared(norm) for norm in found])


def _small(like: Tensor) -> float:
    """Return a power of two that keeps the square of any norm finite, and whose own square is a normal number."""
    # A fixed power of two needs no reduction over ranks for the largest norm.
    return 2.0**-60 if like.device.type == "mps" else 2.0**-510


def _ratio(total: Tensor) -> Tensor:
    """Return the norm in a unit from the sum of `_squared_norms` in this unit."""
    small = _small(total)
    total = total if total.device.type == "mps" else total.double()  # the sum of no leaves is fp32
    plain = total / small / small  # exact if finite, with derivatives of normal size
    fits = plain.isfinite()
    root = ew.safe_sqrt(torch.where(total.isfinite(), total, torch.ones_like(total))) / small
    large = torch.where(total.isfinite(), root, total)
    return torch.where(fits, ew.safe_sqrt(torch.where(fits, plain, torch.ones_like(plain))), large)


def global_norm(updates: PyTree) -> Tensor:
    """The 2-norm over all elements of all leaves of a tree; `muonfx.tree.norm` is the same.

    Returns:
        A 0-d tensor, fp64 where the device has it.

    >>> float(global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}))
    5.0
    """
    return norm(updates)
