"""Sharpness-aware minimization (SAM): gradients at a nearby point of higher loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from muonfx.core import EmptyState, Transform, apply_updates, checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.internal.arguments import plain_arguments
from muonfx.transforms.clip import Sum, norm_of_sum, recorded_squares
from muonfx.transforms.formulas import divide_unless
from muonfx.transforms.leafwise import Leaf, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew


@leafwise(reads_params=lambda rho=0.05, *, adaptive=False: adaptive, position="sets_size")
def sam(rho: ScalarOrSchedule = 0.05, *, adaptive: bool = False):
    r"""Replace gradients g by the ascent step of sharpness-aware minimization, $\rho g / \|g\|$.

    The norm is over all elements of all leaves, on all ranks. `sam_gradient` takes this step from the parameters and
    computes the gradient at the new point. A separate chain then updates the parameters with this gradient.

    Args:
        rho: the length of the step, 0 or more.
        adaptive: scale the step of each element by its parameter p: $\rho p^2 g / \|p g\|$.

    A gradient that is zero everywhere gives a step of zero.

    Raises:
        ValueError: ``rho`` is negative or not finite; with ``adaptive``, ``params`` is missing at `update`.

    Follows Foret et al. (arXiv 2010.01412) and, adaptive, Kwon et al. (arXiv 2102.11600).

    >>> import muonfx as mfx
    >>> mfx.contrib.sam(0.1).update({"w": torch.tensor([3.0, 4.0])}, mfx.core.EmptyState())[0]
    {'w': tensor([0.0600, 0.0800])}
    """
    rho = checks.at_least("rho", rho, 0.0)

    def step(g: Leaf, s: EmptyState, *, sum_over_leaves: Sum):
        return g * _over_norm(rho, g, sum_over_leaves), s

    def adaptive_step(g: Leaf, s: EmptyState, p: Leaf, *, sum_over_leaves: Sum):
        pg = g * p
        return pg * _over_norm(rho, pg, sum_over_leaves) * p, s

    if adaptive:
        return EmptyState(), adaptive_step
    return EmptyState(), step


def _over_norm(rho: float | Tensor, g: Leaf, sum_over_leaves: Sum) -> Tensor:
    """Return rho divided by the norm of g over all leaves, or zero for a norm of zero."""
    norm = norm_of_sum(sum_over_leaves(recorded_squares(g)))
    return divide_unless(norm == 0, ew.scalar_like(rho, norm), norm, otherwise=0.0)


@plain_arguments
def sam_gradient(
    gradient: Callable[[PyTree], Any],
    params: PyTree,
    perturbation: Transform | None = None,
    *,
    has_aux: bool = False,
) -> Any:
    """Return the gradient at the point after an ascent step from the parameters, for sharpness-aware minimization.

    Args:
        gradient: a function from parameters to a tree of gradients, such as ``torch.func.grad(loss)``. It is called
            twice and must use the same batch both times.
        params: the parameters; if they are sharded, this rank's shards.
        perturbation: a transform without state that turns the gradient into the ascent step. None is ``sam()``. For
            sharded parameters, give ``sharding.sharded(sam(rho), layout)``, so that the norm is over all ranks.
        has_aux: whether ``gradient`` returns a pair (gradients, aux), as ``torch.func.grad_and_value`` does.

    Returns:
        The gradients with which to update the parameters. With ``has_aux``, a pair of these gradients and the aux value
        of the first call, at the parameters themselves.

    Example:
        >>> import muonfx as mfx
        >>> def loss(params):
        ...     return params["w"].square().sum()
        >>> params, tx = {"w": torch.tensor([3.0, 4.0])}, mfx.scale(-0.1)
        >>> grads, value = sam_gradient(
        ...     torch.func.grad_and_value(loss), params, mfx.contrib.sam(0.5), has_aux=True
        ... )
        >>> grads, value
        ({'w': tensor([6.6000, 8.8000])}, tensor(25.))
        >>> updates, _ = tx.update(grads, tx.init(params), params)
    """
    if perturbation is None:
        perturbation = sam()

    def ascended(grads: PyTree) -> PyTree:
        """Return the parameters after a step in the direction of the gradients."""
        ascent, _ = perturbation.update(grads, EmptyState(), params)
        return apply_updates(params, ascent)

    if not has_aux:
        grads = gradient(params)
        return gradient(ascended(grads))
    grads, aux = gradient(params)
    grads_at_ascended, _ = gradient(ascended(grads))
    return grads_at_ascended, aux
