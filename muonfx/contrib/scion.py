"""Scion: steepest descent in a norm for each kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonfx.contrib.norms import normalize_columns, normalize_leaves, normalize_rows
from muonfx.core import Transform, chain, checks
from muonfx.core.partition import masked, partition
from muonfx.core.schedules import ScalarOrSchedule, Schedule
from muonfx.internal.arguments import plain_arguments
from muonfx.recipes import view_of
from muonfx.routing import default_labels, ndim
from muonfx.transforms import (
    add_decayed_weights,
    momentum,
    orthogonalize,
    scale,
    scale_by_learning_rate,
    scale_by_shape,
    scale_by_sign,
)

Norms = Mapping[str, tuple[str, float]]

_NORMS_OF_GPT: Norms = {"muon": ("spectral", 50.0), "adamw": ("sign", 3000.0)}
"""The norms and radii of the authors for a GPT with shared embeddings."""


@plain_arguments
def scion(
    learning_rate: ScalarOrSchedule = 2.0**-12,
    *,
    norms: Norms | None = None,
    decay: ScalarOrSchedule = 0.9,
    constrained: bool = True,
    orthogonalize: Transform = orthogonalize(),
    labels: Any = default_labels,
) -> Transform:
    """Scion: take steps of steepest descent in a norm that is chosen for each kind of parameter.

    Args:
        learning_rate: a number or a schedule; with ``constrained``, a number from 0 to 1, because each step multiplies
            parameters by 1 minus the rate.
        norms: a dict from each label (the name of a group of parameters) to a norm and a radius, which multiplies the
            direction. None is ``{"muon": ("spectral", 50.0), "adamw": ("sign", 3000.0)}``, the authors' values for a
            GPT with shared embeddings. The norms are "spectral" for hidden matrices, "sign" for heads, "rows" (the
            authors' RowNorm), "columns" (their ColNorm, for the first layer) and "embedding" (their ColNorm of a
            transposed matrix, for embeddings stored as tokens by features). The update of a vector or scalar has the
            root mean square 1, whatever its label.
        decay: decay rate of the momentum; 1 minus the authors' ``momentum``.
        constrained: use weight decay with the factor 1, so that parameters stay within the radius (Frank-Wolfe). If
            False, there is no weight decay.
        orthogonalize: the transform that orthogonalizes, as in `muon`.
        labels: a label in ``norms``, or None, for each parameter, as in `partition`.

    Raises:
        ValueError: a norm is unknown, or a radius is negative; the message names the label. Or the learning rate is out
            of range.

    Follows Scion (arXiv 2502.07529). A convolution kernel is one flattened matrix here; the authors also divide its
    factor by the root of the kernel's size.

    >>> labels = {"up.weight": "hidden", "head.weight": "head"}
    >>> tx = scion(norms={"hidden": ("spectral", 50.0), "head": ("sign", 3000.0)}, labels=labels)
    >>> params = {name: torch.zeros(4, 4) for name in labels}
    >>> updates, _ = tx.update({name: torch.eye(4) for name in labels}, tx.init(params), params)
    >>> updates["head.weight"][0] * 2**12
    tensor([-750.,   -0.,   -0.,   -0.])
    """
    if norms is None:
        norms = _NORMS_OF_GPT
    average = momentum(decay, nesterov=False)
    view = view_of(orthogonalize)
    directions = {
        "spectral": (orthogonalize, scale_by_shape("spectral", view=view)),
        "sign": (scale_by_sign(), scale_by_shape("fan_in", view=view)),
        "rows": (normalize_rows(view=view), scale_by_shape("fan_in", view=view)),
        "columns": (normalize_columns(view=view),),
        "embedding": (normalize_rows(view=view),),
    }
    parts: dict[str, Transform] = {}
    for label, (norm, radius) in norms.items():
        if norm not in directions:
            raise ValueError(
                f"scion: norms[{label!r}] has the norm {norm!r}, expected one of {', '.join(map(repr, directions))}"
            )
        if radius < 0:
            raise ValueError(
                f"scion: norms[{label!r}] has the radius {radius!r}, expected 0 or more"
            )
        parts[label] = chain(
            ("matrices", masked(chain(average, *directions[norm], scale(radius)), ndim(min=2))),
            ("vectors", masked(chain(average, normalize_leaves()), ndim(max=1))),
        )
    members = [partition(parts, labels)]
    by_rate = scale_by_learning_rate(learning_rate)  # raises for a rate of a wrong type
    if constrained:
        if not isinstance(learning_rate, Schedule):
            checks.fraction("learning_rate", learning_rate)
        members.append(add_decayed_weights(1.0))
    return chain(*members, by_rate)
