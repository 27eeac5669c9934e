"""Weight decay, and caution about the direction of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from torch import Tensor

from muonfx import checks, tree
from muonfx import elementwise as ew
from muonfx.core import Donation, Locality, Transform, transform
from muonfx.core.combine import chain_entries
from muonfx.core.contract import NOTHING
from muonfx.elementwise import Scalar
from muonfx.partition import mask_patterns, resolve_mask
from muonfx.recorded import parts_of
from muonfx.schedules import Schedule
from muonfx.select.predicates import Predicate
from muonfx.transforms.scale import scale, scale_by_learning_rate, scale_by_schedule, scheduled
from muonfx.tree import Present, PyTree

__all__ = ["add_decayed_weights", "cautious"]


def _resolve_decay(tx: Transform, params: PyTree) -> Transform:
    mask = tx.arguments["mask"]
    if mask is None:
        return tx
    chosen = resolve_mask("add_decayed_weights: mask", mask)(params)
    return tx.replace(mask=dict(zip(tree.names(params), chosen, strict=True)))


@transform(
    locality=Locality.ELEMENT,
    resolve=_resolve_decay,
    name_patterns=mask_patterns,
    wants_uphill=True,
    remembers=True,
    short_names={"weight_decay": "weight_decay"},
)
def add_decayed_weights(
    weight_decay: float | Schedule | Callable[[Tensor], Tensor] = 0.0,
    mask: PyTree | Mapping[str, bool] | Predicate | Callable[[PyTree], PyTree] | None = None,
    *,
    _memory: dict[object, object],
):
    """Add the parameters, times a factor, to the updates.

    Before `scale_by_learning_rate` this is the decoupled decay of AdamW: parameters shrink by ``learning_rate *
    weight_decay``.

    Args:
        weight_decay: a number of 0 or more, or a schedule.
        mask: which parameters decay, as in `masked`; None: all.

    Raises:
        ValueError: the factor is negative or not finite; at `update`, ``params`` is missing.

    Follows Loshchilov and Hutter (arXiv 1711.05101) and Optax's transform of this name.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.add_decayed_weights(0.1, mask=mfx.select.ndim(min=2))
        >>> params = {"w": torch.ones(1, 1), "b": torch.ones(1)}
        >>> tx.update(mfx.tree.map(torch.zeros_like, params), tx.init(params), params)[0]
        {'w': tensor([[0.1000]]), 'b': tensor([0.])}
    """
    if not callable(weight_decay):
        checks.at_least("weight_decay", weight_decay, 0.0)
    decays = resolve_mask("add_decayed_weights: mask", mask, _memory)

    def decay(updates: PyTree, params: PyTree, factor: Scalar, donate: Donation) -> PyTree:
        if params is None:
            raise ValueError("add_decayed_weights needs the parameters: call update(updates, state, params)")
        if isinstance(factor, float) and factor == 0.0:
            return updates
        leaves, treedef = tree.flatten(updates)
        at = Present([leaf if use else None for leaf, use in zip(leaves, decays(params), strict=True)])
        chosen, weights = at.pick(leaves), at.pick(tree.leaves(params))
        added = ew.cast_like(ew.add(chosen, ew.cast_like(weights, chosen), factor, reuse=donate.updates), chosen)
        return tree.unflatten(treedef, at.fill(added, leaves))

    return scheduled(weight_decay, decay, prepare=decays)


def _sign(tx: Transform) -> int:
    """Find whether a transform keeps the direction of updates (1) or turns some (-1), as far as numbers are known."""
    entries = chain_entries(tx)
    if entries is not None:
        return prod(_sign(part) for part in entries.values())
    if tx.factory is scale:
        return _sign_of(tx.arguments["factor"])
    if tx.factory is scale_by_schedule:
        return _sign_of(tx.arguments["schedule"])
    if tx.factory is scale_by_learning_rate:
        return -1 if tx.arguments["flip_sign"] else 1
    signs = [_sign(part) for part in tx.parts if isinstance(part, Transform)]
    return min(signs) if signs else 1  # torch 2.13 cannot trace min with a default


def _sign_of(value: object) -> int:
    numbers = [x for _, x in parts_of(value) if isinstance(x, float)] if isinstance(value, Schedule) else [value]
    known = [x for x in numbers if isinstance(x, float)]
    return -1 if any(x < 0 for x in known) and not any(x > 0 for x in known) else 1


@transform(
    locality=lambda inner, min_share: max(Locality.LEAF, inner.locality),
    reads_params=lambda inner, min_share: inner.reads_params,
)
def cautious(inner: Transform, min_share: float = 1e-3):
    """Keep only those elements of a transform's updates that point the way of the gradient, and scale these up.

    The elements whose sign differs from the incoming gradient's are set to zero and the rest of the leaf is divided
    by the share that is kept. The inner transform must return updates in ascent direction: leave the learning rate
    outside.

    Args:
        inner: the transform whose updates are filtered.
        min_share: the share is taken to be at least this, so that few survivors do not blow up.

    Raises:
        ValueError: ``min_share`` is not finite or not positive, or the inner transform turns updates downhill by a
            learning rate or a negative scale; one that a tensor or a function gives is taken to be positive.

    Follows Cautious Optimizers (arXiv 2411.16085).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.cautious(mfx.identity())
        >>> tx.update({"w": torch.tensor([1.0, -1.0, 0.0, 2.0])}, tx.init({"w": torch.zeros(4)}))[0]["w"].tolist()
        [1.3333333730697632, -1.3333333730697632, 0.0, 2.6666667461395264]
    """
    checks.positive("min_share", min_share)
    if _sign(inner) < 0:
        raise ValueError(
            "cautious: inner turns downhill (a learning rate, or a negative scale), so all that agrees with the "
            "gradient would be dropped; put it behind: chain(cautious(...), scale_by_learning_rate(...))"
        )

    def init(params: PyTree) -> PyTree:
        return inner.functions.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object):
        # The gradient is needed again after the inner transform: it cannot be donated on.
        out, state = inner.run(updates, state, params, donate=Donation(False, donate.state), **extras)

        def keep(update: Tensor, gradient: Tensor) -> Tensor:
            # Signs, not the product: that can underflow to zero everywhere.
            agrees = (update.sign() * gradient.sign() > 0).to(update.dtype)
            share = agrees.float().mean() if agrees.numel() else agrees.float().sum()
            return (update * agrees / share.clamp(min=min_share)).to(update.dtype)

        return tree.map(keep, out, updates), state

    return init, update
