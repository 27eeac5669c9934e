"""Numbers under a tracer that makes symbols of them.

With dynamic shapes a compiler calls sizes by symbols, and with `dynamic=True` the coefficients too. Symbols can be
compared, which guards the graph, and computed with; they cannot be hashed, formatted or kept as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Number = TypeVar("Number", int, float)


def is_traced(*numbers: float) -> bool:
    """Tell whether any of these may be a symbol.

    >>> is_traced(2, 3.0)
    False
    """
    return torch.compiler.is_compiling() or any(isinstance(x, torch.SymInt | torch.SymFloat) for x in numbers)


def fixed(number: Number) -> Number:
    """The value of a number that may be a symbol; the graph is then for this value alone.

    >>> fixed(3)
    3
    """
    if not is_traced(number):
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # only where a tracer has loaded it anyway

    return guard_scalar(number)  # pyright: ignore[reportReturnType]


F = TypeVar("F", bound=Callable[..., object])


def called_once(function: F) -> F:
    """Let a tracer call a function once and keep the answer, as ``torch.compiler.assume_constant_result`` does.

    That imports the whole compiler, seconds, to set this mark.

    >>> called_once(lambda: 1)()
    1
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # not an attribute that functions have
    return function
