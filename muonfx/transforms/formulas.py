"""Terms of many formulas: a running average, its bias, and a quotient that is not defined everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar


def running_average(average: Tensor, value: Tensor, decay: Scalar) -> Tensor:
    """Return ``decay * average + (1 - decay) * value``. With a decay of 0, it is exactly ``value``.

    >>> running_average(torch.tensor([1.0]), torch.tensor([3.0]), decay=0.75)
    tensor([1.5000])
    >>> running_average(torch.tensor([1.0]), torch.tensor([1e-9]), decay=0.0)
    tensor([1.0000e-09])
    """
    # Two forms of the formula, which differ in rounding. The difference loses the last digits of the smaller number, so
    # the form for a decay below 1/2 starts from the value, whose weight is larger there.
    difference = value - average
    # Python cannot branch on its value without a sync, so both are computed.
    if isinstance(decay, Tensor):
        from_average = average + (1.0 - decay) * difference
        from_value = value - decay * difference
        return torch.where(decay < 0.5, from_value, from_average)
    if decay < 0.5:
        return value - decay * difference
    return average + (1.0 - decay) * difference


def bias_correction(decay: Scalar, count: Tensor) -> Tensor:
    """Return ``1 - decay^count``, the sum of the weights in a running average that started at zero."""
    return 1.0 - ew.power(decay, count)


def divide_unless(
    undefined: Tensor, numerator: Tensor, denominator: Tensor, otherwise: float | Tensor
) -> Tensor:
    """Return ``numerator / denominator``, and ``otherwise`` where ``undefined`` is True, such as for 0 / 0.

    1 takes the place of the denominator there, because a division by zero would make derivatives NaN.

    >>> sums = torch.tensor([0.0, 4.0])
    >>> divide_unless(sums == 0, torch.tensor([0.0, 2.0]), sums, otherwise=1.0)
    tensor([1.0000, 0.5000])
    """
    safe_denominator = torch.where(undefined, 1.0, denominator)
    quotient = numerator / safe_denominator
    # The quotients at these places are finite, and are replaced now.
    return torch.where(undefined, otherwise, quotient)
