"""Skipping of whole steps with NaN or infinite gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import require_transform
from muonfx.transforms.clip import Sum
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew


class SkipNonfiniteState(NamedTuple):
    """State of the transform `skip_nonfinite`: counts of skipped steps, and the state of the inner transform."""

    skipped: Tensor
    """The number of skipped steps so far, 0-d int64."""
    in_a_row: Tensor
    """The number of skipped steps since the last step with finite gradients, 0-d int64."""
    inner: PyTree
    """The state of the inner transform."""


@transform(locality=Locality.TREE, combinator=Combinator(Locality.TREE))
def skip_nonfinite(inner: Transform):
    """Skip a step in which any gradient is NaN or infinite: return updates of zero and keep the inner state bitwise.

    The old or the new state is selected on the device, without a sync. Therefore the inner transform runs at every
    step (on gradients of zero in a skipped step), and the memory of its old state is not reused. Write
    ``accumulate(skip_nonfinite(...), k)`` rather than ``skip_nonfinite(accumulate(...))``, which syncs because the
    counters of `accumulate` are in CPU memory.

    Args:
        inner: the transform to skip, usually the whole chain. One bad gradient skips the step for all leaves.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.skip_nonfinite(mfx.momentum(0.9, nesterov=False))
        >>> state = tx.init({"w": torch.zeros(1)})
        >>> updates, state = tx.update({"w": torch.tensor([float("nan")])}, state)
        >>> updates, int(state.skipped), state.inner.trace
        ({'w': tensor([0.])}, 1, {'w': tensor([0.])})
    """
    require_transform("skip_nonfinite: inner", inner)

    def init(params: PyTree) -> SkipNonfiniteState:
        device = device_of(params)
        return SkipNonfiniteState(
            skipped=ew.new_count(device),
            in_a_row=ew.new_count(device),
            inner=inner.functions.init(params),
        )

    def update(
        updates: PyTree,
        state: SkipNonfiniteState,
        params: PyTree = None,
        *,
        sum_over_leaves: Sum,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        """Run the inner transform on zeros if any gradient is NaN or infinite, and then drop its results.

        No branch depends on a value: both outcomes are computed, and ``torch.where`` selects.
        """
        is_finite = _are_finite(updates, sum_over_leaves)
        is_finite = is_finite.to(state.skipped.device)
        finite_gradients = tree.map(functools.partial(_zero_unless, is_finite), updates)

        # The inner transform may need it too, as `clip_by_global_norm`
        extras["sum_over_leaves"] = sum_over_leaves
        # An offloaded transform has the argument ``only_if``. For a skipped step it loads nothing from the CPU and
        # returns the old state, so that no state is selected here.
        is_offloaded = "only_if" in inner.extras.named
        if is_offloaded:
            extras["only_if"] = is_finite
        # The finite gradients are new tensors. The old state is kept for the selection, if there is one.
        donation = Donation(updates=True, state=donate.state and is_offloaded)
        out, inner_state = inner.run(
            finite_gradients, state.inner, params, donate=donation, **extras
        )
        del finite_gradients  # the copy is as large as the model, and no longer needed
        if not is_offloaded:
            state_leaves, treedef = tree.flatten(inner_state)
            old_leaves = tree.subtrees(treedef, state.inner)
            # Only the list has its leaves now, so that each is freed when it is replaced.
            del inner_state
            for index in range(len(state_leaves)):
                state_leaves[index] = _select(is_finite, state_leaves[index], old_leaves[index])
            inner_state = tree.unflatten(treedef, state_leaves)

        # Weight decay, for example, also returns updates for gradients of zero.
        out_leaves, treedef = tree.flatten(out)
        del out
        for index in range(len(out_leaves)):
            if out_leaves[index] is not None:
                out_leaves[index] = _zero_unless(is_finite, out_leaves[index])

        # 1 or 0; times 0, the count of skipped steps in a row starts again
        is_skipped = (~is_finite).to(torch.int64)
        return tree.unflatten(treedef, out_leaves), SkipNonfiniteState(
            skipped=state.skipped + is_skipped,
            in_a_row=(state.in_a_row + 1) * is_skipped,
            inner=inner_state,
        )

    return init, update


def _are_finite(gradients: PyTree, sum_over_leaves: Sum) -> Tensor:
    """Return True, as a 0-d tensor, if all gradients on all ranks are finite.

    ``sum_over_leaves`` adds a tree with one number for each leaf, over all leaves and ranks.

    >>> _are_finite({"w": torch.tensor([1.0, torch.nan])}, sum_over_leaves=lambda flags: flags["w"])
    tensor(False)
    """
    present = Present(gradients)
    # Detached, because the answer has no derivative, and torch 2.10 has no forward mode of the largest magnitude.
    values = [gradient.detach() for gradient in present.pick(gradients)]
    peaks = ew.peaks(values)  # the largest magnitude of each leaf
    flags = list(map(_infinity_unless_finite, peaks))  # 0 for a finite leaf, else infinity
    # A collective: every rank sees the infinity of any rank in the sum.
    return sum_over_leaves(present.fill(flags)) == 0


def _infinity_unless_finite(peak: Tensor) -> Tensor:
    """Return 0 if the largest magnitude of a leaf is finite, else infinity, as a 0-d fp32 tensor."""
    flag = torch.where(peak.isfinite(), 0.0, torch.inf)
    return flag.to(peak.device, torch.float32)


def _select(is_finite: Tensor, new: Any, old: Any) -> Any:
    """Return an item of the new state if all gradients of the step are finite, else of the old state."""
    if not isinstance(new, Tensor):
        return new
    # A selection, because zero times NaN is NaN. It also keeps derivatives finite.
    return torch.where(is_finite.to(new.device), new, old)


def _zero_unless(is_finite: Tensor, leaf: Tensor) -> Tensor:
    """Return a gradient or an update if all gradients of the step are finite, else zeros."""
    return _select(is_finite, leaf, torch.zeros_like(leaf))
