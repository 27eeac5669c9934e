"""The settings of a Newton-Schulz iteration as one value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.orthogonalize import orthogonalize
from muonfx.polar.policy import DTypeLike, MethodLike
from muonfx.polar.products import ProductsLike


@dataclass(frozen=True)
class NewtonSchulz:
    """A Newton-Schulz iteration: its polynomials, and how and in which dtype they are computed.

    The fields are the arguments of `orthogonalize` of these names, with its defaults.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is malformed.

    >>> NewtonSchulz(steps=3).arguments["coefficients"]
    'polar_express_5'
    >>> NewtonSchulz(method="grem")
    Traceback (most recent call last):
    ValueError: method: found 'grem', expected 'auto', 'standard' or 'gram'
    """

    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5"
    steps: int | None = None
    method: MethodLike = "auto"
    dtype: DTypeLike = "auto"
    products: ProductsLike = "auto"

    def __post_init__(self) -> None:
        """Have the iteration name what is wrong with the settings."""
        orthogonalize(torch.empty(0, 0), **self.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields as named arguments of `orthogonalize`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, value: NewtonSchulz | None, **loose: Any) -> NewtonSchulz:
        """Take a value, or else make one of loose arguments.

        Raises:
            TypeError: the value is no `NewtonSchulz`.
            ValueError: both say something; the message names the loose arguments that do.

        >>> NewtonSchulz.of(None, steps=3, method="auto").steps
        3
        >>> NewtonSchulz.of(NewtonSchulz(steps=3), steps=4, method="auto")
        Traceback (most recent call last):
        ValueError: newton_schulz stands for steps too: give one of them
        """
        if value is None:
            return cls(**loose)
        if not isinstance(value, NewtonSchulz):
            raise TypeError(f"newton_schulz must be a muonfx.polar.NewtonSchulz or None, found {value!r}")
        default = {field.name: field.default for field in fields(cls)}
        told = [name for name, own in loose.items() if isinstance(own, torch.Tensor) or own != default[name]]
        if told:
            raise ValueError(f"newton_schulz stands for {', '.join(told)} too: give one of them")
        return value
