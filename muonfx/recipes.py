"""Well-known optimizers as short chains, to use or to copy and change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from muonfx import polar
from muonfx.core import Transform, chain
from muonfx.core.schedules import ScalarOrFunction, ScalarOrSchedule
from muonfx.select import Labels, Predicate, default_labels
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
from muonfx.transforms._matrices import Blocks, Dims, MatrixView
from muonfx.transforms.scale import ShapeRule
from muonfx.tree import PyTree
from muonfx.tree.arguments import plain_arguments

__all__ = ["adamw", "lion", "muon", "muon_with_adamw", "muonclip", "normuon"]

Mask = PyTree | Mapping[str, bool] | Predicate | Callable[[PyTree], PyTree] | None
CoefficientsLike = str | polar.Coefficients | tuple[tuple[float, ...], ...] | Tensor


@plain_arguments
def muon(
    learning_rate: ScalarOrFunction = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    weight_decay: ScalarOrSchedule = 0.0,
    coefficients: polar.CoefficientsLike = "polar_express_5",
    steps: int | None = None,
    method: polar.MethodLike = "auto",
    dtype: polar.DTypeLike = "auto",
    newton_schulz: polar.NewtonSchulz = polar.NewtonSchulz(),
    rule: ShapeRule = "match_rms_adamw",
    dims: Dims | Mapping[str, Dims] | None = None,
    blocks: Blocks | Mapping[str, Blocks] | None = None,
    view: MatrixView = MatrixView(),
    mask: Mask = None,
) -> Transform:
    """Muon, for parameters that are all matrices: orthogonalized momentum, scaled by shape, with decoupled decay.

    Args:
        learning_rate: a number or a schedule. With the rule "match_rms_adamw" it is of AdamW's size; with "original",
            Keller Jordan's 0.02 is customary.
        decay: of the momentum; a number or a schedule.
        nesterov: whether momentum looks ahead.
        weight_decay: decoupled; parameters shrink by ``learning_rate * weight_decay``.
        coefficients: of the Newton-Schulz iteration, as in `orthogonalize`.
        steps: of the iteration, as in `orthogonalize`.
        method: "standard", "gram" or "auto", as in `orthogonalize`.
        dtype: of the iteration, as in `orthogonalize`.
        newton_schulz: the iteration as one value, in place of the four arguments above.
        rule: as in `scale_by_shape`.
        dims: ``{"*.experts.*": ((-2,), (-1,))}`` for stacks of matrices, as `MatrixView` says in full.
        blocks: ``{"*.qkv.weight": 3}`` for fused matrices.
        view: which matrices a leaf consists of, as one value, in place of the two arguments above.
        mask: which parameters decay, as in `add_decayed_weights`.

    Follows Keller Jordan's Muon and Moonlight (arXiv 2502.16982). ``torch.optim.Muon(lr, weight_decay)`` is
    ``muon(lr, weight_decay=weight_decay, coefficients="keller", rule="original")``.

    >>> muon(0.02)  # doctest: +NORMALIZE_WHITESPACE
    chain(momentum(), orthogonalize(), scale_by_shape(), add_decayed_weights(),
          scale_by_learning_rate(learning_rate=0.02))
    """
    return chain(
        momentum(decay, nesterov=nesterov),
        orthogonalize(newton_schulz=newton_schulz, view=view),
        scale_by_shape(rule, view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def normuon(
    learning_rate: ScalarOrFunction = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    neuron_decay: ScalarOrSchedule = 0.95,
    weight_decay: ScalarOrSchedule = 0.0,
    coefficients: polar.CoefficientsLike = "polar_express_5",
    method: polar.MethodLike = "auto",
    dtype: polar.DTypeLike = "auto",
    newton_schulz: polar.NewtonSchulz = polar.NewtonSchulz(),
    dims: Dims | Mapping[str, Dims] | None = None,
    blocks: Blocks | Mapping[str, Blocks] | None = None,
    view: MatrixView = MatrixView(),
    mask: Mask = None,
) -> Transform:
    """NorMuon, for parameters that are all matrices: Muon with each neuron's update normalized by its running size.

    Args:
        learning_rate: a number or a schedule.
        decay: of the momentum.
        neuron_decay: of the rows' second moment.
        weight_decay: decoupled, as in `muon`.
        coefficients: of the iteration, loose.
        method: of the iteration, loose.
        dtype: of the iteration, loose.
        newton_schulz: the iteration.
        dims: of the view, loose.
        blocks: of the view, loose.
        view: which matrices a leaf consists of; a block is normalized as a parameter of its own.
        mask: which parameters decay, as in `add_decayed_weights`.

    Follows NorMuon (arXiv 2510.05491).

    >>> list(normuon(0.02).init({"w": torch.zeros(4, 4)}))[:3]
    ['momentum', 'orthogonalize', 'normalize_neurons']
    """
    return chain(
        momentum(decay),
        orthogonalize(newton_schulz=newton_schulz, view=view),
        normalize_neurons(neuron_decay, view=view),
        scale_by_shape("match_rms_adamw", view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def adamw(
    learning_rate: ScalarOrFunction = 1e-3,
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
    learning_rate: ScalarOrFunction = 1e-4,
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
    learning_rate: ScalarOrFunction = 2e-3,
    adamw_learning_rate: ScalarOrFunction | None = None,
    *,
    weight_decay: ScalarOrSchedule = 0.1,
    adamw_weight_decay: ScalarOrSchedule = 0.1,
    decay: ScalarOrSchedule = 0.95,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.95,
    adamw_nesterov: bool = False,
    rule: ShapeRule = "match_rms_adamw",
    coefficients: polar.CoefficientsLike = "polar_express_5",
    method: polar.MethodLike = "auto",
    dtype: polar.DTypeLike = "auto",
    newton_schulz: polar.NewtonSchulz = polar.NewtonSchulz(),
    dims: Dims | Mapping[str, Dims] | None = None,
    blocks: Blocks | Mapping[str, Blocks] | None = None,
    view: MatrixView = MatrixView(),
    labels: Any = default_labels,
    mask: Mask = None,
) -> Transform:
    """Muon for hidden matrices and AdamW for the rest, each with its own learning rate and weight decay.

    Args:
        learning_rate: Muon's, a number or a schedule.
        adamw_learning_rate: AdamW's, a number or a schedule; None: Muon's, which suits where the rule is
            "match_rms_adamw".
        weight_decay: Muon's, decoupled.
        adamw_weight_decay: AdamW's, decoupled.
        decay: of Muon's momentum.
        b1: AdamW's first decay.
        b2: AdamW's second decay.
        adamw_nesterov: whether AdamW looks ahead; Muon does. ``optax.contrib.muon`` has one argument for both.
        rule: as in `scale_by_shape`.
        coefficients: of the iteration, loose.
        method: of the iteration, loose.
        dtype: of the iteration, loose.
        newton_schulz: the iteration.
        dims: of the view, loose; by default, and for parameters that a mapping here does not name, by the views of the
            labels (``labels.view()``). ``labels=Labels(labels)`` goes without views.
        blocks: of the view, loose; by default as ``dims``.
        view: which matrices a leaf consists of.
        labels: "muon", "adamw" or None for each parameter, as in `partition`. ``default_labels(model)`` decides by
            module type; the default here sees names and shapes only, and says so in a warning, which
            ``muonfx.select.default_labels_by_name`` does without.
        mask: which parameters decay, as in `add_decayed_weights`.

    >>> from muonfx.select import default_labels_by_name
    >>> tx = muon_with_adamw(0.02, 3e-4, labels=default_labels_by_name)
    >>> list(tx.init({"h.0.fc.weight": torch.zeros(4, 4), "wte.weight": torch.zeros(8, 4)}))
    ['adamw', 'muon']
    """
    if isinstance(labels, Labels):
        view = labels.view(view)
    return partition(
        {
            "muon": muon(
                learning_rate,
                decay=decay,
                weight_decay=weight_decay,
                newton_schulz=newton_schulz,
                rule=rule,
                view=view,
                mask=mask,
            ),
            "adamw": adamw(
                learning_rate if adamw_learning_rate is None else adamw_learning_rate,
                b1=b1,
                b2=b2,
                nesterov=adamw_nesterov,
                weight_decay=adamw_weight_decay,
                mask=mask,
            ),
        },
        labels,
    )


@plain_arguments
def muonclip(
    heads: AttentionHeads | tuple[AttentionHeads, ...],
    learning_rate: ScalarOrFunction = 2e-3,
    adamw_learning_rate: ScalarOrFunction | None = None,
    *,
    tau: ScalarOrSchedule = 100.0,
    alpha: ScalarOrSchedule = 0.5,
    weight_decay: ScalarOrSchedule = 0.1,
    adamw_weight_decay: ScalarOrSchedule = 0.1,
    decay: ScalarOrSchedule = 0.95,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.95,
    rule: ShapeRule = "match_rms_adamw",
    newton_schulz: polar.NewtonSchulz = polar.NewtonSchulz(),
    view: MatrixView = MatrixView(),
    labels: Any = default_labels,
    mask: Mask = None,
) -> Transform:
    """MuonClip: Muon for hidden matrices and AdamW for the rest, with attention logits kept small by `qk_clip`.

    Each update takes the largest attention logits of its step: ``update(..., max_logits=...)``, or
    ``optimizer.step(max_logits=...)``, with what `muonfx.transforms.attention.collect_max_logits` has collected.

    Args:
        heads: which parameters hold queries and keys, as in `qk_clip`.
        learning_rate: Muon's, as in `muon_with_adamw`.
        adamw_learning_rate: AdamW's, as in `muon_with_adamw`.
        tau: the bound of the logits.
        alpha: the query's share, as in `qk_clip`.
        weight_decay: Muon's, decoupled.
        adamw_weight_decay: AdamW's, decoupled.
        decay: of Muon's momentum.
        b1: AdamW's first decay.
        b2: AdamW's second decay.
        rule: as in `scale_by_shape`.
        newton_schulz: the iteration.
        view: which matrices a leaf consists of, as in `muon_with_adamw`.
        labels: as in `muon_with_adamw`.
        mask: which parameters decay, as in `add_decayed_weights`.

    Follows Kimi K2 (arXiv 2507.20534), whose Muon is Moonlight's (arXiv 2502.16982).

    >>> from muonfx.select import default_labels_by_name
    >>> heads = AttentionHeads("*.attn", heads=2)
    >>> tx = muonclip(heads, 0.02, labels=default_labels_by_name)
    >>> names = "h.0.attn.q_proj.weight", "h.0.attn.k_proj.weight", "wte.weight"
    >>> list(tx.init({name: torch.zeros(4, 4) for name in names}))
    ['partition', 'qk_clip']
    """
    return chain(
        muon_with_adamw(
            learning_rate,
            adamw_learning_rate,
            weight_decay=weight_decay,
            adamw_weight_decay=adamw_weight_decay,
            decay=decay,
            b1=b1,
            b2=b2,
            rule=rule,
            newton_schulz=newton_schulz,
            view=view,
            labels=labels,
            mask=mask,
        ),
        qk_clip(heads, tau, alpha),
    )
