"""`Once`, a cache of results that follow from a layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """A cache for results that depend on structure, names and shapes alone. Each is computed at most once."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result for a key. If there is none, call ``make()`` and cache its result."""
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]
