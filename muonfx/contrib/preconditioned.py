"""Optimizers with Shampoo's factors, as short chains."""

from __future__ import annotations

from muonfx.contrib.norms import normalize_matrices
from muonfx.contrib.shampoo import scale_by_shampoo
from muonfx.contrib.soap import Factors, scale_by_soap
from muonfx.core import Transform, chain
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.recipes import view_of
from muonfx.select import MatrixView
from muonfx.transforms import (
    add_decayed_weights,
    momentum,
    orthogonalize,
    scale,
    scale_by_learning_rate,
    scale_by_shape,
)
from muonfx.transforms.decay import Mask
from muonfx.transforms.scale import ShapeRule
from muonfx.tree.arguments import plain_arguments

__all__ = ["shampoo", "soap", "soap_muon"]


@plain_arguments
def shampoo(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    b2: ScalarOrSchedule = 0.95,
    damping: ScalarOrSchedule = 1e-4,
    weight_decay: ScalarOrSchedule = 0.0,
    view: MatrixView = MatrixView(),
    mask: Mask = None,
) -> Transform:
    """Shampoo, with updates rescaled to a fixed root mean square. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule; AdamW's values are suitable.
        decay: decay rate of the momentum, which averages the multiplied gradients.
        b2: decay rate of the factors.
        damping: the damping of the factors, as in `scale_by_shampoo`.
        weight_decay: decoupled weight decay, as in `muon`.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows Shampoo (arXiv 1802.09568). The update of each matrix is rescaled to a root mean square of 0.2, as in
    `adamuon`, where other implementations take the size of another optimizer's update (grafting).

    >>> list(shampoo(1e-3).init({"w": torch.zeros(4, 4)}))[:3]
    ['scale_by_shampoo', 'momentum', 'normalize_matrices']
    """
    return chain(
        scale_by_shampoo(b2, damping, view=view),
        momentum(decay, nesterov=False),
        normalize_matrices(view=view),
        scale(0.2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def soap(
    learning_rate: ScalarOrSchedule = 3e-3,
    *,
    b1: ScalarOrSchedule = 0.95,
    b2: ScalarOrSchedule = 0.95,
    eps: ScalarOrSchedule = 1e-8,
    factors: Factors = "shampoo",
    weight_decay: ScalarOrSchedule = 1e-2,
    view: MatrixView = MatrixView(),
    mask: Mask = None,
) -> Transform:
    """SOAP: AdamW in the eigenbases of Shampoo's factors. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the momentum.
        b2: decay rate of the second moment and of the factors.
        eps: added to the root of the second moment.
        factors: "shampoo", or "kl" for KL-SOAP, as in `scale_by_soap`.
        weight_decay: decoupled weight decay, as in `muon`.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows SOAP (arXiv 2409.11321). `scale_by_soap` has more options.

    >>> list(soap(1e-3).init({"w": torch.zeros(4, 4)}))[:2]
    ['scale_by_soap', 'add_decayed_weights']
    """
    return chain(
        scale_by_soap(b1, b2, eps, factors=factors, view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def soap_muon(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    b1: ScalarOrSchedule = 0.95,
    b2: ScalarOrSchedule = 0.95,
    eps: ScalarOrSchedule = 1e-8,
    factors: Factors = "shampoo",
    orthogonalize: Transform = orthogonalize(),
    lr_scaling: ShapeRule = "match_rms_adamw",
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """SOAP with Muon: Muon applied to the updates of SOAP instead of the momentum. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the momentum.
        b2: decay rate of the second moment and of the factors.
        eps: added to the root of the second moment.
        factors: "shampoo" or "kl", as in `scale_by_soap`.
        orthogonalize: the transform that orthogonalizes, as in `muon`. Its ``view`` is also used for `scale_by_soap`.
        lr_scaling: how the update of a matrix is scaled by its shape, as in `scale_by_shape`.
        weight_decay: decoupled weight decay, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows the records of the optimization track of modded-nanogpt since May 2026, whose second moment is computed from
    the Nesterov momentum. The first of these records uses it in feed-forward layers only. As in `scale_by_soap`, the
    first update is zero.

    >>> list(soap_muon(0.02).init({"w": torch.zeros(4, 4)}))[:3]
    ['scale_by_soap', 'orthogonalize', 'scale_by_shape']
    """
    view = view_of(orthogonalize)
    return chain(
        scale_by_soap(b1, b2, eps, factors=factors, view=view),
        orthogonalize,
        scale_by_shape(lr_scaling, view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
