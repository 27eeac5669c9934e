"""Variants of Muon as short chains, to use as they are or to copy and change."""

from __future__ import annotations

from muonfx.contrib.dion import scale_by_dion
from muonfx.contrib.dion2 import scale_by_dion2
from muonfx.contrib.directions import scale_by_dual_norm, scale_by_namo
from muonfx.contrib.lora import muon_lora
from muonfx.contrib.norms import keep_weight_norms, match_weight_norms, normalize_matrices
from muonfx.contrib.preconditioned import shampoo, soap, soap_muon
from muonfx.contrib.prodigy import scale_by_prodigy
from muonfx.contrib.scion import scion
from muonfx.core import Transform, add_updates, chain
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.recipes import view_of
from muonfx.select import MatrixView
from muonfx.transforms import (
    add_decayed_weights,
    momentum,
    orthogonalize,
    scale,
    scale_by_learning_rate,
    scale_by_rms,
    scale_by_shape,
)
from muonfx.transforms.decay import Mask
from muonfx.transforms.scale import ShapeRule
from muonfx.tree.arguments import plain_arguments

__all__ = ["adamuon", "dion", "dion2", "muon_hyperball", "muon_lora", "musgd", "namo", "polargrad", "prodigy", "scion"]
__all__ += ["shampoo", "soap", "soap_muon"]


