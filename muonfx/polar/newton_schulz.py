"""The settings of a Newton-Schulz iteration as one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.policy import DTypeLike, MethodLike, plan
from muonfx.polar.polynomials import polynomials
from muonfx.polar.products import ProductsLike
from muonfx.tree.arguments import Options


@dataclass(frozen=True, repr=False)
class NewtonSchulz(Options):
    """A Newton-Schulz iteration: its polynomials, and how and in which dtype they are computed.

    The fields are the arguments of `orthogonalize` of these names, with its defaults. A `dtype` of "auto" is at least
    fp32 where derivatives are taken.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is malformed.

    >>> NewtonSchulz(steps=3)
    NewtonSchulz(steps=3)
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
        """Plan for an empty matrix, which raises for invalid settings."""
        resolved = polynomials(self.coefficients, self.steps)
        cpu, method, products = torch.device("cpu"), self.method, self.products
        plan(0, 0, torch.float32, cpu, resolved, method=method, dtype=self.dtype, products=products)
