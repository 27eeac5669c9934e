"""Scaling of updates by norms: of the parameter, of the whole tree, and of the mean of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonfx.core import Donation, EmptyState, Locality, checks, transform
from muonfx.core.combine import no_state
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.clip import norm_over_leaves
from muonfx.transforms.scale import of_leaves, of_pairs, position_of_factor
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew

__all__ = ["centralize", "normalize_by_update_norm", "scale_by_trust_ratio"]


@transform(locality=Locality.LEAF, position="sets_size")
def scale_by_trust_ratio(
    min_norm: ScalarOrSchedule = 0.0, trust_coefficient: ScalarOrSchedule = 1.0, eps: ScalarOrSchedule = 0.0
):
    r"""Rescale each leaf of the updates to the norm of its parameter, times a coefficient.

    The update is $u \, \eta \|p\| / (\|u\| + \epsilon)$, or $u$ if either norm is zero. After `scale_by_adam` and
    `add_decayed_weights` it makes LAMB; before a heavy-ball `momentum` it makes LARS.

    Args:
        min_norm: both norms count as at least this, not negative.
        trust_coefficient: $\eta$, not negative.
        eps: added to the norm of the updates, not negative.

    Raises:
        ValueError: an argument is out of range; at `update`, ``params`` is missing.

    Follows You et al. (arXiv 1708.03888, 1904.00962) and Optax's transform of this name.

    >>> import muonfx as mfx
    >>> params = {"w": torch.tensor([6.0, 8.0])}
    >>> mfx.scale_by_trust_ratio().update({"w": torch.tensor([0.0, 5.0])}, mfx.core.EmptyState(), params)[0]
    {'w': tensor([ 0., 10.])}
    """
    min_norm = checks.at_least("min_norm", min_norm, 0.0)
    trust_coefficient = checks.at_least("trust_coefficient", trust_coefficient, 0.0)
    eps = checks.at_least("eps", eps, 0.0)

    def rescale(leaf: Tensor, norm: Tensor, of_param: Tensor) -> Tensor:
        norm, of_param = norm.clamp(min=min_norm), of_param.clamp(min=min_norm)
        usable = (norm > 0) & (of_param > 0)
        ratio = trust_coefficient * of_param / torch.where(usable, norm + eps, 1.0)
        # NaN in either norm is passed on to the updates, where it is visible
        ratio = torch.where(usable, ratio, torch.where((norm + of_param).isnan(), norm + of_param, 1.0))
        return (leaf.to(ew.wide_dtype(leaf.dtype)) * ratio).to(leaf.dtype)

    def rescaled(leaves: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        return [rescale(*one) for one in zip(leaves, ew.norms(leaves), ew.norms(params), strict=True)]

    return of_pairs("scale_by_trust_ratio", rescaled)


@transform(locality=Locality.TREE, position=lambda scale_factor, eps: position_of_factor(scale_factor) or "sets_size")
def normalize_by_update_norm(scale_factor: ScalarOrSchedule = 1.0, eps: ScalarOrSchedule = 1e-6):
    """Divide all updates by the norm of the whole tree, and multiply them by a factor.

    Args:
        scale_factor: the norm that the updates then have; finite. Norms are taken in fp64, of float64 updates right
            from 1e-150.
        eps: added to the norm, not negative. Updates that are all zero stay zero.

    Raises:
        ValueError: an argument is out of range.

    Follows Optax's transform of this name.

    >>> import muonfx as mfx
    >>> mfx.normalize_by_update_norm(eps=0.0).update({"w": torch.tensor([3.0, 4.0])}, mfx.core.EmptyState())[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    scale_factor = checks.finite("scale_factor", scale_factor)
    eps = checks.at_least("eps", eps, 0.0)

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        sum_over_leaves: Callable[[PyTree], Tensor],
        donate: Donation = NOTHING,
    ):
        at = Present(updates)
        leaves = at.pick(updates)
        norm = norm_over_leaves(updates, sum_over_leaves) + eps  # a collective: also without leaves
        factor = ew.scalar_like(scale_factor, norm) / torch.where(norm == 0, 1.0, norm)
        return at.fill(ew.cast_like(ew.mul(leaves, factor, reuse=donate.updates), leaves)), state

    return no_state, update


@transform(locality=Locality.LEAF, reads_params=False)
def centralize():
    """Subtract from each output feature (index of the first dim) of a leaf its mean over all other dims.

    Leaves of fewer than two dims pass unchanged.

    Follows gradient centralization (arXiv 2004.01461) and Optax's transform of this name.

    >>> import muonfx as mfx
    >>> mfx.centralize().update({"w": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])}, mfx.core.EmptyState())[0]["w"]
    tensor([[-1.,  0.,  1.],
            [-2., -1.,  3.]])
    """

    def center(leaf: Tensor) -> Tensor:
        if leaf.ndim < 2 or leaf.numel() == 0:
            return leaf
        wide = leaf.to(ew.wide_dtype(leaf.dtype))
        return (wide - wide.mean(dim=tuple(range(1, leaf.ndim)), keepdim=True)).to(leaf.dtype)

    return of_leaves(center)
