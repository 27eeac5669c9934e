"""Wrappers that apply a transform at selected steps and not at others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, InitAndUpdate, Locality, Transform, transform
from muonfx.core.combine import run_if
from muonfx.core.contract import NOTHING, require_transform
from muonfx.transforms._pinned import new_count
from muonfx.tree import PyTree, device_of

__all__ = ["ConditionalState", "conditionally_mask", "conditionally_transform"]

Condition = Callable[[Tensor], Tensor]


class ConditionalState(NamedTuple):
    """State of `conditionally_transform` and `conditionally_mask`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64, including the steps at which the inner transform was not applied."""
    inner: PyTree
    """The inner transform's state."""


def _functions(
    name: str, inner: Transform, condition: Condition, otherwise: Callable[[Tensor], Tensor]
) -> InitAndUpdate:
    """Build ``init`` and ``update``; ``otherwise`` maps each update at the steps without the inner transform."""
    require_transform(f"{name}: inner", inner)
    if not callable(condition):
        raise TypeError(f"{name}: should_transform must be a function of the count, found {condition!r}")

    def init(params: PyTree) -> ConditionalState:
        return ConditionalState(new_count(device_of(params)), inner.functions.init(params))

    def update(
        updates: PyTree, state: ConditionalState, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object
    ):
        acts: object = condition(state.count)
        if not isinstance(acts, Tensor) or acts.dtype != torch.bool or acts.ndim:
            raise TypeError(
                f"{name}: should_transform must return a 0-d bool tensor for the count, a 0-d int64 tensor, found "
                f"{acts!r}; compare the count with torch's operators: lambda count: count % 10 == 0"
            )
        # The updates are needed for the selection, so they are not donated.
        donated = Donation(False, donate.state)
        out, after = run_if(acts, inner, updates, state.inner, params, donate=donated, **extras)

        def select(new: Tensor, update: Tensor | None) -> Tensor:
            # An accumulating inner transform may update a leaf that has no gradient now.
            old = torch.zeros_like(new) if update is None else otherwise(update).to(new.dtype)
            return torch.where(acts.to(new.device), new, old)

        return tree.map(select, out, updates), ConditionalState(state.count + 1, after)

    return init, update


_conditional = transform(
    locality=lambda inner, should_transform: inner.locality,
    reads_params=lambda inner, should_transform: inner.reads_params,
    combinator=Combinator(Locality.ELEMENT),
)


@_conditional
def conditionally_transform(inner: Transform, should_transform: Callable[[Tensor], Tensor]):
    """Apply a transform at the steps that a condition selects; at all other steps, return the updates unchanged.

    At the other steps, the state of the inner transform stays the same. The inner transform still runs at every step;
    its result is kept or discarded on the device, so the host does not wait.

    Args:
        inner: the transform to apply.
        should_transform: the condition: a function from the number of previous updates, a 0-d int64 tensor, to a 0-d
            bool tensor. To pickle the transform, use a function that is defined in a module.

    Raises:
        TypeError: ``should_transform`` is not callable; at `update`, it returns something else.

    Follows Optax's transform of this name.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.conditionally_transform(mfx.scale(2.0), lambda count: count % 2 == 1)
        >>> state = tx.init({"w": torch.ones(1)})
        >>> for _ in range(3):
        ...     updates, state = tx.update({"w": torch.ones(1)}, state)
        ...     print(updates)
        {'w': tensor([1.])}
        {'w': tensor([2.])}
        {'w': tensor([1.])}
    """
    return _functions("conditionally_transform", inner, should_transform, lambda update: update)


@_conditional
def conditionally_mask(inner: Transform, should_transform: Callable[[Tensor], Tensor]):
    """Apply a transform at the steps that a condition selects; at all other steps, return zero updates.

    At the other steps, the state of the inner transform stays the same.

    Args:
        inner: the transform to apply.
        should_transform: the condition, a function as for `conditionally_transform`.

    Raises:
        TypeError: ``should_transform`` is not callable; at `update`, it returns something else.

    Follows Optax's transform of this name.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.conditionally_mask(mfx.scale(2.0), lambda count: count >= 1)
        >>> state = tx.init({"w": torch.ones(1)})
        >>> first, state = tx.update({"w": torch.ones(1)}, state)
        >>> second, state = tx.update({"w": torch.ones(1)}, state)
        >>> first, second
        ({'w': tensor([0.])}, {'w': tensor([2.])})
    """
    return _functions("conditionally_mask", inner, should_transform, torch.zeros_like)
