"""Well-known optimizers as short chains, to use or to copy and change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muonfx.core import Transform, chain
from muonfx.core.contract import require_transform, within
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.select import Labels, MatrixView, Predicate, default_labels
from muonfx.select.partition import partition
from muonfx.transforms import (
    AttentionHeads,
    add_decayed_weights,
    momentum,
    normalize_neurons,
    orthogonalize,
    qk_clip,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_shape,
)
from muonfx.transforms.scale import ShapeRule
from muonfx.tree import PyTree
from muonfx.tree.arguments import plain_arguments

__all__ = ["adamw", "lion", "muon", "muon_with_adamw", "muonclip", "normuon"]

Mask = PyTree | Mapping[str, bool] | Predicate | Callable[[PyTree], PyTree] | None


def view_of(orthogonalize: Transform) -> MatrixView:
    """Return the view of the part that orthogonalizes, or of the first transform within it that has a view."""
    require_transform("orthogonalize", orthogonalize)
    views = (tx.arguments.get("view") for tx in within(orthogonalize))
    return next((view for view in views if isinstance(view, MatrixView)), MatrixView())


def with_views(tx: Transform, labels: Labels) -> Transform:
    """Add the labels' views of parameters to all transforms within that take a view and have none for them."""
    if not labels.views:
        return tx
    tx = tx.with_children(lambda part: with_views(part, labels))
    view = tx.arguments.get("view")
    return tx.replace(view=labels.view(view)) if isinstance(view, MatrixView) else tx