@plain_arguments
def adamuon(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    second_decay: ScalarOrSchedule = 0.95,
    eps: ScalarOrSchedule = 1e-8,
    nesterov: bool = True,
    weight_decay: ScalarOrSchedule = 0.0,
    orthogonalize: Transform = orthogonalize(),
    mask: Mask = None,
) -> Transform:
    """AdaMuon: Muon with updates divided by their running root mean square. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule; AdamW's values are suitable.
        decay: decay rate of the momentum.
        second_decay: decay rate of the running mean square of each element.
        eps: added to the root mean square in the divisor.
        nesterov: use Nesterov momentum.
        weight_decay: decoupled weight decay, as in `muon`.
        orthogonalize: the transform that orthogonalizes, as in `muon`. The update of each matrix is then rescaled to a
            root mean square of 0.2. A parameter may hold several matrices, by the argument ``view`` of this transform.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows the authors' code of AdaMuon (arXiv 2507.11005). A later version of the paper orthogonalizes the signs of
    the momentum; for this, write the chain with `scale_by_sign` after the momentum.

    >>> adamuon(1e-3)  # doctest: +NORMALIZE_WHITESPACE
    chain(momentum(), orthogonalize(), scale_by_rms(decay=0.95, eps_in_sqrt=False, debias=True), normalize_matrices(),
          scale(factor=0.2), add_decayed_weights(), scale_by_learning_rate(learning_rate=0.001))
    """
    return chain(
        momentum(decay, nesterov=nesterov),
        orthogonalize,
        scale_by_rms(second_decay, eps, eps_in_sqrt=False, debias=True),
        normalize_matrices(view=view_of(orthogonalize)),
        scale(0.2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def polargrad(
    learning_rate: ScalarOrSchedule = 1e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    weight_decay: ScalarOrSchedule = 0.0,
    orthogonalize: Transform = orthogonalize(),
    mask: Mask = None,
) -> Transform:
    """PolarGrad: Muon's update times the nuclear norm of the momentum. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        decay: decay rate of the momentum.
        weight_decay: decoupled weight decay, as in `muon`.
        orthogonalize: the transform that orthogonalizes, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows PolarGrad (arXiv 2505.21799).

    >>> list(polargrad(0.02).init({"w": torch.zeros(4, 4)}))[:2]
    ['momentum', 'scale_by_dual_norm']
    """
    return chain(
        momentum(decay, nesterov=False),
        scale_by_dual_norm(orthogonalize, view=view_of(orthogonalize)),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def namo(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    b1: ScalarOrSchedule = 0.95,
    b2: ScalarOrSchedule = 0.99,
    eps: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    lr_scaling: ShapeRule = "match_rms_adamw",
    orthogonalize: Transform = orthogonalize(),
    mask: Mask = None,
) -> Transform:
    """NAMO: Muon with updates scaled down when gradients are noisy. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the momentum.
        b2: decay rate of the running average of the squared gradient norm.
        eps: added to the root of this average.
        weight_decay: decoupled weight decay, which is scaled down together with the update.
        lr_scaling: how the update of a matrix is scaled by its shape, as in `scale_by_shape`.
        orthogonalize: the transform that orthogonalizes, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows NAMO (arXiv 2602.17080), which does not scale updates by shape.

    >>> list(namo(0.02).init({"w": torch.zeros(4, 4)}))
    ['scale_by_namo', 'scale_by_learning_rate']
    """
    view = view_of(orthogonalize)
    inner = chain(orthogonalize, scale_by_shape(lr_scaling, view=view), add_decayed_weights(weight_decay, mask))
    return chain(scale_by_namo(inner, b1, b2, eps, view=view), scale_by_learning_rate(learning_rate))


@plain_arguments
def musgd(
    learning_rate: ScalarOrSchedule = 1e-3,
    *,
    muon: ScalarOrSchedule = 0.5,
    sgd: ScalarOrSchedule = 0.5,
    decay: ScalarOrSchedule = 0.95,
    weight_decay: ScalarOrSchedule = 0.0,
    orthogonalize: Transform = orthogonalize(),
    mask: Mask = None,
) -> Transform:
    """MuSGD: the sum of a Muon step and an SGD step. All parameters must be matrices.

    Args:
        learning_rate: the learning rate of both steps, a number or a schedule.
        muon: factor of the Muon step.
        sgd: factor of the SGD step.
        decay: decay rate of both momenta, which are Nesterov momenta.
        weight_decay: factor of an L2 penalty, in the SGD step only.
        orthogonalize: the transform that orthogonalizes, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows Ultralytics' MuSGD for YOLO26. There, the updates of convolution kernels are scaled by the height and width
    of the kernel instead of the rows and columns of its matrix.

    >>> list(musgd(0.02).init({"w": torch.zeros(4, 4)})["add_updates"])
    ['muon', 'sgd']
    """
    shape = scale_by_shape("original", view=view_of(orthogonalize))
    matrices = chain(momentum(decay), orthogonalize, shape, scale(muon))
    elements = chain(add_decayed_weights(weight_decay, mask), momentum(decay, heavy_ball=True), scale(sgd))
    return chain(add_updates(("muon", matrices), ("sgd", elements)), scale_by_learning_rate(learning_rate))


@plain_arguments
def muon_hyperball(
    learning_rate: ScalarOrSchedule = 1e-2,
    *,
    decay: ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    orthogonalize: Transform = orthogonalize(),
) -> Transform:
    """Hyperball with Muon: each matrix keeps its initial Frobenius norm. All parameters must be matrices.

    Args:
        learning_rate: the norm of a step relative to the norm of the weight, a number or a schedule.
        decay: decay rate of the momentum.
        nesterov: use Nesterov momentum.
        orthogonalize: the transform that orthogonalizes, as in `muon`. If its `MatrixView` divides a parameter into
            several matrices, each of them keeps its own norm.

    Follows Hyperball (Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1", 2025). A matrix that
    starts at zero is not constrained: its update is the orthogonalized momentum times the learning rate.

    >>> list(muon_hyperball(0.02).init({"w": torch.ones(4, 4)}))[2:]
    ['match_weight_norms', 'scale_by_learning_rate', 'keep_weight_norms']
    """
    view = view_of(orthogonalize)
    return chain(
        momentum(decay, nesterov=nesterov),
        orthogonalize,
        match_weight_norms(view=view),
        scale_by_learning_rate(learning_rate),
        keep_weight_norms(view=view),
    )


@plain_arguments
def dion(
    learning_rate: ScalarOrSchedule = 1e-2,
    *,
    rank: int = 768,
    decay: ScalarOrSchedule = 0.95,
    weight_decay: ScalarOrSchedule = 0.01,
    view: MatrixView = MatrixView(),
    mask: Mask = None,
) -> Transform:
    """Dion: orthonormalized updates of low rank. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        rank: the maximal rank of the update.
        decay: the fraction of the low-rank part that stays in the sum of gradients after each step.
        weight_decay: decoupled weight decay, as in `muon`.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows Dion (arXiv 2504.05295).

    >>> list(dion(0.02).init({"w": torch.zeros(4, 4)}))[:2]
    ['scale_by_dion', 'scale_by_shape']
    """
    return chain(
        scale_by_dion(rank, decay, view=view),
        scale_by_shape("spectral", view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def prodigy(
    learning_rate: ScalarOrSchedule = 1.0,
    *,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: ScalarOrSchedule = 1e-8,
    estim_lr0: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
) -> Transform:
    """Prodigy: AdamW with a learning rate that is estimated during training.

    Args:
        learning_rate: a factor of the estimated rate: usually 1, or a schedule that falls from 1 to 0.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment, after multiplication by the estimate.
        estim_lr0: the initial estimate, positive and small.
        weight_decay: decoupled weight decay, as in `muon`.

    Follows Mishchenko and Defazio (arXiv 2306.06101). `scale_by_prodigy` has more options.

    >>> prodigy()
    chain(scale_by_prodigy(), scale(factor=-1.0))
    """
    scaled = scale_by_prodigy(learning_rate, b1, b2, eps, estim_lr0=estim_lr0, weight_decay=weight_decay)
    return chain(scaled, scale(-1.0))


@plain_arguments
def dion2(
    learning_rate: ScalarOrSchedule = 1e-2,
    *,
    shrink: int = 4,
    decay: ScalarOrSchedule = 0.95,
    weight_decay: ScalarOrSchedule = 0.01,
    view: MatrixView = MatrixView(),
    mask: Mask = None,
) -> Transform:
    """Dion2: Muon on the rows or columns of the momentum with the largest norms. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        shrink: the shorter side divided by ``shrink`` is the number of selected rows, as in `scale_by_dion2`.
        decay: the factor of the selected rows of the sum of gradients after each step.
        weight_decay: decoupled weight decay of all rows, as in `muon`.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows Dion2 (arXiv 2512.16928).

    >>> list(dion2(0.02).init({"w": torch.zeros(4, 4)}))[:2]
    ['scale_by_dion2', 'scale_by_shape']
    """
    return chain(
        scale_by_dion2(shrink, decay, view=view),
        scale_by_shape("spectral", view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
