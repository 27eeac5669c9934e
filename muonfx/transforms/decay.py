"""Weight decay, and cautious updates, which keep only elements with the sign of the gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, InitAndUpdate, Locality, Transform, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.order import signs
from muonfx.core.partition import Condition, mask_patterns, resolve_mask
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.core.transform import require_transform
from muonfx.core.value import Memory, with_memory
from muonfx.transforms.leafwise import params_for
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar


def _resolve_decay(tx: Transform, params: PyTree) -> Transform:
    mask = tx.arguments["mask"]
    if mask is None:
        return tx
    which_decay = resolve_mask(f"{tx.name}: mask", mask)
    does_decay = which_decay(params)
    mask_by_name = dict(zip(tree.names(params), does_decay, strict=True))
    return tx.replace(mask=mask_by_name)


Mask = PyTree | Mapping[str, bool] | Condition | Callable[[PyTree], PyTree] | None
"""The parameters that decay: a tree or dict of bools, a predicate, or a function of the parameters, as in `masked`.
None selects all."""


def _init_and_update(
    name: str,
    weight_decay: ScalarOrSchedule,
    mask: Mask,
    *,
    sign: float,
    caution: bool,
    memory: Memory,
) -> InitAndUpdate:
    """Return ``init`` and ``update`` of a weight decay: the update u of a weight w becomes ``u + sign * decay * w``.

    For u = 1.0, w = 2.0 and a decay of 0.1, it becomes 1.2.

    Args:
        name: the name of the transform, for errors.
        weight_decay: the factor of the weights.
        mask: the parameters that decay; None selects all.
        sign: 1 to add the decay before the learning rate, and -1 to subtract it after the learning rate.
        caution: whether an element does not decay where this opposes its update.
        memory: a dict that stores which parameters decay, for transforms that differ in numbers only.
    """
    weight_decay = checks.at_least("weight_decay", weight_decay, 0.0)
    # A function from parameters to a bool for each leaf; None if all parameters decay.
    which_decay = None
    if mask is not None:
        which_decay = resolve_mask(f"{name}: mask", mask, memory)

    def init(params: PyTree) -> EmptyState:
        if which_decay is not None:
            which_decay(params)  # raises an error if the mask does not fit the parameters
        return EmptyState()

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        """Add ``sign * weight_decay * w`` to the update u of each weight w that decays: u and w are lists of these."""
        params = params_for(name, params)
        # Nothing to add; a tensor is not read here.
        if isinstance(weight_decay, float) and weight_decay == 0.0:
            return updates, state
        selected = updates
        if which_decay is not None:
            selected = _selected(updates, which_decay(params))
        decaying = Present(selected)  # the leaves that decay and have a gradient
        u = decaying.pick(updates)
        w = ew.cast_like(decaying.pick(params), u)
        if caution:
            agreeing = functools.partial(_where_decay_agrees, sign=sign)
            w = list(map(agreeing, u, w))
        decayed = ew.add(u, w, sign * weight_decay, reuse=donate.updates)
        if isinstance(weight_decay, Tensor):  # it may have widened the dtype
            decayed = ew.cast_like(decayed, u)
        return decaying.fill(decayed, updates), state

    return init, update


def _selected(updates: PyTree, does_decay: Sequence[bool]) -> PyTree:
    """Return a tree of the updates whose parameters decay, with None in place of the others."""
    leaves, treedef = tree.flatten(updates)
    for index, decays in enumerate(does_decay):
        if not decays:
            leaves[index] = None
    return tree.unflatten(treedef, leaves)


def _where_decay_agrees(update: Tensor, weight: Tensor, sign: float) -> Tensor:
    """Return the weight, but zero where its decay opposes the update."""
    # Compare signs: the product of the values may underflow to zero.
    agrees = update.sign() * weight.sign() * sign >= 0
    return torch.where(agrees, weight, 0.0)


@transform(
    locality=Locality.ELEMENT,
    resolve=_resolve_decay,
    name_patterns=mask_patterns,
    position="before_learning_rate",
    short_names={"weight_decay": "weight_decay"},
)
@with_memory
def add_decayed_weights(
    _memory: Memory,  # supplied by `with_memory`, not by callers
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    cautious: bool = False,
):
    r"""Add ``weight_decay`` times the parameters to the updates.

    Before `scale_by_learning_rate` this is the decoupled weight decay of AdamW: each step multiplies parameters by ``1
    - learning_rate * weight_decay``. At the start of a chain, before momentum or Adam, it is the L2 penalty of
    ``torch.optim.SGD``. Use `subtract_decayed_weights` for a decay without the learning rate as factor.

    Args:
        weight_decay: a number of 0 or more, or a schedule.
        mask: the parameters that decay, as in `masked`: a tree or dict of bools, a predicate of `muonfx.routing`, or a
            function of the parameters. None: all.
        cautious: decay an element $x_t$ only if $u_t x_t \geq 0$, so that the decay does not oppose its incoming
            update $u_t$. Put the transform directly before the learning rate.

    Raises:
        ValueError: the factor is negative or not finite; at `update`, ``params`` is missing.

    Follows Loshchilov and Hutter (arXiv 1711.05101), Optax's transform of this name, and for ``cautious`` algorithm 1
    of Cautious Weight Decay (arXiv 2510.12402).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.add_decayed_weights(0.1, mask=mfx.routing.ndim(min=2))
        >>> params = {"w": torch.ones(1, 1), "b": torch.ones(1)}
        >>> tx.update(mfx.tree.map(torch.zeros_like, params), tx.init(params), params)[0]
        {'w': tensor([[0.1000]]), 'b': tensor([0.])}

        An L2 penalty, and a decay that falls with the square of the learning rate, as in modded-nanogpt:

        >>> sgd = mfx.chain(tx, mfx.momentum(heavy_ball=True), mfx.scale_by_learning_rate(0.1))
        >>> rate, decay = (mfx.cosine_decay_schedule(peak, steps=100) for peak in (0.02, 0.1))
        >>> muon = mfx.chain(
        ...     mfx.orthogonalize(),
        ...     mfx.add_decayed_weights(decay),
        ...     mfx.scale_by_learning_rate(rate),
        ... )
    """
    return _init_and_update(
        "add_decayed_weights",
        weight_decay,
        mask,
        sign=1.0,
        caution=cautious,
        memory=_memory,
    )


@transform(
    locality=Locality.ELEMENT,
    resolve=_resolve_decay,
    name_patterns=mask_patterns,
    position="after_learning_rate",
)
@with_memory
def subtract_decayed_weights(
    _memory: Memory,  # supplied by `with_memory`, not by callers
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    cautious: bool = False,
):
    """Subtract ``weight_decay`` times the parameters from the updates.

    After `scale_by_learning_rate` this is independent weight decay: each step multiplies parameters by ``1 -
    weight_decay``, whatever the learning rate.

    Args:
        weight_decay: a number from 0 to 1, or a schedule. The learning rate does not multiply it, so usual values are
            smaller than for `add_decayed_weights`: 1e-4 rather than 0.1.
        mask: the parameters that decay, as in `masked`: a tree or dict of bools, a predicate of `muonfx.routing`, or a
            function of the parameters. None: all.
        cautious: decay an element only if the decay does not oppose its update, as in `add_decayed_weights`.

    Raises:
        ValueError: the factor is not from 0 to 1; at `update`, ``params`` is missing.

    Follows the independent weight decay of Wortsman et al. (arXiv 2309.14322) and NVIDIA's Emerging-Optimizers.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(
        ...     mfx.scale_by_adam(),
        ...     mfx.scale_by_learning_rate(0.0),
        ...     mfx.subtract_decayed_weights(0.25),
        ... )
        >>> params = {"w": torch.tensor([2.0])}
        >>> tx.update({"w": torch.ones(1)}, tx.init(params), params)[0]
        {'w': tensor([-0.5000])}
    """
    # A larger one would reverse the parameters.
    weight_decay = checks.fraction("weight_decay", weight_decay)
    return _init_and_update(
        "subtract_decayed_weights",
        weight_decay,
        mask,
        sign=-1.0,
        caution=cautious,
        memory=_memory,
    )


@transform(
    locality=lambda inner, min_share: max(Locality.LEAF, inner.locality),
    reads_params=lambda inner, min_share: inner.reads_params,
    position="before_learning_rate",
)
def cautious(inner: Transform, min_share: ScalarOrSchedule = 1e-3):
    """Keep only the elements of a transform's updates that have the sign of the gradient, and scale them up.

    All other elements are set to zero. Each leaf is then divided by the fraction of its elements that are kept. The
    inner transform must return updates in the direction of the gradient, so put the learning rate after this transform.

    Args:
        inner: the transform whose updates are filtered.
        min_share: the smallest divisor, so that updates stay bounded if only a few elements of a leaf are kept.

    Raises:
        ValueError: ``min_share`` is not finite or not positive, or the inner transform has a learning rate or a
            negative scale. A scale that is a tensor or a function is assumed to be positive.

    Follows Cautious Optimizers (arXiv 2411.16085).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.cautious(mfx.identity())
        >>> tx.update({"w": torch.tensor([1.0, -1.0, 0.0, 2.0])}, tx.init({"w": torch.zeros(4)}))[
        ...     0
        ... ]["w"].tolist()
        [1.3333333730697632, -1.3333333730697632, 0.0, 2.6666667461395264]
    """
    min_share = checks.positive("min_share", min_share)
    require_transform("cautious: inner", inner)
    if -1 in signs(inner):
        raise ValueError(
            "cautious: the inner transform reverses the sign of the updates (a learning rate or a negative scale), "
            "expected updates in the direction of the gradient: put the learning rate after it, "
            "chain(cautious(...), scale_by_learning_rate(...))"
        )

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        """Run the inner transform, and drop the elements of its updates whose sign differs from the gradient's."""
        # The gradient is needed after the inner transform, so it is not donated.
        donation = Donation(updates=False, state=donate.state)
        out, state = inner.run(updates, state, params, donate=donation, **extras)

        keep_agreeing = functools.partial(_keep_agreeing, min_share=min_share)
        new_updates = tree.map(keep_agreeing, out, updates)
        return new_updates, state

    return inner.functions.init, update


def _keep_agreeing(update: Tensor, gradient: Tensor | None, min_share: Scalar) -> Tensor:
    """Set the elements whose sign differs from the gradient's to zero; divide the others by their share of the leaf.

    For an update [1, -1, 1, 1] and positive gradients, it is [1, 0, 1, 1] / 0.75. The share counts as ``min_share`` if
    it is smaller.
    """
    if gradient is None:  # an accumulating inner transform may update a leaf without a gradient
        return torch.zeros_like(update)
    if update.numel() == 0:
        return update.clone()
    # Compare signs: the product of the values may underflow to zero.
    agrees = update.sign() * gradient.sign() > 0
    wide = ew.wide_dtype(update.dtype)  # in bf16, the share would be rounded under vmap
    is_kept = agrees.to(wide)  # 1 for each element that is kept, and else 0
    share = is_kept.mean()
    divisor = share.clamp(min=ew.scalar_like(min_share, share))
    scaled = update.to(wide) * is_kept / divisor
    return scaled.to(update.dtype)