@plain_arguments
def muon(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    orthogonalize: Transform = orthogonalize(),
    lr_scaling: ShapeRule = "match_rms_adamw",
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """Muon, for parameters that are all matrices: orthogonalized momentum, scaled by shape, with decoupled decay.

    Args:
        learning_rate: a number or a schedule. With the scaling "match_rms_adamw" it has the size of AdamW's; with
            "original", Keller Jordan's 0.02 is customary.
        decay: decay of the momentum; a number or a schedule.
        nesterov: whether the momentum looks ahead.
        orthogonalize: the transform that orthogonalizes the momentum, such as ``orthogonalize(coefficients="keller")``.
            Its view is also the view of `scale_by_shape`.
        lr_scaling: as in `scale_by_shape`.
        weight_decay: decoupled; parameters shrink by ``learning_rate * weight_decay``.
        mask: which parameters decay, as in `add_decayed_weights`.

    Follows Keller Jordan's Muon and Moonlight (arXiv 2502.16982). ``torch.optim.Muon(lr, weight_decay)`` is
    ``muon(lr, weight_decay=weight_decay, orthogonalize=orthogonalize(coefficients="keller"), lr_scaling="original")``.

    >>> muon(0.02)  # doctest: +NORMALIZE_WHITESPACE
    chain(momentum(), orthogonalize(), scale_by_shape(), add_decayed_weights(),
          scale_by_learning_rate(learning_rate=0.02))
    """
    return chain(
        momentum(decay, nesterov=nesterov),
        orthogonalize,
        scale_by_shape(lr_scaling, view=view_of(orthogonalize)),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def normuon(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    neuron_decay: ScalarOrSchedule = 0.95,
    orthogonalize: Transform = orthogonalize(),
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """NorMuon, for parameters that are all matrices: Muon with each neuron's update normalized by its running size.

    Args:
        learning_rate: a number or a schedule.
        decay: decay of the momentum.
        neuron_decay: decay of the rows' second moment.
        orthogonalize: as in `muon`; each block of its view is normalized as a parameter of its own.
        weight_decay: decoupled, as in `muon`.
        mask: which parameters decay, as in `add_decayed_weights`.

    Follows NorMuon (arXiv 2510.05491).

    >>> list(normuon(0.02).init({"w": torch.zeros(4, 4)}))[:3]
    ['momentum', 'orthogonalize', 'normalize_neurons']
    """
    tx = muon(learning_rate, decay=decay, orthogonalize=orthogonalize, weight_decay=weight_decay, mask=mask)
    average, direction, *rest = tx.children
    return chain(average, direction, normalize_neurons(neuron_decay, view=view_of(orthogonalize)), *rest)


@plain_arguments
def adamw(
    learning_rate: ScalarOrSchedule = 1e-3,
    *,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: ScalarOrSchedule = 1e-8,
    nesterov: bool = False,
    weight_decay: ScalarOrSchedule = 1e-2,
    mask: Mask = None,
) -> Transform:
    """AdamW, equal to ``torch.optim.AdamW``.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        nesterov: whether the first moment looks ahead, as in `scale_by_adam`.
        weight_decay: decoupled, as in `muon`.
        mask: which parameters decay, as in `add_decayed_weights`.

    >>> adamw(1e-3)
    chain(scale_by_adam(), add_decayed_weights(weight_decay=0.01), scale_by_learning_rate(learning_rate=0.001))
    """
    return chain(
        scale_by_adam(b1, b2, eps, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def lion(
    learning_rate: ScalarOrSchedule = 1e-4,
    *,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.99,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """Lion: signs of an interpolated momentum, with decoupled weight decay.

    Args:
        learning_rate: a number or a schedule; a third to a tenth of AdamW's.
        b1: weight of the average in the update.
        b2: decay of the average.
        weight_decay: decoupled, as in `muon`.
        mask: which parameters decay, as in `add_decayed_weights`.

    Follows Chen et al. (arXiv 2302.06675).

    >>> lion(1e-4)
    chain(scale_by_lion(), add_decayed_weights(), scale_by_learning_rate(learning_rate=0.0001))
    """
    return chain(scale_by_lion(b1, b2), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


@plain_arguments
def muon_with_adamw(
    learning_rate: ScalarOrSchedule = 2e-3,
    adamw_learning_rate: ScalarOrSchedule | None = None,
    *,
    decay: ScalarOrSchedule = 0.95,
    orthogonalize: Transform = orthogonalize(),
    lr_scaling: ShapeRule = "match_rms_adamw",
    weight_decay: ScalarOrSchedule = 0.1,
    adam: Transform = scale_by_adam(0.9, 0.95),
    adamw_weight_decay: ScalarOrSchedule = 0.1,
    labels: Any = default_labels,
    mask: Mask = None,
) -> Transform:
    """Muon for hidden matrices and AdamW for the rest, each with its own learning rate and weight decay.

    Args:
        learning_rate: Muon's, a number or a schedule.
        adamw_learning_rate: AdamW's, a number or a schedule; None: Muon's, which suits the scaling "match_rms_adamw".
        decay: decay of Muon's momentum.
        orthogonalize: as in `muon`. For parameters that its view does not set, the views of the labels apply
            (``labels.view()``); ``labels=Labels(labels)`` drops them.
        lr_scaling: as in `scale_by_shape`.
        weight_decay: Muon's, decoupled.
        adam: the direction of AdamW's updates. ``optax.contrib.muon`` has one argument ``nesterov`` for Muon and Adam;
            here Muon looks ahead, and ``scale_by_adam(0.9, 0.95, nesterov=True)`` does.
        adamw_weight_decay: AdamW's, decoupled.
        labels: "muon", "adamw" or None for each parameter, as in `partition`. ``default_labels(model)`` decides by
            module type. The default sees names and shapes only, and warns of that;
            ``muonfx.select.default_labels_by_name`` does the same without the warning.
        mask: which parameters decay, as in `add_decayed_weights`.

    >>> from muonfx.select import default_labels_by_name
    >>> tx = muon_with_adamw(0.02, 3e-4, labels=default_labels_by_name)
    >>> list(tx.init({"h.0.fc.weight": torch.zeros(4, 4), "wte.weight": torch.zeros(8, 4)}))
    ['adamw', 'muon']
    """
    matrices = muon(
        learning_rate,
        decay=decay,
        orthogonalize=orthogonalize,
        lr_scaling=lr_scaling,
        weight_decay=weight_decay,
        mask=mask,
    )
    require_transform("adam", adam)
    rest = chain(
        adam,
        add_decayed_weights(adamw_weight_decay, mask),
        scale_by_learning_rate(learning_rate if adamw_learning_rate is None else adamw_learning_rate),
    )
    muon_part = with_views(matrices, labels) if isinstance(labels, Labels) else matrices
    return partition({"muon": muon_part, "adamw": rest}, labels)


@plain_arguments
def muonclip(
    heads: AttentionHeads | tuple[AttentionHeads, ...],
    learning_rate: ScalarOrSchedule = 2e-3,
    adamw_learning_rate: ScalarOrSchedule | None = None,
    *,
    tau: ScalarOrSchedule = 100.0,
    alpha: ScalarOrSchedule = 0.5,
    **options: Any,
) -> Transform:
    """MuonClip: `muon_with_adamw`, with attention logits kept small by `qk_clip`.

    Each update takes the largest attention logits of its step: ``update(..., max_logits=...)``, or
    ``optimizer.step(max_logits=...)``, with the result of `muonfx.transforms.attention.collect_max_logits`.

    Args:
        heads: which parameters hold queries and keys, as in `qk_clip`.
        learning_rate: Muon's, as in `muon_with_adamw`.
        adamw_learning_rate: AdamW's, as in `muon_with_adamw`.
        tau: the bound of the logits.
        alpha: the query's share, as in `qk_clip`.
        options: further arguments of `muon_with_adamw`.

    Follows Kimi K2 (arXiv 2507.20534), whose Muon is Moonlight's (arXiv 2502.16982).

    >>> from muonfx.select import default_labels_by_name
    >>> heads = AttentionHeads("*.attn", heads=2)
    >>> tx = muonclip(heads, 0.02, labels=default_labels_by_name)
    >>> names = "h.0.attn.q_proj.weight", "h.0.attn.k_proj.weight", "wte.weight"
    >>> list(tx.init({name: torch.zeros(4, 4) for name in names}))
    ['partition', 'qk_clip']
    """
    return chain(muon_with_adamw(learning_rate, adamw_learning_rate, **options), qk_clip(heads, tau, alpha))
