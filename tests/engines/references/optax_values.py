"""Values in double precision for torch and JAX, shared by the tests that compare with Optax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

jax = pytest.importorskip("jax", reason="needs optax: make engines")


@contextmanager
def double_precision() -> Iterator[None]:
    """Let JAX compute in float64 in a ``with`` block."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random float64 tensors by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def to_jax(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: jax.numpy.asarray(leaf.numpy()) for name, leaf in values.items()}
