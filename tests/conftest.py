"""Which marked tests run: `gpu` where there is a device, `deep` only in a deep run."""

import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if os.environ.get("MUONFX_HYPOTHESIS_PROFILE") != "deep":
        deep = [item for item in items if "deep" in item.keywords]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if item not in deep]
