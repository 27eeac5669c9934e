"""Which files are collected, which marked tests run, and the processes that tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import World


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect only ``test_*.py``: a helper has no doctests, and may import packages that are not installed."""
    return (collection_path.is_file() and not collection_path.name.startswith("test_")) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            # `keywords` also has the names of folders around the checkout
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if os.environ.get("MUONFX_HYPOTHESIS_PROFILE") != "deep":
        deep = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if item not in deep]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes that run what a test hands them; started by the first test that does."""
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    """Two processes whose default group has two ranks: torch broadcasts state dicts in the default group."""
    made = World(2)
    yield made
    made.close()
