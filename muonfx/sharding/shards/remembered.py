"""`remembered`: a decorator for values that follow from a layout or a partition, and are computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def remembered(function: F) -> F:
    """Decorate a method, or a function of an object, so that the object remembers each result by the other arguments.

    These are passed by position and are hashable. The results live as long as the object.

    >>> class Table:
    ...     @remembered
    ...     def row(self, name):
    ...         print("computing", name)
    ...         return [name]
    >>> table = Table()
    >>> table.row("w"), table.row("w")
    computing w
    (['w'], ['w'])
    """
    attribute = f"_remembered_{function.__module__}.{function.__qualname__}"

    # `owner` is the object itself: the first argument, in whose attributes the results are stored.
    @functools.wraps(function)
    def call(owner: Any, *arguments: Any) -> Any:
        results = vars(owner).setdefault(attribute, {})
        if arguments not in results:
            results[arguments] = function(owner, *arguments)
        return results[arguments]

    return cast("F", call)
