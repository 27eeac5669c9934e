"""Tensors that a caller gave as hyperparameters, and of which the param groups have copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.core.checks import warn_caller


class _Given(NamedTuple):
    name: str
    tensor: Tensor
    version: int
    """The version of the tensor when the groups copied it: writing into it increases the version."""


class CallersTensors:
    """Warns if the caller writes into a tensor that was given as a hyperparameter, which has no effect."""

    def __init__(self) -> None:
        self._tensors: list[_Given] = []

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Record the tensors among hyperparameters, which are numbers or tuples of numbers."""
        for name, number in numbers.items():
            values = number if isinstance(number, tuple | list) else (number,)
            for value in values:
                if isinstance(value, Tensor) and not value.is_inference():  # inference tensors have no version
                    self._tensors.append(_Given(name, value, value._version))

    def warn_of_written(self) -> None:
        """Warn once if the caller has written into one of the tensors."""
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                self._tensors = []
                warn_caller(
                    f"the tensor that was given for {name!r} was changed in place, which has no effect: each param "
                    "group has a copy of it; write into the tensors in param_groups"
                )
                return
