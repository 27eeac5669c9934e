"""Variants of Muon and further optimizers as chains, which docs/muon-variants.md shows with their usual numbers."""

from typing import Any

import muonfx as mfx

contrib = mfx.contrib
ORTHOGONALIZE = mfx.orthogonalize()


def ending(rate: Any, weight_decay: float) -> tuple[mfx.Transform, mfx.Transform]:
    """The decoupled weight decay and the learning rate."""
    return mfx.add_decayed_weights(weight_decay), mfx.scale_by_learning_rate(rate)


def adamuon(
    rate: Any,
    *,
    decay: float = 0.95,
    second_decay: float = 0.95,
    eps: float = 1e-8,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    return mfx.chain(
        mfx.momentum(decay, nesterov=nesterov),
        orthogonalize,
        mfx.scale_by_rms(second_decay, eps, eps_in_sqrt=False, debias=True),
        contrib.normalize_matrices(),
        mfx.scale(0.2),
        *ending(rate, weight_decay),
    )


def paper_normuon(
    rate: Any,
    *,
    decay: float = 0.95,
    neuron_decay: float = 0.95,
    weight_decay: float = 0.0,
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    return mfx.chain(
        mfx.momentum(decay, nesterov=False),
        orthogonalize,
        mfx.normalize_neurons(neuron_decay),
        contrib.normalize_matrices(),
        mfx.scale(0.2),
        *ending(rate, weight_decay),
    )


def polargrad(
    rate: Any,
    *,
    decay: float = 0.95,
    weight_decay: float = 0.0,
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    return mfx.chain(
        mfx.momentum(decay, nesterov=False),
        contrib.scale_by_dual_norm(orthogonalize),
        *ending(rate, weight_decay),
    )


def namo(
    rate: Any,
    *,
    b1: float = 0.95,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    lr_scaling: mfx.ShapeRule = "match_rms_adamw",
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    inner = mfx.chain(
        orthogonalize, mfx.scale_by_shape(lr_scaling), mfx.add_decayed_weights(weight_decay)
    )
    return mfx.chain(contrib.scale_by_namo(inner, b1, b2), mfx.scale_by_learning_rate(rate))


def musgd(
    rate: Any,
    *,
    muon: float = 0.5,
    sgd: float = 0.5,
    decay: float = 0.95,
    weight_decay: float = 0.0,
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    matrices = mfx.chain(
        mfx.momentum(decay), orthogonalize, mfx.scale_by_shape("original"), mfx.scale(muon)
    )
    elements = mfx.chain(
        mfx.add_decayed_weights(weight_decay), mfx.momentum(decay, heavy_ball=True), mfx.scale(sgd)
    )
    return mfx.chain(
        mfx.add_updates(("muon", matrices), ("sgd", elements)), mfx.scale_by_learning_rate(rate)
    )


def muon_hyperball(
    rate: Any,
    *,
    decay: float = 0.95,
    nesterov: bool = True,
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    return mfx.chain(
        mfx.momentum(decay, nesterov=nesterov),
        orthogonalize,
        contrib.match_weight_norms(),
        mfx.scale_by_learning_rate(rate),
        contrib.keep_weight_norms(),
    )


def dion(
    rate: Any, *, rank: int = 768, decay: float = 0.95, weight_decay: float = 0.01
) -> mfx.Transform:
    return mfx.chain(
        contrib.scale_by_dion(rank, decay),
        mfx.scale_by_shape("spectral"),
        *ending(rate, weight_decay),
    )


def dion2(
    rate: Any, *, shrink: int = 4, decay: float = 0.95, weight_decay: float = 0.01
) -> mfx.Transform:
    return mfx.chain(
        contrib.scale_by_dion2(shrink, decay),
        mfx.scale_by_shape("spectral"),
        *ending(rate, weight_decay),
    )


def shampoo(rate: Any, *, weight_decay: float = 0.0) -> mfx.Transform:
    return mfx.chain(
        contrib.scale_by_shampoo(),
        mfx.momentum(nesterov=False),
        contrib.normalize_matrices(),
        mfx.scale(0.2),
        *ending(rate, weight_decay),
    )


def soap(rate: Any, *, weight_decay: float = 0.01) -> mfx.Transform:
    return mfx.chain(contrib.scale_by_soap(), *ending(rate, weight_decay))


def soap_muon(
    rate: Any,
    *,
    lr_scaling: mfx.ShapeRule = "match_rms_adamw",
    weight_decay: float = 0.0,
    orthogonalize: mfx.Transform = ORTHOGONALIZE,
) -> mfx.Transform:
    return mfx.chain(
        contrib.scale_by_soap(),
        orthogonalize,
        mfx.scale_by_shape(lr_scaling),
        *ending(rate, weight_decay),
    )


def prodigy(**options: Any) -> mfx.Transform:
    return mfx.chain(contrib.scale_by_prodigy(**options), mfx.scale(-1.0))


SIMPLE = (
    adamuon,
    dion,
    dion2,
    muon_hyperball,
    musgd,
    namo,
    paper_normuon,
    polargrad,
    shampoo,
    soap,
    soap_muon,
)
"""The chains for matrices, each a function of the learning rate."""
