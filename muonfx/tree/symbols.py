"""Numbers that may be symbols of a tracer.

With dynamic shapes a compiler replaces sizes by symbols, and with `dynamic=True` the coefficients too. Symbols can be
computed with and compared, which guards the graph. They cannot be hashed, formatted or kept as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Number = TypeVar("Number", int, float)


def is_traced(*numbers: float) -> bool:
    """Return True if any of the numbers may be a symbol."""
    return torch.compiler.is_compiling() or any(isinstance(x, torch.SymInt | torch.SymFloat) for x in numbers)


def fixed(number: Number) -> Number:
    """Return the value of a number that may be a symbol, which specializes the graph to this value."""
    if not is_traced(number):
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to import, and loaded if a tracer runs

    return guard_scalar(number)  # pyright: ignore[reportReturnType]


F = TypeVar("F", bound=Callable[..., object])


def called_once(function: F) -> F:
    """Mark a function as constant for a tracer, as ``torch.compiler.assume_constant_result`` does."""
    # Setting the mark directly avoids the import of the whole compiler, which takes seconds.
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # not an attribute that functions have
    return function
