"""A factor of the updates that is reduced when the loss stops falling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.core import Transform, checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.internal.arguments import is_real_number
from muonfx.transforms.leafwise import Leaf, Number, StepCount, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew


class ReduceOnPlateauState(NamedTuple):
    """State of the transform `reduce_on_plateau`: the scale, the lowest loss, and two counters."""

    scale: PyTree
    """The current scale, by which updates are multiplied, a 0-d tensor."""
    best_value: PyTree
    """The lowest loss so far, a 0-d tensor."""
    plateau_count: PyTree
    """The number of losses since the last improvement or reduction, a 0-d int64 tensor."""
    cooldown_count: PyTree
    """The number of remaining losses in the cooldown, a 0-d int64 tensor."""


def _check_extras(tx: Transform, extras: Mapping[str, Any]) -> None:
    """Raise an error unless the loss, ``update(..., value=loss)``, is a real number or a real tensor of one element."""
    value = extras.get("value", 0.0)
    if not is_real_number(value):
        raise TypeError(
            f"reduce_on_plateau: found value={value!r}, expected the loss as a real number or real tensor"
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"reduce_on_plateau: found a value of shape {tuple(value.shape)}, expected one element: reduce the loss "
            "first, for example with .mean()"
        )


@leafwise(check_extras=_check_extras)
def reduce_on_plateau(
    factor: ScalarOrSchedule = 0.1,
    patience: int = 10,
    rtol: ScalarOrSchedule = 1e-4,
    atol: ScalarOrSchedule = 0.0,
    cooldown: int = 0,
    min_scale: ScalarOrSchedule = 0.0,
):
    """Multiply updates by a scale, which starts at 1 and is reduced when the loss has not improved for some time.

    Pass the loss at every step: ``update(updates, state, params, value=loss)`` or ``optimizer.step(value=loss)``. It is
    a number or a 0-d tensor with the same value on all ranks. A tensor is not read back to the CPU.

    Args:
        factor: the number by which the scale is multiplied at each reduction, in (0, 1).
        patience: the number of losses without improvement after which the scale is reduced, 1 or more.
        rtol: the relative threshold, in [0, 1]: a loss is an improvement if it is below ``(1 - rtol) * best - atol``.
        atol: the absolute threshold, 0 or more. ``rtol`` or ``atol`` must be positive.
        cooldown: the number of losses after a reduction that are not counted towards ``patience``, 0 or more.
        min_scale: the lower bound of the scale, from 0 to 1.

    Raises:
        TypeError: ``patience`` or ``cooldown`` is not an int; at `update`, ``value`` is missing or not a real number.
        ValueError: an argument is out of range; at `update`, ``value`` has more than one element.

    Follows Optax's ``contrib.reduce_on_plateau``, which follows ``torch.optim.lr_scheduler.ReduceLROnPlateau``.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.reduce_on_plateau(0.5, patience=2)
        >>> state = tx.init({"w": torch.ones(1)})
        >>> for loss in (1.0, 0.9, 0.9, 0.9):
        ...     updates, state = tx.update({"w": torch.ones(1)}, state, value=loss)
        >>> updates, float(state.scale)
        ({'w': tensor([0.5000])}, 0.5)
    """
    factor = checks.in_unit_interval("factor", factor)
    factor = checks.positive("factor", factor)
    checks.positive_int("patience", patience)
    checks.whole_number("cooldown", cooldown)
    rtol = checks.fraction("rtol", rtol)
    atol = checks.at_least("atol", atol, 0.0)
    min_scale = checks.fraction("min_scale", min_scale)
    if not isinstance(rtol, Tensor) and not isinstance(atol, Tensor) and rtol == atol == 0.0:
        raise ValueError("one of rtol and atol must be above 0, found 0.0 for both")

    def step(u: Leaf, s: ReduceOnPlateauState, *, value: float | Tensor):
        """Return the updates times the scale, which a loss without improvement may reduce.

        No branch depends on a value: ``torch.where`` selects between the cases improvement, reduction and cooldown.
        """
        if isinstance(value, Tensor):
            value = value.detach().reshape(())
        loss = ew.new_number(value, s.scale.device)

        improves = loss < (1.0 - rtol) * s.best_value - atol
        best_value = torch.where(improves, loss, s.best_value)
        count = torch.where(improves, 0, s.plateau_count + 1)  # losses since the last improvement

        # In a cooldown, the scale stays and no loss is counted. Otherwise, ``patience`` losses reduce the scale, start
        # the count again and begin a cooldown.
        in_cooldown = s.cooldown_count > 0
        reduces = (count == patience) & ~in_cooldown
        reduced_scale = torch.where(reduces, s.scale * factor, s.scale).clamp(
            min=ew.scalar_like(min_scale, s.scale)
        )
        scale = torch.where(in_cooldown, s.scale, reduced_scale)
        plateau_count = torch.where(in_cooldown | reduces, 0, count)
        new_cooldown = torch.where(reduces, cooldown, 0)
        cooldown_count = torch.where(in_cooldown, s.cooldown_count - 1, new_cooldown)
        return u * scale, ReduceOnPlateauState(
            scale=scale,
            best_value=best_value,
            plateau_count=plateau_count,
            cooldown_count=cooldown_count,
        )

    return ReduceOnPlateauState(
        scale=Number(1.0),
        best_value=Number(float("inf")),
        plateau_count=StepCount(),
        cooldown_count=StepCount(),
    ), step
